"""The kinds of layer: `KINDS` maps the key that names a kind in a rule to its class.

A folder holds each family of kinds: the class (what it declares), `compile` (how it becomes steps, where that does not follow
from the declaration), `probe` (both sides of a check), `mistakes` (known wrong conversions) and `draft` (a rule from a tree).
The modules next to the folders serve all kinds, in the order of their imports:

- `leaf_sums`: leaves that are added up.
- `activations`, `shared_keys`, `weight_keys`: names of activations, keys that several kinds have, keys that describe a weight.
- `low_rank`: weights that the source keeps as a product of two; `target`: where the tensors of a rule go.
- `declaration`: what a kind declares; `draft`: the lines of a drafted rule; `probe`: both sides of a check of one layer.
- `mistake`: a known wrong conversion; `leaf_reader`: the part of a checkpoint that probes and mistakes read.
- `base`: the types. A `Rule` names its `LayerKind`, which compiles the leaves that the rule matches to `Step`s.
- `casts`: dtypes and casts of a tensor; `leaves`: which leaves form a layer, and errors; `step_tensor`: a step's tensor, computed.
- `torch_modules`: recurrent layers that PyTorch lacks.

To add a kind: subclass `LayerKind` in the folder of its family, and list it in `KINDS`.
May import `convert.core`; jax and torch are imported when a probe runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from convert.layers.base import LayerKind, Rule
from convert.layers.control_path.kinds import CubicSpline, DataPath, LinearInterpolation
from convert.layers.conv.conv import Convolution
from convert.layers.conv.transpose import ConvTranspose
from convert.layers.embedding.embedding import Embedding
from convert.layers.embedding.patch_positions import PatchPositions
from convert.layers.embedding.position_ids import PositionIds
from convert.layers.embedding.sinusoids import Timescales
from convert.layers.linear.linear import Linear
from convert.layers.norm.group_batch import BatchNorm, GroupNorm
from convert.layers.norm.instance import InstanceNorm
from convert.layers.norm.layer_rms import LayerNorm, RMSNorm
from convert.layers.parameter.constant import Fixed
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
        PositionIds,
        PatchPositions,
        Fixed,
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
    "Fixed",
    "GroupNorm",
    "LayerKind",
    "LayerNorm",
    "Linear",
    "LinearInterpolation",
    "Numbering",
    "Parameter",
    "PatchPositions",
    "PositionIds",
    "RMSNorm",
    "Recurrent",
    "Rule",
    "TargetLayer",
    "Timescales",
]
