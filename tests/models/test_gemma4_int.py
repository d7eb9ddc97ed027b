"""Gemma 4 and Gemma 3n with weights of int4 and int8, as gemma 4.0.1's `peft.quantize` made them, and trees of its quantisation-aware training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert.verify.run import check
from support.gemma_drawn import ALL, CASES, INTEGERS, OF_INTEGERS, converted, errors, golden, settings
from support.goldens import relative_error
from support.memory_source import MemorySource
from support.value_mistakes import assert_mistakes_are_named, replace_tensors

pytestmark = pytest.mark.slow

QUERIES = "params/layer_0/attn/q_einsum/_IntEinsum_0"
TENSOR = "model.layers.0.self_attn.q_proj.weight"
OF_TRAINING: dict[str, dict[str, str]] = json.loads((OF_INTEGERS.folder / "qat.json").read_text())


def restored(case: str) -> dict[str, np.ndarray]:
    """The leaves as Orbax itself reads them."""
    import orbax.checkpoint as ocp
    from flax.traverse_util import flatten_dict

    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(OF_INTEGERS.folder / case)
    return {name: np.asarray(x) for name, x in flatten_dict(tree, sep="/").items()}


@pytest.mark.parametrize("case", INTEGERS)
def test_transformers_computes_what_gemma_does_with_the_divided_weights(case: str, tmp_path: Path) -> None:
    """The bounds of the cases without integers; what is in float64 starts from quotients in float32 on both sides."""
    _, out = converted(case, tmp_path)
    single, double = errors(case, out)
    drift = relative_error(*(golden(case).values(case, kind)["logits"] for kind in ("out", "out64")))
    assert drift < 1e-4 and single < 4 * drift
    assert double < 1e-12


@pytest.mark.parametrize("case", INTEGERS)
def test_a_weight_is_the_integers_divided_by_the_scales(case: str, tmp_path: Path) -> None:
    stored = restored(case)
    kernel, scale = stored[f"{QUERIES}/kernel"], stored[f"{QUERIES}/scale"]
    assert kernel.dtype.name == case.rpartition("-")[2] and scale.shape == (1, 1, kernel.shape[-1])
    made = load_file(converted(case, tmp_path)[1] / "model.safetensors")[TENSOR]
    wanted = (kernel.astype(np.float32) / scale).transpose(0, 2, 1)
    assert np.array_equal(made, wanted.reshape(-1, wanted.shape[-1]))


WRONG: dict[str, tuple[Any, str]] = {  # of integers (heads, width, width of a head) and scales
    "dropped": (lambda kernel, scale: kernel, "scales left out"),
    "multiplied": (lambda kernel, scale: kernel * scale, "multiplied by the scales"),
    "one scale": (lambda kernel, scale: kernel / scale.mean(), "divided by the mean of the scales"),
    "largest": (lambda kernel, scale: kernel / scale.max(), "divided by the largest of the scales"),
    "next group": (lambda kernel, scale: kernel / np.roll(scale, 1, 2), "scales of the place before along axis 2"),
    "reversed": (lambda kernel, scale: kernel / scale[:, :, ::-1], "scales in reverse order along axis 2"),
    "unsigned": (lambda kernel, scale: np.where(kernel < 0, kernel + 16, kernel) / scale, "read without a sign"),
    "zero at 8": (lambda kernel, scale: (kernel + 8) / scale, "integers with \\+8"),
    "halves of a byte": (lambda kernel, scale: kernel.reshape(-1, 2)[:, ::-1].reshape(kernel.shape) / scale, "each two neighbours of the packed integers exchanged"),
}  # fmt: skip


@pytest.mark.parametrize("case", ["gemma4-31b-int4"])
def test_a_wrong_division_is_named(case: str, tmp_path: Path) -> None:
    """What a hand-written script may do with integers and scales."""
    source, out = converted(case, tmp_path)
    stored = restored(case)
    kernel, scale = stored[f"{QUERIES}/kernel"].astype(np.float32), stored[f"{QUERIES}/scale"]
    rows = kernel.shape[0] * kernel.shape[2]
    for fault, (change, words) in WRONG.items():
        wrong = np.asarray(change(kernel, scale), np.float32).transpose(0, 2, 1).reshape(rows, -1)
        replace_tensors(out, {TENSOR: np.ascontiguousarray(wrong)})
        (report,) = check(out, source, levels=["weights"]).levels
        said = " ".join(map(str, report.findings))
        assert report.verdict.value == "failed" and f"{TENSOR}: " in said and re.search(words, said), (fault, said)


def test_scales_of_another_axis_are_named(tmp_path: Path) -> None:
    """A matrix of global layers, whose heads are as wide as the model."""
    case, name = "gemma4-31b-int4", "model.layers.1.self_attn.k_proj.weight"
    source, out = converted(case, tmp_path)
    stored, place = restored(case), "params/layer_1/attn/k_einsum/_IntEinsum_0"
    kernel, scale = stored[f"{place}/kernel"].astype(np.float32), stored[f"{place}/scale"]
    wrong = (kernel / np.swapaxes(scale, 1, 2)).transpose(0, 2, 1).reshape(-1, kernel.shape[1])
    replace_tensors(out, {name: np.ascontiguousarray(wrong)})
    (report,) = check(out, source, levels=["weights"]).levels
    assert "scales of which axes 1 and 2 are exchanged" in " ".join(map(str, report.findings))


@pytest.mark.parametrize("case", INTEGERS)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9


@pytest.mark.parametrize("case", INTEGERS)
def test_every_weight_needs_its_scales(case: str) -> None:
    stored = restored(case)
    for name in [name for name in stored if name.endswith("_IntEinsum_0/scale")][:3]:
        source = MemorySource({k: x for k, x in stored.items() if k != name})
        with pytest.raises(convert.CheckpointError) as refused:
            convert.plan_conversion("gemma", source, settings=settings(case))
        (finding,) = refused.value.findings
        assert (finding.code, finding.path) == ("scales-missing", f"{name.removesuffix('scale')}kernel")


@pytest.mark.parametrize("case", CASES)
def test_trees_of_quantisation_aware_training_hold_the_weights(case: str, tmp_path: Path) -> None:
    """As `load_params(quantize=True)` names the leaves: the files are those of the plain tree."""
    leaves, names = ALL.leaves(case), OF_TRAINING[case]
    assert leaves.keys() == names.keys() and sum("_SimulateQuantizedEinsum_" in name for name in names.values()) > 10
    _, out = converted(case, tmp_path)
    trained = MemorySource({names[name]: x for name, x in leaves.items()})
    convert.convert("gemma", trained, tmp_path / "trained", settings=settings(case))
    first, second = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "trained"))
    assert first.keys() == second.keys() and all(np.array_equal(x, second[name]) for name, x in first.items())
