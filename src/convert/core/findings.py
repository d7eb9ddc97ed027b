"""A finding: one problem, as data. The text is rendered from it at the end, once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from convert.core.text import one_line


@dataclass(frozen=True)
class Finding:
    """One problem, or one thing that the user should know.

    `render` is the only place where its text is put together:
    ``rule: path: problem: expected X, got Y; fix``. Parts that are empty are left out.

    Attributes:
        code: key of the error index, such as ``shape-mismatch``; ``docs/errors/CODE.md`` explains it.
        problem: what is wrong, as a sentence without its place; may be empty where `expected` and `got` say it.
        rule: ``file:line`` or ``file:line:column`` of the rule or key that is concerned.
        path: tree path of the leaf, name of the tensor, or path of the file that is concerned.
        expected: one side: what the rule, the format or the target requires.
        got: the other side: what was found.
        fix: the next step, as an imperative sentence.
        data: the same as numbers and names, for machines.
    """

    code: str
    problem: str = ""
    rule: str = ""
    path: str = ""
    expected: str = ""
    got: str = ""
    fix: str = ""
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.render()

    def render(self, *, with_code: bool = False) -> str:
        """The text, one line: names are untrusted, so what does not print is escaped. `with_code` adds the code after the place, for lists of findings whose codes differ."""
        rule, path, problem, expected, got, fix = map(
            one_line, (self.rule, self.path, self.problem, self.expected, self.got, self.fix)
        )
        places = ": ".join(part for part in (rule, path) if part)
        if with_code:
            places = f"{places} [{self.code}]".lstrip()
        sides = ", ".join(f"{verb} {side}" for verb, side in (("expected", expected), ("got", got)) if side)
        parts = ": ".join(part for part in (places, problem, sides) if part)
        return f"{parts}; {fix}" if fix else parts

    def to_dict(self) -> dict[str, Any]:
        """All fields and the rendered text, for ``--json``."""
        return {
            "code": self.code,
            "text": str(self),
            "problem": self.problem,
            "rule": self.rule,
            "path": self.path,
            "expected": self.expected,
            "got": self.got,
            "fix": self.fix,
            "data": dict(self.data),
        }


MIN_SIMILAR = 3  # fewer similar findings are shown one by one


def group_similar(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Group findings of one code and one rule whose paths differ in numbers only: they have one cause."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.rule, re.sub(r"\d+", "#", finding.path)), []).append(finding)
    parts = ([group] if len(group) >= MIN_SIMILAR else [[finding] for finding in group] for group in groups.values())
    return list(itertools.chain.from_iterable(parts))
