"""Evaluate the primitives of JAX in float64, one after another or as the equations of a jaxpr.

Common primitives of small arrays are evaluated by NumPy (`numpy_primitives`), as XLA would compile hundreds of them one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from convert.numerics import loops, numpy_primitives
from convert.numerics.jax_observer import Observer, Step
from convert.numerics.jax_values import FLOAT, as_jax, digits, narrow, small, up, wide

try:  # JAX's own hook to interpret primitives while Python code runs; without it, only jaxprs are evaluated
    from jax._src import core as interpreter

    EvalTrace: Any = interpreter.EvalTrace
    eval_trace: Any = interpreter.eval_trace
    set_current_trace: Any = interpreter.set_current_trace
except (ImportError, AttributeError):
    EvalTrace, eval_trace, set_current_trace = object, None, None

# Calls whose body is evaluated in place; the custom derivative rules do not matter here.
_INLINE = {"jit", "pjit", "closed_call", "core_call", "core_closed_call", "custom_jvp_call", "custom_vjp_call"}
_INLINE |= {"custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint", "custom_lin", "composite", "custom_vmap_call"}
# Collectives that give their operands where an axis has length one.
_OVER_DEVICES = {"psum", "psum_invariant", "psum2", "pmax", "pmin", "pvary", "pbroadcast"}
# Errors of primitives that support only their own dtypes: callbacks, foreign and Pallas kernels.
REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)
MOST_LIFTED = 256  # jaxprs that are parameters, such as the updates of scatters


class RefusedError(RuntimeError):
    """A primitive that does not run here, in any dtype; the message has its name and what JAX says."""


def _in_own_dtype(primitive: Any, params: Mapping[str, Any], ins: Sequence[Any]) -> Any:
    """Return what a primitive gives that takes only the dtype that it was made for: float32, mostly.

    Raises:
        RefusedError: it takes none, or it runs on other devices.
    """
    first = ""
    for dtype in (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16):
        try:
            given = [x.astype(dtype) if getattr(x, "dtype", None) == jnp.float64 else x for x in ins]
            return primitive.bind(*given, **params)
        except REFUSALS as error:  # not kept: its frames would keep arrays that JAX finds again
            first = first or (str(error).splitlines() or [type(error).__name__])[0]
    raise RefusedError(f"{primitive.name}: {first}")


def _in_one_integer(ins: Sequence[Any]) -> list[Any] | None:
    """Return arguments with all integers as int64; None if they are of one dtype.

    JAX finds an array of NumPy again that it has made int32 before: another argument, made now, is int64.
    """
    dtypes = {np.dtype(x.dtype) for x in ins if getattr(x, "dtype", FLOAT).kind == "i"}
    if dtypes != {np.dtype(np.int32), np.dtype(np.int64)}:
        return None
    return [x.astype(np.int64) if getattr(x, "dtype", FLOAT).kind == "i" else x for x in ins]


class Lifter:
    """Evaluates primitives in float64.

    Attributes:
        observer: receives each primitive that is evaluated.
        unlifted: primitives and constants with rounded values.
        rounded: the constants among them. With `shaken`, they move at random by up to half a unit in the last place.
        source: where the jaxprs that are being evaluated record that they stand, the outermost first.
        tapes: of the iterations of loops that are running as Python.
        axes: names of the axes of length one that the jaxprs being evaluated are mapped over.
    """

    def __init__(self, observer: Observer | None = None, shaken: bool = False) -> None:
        self.observer = observer
        self._shake = np.random.default_rng(0) if shaken else None
        self.unlifted: set[str] = set()
        self.rounded: set[str] = set()
        self.source: tuple[Any, ...] = ()
        self.tapes: list[loops.Tape] = []
        self.axes = frozenset[Any]()

    def constant(self, x: Any) -> Any:
        """Lift a value that no lifted primitive returned: an argument of a primitive, or a literal or constant of a jaxpr."""
        if not hasattr(x, "dtype") or not narrow(x.dtype) or isinstance(x, jax.core.Tracer):
            return up(x)
        value = np.asarray(x)
        if value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.floating):
            return jnp.asarray(digits(value), jnp.float64)
        lifted = value.astype(wide(value.dtype))
        if not np.array_equal(lifted, np.asarray(value, jnp.bfloat16).astype(lifted.dtype), equal_nan=True):
            # more digits than a bfloat16 holds: it was rounded
            self.rounded.add(f"constant {value.dtype}{list(value.shape)}")
            self.unlifted |= self.rounded
            if self._shake is not None:
                lifted = lifted * (1 + self._shake.uniform(-0.5, 0.5, value.shape) * float(jnp.finfo(value.dtype).eps))
        return jnp.asarray(lifted)

    def bind(self, primitive: Any, ins: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        """Evaluate a primitive on arguments that are already float64; calls, loops and branches by what they contain."""
        name = primitive.name
        if name in _INLINE:
            bodies = (params.get(key) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"))
            return self.closed(next(filter(None, bodies)), ins)
        if name in ("scan", "while", "cond"):
            return list({"scan": self.scan, "while": self.loop, "cond": self.branch}[name](params, ins))
        if name == "reduce_precision":
            return [ins[0]]
        if name == "shard_map":
            return self.on_one_device(params, ins)
        if (axes := self.axes.intersection(_axes(params))) or name == "pvary":
            return list(ins) if name in _OVER_DEVICES else self.collective(primitive, ins, params, axes)
        return self.applied(primitive, ins, params, self.source)

    def on_one_device(self, params: Mapping[str, Any], ins: Sequence[Any]) -> list[Any]:
        """Evaluate what `jax.shard_map` runs: on a mesh of one device, each shard is the whole array.

        Raises:
            RefusedError: the mesh has more devices.
        """
        if (devices := params["mesh"].size) > 1:
            raise RefusedError(f"shard_map: a mesh of {devices} devices; only one of one device is looked into")
        around, self.axes = self.axes, self.axes.union(params["mesh"].axis_names)
        out = self.closed(params["jaxpr"], ins)
        self.axes = around
        return out

    def collective(
        self, primitive: Any, ins: Sequence[Any], params: Mapping[str, Any], axes: Collection[str]
    ) -> list[Any]:
        """Evaluate a primitive over named axes, all of length one, by the primitives that `jax.vmap` makes of it."""

        def mapped(*ins: Any) -> Sequence[Any]:
            out = primitive.bind(*ins, **params)
            return out if primitive.multiple_results else [out]

        for axis in axes:
            mapped = jax.vmap(mapped, axis_name=axis, axis_size=1)
        one, first = (None,) * len(axes), (0,) * len(axes)
        return self.traced(lambda *ins: [x[first] for x in mapped(*(x[one] for x in ins))], *ins)

    def applied(
        self, primitive: Any, ins: Sequence[Any], params: Mapping[str, Any], source: tuple[Any, ...], place: Any = None
    ) -> list[Any]:
        """Evaluate a primitive that is neither a call, a loop nor a branch, and tell the observer and the tapes of it."""
        out, lifted = self.evaluate(primitive, params, ins)
        if not lifted:
            self.unlifted.add(primitive.name)
        out = [as_jax(x) if isinstance(x, np.ndarray) else x for x in out]
        if self.observer:
            step = Step(primitive, ins, params, out, lifted, source, self.evaluate, place)
            place = self.observer.step(step)
            for tape in self.tapes:
                tape.steps.append((step, place))
        return out

    def repeat(self, step: Step, place: Any, operands: Sequence[Any]) -> list[Any]:
        """Evaluate the primitive of a step on other operands."""
        with set_current_trace(eval_trace):
            return self.applied(step.primitive, operands, step.params, step.source, place)

    def evaluate(self, primitive: Any, params: Mapping[str, Any], ins: Sequence[Any]) -> tuple[list[Any], bool]:
        """Return the results of a primitive in float64, and whether no narrower dtype was needed."""
        if (self.observer or small(ins)) and (made := self.by_numpy(primitive.name, params, ins)) is not None:
            return made, True
        lifted = True
        ins = [as_jax(x) if isinstance(x, np.ndarray) else x for x in ins]  # Equinox's primitives take no NumPy arrays
        try:
            if (
                primitive.name == "bitcast_convert_type"
            ):  # a cast between floats and bits: in the dtype that the code expects
                width = np.dtype(params["new_dtype"]).itemsize
                if ins[0].dtype == jnp.float64 and width < 8:
                    lifted, ins = False, [ins[0].astype({4: jnp.float32, 2: jnp.bfloat16}[width])]
                out = primitive.bind(*ins, **params)
            else:
                out = primitive.bind(*ins, **{key: self.param(value) for key, value in params.items()})
        except REFUSALS:
            if (same := _in_one_integer(ins)) is not None:
                return self.evaluate(primitive, params, same)
            lifted, out = False, _in_own_dtype(primitive, params, ins)
        results = out if primitive.multiple_results else [out]
        lifted = lifted and not any(hasattr(x, "dtype") and narrow(x.dtype) for x in results)
        return [up(x) for x in results], lifted

    def by_numpy(self, name: str, params: Mapping[str, Any], ins: Sequence[Any]) -> list[Any] | None:
        """Return what NumPy gives for a primitive; None if it has no such function, or a result has a weak integer dtype."""
        if name not in numpy_primitives.NAMES or not all(isinstance(getattr(x, "dtype", FLOAT), np.dtype) for x in ins):
            return None
        weak = params.get("weak_type") or (ins and all(getattr(x, "weak_type", False) for x in ins))
        made = numpy_primitives.evaluate(
            name, [np.asarray(x) for x in ins], {k: self.param(v) for k, v in params.items()}
        )
        if made is None or (weak and any(x.dtype.kind in "iu" for x in made)):
            return None
        return made

    def param(self, value: Any) -> Any:
        """Lift a parameter: a dtype, or a jaxpr such as the update of a scatter. Algorithms of matrix products are dropped."""
        if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
            lifted, unlifted = _lifted(value)
            self.unlifted |= unlifted
            return lifted
        if "DotAlgorithm" in type(value).__name__:
            return jax.lax.Precision.HIGHEST
        return wide(value) if narrow(value) else value

    # ---- jaxprs

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(self.constant, consts), strict=True))
        env |= zip(jaxpr.invars, map(up, args), strict=True)

        def read(var: Any) -> Any:
            return self.constant(_typed(var)) if isinstance(var, core.Literal) else env[var]

        around = self.source
        for eqn in jaxpr.eqns:
            self.source = (*around, eqn.source_info)
            env |= zip(
                eqn.outvars, self.bind(eqn.primitive, [read(var) for var in eqn.invars], eqn.params), strict=True
            )
        self.source = around
        return [read(var) for var in jaxpr.outvars]

    def closed(self, body: Any, ins: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr or a closed jaxpr."""
        return self.run(body.jaxpr, body.consts, ins) if hasattr(body, "consts") else self.run(body, [], ins)

    def traced(self, function: Callable[..., Sequence[Any]], *args: Any) -> list[Any]:
        """Evaluate a function of arrays by its jaxpr, so that what it does is observed."""
        closed = jax.make_jaxpr(function)(*args)
        return self.closed(closed, args)

    def scan(self, params: Any, ins: Sequence[Any]) -> list[Any]:
        length = params["length"]
        if "ft_in" in params:  # JAX 0.11 and 0.12
            consts, carry, _ = map(len, params["ft_in"].unpack())
        else:
            consts, carry = params["num_consts"], params["num_carry"]

        def body(state: Any, x: Any) -> tuple[Any, Any]:
            out = self.closed(params["jaxpr"], [*ins[:consts], *state, *x])
            return out[:carry], out[carry:]

        state, xs = list(ins[consts : consts + carry]), list(ins[consts + carry :])
        if not self.observer:
            state, ys = jax.lax.scan(body, state, xs, length=length, reverse=params["reverse"])
            return [*state, *ys]
        rows = []
        for k in reversed(range(length)) if params["reverse"] else range(length):
            row = self.traced(lambda *xs, k=k: [jax.lax.index_in_dim(x, k, keepdims=False) for x in xs], *xs)
            state, y = body(state, row)
            rows.append(y)
        if not rows:
            return [*state, *Lifter().scan(params, ins)[carry:]]
        columns = zip(*(reversed(rows) if params["reverse"] else rows), strict=True)
        return [*state, *(self.traced(lambda *ys: [jnp.stack(ys)], *column)[0] for column in columns)]

    def loop(self, params: Any, ins: Sequence[Any]) -> list[Any]:
        conditions, bodies = params["cond_nconsts"], params["body_nconsts"]
        first, second, state = ins[:conditions], ins[conditions : conditions + bodies], list(ins[conditions + bodies :])

        def proceeds(state: Any) -> Any:
            return self.closed(params["cond_jaxpr"], [*first, *state])[0]

        def select(active: Any, *values: Any) -> list[Any]:
            """A loop under vmap: rows that have finished keep their values."""
            half = len(values) // 2
            rows = [active.reshape(active.shape + (1,) * (new.ndim - active.ndim)) for new in values[:half]]
            return [jnp.where(*of) for of in zip(rows, values[:half], values[half:], strict=True)]

        def body(active: Any, state: Any) -> Any:
            new = self.closed(params["body_jaxpr"], [*second, *state])
            if not active.ndim:
                return new
            return self.traced(select, active, *new, *state) if self.observer else select(active, *new, *state)

        if not self.observer:
            return list(
                jax.lax.while_loop(
                    lambda state: proceeds(state).any(), lambda state: body(proceeds(state), state), state
                )
            )
        while self.chosen(active := proceeds(state)).any():
            state = body(active, state)
        return state

    def branch(self, params: Any, ins: Sequence[Any]) -> list[Any]:
        index, *operands = ins
        if self.observer:
            chosen = min(max(int(self.chosen(index)), 0), len(params["branches"]) - 1)
            return self.closed(params["branches"][chosen], operands)
        branches = [lambda *xs, body=body: self.closed(body, xs) for body in params["branches"]]
        return list(jax.lax.switch(index, branches, *operands))

    def chosen(self, value: Any) -> np.ndarray[Any, Any]:
        """Return the value by which a loop or branch chooses, and tell the observer of it."""
        if self.observer:
            self.observer.choice(value)
        for tape in self.tapes:
            tape.chose = True
        return np.asarray(value)


@functools.lru_cache(maxsize=MOST_LIFTED)
def _lifted(body: Any) -> tuple[Any, frozenset[str]]:
    """Return a jaxpr in float64, and what is not lifted in it: the same one each time, as XLA compiles again what it does not know."""
    avals = [jax.ShapeDtypeStruct(v.shape, wide(v.dtype) if narrow(v.dtype) else v.dtype) for v in _avals(body)]
    inner = Lifter()  # it is traced, not evaluated: not observed
    lifted = jax.make_jaxpr(lambda *args: inner.closed(body, args))(*avals)
    whole = lifted if isinstance(body, core.ClosedJaxpr) or lifted.consts else lifted.jaxpr
    return whole, frozenset(inner.unlifted)


def _axes(params: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the axes that a primitive is over: names, for a collective one."""
    axes = params.get("axes", params.get("axis_name", ()))
    return axes if isinstance(axes, tuple) else (axes,)


def _typed(literal: Any) -> Any:
    """Return the value of a literal in its dtype of the jaxpr."""
    value = np.asarray(literal.val)
    return value.astype(literal.aval.dtype) if isinstance(literal.aval.dtype, np.dtype) else literal.val


def _avals(body: Any) -> list[Any]:
    """Return the abstract values of the arguments of a jaxpr."""
    return [var.aval for var in (body.jaxpr if hasattr(body, "jaxpr") else body).invars]
