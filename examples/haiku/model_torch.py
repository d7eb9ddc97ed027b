"""The PyTorch side of model_jax.py."""

import torch
from torch import nn

from convert.layers.torch_modules import GRU  # needs PyTorch alone; may be copied


class Tagger(nn.Module):
    """`gru`: the layer that computes Haiku's GRU. torch.nn.GRU takes the same weights, and computes something else."""

    def __init__(self, gru: type[nn.Module] = GRU) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 7, batch_first=True)
        self.lstm_norm = nn.LayerNorm(7)
        self.gru = gru(7, 5, batch_first=True, **({"reset": "before"} if gru is GRU else {}))
        self.gru_norm = nn.LayerNorm(5)
        self.labels = nn.Linear(5, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embed(tokens))
        x, _ = self.gru(self.lstm_norm(x))
        return self.labels(self.gru_norm(x))
