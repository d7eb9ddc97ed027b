"""TabFM: what its own checkpoint manager saved, read by its own PyTorch class, against what its flax code computed.

`tests/golden/make_tabfm.py` ran the flax code, which needs jaxtyping below 0.3, in another environment.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert.core.errors import CheckpointError
from convert.rules.library import shipped_rules_dir
from convert.rules.parse import parse_models
from convert.writing.written import open_written
from support import tabfm
from support.goldens import checkpoint, golden_io
from support.rule_mistakes import assert_mistake_is_named
from support.value_mistakes import assert_mistakes_are_named
from support.weights_level import check_weights

pytestmark = pytest.mark.slow

CASES = ("tabfm-classification", "tabfm-regression")


@pytest.mark.parametrize("case", CASES)
def test_the_tensors_are_those_of_tabfms_own_pytorch_model(case: str, tmp_path: Path) -> None:
    """By their digest, which is that of tabfm's own converter; and it computes from them what its flax code did."""
    plan = convert.plan_conversion("tabfm", checkpoint(case))
    assert plan.rules.model == case
    convert.convert("tabfm", checkpoint(case), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].astype("<f4").tobytes())
    io = golden_io(case)
    assert digest.hexdigest() == str(io["sha256"])
    single, double = tabfm.errors(case, tmp_path / "out")
    assert single < 2e-6 and double < 1e-12
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["is_classifier"] is (case == "tabfm-classification")
    assert [config[key] for key in ("col_nhead", "row_nhead", "icl_nhead", "ff_factor", "decoder_hidden", "num_freq")] == [3, 2, 2, 4, 48, 5]  # fmt: skip


def test_biases_that_only_pytorch_has_are_zeros(tmp_path: Path) -> None:
    plan = convert.plan_conversion("tabfm", checkpoint(CASES[0]))
    zeros = {step.name: step for step in plan.steps if not step.parts}
    assert len(zeros) == 3 * (2 * 2 * 2 + 2 * 3 + 2) and all(name.endswith(".bias") for name in zeros)
    convert.convert("tabfm", checkpoint(CASES[0]), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, step in zeros.items():
        assert not weights[name].any() and weights[name].shape == weights[name.replace("bias", "weight")].shape[:1]
        assert step.spec.shape == weights[name].shape


@pytest.mark.parametrize("case", CASES)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    convert.convert("tabfm", checkpoint(case), tmp_path / "out")
    assert assert_mistakes_are_named(tmp_path / "out", checkpoint(case)) >= 9


def test_a_bias_that_is_not_zero_is_found(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    convert.convert("tabfm", checkpoint(CASES[0]), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    weights = load_file(file)
    name = "row_interactor.tf_row.blocks.1.linear2.bias"
    save_file({**weights, name: weights[name] + np.float32(0.5)}, file, metadata=metadata)
    report = check_weights(convert.plan_conversion("tabfm", checkpoint(CASES[0])), open_written(tmp_path / "out"))
    assert report.verdict.value == "failed" and [f.path for f in report.findings] == [name]


RULE_MISTAKES = (  # a text of the rules, what stands there instead, what the check calls it
    ("blocks/{mab1,mab2}/attn/{q_proj,k_proj,v_proj}/kernel", "blocks/{mab1,mab2}/attn/{k_proj,q_proj,v_proj}/kernel", "of another tensor"),
    ("einsum: ...D,DE->...E\n  from: \"{row", "einsum: ...E,DE->...D\n  from: \"{row", "transposed"),
    ("multiplies_by: scale\n  epsilon: $epsilon\n  axes: P", "multiplies_by: 1+scale\n  epsilon: $epsilon\n  axes: P", "1+scale on a plain norm"),
    ("{col_embedder,col_embedder_2}.out_w", "{col_embedder_2,col_embedder}.out_w", "of another tensor"),
    ("tf_icl/blocks/{linear1,linear1_gate}/kernel", "tf_icl/blocks/{linear1_gate,linear1}/kernel", "of another tensor"),
    ("cell_embedder.{fourier_frequencies,fourier_frequencies_cat}", "cell_embedder.{fourier_frequencies_cat,fourier_frequencies}", "of another tensor"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "name"), RULE_MISTAKES)
def test_a_mistake_in_the_rules_is_named(old: str, new: str, name: str, tmp_path: Path) -> None:
    assert_mistake_is_named("tabfm", checkpoint(CASES[0]), old, new, name, tmp_path / "out")


def test_two_directories_of_steps_are_ambiguous(tmp_path: Path) -> None:
    for name in ("orbax", "checkpoints"):
        shutil.copytree(checkpoint(CASES[0]) / "orbax", tmp_path / name)
    with pytest.raises(CheckpointError) as refused:
        convert.plan_conversion("tabfm", tmp_path)
    assert refused.value.code == "checkpoint-ambiguous"


def test_zeros_are_for_a_whole_linear() -> None:
    text = (shipped_rules_dir() / "tabfm.yaml").read_text()
    with pytest.raises(convert.RuleError, match="writes zeros for a whole"):
        parse_models(text.replace('linear2", parameters: weight and bias}', 'linear2", parameters: weight and bias, part: 1 of 2}'), "x")  # fmt: skip
