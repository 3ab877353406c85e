#!/usr/bin/env python3
"""SnapKV, AdaKV and StreamingLLM here and in NVIDIA's kvpress: same weights, same prompts, same rows, same answers?

The GGUF file runs in this engine (rows really evicted, F16 cache) and, dequantised, in transformers (float32) under
kvpress's presses. Both prefill the same token ids once a sample, evict as many rows and decode greedily by the same
rules. Two controls say what is noise: the full caches against each other, and transformers decoding on the rows that
*we* kept. `--f32` runs this engine on dequantised weights, too: no product rounds its activations to 8 bits then.

    pip install kvpress==0.5.5 gguf           # brings torch and transformers; made with 2.14.1 and 5.2.0
    python scripts/compare_kvpress.py --samples 20 --tokens 2048 --out runs/kvpress.jsonl

A run that is stopped goes on with the same command. The table is printed at the end, in Markdown.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, cast

import numpy as np
import numpy.typing as npt

from laprox_llamacpp import models
from laprox_llamacpp.budget import Budget
from laprox_llamacpp.evaluate.cells import FULL, Cell
from laprox_llamacpp.evaluate.records import read_objects
from laprox_llamacpp.evaluate.runner import machine, sha256
from laprox_llamacpp.evaluate.session import Session
from laprox_llamacpp.evaluate.stats import Mean
from laprox_llamacpp.evaluate.task import Sample, Task
from laprox_llamacpp.policy import EvictionPolicy

import llama_cpp.llama_cpp as lib  # isort: skip

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # files are local
os.environ.setdefault("TQDM_DISABLE", "1")
try:
    import gguf
    import kvpress
    import torch
    import transformers

    missing = None
except ImportError as e:
    missing = e

PACKAGES = ("kvpress", "torch", "transformers", "gguf")
INSTALL = "pip install kvpress==0.5.5 torch==2.14.1 transformers==5.2.0 gguf"
W = EvictionPolicy.window
GUARD = 0.2  # kvpress's default
ALIKE = 0.98  # correlation of the logits after the prompt, below which the weights cannot be the same
TASKS = {
    "needle": "needle:kind=single+multikey:digits=4:open_answer=yes:max_tokens=12",
    "continuation": "continuation:n=128",
}
F32 = npt.NDArray[np.float32]
Kept = list[npt.NDArray[Any]]  # positions of each KV head of each layer, layers first, window included


# ---- the same budget for both


def ratio(n_prompt: int, n_kept: int) -> float:
    """kvpress's compression_ratio that keeps `n_kept` of `n_prompt` positions per head: its int(n (1 - ratio))."""
    return 1 - (n_kept + 1e-3) / n_prompt


def safeguard(n_kept: int) -> float:
    """alpha_safeguard that protects as many rows of each head as `guard0.2` beside the window, which kvpress counts."""
    k = n_kept - W
    return (int(GUARD * k) + W + 0.5) / n_kept


@dataclass(frozen=True)
class Method:
    """Our spec and kvpress's press that keeps `n_kept` of `n_prompt` positions per head on average."""

    name: str
    spec: str
    press: Callable[[int, int], Any]


def _snapkv(n_prompt: int, n_kept: int) -> Any:
    return kvpress.SnapKVPress(ratio(n_prompt, n_kept), window_size=W, kernel_size=7)


METHODS = [
    Method("snapkv", "snapkv", _snapkv),
    Method("adakv", "adakv:alloc=guard0.2", lambda n, kept: kvpress.AdaKVPress(_snapkv(n, kept), safeguard(kept))),
    Method("adakv, alpha 0.2", "adakv:alloc=guard0.2", lambda n, kept: kvpress.AdaKVPress(_snapkv(n, kept), GUARD)),
    Method("streaming", "streaming", lambda n, kept: kvpress.StreamingLLMPress(ratio(n, kept), n_sink=4)),
]


def kept_tokens(budget: str, n_prompt: int) -> int:
    """Positions that a head keeps on average, window included. Raises ValueError for a budget that is none for both."""
    parsed = Budget.parse(budget)
    if parsed.kind == "bytes":
        raise ValueError(f"budget {budget} counts bytes, expected a share of the prompt or tokens per head")
    n = parsed.tokens(n_prompt, bytes_per_token=0)
    if not W < n < n_prompt:
        raise ValueError(
            f"budget {budget} keeps {n} of a prompt of {n_prompt} tokens, expected more than the window of {W} and "
            "less than the prompt"
        )
    return n


def jaccard(a: Kept, b: Kept) -> list[float]:
    """Index of each head."""
    return [len(np.intersect1d(x, y)) / len(np.union1d(x, y)) for x, y in zip(a, b)]


# ---- transformers


class Rival:
    """The same weights in transformers, float32: `prefill` a prompt, then `under` a press after another.

    The prompt is read once: what kvpress's hooks are called with is kept, and each press's own hook called with it on
    a copy of the cache. `answer` and `logprobs` are as `Session`'s, so that a task can measure both.
    """

    def __init__(self, path: Path, vocab: Session) -> None:
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._vocab = vocab  # of the same file: detokenises, and knows the tokens that end an answer
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        if not isinstance(self._model, kvpress.presses.base_press.SUPPORTED_MODELS):
            raise ValueError(f"{path.name} is a {type(self._model).__name__}, expected a model that kvpress supports")
        self._layers = [layer.self_attn for layer in self._model.model.layers]
        self._calls: list[dict[str, Any]] = []
        self._cache: Any = None
        self._end = self._n = 0
        self.after_prompt: F32 = np.zeros(0, np.float32)

    def prefill(self, tokens: Sequence[int]) -> None:
        """A new prompt."""
        self._calls, self._whole = [], transformers.DynamicCache()
        hooks = [
            layer.register_forward_hook(lambda _m, _args, kwargs, _out: self._calls.append(kwargs), with_kwargs=True)
            for layer in self._layers
        ]
        try:
            self._end, self._n, self._cache = len(tokens), 0, self._whole
            self.after_prompt = self._decode(tokens, last=True)[-1]
        finally:
            for hook in hooks:
                hook.remove()

    def under(self, press: Any) -> None:
        """The prompt as a press leaves it (None: whole)."""
        self._copy()
        if press is not None:
            with torch.no_grad(), press(self._model):
                for layer, kwargs in zip(self._layers, self._calls):
                    press.forward_hook(layer, [], {**kwargs, "past_key_values": self._cache}, (None, None))

    def under_rows(self, kept: Kept) -> None:
        """The prompt with these rows alone; kvpress's mask hides the others."""
        self._copy()
        heads = iter(kept)
        for layer, of in zip(self._layers, self._cache.layers):
            gone = np.ones((of.keys.shape[1], self._end), bool)
            for row in gone:
                row[next(heads)] = False
            head, position = (torch.tensor(x) for x in np.nonzero(gone))
            layer.masked_key_indices = (torch.zeros_like(head), head, position)

    def _copy(self) -> None:
        self._cache = copy.copy(self._whole)
        self._cache.layers = [copy.copy(of) for of in self._whole.layers]  # an update makes new tensors
        self._n = self._end
        for layer in self._layers:
            layer.masked_key_indices = None

    def kept(self) -> Kept:
        """Rows of the prompt that the press left, ascending."""
        out: Kept = []
        for layer, of, whole in zip(self._layers, self._cache.layers, self._whole.layers):
            keys, left = whole.keys[0].numpy(), of.keys[0].numpy()
            masked = getattr(layer, "masked_key_indices", None)
            if masked is not None:  # AdaKV: nothing moves
                mask = np.ones(keys.shape[:2], bool)
                mask[masked[1].numpy(), masked[2].numpy()] = False
                out += [np.flatnonzero(row) for row in mask]
                continue
            for every, rows in zip(keys, left):
                at = {row.tobytes(): i for i, row in enumerate(every)}
                assert len(at) == self._end  # keys name their positions
                out.append(np.sort([at[row.tobytes()] for row in rows]))
        return out

    def answer(self, max_tokens: int, stop: Sequence[str] = ()) -> str:
        """Greedy text after the prompt; its first token comes from the prefill, as in `Session.answer`."""
        assert not stop
        out: list[int] = []
        logits = self.after_prompt
        while True:
            token = int(logits.argmax())
            if lib.llama_vocab_is_eog(self._vocab._model.vocab, token):
                break
            out.append(token)
            if len(out) == max_tokens:
                break
            logits = self._decode([token])[-1]
        return str(self._vocab.detokenize(out).decode("utf-8", errors="replace"))

    def logprobs(self, tokens: Sequence[int]) -> Iterator[F32]:
        """Log-probabilities [n_vocab] after each of `tokens`, which are decoded in one step."""
        yield from torch.log_softmax(torch.tensor(self._decode(tokens)), dim=-1).numpy()

    def _decode(self, tokens: Sequence[int], last: bool = False) -> F32:
        """Append `tokens` at their true positions; logits after each, or after the last."""
        positions = torch.arange(self._n, self._n + len(tokens))[None]
        with torch.no_grad():
            out = self._model(
                torch.tensor(tokens)[None], past_key_values=self._cache, position_ids=positions,
                logits_to_keep=int(last),
            )  # fmt: skip
        self._n += len(tokens)
        return cast(F32, out.logits[0].numpy())


def dequantised(source: Path, target: Path) -> Path:
    """The same model with float32 weights."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            writer.add_key_value(
                name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


# ---- a sample


def compare(ours: Session, theirs: Rival, task: Task, sample: Sample, budgets: Sequence[str]) -> dict[str, Any]:
    """Everything that is measured on a sample."""
    ours.prefill(sample.tokens)
    theirs.prefill(sample.tokens)
    alike = float(np.corrcoef(ours.after_prompt, theirs.after_prompt)[0, 1])
    if alike < ALIKE:
        raise ValueError(
            f"the logits after sample {sample.index} correlate at {alike:.4f}, expected {ALIKE} and more from the same "
            "weights; transformers may read this file in another way"
        )
    at_ours, at_theirs = (replace(sample, memo=dict(sample.memo)) for _ in range(2))
    rival = cast(Session, theirs)
    cells: dict[str, Any] = {}
    theirs.under(None)
    with ours.under(None):
        cells[FULL] = {"ours": task.measure(ours, at_ours), "kvpress": task.measure(rival, at_theirs)}
    n = len(sample.tokens)
    for method in METHODS:
        for budget in budgets:
            n_kept = kept_tokens(budget, n)
            with ours.under(Cell(EvictionPolicy.parse(method.spec), Budget.parse(budget))):
                rows = [x[x < n] for x in ours.kv_kept().values()]
                of: dict[str, Any] = {"ours": task.measure(ours, at_ours)}
            theirs.under(method.press(n, n_kept))
            their_rows = theirs.kept()
            of["kvpress"] = task.measure(rival, at_theirs)
            theirs.under_rows(rows)
            of["our_rows"] = task.measure(rival, at_theirs)
            of["rows"], of["kvpress_rows"] = sum(map(len, rows)), sum(map(len, their_rows))
            of["jaccard"] = round(float(np.median(jaccard(rows, their_rows))), 5)
            cells[f"{method.name}@{budget}"] = of
    rms = float(np.sqrt(np.mean((ours.after_prompt - theirs.after_prompt) ** 2)) / theirs.after_prompt.std())
    return {
        "index": sample.index, "n_prompt": n, "info": sample.info,
        "logits": {"correlation": round(alike, 6), "rms": round(rms, 5)}, "cells": cells,
    }  # fmt: skip


# ---- the table


def table(records: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Markdown: a line for the full cache and each cell; means ± standard errors over the samples."""
    names = list(dict.fromkeys(name for r in records for name in r["cells"]))
    texts = all("text" in r["cells"][FULL]["ours"] for r in records)
    digits = 3 if texts else 5
    head = ["method", "budget", f"{metric}, ours", f"{metric}, kvpress", "ours - kvpress", "ours - its, on our rows"]
    head += ["same answer", "same answer, on our rows"] if texts else []
    lines = [[*head, "kept sets, Jaccard"], ["---", "---", *["---:"] * (len(head) - 1)]]
    for name in names:
        cells = [r["cells"][name] for r in records if name in r["cells"]]
        method, _, budget = name.rpartition("@") if "@" in name else (name, "", "")
        line = [method, budget, *(_mean((c[side][metric] for c in cells), digits) for side in ("ours", "kvpress"))]
        for side in ("kvpress", "our_rows"):
            line.append(_mean((c["ours"][metric] - c[side][metric] for c in cells if side in c), digits, "+"))
        if texts:
            line += [_share(c["ours"]["text"] == c[side]["text"] for c in cells if side in c)
                     for side in ("kvpress", "our_rows")]  # fmt: skip
        found = [c["jaccard"] for c in cells if "jaccard" in c]
        lines.append([*line, f"{np.median(found):.3f} ({min(found):.3f})" if found else ""])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _mean(values: Iterator[float], digits: int, sign: str = "") -> str:
    x = Mean.of(values)
    return f"{x.mean:{sign}.{digits}f} ± {x.sem:.{digits}f}" if x.n else ""


def _share(values: Iterator[bool]) -> str:
    found = list(values)
    return f"{sum(found)} of {len(found)}" if found else ""


def notes(records: Sequence[Mapping[str, Any]]) -> str:
    """Lines under the table: the logits, and whether all cells kept equally many rows."""
    alike = [r["logits"]["correlation"] for r in records]
    rms = [r["logits"]["rms"] for r in records]
    uneven = sorted({
        f"{name} by {c['rows'] - c['kvpress_rows']:+d}"
        for r in records for name, c in r["cells"].items() if name != FULL and c["rows"] != c["kvpress_rows"]
    })  # fmt: skip
    return "\n".join([
        f"{len(records)} samples. Jaccard: median over heads, then over samples (the lowest sample).",
        f"Logits after the prompt: correlation {np.median(alike):.5f} (lowest {min(alike):.5f}), rms of the difference "
        f"{np.median(rms):.3f} of their spread (highest {max(rms):.3f}).",
        f"Rows kept: {'; '.join(uneven) if uneven else 'equally many in every cell'}.",
    ])  # fmt: skip


# ---- a run


def resume(file: Path, setup: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Records that `file` holds already; begins it when there are none. Raises ValueError for another run's file."""
    found = read_objects(file)
    if not found:
        made = {**machine(), **{name: version(name) for name in PACKAGES}}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"setup": setup, "made": made}) + "\n", encoding="utf-8")
        return []
    if not isinstance(found[0], dict) or found[0].get("setup") != json.loads(json.dumps(setup)):
        raise ValueError(f"{file} holds another run; choose another --out")
    os.truncate(file, file.read_bytes().rfind(b"\n") + 1)  # a line that a kill cut short
    return found[1:]


def run(args: argparse.Namespace) -> str:
    """Measure what is missing; the table."""
    path = models.fetch(args.model)
    budgets = list(dict.fromkeys(b.strip() for b in args.budgets.split(",") if b.strip()))
    if not budgets:
        raise ValueError("--budgets is empty, expected one or more such as 0.1,0.2")
    task = Task.parse(f"{TASKS[args.task]}:tokens={args.tokens}")
    for budget in budgets:
        kept_tokens(budget, args.tokens)
    setup = {
        "task": task.name, "options": asdict(cast(Any, task)), "model": path.name, "model_sha256": sha256(path),
        "f32": args.f32, "budgets": budgets,
    }  # fmt: skip
    records = resume(args.out, setup)
    done = {r["index"] for r in records}
    todo = [i for i in range(args.samples) if i not in done]
    if todo:
        with tempfile.TemporaryDirectory() as scratch, args.out.open("a", encoding="utf-8") as f:
            file = dequantised(path, Path(scratch) / path.name) if args.f32 else path
            for record in measure(file, path, task, budgets, todo, args.threads):
                records.append(record)
                f.write(json.dumps(record) + "\n")
                f.flush()
                print(f"{len(records)} of {args.samples} samples, {record['seconds']:.0f} s", file=sys.stderr)
    return f"{table(records, task.metric)}\n\n{notes(records)}"


def measure(
    file: Path, path: Path, task: Task, budgets: Sequence[str], indices: Sequence[int], n_threads: int
) -> Iterator[dict[str, Any]]:
    """Records of samples: `file` is what our engine reads, `path` what transformers does."""
    torch.set_num_threads(n_threads)
    cells = [Cell(EvictionPolicy.parse(m.spec), Budget.parse(b)) for m in METHODS for b in budgets]
    session = Session(str(file), cells, n_ctx=task.n_ctx, n_threads=n_threads, n_threads_batch=n_threads)
    try:
        rival = Rival(path, session)
        for index in indices:
            start = time.perf_counter()
            record = compare(session, rival, task, task.sample(session, index), budgets)
            yield {**record, "seconds": round(time.perf_counter() - start, 1)}
    finally:
        session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m", help="a known model or a GGUF file (smollm2-135m)")
    parser.add_argument("--task", choices=TASKS, default="needle", help="what is measured (needle)")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt (1024)")
    parser.add_argument("--budgets", default="0.1,0.2,0.5", help="of the cache, window included (0.1,0.2,0.5)")
    parser.add_argument("--f32", action="store_true", help="our engine reads dequantised weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="a JSON line per sample; a stopped run goes on")
    args = parser.parse_args()
    if missing is not None:
        parser.error(f"{missing}; expected kvpress and what it needs: {INSTALL}")
    if args.samples < 1 or args.threads < 1:
        parser.error(f"--samples {args.samples} --threads {args.threads}, expected 1 or more")
    try:
        print(run(args))
    except (ValueError, OSError, models.ModelError) as e:
        sys.exit(f"error: {' '.join(str(e).split())}")


if __name__ == "__main__":
    main()
