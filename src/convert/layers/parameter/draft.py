"""How a leaf is drafted that no other kind is guessed for."""

from __future__ import annotations

from convert.layers.draft import DraftContext, DraftEntry, Layer, plain


def draft_parameter(context: DraftContext, layer: Layer, main: str) -> DraftEntry:
    """A leaf that no kind is guessed for."""
    g = layer.leaves[main]
    remark = f"{context.spec(g)}; guess: a raw parameter, kept as stored; names and shape do not tell more"
    entry = DraftEntry(g.leaves[0])
    context.say_from(entry, g, remark)
    names = [(f"parameter: {plain(context.module(g.steps))}", "")]
    entry.ask("parameter", "what is the tensor called in PyTorch?", names)
    return entry
