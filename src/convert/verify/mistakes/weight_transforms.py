"""Mistakes about what the source folds into a weight: a factor left in or undone twice, RoPE's pairs left as they were.

Where the rule declares nothing of the kind, the converse is tried: what the weight would be if it had declared it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from convert.checkpoints.source import Source
from convert.core.ops import Cast, Deinterleave, Interleave, Multiply, Op
from convert.layers import Embedding, Linear, Rule
from convert.layers.base import Part, Step
from convert.layers.hypothesis import Hypothesis
from convert.verify.mistakes.hypothesis import maker

LEFT_IN = "carried factor left in"
NEEDLESS = "factor taken out of a weight that carries none"
TWICE = "carried factor folded in twice"
INTERLEAVED = "RoPE pairs still interleaved"
HALVED = "RoPE pairs de-interleaved needlessly"
NEEDLESSLY = "RoPE pairs interleaved needlessly"


def conventions(step: Step, source: Source) -> Iterator[Hypothesis]:
    """Hypotheses about factors and pairs; a fused tensor is left to its parts' rules."""
    if len(step.parts) != 1 or step.parts[0].rule is None:
        return
    part, rule = step.parts[0], step.parts[0].rule
    yield from _factors(step, part, rule, source)
    yield from _pairs(step, part, rule, source)


def _hypothesis(
    step: Step, source: Source, ops: tuple[Op, ...], name: str, converse: str, gives: str, instead: str
) -> Hypothesis:
    part = step.parts[0]
    changed = Part(part.leaf, ops, part.rows, part.layout, part.at, part.axes, part.groups, rule=part.rule)
    return Hypothesis(name, converse, gives, instead, maker(step, source, (changed,)), name)


def _factors(step: Step, part: Part, rule: Rule, source: Source) -> Iterator[Hypothesis]:
    if rule.prescaled_by is not None:
        carried = rule.prescaled_by.text
        instead = f"the weight without the factor {carried} that the source folds into it"
        bare = tuple(op for op in part.ops if not isinstance(op, Multiply))
        yield _hypothesis(step, source, bare, LEFT_IN, NEEDLESS, f"the weight with its factor {carried}", instead)
        turned = tuple(Multiply(1 / op.value) if isinstance(op, Multiply) else op for op in part.ops)
        gives = f"the weight with the factor {carried} twice"
        yield _hypothesis(step, source, turned, TWICE, TWICE, gives, instead)
        return
    sizes = dict(part.axes)
    if isinstance(rule.kind, Linear) and step.role == "weight" and len(part.groups[0]) > 1:
        letter, folded = part.groups[0][-1], "1/sqrt({})"  # of a head, into queries
        value = math.sqrt(sizes[letter])
    elif isinstance(rule.kind, Embedding) and rule.kind.axes:
        letter, folded = rule.kind.axes[-1], "sqrt({})"
        value = 1 / math.sqrt(sizes[letter])
    else:
        return
    carried = folded.format(letter)
    gives = f"the weight without a factor {carried}, as if the source had folded it in"
    ops = _computed(step, part.ops, Multiply(value))
    yield _hypothesis(step, source, ops, NEEDLESS, LEFT_IN, gives, "the weight as the source stores it")


def _computed(step: Step, ops: tuple[Op, ...], op: Op) -> tuple[Op, ...]:
    """The operations with arithmetic behind them, in float32 or wider."""
    wide = "float64" if step.spec.dtype == "float64" else "float32"
    return (*(known for known in ops if not isinstance(known, Cast)), Cast(wide), op, Cast(step.spec.dtype))


def _pairs(step: Step, part: Part, rule: Rule, source: Source) -> Iterator[Hypothesis]:
    done = [op for op in part.ops if isinstance(op, (Deinterleave, Interleave))]
    apart, together = "pairs of features (0, H/2)".replace("H", _axis(part, rule)), "pairs of features (0, 1)"
    if done:
        bare = tuple(op for op in part.ops if op not in done)
        split = isinstance(done[0], Deinterleave)
        name, converse = (INTERLEAVED, HALVED) if split else (HALVED, INTERLEAVED)
        gives, instead = (together, apart) if split else (apart, together)
        yield _hypothesis(step, source, bare, name, converse, f"in the source's order, {gives}", f"in the order of the target, {instead}")  # fmt: skip
        return
    letters = "".join(letter for letter, _ in part.axes)
    axis = letters.find(_axis(part, rule))
    heads = rule.rope is not None or (
        isinstance(rule.kind, Linear) and step.role == "weight" and len(part.groups[0]) > 1
    )
    if not heads or axis < 0 or part.axes[axis][1] % 2:
        return
    taken = len(part.ops) - len(_own(part))
    ops = (*part.ops[:taken], Deinterleave(axis), *part.ops[taken:])
    yield _hypothesis(step, source, ops, HALVED, INTERLEAVED, f"in the order of {apart}, as if the source had {together}", "in the source's order")  # fmt: skip


def _axis(part: Part, rule: Rule) -> str:
    """The axis that RoPE turns, or would turn: the last of an output's."""
    return rule.rope.axis if rule.rope is not None else part.groups[0][-1:] if part.groups else ""


def _own(part: Part) -> tuple[Op, ...]:
    """The operations behind those that take one layer, or one member, out of the leaf."""
    return part.ops[len(part.apart) :]
