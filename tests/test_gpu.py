"""On a machine with a CUDA device and a package built for it: `pytest -m gpu`. scripts/gpu_check.sh measures, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowlevel import golden

from laprox_llamacpp import Llama

N = 512
LEAST = 0.98  # sums in another order change a few rows near the threshold


def evict(path: Path, n_gpu_layers: int) -> tuple[dict[Any, Any], Any]:
    """Kept positions of each head, and the statistics."""
    llm = Llama(
        str(path),
        n_ctx=N + 64,
        n_gpu_layers=n_gpu_layers,
        op_offload=n_gpu_layers != 0,  # else the GPU multiplies for the CPU where a batch is large
        kv_evict="laprox",
        budget=0.2,
        verbose=False,
    )
    try:
        llm.eval(golden("smollm2-135m")["ids"][:N].tolist())
        return llm.kv_kept(), llm.kv_stats()
    finally:
        llm.close()


@pytest.mark.gpu
def test_cuda_keeps_what_the_cpu_keeps(smol_path: Path) -> None:
    gpu, stats = evict(smol_path, -1)
    if not all(name.startswith("CUDA") for name in stats.devices):
        pytest.skip(f"no CUDA device: rows are on {', '.join(stats.devices)}")
    assert (stats.score_path, stats.attention_path) == ("fused", "ragged_op")
    cpu, _ = evict(smol_path, 0)
    assert gpu.keys() == cpu.keys() and len(cpu) == 90
    same = [len(np.intersect1d(gpu[head], cpu[head])) / len(cpu[head]) for head in cpu if len(cpu[head])]
    assert np.mean(same) >= LEAST
