"""Fixtures that several test files share. The models come out of packages, once, into the cache folder."""

from __future__ import annotations

import os
from pathlib import Path

# before NumPy is loaded: its threads cost more than they give on the small products of the references
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from laprox_llamacpp import models


@pytest.fixture(scope="session")
def smol_path() -> Path:
    """SmolLM2 135M Instruct Q4_1: 30 layers, 9 query and 3 KV heads, head size 64."""
    return models.fetch("smollm2-135m")


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    """Qwen2.5-Coder 0.5B Instruct Q4_K_M: 24 layers, 14 query and 2 KV heads, head size 64. Half a GB."""
    return models.fetch("qwen2.5-coder-0.5b")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M Q4_K_M: 18 layers, 3 of them with full attention, 4 query and 1 KV heads, head size 256."""
    return models.fetch("gemma-3-270m")
