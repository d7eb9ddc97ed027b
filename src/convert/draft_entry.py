"""The rules of a draft as text, and the layers that they are about."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from convert.asking import ASK
from convert.grouping import Group, Step
from convert.yamlfile import parse_scalar


@dataclass
class Entry:
    """One rule of the draft: its lines, each a key with its value and a remark, and the alternatives below it."""

    lines: list[str] = field(default_factory=list)

    def say(self, key: str, value: str, remark: str = "") -> None:
        self.lines.append(f"{key}: {value}" + (f"    # {remark}" if remark else ""))

    def ask(self, key: str, question: str, alternatives: Sequence[tuple[str, str]]) -> None:
        """A question: `alternatives` are lines that could stand in its place, each with a remark."""
        self.say(key, ASK, f"question: {question}")
        self.offer(alternatives)

    def offer(self, alternatives: Sequence[tuple[str, str]]) -> None:
        self.lines += [f"# {line}" + (f"    # {remark}" if remark else "") for line, remark in alternatives]

    def __str__(self) -> str:
        first, *rest = self.lines
        return "\n".join([f"- {first}", *(f"  {line}" for line in rest)])


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
    def hint(self) -> str:
        """What the layer is called, in small letters and without its number."""
        words = [step for step in self.steps if step.words[0] not in ("vars", "cell")]
        if not words:
            return ""
        last = words[-1]
        word = last.stem if last.stem else last.words[0]
        return re.sub(r"[_0-9]+$", "", word).lower()

    def find(self, names: Sequence[str], axes: Sequence[int]) -> str | None:
        """The first of these keys whose leaf has one of these numbers of axes."""
        return next((n for n in names if n in self.leaves and len(self.leaves[n].shape) in axes), None)


def plain(text: str) -> str:
    """A YAML scalar that reads as this text."""
    safe = re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./{},*\\-]*", text) and isinstance(parse_scalar(text), str)
    return text if safe and text != ASK else json.dumps(text)
