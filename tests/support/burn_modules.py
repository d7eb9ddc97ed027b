"""What Burn computes and how burn-store loads, stated anew in NumPy from its published source: nothing here comes from `convert`.

Sources, all of tracel-ai/burn at 2c06be351006 (0.22.0-pre.2): crates/burn-store/src/adapter.rs and applier.rs;
crates/burn-nn/src/modules/{linear,attention/mha,rope_encoding,norm/*,rnn/*}.rs, padding.rs;
crates/burn-backend/src/backend/ops/modules/{base,conv}.rs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Array = np.ndarray
File = Mapping[str, Array]
NORMS = ("BatchNorm", "LayerNorm", "GroupNorm", "RmsNorm")  # adapter.rs `is_normalization_layer`
TO_BURN, TO_PYTORCH = {"weight": "gamma", "bias": "beta"}, {"gamma": "weight", "beta": "bias"}


def adapted(file: File, types: Mapping[str, str], norms: Mapping[str, str]) -> dict[str, Array]:
    """`adapt_pytorch_tensor`: 2-D weights of Linears are transposed, parameters of norms renamed; nothing else is touched.

    Args:
        file: tensors.
        layer_types: path of a module -> its struct, of those that the adapter looks at.
        norms: `TO_BURN` (PyTorchToBurnAdapter) or `TO_PYTORCH` (BurnToPyTorchAdapter).
    """
    out = {}
    for name, tensor in file.items():
        module, _, parameter = name.rpartition(".")
        struct = types.get(module)
        if struct == "Linear" and parameter == "weight" and tensor.ndim == 2:
            tensor = tensor.T
        if struct in NORMS:
            parameter = norms.get(parameter, parameter)
        out[f"{module}.{parameter}" if module else parameter] = tensor
    return out


def load(file: File, module: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """`Applier` with `allow_partial(false)`: every parameter of the module is found by its path, with its shape.

    Raises:
        KeyError: missing tensors. ValueError: another shape.
    """
    missing = [path for path in module if path not in file]
    if missing:
        raise KeyError(missing)
    for path, shape in module.items():
        if file[path].shape != shape:
            raise ValueError(f"{path}: expected {shape}, found {file[path].shape}")
    return {path: file[path] for path in module}


def below(file: File, module: str) -> dict[str, Array]:
    return {name.removeprefix(f"{module}."): x for name, x in file.items() if name.startswith(f"{module}.")}


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def linear(file: File, module: str, x: Array) -> Array:
    """``O = IW + b``, W of shape (d_input, d_output)."""
    y = x @ file[f"{module}.weight"]
    return y + file[f"{module}.bias"] if f"{module}.bias" in file else y


# ---- rnn: gru.rs `forward_iter` and `gate_product`, lstm_module.rs, basic.rs


def gru(file: File, x: Array, h: Array, *, reset_after: bool = True) -> Array:
    """Gru::forward. x: (time, batch, d_input); the states, (time, batch, d_hidden)."""
    out = []
    for row in x:
        update, reset = (
            sigmoid(linear(file, f"{gate}.input_transform", row) + linear(file, f"{gate}.hidden_transform", h))
            for gate in ("update_gate", "reset_gate")
        )
        inputs = linear(file, "new_gate.input_transform", row)
        if reset_after:
            candidate = np.tanh(inputs + reset * linear(file, "new_gate.hidden_transform", h))
        else:
            candidate = np.tanh(inputs + linear(file, "new_gate.hidden_transform", h * reset))
        h = candidate * (1 - update) + update * h
        out.append(h)
    return np.stack(out)


def lstm(file: File, x: Array, h: Array, c: Array) -> Array:
    """Lstm::forward: the hidden states with the cell states beside them."""
    out = []
    for row in x:
        i, f, o, g = (
            linear(file, f"{gate}.input_transform", row) + linear(file, f"{gate}.hidden_transform", h)
            for gate in ("input_gate", "forget_gate", "output_gate", "cell_gate")
        )
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out.append(np.concatenate([h, c], -1))
    return np.stack(out)


def rnn(file: File, x: Array, h: Array, *, relu: bool = False) -> Array:
    """Rnn::forward."""
    out = []
    for row in x:
        y = linear(file, "gate.input_transform", row) + linear(file, "gate.hidden_transform", h)
        h = np.maximum(y, 0) if relu else np.tanh(y)
        out.append(h)
    return np.stack(out)


def bi_gru(file: File, x: Array, forward: Array, reverse: Array) -> Array:
    """BiGru::forward: the reverse states stand where their inputs stand."""
    there = gru(below(file, "forward"), x, forward)
    back = gru(below(file, "reverse"), x[::-1], reverse)[::-1]
    return np.concatenate([there, back], -1)


# ---- norms: layer.rs (`layer_norm` of the backend), rms.rs, group.rs, batch.rs


def layer_norm(file: File, module: str, x: Array, epsilon: float = 1e-5) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * file[f"{module}.gamma"]
    return y + file[f"{module}.beta"] if f"{module}.beta" in file else y


def rms_norm(file: File, module: str, x: Array, epsilon: float = 1e-5) -> Array:
    """Burn takes the mean in float32 whatever the dtype is; here it stays as wide as x."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * file[f"{module}.gamma"]


def group_norm(file: File, module: str, x: Array, groups: int, epsilon: float = 1e-5) -> Array:
    """x: (batch, channels, ...)."""
    flat = x.reshape(x.shape[0], groups, -1)
    centred = flat - flat.mean(2, keepdims=True)
    y = (centred / np.sqrt((centred**2).mean(2, keepdims=True) + epsilon)).reshape(x.shape)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return y * file[f"{module}.gamma"].reshape(shape) + file[f"{module}.beta"].reshape(shape)


def batch_norm(file: File, module: str, x: Array, epsilon: float = 1e-5) -> Array:
    """BatchNorm::forward_inference; x: (batch, channels, ...)."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    gamma, beta, mean, var = (
        file[f"{module}.{name}"].reshape(shape) for name in ("gamma", "beta", "running_mean", "running_var")
    )
    return (x - mean) / np.sqrt(var + epsilon) * gamma + beta


# ---- attention: mha.rs, rope_encoding.rs


def attention(file: File, module: str, x: Array, heads: int, allowed: Array | None = None) -> Array:
    """MultiHeadAttention::forward on itself. x: (batch, time, d_model); allowed: (time, time), else min_float."""
    batch, time, width = x.shape

    def split(name: str) -> Array:
        return linear(file, f"{module}.{name}", x).reshape(batch, time, heads, width // heads).swapaxes(1, 2)

    scores = split("query") @ split("key").swapaxes(-1, -2) / np.sqrt(width // heads)
    scores = scores if allowed is None else np.where(allowed, scores, -1e4)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    context = (weights @ split("value")).swapaxes(1, 2).reshape(batch, time, width)
    return linear(file, f"{module}.output", context)


def rotary(x: Array, theta: float = 10000.0) -> Array:
    """RotaryEncoding::forward: features 2k and 2k+1 are a pair. x: (..., time, d)."""
    time, d = x.shape[-2:]
    angles = np.arange(time)[:, None] / theta ** (np.arange(0, d, 2) / d)
    cos, sin = np.cos(angles), np.sin(angles)
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


# ---- padding.rs


def same_padding(kernel: int, stride: int, size: int) -> tuple[int, int]:
    """`calculate_same_padding`; dilation does not count."""
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def explicit(numbers: list[int], rank: int) -> list[tuple[int, int]]:
    """PaddingConfig1d::Explicit(left, right), 2d::Explicit(top, left, bottom, right), 3d::Explicit(depth, height, width)."""
    if rank == 3:
        return [(n, n) for n in numbers]
    return list(zip(numbers[:rank], numbers[rank:], strict=True))
