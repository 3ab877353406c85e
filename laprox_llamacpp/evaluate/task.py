"""What a task is: samples, and what is measured on each state of the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..parts.options import from_spec
from .session import Session

_ROOM = 64


@dataclass
class Sample:
    """One prompt of a task.

    Args:
        index: number of the sample; with the task's seed it decides everything about it.
        tokens: the prompt, window last.
        info: what the record says about the sample (depth, kind, expected answers ...), JSON values.
        memo: for the task itself: what `measure` keeps from the first full cache for what is measured after it, which
            are the cells, then the narrower KV types.
    """

    index: int
    tokens: list[int]
    info: dict[str, Any]
    memo: dict[str, Any] = field(default_factory=dict)


class Task:
    """A kind of measurement. Subclasses are dataclasses whose fields are the options on the command line.

    `metric` names what tables and plots show, `higher` says whether more of it is better, `watch` whether the task
    looks at attention outputs, `against_full` whether `measure` compares with what it kept of the widest full cache,
    `length` names the option that sets the prompts' length.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    higher: ClassVar[bool] = True
    watch: ClassVar[bool] = False
    against_full: ClassVar[bool] = False
    length: ClassVar[str] = "tokens"

    @classmethod
    def parse(cls, spec: str) -> Task:
        """`"needle"`, `"needle:kind=multikey:tokens=4096"`. Raises ValueError for an unknown task, option or value."""
        from .tasks import TASKS

        name, *parts = spec.strip().split(":")
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}, expected one of {', '.join(sorted(TASKS))}")
        made: Task = TASKS[name](**from_spec(spec, parts, TASKS[name]))
        return made

    def check(self) -> None:
        """Raise ValueError when something that the samples need cannot be read; before anything is measured."""

    def data_sha256(self) -> str:
        """SHA-256 of what the samples are made of beside the options, such as texts; "" for nothing."""
        return ""

    @property
    def n_need(self) -> int:
        """Tokens of the longest prompt and its answers: the context that a model must have been trained for."""
        raise NotImplementedError

    @property
    def n_ctx(self) -> int:
        """Context for the samples, in tokens: what they need, and some room."""
        return self.n_need + _ROOM

    def sample(self, session: Session, index: int) -> Sample:
        """Sample `index`, the same for the same task options."""
        raise NotImplementedError

    def measure(self, session: Session, sample: Sample) -> Mapping[str, Any]:
        """Numbers and texts for the cache as it is; called with the widest full cache first. Must hold `metric`."""
        raise NotImplementedError


def sha256_of(parts: Iterable[bytes]) -> str:
    """Of parts one after another, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
