"""Compare the shapes of the output with the sizes that config.json states, or that the class then has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.layers.base import Step
from convert.planning.modules.expand import listed_modules
from convert.planning.modules.formulas import keys_of, value_of
from convert.planning.modules.table import NUMBER, Module, ModuleList, Name
from convert.rules.file import RuleFile

LAST = {"Conv1D"}  # modules whose bias has the size of the last axis of the weight; of all others, the first
OF_WEIGHT_NORM = ("parametrizations", "weight", "original1")


@dataclass(frozen=True)
class _Conflict:
    step: Step
    axis: int
    said: str
    expected: int


def compare_sizes(
    rules: RuleFile, source: Source, steps: Sequence[Step]
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return what the sidecar of rules with `modules` contradicts, and notes on what no leaf shows."""
    listed = None if rules.modules is None else listed_modules(rules, source)
    if not isinstance(listed, ModuleList):
        return (), ()
    assert rules.sidecar is not None
    file = rules.sidecar.file
    sizes, wrong = _other_sizes(listed, steps, file)
    return (*sizes, *_other_heads(listed, file, wrong)), tuple(dict.fromkeys(_assumed_heads(listed, file)))


def _other_sizes(listed: ModuleList, steps: Sequence[Step], file: str) -> tuple[list[Finding], set[str]]:
    """Report sizes that the tree has and config.json contradicts: each key once, and none with a key that another has shown to be wrong.

    Args:
        file: name of the file that states the sizes.

    Returns:
        the findings, and the keys of the sizes that differ.
    """
    known: dict[Name, list[Module]] = defaultdict(list)
    for module in listed.modules:
        if module.axes:
            known[_template(module.name)].append(module)
    conflicts: dict[tuple[str, ...], list[_Conflict]] = defaultdict(list)
    sizes: dict[tuple[int, str, str], int | None] = {}
    for step in steps:
        of = _module(known, step.name)
        if of is None:
            continue
        for axis, formula in _axes(of, step):
            number = _number(step.name, of) if NUMBER in formula else ""
            key = (id(of.keys), formula, number)
            if key not in sizes:
                sizes[key] = of.keys.count(formula, number)
            expected = sizes[key]
            if expected is not None and step.spec.shape[axis] != expected:
                said = of.keys.said(formula, number)
                shown = dict.fromkeys(of.keys.shown(one) for one in keys_of(formula.replace(NUMBER, number)))
                conflicts[tuple(shown)].append(_Conflict(step, axis, said, expected))
    findings: list[Finding] = []
    blamed: set[str] = set()
    for keys, found in sorted(conflicts.items(), key=lambda one: len(one[0])):
        findings += [] if blamed & set(keys) else [_finding(found, file)]
        blamed |= set(keys)
    return findings, blamed


def _other_heads(listed: ModuleList, file: str, wrong: Collection[str]) -> Iterator[Finding]:
    """Report numbers of heads that do not divide the width, each once; no leaf shows them.

    Args:
        wrong: keys that differ from the tree.
    """
    reported: set[str] = set()
    for heads, width, keys in listed.heads:
        count, size = keys.value(heads), keys.value(width)
        known = keys.shown(heads) in reported or keys.shown(width) in wrong
        if isinstance(count, int) and isinstance(size, int) and (count < 1 or size % count) and not known:
            reported.add(keys.shown(heads))
            yield Finding(
                "config-conflict",
                f"the {file} of the checkpoint {keys.said(heads)}, which does not divide {keys.shown(width)} = {size}",
                path=keys.shown(heads),
                expected=f"a divisor of {size}",
                got=str(count),
                fix="state the number of heads that the model was trained with; no leaf shows it",
            )


def _assumed_heads(listed: ModuleList, file: str) -> Iterator[str]:
    """Note the numbers of heads that the file lacks."""
    for heads, _, keys in listed.heads:
        if value_of(keys.config, heads) is None and (count := keys.default(heads)) is not None:
            yield f"the {file} next to the checkpoint has no {keys.shown(heads)}: {listed.package} `{listed.loads}` then has {count}, and no leaf shows the number"


def _finding(found: Sequence[_Conflict], file: str) -> Finding:
    first = found[0]
    shape = first.step.spec.shape
    leaf = first.step.parts[0].leaf if first.step.parts else ""
    more = len(found) - 1
    others = f", and so {'has 1 other' if more == 1 else f'have {more} others'}" if more else ""
    return Finding(
        "config-conflict",
        f"the {file} of the checkpoint {first.said}, and the tensor {first.step.name} has {shape[first.axis]} in axis {first.axis}{others}",
        path=leaf,
        expected=f"{first.expected} in axis {first.axis}",
        got=str(tuple(shape)),
        fix="one of the two is of another checkpoint; if the leaves are right, state the sizes that the model was trained with",
    )


def _axes(module: Module, step: Step) -> Iterator[tuple[int, str]]:
    """Yield the axes of a tensor whose sizes are known."""
    formulas, dims = module.axes, len(step.spec.shape)
    if dims == 1 and len(formulas) > 1:
        formulas = formulas[-1:] if module.type in LAST else formulas[:1]
    if len(formulas) == dims:
        yield from ((axis, formula) for axis, formula in enumerate(formulas) if formula)


def _module(known: Mapping[Name, Sequence[Module]], tensor: str) -> Module | None:
    keys = tuple(tensor.split("."))
    keys = keys[:-3] if keys[-3:] == OF_WEIGHT_NORM else keys
    for name in (keys, keys[:-1]):
        for module in known.get(_template(name), ()):
            if all(one in (NUMBER, other) for one, other in zip(module.name, name, strict=True)):
                return module
    return None


def _number(tensor: str, module: Module) -> str:
    """Return the first number of a tensor's name, behind the part of the model."""
    return next((key for key in tensor.split(".")[module.keys.depth :] if key.isdecimal()), "")


def _template(name: Name) -> Name:
    return tuple(NUMBER if key.isdecimal() else key for key in name)
