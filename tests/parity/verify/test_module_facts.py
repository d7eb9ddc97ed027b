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
