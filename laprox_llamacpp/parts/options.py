"""Checks of option values; each raises ValueError with one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any


def one_of(what: str, value: object, known: tuple[str, ...]) -> None:
    """`value` is one of the names in `known`."""
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}, expected one of {', '.join(known)}")


def int_at_least(what: str, value: object, least: int, most: int = (1 << 31) - 1) -> None:
    """`value` is an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is {value!r}, expected an integer >= {least}")
    if value > most:
        raise ValueError(f"{what} is {value}, expected at most {most}")


def text(what: str, value: object) -> str:
    """`value` is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {value!r}, expected a string such as in a spec")
    return value


def fraction(what: str, value: object) -> None:
    """`value` is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{what} is {value!r}, expected a number from 0 to 1")


def from_spec(spec: str, parts: Sequence[str], target: Any) -> dict[str, Any]:
    """Values for the fields of a dataclass from the name=value `parts` of a spec; a value may hold colons.

    Fields are int, float or str. `spec` is for the text of the ValueError.
    """
    kinds = {f.name: f.type if isinstance(f.type, str) else f.type.__name__ for f in fields(target)}
    texts: dict[str, str] = {}
    key = ""
    for part in parts:
        name, eq, value = part.partition("=")
        if eq:
            key = name.strip()
            if key in texts:
                raise ValueError(f"option {key!r} is given twice in {spec!r}")
            if key not in kinds:
                raise ValueError(f"unknown option {key!r} in {spec!r}, expected one of {', '.join(sorted(kinds))}")
            texts[key] = value.strip()
        elif key:
            texts[key] += ":" + part.strip()
        else:
            raise ValueError(f"{part!r} in {spec!r} is not an option, expected name=value")
    return {key: _from_text(key, text, kinds[key]) for key, text in texts.items()}


def _from_text(what: str, text: str, kind: str) -> Any:
    if kind == "str":
        return text
    try:
        return {"int": int, "float": float}[kind](text)
    except ValueError:
        raise ValueError(f"{what} is {text!r}, expected {'an integer' if kind == 'int' else 'a number'}") from None
