"""How an embedding is drafted."""

from __future__ import annotations

from convert.layers.draft import NAME, DraftContext, DraftEntry, Layer, plain


def draft_table(context: DraftContext, layer: Layer, main: str) -> DraftEntry:
    g = layer.leaves[main]
    entry = DraftEntry(g.leaves[0])
    context.say_leaves(entry, layer, main, None, "guess: an embedding, a row for each entry")
    entry.say("axes", context.letters.named("entries", g.shape[0]) + context.letters.named("width", g.shape[1]))
    module = context.module(layer.steps)
    known = [(f"embedding: {plain(module)}", "")]
    if "{" not in module:  # one table, and so perhaps the head's
        tied = f"embedding: {{module: {plain(module)}, tied: head}}"
        known.append((tied, "flax's Embed.attend, in a model that has `head.weight = embed.weight`"))
    entry.ask("embedding", NAME, known)
    return entry
