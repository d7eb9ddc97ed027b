"""The model card: ``README.md`` of an output directory. It names the checkpoint, the rules and the version. It holds no time and no path, so equal conversions give equal cards."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from convert.core.text import code_span, one_line

if TYPE_CHECKING:
    from convert.planning.plan import Plan

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
        ("Model", _text(plan.found)),
        ("Loaded by", _text(target.loads)),
        ("Converted by", tool),
        (
            "Rules",
            f"{code_span(_rules(plan))}, model {code_span(plan.rules.model)}, sha256 {code_span(plan.rules.sha256)}",
        ),
        ("Source", f"{_text(plan.source.format)}, {len(plan.source.leaves)} leaves"),
        (
            "Weights",
            f"{len(plan.steps)} tensors, {plan.nbytes} bytes, {', '.join(sorted({s.spec.dtype for s in plan.steps}))}",
        ),
        ("Sizes", _text("; ".join(f"{meaning} ({name}): {size}" for name, meaning, size in _sizes(plan)))),
    ]
    rows += plan.format.card_rows()
    if plan.facts:
        rows.append(("Facts", _text(", ".join(f"{key} {_shown(plan, key)}" for key in plan.facts))))
    if plan.tokenizer is not None:
        stated = f"; its model card states {plan.tokenizer.licence}" if plan.tokenizer.licence else ""
        rows.append(("Copied", _text(", ".join(plan.tokenizer.names) + stated)))
    if plan.settings:
        given = sorted(plan.settings.items())  # independent of the order of the options
        rows.append(("Set by hand", _text(", ".join(f"{key} = {json.dumps(value)}" for key, value in given))))
    lines = ["---", "library_name: " + plan.target] if plan.target == "transformers" else ["---"]
    lines += ["tags: [converted-from-jax]", "---", "", f"# {_text(plan.found)}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(text)} |" for name, text in rows]
    lines += plan.format.loading_code(target, plan.layers)
    computed = [note.problem for note in plan.checkpoint.notes if note.code == "weights-divided"]
    remarks = [*computed, *plan.notes, *plan.config_notes]
    reasons: dict[str, list[str]] = {}
    for dropped in plan.dropped:
        reasons.setdefault(dropped.reason, []).append(dropped.leaf)
    remarks += [f"{_are(len(leaves), 'leaf', 'leaves')} left out: {reason}" for reason, leaves in reasons.items()]
    lossy: dict[str, int] = {}
    for step in plan.steps:
        if step.loses:
            lossy[step.loses] = lossy.get(step.loses, 0) + 1
    remarks += [f"{_are(count, 'tensor', 'tensors')} {loses}" for loses, count in lossy.items()]
    if remarks:
        lines += ["", *(f"- {_text(str(remark))}" for remark in remarks)]
    lines += [
        "",
        "The headers of the weights hold a digest of the source's leaves (`source_digest`), and the facts above.",
        "",
    ]
    return "\n".join(lines)


def _are(count: int, one: str, several: str) -> str:
    return f"1 {one} is" if count == 1 else f"{count} {several} are"


def _rules(plan: Plan) -> str:
    """The rule file as the card names it: no path of this machine."""
    path = PurePath(plan.rules.path)
    return plan.rules.path if path.parent == PurePath("rules") else path.name


def _sizes(plan: Plan) -> list[tuple[str, str, int]]:
    """Letter, meaning and size of the axes that this model's leaves have, and of the indices of its layers."""
    parts = [part for step in plan.steps for part in step.parts]
    used = {letter for part in parts for letter, _ in part.stored}
    used |= {
        index for part in parts if part.rule is not None for index in (*part.rule.index_from, *part.rule.path.indices)
    }
    axes = plan.rules.axes
    return [
        (k, axes[k].meaning if k in axes else "", size) for k, size in plan.sizes.items() if k in used or k not in axes
    ]


def _shown(plan: Plan, fact: str) -> str:
    """A fact in short: of a list that repeats, what it repeats."""
    value, declared = plan.facts[fact], plan.rules.facts.get(fact)
    if isinstance(declared, dict) and isinstance(declared.get("repeat"), list):
        return f"({', '.join(map(str, declared['repeat']))}) again and again"
    return value if isinstance(value, str) else json.dumps(value)


def add_figures(card: str, figures: Sequence[tuple[str, str, str]]) -> str:
    """The card with what a check measured: rows of level, verdict and figure. Those of an earlier check are replaced."""
    head, found, rest = card.partition(f"\n{_CHECKED}\n")
    tail = rest.partition(f"{_END}\n")[2] if found else ""
    rows = [f"| {' | '.join(_cell(_text(text)) for text in row)} |" for row in figures]
    lines = ["", _CHECKED, "", "| level | verdict | |", "|---|---|---|", *rows, "", _END, ""]
    return head + "\n".join(lines) + tail


def without_figures(card: str) -> str:
    """The card as the conversion wrote it, before `add_figures`."""
    head, found, rest = card.partition(f"\n{_CHECKED}\n")
    return head + rest.partition(f"{_END}\n")[2] if found else card


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _text(text: str) -> str:
    """Return a text of the rules or of the checkpoint as Markdown that holds neither HTML nor links."""
    escaped = one_line(text).replace("\\", "\\\\").replace("<", "\\<")
    return re.sub(r"\](?=[(\[:])", r"\\]", escaped)
