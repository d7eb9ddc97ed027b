"""Projections: an einsum in the source; ``torch.nn.Linear``, or an einsum of its own, in the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from convert.core.axis_groups import AxisGroup
from convert.core.einsum import Projection, parse_projection
from convert.core.fields import Choice, Either, Key, MapOf, Record, Scalar
from convert.core.path_pattern import Pattern
from convert.layers.base import LayerKind, PlanView, ProbeSample, Step
from convert.layers.draft import DraftContext, DraftEntry, Layer
from convert.layers.leaf_sums import place_of, role_of_sum
from convert.layers.linear.draft import draft_weight
from convert.layers.linear.mistakes import linear_mistakes
from convert.layers.linear.probe import probe_linear
from convert.layers.low_rank import EITHER_EQUATION, ONE, PLUS, PLUS_FIRST, PLUS_SECOND, SECOND, Pair, Plus, Product
from convert.layers.mistake import Mistake
from convert.layers.probe import Probe, probe_of_values
from convert.layers.shared_keys import (
    ACTIVATION,
    BIAS,
    PART_OF_LEAF,
    PATTERN,
    TARGET_AXES,
    module_target,
    referenced_fact,
)
from convert.layers.target import Constant, TargetLayer
from convert.layers.transforms.probe import row_lengths
from convert.layers.transforms.weight_normalization import lengths_role
from convert.layers.weight_keys import (
    CARRIES_IN_PARTS,
    FLATTENED,
    NORMALIZED,
    PARAMETRIZATION,
    ROPE,
    TARGET_FLATTENED,
    TARGET_ROPE,
)

BIASED = "weight and bias"
EQUATION = Scalar(str, "an einsum such as ...D,DNH->...NH", parse_projection)


@dataclass(frozen=True)
class Linear(LayerKind):
    """``y = x @ weight.T + bias`` on flattened axes, with the layout that the source's equation implies.

    Attributes:
        equations: variant -> equation; a single equation is the variant ``""``.
        activation: what the source applies to the result.
        product: the weight is the product of two leaves, until they are merged.
        plus: a product that is added to the weight, until it is merged.
        biased: whether the source adds a bias.
        leaves: how many leaves stand one after the other along the axis of the inputs, until they are joined.
    """

    equations: Mapping[str, Projection]
    activation: str | None = None
    product: Product | None = None
    plus: Plus | None = None
    biased: bool = False
    leaves: int = 1

    kind_name: ClassVar[str] = "linear"
    doc: ClassVar[str] = "torch.nn.Linear; the layout is derived from the equation of the source."
    keys: ClassVar[Mapping[str, Key]] = {
        "einsum": Key(
            Either(EITHER_EQUATION, MapOf(EQUATION, "variants such as {plain: ..., transposed: ...}")),
            "Equation of the layer as the source writes it: X,W->Y with the weight second, or X,A,B->Y for a low-rank pair. A composite axis of the leaf is written as in einops, ...D,D(N C H)->...(N C H), and one that holds several parts as a sum, (N H + K H + K H). Several named equations are variants, of which sizes or --set choose one.",
            required=True,
            example="...D,DF->...F",
        ),
        "times": Key(
            PATTERN,
            "Path of the second leaf of a low-rank pair X,A,B->Y; `from` is the path of the first. Default: one weight.",
        ),
        "plus": Key(
            PLUS,
            "Low-rank product that the source adds to the result (LoRA); it is merged into the weight. Default: none.",
        ),
        "choice": Key(
            Scalar(str, "a word"),
            "Name by which --set chooses among several named equations; required if there are several.",
        ),
        "bias": BIAS,
        "activation": ACTIVATION,
        "part": PART_OF_LEAF,
        "prescaled_by": CARRIES_IN_PARTS,
        "rope": ROPE,
        "flattened": FLATTENED,
        **NORMALIZED,
    }
    target: ClassVar[Record] = module_target(
        einsum=Key(
            EQUATION,
            "Equation of the target's own code, in the letters of the source's equation, if it is not a torch.nn.Linear. Default: that of torch.nn.Linear.",
        ),
        axes=TARGET_AXES,
        rope=TARGET_ROPE,
        flattened=TARGET_FLATTENED,
        parametrization=PARAMETRIZATION,
        parameters=Key(
            Choice((BIASED,)),
            "`weight and bias`: the target's module has a bias, also where the source has none; zeros are written. Default: a bias if the source has one.",
        ),
    )
    fuses: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Linear:
        equations = values["einsum"]
        named = equations if isinstance(equations, dict) else {"": equations}
        if isinstance(equations, dict) and len(equations) < 2:
            raise ValueError("write at least two named equations, or one without a name")
        if isinstance(equations, dict) and not values.get("choice"):
            raise ValueError("several equations need a `choice:`, the name under which --set can choose one")
        if not isinstance(equations, dict) and "choice" in values:
            raise ValueError("`choice:` requires several named equations")
        product = equations if isinstance(equations, Product) else None
        if product is not None and "part" in values:
            raise ValueError("`part` of a rule takes a part of one leaf, and a low-rank pair has two; leave it out")
        if "part" in values:
            named = {name: equation.taken(values["part"]) for name, equation in named.items()}
        if (product is None) == ("times" in values):
            raise ValueError(
                "a pair, X,A,B->Y, has its first leaf in `from:` and its second in `times:`; one weight has no `times:`"
            )
        for equation in named.values() if product is None else ():
            equation.check_one_sum()
        if len({equation.parts for equation in named.values() if isinstance(equation, Projection)}) > 1:
            raise ValueError("the named equations have different numbers of parts")
        plus = None
        if "plus" in values:
            if product is not None or isinstance(equations, dict):
                raise ValueError("`plus:` is added to one weight, X,W->Y")
            if equations.groups:
                raise ValueError(
                    "`plus:` is added to a weight whose axes are letters; write two rules to keep the pair separate"
                )
            plus = Plus(values["plus"]["einsum"], values["plus"].get("scale", ONE))
            _check_same_map(equations, plus.product)
        whole, leaves = ({"": product.whole} if product else named), len(values["from"])
        if leaves > 1:
            _check_joined(whole, leaves, product is None and plus is None and "part" not in values)
        return cls(whole, values.get("activation"), product, plus, "bias" in values, leaves)

    @classmethod
    def draft(
        cls, context: DraftContext, layer: Layer, main: str | None, bias: str | None, either: bool = False
    ) -> DraftEntry:
        assert main is not None
        return draft_weight(context, layer, main, bias)

    @property
    def weight_axes(self) -> tuple[tuple[str, str], ...]:
        return tuple(_all_axes(equation) for equation in self.equations.values())

    @property
    def facts_used(self) -> tuple[str, ...]:
        scale = self.plus.scale.fact if self.plus is not None else None
        return tuple(fact for fact in (referenced_fact(self.activation), scale) if fact)

    @property
    def pair(self) -> Pair | None:
        if self.product is not None:
            return Pair(self.product, ONE, ("weight", SECOND), added=False)
        if self.plus is not None:
            return Pair(self.plus.product, self.plus.scale, (PLUS_FIRST, PLUS_SECOND), added=True)
        return None

    @property
    def merged(self) -> Linear:
        if self.leaves > 1:
            return replace(self, equations={name: one.stored for name, one in self.equations.items()}, leaves=1)
        return replace(self, product=None, plus=None)

    def of_leaf(self, role: str) -> Linear:
        if self.leaves == 1 or role_of_sum(role) != "weight":
            return self
        alone = {name: one.alone(place_of(role)) for name, one in self.equations.items()}
        return replace(self, equations=alone, leaves=1)

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self.equations) if len(self.equations) > 1 else ()

    def _equation(self, variant: str | None) -> Projection:
        return self.equations[variant] if variant is not None else next(iter(self.equations.values()))

    def linear_map(self, variant: str | None) -> Projection | None:
        return self._equation(variant).stored

    def axis_groups(self, variant: str | None) -> Mapping[str, AxisGroup]:
        return self._equation(variant).groups

    @property
    def parts(self) -> int:
        return next(iter(self.equations.values())).parts

    def part(self, k: int) -> Linear:
        return replace(self, equations={name: equation.part(k) for name, equation in self.equations.items()})

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str:
        equation = self._equation(variant)
        if role == "bias":
            return equation.stored.bias_axes(shape)
        if (pair := self._of_pair(role)) is not None:
            if len(shape) != len(pair):
                raise ValueError(f"it has the axes {' '.join(pair)} in the rule's equation")
            return pair
        weight = equation.stored.weight
        if len(shape) != len(weight):
            raise ValueError(f"{equation.text} has a weight with {len(weight)} axes ({equation.stored_weight})")
        return weight

    def rank(self, role: str, variant: str | None) -> int | None:
        return self._equation(variant).stored.bias_rank if role == "bias" else None

    def _of_pair(self, role: str) -> str | None:
        """Return the letters of a leaf of a low-rank pair."""
        if self.pair is None:
            return None
        product = self.pair.product
        return dict(zip(self.pair.roles, (product.first, product.second), strict=True)).get(role)

    def constants(self, layer: TargetLayer) -> tuple[Constant, ...]:
        if layer.has is None or self.biased:
            return ()
        return (Constant("bias", 0.0, "zeros: the source adds nothing, and the target has a bias", per_row=True),)

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        if self.constants(layer) and (layer.part is not None or layer.axes is not None or layer.computes is not None):
            raise ValueError("`parameters: weight and bias` writes zeros for a whole torch.nn.Linear; leave `part`, `axes` and `einsum` out of the target")  # fmt: skip
        for equation in self.equations.values():
            batch = "".join(x for x in equation.batch if x not in layer.path.indices)
            if layer.computes is None and batch:
                raise ValueError(
                    f"{batch} of {equation.text} is an axis of all three operands: the matrices are block "
                    "diagonal, which a Linear cannot hold; give the target the `einsum:` of its code, or keep them "
                    "as stored with `parameter:`"
                )
            if layer.computes is not None and equation.groups:
                raise ValueError(
                    f"the target's `einsum:` has the axes of the leaf, and {equation.text} has composite axes"
                )
            if layer.computes is not None:
                _check_same_layer(equation, layer.computes)
            split = [x for x in equation.weight if x in layer.path.indices]
            if layer.computes is not None and split:
                raise ValueError(
                    f"a target with an `einsum:` holds the whole weight, and {layer.path} names one element of {split[0]}"
                )
        if layer.computes is not None and len(layer.path.groups) != len(source.groups):
            raise ValueError(
                "a target with an `einsum:` holds one leaf in one tensor; it can be neither fused nor split"
            )

    def groups(self, role: str, letters: str, variant: str | None, layer: TargetLayer) -> tuple[str, ...]:
        if layer.computes is not None:  # its weight by its equation; its bias is added to a result of the same axes
            return tuple(layer.computes.weight) if role == "weight" else tuple(x.strip(".") for x in letters)
        equation = self._equation(variant)
        if role == "bias" and (split := _split_inputs(equation, layer)):
            raise ValueError(
                f"{split} of {equation.text} is an axis of the input, and each module that it is split among would add the bias"
            )
        outputs, inputs = ("".join(x for x in of if x in letters) for of in (equation.outputs, equation.inputs))
        return (outputs,) if role == "bias" else (outputs, inputs)  # one is gone where the layer is split

    def split_axis(self, role: str, letters: str, variant: str | None) -> str:
        equation = self._equation(variant)
        if len(equation.outputs) < 2:
            raise ValueError(f"{equation.text} has one output axis, so there is nothing to split among several targets")
        return equation.outputs[0]

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        return {"activation": self.activation} if self.activation else {}

    def probe(self, sample: ProbeSample) -> Probe:
        equation = self._equation(sample.variant)
        if sample.step.role == lengths_role(sample.rule, sample.layer):
            return probe_of_values(sample.written, row_lengths(sample, equation.weight, equation.outputs))
        if sample.step.role not in ("weight", "bias"):  # the scale of a weight norm
            return super().probe(sample)
        return probe_linear(sample, equation)

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        return linear_mistakes(step, plan)


def _all_axes(equation: Projection) -> tuple[str, str]:
    """Return the letters of the weight and of its outputs; of an equation with parts, those of all parts."""
    each = [equation.part(k) for k in range(equation.parts)] or [equation]
    weight, outputs = ("".join(getattr(one, name) for one in each) for name in ("weight", "outputs"))
    return "".join(dict.fromkeys(weight)), "".join(dict.fromkeys(outputs))


def _split_inputs(equation: Projection, layer: TargetLayer) -> str:
    """Return the axis of the input that is split among targets; empty where none is."""
    chosen = (group for group in equation.groups.values() if group.chosen is not None)
    parts = (str(group) for group in chosen if set(group.letters or "") & set(equation.inputs))
    return next(parts, "") or next((x for x in equation.inputs if x in layer.path.indices), "")


def _check_joined(equations: Mapping[str, Projection], leaves: int, plain: bool) -> None:
    """Check that an equation has an axis of inputs with a part for each of several leaves."""
    equation, *others = equations.values()
    parts = next((of.parts for of in equation.groups.values() if len(of.parts) == leaves), ())
    known = plain and not others and len(equation.groups) == 1 and [len(part) for part in parts] == [1] * leaves
    if not known or any(equation.alone(k).inputs != part for k, part in enumerate(parts)):
        raise ValueError(
            f"`from` has {leaves} leaves, one after the other; the equation then has one axis of inputs that is the sum of a letter for each, such as "
            "...(D + E),(D + E)F->...F, and the rule has no `part`, `times` or `plus`"
        )


def _check_same_layer(source: Projection, target: Projection) -> None:
    """Check that two equations differ only in the order of the weight's axes."""

    def rest(p: Projection) -> str:
        return p.equation.replace(f",{p.weight}->", ",->")

    if rest(source) != rest(target) or sorted(source.weight) != sorted(target.weight):
        raise ValueError(
            f"the target's {target.equation} is not the source's {source.equation} with the weight's axes in another order"
        )


def _check_same_map(weight: Projection, pair: Product) -> None:
    """Check that a pair maps the same input to the same result as the weight that it is added to."""
    if (weight.result, weight.inputs, weight.outputs, weight.batch) != (
        pair.whole.result,
        pair.whole.inputs,
        pair.whole.outputs,
        pair.whole.batch,
    ):
        raise ValueError(
            f"{pair.equation} merges to {pair.whole.equation}, whose inputs or results differ from {weight.equation}; "
            "a pair can be added only to a weight with the same axes"
        )
