"""What NumPy gives for a JAX primitive is what XLA gives: the same dtype, shape and values, also at the edges of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from convert.numerics import numpy_primitives

RNG = np.random.default_rng(0)
EDGES = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 1e-300, 1e300, -1e300, 700.0, -800.0, np.inf, -np.inf, np.nan])
X, Y = np.meshgrid(EDGES, EDGES)
INTS = np.array([0, 1, -1, 7, 2**31 - 1, -(2**31)], np.int32)
N, M = np.meshgrid(INTS, INTS)
BITS = np.array([[True, False], [True, True]])
Z = RNG.normal(size=(2, 3, 4))
INDEX = np.int32(1)

floats = {name: getattr(lax, f"{name}_p") for name in ["sqrt", "rsqrt", "exp", "exp2", "log", "log1p", "expm1", "tanh", "sin", "cos", "tan", "floor", "ceil", "logistic", "is_finite"]}  # fmt: skip
pairs = {
    name: getattr(lax, f"{name}_p")
    for name in ["add", "sub", "mul", "div", "pow", "max", "min", "eq", "ne", "lt", "le", "gt", "ge"]
}
whole = {name: pairs[name] for name in pairs if name not in ("div", "pow")}
bitwise = {name: getattr(lax, f"{name}_p") for name in ("and", "or", "xor")}


def plain(name: str, primitive: Any) -> Callable[..., Any]:
    takes = ("exp", "exp2", "log", "log1p", "expm1", "tanh", "sin", "cos", "tan", "logistic", "sqrt", "rsqrt")
    more = {"accuracy": None} if name in takes else {"out_dtype": None} if name == "mul" else {}
    return lambda *args: primitive.bind(*args, **more)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{name: (plain(name, primitive), (EDGES,)) for name, primitive in floats.items()},
    **{name: (plain(name, primitive), (X, Y)) for name, primitive in pairs.items()},
    **{f"{name} of integers": (plain(name, primitive), (N, M)) for name, primitive in whole.items()},
    **{f"{name} of truth values": (plain(name, p), (BITS, BITS.T)) for name, p in bitwise.items()},
    **{f"{name} of integers": (plain(name, primitive), (N, M)) for name, primitive in bitwise.items()},
    "a sum of unequal shapes": (lax.add_p.bind, (Z, Z[:1])),
    "add_any": (lambda x: jax.vjp(lambda x: (x, x), x)[1]((x, x))[0], (EDGES,)),
    "neg": (lax.neg, (EDGES,)),
    "neg of integers": (lax.neg, (INTS,)),
    "sign": (lax.sign, (EDGES,)),
    "abs": (lax.abs, (EDGES,)),
    "square": (lax.square, (EDGES,)),
    "not": (lax.bitwise_not, (BITS,)),
    "not of integers": (lax.bitwise_not, (INTS,)),
    "copy": (lambda x: jnp.array(x, copy=True), (EDGES,)),
    "integer_pow": (lambda x: [lax.integer_pow(x, k) for k in (-3, -1, 0, 2, 5)], (EDGES,)),
    "clamp": (lax.clamp, (-1.0, EDGES, 2.0)),
    "clamp of integers": (lax.clamp, (np.int32(-3), INTS, np.int32(4))),
    "select_n": (lax.select, (BITS, Z[0, :2, :2], Z[1, :2, :2])),
    "select_n by one value": (lambda p, x, y: lax.select_n(p, x, y), (np.True_, Z, -Z)),
    "convert_element_type": (lambda x: [x.astype(kind) for kind in (np.float64, np.int8, np.uint16, bool)], (INTS,)),
    "convert_element_type of floats": (lambda x: x.astype(bool), (EDGES,)),
    "dot_general": (lambda x, y: jnp.einsum("abc,dac->bad", x, y), (Z, RNG.normal(size=(5, 2, 4)))),
    "dot_general of two sums": (lambda x, y: jnp.einsum("abc,cb->a", x, y), (Z, Z[0].T)),
    "dot_general without a sum": (lambda x, y: lax.dot_general(x, y, (((), ()), ((0,), (0,)))), (Z, Z[:, 0])),
    "reduce": (lambda x: [f(x, axis=a) for f in (jnp.sum, jnp.max, jnp.min) for a in (0, (1, 2), None)], (Z,)),
    "reduce at the edges": (lambda x: [x.max(0), x.min(1), jnp.nanmax(x)], (X,)),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (5, 2, 3, 4), (1, 2, 3)), (Z,)),
    "broadcast_in_dim of one": (lambda x: lax.broadcast_in_dim(x, (2, 6, 4), (0, 1, 2)), (Z[:, :1],)),
    "reshape": (lambda x: x.reshape(4, 6), (Z,)),
    "transpose": (lambda x: x.transpose(2, 0, 1), (Z,)),
    "squeeze": (lambda x: x[None, :, None].squeeze((0, 2)), (Z,)),
    "rev": (lambda x: lax.rev(x, (0, 2)), (Z,)),
    "slice": (lambda x: [lax.slice(x, (0, 1, 0), (2, 3, 4), (1, 1, 3)), lax.slice(x, (0, 1, 0), (2, 1, 4))], (Z,)),
    "concatenate": (lambda x: jnp.concatenate([x, x[:, :1]], 1), (Z,)),
    "split": (lambda x: lax.split(x, (1, 3), 2), (Z,)),
    "pad": (lambda x: lax.pad(x, 7.0, ((0, 1, 0), (2, 0, 0), (0, 0, 0))), (Z,)),
    "pad between": (lambda x: lax.pad(x, 7.0, ((0, 1, 2), (-1, 0, 0), (0, 0, 0))), (Z,)),
    "dynamic_slice": (lambda x, k: lax.dynamic_slice(x, (k, k, k), (1, 2, 3)), (Z, INDEX)),
    "dynamic_slice beyond": (lambda x, k: lax.dynamic_slice(x, (-k, 9 * k, k), (1, 2, 3)), (Z, INDEX)),
    "dynamic_update_slice": (lambda x, k: lax.dynamic_update_slice(x, -x[:1, :2], (k, 9 * k, -k)), (Z, INDEX)),
    "iota": (lambda: lax.broadcasted_iota(np.int32, (2, 3, 4), 1), ()),
}
EVALUATED: set[str] = set()


@pytest.mark.parametrize("case", CASES)
def test_numpy_gives_what_xla_gives(case: str) -> None:
    function, args = CASES[case]
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(function)(*args)
        values: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values |= zip(closed.jaxpr.invars, map(jnp.asarray, args), strict=True)
        for eqn in closed.jaxpr.eqns:
            ins = [var.val if isinstance(var, core.Literal) else values[var] for var in eqn.invars]
            out = eqn.primitive.bind(*ins, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
            values |= zip(eqn.outvars, out, strict=True)
            if eqn.primitive.name not in numpy_primitives.NAMES:
                continue
            operands = [np.asarray(x, var.aval.dtype) for x, var in zip(ins, eqn.invars, strict=True)]
            made = numpy_primitives.evaluate(eqn.primitive.name, operands, eqn.params)
            if made is None:
                continue
            EVALUATED.add(eqn.primitive.name)
            for ours, theirs in zip(made, map(np.asarray, out), strict=True):
                assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), eqn
                if ours.dtype.kind == "f":
                    np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-307, err_msg=str(eqn))
                else:
                    np.testing.assert_array_equal(ours, theirs, err_msg=str(eqn))


@pytest.mark.slow
def test_every_function_is_compared() -> None:
    for case in CASES:  # where this test runs alone
        test_numpy_gives_what_xla_gives(case)
    assert numpy_primitives.NAMES - EVALUATED - {"copy_p", "stop_gradient"} == set()
