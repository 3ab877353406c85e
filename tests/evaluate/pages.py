"""Reads a page that this project wrote, strictly."""

from __future__ import annotations

from collections.abc import Sequence
from html.parser import HTMLParser

VOID = {"meta", "br", "input", "rect", "path", "use", "img", "hr"}


class Page(HTMLParser):
    """Parses strictly: elements close in order, ids are unique, nothing comes from outside."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.refs: list[str] = []
        self.tags: list[str] = []
        self.spans: list[str] = []
        self.words: list[str] = []
        self._span: str | None = None
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert all(ref.startswith("#") and ref[1:] in self.ids for ref in self.refs), self.refs

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        named = dict(attrs)
        self.ids += [str(v) for k, v in attrs if k == "id"]
        self.refs += [str(v) for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action")]
        if tag == "span" and "data-i" in named:
            assert named["data-i"] == str(len(self.spans))
            self._span = ""

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag
        if tag == "span" and self._span is not None:
            self.spans.append(self._span)
            self._span = None

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._span is not None:
            self._span += data
