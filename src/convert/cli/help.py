"""Help pages: a flag has no type, an argument is written `MODEL`, not `{MODEL}`, and a paragraph fills the width of the terminal."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperCommand, TyperGroup


class _PlainHelp:
    """Override what Typer's commands print of their help text and their parameters."""

    def __init__(self, *args: Any, help: str | None = None, **options: Any) -> None:
        super().__init__(*args, help=_filled(help), **options)  # type: ignore[call-arg]

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.translate({ord("{"): None, ord("}"): None}) for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]


def _filled(text: str | None) -> str | None:
    """Join the lines of each paragraph, except indented ones: Typer would keep the line breaks of the docstring."""
    parts = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(part if part.startswith(" ") else " ".join(part.split()) for part in parts) or None


class Command(_PlainHelp, TyperCommand):
    """A command."""


class Group(_PlainHelp, TyperGroup):
    """A command that has commands."""
