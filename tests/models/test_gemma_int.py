"""Gemma with weights of int4 and int8: what gemma 4.0.1's `IntWrapper` computed, and what transformers computes from the converted directory."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file

import convert
from convert.checkpoints.chunks import Box
from convert.verify.run import check
from support import gemma_models
from support.gemma_models import BOUND, directory, error, settings
from support.goldens import checkpoint
from support.memory_source import MemorySource
from support.value_mistakes import assert_mistakes_are_named, replace_tensors

pytestmark = pytest.mark.slow

CASES = gemma_models.INTEGERS
LAYER = "layer_0/attn/q_einsum/_IntEinsum_0"


@cache
def restored(case: str) -> dict[str, np.ndarray]:
    """The leaves as Orbax itself reads them."""
    import orbax.checkpoint as ocp
    from flax.traverse_util import flatten_dict

    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(checkpoint(case))
    return {name: np.asarray(x) for name, x in flatten_dict(tree, sep="/").items()}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_gemma_does(case: str, tmp_path: Path) -> None:
    assert error(case, directory(case, tmp_path)) < BOUND


@pytest.mark.parametrize("case", CASES)
def test_a_weight_is_the_integers_divided_by_the_scales(case: str, tmp_path: Path) -> None:
    """As upstream divides: in float32, rounded once."""
    stored = restored(case)
    kernel, scale = stored[f"{LAYER}/kernel"], stored[f"{LAYER}/scale"]
    assert kernel.dtype.name == case.removeprefix("gemma3-") and scale.shape == (4, 1, 8)
    wanted = kernel.astype(np.float32) / scale
    source = convert.open_source(checkpoint(case))
    assert np.array_equal(source.read(f"{LAYER}/kernel"), wanted)
    box = Box((1, 3, 2), (2, 9, 5))
    assert np.array_equal(source.read_box(f"{LAYER}/kernel", box), wanted[1:3, 3:12, 2:7])
    name = "model.layers.0.self_attn.q_proj.weight"
    made = load_file(directory(case, tmp_path / "a") / "model.safetensors")[name]
    assert np.array_equal(made, wanted.transpose(0, 2, 1).reshape(32, 16))
    small = load_file(directory(case, tmp_path / "b", dtype="bfloat16") / "model.safetensors")[name]
    assert np.array_equal(small, made.astype(bfloat16))


def test_plan_and_card_say_so(tmp_path: Path) -> None:
    case = CASES[0]
    said = f"weights of {case.removeprefix('gemma3-')} are divided by their scales"
    (note,) = (x for x in convert.plan_conversion("gemma", checkpoint(case), settings=settings(case)).source.notes)
    assert note.code == "weights-divided" and said in note.problem
    assert said in (directory(case, tmp_path) / "README.md").read_text()


@pytest.mark.parametrize("scale", [None, np.ones((4, 16, 1, 1), np.float32), np.ones((4, 3, 8), np.float32), np.ones((4, 1, 8), np.int8)])  # fmt: skip
def test_integers_without_their_scales_are_refused(scale: np.ndarray | None) -> None:
    stored = dict(restored(CASES[0]))
    del stored[f"{LAYER}/scale"]
    if scale is not None:
        stored[f"{LAYER}/scale"] = scale
    with pytest.raises(convert.CheckpointError) as raised:
        convert.plan_conversion("gemma", MemorySource(stored), settings=settings(CASES[0]))
    (finding,) = raised.value.findings
    assert (finding.code, finding.path) == ("scales-missing", f"{LAYER}/kernel")


def test_the_way_back_gives_no_integers(tmp_path: Path) -> None:
    case = CASES[0]
    out = directory(case, tmp_path)
    with pytest.raises(convert.PlanError, match="integers and scales") as raised:
        convert.plan_reverse("gemma", out, checkpoint(case), settings=settings(case))
    assert raised.value.findings[0].code == "not-reversible"
    assert convert.plan_reverse("gemma", out, layout="NESTED").leaves


def test_scales_that_were_multiplied_or_left_out_are_named(tmp_path: Path) -> None:
    """What a hand-written script may do: kernel * scale, the bare integers, the scales of another head."""
    case = CASES[0]
    out, stored = directory(case, tmp_path), restored(case)
    kernel, scale = stored[f"{LAYER}/kernel"].astype(np.float32), stored[f"{LAYER}/scale"]
    name = "model.layers.0.self_attn.q_proj.weight"
    wrongs = {
        "multiplied by the scales": kernel * scale,
        "scales left out": kernel,
        "scales in reverse order along axis 0": kernel / scale[::-1],
        "the mean of the scales": kernel / scale.mean(),
    }
    for words, wrong in wrongs.items():
        replace_tensors(out, {name: np.ascontiguousarray(wrong.transpose(0, 2, 1).reshape(32, 16))})
        (report,) = check(out, checkpoint(case), levels=["weights"]).levels
        said = " ".join(map(str, report.findings))
        assert report.verdict.value == "failed" and name in said and words in said


@pytest.mark.parametrize("case", CASES)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    assert assert_mistakes_are_named(directory(case, tmp_path), checkpoint(case)) >= 9


def test_every_level_passes(tmp_path: Path) -> None:
    """The model level runs gemma's equations on the divided weights."""
    report = check(directory(CASES[0], tmp_path), checkpoint(CASES[0]))
    assert {level.verdict.value for level in report.levels} == {"passed"}
