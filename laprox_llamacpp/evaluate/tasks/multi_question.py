"""Several questions about one evicted context: the case where eviction hurts most."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...haystack import says
from ...parts.options import int_at_least, one_of
from ..session import Session
from ..task import Sample, Task, sha256_of
from ..texts import chat, hide, longest, shuffled, source, tokenize
from .needle import ADJECTIVES, NOUNS

_ANSWER = "ANSWER0"  # stands for what the model has said


@dataclass(frozen=True)
class MultiQuestion(Task):
    """Facts hidden all over a text that is evicted once; then a question about each, as turns of one chat.

    The questions come in several orders, each on the same evicted context. `aware="yes"`: the prompt ends with the
    first question, so the window has seen one of them; "no": with the text, and the window has seen none. The score is
    the share of right answers over all orders; `by_turn` has it by turn, `seen` and `unseen` by whether the window saw
    the question.

    Options: tokens of the context, questions, orders, aware, digits of a number, haystack, max_tokens of an answer,
    seed.
    """

    tokens: int = 2048
    questions: int = 5
    orders: int = 3
    aware: str = "yes"
    digits: int = 4
    haystack: str = "python"
    max_tokens: int = 24
    seed: int = 0

    name: ClassVar[str] = "multi_question"
    metric: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        int_at_least("tokens", self.tokens, 256)
        int_at_least("questions", self.questions, 1)
        int_at_least("orders", self.orders, 1)
        int_at_least("digits", self.digits, 2)
        int_at_least("max_tokens", self.max_tokens, 1)
        one_of("aware", self.aware, ("yes", "no"))
        if self.questions > len(NOUNS):
            raise ValueError(f"questions is {self.questions}, expected at most {len(NOUNS)}")

    def check(self) -> None:
        """The haystack can be read."""
        source(self.haystack)

    def data_sha256(self) -> str:
        """Of the haystack's paragraphs."""
        return sha256_of(p.encode() for p in source(self.haystack))

    @property
    def n_need(self) -> int:
        """Context, questions and answers."""
        return self.tokens + self.questions * (self.max_tokens + 64)

    def sample(self, session: Session, index: int) -> Sample:
        """Facts at random depths; orders begin with the question that the window saw, or each with another one."""
        rng = random.Random(f"{self.seed}/{index}")
        n = self.questions
        names = [f"{a} {b}" for a, b in zip(rng.sample(ADJECTIVES, n), rng.sample(NOUNS, n))]
        values = [str(x) for x in rng.sample(range(10 ** (self.digits - 1), 10**self.digits), n)]
        sentences = [f"The special magic number for the {name} is {value}." for name, value in zip(names, values)]
        depths = [rng.random() for _ in range(n)]
        asked = [f"What is the special magic number for the {name}? Reply with the number only." for name in names]
        orders = []
        for i in range(self.orders):
            first = 0 if self.aware == "yes" else i % n
            rest = [j for j in range(n) if j != first]
            rng.shuffle(rest)
            orders.append([first, *rest])
        words = shuffled(self.haystack, rng, self.tokens)
        texts: dict[int, str] = {}

        def build(chosen: Sequence[str]) -> list[int]:
            text = hide(chosen, sentences, depths)
            head, tail = self._first_turn(session, text, asked[0])
            tokens = tokenize(session, head + tail) if self.aware == "yes" else tokenize(session, head)
            texts[len(tokens)] = text
            return tokens

        tokens = longest(words, self.tokens, build)
        info = {"expected": values, "questions": asked, "orders": orders, "depths": [round(d, 3) for d in depths]}
        return Sample(index, tokens, info, {"text": texts[len(tokens)]})

    def measure(self, session: Session, sample: Sample) -> Mapping[str, Any]:
        """Answers of every order, and the shares that are right."""
        info, end = sample.info, len(sample.tokens)
        answers, right = [], []
        for order in info["orders"]:
            session.cut(end)
            answers.append(self._conversation(session, sample, order))
            right.append([says(a, info["expected"][q]) for q, a in zip(order, answers[-1])])
        flat = [
            (q == 0 and self.aware == "yes", r) for order, row in zip(info["orders"], right) for q, r in zip(order, row)
        ]
        seen, unseen = ([r for s, r in flat if s == which] for which in (True, False))
        return {
            "answers": answers,
            "score": sum(map(sum, right)) / len(flat),
            "by_turn": [sum(column) / len(right) for column in zip(*right)],
            "seen": sum(seen) / len(seen) if seen else None,
            "unseen": sum(unseen) / len(unseen) if unseen else None,
        }

    def _first_turn(self, session: Session, text: str, question: str) -> tuple[str, str]:
        """The first turn up to the end of the text, and from there to where the answer begins."""
        turn = chat(session, [{"role": "user", "content": f"{text}\n\n{question}"}])
        at = turn.rindex(text) + len(text)
        return turn[:at], turn[at:]

    def _next_turn(self, session: Session, question: str) -> str:
        """What the template puts between an answer and where the next one begins."""
        turns = [("user", "Hello"), ("assistant", _ANSWER), ("user", question)]
        made = chat(session, [{"role": role, "content": content} for role, content in turns])
        return made[made.rindex(_ANSWER) + len(_ANSWER) :]

    def _conversation(self, session: Session, sample: Sample, order: Sequence[int]) -> list[str]:
        asked = sample.info["questions"]
        answers: list[str] = []
        for i, q in enumerate(order):
            if i == 0 and self.aware == "yes":
                answers.append(session.answer(self.max_tokens))
                continue
            if i == 0:
                added = self._first_turn(session, sample.memo["text"], asked[q])[1]
            else:
                added = self._next_turn(session, asked[q])
            answers.append(session.ask(tokenize(session, added), self.max_tokens))
        return answers
