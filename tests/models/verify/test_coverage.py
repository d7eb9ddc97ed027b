"""Level 1: names, shapes and dtypes of a file against the plan and against upstream's own module; and how files are opened."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import convert
from convert.api import plan_conversion
from convert.core.errors import CheckpointError
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.verify.comparison import load_reference
from convert.verify.coverage.level import check_coverage
from convert.verify.coverage.names import find_prefix_change
from convert.verify.report.report import LevelReport, Verdict
from convert.writing.written import open_written
from support.command_line import Run
from support.gemma_models import directory, settings
from support.goldens import checkpoint

Tensors = dict[str, np.ndarray]
OUT = "stacked_xf.1.attn.out.weight"
ABSENT = "timesfm is not installed"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_conversion("timesfm", checkpoint("timesfm-2.5"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    out = tmp_path / "out.safetensors"
    convert.convert("timesfm", checkpoint("timesfm-2.5"), out)
    return out


def edited(
    file: Path, edit: Callable[[Tensors], object], plan: Plan, reference: Reference | str = ABSENT
) -> LevelReport:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    return check_coverage(plan, open_written(file), reference)


def test_what_was_written_is_covered(plan: Plan, file: Path) -> None:
    level = check_coverage(plan, open_written(file), ABSENT)
    assert level.verdict is Verdict.PASSED and level.findings == ()
    assert level.notes == (
        "45 tensors in the file, 45 in the plan",
        "load_state_dict of the target's module was not run: timesfm is not installed",
    )


def test_a_missing_tensor(plan: Plan, file: Path) -> None:
    level = edited(file, lambda t: t.pop(OUT), plan)
    assert level.verdict is Verdict.FAILED
    (finding,) = level.findings
    assert finding.path == OUT and finding.rule == "rules/timesfm-2.5.yaml:113"
    assert finding.code == "tensor-missing" and finding.got == "no such tensor"
    assert finding.expected == "float32[32,32] (from stacked_xf/attn/out/kernel/value)"


def test_a_tensor_too_many(plan: Plan, file: Path) -> None:
    (finding,) = edited(file, lambda t: t.update({"lm_head.weight": np.zeros((2, 3), np.float32)}), plan).findings
    assert finding.path == "lm_head.weight" and finding.rule == ""
    assert finding.code == "tensor-unexpected" and finding.got == "float32[2,3]"


def test_a_misspelt_name_suggests_the_right_one(plan: Plan, file: Path) -> None:
    level = edited(file, lambda t: t.update({"stacked_xf.1.attn.oot.weight": t.pop(OUT)}), plan)
    missing, extra = level.findings
    assert missing.path == OUT and missing.fix == "did you mean 'stacked_xf.1.attn.oot.weight'?"
    assert extra.path == "stacked_xf.1.attn.oot.weight" and f"did you mean '{OUT}'?" == extra.fix


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda x: x.reshape(16, 64), "float32[16,64]"),
        (lambda x: x.astype(np.float16), "float16[32,32]"),
        (lambda x: x.reshape(-1), "float32[1024]"),
    ],
)
def test_another_shape_or_dtype(plan: Plan, file: Path, make: Callable[[np.ndarray], np.ndarray], got: str) -> None:
    (finding,) = edited(file, lambda t: t.update({OUT: make(t[OUT])}), plan).findings
    assert (finding.code, finding.path, finding.got) == ("tensor-spec-differs", OUT, got)
    assert finding.expected == "float32[32,32] (from stacked_xf/attn/out/kernel/value)"


# ---- a whole file that differs in one thing


def renamed(new: Callable[[str], str]) -> Callable[[Tensors], object]:
    def edit(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[new(name)] = tensors.pop(name)

    return edit


@pytest.mark.parametrize(
    ("new", "ours", "theirs"),
    [
        (lambda name: f"model.{name}", "", "model."),
        (lambda name: name.replace("stacked_xf.", "xf.layers."), "stacked_xf.", "xf.layers."),
        (lambda name: name.removeprefix("stacked_xf."), "stacked_xf.", ""),
    ],
)
def test_anfind_prefix_change_is_one_finding(
    plan: Plan, file: Path, new: Callable[[str], str], ours: str, theirs: str
) -> None:
    (finding,) = edited(file, renamed(new), plan).findings
    assert finding.code == "prefix-differs" and (finding.data["ours"], finding.data["theirs"]) == (ours, theirs)
    assert repr(ours) in finding.expected and repr(theirs) in finding.got and "--model" in finding.fix
    assert finding.data["tensors"] == sum(step.name != new(step.name) for step in plan.steps)


def test_beside_anfind_prefix_change_the_rest_is_found(plan: Plan, file: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors.pop(OUT)
        tensors["stacked_xf.0.attn.out.weight"] = tensors["stacked_xf.0.attn.out.weight"][:3].copy()
        renamed(lambda name: f"model.{name}")(tensors)
        tensors["tail"] = np.zeros(2, np.float32)

    codes = [finding.code for finding in edited(file, edit, plan).findings]
    assert codes == ["prefix-differs", "tensor-spec-differs", "tensor-missing", "tensor-unexpected"]


def test_single_names_are_no_prefix() -> None:
    assert find_prefix_change(["a.weight", "b.weight"], ["c.weight", "d.weight"]) is None
    assert find_prefix_change(["a.x.weight"], ["b.x.weight"]) is None
    assert find_prefix_change(["a.x.w", "a.y.w", "a.z.w"], ["b.x.w", "b.y.w", "c"]) == ("a.", "b.")
    assert find_prefix_change([], ["b"]) is None and find_prefix_change(["b"], []) is None


def test_everything_in_bfloat16_is_one_finding(run: Run, plan: Plan, file: Path, tmp_path: Path) -> None:
    """As most published files are. With --dtype it passes."""
    narrow = tmp_path / "narrow.safetensors"
    convert.convert("timesfm", checkpoint("timesfm-2.5"), narrow, dtype="bfloat16")
    (finding,) = check_coverage(plan, open_written(narrow), ABSENT).findings
    assert (finding.code, finding.expected, finding.got) == ("dtype-differs", "float32 for 45 of them", "bfloat16")
    assert "--dtype bfloat16" in finding.fix

    tensors = {name: open_written(narrow).read(name) for name in open_written(narrow).tensors}
    foreign = tmp_path / "foreign.safetensors"
    save_file(tensors, foreign)
    source = ("--from", checkpoint("timesfm-2.5"), "--model", "timesfm", "--level", "coverage,weights")
    run("check", foreign, *source, code=1)
    run("check", foreign, *source, "--dtype", "bfloat16", code=0)
    tensors["stacked_xf.0.attn.out.weight"] = tensors["stacked_xf.0.attn.out.weight"].astype(np.float32)
    save_file(tensors, foreign)  # not all: no choice of a dtype, but a mistake of each
    findings = check_coverage(plan, open_written(foreign), ABSENT).findings
    assert len(findings) == 44 and all(f.code == "tensor-spec-differs" for f in findings)


def test_a_head_beside_the_table_that_it_is_tied_to(tmp_path: Path) -> None:
    out = directory("gemma3", tmp_path / "out")
    plan = convert.plan_conversion("gemma", checkpoint("gemma3"), settings=settings("gemma3"))
    file, table = out / "model.safetensors", "model.embed_tokens.weight"
    level = edited(file, lambda t: t.update({"lm_head.weight": t[table]}), plan)
    assert level.verdict is Verdict.PASSED
    assert any(note.startswith(f"lm_head.weight equals {table} bit for bit") for note in level.notes)
    planted: dict[str, float] = {}

    def one_value(tensors: Tensors) -> None:
        head = tensors["lm_head.weight"] = tensors[table].copy()
        head[5, 7] += 0.25
        planted["by"] = float(abs(np.float64(head[5, 7]) - np.float64(tensors[table][5, 7])))

    (finding,) = edited(file, one_value, plan).findings
    assert finding.code == "tied-weights-differ" and table in finding.expected
    assert "1 of 12288 values" in finding.got and finding.data["max_abs"] == planted["by"] > 0.2
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(out)  # as the finding says of transformers
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)
    (finding,) = edited(file, lambda t: t.update({"lm_head.weight": t[table][:9].copy()}), plan).findings
    assert finding.code == "tensor-unexpected"


# ---- upstream's own module


@pytest.mark.parametrize("to", ["timesfm", "transformers"])
def test_upstreams_module_accepts_what_was_written(to: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    convert.convert("timesfm", checkpoint("timesfm-2.5"), out, to=to)
    plan = plan_conversion("timesfm", checkpoint("timesfm-2.5"), to=to)
    reference = load_reference(plan, None)
    level = check_coverage(plan, open_written(out), reference)
    assert level.verdict is Verdict.PASSED, level.findings
    assert level.notes[1:] == ("load_state_dict(strict=True) of the target's module was run on the meta device",)


def test_upstreams_module_is_asked_beyond_the_rules(plan: Plan, file: Path) -> None:
    """Rules that forget a tensor agree with a file that lacks it; the module does not."""
    less = dataclasses.replace(plan, steps=tuple(step for step in plan.steps if step.name != OUT))
    level = edited(file, lambda t: t.pop(OUT), less, load_reference(less, None))
    (finding,) = level.findings
    assert finding.code == "module-rejects-file" and OUT in finding.got


def test_a_package_that_turns_out_to_be_missing(plan: Plan, file: Path) -> None:
    def build(state: Mapping[str, Any]) -> torch.nn.Module:
        raise ModuleNotFoundError("No module named 'flux'", name="flux")

    reference = Reference(lambda seed: {}, build, lambda module, inputs: {}, (), 1, 1)
    level = check_coverage(plan, open_written(file), reference)
    assert level.verdict is Verdict.PASSED
    assert level.notes[-1] == "load_state_dict of the target's module was not run: flux is not installed"


def test_a_module_that_needs_numbers_is_not_called_wrong(plan: Plan, file: Path) -> None:
    """As PyTorch Geometric's layers, whose `__init__` takes a number off a tensor."""

    def build(state: Mapping[str, Any]) -> torch.nn.Module:
        torch.zeros(1, device="meta").item()
        return torch.nn.Module()

    reference = Reference(lambda seed: {}, build, lambda module, inputs: {}, (), 1, 1)
    level = check_coverage(plan, open_written(file), reference, factory="mine:reference")
    assert level.verdict is Verdict.PASSED
    assert level.notes[-1].endswith(
        "this is no fault: code that reads numbers while the module is built does not run on the meta device, and the model level loads the module with the weights"
    )


RULES = """model: m
title: M
targets: {torch: {loads: torch.nn.BatchNorm1d}}
rules:
- {from: "{scale,bias,mean,var}", axes: C, parameter: "bn.{weight,bias,running_mean,running_var}"}
"""
COUNTER = '- {value: 0, axes: "", dtype: int64, because: no count, constant: bn.num_batches_tracked}\n'


@pytest.mark.parametrize("rules", [RULES, RULES + COUNTER])
@pytest.mark.parametrize("own", [True, False])
def test_a_counter_that_the_module_has_is_named(rules: str, own: bool, tmp_path: Path) -> None:
    """torch fills it in where a state_dict says no version, so that a strict load does not miss it."""

    def build(state: Mapping[str, Any]) -> torch.nn.Module:
        module = torch.nn.Module()
        module.bn = torch.nn.BatchNorm1d(5)
        if own:  # which has the version of each layer
            module.load_state_dict(state, strict=True)
            return module.eval()
        return torch.nn.Sequential(module)  # whose names are no names of the file

    ckpt, out = tmp_path / "ckpt.npz", tmp_path / "out.safetensors"
    np.savez(ckpt, **{name: np.ones(5, np.float32) for name in ("scale", "bias", "mean", "var")})
    (tmp_path / "m.yaml").write_text(rules)
    convert.convert(str(tmp_path / "m.yaml"), ckpt, out)
    reference = Reference(lambda seed: {}, build, lambda module, inputs: {}, (), 1, 1)
    level = check_coverage(plan_conversion(str(tmp_path / "m.yaml"), ckpt), open_written(out), reference)
    lacks = own and rules == RULES
    said = [note for note in level.notes if note.startswith("the file has no bn.num_batches_tracked, the counter")]
    assert len(said) == lacks and level.verdict is Verdict.PASSED
    assert all(COUNTER[3:11] in note and "`constant: bn.num_batches_tracked`" in note for note in said)


# ---- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    convert.convert("timesfm", checkpoint("timesfm-2.5"), out, to="transformers", max_shard_bytes=200_000)
    return out


def test_shards(folder: Path) -> None:
    written = open_written(folder)
    plan = plan_conversion("timesfm", checkpoint("timesfm-2.5"), to="transformers")
    assert len({path for path, _ in written.tensors.values()}) > 1
    assert check_coverage(plan, written, ABSENT).verdict is Verdict.PASSED
    assert written.config is not None and written.config["model_type"] == "timesfm2_5"
    assert written.metadata["model"] == "timesfm-2.5"


def test_a_directory_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert len(open_written(folder).tensors) == 51


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_an_index_that_lies(folder: Path) -> None:
    """Loaders go by the index: a tensor that it puts elsewhere, or leaves out, would not be loaded."""
    change_index(folder, lambda places: places.pop("model.layers.0.mlp.fc1.weight"))
    with pytest.raises(CheckpointError) as error:
        open_written(folder)
    (finding,) = error.value.findings
    assert finding.code == "converted-index-invalid" and "model.layers.0.mlp.fc1.weight" in finding.problem
    assert finding.got == "no entry" and "model-0000" in finding.expected
    change_index(
        folder, lambda places: places.update({"model.layers.0.mlp.fc1.weight": "model-00004-of-00004.safetensors"})
    )
    with pytest.raises(CheckpointError) as error:
        open_written(folder)
    assert error.value.findings[0].got == "model-00004-of-00004.safetensors"


def test_the_file_that_from_pretrained_loads_is_the_one_that_is_checked(run: Run, folder: Path) -> None:
    """A file of an earlier conversion beside shards and an index: transformers prefers it, and so must the check."""
    from transformers import AutoModel

    tensors = {name: open_written(folder).read(name) for name in open_written(folder).tensors}
    metadata = dict(open_written(folder).metadata)
    stale = {name: (x * np.float32(1.1) if x.dtype == np.float32 else x) for name, x in tensors.items()}
    save_file(stale, folder / "model.safetensors", metadata=metadata)
    name = next(n for n in tensors if n.endswith("layers.0.mlp.fc1.weight"))
    loaded = AutoModel.from_pretrained(folder).state_dict()[name.removeprefix("model.")].numpy()
    assert np.array_equal(loaded, stale[name]) and np.array_equal(open_written(folder).read(name), stale[name])
    said, _ = run("check", folder, "--from", checkpoint("timesfm-2.5"), "--level", "coverage,weights", code=1)
    assert "model.safetensors: it stands next to model.safetensors.index.json" in said
    assert "delete model.safetensors if the shards are meant" in said
    assert "weights: FAILED" in said and "all values are multiplied by 1.1" in said

    (folder / "model.safetensors").unlink()
    run("check", folder, "--from", checkpoint("timesfm-2.5"), "--level", "coverage,weights", code=0)


def test_a_file_that_config_json_names(run: Run, folder: Path) -> None:
    """`transformers_weights` comes before all names that transformers knows by itself."""
    from transformers import AutoModel

    tensors = {name: open_written(folder).read(name) + 0 for name in open_written(folder).tensors}
    name = next(n for n in tensors if n.endswith("layers.0.mlp.fc1.weight"))
    tensors[name][0, 0] += 1
    save_file(tensors, folder / "other.safetensors", metadata=dict(open_written(folder).metadata))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    loaded = AutoModel.from_pretrained(folder).state_dict()[name.removeprefix("model.")].numpy()
    assert np.array_equal(loaded, tensors[name])
    said, _ = run("check", folder, "--from", checkpoint("timesfm-2.5"), "--level", "coverage,weights", code=1)
    assert "transformers_weights: config.json names other.safetensors" in said and f": {name}: " in said
    for named in ("../x.safetensors", "absent.safetensors", 3):
        (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": named}))
        with pytest.raises(CheckpointError, match="transformers_weights.*expected a file in this directory"):
            open_written(folder)


def test_an_adapter_beside_the_weights(folder: Path) -> None:
    plan = plan_conversion("timesfm", checkpoint("timesfm-2.5"), to="transformers")
    (folder / "adapter_config.json").write_text("{}")
    (finding,) = check_coverage(plan, open_written(folder), ABSENT).findings
    assert "from_pretrained adds the adapter to these weights" in finding.problem


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", 7])
def test_an_index_that_leads_elsewhere(folder: Path, name: object) -> None:
    change_index(folder, lambda places: places.update({"model.layers.0.mlp.fc1.weight": name}))
    with pytest.raises(CheckpointError, match="expected a file in this directory"):
        open_written(folder)


def test_a_missing_shard(folder: Path, run: Run) -> None:
    """`from_pretrained` cannot load such a directory, so the check fails, and is not inconclusive."""
    from transformers import AutoModel

    places = {name: path.name for name, (path, _) in open_written(folder).tensors.items()}
    gone = max(set(places.values()), key=list(places.values()).count)
    lost = [name for name, place in places.items() if place == gone]
    assert len(lost) > 1
    (folder / gone).unlink()
    with pytest.raises(OSError, match=gone):
        AutoModel.from_pretrained(folder)
    said, _ = run("check", folder, "--from", checkpoint("timesfm-2.5"), "--level", "coverage,weights", code=1)
    assert (
        f"{gone}: there is no such file, and model.safetensors.index.json names it for {lost[0]} and {len(lost) - 1} more"
        in said
    )
    assert "copy the file there, or convert again" in said
    assert f"{lost[0]} (" not in said.partition("weights: ")[0], "its tensors are no findings of their own"
    assert "coverage: FAILED" in said and "weights: FAILED" in said and "see the coverage level" in said
    _, stderr = run("plan", "timesfm", checkpoint("timesfm-2.5"), "--to", "transformers", "--like", folder, code=2)
    assert f"names {gone} (for " in stderr and "and there is no such file" in stderr


def test_no_shard_is_there(folder: Path, run: Run) -> None:
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    said, _ = run("check", folder, "--from", checkpoint("timesfm-2.5"), "--model", "timesfm", "--to", "transformers", "--level", "coverage", code=1)  # fmt: skip
    assert said.count("there is no such file") == 4


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such file or directory"):
        open_written(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"there is no .safetensors file in it"):
        open_written(tmp_path)
