"""Our methods keep what NVIDIA's kvpress keeps, on a real model's own Q, K and V.

Optional, the rest of the tests needs none of this: `pip install kvpress`, then
`python -m pytest -m slow tests/test_kvpress.py -s`. Made with kvpress 0.5.5.

A prompt is decoded by llama.cpp; what kvpress reads of a model (keys, values, the window's attention, W_O) is handed to
its presses in float64, and the positions are read from what they compress. kvpress counts the window inside its shares
(`alpha_safeguard`, `first_stage_ratio`) and KeyDiff has none at all, so where that matters a press is given the
candidates alone, see `Candidates`; docs/methods.md says what differs then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from lowlevel import Context, W, golden

from laprox_llamacpp import models
from laprox_llamacpp.observed import ObservedPrompt
from laprox_llamacpp.policy import EvictionPolicy

pytest.importorskip("kvpress", reason="pip install kvpress")
import kvpress
import torch

pytestmark = pytest.mark.slow
torch.set_num_threads(1)

K = 150  # candidates per head, of about 550
LEAST = 0.99  # Jaccard index in every layer: float32 scores from an F16 cache here, float64 there
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b")
Kept = list[npt.NDArray[Any]]


@dataclass(frozen=True)
class Layer:
    """What a press reads of an attention layer; a batch of one."""

    module: SimpleNamespace
    hidden: torch.Tensor  # [1, N, 1], only its length counts
    keys: torch.Tensor  # [1, n_head_kv, N, d]
    values: torch.Tensor  # [1, n_head_kv, N, d]
    attention: torch.Tensor  # [1, n_head, w, N], the window's rows


class Candidates(kvpress.ScorerPress):
    """A press's scores of the positions before the window, for compression of these alone."""

    def __init__(self, press: kvpress.ScorerPress, layer: Layer) -> None:
        super().__init__()
        self.press, self.layer = press, layer

    def score(
        self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
    ) -> torch.Tensor:
        x = self.layer
        return self.press.score(module, x.hidden, x.keys, x.values, x.attention, kwargs)[..., : keys.shape[2]]


def snapkv(layer: Layer) -> kvpress.ScorerPress:
    return kvpress.SnapKVPress(window_size=W, kernel_size=7)


@dataclass(frozen=True)
class Case:
    """Our spec, kvpress's press, and a spec with one setting changed, which must not pass.

    `candidates`: the press is given the candidates alone.
    """

    spec: str
    press: Callable[[Layer], Any]
    other: str
    candidates: bool = False


CASES = [
    Case("snapkv", snapkv, "snapkv:pool=avg5"),
    Case("tova:window=1", lambda x: kvpress.TOVAPress(), "tova:window=1:granularity=head"),
    Case("streaming", lambda x: kvpress.StreamingLLMPress(n_sink=4), "streaming:protect_sinks=8"),
    Case("keydiff", lambda x: Candidates(kvpress.KeyDiffPress(), x), "keydiff:pool=max3", candidates=True),
    Case(
        "adakv:alloc=guard0.2",
        lambda x: kvpress.AdaKVPress(Candidates(snapkv(x), x), alpha_safeguard=0.2),
        "adakv:alloc=guard0.7",
        candidates=True,
    ),
    Case(
        "criticalkv",
        lambda x: kvpress.CriticalKVPress(Candidates(snapkv(x), x), first_stage_ratio=0.5),
        "criticalkv:first=0.7",
        candidates=True,
    ),
    Case(
        "criticalkv:alloc=guard0.2",
        lambda x: kvpress.CriticalAdaKVPress(Candidates(snapkv(x), x), alpha_safeguard=0.2, first_stage_ratio=0.5),
        "criticalkv:alloc=guard0.2:first=0.7",
        candidates=True,
    ),
]


class Observed:
    """A decoded prompt with an observed window, and its layers as kvpress would see them."""

    def __init__(self, model: str, window: int) -> None:
        path = models.fetch(model)
        tokens = golden(model)["ids"]
        self.context = Context(path)
        self.context.prefill(tokens, window)
        self.prompt = ObservedPrompt(self.context.ptr, len(tokens), window, str(path))
        weights = {t.name: t for t in gguf.GGUFReader(path).tensors}
        self.layers = []
        for il in range(len(self.prompt.n_head_kv)):
            w_o = weights[f"blk.{il}.attn_output.weight"]
            self.layers.append(self.layer(il, gguf.dequantize(w_o.data, w_o.tensor_type)))

    def layer(self, il: int, w_o: npt.NDArray[Any]) -> Layer:
        """`w_o` is [hidden size, n_head * d]."""
        q, k, v = (
            torch.tensor(x(il), dtype=torch.float64)
            for x in (self.prompt.queries, self.prompt.keys, self.prompt.values)
        )
        n_head, w, d = q.shape
        n_group, n = n_head // len(k), k.shape[1]
        logits = q @ k.repeat_interleave(n_group, dim=0).transpose(1, 2) / d**0.5
        later = torch.arange(n) > n - w + torch.arange(w)[:, None]
        config = SimpleNamespace(
            num_attention_heads=n_head,
            num_key_value_heads=len(k),
            head_dim=d,
            hidden_size=len(w_o),
            _attn_implementation="sdpa",
        )
        module = SimpleNamespace(
            config=config,
            layer_idx=il,
            head_dim=d,
            num_key_value_groups=n_group,
            o_proj=SimpleNamespace(weight=torch.tensor(w_o, dtype=torch.float64)),
        )
        attention = torch.softmax(logits.masked_fill(later, -torch.inf), dim=-1)
        return Layer(module, torch.empty(1, n, 1), k[None], v[None], attention[None])


observed = cache(Observed)


def kept_by_kvpress(case: Case, layer: Layer, window: int) -> Kept:
    """Kept candidates of each head of a layer, ascending."""
    n_cand = layer.keys.shape[2] - window
    n, n_kept = (n_cand, K) if case.candidates else (n_cand + window, K + window)
    keys, values = layer.keys[:, :, :n], layer.values[:, :, :n]
    press = case.press(layer)
    press.compression_ratio = 1 - (n_kept + 1e-3) / n  # n_kept is its int(n * (1 - ratio))
    layer.module.masked_key_indices = None
    rows = press.compress(layer.module, layer.hidden, keys, values, layer.attention, {})[0]
    masks = np.ones((keys.shape[1], n), bool)
    if layer.module.masked_key_indices is not None:  # head-wise: nothing moves, the rest is masked
        _, heads, positions = layer.module.masked_key_indices
        masks[heads, positions] = False
    else:
        for mask, head, left in zip(masks, keys[0].numpy(), rows[0].numpy()):
            of = {row.tobytes(): i for i, row in enumerate(head)}
            assert len(of) == n  # keys name their positions
            mask[:] = False
            mask[[of[row.tobytes()] for row in left]] = True
    assert masks.sum() == n_kept * len(masks)
    assert case.candidates or masks[:, n_cand:].all()  # the window stays
    return [np.flatnonzero(mask[:n_cand]) for mask in masks]


def kept(model: str, case: Case, spec: str) -> list[list[tuple[Any, Any]]]:
    """By kvpress and by `spec`, for each head of each layer."""
    policy = EvictionPolicy.parse(spec)
    seen = observed(model, policy.window)
    ours = policy.keep(seen.prompt, K)
    assert ours is not None and len(ours) == seen.prompt.n_heads
    heads = iter(ours)
    return [list(zip(kept_by_kvpress(case, layer, policy.window), heads)) for layer in seen.layers]


def jaccard(layers: list[list[tuple[Any, Any]]]) -> npt.NDArray[np.float64]:
    """Index of each layer."""
    return np.array([
        sum(len(np.intersect1d(a, b)) for a, b in pairs) / sum(len(np.union1d(a, b)) for a, b in pairs)
        for pairs in layers
    ])  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec)
@pytest.mark.parametrize("model", MODELS)
def test_keeps_what_kvpress_keeps(model: str, case: Case) -> None:
    layers = kept(model, case, case.spec)
    index = jaccard(layers)
    moved = max(abs(len(a) - len(b)) for pairs in layers for a, b in pairs)
    print(f"\n{model} {case.spec}: Jaccard {index.min():.4f} at least, counts differ by {moved}")
    print(" ".join(f"{x:.3f}" for x in index))
    assert index.min() >= LEAST
    assert moved <= (1 - LEAST) * K


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.other)
def test_tells_another_setting_apart(case: Case) -> None:
    index = jaccard(kept(MODELS[0], case, case.other))
    print(f"\n{case.other}: Jaccard {index.min():.4f} to {index.max():.4f}")
    assert index.min() < LEAST
