"""The kinds of layer: `KINDS` maps the key that names a kind in a rule to its class.

A folder holds each family of kinds: the class (what it declares), `compile` (how it becomes steps, where that does not follow
from the declaration), `probe` (both sides of a check), `mistakes` (known wrong conversions) and `draft` (a rule from a tree).
`base` has the types: a `Rule` names its `LayerKind`, which compiles the leaves that the rule matches to `Step`s.
To add a kind: subclass `LayerKind` in the folder of its family, and list it in `KINDS`.
Imports `convert.core` only; jax and torch are imported when a probe runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from convert.layers.base import LayerKind, Rule
from convert.layers.control_path.kinds import CubicSpline, DataPath, LinearInterpolation
from convert.layers.conv.conv import Convolution
from convert.layers.conv.transpose import ConvTranspose
from convert.layers.embedding.embedding import Embedding
from convert.layers.embedding.sinusoids import Timescales
from convert.layers.linear.linear import Linear
from convert.layers.norm.group_batch import BatchNorm, GroupNorm
from convert.layers.norm.instance import InstanceNorm
from convert.layers.norm.layer_rms import LayerNorm, RMSNorm
from convert.layers.parameter.drop import Drop
from convert.layers.parameter.parameter import Parameter
from convert.layers.recurrent.kinds import GRU, LSTM, RNN, Recurrent
from convert.layers.target import Numbering, TargetLayer

KINDS: Mapping[str, type[LayerKind]] = {
    kind.kind_name: kind
    for kind in (
        Linear,
        Convolution,
        ConvTranspose,
        GRU,
        LSTM,
        RNN,
        CubicSpline,
        LinearInterpolation,
        Embedding,
        LayerNorm,
        RMSNorm,
        GroupNorm,
        BatchNorm,
        InstanceNorm,
        Parameter,
        Timescales,
        Drop,
    )
}

__all__ = [
    "GRU",
    "KINDS",
    "LSTM",
    "RNN",
    "BatchNorm",
    "ConvTranspose",
    "Convolution",
    "CubicSpline",
    "DataPath",
    "Drop",
    "Embedding",
    "GroupNorm",
    "LayerKind",
    "LayerNorm",
    "Linear",
    "LinearInterpolation",
    "Numbering",
    "Parameter",
    "RMSNorm",
    "Recurrent",
    "Rule",
    "TargetLayer",
    "Timescales",
]
