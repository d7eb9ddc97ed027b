"""Mistakes in the target's code of Llama: between its layers, each has a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

import convert
from convert.verify.run import check
from faults.catalogue import one_thread
from support.goldens import checkpoint

pytestmark = pytest.mark.slow

ROPE, KV = modeling_llama.apply_rotary_pos_emb, modeling_llama.repeat_kv


def mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Activate the other projection."""
    made: torch.Tensor = module.down_proj(module.gate_proj(x) * module.act_fn(module.up_proj(x)))
    return made


def backwards(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return ROPE(q, k, cos, -sin, unsqueeze_dim)


def queries_alone(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return ROPE(q, k, cos, sin, unsqueeze_dim)[0], k


def keys_alone(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return q, ROPE(q, k, cos, sin, unsqueeze_dim)[1]


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "gate and up swapped": (modeling_llama.LlamaMLP, "forward", mlp),
    "RoPE turned backwards": (modeling_llama, "apply_rotary_pos_emb", backwards),
    "keys without RoPE": (modeling_llama, "apply_rotary_pos_emb", queries_alone),
    "queries without RoPE": (modeling_llama, "apply_rotary_pos_emb", keys_alone),
    "key heads in turns, not in groups": (modeling_llama, "repeat_kv", lambda x, n: x.repeat(1, n, 1, 1)),
}


@contextmanager
def in_code(owner: Any, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, wrong)
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_the_mistake_is_named(name: str, tmp_path: Path) -> None:
    convert.convert("llama", checkpoint("llama"), tmp_path / "out")
    with one_thread(), in_code(*FAULTS[name]):
        report = check(tmp_path / "out", checkpoint("llama"), levels=("model",))
    found = report.levels[-1].diagnosis
    assert found is not None and found["name"] == name
