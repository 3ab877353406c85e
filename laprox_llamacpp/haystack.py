"""A long real text that every machine has, with facts hidden in it: Python's own language reference."""

from __future__ import annotations

import importlib
import inspect
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

_ADJECTIVES = ("amber", "silent", "crooked", "frozen", "hollow", "scarlet", "wooden", "distant", "velvet", "rusty")
_NOUNS = ("lighthouse", "harbor", "meadow", "orchard", "lantern", "bridge", "castle", "garden", "kettle", "railway")

_MARKUP = re.compile(r"[*`|\\]|\[\d+\]")
_NOT_PROSE = re.compile(r"::=|>>>|->|\d{4}|[={}<>_^~#]|\(\s*\)|^[-.+]")


@dataclass(frozen=True)
class Fact:
    """One hidden sentence and its answer."""

    name: str
    number: str

    @property
    def sentence(self) -> str:
        return f"The special magic number for the {self.name} is {self.number}."


def facts(n: int, seed: int, digits: int = 4) -> list[Fact]:
    """`n` facts with different names and numbers of `digits` digits; the same for the same seed."""
    rng = random.Random(seed)
    names = [f"{a} {b}" for a, b in zip(rng.sample(_ADJECTIVES, n), rng.sample(_NOUNS, n))]
    numbers = rng.sample(range(10 ** (digits - 1), 10**digits), n)
    return [Fact(name, str(number)) for name, number in zip(names, numbers)]


def paragraphs() -> list[str]:
    """Prose paragraphs, unwrapped and without markup, code or long numbers; always in the same order."""
    found: dict[str, None] = {}
    for text in _sources():
        for block in re.split(r"\n\s*\n", text):
            prose = " ".join(_MARKUP.sub("", block).split())
            if 120 <= len(prose) <= 800 and prose[0].isupper() and prose.endswith(".") and not _NOT_PROSE.search(prose):
                found[prose] = None
    return list(found)


def _sources() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out: take the docstrings of the library instead
        return _docstrings()
    return [topics[name] for name in sorted(topics)]


def _docstrings() -> list[str]:
    names = "asyncio decimal doctest email.message fractions inspect logging pdb pathlib statistics tarfile"
    texts: list[str] = []
    for module in map(importlib.import_module, names.split()):
        for item in (module, *vars(module).values()):
            members = vars(item).values() if inspect.isclass(item) else ()
            texts += [getattr(x, "__doc__", None) or "" for x in (item, *members)]
    return [inspect.cleandoc(text) for text in texts if isinstance(text, str)]


def hide(
    hidden: Sequence[Fact], n_tokens: int, count_tokens: Callable[[str], int], seed: int, depths: Sequence[float]
) -> str:
    """A text of at least `n_tokens` tokens with `hidden[i]` as a paragraph of its own at depth `depths[i]` (0 to 1).

    The paragraphs are shuffled by `seed` and repeat when there are too few. `count_tokens` counts one paragraph.
    """
    rng = random.Random(seed)
    pool = paragraphs()
    rng.shuffle(pool)
    chosen: list[str] = []
    n = sum(count_tokens(f.sentence) for f in hidden)
    while n < n_tokens:
        chosen.append(pool[len(chosen) % len(pool)])
        n += count_tokens(chosen[-1])
    places = sorted(((round(d * len(chosen)), f.sentence) for d, f in zip(depths, hidden)), reverse=True)
    for at, sentence in places:
        chosen.insert(at, sentence)
    return "\n\n".join(chosen)


def says(text: str, value: str) -> bool:
    """Whether `value` stands in `text` by itself, in any case: "9245" does not stand in "92456"."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None
