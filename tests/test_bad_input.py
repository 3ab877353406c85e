"""Bad input to `Llama`: one clear line, no crash, nothing lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laprox_llamacpp import Llama, UnsupportedError, models

import llama_cpp  # isort: skip


@pytest.fixture(scope="module")
def path() -> str:
    return str(models.fetch("smollm2-135m"))


@pytest.fixture
def llm(path: str) -> Iterator[Llama]:
    llm = Llama(path, n_ctx=512, kv_evict="laprox", budget=0.3, verbose=False)
    yield llm
    llm.close()


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"kv_evict": "laprox", "budget": 0}, "budget is 0"),
        ({"kv_evict": "laprox", "budget": -0.1}, "budget is -0.1"),
        ({"kv_evict": "laprox", "budget": math.nan}, "budget is nan"),
        ({"kv_evict": "laprox", "budget": 1.5}, "budget is 1.5"),
        ({"kv_evict": "laprox", "budget": "64 parsecs"}, "budget is '64 parsecs'"),
        ({"kv_evict": "streaming:pool=avg7"}, "unknown option 'pool' .* protect_sinks, window"),
        ({"kv_evict": "nonsense"}, "unknown eviction method"),
        ({"kv_evict": "laprox:window=0"}, "window is 0"),
        ({"kv_evict": None, "budget": 0.5}, "no effect without kv_evict"),
        ({"type_k": "q99"}, "type_k is 'q99'"),
    ],
)
def test_bad_arguments_before_the_model_is_loaded(path: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as e:
        Llama(path, verbose=False, **kwargs)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"embedding": True}, "embedding"),
        ({"draft_model": lambda ids: ids}, "draft_model"),
        ({"lora_path": "adapter.gguf"}, "lora_path"),
        ({"vocab_only": True}, "vocab_only"),
        ({"type_k": 7}, "type_k=7 does not work with kv_evict, expected one of f32, f16"),
        ({"attention_type": llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL}, "not supported here: .*non-causal"),
    ],
)
def test_what_rules_eviction_out(path: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says) as e:
        Llama(path, verbose=False, kv_evict="laprox", **kwargs)
    assert "\n" not in str(e.value)


def test_a_refusal_leaves_nothing_behind(path: str) -> None:
    with pytest.raises(UnsupportedError):
        Llama(path, verbose=False, kv_evict="laprox", attention_type=llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL)
    llm = Llama(path, verbose=False, n_ctx=128)
    assert llm.kv_stats().policy == "off"
    llm.close()


@pytest.mark.parametrize("kv_evict", [None, "laprox"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"\x7fELF and so on, for a while", "not GGUF"),
        (b"GGUF\x03\x00", "truncated"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, content: bytes | None, says: str, kv_evict: str | None) -> None:
    file = tmp_path / "model.gguf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=says) as e:
        Llama(str(file), kv_evict=kv_evict, verbose=False)
    assert "\n" not in str(e.value) and str(file) in str(e.value)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder"):
        Llama(str(tmp_path), verbose=False)


@pytest.mark.parametrize("part", [0.5, 0.001])
def test_truncated_model(tmp_path: Path, path: str, part: float) -> None:
    data = Path(path).read_bytes()
    file = tmp_path / "cut.gguf"
    file.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(ValueError, match="truncated") as e:
        Llama(str(file), kv_evict="laprox", verbose=False)
    assert "\n" not in str(e.value)


def test_unknown_architecture(tmp_path: Path, path: str) -> None:
    data = Path(path).read_bytes()
    at = data.index(b"general.architecture") + len(b"general.architecture") + 4 + 8
    assert data[at : at + 5] == b"llama"
    file = tmp_path / "other.gguf"
    file.write_bytes(data[:at] + b"lamas" + data[at + 5 :])
    with pytest.raises(ValueError, match="architecture"):
        Llama(str(file), kv_evict="laprox", verbose=False)


def test_window_larger_than_the_prompt_keeps_everything(path: str) -> None:
    llm = Llama(path, n_ctx=512, kv_evict="laprox:window=400", budget=0.05, verbose=False)
    llm.eval(list(range(100, 300)))
    assert not llm.kv_stats().evicted and all(len(pos) == 200 for pos in llm.kv_kept().values())
    llm.close()


def test_prompt_longer_than_the_context(llm: Llama) -> None:
    tokens = list(range(100, 300))
    llm.eval(tokens)
    kept = {key: pos.tolist() for key, pos in llm.kv_kept().items()}
    with pytest.raises(ValueError, match="exceed context window of 512"):
        llm.create_completion(list(range(100, 700)), max_tokens=1)
    with pytest.raises(ValueError, match="513 tokens exceed the context window of 512"):
        llm.eval([5] * 313)
    assert {key: pos.tolist() for key, pos in llm.kv_kept().items()} == kept and llm.n_tokens == 200
    llm.eval([5])
    assert llm.n_tokens == 201


def test_token_that_does_not_exist(llm: Llama) -> None:
    tokens = list(range(100, 300))
    llm.eval(tokens)
    with pytest.raises(RuntimeError):
        llm.eval([10**8])
    assert llm.n_tokens == 200
    llm.eval([5])
    assert llm.n_tokens == 201


@pytest.mark.parametrize(
    "use",
    [
        lambda llm: llm.eval([1]),
        lambda llm: llm("hello", max_tokens=1),
        lambda llm: next(llm.generate([1, 2])),
        lambda llm: llm.tokenize(b"hello"),
        lambda llm: llm.detokenize([1]),
        lambda llm: llm.create_chat_completion([{"role": "user", "content": "hi"}]),
        lambda llm: llm.n_ctx(),
        lambda llm: llm.token_eos(),
        lambda llm: llm.ctx,
        lambda llm: llm.kv_stats(),
        lambda llm: llm.kv_kept(),
        lambda llm: llm.kv_scores(),
    ],
)
@pytest.mark.parametrize("kv_evict", [None, "laprox"])
def test_use_after_close(closed: dict[str | None, Llama], use: Any, kv_evict: str | None) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"closed|kv_evict"):
        use(closed[kv_evict])


@pytest.fixture(scope="module")
def closed(path: str) -> dict[str | None, Llama]:
    out = {}
    for kv_evict in (None, "laprox"):
        out[kv_evict] = Llama(path, n_ctx=128, kv_evict=kv_evict, verbose=False)
        out[kv_evict].close()
        out[kv_evict].close()  # twice is fine
    return out
