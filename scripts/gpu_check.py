"""What scripts/gpu_check.sh runs once the libraries are built: the proof on a GPU, as one table and a JSON file.

Every check says what it saw and whether that is as it must be; the exit status is 1 when one is not.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from laprox_llamacpp import Llama, models
from laprox_llamacpp.evaluate import bench
from laprox_llamacpp.haystack import paragraphs

OPS = ("LAPROX_SCORE", "LAPROX_ATTN")
LENGTHS = (4096, 16384, 32768)
BUDGET = 0.05
LEAST_AGREEMENT = 0.98  # of kept rows, CPU against GPU: sums in another order change a few near the threshold
FLOOR_FACTOR = 2.0  # how far above the time to read K twice and V once the score op may be
FLOOR_BYTES = 1 << 28  # of K, from where on that is asked: no card's L2 holds half of it
# (KV heads, head width, rows) that native/tests/laprox-backend-ops.h times, all of F16
TIMED = {
    "LAPROX_SCORE": {
        (3, 64, 4096),
        (8, 128, 4096),
        (8, 128, 8192),
        (8, 128, 32768),
        (128, 128, 8192),
        (32, 128, 32768),
    },
    "LAPROX_ATTN": {(3, 64, 1024), (8, 128, 4096)},
}
_MIB = 1 << 20


@dataclass
class Check:
    """One line of the table; `ok` is None for a number that nothing is asked of."""

    what: str
    seen: str
    ok: bool | None
    data: Any = None


class Cuda:
    """What the CUDA runtime says about memory. Raises OSError on use where it is missing or finds no device."""

    @cached_property
    def _lib(self) -> ctypes.CDLL:
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        names = [ctypes.util.find_library("cudart"), *map(str, Path(home).glob("lib64/libcudart.so*"))]
        for name in filter(None, names):
            try:
                return ctypes.CDLL(name)
            except OSError:
                pass
        raise OSError(f"no libcudart, expected one in {home}/lib64; set CUDA_HOME")

    def used(self) -> int:
        """Bytes of device memory in use, by anybody."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second that a copy inside the device reads and writes."""
        n, rounds = 1 << 30, 20
        a, b = ctypes.c_void_p(), ctypes.c_void_p()
        for p in (a, b):
            self._call("cudaMalloc", ctypes.byref(p), ctypes.c_size_t(n))
        best = 0.0
        for _ in range(3):
            self._call("cudaDeviceSynchronize")
            start = time.perf_counter()
            for _ in range(rounds):
                self._call("cudaMemcpy", b, a, ctypes.c_size_t(n), ctypes.c_int(3))
            self._call("cudaDeviceSynchronize")
            best = max(best, 2 * n * rounds / (time.perf_counter() - start))
        for p in (a, b):
            self._call("cudaFree", p)
        return best

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._lib, name)(*args)
        if status != 0:
            raise OSError(f"{name} failed with status {status}")


def card(cuda: Cuda) -> Check:
    """Its name and driver, and the bandwidth that the op's times are held against."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return Check("card", f"{name}, copies at {cuda.bandwidth / 1e9:.0f} GB/s", None, cuda.bandwidth)


def test_ops(program: str) -> list[Check]:
    """llama.cpp's own comparison of each op with the CPU."""
    checks = []
    for op in OPS:
        done = subprocess.run([program, "test", "-o", op, "-b", "CUDA0"], capture_output=True, text=True)
        counts = re.findall(r"(\d+)/(\d+) tests passed", done.stdout)
        n_passed, n_run = map(int, counts[-1]) if counts else (0, 0)
        refused = done.stdout.count("not supported")
        seen = f"{n_passed} of {n_run} cases, {refused} refused" if counts else f"exit {done.returncode}"
        ok = done.returncode == 0 and 0 < n_passed == n_run and refused == 0  # those refused are not among those run
        checks.append(Check(f"test-backend-ops {op}", seen, ok, done.stdout[-4000:]))
    return checks


def time_ops(program: str, bandwidth: float) -> list[Check]:
    """The score op against the time to read K twice and V once; each op's own cases."""
    checks = []
    for op in OPS:
        done = subprocess.run([program, "perf", "-o", op, "-b", "CUDA0"], capture_output=True, text=True)
        missing = set(TIMED[op])
        for line in done.stdout.splitlines():
            found = re.search(rf"{op}\((.*?)\):\s+\d+ runs -\s+([\d.]+) us/run", line)
            if not found:
                continue
            case, us = dict(re.findall(r"(\w+)=([^,]+)", found[1])), float(found[2])
            n = int(case.get("n_kv") or case["n_mask"])
            missing.discard((int(case["n_head_kv"]), int(case["d"]), n))
            n_bytes = 2 * int(case["d"]) * int(case["n_head_kv"]) * n  # of K, and of V
            passes = 3 if op == OPS[0] else 2
            floor = 1e6 * passes * n_bytes / bandwidth
            ok = us <= FLOOR_FACTOR * floor if op == OPS[0] and n_bytes >= FLOOR_BYTES else None
            what = f"{op}, {case['n_head_kv']} KV heads x {case['d']}, {n} rows"
            seen = f"{us:.1f} us, {us / floor:.2f}x the time to read the rows"
            checks.append(Check(what, seen, ok, {"us": us, "floor_us": floor, "case": case}))
        if missing:
            shapes = ", ".join(f"{heads} x {d}, {n} rows" for heads, d, n in sorted(missing))
            checks.append(
                Check(f"{op}, times", f"none of {shapes} (exit {done.returncode})", False, done.stdout[-4000:])
            )
    return checks


def evict(model: str, tokens: list[int], n_gpu_layers: int) -> dict[str, Any]:
    """A prompt evicted at `BUDGET`: what was kept, and what it took."""
    llm = Llama(
        model, n_ctx=len(tokens) + 64, kv_evict="laprox", budget=BUDGET, n_gpu_layers=n_gpu_layers, verbose=False,
        op_offload=n_gpu_layers != 0,  # else the GPU multiplies for the CPU where a batch is large
    )  # fmt: skip
    try:
        llm.eval(tokens)
        return {"kept": llm.kv_kept(), "stats": llm.kv_stats()}
    finally:
        llm.close()


def agreement(model: str, tokens: list[int]) -> list[Check]:
    """Kept sets of CPU and GPU on one prompt."""
    cpu, gpu = (evict(model, tokens, n) for n in (0, -1))
    same = [len(np.intersect1d(cpu["kept"][k], gpu["kept"][k])) / len(cpu["kept"][k]) for k in cpu["kept"]]
    share, s = float(np.mean(same)), gpu["stats"]
    found = {"mean": share, "min": min(same), "heads": len(same)}
    seen = f"{share:.2%} the same, worst head {min(same):.1%}"
    took = f"{s.score_ms:.1f} / {s.plan_ms:.1f} / {s.commit_ms:.1f} ms, {s!r}"
    ours = (s.score_path, s.attention_path) == ("fused", "ragged_op") and "CPU" not in s.devices
    return [
        Check(f"kept rows, CPU against GPU, {len(tokens)} tokens", seen, share >= LEAST_AGREEMENT, found),
        Check("our ops on the GPU", f"{', '.join(s.devices)}: scores {s.score_path}, decode {s.attention_path}", ours),
        Check("score / plan / move on the GPU", took, None),
    ]


def memory(model: str, tokens: list[int], cuda: Cuda) -> Check:
    """Bytes that cudaMemGetInfo sees freed by an eviction, against what the stats say."""
    llm = Llama(model, n_ctx=len(tokens) + 64, kv_evict="laprox", budget=BUDGET, n_gpu_layers=-1, verbose=False)
    try:
        held: dict[str, int] = {}
        evict_now = llm._evict

        def watch(*args: Any) -> None:
            held["before"] = cuda.used()
            evict_now(*args)
            held["after"] = cuda.used()

        llm._evict = watch  # type: ignore[method-assign]
        llm.eval(tokens)
        s = llm.kv_stats()
        freed, said = held["before"] - held["after"], s.bytes_full - s.bytes_now
        near = abs(freed - said) <= max(64 * _MIB, 0.25 * said)  # the driver hands out and takes back whole pages
        seen = f"cudaMemGetInfo {freed / _MIB:.0f} MiB freed, stats {said / _MIB:.0f} MiB"
        return Check(
            f"memory freed, {len(tokens)} tokens at {BUDGET:.0%}", seen, near and freed > 0, {**held, "said": said}
        )
    finally:
        llm.close()


def decode(model: str, length: int) -> Check:
    """Decode speed full against evicted, caches in turn."""
    (g,) = bench.run(speed(model, length))["groups"]
    full, evicted = (1000 / float(np.median(g[k]["decode_ms"])) for k in ("full", "evicted"))
    seen = f"{full:.1f} -> {evicted:.1f} tokens/s ({g['speedup']:.2f}x, {g['of_limit']:.0%} of the limit)"
    return Check(f"decode, {length} tokens at {BUDGET:.0%}", seen, None, g)


def speed(model: str, length: int) -> bench.Bench:
    """The benchmark behind `decode`."""
    return bench.Bench(
        Path(model), [length], ["laprox"], [str(BUDGET)],
        rounds=3, n_decode=32, n_gpu_layers=-1, beyond_training=True,
    )  # fmt: skip


def run(steps: dict[str, Callable[[], Check | list[Check]]], out: Path) -> list[Check]:
    """All checks, printed as they come; one that fails to run is a failed check, and does not stop the others."""
    checks: list[Check] = []
    for name, step in steps.items():
        try:
            found = step()
        except Exception as e:
            found = Check(name, f"{type(e).__name__}: {e}", False)
        for check in found if isinstance(found, list) else [found]:
            verdict = {True: "OK    ", False: "FAILED", None: "      "}[check.ok]
            print(f"{verdict} {check.what}: {check.seen}", flush=True)
            checks.append(check)
        out.write_text(json.dumps([asdict(c) for c in checks], indent=1, default=str) + "\n", encoding="utf-8")
    return checks


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ops", required=True, help="the program test-backend-ops")
    ap.add_argument("--model", required=True)
    ap.add_argument("--out", type=Path, required=True)
    args = ap.parse_args()
    model = str(models.fetch(args.model))
    vocab = Llama(model, vocab_only=True, verbose=False)
    words = vocab.tokenize("\n\n".join(paragraphs()).encode())
    vocab.close()

    def text(n: int) -> list[int]:
        return (words * (n // len(words) + 1))[:n]

    cuda = Cuda()
    steps: dict[str, Callable[[], Check | list[Check]]] = {
        "card": lambda: card(cuda),
        "test-backend-ops": lambda: test_ops(args.ops),
        "kept rows, CPU against GPU": lambda: agreement(model, text(4096)),
        "memory freed": lambda: memory(model, text(16384), cuda),
        "times of the ops": lambda: time_ops(args.ops, cuda.bandwidth),
    }
    for n in LENGTHS:
        steps[f"decode, {n} tokens"] = lambda n=n: decode(model, n)  # type: ignore[misc]
    checks = run(steps, args.out)
    print("\n| check | seen | |\n|---|---|---|")
    for c in checks:
        print(f"| {c.what} | {' '.join(c.seen.split())} | {'' if c.ok is None else 'ok' if c.ok else '**failed**'} |")
    return int(any(c.ok is False for c in checks))


if __name__ == "__main__":
    sys.exit(main())
