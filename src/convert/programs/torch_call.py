"""One call of a torch operator: its operands, its settings, what it writes to, and how to run it on other operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from convert.numerics.lift_torch import Lift

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
NUMBERS = ("number", "Optional[number]", "List[number]")
CHOOSE = {"alpha", "beta"}  # numbers that choose the function
OVERWRITTEN = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_"}
BITS = {"aten.view.dtype", "aten.view_as_complex.default"}  # they need elements that lie side by side
STRIDES = {
    "view": "reshape",
    "_unsafe_view": "reshape",
    "_reshape_alias": "reshape",
}  # the strides of an array may differ
LIBRARIES = ("aten", "prims")


class _Slot(NamedTuple):
    """Stands in the arguments for an operand."""

    number: int
    scalar: bool


class _Blank(NamedTuple):
    """Stands in the arguments for a tensor of which only the shape and the dtype are used."""

    size: tuple[int, ...]
    dtype: torch.dtype


def tensors_in(x: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested result."""
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an operator.

    Attributes:
        name: without the overload, and without the underscore that says that it runs in place.
        operands: tensors, and the numbers that it computes with.
        settings: the other arguments, by name.
        written: the tensors that it changes.
        elementwise: whether each element of the result is computed from the elements of the operands at its place.
        random: whether another call gives other numbers.
        foreign: whether it is no operator of torch itself.
        moves_views: whether it may give a view.
        run: runs it on other operands; gives what it writes, then what it returns. Changes none of them.
    """

    name: str
    operands: Sequence[Any]
    settings: Mapping[str, Any]
    written: Sequence[torch.Tensor]
    elementwise: bool
    random: bool
    foreign: bool
    moves_views: bool
    run: Run

    @property
    def scalars(self) -> frozenset[int]:
        """Which operands are numbers."""
        return frozenset(k for k, x in enumerate(self.operands) if not isinstance(x, torch.Tensor))

    def results(self, out: Any) -> list[torch.Tensor]:
        """Return what the call wrote, then what it returned."""
        return _results(self.written, out)

    @classmethod
    def moving(cls, name: str, run: Run, settings: Mapping[str, Any]) -> Call:
        """An operation that moves elements between tensors."""
        return cls(name, (), settings, (), elementwise=False, random=False, foreign=False, moves_views=True, run=run)

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Read the arguments by the operator's schema."""
        namespace, _, name = func._schema.name.partition("::")
        operands: list[Any] = []
        forms: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        written: list[torch.Tensor] = []
        for argument, value in _arguments(func, args, kwargs):
            kind = str(argument.type)
            changed = _changed(argument)
            if changed:
                written += tensors_in(value)
            if "Tensor" in kind or (kind in NUMBERS and argument.name not in CHOOSE):
                blank = (argument.name == "self" and _lends_its_shape(name)) or (changed and argument.is_out)
                forms[argument.name] = _form(value, operands, blank)
            else:
                forms[argument.name] = value
            if not tensors_in(value) and forms[argument.name] is value and value is not None:
                settings[argument.name] = value
        mutable, elementwise = func._schema.is_mutable, torch.Tag.pointwise in func.tags
        plain = f"{name}_dtype" if func is torch.ops.aten.view.dtype else name
        return cls(
            name=plain.removesuffix("_") if mutable else plain,
            operands=operands,
            settings=settings,
            written=written,
            elementwise=elementwise,
            random=torch.Tag.nondeterministic_seeded in func.tags,
            foreign=namespace not in LIBRARIES,
            moves_views=not elementwise,
            run=_runner(func, name, forms),
        )


def _results(written: Sequence[torch.Tensor], out: Any) -> list[torch.Tensor]:
    return [*written, *(x for x in tensors_in(out) if all(x is not y for y in written))]


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _changed(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _lends_its_shape(name: str) -> bool:
    return name in OVERWRITTEN or name.endswith("_like") or name.startswith("new_")


def _form(value: Any, operands: list[Any], blank: bool) -> Any:
    """Return the argument with its operands replaced by slots; add them to `operands`."""
    if isinstance(value, list | tuple):
        return [_form(part, operands, blank) for part in value]
    if isinstance(value, torch.Tensor) and blank:
        return _Blank(tuple(value.shape), value.dtype)
    if not isinstance(value, torch.Tensor | bool | int | float | complex):
        return value
    operands.append(value)
    return _Slot(len(operands) - 1, not isinstance(value, torch.Tensor))


def _runner(func: Any, name: str, forms: Mapping[str, Any]) -> Run:
    arguments = {argument.name: argument for argument in func._schema.arguments}
    again = (
        getattr(torch.ops.aten, STRIDES[name]).default if func._overloadname == "default" and name in STRIDES else func
    )

    def run(operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        written: list[torch.Tensor] = []
        for key, form in forms.items():
            changed = _changed(arguments[key])
            value = _filled(form, operands, changed, str(func) in BITS)
            if changed:
                written += tensors_in(value)
            if arguments[key].kwarg_only:
                kwargs[key] = value
            else:
                args.append(value)
        out = Lift().__torch_dispatch__(again, (), tuple(args), kwargs)
        return _results(written, out)

    return run


def _filled(form: Any, operands: Sequence[torch.Tensor], copied: bool, packed: bool) -> Any:
    if isinstance(form, _Slot):
        x = operands[form.number]
        if form.scalar:
            return x.item()
        x = x.clone() if copied else x
        return x.contiguous() if packed else x
    if isinstance(form, _Blank):
        return torch.zeros(form.size, dtype=form.dtype)
    if isinstance(form, torch.device):
        return torch.device("cpu")
    if isinstance(form, list):
        return [_filled(part, operands, copied, packed) for part in form]
    return form
