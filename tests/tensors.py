"""Tensors of a running graph, read where the ops read them by a callback of the scheduler."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import numpy.typing as npt

from laprox_llamacpp.evaluate.outputs import Tensor

__all__ = ["Tensor", "read"]

F64 = npt.NDArray[np.float64]


def read(address: int) -> F64:
    """A strided tensor in host memory as float64, [ne2, ne1, ne0]; ne3 is 1."""
    t = Tensor.from_address(address)
    kind = gguf.GGMLQuantizationType(t.type)
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    row = t.ne[0] // n_values * n_bytes
    assert t.ne[3] == 1 and t.nb[0] == n_bytes
    size = (t.ne[2] - 1) * t.nb[2] + (t.ne[1] - 1) * t.nb[1] + row
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(t.data))
    rows = np.lib.stride_tricks.as_strided(raw, (t.ne[2], t.ne[1], row), (t.nb[2], t.nb[1], 1)).copy()
    return gguf.dequantize(rows, kind).astype(np.float64)
