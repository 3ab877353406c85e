"""How much of a prompt's KV cache survives; plain Python, no native library."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_BYTES = re.compile(r"(?P<n>\d+(\.\d+)?)\s*(?P<unit>[KMG]i?B|B)")
_UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Budget:
    """How much of the prompt's KV cache survives, the window included. `kind` is fraction, tokens or bytes."""

    kind: str
    value: float

    @classmethod
    def parse(cls, spec: float | int | str | Budget) -> Budget:
        """Parse a budget: 0.05, "0.05" or "5%" of the prompt; 1024 tokens per KV head on average; "64MiB" of K and V.

        A float is a fraction in (0, 1], an int counts tokens (at least 1). Raises ValueError, one line.
        """
        if isinstance(spec, Budget):
            return spec
        if isinstance(spec, bool) or not isinstance(spec, (int, float, str)):
            raise _bad_budget(spec)
        if isinstance(spec, int):
            if spec < 1:
                raise _bad_budget(spec)
            return cls("tokens", spec)
        if isinstance(spec, float):
            if not 0.0 < spec <= 1.0:  # also false for NaN
                raise _bad_budget(spec)
            return cls("fraction", spec)
        text = spec.strip()
        m = _BYTES.fullmatch(text)
        if m is not None:
            n_bytes = math.floor(float(m["n"]) * _UNITS[m["unit"]])
            if n_bytes < 1:
                raise _bad_budget(spec)
            return cls("bytes", n_bytes)
        try:
            if text.endswith("%"):
                return cls.parse(float(text[:-1]) / 100)
            return cls.parse(int(text) if text.isdigit() else float(text))
        except ValueError:
            raise _bad_budget(spec) from None

    def tokens(self, n_prompt: int, bytes_per_token: int) -> int:
        """k + w as asked for: tokens per KV head on average, of a prompt of `n_prompt` tokens.

        `bytes_per_token`: K and V of one token over all evictable layers and heads; only a byte budget reads it.
        """
        if self.kind == "fraction":
            return math.floor(self.value * n_prompt + 0.5)
        if self.kind == "tokens":
            return int(self.value)
        return int(self.value // bytes_per_token)

    def kept(self, n_prompt: int, window: int, bytes_per_token: int) -> int:
        """k: candidates that each KV head keeps on average beside the window of w tokens. Arguments as `tokens`."""
        return max(0, min(self.tokens(n_prompt, bytes_per_token), n_prompt) - window)

    def n_keep(self, n_prompt: int, window: int, n_heads: int, bytes_per_token: int) -> int:
        """Kept candidates over all `n_heads` KV heads of all evictable layers: exactly n_heads * k."""
        return n_heads * self.kept(n_prompt, window, bytes_per_token)

    def __str__(self) -> str:
        """A spec that parses back to this budget."""
        if self.kind == "fraction":
            return repr(self.value)
        if self.kind == "tokens":
            return str(int(self.value))
        for unit in ("GiB", "MiB", "KiB"):
            if self.value % _UNITS[unit] == 0:
                return f"{int(self.value) // _UNITS[unit]}{unit}"
        return f"{int(self.value)}B"


def _bad_budget(spec: object) -> ValueError:
    return ValueError(
        f"budget is {spec!r}, expected a fraction in (0, 1] such as 0.05 or '5%', "
        "an integer number of tokens >= 1 such as 1024, or bytes such as '64MiB'"
    )
