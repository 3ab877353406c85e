"""What to evict (`EvictionPolicy`) and how much to keep (`Budget`); plain Python, no native library."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

METHODS = ("laprox",)
METHODS_LATER = (
    "streaming", "h2o", "snapkv", "adakv", "pyramidkv", "criticalkv", "tova", "keydiff", "random", "duo", "quest",
)  # fmt: skip

ATTENTION = ("max", "l2", "sum")
NORMALIZE = ("residual", "layer_sum", "zscore", "none")
ALLOC = ("model", "layer", "head")

_REACH: dict[str, Any] = dict(attention="max", pool="reach12:0.3", normalize="residual", alloc="model", sinks=4)
PRESETS: dict[str, dict[str, Any]] = {
    "reach": _REACH,
    "l2": {**_REACH, "attention": "l2"},
    "paper": dict(attention="l2", pool="avg7", normalize="layer_sum", alloc="model", sinks=0),
}

_POOL = re.compile(r"(?P<none>none)|reach(?P<radius>\d+):(?P<decay>\d*\.?\d+)|(?P<kind>avg|max)(?P<kernel>\d+)")
_BYTES = re.compile(r"(?P<n>\d+(\.\d+)?)\s*(?P<unit>[KMG]i?B|B)")
_UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Pool:
    """A parsed `pool`: `kind` is none, reach, avg or max; `size` the radius or the kernel; `decay` for reach only."""

    kind: str
    size: int = 0
    decay: float = 0.0

    @classmethod
    def parse(cls, spec: str) -> Pool:
        """Parse `reach12:0.3`, `avg7`, `max7` or `none`. Raises ValueError."""
        m = _POOL.fullmatch(spec)
        if m is None:
            raise ValueError(
                f"pool is {spec!r}, expected 'reach<radius>:<decay>', 'avg<kernel>', 'max<kernel>' or 'none'"
            )
        if m["none"]:
            return cls("none")
        if m["radius"]:
            pool = cls("reach", int(m["radius"]), float(m["decay"]))
            if pool.decay > 1:
                raise ValueError(f"pool is {spec!r}: the decay must be in [0, 1]")
            return pool
        pool = cls(m["kind"], int(m["kernel"]))
        if pool.size % 2 == 0:
            raise ValueError(f"pool is {spec!r}: the kernel must be odd")
        return pool


@dataclass(frozen=True)
class EvictionPolicy:
    """How the prompt's KV entries are scored and chosen. Immutable; fields left out come from `preset`.

    LaProx (arXiv 2605.07234) scores entry i of a KV head by the norm of the term that it adds to the attention layer's
    output, ||A_h[:, i]|| * ||v_i W_O^h|| (Algorithm 1), and keeps the model-wide best (Algorithm 2).

    Args:
        method: only "laprox" so far.
        preset: "reach" (default), "l2" (the same with the paper's column norm) or "paper" (Algorithms 1 and 2).
        window: w, the last prompt tokens, whose queries score the rest and which are always kept; default 32.
        attention: statistic of a column of the window's attention: "max", "l2" (paper) or "sum".
        value_norm: multiply by ||v W_O^h||_2; default True.
        pool: smoothing along positions: "reach12:0.3", "avg7" (paper), "max7" or "none".
        normalize: across layers: "residual", "layer_sum" (paper), "zscore" (per head) or "none".
        alloc: one selection over the "model" (paper), each "layer" or each "head".
        sinks: first positions kept in every head, inside the budget: 4, 0 in "paper".

    Raises:
        ValueError: an unknown name or a value out of range, in one line.
    """

    method: str = "laprox"
    preset: str = "reach"
    window: int = 32
    attention: str = "preset"
    value_norm: bool = True
    pool: str = "preset"
    normalize: str = "preset"
    alloc: str = "preset"
    sinks: int = -1  # -1: the preset's

    def __post_init__(self) -> None:
        if self.method in METHODS_LATER:
            raise ValueError(f"eviction method {self.method!r} is not available yet; available: {', '.join(METHODS)}")
        _one_of("eviction method", self.method, METHODS)
        _one_of("preset", self.preset, tuple(PRESETS))
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) in ("preset", -1):
                object.__setattr__(self, name, value)
        _one_of("attention", self.attention, ATTENTION)
        _one_of("normalize", self.normalize, NORMALIZE)
        _one_of("alloc", self.alloc, ALLOC)
        _int_at_least("window", self.window, 1)
        _int_at_least("sinks", self.sinks, 0)
        if not isinstance(self.value_norm, bool):
            raise ValueError(f"value_norm is {self.value_norm!r}, expected True or False")
        Pool.parse(self.pool)

    @classmethod
    def parse(cls, spec: str | EvictionPolicy) -> EvictionPolicy:
        """`"laprox"` or `"laprox:preset=paper:window=16:pool=reach12:0.3"`; a policy is returned as it is.

        Raises ValueError for an unknown method, option or value.
        """
        if isinstance(spec, EvictionPolicy):
            return spec
        if not isinstance(spec, str):
            raise ValueError(f"kv_evict is {spec!r}, expected a string such as 'laprox', an EvictionPolicy or None")
        method, *parts = spec.strip().split(":")
        options: dict[str, Any] = {}
        key = ""
        for part in parts:
            name, eq, value = part.partition("=")
            if eq:
                key = name.strip()
                if key in options:
                    raise ValueError(f"option {key!r} is given twice in {spec!r}")
                options[key] = value.strip()
            elif key:  # the value itself holds a colon: pool=reach12:0.3
                options[key] += ":" + part.strip()
            else:
                raise ValueError(f"{part!r} in {spec!r} is not an option, expected name=value")
        known = {f.name for f in fields(cls)} - {"method"}
        for name, value in options.items():
            if name not in known:
                raise ValueError(f"unknown option {name!r} in {spec!r}, expected one of {', '.join(sorted(known))}")
            if name in ("window", "sinks"):
                options[name] = _to_int(name, value)
            elif name == "value_norm":
                options[name] = _to_bool(name, value)
        return cls(method=method, **options)

    def __str__(self) -> str:
        """The shortest spec that parses back to this policy."""
        preset = PRESETS[self.preset]
        parts = [self.method]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "method" and value != preset.get(f.name, f.default):
                parts.append(f"{f.name}={str(value).lower() if isinstance(value, bool) else value}")
        return ":".join(parts)


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


def _one_of(what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}, expected one of {', '.join(known)}")


def _int_at_least(what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is {value!r}, expected an integer >= {least}")


def _to_int(what: str, text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"{what} is {text!r}, expected an integer")
    return int(text)


def _to_bool(what: str, text: str) -> bool:
    _one_of(what, text.lower(), ("true", "false"))
    return text.lower() == "true"


def _bad_budget(spec: object) -> ValueError:
    return ValueError(
        f"budget is {spec!r}, expected a fraction in (0, 1] such as 0.05 or '5%', "
        "an integer number of tokens >= 1 such as 1024, or bytes such as '64MiB'"
    )
