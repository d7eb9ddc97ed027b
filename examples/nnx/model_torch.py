"""The PyTorch side of model_jax.py."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, eps: float | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(12, eps=eps)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.mlp_norm = nn.RMSNorm(12, eps=eps)
        self.gate = nn.Linear(12, 14, bias=False)
        self.up = nn.Linear(12, 14, bias=False)
        self.down = nn.Linear(14, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        may_not_look = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(
            1
        )  # flax's masks say the opposite
        y = self.attention_norm(x)
        x = x + self.attention(y, y, y, attn_mask=may_not_look, need_weights=False)[0]
        y = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """`eps` of the norms: flax's. torch's own default is that of the dtype, 1.2e-7 in float32."""

    def __init__(self, eps: float | None = 1e-6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.blocks = nn.ModuleList(Block(eps) for _ in range(2))
        self.norm = nn.RMSNorm(12, eps=eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T
