"""Operations in place: what is read later through any alias of a tensor is what the record says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from convert.programs.record_torch import record_torch
from support.recorded_module import recorded

Tensor = torch.Tensor
X = np.random.default_rng(0).normal(size=(2, 3, 8))
B = torch.arange(16.0, dtype=torch.float64).reshape(2, 8) / 7


def assigned(x: Tensor) -> dict[str, Tensor]:
    a = x * 1.0
    row, turned = a[:, 0], a.transpose(1, 2)
    a[:, 0] = B
    return {"a": a, "row": row, "turned": turned, "after": row + 1}


def chain(x: Tensor) -> dict[str, Tensor]:
    a = x * 1.0
    row, turned, flat = a[:, 0], a.transpose(1, 2), a.view(-1)
    before = row * 2
    turned.mul_(2.0)
    a.add_(before[:, None])
    row.copy_(row * 3)
    flat[3::7] -= 0.5
    return {"a": a, "row": row, "turned": turned, "flat": flat, "before": before}


def overlapping(x: Tensor) -> dict[str, Tensor]:
    a = x * 1.0
    left, right = a[..., :5], a[..., 3:]
    left.neg_()
    right.mul_(left[..., :5].clone())
    left += 1
    windows = a.unfold(2, 4, 2)
    a[..., 4] = 9
    return {"a": a, "left": left, "right": right, "windows": windows}


def strided(x: Tensor) -> dict[str, Tensor]:
    a = x.clone()
    part = a.as_strided((2, 4), (3, 2), 1)
    kept = part * 1
    part.neg_()
    inner = part[1:].as_strided((3,), (2,), 5)
    inner.zero_()
    return {"a": a, "part": part, "kept": kept, "inner": inner}


def cache(x: Tensor) -> dict[str, Tensor]:
    keys = torch.empty(2, 5, 8)
    keys.zero_()
    outputs = []
    for t in range(3):
        keys[:, t] = x[:, t] * 2
        seen = keys[:, : t + 1]
        outputs.append((x[:, t, None] @ seen.transpose(1, 2)).sum((1, 2)))
    keys.index_copy_(1, torch.tensor([4]), x[:, :1])
    keys.index_put_((torch.tensor([0, 1]), torch.tensor([1, 2])), B)
    keys.scatter_(1, torch.full((2, 1, 8), 3), 5.0)
    return {"keys": keys, "scores": torch.stack(outputs)}


def out_arguments(x: Tensor) -> dict[str, Tensor]:
    made = torch.empty(0)
    torch.mul(x, x, out=made)
    grown = x.new_zeros(2, 3, 8)
    grown += x
    alias = grown[0]
    torch.add(grown, 1, out=grown)
    top, where = torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.long)
    torch.max(x, 1, out=(top, where))
    return {"made": made, "grown": grown, "alias": alias, "top": top, "where": where}


def lists(x: Tensor) -> dict[str, Tensor]:
    a = x.clone()
    parts = list(a.unbind(1))
    parts[0].add_(1)
    torch._foreach_mul_(parts, 2.0)
    torch._foreach_add_(parts[:2], parts[1:])
    first, second = a.chunk(2, -1)
    first.sub_(second)
    return {"a": a, "part": parts[2], "first": first}


def masks(x: Tensor) -> dict[str, Tensor]:
    a = x.clone()
    a[a > 0] = 0.25
    a.masked_fill_(a < -1, -9.0)
    a.clamp_(max=0.1)
    a[torch.tensor([[True, False, True], [False, True, False]])] *= 2
    a.fill_diagonal_(0.5) if a.ndim == 2 else a[0].fill_diagonal_(0.5)
    return {"a": a}


def complex_views(x: Tensor) -> dict[str, Tensor]:
    z = torch.view_as_complex(x.reshape(2, 3, 4, 2).clone())
    turned = z * torch.polar(torch.ones(4), torch.arange(4.0))
    pairs = torch.view_as_real(turned)
    turned.mul_(2)
    pairs[..., 0] = 7 * pairs[..., 0]
    conjugate = turned.conj()
    pairs[..., 1] += 1
    return {
        "pairs": pairs,
        "conjugate": torch.view_as_real(conjugate.resolve_conj()),
        "imaginary": turned.imag * 1,
        "magnitude": turned.abs(),
    }


def transposed_in_place(x: Tensor) -> dict[str, Tensor]:
    a = x.clone()
    other = a[1]
    a.transpose_(0, 1)
    a.sub_(1)
    a.unsqueeze_(0).squeeze_(0)
    return {"a": a, "other": other}


def swapped(x: Tensor) -> dict[str, Tensor]:
    a, b = x.clone(), x * 2
    a[:, 0], a[:, 1] = a[:, 1].clone(), a[:, 0].clone()
    b.copy_(a.flip(1))
    b[:, 2:].copy_(b[:, :1])
    a.copy_(B[:, None])
    return {"a": a, "b": b}


def integers(x: Tensor) -> dict[str, Tensor]:
    counts = torch.zeros(4, dtype=torch.long)
    counts[1:3] += 2
    counts.copy_(x[0, 0, :4] * 10)
    seen = torch.zeros(3, dtype=torch.bool)
    seen[1:] |= x[0, 1:, 0] > 0
    return {"counts": counts, "seen": seen, "numbers": counts / 2}


def dropped(x: Tensor) -> dict[str, Tensor]:
    total = torch.zeros(8)
    for k in range(20):  # storages come and go, and their addresses with them
        total = total + (x[:, k % 3] * k).clone().add_(1).sum(0)
    return {"total": total}


def first_rows(x: Tensor) -> dict[str, Tensor]:
    """Outputs that share a storage of their own."""
    made, indices = torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.long)
    torch.max(x, 0, out=(made[:], indices[:]))
    halves = indices.view(-1)[4:].unfold(0, 2, 2)
    halves += 3
    return {"made": made, "indices": indices, "halves": halves}


CASES = [assigned, chain, overlapping, strided, cache, out_arguments, lists, masks, complex_views]
CASES += [transposed_in_place, swapped, integers, dropped, first_rows]


class Of(nn.Module):
    def __init__(self, function: Callable[[Tensor], dict[str, Tensor]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.function(x)


def call(module: nn.Module, inputs: Any) -> dict[str, Tensor]:
    return module(inputs["x"])


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_every_alias_reads_what_was_written(function: Callable[[Tensor], dict[str, Tensor]]) -> None:
    program = recorded(Of(function), call, x=X)
    assert any(value.data for value in program.outputs.values())
    assert not program.path_taken


VIEWS: list[Callable[[random.Random, Tensor], Tensor]] = [
    lambda draw, a: a.select(draw.randrange(a.ndim), 0),
    lambda draw, a: a.narrow(axis := draw.randrange(a.ndim), 0, draw.randint(1, a.shape[axis])),
    lambda draw, a: a.transpose(0, -1),
    lambda draw, a: a.unsqueeze(draw.randrange(a.ndim + 1)),
    lambda draw, a: a[..., :: draw.randint(1, 3)],
    lambda draw, a: a.diagonal() if a.ndim > 1 else a[1:],
    lambda draw, a: a.view(-1) if a.is_contiguous() else a.squeeze(),
    lambda draw, a: a.unfold(-1, 2, 2) if a.shape[-1] > 1 else a.detach(),
    lambda draw, a: (
        a.as_strided((2, 2), (1, 2), a.storage_offset())
        if a.numel() > 6 and a.is_contiguous()
        else a.T
        if a.ndim == 2
        else a
    ),
]
WRITES: list[Callable[[random.Random, Tensor, Tensor], Any]] = [
    lambda draw, a, b: a.add_(b.sum()),
    lambda draw, a, b: a.mul_(1.5).sub_(0.25),
    lambda draw, a, b: a.copy_(b.mean()),
    lambda draw, a, b: a.zero_() if draw.random() < 0.2 else a.neg_(),
    lambda draw, a, b: a[..., :1].copy_(a[..., -1:].clone()),
    lambda draw, a, b: a.masked_fill_(a > 1, 0.5),
    lambda draw, a, b: a.index_fill_(-1, torch.tensor([0]), 2.0),
    lambda draw, a, b: a.clamp_(-3, 3).tanh_(),
    lambda draw, a, b: a.copy_(a.flip(0)) if a.ndim else a.sin_(),
    lambda draw, a, b: torch.add(a.clone(), 1, out=a) if a.is_contiguous() else a.cos_(),
]


def any_sequence(seed: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Views of views, writes through any of them, and new tensors, in an order that is drawn."""

    def function(x: Tensor) -> dict[str, Tensor]:
        draw = random.Random(seed)
        pool = [x * 1.0, x.transpose(0, 2).clone(), torch.arange(24.0).reshape(4, 6)]
        for _ in range(40):
            a, b = draw.choice(pool), draw.choice(pool)
            kind = draw.random()
            if kind < 0.4:
                pool.append(draw.choice(VIEWS)(draw, a) if a.ndim and a.numel() else a + 1)
            elif kind < 0.85:
                draw.choice(WRITES)(draw, a, b) if a.ndim and a.numel() else a.add_(1)
            else:
                pool.append(a * 0.5 + b.sum())
        return {str(k): tensor for k, tensor in enumerate(pool)}

    return function


@pytest.mark.parametrize("seed", range(20))
def test_every_alias_reads_what_any_sequence_wrote(seed: int) -> None:
    recorded(Of(any_sequence(seed)), call, x=X)


class Window(nn.Module):
    """Writes through a view that was made before the run."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.arange(40.0, dtype=torch.float64).reshape(2, 5, 4)
        self.counts = torch.arange(8)
        self.views = {"rows": self.rows[:, 1:3], "counts": self.counts[2:4]}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rows, counts = (view.detach() for view in self.views.values())
        rows.copy_(x[:, :2, :4])
        counts.copy_((x[0, 0, :2] * 10).long())
        return {"rows": self.rows * 1, "counts": self.counts * 1, "half": self.counts[1:3] * 1}


class Overlapping(nn.Module):
    """Two parameters that share elements, and a view of one of them that is none."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.randn(16, 8)
        self.both, self.one = nn.Parameter(both), nn.Parameter(both[:8])
        self.rest = self.both.detach()[8:]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"one": x @ self.one.T, "both": x @ self.both.T, "rest": x @ self.rest.T}


def test_parameters_that_share_elements() -> None:
    program = recorded(Overlapping(), call, x=X)
    assert {name: value.leaves for name, value in program.outputs.items()} == {
        "one": {"one"},
        "both": {"both"},
        "rest": {"one", "both"},
    }


def test_a_view_that_was_there_before_the_run_writes_to_what_it_looks_at() -> None:
    program = recorded(Window(), call, x=X)
    assert program.outputs["counts"].array.dtype == np.int64


def test_tensors_without_elements_are_not_one() -> None:
    """Rows and places of an expert that no token reaches look at the same elements: none."""

    def rows(x: Tensor) -> dict[str, Tensor]:
        row, place = torch.where(x[0] > 100)
        return {"y": x[0].index_add(0, row, x[0, row] * x[1, row, place, None])}

    program = recorded(Of(rows), call, x=X)
    (indexed,) = (
        o for o in program.operations if o.name == "index" and len(o.operands) == 3 and not o.results[0].array.size
    )
    assert indexed.operands[1] is not indexed.operands[2]


class Stateful(nn.Module):
    """Writes to a buffer, to a constant of its own, and keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("cache", torch.zeros(2, 4, 8), persistent=False)
        self.plain, self.calls, self.kept = torch.ones(8), 0, []
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.kept.append(x)
        self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        self.cache[:, :3] = x * self.scale
        self.plain += self.mean
        self.derived = self.cache.sum(1)
        return {"y": self.derived * self.plain + self.calls + len(self.kept), "mean": self.mean * 1.0}


def test_a_module_that_writes_to_itself_is_left_as_it_was() -> None:
    module = Stateful()
    before = module.plain, module.kept
    program = record_torch(module, call, {"x": X})
    assert program.outputs["mean"].leaves == {"mean"} and program.outputs["mean"].data
    assert (module.calls, module.kept, hasattr(module, "derived")) == (0, [], False)
    assert module.plain is before[0] and module.kept is before[1]
    assert torch.equal(module.plain, torch.ones(8)) and module.plain.dtype == torch.float32
    assert not module.mean.any() and not module.cache.any() and module.cache.dtype == torch.float32
