"""The rules `gru`, `lstm` and `rnn`: a cell of the source; ``torch.nn.GRU``, ``LSTM`` or ``RNN`` in the target."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from convert.core.fields import FLAG, Choice, Either, Key, MapOf, Record, Scalar
from convert.core.path_pattern import Pattern, parse_pattern
from convert.layers.base import CompileContext, CompiledRule, LayerKind, Matched, PlanView, Step
from convert.layers.mistake import Mistake
from convert.layers.probe import Probe
from convert.layers.recurrent.compile import compile_cell
from convert.layers.recurrent.equations import NO_LAYER, TENSORS, Cell, make_cell, parse_held, tensor_at
from convert.layers.recurrent.library_cells import named_cell
from convert.layers.recurrent.mistakes import cell_mistakes
from convert.layers.recurrent.probe import probe_cell, random_weights
from convert.layers.shared_keys import PATTERN, TARGET_CONCATENATED, parse_letter
from convert.layers.target import TargetLayer

Array = np.ndarray[Any, np.dtype[Any]]


def _parse_leaf_path(text: str) -> str:
    if not text or any(character in text for character in "{}*\\"):
        raise ValueError(f"{text!r} is not the path of one leaf below `from`")
    return text


_CELL = Record(
    {
        "n": Key(Scalar(str, "an equation"), "Candidate of a GRU: tanh(W x + b + r * (U h + c)) or tanh(W x + b + U (r * h))."),
        "h": Key(Scalar(str, "an equation"), "New state: (1 - z) * n + z * h, or tanh(W x + b + U h + c)."),
        "f": Key(Scalar(str, "an equation"), "Forget gate of an LSTM, if the source adds a constant: sigmoid(W x + U h + b + 1). Default: nothing is added."),
        "c": Key(Scalar(str, "an equation"), "Cell state of an LSTM: f * c + i * g."),
    },
    "a cell's equations",
)  # fmt: skip


def _parse_layer(value: int | str) -> str:
    text = str(value)
    if not (text == NO_LAYER or text.isdecimal() or re.fullmatch(r"\{([A-Za-z_]\w*|[0-9]+(,[0-9]+)+)\}", text)):
        raise ValueError(
            f"a layer is a number, an index such as '{{k}}', numbers such as '{{1,2}}', or {NO_LAYER}, not {value!r}"
        )
    return text


DIRECTIONS = {
    "forward": "",
    "backward": "_reverse",
    "{forward,backward}": "{,_reverse}",
    "{backward,forward}": "{_reverse,}",
}


@dataclass(frozen=True)
class Recurrent(LayerKind):
    """One layer in one direction of a recurrent network.

    Attributes:
        cell: what the source computes.
        inputs, hidden: letters of the file for the sizes of the input and the state.
    """

    cell: Cell
    inputs: str | None = None
    hidden: str | None = None

    guide: ClassVar[str] = "recurrent-cells"
    kind_name: ClassVar[str]
    packed: ClassVar[bool] = True
    settings: ClassVar[tuple[str, ...]] = ("custom_cells",)  # which --allow-custom-cells sets
    doc: ClassVar[str]
    keys: ClassVar[Mapping[str, Key]] = {
        "cell": Key(
            Either(Scalar(str, "a cell such as flax.linen.GRUCell, or keras.layers.GRU(reset_after=False)"), _CELL),
            "Cell of the source: its name and arguments in its library, or its equations.",
            required=True,
            example="flax.linen.GRUCell",
        ),
        "leaves": Key(
            MapOf(Scalar(str, "what a leaf holds, such as W [I, zrn]", parse_held), key=_parse_leaf_path),
            "Mapping of a path below `from` to the meaning of the leaf; required with equations, and if the leaves have other names than in the library. Default: the library's names.",
        ),
        "inputs": Key(Scalar(str, "an axis letter", parse_letter), "Letter of the input's width. Default: no letter."),
        "hidden": Key(Scalar(str, "an axis letter", parse_letter), "Letter of the state's width. Default: no letter."),
    }
    target: ClassVar[Record] = Record(
        {
            "module": Key(PATTERN, "Name of the module in the state_dict.", required=True),
            "layer": Key(
                Scalar((int, str), "a number or an index", _parse_layer),
                "Index of the layer in the torch module; `none`: a module for one step, such as torch.nn.LSTMCell. Default: 0.",
            ),
            "direction": Key(
                Choice(tuple(DIRECTIONS)),
                "Direction of the layer in a bidirectional torch module, `forward` or `backward`. Default: forward.",
            ),
            "concatenated": TARGET_CONCATENATED,
            "bias": Key(FLAG, "Whether the target was created with bias=True. Default: true."),
        },
        "a target",
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Recurrent:
        given, leaves = values["cell"], values.get("leaves")
        if isinstance(given, str):
            cell = named_cell(given, cls.kind_name, leaves)
        elif leaves is None:
            raise ValueError("a cell given by its equations needs `leaves:`, what each leaf holds")
        else:
            cell = make_cell(cls.kind_name, "the cell of this rule", given, leaves)
        return cls(cell, values.get("inputs"), values.get("hidden"))

    @classmethod
    def layer(cls, values: Mapping[str, Any]) -> TargetLayer:
        layer, direction = values.get("layer", "0"), DIRECTIONS[values.get("direction", "forward")]
        if layer == NO_LAYER and direction:
            raise ValueError("a module for one step (`layer: none`) has no direction; leave `direction` out")
        end = f"l{layer}{direction}" if layer != NO_LAYER else ""
        path, order = parse_pattern(f"{values['module'].text}.{end}"), values.get("concatenated", {})
        return TargetLayer(path, computes=values.get("bias", True), concatenated=order)

    def patterns(self, start: Pattern) -> dict[str, Pattern]:
        return {path: parse_pattern(f"{start.text}/{path}") for path in self.cell.leaves}

    @property
    def may_lack(self) -> frozenset[str]:
        return self.cell.may_lack

    @property
    def letters_used(self) -> str:
        return "".join(filter(None, (self.inputs, self.hidden)))

    @property
    def concatenable(self) -> str:
        return self.inputs or ""

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> None:
        self.cell.leaves[role].check(shape)

    def implied_sizes(self, role: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int, str]]:
        held, names = self.cell.leaves[role], {"I": self.inputs, "H": self.hidden}
        for axis, size in held.sizes(shape):
            if letter := names[axis]:
                yield letter, size, held.text

    def compile(
        self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None
    ) -> CompiledRule:
        return CompiledRule(tuple(compile_cell(context, self.cell, matched, layer)))

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        facts: dict[str, Any] = {"cell": self.cell.name, "equations": ", ".join(f"{k} = {v}" for k, v in self.cell.equations.items())}  # fmt: skip
        return {**facts, "module": self.cell.module} if self.cell.module else facts

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        """Return the name of a tensor; for the path of a leaf that of the first that holds a part of it."""
        if role not in TENSORS:
            first = self.cell.leaves[role].parts[0]
            role = next(tensor for tensor, part in TENSORS.items() if part == first)
        return tensor_at(path, role)

    def leaf_shape(self, role: str, tensor: tuple[int, ...]) -> tuple[int, ...]:
        held, hidden = self.cell.leaves[role], tensor[0] // len(self.cell.order)
        sizes = {"2": 2, "H": hidden}
        if len(tensor) > 1:
            sizes |= {"I": tensor[1], "I+H": tensor[1] + hidden}
        return tuple(sizes[axis] if axis in sizes or axis.startswith("I") else len(axis) * hidden for axis in held.axes)

    def probe_group(
        self, leaves: Mapping[str, Array], tensors: Mapping[str, Array], *, device: str, rng: np.random.Generator
    ) -> Probe:
        return probe_cell(self.cell, leaves, tensors, device, rng)

    def random_leaf(self, role: str, leaf: Array, rng: np.random.Generator) -> Array:
        return random_weights(leaf, rng)

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        return cell_mistakes(self.cell, step, plan)


@dataclass(frozen=True)
class GRU(Recurrent):
    """``torch.nn.GRU``: one layer in one direction."""

    kind_name: ClassVar[str] = "gru"
    doc: ClassVar[str] = "torch.nn.GRU (rows r, z, n): weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0."


@dataclass(frozen=True)
class LSTM(Recurrent):
    """``torch.nn.LSTM``: one layer in one direction."""

    kind_name: ClassVar[str] = "lstm"
    doc: ClassVar[str] = "torch.nn.LSTM (rows i, f, g, o): weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0."


@dataclass(frozen=True)
class RNN(Recurrent):
    """``torch.nn.RNN``: one layer in one direction."""

    kind_name: ClassVar[str] = "rnn"
    doc: ClassVar[str] = (
        "torch.nn.RNN, with tanh or nonlinearity='relu': weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0."
    )
