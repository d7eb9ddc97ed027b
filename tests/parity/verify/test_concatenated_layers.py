"""The layers level runs layers whose parts or maps have another order in the target: right ones pass, and a wrong order differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import convert
from convert.planning.planner import make_plan
from convert.verify.layers.level import check_layers
from convert.verify.mistakes.catalogue import known_mistakes
from convert.verify.report.report import Verdict
from convert.writing.written import open_written
from support.memory_source import HEAD, MemorySource, rule_file

pytestmark = pytest.mark.slow

A, B, F, H = 3, 5, 7, 2
D = A + B
AXES = f"axes: {{A: {{is: a, equals: {A}}}, B: {{is: b}}}}\n"
KEYS = "  concatenated: {D: A + B}\n"
ORDER = "concatenated: {D: B + A}"
LINEAR = f"- einsum: ...D,DF->...F\n  from: w\n  bias: b\n{KEYS}  linear: {{module: m, {ORDER}}}\n"
CONV = f"- dimension_numbers: NWC,WIO->NWC\n  axes: PDF\n  from: w\n{KEYS}  conv: {{module: m, {ORDER}}}\n"
LAYERS: dict[str, tuple[str, dict[str, tuple[int, ...]], str]] = {
    "linear": (LINEAR, {"w": (D, F), "b": (F,)}, "m.weight"),
    "rows": (LINEAR.replace("...D,DF->...F", "...F,FD->...D"), {"w": (F, D), "b": (D,)}, "m.weight"),
    "bias": (LINEAR.replace("...D,DF->...F", "...F,FD->...D"), {"w": (F, D), "b": (D,)}, "m.bias"),
    "einsum": (
        f'- einsum: ...D,DF->...F\n  from: w\n{KEYS}  linear: {{module: m, einsum: "...D,DF->...F", {ORDER}}}\n',
        {"w": (D, F)},
        "m.weight",
    ),
    "conv": (CONV, {"w": (2, D, F)}, "m.weight"),
    "groups": (CONV.replace("  conv:", "  feature_group_count: 7\n  conv:"), {"w": (2, D, F)}, "m.weight"),
    "conv_transpose": (CONV.replace("conv:", "conv_transpose:"), {"w": (2, D, F)}, "m.weight"),
    "layer_norm": (
        f"- from: w\n  bias: b\n  axes: D\n  multiplies_by: 1+scale\n  epsilon: 1e-6\n{KEYS}  layer_norm: {{module: m, {ORDER}}}\n",
        {"w": (D,), "b": (D,)},
        "m.weight",
    ),
    "batch_norm": (
        f"- from: w\n  mean: u\n  var: v\n  axes: D\n  multiplies_by: scale\n  epsilon: 1e-5\n{KEYS}  batch_norm: {{module: m, {ORDER}}}\n",
        {"w": (D,), "u": (D,), "v": (D,)},
        "m.running_var",
    ),
    "embedding": (f"- from: w\n  axes: VD\n{KEYS}  embedding: {{module: m, tied: h, {ORDER}}}\n", {"w": (F, D)}, "h.weight"),
    "parameter": (f"- from: w\n  axes: D\n{KEYS}  parameter: {{name: m, {ORDER}}}\n", {"w": (D,)}, "m"),
    "gru": (
        f"- cell: equinox.nn.GRUCell(use_bias=False)\n  from: c\n  inputs: D\n{KEYS}  gru: {{module: m, {ORDER}}}\n",
        {"c/weight_ih": (3 * H, D), "c/weight_hh": (3 * H, H)},
        "m.weight_ih_l0",
    ),
    "rnn": (
        f"- cell: haiku.VanillaRNN\n  from: c\n  inputs: D\n{KEYS}  rnn: {{module: m, {ORDER}}}\n",
        {"c/linear/w": (D, H), "c/linear/b": (H,), "c/linear_1/w": (H, H), "c/linear_1/b": (H,)},
        "m.weight_ih_l0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_with_parts_in_another_order(case: str, tmp_path: Path) -> None:
    text, shapes, wrong = LAYERS[case]
    rng, file = np.random.default_rng(0), tmp_path / "out.safetensors"
    source = MemorySource({name: rng.uniform(0.5, 2, shape).astype(np.float32) for name, shape in shapes.items()})
    rules = rule_file(text, HEAD + AXES)
    plan = make_plan(rules, source)
    convert.convert(rules, source, file)
    assert check_layers(plan, open_written(file)).verdict is Verdict.PASSED
    with safe_open(file, "np") as opened:
        header = opened.metadata()
    tensors = load_file(file)
    axis = tensors[wrong].shape.index(D)
    tensors[wrong] = np.roll(tensors[wrong], A, axis)  # the source's order
    save_file(tensors, file, header)
    assert check_layers(plan, open_written(file)).verdict is Verdict.FAILED


NORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "layer_norm": ("- from: w\n  bias: b\n  axes: D\n  multiplies_by: 1+scale\n  epsilon: 1e-6\n  flattened: {D: HWC}\n  layer_norm: m\n", ("w", "b")),
    "rms_norm": ("- from: w\n  axes: D\n  multiplies_by: scale\n  epsilon: 1e-6\n  flattened: {D: HWC}\n  rms_norm: m\n", ("w",)),
    "batch_norm": ("- from: w\n  mean: u\n  var: v\n  axes: D\n  multiplies_by: scale\n  epsilon: 1e-5\n  flattened: {D: HWC}\n  batch_norm: m\n", ("w", "u", "v")),
}  # fmt: skip


@pytest.mark.parametrize("case", NORMS)
def test_a_norm_over_a_flattened_map(case: str, tmp_path: Path) -> None:
    (text, leaves), (h, w, c) = NORMS[case], (2, 3, 4)
    rng, file = np.random.default_rng(0), tmp_path / "out.safetensors"
    source = MemorySource({name: rng.uniform(0.5, 2, h * w * c).astype(np.float32) for name in leaves})
    axes = ", ".join(f"{name}: {{is: s, equals: {size}}}" for name, size in (("H", h), ("W", w), ("C", c)))
    rules = rule_file(text, f"{HEAD}axes: {{{axes}}}\n")
    plan = make_plan(rules, source)
    convert.convert(rules, source, file)
    assert check_layers(plan, open_written(file)).verdict is Verdict.PASSED
    with safe_open(file, "np") as opened:
        header = opened.metadata()
    tensors = load_file(file)
    added = case == "layer_norm"
    right = np.moveaxis(source.read("w").reshape(h, w, c), -1, 0).ravel() + added
    assert np.array_equal(tensors["m.weight"], right)
    tensors["m.weight"] = source.read("w") + added
    save_file(tensors, file, header)
    assert check_layers(plan, open_written(file)).verdict is Verdict.FAILED
    names = [m.name for m in known_mistakes(plan.steps[0], plan) if np.array_equal(m.make(), tensors["m.weight"])]
    assert names[0] == "flattened in the source's order"
