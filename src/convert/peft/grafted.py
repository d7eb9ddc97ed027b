"""A checkpoint with the leaves of LoRA pairs beside its weights, in the form of a library. The pairs have no values yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum

import numpy as np

from convert.checkpoints.chunks import Box, Grid, Meter, Piece, single_chunk
from convert.checkpoints.source import Leaf, Source, tree_order
from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import Part, Step
from convert.planning.adapters.forms import pair_shapes
from convert.planning.adapters.names import Writer, find_pairs, pair_keys
from convert.planning.plan import Plan


class Form(Enum):
    """The forms of pairs: a library, and for qwix the function that the model calls."""

    QWIX_EINSUM = "qwix.einsum"
    QWIX_DOT_GENERAL = "qwix.dot_general"
    GEMMA = "gemma"
    OPENPI = "openpi"
    FLAX = "flax.nnx"

    @property
    def writer(self) -> Writer:
        return next(writer for writer in Writer if self.value.startswith(writer.value))


FORMS = tuple(form.value for form in Form)


class Grafted(Source):
    """A checkpoint with more leaves, which have no values.

    Args:
        base: the checkpoint.
        added: the leaves.
    """

    def __init__(self, base: Source, added: Iterable[Leaf]) -> None:
        self._base = base
        self.path, self.format, self.absent, self.notes = base.path, base.format, base.absent, base.notes
        self.given_path, self.boundary, self.watched = base.given_path, base.boundary, base.watched
        both = {**base.leaves, **{"/".join(leaf.keys): leaf for leaf in added}}
        self.leaves = dict(sorted(both.items(), key=lambda named: tree_order(named[1].keys)))

    def read(self, name: str) -> np.ndarray:
        return self._base.read(name)

    def read_box(self, name: str, box: Box) -> np.ndarray:
        return self._base.read_box(name, box)

    def chunks(self, name: str) -> Grid:
        return self._base.chunks(name) if name in self._base.leaves else single_chunk(self.leaves[name].spec.shape)

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        return self._base.pieces(name, chunk, meter)


def weights_of(plan: Plan, modules: Iterable[str]) -> dict[str, tuple[Step, Part]]:
    """Return leaf -> a tensor that it goes into, for the weights of modules."""
    names = {f"{module}.weight" for module in modules}
    return {part.leaf: (step, part) for step in plan.steps if step.name in names for part in step.parts}


def grafted(plan: Plan, weights: Mapping[str, tuple[Step, Part]], ranks: Mapping[str, int], dtype: str, form: Form) -> Grafted:  # fmt: skip
    """Add the leaves of a pair beside each weight.

    Args:
        plan: of the checkpoint alone.
        weights: from `weights_of`.
        ranks: of the pairs, by the name of the weight.
        dtype: of the leaves.

    Raises:
        PlanError: the library makes no pair for a weight.
    """
    added: dict[str, tuple[Leaf, Leaf]] = {}
    findings = []
    for name, (step, part) in weights.items():
        leaf, rule = plan.checkpoint.leaves[name], part.rule
        plain = rule is not None and rule.kind.pair is None and rule.normalized is None
        equation = rule.kind.linear_map(plan.choices.get(rule.choice or "")) if rule is not None and plain else None
        try:
            if rule is None or equation is None:
                raise ValueError("the rule does not say with which equation the source uses the weight")
            stacked = tuple(sorted(rule.stacked.values()))
            shapes = pair_shapes(equation, stacked, leaf.spec, ranks[name], form.writer, flat=form is Form.QWIX_DOT_GENERAL)  # fmt: skip
        except ValueError as error:
            fix = f"choose another form with --adapter ({', '.join(FORMS)}), or give a checkpoint that has the pairs with --like"
            findings.append(Finding("adapter-not-importable", str(error), step.rule.line_only, name, fix=fix))
            continue
        keys = pair_keys(leaf.keys, form.writer)
        first, second = (Leaf(path, TensorSpec(shape, dtype)) for path, shape in zip(keys, shapes, strict=True))
        added[name] = first, second
    if findings:
        raise PlanError(*findings)
    source = Grafted(plan.checkpoint, (leaf for pair in added.values() for leaf in pair))
    found = find_pairs(source.leaves)
    for name in added:
        if name not in found or found[name].writer is not form.writer:
            taken = f"those of {found[name].writer.value}" if name in found else "no pair"
            problem = f"the names that {form.writer.value} gives to the pair are, in this tree, {taken}"
            fix = "give a checkpoint that has the pairs with --like"
            raise PlanError(Finding("adapter-not-importable", problem, weights[name][0].rule.line_only, name, fix=fix))
    return source
