"""Join the parts of output tensors, and check the names and shapes of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from convert.core.errors import MAX_LINES
from convert.core.findings import Finding
from convert.core.similarity import ClosestNames
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import Step


def join(steps: list[Step]) -> tuple[list[Step], list[Finding]]:
    """Join the parts of tensors whose rows come from several rules.

    Returns:
        The steps, each tensor in the place of its first part, and findings.
    """
    parts: dict[str, list[Step]] = {}
    for step in steps:
        if step.part:
            parts.setdefault(step.name, []).append(step)
    findings: list[Finding] = []
    joined: dict[str, Step] = {}
    for name, found in parts.items():
        found.sort(key=lambda step: step.part or (0, 0))
        first = found[0]
        wanted = [(k + 1, (first.part or (0, 0))[1]) for k in range((first.part or (0, 0))[1])]
        if [step.part for step in found] != wanted:
            have = ", ".join(f"{step.part[0]} of {step.part[1]} ({step.rule.line_only})" for step in found if step.part)
            findings.append(
                Finding(
                    "tensor-parts-incomplete",
                    rule=first.rule.line_only,
                    path=name,
                    expected=f"{wanted[0][1]} parts, each from one rule",
                    got=have,
                    fix="a leaf or a rule is missing, or two rules make the same part",
                )
            )
            continue
        mismatch = next(
            (s for s in found if s.spec.shape[1:] != first.spec.shape[1:] or s.spec.dtype != first.spec.dtype), None
        )
        if mismatch is not None:
            findings.append(
                Finding(
                    "tensor-parts-incomplete",
                    f"{mismatch.spec} and {first.spec} ({first.rule.line_only}) cannot be rows of one tensor",
                    rule=mismatch.rule.line_only,
                    path=name,
                    fix="give them one dtype with `dtype:`, or correct one of the equations",
                )
            )
            continue
        row, moved = 0, []
        for step in found:
            for part in step.parts:
                start, stop = part.rows or (0, step.spec.shape[0])
                moved.append(replace(part, rows=(row + start, row + stop)))
            row += step.spec.shape[0]
        if all(_interleaved(step) for step in found):  # the target's axes say which rows
            moved, row = (
                sorted((part for step in found for part in step.parts), key=lambda part: part.rows or (0, 0)),
                first.spec.shape[0],
            )
        joined[name] = replace(
            first,
            spec=TensorSpec((row, *first.spec.shape[1:]), first.spec.dtype),
            parts=tuple(moved),
            arithmetic=", ".join(dict.fromkeys(step.arithmetic for step in found if step.arithmetic)),
            loses=", ".join(dict.fromkeys(step.loses for step in found if step.loses)),
            part=None,
        )
    whole = [joined.pop(step.name, None) if step.part else step for step in steps]
    return [step for step in whole if step is not None], findings


def _interleaved(step: Step) -> bool:
    """Whether the rows of a step are some of those of its whole tensor."""
    rows = [part.rows for part in step.parts if part.rows is not None]
    return (
        len(rows) == len(step.parts) and sum(stop - start for start, stop in rows) < step.spec.shape[step.parts[0].axis]
    )


def made_twice(steps: Sequence[Step]) -> Iterator[Finding]:
    """Find tensors that two steps make."""
    seen: dict[str, Step] = {}
    for step in steps:
        first = seen.setdefault(step.name, step)
        if first is not step:
            yield Finding(
                "tensor-made-twice",
                f"this target tensor ({step.spec}) is made twice, here and at {first.rule.line_only} ({first.spec})",
                rule=step.rule.line_only,
                path=step.name,
                fix="each target tensor has one source; change one of the two paths",
            )


def compare_with_state_dict(steps: Sequence[Step], like: Mapping[str, TensorSpec]) -> Iterator[Finding]:
    """Compare names and shapes of the output with those of `--like`."""
    made = {step.name: step for step in steps}
    known_made, known_like = ClosestNames(made), ClosestNames(like)
    suggested = 0

    def suggest(known: ClosestNames, name: str) -> str:  # slow among thousands; later findings are not shown
        nonlocal suggested
        suggested += 1
        near = known.did_you_mean(name) if suggested <= MAX_LINES else ""
        return f"; {near}" if near else ""

    for name, spec in like.items():
        if name not in made:
            yield Finding(
                "state-dict-mismatch",
                f"the state_dict of --like has this tensor ({spec}), and nothing makes it",
                path=name,
                fix=f"add a rule for it{suggest(known_made, name)}",
            )
        elif made[name].spec.shape != spec.shape:
            yield Finding(
                "state-dict-mismatch",
                rule=made[name].rule.line_only,
                path=name,
                expected=f"{spec} as in the state_dict of --like",
                got=str(made[name].spec),
                fix="correct the rule",
            )
    for name, step in made.items():
        if name not in like:
            yield Finding(
                "state-dict-mismatch",
                f"the state_dict of --like has no such tensor ({step.spec})",
                rule=step.rule.line_only,
                path=name,
                fix=f"correct its name or drop its leaf{suggest(known_like, name)}",
            )
