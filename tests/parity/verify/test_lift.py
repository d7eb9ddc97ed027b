"""Lifting to float64: what code casts, rounds or asks for in a narrower float is float64, and what cannot be is named."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax import lax
from torch import nn

from convert.numerics.lift_jax import lift
from convert.numerics.lift_torch import lifted
from support.marks import slow_but

X = np.random.default_rng(0).normal(0, 2, (3, 4))
F = nn.functional
EXACT = 1e-15  # two float64 computations of one formula


def relative(got: Any, want: Any) -> float:
    got = np.asarray(got)
    assert got.dtype == np.float64, got.dtype
    assert got.shape == np.shape(want), (got.shape, np.shape(want))
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-300))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def scan(x: Any) -> Any:
    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        carry = (carry.astype(jnp.float32) * 0.1 + row).astype(jnp.float32)
        return carry, carry.astype(jnp.bfloat16)

    return lax.scan(step, jnp.zeros(4, jnp.float32), x)


def scanned() -> Any:
    carry, rows = np.zeros(4), []
    for row in X:
        carry = carry * 0.1 + row
        rows.append(carry)
    return carry, np.stack(rows)


def while_loop(x: Any) -> Any:
    state = lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * jnp.float32(0.1)), (0, x.astype(jnp.float32))
    )
    return state[1]


def cond(x: Any) -> Any:
    return lax.cond(x[0, 0] > 100, lambda v: v, lambda v: v.astype(jnp.bfloat16).astype(v.dtype) * 0.3, x)


def switch(x: Any) -> Any:
    return lax.switch(1, [lambda v: v, lambda v: v * jnp.float32(0.3)], x.astype(jnp.float32))


@jax.custom_jvp
def scaled(x: Any) -> Any:
    return x.astype(jnp.float32) * 0.7


scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0]))


@jax.custom_vjp
def shifted(x: Any) -> Any:
    return x.astype(jnp.float32) + 0.7


shifted.defvjp(lambda x: (shifted(x), None), lambda _, g: (g,))


def attention(x: Any) -> Any:
    q = x[None, :, None, :].astype(jnp.bfloat16)
    return jax.nn.dot_product_attention(q, q, q)[0, :, 0, :]


def rms_norm(x: Any) -> Any:
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


CASES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "jit": (jax.jit(lambda x: x.astype(jnp.float32) / 3), X / 3),
    "jit in jit": (jax.jit(lambda x: jax.jit(lambda y: y.astype("float32") * 0.1)(x) + 1), X * 0.1 + 1),
    "scan": (scan, scanned()),
    "scan without xs": (
        lambda x: lax.scan(lambda c, _: (c * 0.5 + 0.1, None), x.astype(jnp.float32), None, length=2)[0],
        (X * 0.5 + 0.1) * 0.5 + 0.1,
    ),
    "scan of length zero": (lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=0)[0], X),
    "while": (while_loop, X * 0.1 * 0.1 * 0.1),
    "fori": (lambda x: lax.fori_loop(0, 3, lambda i, v: v + i * jnp.float32(0.1), x.astype(jnp.float32)), X + 0.3),
    "vmapped while": (
        lambda x: jax.vmap(lambda r: lax.while_loop(lambda v: v[0] < 0, lambda v: v + jnp.float32(100), r))(x),
        np.where(X[:, :1] < 0, X + 100, X),
    ),
    "cond": (cond, X * 0.3),
    "switch": (switch, X * 0.3),
    "map": (lambda x: lax.map(lambda r: r.astype(jnp.float16) * 0.1, x), X * 0.1),
    "relu": (lambda x: jax.nn.relu(x.astype(jnp.float32)), np.maximum(X, 0)),
    "softplus": (lambda x: jax.nn.softplus(x.astype(jnp.bfloat16)), np.logaddexp(X, 0)),
    "swish": (lambda x: jax.nn.swish(x.astype(jnp.float16)), X / (1 + np.exp(-X))),
    "custom_jvp": (scaled, X * 0.7),
    "custom_vjp": (shifted, X + 0.7),
    "checkpoint": (jax.checkpoint(lambda x: x.astype(jnp.float32) * 0.1), X * 0.1),
    "grad": (jax.grad(lambda x: (x.astype(jnp.float32) ** 2).sum() * 0.1), 0.2 * X),
    "astype": (lambda x: x.astype(jnp.float32), X),
    "astype by name": (lambda x: x.astype("bfloat16"), X),
    "scalar literal": (lambda x: x.astype(jnp.float32) * 0.1, X * 0.1),
    "float32 scalar": (lambda x: x.astype(jnp.float32) * jnp.float32(0.1), X * 0.1),
    "bfloat16 scalar": (lambda x: x.astype(jnp.bfloat16) * jnp.bfloat16(0.1), X * 0.1),
    "full": (lambda x: x + jnp.full(4, 0.1, jnp.float32), X + 0.1),
    "softmax": (lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype), softmax(X)),
    "attention": (attention, softmax(X @ X.T / 2) @ X),
    "rms norm": (rms_norm, X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-6)),
    "iota": (lambda x: x[0] * (lax.iota(jnp.float32, 4) / 3), X[0] * np.arange(4) / 3),
    "arange": (lambda x: jnp.sin(jnp.arange(4, dtype=jnp.float32) / 3) + x[0], np.sin(np.arange(4) / 3) + X[0]),
    "linspace": (lambda x: x[0] + jnp.linspace(0, 1, 4, dtype=jnp.float32), X[0] + np.linspace(0, 1, 4)),
    "one_hot": (lambda x: x @ jax.nn.one_hot(jnp.arange(4), 4, dtype=jnp.bfloat16), X),
    "preferred dtype": (lambda x: jnp.dot(x, x.T, preferred_element_type=jnp.float32), X @ X.T),
    "algorithm": (
        lambda x: lax.dot(x.astype(jnp.float32), x.T.astype(jnp.float32), precision=lax.DotAlgorithmPreset.F32_F32_F32),
        X @ X.T,
    ),
    "scatter": (
        lambda x: jnp.zeros((3, 4), jnp.float32).at[1].add(x[0].astype(jnp.float32)),
        X * 0 + [[0], [1], [0]] * X[0],
    ),
    "cumulative": (lambda x: jnp.cumsum(x.astype(jnp.float32), axis=0, dtype=jnp.float32), np.cumsum(X, axis=0)),
    "sort": (lambda x: jnp.sort(x.astype(jnp.bfloat16), axis=1), np.sort(X, axis=1)),
    "convolution": (
        lambda x: jnp.convolve(x[0].astype(jnp.float32), x[1].astype(jnp.float32), precision="highest"),
        np.convolve(X[0], X[1]),
    ),
    "variance": (lambda x: jnp.var(x.astype(jnp.float32), axis=1), X.var(axis=1)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), X),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x.astype(jnp.float32)).astype(jnp.complex64)), np.abs(np.fft.fft(X))),
    "a tree": (lambda x: {"b": [x.astype(jnp.float32)], "a": x[0, 0]}, {"b": [X], "a": X[0, 0]}),
}


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "staged"])
@pytest.mark.parametrize("name", slow_but(list(CASES)[::3], CASES))
def test_jax_computes_in_float64(name: str, staged: bool) -> None:
    function, want = CASES[name]
    run = lift(function, staged=staged)
    got = run(X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(a, b) < EXACT
    assert run.unlifted == ()
    assert run.staged == (staged or name == "scan of length zero"), "a scan of length zero cannot run as Python"


@pytest.mark.slow
def test_float32_is_what_lifting_is_needed_for() -> None:
    """The same cases unlifted: almost all are rounded, so the test above can fail."""
    with jax.enable_x64(True):
        rounded = {
            name
            for name, (function, want) in CASES.items()
            if name != "grad"
            and max(
                relative(np.asarray(a, np.float64), b)
                for a, b in zip(jax.tree.leaves(function(jnp.asarray(X))), jax.tree.leaves(want), strict=True)
            )
            > 1e-10
        }
    exact = {"scan of length zero", "vmapped while", "one_hot", "grad"}
    assert rounded == CASES.keys() - exact, rounded ^ (CASES.keys() - exact)


def computed(x: Any) -> Any:
    """Scalars that Python computes and float32 rounds on the way: praxis' positional embedding has them."""
    count = jnp.asarray(3, dtype=jnp.float32)
    return x.astype(jnp.float32) * (math.log(10_000.0) / jnp.maximum(count - 1, 1)) / math.sqrt(80)


def test_eager_keeps_scalars_that_python_computed() -> None:
    want = X * (math.log(10_000.0) / 2) / math.sqrt(80)
    assert relative(lift(computed)(X), want) < EXACT
    # Staged, they were rounded in the trace, and their shortest decimal is not what was meant.
    assert 1e-9 < relative(lift(computed, staged=True)(X), want) < 1e-6


def test_eager_runs_what_is_checkpointed_within() -> None:
    """What was wrapped before the run is evaluated by its trace, which has rounded scalars."""

    def rematted(x: Any) -> Any:
        return jax.checkpoint(computed, prevent_cse=False)(jax.remat(prevent_cse=False)(computed)(x))

    want = X * ((math.log(10_000.0) / 2) / math.sqrt(80)) ** 2
    before = (jax.checkpoint, jax.remat)
    assert relative(lift(rematted)(X), want) < EXACT
    assert (jax.checkpoint, jax.remat) == before
    wrapped = jax.checkpoint(computed)
    assert 1e-9 < relative(lift(lambda x: wrapped(wrapped(x)))(X), want) < 1e-6


@pytest.mark.parametrize("staged", [False, True])
def test_the_constant_of_gelu_is_known(staged: bool) -> None:
    """Code that asserts float32, as openpi's does, is evaluated by its trace."""

    def gelu(x: Any) -> Any:
        return jax.nn.gelu(x.astype(jnp.float32), approximate=True)

    want = X * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
    assert relative(lift(gelu, staged=staged)(X), want) < EXACT


def test_functions_of_computed_constants_are_lifted() -> None:
    """A rotary table from Python scalars, in float32 throughout."""

    def rope(x: Any) -> Any:
        timescale = 10_000.0 ** (2 * jnp.arange(2, dtype=jnp.float32) / 4)
        angle = jnp.arange(3, dtype=jnp.float32)[:, None] / timescale
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    angle = np.arange(3)[:, None] / 10_000.0 ** (np.arange(2) / 2)
    a, b = np.split(X, 2, axis=-1)
    want = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)
    for staged in (False, True):
        assert relative(lift(rope, staged=staged)(X), want) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True], ids=["eager", "staged"])
def test_integers_booleans_and_keys_are_left_alone(staged: bool) -> None:
    def integers(x: Any, n: Any, mask: Any, key: Any) -> Any:
        bits = jax.random.bits(key, (2,), jnp.uint32)
        return n * 2, ~mask, jnp.argmax(x, axis=1), (x > 0).astype(jnp.int8), bits, jnp.arange(3, dtype=jnp.int32)

    n, mask, key = np.arange(3, dtype=np.int32), np.array([True, False]), jax.random.key(1)
    got = lift(integers, staged=staged)(X, n, mask, key)
    assert [np.asarray(x).dtype.name for x in got] == ["int32", "bool", "int64", "int8", "uint32", "int32"]
    want = (n * 2, ~mask, X.argmax(1), X > 0, jax.random.bits(key, (2,), jnp.uint32), np.arange(3))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_random_numbers_of_float32_are_named() -> None:
    """They are made of 32 bits, so they cannot have more; as many as code asks for is what it gets."""
    run = lift(lambda key: jax.random.normal(key, (5,), jnp.float32))
    run(jax.random.key(0))
    assert "bitcast_convert_type" in run.unlifted


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "staged"])
def test_bits_of_a_float32_are_named(staged: bool) -> None:
    run = lift(lambda x: lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32), staged=staged)
    np.testing.assert_array_equal(run(X), X.astype(np.float32).view(np.uint32))
    assert run.unlifted == ("bitcast_convert_type",)


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "staged"])
def test_what_refuses_float64_runs_as_it_is_and_is_named(staged: bool) -> None:
    def narrow(x: np.ndarray) -> np.ndarray:
        if x.dtype != np.float32:
            raise TypeError(f"float32 only, not {x.dtype}")
        return np.asarray(x * np.float32(2))

    def function(x: Any) -> Any:
        return jax.pure_callback(narrow, jax.ShapeDtypeStruct((3, 4), jnp.float32), x.astype(jnp.float32)) / 3

    run = lift(function, staged=staged)
    assert 1e-9 < relative(run(X), X * 2 / 3) < 1e-6
    assert run.unlifted == ("pure_callback",)


@pytest.mark.parametrize("staged", [False, True], ids=["eager", "staged"])
def test_constants_that_were_rounded_before_are_named(staged: bool) -> None:
    table = np.sin(np.arange(4)).astype(np.float32)
    run = lift(lambda x: x.astype(jnp.float32) * table, staged=staged)
    assert relative(run(X), X * table.astype(np.float64)) < EXACT
    assert run.unlifted == ("constant float32[4]",)
    exact = np.array([1, 0.5, -3, np.inf], np.float32)  # nothing was lost
    run = lift(lambda x: x.astype(jnp.float32)[:, :3] * exact[:3], staged=staged)
    run(X)
    assert run.unlifted == ()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arguments_are_lifted(dtype: Any) -> None:
    x = X.astype(dtype)
    assert relative(lift(lambda v: v / 3)(x), x.astype(np.float64) / 3) < EXACT


def test_code_that_insists_on_its_dtype_is_staged() -> None:
    def strict(x: Any) -> Any:
        x = x.astype(jnp.float32)
        assert x.dtype == jnp.float32
        return x * 0.1

    run = lift(strict)
    assert relative(run(X), X * 0.1) < EXACT
    assert run.staged


def test_staged_code_that_needs_float32_arguments_gets_them_in_the_trace() -> None:
    def total(x: Any) -> Any:  # the carry is float32, so must x be
        return lax.scan(lambda c, row: (c + row * 0.1, None), jnp.zeros(4, jnp.float32), x)[0]

    x = X.astype(np.float32)
    assert relative(lift(total, staged=True)(x), x.astype(np.float64).sum(0) * 0.1) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True])
def test_indices_of_numpy_that_jax_made_narrow_before(staged: bool) -> None:
    """JAX remembers the int32 that it made of them where float64 was not enabled."""
    rows = np.array([1, 0, -1], np.int64)

    def picked(x: Any) -> Any:
        return x[rows] * 0.1

    jax.eval_shape(picked, X)
    run = lift(picked, staged=staged)
    assert relative(run(X), X[rows] * 0.1) < EXACT
    assert run.staged is staged


def test_a_jax_without_the_interpreter_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.numerics.lift_jax.set_current_trace", None)
    run = lift(lambda x: x.astype(jnp.float32) * 0.1)
    assert relative(run(X), X * 0.1) < EXACT
    assert run.staged


def test_errors_of_the_function_come_through() -> None:
    def broken(x: Any) -> Any:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        lift(broken)(X)


def test_order_of_an_ordered_dict_is_kept() -> None:
    for staged in (False, True):
        got = lift(lambda x: OrderedDict(b=x, a=x, c=x), staged=staged)(X)
        assert list(got) == ["b", "a", "c"]


def test_jax_is_as_it_was_afterwards() -> None:
    """Neither the configuration nor what jit remembers of a function changes."""

    @jax.jit
    def f(x: Any) -> Any:
        return x.astype(jnp.float32) * 0.1

    with jax.enable_x64(True):
        before = f(jnp.asarray(X))
    for staged in (False, True):
        lift(f, staged=staged)(X)
    with jax.enable_x64(True):
        after = f(jnp.asarray(X))
    assert before.dtype == after.dtype == jnp.float32
    assert not jax.config.read("jax_enable_x64") and jnp.zeros(1).dtype == jnp.float32
    assert jax.config.jax_default_matmul_precision is None


# ---- torch


class Norm(nn.Module):
    """With everything that upstream code does to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.1, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(0.1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x32 * self.weight.float()).type_as(x) * self.scale


def sdpa(x: torch.Tensor) -> torch.Tensor:
    q = x.to(torch.bfloat16)[None, None]
    return F.scaled_dot_product_attention(q, q, q)[0, 0]


def in_place(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(3, 4, dtype=torch.float32)
    out[1:] = x[1:].half()
    out += 0.1
    return out.mul_(torch.tensor(0.1, dtype=torch.float32))


TORCH_CASES: dict[str, tuple[Callable[[torch.Tensor], Any], np.ndarray]] = {
    "float": (lambda x: x.float() / 3, X / 3),
    "half and bfloat16": (lambda x: x.half() + x.bfloat16(), 2 * X),
    "to": (lambda x: x.to(torch.bfloat16), X),
    "to by keyword": (lambda x: x.to(dtype=torch.float16), X),
    "to another's": (lambda x: x.to(torch.zeros(1, dtype=torch.float16)), X),
    "type": (lambda x: x.type(torch.float32), X),
    "type_as": (lambda x: x.type_as(torch.ones(1, dtype=torch.float32)), X),
    "softmax": (lambda x: F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype), softmax(X)),
    "sum": (lambda x: x.sum(-1, dtype=torch.float32), X.sum(-1)),
    "arange": (lambda x: x[0] + torch.arange(4, dtype=torch.float32) / 3, X[0] + np.arange(4) / 3),
    "tensor": (lambda x: x * torch.tensor(0.1, dtype=torch.float32), X * 0.1),
    "full_like": (lambda x: x + torch.full_like(x, 0.1, dtype=torch.float32), X + 0.1),
    "new_full": (lambda x: x + x.new_full((4,), 0.1, dtype=torch.bfloat16), X + 0.1),
    "ones": (lambda x: x * (torch.ones(4, dtype=torch.float32) / 3), X / 3),
    "attention": (sdpa, softmax(X @ X.T / 2) @ X),
    "layer_norm": (
        lambda x: F.layer_norm(x.float(), (4,), eps=1e-6),
        (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-6),
    ),
    "softplus": (lambda x: F.softplus(x * 0.1 + 20.2), np.logaddexp(X * 0.1 + 20.2, 0)),  # linear above 20, in float32
    "linear": (lambda x: F.linear(x.float(), torch.eye(4, dtype=torch.float32) * 0.1), X * 0.1),
    "in place": (in_place, np.stack([np.zeros(4), X[1], X[2]]) * 0.1 + 0.01),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x.bfloat16(), x.bfloat16()), X @ X.T),
    "complex": (lambda x: torch.fft.fft(x.float()).to(torch.complex64).abs(), np.abs(np.fft.fft(X))),
    "module": (
        lambda x: Norm()(x),
        X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-6) * 0.01,
    ),
}


@pytest.mark.parametrize("name", TORCH_CASES)
def test_torch_computes_in_float64(name: str) -> None:
    function, want = TORCH_CASES[name]
    with lifted() as mode, torch.no_grad():
        got = function(torch.tensor(X))
    assert relative(got.numpy(), want) < EXACT
    assert mode.unlifted == set()
    rounded = np.asarray(function(torch.tensor(X)).detach().double())
    assert np.abs(rounded - want).max() > 1e-9, "nothing needed lifting"


def test_a_limit_of_softplus_that_the_code_gives_is_kept() -> None:
    with lifted():
        assert F.softplus(torch.tensor([5.0, 0.5]), threshold=4).tolist()[0] == 5.0


GROUPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[int] | None]] = {
    "rows": ((12, 4), (3, 4, 8), [5, 8, 12]),
    "columns": ((2, 4, 4), (4, 12), [4, 12]),
    "what is summed over": ((4, 8), (8, 4), [3, 8]),
    "none": ((2, 4, 4), (2, 4, 8), None),
}


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch is older")
@pytest.mark.parametrize("name", GROUPS)
def test_products_of_groups_have_float64(name: str) -> None:
    (*shapes, ends), rng = GROUPS[name], np.random.default_rng(0)
    one, other = (rng.normal(size=shape) for shape in shapes)
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)

    def product(dtype: torch.dtype) -> np.ndarray:
        return torch._grouped_mm(torch.tensor(one, dtype=dtype), torch.tensor(other, dtype=dtype), offs=offsets).numpy()

    with lifted() as mode, torch.no_grad():
        got = product(torch.float64)
    want = product(torch.float32)
    assert mode.unlifted == set() and got.dtype == np.float64
    assert relative(got, want) < 1e-6
    assert not np.array_equal(got, want), "the kernel itself rounds"


def test_a_module_built_within_is_float64_and_trains_nothing_else() -> None:
    with lifted():
        module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Norm())
    assert {value.dtype for value in module.state_dict().values()} == {torch.float64}
    assert torch.get_default_dtype() == torch.float32 and nn.Linear(1, 1).weight.dtype == torch.float32


def test_a_module_built_without_is_computed_in_float64_all_the_same() -> None:
    """Its weights are data: they stay as they are, and what is computed with them is not rounded."""
    linear = nn.Linear(4, 4)
    weight, bias = (p.detach().double().numpy() for p in (linear.weight, linear.bias))
    with lifted() as mode, torch.no_grad():
        got = linear(torch.tensor(X, dtype=torch.float64))
    assert relative(got.numpy(), X @ weight.T + bias) < EXACT
    assert mode.unlifted == set() and linear.weight.dtype == torch.float32


def test_data_that_comes_in_narrow_is_lifted() -> None:
    narrow = X.astype(np.float32)
    with lifted() as mode, torch.no_grad():
        for x in (torch.tensor(narrow), torch.from_numpy(narrow), torch.as_tensor(narrow)):
            assert relative((x / 3).numpy(), narrow.astype(np.float64) / 3) < EXACT
    assert mode.unlifted == set()


def test_integers_and_booleans_of_torch_are_left_alone() -> None:
    with lifted():
        x = torch.tensor([1, 2])
        assert (x * 2).dtype == torch.int64 and (x > 1).dtype == torch.bool
        assert torch.arange(3, dtype=torch.int32).dtype == torch.int32
        assert x.to(torch.uint8).dtype == torch.uint8


def test_torch_operations_that_stay_narrow_are_named() -> None:
    library = torch.library.Library("lift_test", "DEF")
    library.define("half_norm(Tensor x) -> Tensor")
    library.impl("half_norm", lambda x: (x.float() / 3).half(), "CPU")
    with lifted() as mode, torch.no_grad():
        got = torch.ops.lift_test.half_norm(torch.tensor(X))
        assert got.dtype == torch.float16
        assert (got * 1).dtype == torch.float64
    assert mode.unlifted == {"lift_test.half_norm.default"}


def test_what_is_written_into_narrow_tensors_is_named() -> None:
    """A cache that was made before: what is put there is rounded."""
    cache = torch.zeros(3, 4)
    with lifted() as mode, torch.no_grad():
        cache.copy_(torch.tensor(X))
        assert mode.unlifted == {"aten.copy_.default"}
        assert cache[0].dtype == torch.float32, "a view is no rounding"
        assert mode.unlifted == {"aten.copy_.default"}


def test_bits_of_a_float_are_named() -> None:
    with lifted() as mode, torch.no_grad():
        bits = torch.tensor(X).float().view(torch.int32)
        back = bits.view(torch.float32)
    np.testing.assert_array_equal(bits.numpy(), X.astype(np.float32).view(np.int32))
    np.testing.assert_array_equal(back.numpy(), X.astype(np.float32))
    assert mode.unlifted == {"aten.view.dtype"}


def test_default_dtype_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="broken"), lifted():
        raise ValueError("broken")
    assert torch.get_default_dtype() == torch.float32


def test_a_module_is_copied_in_float64_with_its_buffers() -> None:
    module = torch.nn.BatchNorm1d(3)
    module.mask = module.running_var  # a name more for the same tensor, as a plain attribute
    with lifted() as mode:
        made = copy.deepcopy(module)
    assert made.mask is made.running_var and made.mask is not module.mask
    assert {x.dtype for x in (made.weight, made.running_var)} == {torch.float64}
    assert module.running_var.dtype == torch.float32 and not mode.unlifted
    assert made.weight.requires_grad and torch.equal(made.running_var, torch.ones(3, dtype=torch.float64))
