"""The backends: JAX without and with jit; torch eager and compiled; both on a GPU; and those that a reference registers."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.numerics.precision import cuda_problem, jax_precision, torch_pinned
from convert.numerics.real_numbers import in_float64, tensor_in_float64
from convert.planning.plan import Plan
from convert.references.protocol import Reference, observe
from convert.verify.sides.evidence import Evidence, Values
from convert.verify.sides.run_jax import as_jax, jax_weights
from convert.verify.sides.run_torch import boundaries_of, input_tensors, observed, written_state
from convert.writing.written import Written

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
OP_BY_OP, JITTED, RECORDED = "JAX op by op", "JAX jit", "JAX recorded"
EAGER, COMPILED = "torch eager", "torch.compile"
JAX_ON_GPU = "JAX jit on a GPU"
CUDA, CUDA_TF32, CUDA_COMPILED = "torch CUDA", "torch CUDA with TF32", "torch.compile CUDA"
JAX_NAMES = (OP_BY_OP, JITTED, RECORDED, JAX_ON_GPU)
COMPILERS = ("g++", "clang++", "c++")


class Skip(Exception):  # noqa: N818 - not an error: the backend is not available
    """A backend cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Run:
    """A backend.

    Attributes:
        name: in reports.
        make: computes the outputs, and boundaries if they cost nothing extra; raises `Skip`.
        locate: computes the boundaries as well, if `make` does not; called if the outputs are wrong.
        registered: whether the reference names it, so that it must run.
    """

    name: str
    make: Callable[[], Values]
    locate: Callable[[], Values] | None = None
    registered: bool = False


def jax_runs(plan: Plan, reference: Reference, evidence: Evidence) -> Iterator[Run]:
    """Yield JAX's backends; for a recorded model the recorded run."""
    if not evidence.is_live or reference.jax is None:
        yield Run(RECORDED, lambda: evidence.native_values)
        return
    for name in (OP_BY_OP, JITTED):
        yield Run(name, partial(_jax, plan, reference, evidence, name))
    if not cuda_problem():
        yield Run(JAX_ON_GPU, partial(_jax_on_gpu, plan, reference, evidence))


def _jax_on_gpu(plan: Plan, reference: Reference, evidence: Evidence) -> Values:
    import jax

    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError as error:
        raise Skip(f"JAX {jax.__version__} finds no GPU, or was installed without CUDA") from error
    with jax.default_device(gpu):
        return _jax(plan, reference, evidence, JITTED)


def _jax(plan: Plan, reference: Reference, evidence: Evidence, name: str) -> Values:
    import jax

    side = reference.jax_side()
    precision = evidence.precision
    with jax_precision(precision):
        weights = {leaf: as_jax(value, precision) for leaf, value in jax_weights(plan).items()}
        inputs = {key: as_jax(value, precision) for key, value in evidence.inputs.items()}
        try:
            if name == OP_BY_OP:
                with jax.disable_jit():
                    values = side(weights, inputs)
            else:
                values = jax.jit(side)(weights, inputs)
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            raise Skip(_line(error)) from error
        return {key: in_float64(value) for key, value in values.items()}


def torch_runs(written: Written, reference: Reference, evidence: Evidence) -> Iterator[Run]:
    """Yield torch's backends, and those that the reference registers, which get a module on the CPU."""
    eager = partial(_eager, written, reference, evidence)
    compiled = partial(_compiled, written, reference, evidence)
    yield Run(EAGER, partial(eager, "cpu"))
    yield Run(COMPILED, partial(compiled, "cpu", hooks=False), partial(compiled, "cpu", hooks=True))
    if problem := cuda_problem():
        yield Run(CUDA, partial(_skip, problem))
    else:
        yield Run(CUDA, partial(eager, "cuda"))
        yield Run(CUDA_COMPILED, partial(compiled, "cuda", hooks=False), partial(compiled, "cuda", hooks=True))
        if evidence.precision == "float32":
            yield Run(CUDA_TF32, partial(eager, "cuda", tf32=True))
    for name, function in reference.backends.items():
        yield Run(name, partial(_registered, written, reference, evidence, function), registered=True)


def _module(written: Written, reference: Reference, evidence: Evidence, device: str) -> torch.nn.Module:
    return reference.build(written_state(written, device, evidence.precision)).to(device)


def _skip(why: str) -> Values:
    raise Skip(why)


def _eager(written: Written, reference: Reference, evidence: Evidence, device: str, *, tf32: bool = False) -> Values:
    import torch

    with torch_pinned(tf32=tf32), torch.no_grad():
        module = _module(written, reference, evidence, device)
        inputs = input_tensors(evidence.inputs, evidence.precision, device)
        return observed(reference, module, inputs, list(evidence.native_values))


def _registered(
    written: Written,
    reference: Reference,
    evidence: Evidence,
    function: Callable[[torch.nn.Module, Mapping[str, Any]], Mapping[str, Any]],
) -> Values:
    import torch

    with torch_pinned(), torch.no_grad():
        module = _module(written, reference, evidence, "cpu")
        inputs = input_tensors(evidence.inputs, evidence.precision, "cpu")
        try:
            outputs = _run(function, module, inputs, evidence)  # without hooks, which may change what is fused
            return {**_run(function, module, inputs, evidence, reference), **outputs}
        except Exception as error:
            raise Skip(_line(error)) from error


def _compiled(written: Written, reference: Reference, evidence: Evidence, device: str, *, hooks: bool) -> Values:
    """Compile `Reference.run` with ``torch.compile``, as far as it can be compiled; hooks become part of the graphs."""
    import torch

    if "CXX" not in os.environ and not any(map(shutil.which, COMPILERS)):
        raise Skip(f"it needs a C++ compiler ({', '.join(COMPILERS)}, or the one in the variable CXX)")
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, example)

    with torch_pinned(), torch.no_grad(), _quiet():
        module = _module(written, reference, evidence, device)
        inputs = input_tensors(evidence.inputs, evidence.precision, device)
        torch.compiler.reset()
        try:
            run = torch.compile(reference.run, backend=backend, dynamic=False)
            values = _run(run, module, inputs, evidence, reference if hooks else None)
        except Exception as error:
            raise Skip(_line(error)) from error
        finally:
            torch.compiler.reset()
    if not graphs:
        raise Skip("it compiled nothing in the model")
    return values


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the compiler's warnings about graph breaks."""
    logger = logging.getLogger("torch._dynamo")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _run(
    function: Callable[[torch.nn.Module, Mapping[str, Any]], Mapping[str, Any]],
    module: torch.nn.Module,
    inputs: Mapping[str, Any],
    evidence: Evidence,
    reference: Reference | None = None,
) -> dict[str, Array]:
    """Run a backend and return its values in the order of the data; with a reference also those that hooks see at boundaries."""
    boundaries = boundaries_of(reference, module, evidence.native_values) if reference is not None else []
    with observe(module, boundaries) as values:
        outputs = function(module, inputs)
    known = {**values, **outputs}
    return {name: tensor_in_float64(known[name]) for name in evidence.native_values if name in known}


def _line(error: Exception) -> str:
    """Return the first line of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__
