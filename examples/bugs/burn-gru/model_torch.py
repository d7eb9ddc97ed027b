"""The PyTorch side: torch's GRU, and a GRU with the two bugs of tracel-ai/burn#2701 (repaired in Burn 0.17)."""

import torch
from torch import nn


class StaleGRU(nn.GRU):
    """Every step starts from the first state: Burn went through the initial state in place of the last one."""

    def candidate(self, x, h, r, w, c):
        return torch.tanh(x + r * (h @ w.T + c))

    def forward(self, x, hx):
        h, states = hx[0], []
        w, c = self.weight_hh_l0, self.bias_hh_l0
        size = self.hidden_size
        for t in range(x.shape[1]):
            given = x[:, t] @ self.weight_ih_l0.T + self.bias_ih_l0
            r, z = torch.sigmoid(given[:, : 2 * size] + h @ w[: 2 * size].T + c[: 2 * size]).chunk(2, dim=-1)
            n = self.candidate(given[:, 2 * size :], h, r, w[2 * size :], c[2 * size :])
            states.append((1 - z) * n + z * h)  # and `h` is not replaced
        return torch.stack(states, dim=1), states[-1][None]


class BurnGRU(StaleGRU):
    """And the reset gate is on the wrong side of the matrix."""

    def candidate(self, x, h, r, w, c):
        return torch.tanh(x + (r * h) @ w.T + c)


class Model(nn.Module):
    def __init__(self, gru, inputs, hidden):
        super().__init__()
        self.gru = gru(inputs, hidden, batch_first=True)

    def forward(self, x, h):
        return self.gru(x, h[None])[0]


def load(gru, state):
    rows, inputs = state["gru.weight_ih_l0"].shape
    module = Model(gru, inputs, rows // 3)
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()
