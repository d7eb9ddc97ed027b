"""What may have gone wrong with a tensor, one thing at a time: each hypothesis is a tensor that one known mistake gives.

Where the written tensor equals a hypothesis bit for bit, the mistake has a name. The same list serves the model-level
diagnosis, where the hypothesis that restores parity is the diagnosis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from convert.checkpoints.source import Source
from convert.core.ops import (
    Add,
    Cast,
    Deinterleave,
    Interleave,
    Multiply,
    Permute,
    Reshape,
    Slice,
    Take,
    apply,
    is_float,
)
from convert.core.tensor_spec import numpy_dtype
from convert.layers.base import Part, Step
from convert.layers.hypothesis import Hypothesis
from convert.planning.ambiguity import MAX_AXES, other_layouts
from convert.planning.low_rank_source import Merge
from convert.planning.plan import Plan
from convert.verify.mistakes.control_path import path_hypotheses
from convert.verify.mistakes.conv import conv_hypotheses, layout_name
from convert.verify.mistakes.hypothesis import expected, maker
from convert.verify.mistakes.recurrent import cell_hypotheses
from convert.verify.mistakes.weight_transforms import conventions
from convert.verify.numerics.compare import epsilon

Array = np.ndarray[Any, np.dtype[Any]]
MAX_PARTS = 4  # of a fused tensor, whose orders are all tried
NOT_IN_SOURCE = "bias that the source does not add"
NOT_SCALED = "scale that the source does not multiply by"
ROUNDINGS = 4  # a mistake such as a lost `1+scale` may have been made by adding and subtracting


def hypotheses(step: Step, plan: Plan) -> Iterator[Hypothesis]:
    """Mistakes that give a tensor of the same shape, the most frequent ones first."""
    if not step.parts:
        return
    source = plan.source
    if step.group is not None and step.group.sizes:
        yield from cell_hypotheses(step, plan)
    if step.name in plan.holders:
        yield from _of_a_gate(step, plan)
    if step.group is not None and not step.group.sizes:
        yield from path_hypotheses(step, plan)
    yield from _pairs(step, plan)
    yield from _arithmetic(step, source)
    yield from conv_hypotheses(step, plan)
    yield from _slices(step, source)
    yield from conventions(step, source)
    yield from _layouts(step, source)
    yield from _orders(step, source)
    yield from _others(step, plan)
    yield from _absence(step, source)
    yield from _roundings(step, source)


def _of_a_gate(step: Step, plan: Plan) -> Iterator[Hypothesis]:
    """A recurrent layer's mistakes, where the file holds its gates apart."""
    held, place = plan.holders[step.name]
    if held.step.group is None:
        return

    def share(whole: Array) -> Array:
        rows = np.split(whole, len(held.names))[place]
        return rows.T if held.turned else rows

    for one in cell_hypotheses(held.step, plan.in_torch):
        yield replace(one, make=lambda make=one.make: share(make()))  # type: ignore[misc]


MISSING, DOUBLED, ADDED, SUBTRACTED = (
    "1+scale missing",
    "1+scale doubled",
    "1+scale on a plain norm",
    "1 subtracted from a plain norm",
)


def _arithmetic(step: Step, source: Source) -> Iterator[Hypothesis]:
    if step.word not in ("layer_norm", "rms_norm", "group_norm", "batch_norm") or step.role != "weight":
        return
    part = step.parts[0]
    added = sum(op.value for op in part.ops if isinstance(op, Add))
    bare = tuple(op for op in part.ops if not isinstance(op, (Add, Cast)))

    def shifted(offset: float) -> Callable[[], Array]:
        wide = "float64" if step.spec.dtype == "float64" else "float32"
        ops = (*bare, Cast(wide), Add(offset), Cast(step.spec.dtype))
        return lambda: apply(ops, source.read(part.leaf))

    def worded(offset: float) -> str:
        return "the plain scale" if offset == 0 else f"scale{offset:+g}"

    names = {(1.0, 0.0): (MISSING, ADDED), (1.0, 2.0): (DOUBLED, MISSING), (0.0, 1.0): (ADDED, MISSING), (0.0, -1.0): (SUBTRACTED, MISSING), (-1.0, 0.0): (ADDED, SUBTRACTED)}  # fmt: skip
    for (rule, wrong), (name, converse) in names.items():
        if rule == added:
            yield Hypothesis(name, converse, worded(wrong), worded(added), shifted(wrong))


def _pairs(step: Step, plan: Plan) -> Iterator[Hypothesis]:
    """A product of two leaves that was left out, or scaled otherwise."""
    merges = [plan.merges.get(part.leaf) for part in step.parts]
    first = next((merge for merge in merges if merge is not None), None)
    if first is None:
        return

    def made(base: float, scale: Callable[[Merge], float]) -> Callable[[], Array]:
        def make() -> Array:
            rows = [
                apply(
                    part.ops,
                    plan.source.read(part.leaf)
                    if merge is None
                    else merge.make(plan.checkpoint.read, base, scale(merge)),
                )
                for part, merge in zip(step.parts, merges, strict=True)
            ]
            return rows[0] if len(rows) == 1 else np.concatenate(rows)

        return make

    shape = plan.checkpoint.leaves[first.first].spec.shape
    sizes = dict(zip(first.product.first, (n for k, n in enumerate(shape) if k not in first.stacked), strict=True))
    rank = math.prod(sizes[letter] for letter in first.product.shared)
    own = f"the weight {first.said}" if first.base else first.said
    if first.base is not None:
        yield Hypothesis(
            "LoRA pair not merged", "LoRA pair not merged", "the weight alone", own, made(1.0, lambda m: 0.0)
        )
        yield Hypothesis("LoRA pair merged twice", "LoRA pair merged twice", "the weight with the product added twice", own, made(1.0, lambda m: 2 * m.scale))  # fmt: skip
        yield Hypothesis("LoRA pair subtracted", "LoRA pair subtracted", "the weight without the product", own, made(1.0, lambda m: -m.scale))  # fmt: skip
        yield Hypothesis("LoRA pair without its weight", "LoRA pair without its weight", "the product alone", own, made(0.0, lambda m: m.scale))  # fmt: skip
    scales: dict[str, Callable[[Merge], float]] = {
        "the product without its scale": lambda m: 1.0,
        "the scale not divided by the rank": lambda m: m.scale * rank,
        "the scale divided by the rank once more": lambda m: m.scale / rank,
        "the scale divided by the root of the rank": lambda m: m.scale * math.sqrt(rank),
    }
    for said, scale in scales.items():
        if scale(first) != first.scale:
            yield Hypothesis("another scale of a pair", "another scale of a pair", said, own, made(1.0, scale))


def _slices(step: Step, source: Source) -> Iterator[Hypothesis]:
    """Of a table that the source pads, others than the first rows."""
    part = step.parts[0]
    kept = next((op for op in part.ops if isinstance(op, Slice) and op.axis == 0), None)
    if step.word != "embedding" or kept is None or kept.start != 0:
        return
    spare = source.leaves[part.leaf].spec.shape[0] - kept.stop
    name, own = "another slice of the rows", f"its rows 0 to {kept.stop - 1}"
    for start in dict.fromkeys((spare, 1)):
        if 0 < start <= spare:
            moved = replace(kept, start=start, stop=start + kept.stop)
            parts = (replace(part, ops=tuple(moved if op is kept else op for op in part.ops)),)
            said = f"rows {start} to {start + kept.stop - 1} of {part.leaf}"
            yield Hypothesis(name, name, said, own, maker(step, source, parts))


def _layouts(step: Step, source: Source) -> Iterator[Hypothesis]:
    """The same leaf in another order of its axes."""
    part = step.parts[0]
    if not part.axes or any((p.axes, p.groups) != (part.axes, part.groups) for p in step.parts):
        return
    if len(part.axes) > MAX_AXES or any(isinstance(op, Slice) for p in step.parts for op in p.ops):
        return
    right = " ".join(x if len(x) == 1 else f"({' '.join(x)})" for x in part.groups)
    for layout in other_layouts(part.axes, part.groups):
        order = [x for x in layout.replace("(", " ").replace(")", " ").split() if x != "1"]
        parts = tuple(_reordered(p, order, step) for p in step.parts)
        name = layout_name(step, tuple("".join(g.split()) for g in _split_groups(layout))) or _layout_name(part, layout)
        yield Hypothesis(name, name, f"laid out as {layout}", f"laid out as {right}", maker(step, source, parts))


def _layout_name(part: Part, layout: str) -> str:
    """Transposed: the two flattened groups in the other order. Anything else mixes axes within a group."""
    groups = tuple("".join(g.split()) for g in _split_groups(layout))
    if len(groups) == 2 and len(part.groups) == 2 and "".join(groups) == part.groups[1] + part.groups[0]:
        return "transposed"
    if sorted(map(sorted, groups)) == sorted(map(sorted, part.groups)):
        return "axes of a head swapped"
    return "axes permuted"


def _split_groups(layout: str) -> list[str]:
    out, at = [], 0
    while at < len(layout):
        if layout[at] == "(":
            end = layout.index(")", at)
            out.append(layout[at + 1 : end])
            at = end + 1
        elif layout[at] == " ":
            at += 1
        else:
            out.append(layout[at])
            at += 1
    return out


def _reordered(part: Part, order: list[str], step: Step) -> Part:
    """The part with its last permutation replaced: axes in `order`, flattened to the same shape."""
    letters = [letter for letter, _ in part.axes]
    kept = [op for op in part.ops if not isinstance(op, (Permute, Reshape))]
    rows = part.rows or (0, step.spec.shape[part.axis])
    shape = list(step.spec.shape)
    shape[part.axis] = rows[1] - rows[0]
    # What stays in front takes layers and members; casts, arithmetic and what speaks of the target's axes stay behind.
    front = [op for op in kept if isinstance(op, (Take, Deinterleave, Interleave))]
    behind = [op for op in kept if op not in front]
    apart = Reshape(tuple(size for _, size in part.axes))
    moved = (apart, Permute(tuple(letters.index(x) for x in order)), Reshape(tuple(shape)))
    return replace(part, ops=(*front, *moved, *behind))


def _orders(step: Step, source: Source) -> Iterator[Hypothesis]:
    """A fused tensor with its parts in another order."""
    if not 1 < len(step.parts) <= MAX_PARTS or len({p.rows[1] - p.rows[0] for p in step.parts if p.rows}) != 1:
        return
    word = "rows" if step.parts[0].axis == 0 else "columns"
    right = f"{word} in the order {', '.join(part.leaf for part in step.parts)}"
    for order in itertools.permutations(range(len(step.parts))):
        if order == tuple(range(len(step.parts))):
            continue
        parts = tuple(step.parts[k] for k in order)
        wrong = f"{word} in the order {', '.join(part.leaf for part in parts)}"
        name = "fused parts in another order"
        yield Hypothesis(name, name, wrong, right, maker(step, source, parts), str(order))


def _others(step: Step, plan: Plan) -> Iterator[Hypothesis]:
    """The tensor that belongs to another name: layers shifted or swapped, query for key, a sibling's bias."""
    alike = [s for s in plan.steps if s.spec == step.spec and s.name != step.name and s.parts and s.role == step.role]
    layers = [s for s in alike if s.rule == step.rule and _without_numbers(s.name) == _without_numbers(step.name)]
    own = f"what belongs to {step.name}"
    for other in (*layers, *(s for s in alike if s not in layers)):
        name = "of another layer" if other in layers else "of another tensor"
        made, key = maker(other, plan.source, other.parts), other.name.rpartition(".")[0]
        yield Hypothesis(name, name, f"what belongs to {other.name}", own, made, key)


def _without_numbers(name: str) -> str:
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


def _absence(step: Step, source: Source) -> Iterator[Hypothesis]:
    zeros = np.zeros(step.spec.shape, numpy_dtype(step.spec.dtype))
    if step.role == "bias":
        yield Hypothesis("bias dropped", NOT_IN_SOURCE, "all zeros", "the bias", lambda: zeros)


def _roundings(step: Step, source: Source) -> Iterator[Hypothesis]:
    if not is_float(step.spec.dtype):
        return
    for narrow in ("bfloat16", "float16"):
        if numpy_dtype(narrow).itemsize < numpy_dtype(step.spec.dtype).itemsize:
            name = f"rounded through {narrow}"
            yield Hypothesis(
                name, name, f"rounded to {narrow} on the way", "cast once, at the end", _rounded(step, source, narrow)
            )
    if step.arithmetic:
        name = "folded in bfloat16"
        yield Hypothesis(
            name,
            name,
            f"'{step.arithmetic}' computed in bfloat16",
            "computed in float32",
            lambda: _folded(step, source, "bfloat16"),
        )


def _rounded(step: Step, source: Source, narrow: str) -> Callable[[], Array]:
    def make() -> Array:
        with np.errstate(over="ignore"):
            return expected(step, source).astype(numpy_dtype(narrow)).astype(numpy_dtype(step.spec.dtype))

    return make


def _folded(step: Step, source: Source, narrow: str) -> Array:
    """The step's arithmetic done in a narrow dtype."""
    dtype = numpy_dtype(narrow)
    ops = [op for op in step.parts[0].ops if not isinstance(op, Cast)]
    made: Array = apply(tuple(op for op in ops if not isinstance(op, (Add, Multiply))), source.read(step.parts[0].leaf))
    made = made.astype(dtype)
    for op in ops:
        if isinstance(op, Add):
            made = made + dtype.type(op.value)
        elif isinstance(op, Multiply):
            made = made * dtype.type(op.value)
    return made.astype(numpy_dtype(step.spec.dtype))


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays have the same dtype, shape and bytes (so that NaN equals NaN and 0 differs from -0)."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(_words(a), _words(b)))


def nearly(a: Array, b: Array) -> bool:
    """Whether two float arrays differ by a few roundings only: the same mistake, made with other arithmetic."""
    if a.dtype != b.dtype or a.shape != b.shape or not is_float(a.dtype.name):
        return False
    eps = epsilon(a.dtype.name)
    x, y = a.astype(np.float64), b.astype(np.float64)
    return bool(np.all(np.abs(x - y) <= ROUNDINGS * eps * np.maximum(np.abs(y), np.max(np.abs(y), initial=0.0))))


def _words(x: Array) -> Array:
    """The values as integers of their size, where there are such: no copy is made, whatever the strides."""
    return (
        x.view(f"u{x.itemsize}") if x.itemsize in (1, 2, 4, 8) else np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    )


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def unequal(got: Array, want: Array) -> Array:
    """Which values differ in any bit."""
    size = got.dtype.itemsize
    a, b = _bits(got).reshape(-1, size), _bits(want).reshape(-1, size)
    return np.asarray(np.any(a != b, axis=1)).reshape(got.shape)


def count_unequal(got: Array, want: Array) -> int:
    """How many values differ in any bit."""
    return int(np.count_nonzero(unequal(got, want)))
