"""Which tensors lie behind the operation at which a search ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from convert.inference.derivation import Grade, Tensor
from convert.inference.grading.differences.explained import not_reached


def reads(*names: str) -> Any:
    return SimpleNamespace(
        operands=[SimpleNamespace(of_parameters=True, leaves={name}) for name in names]
        + [SimpleNamespace(of_parameters=False, leaves={"w1", "w2"})]
    )


@pytest.mark.parametrize(("index", "behind"), [(0, {"w1", "w2"}), (1, {"w2"}), (2, set())])
def test_what_is_read_behind_the_end_was_not_reached(index: int, behind: set[str]) -> None:
    target: Any = SimpleNamespace(operations=(reads("w0"), reads("w1"), reads("w2")))
    tensors = [Tensor(f"w{k}", (2,), Grade.OPEN, candidates=("leaf",)) for k in range(3)]
    tensors.append(Tensor("never", (2,), Grade.OPEN, unread=True))
    found = not_reached(tensors, target, index)
    assert {tensor.name for tensor in found if tensor.not_reached} == behind
    assert all(bool(tensor.candidates) is not tensor.not_reached for tensor in found[:3])
