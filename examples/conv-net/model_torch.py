"""The PyTorch side of model_jax.py, channels first."""

import torch
from torch import nn

EPSILON = 1e-5


class Up(nn.ConvTranspose2d):
    """flax's ConvTranspose with SAME: torch's result without its last row and column, which no argument of torch takes off."""

    crop = (0, -1, 0, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(super().forward(x), self.crop)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pad = nn.ZeroPad2d((0, 1, 1, 1))  # left, right, top, bottom: SAME of 9 rows and 8 columns
        self.stem = nn.Conv2d(3, 6, 3, stride=2)
        self.norm = nn.BatchNorm2d(6, eps=EPSILON, momentum=0.1)  # flax's momentum 0.9 is 1 - 0.1
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.mix = nn.Conv2d(6, 6, (2, 3))
        self.group = nn.GroupNorm(3, 6, eps=1e-6)
        self.up = Up(6, 6, 3, stride=2)
        self.dense = nn.utils.parametrizations.weight_norm(nn.Linear(6 * 8 * 4, 7))
        self.head = nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.pad(x))
        x = torch.relu(self.norm(x))
        x = self.mix(self.depthwise(x))
        x = torch.relu(self.group(x))
        x = self.up(x)
        x = torch.relu(self.dense(x.flatten(1)))  # channels, rows, columns
        return self.head(x)


def load(state: dict[str, torch.Tensor]) -> nn.Module:
    """The model in the dtype of its weights."""
    module = Model()
    module.load_state_dict(state, strict=True, assign=True)
    return module.requires_grad_(False).eval()
