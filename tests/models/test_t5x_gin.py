"""What `config.gin` beside a T5X checkpoint says of the function is written, or refused where the tree or the class contradicts it."""

from __future__ import annotations

from pathlib import Path

import pytest

import convert
from convert.planning.facts.gin import read_gin
from support import t5x_cases

SUMMARY = """# Macros:
# ==============================================================================
ACTIVATIONS = {activations}

# Parameters for network.T5Config:
# ==============================================================================
network.T5Config.dropout_rate = %DROPOUT_RATE
network.T5Config.dtype = 'bfloat16'  # of the activations
network.T5Config.{key} = {value}
network.T5Config.mlp_activations = %ACTIVATIONS
"""
BLOCK = """from t5x.examples.t5 import network
network.T5Config:
  {key} = \\
      {value}
  mlp_activations = {activations}
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for case in ("t5-1.0", "t5-1.1", "ul2", "longt5-local", "switch", "pix2struct", "umt5"):
        t5x_cases.write(case, folder / case)
    return folder


def gin(checkpoints: Path, case: str, text: str) -> Path:
    (checkpoints / case / "config.gin").write_text(text)
    return checkpoints / case


def stated(form: str, activations: str = "('gelu', 'linear')", key: str = "emb_dim", value: str = "12") -> str:
    return form.format(activations=activations, key=key, value=value)


@pytest.mark.parametrize("form", [SUMMARY, BLOCK])
@pytest.mark.parametrize(
    ("case", "activations", "word"),
    [
        ("t5-1.0", "('relu',)", "relu"),
        ("t5-1.0", "('gelu',)", "gelu_new"),  # flax's is tanh's approximation
        ("t5-1.1", "('gelu', 'linear')", "gated-gelu"),
        ("ul2", "('silu', 'linear')", "gated-silu"),
        ("ul2", "['swish',\n    'linear']", "gated-swish"),
        ("umt5", "('gelu', 'linear')", "gated-gelu"),
    ],
)
def test_the_activation_is_the_one_of_the_run(case: str, activations: str, word: str, form: str, checkpoints: Path) -> None:  # fmt: skip
    plan = convert.plan_conversion("t5x", gin(checkpoints, case, stated(form, activations)))
    assert plan.config is not None and plan.config["feed_forward_proj"] == word
    assert plan.notes == ()


def test_the_file_comes_before_a_published_size_and_set_before_the_file(checkpoints: Path) -> None:
    run = gin(checkpoints, "t5-1.1", stated(SUMMARY, "('silu', 'linear')"))
    plan = convert.plan_conversion("t5x", run, settings={"feed_forward_proj": "gated-gelu"})
    assert plan.config is not None and plan.config["feed_forward_proj"] == "gated-gelu"
    (note,) = plan.notes
    assert 'takes the place of feed_forward_proj "gated-silu" in the config.gin:10 of the checkpoint' in note


@pytest.mark.parametrize(
    ("case", "text", "said"),
    [
        ("t5-1.1", stated(SUMMARY, "('relu',)"), "config.gin:10 of the checkpoint: the tree has"),
        ("t5-1.1", stated(SUMMARY, "('linear', 'gelu')"), "('linear', 'gelu')"),
        ("t5-1.1", stated(SUMMARY, "%NOWHERE"), "%NOWHERE"),
        ("t5-1.1", stated(SUMMARY, "('gelu', 'linear')", "num_heads", "6"), "num_heads = 6, and the tree has N = 3"),
        ("t5-1.1", stated(BLOCK, "('gelu', 'linear')", "head_dim", "5"), "config.gin:3 of the checkpoint has T5Config.head_dim = 5"),
        ("t5-1.1", stated(BLOCK, "('gelu', 'linear')", "logits_via_embedding", "True"), "expected false, got true"),
        ("t5-1.0", stated(BLOCK, "('relu',)", "logits_via_embedding", "False"), "expected true, got false"),
        ("umt5", stated(BLOCK, "('gelu', 'linear')", "logits_via_embedding", "True"), "expected false, got true"),
        ("t5-1.1", "encoder/MlpBlock.activations = ('gelu', 'linear')\ndecoder/MlpBlock.activations = ('silu', 'linear')", "and"),
    ],
)  # fmt: skip
def test_what_the_tree_contradicts_is_refused(case: str, text: str, said: str, checkpoints: Path) -> None:
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion("t5x", gin(checkpoints, case, text))
    assert said in str(refused.value), str(refused.value)


def test_brackets_strings_and_macros_are_read() -> None:
    text = "a.B.c = [1,  # it's\n  2]\nx = 'a#b' # c\nfoo/z.B.d = %x\nB.e:\n  f = {'a': %x}\n\n  g = \\\n    @h()\nB.loop = %y\ny = %y\n"
    found = read_gin(text)
    assert found.values == {"B.c": [1, 2], "B.d": "a#b", "e.f": {"a": "a#b"}, "e.g": "@h", "B.loop": "%y"}
    assert found.lines == {"B.c": 1, "B.d": 4, "e.f": 6, "e.g": 8, "B.loop": 10}


FLAXFORMER = """
RADIUS = 5
dense.MlpBlock.activations = {activations}
encoder/long_attention.EncoderLocalSelfAttention.local_radius = %RADIUS
relative_position_biases.RelativePositionBiases.max_distance = 64
layer_norm.T5LayerNorm.epsilon = 1e-5
dense_attention.MultiHeadDotProductAttention.rescale_logits = {rescaled}
"""


def test_flaxformers_parameters_are_read(checkpoints: Path) -> None:
    text = FLAXFORMER.format(activations="('silu', 'linear')", rescaled=False)
    plan = convert.plan_conversion("t5x", gin(checkpoints, "longt5-local", text))
    assert plan.config is not None and plan.rules.model == "t5x-longt5-local"
    found = {key: plan.config[key] for key in ("feed_forward_proj", "local_radius", "relative_attention_max_distance", "layer_norm_epsilon")}  # fmt: skip
    assert list(found.values()) == ["gated-silu", 5, 64, 1e-5]


def test_scores_that_the_class_does_not_scale_are_refused(checkpoints: Path) -> None:
    text = FLAXFORMER.format(activations="('gelu', 'linear')", rescaled=True)
    with pytest.raises(convert.PlanError, match="rescale_logits in the config.gin:7"):
        convert.plan_conversion("t5x", gin(checkpoints, "longt5-local", text))


@pytest.mark.parametrize(
    ("case", "rules", "activations", "key", "word"),
    [("switch", "t5x", "('gelu',)", "dense_act_fn", "gelu_new"), ("pix2struct", "pix2struct", "('silu', 'linear')", "text_config", "silu")],
)  # fmt: skip
def test_the_activation_of_other_classes(case: str, rules: str, activations: str, key: str, word: str, checkpoints: Path) -> None:  # fmt: skip
    run = gin(checkpoints, case, f"dense.MlpBlock.activations = {activations}\n")
    plan = convert.plan_conversion(rules, run)
    assert plan.config is not None
    found = plan.config[key]
    assert (found["dense_act_fn"] if key == "text_config" else found) == word


@pytest.mark.parametrize(
    ("case", "rules", "activations"), [("switch", "t5x", "('gelu', 'linear')"), ("pix2struct", "pix2struct", "('gelu',)")]
)  # fmt: skip
def test_a_block_of_the_other_kind_is_refused(case: str, rules: str, activations: str, checkpoints: Path) -> None:
    run = gin(checkpoints, case, f"dense.MlpBlock.activations = {activations}\n")
    with pytest.raises(convert.PlanError, match="config.gin:1"):
        convert.plan_conversion(rules, run)


ROUTED = "moe_layers.MoeLayer.router = @{router}()\nrouting.TokensChooseMaskedRouter.num_selected_experts = {chosen}\nmoe_layers.MoeLayer.num_experts = {experts}\n"


@pytest.mark.parametrize(
    ("router", "chosen", "experts", "said"),
    [
        ("routing.TokensChooseMaskedRouter", 1, 5, ""),
        ("sparse/flaxformer.routing.TokensChooseScatterRouter", 1, 5, ""),
        ("routing.ExpertsChooseMaskedRouter", 1, 5, 'got "@ExpertsChooseMaskedRouter"'),
        ("routing.TokensChooseMaskedRouter", 2, 5, "num_selected_experts in the config.gin:2"),
        ("routing.TokensChooseMaskedRouter", 1, 4, "MoeLayer.num_experts = 4, and the tree has X = 5"),
    ],
)
def test_a_router_that_the_class_does_not_have_is_refused(
    router: str, chosen: int, experts: int, said: str, checkpoints: Path
) -> None:
    """transformers' class gives each token to one expert; the leaves of other routers are the same."""
    run = gin(checkpoints, "switch", ROUTED.format(router=router, chosen=chosen, experts=experts))
    if not said:
        assert convert.plan_conversion("t5x", run).rules.model == "t5x-switch"
        return
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion("t5x", run)
    assert said in str(refused.value), str(refused.value)
