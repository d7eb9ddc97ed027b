"""`build` of a reference is called before there are weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from convert import ConvertError
from convert.inference.pair import pair_of_reference
from convert.references.protocol import Reference


def first_dtype(state: Mapping[str, torch.Tensor]) -> torch.dtype:
    return next(iter(state.values())).dtype


def by_name(state: Mapping[str, torch.Tensor]) -> torch.dtype:
    return state["weight"].dtype


READ: list[Callable[[Mapping[str, torch.Tensor]], torch.dtype]] = []


def reference(plan: Any) -> Reference:
    return Reference(
        inputs=lambda seed: {},
        jax=lambda weights, inputs: {},
        build=lambda state: torch.nn.Linear(3, 2).to(READ[-1](state)),
        run=lambda module, inputs: {},
        outputs=("y",),
        reduction=3,
        depth=1,
    )


@pytest.mark.parametrize("read", [first_dtype, by_name])
def test_weights_that_build_reads_are_refused(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.READ", [read])
    with pytest.raises(ConvertError, match="expected a `build` that makes the module and calls load_state_dict"):
        pair_of_reference(f"{__name__}:reference", {})
