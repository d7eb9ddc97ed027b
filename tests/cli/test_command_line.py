"""The command line as a user meets it: what goes to stdout and stderr, exit codes, messages, nothing left behind."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import convert
from convert.core.errors import ConvertError
from convert.writing.shard_size import parse_size
from support.command_line import Run
from support.goldens import checkpoint
from support.memory_source import MemorySource
from support.paths import GOLDEN

CONVERT = str(Path(sys.executable).with_name("convert"))


# ---- the main job


def test_convert_says_what_it_found_and_wrote(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    stdout, stderr = run("timesfm", checkpoint("timesfm-2.5"), out)
    assert stdout == ""
    found, wrote = stderr.splitlines()
    assert found.startswith("found TimesFM 2.5 (flax nnx), no published size (i=3, D=32, ")
    assert wrote.startswith(f"wrote {out}: 45 tensors, 596.1 kB in ") and "TimesFM_2p5_200M_torch_module" in wrote


def test_quiet_says_nothing(run: Run, tmp_path: Path) -> None:
    assert run("timesfm", checkpoint("timesfm-1.0"), tmp_path / "out.safetensors", "--quiet") == ("", "")


def test_json_report(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    stdout, stderr = run("timesfm", checkpoint("timesfm-1.0"), out, "--json")
    report = json.loads(stdout)
    assert stderr == ""
    assert report["model"] == "timesfm-1" and report["tensors"] == 49 and report["out"] == str(out)
    assert report["dropped"] == [{"leaf": "step", "because": "the training step"}]


def test_options_may_come_first(run: Run, tmp_path: Path) -> None:
    run("--to", "transformers", "timesfm", checkpoint("timesfm-2.5"), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_any_directory_above_the_checkpoint_will_do(run: Run, tmp_path: Path) -> None:
    root = GOLDEN / "timesfm-1.0"
    bytes_ = set()
    for k, path in enumerate((root, root / "checkpoints", *(root / "checkpoints").iterdir())):
        run("timesfm", path, tmp_path / f"{k}.safetensors")
        bytes_.add((tmp_path / f"{k}.safetensors").read_bytes())
    assert k == 2 and len(bytes_) == 1


def test_dtype(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    _, stderr = run("timesfm", checkpoint("timesfm-2.5"), out, "--dtype", "bfloat16")
    assert "note: 45 tensors rounded from float32 to bfloat16" in stderr
    with safe_open(out, "np") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_dry_run_is_the_plan_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    args = ("timesfm", checkpoint("timesfm-1.0"))
    dry, _ = run(*args, tmp_path / "model.safetensors", "--dry-run")
    plan, _ = run("plan", *args)
    assert dry == plan
    assert list(tmp_path.iterdir()) == []


def test_shards(run: Run, tmp_path: Path) -> None:
    run("timesfm", checkpoint("timesfm-2.5"), tmp_path / "out", "--max-shard-size", "200kB")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert (
        names[:2] == ["README.md", "model-00001-of-00004.safetensors"] and names[-1] == "model.safetensors.index.json"
    ), names
    _, stderr = run(
        "timesfm", checkpoint("timesfm-2.5"), tmp_path / "x.safetensors", "--max-shard-size", "200kB", code=2
    )
    assert "directory" in stderr
    assert not (tmp_path / "x.safetensors").exists()


def test_like_compares_with_an_existing_state_dict(run: Run, tmp_path: Path) -> None:
    ours, other = tmp_path / "ours.safetensors", tmp_path / "other.safetensors"
    run("timesfm", checkpoint("timesfm-2.5"), ours)
    run("timesfm", checkpoint("timesfm-2.5"), tmp_path / "again.safetensors", "--like", ours)
    _, stderr = run("timesfm", checkpoint("timesfm-2.5"), other, "--to", "transformers", "--like", ours, code=2)
    assert "error[state-dict-mismatch]" in stderr and not other.exists()


# ---- inspect, plan, rules


def test_inspect(run: Run) -> None:
    out, err = run("inspect", checkpoint("timesfm-2.5"))
    assert err == ""
    assert "Orbax, OCDBT, zarr" in out.splitlines()[0]
    assert any(
        line.split() == ["stacked_xf/attn/out/kernel/value", "3x4x8x32", "float32", "12,288"]
        for line in out.splitlines()
    )
    assert "25 leaves, " in out
    assert (
        "Rules that fit" in out
        and "  timesfm-2.5: TimesFM 2.5 (flax nnx)" in out
        and "more do not fit; --full lists them" in out
    )


def test_inspect_json(run: Run) -> None:
    report = json.loads(run("inspect", checkpoint("timesfm-1.0"), "--json")[0])
    leaf = next(leaf for leaf in report["leaves"] if leaf["path"].endswith("x_layers_1/self_attention/post/w"))
    assert leaf["shape"] == [32, 4, 8] and leaf["dtype"] == "float32" and leaf["bytes"] == 4096
    assert leaf["keys"][0] == "mdl_vars"
    assert report["totals"]["bytes"] == sum(leaf["bytes"] for leaf in report["leaves"])
    assert {fit["model"] for fit in report["rules"]} > {"timesfm-1", "timesfm-2.5", "gemma3"}
    assert [fit["model"] for fit in report["rules"] if fit["fits"]] == ["timesfm-1"]


def test_plan_shows_layouts_and_what_shapes_cannot_protect(run: Run) -> None:
    out, _ = run("plan", "timesfm", checkpoint("timesfm-1.0"))
    lines = [line.strip() for line in out.splitlines()]
    k = next(
        k
        for k, line in enumerate(lines)
        if line.startswith("stacked_transformer.layers.{0..")
        and ".o_proj.weight  float32[32,32]  model.safetensors" in line
    )
    assert lines[k + 1].endswith("/self_attention/post/w  D N H -> D (N H)") and "x_layers_{0.." in lines[k + 1]
    assert any(".mlp.layer_norm.weight  float32[32]  (+ 1)  model.safetensors" in line for line in lines)
    assert "D N H -> D (N H); also fits: D (H N), (N H) D, (H N) D" in lines
    assert "its 3 parts fit in any order; the rule's order is query, key, value" in lines
    assert any(line.startswith("step  int32[]  the training step (rules/timesfm-1.yaml:") for line in lines)


def test_plan_layout_of_the_two_output_projections(run: Run) -> None:
    """The same sentence of the design, two equations: no transpose in praxis, a transpose in 2.5."""
    layouts = {}
    for case, name in (
        ("timesfm-1.0", "stacked_transformer.layers.2.self_attn.o_proj.weight"),
        ("timesfm-2.5", "stacked_xf.2.attn.out.weight"),
    ):
        plan = json.loads(run("plan", "timesfm", checkpoint(case), "--json")[0])
        tensor = next(tensor for tensor in plan["tensors"] if tensor["name"] == name)
        layouts[case] = (tensor["from"][0]["layout"], tensor["from"][0]["ops"])
    assert layouts["timesfm-1.0"] == ("D N H -> D (N H)", ["reshape (32, 32)"])
    assert layouts["timesfm-2.5"] == ("i N H D -> i D (N H)", ["axis 0 [2]", "permute (2, 0, 1)", "reshape (32, 32)"])


@pytest.mark.slow
def test_plan_json_accounts_for_every_leaf_and_byte(run: Run) -> None:
    for case in ("timesfm-1.0", "timesfm-2.0", "timesfm-2.5"):
        plan = json.loads(run("plan", "timesfm", checkpoint(case), "--json", "--max-shard-size", "100kB")[0])
        leaves = {leaf["path"] for leaf in json.loads(run("inspect", checkpoint(case), "--json")[0])["leaves"]}
        used = {part["leaf"] for tensor in plan["tensors"] for part in tensor["from"]}
        assert used | {d["leaf"] for d in plan["dropped"]} == leaves
        spans: dict[str, list[tuple[int, int]]] = {}
        for tensor in plan["tensors"]:
            spans.setdefault(tensor["file"], []).append(tuple(tensor["bytes"]))
        for found in spans.values():
            ends = sorted(found)
            assert ends[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(ends))


def test_rules_list_show_validate_schema(run: Run, tmp_path: Path) -> None:
    out, _ = run("rules", "list")
    known = [rules.model for rules in convert.available_rules()]  # their names are in the snapshot of this command
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", *known]
    assert [rules["model"] for rules in json.loads(run("rules", "list", "--json")[0])] == known
    assert run("rules", "show", "gemma")[0].count("# yaml-language-server") == 5  # five files
    shown, _ = run("rules", "show", "timesfm-2.5")
    mine = tmp_path / "mine.yaml"
    mine.write_text(shown)
    assert run("rules", "validate", mine)[0] == f"{mine}: valid, 15 rules for timesfm, transformers\n"
    assert json.loads(run("rules", "schema")[0])["title"] == "ckpt-convert rule file"
    mine.write_text(shown.replace("  einsum:", "  einsun:").replace("- einsum:", "- einsun:"))
    _, err = run("rules", "validate", mine, code=2)
    assert f"{mine}:" in err and "einsun" in err


def test_a_file_and_a_directory_of_ones_own(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.mkdir()
    text = (
        run("rules", "show", "timesfm-2.5")[0]
        .replace("model: timesfm-2.5", "model: mine")
        .replace("family: timesfm\n", "")
    )
    (rules / "mine.yaml").write_text(text)
    run("mine", checkpoint("timesfm-2.5"), tmp_path / "a.safetensors", "--rules", rules)
    run(rules / "mine.yaml", checkpoint("timesfm-2.5"), tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert "mine" in run("rules", "list", "--rules", rules)[0]


# ---- input errors: exit code 2, one clear message, nothing left behind


def nothing_but(tmp_path: Path, *names: str) -> bool:
    return sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


def damaged(tmp_path: Path, case: str) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(GOLDEN / case, copy)
    return copy


def test_no_such_path(run: Run, tmp_path: Path) -> None:
    _, err = run("timesfm", tmp_path / "absent", tmp_path / "out.safetensors", code=2)
    assert (
        err
        == f"error[checkpoint-missing]: {tmp_path / 'absent'}: there is no such file or directory; correct the path\n"
    )


def test_not_a_checkpoint(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("hello")
    _, err = run("timesfm", folder, tmp_path / "out.safetensors", code=2)
    assert err.startswith(
        f"error[checkpoint-unknown-format]: {folder}: expected a checkpoint, got a directory with notes.txt; give the file"
    )
    assert nothing_but(tmp_path, "folder")


def test_another_models_checkpoint(run: Run, tmp_path: Path) -> None:
    _, err = run("timesfm-1", checkpoint("timesfm-2.5"), tmp_path / "out.safetensors", code=2)
    assert err.startswith(
        "error[rules-of-another-model]: rules/timesfm-1.yaml: no rule matches any of the 25 leaves of "
    )
    assert nothing_but(tmp_path)


def test_unknown_model(run: Run, tmp_path: Path) -> None:
    _, err = run("timesfn", checkpoint("timesfm-2.5"), tmp_path / "out.safetensors", code=2)
    assert err.startswith(
        "error[rules-not-found]: no rules are named 'timesfn'; did you mean 'timesfm'? Or give your own"
    )
    assert "./my-model.yaml" in err and "whisper" not in err
    _, err = run("xyz", checkpoint("timesfm-2.5"), tmp_path / "out.safetensors", code=2)
    assert "no rules are named 'xyz': expected one of bert, " in err


def test_rule_file_without_a_path_or_yaml(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("")
    _, err = run("plan", "README.md", checkpoint("timesfm-2.5"), code=2)
    assert err.startswith(
        "error[rules-not-found]: README.md: it is a file, but a rule file is named by a path with / or"
    )
    assert err.endswith("; write ./README.md\n") and "bert" not in err


def test_unknown_target_and_setting(run: Run, tmp_path: Path) -> None:
    args = ("timesfm", checkpoint("timesfm-2.5"), tmp_path / "out.safetensors")
    err = run(*args, "--to", "transformer", code=2)[1]
    assert err.startswith("error[target-unknown]") and "did you mean 'transformers'?" in err
    assert "did you mean 'rope_theta'?" in run(*args, "--set", "rope_thetha=1", code=2)[1]
    assert "expected key=value, got 'rope_theta'" in run(*args, "--set", "rope_theta", code=2)[1]
    assert nothing_but(tmp_path)


def test_truncated_leaf(run: Run, tmp_path: Path) -> None:
    copy = damaged(tmp_path, "timesfm-1.0")
    file = next(copy.rglob("state/checkpoint"))
    file.write_bytes(file.read_bytes()[:200_000])
    _, err = run("timesfm", copy, tmp_path / "out.safetensors", code=2)
    assert err.startswith("error[") and "mdl_vars/params/" in err and "Traceback" not in err
    assert nothing_but(tmp_path, "copy")


def test_damaged_ocdbt_file(run: Run, tmp_path: Path) -> None:
    copy = damaged(tmp_path, "timesfm-2.5")
    biggest = max((p for p in copy.rglob("d/*") if p.is_file()), key=lambda p: p.stat().st_size)
    biggest.write_bytes(biggest.read_bytes()[: biggest.stat().st_size // 2])
    _, err = run("timesfm", copy, tmp_path / "out.safetensors", code=2)
    assert err.startswith("error[") and re.search(r"kernel[./]value", err) and "Traceback" not in err
    assert nothing_but(tmp_path, "copy")


def test_unfinished_checkpoint(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "ckpt.orbax-checkpoint-tmp-123"
    shutil.copytree(checkpoint("timesfm-2.5"), copy)
    _, err = run("timesfm", copy, tmp_path / "out.safetensors", code=2)
    assert "not finished" in err
    assert nothing_but(tmp_path, copy.name)


def test_existing_output_is_kept(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("mine")
    _, err = run("timesfm", checkpoint("timesfm-2.5"), out, code=2)
    assert "--overwrite" in err and out.read_text() == "mine"
    run("timesfm", checkpoint("timesfm-2.5"), out, "--overwrite")
    assert out.stat().st_size > 500_000 and nothing_but(tmp_path, "out.safetensors")


@pytest.mark.parametrize("name", ["o.pt", "o.PTH", "o.bin", "o.safetensor", "o.ckpt", "o.h5", "o.npz", "o.Safetensors"])
def test_output_with_the_name_of_another_format(run: Run, name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    for option in ((), ("--dry-run",), ("--overwrite",)):
        _, err = run("timesfm", checkpoint("timesfm-2.5"), out, *option, code=2)
        assert err.startswith(f"error[output-name-invalid]: {out}: expected a name that ends in .safetensors, or the")
        assert f"got a name that ends in {out.suffix}; write {out.with_suffix('.safetensors')}, or " in err
    assert nothing_but(tmp_path)


def test_output_directory_with_a_dot_in_its_name(run: Run, tmp_path: Path) -> None:
    existing = tmp_path / "run.pt"
    existing.mkdir()
    for out in (tmp_path / "gemma-3.1b", existing):
        run("timesfm", checkpoint("timesfm-2.5"), out, "--overwrite")
        assert (out / "model.safetensors").is_file()


def test_output_within_the_checkpoint(run: Run, tmp_path: Path) -> None:
    copy = damaged(tmp_path, "timesfm-2.5") / "ckpt"
    problems = {
        copy: f"the output is the checkpoint {copy} itself",
        copy / "x.safetensors": f"the output lies inside the checkpoint {copy}; choose a path outside of it",
        copy.parent: f"the checkpoint {copy} lies inside the output directory",
    }
    for out, problem in problems.items():
        _, err = run("timesfm", copy, out, "--overwrite", code=2)
        assert err.startswith(f"error[output-within-input]: {out}: {problem}")
    assert not (copy / "x.safetensors").exists()


@pytest.mark.parametrize(
    "place", ["x.safetensors", "checkpoints/x.safetensors", "checkpoints/checkpoint_1100000/state/x"]
)
def test_output_within_a_paxml_checkpoint(run: Run, place: str, tmp_path: Path) -> None:
    """Refused from whichever of its directories the checkpoint is named."""
    copy = damaged(tmp_path, "timesfm-1.0")
    for named in (
        copy,
        copy / "checkpoints" / "checkpoint_1100000",
        copy / "checkpoints" / "checkpoint_1100000" / "state",
    ):
        out = copy / place
        if named in out.parents or "checkpoint_1100000" in place:
            assert "output-within-input" in run("timesfm", named, out, code=2)[1]
    assert not (copy / place).exists()


def test_output_within_another_step(run: Run, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    shutil.copytree(GOLDEN / "orbax-0.5" / "steps", steps)
    leaf = next(iter(convert.open_source(steps).leaves))
    rules = tmp_path / "mine.yaml"
    names = {name: f"- from: {name}\n  parameter: p{k}\n" for k, name in enumerate(convert.open_source(steps).leaves)}
    rules.write_text("model: m\ntitle: m\ntargets: {torch: {loads: x}}\nrules:\n" + "".join(names.values()))
    assert leaf
    for out in (steps / "x.safetensors", next(p for p in steps.iterdir() if p.is_dir())):
        assert "output-within-input" in run(rules, steps, out, "--overwrite", code=2)[1]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("epsilon=abc", "expected a number above 0 and at most 0.1, such as 1e-06"),
        ("quantiles=5", "expected a list of Q - 1 numbers, each above 0 and below 1, in rising order"),
        ("context_length=foo", "expected an integer of at least 1, such as 512"),
        ("context_length=-5", "expected an integer of at least 1, such as 512"),
        ("use_positional_embedding=1", "expected true or false"),
        ("attention_mask=3", "attention_mask describes what the source computes (causal and padding), and nothing"),
    ],
)
def test_settings_of_the_wrong_kind(run: Run, setting: str, said: str, tmp_path: Path) -> None:
    base = ("--to", "transformers", "--set", "use_positional_embedding=true", "--set", "context_length=512")
    _, err = run("timesfm", checkpoint("timesfm-1.0"), tmp_path / "out", *base, "--set", setting, code=2)
    assert f"--set {setting}: {said}" in err and nothing_but(tmp_path)


def test_float16_overflow_names_the_tensor(run: Run, tmp_path: Path) -> None:
    source = convert.open_source(checkpoint("timesfm-2.5"))
    arrays = {name: source.read(name).copy() for name in source.leaves}
    arrays["stacked_xf/ff0/kernel/value"][1, 2, 3] = 1e6
    with pytest.raises(
        convert.PlanError,
        match=r"timesfm-2.5.yaml:\d+: stacked_xf.1.ff0.weight: from stacked_xf/ff0/kernel/value: 1 of",
    ) as error:
        convert.convert("timesfm", MemorySource(arrays), tmp_path / "out.safetensors", dtype="float16")
    assert "dtype: float32" in str(error.value) and nothing_but(tmp_path)


def test_usage_error_is_2(run: Run) -> None:
    assert "Missing argument" in run("timesfm", code=2)[1]


def test_internal_error_is_2_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("convert.api.open_source", lambda *_, **__: 1 / 0)
    _, err = run("timesfm", checkpoint("timesfm-2.5"), tmp_path / "out.safetensors", code=2)
    assert "internal error, please report it" in err and "ZeroDivisionError" in err


def test_bad_dtype(run: Run, tmp_path: Path) -> None:
    _, err = run("timesfm", checkpoint("timesfm-2.5"), tmp_path / "out.safetensors", "--dtype", "bf16", code=2)
    assert "bf16" in err and "bfloat16" in err


POST = "stacked_transformer_layer/x_layers_{i}/self_attention/post"
COVERAGE = {
    "two layers from one leaf": (
        "- from: freq_emb/emb_var\n  axes: ED\n",
        "- from: freq_emb/emb_var\n  parameter: {timesfm: x, transformers: x}\n\n- from: freq_emb/emb_var\n  axes: ED\n",
        "mdl_vars/params/freq_emb/emb_var: two rules match this leaf (float32[3,32]), {rules}:106 (parameter) and {rules}:109 (embedding)",
    ),
    "two rules on one leaf": (
        "- drop: /step",
        "- drop: '/*tep'\n  because: again\n\n- drop: /step",
        "step: two rules match this leaf (int32[]), {rules}:193 (drop) and {rules}:196 (drop); remove one or narrow its path",
    ),
    "a leaf without a rule": (
        "- drop: /step\n  because: the training step\n",
        "",
        "{rules}: step: no rule matches this leaf (int32[]); add a rule, or `drop:` it with a reason",
    ),
    "a target without a source": (
        f"bias: {POST}/b",
        f"bias: {POST}/bias",
        f"{{rules}}:134: mdl_vars/params/{POST}/bias (linear, bias): expected a leaf with this path, got none",
    ),
    "a shape that contradicts the equation": (
        "...F,FO->...O",
        "...O,FO->...F",
        "{rules}:181: mdl_vars/params/horizon_ff_layer/output_layer/bias/b: float32[1280] as F makes F = 1280 (width of",
    ),
    "an axis that does not divide": (
        "equals: 2*P",
        "equals: 3*P",
        "{rules}:19: I = 3*P (input of the first block (a patch and its padding mask)): 64 is not divisible by 3 ({rules}:84: "
        "mdl_vars/params/input_ff_layer/hidden_layer/linear/w: float32[64,32] as I F makes it 64)",
    ),
    "two rules make one tensor": (
        "timesfm: input_ff_layer.residual_layer",
        "timesfm: input_ff_layer.output_layer",
        "input_ff_layer.output_layer.weight: this target tensor (float32[32,64]) is made twice, here and at {rules}:92 (float32[32,32])",
    ),
}


@pytest.mark.parametrize("case", COVERAGE)
def test_rules_that_do_not_cover(run: Run, case: str, tmp_path: Path) -> None:
    """Each names rule file:line, tree path, both sides and what to do; the exit code is 2 and nothing is written."""
    old, new, said = COVERAGE[case]
    text = run("rules", "show", "timesfm-1")[0]
    assert text.count(old) == 1, old
    rules = tmp_path / "mine.yaml"
    rules.write_text(text.replace(old, new))
    for out in ("out.safetensors", "out"):
        _, err = run(rules, checkpoint("timesfm-1.0"), tmp_path / out, code=2)
        assert said.replace("{rules}", str(rules)) in err
    assert nothing_but(tmp_path, "mine.yaml")


# ---- the process itself


@pytest.mark.slow
def test_three_names_for_one_program(tmp_path: Path) -> None:
    for command in ([CONVERT], [CONVERT.replace("convert", "ckpt-convert")], [sys.executable, "-m", "convert"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("ckpt-convert ")


@pytest.mark.slow
def test_no_jax_and_no_torch(tmp_path: Path) -> None:
    """Neither importing nor converting loads them; the same probe sees torch when it is imported."""
    probe = "import sys; print(sorted({'jax', 'jaxlib', 'flax', 'orbax', 'torch', 'transformers'} & set(sys.modules)))"
    code = f"import convert; convert.convert('timesfm', {str(checkpoint('timesfm-2.5'))!r}, {str(tmp_path / 'o.safetensors')!r}); {probe}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert (
        "torch"
        in subprocess.run(
            [sys.executable, "-c", f"import torch; {probe}"], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.slow
def test_the_command_line_loads_no_more_than_its_help_needs() -> None:
    """`convert --help` waits for neither NumPy nor YAML; no conversion for a library that validates models of data."""
    probe = (
        "import sys; print(sorted({'numpy', 'pydantic', 'rich', 'tensorstore', 'typer', 'yaml'} & set(sys.modules)))"
    )
    code = f"import convert.cli; {probe}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    path = str(checkpoint("timesfm-2.5"))
    code = f"import sys, convert.cli.app as c; c.app(['plan', 'timesfm', {path!r}], standalone_mode=False); {probe}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['numpy', 'tensorstore', 'typer', 'yaml']"


@pytest.mark.slow
def test_progress_on_a_terminal_only(tmp_path: Path) -> None:
    """On a terminal: a bar with bytes, rate and time. In a pipe: the two closing lines."""
    command = [CONVERT, "timesfm", str(checkpoint("timesfm-1.0"))]
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [*command, str(tmp_path / "a.safetensors")], stderr=follower, stdout=subprocess.PIPE, env=env
    ) as process:
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 4096):
                shown += chunk
        except OSError:  # Linux says so when the other end has closed
            pass
        os.close(leader)
        assert process.stdout is not None and process.stdout.read() == b""
    assert process.returncode == 0
    assert b"440.6/440.6 kB" in shown or b"440.7/440.7 kB" in shown, shown
    assert b"; step 1100000 of 1100000)" in shown and b"dropped 1 leaf" in shown
    piped = subprocess.run([*command, str(tmp_path / "b.safetensors")], capture_output=True, text=True, check=True)
    assert piped.stdout == "" and len(piped.stderr.splitlines()) == 2 and "\x1b" not in piped.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "code", "said"),
    [
        (">&-", 0, "wrote"),
        pytest.param("2>&-", 0, "", marks=pytest.mark.slow),
        (">&- 2>&- <&-", 0, ""),
        pytest.param("2>/dev/full", 0, "", marks=pytest.mark.slow),
        ("--json >/dev/full", 2, "error[output-not-writable]: stdout: No space left on device\n"),
        pytest.param(
            "--help >/dev/full",
            2,
            "error[output-not-writable]: stdout: No space left on device\n",
            marks=pytest.mark.slow,
        ),
        pytest.param("--to nowhere 2>&-", 2, "", marks=pytest.mark.slow),
    ],
)
def test_streams_that_are_closed_or_full(streams: str, code: int, said: str, tmp_path: Path) -> None:
    """A conversion is not undone by who does not listen, and what is opened next does not become a standard stream."""
    out = tmp_path / "m.safetensors"
    command = f"{CONVERT} timesfm {checkpoint('timesfm-2.5')} {out} {streams}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    if code == 0:
        assert load_file(out)


@pytest.mark.slow
def test_an_output_that_no_path_leads_to(tmp_path: Path) -> None:
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    (gone := tmp_path / "gone").mkdir()
    convert_it = f"{CONVERT} timesfm {checkpoint('timesfm-2.5').resolve()}"
    loop = subprocess.run(
        ["bash", "-c", f"{convert_it} loop.safetensors"], cwd=tmp_path, capture_output=True, text=True
    )
    assert loop.returncode == 2 and loop.stderr.startswith("error[") and "internal" not in loop.stderr, loop.stderr
    command = f"rmdir {gone}; {convert_it} o.safetensors"
    lost = subprocess.run(["bash", "-c", command], cwd=gone, capture_output=True, text=True, check=False)
    assert lost.returncode == 2, lost.stderr
    assert (
        "o.safetensors: the current directory is not known (No such file or directory); give an absolute path"
        in lost.stderr
    )


@pytest.mark.parametrize(
    "option", ["--jobs 1" + 30 * "0", "--max-shard-size 1" + 400 * "0" + "GB", "--set epsilon=1" + 400 * "0"]
)
def test_numbers_beyond_all_measure(option: str, run: Run, tmp_path: Path) -> None:
    _, err = run("timesfm", str(checkpoint("timesfm-2.5")), str(tmp_path / "o"), *option.split(), code=2)
    assert "internal" not in err and nothing_but(tmp_path)


def test_names_cannot_drive_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = MemorySource({'\x1b[31mred\n"x': np.zeros(2, np.float32)})
    monkeypatch.setattr("convert.checkpoints.open_source", lambda *_, **__: evil)
    out, _ = run("inspect", "anything")
    assert "\x1b" not in out and '\\x1b[31mred\\n"x' in out


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{CONVERT} plan timesfm {checkpoint('timesfm-2.0')} --json | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "{\n" and "Traceback" not in done.stderr and done.returncode == 0, done.stderr


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_closed_pipe_does_not_change_what_was_found(more: list[str], tmp_path: Path) -> None:
    """A pipeline in CI that cuts the report must fail all the same; it was 0."""
    out, source = tmp_path / "o.safetensors", checkpoint("timesfm-2.5")
    convert.convert("timesfm", source, out)
    tensors, first = load_file(out), "output_projection_point.hidden_layer.weight"
    save_file({**tensors, first: tensors[first] + np.float32(1)}, out, metadata={"model": "timesfm-2.5"})
    check = [CONVERT, "check", str(out), "--from", str(source), "--level", "weights", *more]
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(check, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("platforms", ["cuda", "tpu", "nonsense"])
def test_jax_that_does_not_start_is_no_difference(platforms: str, tmp_path: Path) -> None:
    """The rules were blamed, or it ended in a traceback; a recording needs no JAX."""
    out, source = tmp_path / "o.safetensors", checkpoint("timesfm-2.5")
    convert.convert("timesfm", source, out)
    variables = {**os.environ, "JAX_PLATFORMS": platforms}

    def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [CONVERT, *map(str, arguments)]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    live = ran("check", out, "--from", source)
    assert "Traceback" not in live.stderr and live.returncode in (0, 2), live.stderr
    assert f"JAX_PLATFORMS is '{platforms}'" in live.stdout and "correct the axes" not in live.stdout, live.stdout
    recording = GOLDEN / "recordings" / "timesfm-2.5.safetensors"
    recorded = ran("check", out, "--recorded", recording, "--level", "weights", "--level", "model")
    assert recorded.returncode == 0, (recorded.stdout, recorded.stderr)
    programs = ("--reference", "convert.references.timesfm.timesfm_2p5:reference")
    for arguments in (
        ("record", "timesfm", source, tmp_path / "r.safetensors"),
        ("infer", source, tmp_path / "i.yaml", *programs),
        ("rules", "new", source, tmp_path / "n.yaml", *programs),
    ):
        done = ran(*arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert done.stderr.startswith("error[reference-unavailable]: the JAX model cannot run here: JAX does not start")
        assert platforms in done.stderr and len(done.stderr.splitlines()) == 1


def test_check_with_another_target_than_that_of_the_header(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    run("timesfm", checkpoint("timesfm-2.5"), out)
    for to in ("transformers", "burn"):
        _, err = run("check", out, "--from", checkpoint("timesfm-2.5"), "--to", to, code=2)
        assert err == (
            f"error[target-differs]: {out}: the header names the target timesfm, --to says {to}; leave out --to\n"
        )
    run("check", out, "--from", checkpoint("timesfm-2.5"), "--to", "timesfm", "--level", "coverage")


def test_sizes() -> None:
    assert [parse_size(text, "--max-size") for text in ("5GB", "1.5 kB", "2GiB", "100", "3m")] == [
        5 * 10**9,
        1500,
        2**31,
        100,
        3 * 10**6,
    ]
    for text in ("", "GB", "-1GB", "5XB", "0"):
        with pytest.raises(ConvertError, match="^--max-size: expected a size such as 500MB"):
            parse_size(text, "--max-size")


def test_goldens_are_small() -> None:
    total = sum(p.stat().st_size for p in GOLDEN.rglob("*") if p.is_file())
    assert total < 26_500_000
    assert np.load(GOLDEN / "timesfm-1.0" / "io.npz")["full"].shape == (2, 128, 10)
