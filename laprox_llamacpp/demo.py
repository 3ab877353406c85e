"""The demo: facts hidden in a long text, asked for with the full cache and with what smaller budgets leave of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp.llama_chat_format as chat_format
from rich.console import Console
from rich.table import Table

from . import haystack, models
from ._util import Clock
from .llama import Llama
from .policy import EvictionPolicy
from .stats import KVStats

BUDGETS = (0.2, 0.1, 0.05)
DEPTHS = (0.15, 0.5, 0.85)
MAX_TOKENS = 32
ROOM = 256  # tokens for the chat template, the question and the answer


@dataclass(frozen=True)
class Prompt:
    """A text with facts in it and a question about all of them, as tokens of one model."""

    tokens: list[int]
    facts: list[haystack.Fact]
    needles: list[int]  # positions of the facts' tokens


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    cache: str
    answer: str
    n_right: int
    stats: KVStats
    kv_bytes: int
    needles_kept: float | None = None  # share of the facts' rows still there, over all layers and heads


class _FullFirst(Llama):
    """Evicts when told to, so that one prefill serves the full cache and a budget."""

    _due: int | None = None

    def _evict(self, policy: EvictionPolicy, n_prompt: int) -> None:
        self._due = n_prompt

    def evict_now(self) -> None:
        assert self._policy is not None and self._due is not None
        self._ctx.kv_cache_seq_rm(-1, self._due, -1)
        self.n_tokens = self._due
        self._requires_eval = True
        self._decode = Clock()
        super()._evict(self._policy, self._due)


def run(
    console: Console,
    model: str = "qwen2.5-coder-0.5b",
    policy: str = "laprox",
    budgets: Sequence[float] = BUDGETS,
    n_tokens: int = 4096,
    n_facts: int = 3,
    seed: int = 1,
) -> list[Row]:
    """Run the demo and print its table; returns the table's rows, the full cache first.

    Args:
        console: where to print.
        model: a name of `models.fetch` or a path of a GGUF chat model.
        policy: as `Llama(kv_evict=...)`.
        budgets: each takes one prefill.
        n_tokens: least length of the text.
        n_facts: hidden facts, at most 3; all are asked for in one question.
        seed: of the text's order, the facts and their numbers.
    """
    path = models.fetch(model)
    rows: list[Row] = []
    for i, budget in enumerate(budgets, 1):
        start = time.perf_counter()
        llm = _FullFirst(str(path), n_ctx=n_tokens * 2 + ROOM, kv_evict=policy, budget=budget, verbose=False)
        try:
            prompt = make_prompt(llm, n_tokens, n_facts, seed)
            if i == 1:
                _introduce(console, path.name, prompt)
            with console.status(f"prefill of {len(prompt.tokens)} tokens ({i} of {len(budgets)})"):
                llm.eval(prompt.tokens)
                if i == 1:
                    rows.append(_answer(llm, prompt, "full"))
                llm.evict_now()
                rows.append(_answer(llm, prompt, f"{budget:.0%}"))
        finally:
            llm.close()
        console.print(f"[{i}/{len(budgets)}] budget {budget:.0%}: {time.perf_counter() - start:.1f} s", markup=False)
    console.print(table(rows, n_facts))
    console.print(kept_line(rows[-1]), markup=False)
    return rows


def make_prompt(llm: Llama, n_tokens: int, n_facts: int, seed: int) -> Prompt:
    """Hide `n_facts` facts and ask for them in the model's chat template. Raises ValueError if it has none."""
    facts = haystack.facts(n_facts, seed)
    text = haystack.hide(facts, n_tokens, lambda s: len(llm.tokenize(s.encode(), add_bos=False)), seed, DEPTHS)
    question, opening = ask_for(facts)
    tokens = chat_tokens(llm, f"{text}\n\n{question}", opening)
    return Prompt(tokens, facts, needle_positions(llm, tokens, [f.sentence for f in facts]))


def chat_tokens(llm: Llama, content: str, opening: str = "") -> list[int]:
    """A user's turn in the model's chat template, and how the answer opens. Raises ValueError without a template."""
    template = llm.metadata.get("tokenizer.chat_template")
    if template is None:
        raise ValueError(f"{llm.model_path} has no chat template, expected a chat (instruct) model")
    eos, bos = (llm._model.token_get_text(t) if t >= 0 else "" for t in (llm.token_eos(), llm.token_bos()))
    formatter = chat_format.Jinja2ChatFormatter(template=template, eos_token=eos, bos_token=bos)
    prompt = formatter(messages=[{"role": "user", "content": content}]).prompt + opening
    tokens: list[int] = llm.tokenize(prompt.encode(), add_bos=False, special=True)
    return tokens


def ask_for(facts: Sequence[haystack.Fact]) -> tuple[str, str]:
    """The question, and how the answer opens: a small model needs the opening to name one number and nothing else."""
    names = [f"the {f.name}" for f in facts]
    if len(names) == 1:
        return f"What is the special magic number for {names[0]}?", f"The special magic number for {names[0]} is"
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"What are the special magic numbers for {listed}? Reply with the numbers only.", ""


def needle_positions(llm: Llama, tokens: Sequence[int], sentences: Sequence[str]) -> list[int]:
    """Positions of the tokens that spell each sentence where it first occurs."""
    pieces = [llm.detokenize([t], special=True) for t in tokens]
    text = b"".join(pieces)
    spans = [(start, start + len(s.encode())) for s in sentences for start in [text.find(s.encode())] if start >= 0]
    positions, at = [], 0
    for i, piece in enumerate(pieces):
        if any(at < end and at + len(piece) > start for start, end in spans):
            positions.append(i)
        at += len(piece)
    return positions


def _answer(llm: Llama, prompt: Prompt, cache: str) -> Row:
    completion = llm.create_completion(list(prompt.tokens), max_tokens=MAX_TOKENS, temperature=0.0)
    answer = completion["choices"][0]["text"].strip()
    stats = llm.kv_stats()
    return Row(
        cache=cache,
        answer=answer,
        n_right=sum(haystack.says(answer, f.number) for f in prompt.facts),
        stats=stats,
        kv_bytes=stats.bytes_now,
        needles_kept=_share(llm, prompt.needles) if stats.evicted else None,
    )


def _share(llm: Llama, needles: Sequence[int]) -> float:
    kept = list(llm.kv_kept().values())
    there = sum(len(set(needles).intersection(pos.tolist())) for pos in kept)
    return there / max(1, len(kept) * len(needles))


def _introduce(console: Console, name: str, prompt: Prompt) -> None:
    console.print(f"{name}: {len(prompt.tokens)} tokens of Python's documentation, with these sentences hidden in it:")
    for fact in prompt.facts:
        console.print(f"  {fact.sentence}", highlight=False)


def table(rows: Sequence[Row], n_facts: int) -> Table:
    """The demo's table; KV bytes include the room that is held ready for new tokens."""
    out = Table()
    out.add_column("cache")
    out.add_column("answer", overflow="fold")
    for name in ("right", "KV MiB", "decode tokens/s", "score + evict ms"):
        out.add_column(name, justify="right")
    for row in rows:
        s = row.stats
        took = f"{s.score_ms + s.plan_ms + s.commit_ms:.0f}" if s.evicted else "-"
        right = f"[{'green' if row.n_right == n_facts else 'red'}]{row.n_right}/{n_facts}[/]"
        first = (row.answer.splitlines() or [""])[0]
        out.add_row(row.cache, first, right, f"{row.kv_bytes / (1 << 20):.1f}", f"{s.decode_tps:.1f}", took)
    return out


def kept_line(row: Row) -> str:
    """What was kept, in one line."""
    s = row.stats
    if not s.evicted:
        return f"at {row.cache} nothing was evicted: {s.fallback or 'the budget holds the whole prompt'}"
    per_head = s.kept_per_head[s.kept_per_head >= 0]
    return (
        f"kept at {row.cache}: {s.rows_kept} of {s.rows_full} rows in {per_head.size} heads, per head "
        f"{per_head.min()} to {per_head.max()} (mean {per_head.mean():.0f}), "
        f"{row.needles_kept or 0:.0%} of the rows of the hidden sentences"
    )
