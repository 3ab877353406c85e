"""The tasks by name; each is one file."""

from __future__ import annotations

from ..task import Task
from .continuation import Continuation
from .longbench import LongBench
from .multi_question import MultiQuestion
from .needle import Needle
from .ruler import Ruler
from .similarity import Similarity

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Continuation, LongBench, MultiQuestion, Needle, Ruler, Similarity)
}
