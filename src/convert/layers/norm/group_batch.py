"""Norms over channels: group norm and batch norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.fields import Key, Record, Scalar
from convert.layers.base import PlanView, ProbeSample, Step
from convert.layers.draft import DraftEntry, Layer
from convert.layers.mistake import Mistake
from convert.layers.norm.layer_rms import FACTOR, HAS, TARGET_FACTOR, Array, Norm
from convert.layers.norm.mistakes import norm_mistakes
from convert.layers.norm.probe import POSITIONS, batch_norm, group_norm, normal_input
from convert.layers.probe import BATCH, Probe, probe_of_sum
from convert.layers.shared_keys import AXES, BIAS, EPSILON, PATTERN, module_target
from convert.layers.target import Constant, TargetLayer
from convert.layers.transforms.probe import with_target_map
from convert.layers.weight_keys import FLATTENED, TARGET_FLATTENED


def _parse_count(value: int) -> int:
    if value < 1:
        raise ValueError(f"it is 1 or more, not {value}")
    return value


def _parse_momentum(value: float | int) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"momentum is between 0 and 1, not {value:g}")
    return float(value)


COUNT = Scalar(int, "a number above 0", _parse_count)
STATISTICS = ("running_mean", "running_var")
COUNTER = "num_batches_tracked"  # of torch.nn.BatchNorm: the batches that it has seen


@dataclass(frozen=True)
class GroupNorm(Norm):
    """Normalises mean and variance over the positions and the channels of a group; groups are neighbouring channels.

    Attributes:
        num_groups: how many; None: `group_size` tells.
        group_size: how many channels each has.
    """

    num_groups: int | None = None
    group_size: int | None = None

    kind_name: ClassVar[str] = "group_norm"
    doc: ClassVar[str] = "torch.nn.GroupNorm: groups of adjacent channels, normalized over all positions."
    keys: ClassVar[Mapping[str, Key]] = {
        "multiplies_by": FACTOR,
        "epsilon": Key(EPSILON.field, EPSILON.doc, required=True, example="1e-5"),
        "num_groups": Key(
            COUNT, "Number of groups of channels in the source (32 in flax by default). Give this or `group_size`."
        ),
        "group_size": Key(COUNT, "Number of channels per group in the source. Give this or `num_groups`."),
        "bias": BIAS,
        "axes": AXES,
    }
    target: ClassVar[Record] = module_target(multiplies_by=TARGET_FACTOR, parameters=HAS)
    module_names: ClassVar[str] = r"group_?norm(alization)?$"
    biased: ClassVar[bool] = True
    bare: ClassVar[str] = "torch.nn.GroupNorm(..., affine=False)"

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> GroupNorm:
        if ("num_groups" in values) == ("group_size" in values):
            raise ValueError("a group norm has `num_groups` or `group_size`, one of the two")
        return cls(
            values["multiplies_by"],
            values["epsilon"],
            values.get("axes"),
            cls.leaves(values),
            values.get("num_groups"),
            values.get("group_size"),
        )

    @classmethod
    def draft_keys(cls, entry: DraftEntry, layer: Layer, channels: int) -> None:
        count = math.gcd(channels, 32)
        remark = (
            "the default of flax and Keras"
            if count == 32
            else f"flax's and Keras's default, 32, does not divide {channels}"
        )
        remark += "; where the source says how many channels a group has: `group_size`"
        entry.ask("num_groups", "how many groups?", [(f"num_groups: {count}", remark)], "groups")

    def count(self, channels: int) -> int:
        """Return the number of groups of so many channels.

        Raises:
            ValueError: the channels do not divide.
        """
        parts = self.num_groups or self.group_size or 1
        if channels % parts:
            raise ValueError(f"{channels} channels do not divide into {'groups' if self.num_groups else 'parts'} of {parts}" if self.group_size else f"{channels} channels do not make {parts} groups")  # fmt: skip
        return self.num_groups or channels // parts

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        found = super().letters(role, shape, variant)
        self.count(max(shape, default=1))
        return found

    def sized_facts(self, layer: TargetLayer, sizes: Mapping[str, int]) -> dict[str, Any]:
        channels = sizes.get((self.axes or ".").replace(".", "") or ".")
        if self.num_groups is None and channels is None:
            return {"group_size": self.group_size}
        return {"num_groups": self.num_groups or self.count(channels or 1)}

    def _probe_norm(self, sample: ProbeSample, leaf: Array) -> Probe:
        x = normal_input(sample.rng, BATCH, POSITIONS, leaf.size)
        factors = (self.multiplies_by, sample.layer.multiplies_by)
        written, eps = self._affine(sample), self._epsilon(sample)
        run = group_norm(x, leaf.reshape(-1), written, self.count(leaf.size), eps, factors, sample.device)
        return probe_of_sum(run, leaf.size * POSITIONS)

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        yield from norm_mistakes(step, plan)


@dataclass(frozen=True)
class BatchNorm(Norm):
    """Normalises by a running mean and variance, as at inference.

    Attributes:
        momentum: the share of the running statistics that a step keeps, which flax, Keras, Haiku and Equinox call so;
            torch's is the share that it replaces.
    """

    momentum: float | None = None

    kind_name: ClassVar[str] = "batch_norm"
    doc: ClassVar[str] = (
        "torch.nn.BatchNorm1d, 2d or 3d: weight, bias, running_mean, running_var, and num_batches_tracked (0)."
    )
    keys: ClassVar[Mapping[str, Key]] = {
        "multiplies_by": FACTOR,
        "epsilon": Key(EPSILON.field, EPSILON.doc, required=True, example="1e-5"),
        "mean": Key(
            PATTERN,
            "Path of the running mean (flax: batch_stats/.../mean).",
            required=True,
            example="batch_stats/norm/mean",
        ),
        "var": Key(
            PATTERN,
            "Path of the running variance (flax: batch_stats/.../var).",
            required=True,
            example="batch_stats/norm/var",
        ),
        "momentum": Key(
            Scalar((float, int), "a number", _parse_momentum),
            "Momentum of the source: the share of the running statistics that a training step keeps (flax: 0.99). torch's `momentum` is 1 minus it. Default: not stated, and not compared.",
        ),
        "bias": BIAS,
        "axes": AXES,
        "flattened": FLATTENED,
    }
    target: ClassVar[Record] = module_target(multiplies_by=TARGET_FACTOR, flattened=TARGET_FLATTENED, parameters=HAS)
    biased: ClassVar[bool] = True
    leaf_keys: ClassVar[Mapping[str, str]] = {"bias": "bias", "mean": "running_mean", "var": "running_var"}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> BatchNorm:
        leaves = cls.leaves(values)
        return cls(values["multiplies_by"], values["epsilon"], values.get("axes"), leaves, values.get("momentum"))

    def constants(self, layer: TargetLayer) -> tuple[Constant, ...]:
        reason = "zero: the source does not count, and torch needs no count where `momentum` is a number"
        return (*super().constants(layer), Constant(COUNTER, 0.0, reason, "int64"))

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        momentum = {} if self.momentum is None else {"source_momentum": self.momentum, "target_momentum": round(1 - self.momentum, 12)}  # fmt: skip
        return {**super().facts(layer), **momentum}

    def _probe_norm(self, sample: ProbeSample, leaf: Array) -> Probe:
        """Run the whole layer, with all of its tensors."""
        axes = (self.axes or "").replace(".", "")
        leaves = {role: with_target_map(sample.leaf(role).reshape(-1), axes, sample) for role in self.roles}
        names = {role: sample.layer.names.get(role, role) for role in self.held(sample.layer)}
        names |= {role: role for role in STATISTICS}  # which torch reads by their names
        written = {role: sample.tensor(name).reshape(-1) for role, name in names.items()}
        x = normal_input(sample.rng, 4 * BATCH, leaf.size)
        factors = (self.multiplies_by, sample.layer.multiplies_by)
        run = batch_norm(x, leaves, written, self._epsilon(sample), factors, sample.device)
        return probe_of_sum(run, leaf.size)
