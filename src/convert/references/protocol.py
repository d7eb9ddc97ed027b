"""What a model-level check needs of a model: the two sides, the inputs, and the boundaries at which they must agree."""

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
    """What the PyTorch model computed on its way to the first place where it differs from the JAX model.

    Attributes:
        values: at boundaries, by name.
        inputs: of the model.
        weights: of the PyTorch module, by name.
    """

    values: Arrays
    inputs: Arrays
    weights: Arrays


@dataclass(frozen=True)
class Variant:
    """One of the functions by which the value at a boundary may have been computed. For the diagnosis of a difference.

    Attributes:
        name: of the function, short and stable: ``interleaved RoPE``.
        make: computes the whole value.
        undoes: `make` takes the PyTorch model's own value at the boundary and undoes a mistake called `name` in it. Otherwise
            it computes the value anew from earlier ones.
        repair: what to change where the target computes this, in the words of its configuration; empty: compute what is meant.
        params: the function as data, for code that compares two variants; None where the name is all there is.
    """

    name: str
    make: Callable[[Observed], Array]
    undoes: bool = False
    repair: str = ""
    params: Any = None


JaxSide = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Deferred:
    """A JAX side that is made when it is needed: upstream's import may cost seconds, and only the model level runs it.

    Attributes:
        make: imports upstream and gives the function. Called once, outside of any trace.
    """

    make: Callable[[], JaxSide]


@dataclass(frozen=True)
class Reference:
    """The two models of a family at one size. A factory of one's own returns this (`--reference module:factory`).

    Everything is a plain function of arrays, so that it can be traced, lifted, recorded and run on any device.

    Attributes:
        inputs: seed -> the inputs by name. Long enough to reach every window and position; with padding and saturation.
        jax: (weights, inputs) -> values at the boundaries and outputs, by name, in the order in which data flows. The
            weights are the source's leaves by name (flax nnx's ``/value`` removed). Must be traceable by ``jax.make_jaxpr``
            with weights and inputs as the arguments. `Deferred` where importing upstream takes long; `jax_side` gives the
            function itself. None when JAX's side is only known from a recording.
        build: state_dict -> the PyTorch module in eval mode, weights loaded with strict=True, in the dtype of its weights.
        run: (module, inputs) -> the outputs by name, the same names as `jax` gives. Values at module boundaries are
            taken by hooks (`observe`): every other name that `jax` gives is a submodule of the module
            (``layers.0.attn.out``), whose first output is meant, or its first input (``layers.0.attn.out:in``), at the
            module's first call.
        outputs: names of the final outputs, as opposed to boundaries.
        logits: those of the outputs that are logits over their last axis: their KL divergence and top-1 agreement are reported.
        masks: inputs -> name -> true where a value counts; names that are missing count everywhere. The leading axes of
            the value, with 1 for an axis along which all count alike.
        reduction: length of the longest sum (the width of the widest layer); depth: number of layers. For tolerances.
        facts: what the target is configured to compute (activations, epsilons, ...), read off the live module.
        variants: name of a boundary or output -> functions that may have made its value. The first is the one that the
            models are meant to compute; the others are known mistakes. They are tried where the models differ first, and
            name what either side computes. Empty where nothing but layers with weights comes before the boundary.
        backends: further ways to compute the same from the same weights (an export, a kernel, another runtime), by name:
            (module, inputs) -> the outputs by name, as `run` gives them. Values at boundaries are taken by hooks where the
            backend runs the submodules; it may also give them beside the outputs, by their names. `--backends` compares
            these with JAX, torch and ``torch.compile``.
    """

    inputs: Callable[[int], Arrays]
    build: Callable[[Mapping[str, torch.Tensor]], torch.nn.Module]
    run: Callable[[torch.nn.Module, Mapping[str, Any]], Mapping[str, Any]]
    outputs: Sequence[str]
    reduction: int
    depth: int
    jax: JaxSide | Deferred | None = None
    logits: Sequence[str] = ()
    masks: Callable[[Arrays], Arrays] = field(default=lambda inputs: {})
    facts: Callable[[torch.nn.Module], Mapping[str, Mapping[str, Any]]] = field(default=lambda module: {})
    variants: Callable[[str], Sequence[Variant]] = field(default=lambda name: ())
    backends: Mapping[str, Callable[[torch.nn.Module, Mapping[str, Any]], Mapping[str, Any]]] = field(
        default_factory=dict
    )

    def jax_side(self) -> JaxSide:
        """The function that `jax` is or defers to.

        Raises:
            ValueError: there is none.
            ImportError: upstream's JAX code is not installed.
        """
        if self.jax is None:
            raise ValueError("this reference has no JAX side")
        return self.jax.make() if isinstance(self.jax, Deferred) else self.jax


INPUT = ":in"  # after a submodule's name: its first input, not its first output


@contextmanager
def observe(module: torch.nn.Module, names: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Records values at module boundaries while the module runs: at each submodule's first call.

    Args:
        names: submodules, with ``:in`` where the first input is meant and not the first output.

    Yields:
        The values by name; filled as the module runs, so those of submodules that never ran are missing, and those that
        are no tensors.

    Raises:
        AttributeError: there is no such submodule.
    """
    values: dict[str, torch.Tensor] = {}

    def keep(name: str, value: Any) -> None:
        while isinstance(value, Mapping | tuple | list):  # several outputs, or transformers' ModelOutput
            value = next(iter(value.values() if isinstance(value, Mapping) else value), None)
        if hasattr(value, "detach"):  # not the length of a sequence, say
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
