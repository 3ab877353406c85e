"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table; a column of numbers is set right."""
    right = [
        all(not row[i] or row[i].lstrip("+−-")[:1].isdigit() or row[i] == "–" for row in rows) for i in range(len(head))
    ]
    lines = [head, ["---:" if r else "---" for r in right], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
