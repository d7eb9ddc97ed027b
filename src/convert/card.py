"""The model card: ``README.md`` of an output directory. It says what was converted by what; no time, no path, no opinion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convert.plan import Plan

CARD = "README.md"
_CHECKED, _END = "## Checked", "<!-- end of the check -->"


def render_card(plan: Plan, tool: str) -> str:
    """The card as a conversion writes it: provenance, sizes, facts, what was left out or lost.

    Args:
        plan: what was converted.
        tool: name and version of the converter.
    """
    target = plan.rules.targets[plan.target]
    rows = [
        ("Model", plan.found),
        ("Loaded by", target.loads),
        ("Converted by", tool),
        ("Rules", f"`{plan.rules.path}`, model `{plan.rules.model}`, sha256 `{plan.rules.sha256}`"),
        ("Source", f"{plan.source.format}, {len(plan.source.leaves)} leaves"),
        (
            "Weights",
            f"{len(plan.steps)} tensors, {plan.nbytes} bytes, {', '.join(sorted({s.spec.dtype for s in plan.steps}))}",
        ),
        ("Sizes", ", ".join(f"{name} = {size}" for name, size in plan.sizes.items())),
    ]
    if plan.settings:
        rows.append(("Set by hand", ", ".join(f"{key} = {json.dumps(value)}" for key, value in plan.settings.items())))
    lines = ["---", "library_name: " + plan.target] if plan.target == "transformers" else ["---"]
    lines += ["tags: [converted-from-jax]", "---", "", f"# {plan.found}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(text)} |" for name, text in rows]
    said = list(plan.notes)
    reasons: dict[str, list[str]] = {}
    for dropped in plan.dropped:
        reasons.setdefault(dropped.reason, []).append(dropped.leaf)
    said += [f"{len(leaves)} leaves are left out: {reason}" for reason, leaves in reasons.items()]
    lossy: dict[str, int] = {}
    for step in plan.steps:
        if step.loses:
            lossy[step.loses] = lossy.get(step.loses, 0) + 1
    said += [f"{count} tensors are {loses}" for loses, count in lossy.items()]
    if said:
        lines += ["", *(f"- {text}" for text in said)]
    lines += [
        "",
        "The headers of the weights hold a digest of the source's leaves (`source_digest`), and the facts above.",
        "",
    ]
    return "\n".join(lines)


def add_figures(card: str, figures: Sequence[tuple[str, str, str]]) -> str:
    """The card with what a check measured: rows of level, verdict and figure. Those of an earlier check are replaced."""
    head, found, rest = card.partition(f"\n{_CHECKED}\n")
    tail = rest.partition(f"{_END}\n")[2] if found else ""
    rows = [f"| {' | '.join(map(_cell, row))} |" for row in figures]
    lines = ["", _CHECKED, "", "| level | verdict | |", "|---|---|---|", *rows, "", _END, ""]
    return head + "\n".join(lines) + tail


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
