"""Checks of option values; each raises ValueError with one line."""

from __future__ import annotations

from typing import Any


def one_of(what: str, value: object, known: tuple[str, ...]) -> None:
    """`value` is one of the names in `known`."""
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}, expected one of {', '.join(known)}")


def int_at_least(what: str, value: object, least: int) -> None:
    """`value` is an integer, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} is {value!r}, expected an integer >= {least}")


def fraction(what: str, value: object) -> None:
    """`value` is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{what} is {value!r}, expected a number from 0 to 1")


def from_text(what: str, text: str, kind: str) -> Any:
    """An option's value from a spec; `kind` is the field's annotation, int, float or str."""
    if kind == "str":
        return text
    try:
        return {"int": int, "float": float}[kind](text)
    except ValueError:
        raise ValueError(f"{what} is {text!r}, expected {'an integer' if kind == 'int' else 'a number'}") from None
