"""Attention-layer outputs of a running graph, caught by the scheduler's eval callback."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedError

import llama_cpp.llama_cpp as lib  # isort: skip

F32 = npt.NDArray[np.float32]

_W_O = re.compile(rb"blk\.(\d+)\.attn_output\.weight")
_OBJECT_BYTES = 32  # sizeof(struct ggml_object), which ggml_tensor_overhead() counts, too


class Tensor(ctypes.Structure):
    """struct ggml_tensor of the pinned version."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


def _declare(name: str, restype: Any, *argtypes: Any) -> Any:
    f = getattr(lib._lib, name)  # libllama brings libggml-base along
    f.restype, f.argtypes = restype, list(argtypes)
    return f


class AttentionOutputs:
    """What W_O gives in each layer: the product with `blk.N.attn_output.weight`, before anything is added or scaled.

    `callback` is the `cb_eval` of the context. Outside of `of` it lets every node pass.

    Raises UnsupportedError when the library lays out a tensor in another way.
    """

    def __init__(self) -> None:
        self._op = _declare("ggml_op_desc", ctypes.c_char_p, ctypes.c_void_p)
        self._name = _declare("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._n_bytes = _declare("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        sizes = (ctypes.c_size_t, ctypes.c_size_t)
        self._get = _declare("ggml_backend_tensor_get", None, ctypes.c_void_p, ctypes.c_void_p, *sizes)
        here, there = ctypes.sizeof(Tensor) + _OBJECT_BYTES, _declare("ggml_tensor_overhead", ctypes.c_size_t)()
        if here != there:
            raise UnsupportedError(f"a ggml_tensor takes {there} bytes in the library, expected {here}")
        self._rows: dict[int, F32] | None = None
        self.callback = lib.ggml_backend_sched_eval_callback(self._on_node)

    @contextmanager
    def of(self, layers: Sequence[int]) -> Iterator[Callable[[], F32]]:
        """While one token is decoded; what is yielded gives its outputs afterwards, [n_layer, n_embd].

        Raises UnsupportedError when a layer has no such product.
        """
        rows = self._rows = {}
        try:
            yield lambda: self._stacked(rows, layers)
        finally:
            self._rows = None

    @staticmethod
    def _stacked(rows: dict[int, F32], layers: Sequence[int]) -> F32:
        missing = [il for il in layers if il not in rows]
        if missing:
            raise UnsupportedError(f"no product with blk.{missing[0]}.attn_output.weight in the model's graph")
        return np.stack([rows[il] for il in layers])

    def _on_node(self, tensor: int, ask: bool, _: Any) -> bool:
        """Asked: whether the node is wanted; then, once it is computed: whether to go on."""
        if self._rows is None:
            return not ask
        layer = self._layer(tensor)
        if ask:
            return layer is not None
        if layer is not None:
            row = np.empty(self._n_bytes(tensor) // 4, np.float32)
            self._get(tensor, row.ctypes.data, 0, row.nbytes)
            self._rows[layer] = row
        return True

    def _layer(self, tensor: int) -> int | None:
        """Layer of the product with W_O that the node is, None: another node."""
        if self._op(tensor) != b"MUL_MAT":
            return None
        m = _W_O.fullmatch(self._name(Tensor.from_address(tensor).src[0]))
        return int(m[1]) if m else None
