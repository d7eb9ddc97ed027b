"""The cells of the libraries: their equations, and what each of their leaves holds.

Read in flax 0.12.8, Equinox 0.13.8, Haiku 0.0.17 and Keras 3.15.1 (file and function at each), and run against torch in
``tests/parity/test_recurrent_cells.py``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from convert.core.similarity import did_you_mean
from convert.layers.recurrent.equations import Cell, Held, make_cell, parse_held

AFTER, BEFORE = "tanh(W x + b + r * (U h + c))", "tanh(W x + b + U (r * h))"
KEEP, NEW = "(1 - z) * n + z * h", "(1 - z) * h + z * n"
Facts = tuple[str, dict[str, str], dict[str, str]]  # word, equations, leaves: optional ones end in a question mark


def _apart(part: str, prefix: str, gates: str, end: str, letters: str = "") -> dict[str, str]:
    """Return one leaf per gate: ``ir/kernel``, ``iz/kernel``, ..."""
    axis = {"W": "I, ", "U": "H, "}.get(part, "")
    return {f"{prefix}{gate}/{end}": f"{part} [{axis}{letter}]" for gate, letter in zip(gates, letters or gates, strict=True)}  # fmt: skip


def _linen_gru() -> Facts:
    """``flax/linen/recurrent.py`` GRUCell.__call__: biases on ir, iz, in and hn."""
    inputs = {**_apart("W", "i", "rzn", "kernel"), **_apart("b", "i", "rzn", "bias")}
    return "gru", {"n": AFTER, "h": KEEP}, {**inputs, **_apart("U", "h", "rzn", "kernel"), "hn/bias": "c [n]"}


def _linen_mgu(reset_gate: bool = True) -> Facts:
    """``flax/linen/recurrent.py`` MGUCell.__call__: one gate f is both the reset and the update gate; hn has a bias only with reset_gate=True."""
    inputs = {**_apart("W", "i", "fn", "kernel"), **_apart("b", "i", "fn", "bias")}
    leaves = {**inputs, **_apart("U", "h", "fn", "kernel")}
    update = KEEP.replace("z", "f")
    if not reset_gate:
        return "gru", {"n": "tanh(W x + b + U h)", "h": update}, leaves
    return "gru", {"n": AFTER.replace("r", "f"), "h": update}, {**leaves, "hn/bias": "c [n]"}


def _linen_lstm() -> Facts:
    """``flax/linen/recurrent.py`` LSTMCell.__call__, and OptimizedLSTMCell, whose tree is the same: biases on h alone."""
    hidden = {**_apart("U", "h", "ifgo", "kernel"), **_apart("c", "h", "ifgo", "bias")}
    return "lstm", {}, {**_apart("W", "i", "ifgo", "kernel"), **hidden}


def _linen_simple(residual: bool = False, activation_fn: str = "tanh") -> Facts:
    """``flax/linen/recurrent.py`` SimpleCell.__call__: the bias is on i."""
    equation = f"{activation_fn}(W x + b + U h{' + h' if residual else ''})"
    return "rnn", {"h": equation}, {"i/kernel": "W [I, h]", "i/bias": "b [h]", "h/kernel": "U [H, h]"}


def _nnx_gru() -> Facts:
    """``flax/nnx/nn/recurrent.py`` GRUCell: packed r, z, n; no bias on h in 0.12.8, ``hn_bias`` where there is one."""
    leaves = {"dense_i/kernel": "W [I, rzn]", "dense_i/bias": "b [rzn]", "dense_h/kernel": "U [H, rzn]"}
    return "gru", {"n": AFTER, "h": KEEP}, {**leaves, "hn_bias?": "c [n]"}


def _nnx_lstm() -> Facts:
    """``flax/nnx/nn/recurrent.py`` LSTMCell: as linen's, but for ``if_``, as `if` is a word of Python."""
    word, equations, leaves = _linen_lstm()
    return word, equations, {path.replace("if/", "if_/"): held for path, held in leaves.items()}


def _nnx_optimized_lstm() -> Facts:
    """``flax/nnx/nn/recurrent.py`` OptimizedLSTMCell: packed i, f, g, o, which is not the tree of LSTMCell."""
    return "lstm", {}, {"dense_i/kernel": "W [I, ifgo]", "dense_h/kernel": "U [H, ifgo]", "dense_h/bias": "c [ifgo]"}


def _nnx_simple(residual: bool = False, activation_fn: str = "tanh") -> Facts:
    """``flax/nnx/nn/recurrent.py`` SimpleCell."""
    word, equations, leaves = _linen_simple(residual, activation_fn)
    return word, equations, {f"dense_{path}": held for path, held in leaves.items()}


def _equinox_gru(use_bias: bool = True) -> Facts:
    """``equinox/nn/_rnn.py`` GRUCell.__call__: torch's own layout; ``bias_n`` is in torch ``bias_hh``'s n."""
    biases = {"bias": "b [rzn]", "bias_n": "c [n]"} if use_bias else {}
    return "gru", {"n": AFTER, "h": "n + z * (h - n)"}, {"weight_ih": "W [rzn, I]", "weight_hh": "U [rzn, H]", **biases}


def _equinox_lstm(use_bias: bool = True) -> Facts:
    """``equinox/nn/_rnn.py`` LSTMCell.__call__."""
    biases = {"bias": "b [ifgo]"} if use_bias else {}
    return "lstm", {}, {"weight_ih": "W [ifgo, I]", "weight_hh": "U [ifgo, H]", **biases}


def _haiku_gru() -> Facts:
    """``haiku/_src/recurrent.py`` GRU.__call__: packed z, r, a; a is called n here."""
    return "gru", {"n": BEFORE, "h": NEW}, {"w_i": "W [I, zrn]", "w_h": "U [H, zrn]", "b": "b [zrn]"}


def _haiku_lstm() -> Facts:
    """``haiku/_src/recurrent.py`` LSTM.__call__: one matrix for x and h together; 1 is added to the forget gate."""
    return "lstm", {"f": "sigmoid(W x + U h + b + 1)"}, {"linear/w": "W U [I+H, igfo]", "linear/b": "b [igfo]"}


def _haiku_vanilla(double_bias: bool = True) -> Facts:
    """``haiku/_src/recurrent.py`` VanillaRNN.__call__: relu; the second Linear is that of the state."""
    leaves = {"linear/w": "W [I, h]", "linear/b": "b [h]", "linear_1/w": "U [H, h]"}
    return "rnn", {"h": "relu(W x + b + U h + c)"}, {**leaves, **({"linear_1/b": "c [h]"} if double_bias else {})}


def _keras_gru(reset_after: bool = True, use_bias: bool = True) -> Facts:
    """``keras/src/layers/rnn/gru.py`` GRUCell.build and call: packed z, r, h; h is called n here."""
    bias = "b c [2, zrn]" if reset_after else "b [zrn]"
    leaves = {"vars/0": "W [I, zrn]", "vars/1": "U [H, zrn]", **({"vars/2": bias} if use_bias else {})}
    return "gru", {"n": AFTER if reset_after else BEFORE, "h": "z * h + (1 - z) * n"}, leaves


def _keras_lstm(use_bias: bool = True) -> Facts:
    """``keras/src/layers/rnn/lstm.py`` LSTMCell.build and call: packed i, f, c, o; ``unit_forget_bias`` is in the bias."""
    return (
        "lstm",
        {},
        {"vars/0": "W [I, ifgo]", "vars/1": "U [H, ifgo]", **({"vars/2": "b [ifgo]"} if use_bias else {})},
    )


def _keras_simple(use_bias: bool = True, activation: str = "tanh") -> Facts:
    """``keras/src/layers/rnn/simple_rnn.py`` SimpleRNNCell.call."""
    leaves = {"vars/0": "W [I, h]", "vars/1": "U [H, h]", **({"vars/2": "b [h]"} if use_bias else {})}
    return "rnn", {"h": f"{activation}(W x + b + U h)"}, leaves


CELLS: Mapping[str, Callable[..., Facts]] = {
    "flax.linen.GRUCell": _linen_gru,
    "flax.linen.MGUCell": _linen_mgu,
    "flax.linen.LSTMCell": _linen_lstm,
    "flax.linen.OptimizedLSTMCell": _linen_lstm,
    "flax.linen.SimpleCell": _linen_simple,
    "flax.nnx.GRUCell": _nnx_gru,
    "flax.nnx.LSTMCell": _nnx_lstm,
    "flax.nnx.OptimizedLSTMCell": _nnx_optimized_lstm,
    "flax.nnx.SimpleCell": _nnx_simple,
    "equinox.nn.GRUCell": _equinox_gru,
    "equinox.nn.LSTMCell": _equinox_lstm,
    "haiku.GRU": _haiku_gru,
    "haiku.LSTM": _haiku_lstm,
    "haiku.VanillaRNN": _haiku_vanilla,
    "keras.layers.GRU": _keras_gru,
    "keras.layers.LSTM": _keras_lstm,
    "keras.layers.SimpleRNN": _keras_simple,
}
_CALL = re.compile(r"(?P<name>[\w.]+)\s*(?:\((?P<arguments>[^()]*)\))?")


def named_cell(text: str, word: str, leaves: Mapping[str, Held] | None = None) -> Cell:
    """Return the cell that a rule names with its arguments: ``keras.layers.GRU(reset_after=False)``.

    Args:
        word: ``gru``, ``lstm`` or ``rnn``: the target.
        leaves: what they are, where they are not called as the library calls them.

    Raises:
        ValueError: no such cell or argument, or one of another kind.
    """
    match = _CALL.fullmatch(text.strip())
    if match is None or match["name"] not in CELLS:
        name = match["name"] if match else text
        raise ValueError(
            f"{name!r} is not a known cell (known: {', '.join(CELLS)}); {did_you_mean(name, CELLS) or 'give its equations in `cell:`'}"
        )
    made = CELLS[match["name"]]
    kind, equations, held = made(**_arguments(match["name"], made, match["arguments"] or ""))
    if kind != word:
        raise ValueError(
            f"{match['name']} is not a `{word}`, but a `{kind}`: torch.nn.{kind.upper()} has its equations"
        )
    known = {path.removesuffix("?"): parse_held(contents) for path, contents in held.items()}
    lack = frozenset(path.removesuffix("?") for path in held if path.endswith("?"))
    return make_cell(word, text, equations, leaves or known, lack if leaves is None else frozenset())


def _arguments(name: str, made: Callable[..., Facts], text: str) -> dict[str, Any]:
    takes = {key: parameter.default for key, parameter in inspect.signature(made).parameters.items()}
    given: dict[str, Any] = {}
    for pair in filter(str.strip, text.split(",")):
        key, equals, value = (piece.strip() for piece in pair.partition("="))
        if not equals or key not in takes:
            known = ", ".join(f"{k}={v}" for k, v in takes.items()) or "none"
            raise ValueError(f"{name} has no argument {key!r} that changes the computation (known: {known}); give its equations in `cell:`")  # fmt: skip
        words: dict[str, Any] = {"True": True, "False": False} if isinstance(takes[key], bool) else {"tanh": "tanh", "relu": "relu"}  # fmt: skip
        if value not in words:
            raise ValueError(f"{name}({key}={value}): expected {' or '.join(words)}")
        given[key] = words[value]
    return given
