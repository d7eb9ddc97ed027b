"""Faults of convolutions, norms over channels, flattened maps and normalised weights, in the example ``conv-net``."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from faults.expected import Fault
from faults.plants import InFile, InRule, InTarget, InTraining, Tensors, attribute, tensor

NET = "conv-net"
WEIGHT = "dense.parametrizations.weight.original1"


def in_file(name: str, edit: Any, at: str, diagnosis: str, place: str = "", model: str = "") -> Fault:
    """A fault of the written tensors. `place` and `model`: what the model level says, where it is not the same."""
    boundary = place or at.rpartition(".")[0]
    return Fault(
        name, NET, "torch", InFile(edit), "weights", at, diagnosis, (boundary, model or "another value in the file")
    )


def in_rule(name: str, edits: tuple[tuple[str, str], ...], at: str, diagnosis: str) -> Fault:
    """A fault of the rules that only the models tell."""
    return Fault(name, NET, "torch", InRule(edits), "model", at, diagnosis)


def in_target(name: str, edit: Any, level: str, at: str, diagnosis: str, model: tuple[str, str] | None = None) -> Fault:
    return Fault(name, NET, "torch", InTarget(edit), level, at, diagnosis, model)


def swapped(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(0, 1)


def spatial(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(2, 3)


def turned(x: np.ndarray) -> np.ndarray:
    return np.flip(x, (2, 3))


def hwc(x: np.ndarray) -> np.ndarray:
    """The columns as flax has them: rows, columns, channels."""
    return x.reshape(-1, 6, 8, 4).transpose(0, 2, 3, 1).reshape(x.shape)


def exchanged(one: str, two: str) -> Any:
    def edit(tensors: Tensors) -> None:
        tensors[one], tensors[two] = tensors[two], tensors[one]

    return edit


def of(name: str, change: Any) -> Any:
    """An edit of one submodule of the target."""
    return lambda module: change(module.get_submodule(name))


def symmetric(module: Any) -> None:
    """What is usually written for SAME."""
    module.pad = nn.Identity()
    module.stem.padding = (1, 1)


def torch_arguments(module: Any) -> None:
    """What is usually written for a transposed SAME: it has the right size."""
    module.up.crop = (0, 0, 0, 0)
    module.up.padding, module.up.output_padding = (1, 1), (1, 1)


def from_the_start(module: Any) -> None:
    """Cropped at the other end."""
    module.up.crop = (-1, 0, -1, 0)


IN_FILES = [
    in_file("OIHW and HWIO: channels exchanged (square)", tensor("mix.weight", swapped), "mix.weight", "input and output channels exchanged"),
    in_file("spatial axes exchanged", tensor("stem.weight", spatial), "stem.weight", "spatial axes exchanged"),
    in_file("kernel turned round", tensor("stem.weight", turned), "stem.weight", "kernel flipped"),
    in_file("depthwise kernel turned round", tensor("depthwise.weight", turned), "depthwise.weight", "kernel flipped"),
    in_file("transposed convolution without its turn", tensor("up.weight", turned), "up.weight", "kernel flipped" ),
    in_file("transposed convolution, channels exchanged (square)", tensor("up.weight", swapped), "up.weight", "input and output channels exchanged"),
    in_file("transpose_kernel the other way", tensor("up.weight", lambda x: turned(swapped(x))), "up.weight", "transpose_kernel the other way round"),
    in_file("NHWC flatten left as it is", tensor(WEIGHT, hwc), WEIGHT, "flattened in the source's order", "dense"),
    in_file("mean and variance exchanged", exchanged("norm.running_mean", "norm.running_var"), "norm.running_mean", "mean and variance exchanged", "norm", "other values in the file"),
    in_file("standard deviation for the variance", tensor("norm.running_var", np.sqrt), "norm.running_var", "standard deviation for the variance"),
    in_file("scale and bias exchanged", exchanged("norm.weight", "norm.bias"), "norm.weight", "scale and bias exchanged", "norm", "other values in the file"),
    in_file("standardisation left out", tensor("mix.weight", lambda x: raw("mix", x)), "mix.weight", "standardisation left out"),
    in_file("divided by the stored sigma", tensor("head.weight", lambda x: raw("head", x) / sigma()), "head.weight", "divided by the stored sigma"),
    in_file("spectral norm left out", tensor("head.weight", lambda x: raw("head", x)), "head.weight", "normalisation of the weight left out"),
    in_file("norm of the kernel for its scale", lambda t: t.update({WEIGHT.replace("1", "0"): np.linalg.norm(t[WEIGHT], axis=1, keepdims=True)}), WEIGHT.replace("1", "0"), "the norm of the kernel for its scale", "dense"),
]  # fmt: skip


def checkpoint() -> Any:
    from faults.own_models import OWN

    return dict(np.load(OWN[NET].checkpoint()))


def raw(name: str, x: np.ndarray) -> np.ndarray:
    """The kernel as stored, in torch's order of axes."""
    kernel = checkpoint()[f"params/{name}/kernel"]
    return kernel.T if kernel.ndim == 2 else kernel.transpose(3, 2, 0, 1)


def sigma() -> np.ndarray:
    return checkpoint()["batch_stats/spectral_norm/head/kernel/sigma"]


IN_RULES = [
    in_rule("the map's flattening not declared", (("  flattened: {F: RSE}                   # channels last; torch's flatten has them first\n", ""),), "dense", "flattened in the source's order"),
    in_rule("channels exchanged in the dimension numbers (square)", (("  axes: UVCD\n", "  axes: UVDC\n"), ("NHWC,HWIO->NHWC\n  axes: UVDC", "NHWC,HWOI->NHWC\n  axes: UVCD")), "mix", "input and output channels exchanged"),
    in_rule("spatial axes exchanged in the dimension numbers", (("NHWC,HWIO->NHWC    # flax's, in every Conv with two spatial axes", "NHWC,WHIO->NHWC"), ("  padding: SAME                         # flax's default\n  strides: 2\n  input_size: [9, 8]\n", ""),), "stem", "spatial axes exchanged"),
    in_rule("transpose_kernel declared where it is not passed", (("  conv_transpose: up", "  transpose_kernel: true\n  conv_transpose: up"),), "up", "transpose_kernel the other way round"),
    in_rule("mean and variance exchanged", (("  mean: batch_stats/norm/mean\n  var: batch_stats/norm/var", "  mean: batch_stats/norm/var\n  var: batch_stats/norm/mean"),), "norm", "mean and variance exchanged"),
    in_rule("1+scale on a batch norm", (("multiplies_by: scale\n  epsilon: 1e-5", "multiplies_by: 1+scale\n  epsilon: 1e-5"),), "norm", "1+scale on a plain norm"),
    in_rule("standardisation not declared", (("  weight_standardization: (w - mean) / (std + 1e-5)\n", ""),), "mix", "standardisation left out"),
]  # fmt: skip

IN_TARGETS = [
    in_target("symmetric padding for SAME with strides", symmetric, "layers", "stem", "padding", ("stem", "another padding")),
    in_target("output_padding for a transposed SAME", torch_arguments, "layers", "up", "padding", ("up", "another padding")),
    in_target("transposed SAME cropped at the start", from_the_start, "model", "up", "another padding"),
    in_target("epsilon of a batch norm", of("norm", attribute("eps", 1e-3)), "layers", "norm", "epsilon", ("norm", "epsilon 0.001 for 1e-05")),
    Fault("momentum as the source calls it", NET, "torch", InTraining(of("norm", attribute("momentum", 0.9))), "layers", "norm", "momentum"),
    in_target("number of groups", of("group", attribute("num_groups", 2)), "layers", "group", "num_groups", ("group", "2 groups for 3 groups")),
    in_target("epsilon of a group norm", of("group", attribute("eps", 1e-5)), "layers", "group", "epsilon", ("group", "epsilon 1e-05 for 1e-06")),
]  # fmt: skip

CONV: list[Fault] = [*IN_FILES, *IN_RULES, *IN_TARGETS]
