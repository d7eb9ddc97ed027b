"""Names in a checkpoint and texts of a rule file are untrusted: what renders them keeps each on its line."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Escape everything that does not print: newlines, tabs, control and direction characters, lone surrogates."""
    return escape(text, keep="")


def escape(text: str, keep: str) -> str:
    """Escape everything that does not print, but the characters in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def shortened(text: str, most: int = 200) -> str:
    """Return the beginning of a text that is longer than any name."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def code_span(text: str) -> str:
    """Return a name as code in Markdown. Nothing can be escaped in a code span, so a backtick, which would end it, goes."""
    name = one_line(text).replace("`", "'")
    return f"`{name}`"
