"""Facts of a live module: a block that does not run alone hides those of no other layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from convert.references.module_facts import Block, facts


class Shared(nn.Module):
    """A layer that takes the keys of another one, as those of Gemma 4 E2B do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4, eps=3e-4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any, keys: Any = None) -> Any:
        keys, values = keys
        return self.down(torch.tanh(self.up(self.norm(x) + keys * values)))


class Alone(Shared):
    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(self.norm(x))))


def test_a_block_that_does_not_run_alone_has_no_activation_and_the_others_have_theirs() -> None:
    module = nn.ModuleDict({"shared": Shared(), "alone": Alone()}).eval()
    found = facts(module, [Block(at, f"{at}.up", f"{at}.down") for at in module])
    assert found["alone.up"]["activation"] == "tanh"
    assert "shared.up" not in found
    assert found["shared.norm"]["epsilon"] == found["alone.norm"]["epsilon"] == 3e-4


class ChannelNorm(nn.LayerNorm):
    """Of images with the channels first."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class PairNorm(nn.LayerNorm):
    def forward(self, x: Any, other: Any) -> Any:  # type: ignore[override]
        return super().forward(x + other)


def test_a_norm_of_images_is_measured_and_one_that_does_not_run_hides_those_of_no_other_module() -> None:
    module = nn.ModuleDict({"pair": PairNorm(4), "images": ChannelNorm(6, eps=2e-4), "plain": nn.LayerNorm(4)})
    found = facts(module)
    assert found["pair"] == {"epsilon": 1e-5, "multiplies_by": "unknown"}
    assert found["images"] == {"epsilon": 2e-4, "multiplies_by": "weight"}
    assert found["plain"] == {"epsilon": 1e-5, "multiplies_by": "weight"}
