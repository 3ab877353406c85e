"""The README's picture: needles found against the budget, from the runs in docs/results.

python scripts/readme_figure.py docs/results docs/results/needles.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from laprox_llamacpp.evaluate import stats
from laprox_llamacpp.evaluate.stats import Experiment, Key

PANELS = (("needle-smol-2k", "SmolLM2-135M, 2K tokens"), ("needle-qwen-4k", "Qwen2.5-Coder-0.5B, 4K tokens"))
# method, name, colour of Okabe and Ito, line, marker
LINES = (
    ("laprox", "LaProx, our default", "#D55E00", "-", "o"),
    ("laprox:preset=paper", "LaProx as published", "#E69F00", "--", "s"),
    ("criticalkv", "CriticalKV", "#CC79A7", "-.", "D"),
    ("snapkv", "SnapKV", "#0072B2", "--", "^"),
    ("adakv", "AdaKV", "#56B4E9", "-.", "v"),
    ("quest", "Quest (reads, frees nothing)", "#009E73", ":", "P"),
    ("h2o", "H2O", "#777777", "--", "X"),
    ("streaming", "StreamingLLM", "#777777", ":", "<"),
)


def draw(axis: plt.Axes, experiment: Experiment, title: str) -> None:
    budgets = experiment.budgets
    for method, name, color, line, marker in LINES:
        means = [experiment.mean(Key("f16", method, b)) for b in budgets]
        x = [100 * float(b) for b in budgets]
        axis.errorbar(
            x, [m.mean for m in means], yerr=[m.sem for m in means], color=color, linestyle=line, marker=marker,
            label=name, capsize=2, linewidth=2.4 if method == "laprox" else 1.3, zorder=3 if method == "laprox" else 2,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_xticks([100 * float(b) for b in budgets], [f"{100 * float(b):g} %" for b in budgets])
    axis.minorticks_off()
    axis.set_ylim(-0.03, 1.05)
    axis.set_xlabel("rows kept of the prompt")
    axis.set_title(f"{title}, n = {len(experiment.counted('f16'))}", fontsize=10)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def main(results: Path, out: Path) -> None:
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9.6, 3.9), layout="constrained", sharey=True)
    for axis, (folder, title) in zip(axes, PANELS):
        (experiment,), _ = stats.read(results / folder)
        draw(axis, experiment, title)
    axes[0].set_ylabel("needles found, of those that\nthe full cache finds")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8.5, frameon=False
    )
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("two arguments expected: the folder of the results, and the picture to write")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
