"""Planted faults: each edits a copy of the shipped rules, loads strictly all the same, and must be caught by parity.

Strict loading proves nothing: every tensor here has the right name and shape. What catches a fault is the comparison
with the recorded JAX outputs, by the same code and bound as in test_timesfm_conversion.py. Faults that never come so far, because
the plan refuses them, are at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import convert
from convert.rules.library import shipped_rules_dir
from support.goldens import checkpoint, golden_io, relative_error
from support.memory_source import MemorySource
from support.timesfm_parity import BOUND, load_upstream, run_upstream

ONE = ("timesfm-1.0", "timesfm-2.0")
TWO = ("timesfm-2.5",)


@dataclass(frozen=True)
class Fault:
    """Text edits of a shipped rule file; each `old` must be there."""

    name: str
    file: str
    cases: tuple[str, ...]
    edits: tuple[tuple[str, str], ...]


POST = "stacked_transformer_layer/x_layers_{i}/self_attention/post"
FFN2 = "stacked_transformer_layer/x_layers_{i}/ff_layer/ffn_layer2"


def bias_apart(source: str, target: str) -> tuple[str, str]:
    """Takes the bias out of a linear rule, so that the weight's equation can be falsified alone."""
    return (f"  bias: {source}/b\n", ""), (
        "# ---- output:",
        f"- from: {source}/b\n  axes: D\n  parameter: {{timesfm: '{target}.bias'}}\n\n# ---- output:",
    )


FAULTS = (
    Fault(
        "output projection transposed",
        "timesfm-1",
        ONE,
        (("...NH,DNH->...D ", "...D,DNH->...NH "), *bias_apart(POST, "stacked_transformer.layers.{i}.self_attn.o_proj")),
    ),
    Fault("output projection transposed", "timesfm-2.5", TWO, (("...NH,NHD->...D", "...D,NHD->...NH"),)),
    Fault("1+scale dropped", "timesfm-1", ONE, (("multiplies_by: 1+scale", "multiplies_by: scale"),)),
    Fault("1+scale added to the RMS norm", "timesfm-1", ONE, (("multiplies_by: scale ", "multiplies_by: 1+scale "),)),
    Fault("1+scale added to the RMS norms", "timesfm-2.5", TWO, (("multiplies_by: scale", "multiplies_by: 1+scale"),)),
    Fault(
        "two layers swapped",
        "timesfm-1",
        ("timesfm-1.0",),
        (("x_layers_{i}", "x_layers_{0,1,2}"), ("transformer.layers.{i}", "transformer.layers.{1,0,2}"), ("decoder.layers.{i}", "decoder.layers.{1,0,2}")),
    ),
    Fault(
        "layers in lexical order",
        "timesfm-1",
        ("timesfm-2.0",),
        (
            ("x_layers_{i}", "x_layers_{0,1,10,11,2,3,4,5,6,7,8,9}"),
            ("transformer.layers.{i}", "transformer.layers.{0,1,2,3,4,5,6,7,8,9,10,11}"),
            ("decoder.layers.{i}", "decoder.layers.{0,1,2,3,4,5,6,7,8,9,10,11}"),
        ),
    ),
    Fault("q and k swapped", "timesfm-1", ONE, (("{query,key,value}", "{key,query,value}"),)),
    Fault("q and k swapped", "timesfm-2.5", TWO, (("{query,key,value}", "{key,query,value}"),)),
    # The scales of TimesFM 2.5's q and k norms may be swapped: they come after RoPE, so only their product counts.
    Fault(
        "heads and features swapped", "timesfm-2.5", TWO, (("...D,DNH->...NH", "...D,DNH->...HN"),)
    ),
    Fault(
        "square feed-forward projection transposed",
        "timesfm-1",
        ONE,
        (
            (f"- einsum: ...F,FD->...D\n  from: {FFN2}", f"- einsum: ...D,FD->...F\n  from: {FFN2}"),
            (f"  bias: {FFN2}/bias/b\n", ""),
            ("# ---- output:", f"- from: {FFN2}/bias/b\n  axes: D\n  parameter: {{timesfm: 'stacked_transformer.layers.{{i}}.mlp.down_proj.bias'}}\n\n# ---- output:"),
        ),
    ),
)  # fmt: skip
RUNS = [(fault, case) for fault in FAULTS for case in fault.cases]


def planted(fault: Fault, folder: Path) -> Path:
    """A copy of the rules with the fault in it."""
    text = (shipped_rules_dir() / f"{fault.file}.yaml").read_text()
    for old, new in fault.edits:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / f"{fault.file}.yaml"
    path.write_text(text)
    return path


def worst_error(case: str, out: Path) -> float:
    """The largest relative error of upstream's model with the converted weights, loaded with strict=True."""
    io = golden_io(case)
    return max(relative_error(got, io[name]) for name, got in run_upstream(case, load_upstream(case, out)).items())


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "case"), RUNS, ids=[f"{fault.name} ({case})" for fault, case in RUNS])
def test_parity_catches_the_fault(fault: Fault, case: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    convert.convert(str(planted(fault, tmp_path)), checkpoint(case), out)
    error = worst_error(case, out)
    assert error > 1000 * BOUND, f"{fault.name}: {error:.1e} is not told from rounding"


@pytest.mark.slow
def test_layers_swapped_in_the_source_are_caught(tmp_path: Path) -> None:
    """TimesFM 2.5 stacks its layers: no rule can express a swap, so the fault sits in the checkpoint."""
    source = convert.open_source(checkpoint("timesfm-2.5"))
    arrays = {name: source.read(name) for name in source.leaves}
    swapped = {name: x[[1, 0, 2]] if name.startswith("stacked_xf") else x for name, x in arrays.items()}
    errors = {}
    for label, tree in (("right", arrays), ("swapped", swapped)):
        convert.convert("timesfm", MemorySource(tree), tmp_path / f"{label}.safetensors")
        errors[label] = worst_error("timesfm-2.5", tmp_path / f"{label}.safetensors")
    assert errors["right"] < BOUND < 1000 * BOUND < errors["swapped"]


REFUSED = (
    ("einsum of the other layout", "timesfm-1", "timesfm-1.0", "...NH,DNH->...D ", "...NH,NHD->...D ", r"makes [NHD] = \d+ \("),
    ("embedding's axes", "timesfm-1", "timesfm-1.0", "axes: ED", "axes: DE", r"makes [DE] = \d+ \("),
    ("input projection", "timesfm-2.5", "timesfm-2.5", "...I,IG->...G", "...G,IG->...I", r"makes I = \d+|a bias with"),
    ("a layer's weight dropped", "timesfm-1", "timesfm-1.0", "self_attention/{query,key,value}/b", "self_attention/{query,key}/b", "the number of alternatives"),
    ("indices shifted", "timesfm-1", "timesfm-1.0", "layers.{i}.self_attn.scaling", "layers.{k}.self_attn.scaling", "indices"),
)  # fmt: skip


@pytest.mark.parametrize(("_", "file", "case", "old", "new", "said"), REFUSED, ids=[r[0] for r in REFUSED])
def test_the_plan_refuses(_: str, file: str, case: str, old: str, new: str, said: str, tmp_path: Path) -> None:
    rules = planted(Fault("", file, (case,), ((old, new),)), tmp_path)
    with pytest.raises(convert.ConvertError, match=said) as error:
        convert.convert(str(rules), checkpoint(case), tmp_path / "out.safetensors")
    assert f"{rules}:" in str(error.value)
    assert not (tmp_path / "out.safetensors").exists()
