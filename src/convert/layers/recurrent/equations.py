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

from convert.core.findings import Finding

TENSORS: Mapping[str, str] = {"weight_ih": "W", "weight_hh": "U", "bias_ih": "b", "bias_hh": "c"}
NO_LAYER = "none"  # of a module for one step, such as ``torch.nn.LSTMCell``: the names of its tensors have no layer
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


def tensor_at(path: str, role: str) -> str:
    """Return the name of a tensor, from the path of its module with the layer: ``rnn.l0``, or ``cell.`` for one without.

    >>> tensor_at("rnn.l0", "weight_ih"), tensor_at("cell.", "weight_ih")
    ('rnn.weight_ih_l0', 'cell.weight_ih')
    """
    module, _, layer = path.rpartition(".")
    return f"{module}.{role}_{layer}".removesuffix("_")


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
        """The gates in packed order."""
        return self.axes[self.gate_axis]

    @property
    def gate_axis(self) -> int:
        """The axis of the gates."""
        return next(k for k, axis in enumerate(self.axes) if axis.islower())

    def check(self, shape: tuple[int, ...]) -> None:
        """Check that a leaf of this shape can hold it.

        Raises:
            ValueError: it cannot; the message is the reason.
        """
        if len(shape) != len(self.axes):
            raise ValueError(f"it holds {self.text} and has the axes {', '.join(self.axes)}")
        gates = shape[self.gate_axis]
        if gates % len(self.gates):
            raise ValueError(f"it holds {self.text}, and {gates} is not a multiple of its {len(self.gates)} gates")
        if any(axis == "2" and size != 2 for axis, size in zip(self.axes, shape, strict=True)):
            raise ValueError(f"it holds {self.text}, {' and '.join(self.parts)} stacked on an axis of size 2")

    def sizes(self, shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
        """Yield the widths `I` and `H` of the cell that a leaf of this shape implies."""
        hidden = shape[self.gate_axis] // len(self.gates)
        yield "H", hidden
        for axis, size in zip(self.axes, shape, strict=True):
            if axis in ("I", "H"):
                yield axis, size
            if axis == "I+H":
                yield "I", size - hidden


_HELD = re.compile(r"(?P<parts>[WUbc](?: [WUbc])?) ?\[(?P<axes>[^\[\]]+)\]")
_AXES = {("W",): ["I"], ("U",): ["H"], ("W", "U"): ["I+H"], ("b",): [], ("c",): [], ("b", "c"): ["2"]}


def parse_held(text: str) -> Held:
    """Parse what a leaf holds.

    >>> parse_held("W U [I+H, igfo]").gates
    'igfo'

    Raises:
        ValueError: not of this form.
    """
    match = _HELD.fullmatch(text.strip())
    example = "a leaf holds W [I, zrn], U [H, zrn], b [zrn] or c [zrn] (the gates in the order in which they are packed), W U [I+H, zrn], or b c [2, zrn]"
    if match is None:
        raise ValueError(f"{text!r} does not describe a leaf of a cell: {example}")
    parts = tuple(match["parts"].split())
    axes = tuple("".join(axis.split()) for axis in match["axes"].split(","))
    gates = [axis for axis in axes if axis.isalpha() and axis.islower()]
    if len(gates) != 1 or sorted(axis for axis in axes if axis not in gates) != _AXES.get(parts):
        raise ValueError(f"{text!r} lacks the axes of {' and '.join(parts)}: {example}")
    if len(set(gates[0])) < len(gates[0]):
        raise ValueError(f"{gates[0]!r} in {text!r} has a gate twice")
    return Held(text, parts, axes)


@dataclass(frozen=True)
class Cell:
    """A cell as the source computes it.

    Attributes:
        name: as the rule calls it.
        kind_name: ``gru``, ``lstm`` or ``rnn``: the torch layer that it is nearest to.
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
    kind_name: str
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
        """Return the leaf that holds `W`, `U`, `b` or `c` of a gate; None if no leaf does."""
        return next((path for path, held in self.leaves.items() if part in held.parts and letter in held.gates), None)

    @property
    def order(self) -> tuple[str, ...]:
        """The gates in the order of the target's rows: torch's, or those of `convert.layers.torch_modules` without a reset gate."""
        return UNRESET if self.kind_name == "gru" and self.reset == "none" else GATES[self.kind_name]

    @property
    def module(self) -> str:
        """The class of `convert.layers.torch_modules` that computes the cell; empty: torch.nn computes it."""
        return (
            f"convert.layers.torch_modules.GRU(reset={self.reset!r})"
            if self.kind_name == "gru" and self.reset != "after"
            else ""
        )

    def refusal(self, rule: str) -> Finding:
        """Say why torch's layer cannot compute this cell, with both equations.

        Args:
            rule: where the rule stands.
        """
        letter = self.gates.get("r", "r")
        problem = {
            "before": f"the reset gate {letter} multiplies the state before the matrix U; in torch it multiplies the product",
            "none": "the cell has no reset gate; torch.nn.GRU has one, and no weights disable it",
        }[self.reset]
        return Finding(
            "layer-not-representable",
            f"{self.name}: {problem}",
            rule=rule,
            expected=f"n = {EQUATIONS['gru']['n']} (torch.nn.GRU)",
            got=f"n = {self.equations['n']}",
            fix=f"pass --allow-custom-cells to write the weights for {self.module}, and use that module in place of torch.nn.GRU",
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
    """Make a cell from its equations.

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
        raise ValueError(f"n = {candidate or '?'} is not a known candidate of a GRU: {known}; {RESETS['none']}")
    reset, match = found[0]
    mixed = [(keeps, m) for keeps, pattern in _UPDATES.items() if (m := pattern.fullmatch(_bare(update)))]
    if not mixed:
        raise ValueError(f"h = {update or '?'} is not the update of a GRU: (1 - z) * n + z * h, or (1 - z) * h + z * n")
    keeps, m = mixed[0]
    gates = {"z": next(letter for letter in m.group("z", "y", "x") if letter), "n": "n"}
    if reset != "none":
        gates = {"r": match["r"], **gates}
    return Cell(name, "gru", equations, leaves, gates, reset=reset, keeps=keeps, may_lack=may_lack)


def _lstm(name: str, equations: Mapping[str, str], leaves: Mapping[str, Held], may_lack: frozenset[str]) -> Cell:
    given = {**EQUATIONS["lstm"], **equations}
    for key, wanted in EQUATIONS["lstm"].items():
        if _bare(given[key]) != _bare(wanted):
            raise ValueError(
                f"{key} = {given[key]} is not an equation of an LSTM: {key} = {wanted}; torch has no other"
            )
    offsets: dict[str, float] = {}
    if "f" in equations:
        match = _FORGET.fullmatch(_bare(equations["f"]))
        if match is None:
            raise ValueError(f"f = {equations['f']} is not a known forget gate: sigmoid(W x + U h + b + 1)")
        offsets["f"] = float(match["offset"])
    gates = {gate: gate for gate in GATES["lstm"]}
    return Cell(name, "lstm", given, leaves, gates, offsets=offsets, may_lack=may_lack)


def _rnn(name: str, equations: Mapping[str, str], leaves: Mapping[str, Held], may_lack: frozenset[str]) -> Cell:
    given = {**EQUATIONS["rnn"], **equations}
    match = _STATE.fullmatch(_bare(given["h"]))
    if match is None:
        raise ValueError(f"h = {given['h']} is not the state of an RNN in torch: tanh(W x + b + U h + c), or relu(...)")
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
