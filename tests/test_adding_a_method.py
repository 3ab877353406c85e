"""docs/adding-a-method.md: the method that it shows is the one below, works, and is as short as it says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from lowlevel import golden

from laprox_llamacpp import Llama, _native, policy
from laprox_llamacpp.observed import ObservedPrompt

DOC = Path(__file__).resolve().parent.parent / "docs" / "adding-a-method.md"
N, BUDGET = 300, 0.3


def recipe() -> str:
    """The first Python block of the page."""
    match = re.search(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


@pytest.fixture
def knorm() -> Iterator[None]:
    module = ModuleType("knorm")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(recipe(), str(DOC), "exec"), module.__dict__)
    yield
    del policy._METHODS["knorm"], sys.modules[module.__name__]


def test_it_is_short() -> None:
    assert len([line for line in recipe().splitlines() if line.strip()]) < 30


def test_it_runs_by_name_and_keeps_the_smallest_keys(knorm: Any, smol_path: Path) -> None:
    tokens = golden("smollm2-135m")["ids"][:N].tolist()
    llm = Llama(str(smol_path), n_ctx=512, kv_evict="knorm", budget=BUDGET, n_threads=1, verbose=False)
    try:
        seen: dict[tuple[int, int], Any] = {}
        keep = type(llm._policy).keep  # type: ignore[union-attr]

        def spy(self: Any, prompt: ObservedPrompt, k: int) -> Any:
            for layer, (il, n_head_kv) in enumerate(llm._layers):
                norms = np.linalg.norm(_native.rows(llm.ctx, "k", layer).astype(np.float64), axis=2)
                seen.update({(il, h): norms[h, : N - 32] for h in range(n_head_kv)})
            return keep(self, prompt, k)

        type(llm._policy).keep = spy  # type: ignore[method-assign, union-attr]
        llm.eval(tokens)
        k = round(BUDGET * N) - 32
        for key, positions in llm.kv_kept().items():
            kept, norms = positions[positions < N - 32], seen[key]
            assert len(kept) == k
            assert norms[kept].max() <= np.delete(norms, kept).min() * (1 + 1e-6)
        stats = llm.kv_stats()
        assert stats.policy == "knorm" and stats.bytes_now < stats.bytes_full + stats.bytes_reserve
    finally:
        llm.close()


def test_its_options_are_checked(knorm: Any) -> None:
    assert str(policy.EvictionPolicy.parse("knorm:alloc=layer:pool=avg5")) == "knorm:pool=avg5:alloc=layer"
    with pytest.raises(ValueError, match="unknown option 'power'"):
        policy.EvictionPolicy.parse("knorm:power=2")
