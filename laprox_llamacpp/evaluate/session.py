"""`Session`: a model whose prompts are prefilled once, and then evicted as often as wanted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..llama import Llama
from ..observed import ObservedPrompt
from ..policy import EvictionPolicy
from .cells import Cell

import llama_cpp.llama_cpp as lib  # isort: skip

F32 = npt.NDArray[np.float32]


class Session(Llama):
    """A `Llama` for evaluation: `prefill` a prompt, look at it with the full cache, then `under` a cell after another.

    The prompt's rows stay aside while a cell is tried (LAPROX_STORE_ASIDE): each cell decodes on really evicted rows,
    at their speed, and the next one starts from the full prompt again.

    Args:
        model_path: a GGUF file.
        cells: methods and budgets that will be tried; they decide the window, and whether every query is summed up.
        **kwargs: as `Llama`.
    """

    def __init__(self, model_path: str, cells: Sequence[Cell], **kwargs: Any) -> None:
        policies = [c.policy for c in cells]
        first: EvictionPolicy | str = next(
            (p for p in policies if p.all_queries), policies[0] if policies else "laprox"
        )
        kwargs.setdefault("verbose", False)
        super().__init__(model_path, kv_evict=first, budget=1, **kwargs)
        for policy in policies:
            policy.check_model(model_path)
        self.prefill_s = 0.0
        self._end = 0
        self._known: dict[Any, Any] = {}  # scores that cells have in common
        self._logits: F32 | None = None

    def _check_budget(self, policy: EvictionPolicy, n_prompt: int) -> None:
        """Budgets are the cells'."""

    def _evict(self, policy: EvictionPolicy, n_prompt: int) -> None:
        """Comes later, by `under`."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """A new prompt, observed and whole. Raises ValueError when it is not longer than the window."""
        assert self._policy is not None
        if len(tokens) <= self._policy.window:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens, expected more than the window of {self._policy.window}"
            )
        self.reset()
        self._ctx.kv_cache_clear()
        start = time.perf_counter()
        self.eval(tokens)
        self.prefill_s = time.perf_counter() - start
        self._end = len(tokens)
        self._known = {}
        self._logits = self.last_logits()

    @contextmanager
    def under(self, cell: Cell | None) -> Iterator[None]:
        """The prompt as `cell` leaves it (None: whole), and whole again afterwards."""
        self.cut()
        if cell is None:
            yield
            self.cut()
            return
        assert self._logits is not None
        k = cell.budget.kept(self._end, cell.policy.window, self._bytes_per_token)
        self._prompt = ObservedPrompt(
            self.ctx, self._end, cell.policy.window, self.model_path, self._pieces, self._known
        )
        start = time.perf_counter()
        kept = cell.policy.keep(self._prompt, k)
        self._plan_ms = 1000 * (time.perf_counter() - start - self._prompt.scoring_s)
        whole = kept is None or k + cell.policy.window >= self._end
        if not whole:
            assert kept is not None
            _native.set_kept(self.ctx, kept, _native.STORE_ASIDE)
        self._read_pages(cell.policy, cell.budget, self._end)
        try:
            yield
        finally:
            self._read_pages(None, cell.budget, self._end)
            self.cut()
            if not whole:
                _native.restore(self.ctx)

    def cost(self) -> dict[str, Any]:
        """What the cache as it is took: bytes and rows held, milliseconds to get there."""
        s = _native.stats(self.ctx)
        prompt = self._prompt if s.evicted else None
        return {
            "kv_bytes": s.bytes_now,
            "rows": s.rows_kept if s.evicted else self._end * self._n_heads,
            "score_ms": round(prompt.score_ms, 2) if prompt else 0.0,
            "plan_ms": round(self._plan_ms, 2) if prompt else 0.0,
        }

    def cut(self, end: int | None = None) -> None:
        """Remove what was decoded after the prompt, or after position `end`."""
        at = self._end if end is None else end
        self._ctx.kv_cache_seq_rm(-1, at, -1)
        self.n_tokens = at

    def last_logits(self) -> F32:
        """Logits after the last decoded token, [n_vocab]."""
        out: F32 = np.ctypeslib.as_array(lib.llama_get_logits_ith(self.ctx, -1), shape=(self.n_vocab(),)).copy()
        return out

    def answer(self, max_tokens: int, stop: Sequence[str] = ()) -> str:
        """Greedy text after the prompt, without what follows a stop string. The first token comes from the prefill,
        whatever was evicted after it.
        """
        assert self._logits is not None
        return self._greedy(self._logits, max_tokens, stop)

    def ask(self, tokens: Sequence[int], max_tokens: int, stop: Sequence[str] = ()) -> str:
        """Greedy text after `tokens`, which follow what is in the cache."""
        self.decode(tokens)
        return self._greedy(self.last_logits(), max_tokens, stop)

    def decode(self, tokens: Sequence[int]) -> None:
        """Append tokens as they are, without another eviction."""
        for i in range(0, len(tokens), self.n_batch):
            self._decode_now(list(tokens[i : i + self.n_batch]))

    def _greedy(self, logits: F32, max_tokens: int, stop: Sequence[str]) -> str:
        out: list[int] = []
        text: str = ""
        while len(out) < max_tokens:
            token = int(logits.argmax())
            if lib.llama_vocab_is_eog(self._model.vocab, token):
                break
            out.append(token)
            text = self.detokenize(out).decode("utf-8", errors="replace")
            found = [text.index(s) for s in stop if s in text]
            if found:
                return text[: min(found)]
            if len(out) < max_tokens:
                self._decode_now([token])
                logits = self.last_logits()
        return text

    def logprobs(self, tokens: Sequence[int]) -> Iterator[F32]:
        """Log-probabilities [n_vocab] that the model gives after each of `tokens`, in one chunk after the cache."""
        n = len(tokens)
        batch = lib.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = int(token), self.n_tokens + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = True
            if lib.llama_decode(self.ctx, batch) != 0:
                raise RuntimeError(f"{n} tokens could not be decoded after {self.n_tokens}: {_native.last_error()}")
        finally:
            lib.llama_batch_free(batch)
        self.n_tokens += n
        for i in range(n):
            row = np.ctypeslib.as_array(lib.llama_get_logits_ith(self.ctx, i), shape=(self.n_vocab(),))
            shifted = row - row.max()
            yield shifted - np.log(np.exp(shifted, dtype=np.float64).sum()).astype(np.float32)
