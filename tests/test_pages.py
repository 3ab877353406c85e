"""Page selection at decode time, against the definition in float64 on a real model's own q, K, V and mask.

The definition (Quest, arXiv 2406.10774): a page is 16 rows of one KV head, its score for a query is
sum_c max(q_c*min_c, q_c*max_c) over its keys, and a query attends to the best pages, the newest always among them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lowlevel import Context, W, golden
from tensors import F64, Tensor, read

from laprox_llamacpp import ArgumentError, StateError, _native, models

import llama_cpp as lib  # isort: skip

PAGE, DENSE = 16, 2  # defaults
N = 137  # not a multiple of a page
N_ROWS = 4 * PAGE
BUDGET = 0.7
TYPES = ["f16", "q8_0", pytest.param("q4_0", marks=pytest.mark.slow), pytest.param("f32", marks=pytest.mark.slow),
         pytest.param("bf16", marks=pytest.mark.slow)]  # fmt: skip
slow = pytest.mark.slow
IDS = golden("smollm2-135m")["ids"]
TOLERANCE = 2e-5  # of the largest value of a head's output: sums of F32 products against float64


class Step:
    """What the op of one layer read and wrote. `q` [H, d], `k`, `v` lists of [n_rows, d], `visible` of [n_rows]."""

    def __init__(self, address: int, page: int, scaled: bool) -> None:
        t = Tensor.from_address(address)
        self.q, self.k_all, self.v_all, mask = (read(t.src[i]) for i in range(4))
        self.q, self.mask, self.out = self.q[0], mask[0, 0], read(address)[0]
        self.address = {"k": t.src[1], "v": t.src[2]}
        self.page = page
        self.scale = 1.0 if scaled else 1 / np.sqrt(self.q.shape[1])

    def split(self, kept: Sequence[int] | None, kept_max: int, n_head_kv: int) -> None:
        """Rows of each KV head, from the documented layouts: cells, or head after head kept rows, tail and room."""
        if kept is None:
            self.offsets = [(h, 0) for h in range(n_head_kv)]
            self.n_rows = [self.k_all.shape[1]] * n_head_kv
        else:
            room = (self.k_all.shape[1] - sum(kept)) // n_head_kv
            self.offsets = [(0, sum(kept[:h]) + h * room) for h in range(n_head_kv)]
            self.n_rows = [n + len(self.mask) - kept_max for n in kept]
        self.k, self.v, self.visible = [], [], []
        for (head, row0), n in zip(self.offsets, self.n_rows):
            self.k.append(self.k_all[head, row0 : row0 + n])
            self.v.append(self.v_all[head, row0 : row0 + n])
            self.visible.append(self.mask[len(self.mask) - n :] == 0)

    def rows(self, h: int, page: int) -> list[int]:
        """Rows of a page that the token sees."""
        last = min((page + 1) * self.page, self.n_rows[h])
        return [r for r in range(page * self.page, last) if self.visible[h][r]]


class Probe:
    """A context whose next decodes are recorded, layer by layer."""

    def __init__(
        self, path: Path, evicted: bool, n_rows: int | None = N_ROWS, page: int = PAGE, **options: Any
    ) -> None:
        self.steps: dict[int, Step] = {}
        self.dense: dict[int, F64] = {}

        @lib.ggml_backend_sched_eval_callback
        def callback(address: int, ask: bool, user_data: Any) -> bool:
            t = Tensor.from_address(address)
            name, _, il = t.name.decode().partition("-")
            if name == "laprox_pages":
                if not ask:
                    self.steps[int(il)] = Step(address, page, "gemma" in path.name)  # its queries are scaled before
            elif name == "kqv_out":
                if not ask and t.ne[1] == 1:
                    self.dense[int(il)] = read(address)[0, 0]
            else:
                return not ask
            return True

        self.callback = callback  # lives as long as the context
        self.ctx = Context(path, cb_eval=callback, **options)
        self.ctx.prefill(IDS[:N] % self.ctx.n_vocab)
        self.kept = self.ctx.evict(BUDGET) if evicted else None
        self.layers = _native.layers(self.ctx.ptr)
        if n_rows is not None:
            params = _native.pages_params(n_rows)
            params.page_size = page
            _native.set_pages(self.ctx.ptr, params)

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: Any) -> None:
        self.ctx.close()

    def decode(self, token: int) -> Any:
        self.steps.clear()
        self.dense.clear()
        logits = self.ctx.decode([token])
        first = 0
        for il, n_head_kv in self.layers:
            if il in self.steps:
                sizes = None if self.kept is None else [len(k) for k in self.kept[first : first + n_head_kv]]
                self.steps[il].split(sizes, 0 if self.kept is None else max(map(len, self.kept)), n_head_kv)
            first += n_head_kv
        return logits


def pages_of(step: Step, h: int, q: F64, newest: int, n_rows: int) -> tuple[list[int], list[int]]:
    """The pages of one query, best first, and those it does without, best first."""
    score = {}
    for page in range(-(-step.n_rows[h] // step.page)):
        rows = step.rows(h, page)
        if rows:
            keys = step.k[h][rows]
            score[page] = np.inf if newest in rows else np.maximum(q * keys.min(0), q * keys.max(0)).sum()
    order = sorted(score, key=lambda page: (-score[page], page))
    n = max(3, n_rows // step.page)
    return order[:n], order[n:]


def attend(step: Step, h: int, q: F64, pages: Sequence[int]) -> F64:
    rows = [r for page in pages for r in step.rows(h, page)]
    logits = step.k[h][rows] @ q * step.scale
    weights = np.exp(logits - logits.max())
    return weights / weights.sum() @ step.v[h][rows]


def newest_of(step: Step, h: int) -> int:
    return int(np.flatnonzero(step.visible[h])[-1])


def check(probe: Probe, n_rows: int = N_ROWS, newest: int | None = None) -> None:
    """Output of every layer and the counters of the last step are those of the definition."""
    read_rows = seen_rows = 0
    told_apart, n_chose = 0, 0
    worst = 0.0
    for il, n_head_kv in probe.layers:
        if il < DENSE:
            assert il not in probe.steps
            continue
        step = probe.steps[il]
        group = len(step.q) // n_head_kv
        for h in range(n_head_kv):
            new = newest_of(step, h) if newest is None else newest
            union: set[int] = set()
            for g in range(group):
                q = step.q[h * group + g]
                chosen, others = pages_of(step, h, q, new, n_rows)
                union |= set(chosen)
                want, got = attend(step, h, q, chosen), step.out[h * group + g]
                error = np.abs(got - want).max() / np.abs(want).max()
                worst = max(worst, error)
                if others:
                    swapped = attend(step, h, q, [*chosen[:-1], others[0]])
                    n_chose += 1
                    told_apart += np.abs(swapped - want).max() > 5 * TOLERANCE * np.abs(want).max()
            read_rows += sum(len(step.rows(h, page)) for page in union)
            seen_rows += int(step.visible[h].sum())
    some = next(iter(probe.steps.values()))
    tail = int(some.visible[0].sum()) - (0 if probe.kept is None else len(probe.kept[first_head(probe)]))
    first = 0
    for il, n_head_kv in probe.layers:
        if il < DENSE:
            n = n_head_kv * tail
            n += 0 if probe.kept is None else sum(map(len, probe.kept[first : first + n_head_kv]))
            read_rows, seen_rows = read_rows + n, seen_rows + n
        first += n_head_kv
    stats = probe.ctx.stats()
    print(f"worst {worst:.1e}, {told_apart} of {n_chose} told apart, rows {stats.rows_read} of {stats.rows_dense}")
    assert worst <= TOLERANCE
    assert stats.rows_read == read_rows and stats.rows_dense == seen_rows
    assert told_apart >= 0.85 * n_chose  # another choice would have been noticed


def first_head(probe: Probe) -> int:
    """Number of the first KV head whose layer selects pages, over all layers."""
    return sum(n for il, n in probe.layers if il < DENSE)


@pytest.fixture(params=["smollm2-135m", pytest.param("qwen2.5-coder-0.5b", marks=slow),
                        pytest.param("gemma-3-270m", marks=slow)])  # fmt: skip
def path(request: Any) -> Path:
    return models.fetch(request.param)


@pytest.fixture(params=[False, True], ids=["full", "evicted"])
def evicted(request: Any) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("type_kv", TYPES)
def test_steps_are_the_definition(path: Path, type_kv: str, evicted: bool) -> None:
    """Also after tokens were removed, and others took their rows."""
    with Probe(path, evicted, type_k=type_kv) as probe:
        for token in (5, 6, 7):
            probe.decode(token)
            check(probe)
        stats = probe.ctx.stats()
        assert stats.rows_read < 0.85 * stats.rows_dense and stats.bytes_pages > 0
        assert probe.ctx.cut(N - 30)  # into the window, which is whole in every head
        probe.ctx.decode(IDS[400:436] % probe.ctx.n_vocab)  # more than one token: dense, pages learn of them later
        probe.decode(13)
        check(probe)
        probe.ctx.clear()
        probe.kept = None
        probe.ctx.decode(IDS[300 : 300 + N - 30] % probe.ctx.n_vocab)
        probe.decode(14)
        check(probe)


@pytest.mark.parametrize(("page", "n_rows"), [(16, 1), (16, 63), (16, 79), (1, 50), (5, 59)])
def test_number_and_size_of_pages(smol_path: Path, page: int, n_rows: int) -> None:
    """At least 3, and rounded down."""
    with Probe(smol_path, False, n_rows, page) as probe:
        probe.decode(5)
        check(probe, n_rows)


def test_a_full_cache_grows_under_pages(smol_path: Path) -> None:
    """Its buffers and what a graph reads of them, at 256 rows."""
    with Probe(smol_path, False) as probe:
        probe.decode(5)
        probe.ctx.decode(IDS[N : N + 116])
        for _ in range(4):
            probe.decode(6)
        assert probe.ctx.pos == 258 and len(probe.steps[DENSE].mask) == 512
        check(probe)


def test_holes_are_filled_and_the_newest_row_is_not_the_last(smol_path: Path) -> None:
    with Probe(smol_path, False) as probe:
        probe.decode(5)
        assert lib.llama_memory_seq_rm(probe.ctx.memory, 0, 40, 43)
        for cell in (40, 41, 42):
            before = next(iter(probe.steps.values())).visible[0]
            probe.decode(6)
            after = next(iter(probe.steps.values())).visible[0]
            assert (
                after[cell]
                and not after[cell + 1 : 43].any()
                and before.sum() + (-2 if cell == 40 else 1) == after.sum()
            )
            check(probe, newest=cell)


def test_a_hole_in_the_tail(smol_path: Path) -> None:
    """Up to the end of a page in some heads: the bounds of what is left of it are narrower."""
    with Probe(smol_path, True) as probe:
        probe.decode(5)
        assert lib.llama_memory_seq_rm(probe.ctx.memory, 0, N - 30, N - 14)
        probe.decode(6)
        n_kept = len(probe.kept[first_head(probe)])
        assert list(probe.steps[DENSE].visible[0][n_kept : n_kept + 19]) == [True] * 2 + [False] * 16 + [True]
        check(probe)


def test_an_evicted_cache_grows_under_pages(path: Path) -> None:
    with Probe(path, True, n_reserve=20) as probe:
        probe.decode(5)
        for _ in range(2):
            probe.ctx.decode(IDS[:25] % probe.ctx.n_vocab)
            probe.decode(6)
            check(probe)
        assert probe.ctx.stats().n_grown >= 2


def test_eviction_with_pages_on(smol_path: Path) -> None:
    """The rows move, and the pages with them."""
    with Probe(smol_path, False) as probe:
        probe.decode(5)
        bytes_full = probe.ctx.stats().bytes_pages
        probe.ctx.clear()
        probe.ctx.prefill(IDS[:N])
        probe.ctx.decode([5])
        assert probe.ctx.cut(N)
        probe.kept = probe.ctx.evict(0.3)
        probe.decode(5)
        check(probe)
        assert probe.ctx.stats().bytes_pages != bytes_full


# ---- all pages: the dense decode


@pytest.mark.parametrize("type_kv", ["f16", "q8_0"])
def test_all_pages_are_the_dense_layer(smol_path: Path, type_kv: str, evicted: bool) -> None:
    """In the first layer that selects, whose input is the same to the bit. The op is exact to 2e-5; flash attention
    rounds its queries to the type that K is multiplied in and sums F16 values in F16: hence the limit.
    """
    with Probe(smol_path, evicted, None, type_k=type_kv) as probe:
        probe.decode(5)
        dense = dict(probe.dense)
        assert probe.ctx.cut(N)
        _native.set_pages(probe.ctx.ptr, _native.pages_params(10**6))
        probe.decode(5)
        check(probe, 10**6)
        stats = probe.ctx.stats()
        assert stats.rows_read == stats.rows_dense > 0
        for il in range(DENSE):
            assert np.array_equal(probe.dense[il], dense[il])
        error = np.abs(probe.dense[DENSE] - dense[DENSE]).max() / np.abs(dense[DENSE]).max()
        print(f"{type_kv}: {error:.1e}")
        assert 0 < error <= 1e-2


def test_all_pages_are_the_dense_decode(smol_path: Path, evicted: bool) -> None:
    """Logits of 4 tokens, relative. The difference that a layer makes goes through activations that are quantised to 8
    bits in every layer after it, so it is small when the last layer alone selects, and some percent when all do.
    """
    logits = {}
    for name, n_rows, n_layer_dense in (("dense", 1, 30), ("last", 10**6, 29), ("all", 10**6, 2), ("few", N_ROWS, 2)):
        with Context(smol_path) as ctx:
            ctx.prefill(IDS[:N])
            if evicted:
                ctx.evict(BUDGET)
            params = _native.pages_params(n_rows)
            params.n_layer_dense = n_layer_dense
            _native.set_pages(ctx.ptr, params)
            logits[name] = np.array([ctx.decode([t]) for t in range(5, 9)])
    error = {name: np.linalg.norm(x - logits["dense"]) / np.linalg.norm(logits["dense"]) for name, x in logits.items()}
    print(error)
    assert 0 < error["last"] <= 1e-2
    assert 0 < error["all"] <= 5e-2
    assert error["few"] > 2 * error["all"]


def test_off_is_the_dense_decode_to_the_bit(smol_path: Path, evicted: bool) -> None:
    with Probe(smol_path, evicted, None) as probe:
        dense = probe.decode(5)
        assert probe.ctx.cut(N)
        _native.set_pages(probe.ctx.ptr, _native.pages_params(N_ROWS))
        assert not np.array_equal(probe.decode(5), dense)
        assert probe.ctx.cut(N)
        _native.set_pages(probe.ctx.ptr, None)
        assert np.array_equal(probe.decode(5), dense)
        stats = probe.ctx.stats()
        assert (stats.rows_read, stats.rows_dense, stats.bytes_pages) == (0, 0, 0)


def test_more_tokens_and_the_window_stay_dense(smol_path: Path) -> None:
    logits = []
    for pages in (False, True):
        with Context(smol_path) as ctx:
            if pages:
                _native.set_pages(ctx.ptr, _native.pages_params(N_ROWS))
            logits.append([ctx.prefill(IDS[:N]), ctx.prefill(IDS[N : N + W + 1], 1)])
    assert np.array_equal(logits[0], logits[1])


# ---- only what is chosen is read


def overwrite(step: Step, h: int, page: int) -> None:
    """Large finite garbage in K and V of one page."""
    for address in step.address.values():
        t = Tensor.from_address(address)
        head, row0 = step.offsets[h]
        for row in step.rows(h, page):
            data = (ctypes.c_uint16 * t.ne[0]).from_address(t.data + head * t.nb[2] + (row0 + row) * t.nb[1])
            data[:] = [int(np.float16(3e4).view(np.uint16))] * t.ne[0]


def test_only_chosen_pages_are_read(smol_path: Path, evicted: bool) -> None:
    """Every page that no query head of its group chose is overwritten once its bounds are known: the same token gives
    the same logits to the bit. One chosen page overwritten changes them.
    """
    with Probe(smol_path, evicted) as probe:
        logits = probe.decode(5)
        n, some = 0, None
        for il, n_head_kv in probe.layers[DENSE:]:
            step = probe.steps[il]
            group = len(step.q) // n_head_kv
            for h in range(n_head_kv):
                choices = [
                    pages_of(step, h, q, newest_of(step, h), N_ROWS) for q in step.q[h * group : (h + 1) * group]
                ]
                for page in set(choices[0][1]).intersection(*(others for _, others in choices)):
                    overwrite(step, h, page)
                    n += 1
                some = (step, h, choices[0][0][1])
        print(f"{n} pages overwritten")
        assert n > 100 and some is not None
        assert probe.ctx.cut(N)
        assert np.array_equal(probe.decode(5), logits)
        overwrite(*some)
        assert probe.ctx.cut(N)
        assert not np.array_equal(probe.decode(5), logits)


def test_threads_do_not_matter(smol_path: Path) -> None:
    logits = []
    for n_threads in (1, 2):
        with Context(smol_path, n_threads=n_threads) as ctx:
            ctx.prefill(IDS[:N])
            _native.set_pages(ctx.ptr, _native.pages_params(N_ROWS))
            logits.append([ctx.decode([5]), ctx.decode([6])])
    assert np.array_equal(logits[0], logits[1])


# ---- refused


BAD = [("page_size", 0, "page_size is 0, expected 1 to 1024 rows"), ("page_size", 1025, "page_size is 1025"),
       ("n_pages_min", 0, "n_pages_min is 0"), ("n_rows", 0, "n_rows is 0"), ("struct_size", 0, "struct_size is 0"),
       ("struct_size", 1 << 20, "struct_size is 1048576")]  # fmt: skip


def test_bad_parameters_change_nothing(smol_path: Path) -> None:
    with Context(smol_path) as ctx:
        ctx.prefill(IDS[:N])
        _native.set_pages(ctx.ptr, _native.pages_params(N_ROWS))
        logits = ctx.decode([5])
        for field, value, text in BAD:
            params = _native.pages_params(N_ROWS)
            setattr(params, field, value)
            with pytest.raises(ArgumentError, match=text) as info:
                _native.set_pages(ctx.ptr, params)
            assert "\n" not in str(info.value)
        assert ctx.cut(N)
        assert np.array_equal(ctx.decode([5]), logits)


def test_extreme_parameters(smol_path: Path) -> None:
    """Pages of one row and of 1024, all layers dense, and numbers as large as they get."""
    most = 2**32 - 1
    with Context(smol_path) as ctx:
        ctx.prefill(IDS[:N])
        dense = ctx.decode([5])
        for fields in ({"page_size": 1}, {"page_size": 1024}, {"n_pages_min": most, "n_rows": most},
                       {"n_layer_dense": most}, {"n_layer_dense": 0}):  # fmt: skip
            params = _native.pages_params(N_ROWS)
            for name, value in fields.items():
                setattr(params, name, value)
            _native.set_pages(ctx.ptr, params)
            assert ctx.cut(N)
            assert np.isfinite(ctx.decode([5])).all()
            stats = ctx.stats()
            assert 0 < stats.rows_read <= stats.rows_dense == 90 * (N + 1)
            if "n_layer_dense" in fields:
                assert (stats.rows_read == stats.rows_dense) == (fields["n_layer_dense"] == most)
        assert ctx.cut(N)
        _native.set_pages(ctx.ptr, None)
        assert np.array_equal(ctx.decode([5]), dense)


def test_not_with_the_mask_store(smol_path: Path) -> None:
    with Context(smol_path) as ctx:
        ctx.prefill(IDS[:N])
        _native.set_pages(ctx.ptr, _native.pages_params(N_ROWS))
        with pytest.raises(StateError, match="laprox_set_pages"):
            ctx.evict(0.5, store=_native.STORE_MASK)
        _native.set_pages(ctx.ptr, None)
        ctx.evict(0.5, store=_native.STORE_MASK)
        with pytest.raises(StateError, match="mask store"):
            _native.set_pages(ctx.ptr, _native.pages_params(N_ROWS))
        assert np.isfinite(ctx.decode([5])).all()


def test_not_without_eviction(smol_path: Path) -> None:
    with Context(smol_path, evict=False) as ctx, pytest.raises(StateError, match="eviction is off"):
        _native.set_pages(ctx.ptr, _native.pages_params(N_ROWS))
