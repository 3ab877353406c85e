"""Language modelling: how the next tokens of a long real text change when what came before is evicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...parts.options import int_at_least
from ..session import Session
from ..task import Sample, Task, sha256_of
from ..texts import source, stretch


@dataclass(frozen=True)
class Continuation(Task):
    """A prefix is evicted, the tokens after it are fed in one chunk (teacher forcing).

    The first of them is predicted by the prefill, whatever was evicted, and is left out. `kl` is the mean Kullback-
    Leibler divergence from the full cache in nats, `nll` the mean negative log-likelihood, `top1` the share of tokens
    whose best guess is the full cache's.

    Options: tokens of the prefix, n tokens after it, haystack ("python": its documentation, topic after topic, "code":
    modules of its library, or a text file), seed.
    """

    tokens: int = 2048
    n: int = 256
    haystack: str = "python"
    seed: int = 0

    name: ClassVar[str] = "continuation"
    metric: ClassVar[str] = "kl"
    higher: ClassVar[bool] = False
    against_full: ClassVar[bool] = True

    def __post_init__(self) -> None:
        int_at_least("tokens", self.tokens, 64)
        int_at_least("n", self.n, 2)

    def check(self) -> None:
        """The haystack can be read."""
        source(self.haystack)

    def data_sha256(self) -> str:
        """Of the haystack's paragraphs."""
        return sha256_of(p.encode() for p in source(self.haystack))

    @property
    def n_need(self) -> int:
        """Prefix and continuation."""
        return self.tokens + self.n

    def sample(self, session: Session, index: int) -> Sample:
        """A stretch of the text, its own as far as the text reaches."""
        start, tokens = stretch(session, self.haystack, self.seed, index, self.tokens + self.n)
        after = tokens[self.tokens :]
        info = {"start": start, "after": session.detokenize(after).decode("utf-8", errors="replace")}
        return Sample(index, tokens[: self.tokens], info, {"after": after})

    def measure(self, session: Session, sample: Sample) -> Mapping[str, Any]:
        """Means over the tokens after the first."""
        after = sample.memo["after"]
        full = sample.memo.get("full")  # log-probabilities and probabilities after each token
        rows = [] if full is None else full
        nll, kl, top1 = [], [], []
        for i, row in enumerate(session.logprobs(after[:-1])):
            if full is None:
                rows.append((row, np.exp(row)))
            of, p = rows[i]
            kl.append(float(np.dot(p, of - row)))  # the difference first: F32 is enough
            nll.append(-float(row[after[i + 1]]))
            top1.append(int(row.argmax()) == int(of.argmax()))
        sample.memo["full"] = rows
        return {"kl": float(np.mean(kl)), "nll": float(np.mean(nll)), "top1": float(np.mean(top1))}
