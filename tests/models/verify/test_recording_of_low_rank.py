"""Weights that are merged from several leaves, at the model level and in recordings: the merged leaf is what is known of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.core.safetensors_header import read_header
from convert.verify.recording.file import load_recording
from support.command_line import Run

RULES = """\
model: lora-mine
title: a model with pairs
root: params
facts: {lora_alpha: 8}
targets: {torch: {loads: Model of my_pairs.py}}
rules:
- einsum: ...D,DE->...E
  from: "{q,v}/kernel"
  bias: "{q,v}/bias"
  plus: {einsum: "...D,DR,RE->...E", from: "{q,v}/lora/lora_a", times: "{q,v}/lora/lora_b", scale: $lora_alpha/R}
  linear: "{q,v}_proj"
- einsum: ...E,ES,SC->...C
  from: mix/u
  times: mix/v
  linear: mix
"""
MODEL = """\
import jax.numpy as jnp
import numpy as np
import torch

from convert.references.protocol import Reference


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = torch.nn.Linear(7, 5), torch.nn.Linear(7, 5)
        self.mix = torch.nn.Linear(5, 4, bias=False)

    def forward(self, x):
        return self.mix(torch.tanh(self.q_proj(x)) * self.v_proj(x))


def jax_side(w, inputs):
    def lora(m):
        low = inputs["x"] @ w[f"{m}/lora/lora_a"] @ w[f"{m}/lora/lora_b"]
        return inputs["x"] @ w[f"{m}/kernel"] + w[f"{m}/bias"] + 8 / 3 * low

    q, v = lora("q"), lora("v")
    y = jnp.tanh(q) * v @ w["mix/u"] @ w["mix/v"]
    return {"q_proj": q, "v_proj": v, "mix": y, "y": y}


def build(state):
    module = Model()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.eval()


def reference(plan):
    return Reference(
        inputs=lambda seed: {"x": np.random.default_rng(seed).normal(size=(3, 7)).astype(np.float32)},
        jax=jax_side,
        build=build,
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=7,
        depth=2,
    )
"""
OWN = ("--model", "./rules.yaml", "--reference", "my_pairs:reference")
RECORDED = ("--recorded", "r.safetensors")


def tree(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (7, 5), "bias": (5,), "lora/lora_a": (7, 3), "lora/lora_b": (3, 5)}
    leaves = {f"params/{m}/{n}": rng.standard_normal(s).astype(np.float32) for m in "qv" for n, s in shapes.items()}
    leaves |= {
        f"params/mix/{n}": rng.standard_normal(s).astype(np.float32) for n, s in {"u": (5, 2), "v": (2, 4)}.items()
    }
    return leaves


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint, its rules, and both models."""
    monkeypatch.chdir(tmp_path)
    np.savez("ckpt.npz", **tree())
    Path("rules.yaml").write_text(RULES)
    Path("my_pairs.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop("my_pairs", None)


@pytest.fixture
def recorded(folder: Path, run: Run) -> Path:
    run("./rules.yaml", "ckpt.npz", "out.safetensors")
    run("record", "./rules.yaml", "ckpt.npz", "r.safetensors", "--reference", "my_pairs:reference")
    return folder


def check(run: Run, *more: object, code: int) -> dict[str, dict[str, object]]:
    """Reports of the levels, by name; and the verdict as ``verdict``."""
    out, _ = run("check", "out.safetensors", *OWN, *more, "--json", code=code)
    report = json.loads(out)
    return {level["level"]: level for level in report["levels"]}


def test_a_merged_model_is_compared_before_its_weights_are_rounded(folder: Path, run: Run) -> None:
    """In lifted float64 JAX adds the product up in float64: so must torch's weights, or each correct model would differ."""
    run("./rules.yaml", "ckpt.npz", "out.safetensors")
    levels = check(run, "--from", "ckpt.npz", "--level", "weights,model", "--require", "model", code=0)
    assert max(measure["float64"]["relative"] for measure in levels["model"]["measures"]) < 1e-14  # type: ignore[attr-defined]


def test_a_scale_that_both_sides_take_from_the_rules_is_not_verified(folder: Path, run: Run) -> None:
    model = MODEL.replace("def reference(plan):\n", "def reference(plan):\n    plan.facts['lora_alpha']\n")
    Path("my_pairs.py").write_text(model)
    run("./rules.yaml", "ckpt.npz", "out.safetensors")
    levels = check(run, "--from", "ckpt.npz", "--level", "weights,model", "--require", "model", code=2)
    assert levels["model"]["verdict"] == "inconclusive" and "lora_alpha" in str(levels["model"]["reason"])


@pytest.mark.parametrize(("wrong", "diagnosis"), [("8", "another scale of a pair"), ("-8/R", "LoRA pair subtracted")])
def test_a_wrong_scale_in_the_rule_is_named_by_the_model_level(
    wrong: str, diagnosis: str, folder: Path, run: Run
) -> None:
    """The weights are what the rules say. What would put it right is tried unrounded, too."""
    Path("rules.yaml").write_text(RULES.replace("$lora_alpha/R", wrong))
    run("./rules.yaml", "ckpt.npz", "out.safetensors")
    levels = check(run, "--from", "ckpt.npz", "--level", "weights,model", code=1)
    assert levels["weights"]["verdict"] == "passed" and levels["model"]["verdict"] == "failed"
    said = levels["model"]["diagnosis"]
    assert isinstance(said, dict) and (said["boundary"], said["name"]) == ("q_proj", diagnosis)
    assert said["error_after"] < 1e-14 and said["rule"].endswith("rules.yaml:7")


def test_without_the_checkpoint(recorded: Path, run: Run) -> None:
    """The merged leaf is what the file gives back, bit for bit; its parts are known by name and shape alone."""
    levels = check(run, *RECORDED, "--require", "weights", "--require", "model", code=0)
    assert levels["weights"]["notes"] == ["5 leaves computed back from the file, checksums compared with r.safetensors"]
    notes = levels["model"]["notes"]
    assert isinstance(notes, list) and any(
        "rounded to float32 and the checkpoint is not given" in note for note in notes
    )
    _, entries = read_header(Path("r.safetensors"))
    assert not any(name.startswith("leaf/") for name in entries)  # nothing of the checkpoint lies in it
    manifest = load_recording("r.safetensors").manifest
    assert set(manifest.leaves) == set(tree()) and len(manifest.merged) == 3
    assert set(manifest.digests) == {*manifest.merged, "params/q/bias", "params/v/bias"}
    levels = check(run, *RECORDED, "--from", "ckpt.npz", "--require", "layers", "--require", "model", code=0)
    assert max(measure["float64"]["relative"] for measure in levels["model"]["measures"]) < 1e-14  # type: ignore[attr-defined]


def test_a_wrong_value_is_found(recorded: Path, run: Run) -> None:
    """One bit, and the pair left out: what is known of the merged leaf is its checksum."""
    tensors, right = load_file("out.safetensors"), load_file("out.safetensors")
    (metadata, _) = read_header(Path("out.safetensors"))
    bits = tensors["q_proj.weight"].view(np.uint32)
    bits[2, 3] ^= 1
    save_file(tensors, "out.safetensors", metadata)
    findings = check(run, *RECORDED, "--level", "weights", code=1)["weights"]["findings"]
    assert [finding["path"] for finding in findings] == ["q_proj.weight"]  # type: ignore[attr-defined]
    bare = tree()["params/v/kernel"].T.copy()
    save_file({**right, "v_proj.weight": bare}, "out.safetensors", metadata)
    levels = check(run, *RECORDED, code=1)
    assert levels["weights"]["verdict"] == levels["model"]["verdict"] == "failed"
    said = levels["model"]["diagnosis"]
    assert isinstance(said, dict) and said["boundary"] == "v_proj"


def test_a_recording_of_something_else(recorded: Path, run: Run) -> None:
    """Another product, and another scale, are other leaves."""
    _, err = run("check", "out.safetensors", *OWN, *RECORDED, "--set", "lora_alpha=4", code=2)
    assert "error[recording-mismatch]: r.safetensors" in err
    assert "params/q/kernel + 1.33333 x " in err and "params/q/kernel + 2.66667 x " in err
    leaves = tree()
    leaves["params/q/lora/lora_b"][0, 0] += 1
    np.savez("other.npz", **leaves)
    _, err = run("check", "out.safetensors", *OWN, *RECORDED, "--from", "other.npz", code=2)
    assert "1 of 5 leaves" in err and "params/q/kernel + 2.66667 x" in err
    run("./rules.yaml", "other.npz", "out.safetensors", "--overwrite")
    _, err = run("check", "out.safetensors", *OWN, *RECORDED, code=2)
    assert "another checkpoint or another step" in err


@pytest.mark.slow
def test_weights_that_were_rounded(recorded: Path, run: Run) -> None:
    """bfloat16 does not give the merged leaf back: that is said, and the model level tells what it can."""
    run("./rules.yaml", "ckpt.npz", "out.safetensors", "--overwrite", "--dtype", "bfloat16")
    levels = check(run, *RECORDED, "--level", "weights,model", code=0)
    assert levels["weights"]["verdict"] == "skipped" and "cannot be computed back" in str(levels["weights"]["reason"])
    assert load_file("out.safetensors")["mix.weight"].dtype == ml_dtypes.bfloat16


@pytest.mark.slow
def test_a_merged_weight_that_is_computed_with_is_kept(folder: Path, run: Run) -> None:
    """A factor behind the product cannot be undone to the bit, so the recording holds the merged leaf."""
    Path("rules.yaml").write_text(RULES.replace("  times: mix/v\n", "  times: mix/v\n  prescaled_by: 1/3\n"))
    run("./rules.yaml", "ckpt.npz", "out.safetensors")
    run("record", "./rules.yaml", "ckpt.npz", "r.safetensors", "--reference", "my_pairs:reference")
    stored = load_recording("r.safetensors").stored
    assert list(stored) == ["params/mix/u params/mix/v"]
    assert check(run, *RECORDED, "--level", "weights", code=0)["weights"]["verdict"] == "passed"
    tensors = load_file("out.safetensors")
    (metadata, _) = read_header(Path("out.safetensors"))
    save_file({**tensors, "mix.weight": tensors["mix.weight"] / 3}, "out.safetensors", metadata)
    findings = check(run, *RECORDED, "--level", "weights", code=1)["weights"]["findings"]
    assert [finding["path"] for finding in findings] == ["mix.weight"]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_manifest_that_lists_a_leaf_twice(recorded: Path, run: Run) -> None:
    metadata, _ = read_header(Path("r.safetensors"))
    manifest = json.loads(metadata["recording"])
    manifest["merged"].append(manifest["leaves"][0])
    save_file(load_file("r.safetensors"), "r.safetensors", {**metadata, "recording": json.dumps(manifest)})
    _, err = run("check", "out.safetensors", *OWN, *RECORDED, code=2)
    assert "error[recording-damaged]: r.safetensors" in err and "leaf twice" in err
