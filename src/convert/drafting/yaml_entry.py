"""The rules of a draft as text, and the layers that they are about."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from convert.core.yaml_nodes import parse_scalar
from convert.drafting.path_groups import Group, Step
from convert.rules.placeholders import ASK

# What could stand in a rule, each with a remark: a line, or several that go together.
Lines = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class _Line:
    """A line of a rule.

    Attributes:
        key, value, remark: of the line; without a key it is only what is below.
        below: alternatives.
        same: what the question is about: where several rules ask the same, the first asks, and the others refer to it.
        once: whether the alternatives are listed in the first rule that has them, and in no other.
        asks: whether it is a question, which the remark is.
    """

    key: str
    value: str
    remark: str
    below: tuple[tuple[str, str], ...] = ()
    same: Hashable = None
    once: bool = False
    asks: bool = False


@dataclass
class Entry:
    """One rule of the draft: its lines, each a key with its value and a remark, and the alternatives below it.

    Attributes:
        first: the leaf that it stands at in the order of the tree; rules without one come last.
    """

    first: str = ""
    lines: list[_Line] = field(default_factory=list)

    def say(self, key: str, value: str, remark: str = "") -> None:
        self.lines.append(_Line(key, value, remark))

    def ask(self, key: str, question: str, alternatives: Lines, same: Hashable = None, value: str = ASK) -> None:
        """A question: `alternatives` are lines that could stand in its place.

        Questions of equal `key`, `alternatives` and `same` (if not None) are asked once. `value` has an ``ask`` in it.
        """
        self.lines.append(_Line(key, value, question, tuple(alternatives), same, asks=True))

    def offer(self, alternatives: Lines, once: bool = False) -> None:
        """Lines that could be added; with `once` only in the first rule that has them."""
        self.lines.append(_Line("", "", "", tuple(alternatives), once=once))


def written(entries: Sequence[Entry]) -> Iterator[str]:
    """The text of the rules. What several ask alike is asked by the first, whose value has a name (``&epsilon``) that the
    others refer to (``*epsilon``)."""

    def question(line: _Line) -> Hashable:
        return None if line.same is None else (line.key, line.below, line.same)

    counts = Counter(key for entry in entries for line in entry.lines if (key := question(line)) is not None)
    names: dict[Hashable, str] = {}
    offered: set[Hashable] = set()
    for entry in entries:
        lines: list[str] = []
        for line in entry.lines:
            key, anchor, value, remark, below = question(line), "", line.value, line.remark, line.below
            remark = f"question: {remark}" if line.asks else remark
            if key in names:
                value, remark, below = f"*{names[key]}", f"what the question at &{names[key]} is answered with", ()
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
            for text, said in below:
                head, *more = (text.replace(": ", f": {anchor}", 1) if anchor else text).split("\n")
                lines.append(f"# {head}" + (f"    # {_with_more(said, len(more))}" if said or more else ""))
                lines += [f"# {added}" for added in more]
        first, *rest = lines
        yield "\n".join([f"- {first}", *(f"  {line}" for line in rest)])


def _with_more(said: str, more: int) -> str:
    below = "" if not more else "with the line below" if more == 1 else f"with the {more} lines below"
    return "; ".join(filter(None, (said, below)))


@dataclass(frozen=True)
class Layer:
    """The leaves of one dict of the tree, or of several that are alike.

    Attributes:
        steps: path of the dict.
        leaves: last key -> the leaves.
    """

    steps: tuple[Step, ...]
    leaves: Mapping[str, Group]

    @property
    def _last(self) -> Step | None:
        """The step that says what the layer is called."""
        return next((step for step in reversed(self.steps) if step.words[0] not in ("vars", "cell")), None)

    @property
    def hint(self) -> str:
        """What the layer is called, in small letters and without its number."""
        last = self._last
        word = "" if last is None else last.stem + last.tail if last.stem else last.words[0]
        return re.sub(r"[_0-9]+$", "", word).lower()

    @property
    def name(self) -> str:
        """What the layer is called, with the first of its numbers."""
        last = self._last
        if last is None:
            return ""
        return f"{last.stem}0{last.tail}" if last.stem is not None else last.words[0]

    @property
    def around(self) -> tuple[Step, ...]:
        """Path of what the layer is part of."""
        steps = self.steps[:-1] if self.steps and self.steps[-1].words == ("vars",) else self.steps
        return steps[:-1]

    def find(self, names: Sequence[str], axes: Sequence[int]) -> str | None:
        """The first of these keys whose leaf has one of these numbers of axes."""
        return next((n for n in names if n in self.leaves and len(self.leaves[n].shape) in axes), None)


def plain(text: str) -> str:
    """A YAML scalar that reads as this text."""
    safe = re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./{},*\\~-]*", text) and isinstance(parse_scalar(text), str)
    return text if safe and text != ASK else json.dumps(text)


def flow(text: str) -> str:
    """A YAML scalar that reads as this text within braces."""
    return json.dumps(text) if re.search(r"[{}\[\],]", text) else plain(text)
