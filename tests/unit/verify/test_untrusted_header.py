"""The file that is checked does not choose its judge: its header names models, never paths, and its facts are compared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from convert.api import convert, plan_conversion
from convert.core.errors import CheckpointError, ConvertError, PlanError, RuleError
from convert.planning.options import ConversionOptions
from convert.rules.library import load_rules, named_rules
from convert.verify.comparison import plan_of
from convert.verify.report.report import Verdict
from convert.verify.run import check
from convert.writing.written import Written, open_written
from support.memory_source import MemorySource
from support.weights_level import check_weights

RULES = "model: evil\ntitle: E\ntargets: {torch: {loads: T}}\nrules:\n  - from: w\n    parameter: w\n"
SOURCE = MemorySource({"w": np.ones((2, 3), np.float32)})


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    (tmp_path / "rules").mkdir()
    path = tmp_path / "rules" / "evil.yaml"
    path.write_text(RULES)
    return path


@pytest.fixture
def written(rules: Path, tmp_path: Path) -> Callable[..., Written]:
    """The converted file, with other entries in its header."""

    def make(**changes: str) -> Written:
        out = tmp_path / "out.safetensors"
        convert(str(rules), SOURCE, out, overwrite=True)
        with safe_open(out, "np") as file:
            metadata = file.metadata()
        save_file(load_file(out), out, {**metadata, **changes})
        return open_written(out)

    return make


def test_a_header_that_names_another_model_is_said_to_have_chosen_it(written: Callable[..., Written]) -> None:
    with pytest.raises(PlanError) as error:
        plan_of(written(model="llama_lm"), SOURCE)
    last = str(error.value).splitlines()[-1]
    assert last.startswith("out.safetensors chose these rules: its header names llama_lm; if it is of another model, ")
    with pytest.raises(PlanError) as error:
        plan_of(written(model="llama_lm"), SOURCE, model="llama_lm")
    assert "chose" not in str(error.value)


def test_a_header_names_no_path(written: Callable[..., Written], rules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(rules.parent)
    os.mkfifo("fifo.yaml")
    for model in ("./evil.yaml", "evil.yaml", str(rules), "../rules/evil.yaml", "/dev/zero", "./fifo.yaml", "evil"):
        with pytest.raises(ConvertError) as error:
            plan_of(written(model=model), SOURCE)
        assert error.value.code == "rules-not-found" and "--model" in error.value.findings[0].fix
        if model != "evil":
            assert error.value.findings[0].got == model


@pytest.mark.slow
@pytest.mark.parametrize("key", ["model", "target", "dtype"])
def test_a_long_name_in_a_header_is_shortened(written: Callable[..., Written], rules: Path, key: str) -> None:
    for name in ("a" * 100_000, "é/" * 100_000):
        with pytest.raises(ConvertError) as error:
            plan_of(written(**{key: name}), SOURCE, model="" if key == "model" else str(rules))
        text = str(error.value)
        assert f"({len(name)} characters)" in text and len(text) < 1500 and "File name too long" not in text
    with pytest.raises(RuleError, match=r"no rules are named 'a{200}\.\.\. \(100000 characters\)'"):
        named_rules("a" * 100_000)


def test_a_recording_names_no_path(written: Callable[..., Written], rules: Path) -> None:
    with pytest.raises(ConvertError) as error:
        plan_of(written(model=""), SOURCE, recorded_model=str(rules))
    assert error.value.findings[0].got == str(rules)


def test_a_header_names_a_model_of_the_rules_directory(written: Callable[..., Written], rules: Path) -> None:
    (rules.parent / "fifo.yaml").unlink(missing_ok=True)
    plan = plan_of(written(), SOURCE, ConversionOptions(rules_dir=rules.parent))
    assert plan.rules.model == "evil"
    assert plan_of(written(model="other"), SOURCE, model=str(rules)).rules.model == "evil"  # the user may


@pytest.mark.parametrize("key", ["sizes", "facts", "layers"])
def test_false_facts_in_a_header_are_findings(written: Callable[..., Written], rules: Path, key: str) -> None:
    plan = plan_conversion(str(rules), SOURCE)
    assert check_weights(plan, written()).verdict is Verdict.PASSED
    text = json.dumps([{"layer": "w", "kind": "norm"}] if key == "layers" else {"rope_theta": 7})
    level = check_weights(plan, written(**{key: text}))
    assert [(f.code, f.got) for f in level.findings] == [("provenance-differs", text)]


TWO_TARGETS = """
model: two
title: T
targets: {a: {loads: A}, b: {loads: B}}
rules:
  - from: w
    parameter: {a: x, b: y}
  - from: v
    parameter: shared
"""


def test_a_header_that_names_another_target_is_told_by_the_names(tmp_path: Path) -> None:
    source = MemorySource({name: np.ones((2, 3), np.float32) for name in "wv"})
    path, out = tmp_path / "two.yaml", tmp_path / "out.safetensors"
    path.write_text(TWO_TARGETS)
    convert(str(path), source, out, to="b")
    with safe_open(out, "np") as file:
        metadata = file.metadata()

    def level(metadata: dict[str, str], to: str | None = None) -> Verdict:
        save_file(load_file(out), out, metadata)
        return check(out, source, model=str(path), to=to, levels=("coverage",)).levels[0].verdict

    with pytest.raises(ConvertError, match="names the target a, and the tensors have the names of the target b"):
        level({**metadata, "target": "a"})
    with pytest.raises(ConvertError, match="the tensors have the names of the target b; give --to b"):
        level({"format": "pt"})
    assert level({"format": "pt"}, to="b") is Verdict.PASSED
    save_file({"z": np.ones((2, 3), np.float32)}, out)  # of no target: each tensor is a finding
    assert level({"format": "pt"}) is Verdict.FAILED


def test_a_digest_of_another_form_is_a_finding(written: Callable[..., Written], rules: Path) -> None:
    level = check_weights(plan_conversion(str(rules), SOURCE), written(source_digest="?"))
    assert [(f.code, f.got) for f in level.findings] == [("provenance-differs", "?")]


def test_rule_files_are_regular_files_of_bounded_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(1 << 30)
    for name in ("fifo", "zero", "large"):
        with pytest.raises(RuleError) as error:
            load_rules(tmp_path / f"{name}.yaml")
        assert error.value.code == "rule-file-unreadable"


def test_converted_files_are_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").symlink_to("/dev/zero")
    for name in ("a", "b"):
        with pytest.raises(CheckpointError) as error:
            open_written(tmp_path / f"{name}.safetensors")
        assert error.value.code == "file-not-readable"
    (tmp_path / "c").mkdir()
    os.mkfifo(tmp_path / "c" / "config.json")
    with pytest.raises(CheckpointError) as error:
        open_written(tmp_path / "c")
    assert error.value.code == "converted-metadata-invalid"
