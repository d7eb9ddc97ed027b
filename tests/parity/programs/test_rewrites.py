"""Operations in another order and parts for each other: the record of the target is run with them exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.numerics.compare import difference
from convert.programs.rewrites.places.copies import copies
from convert.programs.rewrites.places.exchange import exchange
from convert.programs.rewrites.places.order import order
from convert.programs.rewrites.places.residual import residual
from convert.programs.rewrites.positions.rows import rows
from convert.programs.rewrites.rewrite import Goal, Rewrite
from support.small_faults import Arrays, records


def norm(x: Any) -> Any:
    return x / ((x * x).mean(-1)[..., None] + 1e-6) ** 0.5


def layers(p: Arrays, x: Any, tanh: Any, step: Callable[[Any], Any]) -> Any:
    """Two layers of the same code."""
    for _ in range(2):
        x = x + tanh(step(x @ p["w"])) @ p["v"]
    return x


def halves(p: Arrays, x: Any, of: Any, swapped: bool = False) -> Any:
    split = jnp.split if of is jnp else lambda z, n, axis: z.chunk(n, axis)
    for _ in range(2):
        one, two = split(of.tanh(x @ p["w"]), 2, -1)
        one, two = (two, one) if swapped else (one, two)
        x = x + (one @ p["v"][:4, :4] * of.exp(two)) @ p["v"][4:, :]
    return x


def thirds(p: Arrays, x: Any, of: Any, places: tuple[int, ...]) -> Any:
    z = of.tanh(x @ p["w"])
    q, k, v = ([z[..., :2], z[..., 2:4], z[..., 4:6]][place] for place in places)
    return (q * of.exp(k)) @ p["v"][:2] + v @ p["v"][2:4]


def ends(p: Arrays, x: Any, first: int) -> Any:
    """What stands at two ends of the sequence goes through other weights."""
    return x[:, first] @ p["w"] + x[:, 9 - first] @ p["v"]


def blocks(p: Arrays, x: Any, tanh: Any, of: str) -> Any:
    """Two layers with a residual, and a norm with its scale, or an activation, somewhere."""

    def branch(z: Any) -> Any:
        return tanh(z @ p["w"]) @ p["v"]

    def scaled(z: Any) -> Any:
        return norm(z) * p["g"]

    places: dict[str, Callable[[Any], Any]] = {
        "on the branch": lambda z: z + scaled(branch(z)),
        "on the sum": lambda z: scaled(z + branch(z)),
        "in front": lambda z: z + branch(scaled(z)),
        "none": lambda z: z + branch(z),
        "tanh on the sum": lambda z: tanh(z + branch(z)),
        "tanh on the branch": lambda z: z + tanh(branch(z)),
    }
    return places[of](places[of](x))


def joined(p: Arrays, x: Any, of: Any, swapped: bool = False) -> Any:
    """A narrow value and a wide one."""
    one, two = of.tanh(x @ p["w"])[..., :2], of.exp(x @ p["v"] / 9)[..., :4]
    parts = [two, one] if swapped else [one, two]
    both = of.concatenate(parts, -1)
    return (both * both) @ p["v"][:6]


def grouped(p: Arrays, x: Any, of: Any, how: str) -> Any:
    """Four heads of queries, and two of keys."""
    q, k = (x @ p["w"]).reshape(3, 10, 4, 2), (x @ p["v"])[..., :4].reshape(3, 10, 2, 2)
    heads = {"rows": [0, 0, 1, 1], "turns": [0, 1, 0, 1], "first": [0, 0, 0, 0]}[how]
    k = k[:, :, heads] if how == "first" or of is jnp else k.repeat(1, 1, 2, 1)
    mixed = of.einsum("bnts,bsnh->btnh", of.tanh(of.einsum("btnh,bsnh->bnts", q, k)), k)
    return mixed.reshape(3, 10, 8) @ p["v"]


def looked_up(p: Arrays, x: Any, of: Any, first: int) -> Any:
    return of.tanh(x[:, :5] + p["w"][of.arange(5) + first]) @ p["v"]


def by_data(p: Arrays, real: Any, more: int) -> Any:
    return p["w"][real.sum(-1) - 6 + more] @ p["v"]


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], str, str]] = {
    "mean in front of a norm": (
        lambda p, x, real: (norm(x @ p["w"]) * p["g"]).mean(1),
        lambda p, x, real: norm((x @ p["w"]).mean(1)) * p["g"],
        "operations in another order",
        "the target takes the mean over axis 1",
    ),
    "scale in front of the activation, in each layer": (
        lambda p, x, real: layers(p, x, jnp.tanh, lambda z: jnp.exp(z / 9) * p["g"]),
        lambda p, x, real: layers(p, x, torch.tanh, lambda z: torch.exp(z / 9 * p["g"])),
        "operations in another order",
        "the target multiplies by g",
    ),
    "halves, in each layer": (
        lambda p, x, real: halves(p, x, jnp),
        lambda p, x, real: halves(p, x, torch, swapped=True),
        "parts exchanged",
        "with the two exchanged",
    ),
    "thirds": (
        lambda p, x, real: thirds(p, x, jnp, (0, 1, 2)),
        lambda p, x, real: thirds(p, x, torch, (1, 2, 0)),
        "parts exchanged",
        "with these parts in the order",
    ),
    "two of three": (
        lambda p, x, real: thirds(p, x, jnp, (0, 1, 2)),
        lambda p, x, real: thirds(p, x, torch, (0, 2, 1)),
        "parts exchanged",
        "with the parts 1 and 2 exchanged",
    ),
    "joined in another order": (
        lambda p, x, real: joined(p, x, jnp),
        lambda p, x, real: joined(p, x, torch, swapped=True),
        "parts joined in another order",
        "in this order (test_rewrites.py:",
    ),
    "norm of the sum for that of the branch": (
        lambda p, x, real: blocks(p, x, jnp.tanh, "on the branch"),
        lambda p, x, real: blocks(p, x, torch.tanh, "on the sum"),
        "norm behind the addition, not in front of it",
        "when it adds the residual behind that",
    ),
    "norm of the branch for that of the sum": (
        lambda p, x, real: blocks(p, x, jnp.tanh, "on the sum"),
        lambda p, x, real: blocks(p, x, torch.tanh, "on the branch"),
        "norm in front of the addition, not behind it",
        "when it does so with the sum",
    ),
    "norm behind for in front": (
        lambda p, x, real: blocks(p, x, jnp.tanh, "in front"),
        lambda p, x, real: blocks(p, x, torch.tanh, "on the sum"),
        "norm behind the addition, not in front of the layer",
        "with what the layer is given, and not with the sum",
    ),
    "activation of the sum": (
        lambda p, x, real: blocks(p, x, jnp.tanh, "tanh on the branch"),
        lambda p, x, real: blocks(p, x, torch.tanh, "tanh on the sum"),
        "function behind the addition",
        "applies tanh",
    ),
    "activation of the branch": (
        lambda p, x, real: blocks(p, x, jnp.tanh, "tanh on the sum"),
        lambda p, x, real: blocks(p, x, torch.tanh, "tanh on the branch"),
        "function in front of the addition",
        "applies tanh",
    ),
    "heads in turns": (
        lambda p, x, real: grouped(p, x, jnp, "rows"),
        lambda p, x, real: grouped(p, x, torch, "turns"),
        "heads repeated in another order",
        "in the order 0, 1, 0, 1",
    ),
    "rows of a table, from the third": (
        lambda p, x, real: looked_up(p, x, jnp, 0),
        lambda p, x, real: looked_up(p, x, torch, 2),
        "positions off by 2",
        "of w, the target takes the rows 2, 3, 4, 5",
    ),
    "rows of a table, by data": (
        lambda p, x, real: by_data(p, real, 0),
        lambda p, x, real: by_data(p, real, 1),
        "rows off by one",
        "of w, the target takes the rows 5, 1, 3",
    ),
    "ends of the input": (
        lambda p, x, real: ends(p, x, 0),
        lambda p, x, real: ends(p, x, 9),
        "parts exchanged",
        "2 parts of the input x for each other",
    ),
}


def rewritten(right: Callable[..., Any], wrong: Callable[..., Any]) -> Rewrite | None:
    source, target = records(right, wrong)
    want = source.outputs["y"].array
    goal = Goal("y", lambda got: difference(got, want).relative if got.shape == want.shape else np.inf, 1e-9)
    return (
        rows(source, target, goal)
        or copies(target, goal)
        or exchange(source, target, goal)
        or order(source, target, goal)
        or residual(target, goal)
    )


@pytest.mark.parametrize("name", CASES)
def test_the_exchange_is_found_with_its_line(name: str) -> None:
    right, wrong, called, says = CASES[name]
    found = rewritten(right, wrong)
    assert found is not None and found.name == called
    assert says in found.problem and "test_rewrites.py:" in found.problem and found.fix


def test_another_function_is_no_other_order() -> None:
    right = lambda p, x, real: jax.nn.relu(norm(x @ p["w"]) * p["g"]).mean(1)  # noqa: E731
    wrong = lambda p, x, real: torch.exp(norm(x @ p["w"]) * p["g"]).mean(1)  # noqa: E731
    assert rewritten(right, wrong) is None


def test_a_norm_that_is_missing_is_on_no_other_side() -> None:
    for there, here in (("on the branch", "none"), ("none", "on the sum"), ("none", "on the branch")):
        right = lambda p, x, real, of=there: blocks(p, x, jnp.tanh, of)  # noqa: E731
        wrong = lambda p, x, real, of=here: blocks(p, x, torch.tanh, of)  # noqa: E731
        assert rewritten(right, wrong) is None


def test_a_table_with_other_rows_is_not_read_elsewhere() -> None:
    right = lambda p, x, real: looked_up(p, x, jnp, 0)  # noqa: E731
    wrong = lambda p, x, real: looked_up({**p, "w": p["w"].flip(0)}, x, torch, 0)  # noqa: E731
    assert rewritten(right, wrong) is None


def test_one_head_for_all_is_no_other_order_of_heads() -> None:
    right = lambda p, x, real: grouped(p, x, jnp, "rows")  # noqa: E731
    wrong = lambda p, x, real: grouped(p, x, torch, "first")  # noqa: E731
    assert rewritten(right, wrong) is None
