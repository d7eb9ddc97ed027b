"""The PyTorch side, with torchcde, whose paths take all times at once."""

import torch
import torchcde
from torch import nn


class Roughness(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1))
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, ts, signal):
        slope = torchcde.LinearInterpolation(signal, ts).derivative(ts)
        return {"slope": slope, "y": torch.tanh(self.gain * slope + self.offset).mean((1, 2))}


def load(state):
    module = Roughness()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()
