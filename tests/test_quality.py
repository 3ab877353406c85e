"""Needles through `Llama`, rows really freed: the default form finds them where the full cache does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from laprox_llamacpp import Llama

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import needles

SEED = 29  # not the bench's


class Whole(needles.Prefilled):
    """Answers from the uncut cache first, then from what the freeing store leaves."""

    def freed(self) -> str:
        self._ctx.kv_cache_seq_rm(-1, self._n_prompt, -1)
        self.n_tokens = self._n_prompt
        assert self._policy is not None
        Llama._evict(self, self._policy, self._n_prompt)
        stats = self.kv_stats()
        assert stats.evicted and stats.bytes_now < stats.bytes_full
        return self._answer()


def shares(name: str, path: Path, specs: list[tuple[str, float]], n_samples: int, n_tokens: int) -> list[float]:
    """Share of right answers of each (policy, budget), over the samples that the full cache answers."""
    style = needles.STYLES.get(name, needles.DEFAULT_STYLE)
    known, right = 0, [0] * len(specs)
    llms = [
        Whole(str(path), kv_evict=spec, budget=budget, n_ctx=n_tokens + 64, verbose=False, n_threads=2)
        for spec, budget in specs
    ]
    for index in range(n_samples):
        sample = needles.make_sample(llms[0], style, index, n_tokens, SEED)
        llms[0].prefill(sample.tokens)
        if not sample.right(llms[0].full()):
            continue
        known += 1
        for i, llm in enumerate(llms):
            if i > 0:
                llm.prefill(sample.tokens)
            right[i] += sample.right(llm.freed())
    for llm in llms:
        llm.close()
    assert known >= n_samples / 2, "the full cache should answer most of them"
    return [r / known for r in right]


def test_one_needle_survives_at_a_tenth(smol_path: Path) -> None:
    assert shares("smollm2-135m", smol_path, [("laprox", 0.1)], n_samples=1, n_tokens=1024) == [1.0]


@pytest.mark.slow
def test_smollm2_at_a_tenth(smol_path: Path) -> None:
    (default,) = shares("smollm2-135m", smol_path, [("laprox", 0.1)], n_samples=20, n_tokens=2048)
    assert default >= 0.95


@pytest.mark.slow
def test_qwen_at_a_twentieth_against_the_paper(qwen_path: Path) -> None:
    specs = [("laprox", 0.05), ("laprox:preset=paper", 0.05)]
    default, paper = shares("qwen2.5-coder-0.5b", qwen_path, specs, n_samples=20, n_tokens=2048)
    assert default >= 0.95
    assert default - paper >= 0.3
