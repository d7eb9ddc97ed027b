"""A leaf that the way back made wrong is caught and named: from the tensors of other code and its tree, at each level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from convert.planning.options import ConversionOptions
from convert.reversing.source import ReversedSource
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.run import check
from convert.verify.weights.level import WAY_BACK
from faults.catalogue import SETTINGS, upstream_found
from support import maxtext
from support.goldens import checkpoint
from support.memory_source import MemorySource

pytestmark = pytest.mark.slow

Leaves = dict[str, np.ndarray]


@dataclass(frozen=True)
class Fault:
    """A fault in the tree.

    Attributes:
        case: of the goldens.
        model: its rules.
        plant: changes the leaves.
        name: of the mistake with which the right tensor is made of the wrong leaf.
        tensor: one that is named.
        boundary: the first of the model that differs; empty: the model is not run.
        to: target; empty: the first.
    """

    case: str
    model: str
    plant: Callable[[Leaves], None]
    name: str
    tensor: str
    boundary: str = ""
    to: str | None = None


def each(ending: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Leaves], None]:
    """Change every leaf whose name ends so."""

    def plant(leaves: Leaves) -> None:
        names = [name for name in leaves if name.endswith(ending)]
        assert names
        leaves.update({name: np.ascontiguousarray(change(leaves[name])) for name in names})

    return plant


def exchange(one: str, two: str) -> Callable[[Leaves], None]:
    """Exchange the leaves whose names have `one` with those that have `two` there."""

    def plant(leaves: Leaves) -> None:
        pairs = [(name, name.replace(one, two)) for name in leaves if one in name]
        assert pairs
        for name, other in pairs:
            leaves[name], leaves[other] = leaves[other], leaves[name]

    return plant


def halves(x: np.ndarray) -> np.ndarray:
    """Bring RoPE's pairs to halves, as transformers has them."""
    return np.concatenate((x[..., ::2], x[..., 1::2]), -1)


FAULTS = {
    "a square kernel transposed": Fault("timesfm-2.5", "timesfm", each("ff0/kernel/value", lambda x: x.swapaxes(1, 2)), "transposed", "ff0.weight", "stacked_xf.0.ff0"),
    "layers shifted": Fault("timesfm-2.5", "timesfm", each("ff0/kernel/value", lambda x: np.roll(x, 1, 0)), "of another layer", "ff0.weight", "stacked_xf.0.ff0"),
    "queries and keys exchanged": Fault("timesfm-2.5", "timesfm", exchange("attn/query/", "attn/key/"), "fused parts in another order", "qkv_proj.weight", "stacked_xf.0.attn.qkv_proj"),
    "1+scale left in": Fault("timesfm-1.0", "timesfm", each("ff_layer/layer_norm/scale", lambda x: x + 1), "1+scale missing", "layer_norm.weight", "stacked_transformer.layers.0.mlp.layer_norm"),
    "gate and up exchanged": Fault("gemma3", "gemma", each("mlp/gating_einsum", lambda x: x[::-1]), "of another tensor", "_proj.weight", "model.layers.0.mlp.gate_proj", "transformers"),
    "1 added to a norm that adds it": Fault("gemma3", "gemma", each("final_norm/scale", lambda x: x + 1), "1+scale missing", "model.norm.weight", "", "transformers"),
    "square kernels transposed": Fault("bert", "bert", each("attention/self/query/kernel", np.transpose), "transposed", "query.weight", "bert.encoder.layer.0.attention.self.query"),
    "two layers exchanged": Fault("bert", "bert", exchange("layer/0/", "layer/1/"), "of another layer", "query.weight", "bert.encoder.layer.0.attention.self.query"),
    "a projection transposed": Fault("recurrentgemma", "recurrentgemma", each("linear_out/kernel", np.transpose), "transposed", "linear_out.weight"),
    "RoPE pairs left in halves": Fault("llama3.1", "maxtext-llama3.1", each("key/kernel", halves), "RoPE pairs still interleaved", "k_proj.weight"),
}  # fmt: skip


def checked(fault: Fault, folder: Path, *levels: str, plant: bool = True) -> dict[str, LevelReport]:
    """Check the tensors, as other code writes them, against the tree that comes back from them, with the fault in it."""
    maxtexts = fault.model.startswith("maxtext")
    ckpt = maxtext.checkpoint(fault.case) if maxtexts else checkpoint(fault.case)
    settings = maxtext.settings(fault.case) if maxtexts else SETTINGS[fault.case]
    options, tensors = ConversionOptions(to=fault.to, settings=settings), folder / "in.safetensors"
    convert.convert(fault.model, ckpt, tensors, options, overwrite=True)
    save_file(load_file(tensors), tensors)
    source = ReversedSource(convert.plan_reverse(fault.model, tensors, ckpt, options))
    leaves = {leaf: source.read(leaf) for leaf in source.leaves}
    if plant:
        fault.plant(leaves)
    tree = MemorySource(leaves)
    tree.path = ckpt  # its config.json
    with upstream_found():
        report = check(tensors, tree, options, model=fault.model, levels=levels)
    return {level.level: level for level in report.levels if level.level in levels}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_values_name_the_fault(fault: str, tmp_path: Path) -> None:
    (right,) = checked(FAULTS[fault], tmp_path, "weights", plant=False).values()
    (wrong,) = checked(FAULTS[fault], tmp_path, "weights").values()
    assert right.verdict == Verdict.PASSED and WAY_BACK not in right.notes
    assert wrong.verdict == Verdict.FAILED and WAY_BACK in wrong.notes
    assert {finding.data["diagnosis"] for finding in wrong.findings} == {FAULTS[fault].name}
    assert any(FAULTS[fault].tensor in name for finding in wrong.findings for name in finding.data["tensors"])


@pytest.mark.parametrize("fault", FAULTS)
def test_the_layers_and_the_model_name_it_without_the_values(fault: str, tmp_path: Path) -> None:
    """The layers level names the rule of the tensor, the model level the first boundary; neither needs the other."""
    wanted = FAULTS[fault]
    levels = checked(wanted, tmp_path, "layers", *(("model",) if wanted.boundary else ()))
    assert {level.verdict for level in levels.values()} == {Verdict.FAILED}
    findings = levels["layers"].findings
    assert {finding.data["diagnosis"] for finding in findings} == {wanted.name}
    assert any(wanted.tensor in name for finding in findings for name in finding.data["tensors"])
    assert all(finding.rule for finding in findings)
    if wanted.boundary:
        diagnosis = levels["model"].diagnosis
        assert (
            diagnosis is not None and diagnosis["boundary"] == wanted.boundary and wanted.tensor in diagnosis["problem"]
        )
        assert (
            f"of the checkpoint: {wanted.name} (" in diagnosis["problem"] and "back again with --to" in diagnosis["fix"]
        )
