"""What no weight tells: the rules' word against config.json and the live module, with planted differences."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert.api import convert, plan_conversion
from convert.core.errors import CheckpointError
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.verify.comparison import load_reference
from convert.verify.config.compare import check_facts, with_facts
from convert.verify.config.impact import impact_of, of_activation, of_epsilon, of_numbers, of_rope_theta
from convert.verify.config.same_value import canonical, same
from convert.verify.report.report import LevelReport, Verdict
from convert.writing.written import Written, open_written
from support.goldens import checkpoint
from support.marks import slow_but
from support.upstream import timesfm_1

CASES = {
    "timesfm-1.0": {"use_positional_embedding": True, "context_length": 512},
    "timesfm-2.0": {"use_positional_embedding": False, "context_length": 2048},
    "timesfm-2.5": {},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, target) -> plan, the written directory, the reference; each made once."""
    known: dict[tuple[str, str], tuple[Plan, Path, Reference]] = {}
    patch = pytest.MonkeyPatch()
    patch.setenv("CONVERT_TIMESFM_1", str(Path(timesfm_1().__file__).parents[1]))

    def make(case: str, target: str) -> tuple[Plan, Path, Reference]:
        if (case, target) not in known:
            out = tmp_path_factory.mktemp("facts") / "out"
            convert("timesfm", checkpoint(case), out, to=target, settings=CASES[case])
            model = open_written(out).metadata["model"]
            plan = plan_conversion(model, checkpoint(case), to=target, settings=CASES[case])
            reference = load_reference(plan, None)
            assert isinstance(reference, Reference), reference
            known[case, target] = plan, out, reference
        return known[case, target]

    yield make
    patch.undo()


def with_config(out: Path, **changes: Any) -> Written:
    """The written conversion with another config.json; None removes a key."""
    written = open_written(out)
    assert written.config is not None
    config = {**written.config, **changes}
    return dataclasses.replace(written, config={key: value for key, value in config.items() if value is not None})


def only(facts: Any) -> Any:
    assert len(facts.findings) == 1, [str(finding) for finding in facts.findings]
    return facts.findings[0]


# ---- no false alarm


@pytest.mark.parametrize("case", slow_but(list(CASES)[-1:], CASES))
@pytest.mark.parametrize("target", ["timesfm", "transformers"])
def test_golden_has_no_finding(made: Any, case: str, target: str) -> None:
    plan, out, reference = made(case, target)
    for facts in (check_facts(plan, open_written(out), reference), check_facts(None, open_written(out), reference)):
        assert not facts.findings, [str(finding) for finding in facts.findings]
        assert " 0 of" not in facts.notes[0]
        assert "query_scale" in {fact.name for fact in facts.unread}  # a formula cannot be read off, so it is listed
        assert "; not read from it: " in facts.notes[0] and "query_scale" in facts.notes[0]


def test_layer_facts_are_all_compared_with_the_module(made: Any) -> None:
    plan, out, reference = made("timesfm-2.5", "timesfm")
    unread = {fact.name for fact in check_facts(plan, open_written(out), reference).unread}
    assert not any(word in unread for word in ("activation", "epsilon", "multiplies_by", "rope_theta"))


def test_without_a_module_what_only_it_tells_is_listed(made: Any) -> None:
    plan, out, _ = made("timesfm-2.5", "timesfm")
    facts = check_facts(plan, open_written(out), "timesfm is not installed")
    assert "0 of 15" in facts.notes[0] and "timesfm is not installed" in facts.notes[-1]
    unread = {(fact.name, fact.layer.text if fact.layer else "") for fact in facts.unread}
    assert unread >= {("epsilon", "stacked_xf.{i}.attn.{query,key}_ln"), ("rope_theta", "")}


def test_names_of_transformers_mean_ours() -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    from convert.layers.activations import NUMPY_ACTIVATIONS

    for name in ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python", "silu", "swish", "relu", "relu2", "relu6", "quick_gelu", "tanh", "sigmoid", "mish", "linear"):  # fmt: skip
        want = ACT2FN[name](x.clone()).numpy()
        assert np.abs(NUMPY_ACTIVATIONS[canonical(name)](x.numpy()) - want).max() < 1e-7, name


# ---- planted in config.json


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_another_activation_in_config(made: Any, activation: str) -> None:
    plan, out, reference = made("timesfm-2.5", "transformers")
    finding = only(check_facts(plan, with_config(out, activation=activation), reference))
    assert "silu" in str(finding) and activation in str(finding) and "config.json's activation" in finding.got
    assert finding.rule.startswith("rules/timesfm-2.5.yaml:")
    assert finding.data["diagnosis"] == "activation" and finding.data["impact"]["max_abs"] > 0.1
    assert 'set activation to "silu"' in finding.fix


def test_swish_is_silu(made: Any) -> None:
    plan, out, reference = made("timesfm-2.5", "transformers")
    assert not check_facts(plan, with_config(out, activation="swish"), reference).findings


def test_an_activation_under_a_name_that_the_rules_have_no_key_for(made: Any) -> None:
    plan, out, reference = made("timesfm-1.0", "transformers")
    unread = check_facts(plan, with_config(out, hidden_activation="gelu"), reference)
    assert not unread.findings and any(
        'hidden_activation = "gelu"' in note for note in unread.notes
    )  # TimesFmConfig has none
    other = {"model_type": "mine", "architectures": None}
    assert not check_facts(plan, with_config(out, hidden_act="relu", **other), reference).findings
    finding = only(check_facts(plan, with_config(out, hidden_activation="gelu", **other), reference))
    assert "silu or relu" in str(finding)


def test_another_epsilon_in_config(made: Any) -> None:
    for case in ("timesfm-1.0", "timesfm-2.5"):
        plan, out, reference = made(case, "transformers")
        finding = only(check_facts(plan, with_config(out, rms_norm_eps=1e-5), reference))
        assert "1e-06" in str(finding) and "1e-05" in str(finding)
        assert finding.data["impact"]["relative"] == pytest.approx(1 - math.sqrt(1.01e-4 / 1.1e-4), rel=1e-6)


def test_another_rope_base_in_config(made: Any) -> None:
    plan, out, reference = made("timesfm-2.5", "transformers")
    changed = with_config(out, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    finding = only(check_facts(plan, changed, reference))
    assert finding.path == "rope_parameters.rope_theta" and finding.data["fact"] == "rope_theta"
    assert finding.data["impact"]["max_abs"] > 1 and "1e+06" in str(finding)


@pytest.mark.slow
def test_a_size_and_other_facts_in_config(made: Any) -> None:
    plan, out, reference = made("timesfm-2.5", "transformers")
    for key, value in {"num_hidden_layers": 2, "context_length": 512, "quantiles": [0.1, 0.9], "decode_index": 4, "use_bias": True}.items():  # fmt: skip
        finding = only(check_facts(plan, with_config(out, **{key: value}), reference))
        assert f"config.json's {key}" in str(finding), str(finding)


@pytest.mark.slow
def test_a_key_that_is_left_out_has_the_default_of_transformers(made: Any) -> None:
    plan, out, reference = made("timesfm-2.5", "transformers")
    assert not check_facts(plan, with_config(out, rms_norm_eps=None), reference).findings  # the default is right
    finding = only(check_facts(plan, with_config(out, num_hidden_layers=None), reference))
    assert "20 (the default of transformers" in finding.got


def test_a_key_that_is_left_out_of_an_unknown_class_is_listed(made: Any) -> None:
    plan, out, reference = made("timesfm-2.5", "transformers")
    facts = check_facts(plan, with_config(out, rms_norm_eps=None, model_type="mine"), reference)
    assert not facts.findings and any("rms_norm_eps (left out" in note for note in facts.notes)


def test_config_against_the_header_alone(made: Any) -> None:
    _, out, _ = made("timesfm-2.5", "transformers")
    found = [
        check_facts(None, with_config(out, **change)) for change in ({"activation": "relu"}, {"rms_norm_eps": 1e-5})
    ]
    assert [only(facts).data["fact"] for facts in found] == ["activation", "epsilon"]
    assert only(found[0]).rule.startswith("header of ")


# ---- planted in the module


@pytest.mark.slow
def test_a_module_with_another_epsilon(made: Any) -> None:
    plan, out, reference = made("timesfm-2.5", "timesfm")

    def build(state: Any) -> Any:
        module = reference.build(state)
        module.stacked_xf[1].attn.key_ln.epsilon = 1e-5
        module.stacked_xf[2].attn.key_ln.epsilon = 1e-5
        return module

    finding = only(check_facts(plan, open_written(out), dataclasses.replace(reference, build=build)))
    assert finding.path == "stacked_xf.1.attn.key_ln" and finding.rule.startswith("rules/timesfm-2.5.yaml:")
    assert finding.data["modules"] == ["stacked_xf.1.attn.key_ln", "stacked_xf.2.attn.key_ln"]
    assert "1 more module" in finding.problem and finding.data["impact"]["relative"] > 0.01


@pytest.mark.slow
def test_a_module_with_another_activation_and_another_base(made: Any) -> None:
    plan, out, reference = made("timesfm-2.5", "timesfm")

    def build(state: Any) -> Any:
        module = reference.build(state)
        module.tokenizer.activation = torch.nn.GELU()
        module.stacked_xf[0].attn.rotary_position_embedding.max_timescale = 1e6
        return module

    facts = check_facts(plan, open_written(out), dataclasses.replace(reference, build=build))
    assert {finding.data["fact"] for finding in facts.findings} == {"activation", "rope_theta"}
    assert any("gelu_erf" in str(finding) and "tokenizer.hidden_layer" in str(finding) for finding in facts.findings)


@pytest.mark.slow
def test_a_norm_that_multiplies_by_something_else(made: Any) -> None:
    plan, out, reference = made("timesfm-1.0", "timesfm")

    def build(state: Any) -> Any:
        module = reference.build(state)
        module.stacked_transformer.layers[0].input_layernorm.add_unit_offset = True
        return module

    finding = only(check_facts(plan, open_written(out), dataclasses.replace(reference, build=build)))
    assert finding.data["fact"] == "multiplies_by" and finding.data["configured"] == "1+weight"


def test_a_module_that_cannot_be_asked_is_listed(made: Any) -> None:
    plan, out, reference = made("timesfm-2.5", "timesfm")

    def build(state: Any) -> Any:
        raise RuntimeError("no")

    facts = check_facts(plan, open_written(out), dataclasses.replace(reference, build=build))
    assert not facts.findings and any("could not be read: no" in note for note in facts.notes)
    assert "epsilon" in {fact.name for fact in facts.unread}

    one = {"stacked_xf.0.pre_attn_ln": {"multiplies_by": "unknown"}}
    facts = check_facts(plan, open_written(out), dataclasses.replace(reference, facts=lambda module: one))
    assert any("stacked_xf.0.pre_attn_ln" in note and "--trust multiplies_by" in note for note in facts.notes)

    vague = dataclasses.replace(reference, facts=lambda module: {"stacked_xf.0.ff0": {"activation": "unknown"}})
    facts = check_facts(plan, open_written(out), vague)
    unread = {(fact.name, fact.layer.text if fact.layer else "") for fact in facts.unread}
    assert not facts.findings and ("activation", "stacked_xf.{i}.ff0") in unread


# ---- planted in the header


def test_a_file_that_was_made_with_other_facts(made: Any) -> None:
    plan, out, reference = made("timesfm-2.5", "timesfm")
    written = open_written(out)
    layers = json.loads(written.metadata["layers"])
    layers[0]["activation"] = "gelu_tanh"
    facts = json.dumps({**json.loads(written.metadata["facts"]), "rope_theta": 1e6})
    changed = dataclasses.replace(written, metadata={**written.metadata, "facts": facts, "layers": json.dumps(layers)})
    found = check_facts(plan, changed, reference).findings
    assert {finding.data["fact"] for finding in found} == {"activation", "rope_theta"}
    assert all("header of" in str(finding) for finding in found)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("facts", "{", "expected a JSON object"),
        ("facts", "[]", "expected a JSON object"),
        ("layers", "{", "expected a JSON list"),
        ("layers", "{}", "expected a JSON list"),
        ("layers", "[7]", "expected a layer and its kind, got 7"),
        ("layers", '[{"layer": "a{", "kind": "x"}]', "expected a layer and its kind"),
        (
            "layers",
            '[{"layer": "a", "kind": "x", "padding": 3, "allowed_padding": 7}]',
            "expected a layer and its kind",
        ),
    ],
)
def test_a_header_of_other_code(made: Any, key: str, value: str, said: str) -> None:
    """A user's file: never an internal error."""
    plan, out, _ = made("timesfm-2.5", "timesfm")
    written = open_written(out)
    changed = dataclasses.replace(written, metadata={**written.metadata, key: value})
    with pytest.raises(CheckpointError, match=re.escape(said)):
        check_facts(plan, changed)


def test_sizes_in_a_header_of_other_code(made: Any) -> None:
    written = open_written(made("timesfm-2.5", "timesfm")[1])
    with pytest.raises(CheckpointError, match="`sizes` .* expected a JSON object"):
        check_facts(None, dataclasses.replace(written, metadata={**written.metadata, "sizes": "["}))


# ---- how it is reported


def test_a_finding_fails_the_level_even_if_it_was_skipped(made: Any) -> None:
    plan, out, _ = made("timesfm-2.5", "transformers")
    skipped = LevelReport("layers", Verdict.SKIPPED, "jax is not installed")
    assert with_facts(skipped, check_facts(plan, open_written(out))).verdict is Verdict.SKIPPED
    failed = with_facts(skipped, check_facts(plan, with_config(out, activation="relu")))
    assert failed.verdict is Verdict.FAILED and not failed.reason and failed.findings
    json.dumps(failed.to_dict())


def test_sizes_of_differences() -> None:
    gelu = of_activation("gelu_erf", "gelu_tanh")
    assert gelu.data["max_abs"] == pytest.approx(4.73e-4, rel=2e-3) and abs(gelu.data["at"]) == pytest.approx(
        2.70, abs=5e-3
    )
    assert "|x| = 2.70" in gelu.text
    assert "without bound" in of_activation("relu", "tanh").text
    assert not of_activation("silu", "something").text
    assert of_epsilon(1e-6, 1e-5).data["relative"] > of_epsilon(1e-6, 1e-5).data["ordinary"]
    assert "without bound" in of_epsilon(1e-6, 0.0).text
    assert of_rope_theta(1e4, 1e4, {}, 100).data["max_abs"] == 0
    assert of_numbers([0.1, 0.2], [0.1]).text == "2 numbers against 1"
    assert of_numbers(12, 144).text == "the square of the declared value; a relative difference of 9.2e-01"
    assert of_numbers("a", 1).text == "" and impact_of("rope", "half-split", "interleaved", {}, 1).text == ""
    assert same("", [1, 2.0], (1.0, 2)) and not same("", True, 1) and same("activation", "swish", "silu")
