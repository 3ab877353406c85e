"""`laprox-llamacpp kept`: which rows of a prompt survive, per layer and KV head (the paper's figure 6)."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..llama import token_bytes
from .cells import Cell, grid
from .session import Session
from .texts import chat, source, tokenize

import llama_cpp.llama_cpp as lib  # isort: skip

_ROOM = 64


@dataclass(frozen=True)
class Token:
    """A token of the prompt: the text that ends in it, its bytes, and whether it is a control token of the model.

    `text` is "" while a character is not complete; its last token then has it.
    """

    text: str
    piece: bytes
    control: bool


@dataclass(frozen=True)
class Survivors:
    """What a method keeps of a prompt: [number of KV heads, N] of bool, the window included."""

    cell: Cell
    rows: npt.NDArray[np.bool_]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Kept positions of each KV head."""
        out: npt.NDArray[np.int64] = self.rows.sum(axis=1, dtype=np.int64)
        return out

    @property
    def shares(self) -> npt.NDArray[np.float64]:
        """Share of the heads, over all layers, in which each position survives, [N]."""
        out: npt.NDArray[np.float64] = self.rows.mean(axis=0, dtype=np.float64)
        return out

    def binned(self, n_bins: int) -> npt.NDArray[np.float64]:
        """Shares of kept positions in at most `n_bins` stretches of equal length, [number of KV heads, bins]."""
        n = self.rows.shape[1]
        starts = np.arange(0, n, -(-n // n_bins))
        sums = np.add.reduceat(self.rows, starts, axis=1, dtype=np.int64)
        out: npt.NDArray[np.float64] = sums / np.diff(np.append(starts, n))
        return out


@dataclass(frozen=True)
class Kept:
    """A prompt and what each method keeps of it; `heads` are (model layer, KV head)."""

    model: str
    question: str
    window: int
    tokens: list[Token]
    heads: list[tuple[int, int]]
    survivors: list[Survivors]


def measure(
    model_path: str,
    text: str,
    question: str,
    methods: Sequence[str],
    budget: str,
    n_tokens: int = 1024,
    n_threads: int | None = None,
) -> Kept:
    """Prefill the text with the question after it, and ask each method what it keeps.

    Args:
        model_path: a GGUF file.
        text: its beginning is used, as much as fits.
        question: in the same turn of the chat, after the text.
        methods: specs as `EvictionPolicy.parse`, with one window for all.
        budget: as `Budget.parse`.
        n_tokens: longest prompt, with the question and the chat template.
        n_threads: as `Llama`.

    Raises:
        ValueError: no text, no question, no method, an unknown one, or a prompt that is too short or cannot be cut.
    """
    if not text.strip() or not question.strip():
        raise ValueError(f"the {'question' if text.strip() else 'text'} is empty, expected words")
    cells = grid(methods, [budget])
    if not any(c.policy.evicts for c in cells):
        raise ValueError("no method that evicts is named, expected one or more such as laprox,snapkv")
    threads: dict[str, Any] = {} if n_threads is None else {"n_threads": n_threads, "n_threads_batch": n_threads}
    session = Session(model_path, cells, n_ctx=n_tokens + _ROOM, **threads)
    try:
        prompt = _prompt(session, text, question, n_tokens)
        session.prefill(prompt)
        survivors = []
        for cell in cells:
            with session.under(cell):
                survivors.append(Survivors(cell, _rows(session, len(prompt), cell.policy.window)))
        pieces = [token_bytes(session._model.vocab, t) for t in prompt]
        controls = [bool(lib.llama_vocab_is_control(session._model.vocab, t)) for t in prompt]
        return Kept(
            Path(model_path).name, question, cells[0].policy.window,
            tokens(pieces, controls), [(il, h) for il, n in session._layers for h in range(n)], survivors,
        )  # fmt: skip
    finally:
        session.close()


def tokens(pieces: Iterable[bytes], controls: Iterable[bool]) -> list[Token]:
    """Texts of tokens that may hold parts of characters; bytes that are no UTF-8 become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [Token(decoder.decode(piece), piece, control) for piece, control in zip(pieces, controls)]


def named_text(name: str) -> str:
    """A text that every machine has: "python" or "code"; see `texts.source`."""
    return "\n\n".join(source(name))


def _prompt(session: Session, text: str, question: str, n_tokens: int) -> list[int]:
    """One turn of a chat: the beginning of the text, as long as fits, and the question."""

    def build(beginning: str) -> list[int]:
        return tokenize(session, chat(session, [{"role": "user", "content": f"{beginning}\n\n{question}"}]))

    whole = session.tokenize(text.encode(), add_bos=False, special=False)
    n = min(len(whole), n_tokens - len(build("")))
    while n > 0:
        beginning = text if n == len(whole) else session.detokenize(whole[:n]).decode("utf-8", errors="ignore")
        made = build(beginning)
        if len(made) <= n_tokens:
            return made
        n -= len(made) - n_tokens
    raise ValueError(f"{n_tokens} tokens do not hold the question and any of the text; raise --tokens")


def _rows(session: Session, n_prompt: int, window: int) -> npt.NDArray[np.bool_]:
    rows = np.ones((session._n_heads, n_prompt), np.bool_)
    if _native.stats(session.ctx).evicted:
        rows[:, : n_prompt - window] = False
        for row, positions in zip(rows, _native.kept(session.ctx)):
            row[positions] = True
    return rows
