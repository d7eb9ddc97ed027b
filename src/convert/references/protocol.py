"""`Reference`: the two models of a check, their inputs, and the boundaries at which they must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class Observed:
    """The values of one run of the PyTorch model, for the diagnosis.

    Attributes:
        values: at boundaries and outputs, by name.
        inputs: of the model.
        weights: of the PyTorch module, by name.
    """

    values: Arrays
    inputs: Arrays
    weights: Arrays


@dataclass(frozen=True)
class Variant:
    """A function that may have computed the value at a boundary, for the diagnosis of a difference.

    Attributes:
        name: short and stable, such as ``interleaved RoPE``.
        make: computes the whole value.
        undoes: whether `make` undoes a mistake called `name` in the PyTorch model's value at the boundary. Otherwise it computes
            the value from earlier ones.
        fix: how to change a target that computes this function; empty for a generic text.
        params: the parameters of the function, for code that compares two variants.
    """

    name: str
    make: Callable[[Observed], Array]
    undoes: bool = False
    fix: str = ""
    params: Any = None


JaxSide = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Deferred:
    """A JAX side whose upstream package is imported when the model level needs it, as the import may take seconds.

    Attributes:
        make: imports upstream and returns the function. It is called once, outside of any trace.
    """

    make: Callable[[], JaxSide]


@dataclass(frozen=True)
class Reference:
    """The JAX model and the PyTorch model at one size. A factory returns it (`--reference module:factory`).

    Every field is a plain function of arrays, so that it can be traced, run in float64, recorded, and run on any device.

    Attributes:
        inputs: seed -> the inputs by name. They should reach every window and position, and contain padding and saturation.
        jax: (weights, inputs) -> values at the boundaries and outputs, by name, in the order of the data. The weights are the
            checkpoint's leaves by name, without flax nnx's ``/value``. ``jax.make_jaxpr`` must be able to trace it with weights
            and inputs as arguments. `Deferred` if importing upstream takes long; `jax_side` returns the function. None if the
            JAX side is known only from a recording.
        build: state_dict -> the PyTorch module in eval mode, with the weights loaded with strict=True, in their dtype.
        run: (module, inputs) -> the outputs, by the same names as in `jax`. Hooks read the values at boundaries (`observe`): every
            other name that `jax` returns is a submodule, and stands for its first output (``layers.0.attn.out``) or its first
            input (``layers.0.attn.out:in``) at the submodule's first call.
        outputs: names of the final outputs; all other names are boundaries.
        jax_outputs: (weights, inputs) -> the outputs alone, for who needs no boundaries, where `jax` runs the model once more to see them.
            None: `jax`.
        logits: outputs that are logits over their last axis; the report has their KL divergence and top-1 agreement.
        masks: inputs -> name -> true where a value counts. A mask has the leading axes of the value, with 1 for an axis along which
            all elements count the same. A value without a mask counts everywhere.
        reduction: length of the longest sum (the width of the widest layer); depth: number of layers. Tolerances follow from both.
        facts: what the target is configured to compute (activations, epsilons, ...), read from the live module.
        places: name of a written tensor -> name in the module's state_dict, of the tensors that loading renames.
        variants: name of a boundary or output -> functions that may have computed its value. The first is the correct one, the
            others are known mistakes. Where the models differ first, they name what each side computes. Empty if only layers
            with weights come before the boundary.
        backends: further implementations of the same model (an export, a kernel, another runtime), by name: (module, inputs) ->
            the outputs, as `run` returns them. Hooks read the values at boundaries if the backend runs the submodules; it may
            also return them with the outputs. `--backends` compares these with JAX, torch and ``torch.compile``.
    """

    inputs: Callable[[int], Arrays]
    build: Callable[[Mapping[str, torch.Tensor]], torch.nn.Module]
    run: Callable[[torch.nn.Module, Mapping[str, Any]], Mapping[str, Any]]
    outputs: Sequence[str]
    reduction: int
    depth: int
    jax: JaxSide | Deferred | None = None
    jax_outputs: JaxSide | Deferred | None = None
    logits: Sequence[str] = ()
    masks: Callable[[Arrays], Arrays] = field(default=lambda inputs: {})
    facts: Callable[[torch.nn.Module], Mapping[str, Mapping[str, Any]]] = field(default=lambda module: {})
    places: Callable[[torch.nn.Module], Mapping[str, str]] = field(default=lambda module: {})
    variants: Callable[[str], Sequence[Variant]] = field(default=lambda name: ())
    backends: Mapping[str, Callable[[torch.nn.Module, Mapping[str, Any]], Mapping[str, Any]]] = field(
        default_factory=dict
    )

    def jax_side(self) -> JaxSide:
        """Return the function that `jax` is or defers to.

        Raises:
            ValueError: the reference has no JAX side.
            ImportError: upstream's JAX code is not installed.
        """
        if self.jax is None:
            raise ValueError("this reference has no JAX side")
        return self.jax.make() if isinstance(self.jax, Deferred) else self.jax

    def jax_outputs_side(self) -> JaxSide:
        """Return the function that gives the outputs, with or without boundaries.

        Raises:
            ValueError: the reference has no JAX side.
            ImportError: upstream's JAX code is not installed.
        """
        side = self.jax_outputs
        if side is None:
            return self.jax_side()
        return side.make() if isinstance(side, Deferred) else side


INPUT = ":in"  # after a submodule's name: its first input, not its first output


@contextmanager
def observe(module: torch.nn.Module, names: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Record values at boundaries while the module runs, at the first call of each submodule.

    Args:
        names: submodules, for their first output; with ``:in``, for their first input.

    Yields:
        The values by name, filled while the module runs. Values of submodules that never run, and values that are not tensors,
        are missing.

    Raises:
        AttributeError: there is no such submodule.
    """
    values: dict[str, torch.Tensor] = {}

    def keep(name: str, value: Any) -> None:
        while isinstance(value, Mapping | tuple | list):  # several outputs, or a ModelOutput of transformers
            value = next(iter(value.values() if isinstance(value, Mapping) else value), None)
        if hasattr(value, "detach"):  # a tensor
            values.setdefault(name, value.detach().clone())

    handles = []
    try:
        for name in names:
            submodule = module.get_submodule(name.removesuffix(INPUT))
            if name.endswith(INPUT):
                handles.append(
                    submodule.register_forward_pre_hook(
                        lambda _, args, kwargs, name=name: keep(name, args or kwargs), with_kwargs=True
                    )
                )
            else:
                handles.append(submodule.register_forward_hook(lambda _, args, out, name=name: keep(name, out)))
        yield values
    finally:
        for handle in handles:
            handle.remove()
