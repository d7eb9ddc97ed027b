"""A recurrent layer at the layers level: the declared equations in JAX with the source's leaves, torch's layer with the
written tensors, from a state that is not zero, over several steps.

Variants of a recurrence agree by accident where the state is zero, the width is one, or the biases are zero (as flax, Haiku
and Keras make them): so every layer is run a second time, with random numbers in place of the source's leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.ops import apply, is_float
from convert.layers.base import LayerLeaves, Step
from convert.layers.recurrent.equations import Cell
from convert.layers.recurrent.kinds import Recurrent
from convert.verify.numerics.compare import Tolerance, difference, epsilon
from convert.verify.report.report import Measure
from convert.writing.execute import computed

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
STEPS, BATCH = 5, 3
SPREAD = 0.5  # of random weights: gates that neither saturate nor stay near one half


def cell_of(group: LayerLeaves) -> Cell:
    """What the rule declares."""
    kind = group.rule.kind
    assert isinstance(kind, Recurrent)
    return kind.cell


def measure_cell(
    group: LayerLeaves,
    steps: list[Step],
    leaves: Mapping[str, Array],
    written: Mapping[str, Array],
    *,
    device: str,
    rng: np.random.Generator,
) -> list[Measure]:
    """Both sides in float64 and in float32, with the source's weights and with random ones.

    Args:
        steps: that make the tensors of this layer and direction.
        leaves: of the source, by name.
        written: tensors of the file, by name.

    Returns:
        Nothing when the leaves are no floats.
    """
    cell = cell_of(group)
    if not all(is_float(x.dtype.name) for x in (*leaves.values(), *written.values())):
        return []
    given = {"x": rng.standard_normal((STEPS, BATCH, group.sizes["I"]))}
    given |= {key: rng.standard_normal((BATCH, group.sizes["H"])) for key in ("h", "c")}
    invented = {name: np.asarray(SPREAD * rng.standard_normal(x.shape)).astype(x.dtype) for name, x in leaves.items()}
    made: dict[str, Array] = {}
    for step in steps:
        rows = [apply(part.ops, invented[part.leaf]) for part in step.parts]
        made[step.name] = np.concatenate(rows) if rows else computed(step)
    measures = []
    for words, source, tensors in (("", leaves, written), (", random weights", invented, made)):
        own = {role: apply(takes, source[name]) for role, (name, takes) in group.leaves.items()}
        roles = {step.role: tensors[step.name] for step in steps}
        exact, drift = (
            difference(
                torch_states(cell, roles, given, dtype, device), jax_states(cell, own, given, dtype), precision=dtype
            )
            for dtype in ("float64", "float32")
        )
        summands = group.sizes["I"] + group.sizes["H"]
        measures.append(
            Measure(
                f"{group.module} ({group.suffix}){words}",
                drift,
                _bound("float32", summands, steps),
                exact,
                _bound("float64", summands, steps),
                group.rule.at.line_only,
            )
        )
    return measures


def _bound(precision: str, summands: int, steps: list[Step]) -> Tolerance:
    """Sums in another order, as often as there are steps; and what the written dtype lost of the weights."""
    value = 8 * STEPS * float(np.sqrt(summands)) * epsilon(precision)
    said = f"8 x {STEPS} steps x sqrt({summands} summands) x eps({precision})"
    lost = [step for step in steps if step.loses or "+" in step.arithmetic]
    if lost:
        narrow = 2 * STEPS * float(np.sqrt(summands)) * epsilon(lost[0].spec.dtype)
        return Tolerance(value + narrow, f"{said}, and the weights were rounded to {lost[0].spec.dtype}")
    return Tolerance(value, said)


def jax_states(cell: Cell, leaves: Mapping[str, Array], given: Mapping[str, Array], dtype: str) -> Array:
    """The states at every step by the source's equations, (time, batch, H); of an LSTM the cell states beside them.

    Args:
        leaves: of the cell, by path below it.
        given: ``x`` (time, batch, I), and the first states ``h`` and, for an LSTM, ``c`` (batch, H).
    """
    import jax
    import jax.numpy as jnp

    held: dict[tuple[str, str], Any] = {}
    for path, leaf in leaves.items():
        said = cell.leaves[path]
        array = jnp.asarray(leaf).astype(dtype)
        pieces = [array]
        if len(said.parts) == 2 and "2" in said.axes:
            pieces = [jnp.take(array, k, axis=said.axes.index("2")) for k in (0, 1)]
        elif len(said.parts) == 2:
            axis = said.axes.index("I+H")
            pieces = jnp.split(array, [given["x"].shape[-1]], axis=axis)
        for part, piece in zip(said.parts, pieces, strict=True):
            axis = next(k for k, a in enumerate(a for a in said.axes if a != "2") if a == said.gates)
            for letter, block in zip(said.gates, jnp.split(piece, len(said.gates), axis=axis), strict=True):
                held[part, letter] = block.T if block.ndim == 2 and axis == 0 else block

    def linear(matrix: str, bias: str, letter: str, x: Any) -> Any:
        y = x @ held[matrix, letter]
        return y + held[bias, letter] if (bias, letter) in held else y

    def gate(letter: str, x: Any, h: Any) -> Any:
        return linear("W", "b", letter, x) + linear("U", "c", letter, h)

    sigmoid = jax.nn.sigmoid
    h, c = (jnp.asarray(given[key]).astype(dtype) for key in ("h", "c"))
    states = []
    for x in jnp.asarray(given["x"]).astype(dtype):
        if cell.word == "lstm":
            i, f, g, o = (gate(letter, x, h) + cell.offsets.get(letter, 0.0) for letter in "ifgo")
            c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
            h = sigmoid(o) * jnp.tanh(c)
            states.append(jnp.concatenate([h, c], axis=-1))
            continue
        if cell.word == "rnn":
            y = gate("h", x, h) + (h if cell.residual else 0)
            h = jnp.tanh(y) if cell.activation == "tanh" else jnp.maximum(y, 0)
        else:
            h = _gru(cell, linear, gate, x, h)
        states.append(h)
    return np.asarray(jnp.stack(states)).astype(np.float64)


def _gru(cell: Cell, linear: Any, gate: Any, x: Any, h: Any) -> Any:
    import jax
    import jax.numpy as jnp

    z = jax.nn.sigmoid(gate(cell.gates["z"], x, h))
    r = jax.nn.sigmoid(gate(cell.gates["r"], x, h)) if "r" in cell.gates else 1.0
    candidate = cell.gates["n"]
    inner = linear("U", "c", candidate, r * h) if cell.reset == "before" else r * linear("U", "c", candidate, h)
    n = jnp.tanh(linear("W", "b", candidate, x) + inner)
    return (1 - z) * n + z * h if cell.keeps else (1 - z) * h + z * n


def torch_layer(cell: Cell, inputs: int, hidden: int, bias: bool) -> torch.nn.Module:
    """The target's layer: torch's own, or ours."""
    import torch

    if cell.module:
        from convert.layers.torch_modules import GRU

        return GRU(inputs, hidden, bias=bias, reset=cell.reset)
    if cell.word == "rnn":
        return torch.nn.RNN(inputs, hidden, bias=bias, nonlinearity=cell.activation)
    return (torch.nn.GRU if cell.word == "gru" else torch.nn.LSTM)(inputs, hidden, bias=bias)


def torch_states(
    cell: Cell, tensors: Mapping[str, Array], given: Mapping[str, Array], dtype: str, device: str = "cpu"
) -> Array:
    """What `jax_states` gives, by the target's layer.

    Args:
        tensors: ``weight_ih`` and so on.
    """
    import torch

    kind = getattr(torch, dtype)
    weights = {f"{role}_l0": torch.tensor(x.astype(np.float64)).to(device, kind) for role, x in tensors.items()}
    layer = torch_layer(cell, given["x"].shape[-1], given["h"].shape[-1], "bias_ih" in tensors).to(device, kind)
    layer.load_state_dict(weights, strict=True)
    x, h, c = (torch.tensor(given[key]).to(device, kind) for key in ("x", "h", "c"))
    states = []
    with torch.no_grad():
        if cell.word != "lstm":
            return np.asarray(layer(x, h[None])[0].double().cpu().numpy())
        for step in x:  # one at a time: torch gives the cell state of the last step alone
            out, (h, c) = layer(step[None], (h[None], c[None]))
            h, c = h[0], c[0]
            states.append(torch.cat([out[0], c], dim=-1))
    return np.asarray(torch.stack(states).double().cpu().numpy())
