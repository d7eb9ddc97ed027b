"""Layer norm and RMS norm: the arithmetic and the missing constants follow from the factors of both sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from convert.core.fields import Choice, Key, Record
from convert.core.ops import Op
from convert.core.path_pattern import Pattern
from convert.core.value_ops import Add
from convert.layers.base import CompileContext, CompiledRule, LayerKind, Matched, PlanView, ProbeSample, Step
from convert.layers.draft import DraftContext, DraftEntry, Layer
from convert.layers.leaves import shape_mismatch
from convert.layers.mistake import Mistake
from convert.layers.norm.draft import NamedNorm, draft_norm
from convert.layers.norm.mistakes import norm_mistakes
from convert.layers.norm.probe import probe_layer_or_rms_norm
from convert.layers.probe import Probe, probe_of_values, without_unit_axes
from convert.layers.shared_keys import AXES, BIAS, EPSILON, module_target, named_axes
from convert.layers.target import Constant, TargetLayer
from convert.layers.transforms.mistakes import flattened_mistakes, rope_mistakes
from convert.layers.transforms.probe import with_target_map
from convert.layers.weight_keys import FLATTENED, ROPE, TARGET_FLATTENED, TARGET_ROPE

Array = np.ndarray[Any, np.dtype[Any]]

SOURCE_FACTORS = ("scale", "1+scale")
UNSCALED = "1"  # the source multiplies by nothing
TARGET_FACTORS = ("weight", "1+weight")
HELD: Mapping[str, tuple[str, ...]] = {"weight and bias": ("weight", "bias"), "weight": ("weight",), "nothing": ()}


FACTOR = Key(
    Choice(
        (*SOURCE_FACTORS, UNSCALED),
        (("1 + scale", "write it without spaces: 1+scale"), ("weight", "in the source it is called scale")),
    ),
    "Factor that the source applies: `scale`, `1+scale`, or `1` if it has no scale. With `1` there is no `from`; the paths of the bias and of the statistics name the leaves.",
    required=True,
    example="scale",
)
TARGET_FACTOR = Key(
    Choice(TARGET_FACTORS), "Factor that the target's code applies: `weight` or `1+weight`. Default: weight."
)
HAS = Key(
    Choice(tuple(HELD)),
    "Parameters of the target's module: weight, bias or both. Parameters that the source lacks are written as ones and zeros. Default: weight and bias for batch_norm and group_norm, as torch creates them; otherwise weight, and bias if the source has one.",
)


@dataclass(frozen=True)
class Norm(LayerKind):
    """``x * rsqrt(variance + epsilon) * factor (+ bias)``, the mean subtracted first by a layer norm.

    Attributes:
        multiplies_by: the source's factor.
        epsilon: a number, or the name of a fact.
        axes: letters of the scale's axes.
        roles: of the leaves that the rule names.
    """

    multiplies_by: str
    epsilon: float | str
    axes: str | None = None
    roles: tuple[str, ...] = ("weight",)

    guide: ClassVar[str] = "norms"
    from_key: ClassVar[str] = "optional"  # a norm without a scale has no `from`
    biased: ClassVar[bool] = False  # whether torch's module has a bias, also when the source has none
    centred: ClassVar[bool] = False  # whether the mean is subtracted
    bare: ClassVar[str] = ""  # torch's module without weight and bias
    keys: ClassVar[Mapping[str, Key]] = {
        "multiplies_by": FACTOR,
        "epsilon": Key(EPSILON.field, EPSILON.doc, required=True, example="1e-6"),
        "bias": BIAS,
        "axes": AXES,
        "rope": ROPE,
        "flattened": FLATTENED,
    }
    target: ClassVar[Record] = module_target(
        multiplies_by=TARGET_FACTOR, rope=TARGET_ROPE, flattened=TARGET_FLATTENED, parameters=HAS
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Norm:
        return cls(values["multiplies_by"], values["epsilon"], values.get("axes"), cls.leaves(values))

    @classmethod
    def leaves(cls, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the roles of the leaves that a rule names.

        Raises:
            ValueError: what it multiplies by contradicts them; the message is the reason.
        """
        unscaled = values["multiplies_by"] == UNSCALED
        if unscaled and "from" in values:
            raise ValueError(
                f"`multiplies_by: 1` declares that the source has no scale, and `from` names one, {values['from']}; leave one of the "
                "two out"
            )
        if not unscaled and "from" not in values:
            raise ValueError(
                "a norm needs the key 'from', the path of its scale; write `multiplies_by: 1` if the source has none"
            )
        found = (*(() if unscaled else ("weight",)), *(role for key, role in cls.leaf_keys.items() if key in values))
        if not found:
            raise ValueError(
                "a norm without scale and bias has no leaf and needs no rule; build the target's module without them, "
                f"{cls.bare}"
            )
        return found

    @classmethod
    def draft(
        cls, context: DraftContext, layer: Layer, main: str | None, bias: str | None, either: bool = False
    ) -> DraftEntry:
        named = NamedNorm(cls.kind_name, cls.draft_keys) if cls.module_names else None
        return draft_norm(context, layer, main, bias, either, named)

    @classmethod
    def draft_keys(cls, entry: DraftEntry, layer: Layer, channels: int) -> None:
        """Write the keys that this kind has besides those of every norm."""

    def held(self, layer: TargetLayer) -> tuple[str, ...]:
        """Return which of weight and bias the target's module has."""
        if layer.has is not None:
            return HELD[layer.has]
        return ("weight", "bias") if self.biased or "bias" in self.roles else ("weight",)

    @property
    def weight_axes(self) -> tuple[tuple[str, str], ...]:
        return ((self.axes, self.axes),) if self.axes else ()

    @property
    def facts_used(self) -> tuple[str, ...]:
        return (self.epsilon,) if isinstance(self.epsilon, str) else ()

    @classmethod
    def schema(cls) -> dict[str, Any]:
        unscaled = {"properties": {"multiplies_by": {"const": int(UNSCALED)}}, "not": {"required": ["from"]}}
        scaled = {"properties": {"multiplies_by": {"not": {"const": int(UNSCALED)}}}, "required": ["from"]}
        return {"anyOf": [scaled, unscaled]}

    def constants(self, layer: TargetLayer) -> tuple[Constant, ...]:
        added = layer.multiplies_by == TARGET_FACTORS[1]
        ones = (
            f"{'zeros' if added else 'ones'}: the source has no scale, the target multiplies by {layer.multiplies_by}"
        )
        made = (
            Constant("weight", 0.0 if added else 1.0, ones),
            Constant("bias", 0.0, "zeros: the source adds nothing, and the target has a bias"),
        )
        return tuple(one for one in made if one.role in self.held(layer) and one.role not in self.roles)

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        for role, does in (("weight", "multiplies by a scale"), ("bias", "adds a bias")):
            if role in self.roles and role not in self.held(layer):
                raise ValueError(f"the source {does}, which would be lost: the target says `parameters: {layer.has}`")
        if layer.part is not None and self.constants(layer):
            raise ValueError("a norm without a scale or a bias makes whole tensors; leave `part` out")

    def compile(
        self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None
    ) -> CompiledRule:
        self._check_shapes(context, matched)
        return super().compile(context, matched, layer, variant)

    def _check_shapes(self, context: CompileContext, matched: Matched) -> None:
        """Check that scale, bias and statistics have one shape, whether the rule names their axes or not."""
        rule = matched.rule
        lead = rule.lead
        called = "scale" if lead == "weight" else lead
        for role, of_role in matched.leaves.items():
            for key, other in of_role.items():
                first = matched.leaves[lead].get(key)
                if first is not None and context.spec(first).shape != context.spec(other).shape:
                    raise shape_mismatch(
                        rule,
                        other,
                        problem=f"the {called} and the {role} of a norm have the same shape",
                        expected=f"the shape of {first}: {context.spec(first)}",
                        got=str(context.spec(other)),
                        fix="correct one of the two paths",
                    )

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        return named_axes(self.axes, shape)

    def compute(self, role: str, layer: TargetLayer) -> tuple[Op, ...]:
        if role != "weight":
            return ()
        offset = SOURCE_FACTORS.index(self.multiplies_by) - TARGET_FACTORS.index(layer.multiplies_by)
        return (Add(float(offset)),) if offset else ()

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        has = {"target_has": layer.has} if layer.has else {}
        return {
            "epsilon": self.epsilon,
            "source_multiplies_by": self.multiplies_by,
            "target_multiplies_by": layer.multiplies_by if "weight" in self.held(layer) else "none",
            **has,
        }

    def probe(self, sample: ProbeSample) -> Probe:
        """Run the norm once, with the first tensor of the rule; the values of its other tensors are compared."""
        stored = without_unit_axes(sample.stored, self.axes)
        if sample.step.role != sample.rule.lead:
            return probe_of_values(sample.written, with_target_map(stored, (self.axes or "").replace(".", ""), sample))
        return self._probe_norm(sample, stored)

    def _probe_norm(self, sample: ProbeSample, leaf: Array) -> Probe:
        axes, written, eps = (self.axes or "").replace(".", ""), self._affine(sample), self._epsilon(sample)
        return probe_layer_or_rms_norm(sample, leaf, written, axes, eps, self.multiplies_by, centred=self.centred)

    def _epsilon(self, sample: ProbeSample) -> float:
        return float(sample.plan.facts[self.epsilon] if isinstance(self.epsilon, str) else self.epsilon)

    def _affine(self, sample: ProbeSample) -> tuple[Array | None, Array | None]:
        """Weight and bias of the target's norm: the tensor that is probed, and the constant that the target has besides."""
        written = {sample.step.role: sample.written}
        for constant in self.constants(sample.layer):
            written[constant.role] = sample.tensor(sample.layer.names.get(constant.role, constant.role))
        return written.get("weight"), written.get("bias")

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        rule = step.parts[0].rule
        yield from norm_mistakes(step, plan)
        if rule is not None:
            yield from rope_mistakes(step, rule, plan)
            yield from flattened_mistakes(step, rule, plan)


@dataclass(frozen=True)
class LayerNorm(Norm):
    """Normalises mean and variance."""

    centred: ClassVar[bool] = True
    kind_name: ClassVar[str] = "layer_norm"
    doc: ClassVar[str] = "Layer norm: subtracts the mean and divides by the standard deviation."
    bare: ClassVar[str] = "torch.nn.LayerNorm(..., elementwise_affine=False)"


@dataclass(frozen=True)
class RMSNorm(Norm):
    """Divides by the root mean square; may have a bias, as Equinox's."""

    kind_name: ClassVar[str] = "rms_norm"
    doc: ClassVar[str] = "RMS norm: divides by the root mean square."
    burn_config: ClassVar[str] = "RmsNormConfig"
    bare: ClassVar[str] = "torch.nn.RMSNorm(..., elementwise_affine=False)"
