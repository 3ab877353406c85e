"""Exceptions: one class per native status, each also of the built-in kind a caller expects."""

from __future__ import annotations


class LaproxError(RuntimeError):
    """A native call failed. `status` is the `laprox_status` of `laprox.h`, 0 when the package itself refused."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ArgumentError(LaproxError, ValueError):
    """An argument is out of range."""


class UnsupportedError(LaproxError, ValueError):
    """This model, or this combination of parameters, cannot be evicted."""


class StateError(LaproxError):
    """Not now: eviction is off, the cache is already evicted, or nothing was observed."""


class AllocError(LaproxError, MemoryError):
    """Memory was refused; the full cache is intact."""


class ComputeError(LaproxError):
    """A backend failed to compute a graph."""


# enum laprox_status
BY_STATUS: dict[int, type[LaproxError]] = {
    -1: ArgumentError,
    -2: UnsupportedError,
    -3: StateError,
    -4: StateError,
    -5: AllocError,
    -6: ComputeError,
}


def from_status(status: int, text: str) -> LaproxError:
    """The exception for a negative `laprox_status` with the library's own line of text."""
    return BY_STATUS.get(status, LaproxError)(text or f"laprox status {status}", status)
