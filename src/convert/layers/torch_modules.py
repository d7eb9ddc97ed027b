"""Recurrent layers that PyTorch does not have, for weights that ``--allow-custom-cells`` wrote.

This module needs PyTorch and nothing else; it can be copied into another project.
"""

from __future__ import annotations

import torch
from torch import nn

ROWS = {"before": 3, "none": 2}


class GRU(nn.Module):
    """A GRU that applies its reset gate before the matrix, or has none; otherwise like ``torch.nn.GRU``.

    With ``reset="before"`` (Haiku, Keras' ``reset_after=False``, Burn before 0.17; Cho et al. 2014, arXiv:1406.1078v1)::

        r = sigmoid(W_r x + b_r + U_r h + c_r)
        z = sigmoid(W_z x + b_z + U_z h + c_z)
        n = tanh(W_n x + b_n + U_n (r * h) + c_n)
        h = (1 - z) * n + z * h

    With ``reset="none"`` (flax's ``MGUCell(reset_gate=False)``) r is 1, and the rows are those of z and n alone.

    The parameters are called and laid out as torch's: ``weight_ih_l0`` (gates times H, I), ``weight_hh_l0``, ``bias_ih_l0``,
    ``bias_hh_l0``, ``_l1``, ``_reverse``; the gates in the order r, z, n.

    Args:
        input_size, hidden_size: I and H.
        num_layers: each takes the states of the one before.
        bias: whether there are biases.
        batch_first: whether the input is (batch, time, I) and not (time, batch, I).
        bidirectional: whether a second state runs from the end; the states of both are concatenated.
        reset: ``before`` or ``none``.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        bidirectional: bool = False,
        *,
        reset: str,
    ) -> None:
        super().__init__()
        if reset not in ROWS:
            raise ValueError(
                f"reset is 'before' or 'none', not {reset!r}; with the reset gate after the matrix, use torch.nn.GRU"
            )
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.bidirectional, self.reset = bias, batch_first, bidirectional, reset
        self._suffixes = [f"l{k}{end}" for k in range(num_layers) for end in ("", "_reverse")[: 1 + bidirectional]]
        bound = hidden_size**-0.5
        for suffix in self._suffixes:
            wide = input_size if suffix.startswith("l0") else hidden_size * (1 + bidirectional)
            rows = ROWS[reset] * hidden_size
            shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, wide), "weight_hh": (rows, hidden_size)}
            if bias:
                shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
            for name, shape in shapes.items():
                value = torch.empty(shape).uniform_(-bound, bound)
                self.register_parameter(f"{name}_{suffix}", nn.Parameter(value))

    def forward(self, input: torch.Tensor, hx: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `torch.nn.GRU.forward`, for batched input.

        Args:
            input: (time, batch, I), or (batch, time, I) with `batch_first`.
            hx: the first states, (layers times directions, batch, H); None is zeros.

        Returns:
            The states of the last layer at every step, (time, batch, H times directions) or batch first, and the last
            states, as `hx`.
        """
        x = input.transpose(0, 1) if self.batch_first else input
        if hx is None:
            hx = x.new_zeros(len(self._suffixes), x.shape[1], self.hidden_size)
        last: list[torch.Tensor] = []
        ways = 1 + self.bidirectional
        for k in range(self.num_layers):
            outs = []
            for way, suffix in enumerate(self._suffixes[k * ways : (k + 1) * ways]):
                states = self._run(x.flip(0) if way else x, hx[k * ways + way], suffix)
                last.append(states[-1])
                outs.append(states.flip(0) if way else states)
            x = torch.cat(outs, dim=-1)
        return (x.transpose(0, 1) if self.batch_first else x), torch.stack(last)

    def _run(self, x: torch.Tensor, h: torch.Tensor, suffix: str) -> torch.Tensor:
        given = nn.functional.linear(x, self._tensor("weight_ih", suffix), self._bias("bias_ih", suffix))
        weight, bias = self._tensor("weight_hh", suffix), self._bias("bias_hh", suffix)
        size, states = self.hidden_size, []
        gates = weight.shape[0] - size  # rows of r and z, or of z alone; those of n come last
        for step in given:
            gate = step[:, :gates] + nn.functional.linear(h, weight[:gates], None if bias is None else bias[:gates])
            z = torch.sigmoid(gate[:, -size:])
            kept = torch.sigmoid(gate[:, :size]) * h if self.reset == "before" else h
            n = torch.tanh(
                step[:, gates:] + nn.functional.linear(kept, weight[gates:], None if bias is None else bias[gates:])
            )
            h = (1 - z) * n + z * h
            states.append(h)
        return torch.stack(states)

    def _tensor(self, name: str, suffix: str) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self, f"{name}_{suffix}")
        return tensor

    def _bias(self, name: str, suffix: str) -> torch.Tensor | None:
        return self._tensor(name, suffix) if self.bias else None
