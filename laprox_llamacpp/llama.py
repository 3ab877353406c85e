"""`Llama`: `llama_cpp.Llama` whose prompts are evicted down to a budget."""

from __future__ import annotations

import ctypes
import difflib
import inspect
import os
import sys
import time
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _native, gguf_check
from ._types import NAMES, kv_row_bytes, to_ggml_type
from ._util import Clock, Closed
from .budget import Budget
from .errors import ArgumentError, StateError, UnsupportedError
from .observed import ObservedPrompt
from .policy import EvictionPolicy
from .stats import KVStats

# after _native: that import points llama_cpp at our libraries
import llama_cpp  # isort: skip
import llama_cpp.llama_cpp as lib  # isort: skip

DEFAULT_BUDGET = 0.2
_STEP = 64  # tokens; see Llama._eval_prefix
_CTX_STEP = 256  # llama.cpp rounds n_ctx up to this; the parent's buffers must have the same size


class Llama(llama_cpp.Llama):  # type: ignore[misc]
    """`llama_cpp.Llama` with KV cache eviction. Every argument of the parent works as there.

    A prompt is prefilled in full; its last `window` tokens then score all KV entries, the best are kept per layer and
    KV head, the rest is freed, and decoding goes on from what is left. That happens once per cache: in the first `eval`
    of two or more tokens after which the budget is smaller than the cache. Later turns are appended, not evicted again.
    The cache can be cut back as far as `window` tokens before the prompt's end, and goes on from there with what was
    kept; a prompt that differs earlier is evaluated anew. With `kv_evict=None` the class behaves as its parent.

    Args:
        model_path: a GGUF file.
        kv_evict: None (off), "laprox", a spec such as "laprox:preset=paper:window=16", or an `EvictionPolicy`.
        budget: what survives of a prompt's KV entries, window included: a fraction in (0, 1], an int >= 1 (tokens per
            KV head on average) or a str of bytes such as "64MiB"; default 0.2. The window stays, whatever the budget.
        type_k, type_v: a `GGML_TYPE_*` number as in the parent, or "f32", "f16", "bf16", "q8_0", "q4_0".
        **kwargs: of the parent. Eviction turns `flash_attn` on, raises `n_batch` and `n_ubatch` to 64 and to the
            window, and takes `swa_full=False` unless told otherwise.

    Raises:
        ValueError: a bad policy or budget; a file that is missing, truncated or not GGUF.
        UnsupportedError: the model or the arguments rule eviction out; the text says why.
        RuntimeWarning (warning): a prompt could not be evicted, and the full cache stays in use.
    """

    n_tokens: int
    _requires_eval: bool

    # LAPROX_STORE_MASK in tests: the oracle, which masks instead of freeing
    _store = _native.STORE_RAGGED

    def __init__(
        self,
        model_path: str,
        *,
        kv_evict: str | EvictionPolicy | None = None,
        budget: float | int | str | Budget | None = None,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        if kv_evict is None and budget is not None:
            raise ValueError(f"budget={budget!r} has no effect without kv_evict; add kv_evict='laprox' or leave it out")
        _known(kwargs)
        self._policy = None if kv_evict is None else EvictionPolicy.parse(kv_evict)
        self._budget = Budget.parse(DEFAULT_BUDGET if budget is None else budget)
        self._fallback: str | None = None
        self._note: str | None = None
        self._method_note: str | None = None
        self._prompt: ObservedPrompt | None = None
        self._plan_ms = 0.0
        self._reads_pages = False
        self._prefill = Clock()
        self._decode = Clock()
        model_path = os.fspath(model_path)
        gguf_check.require(model_path)
        kwargs.update(type_k=to_ggml_type("type_k", type_k), type_v=to_ggml_type("type_v", type_v))
        if self._policy is None:
            self._init_parent(model_path, kwargs)
            return
        _refuse(kwargs)
        self._policy.check_model(model_path)
        self._adapt(self._policy, kwargs)
        _native.set_next(_native.context_params())
        try:
            self._init_parent(model_path, kwargs)
        finally:
            _native.set_next(None)
        if not _native.enabled(self.ctx):
            raise UnsupportedError("the context was created without eviction, and the library does not say why")
        self._layers = _native.layers(self.ctx)
        self._n_heads = sum(n for _, n in self._layers)
        self._bytes_per_token = self._n_heads * kv_row_bytes(
            self.metadata, self._model.n_embd(), lib.llama_model_n_head(self.model),
            self.context_params.type_k, self.context_params.type_v,
        )  # fmt: skip

    def _init_parent(self, model_path: str, kwargs: dict[str, Any]) -> None:
        """The parent's constructor; its errors with the reason that it does not know."""
        try:
            super().__init__(model_path, **kwargs)
        except ValueError as e:
            if str(e) == "Failed to create llama_context" and self._policy is not None:
                why = (
                    _native.last_error() or f"{e} (n_ctx too large for the memory? verbose=True shows llama.cpp's log)"
                )
                raise UnsupportedError(why) from e
            if str(e).startswith("Failed to load model from file"):
                raise ValueError(
                    f"{e} (truncated, or of an architecture that llama.cpp does not know; verbose=True shows its log)"
                ) from e
            raise

    def _adapt(self, policy: EvictionPolicy, kwargs: dict[str, Any]) -> None:
        """Set what eviction needs, and say so."""
        said = []
        n_ctx = kwargs.get("n_ctx", 512)
        if not 0 <= n_ctx < 1 << 31:
            raise ValueError(f"n_ctx is {n_ctx}, expected 0 (the model's own) to {(1 << 31) - 1} tokens")
        kwargs["n_ctx"] = -(-n_ctx // _CTX_STEP) * _CTX_STEP
        if not kwargs.get("flash_attn"):
            kwargs["flash_attn"] = True
            said.append("flash_attn=True")
        least = max(policy.window, _STEP)
        for name in ("n_batch", "n_ubatch"):
            if kwargs.get(name, 512) < least:
                kwargs[name] = least
                said.append(f"{name}={least} (the window is one ubatch, the prompt before it goes in steps of {_STEP})")
        if kwargs.get("swa_full") is None:
            kwargs["swa_full"] = False
            said.append("swa_full=False")
        if said and kwargs.get("verbose", True):
            print(f"laprox: eviction sets {', '.join(said)}", file=sys.stderr)

    # ---- evaluation

    def eval(self, tokens: Sequence[int]) -> None:
        """Decode `tokens` after those in the cache, and evict when they complete a prompt (see the class).

        Raises what the parent raises, and `LaproxError`; the cache then holds the tokens that `n_tokens` counts.
        """
        if self._policy is None:
            super().eval(tokens)
            return
        if len(tokens) == 0:
            return
        tokens = list(tokens)
        n, n_ctx = self.n_tokens + len(tokens), min(self._n_ctx, len(self.input_ids))
        if n > n_ctx:
            raise ValueError(f"{n} tokens exceed the context window of {n_ctx}; raise n_ctx")
        # the parent cuts, too: look for a refusal only when there is something to cut
        if self._n_cached() > self.n_tokens and not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            raise StateError(
                f"the evicted cache cannot be cut at token {self.n_tokens}; call reset() and evaluate anew"
            )
        try:
            if self.n_tokens == 0:
                self._read_pages(None, self._budget, 0)
            if len(tokens) == 1:
                with self._decode.time(1):
                    self._decode_now(tokens)
            elif self._is_prompt(len(tokens)):
                self._prefill, self._decode = Clock(), Clock()
                self._read_pages(None, self._budget, 0)
                self._eval_prompt(self._policy, tokens)
                self._read_pages(self._policy, self._budget, self.n_tokens)
            elif self.n_tokens == 0:
                self._prefill, self._decode = Clock(), Clock()
                self._note = self._method_note = None
                with self._prefill.time(len(tokens)):
                    self._decode_now(tokens)
                self._read_pages(self._policy, self._budget, self.n_tokens)
            else:
                self._decode_now(tokens)
        except BaseException:
            self._requires_eval = True  # the last logits may be those of an earlier batch
            raise

    def _decode_now(self, tokens: Sequence[int]) -> None:
        if self._reads_pages and len(tokens) > 1 and len(tokens) % self.n_batch == 1:
            # the parent would decode the last one alone, as if it were a step that selects pages
            super().eval(tokens[:-2])
            tokens = tokens[-2:]
        super().eval(tokens)
        lib.llama_synchronize(self.ctx)

    def _is_prompt(self, n_new: int) -> bool:
        """Whether the cache is to be evicted once `n_new` more tokens are in it."""
        assert self._policy is not None
        n, w = self.n_tokens + n_new, self._policy.window
        if n <= w or self._budget.kept(n, w, self._bytes_per_token) + w >= n:
            return False
        return not _native.stats(self.ctx).evicted

    def _eval_prompt(self, policy: EvictionPolicy, tokens: Sequence[int]) -> None:
        w = policy.window
        again = w - len(tokens)
        if policy.all_queries and (again > 0 or _native.accumulated(self.ctx) != self.n_tokens):
            again = self.n_tokens  # some were decoded one at a time: all sums from the start
        if again > 0:  # what has to be observed reaches back into the cache: decode that part again
            if again < self.n_tokens and not self._can_cut(self.n_tokens - again):
                self._fall_back(f"the last {w} tokens cannot be observed again, the sliding window has passed them")
                self._decode_now(tokens)
                return
            start = self.n_tokens - again
            tokens = self.input_ids[start : self.n_tokens].tolist() + list(tokens)
            self.n_tokens = start
            self._ctx.kv_cache_seq_rm(-1, start, -1)
        n_prompt = self.n_tokens + len(tokens)
        self._check_budget(policy, n_prompt)
        with self._prefill.time(len(tokens)):
            _native.reserve(self.ctx, len(tokens))
            self._eval_prefix(tokens[:-w])
            self._observe(tokens[-w:])
            if policy.all_queries:
                _native.accumulate(self.ctx)
            self._evict(policy, n_prompt)

    def _check_budget(self, policy: EvictionPolicy, n_prompt: int) -> None:
        """The window stays, whatever the budget: say so once, and in the statistics, when that is more."""
        asked = self._budget.tokens(n_prompt, self._bytes_per_token)
        if asked >= policy.window or not policy.evicts:
            self._note = None
            return
        note = (
            f"budget {self._budget} is {asked} of {n_prompt} tokens, less than the window of {policy.window}: "
            "the window alone is kept"
        )
        if self._note is None:
            warnings.warn(f"{note}; raise budget or lower the policy's window", RuntimeWarning, stacklevel=2)
        self._note = note

    def _eval_prefix(self, tokens: Sequence[int]) -> None:
        """Decode what precedes the window in steps that make the scores the same, to the bit, for every n_batch and
        n_ubatch: CPU kernels round differently for different numbers of tokens, but alike for multiples of 64.
        """
        step = max(_STEP, min(self.n_batch, self.context_params.n_ubatch) // _STEP * _STEP)
        whole = len(tokens) // _STEP * _STEP
        for start in range(0, whole, step):
            self._eval_step(tokens[start : min(start + step, whole)])
        if whole < len(tokens):
            self._eval_step(tokens[whole:])

    def _eval_step(self, tokens: Sequence[int]) -> None:
        """One ubatch of a prompt; observed when the policy asks for the sums over all queries."""
        if self._policy is not None and self._policy.all_queries:
            self._observe(tokens)
            _native.accumulate(self.ctx)
        else:
            super().eval(tokens)

    def _observe(self, tokens: Sequence[int]) -> None:
        _native.observe(self.ctx, len(tokens))
        try:
            self._decode_now(tokens)
        finally:
            _native.observe(self.ctx, 0)

    def _evict(self, policy: EvictionPolicy, n_prompt: int) -> None:
        """Score the prompt of `n_prompt` tokens just observed, and keep what the budget allows."""
        k = self._budget.kept(n_prompt, policy.window, self._bytes_per_token)
        start = time.perf_counter()
        try:
            self._prompt = ObservedPrompt(self.ctx, n_prompt, policy.window, self.model_path, self._pieces)
            kept = policy.keep(self._prompt, k)
            self._plan_ms = 1000 * (time.perf_counter() - start - self._prompt.scoring_s)
            self._prompt.forget()
            if kept is not None:
                check_kept(policy, kept, self._n_heads * k)
                _native.set_kept(self.ctx, kept, self._store)
        except MemoryError as e:
            self._fall_back(str(e) or "no memory for the scores")
        else:
            self._fallback = None
            self._pass_on(self._prompt.note)

    def _pass_on(self, note: str | None) -> None:
        """What the method could not do: say so once, and in the statistics, unless the budget's own note does."""
        if note is not None and self._method_note is None and self._note is None:
            warnings.warn(note, RuntimeWarning, stacklevel=2)
        self._method_note = note

    def _read_pages(self, policy: EvictionPolicy | None, budget: Budget, n_prompt: int) -> None:
        """From now on decode steps read as `policy` says; None: everything that is kept."""
        how = None if policy is None else policy.page_reads()
        if how is None:
            if self._reads_pages:
                _native.set_pages(self.ctx, None)
            self._reads_pages = False
            return
        rows = (Budget.parse(how.read) if how.read else budget).tokens(n_prompt, self._bytes_per_token)
        params = _native.pages_params(max(1, rows))
        params.page_size, params.n_pages_min, params.n_layer_dense = how.page, how.min_pages, how.dense
        try:
            _native.set_pages(self.ctx, params)
            self._reads_pages = True
        except MemoryError as e:
            self._pass_on(f"decode steps read everything, there is no memory for the tables of pages: {e}")

    def _pieces(self) -> list[bytes]:
        """The text of each cached token."""
        return [token_bytes(self._model.vocab, int(t)) for t in self._input_ids]

    def _fall_back(self, why: str) -> None:
        """Go on with the full cache: say so once, and in the statistics."""
        if self._fallback is None:
            warnings.warn(f"prompt not evicted, the full cache stays in use: {why}", RuntimeWarning, stacklevel=2)
        self._fallback = why

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """As in the parent. A prefix in the cache is reused only as far as the evicted cache still supports it."""
        tokens = list(tokens)
        reset = kwargs.get("reset", args[6] if len(args) > 6 else True)
        if not tokens and (reset or self.n_tokens == 0):
            raise ValueError("the prompt is empty, expected at least one token")
        if self._policy is not None and reset:
            self._drop_lost_prefix(tokens)
        yield from super().generate(tokens, *args, **kwargs)

    def _drop_lost_prefix(self, tokens: Sequence[int]) -> None:
        """Reset when the parent would cut the cache at a place where entries that it needs are gone."""
        n_same = llama_cpp.Llama.longest_token_prefix(self._input_ids.tolist(), tokens)
        if n_same == self.n_tokens == len(tokens) and not self._requires_eval:
            return  # the parent samples from the logits it has
        cut = n_same - 1 if n_same == len(tokens) else n_same
        if cut > 0 and not self._can_cut(cut):
            if self.verbose:
                print(
                    f"laprox: the prompt leaves the cached one at token {n_same}, where entries that it needs are "
                    "evicted: re-evaluating all of it",
                    file=sys.stderr,
                )
            self.reset()

    def _can_cut(self, p0: int) -> bool:
        """Whether decoding can go on at position `p0` after the cache is cut there."""
        stats = _native.stats(self.ctx)
        if stats.evicted and p0 < stats.n_prompt - stats.n_window:
            return False
        # a sliding-window layer holds only its last positions: the window of p0 must still be there
        oldest = lib.llama_memory_seq_pos_min(self._ctx.memory, 0)
        n_swa = lib.llama_model_n_swa(self.model)
        return bool(n_swa == 0 or oldest <= max(0, p0 - n_swa + 1))

    # ---- what was kept

    def kv_stats(self) -> KVStats:
        """Policy, kept rows, bytes and times of the KV cache; see `KVStats` for units. Works with eviction off, too."""
        if self._policy is None:
            return KVStats(n_tokens=self._n_cached())
        s = _native.stats(self.ctx)
        kept, reserve = np.zeros((0, 0), np.int32), 0
        if s.evicted:
            kept = self._kept_per_head(s.n_window)
            rows_now = s.rows_kept + s.n_appended * self._n_heads
            reserve = max(0, s.bytes_now - s.bytes_other - rows_now * self._bytes_per_token // self._n_heads)
        return KVStats(
            policy=str(self._policy),
            budget=str(self._budget),
            evicted=s.evicted,
            n_tokens=self._n_cached(),
            n_prompt=s.n_prompt,
            n_window=s.n_window,
            rows_full=s.rows_full,
            rows_kept=s.rows_kept,
            layers=tuple(il for il, _ in self._layers),
            n_layers_untouched=lib.llama_model_n_layer(self.model) - len(self._layers),
            kept_per_head=kept,
            bytes_full=s.bytes_full,
            bytes_peak=s.bytes_peak,
            bytes_now=s.bytes_now,
            bytes_other=s.bytes_other,
            bytes_reserve=reserve,
            bytes_pages=s.bytes_pages,
            rows_read=s.rows_read,
            rows_dense=s.rows_dense,
            n_grown=s.n_grown,
            devices=tuple(dict.fromkeys(_native.devices(self.ctx))),
            score_path=self._path(s.n_layer_composed, "composed", "fused") if self._scored() else "",
            attention_path=self._path(s.n_layer_ragged_op, "ragged_op", "per_head"),
            gram_ms=s.t_gram_ms,
            score_ms=0.0 if self._prompt is None else self._prompt.score_ms,
            plan_ms=self._plan_ms,
            all_queries_ms=s.t_total_ms,
            commit_ms=s.t_commit_ms,
            prefill_tps=self._prefill.rate(),
            decode_tps=self._decode.rate(),
            note=self._note or self._method_note,
            fallback=self._fallback,
        )

    def _scored(self) -> bool:
        return self._prompt is not None and self._prompt.raw is not None

    def _path(self, n: int, name: str, usual: str) -> str:
        """How the layers are computed when `n` of them go the way of `name`."""
        return usual if n == 0 else name if n == len(self._layers) else "mixed"

    def kv_kept(self) -> dict[tuple[int, int], npt.NDArray[np.int32]]:
        """Positions held, ascending, for each (model layer, KV head) that can be evicted; window and later tokens too.

        Raises StateError when eviction is off.
        """
        self._need_eviction("kv_kept")
        s, n = _native.stats(self.ctx), self._n_cached()
        if not s.evicted:
            return {key: np.arange(n, dtype=np.int32) for key in self._heads()}
        tail = np.arange(s.n_prompt - s.n_window, n, dtype=np.int32)
        return {key: np.concatenate([pos, tail]) for key, pos in zip(self._heads(), _native.kept(self.ctx))}

    def kv_scores(self) -> dict[int, npt.NDArray[np.float32]]:
        """Scores of the last eviction before pooling, {model layer: [n_head_kv, n_cand]}, n_cand = N - w.

        Raises StateError when eviction is off, nothing has been evicted since the cache was cleared, or the method
        chooses without scores.
        """
        self._need_eviction("kv_scores")
        if not _native.stats(self.ctx).evicted or self._prompt is None:
            raise StateError("no prompt has been evicted since the cache was cleared, so there are no scores to show")
        if self._prompt.raw is None:
            raise StateError(f"{self._policy} chooses without scores")
        ends = np.cumsum([n for _, n in self._layers])[:-1]
        return {il: s for (il, _), s in zip(self._layers, np.split(self._prompt.raw, ends))}

    def _need_eviction(self, what: str) -> None:
        if self._policy is None:
            raise StateError(f"{what} needs eviction: create the Llama with kv_evict='laprox'")

    def _heads(self) -> list[tuple[int, int]]:
        return [(il, h) for il, n in self._layers for h in range(n)]

    def _kept_per_head(self, window: int) -> npt.NDArray[np.int32]:
        out = np.full((len(self._layers), max(n for _, n in self._layers)), -1, np.int32)
        row = {il: i for i, (il, _) in enumerate(self._layers)}
        for (il, h), pos in zip(self._heads(), _native.kept(self.ctx)):
            out[row[il], h] = len(pos) + window
        return out

    def _n_cached(self) -> int:
        return int(lib.llama_memory_seq_pos_max(self._ctx.memory, 0)) + 1

    # ---- what an evicted cache cannot do yet, and the end

    def save_state(self) -> Any:
        """As in the parent; NotImplementedError with eviction on."""
        self._refuse_state("save_state")
        return super().save_state()

    def load_state(self, state: Any) -> None:
        """As in the parent; NotImplementedError with eviction on."""
        self._refuse_state("load_state")
        super().load_state(state)

    def set_cache(self, cache: Any) -> None:
        """As in the parent; NotImplementedError with eviction on, unless `cache` is None."""
        if cache is not None:
            self._refuse_state("set_cache")
        super().set_cache(cache)

    def _refuse_state(self, what: str) -> None:
        if self._policy is not None:
            raise NotImplementedError(
                f"{what} does not work with an evicted cache yet; create the Llama with kv_evict=None to use it"
            )

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "kv_evict": self._policy, "budget": None if self._policy is None else self._budget}

    def close(self) -> None:
        """Free the model and its cache. Using the object afterwards raises ValueError."""
        if not hasattr(self, "_stack"):  # __init__ raised early
            return
        super().close()
        self._ctx = self._model = self._batch = self.tokenizer_ = Closed(self.model_path)


def _known(kwargs: dict[str, Any]) -> None:
    """Raise TypeError for a name that the parent would swallow: a typo in `budget` must not pass."""
    names = [*inspect.signature(llama_cpp.Llama.__init__).parameters, "kv_evict", "budget"]
    for name in kwargs:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            raise TypeError(f"unknown argument {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))


def check_kept(policy: EvictionPolicy, kept: Sequence[Any], n_keep: int) -> None:
    """Raise ArgumentError when a method did not keep what it was told to."""
    total = sum(len(positions) for positions in kept)
    if total != n_keep:
        raise ArgumentError(f"the method {policy.name!r} kept {total} candidates, expected exactly {n_keep}")


def token_bytes(vocab: Any, token: int) -> bytes:
    """Text of a token, special ones too; `token_to_piece` of llama_cpp gives 32 bytes, whatever the length."""
    size = -int(lib.llama_token_to_piece(vocab, token, None, 0, 0, True))
    buffer = ctypes.create_string_buffer(max(size, 1))
    lib.llama_token_to_piece(vocab, token, buffer, size, 0, True)
    return buffer.raw[:size]


def _refuse(kwargs: dict[str, Any]) -> None:
    """What cannot be combined with eviction, before a model is loaded for nothing."""
    if kwargs.get("embedding"):
        raise UnsupportedError("kv_evict does not work with embedding=True: an embedding model keeps no cache to evict")
    if kwargs.get("draft_model") is not None:
        raise UnsupportedError("kv_evict does not work with draft_model yet: drafts are cut back one by one, unscored")
    if kwargs.get("lora_path") is not None:
        raise UnsupportedError("kv_evict does not work with lora_path yet: the score does not see the adapter's W_O")
    if kwargs.get("vocab_only"):
        raise UnsupportedError("kv_evict does not work with vocab_only=True: there is no cache to evict")
    for name in ("type_k", "type_v"):
        if kwargs[name] is not None and kwargs[name] not in NAMES.values():
            raise UnsupportedError(
                f"{name}={kwargs[name]} does not work with kv_evict, expected one of {', '.join(NAMES)}"
            )
