"""Tensors of a target that no leaf holds: the timescales and tables of sinusoidal positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from convert.core.tensor_spec import TensorSpec
from convert.layers import Rule, Timescales
from convert.layers.base import Sinusoids, Step


def fill_buffer(
    rule: Rule,
    kind: Timescales,
    name: str,
    sizes: Mapping[str, int],
    facts: Mapping[str, Any],
    notes: list[str],
    findings: list[str],
) -> Iterator[Step]:
    """The step of a `buffer` rule, if the target has the buffer.

    Args:
        name: what the target calls it.
        notes, findings: what is to be said of it is added here.
    """
    if rule.when and rule.when not in facts:
        notes.append(
            f"{name} is left out: the target has it only when {rule.when} is true, and nothing says whether it is "
            f"(--set {rule.when}=true|false)"
        )
        return
    if rule.when and not isinstance(facts[rule.when], bool):
        findings.append(
            f"{rule.at.line_only}: {rule.when} is {facts[rule.when]!r}, neither true nor false; give it with "
            f"--set {rule.when}=true|false"
        )
        return
    if rule.when and not facts[rule.when]:
        return
    if kind.width not in sizes:
        findings.append(
            f"{rule.at.line_only}: {name} has the width {kind.width}, to which no leaf and no product of `axes` gives a size; "
            "correct the letter"
        )
        return
    scales = [facts.get(said) for said in ("min_timescale", "max_timescale")]
    positive = [float(scale) for scale in scales if isinstance(scale, int | float) and scale > 0]
    if len(positive) < 2:
        findings.append(
            f"{rule.at.line_only}: {name} needs min_timescale and max_timescale, two positive numbers, not "
            f"{scales[0]} and {scales[1]}; give them with --set min_timescale=... --set max_timescale=..."
        )
        return
    low, high = positive
    half = sizes[kind.width] // 2
    step = math.log(high / low) / max(half - (kind.last == "included"), 1)
    if kind.positions is None:
        yield Step(name, TensorSpec((half,), "float32"), (), rule.word, rule.at, "computed from sizes", "", (low, step))
        return
    rows = sizes.get(kind.positions) if isinstance(kind.positions, str) else kind.positions
    if rows is None or sizes[kind.width] % 2:
        said = (
            f"{name} has {kind.positions} positions, to which no leaf and no product of `axes` gives a size"
            if rows is None
            else f"{name} has the width {kind.width} = {sizes[kind.width]}, which is no pairs of a sine and a cosine"
        )
        findings.append(f"{rule.at.line_only}: {said}; correct the letter")
        return
    table = Sinusoids(low, step, kind.layout == "interleaved")
    spec = TensorSpec((rows, 2 * half), "float32")
    yield Step(name, spec, (), rule.word, rule.at, "computed from sizes", "", table)
