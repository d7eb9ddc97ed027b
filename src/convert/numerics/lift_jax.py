"""Evaluate a JAX function in float64, with the casts to narrower dtypes in its code removed ("lifted").

Every narrower float is replaced by float64: conversions, output dtypes, iotas and constants. There are two modes.

*Eager* runs the function as Python, without jit and with loops unrolled, and lifts each primitive when it is bound. Python code
sees float64, so its scalars are not rounded to float32. Arrays that NumPy rounded stay rounded and are listed in
`Lifted.unlifted`; rounded NumPy scalars, such as ``np.float32(0.1)``, cannot be detected.

*Staged* traces the function and evaluates its jaxpr. Loops stay loops, and code that requires float32 works. The trace has
rounded Python scalars; they are restored to their shortest decimal, which is exact for ``0.1`` but not for ``math.log(1e4)``; the
sqrt(2 / pi) of GELU is known.
Loops that the eager mode finds already traced are evaluated in this mode, too, and so are functions that `jax.checkpoint` wrapped
before the run. What a run itself wraps, such as ``nn.remat`` of flax, runs as Python.

Two lifted runs differ only where the functions differ, not by rounding.

Common primitives of small arrays are evaluated by NumPy (`numpy_primitives`), as XLA would compile hundreds of them one by one.

An `Observer` receives each primitive that is evaluated. For it, loops are unrolled and branches chosen in both modes, and NumPy
evaluates large arrays, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from convert.numerics import loops, numpy_primitives
from convert.numerics.jax_observer import Observer, Step
from convert.numerics.jax_values import FLOAT, as_jax, digits, narrow, small, up, usual, wide

try:  # JAX's own hook to interpret primitives; without it, only the staged mode is available
    from jax._src import core as interpreter

    _EvalTrace: Any = interpreter.EvalTrace
    _eval_trace: Any = interpreter.eval_trace
    _set_current_trace: Any = interpreter.set_current_trace
except (ImportError, AttributeError):
    _EvalTrace, _eval_trace, _set_current_trace = object, None, None

# Calls whose body is evaluated in place; the custom derivative rules do not matter here.
_INLINE = {"jit", "pjit", "closed_call", "core_call", "core_closed_call", "custom_jvp_call", "custom_vjp_call"}
_INLINE |= {"custom_vjp_call_jaxpr", "remat", "remat2", "checkpoint", "custom_lin", "composite", "custom_vmap_call"}
# Collectives that give their operands where an axis has length one.
_OVER_DEVICES = {"psum", "psum_invariant", "psum2", "pmax", "pmin", "pvary", "pbroadcast"}
# Errors of primitives that support only their own dtypes: callbacks, foreign and Pallas kernels.
_REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)


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
        except _REFUSALS as error:  # not kept: its frames would keep arrays that JAX finds again
            first = first or (str(error).splitlines() or [type(error).__name__])[0]
    raise RefusedError(f"{primitive.name}: {first}")


class _Lifter:
    """Evaluates primitives in float64.

    Attributes:
        observer: receives each primitive that is evaluated.
        unlifted: primitives and constants with rounded values.
        source: where the jaxprs that are being evaluated record that they stand, the outermost first.
        tapes: of the iterations of loops that are running as Python.
        axes: names of the axes of length one that the jaxprs being evaluated are mapped over.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer
        self.unlifted: set[str] = set()
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
            self.unlifted.add(f"constant {value.dtype}{list(value.shape)}")
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
        with _set_current_trace(_eval_trace):
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
        except _REFUSALS:
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
            avals = [
                jax.ShapeDtypeStruct(v.shape, wide(v.dtype) if narrow(v.dtype) else v.dtype) for v in _avals(value)
            ]
            inner = _Lifter()  # it is traced, not evaluated: not observed
            inner.unlifted = self.unlifted
            lifted = jax.make_jaxpr(lambda *args: inner.closed(value, args))(*avals)
            return lifted if isinstance(value, core.ClosedJaxpr) or lifted.consts else lifted.jaxpr
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
            return [*state, *_Lifter().scan(params, ins)[carry:]]
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


class _Eager(_EvalTrace):  # type: ignore[misc]
    """Interprets primitives while the function runs as Python: evaluates each of them lifted."""

    def __init__(self, lifter: _Lifter) -> None:
        super().__init__()
        self.lifter = lifter

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        with _set_current_trace(_eval_trace):  # which JAX has set since 0.11 for no trace but its own
            out = self.lifter.bind(primitive, [self.lifter.constant(x) for x in args], params)
        return out if primitive.multiple_results else out[0]

    def process_shard_map(self, *args: Any, **params: Any) -> Any:
        """Refuse: JAX runs it by a trace of its own, that nothing observes. The staged mode has its jaxpr."""
        if params["mesh"].size > 1 and not self.lifter.observer:
            return super().process_shard_map(*args, **params)
        raise RefusedError("shard_map: only the staged mode looks into it")

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any) -> Any:
        with _set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any) -> Any:
        with _set_current_trace(self):
            return fun.call_wrapped(*tracers)


@contextmanager
def float64() -> Iterator[None]:
    """Enable float64 and full precision of matrix products; restore the configuration of JAX afterwards."""
    enable_x64: Any = getattr(jax, "enable_x64", None)
    if enable_x64 is None:  # older JAX
        experimental: Any = jax.experimental
        enable_x64 = experimental.enable_x64
    with enable_x64(True), jax.default_matmul_precision("highest"):
        yield


def traced(trace: Callable[[], Any]) -> Any:
    """Return what a trace gives; with float64 if JAX finds an array of NumPy there that a run made int64, and that is still in use."""
    try:
        return trace()
    except TypeError as error:
        if "int64" not in str(error):
            raise
    with float64():
        return trace()


@dataclass
class Lifted:
    """A lifted function.

    Attributes:
        function: the function to evaluate.
        staged: whether the last call used the staged mode; set it to True to use no other.
        observer: receives what a call evaluates.
        repeats: as `lift` takes it.
        unlifted: primitives and constants of the last call that still gave narrower floats; their values are rounded.
    """

    function: Callable[..., Any]
    staged: bool = False
    observer: Observer | None = None
    repeats: bool = False
    unlifted: tuple[str, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """Evaluate the function in float64; the arguments are pytrees of arrays."""
        with float64():
            args = jax.tree.map(jnp.asarray, args)
            wide, staged = jax.tree.map(up, args), self.staged
            try:
                return self._evaluated(args, wide)
            except (TypeError, RefusedError) as error:
                if "int64" not in str(error):
                    raise
                jax.clear_caches()  # of arrays of NumPy: JAX finds those again that a run without float64 made int32
                self.staged = staged
                return self._evaluated(args, wide)

    def _evaluated(self, args: Any, wide: Any) -> Any:
        if not self.staged and _set_current_trace is not None:
            try:
                return self._eager(wide)
            except (*_REFUSALS, AssertionError):  # code that requires its dtypes, or a scan of length zero
                pass
        self.staged = True
        return self._staged(args, wide)

    def _lifter(self, args: Any) -> _Lifter:
        if self.observer:
            self.observer.begin(jax.tree.leaves(args))
        return _Lifter(self.observer)

    def _eager(self, args: Any) -> Any:
        lifter = self._lifter(args)
        with ExitStack() as stack:
            if self.observer:
                stack.enter_context(loops.choices_observed(lifter.chosen))
            if self.repeats:
                stack.enter_context(mock.patch.object(jax.lax, "scan", loops.repeating(jax.lax.scan, lifter)))
            for context in (jax.disable_jit(), _without_checkpoints(), _set_current_trace(_Eager(lifter))):
                stack.enter_context(context)
            out = self.function(*args)
            out = jax.tree.map(lambda x: lifter.constant(jnp.asarray(x)), out)
        self.unlifted = tuple(sorted(lifter.unlifted))
        return out

    def _staged(self, args: Any, wide: Any) -> Any:
        lifter = self._lifter(wide)
        trace = jax.make_jaxpr(self.function, return_shape=True)
        try:
            closed, shape = trace(*wide)  # rounds fewer scalars
        except (TypeError, ValueError):  # float64 arguments conflict with arrays that the code makes
            closed, shape = trace(*jax.tree.map(usual, args))
        outputs = lifter.run(closed.jaxpr, closed.consts, jax.tree.leaves(wide))
        self.unlifted = tuple(sorted(lifter.unlifted))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Let `jax.checkpoint` return its function: it would trace it, and a trace has rounded scalars. It changes no value."""
    kept = {name: getattr(jax, name) for name in ("checkpoint", "remat")}

    def unchanged(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda function: function

    for name in kept:
        setattr(jax, name, unchanged)
    try:
        yield
    finally:
        for name, checkpoint in kept.items():
            setattr(jax, name, checkpoint)


def lift(
    function: Callable[..., Any], *, staged: bool = False, observer: Observer | None = None, repeats: bool = False
) -> Lifted:
    """Replace every float32, bfloat16 and float16 in a function by float64.

    Args:
        function: traceable by JAX, from pytrees of arrays to a pytree of arrays.
        staged: evaluate the jaxpr instead of running the function as Python; see the docstring of the module.
        observer: receives what a call evaluates.
        repeats: whether the eager mode repeats the primitives of a loop's first iterations, in place of its Python code (`loops`).
            Only with an observer, and only for a function that JAX traces: its code has no other effect.
    """
    return Lifted(function, staged, observer, repeats)
