"""Buffers that the module computes itself and saves, which no leaf of the source has: tables of sines, the frequencies of RoPE."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Arithmetic, Grade
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import UNPROVEN, WIDTH, derive, floats, grades, rules, sources

T = 7
HALF = WIDTH // 2
SHAPES = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH)}


def factors(longest: float, last: bool) -> Any:
    return longest ** (-np.arange(HALF) / (HALF - last))


def table(longest: float, last: bool, interleaved: bool) -> Any:
    angles = np.arange(T)[:, None] * factors(longest, last)
    both = np.sin(angles), np.cos(angles)
    return np.stack(both, -1).reshape(T, WIDTH) if interleaved else np.concatenate(both, 1)


class Places(torch.nn.Module):
    """A table that is added to the inputs of a layer."""

    def __init__(self, of: Any, shape: tuple[int, ...] = (T, WIDTH)) -> None:
        super().__init__()
        self.register_buffer("p", torch.as_tensor(of).reshape(shape))
        self.m = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return self.m[1](torch.relu(self.m[0](x + self.p)))


class Turned(Places):
    """Features that are turned by angles of their positions, as RoPE turns them."""

    def forward(self, x: Any) -> Any:
        angles = torch.arange(T, dtype=self.p.dtype)[:, None] * self.p
        y = self.m[0](x)
        one, two = y[..., :HALF], y[..., HALF:]
        turned = torch.cat([-two, one], -1)
        angles = torch.cat([angles, angles], -1)
        return self.m[1](torch.tanh(y * angles.cos() + turned * angles.sin()))


def placed(of: Any) -> Any:
    return lambda w, x: jnp.maximum((x + of) @ w["a"], 0) @ w["b"]


@pytest.mark.parametrize(
    ("last", "interleaved", "keys"),
    [
        (True, False, ("concatenated", "included")),
        pytest.param(False, True, ("interleaved", "excluded"), marks=pytest.mark.slow),
    ],
)
def test_a_table_of_sines_is_a_rule(last, interleaved, keys):
    of = table(10000, last, interleaved)
    module = Places(of)
    found = derive(placed(of), module, SHAPES, floats(3, T, WIDTH))
    (part,) = found.tensor("p").parts
    assert part.arithmetic is Arithmetic.OWN and found.tensor("p").grade is Grade.DERIVED
    layout, endpoint = keys
    assert f"- timescales: D\n  positions: {T}\n  layout: {layout}\n  endpoint: {endpoint}\n  buffer: p" in rules(
        found, module
    )


@pytest.mark.slow
def test_the_frequencies_of_rope_are_a_rule():
    def function(w, x):
        angles = jnp.arange(T)[:, None] * factors(500, last=False)
        y = x @ w["a"]
        one, two = y[..., :HALF], y[..., HALF:]
        sine, cosine = jnp.sin(angles), jnp.cos(angles)
        return jnp.tanh(jnp.concatenate([one * cosine - two * sine, two * cosine + one * sine], -1)) @ w["b"]

    module = Turned(factors(500, last=False), (HALF,))
    found = derive(function, module, SHAPES, floats(3, T, WIDTH))
    assert "- timescales: D\n  endpoint: excluded\n  buffer: p" in rules(found, module)
    assert "max_timescale: 500" in write_rules(found, model_of_module(module, "Model")).text


@pytest.mark.parametrize(
    "other",
    [
        table(5000, True, False),
        *(pytest.param(table(10000, *of), marks=pytest.mark.slow) for of in ((False, False), (True, True))),
    ],
)
def test_another_table_is_a_difference(other):
    found = derive(placed(other), Places(table(10000, True, False)), SHAPES, floats(3, T, WIDTH))
    (difference,) = found.differences
    assert "of the input x, the target adds p" in difference.problem and not found.complete
    assert f"the JAX model adds a table of shape [1, {T}, {WIDTH}]" in difference.problem
    assert grades(found) <= UNPROVEN


@pytest.mark.parametrize("few", [True, False])
def test_other_numbers_are_written_as_they_are_if_they_are_few(few):
    shape = (1, T, WIDTH) if few else (40, T, WIDTH)
    of = np.random.default_rng(0).normal(size=shape)
    module = Places(of, shape)
    found = derive(placed(of), module, SHAPES, floats(shape[0], T, WIDTH))
    written = write_rules(found, model_of_module(module, "Model"))
    assert found.complete and ("constant: p" in written.text) == few
    assert list(written.open) == [] if few else "too many numbers" in written.open["p"]


class Applied(Places):
    """A layer that is applied to the table itself, as that of relative positions, and a head with a bias that is tied to it."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.m[1].weight

    def forward(self, x: Any) -> Any:
        return self.head(torch.tanh(x @ torch.tanh(self.m[0](self.p)).T) @ torch.tanh(self.m[1](self.p)))


def test_a_layer_may_be_applied_to_the_table():
    of = table(10000, True, False)

    def function(w, x):
        one, two = jnp.tanh(of @ w["a"]), jnp.tanh(of @ w["b"])
        return jnp.tanh(x @ one.T) @ two @ w["b"] + w["c"]

    module = Applied(of)
    found = derive(function, module, SHAPES | {"c": (WIDTH,)}, floats(3, T, WIDTH))
    assert {name: of for name, of in sources(found).items() if name != "p"} == {
        "m.0.weight": "a",
        "m.1.weight": "b",
        "head.bias": "c",
    }
    assert write_rules(found, model_of_module(module, "Model")).open == {}


class Decayed(Places):
    """Queries and keys that are turned, and scaled by powers of a buffer, as xPos does: the source multiplies their halves by other tables."""

    def __init__(self, of: Any) -> None:
        super().__init__(of, (HALF,))
        self.m.append(torch.nn.Linear(WIDTH, WIDTH, bias=False))

    def turned(self, y: Any) -> Any:
        places = torch.arange(T, dtype=self.p.dtype)[:, None]
        scale, angles = (
            (self.p ** (places / 9)).repeat(1, 2),
            (places * torch.as_tensor(factors(500, False))).repeat(1, 2),
        )
        one, two = y[..., :HALF], y[..., HALF:]
        return y * (angles.cos() * scale) + torch.cat([-two, one], -1) * (angles.sin() * scale)

    def forward(self, x: Any) -> Any:
        return self.turned(self.m[0](x)) @ self.turned(self.m[1](x)).mT @ self.m[2](x)


@pytest.mark.parametrize(
    "number", [1.0, *(pytest.param(other, marks=pytest.mark.slow) for other in (1.001, 2.0))], ids=str
)
def test_a_buffer_that_is_part_of_what_queries_and_keys_are_multiplied_by_is_kept(number):
    of = (np.arange(HALF) + 4.0) / 16

    def turned(y):
        places = np.arange(T)[:, None]
        scale, angles = (number * of) ** (places / 9), places * factors(500, False)
        sine, cosine = jnp.sin(angles) * scale, jnp.cos(angles) * scale
        one, two = y[..., :HALF], y[..., HALF:]
        return jnp.concatenate([one * cosine - two * sine, two * cosine + one * sine], -1)

    def function(w, x):
        return turned(x @ w["a"]) @ turned(x @ w["b"]).swapaxes(-1, -2) @ (x @ w["c"])

    found = derive(function, Decayed(of), SHAPES | {"c": (WIDTH, WIDTH)}, floats(3, T, WIDTH))
    if number != 1:
        assert not found.complete and grades(found) <= UNPROVEN
        return
    assert found.complete and found.tensor("p").parts[0].arithmetic is Arithmetic.OWN
    assert {name: of for name, of in sources(found).items() if name != "p"} == {
        "m.0.weight": "a",
        "m.1.weight": "b",
        "m.2.weight": "c",
    }


class Published(nn.Module):
    """The attention of minGPT and nanoGPT: the causal mask is a buffer of floats."""

    def __init__(self, fault: bool = False) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("bias", torch.tril(torch.ones(7, 7), int(fault)).view(1, 1, 7, 7))

    def forward(self, x: Any) -> Any:
        q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.c_attn(x).split(16, 2))
        scores = (q @ k.mT / 2).masked_fill(self.bias[:, :, : x.shape[1], : x.shape[1]] == 0, -torch.inf)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def _published(w: Any, x: Any) -> Any:
    q, k, v = (y.reshape(*y.shape[:2], 4, 4).swapaxes(1, 2) for y in jnp.split(x @ w["a"] + w["ab"], 3, -1))
    scores = jnp.where(np.tri(7) > 0, q @ k.swapaxes(2, 3) / 2, -jnp.inf)
    return (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape) @ w["o"] + w["ob"]


GPT = {"a": (16, 48), "ab": (48,), "o": (16, 16), "ob": (16,)}


def test_a_mask_that_is_saved_as_floats_is_the_modules_own() -> None:
    module = Published()
    found = derive(_published, module, GPT, floats(3, 7, 16))
    assert found.complete and found.tensor("bias").is_own
    assert not write_rules(found, model_of_module(module, "Model")).open


@pytest.mark.slow
def test_another_mask_in_such_a_buffer_is_a_difference() -> None:
    found = derive(_published, Published(fault=True), GPT, floats(3, 7, 16))
    assert not found.complete and found.differences


@pytest.mark.parametrize(
    ("condition", "source"),
    [
        (lambda w: torch.where(w.abs() > 0.5, w, 0.0), lambda w: jnp.where(jnp.abs(w) > 0.5, w, 0)),
        (lambda w: w.masked_fill(w < 0, 0), lambda w: jnp.where(w < 0, 0, w)),
    ],
)
def test_a_condition_of_a_parameter(condition: Any, source: Any) -> None:
    class Pruned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(6, 6))

        def forward(self, x: Any) -> Any:
            return x @ condition(self.w)

    found = derive(lambda w, x: x @ source(w["w"]), Pruned(), {"w": (6, 6)}, floats(4, 6))
    assert found.complete


def test_whole_numbers_that_are_a_parameter_are_written() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(6, 6, bias=False)
            self.seen = nn.Parameter(torch.tensor([1, 5, 2], dtype=torch.int8), requires_grad=False)

        def forward(self, x: Any) -> Any:
            return self.w(x)

    module = Counted()
    found = derive(lambda w, x: x @ w["w"], module, {"w": (6, 6)}, floats(4, 6))
    written = write_rules(found, model_of_module(module, "Model"))
    assert found.complete and not written.open and "constant: seen" in written.text


class Bases(torch.nn.Module):
    """A seasonal block of N-BEATS: cosines and sines are two tables that do not learn, and the JAX model has both in one."""

    def __init__(self, of: Any, *, buffers: bool) -> None:
        super().__init__()
        self.m = torch.nn.Linear(WIDTH, WIDTH)
        self.o = torch.nn.Linear(T, 3, bias=False)
        for name, array in zip(("c", "s"), np.split(of.T, 2), strict=True):
            if buffers:
                self.register_buffer(name, torch.as_tensor(array))
            else:
                self.register_parameter(name, torch.nn.Parameter(torch.as_tensor(array), requires_grad=False))

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.m(x))
        return self.o(y[..., :HALF] @ self.c + y[..., HALF:] @ self.s)


def _bases(w: Any, x: Any) -> Any:
    return jax.nn.relu(x @ w["a"] + w["d"]) @ table(1e4, False, False).T @ w["o"]


BASES = {"a": (WIDTH, WIDTH), "d": (WIDTH,), "o": (T, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [True, False])
def test_two_tables_that_the_jax_model_has_in_one(buffers: bool) -> None:
    module = Bases(table(1e4, False, False), buffers=buffers)
    found = derive(_bases, module, BASES)
    rules(found, module)
    assert grades(found) == {Grade.DERIVED}
    assert {t.parts[0].arithmetic for t in found.tensors if t.name in "cs"} == {Arithmetic.OWN}


@pytest.mark.slow
def test_one_of_two_tables_with_other_numbers_is_a_difference() -> None:
    found = derive(_bases, Bases(table(1e3, False, False), buffers=True), BASES)
    assert not found.complete and grades(found) <= {*UNPROVEN, Grade.TIED}
    assert "table" in found.differences[0].problem or found.differences[0].site.where.startswith("test_own_buffers")
