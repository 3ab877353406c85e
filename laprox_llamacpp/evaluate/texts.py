"""Long real texts, cut to a length in tokens, and the chat turns around them."""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_chat_format as chat_format

from ..haystack import paragraphs
from ..llama import Llama

PYTHON, CODE = "python", "code"
_MODULES = "argparse ast calendar configparser csv difflib doctest fractions heapq inspect logging pdb statistics"
_GOLDEN = (5**0.5 - 1) / 2
_WORD = re.compile(r"(?<=\s)\S")
_SPACE = re.compile(r"(?<=[^ ]) ")  # a word keeps the further spaces before it


def source(name: str) -> list[str]:
    """Paragraphs of a haystack: "python" (its documentation), "code" (modules of its library) or a text file (UTF-8).

    Raises ValueError for a file that is missing, no text, or one paragraph only.
    """
    if name == PYTHON:
        return paragraphs()
    if name == CODE:
        modules = [inspect.getsource(importlib.import_module(m)) for m in _MODULES.split()]
        return [block for text in modules for block in text.split("\n\n") if block.strip()]
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"haystack {name!r} cannot be read as UTF-8 text: {e}") from e
    found = [p.strip() for p in text.split("\n\n") if p.strip()]
    if len(found) < 2:
        raise ValueError(f"haystack {name!r} holds {len(found)} paragraphs, expected a long text with blank lines")
    return found


def shuffled(name: str, rng: random.Random, n_words: int) -> list[str]:
    """Words of the source's paragraphs in random order, at least `n_words`; "\\n\\n" between paragraphs is a word."""
    pool = source(name)
    words: list[str] = []
    while len(words) < n_words:
        rng.shuffle(pool)
        words += [*_SPACE.split(" \n\n ".join(pool)), "\n\n"]
    return words


def stretch(llm: Llama, name: str, seed: int, index: int, n_tokens: int) -> tuple[int, list[int]]:
    """`n_tokens` tokens of the source from a word on, and the character where that word begins.

    Whatever the number of samples, their starts are spread evenly over the text (multiples of the golden section, from
    a random place on), so that they share as little of it as can be. The text begins again after its end. Raises
    ValueError when it is too short.
    """
    text = "\n\n".join(source(name))
    place = int((random.Random(seed).random() + index * _GOLDEN) % 1 * len(text))
    found = _WORD.search(text, place)
    start = found.start() if found else 0
    tokens: list[int] = llm.tokenize(f"{text[start:]}\n\n{text[:start]}".encode())[:n_tokens]
    if len(tokens) < n_tokens:
        raise ValueError(f"haystack {name!r} has {len(tokens)} tokens, expected at least {n_tokens}")
    return start, tokens


def hide(words: Sequence[str], sentences: Sequence[str], depths: Sequence[float]) -> str:
    """A text of `words` with each sentence as a paragraph of its own at its depth (0 to 1)."""
    parts = [p for p in " ".join(words).replace(" \n\n ", "\n\n").strip().split("\n\n") if p]
    for at, sentence in sorted(((round(d * len(parts)), s) for d, s in zip(depths, sentences)), reverse=True):
        parts.insert(at, sentence)
    return "\n\n".join(parts)


def longest(words: Sequence[str], n_tokens: int, build: Callable[[Sequence[str]], list[int]]) -> list[int]:
    """`build(words[:n])` for the largest n that gives at most `n_tokens` tokens. Raises ValueError when none does."""
    low, high = 0, min(len(words), n_tokens) + 1
    tokens = build(words[:low])
    if len(tokens) > n_tokens:
        raise ValueError(f"{n_tokens} tokens do not even hold the question and what is hidden ({len(tokens)} tokens)")
    while high - low > 1:
        middle = (low + high) // 2
        tried = build(words[:middle])
        if len(tried) <= n_tokens:
            low, tokens = middle, tried
        else:
            high = middle
    return tokens


def chat(llm: Llama, messages: Sequence[dict[str, Any]]) -> str:
    """Turns in the model's chat template, up to where the assistant answers; plain text for a model without one."""
    template = llm.metadata.get("tokenizer.chat_template")
    eos, bos = (llm._model.token_get_text(t) if t >= 0 else "" for t in (llm.token_eos(), llm.token_bos()))
    if template is None:
        return (bos if llm._model.add_bos_token() else "") + "\n\n".join([*(m["content"] for m in messages), "Answer:"])
    made = chat_format.Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)(messages=list(messages))
    text: str = made.prompt
    return text


def tokenize(llm: Llama, text: str) -> list[int]:
    """Tokens of a piece of a chat, special ones included, nothing added."""
    tokens: list[int] = llm.tokenize(text.encode(), add_bos=False, special=True)
    return tokens
