"""A small recurrent model for ``--reference support.cell_model:reference``: a GRU, an LSTM on its states, a head. JAX's side is flax's
GRUCell and Haiku's LSTM, step by step; the PyTorch side torch's layers. The faults of a recurrence are planted into either."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from convert.references.protocol import Reference
from support.memory_source import MemorySource

INPUTS, HIDDEN, WIDE, OUTPUTS, BATCH, STEPS = 4, 6, 5, 3, 2, 7
RULES = """
model: cell-model
title: a GRU, an LSTM, a head
targets:
  torch: {loads: cell_model.CellModel}
rules:
- gru: gru
  cell: flax.linen.GRUCell
  from: gru
- lstm: lstm
  cell: haiku.LSTM
  from: lstm
- einsum: ...D,DK->...K
  from: head/kernel
  linear: head
"""


def source(seed: int = 0) -> MemorySource:
    """A checkpoint with random weights, biases too."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {f"gru/i{g}/kernel": (INPUTS, HIDDEN) for g in "rzn"}
    shapes |= {f"gru/i{g}/bias": (HIDDEN,) for g in "rzn"} | {f"gru/h{g}/kernel": (HIDDEN, HIDDEN) for g in "rzn"}
    shapes |= {"gru/hn/bias": (HIDDEN,), "lstm/linear/w": (HIDDEN + WIDE, 4 * WIDE), "lstm/linear/b": (4 * WIDE,)}
    shapes |= {"head/kernel": (WIDE, OUTPUTS)}
    return MemorySource({name: rng.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()})


class CellModel(nn.Module):
    """Starts from states that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(INPUTS, HIDDEN, batch_first=True)
        self.lstm = nn.LSTM(HIDDEN, WIDE, batch_first=True)
        self.head = nn.Linear(WIDE, OUTPUTS, bias=False)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(x, h[None])
        start = c[None, :, :WIDE]
        return self.head(self.lstm(states, (start, start))[0])


def build(state: Mapping[str, torch.Tensor]) -> nn.Module:
    module = CellModel()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()


def run(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"y": module(inputs["x"], inputs["h"], inputs["c"])}


def draw(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"x": (BATCH, STEPS, INPUTS), "h": (BATCH, HIDDEN), "c": (BATCH, HIDDEN)}
    return {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def gru(weights: Mapping[str, Any], x: Any, h: Any, fault: str = "") -> Any:
    """flax's GRUCell at every step; or, for a fault, its equations with the fault."""
    from flax import linen
    from jax.nn import sigmoid

    params = {
        name: {key: weights[f"gru/{name}/{key}"] for key in ("kernel", "bias") if f"gru/{name}/{key}" in weights}
        for name in ("ir", "iz", "in", "hr", "hz", "hn")
    }
    states = []
    for t in range(x.shape[1]):
        if not fault:
            h, _ = linen.GRUCell(HIDDEN).apply({"params": params}, h, x[:, t])
            states.append(h)
            continue
        i = {g: x[:, t] @ params[f"i{g}"]["kernel"] + params[f"i{g}"]["bias"] for g in "rzn"}
        r, z = (sigmoid(i[g] + h @ params[f"h{g}"]["kernel"]) for g in "rz")
        u, c = params["hn"]["kernel"], params["hn"]["bias"]
        inner = (r * h) @ u + c if "reset" in fault else r * (h @ u + c)
        n = jnp.tanh(i["n"] + inner)
        states.append((1 - z) * h + z * n if "polarity" in fault else (1 - z) * n + z * h)
        h = h if "stale" in fault else states[-1]
    return jnp.stack(states, axis=1)


def lstm(weights: Mapping[str, Any], x: Any, start: Any, fault: str = "") -> Any:
    """Haiku's LSTM at every step; a stale state is that of the first step."""
    import haiku as hk

    core = hk.without_apply_rng(hk.transform(lambda x, s: hk.LSTM(WIDE, name="lstm")(x, s)))
    params = {"lstm/linear": {key: weights[f"lstm/linear/{key}"] for key in ("w", "b")}}
    first = state = hk.LSTMState(start, start)
    outs = []
    for t in range(x.shape[1]):
        out, state = core.apply(params, x[:, t], first if "stale" in fault else state)
        outs.append(out)
    return jnp.stack(outs, axis=1)


def _jax(fault: str = "", fault_lstm: str = "") -> Any:
    def apply(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        states = gru(weights, inputs["x"], inputs["h"], fault)
        hidden = lstm(weights, states, inputs["c"][:, :WIDE], fault_lstm)
        return {"gru": states, "lstm": hidden, "y": hidden @ weights["head/kernel"]}

    return apply


def _reference(jax: Any) -> Reference:
    return Reference(
        inputs=draw, build=build, run=run, outputs=("y",), reduction=HIDDEN + WIDE, depth=2 * STEPS, jax=jax
    )


def reference(plan: Any) -> Reference:
    return _reference(_jax())


def reset_before(plan: Any) -> Reference:
    return _reference(_jax("reset"))


def stale_state(plan: Any) -> Reference:
    return _reference(_jax("stale"))


def both(plan: Any) -> Reference:
    """Burn before 0.17: #2701."""
    return _reference(_jax("reset stale"))


def polarity(plan: Any) -> Reference:
    return _reference(_jax("polarity"))


def stale_lstm(plan: Any) -> Reference:
    return _reference(_jax("", "stale"))
