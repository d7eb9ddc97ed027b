"""Evaluates a JAX function in float64 throughout, although its code casts to float32 in the middle.

Two ways, both with every narrower float (conversions, output dtypes, iotas, constants) replaced by float64:

*Eager*: the function runs as Python, without jit and with loops unrolled, and each primitive is lifted as it comes. What
Python sees is float64, so that a scalar which it multiplies with is not rounded to float32 on the way. What NumPy rounds
stays rounded: arrays that it gives are named in `Lifted.unlifted`, scalars such as ``np.float32(0.1)`` cannot be seen.

*Staged*: the function is traced as it is, and its jaxpr evaluated. Loops stay loops, and code that insists on float32 works.
Python's scalars were rounded in the trace; they get their decimal digits back, which is exact for ``0.1`` and not for
``math.log(1e4)``. It is also what becomes of loops that the eager way finds already traced.

What remains between two lifted runs is a difference of the functions, not of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.extend import core

try:  # how JAX itself finds what interprets a primitive; without it there is the staged way
    from jax._src import core as interpreter

    _EvalTrace: Any = interpreter.EvalTrace
    _set_current_trace: Any = interpreter.set_current_trace
except (ImportError, AttributeError):
    _EvalTrace, _set_current_trace = object, None

# Calls whose body is evaluated in place; the custom derivative rules do not matter here.
_INLINE = {"jit", "pjit", "closed_call", "core_call", "core_closed_call", "custom_jvp_call", "custom_vjp_call"}
_INLINE |= {"custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint", "custom_lin", "composite"}
# What a primitive raises that exists for its own dtypes only: callbacks, foreign and Pallas kernels.
_REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)


def _narrow(dtype: Any) -> bool:
    """Whether a dtype is floating, real or complex, and narrower than float64."""
    if not isinstance(dtype, np.dtype):
        if not (isinstance(dtype, type) and issubclass(dtype, np.generic)) and not hasattr(dtype, "dtype"):
            return False  # keys of random numbers have dtypes of their own
        try:
            dtype = np.dtype(dtype)
        except TypeError:
            return False
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return bool(dtype.itemsize < 16)
    return bool(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 8)


def _wide(dtype: Any) -> Any:
    return np.dtype("complex128" if jnp.issubdtype(dtype, jnp.complexfloating) else "float64")


def _up(x: Any) -> Any:
    return jnp.asarray(x).astype(_wide(x.dtype)) if hasattr(x, "dtype") and _narrow(x.dtype) else x


def _digits(x: Any) -> float:
    """The shortest decimal that rounds to this scalar: most likely what was typed."""
    for precision in range(1, 18):
        typed = float(f"{float(x):.{precision}g}")
        if np.asarray(typed).astype(x.dtype) == x:
            return typed
    return float(x)  # NaN


class _Lifter:
    """Evaluates primitives in float64.

    Attributes:
        unlifted: what gave a rounded value all the same.
    """

    def __init__(self) -> None:
        self.unlifted: set[str] = set()

    def constant(self, x: Any) -> Any:
        """A value that no lifted primitive gave: an argument to a primitive, a literal or constant of a jaxpr."""
        if not hasattr(x, "dtype") or not _narrow(x.dtype) or isinstance(x, jax.core.Tracer):
            return _up(x)
        value = np.asarray(x)
        if value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.floating):
            return jnp.asarray(_digits(value), jnp.float64)
        wide = value.astype(_wide(value.dtype))
        if not np.array_equal(wide, np.asarray(value, jnp.bfloat16).astype(wide.dtype), equal_nan=True):
            self.unlifted.add(f"constant {value.dtype}{list(value.shape)}")  # more digits than are exact by intent
        return jnp.asarray(wide)

    def bind(self, primitive: Any, ins: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        """The primitive's results on arguments that are float64 already."""
        name = primitive.name
        if name in _INLINE:
            return self.closed(params.get("jaxpr") or params.get("call_jaxpr") or params["fun_jaxpr"], ins)
        if name in ("scan", "while", "cond"):
            return list({"scan": self.scan, "while": self.loop, "cond": self.branch}[name](params, ins))
        if name == "reduce_precision":
            return [ins[0]]
        try:
            if name == "bitcast_convert_type":
                return self.bits(primitive, ins[0], params)
            out = primitive.bind(*ins, **{key: self.param(value) for key, value in params.items()})
        except _REFUSALS:
            narrow = [x.astype(jnp.float32) if getattr(x, "dtype", None) == jnp.float64 else x for x in ins]
            out = primitive.bind(*narrow, **params)
            self.unlifted.add(name)
        return self.results(name, out if primitive.multiple_results else [out])

    def param(self, value: Any) -> Any:
        """A parameter, lifted: dtypes, and jaxprs such as what a scatter combines by. An algorithm of products goes."""
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            avals = [
                jax.ShapeDtypeStruct(v.shape, _wide(v.dtype) if _narrow(v.dtype) else v.dtype) for v in _avals(value)
            ]
            lifted = jax.make_jaxpr(lambda *args: self.closed(value, args))(*avals)
            return lifted if isinstance(value, core.ClosedJaxpr) or lifted.consts else lifted.jaxpr
        if "DotAlgorithm" in type(value).__name__:
            return jax.lax.Precision.HIGHEST
        return _wide(value) if _narrow(value) else value

    def results(self, name: str, out: Sequence[Any]) -> list[Any]:
        """Results in float64; those that are not by themselves are noted."""
        if any(hasattr(x, "dtype") and _narrow(x.dtype) for x in out):
            self.unlifted.add(name)
        return [_up(x) for x in out]

    def bits(self, primitive: Any, x: Any, params: dict[str, Any]) -> list[Any]:
        """Bits of a float, or a float of bits, are those of the dtype that the code knows."""
        width = np.dtype(params["new_dtype"]).itemsize
        if x.dtype == jnp.float64 and width < 8:
            self.unlifted.add(primitive.name)
            x = x.astype({4: jnp.float32, 2: jnp.bfloat16}[width])
        return self.results(primitive.name, [primitive.bind(x, **params)])

    # ---- jaxprs

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        env |= zip(jaxpr.invars, map(_up, args), strict=True)

        def read(var: Any) -> Any:
            return self.constant(_typed(var)) if isinstance(var, core.Literal) else env[var]

        for eqn in jaxpr.eqns:
            env |= zip(
                eqn.outvars, self.bind(eqn.primitive, [read(var) for var in eqn.invars], eqn.params), strict=True
            )
        return [read(var) for var in jaxpr.outvars]

    def closed(self, body: Any, ins: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr, with constants or without."""
        return self.run(body.jaxpr, body.consts, ins) if hasattr(body, "consts") else self.run(body, [], ins)

    def scan(self, params: Any, ins: Sequence[Any]) -> list[Any]:
        consts, carry = params["num_consts"], params["num_carry"]

        def body(state: Any, x: Any) -> tuple[Any, Any]:
            out = self.closed(params["jaxpr"], [*ins[:consts], *state, *x])
            return out[:carry], out[carry:]

        state, ys = jax.lax.scan(
            body,
            list(ins[consts : consts + carry]),
            list(ins[consts + carry :]),
            length=params["length"],
            reverse=params["reverse"],
        )
        return [*state, *ys]

    def loop(self, params: Any, ins: Sequence[Any]) -> list[Any]:
        conditions, bodies = params["cond_nconsts"], params["body_nconsts"]
        first, second = ins[:conditions], ins[conditions : conditions + bodies]

        def going_on(state: Any) -> Any:
            return self.closed(params["cond_jaxpr"], [*first, *state])[0]

        def body(state: Any) -> Any:
            on, new = going_on(state), self.closed(params["body_jaxpr"], [*second, *state])
            if not on.ndim:
                return new
            # A loop under vmap: rows that have ended stay as they are.
            return [jnp.where(on.reshape(on.shape + (1,) * (a.ndim - on.ndim)), a, b) for a, b in zip(new, state, strict=True)]  # fmt: skip

        return list(jax.lax.while_loop(lambda state: going_on(state).any(), body, list(ins[conditions + bodies :])))

    def branch(self, params: Any, ins: Sequence[Any]) -> list[Any]:
        index, *operands = ins
        branches = [lambda *xs, body=body: self.closed(body, xs) for body in params["branches"]]
        return list(jax.lax.switch(index, branches, *operands))


def _typed(literal: Any) -> Any:
    """A literal's value in the dtype that it has in the jaxpr."""
    value = np.asarray(literal.val)
    return value.astype(literal.aval.dtype) if isinstance(literal.aval.dtype, np.dtype) else literal.val


def _avals(body: Any) -> list[Any]:
    """Of a jaxpr's arguments."""
    return [var.aval for var in (body.jaxpr if hasattr(body, "jaxpr") else body).invars]


class _Eager(_EvalTrace):  # type: ignore[misc]
    """What interprets primitives while the function runs as Python: computes them at once, lifted."""

    def __init__(self, lifter: _Lifter) -> None:
        super().__init__()
        self.lifter = lifter

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        out = self.lifter.bind(primitive, [self.lifter.constant(x) for x in args], params)
        return out if primitive.multiple_results else out[0]

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any) -> Any:
        with _set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any) -> Any:
        with _set_current_trace(self):
            return fun.call_wrapped(*tracers)


@contextmanager
def _float64() -> Iterator[None]:
    """float64 exists and matrix products are exact to it; JAX's configuration is as before afterwards."""
    enable_x64: Any = getattr(jax, "enable_x64", None)
    if enable_x64 is None:  # where older JAX has it
        experimental: Any = jax.experimental
        enable_x64 = experimental.enable_x64
    with enable_x64(True), jax.default_matmul_precision("highest"):
        yield


@dataclass
class Lifted:
    """A lifted function.

    Attributes:
        function: what is lifted.
        staged: whether the last call went the staged way; True beforehand to go no other way.
        unlifted: of the last call: primitives that gave a narrower float all the same, and constants that had one. Their
            values are rounded.
    """

    function: Callable[..., Any]
    staged: bool = False
    unlifted: tuple[str, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """The function's value with float64 in place of narrower floats; arguments are pytrees of arrays."""
        with _float64():
            args = jax.tree.map(jnp.asarray, args)
            if not self.staged and _set_current_trace is not None:
                try:
                    return self._eager(jax.tree.map(_up, args))
                except (*_REFUSALS, AssertionError):  # code that insists on its dtypes, a scan of length zero
                    pass
            self.staged = True
            return self._staged(args)

    def _eager(self, args: Any) -> Any:
        lifter = _Lifter()
        with jax.disable_jit(), _set_current_trace(_Eager(lifter)):
            out = self.function(*args)
            out = jax.tree.map(lambda x: lifter.constant(jnp.asarray(x)), out)
        self.unlifted = tuple(sorted(lifter.unlifted))
        return out

    def _staged(self, args: Any) -> Any:
        lifter = _Lifter()
        trace = jax.make_jaxpr(self.function, return_shape=True)
        try:
            closed, shape = trace(*jax.tree.map(_up, args))  # so that fewer scalars are rounded
        except TypeError:  # float64 does not go with what the code makes itself
            closed, shape = trace(*args)
        outputs = lifter.run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        self.unlifted = tuple(sorted(lifter.unlifted))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)


def lift(function: Callable[..., Any], *, staged: bool = False) -> Lifted:
    """`function`, evaluated with every float32, bfloat16 and float16 in it replaced by float64.

    Args:
        function: traceable by JAX, from pytrees of arrays to a pytree of arrays.
        staged: evaluate its jaxpr rather than run it as Python; the module's docstring says what the difference is.
    """
    return Lifted(function, staged)
