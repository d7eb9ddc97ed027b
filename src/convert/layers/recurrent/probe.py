"""The probe of a recurrent layer: the source's equations in JAX, and torch's layer, over several steps from a state that is not 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers.probe import BATCH, Probe, as_float64
from convert.layers.recurrent.equations import Cell

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
STEPS = 5
SPREAD = 0.5  # of random weights: gates then neither saturate nor stay near one half


def probe_cell(
    cell: Cell, leaves: Mapping[str, Array], tensors: Mapping[str, Array], device: str, rng: np.random.Generator
) -> Probe:
    """Probe one layer in one direction.

    Args:
        leaves: of the cell, by path below it.
        tensors: ``weight_ih`` and so on.
    """
    inputs, hidden = tensors["weight_ih"].shape[1], tensors["weight_hh"].shape[1]
    given = {"x": rng.standard_normal((STEPS, BATCH, inputs))}
    given |= {key: rng.standard_normal((BATCH, hidden)) for key in ("h", "c")}

    def run(dtype: str) -> tuple[Array, Array]:
        return torch_states(cell, tensors, given, dtype, device), jax_states(cell, leaves, given, dtype)

    root = float(np.sqrt(inputs + hidden))
    terms = f"8 x {STEPS} steps x sqrt({inputs + hidden} summands)"
    return Probe(run, 8 * STEPS * root, terms, cast_factor=2 * STEPS * root)


def random_weights(leaf: Array, rng: np.random.Generator) -> Array:
    """Return random weights of the shape and dtype of a leaf."""
    return np.asarray(SPREAD * rng.standard_normal(leaf.shape)).astype(leaf.dtype)


def jax_states(cell: Cell, leaves: Mapping[str, Array], given: Mapping[str, Array], dtype: str) -> Array:
    """Compute the states at every step by the source's equations, (time, batch, H); of an LSTM, state and cell state joined.

    Args:
        leaves: of the cell, by path below it.
        given: ``x`` (time, batch, I), and the first states ``h`` and, for an LSTM, ``c`` (batch, H).
    """
    import jax
    import jax.numpy as jnp

    weights = _by_gate(cell, leaves, given["x"].shape[-1], dtype)

    def linear(matrix: str, bias: str, letter: str, x: Any) -> Any:
        y = x @ weights[matrix, letter]
        return y + weights[bias, letter] if (bias, letter) in weights else y

    def gate(letter: str, x: Any, h: Any) -> Any:
        return linear("W", "b", letter, x) + linear("U", "c", letter, h)

    sigmoid = jax.nn.sigmoid
    h, c = (jnp.asarray(given[key]).astype(dtype) for key in ("h", "c"))
    states = []
    for x in jnp.asarray(given["x"]).astype(dtype):
        if cell.kind_name == "lstm":
            i, f, g, o = (gate(letter, x, h) + cell.offsets.get(letter, 0.0) for letter in "ifgo")
            c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
            h = sigmoid(o) * jnp.tanh(c)
            states.append(jnp.concatenate([h, c], axis=-1))
            continue
        if cell.kind_name == "rnn":
            y = gate("h", x, h) + (h if cell.residual else 0)
            h = jnp.tanh(y) if cell.activation == "tanh" else jnp.maximum(y, 0)
        else:
            h = _gru(cell, linear, gate, x, h)
        states.append(h)
    return np.asarray(jnp.stack(states)).astype(np.float64)


def _by_gate(cell: Cell, leaves: Mapping[str, Array], inputs: int, dtype: str) -> dict[tuple[str, str], Any]:
    """Split the leaves of a cell: (``W``, ``U``, ``b`` or ``c``, letter of the gate) -> matrix or bias."""
    import jax.numpy as jnp

    weights: dict[tuple[str, str], Any] = {}
    for path, leaf in leaves.items():
        contents = cell.leaves[path]
        array = jnp.asarray(leaf).astype(dtype)
        pieces = [array]
        if len(contents.parts) == 2 and "2" in contents.axes:
            pieces = [jnp.take(array, k, axis=contents.axes.index("2")) for k in (0, 1)]
        elif len(contents.parts) == 2:
            pieces = jnp.split(array, [inputs], axis=contents.axes.index("I+H"))
        axis = [axis for axis in contents.axes if axis != "2"].index(contents.gates)
        for part, piece in zip(contents.parts, pieces, strict=True):
            blocks = jnp.split(piece, len(contents.gates), axis=axis)
            for letter, block in zip(contents.gates, blocks, strict=True):
                weights[part, letter] = block.T if block.ndim == 2 and axis == 0 else block
    return weights


def _gru(cell: Cell, linear: Callable[..., Any], gate: Callable[..., Any], x: Any, h: Any) -> Any:
    import jax
    import jax.numpy as jnp

    z = jax.nn.sigmoid(gate(cell.gates["z"], x, h))
    r = jax.nn.sigmoid(gate(cell.gates["r"], x, h)) if "r" in cell.gates else 1.0
    candidate = cell.gates["n"]
    inner = linear("U", "c", candidate, r * h) if cell.reset == "before" else r * linear("U", "c", candidate, h)
    n = jnp.tanh(linear("W", "b", candidate, x) + inner)
    return (1 - z) * n + z * h if cell.keeps else (1 - z) * h + z * n


def torch_layer(cell: Cell, inputs: int, hidden: int, bias: bool) -> torch.nn.Module:
    """Make the target's layer: torch's, or the one of this package."""
    import torch

    if cell.module:
        from convert.layers.torch_modules import GRU

        return GRU(inputs, hidden, bias=bias, reset=cell.reset)
    if cell.kind_name == "rnn":
        return torch.nn.RNN(inputs, hidden, bias=bias, nonlinearity=cell.activation)
    return (torch.nn.GRU if cell.kind_name == "gru" else torch.nn.LSTM)(inputs, hidden, bias=bias)


def torch_states(
    cell: Cell, tensors: Mapping[str, Array], given: Mapping[str, Array], dtype: str, device: str = "cpu"
) -> Array:
    """Compute what `jax_states` gives, by the target's layer.

    Args:
        tensors: ``weight_ih`` and so on.
    """
    import torch

    torch_dtype = getattr(torch, dtype)
    weights = {f"{role}_l0": torch.tensor(x.astype(np.float64)).to(device, torch_dtype) for role, x in tensors.items()}
    inputs, hidden = given["x"].shape[-1], given["h"].shape[-1]
    layer = torch_layer(cell, inputs, hidden, "bias_ih" in tensors).to(device, torch_dtype)
    layer.load_state_dict(weights, strict=True)
    x, h, c = (torch.tensor(given[key]).to(device, torch_dtype) for key in ("x", "h", "c"))
    states = []
    with torch.no_grad():
        if cell.kind_name != "lstm":
            return as_float64(layer(x, h[None])[0])
        for step in x:  # one at a time: torch gives the cell state of the last step alone
            out, (h, c) = layer(step[None], (h[None], c[None]))
            h, c = h[0], c[0]
            states.append(torch.cat([out[0], c], dim=-1))
    return as_float64(torch.stack(states))
