"""Folds weight norm and spectral norm into the weight: the division by the norm, or by sigma."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.ops import Op, Reshape, out_spec
from convert.core.weight_norm_ops import Features, Operand, SpectralNorm, WeightNorm
from convert.layers import Rule, TargetLayer
from convert.layers.leaves import MisfitError, unstacked
from convert.layers.transforms.concatenated import reordered
from convert.layers.transforms.rope import rope_permutation
from convert.layers.transforms.weight_normalization import features
from convert.layers.transforms.weight_transforms import unflattened
from convert.layers.weight_keys import BIAS_U, V
from convert.planning.compile.arrange import arranged
from convert.planning.compile.axes import movement, taken_out
from convert.planning.compile.named_leaf import NamedLeaf


@dataclass(frozen=True)
class Folding:
    """Derives the operations that fold the leaves of a weight norm or spectral norm into the weight.

    Attributes:
        source: the checkpoint.
        sizes: sizes of the axis letters.
    """

    source: Source
    sizes: Mapping[str, int]

    def fold(
        self,
        rule: Rule,
        role: str,
        layer: TargetLayer,
        variant: str | None,
        leaf: NamedLeaf,
        stack: Mapping[str, int],
        second: Mapping[str, str],
    ) -> tuple[Op, ...]:
        """Return the operation that folds the `second` leaves (role -> name) into a leaf."""
        norm = rule.normalized
        assert norm is not None and leaf.letters is not None
        moved = arranged(rule, role, layer, variant, leaf, stack, None, self.sizes)
        target = "".join(moved.groups)
        first = norm.role if role == "weight" else BIAS_U
        name = second[first]
        spec = self.source.leaves[name].spec
        own = unstacked(rule, name, spec)[1]
        try:
            axes = features(rule, leaf.letters, leaf.own_shape, own) if role == "weight" else leaf.letters[-1]
            if norm.role == "spectral_norm" and norm.steps is None and len(own) == 1:
                raise ValueError(
                    f"it has one axis; flax's u has two, [1, {own[0]}]. For Equinox at inference write "
                    "`spectral_norm: {u: ..., v: ...}`; if the source iterates, `{u: ..., steps: 1}`"
                )
            rest = "".join(x for x in leaf.letters if x not in axes)
            made = {of: self._operand(rule, layer, leaf, stack, of_name, axes if of != V else rest, target) for of, of_name in second.items()}  # fmt: skip
        except ValueError as error:
            raise MisfitError(
                Finding(
                    "shape-mismatch",
                    f"{spec} does not fit the weight {leaf.name}: {leaf.spec}: {error}",
                    rule=rule.at.line_only,
                    path=name,
                )
            ) from None
        apart = unflattened(rule, layer, axes, tuple(dict(zip(leaf.letters, leaf.own_shape, strict=True))[x] for x in axes), (), self.sizes)[0]  # fmt: skip
        sizes = dict(moved.axes)
        of = Features(tuple(sizes[x] for x in target), tuple(k for k, x in enumerate(target) if x in apart))
        if norm.role == "weight_norm":
            return (WeightNorm(made[first], norm.epsilon, of),)
        steps = 1 if norm.steps is None else norm.steps
        return (SpectralNorm(made[first], norm.epsilon, of, steps, made.get(V)),)

    def _operand(
        self,
        rule: Rule,
        layer: TargetLayer,
        leaf: NamedLeaf,
        stack: Mapping[str, int],
        name: str,
        axes: str,
        target: str,
    ) -> Operand:
        """Return a leaf that has values for some axes of a weight, with its axes moved like the weight's.

        Args:
            axes: letters of these axes, in the order of the leaf.
            target: letters of the weight's axes in the target's order; a flattened axis is split.

        Raises:
            ValueError: it is stacked differently; the message is the reason.
        """
        spec = self.source.leaves[name].spec
        stacked, own = unstacked(rule, name, spec)
        ops: list[Op] = taken_out(stacked, stack)
        try:
            out_spec(tuple(ops), spec)
        except ValueError as error:
            raise ValueError(f"{error}; it is stacked on other axes than the weight") from None
        size = dict(zip(leaf.letters or "", leaf.own_shape, strict=True))
        shape = tuple(size[x] for x in axes)
        if math.prod(shape) != math.prod(own):  # the operation reports it: it knows what the values are for
            return Operand(name, tuple(ops), math.prod(own), self.source.read)
        letters, inner, _ = unflattened(rule, layer, axes, shape, (), self.sizes)
        order = reordered(rule, layer, axes, shape, self.sizes)
        ops += [Reshape(shape), *rope_permutation(rule, layer, axes, self.sizes), *order, Reshape(inner)]
        ops += movement(letters, inner, ("".join(x for x in target if x in letters),)) if letters else ()
        return Operand(name, tuple(ops), math.prod(own), self.source.read)


def check_bias(rule: Rule, role: str, leaf: NamedLeaf, second: Mapping[str, str]) -> None:
    """Check that a bias of several axes has a vector u: a flax SpectralNorm divides it by its own sigma, too."""
    norm = rule.normalized
    stepped = norm is not None and norm.role == "spectral_norm" and V not in norm.paths
    if role == "bias" and stepped and not second and len(leaf.own_shape) > 1:
        raise MisfitError(
            Finding(
                "leaf-missing",
                f"a flax SpectralNorm also divides a bias of {len(leaf.own_shape)} axes ({leaf.spec}) by its own sigma",
                rule=rule.at.line_only,
                path=leaf.name,
                fix="give the path of its u: `spectral_norm: {u: ..., bias: path}`",
            )
        )
