"""brax's PPO and SAC: what brax computed, and what the module of the example computes from the converted directory."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import convert
from convert.core.errors import PlanError
from convert.rules import library
from convert.rules.parse import parse_models
from convert.writing.written import open_written
from support import brax
from support.goldens import checkpoint
from support.paths import EXAMPLES
from support.value_mistakes import assert_mistakes_are_named
from support.weights_level import check_weights

MODELS = {"ppo": "brax-ppo", "ppo-plain": "brax-ppo", "ppo-asymmetric": "brax-ppo-asymmetric", "sac": "brax-sac"}


@pytest.mark.parametrize("case", brax.CASES)
def test_the_module_computes_what_brax_did(case: str, tmp_path: Path) -> None:
    """Sizes, activation and whether observations are normalised come from the tree and from the file that brax writes beside it."""
    source, out = brax.converted(case, tmp_path)
    single, double = brax.errors(case, out)
    assert single < 1e-6 and double < 1e-14
    assert convert.plan_conversion("brax", source).rules.model == MODELS[case]


def test_what_the_files_beside_the_tree_say_is_used(tmp_path: Path) -> None:
    """Without them it is asked for; networks that these rules do not describe are refused."""
    source = Path(shutil.copytree(brax.checkpoint("ppo-asymmetric"), tmp_path / "ckpt"))
    (file,) = source.glob("*/ppo_network_config.json")
    said = json.loads(file.read_text())
    for key, value in (
        ("distribution_type", "normal"),
        ("value_obs_key", "state"),
        ("use_distributional_critic", True),
    ):
        changed = said | {"network_factory_kwargs": said["network_factory_kwargs"] | {key: value}}
        file.write_text(json.dumps(changed))
        with pytest.raises(PlanError, match=key):
            convert.plan_conversion("brax", source)
    file.unlink()
    with pytest.raises(PlanError, match="activation, normalize_observations, policy_obs_key, value_obs_key"):
        convert.convert("brax", source, tmp_path / "out")
    asked = {"activation": "swish", "normalize_observations": True, "policy_obs_key": "state", "value_obs_key": "privileged_state"}  # fmt: skip
    assert convert.plan_conversion("brax", source, settings=asked).rules.model == "brax-ppo-asymmetric"


@pytest.mark.parametrize(
    ("case", "key", "value", "said"),
    [
        ("ppo", "observation_size", 6, "observation_size = 6, and the tree has P = 5"),
        ("ppo-plain", "observation_size", {"state": [6]}, "observation_size.state = 6, and the tree has P = 5"),
        ("ppo-asymmetric", "observation_size", {"state": [5], "privileged_state": [5]}, "the tree has Q = 11"),
        ("ppo", "action_size", 6, "action_size = 6, and the tree has O[-1]/2 = 3"),
        ("ppo", "policy_hidden_layer_sizes", [8, 16], "policy_hidden_layer_sizes = [8, 16], and the tree has O = 8, 8, 6"),
        ("ppo", "policy_hidden_layer_sizes", [8], "a list of i - 1 = 2 "),
        ("ppo", "value_hidden_layer_sizes", [8, 8, 8], "the tree has B = 8, 8, 6, 1"),
        ("sac", "hidden_layer_sizes", [8, 8, 4], "hidden_layer_sizes = [8, 8, 4]"),
        ("sac", "action_size", 4, "the tree has O[-1]/2 = 3"),
        ("sac", "policy_network_layer_norm", False, "true or false equal to k/(i - 1) = 1, got false"),
    ],
)  # fmt: skip
def test_what_the_tree_contradicts_is_refused(case: str, key: str, value: Any, said: str, tmp_path: Path) -> None:
    source = Path(shutil.copytree(brax.checkpoint(case), tmp_path / "ckpt"))
    (file,) = source.glob("*/*_network_config.json")
    stated = json.loads(file.read_text())
    place = stated if key in stated else stated["network_factory_kwargs"]
    place[key] = value
    file.write_text(json.dumps(stated))
    with pytest.raises(PlanError) as refused:
        convert.plan_conversion("brax", source)
    assert said in str(refused.value), str(refused.value)


@pytest.mark.parametrize(("has_norms", "fits"), [(False, True), (True, False), (None, True)])
def test_norms_that_the_tree_lacks_are_refused(has_norms: bool | None, fits: bool, tmp_path: Path) -> None:
    """The leaves are optional: without them the flag alone says that the policy had norms."""
    opened = convert.open_source(brax.checkpoint("sac"))
    leaves = {name: opened.read(name) for name in opened.leaves if "LayerNorm" not in name}
    np.savez(tmp_path / "policy.npz", **leaves)
    (file,) = brax.checkpoint("sac").glob("*/sac_network_config.json")
    stated = json.loads(file.read_text())
    stated["network_factory_kwargs"]["policy_network_layer_norm"] = has_norms
    if has_norms is None:  # as of an older brax
        del stated["network_factory_kwargs"]["policy_network_layer_norm"]
    (tmp_path / file.name).write_text(json.dumps(stated))
    if fits:
        assert convert.plan_conversion("brax", tmp_path / "policy.npz").rules.model == "brax-sac"
    else:
        with pytest.raises(PlanError, match=r"equal to k/\(i - 1\) = 0, got true"):
            convert.plan_conversion("brax", tmp_path / "policy.npz")


@pytest.mark.parametrize(
    ("family", "source", "key", "value", "stated"),
    [
        ("brax", brax.checkpoint("ppo"), "activation", "tanh", '"silu" in the ppo_network_config.json'),
        ("bert", checkpoint("bert"), "num_attention_heads", 4, "3 in the config.json"),
    ],
)
def test_a_setting_that_takes_the_place_of_the_file_is_noted(
    family: str, source: Path, key: str, value: Any, stated: str
) -> None:
    """In every family with a file beside the arrays."""
    said = f"--set {key}={json.dumps(value)} takes the place of {key} {stated} of the checkpoint"
    silent, told = (convert.plan_conversion(family, source, settings=given).notes for given in ({}, {key: value}))
    assert said in " ".join(told) and "takes the place" not in " ".join(silent)


@pytest.mark.slow
def test_each_activation_that_is_converted_is_one_of_the_example(tmp_path: Path) -> None:
    """The example has jax's function of that name; another name is refused, as the example would not load the output."""
    file = library.shipped_rules_dir() / "brax.yaml"
    (supported,) = {
        rules.sidecar.supported["activation"] for rules in parse_models(file.read_text(), str(file)) if rules.sidecar
    }
    module = runpy.run_path(str(EXAMPLES / "brax" / "policy.py"))["ACTIVATIONS"]
    assert module.keys() == set(supported)
    x = np.linspace(-9, 9, 181, dtype=np.float32)
    for name, torch_function in module.items():
        wanted = x if name == "linear" else np.asarray(getattr(jax.nn, name)(x))
        assert np.abs(torch_function(torch.from_numpy(x)).numpy() - wanted).max() < 3e-6, (
            name
        )  # float32, of values up to 9
    source = Path(shutil.copytree(brax.checkpoint("sac"), tmp_path / "ckpt"))
    (file,) = source.glob("*/sac_network_config.json")
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"network_factory_kwargs": said["network_factory_kwargs"] | {"activation": "glu"}}))  # fmt: skip
    with pytest.raises(PlanError, match="activation in the sac_network_config.json"):
        convert.plan_conversion("brax", source)


def test_forth_and_back_gives_the_same_leaves(tmp_path: Path) -> None:
    source, out = brax.converted("ppo-asymmetric", tmp_path)
    convert.convert_back("brax-ppo-asymmetric", out, tmp_path / "back.npz", source, form="npz")
    first = convert.open_source(source)
    second = convert.open_source(tmp_path / "back.npz")
    assert all(second.read(name).tobytes() == first.read(name).tobytes() for name in second.leaves)


def test_exchanged_statistics_are_named(tmp_path: Path) -> None:
    old, new = "parameter: policy.normalize.{mean,std}", "parameter: policy.normalize.{std,mean}"
    text = (library.shipped_rules_dir() / "brax.yaml").read_text()
    source = brax.checkpoint("ppo-asymmetric")
    wrong = next(
        rules for rules in parse_models(text.replace(old, new), "wrong.yaml") if rules.model.endswith("asymmetric")
    )
    convert.convert(wrong, source, tmp_path / "out")
    report = check_weights(convert.plan_conversion("brax", source), open_written(tmp_path / "out"))
    named = {f.data["diagnosis"] for f in report.findings if f.code == "weights-differ"}
    assert named == {"of another tensor"}, report.findings


@pytest.mark.slow
@pytest.mark.parametrize("case", ("ppo-asymmetric", "sac"))
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = brax.converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 8
