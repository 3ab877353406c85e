"""Task definitions of lm-eval (prompt, limits, metric), filled with data that is on this machine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..llama import Llama
from .texts import chat

Docs = Sequence[Mapping[str, Any]]


def require(what: str, extra: str) -> None:
    """Raise ValueError when lm-eval is not installed; `extra` is ours that brings it."""
    if importlib.util.find_spec("lm_eval") is None:
        raise _missing(what, extra, "lm_eval")


def define(what: str, extra: str, folder: str, name: str, docs: Callable[[], Docs]) -> Any:
    """lm-eval's task `name` from its task folder `folder`, made with `docs()` instead of the data it would download.

    Returns lm-eval's own object: `doc_to_text`, `fewshot_context`, `process_results`, `config.generation_kwargs` ...
    Raises ValueError when a package is missing; `what` needs it, and our `extra` brings it.
    """
    try:
        datasets = importlib.import_module("datasets")
        tasks = importlib.import_module("lm_eval.tasks")

        def dataset(**_: Any) -> dict[str, Any]:
            return {"test": datasets.Dataset.from_list([dict(doc) for doc in docs()])}

        manager = tasks.TaskManager(include_path=str(Path(str(tasks.__file__)).parent / folder), include_defaults=False)
        # a group's members may change a registered task's settings; it is lm-eval's way to do so
        group = {"group": what, "task": [{"task": name, "custom_dataset": dataset}]}
        with _quiet("lm_eval.api.task"):  # it explains how to pass options to a dataset that it makes itself
            return manager.load(group)["tasks"][name]
    except ImportError as e:
        cause = e if e.name else e.__cause__ or e.__context__  # lm-eval's own texts name no package
        raise _missing(what, extra, getattr(cause, "name", None) or str(e)) from e


def until(task: Any) -> list[str]:
    """The strings that end an answer."""
    return list(task.config.generation_kwargs.get("until") or [])


def max_gen(task: Any) -> int:
    """The longest answer, in tokens."""
    return int(task.config.generation_kwargs["max_gen_toks"])


def has_template(llm: Llama) -> bool:
    """Whether the model brings a chat template."""
    return "tokenizer.chat_template" in llm.metadata


def render(llm: Llama, history: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
    """Turns in the model's chat template, as lm-eval asks for them: without a generation prompt, the last turn is an
    answer that is begun, and goes on.
    """
    if add_generation_prompt:
        return chat(llm, history)
    *turns, begun = history
    return chat(llm, turns) + str(begun["content"])


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Errors only, for a while."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _missing(what: str, extra: str, package: str) -> ValueError:
    return ValueError(f"{what} needs {package}, which is not installed: pip install '.[{extra}]' in a clone")
