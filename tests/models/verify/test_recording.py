"""Recordings: what is in them, that a check against one finds what a live check finds, and that it needs no JAX."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import convert
from convert.core.errors import CheckpointError, ConvertError, OutputError
from convert.core.findings import Finding
from convert.core.safetensors_header import read_header
from convert.numerics.compare import difference
from convert.references.protocol import Reference
from convert.references.timesfm import timesfm_1
from convert.rules.library import find_rules
from convert.verify.comparison import load_reference
from convert.verify.recording.file import KEY, _read, checksum, load_recording
from convert.verify.recording.record import MAX_BYTES, Recorded, record, write_recording
from convert.verify.recording.source import RecordedSource
from convert.verify.report.report import LevelReport, Report, Verdict
from convert.verify.run import check
from convert.verify.sides.evidence import Evidence, Values
from convert.verify.sides.run_jax import live_evidence
from support import upstream
from support.command_line import Run
from support.goldens import checkpoint
from support.paths import GOLDEN, ROOT

SETTINGS: dict[str, dict[str, Any]] = {
    "timesfm-1.0": {"use_positional_embedding": True},
    "timesfm-2.0": {"use_positional_embedding": False},
    "timesfm-2.5": {},
}
CASE = "timesfm-1.0"  # for what one model tells as well as three
PROMISED = 1e-12  # lifted; measured are 1e-15 to 3e-15


@pytest.fixture(autouse=True)
def timesfm_1_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(timesfm_1.VARIABLE, str(Path(upstream.timesfm_1().__file__ or "").parents[1]))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are small; threads that wait for each other only cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def plan_of(case: str) -> convert.Plan:
    return convert.plan_conversion("timesfm", checkpoint(case), settings=SETTINGS[case])


@cache
def reference_of(case: str) -> Reference:
    found = load_reference(plan_of(case), None)
    assert not isinstance(found, str), found
    return found


@cache
def evidence_of(case: str) -> Evidence:
    return live_evidence(plan_of(case), reference_of(case))


class Files:
    """Conversions and recordings of the goldens, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def written(self, case: str, **options: Any) -> Path:
        out = self.folder / f"{case}{''.join(map(str, options.values()))}.safetensors"
        if not out.exists():
            convert.convert("timesfm", checkpoint(case), out, **options)
        return out

    def recorded(self) -> Path:
        """Of `CASE`, whole."""
        out = self.folder / "recorded.safetensors"
        if not out.exists():
            keep(out)
        return out


def golden(case: str) -> Path:
    """What make_recordings.py made; a part of each value."""
    return GOLDEN / "recordings" / f"{case}.safetensors"


def keep(out: Path, **options: Any) -> Recorded:
    """Writes the evidence of `CASE`, without running the JAX model again."""
    options = {"outputs": tuple(reference_of(CASE).outputs), "evidence": evidence_of(CASE), **options}
    return write_recording(plan_of(CASE), options.pop("evidence"), out, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("recordings"))


def level(report: Report, name: str) -> LevelReport:
    return next(level for level in report.levels if level.level == name)


def verdicts(report: Report) -> list[str]:
    return [str(level.verdict) for level in report.levels]


def changed(path: Path, out: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a safetensors file with other tensors and the same header."""
    tensors = load_file(path)
    edit(tensors)
    with safe_open(path, "pt") as file:
        save_file({k: v.contiguous() for k, v in tensors.items()}, out, metadata=file.metadata())
    return out


def remade(path: Path, out: Path, edit: Callable[[dict[str, Any]], object], *, sealed: bool = True) -> Path:
    """A copy of a recording with another manifest, whose checksum is made anew if `sealed`."""
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    manifest = json.loads(metadata[KEY])
    before = manifest.get("data")
    edit(manifest)
    if sealed and manifest.get("data") == before:
        arrays = {name: _read(path, entry) for name, entry in read_header(path)[1].items()}
        manifest["data"] = checksum(json.dumps(manifest), arrays)
    metadata[KEY] = json.dumps(manifest)
    save_file(load_file(path), out, metadata=metadata)
    return out


# ---- what passes


@pytest.mark.slow
@pytest.mark.parametrize("case", SETTINGS)
def test_a_right_conversion_passes(case: str, files: Files) -> None:
    report = check(files.written(case), recorded=golden(case), require=("coverage", "weights", "model"))
    assert verdicts(report) == ["passed", "passed", "skipped", "passed"]
    assert report.exit_code == 0
    model = level(report, "model")
    assert max(m.float64.relative for m in model.measures if m.float64) < PROMISED
    assert any(
        f"{len(model.measures)} boundaries and outputs, recorded in {case}.safetensors, " in n for n in model.notes
    )
    assert any(note.startswith("recorded with ") and "jax 0." in note for note in model.notes)
    assert "--from" in level(report, "layers").reason


@pytest.mark.slow
def test_with_the_checkpoint_all_levels_run(files: Files) -> None:
    report = check(files.written(CASE), checkpoint(CASE), recorded=files.recorded())
    assert verdicts(report) == ["passed"] * 4
    assert report.source.startswith(str(checkpoint(CASE)))


@pytest.mark.slow
def test_frameworks_are_not_imported_for_a_level_that_cannot_run(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    """The layers level needs the checkpoint's own weights, so a recording alone never needs JAX."""
    monkeypatch.setattr("convert.verify.run.missing", lambda: pytest.fail("JAX would be imported"))
    report = check(files.written(CASE), recorded=files.recorded(), levels=("weights", "layers"))
    assert [level.verdict for level in report.levels] == [Verdict.PASSED, Verdict.SKIPPED]


@pytest.mark.slow
def test_a_skip_is_never_a_pass(files: Files) -> None:
    report = check(files.written(CASE), recorded=files.recorded(), levels=("layers",), require=("layers",))
    assert (verdicts(report), report.exit_code) == (["skipped"], 2)


@pytest.mark.slow
def test_a_recording_gives_what_the_live_model_gives(files: Files) -> None:
    live, loaded = evidence_of(CASE), load_recording(files.recorded()).evidence
    assert (
        list(loaded.native_values) == list(live.native_values)
        and loaded.float64_values is not None
        and live.float64_values is not None
    )
    for name in live.native_values:
        np.testing.assert_array_equal(loaded.native_values[name], live.native_values[name])
        np.testing.assert_array_equal(loaded.float64_values[name], live.float64_values[name])
    assert loaded.masks.keys() == live.masks.keys() and not loaded.samples
    assert loaded.environment.keys() >= {"jax", "jaxlib", "numpy"}


@pytest.mark.slow
def test_bfloat16_weights_are_no_false_alarm(files: Files) -> None:
    """Their unrounded values are not known without the checkpoint, so that lifted float64 tells less, and says so."""
    report = check(files.written(CASE, dtype="bfloat16"), recorded=files.recorded())
    assert verdicts(report) == ["passed", "skipped", "skipped", "passed"]
    assert "rounded" in level(report, "weights").reason
    assert any("rounded to bfloat16" in note for note in level(report, "model").notes)
    bounds = [m.float64_tolerance for m in level(report, "model").measures if m.float64_tolerance is not None]
    assert all(bound.value < 0.1 for bound in bounds) and "rounding them to bfloat16 again" in bounds[-1].why
    report = check(files.written(CASE, dtype="bfloat16"), checkpoint(CASE), recorded=files.recorded(), levels=("weights", "model"))  # fmt: skip
    assert verdicts(report) == ["passed", "passed"]
    assert max(m.float64.relative for m in level(report, "model").measures if m.float64) < PROMISED


@pytest.mark.slow
def test_a_precision_run_alone_is_evidence_too(files: Files, tmp_path: Path) -> None:
    """What could not be lifted is compared as users run it."""
    out = tmp_path / "r.safetensors"
    keep(out, evidence=replace(evidence_of(CASE), float64_values=None))
    assert load_recording(out).evidence.float64_values is None
    report = check(files.written(CASE), recorded=out)
    assert level(report, "model").verdict is Verdict.PASSED
    assert all(m.float64 is None and m.tolerance is not None for m in level(report, "model").measures)
    wrong = changed(files.written(CASE), tmp_path / "wrong.safetensors", transposed)
    assert level(check(wrong, recorded=out), "model").verdict is Verdict.FAILED


@pytest.mark.slow
def test_what_the_recording_states_is_verified_and_what_only_the_header_or_a_setting_states_is_not(
    files: Files, tmp_path: Path
) -> None:
    """The header belongs to the file under test; the recording was made where the model was trained."""

    def judged(path: Path, **options: Any) -> tuple[str, str]:
        report = check(path, levels=("model",), **options)
        (fact,) = (fact for fact in report.facts if fact.name == "use_positional_embedding")
        return str(fact.status), fact.origin

    out = tmp_path / "out.safetensors"
    convert.convert(CASE.partition(".")[0], checkpoint(CASE), out, settings=SETTINGS[CASE])
    recorded = files.recorded()
    assert judged(out, recorded=recorded) == ("verified", "the header of out.safetensors")
    assert judged(out, checkpoint=checkpoint(CASE)) == ("not verified", "the header of out.safetensors")
    given = {"use_positional_embedding": True}
    assert judged(out, checkpoint=checkpoint(CASE), settings=given) == (
        "not verified",
        "--set use_positional_embedding=true",
    )
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(out), bare)
    assert judged(bare, recorded=recorded) == ("verified", f"the recording {recorded.name}")


# ---- what fails, and why


OUT = "stacked_transformer.layers.1.self_attn.o_proj.weight"
QKV = "stacked_transformer.layers.1.self_attn.qkv_proj.weight"
NORM = "stacked_transformer.layers.1.mlp.layer_norm.weight"


def transposed(tensors: dict[str, torch.Tensor]) -> None:
    tensors[OUT] = tensors[OUT].T


def swapped(tensors: dict[str, torch.Tensor]) -> None:
    q, k, v = tensors[QKV].chunk(3)
    tensors[QKV] = torch.cat([k, q, v])


def without_one(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] -= 1


FAULTS = {
    "transposed": (transposed, OUT, "transposed"),
    "q and k swapped": (swapped, QKV, "fused parts in another order"),
    "1+scale missing": (without_one, NORM, "another value in the file"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", ["timesfm-1.0", pytest.param("timesfm-2.0", marks=pytest.mark.slow)])
def test_planted_faults_are_found_and_named(case: str, fault: str, files: Files, tmp_path: Path) -> None:
    edit, tensor, name = FAULTS[fault]
    report = check(changed(files.written(case), tmp_path / "wrong.safetensors", edit), recorded=golden(case))
    assert verdicts(report) == ["passed", "failed", "skipped", "failed"]
    assert report.exit_code == 1
    [finding] = level(report, "weights").findings[:1]
    assert tensor in str(finding) and finding.rule.startswith("rules/timesfm-1.yaml:")
    diagnosis = level(report, "model").diagnosis
    assert diagnosis is not None and diagnosis["boundary"] == tensor.removesuffix(".weight")
    assert diagnosis["name"] == name


@pytest.mark.slow
def test_a_known_leaf_names_the_mistake_in_the_weights(files: Files, tmp_path: Path) -> None:
    """Of a leaf that the recording holds, more is known than its checksum."""
    wrong = changed(files.written(CASE), tmp_path / "wrong.safetensors", without_one)
    [finding] = level(check(wrong, recorded=files.recorded(), levels=("weights",)), "weights").findings
    assert finding.data["diagnosis"] == "1+scale missing" and finding.path == NORM
    assert finding.expected and finding.got == "the plain scale"
    wrong = changed(files.written(CASE), tmp_path / "other.safetensors", lambda t: t[NORM].mul_(1.5))
    [finding] = level(check(wrong, recorded=files.recorded(), levels=("weights",)), "weights").findings
    assert finding.data["diagnosis"] == "" and "no known mistake" in finding.got


FFN = "\n  from: stacked_transformer_layer/x_layers_{i}/ff_layer/ffn_layer2/linear/w"
RULES = {  # in a copy of the rules, with which the file is then made, too: the file is as it should be by them
    "matrix": (f"...F,FD->...D{FFN}", f"...F,DF->...D{FFN}", "transposed", "mlp.down_proj"),
    "query and key": ("{query,key,value}", "{key,query,value}", "fused parts in another order", "self_attn.qkv_proj"),
    "1+scale": ("multiplies_by: 1+scale", "multiplies_by: scale", "1+scale missing", "mlp.layer_norm"),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_wrong_rules_are_found_and_named(rule: str, files: Files, tmp_path: Path) -> None:
    """Nothing is wrong with the file by the rules; only the JAX model tells, and it is not here."""
    right, wrong, name, layer = RULES[rule]
    [rules] = (found for found in find_rules("timesfm") if found.model == "timesfm-1")
    text = (ROOT / rules.path).read_text()
    assert right in text
    folder = tmp_path / "rules"
    folder.mkdir()
    (folder / "timesfm-1.yaml").write_text(text.replace(right, wrong))
    out = tmp_path / "out.safetensors"
    convert.convert("timesfm-1", checkpoint(CASE), out, rules_dir=folder)
    report = check(out, recorded=files.recorded(), rules_dir=folder)
    assert level(report, "weights").verdict is Verdict.PASSED
    model = level(report, "model")
    assert model.verdict is Verdict.FAILED and report.exit_code == 1
    assert any("recorded with another version of the rules" in note for note in model.notes)
    assert model.diagnosis is not None
    assert (model.diagnosis["boundary"], model.diagnosis["name"]) == (f"stacked_transformer.layers.0.{layer}", name)
    assert re.search(r"timesfm-1\.yaml:\d+", model.diagnosis["rule"])


# ---- what is in the file


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [CASE, *(pytest.param(case, marks=pytest.mark.slow) for case in SETTINGS if case != CASE)]
)
def test_the_recordings_beside_the_goldens_are_what_the_references_give(case: str) -> None:
    """Else run tests/golden/make_recordings.py."""
    live, kept = evidence_of(case), load_recording(golden(case)).evidence
    assert (
        list(kept.native_values) == list(live.native_values)
        and kept.float64_values is not None
        and live.float64_values is not None
    )
    for name, value in live.inputs.items():
        np.testing.assert_array_equal(kept.inputs[name], value)
    for name, value in live.float64_values.items():
        assert (
            difference(kept.float64_values[name], kept.pick(name, value), mask=kept.masks.get(name)).relative < PROMISED
        )


@pytest.mark.slow
def test_the_same_bytes_every_time(files: Files, tmp_path: Path) -> None:
    done = record(plan_of(CASE), reference_of(CASE), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == files.recorded().read_bytes()
    assert done.nbytes == files.recorded().stat().st_size


def test_it_names_no_place_of_this_machine(files: Files) -> None:
    with safe_open(golden("timesfm-2.5"), "np") as file:
        text = file.metadata()[KEY]
    assert str(GOLDEN) not in text and str(files.folder) not in text and sys.prefix not in text
    manifest = json.loads(text)
    assert manifest["format"] == 3 and manifest["model"] == "timesfm-2.5" and manifest["seed"] == 0
    with safe_open(files.written("timesfm-2.5"), "np") as file:
        assert manifest["source_digest"] == file.metadata()["source_digest"]
        assert manifest["rules_sha256"] == file.metadata()["rules_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [400_000, 1_000_000, 3_000_000])
def test_the_size_is_bounded_and_faults_are_still_found(limit: int, files: Files, tmp_path: Path) -> None:
    out = tmp_path / "r.safetensors"
    done = keep(out, max_bytes=limit)
    assert limit * 0.9 < done.nbytes <= limit and done.nbytes == out.stat().st_size
    assert done.sampled > 0
    evidence = load_recording(out).evidence
    assert len(evidence.samples) == done.sampled
    for name, sample in evidence.samples.items():
        whole, mask = evidence_of(CASE).native_values[name], evidence_of(CASE).masks.get(name)
        np.testing.assert_array_equal(evidence.native_values[name], sample.take(whole))
        if mask is not None:  # nothing that is masked; always the first place behind the padding
            keep_ = np.broadcast_to(mask.reshape(mask.shape + (1,) * (whole.ndim - 1 - mask.ndim)), whole.shape[:-1])
            assert keep_.reshape(-1)[sample.positions].all()
            rows = np.unravel_index(sample.positions, whole.shape[:-1])
            if whole.shape[1] == mask.shape[1]:
                assert {(1, 3), (2, 1)} <= set(zip(*(map(int, axis) for axis in rows[:2]), strict=True))
    assert level(check(files.written(CASE), recorded=out), "model").verdict is Verdict.PASSED
    for edit in (transposed, swapped, without_one):
        wrong = changed(files.written(CASE), tmp_path / "wrong.safetensors", edit)
        model = level(check(wrong, recorded=out, levels=("model",)), "model")
        assert model.verdict is Verdict.FAILED and model.diagnosis is not None and model.diagnosis["name"]
        worst = next(m for m in model.measures if not m.passed)
        assert (
            len(worst.difference.at) == evidence_of(CASE).native_values[worst.name].ndim
        )  # a place in the whole value


@pytest.mark.slow
def test_an_impossible_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as error:
        keep(tmp_path / "r.safetensors", max_bytes=100_000)
    (finding,) = error.value.findings
    assert finding.code == "recording-too-large" and "100,000" in finding.expected and "--max-size" in finding.fix
    assert int(finding.got.removesuffix(" bytes").replace(",", "")) > 100_000
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_kept(files: Files, tmp_path: Path) -> None:
    out = tmp_path / "r.safetensors"
    out.write_bytes(b"mine")
    with pytest.raises(OutputError, match="--overwrite"):
        keep(out)
    assert out.read_bytes() == b"mine"
    keep(out, overwrite=True)
    assert load_recording(out).manifest.model == "timesfm-1"
    with pytest.raises(OutputError, match=r"r\.safetensors: exists and is kept"):  # before the model is run
        record(plan_of(CASE), replace(reference_of(CASE), jax=None), out)
    with pytest.raises(OutputError, match="the output lies inside the checkpoint"):
        record(plan_of(CASE), reference_of(CASE), plan_of(CASE).source.path.parent / "r.safetensors")
    with pytest.raises(ConvertError, match="--precision: expected one of float32, bfloat16, float64, got float8"):
        record(plan_of(CASE), reference_of(CASE), out, precision="float8")
    with pytest.raises(OutputError) as error:
        keep(tmp_path / "recording.npz")
    assert error.value.code == "output-name-invalid" and ".safetensors" in error.value.findings[0].expected
    assert error.value.findings[0].fix == f"write {tmp_path / 'recording.safetensors'}"


def test_without_a_jax_side_there_is_nothing_to_record(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="no JAX side") as error:
        record(plan_of(CASE), replace(reference_of(CASE), jax=None), tmp_path / "r.safetensors")

    assert error.value.code == "reference-unavailable"

    def absent(weights: Any, inputs: Any) -> Any:
        raise ImportError("no module praxis", name="praxis")

    with pytest.raises(ConvertError, match="no module praxis") as error:
        record(plan_of(CASE), replace(reference_of(CASE), jax=absent), tmp_path / "r.safetensors")
    assert error.value.code == "reference-unavailable" and error.value.findings[0].fix
    assert list(tmp_path.iterdir()) == []


# ---- what is refused


@pytest.mark.parametrize(
    ("edit", "code", "facts"),
    [
        (lambda m: m.update(format=2), "recording-invalid", ("format 2", "format 3")),
        (lambda m: m.pop("format"), "recording-invalid", ("format None", "format 3")),
        (lambda m: m.update(sampling="dice"), "recording-damaged", ("'dice'", "splitmix64")),
        (lambda m: m.update(seed="0"), "recording-damaged", ("'seed'", "int", "str")),
        (lambda m: m.update(seed=-1), "recording-damaged", ("seed", "0 or more", "-1")),
        (lambda m: m.update(precision="float3"), "recording-damaged", ("'float3'", "bfloat16")),
        (lambda m: m["settings"].update(a={}), "recording-damaged", ("'settings'",)),
        (lambda m: m["sizes"].update(a=None), "recording-damaged", ("'sizes'",)),
        (lambda m: m.pop("values"), "recording-damaged", ("'values'", "list")),
        (lambda m: m.update(values=[]), "recording-damaged", ("no values",)),
        (lambda m: m["values"].append(m["values"][0]), "recording-damaged", ("twice",)),
        (lambda m: m["values"].append(["x", [-1], None, None, True]), "recording-damaged", ("value",)),
        (lambda m: m["values"].append(["x", [4], None, None, False]), "recording-damaged", ("float64",)),
        (lambda m: m["values"].append(["x", [4], None, None, True]), "recording-damaged", ("drifted/x", "[4]")),
        (lambda m: m.update(values=m["values"][:2]), "recording-damaged", ("does not list", "drifted/")),
        (lambda m: [row.__setitem__(4, False) for row in m["values"]], "recording-damaged", ("does not list", "exact/")),
        (lambda m: m["values"][0].__setitem__(2, 3), "recording-damaged", ("shape",)),
        (lambda m: m["values"][0].__setitem__(2, 10**9), "recording-damaged", ("1000000000 positions",)),
        (lambda m: m["values"][0].__setitem__(1, [2**39, 2**39, 32]), "recording-damaged", ("shape",)),
        (lambda m: m["values"][0].__setitem__(3, 99), "recording-damaged", ("mask of input_ff_layer:in",)),
        (lambda m: m["leaves"].append(m["leaves"][0]), "recording-damaged", ("leaf twice",)),
        (lambda m: m["leaves"].append([["a"], [1], "float31", None, []]), "recording-damaged", ("leaf a",)),
        (lambda m: m["leaves"].append(1), "recording-damaged", ("leaf",)),
        (lambda m: m.update(data="xxh3_128:00"), "recording-damaged", ("checksum", "xxh3_128:00")),
    ],
)  # fmt: skip
def test_a_wrong_manifest_is_refused(
    edit: Callable[[dict[str, Any]], object], code: str, facts: tuple[str, ...], files: Files, tmp_path: Path
) -> None:
    out = remade(files.recorded(), tmp_path / "r.safetensors", edit)
    with pytest.raises(CheckpointError) as error:
        load_recording(out)
    (finding,) = error.value.findings
    assert (finding.code, finding.path) == (code, str(out)) and "record it again" in finding.fix
    assert [fact for fact in facts if fact not in str(finding)] == []


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.update(values=m["values"][:2]),
        lambda m: [row.__setitem__(4, False) for row in m["values"]],
        lambda m: m.update(precision="bfloat16"),
        lambda m: m.update(seed=1),
        lambda m: m["settings"].update(context_length=99),
        lambda m: m.update(unlifted=["exp"]),
        lambda m: m["leaves"][-1].__setitem__(3, "xxh3_128:00"),
    ],
)
def test_the_manifest_is_in_the_checksum(
    edit: Callable[[dict[str, Any]], object], files: Files, tmp_path: Path
) -> None:
    """Cut to two values, or said to be of another precision, it would still look whole, and prove less."""
    out = remade(files.recorded(), tmp_path / "r.safetensors", edit, sealed=False)
    with pytest.raises(CheckpointError) as error:
        load_recording(out)
    (finding,) = error.value.findings
    assert finding.code == "recording-damaged"
    assert finding.expected.startswith("xxh3_128:") and finding.got.startswith("xxh3_128:")


def test_a_recording_without_the_outputs_proves_nothing(files: Files, tmp_path: Path) -> None:
    """All that it holds is equal; what the models are for was not compared."""
    known = evidence_of(CASE)
    outputs = reference_of(CASE).outputs
    kept = {
        name: {k: v for k, v in getattr(known, name).items() if k not in outputs}
        for name in ("float64_values", "native_values")
    }
    out = tmp_path / "r.safetensors"
    keep(out, evidence=replace(known, **kept))
    report = check(files.written(CASE), recorded=out, require=("model",))
    assert level(report, "model").verdict is Verdict.INCONCLUSIVE and report.exit_code == 2
    assert level(report, "model").reason.startswith(
        f"the output {outputs[0]} was not compared (recorded in r.safetensors"
    )


def test_a_damaged_file_is_refused(files: Files, tmp_path: Path) -> None:
    content = golden("timesfm-2.5").read_bytes()
    out = tmp_path / "r.safetensors"
    out.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match="safetensors file"):
        load_recording(out)
    out.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_recording(out)
    for path, code in (
        (tmp_path / "missing.safetensors", "file-not-found"),
        (files.written("timesfm-2.5"), "recording-invalid"),
    ):
        with pytest.raises(CheckpointError) as error:
            load_recording(path)
        (finding,) = error.value.findings
        assert (finding.code, finding.path) == (code, str(path)) and "convert record" in finding.fix


def mismatch(out: Path, *given: Any, **options: Any) -> Finding:
    """The finding of a check against a recording of something else."""
    with pytest.raises(ConvertError) as error:
        check(out, *given, **options)
    (finding,) = error.value.findings
    assert finding.code == "recording-mismatch" and finding.path == str(options["recorded"])
    return finding


def test_a_recording_of_something_else_is_refused(files: Files, tmp_path: Path) -> None:
    out, recorded = files.written("timesfm-1.0"), files.recorded()
    found = mismatch(out, recorded=golden("timesfm-2.5"))
    assert found.expected.startswith("model timesfm-1") and found.got == "model timesfm-2.5"
    found = mismatch(files.written("timesfm-2.5", to="transformers"), recorded=golden("timesfm-2.5"))
    assert found.expected.startswith("target transformers") and found.got == "target timesfm"
    assert "--to transformers" in found.fix
    found = mismatch(out, recorded=recorded, precision="bfloat16")
    assert found.expected.startswith("precision bfloat16") and found.got == "precision float32"
    assert "--precision bfloat16" in found.fix
    found = mismatch(out, recorded=recorded, reference="os:system")
    assert "os:system" in found.expected and "shipped" in found.got and "leave --reference out" in found.fix
    foreign = tmp_path / "foreign.safetensors"  # a recording may name code, which does not run unless the user names it
    keep(foreign, factory="os:system")
    found = mismatch(out, recorded=foreign)
    assert "os:system" in found.got and "--reference os:system" in found.fix
    with pytest.raises(ConvertError, match=r"--from CKPT.*--recorded"):
        check(out)


def test_a_recording_of_another_checkpoint_is_refused(files: Files, tmp_path: Path) -> None:
    def other(manifest: dict[str, Any]) -> None:
        manifest["leaves"][0][3] = "0" * 32

    recorded = remade(golden("timesfm-2.5"), tmp_path / "r.safetensors", other)
    found = mismatch(files.written("timesfm-2.5"), recorded=recorded)
    assert "xxh3_128:" in found.expected and "xxh3_128:" in found.got
    found = mismatch(files.written("timesfm-2.5"), checkpoint("timesfm-2.5"), recorded=recorded)
    assert "1 of 25 leaves" in found.got
    found = mismatch(files.written("timesfm-1.0"), checkpoint("timesfm-2.0"), recorded=files.recorded())
    assert found.expected.startswith("leaf ") and found.got


def test_a_boundary_that_the_module_has_not_is_a_finding(files: Files, tmp_path: Path) -> None:
    """As when the recording was made for another version of the target's code."""
    live, out = evidence_of(CASE), tmp_path / "r.safetensors"
    assert live.float64_values is not None
    gone, bent = "stacked_transformer.layers.9", OUT.removesuffix(".weight")

    def other(values: Values) -> dict[str, Any]:
        return {gone if name == "freq_emb" else name: x[:, :-1] if name == bent else x for name, x in values.items()}

    masks = {name: mask for name, mask in live.masks.items() if name not in (bent, "freq_emb")}
    for limit in (MAX_BYTES, 600_000):
        evidence = replace(
            live, float64_values=other(live.float64_values), native_values=other(live.native_values), masks=masks
        )
        keep(out, evidence=evidence, max_bytes=limit, overwrite=True)
        model = level(check(files.written(CASE), recorded=out, levels=("model",)), "model")
        said = [str(finding) for finding in model.findings]
        assert model.verdict is Verdict.FAILED and len(said) == 2
        assert f"{gone}: the PyTorch module has no such value at this boundary" in said[0]
        assert "got no submodule of this name" in said[0]
        assert f"{bent}: the PyTorch module has no such value at this boundary" in said[1]
        assert "expected a value of shape [4, 15, 32], got shape [4, 16, 32]" in said[1]


def test_weights_of_unknown_origin_can_be_checked(files: Files, tmp_path: Path) -> None:
    """Someone else's conversion says nothing of itself; the recording says what it should be."""
    out = tmp_path / "theirs.safetensors"
    save_file(load_file(files.written("timesfm-2.5")), out)
    report = check(out, recorded=golden("timesfm-2.5"))
    assert verdicts(report) == ["passed", "passed", "skipped", "passed"]
    assert any("does not name the checkpoint" in note for note in level(report, "model").notes)


def test_leaves_are_computed_back(files: Files) -> None:
    from convert.writing.transfer import used_leaves
    from convert.writing.written import open_written

    for case in SETTINGS:
        plan = plan_of(case)
        source = RecordedSource(load_recording(golden(case)), open_written(files.written(case))).for_plan(plan)
        for leaf in used_leaves(plan):
            assert source.is_exact(leaf)
            np.testing.assert_array_equal(source.read(leaf), plan.source.read(leaf))
        with pytest.raises(CheckpointError, match="is not in the recording"):
            source.read("step")


# ---- the command line


@pytest.mark.slow
def test_record_and_check(run: Run, tmp_path: Path) -> None:
    out, recorded = tmp_path / "out.safetensors", tmp_path / "r.safetensors"
    run("timesfm", checkpoint(CASE), out, "--quiet")
    stdout, stderr = run("record", "timesfm", checkpoint(CASE), recorded, "--set", "use_positional_embedding=true", "--max-size", "1MB")  # fmt: skip
    assert stdout == "" and re.match(rf"wrote {recorded}: 51 boundaries and outputs of TimesFM 1.0 .*, \d+ of them sampled, ", stderr)  # fmt: skip
    stdout, _ = run("check", out, "--recorded", recorded, "--require", "model", "--json")
    report = json.loads(stdout)
    assert report["verdict"] == "equal" and report["source"] == str(recorded)
    settings = ("--set", "use_positional_embedding=true", "--seed", "3", "--overwrite")
    report = json.loads(run("record", "timesfm", checkpoint(CASE), recorded, *settings, "--json")[0])
    assert report["bytes"] == recorded.stat().st_size and report["values"] == 51 and report["seed"] == 3
    assert load_recording(recorded).manifest.seed == 3
    _, stderr = run("check", out, "--recorded", recorded, "--junit", recorded, code=2)
    assert "give another name" in stderr
    _, stderr = run("check", out, code=2)
    assert "--from CKPT" in stderr
    _, stderr = run("record", "timesfm", checkpoint(CASE), recorded, code=2)
    assert "--set use_positional_embedding=true for TimesFM 1.0, =false for 2.0" in stderr


# ---- without JAX

BLOCKED = re.compile(r"(jax|flax|orbax|optax|chex)|.*\.pth$")


@pytest.fixture(scope="module")
def without_jax(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs this Python with every installed package but JAX and what comes with it."""
    folder = tmp_path_factory.mktemp("site-packages")
    for place in map(Path, sys.path):
        if place.name in ("site-packages", "dist-packages") and place.is_dir():
            for entry in place.iterdir():
                if not BLOCKED.match(entry.name) and not (folder / entry.name).exists():
                    (folder / entry.name).symlink_to(entry)
    source = Path(convert.__file__).parents[1]

    def start(*args: object) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder}{os.pathsep}{source}",
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-S", "-W", "error", *map(str, args)]  # -S: without the real site-packages
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    yield start


def test_there_is_no_jax(without_jax: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    names = ("jax", "jaxlib", "flax", "orbax", "optax", "numpy", "torch", "convert")
    done = without_jax("-c", f"from importlib.util import find_spec; print([n for n in {names} if find_spec(n)])")
    assert done.stdout == "['numpy', 'torch', 'convert']\n", done.stderr
    assert "No module named 'jax'" in without_jax("-c", "import jax").stderr


@pytest.mark.slow
def test_a_check_without_jax(
    without_jax: Callable[..., subprocess.CompletedProcess[str]], files: Files, tmp_path: Path
) -> None:
    arguments = ("-m", "convert", "check", "--recorded", golden(CASE), "--require", "coverage,weights,model")
    done = without_jax(*arguments, files.written(CASE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "" and "equal" in done.stdout and "skipped" in done.stdout
    done = without_jax(*arguments, changed(files.written(CASE), tmp_path / "wrong.safetensors", transposed))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "diagnosis: transposed" in done.stdout and OUT in done.stdout


@pytest.mark.slow
def test_a_check_without_jax_beside_the_checkpoint(
    without_jax: Callable[..., subprocess.CompletedProcess[str]], files: Files
) -> None:
    """Of upstream's package only the PyTorch half can be imported."""
    case = "timesfm-2.5"
    arguments = ("--from", checkpoint(case), "--recorded", golden(case), "--require", "coverage,weights,model")
    done = without_jax("-m", "convert", "check", files.written(case), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jax is not installed" in done.stdout


@pytest.mark.slow
def test_without_jax_the_live_model_is_a_skip_and_recording_an_error(
    without_jax: Callable[..., subprocess.CompletedProcess[str]], files: Files, tmp_path: Path
) -> None:
    code = """
import sys
from convert.cli import main
for arguments in (sys.argv[1:8], sys.argv[8:]):
    sys.argv = ["convert", *arguments]
    try:
        main()
    except SystemExit as stop:
        print("exited with", stop.code)
"""
    source, out = checkpoint(CASE), tmp_path / "r.safetensors"
    setting = ("--set", "use_positional_embedding=true")
    live = ("check", files.written(CASE), "--from", source, "--level=model", *setting)
    done = without_jax("-c", code, *live, "record", "timesfm", source, out, *setting)
    assert done.stdout.count("exited with 2") == 2, done.stdout + done.stderr
    assert "skipped" in done.stdout and "jax is not installed" in done.stdout
    assert "reference-unavailable" in done.stderr and "jax is not installed" in done.stderr
    assert list(tmp_path.iterdir()) == []
