"""Print a draft as YAML: the last step of drafting, which decides nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from convert.core.text import one_line
from convert.layers.draft import DraftEntry, DraftLine, plain
from convert.layers.shared_keys import ACTIVATIONS, ASK

ACTIVATED = ("linear", "conv")  # kinds of rules whose result usually goes through an activation


@dataclass(frozen=True)
class Draft:
    """A drafted rule file.

    Attributes:
        checkpoint: name of the checkpoint.
        model: name of the model.
        root: the prefix below which the leaves are; may be empty.
        root_given: whether the user named it.
        copies: entries of `copies`.
        axes: declarations of the axis letters, one line each.
        rules: one entry for each rule.
        loads: what the result is for.
        missing: tensors of the target that no rule makes.
        known: the code that some rules follow from, for people; empty if there are none.
        asks: whether other rules are drafted.
        leaf_names: of a checkpoint without names, in its order.
    """

    checkpoint: str
    model: str
    root: str
    root_given: bool
    copies: tuple[DraftEntry, ...]
    axes: tuple[str, ...]
    rules: tuple[DraftEntry, ...]
    loads: str = "your own module"
    missing: tuple[str, ...] = ()
    known: str = ""
    asks: bool = True
    leaf_names: tuple[str, ...] = ()

    @property
    def kinds(self) -> set[str]:
        """Names of the kinds of rules, and all other keys that the rules have."""
        return {line.key for entry in self.rules for line in entry.lines}

    @property
    def shares_questions(self) -> bool:
        """Whether several rules have the same question."""
        return any(count > 1 for count in _questions(self.rules).values())


def render(draft: Draft) -> str:
    """Return the text of the rule file."""
    lines = []
    if draft.known:
        lines.append(
            f"# From the two programs of {one_line(draft.known)}. The remark of a rule is its grade, and the operations in which data meets the parameter."
        )
    if draft.asks:
        what = "The others are a draft" if draft.known else "A draft"
        lines += [
            f"# {what}, from the tree of {json.dumps(draft.checkpoint)}. Each `# guess:` may be wrong. Each `{ASK}` is a question: replace it by one of",
            "# the lines below it, and remove the comments. `convert plan` and `convert rules validate` list the open questions.",
        ]
    if draft.shares_questions:
        lines.append(
            "# `*name` repeats the answer to the question at `&name`. Keep the mark `&name`; write another value in a rule that differs."
        )
    if draft.asks and draft.kinds & set(ACTIVATED):
        lines.append(
            f"# Add `activation: gelu_tanh` to a rule to state what the source applies next: no weight depends on it, but a check compares it. {_activations()}"
        )
    lines += [f"model: {plain(draft.model)}", f"title: {plain(draft.model)}"]
    if draft.root:
        remark = "" if draft.root_given else "    # guess: every leaf that a model needs is below it"
        lines.append(f"root: {plain(draft.root)}{remark}")
    lines += leaf_names_lines(draft.leaf_names)
    if draft.copies:
        lines += ["", "copies:", *rule_texts(draft.copies)]
    if draft.axes:
        lines += [
            "",
            "axes:    # guess: axes of the same size have the same letter" if draft.asks else "axes:",
            *(f"  {axis}" for axis in draft.axes),
        ]
    lines += ["", "targets:", f"  torch: {{loads: {json.dumps(draft.loads)}}}", "", "rules:"]
    lines += ["\n\n".join(rule_texts(draft.rules)), ""]
    if draft.missing:
        lines.append("# question: the target also has these tensors. Which leaves are they made of?")
        lines += [f"# {one_line(name)}" for name in draft.missing]
    return "\n".join(lines)


def leaf_names_lines(names: Sequence[str]) -> list[str]:
    """Return the lines that name the leaves of a checkpoint without names, in its order; none if there are no names."""
    return ["", "leaf_names:", *(f"- {plain(name)}" for name in names)] if names else []


def _activations() -> str:
    others = [word for word in ACTIVATIONS if word not in ("none", "gelu_tanh", "gelu_erf")]
    return f"Known: {', '.join(others)}, gelu_tanh (flax's nn.gelu), gelu_erf (nn.gelu with approximate=False)."


def _question(line: DraftLine) -> Hashable:
    """Return what a question that several rules may share is about; None for any other line."""
    return None if line.same is None else (line.key, line.below, line.same)


def _questions(entries: Sequence[DraftEntry]) -> Counter[Hashable]:
    """Count how many rules ask each question that can be shared."""
    return Counter(key for entry in entries for line in entry.lines if (key := _question(line)) is not None)


def rule_texts(entries: Sequence[DraftEntry]) -> Iterator[str]:
    """Yield the text of each rule.

    The first rule with a shared question asks it and gives its value a name (``&epsilon``); the others refer to the
    name (``*epsilon``).
    """
    counts = _questions(entries)
    names: dict[Hashable, str] = {}
    offered: set[Hashable] = set()
    for entry in entries:
        lines: list[str] = []
        for line in entry.lines:
            key, anchor, value, remark, below = _question(line), "", line.value, line.remark, line.below
            remark = f"question: {remark}" if line.asks else remark
            if key in names:
                value, remark, below = f"*{names[key]}", f"the answer to the question at &{names[key]}", ()
            elif key is not None and counts[key] > 1:
                of_key = sum(name.rsplit("_", 1)[0] == line.key or name == line.key for name in names.values())
                names[key] = line.key if not of_key else f"{line.key}_{of_key + 1}"
                anchor = f"&{names[key]} "
                remark = f"question, for {counts[key]} rules: {line.remark}"
            if line.once:
                below = () if below in offered else below
                offered.add(below)
            if line.key:
                lines.append(f"{line.key}: {anchor}{value}" + (f"    # {remark}" if remark else ""))
            for text, note in below:
                head, *more = (text.replace(": ", f": {anchor}", 1) if anchor else text).split("\n")
                lines.append(f"# {head}" + (f"    # {_with_more(note, len(more))}" if note or more else ""))
                lines += [f"# {added}" for added in more]
        first, *rest = lines
        yield "\n".join([f"- {first}", *(f"  {line}" for line in rest)])


def _with_more(note: str, more: int) -> str:
    below = "" if not more else "with the line below" if more == 1 else f"with the {more} lines below"
    return "; ".join(filter(None, (note, below)))
