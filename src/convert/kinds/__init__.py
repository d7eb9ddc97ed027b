"""The kinds of layer, by the key that names them in a rule."""

from __future__ import annotations

from collections.abc import Mapping

from convert.kinds.base import Kind, Numbering, Rule, TargetLayer
from convert.kinds.channel_norm import BatchNorm, GroupNorm
from convert.kinds.conv import Convolution
from convert.kinds.conv_transpose import ConvTranspose
from convert.kinds.interpolation import CubicSpline, DataPath, LinearInterpolation
from convert.kinds.linear import Linear
from convert.kinds.norm import LayerNorm, RMSNorm
from convert.kinds.plain import Drop, Embedding, Parameter, Timescales
from convert.kinds.recurrent import GRU, LSTM, RNN, Recurrent

KINDS: Mapping[str, type[Kind]] = {
    "linear": Linear,
    "conv": Convolution,
    "conv_transpose": ConvTranspose,
    "gru": GRU,
    "lstm": LSTM,
    "rnn": RNN,
    "cubic_spline": CubicSpline,
    "linear_interpolation": LinearInterpolation,
    "embedding": Embedding,
    "layer_norm": LayerNorm,
    "rms_norm": RMSNorm,
    "group_norm": GroupNorm,
    "batch_norm": BatchNorm,
    "parameter": Parameter,
    "buffer": Timescales,
    "drop": Drop,
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
    "Kind",
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
