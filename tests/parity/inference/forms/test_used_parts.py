"""A fused matrix is applied to more rows, or to more values, than each of its parts is used of; the other side has a matrix for each part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, rules, sources

D, H, LAST, FIRST = 8, 2, 3, 2
APART: dict[str, tuple[int, ...]] = {**dict.fromkeys(("q", "k", "v"), (D, D)), **dict.fromkeys(("a", "b", "c"), (D,))}
FUSED: dict[str, tuple[int, ...]] = {"w": (D, 3 * D), "b": (3 * D,)}


def _attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v


def _join(*parts: Any) -> Any:
    return torch.cat(parts, 1) if isinstance(parts[0], torch.Tensor) else jnp.concatenate(parts, 1)


def _last_rows(qkv: Any, x: Any) -> Any:
    q, k, v = qkv(x)
    return q[:, -LAST:], k, v


def _two_values(qkv: Any, x: Any) -> Any:
    (q, _, _), (_, k, v) = qkv(x[:, :FIRST]), qkv(x[:, FIRST:])
    return q, k, v


def _prefix(qkv: Any, x: Any) -> Any:
    (_, k, v), (q, more, others) = qkv(x[:, :FIRST]), qkv(x[:, FIRST:])
    return q, _join(k, more), _join(v, others)


def _of_both(layer: Any, x: Any) -> Any:
    return _join(layer(x[:, :FIRST]), layer(x[:, FIRST:]))


USES = {  # what uses a fused matrix, and what uses one for each of queries, keys and values
    "the queries of the last rows": (_last_rows, lambda q, k, v, x: (q(x[:, -LAST:]), k(x), v(x))),
    "two values": (_two_values, lambda q, k, v, x: (q(x[:, :FIRST]), k(x[:, FIRST:]), v(x[:, FIRST:]))),
    "a prefix": (_prefix, lambda q, k, v, x: (q(x[:, FIRST:]), _of_both(k, x), _of_both(v, x))),
}


class _Fused(nn.Module):
    def __init__(self, used: Callable[..., Any]) -> None:
        super().__init__()
        self.qkv, self._used = nn.Linear(D, 3 * D), used

    def forward(self, x: Any) -> Any:
        q, k, v = self._used(lambda x: self.qkv(x).chunk(3, -1), x)
        return (q @ k.mT).softmax(-1) @ v


class _Apart(nn.Module):
    def __init__(self, used: Callable[..., Any]) -> None:
        super().__init__()
        self.q, self.k, self.v, self._used = *(nn.Linear(D, D) for _ in range(3)), used

    def forward(self, x: Any) -> Any:
        q, k, v = self._used(self.q, self.k, self.v, x)
        return (q @ k.mT).softmax(-1) @ v


def _fused(used: Callable[..., Any]) -> Any:
    return lambda w, x: _attention(*used(lambda x: jnp.split(x @ w["w"] + w["b"], 3, -1), x))


def _apart(used: Callable[..., Any]) -> Any:
    def function(w: Any, x: Any) -> Any:
        return _attention(*used(*(partial(_affine, w[m], w[n]) for m, n in ("qa", "kb", "vc")), x))

    return function


def _affine(w: Any, b: Any, x: Any) -> Any:
    return x @ w + b


@pytest.mark.slow
@pytest.mark.parametrize(("fused", "apart"), USES.values(), ids=USES)
def test_a_fused_matrix_of_pytorch_of_which_parts_are_used(fused: Any, apart: Any) -> None:
    module = _Fused(fused)
    found = derive(_apart(apart), module, APART, floats(3, 6, D))
    assert grades(found) == {Grade.DERIVED}
    assert sources(found) == {"qkv.weight": ("q", "k", "v"), "qkv.bias": ("a", "b", "c")}
    (rule,) = rules(found, module)
    assert "linear: qkv" in rule


@pytest.mark.parametrize(("fused", "apart"), USES.values(), ids=USES)
def test_a_fused_matrix_of_jax_of_which_parts_are_used(fused: Any, apart: Any) -> None:
    module = _Apart(apart)
    found = derive(_fused(fused), module, FUSED, floats(3, 6, D))
    assert grades(found) == {Grade.DERIVED}
    (rule,) = rules(found, module)
    assert "D(C + C + C)" in rule and 'linear: "{q,k,v}"' in rule


def test_rows_are_taken_behind_a_matrix_that_is_not_fused() -> None:
    module = _Apart(lambda q, k, v, x: (q(x)[:, -LAST:], k(x), v(x)))
    found = derive(_apart(USES["the queries of the last rows"][1]), module, APART, floats(3, 6, D))
    assert grades(found) == {Grade.DERIVED}
    rules(found, module)


@pytest.mark.slow
def test_rows_of_a_matrix_that_is_fused_head_by_head() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(D, 3 * D, bias=False)

        def forward(self, x: Any) -> Any:
            heads = self.qkv(x).view(*x.shape[:2], H, 3, D // H)
            q, k, v = (part.transpose(1, 2) for part in heads.unbind(3))
            return ((q[:, :, -LAST:] @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def function(w: Any, x: Any) -> Any:
        q, k, v = (
            jnp.einsum("bsd,dhk->bhsk", rows, w[name]) for name, rows in (("q", x[:, -LAST:]), ("k", x), ("v", x))
        )
        return _attention(q, k, v).swapaxes(1, 2).reshape(len(x), LAST, D)

    module = Fused()
    found = derive(function, module, dict.fromkeys(("q", "k", "v"), (D, H, D // H)), floats(3, 6, D))
    assert grades(found) == {Grade.DERIVED}
    rules(found, module)


def test_columns_that_no_result_is_used_of_are_found_with_the_rest() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(D, 2 * D)

        def forward(self, x: Any) -> Any:
            return self.both(x).chunk(2, -1)[0].tanh()

    found = derive(
        lambda w, x: jnp.tanh((x @ w["w"] + w["b"])[..., :D]), Mean(), {"w": (D, 2 * D), "b": (2 * D,)}, floats(6, D)
    )
    assert found.complete


@pytest.mark.slow
def test_queries_of_the_wrong_rows_are_a_difference() -> None:
    module = _Fused(lambda qkv, x: (qkv(x)[0][:, :LAST], *qkv(x)[1:]))
    found = derive(_apart(USES["the queries of the last rows"][1]), module, APART, floats(3, 6, D))
    assert not found.complete and found.proof is None
    (difference,) = found.differences
    assert "the JAX model takes the indices 3 to 5 of axis 1" in difference.problem


@pytest.mark.slow
def test_keys_and_values_exchanged_in_the_second_use_are_a_difference() -> None:
    def used(qkv: Any, x: Any) -> Any:
        (_, k, v), (q, more, others) = qkv(x[:, :FIRST]), qkv(x[:, FIRST:])
        return q, _join(k, others), _join(v, more)

    found = derive(_fused(_prefix), _Fused(used), FUSED, floats(3, 6, D))
    assert not found.complete and found.proof is None and len(found.differences) == 1
