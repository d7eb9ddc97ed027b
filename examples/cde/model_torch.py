"""The PyTorch side: the same neural CDE with torchcde."""

import torch
import torchcde
from torch import nn


class Field(nn.Module):
    def __init__(self, channels: int, hidden: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(hidden, width), nn.Linear(width, width), nn.Linear(width, hidden * channels)]
        )
        self.shape = hidden, channels

    def forward(self, t: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            z = nn.functional.softplus(layer(z))
        return torch.tanh(self.layers[-1](z)).unflatten(-1, self.shape)


class NeuralCDE(nn.Module):
    def __init__(self, channels: int, hidden: int, width: int, outputs: int, kind: str, method: str) -> None:
        super().__init__()
        self.initial = nn.Linear(channels, hidden)
        self.field = Field(channels, hidden, width)
        self.readout = nn.Linear(hidden, outputs)
        self.kind, self.method = kind, method

    def path(self, ts: torch.Tensor, ys: torch.Tensor) -> nn.Module:
        """A path through `ys` (..., T, C). Without `ts`, torchcde takes the times 0, 1, 2, ..."""
        if self.kind == "linear":
            return torchcde.LinearInterpolation(torchcde.linear_interpolation_coeffs(ys, ts), ts)
        return torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(ys, ts), ts)

    def forward(self, ts: torch.Tensor, ys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states (..., T, H), and what is read out of them."""
        path = self.path(ts, ys)
        start = self.initial(path.evaluate(ts[0]))
        # Without a step size, torchdiffeq steps from each of the times to the next.
        states = torchcde.cdeint(path, self.field, start, ts, adjoint=False, method=self.method)
        return states, self.readout(states)


def load(module: NeuralCDE, weights: dict[str, torch.Tensor]) -> NeuralCDE:
    """The module with these weights, as it is run."""
    module.load_state_dict(dict(weights), strict=True, assign=True)
    return module.requires_grad_(False).eval()
