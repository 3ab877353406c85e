"""Needles: sentences hidden in a long text, and asked for (the paper's figure 3; RULER's first eight tasks in kind)."""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...haystack import says
from ...parts.options import int_at_least, one_of
from ..session import Session
from ..task import Sample, Task, sha256_of
from ..texts import chat, hide, longest, shuffled, source, tokenize

ADJECTIVES = ("amber", "silent", "crooked", "frozen", "hollow", "scarlet", "wooden", "distant", "velvet", "rusty")
NOUNS = ("lighthouse", "harbor", "meadow", "orchard", "lantern", "bridge", "castle", "garden", "kettle", "railway")
WORDS = (
    "anchor", "basket", "candle", "dolphin", "engine", "feather", "guitar", "hammer", "island", "jacket", "ladder",
    "mirror", "needle", "oyster", "pepper", "quiver", "ribbon", "saddle", "tunnel", "violin", "walnut", "zipper",
)  # fmt: skip
# how the text names a thing, and how the question does
SYNONYMS = (
    ("automobile", "car"), ("physician", "doctor"), ("vessel", "ship"), ("woods", "forest"), ("monarch", "king"),
    ("instructor", "teacher"), ("dwelling", "house"), ("hound", "dog"), ("stone", "rock"), ("infant", "baby"),
)  # fmt: skip

KINDS = ("single", "multikey", "multivalue", "multiquery", "reversed", "paraphrase")
VALUES = ("number", "word", "uuid")


@dataclass(frozen=True)
class Question:
    """Sentences to hide, what to ask, and the values that answer it."""

    sentences: list[str]
    text: str
    opening: str
    expected: list[str]


@dataclass(frozen=True)
class Needle(Task):
    """Sentences of the form "The special magic number for the amber lighthouse is 4821937." hidden at given depths.

    kind: single (one sentence), multikey (4 with other names, one asked for), multivalue (3 values of one name),
    multiquery (4 names, two asked for), reversed (the value stands before its name), paraphrase (no word of content in
    common with the question). Several with "+" between: samples take them in turn. The score is the share of the
    expected values that the answer holds, as words of their own.

    Options: tokens of the prompt, kind, value (number, word, uuid), digits of a number, depths in percent with "+"
    between (in turn), haystack ("python": its documentation, "code": modules of its library, or a text file),
    open_answer ("yes": the answer is begun for the model, which small ones need), max_tokens of the answer, seed.
    """

    tokens: int = 2048
    kind: str = "single"
    value: str = "number"
    digits: int = 7
    depths: str = "10+30+50+70+90"
    haystack: str = "python"
    open_answer: str = "no"
    max_tokens: int = 40
    seed: int = 0

    name: ClassVar[str] = "needle"
    metric: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        int_at_least("tokens", self.tokens, 128)
        int_at_least("digits", self.digits, 1)
        int_at_least("max_tokens", self.max_tokens, 1)
        one_of("value", self.value, VALUES)
        one_of("open_answer", self.open_answer, ("yes", "no"))
        for kind in self.kind.split("+"):
            one_of("kind", kind, KINDS)
        for depth in self.depths.split("+"):
            if not depth.isdigit() or int(depth) > 100:
                raise ValueError(f"depths is {self.depths!r}, expected percents such as '10+50+90'")

    def check(self) -> None:
        """The haystack can be read."""
        source(self.haystack)

    def data_sha256(self) -> str:
        """Of the haystack's paragraphs."""
        return sha256_of(p.encode() for p in source(self.haystack))

    @property
    def n_need(self) -> int:
        """Prompt and answer."""
        return self.tokens + self.max_tokens

    def sample(self, session: Session, index: int) -> Sample:
        """Kinds in turn, each through the depths in turn; names, values, text and the other depths are random."""
        kinds, depths = self.kind.split("+"), [int(d) / 100 for d in self.depths.split("+")]
        kind, depth = kinds[index % len(kinds)], depths[index // len(kinds) % len(depths)]
        rng = random.Random(f"{self.seed}/{index}")
        question = self._question(kind, rng)
        places = [depth] + [rng.random() for _ in question.sentences[1:]]
        words = shuffled(self.haystack, rng, self.tokens)

        def build(chosen: Sequence[str]) -> list[int]:
            content = f"{hide(chosen, question.sentences, places)}\n\n{question.text}"
            opening = question.opening if self.open_answer == "yes" else ""
            return tokenize(session, chat(session, [{"role": "user", "content": content}]) + opening)

        info = {"kind": kind, "depth": depth, "expected": question.expected, "sentences": question.sentences}
        return Sample(index, longest(words, self.tokens, build), info)

    def measure(self, session: Session, sample: Sample) -> Mapping[str, Any]:
        """The answer, and the share of the expected values in it."""
        text = session.answer(self.max_tokens).strip()
        expected = sample.info["expected"]
        return {"text": text, "score": sum(says(text, v) for v in expected) / len(expected)}

    def _question(self, kind: str, rng: random.Random) -> Question:
        what = {"number": "number", "word": "word", "uuid": "code"}[self.value]
        values = self._values(rng, 4)
        names = [f"{a} {b}" for a, b in zip(rng.sample(ADJECTIVES, 4), rng.sample(NOUNS, 4))]
        only = f"Reply with the {what} only."
        if kind == "paraphrase":
            told, asked = rng.choice(SYNONYMS)
            sentence = f"Somebody painted {values[0]} on the {told}, and it stayed legible for years."
            return Question([sentence], f"Which {what} did anyone write across that {asked}? {only}",
                            f"Across that {asked}:", values[:1])  # fmt: skip
        if kind == "reversed":
            sentences = [f"{v} is the special magic {what} for the {n}." for n, v in zip(names, values)]
        else:
            sentences = [f"The special magic {what} for the {n} is {v}." for n, v in zip(names, values)]
        ask, opening = (
            f"What is the special magic {what} for the {names[0]}?",
            f"The special magic {what} for the {names[0]} is",
        )
        if kind == "multivalue":
            sentences = [f"A special magic {what} for the {names[0]} is {v}." for v in values[:3]]
            ask = f"What are all the special magic {what}s for the {names[0]}? Reply with the three {what}s only."
            return Question(sentences, ask, f"The special magic {what}s for the {names[0]} are", values[:3])
        if kind == "multiquery":
            both = f"the special magic {what}s for the {names[0]} and the {names[1]}"
            ask = f"What are {both}? Reply with the {what}s only."
            return Question(sentences, ask, f"T{both[1:]} are", values[:2])
        if kind == "single":
            sentences = sentences[:1]
        return Question(sentences, f"{ask} {only}", opening, values[:1])

    def _values(self, rng: random.Random, n: int) -> list[str]:
        if self.value == "word":
            return rng.sample(WORDS, n)
        if self.value == "uuid":
            return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(n)]
        return [str(x) for x in rng.sample(range(10 ** (self.digits - 1), 10**self.digits), n)]
