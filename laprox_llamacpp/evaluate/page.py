"""Self-contained HTML pages: nothing is loaded, and the page itself forbids it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1a1a1a;
  background: #fff; max-width: 76rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 2.4rem 0 .4rem;
  border-top: 2px solid #1a1a1a; padding-top: .6rem; } h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { margin: .4rem 0; max-width: 62rem; } .quiet { color: #555; }
.note { border-left: 4px solid #E69F00; background: #fdf6e7; padding: .35rem .7rem; margin: .4rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; margin: .4rem 0; }
th, td { padding: .18rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 1.5px solid #1a1a1a; font-weight: 600; } th.text, td.text { text-align: left; }
td.wrap { white-space: normal; overflow-wrap: anywhere; max-width: 52rem; }
td.better { color: #004f7a; font-weight: 600; } td.worse { color: #a33f00; font-weight: 600; }
figure { margin: .8rem 0; } figure svg { max-width: 100%; height: auto; display: block; }
figcaption { color: #444; font-size: .88rem; } code { font-size: .85rem; }
@media print { body { padding: 0; max-width: none; font-size: 11px; } a { color: inherit; }
  figure, tr { break-inside: avoid; } figure svg { width: 100%; } table { font-size: .68rem; }
  h2, h3 { break-after: avoid; } .scroll { overflow: visible; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


def page(title: str, body: str, style: str = "", script: str = "") -> str:
    """A whole page around `body`; `title` is text, the rest is HTML, CSS and JavaScript."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n{body}\n"
        + (f"<script>{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1, marks: Sequence[Sequence[str]] = ()
) -> str:
    """An HTML table of plain texts.

    Args:
        head: titles of the columns.
        rows: as many texts each.
        text: this many columns from the left are words, aligned left; the others numbers.
        marks: CSS class of each cell, "" for none.
    """
    out = ['<div class="scroll"><table><thead><tr>']
    out += [f"<th{_class('text' if i < text else '')}>{escape(h)}</th>" for i, h in enumerate(head)]
    out.append("</tr></thead><tbody>")
    for r, row in enumerate(rows):
        out.append("<tr>")
        for i, cell in enumerate(row):
            classes = " ".join(c for c in ("text" if i < text else "", marks[r][i] if marks else "") if c)
            out.append(f"<td{_class(classes)}>{escape(cell)}</td>")
        out.append("</tr>")
    out.append("</tbody></table></div>")
    return "".join(out)


def note(text: str) -> str:
    """What must not be missed, in a box."""
    return f'<p class="note">{escape(text)}</p>'


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""
