"""The two programs that `convert infer` reads, as the user names them: a reference, or a function and a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from convert.api import plan_selected
from convert.checkpoints.source import Source
from convert.core.errors import ConvertError, UserCodeError
from convert.core.findings import Finding
from convert.core.nnx_names import without_value
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.core.user_code import REFERENCE_OPTION, find_factory, signature_error, user_code_errors
from convert.inference.by_name import (
    are_sizes,
    leaves_by_name,
    outputs_by_name,
    require_outputs_by_name,
    sizes_by_name,
)
from convert.inference.requirements import packages_named
from convert.planning.options import ConversionOptions
from convert.planning.plan import Plan
from convert.planning.rule_match import RuleMatch
from convert.planning.select_rules import explain, select
from convert.planning.target_formats.base import TORCH
from convert.references.protocol import Reference
from convert.references.user_reference import (
    require_factory,
    require_inputs,
    require_masks,
    require_outputs,
    require_reference,
)
from convert.rules.library import available_rules
from convert.writing.execute import computed

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Any]
JAX_OPTION, TORCH_OPTION, INPUTS_OPTION, SHAPES_OPTION = "--jax ", "--torch ", "--inputs ", "--shapes "
OTHER_WAY = "give the two sides apart, with --jax, --torch and --inputs"


@dataclass(frozen=True)
class Pair:
    """Two programs and their inputs.

    Attributes:
        function: (parameters by name, inputs by name) -> the outputs by name; traced and run by JAX.
        module: of PyTorch, in eval mode; its weights do not matter.
        run: (module, inputs as tensors) -> the outputs, by the same names.
        inputs: seed -> the inputs by name.
        code: the ``module:function`` whose code runs, for errors.
        masks: inputs -> name of an output -> true where it counts.
    """

    function: Callable[[Arrays, Arrays], Arrays]
    module: torch.nn.Module
    run: Callable[[torch.nn.Module, Arrays], Arrays]
    inputs: Callable[[int], Mapping[str, Array]]
    code: str
    masks: Callable[[Mapping[str, Array]], Mapping[str, Array]] = lambda inputs: {}


def whole_numbers(source: Source, root: str = "") -> dict[str, Array]:
    """Return the leaves below a root that are one integer or truth value each, as Equinox saves the numbers of a configuration."""
    prefix = f"{root}/" if root else ""
    names = without_value(source.leaves)
    return {
        names[name].removeprefix(prefix): source.read(name)
        for name, leaf in source.leaves.items()
        if name.startswith(prefix) and leaf.spec.shape == () and numpy_dtype(leaf.spec.dtype).kind in "iub"
    }


@packages_named()
def pair_of_reference(
    factory: str, settings: Mapping[str, Any], checkpoint: Source | None = None, to: str | None = None
) -> Pair:
    """Make the pair of a reference, as `convert check --reference` takes it; only its outputs are compared.

    Args:
        factory: ``module:function``. That of shipped rules is given the plan that these make for the checkpoint.
        settings: sizes and facts that it reads from its plan.
        to: target of the shipped rules; None is their first.

    Raises:
        ConvertError: there is no such function, it needs a plan, it has no JAX side, or it has no such target.
        UserCodeError: its code raised an error.
    """
    plan = None if checkpoint is None else _shipped_plan(factory, settings, checkpoint, to)
    if plan is not None:
        return _pair_of_plan(factory, plan)
    if to is not None:
        got = "no checkpoint" if checkpoint is None else f"{factory}, which no shipped rules name"
        raise ConvertError(Finding("usage", path=f"--to {to}", expected="the reference of a shipped family", got=got))
    make = find_factory(factory, REFERENCE_OPTION)
    require_factory(factory, make)
    with user_code_errors(factory, REFERENCE_OPTION):
        reference = make(_NoPlan(factory, settings))
    require_reference(reference, factory)
    if reference.jax is None:
        _refuse(REFERENCE_OPTION + factory, "a reference with a JAX side", "one without", OTHER_WAY)
    with user_code_errors(factory, REFERENCE_OPTION):
        return _pair(factory, reference, _built(reference, factory))


def _shipped_plan(factory: str, settings: Mapping[str, Any], checkpoint: Source, to: str | None) -> Plan | None:
    """Return the plan of the shipped rules whose reference this is; None if it is no shipped one.

    Raises:
        ConvertError: the rules do not fit the checkpoint, lack a setting, or have no such target.
    """
    choice = shipped_match(factory, settings, checkpoint, to)
    if choice is None:
        return None
    plan = plan_selected(choice)
    if choice.format is not TORCH:
        expected = f"a target of the rules ({', '.join(choice.rules.targets)})"
        raise ConvertError(Finding("usage", path=f"--to {to}", expected=expected, got="one without a PyTorch module"))
    return plan


def shipped_match(
    factory: str, settings: Mapping[str, Any], checkpoint: Source, to: str | None = None
) -> RuleMatch | None:
    """Return the leaves that the shipped rules match whose reference this is; None if it is no shipped one.

    Raises:
        ConvertError: the rules do not fit the checkpoint, or lack a setting.
    """
    candidates = [rules for rules in available_rules() if rules.reference == factory]
    if not candidates:
        return None
    choice = select(candidates, (), checkpoint, ConversionOptions(to, settings=dict(settings)))
    if not isinstance(choice, RuleMatch):
        raise explain(choice)
    return choice


def _pair_of_plan(factory: str, plan: Plan) -> Pair:
    """Return the pair of a shipped reference; its function takes the checkpoint's names, with or without the plan's root."""
    import torch

    reference: Reference = find_factory(factory, REFERENCE_OPTION)(plan)
    drawn = {
        step.name: torch.rand(step.spec.shape) if step.value is None else torch.as_tensor(computed(step))
        for step in plan.steps
    }
    with _tables_in_float64():  # loading ties what is tied, and nothing else
        module = reference.build(drawn)
    pair = _pair(factory, reference, module.eval())
    root = f"{plan.root}/" if plan.root else ""

    def function(weights: Arrays, given: Arrays) -> Arrays:
        return pair.function({name.removeprefix(root): value for name, value in weights.items()}, given)

    return replace(pair, function=function)


def _pair(factory: str, reference: Reference, module: torch.nn.Module) -> Pair:
    side = reference.jax_outputs_side()
    names = tuple(reference.outputs)

    def masks(given: Mapping[str, Array]) -> Mapping[str, Array]:
        return {name: mask for name, mask in require_masks(reference.masks(given), {}) if name in names}

    function, run = _only(side, names, "jax"), _only(reference.run, names, "run")
    return Pair(function, module, run, reference.inputs, factory, masks)


@packages_named()
def pair_of_parts(jax: str, net: str, inputs: str) -> Pair:
    """Make the pair of a JAX function, a class or function that makes the module, and a function that makes the inputs.

    Args:
        jax: ``module:function`` of (parameters by name, inputs by name); it returns an array, or several in a tuple or by name.
        net: ``module:class`` without arguments. The module is called with the inputs by their names.
        inputs: ``module:function`` of a seed; it returns NumPy arrays by name.

    Raises:
        ConvertError: there is no such code, or it makes something else.
        UserCodeError: the code raised an error.
    """
    from torch.nn import Module

    from convert.programs.record_torch import require_weights

    function, make, draw = (
        find_factory(name, option) for name, option in ((jax, JAX_OPTION), (net, TORCH_OPTION), (inputs, INPUTS_OPTION))
    )
    for name, option, made, arguments in (
        (jax, JAX_OPTION, function, ("parameters", "inputs")),
        (net, TORCH_OPTION, make, ()),
        (inputs, INPUTS_OPTION, draw, ("seed",)),
    ):
        if signature_error(made, arguments) is not None:
            _refuse(option + name, f"a function of ({', '.join(arguments)})", "one of other arguments")
    with user_code_errors(net, TORCH_OPTION), _tables_in_float64():
        module = make()
    if not isinstance(module, Module):
        _refuse(TORCH_OPTION + net, "a torch.nn.Module", type(module).__name__)
    require_weights(module)
    try:
        module.eval()
    except NotImplementedError:
        _refuse(TORCH_OPTION + net, "a module with an eval mode", "one of torch.export, which has none")

    def run(module: torch.nn.Module, given: Arrays) -> Arrays:
        return outputs_by_name(module(**given))

    def drawn(seed: int) -> Mapping[str, Array]:
        with user_code_errors(inputs, INPUTS_OPTION):
            return require_inputs(draw(seed))

    def forward(weights: Arrays, given: Arrays) -> Arrays:
        return require_outputs_by_name(function(weights, given), JAX_OPTION + jax)

    return Pair(forward, module, run, drawn, jax)


def specs_of_function(factory: str) -> dict[str, TensorSpec]:
    """Return the shapes and dtypes of the leaves of a pytree that a function returns, such as ``jax.eval_shape(model.init, ...)``.

    It may return tuples of sizes by name instead; these leaves are float32.

    Raises:
        ConvertError: there is no such function, or it returns no tree of arrays.
        UserCodeError: its code raised an error.
    """
    make = find_factory(factory, SHAPES_OPTION)
    with user_code_errors(factory, SHAPES_OPTION):
        tree = make()
    if are_sizes(tree):
        sizes = sizes_by_name(tree, SHAPES_OPTION + factory)
        return {name: TensorSpec(shape, "float32") for name, shape in sizes.items()}
    leaves = leaves_by_name(tree, SHAPES_OPTION + factory)
    return {name: TensorSpec(tuple(leaf.shape), str(leaf.dtype)) for name, leaf in leaves.items()}


def _only(
    function: Callable[[Any, Arrays], Arrays], names: tuple[str, ...], field: str
) -> Callable[[Any, Arrays], Arrays]:
    """Leave out the boundaries that a function of a reference returns beside the outputs."""

    def outputs(first: Any, inputs: Arrays) -> Arrays:
        made = function(first, inputs)
        require_outputs(names, field, made)
        return {name: value for name, value in made.items() if name in names}

    return outputs


class _NoPlan:
    """Stands for the plan that a reference's factory takes: the rules are not written yet.

    Attributes:
        sizes, facts: what the user gave with `--set`.
    """

    def __init__(self, factory: str, settings: Mapping[str, Any]) -> None:
        self._factory = factory
        self.sizes = _Given(factory, "sizes", settings)
        self.facts = _Given(factory, "facts", settings)

    def __getattr__(self, name: str) -> NoReturn:
        got = f"one that reads plan.{name}, which follows from the rules"
        _refuse(REFERENCE_OPTION + self._factory, "a factory that needs no plan", got, OTHER_WAY)


class _Given(dict[str, Any]):
    """Sizes or facts that the user gave; another one is an error that says how to give it."""

    def __init__(self, factory: str, kind: str, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._factory, self._kind = factory, kind

    def __missing__(self, name: str) -> NoReturn:
        problem = f"it reads plan.{self._kind}[{name!r}], and there are no rules yet from which it follows"
        fix = f"give it with --set {name}=..."
        raise ConvertError(Finding("reference-invalid", problem, path=REFERENCE_OPTION + self._factory, fix=fix))


class _AnyWeights(dict[str, Any]):
    """The weights that `build` is given: there are none yet, and `load_state_dict` is not carried out."""


def _built(reference: Reference, factory: str) -> torch.nn.Module:
    """Return the module that `build` makes, with the weights that it has before any are loaded."""
    try:
        with _nothing_loaded(), _tables_in_float64():
            module = reference.build(_AnyWeights())
    except (KeyError, IndexError, StopIteration) as error:
        got = f"one that reads the weights ({type(error).__name__}: {error})"
        _refuse(REFERENCE_OPTION + factory, "a `build` that makes the module and calls load_state_dict", got, OTHER_WAY)
    except UserCodeError:
        raise
    if any(parameter.is_meta for parameter in module.parameters()):
        module = module.to_empty(device="cpu")
        for buffer in module.buffers():  # else they hold what the memory held
            buffer.zero_()
    return module.eval()


@contextmanager
def _tables_in_float64() -> Iterator[None]:
    """Let a module compute what it keeps beside its weights, such as the angles of RoPE, as exactly as it will run."""
    from convert.numerics.lift_torch import lifted

    with lifted():
        yield


@contextmanager
def _nothing_loaded() -> Iterator[None]:
    """Let `load_state_dict` return without loading."""
    from unittest import mock

    from torch.nn import Module
    from torch.nn.modules.module import _IncompatibleKeys

    def loaded(self: Module, *args: Any, **kwargs: Any) -> Any:
        return _IncompatibleKeys([], [])

    with mock.patch.object(Module, "load_state_dict", loaded):
        yield


def _refuse(path: str, expected: str, got: str, fix: str = "see docs/guides/infer.md") -> NoReturn:
    raise ConvertError(Finding("reference-invalid", path=path, expected=expected, got=got, fix=fix))
