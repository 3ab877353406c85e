"""A raw llama.cpp context for tests: decode tokens, get logits, evict through laprox.h. No sampling, no text."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from laprox_llamacpp import _native
from laprox_llamacpp._types import NAMES
from laprox_llamacpp.methods.laprox import LaProx
from laprox_llamacpp.parts.pool import Pool
from laprox_llamacpp.policy import EvictionPolicy

import llama_cpp as lib  # isort: skip

TESTS = Path(__file__).resolve().parent
W = 32
TYPES = {**NAMES, "iq4_nl": 20}  # one that cannot be evicted

_errors: list[str] = []


@lib.llama_log_callback
def _log(level: int, text: bytes, _: Any) -> None:
    if level == 4:  # error
        _errors.append(text.decode("utf-8", "replace"))


lib.llama_log_set(_log, ctypes.c_void_p(0))


def laprox(spec: str) -> LaProx:
    policy = EvictionPolicy.parse(spec)
    assert isinstance(policy, LaProx)
    return policy


def plan_params(n_keep: int, spec: str = "laprox") -> _native.PlanParams:
    """The plan of a LaProx policy for laprox_evict()."""
    p = laprox(spec)
    return _native.plan_params(n_keep, Pool.parse(p.pool), p.normalize, p.alloc, p.protect_sinks)


def golden(name: str) -> dict[str, npt.NDArray[Any]]:
    """Reference of a model by its name in `models`; `ids` is a prompt of about 600 tokens. See golden/README.md."""
    with np.load(TESTS / "golden" / f"{name}.npz") as data:
        return {key: data[key] for key in data.files}


@cache
def load_model(path: str | Path, n_gpu_layers: int = 0) -> Any:
    """One model per file and process, never freed."""
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"{path} cannot be loaded: {' '.join(_errors)}"
    return model


class Context:
    """One llama_context; eviction is on unless `evict=False`. `pos` is the position of the next token.

    Raises RuntimeError with the library's reason when the context is refused or a decode fails.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        type_k: str = "f16",
        type_v: str | None = None,
        n_ctx: int = 1024,
        n_ubatch: int = 512,
        n_threads: int = 1,
        n_seq_max: int = 1,
        evict: bool = True,
        n_reserve: int | None = None,
        flash_attn: bool = True,
        reference: bool = False,
        cb_eval: Any = None,
        n_gpu_layers: int = 0,
        offload_kqv: bool = True,
        attention_path: str = "auto",
    ) -> None:
        self.ptr: Any = None
        self.path = path
        self.model = load_model(path, n_gpu_layers)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ctx, n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        params.n_seq_max = n_seq_max
        params.flash_attn_type = 1 if flash_attn else 0
        params.type_k, params.type_v = TYPES[type_k], TYPES[type_v or type_k]
        params.swa_full = False
        params.offload_kqv = offload_kqv
        if cb_eval is not None:
            params.cb_eval = cb_eval
        _errors.clear()
        _native.set_next(_native.context_params(n_reserve, attention_path) if evict else None)
        self.ptr = lib.llama_init_from_model(self.model, params)
        if not self.ptr:
            raise RuntimeError(_native.last_error() or " ".join(_errors))
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.memory = lib.llama_get_memory(self.ptr)
        self.pos = 0
        if reference:
            _native.set_reference_kernels(self.ptr, True)

    def close(self) -> None:
        if self.ptr:
            lib.llama_free(self.ptr)
            self.ptr = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def try_decode(self, tokens: Sequence[int]) -> int:
        """Status of llama_decode for `tokens` after those in the cache; 0 moves `pos` on."""
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = int(token), self.pos + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(tokens) - 1
        status: int = lib.llama_decode(self.ptr, batch)
        lib.llama_batch_free(batch)
        if status == 0:
            self.pos += len(tokens)
        return status

    def decode(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of the last of `tokens`, [n_vocab]."""
        status = self.try_decode(tokens)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}: {_native.last_error()}")
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self.ptr, -1), shape=(self.n_vocab,)).copy()

    def prefill(self, tokens: Sequence[int], window: int = W) -> npt.NDArray[np.float32]:
        """Decode a prompt whose last `window` tokens are observed."""
        if len(tokens) > window:
            self.decode(tokens[:-window])
        _native.observe(self.ptr, window)
        return self.decode(tokens[-window:])

    def plan(self, budget: float, spec: str = "laprox", n_prompt: int | None = None) -> _native.PlanParams:
        n = self.pos if n_prompt is None else n_prompt
        k = max(0, int(np.floor(budget * n + 0.5)) - W)
        return plan_params(k * int(_native.shape(self.ptr).n_head_kv), spec)

    def score(self, spec: str = "laprox", composed: bool = False) -> npt.NDArray[np.float32]:
        """Raw scores [KV heads of all layers, n_cand]."""
        policy = laprox(spec)
        _native.score(self.ptr, _native.score_params(policy.attention, policy.value, policy.gqa, composed))
        return _native.scores(self.ptr)

    def evict(self, budget: float, spec: str = "laprox", store: int = _native.STORE_RAGGED) -> list[Any]:
        """Score, plan and commit; kept candidates of each head."""
        self.score(spec)
        _native.evict(self.ptr, self.plan(budget, spec), store)
        return _native.kept(self.ptr)

    def cut(self, pos: int) -> bool:
        """Remove everything from `pos` on; False: refused."""
        if not lib.llama_memory_seq_rm(self.memory, 0, pos, -1):
            return False
        self.pos = pos
        return True

    def clear(self) -> None:
        lib.llama_memory_clear(self.memory, True)
        self.pos = 0

    def stats(self) -> _native.Stats:
        return _native.stats(self.ptr)


def as_set(kept: Sequence[npt.NDArray[Any]]) -> set[tuple[int, int]]:
    """(head, position) of every kept candidate."""
    return {(head, int(pos)) for head, positions in enumerate(kept) for pos in positions}


def run_child(function: Any, *args: Any, env: dict[str, str] | None = None) -> Any:
    """Result of a function of a test module in a process of its own; arguments and result travel as JSON."""
    code = (
        f"import json, sys; sys.path.insert(0, {str(TESTS)!r}); import {function.__module__} as module; "
        f"print(json.dumps(module.{function.__name__}(*json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([str(a) if isinstance(a, Path) else a for a in args])],
        capture_output=True, text=True, env=env, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])
