"""Output similarity: how far attention outputs turn when a prompt is evicted (the paper's figure 4)."""

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
class Similarity(Task):
    """A stretch of text is evicted, and n tokens are decoded after it: those that the full cache chooses, greedily.

    `cosine` is the mean cosine between the attention outputs (after W_O) of the full and of the evicted cache, over the
    evictable layers and the steps; `by_layer` [n_layer] and `by_step` [n] have its means over the other. `layers`
    numbers them in the model. The engine computes the outputs, in the same graph that answers.

    Options: tokens of the prompt, n steps, haystack ("python": its documentation, topic after topic, "code":
    modules of its library, or a text file), seed.
    """

    tokens: int = 2048
    n: int = 16
    haystack: str = "python"
    seed: int = 0

    name: ClassVar[str] = "similarity"
    metric: ClassVar[str] = "cosine"
    watch: ClassVar[bool] = True
    against_full: ClassVar[bool] = True

    def __post_init__(self) -> None:
        int_at_least("tokens", self.tokens, 64)
        int_at_least("n", self.n, 1)

    def check(self) -> None:
        """The haystack can be read."""
        source(self.haystack)

    def data_sha256(self) -> str:
        """Of the haystack's paragraphs."""
        return sha256_of(p.encode() for p in source(self.haystack))

    @property
    def n_need(self) -> int:
        """Prompt and steps."""
        return self.tokens + self.n

    def sample(self, session: Session, index: int) -> Sample:
        """A stretch of the text, its own as far as the text reaches."""
        start, tokens = stretch(session, self.haystack, self.seed, index, self.tokens)
        return Sample(index, tokens, {"start": start, "layers": [il for il, _ in session._layers]})

    def measure(self, session: Session, sample: Sample) -> Mapping[str, Any]:
        """Cosines to the full cache's outputs, which the first call keeps."""
        if "tokens" not in sample.memo:
            token, tokens, outputs = int(session.after_prompt.argmax()), [], []
            for _ in range(self.n):
                tokens.append(token)
                outputs.append(session.attention_outputs(token))
                token = int(session.last_logits().argmax())
            sample.memo.update(tokens=tokens, outputs=outputs)
        else:
            outputs = [session.attention_outputs(token) for token in sample.memo["tokens"]]
        full, now = (np.array(x, np.float64) for x in (sample.memo["outputs"], outputs))  # [n, n_layer, n_embd]
        cosine = (full * now).sum(axis=2) / (np.linalg.norm(full, axis=2) * np.linalg.norm(now, axis=2))
        return {
            "cosine": float(cosine.mean()),
            "by_layer": cosine.mean(axis=0).round(6).tolist(),
            "by_step": cosine.mean(axis=1).round(6).tolist(),
        }
