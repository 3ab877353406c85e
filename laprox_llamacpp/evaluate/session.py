"""`Session`: a model whose prompts are prefilled once, and then evicted as often as wanted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..errors import ComputeError
from ..llama import Llama, check_kept
from ..observed import ObservedPrompt
from ..policy import EvictionPolicy
from .cells import Cell
from .outputs import AttentionOutputs

import llama_cpp.llama_cpp as lib  # isort: skip

F32 = npt.NDArray[np.float32]


class Session(Llama):
    """A `Llama` for evaluation: `prefill` a prompt, look at it with the full cache, then `under` a cell after another.

    The prompt's rows stay aside while a cell is tried (LAPROX_STORE_ASIDE): each cell decodes on really evicted rows,
    at their speed, and the next one starts from the full prompt again.

    Args:
        model_path: a GGUF file.
        cells: methods and budgets that will be tried; they decide the window, and whether every query is summed up.
        watch: whether `attention_outputs` will be called; every step is a little slower then.
        **kwargs: as `Llama`.
    """

    def __init__(self, model_path: str, cells: Sequence[Cell], watch: bool = False, **kwargs: Any) -> None:
        self._outputs = AttentionOutputs() if watch else None
        policies = [c.policy for c in cells]
        for policy in policies:
            policy.check_model(model_path)
        window = policies[0].window if policies else EvictionPolicy.window
        observer = "h2o" if any(p.all_queries for p in policies) else "laprox"  # it observes, and never evicts
        kwargs.setdefault("verbose", False)
        super().__init__(model_path, kv_evict=f"{observer}:window={window}", budget=1, **kwargs)
        n_train = lib.llama_model_n_ctx_train(self.model)
        n_ctx = self.n_ctx()
        if n_ctx > -(-n_train // 256) * 256:
            self.close()
            raise ValueError(
                f"samples need a context of {n_ctx} tokens, the model was trained for {n_train}; ask for fewer"
            )
        self.prefill_s = 0.0
        self._tokens: list[int] = []
        self._end = 0
        self._known: dict[Any, Any] = {}  # scores that cells have in common
        self._logits: F32 | None = None
        self._cell: Cell | None = None
        self._kept: list[npt.NDArray[np.int32]] | None = None
        self._pending: list[int] = []  # the last token of an answer, while it is not in the cache
        self._drafts: dict[tuple[int, ...], list[int]] = {}  # what the full cache answers to the tokens asked

    @property
    def context_params(self) -> Any:
        """As in the parent, whose constructor makes the context of them."""
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        if self._outputs is not None:
            params.cb_eval = self._outputs.callback
        self._context_params = params

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
        self._tokens, self._end = list(tokens), len(tokens)
        self._known, self._drafts, self._cell, self._kept = {}, {}, None, None
        start = time.perf_counter()
        self._evaluate()
        self.prefill_s = time.perf_counter() - start
        self._logits = self.last_logits()

    def _evaluate(self) -> None:
        self.reset()
        self._ctx.kv_cache_clear()
        self.eval(self._tokens)

    @contextmanager
    def under(self, cell: Cell | None) -> Iterator[None]:
        """The prompt as `cell` leaves it (None: whole), and whole again afterwards."""
        self.cut()
        if cell is not None:
            self._plan(cell)
            self._apply(cell)
        try:
            yield
        finally:
            self._cell = self._kept = None
            self._read_pages(None, self._budget, self._end)
            self.cut()
            if _native.stats(self.ctx).evicted:
                _native.restore(self.ctx)

    def _plan(self, cell: Cell) -> None:
        """What `cell` keeps of the prompt."""
        k = cell.budget.kept(self._end, cell.policy.window, self._bytes_per_token)
        self._prompt = ObservedPrompt(
            self.ctx, self._end, cell.policy.window, self.model_path, self._pieces, self._known
        )
        start = time.perf_counter()
        kept = cell.policy.keep(self._prompt, k)
        if kept is not None:
            check_kept(cell.policy, kept, self._n_heads * k)
        self._plan_ms = 1000 * (time.perf_counter() - start - self._prompt.scoring_s)
        self._kept = None if k + cell.policy.window >= self._end else kept

    def _apply(self, cell: Cell) -> None:
        """Evict the whole prompt as planned."""
        if self._kept is not None:
            _native.set_kept(self.ctx, self._kept, _native.STORE_ASIDE)
        self._read_pages(cell.policy, cell.budget, self._end)
        self._cell = cell

    def cost(self) -> dict[str, Any]:
        """What the cache as it is took: bytes and rows held, milliseconds to get there."""
        s = _native.stats(self.ctx)
        prompt = self._prompt if s.evicted else None
        note = self._cell_note()
        return {
            **({"note": note} if note else {}),
            "kv_bytes": s.bytes_now,
            "rows": s.rows_kept if s.evicted else self._end * self._n_heads,
            "score_ms": round(prompt.score_ms, 2) if prompt else 0.0,
            "plan_ms": round(self._plan_ms, 2) if prompt else 0.0,
        }

    def _cell_note(self) -> str | None:
        """What the cell could not do as it says."""
        if self._cell is None or self._prompt is None:
            return None
        asked, window = self._cell.budget.tokens(self._end, self._bytes_per_token), self._cell.policy.window
        if asked < window and self._cell.policy.evicts:
            return f"the budget is {asked} tokens, less than the window of {window}, which alone is kept"
        return self._prompt.note

    def cut(self, end: int | None = None) -> None:
        """Remove what was decoded after the prompt, or after position `end` beyond it."""
        at = self._end if end is None else end
        if at < self._end:
            raise ValueError(f"cut at {at} is inside the prompt of {self._end} tokens, expected its end or later")
        self._pending = []
        if self._n_cached() <= at or self._can_cut(at):
            self._ctx.kv_cache_seq_rm(-1, at, -1)
            self.n_tokens = at
            return
        # a sliding window has left the prompt's end behind: there is no way back but to read the prompt again
        after = self.input_ids[self._end : at].tolist()
        self._evaluate()
        if self._cell is not None:
            self._apply(self._cell)
        self.decode(after)

    @property
    def after_prompt(self) -> F32:
        """Logits after the whole prompt, [n_vocab]."""
        assert self._logits is not None
        return self._logits

    def last_logits(self) -> F32:
        """Logits after the last decoded token, [n_vocab]."""
        out: F32 = np.ctypeslib.as_array(lib.llama_get_logits_ith(self.ctx, -1), shape=(self.n_vocab(),)).copy()
        return out

    def answer(self, max_tokens: int, stop: Sequence[str] = ()) -> str:
        """Greedy text after the prompt, without what follows a stop string. The first token comes from the prefill,
        whatever was evicted after it.
        """
        return self._greedy((), self.after_prompt, max_tokens, stop)

    def ask(self, tokens: Sequence[int], max_tokens: int, stop: Sequence[str] = ()) -> str:
        """Greedy text after `tokens`, which follow what is in the cache."""
        self.decode(tokens)
        return self._greedy(tuple(tokens), self.last_logits(), max_tokens, stop)

    def decode(self, tokens: Sequence[int]) -> None:
        """Append tokens as they are, without another eviction."""
        tokens, self._pending = [*self._pending, *tokens], []
        for i in range(0, len(tokens), self.n_batch):
            self._decode_now(tokens[i : i + self.n_batch])

    def _greedy(self, asked: tuple[int, ...], logits: F32, max_tokens: int, stop: Sequence[str]) -> str:
        out: list[int] = []
        if self._cell is None:
            self._drafts[asked] = out
        elif asked in self._drafts:
            out, logits = self._agreed(self._drafts[asked][:max_tokens], logits)
        while True:
            text: str = self.detokenize(out).decode("utf-8", errors="replace")
            found = [text.index(s) for s in stop if s in text]
            if found:
                return text[: min(found)]
            if len(out) == max_tokens:
                return text
            if self._pending:
                self.decode([])
                logits = self.last_logits()
            token = int(logits.argmax())
            if lib.llama_vocab_is_eog(self._model.vocab, token):
                return text
            out.append(token)
            self._pending = [token]

    def _agreed(self, draft: list[int], logits: F32) -> tuple[list[int], F32]:
        """What greedy decoding has in common with `draft`, found in one step instead of one a token; logits after it.

        Cells mostly say what the full cache said. Pages are selected for single tokens only, and a sliding window
        that has passed the prompt's end cannot give tokens back: no draft then.
        """
        start = self.n_tokens
        if self._reads_pages or not draft or int(logits.argmax()) != draft[0]:
            return [], logits
        if lib.llama_model_n_swa(self.model) or len(draft) > self.n_batch:
            return [], logits
        n, rows = 1, list(self._rows(draft))
        while n < len(draft) and int(rows[n - 1].argmax()) == draft[n]:
            n += 1
        self.cut(start + n)
        return draft[:n], rows[n - 1]

    def attention_outputs(self, token: int) -> F32:
        """Append `token`; what W_O gives for it in each evictable layer, [n_layer, n_embd]. Needs `watch=True`."""
        if self._outputs is None:
            raise ValueError("attention outputs are not watched, expected watch=True at construction")
        self.decode([])
        with self._outputs.of([il for il, _ in self._layers]) as caught:
            self.decode([token])
        return caught()

    def logprobs(self, tokens: Sequence[int]) -> Iterator[F32]:
        """Log-probabilities [n_vocab] that the model gives after each of `tokens`, in chunks of n_batch.

        Under a cell that selects pages they are decoded one by one: larger steps read everything.
        """
        step = 1 if self._reads_pages else self.n_batch
        for i in range(0, len(tokens), step):
            yield from self._logprobs(tokens[i : i + step])

    def _logprobs(self, tokens: Sequence[int]) -> Iterator[F32]:
        for row in self._rows(tokens):
            shifted = row - row.max()
            yield shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))

    def _rows(self, tokens: Sequence[int]) -> Iterator[F32]:
        """Append `tokens`, at most n_batch; logits [n_vocab] after each, valid until something else is decoded."""
        n = len(tokens)
        batch = lib.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = int(token), self.n_tokens + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = True
            if lib.llama_decode(self.ctx, batch) != 0:
                raise ComputeError(f"{n} tokens could not be decoded after {self.n_tokens}: {_native.last_error()}")
        finally:
            lib.llama_batch_free(batch)
        self.input_ids[self.n_tokens : self.n_tokens + n] = tokens
        self.n_tokens += n
        for i in range(n):
            yield np.ctypeslib.as_array(lib.llama_get_logits_ith(self.ctx, i), shape=(self.n_vocab(),))
