"""Say that the target lacks the last rows of a table, which the source has as padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convert.inference.rule_file.layers.layout import Layout
from convert.inference.rule_file.layers.rule import LayerRule

ENTRIES = "entries"  # name of the fact


def with_cut_rows(layers: Sequence[LayerRule]) -> tuple[list[LayerRule], dict[str, str]]:
    """Return the layers with the keys of tables whose last rows the target lacks, and the facts that these use."""
    facts: dict[str, str] = {}
    found = []
    for layer in layers:
        source = layer.main[0]
        if layer.kind_name == "embedding" and _is_cut(source.layout):
            whole, said = _whole(source.layout)
            kept = str(source.layout.axes[0].size)
            name = next((name for name, rows in facts.items() if rows == kept), "")
            name = name or (f"{ENTRIES}_{len(facts) + 1}" if facts else ENTRIES)
            facts[name] = kept
            keys = (("rows", f"${name}"), ("padded", f"[{said}]"), *layer.keys)
            (key, _), *others = layer.sources
            layer = replace(layer, sources=((key, (replace(source, layout=whole),)), *others), keys=keys)
        found.append(layer)
    return found, facts


def _is_cut(layout: Layout) -> bool:
    """Whether a table has the first elements of an axis of the leaf as its rows."""
    if len(layout.axes) != len(layout.shape):
        return False
    rows = layout.axes[0]
    return rows.size < layout.leaf_shape[rows.of] and not (rows.start or rows.place or rows.order)


def _whole(layout: Layout) -> tuple[Layout, int]:
    """Return the layout of the table with all rows of the leaf, and how many these are."""
    rows, *rest = layout.axes
    size = layout.leaf_shape[rows.of]
    return replace(layout, axes=(replace(rows, size=size), *rest), shape=(size, *layout.shape[1:])), size
