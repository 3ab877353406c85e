"""Small helpers of `Llama`."""

from __future__ import annotations

from time import perf_counter
from typing import Any


class Closed:
    """Stands in for what close() freed."""

    def __init__(self, path: str) -> None:
        self.__dict__["_path"] = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(f"this Llama ({self._path}) is closed; create a new one")


class Clock:
    """Tokens and seconds."""

    def __init__(self) -> None:
        self.n_tokens, self.seconds, self._pending, self._start = 0, 0.0, 0, 0.0

    def time(self, n_tokens: int) -> Clock:
        self._pending = n_tokens
        return self

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.n_tokens += self._pending
            self.seconds += perf_counter() - self._start

    def rate(self) -> float:
        """Tokens per second, 0 before the first."""
        return self.n_tokens / self.seconds if self.seconds else 0.0
