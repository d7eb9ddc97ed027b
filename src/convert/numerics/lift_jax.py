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

`lifter` evaluates the primitives, of both modes.

An `Observer` receives each primitive that is evaluated. For it, loops are unrolled and branches chosen in both modes, and NumPy
evaluates large arrays, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.experimental
import jax.numpy as jnp

from convert.numerics import loops
from convert.numerics.jax_observer import Observer
from convert.numerics.jax_values import up, usual
from convert.numerics.lifter import REFUSALS, EvalTrace, Lifter, RefusedError, eval_trace, set_current_trace


class _Eager(EvalTrace):  # type: ignore[misc]
    """Interprets primitives while the function runs as Python: evaluates each of them lifted."""

    def __init__(self, lifter: Lifter) -> None:
        super().__init__()
        self.lifter = lifter

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        with set_current_trace(eval_trace):  # which JAX has set since 0.11 for no trace but its own
            out = self.lifter.bind(primitive, [self.lifter.constant(x) for x in args], params)
        return out if primitive.multiple_results else out[0]

    def process_shard_map(self, *args: Any, **params: Any) -> Any:
        """Refuse: JAX runs it by a trace of its own, that nothing observes. The staged mode has its jaxpr."""
        if params["mesh"].size > 1 and not self.lifter.observer:
            return super().process_shard_map(*args, **params)
        raise RefusedError("shard_map: only the staged mode looks into it")

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any) -> Any:
        with set_current_trace(self):
            return fun.call_wrapped(*tracers)

    def process_custom_vjp_call(self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **_: Any) -> Any:
        with set_current_trace(self):
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
        rounded: the constants among them.
        shaken: as `lift` takes it.
    """

    function: Callable[..., Any]
    staged: bool = False
    observer: Observer | None = None
    repeats: bool = False
    unlifted: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    shaken: bool = False

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
        if not self.staged and set_current_trace is not None:
            try:
                return self._eager(wide)
            except (*REFUSALS, AssertionError):  # code that requires its dtypes, or a scan of length zero
                pass
        self.staged = True
        return self._staged(args, wide)

    def _lifter(self, args: Any) -> Lifter:
        if self.observer:
            self.observer.begin(jax.tree.leaves(args))
        return Lifter(self.observer, self.shaken)

    def _eager(self, args: Any) -> Any:
        lifter = self._lifter(args)
        with ExitStack() as stack:
            if self.observer:
                stack.enter_context(loops.choices_observed(lifter.chosen))
            if self.repeats:
                stack.enter_context(mock.patch.object(jax.lax, "scan", loops.repeating(jax.lax.scan, lifter)))
            for context in (jax.disable_jit(), _without_checkpoints(), set_current_trace(_Eager(lifter))):
                stack.enter_context(context)
            out = self.function(*args)
            out = jax.tree.map(lambda x: lifter.constant(jnp.asarray(x)), out)
        self._name(lifter)
        return out

    def _staged(self, args: Any, wide: Any) -> Any:
        lifter = self._lifter(wide)
        trace = jax.make_jaxpr(self.function, return_shape=True)
        try:
            closed, shape = trace(*wide)  # rounds fewer scalars
        except (TypeError, ValueError):  # float64 arguments conflict with arrays that the code makes
            closed, shape = trace(*jax.tree.map(usual, args))
        outputs = lifter.run(closed.jaxpr, closed.consts, jax.tree.leaves(wide))
        self._name(lifter)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    def _name(self, lifter: Lifter) -> None:
        self.unlifted, self.rounded = tuple(sorted(lifter.unlifted)), tuple(sorted(lifter.rounded))


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
    function: Callable[..., Any],
    *,
    staged: bool = False,
    observer: Observer | None = None,
    repeats: bool = False,
    shaken: bool = False,
) -> Lifted:
    """Replace every float32, bfloat16 and float16 in a function by float64.

    Args:
        function: traceable by JAX, from pytrees of arrays to a pytree of arrays.
        staged: evaluate the jaxpr instead of running the function as Python; see the docstring of the module.
        observer: receives what a call evaluates.
        repeats: whether the eager mode repeats the primitives of a loop's first iterations, in place of its Python code (`loops`).
            Only with an observer, and only for a function that JAX traces: its code has no other effect.
        shaken: whether constants that were rounded move at random by up to half a unit in the last place: one more sample of the
            rounding, which shows how much of the outputs it is.
    """
    return Lifted(function, staged, observer, repeats, shaken=shaken)
