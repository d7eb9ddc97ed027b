"""Facts with a value that no model can have, or none of these sizes: `allowed` of the rules, with the letters of the tree."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from convert.core.findings import Finding
from convert.rules.allowed import NOTHING, Known
from convert.rules.file import RuleFile

NONE_KNOWN: Mapping[str, Any] = {}


def known_values(
    rules: RuleFile,
    sizes: Mapping[str, int],
    facts: Mapping[str, Any],
    of_layers: Mapping[str, Sequence[int]] = NONE_KNOWN,
    layers_with: Mapping[str, Collection[int]] = NONE_KNOWN,
) -> Known:
    """Return what `allowed` refers to; see `Known` for the arguments."""
    meanings = {letter: axis.meaning for letter, axis in rules.axes.items()}
    return Known({**facts, **sizes}, meanings, of_layers, layers_with)


def refused_facts(
    rules: RuleFile, known: Known, facts: Mapping[str, Any], places: Mapping[str, str]
) -> Iterator[Finding]:
    """Find the facts that `allowed` refuses beside the tree and the other facts; what it refuses in any case is reported where it is read.

    A value of the rules themselves is that of the published models, and is refused only beside a value that is stated, or where the
    layers of the tree show it. The rows of a table are a size of the tree.

    Args:
        facts: name -> value.
        places: fact -> where its value is stated, if not in the rules; the rules themselves where their `formulas` give it.
    """
    rows = {getattr(rule.kind, "rows", None) for rule in rules.rules}
    for name, allowed in rules.allowed.items():
        others = [one for one in allowed.names if one in places and one not in rows]
        shown = name in rules.layer_types  # no user stated it
        if name not in facts or not (name in places or others or shown or allowed.shown_by_layers):
            continue
        solved = places.get(name) == rules.path
        unread = shown or solved or not allowed.refuses(facts[name], NOTHING)
        if (expected := allowed.refuses(facts[name], known)) and unread:
            trained = f"give the {' and '.join(dict.fromkeys([name, *others]))} of the model that was trained"
            yield Finding(
                "setting-invalid",
                rule=allowed.at.line_only if allowed.at is not None else rules.path,
                path=places.get(name) or " ".join(dict.fromkeys(places[one] for one in others)),
                expected=f"{name} to be {expected}",
                got=repr(facts[name])
                + (", by the leaves of its layers" if shown else ", by the sizes of the tree" if solved else ""),
                fix="convert a checkpoint with all layers: no model has these"
                if shown
                else "convert a tree whose leaves fit one another"
                if solved
                else trained,
                data={"facts": [name]},
            )
