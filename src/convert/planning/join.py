"""Join the parts of tensors whose rows come from several rules."""

from __future__ import annotations

from dataclasses import replace

from convert.core.findings import Finding
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
