"""`Llama` on a real model: what is kept, the next prompt, sampling options, life cycle.

Prompts are a few hundred tokens, so that the file stays fast; a "decode" below is one call of llama_decode.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from laprox_llamacpp import AllocError, Llama, StateError, _native, haystack, models

import llama_cpp  # isort: skip

N = 200
W = 32
BUDGET = 0.3
# one thread: two that share a busy core spend their time waiting for each other
COMMON: dict[str, Any] = {"n_ctx": 1024, "verbose": False, "seed": 7, "n_threads": 1, "n_threads_batch": 1}


@pytest.fixture(scope="module")
def path() -> str:
    return str(models.fetch("smollm2-135m"))


def make(path: str, **kwargs: Any) -> Llama:
    options = {"kv_evict": "laprox", "budget": BUDGET, **COMMON, **kwargs}
    return Llama(path, **options)


@pytest.fixture(scope="module")
def shared(path: str) -> Iterator[Llama]:
    llm = make(path)
    yield llm
    llm.close()


@pytest.fixture
def llm(shared: Llama) -> Llama:
    """One model for the file; each test starts from a cleared cache."""
    shared.reset()
    shared._ctx.kv_cache_clear()
    return shared


@pytest.fixture(scope="module")
def tokens(shared: Llama) -> list[int]:
    """N tokens of prose."""
    text = haystack.hide([], N + 20, lambda s: len(shared.tokenize(s.encode(), add_bos=False)), seed=3, depths=[])
    return shared.tokenize(text.encode())[:N]


@pytest.fixture
def decodes(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each decode from here on."""
    sizes: list[int] = []
    decode = llm._ctx.decode

    def counted(batch: Any) -> None:
        sizes.append(batch.n_tokens())
        decode(batch)

    monkeypatch.setattr(llm._ctx, "decode", counted)
    return sizes


def greedy(llm: Llama, tokens: list[int], n: int = 6) -> list[int]:
    return list(islice(llm.generate(tokens, temp=0.0), n))


def replay(llm: Llama, tokens: list[int], sizes: list[int]) -> None:
    """Decode in the same steps: kernels round differently for other numbers of tokens."""
    for size in sizes:
        llm.eval(tokens[llm.n_tokens :][:size])


def logits(llm: Llama) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy()


def kept_total(k: int) -> int:
    return 30 * 3 * (k + W)  # SmolLM2-135M: 30 layers of 3 KV heads


# ---- what is kept


@pytest.mark.parametrize(
    ("budget", "k"),
    [(0.3, 60 - W), ("20%", 40 - W), (0.05, 0), (100, 100 - W), (f"{90 * 256 * 70}B", 70 - W)],
)
def test_kept_total_is_exact(path: str, tokens: list[int], budget: Any, k: int) -> None:
    llm = make(path, budget=budget)
    llm.eval(tokens)
    stats = llm.kv_stats()
    assert (stats.evicted, stats.n_prompt, stats.n_window) == (True, N, W)
    assert stats.rows_full == 90 * N and stats.rows_kept == kept_total(k)
    assert stats.kept_per_head.shape == (30, 3) and stats.kept_per_head.sum() == stats.rows_kept
    assert sum(len(pos) for pos in llm.kv_kept().values()) == stats.rows_kept
    assert stats.bytes_full == 90 * N * 256  # 64 f16 each of K and V
    assert stats.bytes_now - stats.bytes_reserve == stats.rows_kept * 256
    llm.close()


def test_positions_are_ascending_with_sinks_window_and_new_tokens(llm: Llama, tokens: list[int]) -> None:
    new = greedy(llm, tokens, 4)  # the last of them is sampled, not decoded
    kept = llm.kv_kept()
    assert set(kept) == {(il, h) for il in range(30) for h in range(3)}
    for pos in kept.values():
        assert pos.dtype == np.int32 and (np.diff(pos) > 0).all()
        assert set(range(4)) <= set(pos.tolist())
        assert pos[-W - len(new) + 1 :].tolist() == list(range(N - W, N + len(new) - 1))
    assert llm.kv_stats().n_tokens == N + 3


def test_kept_are_the_best_of_the_scores_without_pool_and_normaliser(path: str, tokens: list[int]) -> None:
    llm = make(path, kv_evict="laprox:pool=none:normalize=none:protect_sinks=0")
    llm.eval(tokens)
    scores = np.concatenate([llm.kv_scores()[il] for il in range(30)])
    assert scores.shape == (90, N - W) and scores.dtype == np.float32 and (scores >= 0).all()
    order = np.argsort(-scores.ravel(), kind="stable")[: 90 * (60 - W)]
    expected = np.zeros(scores.size, bool)
    expected[order] = True
    got = np.zeros_like(scores, bool)
    for row, pos in zip(got, llm.kv_kept().values()):
        row[pos[pos < N - W]] = True
    assert (got.ravel() == expected).all()
    llm.close()


def test_evicting_changes_the_next_logits_but_not_the_prompts_own(
    path: str, llm: Llama, tokens: list[int], decodes: list[int]
) -> None:
    full = make(path, kv_evict=None, budget=None, flash_attn=True)
    llm.eval(tokens)
    assert decodes[-1] == W and sum(decodes) == N
    replay(full, tokens, decodes)
    assert np.array_equal(logits(llm), logits(full))  # from the prefill, before anything was evicted
    full.eval([5])
    llm.eval([5])
    assert not np.array_equal(logits(llm), logits(full))
    full.close()


@pytest.mark.parametrize(("budget", "n"), [(1.0, N), (4096, N), ("1GiB", N), (0.05, W), (0.05, 7), (0.05, 1)])
def test_nothing_to_evict_is_bit_identical_to_the_parent(path: str, tokens: list[int], budget: Any, n: int) -> None:
    parent = llama_cpp.Llama(path, flash_attn=True, **COMMON)
    llm = make(path, budget=budget)
    for x in (parent, llm):
        x.eval(tokens[:n])
    assert np.array_equal(logits(llm), logits(parent))
    for x in (parent, llm):
        x.eval([11])
    assert np.array_equal(logits(llm), logits(parent))
    stats = llm.kv_stats()
    assert not stats.evicted and stats.n_tokens == n + 1
    assert all(len(pos) == n + 1 for pos in llm.kv_kept().values())
    llm.close()


def test_off_is_the_parent(path: str, tokens: list[int]) -> None:
    parent = llama_cpp.Llama(path, **COMMON)
    llm = make(path, kv_evict=None, budget=None)
    assert greedy(llm, tokens) == list(islice(parent.generate(tokens, temp=0.0), 6))
    assert "off" in repr(llm.kv_stats()) and llm.kv_stats().n_tokens == N + 5
    state = llm.save_state()
    llm.load_state(state)
    for what in (llm.kv_kept, llm.kv_scores):
        with pytest.raises(StateError, match="kv_evict"):
            what()
    llm.close()


def test_the_window_reaches_back_into_a_cache_that_outgrows_its_budget(path: str, tokens: list[int]) -> None:
    llm = make(path, budget=N - 3)
    llm.eval(tokens[: N - 5])
    assert not llm.kv_stats().evicted
    llm.eval(tokens[N - 5 :])
    assert llm.kv_stats().rows_kept == 90 * (N - 3) and llm.n_tokens == N
    assert llm.input_ids[:N].tolist() == tokens
    once = make(path, budget=N - 3)
    once.eval(tokens)
    a = {(k, p) for k, pos in llm.kv_kept().items() for p in pos.tolist()}
    b = {(k, p) for k, pos in once.kv_kept().items() for p in pos.tolist()}
    evicted = {(k, p) for k in llm.kv_kept() for p in range(N)}
    assert len((evicted - a) & (evicted - b)) >= 0.9 * len(evicted - a)
    llm.close()
    once.close()


def test_small_batches_are_raised(path: str, capfd: pytest.CaptureFixture[str], tokens: list[int]) -> None:
    llm = make(path, n_batch=8, n_ubatch=8, verbose=True)
    err = capfd.readouterr().err
    assert all(name in err for name in ("flash_attn=True", "n_batch=", "n_ubatch=", "swa_full=False"))
    llm.eval(tokens)
    assert llm.kv_stats().rows_kept == kept_total(60 - W)
    llm.close()


# ---- the next prompt


def test_second_turn_is_appended(llm: Llama, tokens: list[int], decodes: list[int]) -> None:
    first = greedy(llm, tokens, 5)
    kept = {key: pos[pos < N - W] for key, pos in llm.kv_kept().items()}
    decodes.clear()
    greedy(llm, [*tokens, *first, *tokens[50:90]], 3)
    assert decodes == [41, 1, 1]  # the fifth token had not been decoded
    stats = llm.kv_stats()
    assert stats.evicted and stats.n_prompt == N and stats.n_tokens == N + 47
    for key, pos in llm.kv_kept().items():
        assert np.array_equal(pos[pos < N - W], kept[key])
        assert pos[-1] == N + 46


def test_same_prompt_continues_on_the_evicted_cache(llm: Llama, tokens: list[int], decodes: list[int]) -> None:
    greedy(llm, tokens, 5)
    decodes.clear()
    again = greedy(llm, tokens, 5)
    assert decodes == [1, 1, 1, 1, 1]  # the last prompt token, then four of the answer
    decodes.clear()
    assert greedy(llm, tokens, 5) == again
    assert decodes == [1, 1, 1, 1, 1]


def test_exact_prompt_samples_from_the_logits_it_has(llm: Llama, tokens: list[int], decodes: list[int]) -> None:
    llm.eval(tokens)
    decodes.clear()
    assert greedy(llm, tokens, 1) and decodes == []


@pytest.mark.parametrize("same", [0, 100, N - W - 1])
def test_prompt_that_leaves_the_evicted_part_starts_anew(
    path: str, llm: Llama, tokens: list[int], decodes: list[int], same: int
) -> None:
    other = [*tokens[:same], tokens[same] + 1, *tokens[: N - 1 - same]]
    fresh = make(path)
    expected = greedy(fresh, other)
    greedy(llm, tokens)
    decodes.clear()
    assert greedy(llm, other) == expected
    assert sum(decodes) == N + 5
    assert all(np.array_equal(a, b) for a, b in zip(llm.kv_kept().values(), fresh.kv_kept().values()))
    fresh.close()


def test_prompt_that_leaves_in_the_window_goes_on(llm: Llama, tokens: list[int], decodes: list[int]) -> None:
    greedy(llm, tokens)
    decodes.clear()
    other = [*tokens[: N - W], 77, 78, 79]
    greedy(llm, other, 2)
    assert decodes == [3, 1]
    assert all(pos[-4:].tolist() == list(range(N - W, N - W + 4)) for pos in llm.kv_kept().values())


def test_reevaluation_is_said_when_verbose(
    llm: Llama, tokens: list[int], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy(llm, tokens, 1)
    monkeypatch.setattr(llm, "verbose", True)
    greedy(llm, [*tokens[:9], 3, *tokens], 1)
    assert "leaves the cached one at token 9" in capfd.readouterr().err


def test_short_prompt_after_a_long_one_starts_clean(path: str, llm: Llama, tokens: list[int]) -> None:
    fresh = make(path)
    short = tokens[100:120]
    greedy(llm, tokens)
    assert greedy(llm, short) == greedy(fresh, short)
    assert not llm.kv_stats().evicted
    fresh.close()


def test_cutting_into_the_evicted_part_by_hand_is_refused(llm: Llama, tokens: list[int]) -> None:
    llm.eval(tokens)
    llm.n_tokens = 100
    with pytest.raises(StateError, match="cannot be cut at token 100"):
        llm.eval([1, 2])
    llm.reset()
    llm.eval(tokens)
    assert llm.kv_stats().evicted


@pytest.mark.parametrize("failing", ["first", "window"])
def test_failed_decode_leaves_a_cache_that_goes_on(
    path: str, llm: Llama, tokens: list[int], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    fresh = make(path)
    expected = greedy(fresh, tokens)
    decode = llm._ctx.decode

    def fails(batch: Any) -> None:
        if failing == "first" or batch.n_tokens() == W:
            raise RuntimeError("llama_decode returned 1")
        decode(batch)

    with monkeypatch.context() as patch:
        patch.setattr(llm._ctx, "decode", fails)
        with pytest.raises(RuntimeError, match="returned 1"):
            llm.eval(tokens)
    assert llm.n_tokens == (0 if failing == "first" else N - W) and llm._requires_eval
    assert greedy(llm, tokens) == expected  # also: the observation was cancelled, all tokens are decoded again
    fresh.close()


def test_refused_memory_keeps_the_full_cache(
    path: str, llm: Llama, tokens: list[int], decodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AllocError("cannot allocate 1 byte", -5)

    full = make(path, kv_evict=None, budget=None, flash_attn=True)
    with monkeypatch.context() as patch:
        patch.setattr(_native, "set_kept", refused)
        with pytest.warns(RuntimeWarning, match="cannot allocate 1 byte"):
            llm.eval(tokens)
        llm.eval([5])
        replay(full, [*tokens, 5], decodes)
        assert np.array_equal(logits(llm), logits(full))
        stats = llm.kv_stats()
        assert not stats.evicted and stats.fallback == "cannot allocate 1 byte" and "fallback" in repr(stats)
        llm.reset()
        llm.eval(tokens)  # says so once
    llm.reset()
    llm.eval(tokens)
    assert llm.kv_stats().evicted and llm.kv_stats().fallback is None
    full.close()


# ---- what the parent's methods do on top


def test_streaming_gives_the_same_text(llm: Llama, tokens: list[int]) -> None:
    llm.eval(tokens)
    whole = llm.create_completion(tokens, max_tokens=8, temperature=0.0)["choices"][0]["text"]
    llm.reset()
    parts = list(llm.create_completion(tokens, max_tokens=8, temperature=0.0, stream=True))
    assert len(parts) > 2 and "".join(p["choices"][0]["text"] for p in parts) == whole
    assert llm(tokens, max_tokens=8, temperature=0.0)["choices"][0]["text"].strip()


def test_stop_words(llm: Llama, tokens: list[int]) -> None:
    text = llm.create_completion(tokens, max_tokens=12, temperature=0.0)["choices"][0]["text"]
    word = text.split()[1]
    llm.reset()
    done = llm.create_completion(tokens, max_tokens=12, temperature=0.0, stop=[word])["choices"][0]
    assert done["finish_reason"] == "stop" and done["text"] == text[: text.index(word)]


def test_seed_decides(llm: Llama, tokens: list[int]) -> None:
    def sampled(seed: int) -> str:
        llm.reset()
        out: str = llm.create_completion(tokens, max_tokens=10, temperature=1.5, seed=seed)["choices"][0]["text"]
        return out

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_grammar(llm: Llama, tokens: list[int]) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    text = llm.create_completion(tokens, max_tokens=8, temperature=0.0, grammar=grammar)["choices"][0]["text"]
    assert text in ("yes", "no")


def test_logit_bias(llm: Llama, tokens: list[int]) -> None:
    token = llm.tokenize(b" green", add_bos=False)[0]
    done = llm.create_completion(tokens, max_tokens=1, temperature=0.0, logit_bias={token: 1000.0})
    assert done["choices"][0]["text"].strip() == "green"


def test_logprobs(path: str, tokens: list[int]) -> None:
    llm = make(path, logits_all=True)
    done = llm.create_completion(tokens, max_tokens=3, temperature=0.0, logprobs=2)["choices"][0]
    assert llm.kv_stats().rows_kept == kept_total(60 - W)
    assert all(max(top.values()) == pytest.approx(lp) for top, lp in
               zip(done["logprobs"]["top_logprobs"], done["logprobs"]["token_logprobs"]))  # fmt: skip
    llm.close()


def test_chat_turns_keep_the_evicted_cache(llm: Llama, tokens: list[int], decodes: list[int]) -> None:
    text = llm.detokenize(tokens).decode()
    chat = [{"role": "user", "content": text}]
    answer = llm.create_chat_completion(chat, max_tokens=8, temperature=0.0)["choices"][0]["message"]["content"]
    n_prompt = llm.kv_stats().n_prompt
    assert llm.kv_stats().evicted and n_prompt > N
    decodes.clear()
    chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And what else?"}]
    llm.create_chat_completion(chat, max_tokens=4, temperature=0.0)
    assert decodes[0] < 40 and llm.kv_stats().n_prompt == n_prompt


def test_empty_prompt_and_no_tokens(llm: Llama) -> None:
    for empty in ("", []):  # this model adds no BOS
        with pytest.raises(ValueError, match="prompt is empty"):
            llm.create_completion(empty, max_tokens=3)
    assert len(greedy(llm, [llm.token_bos()], 3)) == 3
    n = llm.n_tokens
    llm.eval([])
    assert llm.n_tokens == n


def test_two_models_at_once(path: str, llm: Llama, tokens: list[int]) -> None:
    expected = greedy(llm, tokens, 8)
    a, b = make(path, budget=0.5), make(path)
    both = islice(zip(a.generate(tokens, temp=0.0), b.generate(tokens, temp=0.0)), 8)
    assert [token for _, token in both] == expected
    assert a.kv_stats().rows_kept == kept_total(100 - W) and b.kv_stats().rows_kept == kept_total(60 - W)
    a.close()
    b.eval([5])
    b.close()


@pytest.mark.parametrize("what", ["save_state", "load_state", "set_cache"])
def test_state_is_refused(llm: Llama, what: str) -> None:
    args = {"save_state": (), "load_state": (None,), "set_cache": (llama_cpp.LlamaRAMCache(),)}[what]
    with pytest.raises(NotImplementedError, match=f"{what} does not work .* kv_evict=None"):
        getattr(llm, what)(*args)
    llm.set_cache(None)


def test_pickle_keeps_policy_and_budget(path: str, tokens: list[int]) -> None:
    llm = make(path, kv_evict="laprox:preset=paper", budget="5%", type_k="q8_0", type_v="q8_0")
    twin = pickle.loads(pickle.dumps(llm))
    for x in (llm, twin):
        x.eval(tokens)
    assert repr(twin.kv_stats().policy) == repr("laprox:preset=paper") and twin.kv_stats().budget == "0.05"
    assert all(np.array_equal(a, b) for a, b in zip(llm.kv_kept().values(), twin.kv_kept().values()))
    assert llm.kv_stats().bytes_full == 90 * N * 2 * 68  # 64 values of q8_0: 2 blocks of 34 bytes
    llm.close()
    twin.close()


# ---- what a new user ran into


@pytest.mark.parametrize("n_ctx", [300, 512])
def test_an_answer_that_fills_the_context_is_returned(path: str, tokens: list[int], n_ctx: int) -> None:
    plain = Llama(path, **{**COMMON, "n_ctx": n_ctx, "flash_attn": True})
    evicting = make(path, n_ctx=n_ctx)
    bias = {plain.token_eos(): -100.0}
    lengths = []
    for one in (plain, evicting):
        done = one.create_completion((tokens * 3)[: n_ctx - 20], max_tokens=None, temperature=0.0, logit_bias=bias)
        assert done["choices"][0]["finish_reason"] == "length"
        lengths.append(done["usage"]["total_tokens"])
        one.close()
    assert lengths[0] == lengths[1] == 512


@pytest.mark.parametrize("budget", [0.05, 10, "1KiB"])
def test_a_budget_below_the_window_is_reported(path: str, tokens: list[int], budget: Any) -> None:
    llm = make(path, budget=budget)
    with pytest.warns(RuntimeWarning, match="window alone is kept"):
        llm.eval(tokens)
    stats = llm.kv_stats()
    assert stats.rows_kept == W * 90
    assert stats.note is not None and stats.note in repr(stats)
    llm.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.eval(tokens)  # once is enough
    llm.close()


def test_statistics_belong_to_the_last_prompt(llm: Llama, tokens: list[int]) -> None:
    llm.eval(tokens)
    long = llm.kv_stats().prefill_tps
    llm.reset()
    llm.eval(tokens[:2])
    assert llm.kv_stats().prefill_tps != long
    with pytest.raises(StateError, match="no prompt has been evicted"):
        llm.kv_scores()


@pytest.mark.parametrize("n_ctx", [-5, 1 << 31])
def test_impossible_contexts(path: str, n_ctx: int) -> None:
    with pytest.raises(ValueError, match="n_ctx"):
        make(path, n_ctx=n_ctx)


@pytest.mark.parametrize(("name", "near"), [("buget", "budget"), ("kv_evct", "kv_evict"), ("n_ctxx", "n_ctx")])
def test_a_misspelt_argument_is_told(path: str, name: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"unknown argument '{name}', did you mean '{near}'"):
        Llama(path, verbose=False, **{name: 1})


def test_pieces_are_the_text(path: str) -> None:
    """What sentences are found by, against the detokenised whole."""
    llm = make(path, kv_evict="laprox:pool=sentence:0.25")
    try:
        text = "One fish. Two fish! Red\nfish? " + "x" * 40 + " Blöd, 魚。\n"
        tokens = llm.tokenize(text.encode(), add_bos=False)
        llm.eval(tokens)
        assert b"".join(llm._pieces()) == text.encode() == llm.detokenize(tokens)
    finally:
        llm.close()
