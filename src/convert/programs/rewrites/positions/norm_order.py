"""Move the norms of queries and keys to the other side of RoPE."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.program import Program, Value
from convert.programs.rewrites.places.segments import LAYERS, Segment, computed_by, segments_to
from convert.programs.rewrites.rewrite import Goal, Rewrite, line

Array = np.ndarray[Any, np.dtype[Any]]
BEHIND, IN_FRONT = "norm behind RoPE", "norm in front of RoPE"
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Chain:
    """The segments from a layer's output to an operand of the scores, of which a norm and RoPE are two.

    Attributes:
        segments: as the target computes them; moved: with the norm on the other side of RoPE.
        norm: the segments of the norm.
        behind: whether the target's norm is behind RoPE.
        rotation: RoPE.
    """

    segments: tuple[Segment, ...]
    moved: tuple[Segment, ...]
    norm: tuple[Segment, ...]
    behind: bool
    rotation: Segment

    @property
    def leaves(self) -> list[str]:
        return sorted({leaf for segment in self.norm for leaf in segment.leaves})

    @property
    def commutes(self) -> bool:
        """Whether its place does not matter: RoPE does not change the length of a vector, and there are no weights."""
        own = any("layer_norm" in one.name or kind_of(one) == "subtract" for x in self.norm for one in x.operations)
        return not self.leaves and not own

    @property
    def family(self) -> tuple[str, ...]:
        """Names of the norm's parameters without numbers: equal in all layers."""
        return tuple(NUMBER.sub("#", leaf) for leaf in self.leaves)


def norm_order(target: Program, goal: Goal) -> Rewrite | None:
    """Return the norms that restore the output on the other side of RoPE: all of queries and keys, or those of one alone."""
    program = on_the_way(target, goal.output)
    chains = _chains(program)
    families = list(dict.fromkeys(chain.family for chain in chains if not chain.commutes))
    for chosen in (families, *([one] for one in families if len(families) > 1)):
        moved = [chain for chain in chains if chain.family in chosen]
        if not moved or len({chain.behind for chain in moved}) > 1:
            continue
        rerun = Rerun(program)
        try:
            for chain in moved:
                if (made := computed_by(chain.moved, rerun.array(chain.segments[0].before))) is None:
                    break
                list(rerun.put(Change({chain.segments[-1].after: made})))
            else:
                error = goal.error(rerun.array(program.outputs[goal.output]))
                if error <= goal.enough:
                    return _rewrite(moved, error)
        except ValueError:  # the norm does not take this layout
            continue
    return None


def _rewrite(moved: Sequence[Chain], error: float) -> Rewrite:
    first = moved[0]
    of = " and ".join(sorted({leaf for chain in moved if chain.family for leaf in chain.leaves[:1]})[:2])
    norm, turn = line(first.norm[0].operations[-1]), line(first.rotation.operations[-1])
    here, there = ("behind", "in front of") if first.behind else ("in front of", "behind")
    problem = f"the target norms with {of} {here} RoPE (norm {norm}, RoPE {turn}); the outputs are equal with the norm {there} RoPE"
    fix = f"norm queries and keys {there} RoPE in the target, or correct the reference"
    return Rewrite(BEHIND if first.behind else IN_FRONT, problem, fix, error)


def _chains(program: Program) -> list[Chain]:
    """Return the chains that end at products of two values, in the order of execution."""
    order = {value: k for k, one in enumerate(program.operations) for value in one.results}
    found: dict[Value, Chain] = {}
    for operation in program.operations:
        if kind_of(operation) in LAYERS and len(operation.data) > 1:
            for value in operation.data:
                if (chain := _chain(value, program, order)) is not None:
                    found.setdefault(chain.segments[-1].after, chain)
    return list(found.values())


def _chain(value: Value, program: Program, order: Mapping[Value, int]) -> Chain | None:
    segments = segments_to(value, program, order)
    turn = next((k for k, one in enumerate(segments) if one.rotates), None)
    norm = next((k for k, one in enumerate(segments) if one.norms), None)
    if turn is None or norm is None:
        return None
    end = norm + 1
    while end < len(segments) and segments[end].scales:
        end += 1
    of_norm, first, last = segments[norm:end], min(norm, turn), max(end, turn + 1)
    others = segments[first:norm] + segments[end:last]
    moved = [*of_norm, *others] if turn < norm else [*others, *of_norm]
    return Chain(tuple(segments[first:last]), tuple(moved), tuple(of_norm), turn < norm, segments[turn])
