"""Calibration of `duo`: which KV heads of a model look a passkey up. Any GGUF model that can be evicted will do.

A sample is a text with several passkeys, a question about one of them, and the true answer, which the model is made to
read (teacher forcing). The score of a KV head is the share of attention that falls on the digits of the asked passkey
in the text when the digits of the answer are predicted: the mean over the answer's tokens, the query heads of the KV
head, and the samples.

A token is predicted by the query of the one before it. For an answer of m tokens the observed window therefore is the
last m tokens before the answer's last: from the last token of the opening "... is" to the last but one of the answer.
The last one is never decoded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, ClassVar

import numpy as np
import numpy.typing as npt
from rich.table import Table

from . import __version__, demo, duo_profile, haystack
from .llama import Llama
from .observed import ObservedPrompt
from .policy import EvictionPolicy

N_FACTS = 5
DEPTHS = (0.2, 0.325, 0.45, 0.575, 0.7)  # outside the sinks and the recent positions of a streaming head
DIGITS = 8
_TOP = 10  # heads in the table


@dataclass(frozen=True)
class Sample:
    """A prompt with its answer; `tokens` end before the answer's last token.

    Attributes:
        tokens: what is decoded; the last `window` of them predict the answer.
        needle: positions of the asked passkey's digits in the text.
        window: m, tokens of the answer.
        last: the answer's last token.
    """

    tokens: list[int]
    needle: list[int]
    window: int
    last: int


@dataclass(frozen=True)
class Result:
    """A profile, and how many samples' last answer token the model predicted itself."""

    profile: duo_profile.Profile
    n_right: int
    n_samples: int


@dataclass(frozen=True)
class _Probe(EvictionPolicy):
    """Evicts nothing; hands the observed prompt to `seen`."""

    seen: Callable[[ObservedPrompt], None] = lambda prompt: None

    name: ClassVar[str] = "probe"

    def keep(self, prompt: ObservedPrompt, k: int) -> None:
        self.seen(prompt)


class Calibrator:
    """A model that is asked for passkeys; `close` frees it.

    Args:
        model_path: a GGUF file.
        n_tokens: least length of a sample's text.
        seed: of the texts, the passkeys and their numbers.
        **kwargs: as `Llama`, e.g. n_threads.
    """

    def __init__(self, model_path: str | os.PathLike[str], n_tokens: int = 1024, seed: int = 0, **kwargs: Any) -> None:
        self._n_tokens, self._seed = n_tokens, seed
        # any budget below 1 makes a long prompt an observed one
        n_ctx = n_tokens * 2 + demo.ROOM
        self.llm = Llama(os.fspath(model_path), n_ctx=n_ctx, kv_evict=_Probe(), budget=0.5, verbose=False, **kwargs)

    def close(self) -> None:
        """Free the model."""
        self.llm.close()

    def sample(self, index: int) -> Sample:
        """Sample `index`: another text, other passkeys, and the asked one at each of the depths in turn."""
        seed = self._seed * 100_003 + index
        facts = haystack.facts(N_FACTS, seed, DIGITS)
        asked = facts[2 * index % N_FACTS]
        text = haystack.hide(facts, self._n_tokens, lambda s: len(self._tokenize(s)), seed, DEPTHS)
        question, opening = demo.ask_for([asked])
        tokens = self._prompt(f"{text}\n\n{question}", f"{opening} {asked.number}")
        n = self._answer_length(tokens, asked.number)
        needle = demo.needle_positions(self.llm, tokens, [asked.number])
        if not needle or needle[-1] >= len(tokens) - n:
            raise ValueError(f"{self.llm.model_path}: its tokens do not spell the text that they stand for")
        return Sample(tokens[:-1], needle, n, tokens[-1])

    def _tokenize(self, text: str, add_bos: bool = False) -> list[int]:
        tokens: list[int] = self.llm.tokenize(text.encode(), add_bos=add_bos)
        return tokens

    def _prompt(self, content: str, opening: str) -> list[int]:
        """In the chat template of the model, or as plain text when it has none."""
        if "tokenizer.chat_template" in self.llm.metadata:
            return demo.chat_tokens(self.llm, content, opening)
        return self._tokenize(f"{content}\n\n{opening}", add_bos=True)

    def _answer_length(self, tokens: Sequence[int], number: str) -> int:
        """Last tokens that spell `number`, with which the text of `tokens` ends."""
        spelled, n = b"", 0
        while len(spelled) < len(number):
            n += 1
            spelled = self.llm.detokenize([tokens[-n]], special=True) + spelled
        return n

    def score(self, sample: Sample, seen: Callable[[ObservedPrompt], None] | None = None) -> npt.NDArray[np.float64]:
        """Share of the answer's attention on the needle, [n_heads], by layer, then by KV head.

        `seen` gets the observed prompt as well.
        """
        shares: list[npt.NDArray[np.float64]] = []

        def observe(prompt: ObservedPrompt) -> None:
            sums = prompt.score("sum")  # over the window, mean over the query group
            shares.append(sums[:, sample.needle].sum(axis=1, dtype=np.float64) / sample.window)
            if seen is not None:
                seen(prompt)

        self.llm.reset()
        self.llm._policy = replace(_Probe(), window=sample.window, seen=observe)
        self.llm.eval(sample.tokens)
        return shares[0]

    def predicts(self, sample: Sample) -> bool:
        """Whether the sample just scored would have gone on as the answer does."""
        return bool(self.llm.sample(temp=0.0) == sample.last)

    def heads(self) -> list[tuple[int, int]]:
        """(model layer, KV head) of each score."""
        return self.llm._heads()

    def n_layer(self) -> int:
        """Layers of the model."""
        return len(self.llm._layers) + self.llm.kv_stats().n_layers_untouched


def duo(
    model_path: str | os.PathLike[str],
    n_samples: int = 8,
    n_tokens: int = 1024,
    seed: int = 0,
    on_sample: Callable[[], object] = lambda: None,
    **kwargs: Any,
) -> Result:
    """Make the profile of a model; the same for the same arguments. It is not saved: see `duo_profile.save`.

    Args:
        model_path: a GGUF file; a chat model is asked in its template, any other in plain text.
        n_samples: prompts, one prefill each.
        n_tokens: least length of their text. Below about 1024 the passkeys lie among what streaming heads keep, too.
        seed: of the texts, the passkeys and their numbers.
        on_sample: called after each.
        **kwargs: as `Llama`, e.g. n_threads.

    Raises:
        ValueError: a file that is no model; UnsupportedError: one that cannot be evicted.
    """
    calibrator = Calibrator(model_path, n_tokens, seed, **kwargs)
    try:
        total = np.zeros(len(calibrator.heads()))
        n_right = 0
        for i in range(n_samples):
            sample = calibrator.sample(i)
            total += calibrator.score(sample)
            n_right += calibrator.predicts(sample)
            on_sample()
        scores = (total / n_samples).tolist()
        heads = tuple((il, h, score) for (il, h), score in zip(calibrator.heads(), scores))
        profile = duo_profile.Profile(
            fingerprint=duo_profile.fingerprint(model_path),
            model=Path(model_path).name,
            n_layer=calibrator.n_layer(),
            heads=heads,
            settings={"samples": n_samples, "tokens": n_tokens, "seed": seed},
            package=__version__,
        )
        return Result(profile, n_right, n_samples)
    finally:
        calibrator.close()


def table(result: Result) -> Table:
    """Number of heads, quartiles of the score, and the best heads."""
    profile = result.profile
    low, middle, high = np.percentile(profile.scores(), (25, 50, 75))
    out = Table(title=f"{profile.model}: attention on the passkey", min_width=64)
    out.add_column("head")
    out.add_column("score", justify="right")
    for name, value in (("lower quartile", low), ("median", middle), ("upper quartile", high)):
        out.add_row(f"{name} of {len(profile.heads)} heads", f"{value:.4f}")
    out.add_section()
    for il, h, score in sorted(profile.heads, key=lambda head: -head[2])[:_TOP]:
        out.add_row(f"layer {il}, KV head {h}", f"{score:.4f}")
    out.caption = f"last token of the answer predicted in {result.n_right} of {result.n_samples} samples"
    return out
