"""Scores and kept sets against an independent implementation: float32, dequantised weights (golden/README.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from lowlevel import Context, W, golden

from laprox_llamacpp import _native, models
from laprox_llamacpp.observed import ObservedPrompt
from laprox_llamacpp.policy import EvictionPolicy

SPECS = [
    "laprox",
    "laprox:preset=l2",
    "laprox:normalize=none",
    "laprox:preset=paper",
    "laprox:preset=paper:protect_sinks=4",
    "laprox:preset=paper:alloc=layer",
    "laprox:preset=paper:alloc=layer:protect_sinks=4",
    "laprox:preset=paper:alloc=head",
    "laprox:preset=paper:normalize=zscore",
    "laprox:preset=paper:normalize=zscore:protect_sinks=4",
]


class Case:
    """A model's reference, and a context whose cache holds the same prompt, scored."""

    def __init__(self, name: str, path: Path | None = None, kind: str = "f16") -> None:
        self.ref = golden(name)
        self.ctx = Context(path or models.fetch(name), type_k=kind, n_threads=2)
        self.logits = self.ctx.prefill(self.ref["ids"])
        self.n = len(self.ref["ids"])

    def kept(self, spec: str, budget: float) -> npt.NDArray[np.bool_]:
        """Kept candidates [heads, n_cand] for a kept total of the definition."""
        prompt = ObservedPrompt(self.ctx.ptr, self.n, W)
        k = max(0, int(np.floor(budget * self.n + 0.5)) - W)
        kept = EvictionPolicy.parse(spec).keep(prompt, k)
        assert kept is not None
        _native.set_kept(self.ctx.ptr, kept, _native.STORE_MASK)  # the cache stays, for the next policy
        out = np.zeros((prompt.n_heads, self.n - W), bool)
        for row, pos in zip(out, _native.kept(self.ctx.ptr)):
            row[pos] = True
        return out


@pytest.fixture(scope="module", params=["smollm2-135m", "qwen2.5-coder-0.5b"])
def case(request: Any) -> Iterator[Case]:
    made = Case(request.param)
    yield made
    made.ctx.close()


def test_the_prompt_was_fed_alike(case: Case) -> None:
    assert int(case.logits.argmax()) == int(case.ref["prefill_argmax"])


@pytest.mark.parametrize(("preset", "key"), [("reach", "raw_max"), ("paper", "raw_l2")])
def test_scores_correlate_in_every_layer(case: Case, preset: str, key: str) -> None:
    want = case.ref[key].astype(np.float64)
    got = case.ctx.score(f"laprox:preset={preset}").reshape(want.shape)
    corr = [np.corrcoef(got[il].ravel(), want[il].ravel())[0, 1] for il in range(len(want))]
    rel = np.abs(got - want) / want
    print(f"{key}: correlation {min(corr):.5f} at least, median relative difference {np.median(rel):.4f}")
    assert min(corr) >= 0.99
    assert np.median(rel) <= 0.05


def test_residual_norms(case: Case) -> None:
    case.ctx.score()
    got = _native.residual(case.ctx.ptr)
    rel = np.abs(got - case.ref["resid"]) / case.ref["resid"]
    print(f"R_l: largest relative difference {rel.max():.5f}")
    assert rel.max() <= 0.01


@pytest.mark.parametrize("spec", SPECS)
def test_kept_sets(case: Case, spec: str) -> None:
    name = spec.replace("protect_sinks", "sinks")
    budgets = [key.split("|")[2] for key in case.ref if key.startswith(f"kept|{name}|")]
    assert budgets
    for budget in budgets:
        bits = np.unpackbits(case.ref[f"kept|{name}|{budget}"], axis=-1)[..., : case.n].astype(bool)
        want = bits.reshape(-1, case.n)
        got = case.kept(spec, float(budget))
        assert want[:, -W:].all()
        assert got.sum() + W * len(got) == want.sum()
        window = W * len(got)  # kept on both sides
        same, either = (got & want[:, :-W]).sum(), (got | want[:, :-W]).sum()
        jaccard = (same + window) / (either + window)
        chosen = same / either if either else 1.0  # without the window
        print(f"{spec} at {budget}: Jaccard {jaccard:.4f}, without the window {chosen:.4f}")
        assert jaccard >= 0.95
        assert chosen >= 0.93


def write_f32(source: Path, target: Path) -> Path:
    """The same model with its weights dequantised: no product rounds its activations to 8 bits then."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(
            field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_with_weights_as_the_reference_has_them(tmp_path: Path, smol_path: Path, kind: str) -> None:
    case = Case("smollm2-135m", write_f32(smol_path, tmp_path / "f32.gguf"), kind)
    want = case.ref["raw_max"].astype(np.float64)
    got = case.ctx.score().reshape(want.shape)
    corr = [np.corrcoef(got[il].ravel(), want[il].ravel())[0, 1] for il in range(len(want))]
    rel = np.median(np.abs(got - want) / want)
    print(f"{kind}: correlation {min(corr):.6f} at least, median relative difference {rel:.4f}")
    assert min(corr) >= 0.9999
    assert rel <= 0.01
    for budget in ("0.1", "0.25"):
        bits = np.unpackbits(case.ref[f"kept|laprox|{budget}"], axis=-1)[..., : case.n].astype(bool)
        want_kept = bits.reshape(-1, case.n)[:, :-W]
        got_kept = case.kept("laprox", float(budget))
        same = (got_kept & want_kept).sum() / (got_kept | want_kept).sum()
        print(f"{kind} at {budget}: Jaccard without the window {same:.4f}")
        assert same >= 0.99
    case.ctx.close()
    (tmp_path / "f32.gguf").unlink()  # 540 MB
