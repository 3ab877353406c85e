"""Needles in a real text: how often the answer survives eviction. Prints a Markdown table.

A sample is a prompt of about `--n-tokens` tokens of Python's documentation, shuffled, with one sentence "The special
magic number for the amber lighthouse is 4821937." in it (single) or four such sentences (multikey), one of them asked
for at the end, in the model's own chat template. The answer is right when it holds the exact number.

Each sample is prefilled once. The full cache answers from it, then every policy and budget: the answer's tokens are
removed, the prompt is scored, and the evicted rows are masked instead of freed. Masking keeps what freeing keeps;
tests/test_quality.py takes the same samples through the freeing store.

    python bench/needles.py --model qwen2.5-coder-0.5b --out qwen.jsonl

One line of JSON per sample goes to `--out`; a second run with the same file skips what is there and adds the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from laprox_llamacpp import EvictionPolicy, Llama, _native, models
from laprox_llamacpp.budget import Budget
from laprox_llamacpp.demo import chat_tokens
from laprox_llamacpp.haystack import Fact, facts, paragraphs
from laprox_llamacpp.observed import ObservedPrompt

import llama_cpp  # isort: skip

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
TASKS = {"single": 1, "multikey": 4}  # sentences in the text
MAX_TOKENS = 20
BUDGETS = (0.05, 0.1, 0.2)
POLICIES = ("laprox", "laprox:preset=paper")


@dataclass(frozen=True)
class Style:
    """How one model is asked. A small one needs its answer opened for it, and remembers fewer digits."""

    digits: int
    open_answer: bool


STYLES = {"smollm2-135m": Style(4, True)}
DEFAULT_STYLE = Style(7, False)


@dataclass(frozen=True)
class Sample:
    """A prompt and the number that answers it."""

    task: str
    index: int
    depth: float
    number: str
    tokens: list[int]

    def right(self, answer: str) -> bool:
        return self.number in answer


def make_sample(llm: Llama, style: Style, index: int, n_tokens: int, seed: int) -> Sample:
    """Sample `index` of a run: single and multikey alternate, each goes through the depths in turn.

    The text is cut, by words, to the longest prompt of at most `n_tokens` tokens.
    """
    task = list(TASKS)[index % len(TASKS)]
    depth = DEPTHS[index // len(TASKS) % len(DEPTHS)]
    rng = random.Random(f"{seed}/{index}")
    hidden = facts(TASKS[task], seed=rng.getrandbits(32), digits=style.digits)
    depths = [depth] + [rng.random() for _ in hidden[1:]]
    pool = paragraphs()
    rng.shuffle(pool)
    words = " \n\n ".join(pool).split(" ")
    low, high = 0, min(len(words), n_tokens)
    tokens = _tokens(llm, style, hidden, depths, words[:low])
    while high - low > 1:
        middle = (low + high) // 2
        tried = _tokens(llm, style, hidden, depths, words[:middle])
        if len(tried) <= n_tokens:
            low, tokens = middle, tried
        else:
            high = middle
    return Sample(task, index, depth, hidden[0].number, tokens)


def _tokens(
    llm: Llama, style: Style, hidden: Sequence[Fact], depths: Sequence[float], words: Sequence[str]
) -> list[int]:
    """The prompt around the text `words`; the first of the `hidden` facts is asked for."""
    parts = [p for p in " ".join(words).replace(" \n\n ", "\n\n").strip().split("\n\n") if p]
    places = sorted(((round(d * len(parts)), f.sentence) for d, f in zip(depths, hidden)), reverse=True)
    for at, sentence in places:
        parts.insert(at, sentence)
    question = f"What is the special magic number for the {hidden[0].name}? Reply with the number only."
    opening = f"The special magic number for the {hidden[0].name} is" if style.open_answer else ""
    return chat_tokens(llm, "\n\n".join([*parts, question]), opening)


class Prefilled(Llama):
    """A `Llama` whose prompts wait, observed and whole, for one eviction after another."""

    def _evict(self, policy: EvictionPolicy, n_prompt: int) -> None:
        """What would follow the prefill is done by `evicted`, as often as wanted."""

    def prefill(self, tokens: Sequence[int]) -> None:
        self.reset()
        self.eval(tokens)
        self._n_prompt = len(tokens)
        self._first = self._greedy()

    def full(self) -> str:
        """Answer from the full cache. Before `evicted`: a masked row stays masked."""
        return self._answer()

    def evicted(self, policy: EvictionPolicy, budgets: Sequence[float]) -> list[str]:
        """Answers of one policy, a budget each."""
        answers = []
        for budget in budgets:
            self._ctx.kv_cache_seq_rm(-1, self._n_prompt, -1)
            self.n_tokens = self._n_prompt
            k = Budget.parse(budget).kept(self._n_prompt, policy.window, self._bytes_per_token)
            prompt = ObservedPrompt(self.ctx, self._n_prompt, policy.window, self.model_path, self._pieces)
            _native.set_kept(self.ctx, policy.keep(prompt, k), _native.STORE_MASK)
            answers.append(self._answer())
        return answers

    def _greedy(self) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.ctx, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.n_vocab(),)).argmax())

    def _answer(self) -> str:
        """Greedy decode. The first token comes from the prefill, whatever is evicted after it."""
        out, token = [], self._first
        while not llama_cpp.llama_vocab_is_eog(self._model.vocab, token):
            out.append(token)
            if len(out) == MAX_TOKENS:
                break
            self.eval([token])
            token = self._greedy()
        return self.detokenize(out).decode("utf-8", errors="replace").strip()


def cell(policy: str, budget: float) -> str:
    return f"{policy}@{budget:g}"


def run(
    model: str, n_samples: int, n_tokens: int, seed: int, policies: Sequence[str], budgets: Sequence[float],
    n_threads: int, out: Path, console: Console,
) -> list[dict[str, Any]]:  # fmt: skip
    """The records of all samples, those read from `out` included."""
    columns = [cell(p, b) for p in policies for b in budgets]
    setup = {"model": model, "n_tokens": n_tokens, "seed": seed, "columns": columns}
    done: dict[int, dict[str, Any]] = {}
    if out.exists():
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        done = {r["index"]: r for r in lines if r["setup"] == setup}
    todo = [i for i in range(n_samples) if i not in done]
    style = STYLES.get(model, DEFAULT_STYLE)
    if todo:
        llm = Prefilled(
            str(models.fetch(model)), kv_evict=policies[0], budget=min(budgets), n_ctx=n_tokens + 64, verbose=False,
            n_threads=n_threads, n_threads_batch=n_threads,
        )  # fmt: skip
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        with bar, out.open("a", encoding="utf-8") as f:
            for i in bar.track(todo, description=model):
                sample = make_sample(llm, style, i, n_tokens, seed)
                llm.prefill(sample.tokens)
                answers = {"full": llm.full()}
                for policy in policies:
                    texts = llm.evicted(EvictionPolicy.parse(policy), budgets)
                    answers.update({cell(policy, b): text for b, text in zip(budgets, texts)})
                done[i] = {
                    "setup": setup,
                    "index": i,
                    "task": sample.task,
                    "depth": sample.depth,
                    "n_prompt": len(sample.tokens),
                    "number": sample.number,
                    "right": {name: sample.right(text) for name, text in answers.items()},
                    "answers": answers,
                }
                f.write(json.dumps(done[i]) + "\n")
                f.flush()
        llm.close()
    return [done[i] for i in range(n_samples)]


def table(records: Sequence[dict[str, Any]], policies: Sequence[str], budgets: Sequence[float]) -> str:
    """Markdown: share of right answers where the full cache is right, single / multikey / both."""
    known = [r for r in records if r["right"]["full"]]
    groups = [[r for r in known if r["task"] == task] for task in TASKS] + [known]
    n_all = " / ".join(str(sum(r["task"] == task for r in records)) for task in TASKS)
    n_full = " / ".join(str(len(g)) for g in groups[:-1])
    head = " | ".join(f"{b:.3g}%" for b in (100 * b for b in budgets))
    lines = [
        f"full cache right: {n_full} of {n_all} (single / multikey)\n",
        f"| policy | {head} |",
        "|---" * (len(budgets) + 1) + "|",
    ]
    for policy in policies:
        shares = [
            " / ".join(f"{np.mean([r['right'][cell(policy, b)] for r in g]):.2f}" if g else "-" for g in groups)
            for b in budgets
        ]
        lines.append(f"| `{policy}` | " + " | ".join(shares) + " |")
    return "\n".join([*lines, "", "Each entry: single / multikey / both, of those that the full cache answers."])


def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", default="smollm2-135m", help="a name that laprox_llamacpp.models knows, or a GGUF file")
    ap.add_argument("--n-samples", type=int, default=40, help="half of them single, half multikey")
    ap.add_argument("--n-tokens", type=int, default=2048, help="length of the prompt")
    ap.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="fractions, with commas between")
    ap.add_argument("--policies", default=",".join(POLICIES), help="as Llama(kv_evict=...), with commas between")
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--out", type=Path, default=Path("needles.jsonl"))
    args = ap.parse_args(argv)
    policies = args.policies.split(",")
    budgets = [float(b) for b in args.budgets.split(",")]
    records = run(
        args.model, args.n_samples, args.n_tokens, args.seed, policies, budgets, args.threads, args.out,
        Console(stderr=True),
    )  # fmt: skip
    print(f"{args.model}, prompts of {args.n_tokens} tokens, seed {args.seed}, window 32\n")
    print(table(records, policies, budgets))


if __name__ == "__main__":
    main()
