"""Faults of recurrent layers: each is planted, caught at its level, and named; and a correct conversion passes all levels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import cell_model
import convert
from cell_model import HIDDEN, RULES
from check.catalogue import outcome
from convert.check import model
from convert.check.report import Report, Verdict
from convert.check.run import check
from convert.references.protocol import Reference
from memory_source import MemorySource

Tensors = dict[str, np.ndarray]
FLAX, HAIKU = "cell: flax.linen.GRUCell", "cell: haiku.LSTM"


@cache
def checkpoint() -> MemorySource:
    return cell_model.source()


def report_of(
    folder: Path, rules: str = RULES, edit: Callable[[Tensors], None] | None = None, reference: str = "reference"
) -> Report:
    """Converts with these rules, edits the file, and checks it."""
    file, out = folder / "rules.yaml", folder / "out.safetensors"
    file.write_text(rules)
    convert.convert(convert.load_rules(file), checkpoint(), out)
    if edit is not None:
        with safe_open(out, "np") as opened:
            metadata = opened.metadata()
        tensors = load_file(out)
        edit(tensors)
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, out, metadata)
    with mock.patch.object(model, "live_evidence", partial(evidence, reference)):
        return check(out, checkpoint(), model=str(file), reference=f"cell_model:{reference}")


LIVE = model.live_evidence
_KNOWN: dict[str, model.Evidence] = {}


def evidence(name: str, plan: convert.Plan, reference: Reference, **options: Any) -> model.Evidence:
    """The JAX side of each reference runs once: neither rules nor file change what it computes."""
    if name not in _KNOWN:
        _KNOWN[name] = LIVE(plan, reference, **options)
    return _KNOWN[name]


def test_a_correct_conversion_passes(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 4, report.to_dict()
    worst = {m.name: m.lifted.relative for level in report.levels for m in level.measures if m.lifted}
    assert {"gru (l0)", "gru (l0), random weights", "lstm (l0)", "lstm (l0), random weights"} <= set(worst)
    assert all(worst[name] < 1e-14 for name in ("gru (l0)", "gru (l0), random weights"))


def rows(
    name: str, change: Callable[[list[np.ndarray]], list[np.ndarray]], count: int = 3
) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = np.concatenate(change(np.split(tensors[name].copy(), count)))

    return edit


def folded(tensors: Tensors) -> None:
    tensors["gru.bias_ih_l0"] = tensors["gru.bias_ih_l0"] + tensors["gru.bias_hh_l0"]
    tensors["gru.bias_hh_l0"] = np.zeros_like(tensors["gru.bias_hh_l0"])


def everywhere(change: Callable[[list[np.ndarray]], list[np.ndarray]]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            rows(f"gru.{name}_l0", change)(tensors)

    return edit


IN_FILES = {
    "gates in the order z, r, n": (everywhere(lambda x: [x[1], x[0], x[2]]), "gru.weight_ih_l0", "gates in another order"),
    "update gate polarity": (everywhere(lambda x: [x[0], -x[1], x[2]]), "gru.weight_ih_l0", "update gate polarity"),
    "b_hn folded into b_in": (folded, "gru.bias_ih_l0", "b_hn folded into b_in"),
    "hidden matrices transposed": (rows("gru.weight_hh_l0", lambda x: [m.T for m in x]), "gru.weight_hh_l0", "transposed"),
    "forget bias missing": (rows("lstm.bias_ih_l0", lambda x: [x[0], x[1] - 1, x[2], x[3]], 4), "lstm.bias_ih_l0", "forget bias missing"),
    "forget bias added twice": (rows("lstm.bias_ih_l0", lambda x: [x[0], x[1] + 1, x[2], x[3]], 4), "lstm.bias_ih_l0", "forget bias added twice"),
    "LSTM gates in the source's order": (rows("lstm.weight_hh_l0", lambda x: [x[0], x[2], x[1], x[3]], 4), "lstm.weight_hh_l0", "gates in another order"),
    "biases exchanged": (lambda t: t.update({"gru.bias_ih_l0": t["gru.bias_hh_l0"], "gru.bias_hh_l0": t["gru.bias_ih_l0"]}), "gru.bias_ih_l0", "input and hidden tensors exchanged"),
    "a bias where the source has none": (lambda t: t.update({"lstm.bias_hh_l0": t["lstm.bias_ih_l0"]}), "lstm.bias_hh_l0", "bias that the source does not add"),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_FILES)
def test_faults_in_the_file(name: str, tmp_path: Path) -> None:
    edit, at, diagnosis = IN_FILES[name]
    report = report_of(tmp_path, edit=edit)
    found = outcome(report)
    assert (found.levels, found.at, found.diagnosis) == (("weights", "layers", "model"), at, diagnosis)
    assert found.model is not None and found.model[0] == at.partition(".")[0]
    assert found.model[1] and found.after is not None and found.after < 1e-9, found


LEAVES = """
  leaves:
    ir/kernel: W [I, r]
    iz/kernel: W [I, z]
    in/kernel: W [I, n]
    ir/bias: b [r]
    iz/bias: b [z]
    in/bias: b [n]
    hr/kernel: U [H, r]
    hz/kernel: U [H, z]
    hn/kernel: U [H, n]
    hn/bias: c [n]"""
SPELT = "cell: {n: tanh(W x + b + r * (U h + c)), h: (1 - z) * n + z * h}"
IN_RULES = {
    "gates in another order": (FLAX, SPELT + LEAVES.replace("r]", "q]").replace("z]", "r]").replace("q]", "z]"), "gru", "gates in another order"),
    "update gate polarity": (FLAX, SPELT.replace("(1 - z) * n + z * h", "(1 - z) * h + z * n") + LEAVES, "gru", "update gate polarity"),
    "forget bias missing": (HAIKU, "cell: {}\n  leaves:\n    linear/w: W U [I+H, igfo]\n    linear/b: b [igfo]", "lstm", "forget bias missing"),
    "forget bias of two": (HAIKU, "cell: {f: sigmoid(W x + U h + b + 2)}\n  leaves:\n    linear/w: W U [I+H, igfo]\n    linear/b: b [igfo]", "lstm", "forget bias added twice"),
    "LSTM gates in torch's order": (HAIKU, "cell: {f: sigmoid(W x + U h + b + 1)}\n  leaves:\n    linear/w: W U [I+H, ifgo]\n    linear/b: b [ifgo]", "lstm", "gates in another order"),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_RULES)
def test_faults_in_the_rules(name: str, tmp_path: Path) -> None:
    """The file is what the rules say, so that only the models tell."""
    old, new, at, diagnosis = IN_RULES[name]
    assert old in RULES
    found = outcome(report_of(tmp_path, RULES.replace(old, new)))
    assert (found.levels, found.at, found.diagnosis) == (("model",), at, diagnosis)
    if diagnosis:
        assert found.after is not None and found.after < 1e-9 and "rules.yaml:" in found.rule


IN_REFERENCES = {
    "reset_before": ("gru", "reset gate on the wrong side of the matmul"),
    "stale_state": ("gru", "stale state across steps"),
    "both": ("gru", "reset gate on the wrong side of the matmul and stale state across steps"),
    "polarity": ("gru", "update gate polarity"),
    "stale_lstm": ("lstm", "stale state across steps"),
}


@pytest.mark.parametrize("name", IN_REFERENCES)
def test_the_models_compute_different_recurrences(name: str, tmp_path: Path) -> None:
    found = outcome(report_of(tmp_path, reference=name))
    at, diagnosis = IN_REFERENCES[name]
    assert (found.levels, found.at, found.diagnosis) == (("model",), at, diagnosis), found
    assert found.after is not None and found.after < 1e-9
    assert HIDDEN > 1


def test_a_wrong_layout_fails_the_layers_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A derivation that forgot to negate, or to reorder, cannot hide behind its own plan."""
    from convert import cell_steps

    original = cell_steps._arithmetic
    for word, broken in (("Add", lambda *a: ()), ("Multiply", lambda *a: (*original(*a), cell_steps.Multiply(-1.0)))):
        monkeypatch.setattr(cell_steps, "_arithmetic", broken)
        levels = {
            level.level: level.verdict
            for level in report_of(tmp_path / word if (tmp_path / word).mkdir() is None else tmp_path).levels
        }
        assert levels["weights"] is Verdict.PASSED and levels["layers"] is Verdict.FAILED
