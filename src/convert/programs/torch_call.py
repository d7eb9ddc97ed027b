"""One call of a torch operator: its operands, its settings, what it writes to, and how to run it on other operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from convert.numerics.lift_torch import Lift, tensors_in

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
NUMBERS = ("number", "Optional[number]", "List[number]")
CHOOSE = {"alpha", "beta"}  # numbers that choose the function
OVERWRITTEN = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_"}
PACKED = {  # they need elements that lie side by side, or warn of others: the arrays of a run have strides of their own
    *("aten.view.dtype", "aten.view_as_complex.default"),
    *("aten.searchsorted.Tensor", "aten.bucketize.Tensor"),
}
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
        sizing: the operands whose elements choose the shape of what it gives.
        run: runs it on other operands; gives what it writes, then what it returns. Changes none of them.
    """

    name: str
    operands: Sequence[Any]
    settings: Mapping[str, Any]
    written: Sequence[torch.Tensor]
    elementwise: bool
    random: bool
    foreign: bool
    sizing: Sequence[int]
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
        return cls(name, (), settings, (), elementwise=False, random=False, foreign=False, sizing=(), run=run)

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Read the arguments by the operator's schema."""
        operator = _operator(func)
        operands: list[Any] = []
        forms: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        written: list[torch.Tensor] = []
        for number, argument in enumerate(operator.arguments):
            if number >= len(args) and argument.name not in kwargs:
                continue
            value = args[number] if number < len(args) else kwargs[argument.name]
            if argument.changed:
                written += tensors_in(value)
            forms[argument.name] = _form(value, operands, argument.blank) if argument.operand else value
            if not argument.operand and value is not None:
                settings[argument.name] = value
        sizing = [k for k, x in enumerate(operands) if operator.sizes and (operator.name != "index" or _is_mask(x))]
        facts = operator.elementwise, operator.random, operator.foreign
        return cls(operator.name, operands, settings, written, *facts, sizing, partial(_run, operator, forms))


class _Argument(NamedTuple):
    """What the schema of an operator says of an argument.

    Attributes:
        operand: whether tensors and numbers in it are operands.
        changed: whether the operator writes to it.
        blank: whether only its shape and its dtype are used.
        keyword: whether it is passed by name.
    """

    name: str
    operand: bool
    changed: bool
    blank: bool
    keyword: bool


@dataclass(frozen=True, eq=False)
class _Operator:
    """What the schema of an operator says.

    Attributes:
        again: what gives the same on arrays, whose strides may differ from the tensors'.
        packed: whether operands must lie in memory without gaps.
        sizes: whether elements of operands choose the shape of what it gives.
        name, elementwise, random, foreign: as in `Call`.
    """

    name: str
    arguments: Sequence[_Argument]
    again: Any
    packed: bool
    elementwise: bool
    random: bool
    foreign: bool
    sizes: bool


@cache
def _operator(func: Any) -> _Operator:
    namespace, _, name = func._schema.name.partition("::")
    lends = name in OVERWRITTEN or name.endswith("_like") or name.startswith("new_")
    arguments = []
    for argument in func._schema.arguments:
        kind, alias = str(argument.type), argument.alias_info
        operand = "Tensor" in kind or (kind in NUMBERS and argument.name not in CHOOSE)
        changed = alias is not None and bool(alias.is_write)
        blank = (lends and argument.name == "self") or (changed and argument.is_out)
        arguments.append(_Argument(argument.name, operand, changed, blank, argument.kwarg_only))
    strided = name in STRIDES and func._overloadname == "default"
    shown = f"{name}_dtype" if func is torch.ops.aten.view.dtype else name
    return _Operator(
        name=shown.removesuffix("_") if func._schema.is_mutable else shown,
        arguments=arguments,
        again=getattr(torch.ops.aten, STRIDES[name]).default if strided else func,
        packed=str(func) in PACKED,
        elementwise=torch.Tag.pointwise in func.tags,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        foreign=namespace not in LIBRARIES,
        sizes=torch.Tag.dynamic_output_shape in func.tags,
    )


def _is_mask(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)


def _results(written: Sequence[torch.Tensor], out: Any) -> list[torch.Tensor]:
    return [*written, *(x for x in tensors_in(out) if all(x is not y for y in written))]


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


def _run(operator: _Operator, forms: Mapping[str, Any], operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    written: list[torch.Tensor] = []
    for argument in operator.arguments:
        if argument.name not in forms:
            continue
        value = _filled(forms[argument.name], operands, argument.changed, operator.packed)
        if argument.changed:
            written += tensors_in(value)
        if argument.keyword:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return _results(written, Lift().__torch_dispatch__(operator.again, (), tuple(args), kwargs))


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
