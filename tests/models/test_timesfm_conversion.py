"""The three golden TimesFM checkpoints: converted, loaded strictly by upstream's code, compared with the JAX outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import convert
from support import goldens, timesfm_parity
from support.goldens import checkpoint, golden_io, relative_error
from support.timesfm_parity import BOUND, SETTINGS, load_upstream, run_upstream

CASES = ("timesfm-1.0", "timesfm-2.0", "timesfm-2.5")


# What the wrong conversions of the planted faults differ by is above 1e-2; see test_faults_in_rules_of_timesfm.py.


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_upstream_model_reproduces_the_jax_outputs(case: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    convert.convert("timesfm", checkpoint(case), out)
    io = golden_io(case)
    for name, got in run_upstream(case, load_upstream(case, out)).items():
        assert relative_error(got, io[name]) < BOUND, name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_transformers_reproduces_the_jax_outputs(case: str, tmp_path: Path) -> None:
    convert.convert("timesfm", checkpoint(case), tmp_path / "out", to="transformers", settings=SETTINGS[case])
    single, double = timesfm_parity.errors(case, "transformers", tmp_path / "out")
    assert single < BOUND and double < 1e-7


def test_sharded_directory_loads(tmp_path: Path) -> None:
    from transformers import TimesFm2_5ModelForPrediction

    whole, shards = tmp_path / "whole", tmp_path / "shards"
    convert.convert("timesfm", checkpoint("timesfm-2.5"), whole, to="transformers")
    result = convert.convert("timesfm", checkpoint("timesfm-2.5"), shards, to="transformers", max_shard_bytes=100_000)
    assert len([name for name in result.files if name.endswith(".safetensors")]) > 3
    assert "model.safetensors.index.json" in result.files
    a, b = (TimesFm2_5ModelForPrediction.from_pretrained(path).state_dict() for path in (whole, shards))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_positional_embedding_buffer_depends_on_a_fact(tmp_path: Path) -> None:
    """The tree does not tell 1.0 from 2.0 at an unpublished size; the weights convert, and the plan says what is open."""
    names = {}
    for value in (True, False, None):
        settings = {} if value is None else {"use_positional_embedding": value}
        plan = convert.plan_conversion("timesfm", checkpoint("timesfm-1.0"), to="transformers", settings=settings)
        names[value] = "decoder.position_emb.inv_timescales" in {step.name for step in plan.steps}
        assert bool(plan.notes) == (value is None)
    assert names == {True: True, False: False, None: False}
    assert plan.notes == (
        "decoder.position_emb.inv_timescales is left out: the target has it only when use_positional_embedding is true, "
        "and nothing says whether it is (--set use_positional_embedding=true|false)",
    )


def test_config_asks_for_missing_facts_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        convert.PlanError, match=r"config\.json needs context_length, use_positional_embedding, which the tree does not"
    ) as error:
        convert.convert("timesfm", checkpoint("timesfm-1.0"), tmp_path / "out", to="transformers")
    assert "1.0-200m has i=20" in str(error.value) and "--set use_positional_embedding=..." in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_same_bytes_on_every_run(case: str, jobs: int, tmp_path: Path) -> None:
    outs = [tmp_path / f"{k}.safetensors" for k in range(2)]
    convert.convert("timesfm", checkpoint(case), outs[0], jobs=1)
    convert.convert("timesfm", checkpoint(case), outs[1], jobs=jobs)
    assert outs[0].read_bytes() == outs[1].read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_metadata_says_what_was_converted_by_what(case: str, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    result = convert.convert("timesfm", checkpoint(case), out)
    with safe_open(out, "np") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["converter"].startswith("ckpt-convert ")
    assert metadata["model"] == ("timesfm-2.5" if case == "timesfm-2.5" else "timesfm-1")
    assert metadata["source_digest"] == result.source_digest
    layers = json.loads(metadata["layers"])
    activations = {layer["activation"] for layer in layers if "activation" in layer}
    assert activations == ({"silu"} if case == "timesfm-2.5" else {"silu", "relu"})
    assert {layer["epsilon"] for layer in layers if "epsilon" in layer} == {1e-6}
    assert str(Path.cwd()) not in json.dumps(metadata) and str(tmp_path) not in json.dumps(metadata)


def test_digest_depends_on_the_weights_and_not_on_how_they_lie(tmp_path: Path) -> None:
    from support.memory_source import MemorySource

    source = convert.open_source(checkpoint("timesfm-2.5"))
    arrays = {name: source.read(name) for name in source.leaves}
    digests = [
        convert.convert("timesfm", s, tmp_path / f"{k}.safetensors").source_digest
        for k, s in enumerate((source, MemorySource(arrays)))
    ]
    assert digests[0] == digests[1]
    name = next(iter(arrays))
    arrays[name] = arrays[name].copy()
    arrays[name].flat[0] += 1
    assert convert.convert("timesfm", MemorySource(arrays), tmp_path / "c.safetensors").source_digest != digests[0]


def test_versions_are_recognised_by_the_tree() -> None:
    for case, i, name in (
        ("timesfm-1.0", 20, "1.0-200m"),
        ("timesfm-2.0", 50, "2.0-500m"),
        ("timesfm-2.5", 20, "2.5-200m"),
    ):
        source = goldens.SpecsOnly(published_shapes(case, i))
        plan = convert.plan_conversion("timesfm", source, to="transformers")
        assert plan.version == name and plan.found.endswith(name)
        assert plan.config is not None and plan.config["num_hidden_layers"] == i
        assert plan.config["hidden_size"] == 1280 and plan.config["head_dim"] == 80


def published_shapes(case: str, layers: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Names, shapes and dtypes of a published checkpoint, from the golden's tree."""
    source = convert.open_source(checkpoint(case))
    plan = convert.plan_conversion("timesfm", source)
    sizes = {"D": 1280, "N": 16, "H": 80, "F": 1280, "G": 1280, "i": layers, "U": 10240}
    specs: dict[str, tuple[tuple[int, ...], str]] = {}
    for step in plan.steps:
        for part in step.parts:
            axes = part.layout.stored.split()
            old = source.leaves[part.leaf].spec
            shape = tuple(sizes.get(axis, size) for axis, size in zip(axes, old.shape, strict=True))
            for i in range(layers) if "x_layers_0/" in part.leaf else (None,):
                specs[part.leaf if i is None else part.leaf.replace("x_layers_0/", f"x_layers_{i}/")] = (
                    shape,
                    old.dtype,
                )
    return {
        name: spec
        for name, spec in specs.items()
        if "x_layers_" not in name or int(name.split("x_layers_")[1].split("/")[0]) < layers
    }
