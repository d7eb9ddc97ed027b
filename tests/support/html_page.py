"""A page taken apart, for tests of what it shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "input", "br", "img", "link"}


@dataclass
class Page(HTMLParser):
    """A page taken apart: elements with their attributes, texts, and whether the tags balance."""

    text: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    contents: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            self.contents[self.open[-1]] = data
        elif data.strip():
            self.words.append(data.strip())

    def of(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [a for name, a in self.elements if name == tag and (not kind or kind in (a.get("class") or "").split())]

    @property
    def said(self) -> str:
        return " ".join(self.words)
