"""The PyTorch side of all three. Run as a script, it compares: model_torch.py WEIGHTS.safetensors INPUT_OUTPUT.npz"""

import sys

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6, eps=1e-5)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.silu(layer(x))
        return self.head(self.norm(x))


def main(weights: str, recorded: str) -> None:
    model = Model()
    model.load_state_dict(load_file(weights), strict=True)
    io = np.load(recorded)
    with torch.no_grad():
        y = model(torch.tensor(io["x"])).numpy()
    error = np.abs(y - io["y"]).max() / np.abs(io["y"]).max()
    print(f"relative error {error:.1e}")
    if not error < 1e-6:
        sys.exit("the two models differ")


if __name__ == "__main__":
    main(*sys.argv[1:])
