"""Compiles rules to steps: derives the primitive operations of each output tensor from what its rule declares."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.ops import Op, Slice, out_spec
from convert.core.tensor_spec import TensorSpec, is_float
from convert.core.value_ops import Multiply
from convert.core.weight_norm_ops import RowLengths
from convert.layers import Rule, TargetLayer
from convert.layers.base import Matched, MatchKey, Part, Step
from convert.layers.casts import computing, losses, target_dtype
from convert.layers.leaves import MisfitError, not_convertible
from convert.layers.shared_keys import shown_part
from convert.layers.target import Constant
from convert.layers.transforms.weight_normalization import kept as kept_apart
from convert.layers.transforms.weight_normalization import lengths_role
from convert.layers.transforms.weight_transforms import add_number, divide_by_prescale
from convert.layers.weight_keys import BIAS_U
from convert.planning.compile.arrange import arranged
from convert.planning.compile.layer_tensor import LayerTensor, among_siblings, tensor_name, uniform
from convert.planning.compile.named_leaf import NamedLeaf, check_names, read_leaf
from convert.planning.compile.pieces import Piece, in_columns, row_by_row, rule_of_part, rules_of_rows
from convert.planning.compile.weight_norm import Folding, check_bias
from convert.planning.merged_leaf import MergedLeaf


@dataclass(frozen=True)
class Compiler:
    """Compiles a rule and its leaves to steps.

    Attributes:
        source: the checkpoint, low-rank pairs merged.
        target: name of the target.
        dtype: dtype of floating-point tensors in the output; None keeps each leaf's.
        facts: hyperparameters that no leaf holds, as far as they are known.
        set_by_hand: names of the facts that the user set.
        sizes: sizes of the axis letters.
        merges: leaves that are computed from several others, by name.
        custom_cells: whether a recurrent cell that torch lacks may be written, for a module of this package.
        varying: letters whose sizes may differ from layer to layer.
    """

    source: Source
    target: str
    dtype: str | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    set_by_hand: Collection[str] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    merges: Mapping[str, MergedLeaf] = field(default_factory=dict)
    custom_cells: bool = False
    varying: frozenset[str] = frozenset()

    @cached_property
    def usual_dtype(self) -> str:
        """Dtype of tensors that no leaf holds: that of the output, or of most of the checkpoint's values."""
        values: Counter[str] = Counter()
        for leaf in self.source.leaves.values():
            values[leaf.spec.dtype] += leaf.spec.size if is_float(leaf.spec.dtype) else 0
        return self.dtype or values.most_common(1)[0][0]

    def spec(self, leaf: str) -> TensorSpec:
        """Return shape and dtype of a leaf."""
        return self.source.leaves[leaf].spec

    def tensors(self, matched: Matched, layer: TargetLayer, variant: str | None) -> Iterator[Step]:
        """Yield the output tensors of a rule, in the order of its leaves.

        Raises:
            MisfitError: a leaf contradicts the rule, or cannot become its tensor.
        """
        rule = matched.rule
        folded = rule.normalized.paths if rule.normalized and not kept_apart(rule, layer) else {}
        second_leaves = {role: matched.leaves.get(role, {}) for role in folded}
        leaves = self.source.leaves
        for role, of_role in matched.leaves.items():
            if role in folded:
                continue  # it is folded into the weight
            pattern = rule.sources[role]
            every = list(pattern.all_choices())
            each_part = [rule_of_part(rule, k) for k in range(rule.kind.parts)]
            if layer.rows is not None:
                each_part = rules_of_rows(each_part or [rule], layer, layer.rows)
            derived: dict[tuple[TensorSpec | None, ...], list[LayerTensor]] = {}
            for values in sorted({indices for indices, _ in of_role}):
                indices = dict(zip(pattern.indices, values, strict=True))
                names = {choices: of_role.get((values, choices)) for choices in every}
                specs = tuple([None if name is None else leaves[name].spec for name in names.values()])
                tensors = derived.get(specs)
                if tensors is None:
                    tensors = among_siblings(
                        [
                            tensor
                            for choices in layer.path.all_choices()
                            for tensor in self._tensor(
                                rule, role, layer, variant, indices, values, names, choices, second_leaves, each_part
                            )
                        ]
                    )
                    if not any(tensor.own for tensor in tensors):
                        derived[specs] = tensors
                made: list[Step] = []
                for tensor in tensors:
                    others = [tensor.paths(rule, tied.tensor, indices) for tied in layer.tied]
                    for step, *further in zip(tensor.steps(rule, role, layer, indices, names), *others, strict=True):
                        made.append(step)
                        yield step
                        for tied, name in zip(layer.tied, further, strict=True):
                            yield replace(
                                step, name=name, kind_name=tied.kind_name, tied=step.name, notes=(), siblings=1
                            )
                if role == rule.lead:
                    constants = rule.kind.constants(layer)
                    yield from (self._constant(rule, layer, one, step) for step in made for one in constants)
                    if (of := lengths_role(rule, layer)) is not None:
                        yield from (_lengths(rule, layer, of, step) for step in made)

    def _constant(self, rule: Rule, layer: TargetLayer, one: Constant, neighbour: Step) -> Step:
        """Make the step of a tensor that the source lacks, for the module of a tensor that it has."""
        name = rule.kind.tensor_name(neighbour.name.rpartition(".")[0], one.role, layer)
        spec = TensorSpec((), one.dtype) if one.dtype else neighbour.spec
        if one.per_row:
            spec = replace(spec, shape=spec.shape[:1])
        return Step(name, spec, (), rule.kind_name, rule.at, one.reason, value=one.value, role=one.role)

    def _tensor(
        self,
        rule: Rule,
        role: str,
        layer: TargetLayer,
        variant: str | None,
        indices: Mapping[str, int],
        values: tuple[int, ...],
        names: Mapping[tuple[int, ...], str | None],
        choices: tuple[int, ...],
        second_leaves: Mapping[str, Mapping[MatchKey, str]],
        each_part: Sequence[Rule],
    ) -> Iterator[LayerTensor]:
        """Yield the tensors of one target name: together where they differ in names and numbers only, else one by one.

        Args:
            each_part: the rule for each part of an axis that is a sum of parts.
        """
        groups = rule.sources[role].groups
        split = len(choices) > len(groups)
        fused = len(groups[-1].words) if len(choices) < len(groups) else 0
        sources = tuple((*choices, k) for k in range(fused)) if fused else (choices[: len(groups)],)
        made_of = each_part if layer.rows is not None else [rule] * len(sources)
        if split and each_part:
            words = layer.path.groups[-1].words
            same = [k for k, word in enumerate(words) if word == words[choices[-1]]]
            if choices[-1] != same[0]:
                return  # a part behind another one in the same tensor
            rule, made_of = each_part[choices[-1]], [each_part[k] for k in same]
        leaves = []
        sources *= len(made_of) // len(sources)
        for choice, one in zip(sources, made_of, strict=True):
            name = names[choice]
            if name is None:
                return  # reported by match.cover
            leaf = read_leaf(one, role, name, self.source.leaves[name].spec, variant)
            leaves.append(leaf.opened(one, self.sizes))
        member = (choices[-1], len(layer.path.groups[-1].words)) if split and not each_part else None
        split_axes = rule.split_axes(layer)
        counts = {index: size for index, _, size in leaves[0].stacked}
        counts |= {axis: self.sizes[axis] for axis in split_axes}
        check_names(rule, layer, leaves[0], counts)
        merged = any(leaf.name in self.merges for leaf in leaves)
        every = list(itertools.product(*map(range, counts.values())))
        for k, elements in enumerate(every):
            stack = dict(zip(counts, elements, strict=True))
            name = tensor_name(rule, role, layer, {**indices, **stack}, choices)
            key = (values, sources[0])
            wanted = [of for of in second_leaves if (of == BIAS_U) == (role == "bias")]
            second = {of: second_leaves[of][key] for of in wanted if key in second_leaves[of]}
            if len(second) < len(wanted):
                return  # reported by match.cover
            chosen = {axis: stack[axis] for axis in split_axes}
            pieces = [Piece(one, leaf, chosen) for one, leaf in zip(made_of, leaves, strict=True)]
            if layer.rows is not None:
                arrange = row_by_row if layer.along is None else in_columns
                pieces = arrange(pieces, layer.rows, layer.part, self.sizes)
            step = self._step(rule, role, layer, variant, pieces, stack, member, name, second)
            own = bool(second or step.notes)
            others = rule.kind.split_axis(role, leaves[0].letters or "", variant) if member else ""
            others += layer.rows.before if layer.rows is not None else ""
            together = not own and uniform(leaves, counts, others)
            yield LayerTensor(
                step,
                tuple(counts),
                every if together else every[k : k + 1],
                leaves[0].stacked,
                choices,
                sources * (len(pieces) // len(sources)),
                own or merged,
            )
            if together:
                return

    def _step(
        self,
        rule: Rule,
        role: str,
        layer: TargetLayer,
        variant: str | None,
        pieces: Sequence[Piece],
        stack: Mapping[str, int],
        member: tuple[int, int] | None,
        name: str,
        second: Mapping[str, str],
    ) -> Step:
        leaves = [piece.leaf for piece in pieces]
        check_bias(rule, role, leaves[0], second)
        folding = Folding(self.source, self.sizes)
        fold = folding.fold(rule, role, layer, variant, leaves[0], stack, second) if second else ()
        computed = [self._compute(piece.rule, role, layer, fold, name) for piece in pieces]
        one_leaf = len({leaf.name for leaf in leaves}) == 1
        made, row = [], 0
        for piece, compute in zip(pieces, computed, strict=True):
            one = self._part(rule, role, layer, variant, piece, stack, member, name, compute, one_leaf)
            rows = piece.rows or ((row, row + one.spec.shape[0]) if len(leaves) > 1 else None)
            row = max(piece.total, rows[1]) if rows else 0
            made.append(replace(one, part=replace(one.part, rows=rows, axis=layer.along or 0, every=piece.every)))
        arithmetic = list(dict.fromkeys(one.arithmetic for one in made if one.arithmetic))
        first = next((k for k, compute in enumerate(computed) if compute), None)
        if first is not None:
            arithmetic.append(_words(computed[first], pieces[first].rule))
        spec = self._joined(rule, layer, name, leaves, [one.spec for one in made], row)
        return Step(
            name,
            spec,
            tuple([one.part for one in made]),
            rule.kind_name,
            rule.at,
            ", ".join(arithmetic),
            losses([leaf.spec.dtype for leaf in leaves], spec.dtype, bool(arithmetic)),
            role=role,
            part=layer.part,
            notes=tuple([one.note for one in made if one.note]),
        )

    def _part(
        self,
        rule: Rule,
        role: str,
        layer: TargetLayer,
        variant: str | None,
        piece: Piece,
        stack: Mapping[str, int],
        member: tuple[int, int] | None,
        name: str,
        compute: tuple[Op, ...],
        one_leaf: bool,
    ) -> _Compiled:
        """Derive the operations of one part of a tensor, with its rule's axes, padding, arithmetic and dtype.

        Args:
            compute: arithmetic on its values.
            one_leaf: whether all parts of the tensor are of one leaf.

        Raises:
            MisfitError: the leaf contradicts the rule.
        """
        leaf = piece.leaf
        own = zip(leaf.letters or "", leaf.own_shape, strict=False) if self.varying else ()
        sizes = {**self.sizes, **{x: n for x, n in own if x in self.varying}} if self.varying else self.sizes
        own_layer = layer if piece.rows is None else piece.rule.layer(self.target) or layer
        moved = arranged(piece.rule, role, own_layer, variant, leaf, stack, member, sizes, piece.elements)
        merged = self.merges.get(leaf.name)
        try:
            dtype = target_dtype(rule, replace(leaf.spec, dtype=merged.dtype) if merged else leaf.spec, self.dtype)
            cut, at, why = self._cut(rule, out_spec(moved.ops, leaf.spec), moved.at)
            ops = (*moved.ops, *cut, *computing(compute, leaf.spec, dtype))
            spec = out_spec(ops, leaf.spec)
        except ValueError as error:
            raise not_convertible(rule, leaf.name, leaf.spec, name, error) from None
        note = f"{name} keeps {at} of {leaf.name}; {why}" if cut else ""
        if piece.rows and piece.rule.kind.axis_groups(variant) and own_layer.piece and one_leaf:
            at = f"part {own_layer.piece[0] + 1}" + (f", {at}" if at else "")
        elif rule.part:
            at = f"part {shown_part(rule.part)}" + (f", {at}" if at else "")
        part = replace(moved, ops=ops, at=at, rule=piece.rule)
        return _Compiled(part, spec, note, merged.arithmetic if merged else "")

    def _joined(
        self,
        rule: Rule,
        layer: TargetLayer,
        name: str,
        leaves: Sequence[NamedLeaf],
        specs: Sequence[TensorSpec],
        rows: int,
    ) -> TensorSpec:
        """Return shape and dtype of the tensor that the parts make, one behind the other.

        Args:
            rows: length of the axis along which they stand; 0 for a single part.

        Raises:
            MisfitError: the parts differ in dtype, or in another axis.
        """
        along = layer.along or 0
        others = [without_axis(spec.shape, along) for spec in specs]
        for leaf, spec, other in zip(leaves, specs, others, strict=True):
            if spec.dtype != specs[0].dtype or other != others[0]:
                raise MisfitError(
                    Finding(
                        "dtype-mismatch" if spec.dtype != specs[0].dtype else "shape-mismatch",
                        f"{leaves[0].name} and {leaf.name} become {'columns' if along else 'rows'} of one tensor",
                        rule=rule.at.line_only,
                        path=name,
                        expected=f"{specs[0]} but for the number of {'columns' if along else 'rows'}",
                        got=str(spec),
                        fix="give them one dtype with `dtype:`, or write them as separate tensors",
                    )
                )
        if not rows:
            return specs[0]
        axis = along % len(specs[0].shape)
        return TensorSpec((*others[0][:axis], rows, *others[0][axis:]), specs[0].dtype)

    def _compute(self, rule: Rule, role: str, layer: TargetLayer, fold: tuple[Op, ...], name: str) -> tuple[Op, ...]:
        """Return the arithmetic on the values of a leaf, or of a part of one.

        Raises:
            MisfitError: a number that it needs is unknown.
        """
        try:
            factor = divide_by_prescale(rule, self.sizes, self.facts)
            return (*add_number(rule, role), *factor, *fold, *rule.kind.compute(role, layer))
        except ValueError as error:
            of_fact = (
                rule.prescaled_by is not None and rule.prescaled_by.fact is not None
            )  # its message says what to do
            fix = "" if of_fact else "correct the letter"
            raise MisfitError(Finding("size-unknown", str(error), rule=rule.at.line_only, path=name, fix=fix)) from None

    def _cut(self, rule: Rule, spec: TensorSpec, at: str) -> tuple[tuple[Op, ...], str, str]:
        """Leave out rows that the kind calls padding: return the operation, which rows are kept, and why not the others."""
        if not spec.shape:
            return (), at, ""
        kept, why = rule.kind.kept_rows(spec.shape[0], self.facts, self.set_by_hand)
        if kept == spec.shape[0]:
            return (), at, ""
        shown = f"rows 0 to {kept - 1} of {spec.shape[0]}"
        return (Slice(0, 0, kept),), f"{at}, {shown}" if at else shown, why


@dataclass(frozen=True)
class _Compiled:
    """One part of a tensor, with its notes.

    Attributes:
        note: which rows of its leaf it keeps, if not all.
        arithmetic: how its leaf is computed from several others, if it is.
    """

    part: Part
    spec: TensorSpec
    note: str
    arithmetic: str


def _lengths(rule: Rule, layer: TargetLayer, role: str, weight: Step) -> Step:
    """Return the step of the scale with which torch's weight norm gives a weight: the lengths of its rows."""
    module = weight.name.removesuffix(rule.kind.tensor_name("", weight.role, layer))
    op = RowLengths()
    (part,) = weight.parts
    return replace(
        weight,
        name=module + rule.kind.tensor_name("", role, layer),
        spec=op.out_spec(weight.spec),
        parts=(replace(part, ops=(*part.ops, op)),),
        arithmetic=", ".join(filter(None, (weight.arithmetic, str(op)))),
        role=role,
    )


def without_axis(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Return a shape without this axis; -1 is the last one."""
    return (*shape[:axis], *shape[axis + 1 :]) if axis >= 0 else shape[:axis]


def _words(compute: tuple[Op, ...], rule: Rule) -> str:
    words = [str(op) for op in compute]
    if rule.prescaled_by is not None:
        words[next(k for k, op in enumerate(compute) if isinstance(op, Multiply))] += (
            f", as the source's weight carries {rule.prescaled_by.text}"
        )
    return ", ".join(words)
