"""The page of `laprox-llamacpp kept`: heat maps, and the prompt with every token shaded by how much of it survives."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from .kept import Kept, Survivors, Token
from .page import note, page

_BINS = 1024  # columns of a map at most
_BLUE, _WHITE = np.array([0, 114, 178]), np.array([255, 255, 255])
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff]")


def render(kept: Kept) -> str:
    """The whole page, without anything outside it."""
    here = Path(__file__)
    n, names = len(kept.tokens), [str(s.cell.policy) for s in kept.survivors]
    budget = str(kept.survivors[0].cell.budget)
    body = [
        f"<h1>What survives of {n} tokens at budget {escape(budget)}</h1>",
        f'<p class="quiet">{escape(kept.model)}; {len(kept.heads)} KV heads in '
        f"{len({layer for layer, _ in kept.heads})} layers; question: {escape(kept.question)}</p>",
        *(note(f"{name} removes nothing from this cache.") for name, s in zip(names, kept.survivors) if s.rows.all()),
        "<h2>Rows kept by each head</h2>",
        *_counts(kept, names),
        "<h2>Positions kept by each head</h2>",
        '<p class="quiet">Dark: kept. Rows are KV heads, layer after layer; columns positions'
        f"{_binned(n)}. Point at a map to see what is there; click to go to the text.</p>",
        *(_map(i, name, kept) for i, name in enumerate(names)),
        "<h2>The prompt</h2>",
        _text(kept, names),
        '<p id="tip" role="status" hidden></p>',
        f'<script type="application/json" id="data">{_data(kept, names)}</script>',
    ]
    style, script = (here.with_name(f"kept.{end}").read_text(encoding="utf-8") for end in ("css", "js"))
    return page("What survives of a prompt", "\n".join(body), style, script)


def _counts(kept: Kept, names: Sequence[str]) -> list[str]:
    """Layer x head heat maps of kept rows, all on one scale."""
    most = max(int(s.counts.max()) for s in kept.survivors)
    layers = list(dict.fromkeys(layer for layer, _ in kept.heads))
    n_heads = 1 + max(h for _, h in kept.heads)
    size = max(10, min(34, 1100 // len(layers)))
    out = []
    for name, s in zip(names, kept.survivors):
        squares = []
        for (layer, head), count in zip(kept.heads, s.counts.tolist()):
            x, y, share = 40 + size * layers.index(layer), 4 + size * head, count / most
            red, green, blue = (_WHITE + share * (_BLUE - _WHITE)).astype(int).tolist()
            squares.append(
                f"<g><title>layer {layer}, head {head}: {count} of {len(kept.tokens)} rows</title>"
                f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="rgb({red},{green},{blue})" stroke="#fff"/>'
            )
            if size >= 9 * len(str(most)) - 3:
                middle = f'x="{x + size / 2}" y="{y + size / 2 + 3.5}"'
                squares.append(f'<text {middle} fill="{"#fff" if share > 0.6 else "#000"}">{count}</text>')
            squares.append("</g>")
        every = max(1, math.ceil(20 / size))
        bottom = 4 + size * n_heads + 14
        labels = [
            f'<text x="{40 + size * (i + 0.5)}" y="{bottom}">{layer}</text>'
            for i, layer in enumerate(layers)
            if i % every == 0
        ]
        labels += [f'<text x="26" y="{4 + size * (h + 0.5) + 3.5}">{h}</text>' for h in range(n_heads)]
        width, height = 44 + size * len(layers), bottom + 18
        least, mean = int(s.counts.min()), float(s.counts.mean())
        out.append(
            f'<h3>{escape(name)}</h3><figure class="scroll counts"><svg role="img" aria-label="rows kept by each head" '
            f'width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(squares + labels)}'
            f'<text x="{40 + size * len(layers) / 2}" y="{bottom + 14}">layer</text>'
            f'<text x="8" y="{4 + size * n_heads / 2}" transform="rotate(-90 8 {4 + size * n_heads / 2})">head</text>'
            f"</svg><figcaption>From {least} to {int(s.counts.max())} rows a head, {mean:.0f} on average, of "
            f"{len(kept.tokens)}; the {kept.window} of the window are among them.</figcaption></figure>"
        )
    return out


def _map(i: int, name: str, kept: Kept) -> str:
    """Where a position x head map is drawn."""
    n = len(kept.tokens)
    ticks = "".join(f"<span>{round(k * n / 4)}</span>" for k in range(5))
    return (
        f'<h3>{escape(name)}</h3><div class="map"><div class="down"><span>layer {kept.heads[0][0]}</span>'
        f"<span>layer {kept.heads[-1][0]}</span></div>"
        f'<canvas data-method="{i}" style="height: {max(120, min(3 * len(kept.heads), 420))}px"></canvas>'
        f'<div class="across">{ticks}</div></div>'
    )


def _text(kept: Kept, names: Sequence[str]) -> str:
    choices = "".join(
        f'<label><input type="radio" name="method" value="{i}"{" checked" if i == 0 else ""}> {escape(name)}</label>'
        for i, name in enumerate(names)
    )
    legend = "".join(
        f'<span class="step" style="--s:{_alpha(share)}">{share:.0%}</span>' for share in (0, 0.05, 0.2, 0.5, 1)
    )
    shares = kept.survivors[0].shares
    spans = "".join(_span(i, token, share) for i, (token, share) in enumerate(zip(kept.tokens, shares.tolist())))
    return (
        f"<fieldset><legend>Shaded by</legend>{choices}</fieldset>"
        '<p class="quiet">The darker a token, the more of the (layer, head) rows keep it: '
        f"{legend}. The last {kept.window} are the window, which always stays. Boxed: control tokens.</p>"
        f'<div id="text" dir="auto">{spans}</div>'
    )


def _span(i: int, token: Token, share: float) -> str:
    kind = "control" if token.control else "" if token.text else "part"
    kinds = f' class="{kind}"' if kind else ""
    return f'<span{kinds} data-i="{i}" style="--s:{_alpha(share)}">{escape(shown(token.text))}</span>'


def shown(text: str) -> str:
    """A token's text; line ends, control and format characters are made visible, which a browser hides or acts on."""
    return _HIDDEN.sub("\ufffd", text.replace("\r\n", "\n")).replace("\n", "\u21b5\n")


def _alpha(share: float) -> float:
    return round(math.sqrt(share), 3)


def _binned(n: int) -> str:
    each = -(-n // _BINS)
    return f", {each} to a column" if each > 1 else ""


def _data(kept: Kept, names: Sequence[str]) -> str:
    """What the script needs, as JSON that cannot end its element."""
    data = {
        "heads": kept.heads,
        "perColumn": -(-len(kept.tokens) // _BINS),
        "tokens": [_told(t) for t in kept.tokens],
        "methods": [{"name": name, **_packed(s)} for name, s in zip(names, kept.survivors)],
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _told(token: Token) -> str:
    """How the tip names a token: its text in quotes, or its bytes when they are no text of their own."""
    try:
        return json.dumps(token.piece.decode("utf-8"), ensure_ascii=False)
    except UnicodeDecodeError:
        return f"bytes {token.piece.hex(' ')}"


def _packed(survivors: Survivors) -> dict[str, object]:
    levels = np.round(255 * survivors.binned(_BINS)).astype(np.uint8)
    return {
        "shares": survivors.shares.round(4).tolist(),
        "columns": levels.shape[1],
        "map": base64.b64encode(levels.tobytes()).decode("ascii"),
    }
