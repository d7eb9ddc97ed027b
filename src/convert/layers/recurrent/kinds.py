"""Recurrent cells: the source's equations and what each of its leaves holds; ``torch.nn.GRU``, ``LSTM`` or ``RNN`` in the target.

In the words used here a cell computes, for every gate k, from input x and state h::

    k = sigmoid(W_k x + b_k + U_k h + c_k)

`W` and `b` are torch's ``weight_ih`` and ``bias_ih``, `U` and `c` its ``weight_hh`` and ``bias_hh``. A leaf that holds
``U [H, zrn]`` is a matrix whose axis 0 is the state and whose axis 1 has the columns of the gates z, r and n, in this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from convert.core.fields import FLAG, Choice, Either, Key, MapOf, Record, Scalar
from convert.core.path_pattern import Pattern, parse_pattern
from convert.layers.base import Kind, TargetLayer
from convert.layers.shared_keys import PATTERN, parse_letter

TENSORS: Mapping[str, str] = {"weight_ih": "W", "weight_hh": "U", "bias_ih": "b", "bias_hh": "c"}
GATES: Mapping[str, tuple[str, ...]] = {"gru": ("r", "z", "n"), "lstm": ("i", "f", "g", "o"), "rnn": ("h",)}
UNRESET = ("z", "n")  # of our own module, for a cell without a reset gate
EQUATIONS: Mapping[
    str, Mapping[str, str]
] = {  # torch 2.13, torch/nn/modules/rnn.py: the docstrings of RNN, LSTM and GRU
    "gru": {"n": "tanh(W x + b + r * (U h + c))", "h": "(1 - z) * n + z * h"},
    "lstm": {"c": "f * c + i * g", "h": "o * tanh(c)"},
    "rnn": {"h": "tanh(W x + b + U h + c)"},
}
RESETS: Mapping[str, str] = {  # where the reset gate stands in a GRU's candidate n -> the candidate
    "after": "tanh(W x + b + r * (U h + c))",
    "before": "tanh(W x + b + U (r * h))",
    "none": "tanh(W x + b + U h)",
}


@dataclass(frozen=True)
class Held:
    """What a leaf of a cell holds.

    Attributes:
        text: as written, ``W [I, zrn]``.
        parts: of `W`, `U`, `b` and `c`; two when the leaf holds both, one after the other.
        axes: ``I``, ``H``, ``I+H`` (one after the other), ``2`` (stacked), or the letters of gates, which follow each other.
    """

    text: str
    parts: tuple[str, ...]
    axes: tuple[str, ...]

    @property
    def gates(self) -> str:
        """The gates, in the order in which they are packed."""
        return self.axes[self.gate_axis]

    @property
    def gate_axis(self) -> int:
        """The axis along which they are."""
        return next(k for k, axis in enumerate(self.axes) if axis.islower())


_HELD = re.compile(r"(?P<parts>[WUbc](?: [WUbc])?) ?\[(?P<axes>[^\[\]]+)\]")
_AXES = {("W",): ["I"], ("U",): ["H"], ("W", "U"): ["I+H"], ("b",): [], ("c",): [], ("b", "c"): ["2"]}


def parse_held(text: str) -> Held:
    """Reads what a leaf holds.

    >>> parse_held("W U [I+H, igfo]").gates
    'igfo'

    Raises:
        ValueError: not of this form.
    """
    match = _HELD.fullmatch(text.strip())
    example = "a leaf holds W [I, zrn], U [H, zrn], b [zrn] or c [zrn] (the gates in the order in which they are packed), W U [I+H, zrn], or b c [2, zrn]"
    if match is None:
        raise ValueError(f"{text!r} does not say what a leaf of a cell holds: {example}")
    parts = tuple(match["parts"].split())
    axes = tuple("".join(axis.split()) for axis in match["axes"].split(","))
    gates = [axis for axis in axes if axis.isalpha() and axis.islower()]
    if len(gates) != 1 or sorted(axis for axis in axes if axis not in gates) != _AXES.get(parts):
        raise ValueError(f"{text!r} has not the axes of {' and '.join(parts)}: {example}")
    if len(set(gates[0])) < len(gates[0]):
        raise ValueError(f"{gates[0]!r} in {text!r} has a gate twice")
    return Held(text, parts, axes)


@dataclass(frozen=True)
class Cell:
    """A cell as the source computes it.

    Attributes:
        name: as the rule calls it.
        word: ``gru``, ``lstm`` or ``rnn``: the torch layer that it is nearest to.
        equations: in the source's letters.
        leaves: path below the cell -> what the leaf holds.
        gates: torch's gate -> the source's letter.
        reset: of a GRU, where the reset gate stands: ``after`` the matrix, ``before`` it, ``none``.
        keeps: of a GRU, whether its update gate multiplies the old state (torch's does), or the new one.
        offsets: the source's letter -> what is added to that gate before its sigmoid.
        activation: of an RNN, ``tanh`` or ``relu``.
        residual: of an RNN, whether the state is added before the activation.
        may_lack: leaves that may be absent.
    """

    name: str
    word: str
    equations: Mapping[str, str]
    leaves: Mapping[str, Held]
    gates: Mapping[str, str]
    reset: str = "after"
    keeps: bool = True
    offsets: Mapping[str, float] = field(default_factory=dict)
    activation: str = "tanh"
    residual: bool = False
    may_lack: frozenset[str] = frozenset()

    def holder(self, part: str, letter: str) -> str | None:
        """The leaf that holds `W`, `U`, `b` or `c` of a gate; None when none does."""
        return next((path for path, held in self.leaves.items() if part in held.parts and letter in held.gates), None)

    @property
    def order(self) -> tuple[str, ...]:
        """The gates as the rows of the target's tensors: torch's, or our own module's where there is no reset gate."""
        return UNRESET if self.word == "gru" and self.reset == "none" else GATES[self.word]

    @property
    def module(self) -> str:
        """The class of ours that computes what torch's cannot; empty when torch's can."""
        return (
            f"convert.layers.recurrent.torch_modules.GRU(reset={self.reset!r})"
            if self.word == "gru" and self.reset != "after"
            else ""
        )

    @property
    def refusal(self) -> str:
        """Why torch's layer cannot compute this cell, with both equations; empty when it can."""
        if not self.module:
            return ""
        letter = self.gates.get("r", "r")
        differs = {
            "before": f"the reset gate {letter} multiplies the state before the matrix U, in torch behind it",
            "none": "there is no reset gate, in torch there is",
        }[self.reset]
        return (
            f"{self.name} computes n = {self.equations['n']}, torch.nn.GRU n = {EQUATIONS['gru']['n']}: {differs}. No weights "
            f"make the two equal. --allow-custom-cells writes them for {self.module}, which computes the source's equation; "
            "use that in place of torch.nn.GRU"
        )


def _bare(equation: str) -> str:
    return re.sub(r"[\s*]", "", equation)


_CANDIDATES = {
    "after": re.compile(r"tanh\(Wx(?:\+b)?\+(?P<r>[a-z])(?:Uh|\(Uh(?:\+c)?\))\)"),
    "before": re.compile(r"tanh\(Wx(?:\+b)?\+U\((?P<r>[a-z])h\)(?:\+[bc])*\)"),
    "none": re.compile(r"tanh\(Wx(?:\+b)?\+Uh(?:\+[bc])*\)"),
}
_UPDATES = {
    True: re.compile(r"\(1-(?P<z>[a-z])\)n\+(?P=z)h|(?P<y>[a-z])h\+\(1-(?P=y)\)n|n\+(?P<x>[a-z])\(h-n\)"),
    False: re.compile(r"\(1-(?P<z>[a-z])\)h\+(?P=z)n|(?P<y>[a-z])n\+\(1-(?P=y)\)h|h\+(?P<x>[a-z])\(n-h\)"),
}
_FORGET = re.compile(r"sigmoid\((?:(?:Wx|Uh|b|c)\+)+(?P<offset>[0-9.]+)\)")
_STATE = re.compile(r"(?P<activation>tanh|relu)\(Wx(?:\+b)?\+Uh(?:\+c)?(?P<residual>\+h)?\)")


def make_cell(
    word: str,
    name: str,
    equations: Mapping[str, str],
    leaves: Mapping[str, Held],
    may_lack: frozenset[str] = frozenset(),
) -> Cell:
    """A cell, its equations understood.

    Raises:
        ValueError: an equation that is none of those known, or leaves that do not hold all of the cell.
    """
    made = {"gru": _gru, "lstm": _lstm, "rnn": _rnn}[word](name, equations, leaves, may_lack)
    for letter in dict.fromkeys(made.gates[gate] for gate in made.order):
        for part in "WU":
            if made.holder(part, letter) is None:
                raise ValueError(f"no leaf of {name} holds {part} of the gate {letter}; `leaves` says what each holds")
    _hold_once(made)
    return made


def _hold_once(cell: Cell) -> None:
    seen: dict[tuple[str, str], str] = {}
    for path, held in cell.leaves.items():
        for part in held.parts:
            for letter in held.gates:
                if letter not in cell.gates.values():
                    raise ValueError(
                        f"{path}: {held.text} holds a gate {letter}, and the gates of {cell.name} are {', '.join(dict.fromkeys(cell.gates.values()))}"
                    )
                if other := seen.get((part, letter)):
                    raise ValueError(f"{other} and {path} both hold {part} of the gate {letter}")
                seen[part, letter] = path


def _gru(name: str, equations: Mapping[str, str], leaves: Mapping[str, Held], may_lack: frozenset[str]) -> Cell:
    candidate, update = equations.get("n", ""), equations.get("h", "")
    found = [(reset, m) for reset, pattern in _CANDIDATES.items() if (m := pattern.fullmatch(_bare(candidate)))]
    if not found:
        known = "; ".join(f"{text} (reset {reset} the matrix)" for reset, text in RESETS.items() if reset != "none")
        raise ValueError(f"n = {candidate or '?'} is no candidate of a GRU that is known: {known}; {RESETS['none']}")
    reset, match = found[0]
    mixed = [(keeps, m) for keeps, pattern in _UPDATES.items() if (m := pattern.fullmatch(_bare(update)))]
    if not mixed:
        raise ValueError(f"h = {update or '?'} is no update of a GRU: (1 - z) * n + z * h, or (1 - z) * h + z * n")
    keeps, m = mixed[0]
    gates = {"z": next(letter for letter in m.group("z", "y", "x") if letter), "n": "n"}
    if reset != "none":
        gates = {"r": match["r"], **gates}
    return Cell(name, "gru", equations, leaves, gates, reset=reset, keeps=keeps, may_lack=may_lack)


def _lstm(name: str, equations: Mapping[str, str], leaves: Mapping[str, Held], may_lack: frozenset[str]) -> Cell:
    given = {**EQUATIONS["lstm"], **equations}
    for key, wanted in EQUATIONS["lstm"].items():
        if _bare(given[key]) != _bare(wanted):
            raise ValueError(f"{key} = {given[key]} is no equation of an LSTM: {key} = {wanted}; torch has no other")
    offsets: dict[str, float] = {}
    if "f" in equations:
        match = _FORGET.fullmatch(_bare(equations["f"]))
        if match is None:
            raise ValueError(f"f = {equations['f']} is no forget gate that is known: sigmoid(W x + U h + b + 1)")
        offsets["f"] = float(match["offset"])
    gates = {gate: gate for gate in GATES["lstm"]}
    return Cell(name, "lstm", given, leaves, gates, offsets=offsets, may_lack=may_lack)


def _rnn(name: str, equations: Mapping[str, str], leaves: Mapping[str, Held], may_lack: frozenset[str]) -> Cell:
    given = {**EQUATIONS["rnn"], **equations}
    match = _STATE.fullmatch(_bare(given["h"]))
    if match is None:
        raise ValueError(
            f"h = {given['h']} is no state of an RNN that torch has: tanh(W x + b + U h + c), or relu(...)"
        )
    return Cell(
        name,
        "rnn",
        given,
        leaves,
        {"h": "h"},
        activation=match["activation"],
        residual=bool(match["residual"]),
        may_lack=may_lack,
    )


def _parse_leaf_path(text: str) -> str:
    if not text or any(character in text for character in "{}*\\"):
        raise ValueError(f"{text!r} is no path of one leaf below `from`")
    return text


_CELL = Record(
    {
        "n": Key(Scalar(str, "an equation"), "a GRU's candidate: tanh(W x + b + r * (U h + c)), or tanh(W x + b + U (r * h))"),
        "h": Key(Scalar(str, "an equation"), "the new state: (1 - z) * n + z * h, or tanh(W x + b + U h + c)"),
        "f": Key(Scalar(str, "an equation"), "an LSTM's forget gate, where something is added: sigmoid(W x + U h + b + 1)"),
        "c": Key(Scalar(str, "an equation"), "an LSTM's cell state: f * c + i * g"),
    },
    "a cell's equations",
)  # fmt: skip


def _parse_layer(value: int | str) -> str:
    text = str(value)
    if not (text.isdecimal() or re.fullmatch(r"\{([A-Za-z_]\w*|[0-9]+(,[0-9]+)+)\}", text)):
        raise ValueError(f"a layer is a number, an index such as '{{k}}', or numbers such as '{{1,2}}', not {value!r}")
    return text


DIRECTIONS = {
    "forward": "",
    "backward": "_reverse",
    "{forward,backward}": "{,_reverse}",
    "{backward,forward}": "{_reverse,}",
}


@dataclass(frozen=True)
class Recurrent(Kind):
    """One layer in one direction of a recurrent network.

    Attributes:
        cell: what the source computes.
        inputs, hidden: letters of the file for the sizes of the input and the state.
    """

    cell: Cell
    inputs: str | None = None
    hidden: str | None = None

    word: ClassVar[str]
    doc: ClassVar[str]
    keys: ClassVar[Mapping[str, Key]] = {
        "cell": Key(
            Either(Scalar(str, "a cell such as flax.linen.GRUCell, or keras.layers.GRU(reset_after=False)"), _CELL),
            "the source's cell, by its name and arguments in its library, or its equations",
            required=True,
        ),
        "leaves": Key(
            MapOf(Scalar(str, "what a leaf holds, such as W [I, zrn]", parse_held), key=_parse_leaf_path),
            "path below `from` -> what the leaf holds; needed for equations, and for leaves that are called otherwise",
        ),
        "inputs": Key(Scalar(str, "an axis letter", parse_letter), "letter of the input's width"),
        "hidden": Key(Scalar(str, "an axis letter", parse_letter), "letter of the state's width"),
    }
    target: ClassVar[Record] = Record(
        {
            "module": Key(PATTERN, "the module's name in the state_dict", required=True),
            "layer": Key(Scalar((int, str), "a number or an index", _parse_layer), "which of its layers (default: 0)"),
            "direction": Key(
                Choice(tuple(DIRECTIONS)), "forward, or backward in a bidirectional one; both as in `from`"
            ),
            "bias": Key(FLAG, "false: the target was made with bias=False"),
        },
        "a target",
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Recurrent:
        from convert.layers.recurrent.library_cells import named_cell

        said, leaves = values["cell"], values.get("leaves")
        if isinstance(said, str):
            cell = named_cell(said, cls.word, leaves)
        elif leaves is None:
            raise ValueError("a cell given by its equations needs `leaves:`, what each leaf holds")
        else:
            cell = make_cell(cls.word, "the cell of this rule", said, leaves)
        return cls(cell, values.get("inputs"), values.get("hidden"))

    @classmethod
    def layer(cls, values: Mapping[str, Any]) -> TargetLayer:
        end = f".l{values.get('layer', '0')}{DIRECTIONS[values.get('direction', 'forward')]}"
        return TargetLayer(parse_pattern(values["module"].text + end), computes=values.get("bias", True))

    def patterns(self, start: Pattern) -> dict[str, Pattern]:
        return {path: parse_pattern(f"{start.text}/{path}") for path in self.cell.leaves}

    @property
    def may_lack(self) -> frozenset[str]:
        return self.cell.may_lack

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> None:
        held = self.cell.leaves[role]
        if len(shape) != len(held.axes):
            raise ValueError(f"it holds {held.text} and has the axes {', '.join(held.axes)}")
        gates = shape[held.gate_axis]
        if gates % len(held.gates):
            raise ValueError(f"it holds {held.text}, and {gates} is no multiple of its {len(held.gates)} gates")
        if any(axis == "2" and size != 2 for axis, size in zip(held.axes, shape, strict=True)):
            raise ValueError(f"it holds {held.text}, {' and '.join(held.parts)} stacked on an axis of size 2")

    def sizes(self, role: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
        """The cell's `I` and `H`, as far as one leaf tells."""
        held = self.cell.leaves[role]
        hidden = shape[held.gate_axis] // len(held.gates)
        yield "H", hidden
        for axis, size in zip(held.axes, shape, strict=True):
            if axis in ("I", "H"):
                yield axis, size
            if axis == "I+H":
                yield "I", size - hidden

    def file_letter(self, axis: str) -> str | None:
        """The letter that the file gives to the cell's `I` or `H`."""
        return self.inputs if axis == "I" else self.hidden

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        said: dict[str, Any] = {"cell": self.cell.name, "equations": ", ".join(f"{k} = {v}" for k, v in self.cell.equations.items())}  # fmt: skip
        return {**said, "module": self.cell.module} if self.cell.module else said

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        module, _, suffix = path.rpartition(".")
        return f"{module}.{role}_{suffix}"


@dataclass(frozen=True)
class GRU(Recurrent):
    """``torch.nn.GRU``: one layer in one direction."""

    word: ClassVar[str] = "gru"
    doc: ClassVar[str] = "torch.nn.GRU (rows r, z, n): weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0"


@dataclass(frozen=True)
class LSTM(Recurrent):
    """``torch.nn.LSTM``: one layer in one direction."""

    word: ClassVar[str] = "lstm"
    doc: ClassVar[str] = "torch.nn.LSTM (rows i, f, g, o): weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0"


@dataclass(frozen=True)
class RNN(Recurrent):
    """``torch.nn.RNN``: one layer in one direction."""

    word: ClassVar[str] = "rnn"
    doc: ClassVar[str] = (
        "torch.nn.RNN, with tanh or nonlinearity='relu': weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0"
    )
