"""The PyTorch side of model_jax.py. Run as a script, it compares: model_torch.py WEIGHTS.safetensors INPUT_OUTPUT.npz"""

import sys

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.split = nn.Linear(width, width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.merge(nn.functional.gelu(self.split(self.norm(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(3))
        self.head = nn.Linear(12, 7, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(weights: str, recorded: str) -> None:
    model = Model()
    model.load_state_dict(load_file(weights), strict=True)
    io = np.load(recorded)
    with torch.no_grad():
        logits = model(torch.tensor(io["tokens"])).numpy()
    error = np.abs(logits - io["logits"]).max() / np.abs(io["logits"]).max()
    print(f"relative error {error:.1e}")
    if not error < 1e-6:
        sys.exit("the two models differ")


if __name__ == "__main__":
    main(*sys.argv[1:])
