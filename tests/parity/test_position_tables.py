"""Positions: tables of sinusoids in their variants, learnt ones, and tables of relative distances, against real modules."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert import PlanError, RuleError
from convert.layers.embedding.patch_positions import TABLES
from convert.planning.planner import make_plan
from convert.verify.sides.run_torch import exact_state
from convert.writing.execute import computed, execute
from convert.writing.written import open_written
from support.goldens import checkpoint, golden_io
from support.memory_source import HEAD, MemorySource, rule_file, run

FACTS = HEAD + "facts: {min_timescale: 1, max_timescale: 10000}\n"
TABLE = "- from: w\n  axes: SD\n  parameter: w\n- timescales: D\n  positions: S\n  layout: LAYOUT\n  endpoint: LAST\n  buffer: pe\n"


def table(layout: str, last: str, rows: int, width: int, **facts: float) -> np.ndarray:
    rules = rule_file(TABLE.replace("LAYOUT", layout).replace("LAST", last), FACTS)
    plan = make_plan(rules, MemorySource({"w": np.zeros((rows, width), np.float32)}), settings=facts)
    (step,) = (step for step in plan.steps if step.name == "pe")
    made = computed(step)
    assert (made.shape, made.dtype.name) == (step.spec.shape, step.spec.dtype)
    return made


def whisper(rows: int, width: int) -> torch.Tensor:
    from transformers.models.whisper.modeling_whisper import sinusoids

    return sinusoids(rows, width)


def marian(rows: int, width: int) -> torch.Tensor:
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    module = MarianSinusoidalPositionalEmbedding(rows, width)
    made = module.create_weight()
    return module.weight if made is None else made


def speecht5(rows: int, width: int) -> torch.Tensor:
    from transformers.models.speecht5.modeling_speecht5 import SpeechT5ScaledPositionalEncoding

    return SpeechT5ScaledPositionalEncoding(0.0, width, rows).pe[0]


MODULES = {
    ("concatenated", "included"): whisper,
    ("concatenated", "excluded"): marian,
    ("interleaved", "excluded"): speecht5,
}


@pytest.mark.parametrize("variant", MODULES)
def test_a_table_is_that_of_the_module(variant: tuple[str, str]) -> None:
    with torch.no_grad():
        want = MODULES[variant](37, 14).numpy()
    assert np.abs(table(*variant, 37, 14) - want).max() < 5e-6  # theirs are computed in float32
    others = [(layout, last) for layout in ("concatenated", "interleaved") for last in ("included", "excluded")]
    assert all(np.abs(table(*other, 37, 14) - want).max() > 0.5 for other in others if other != variant)


def test_a_table_is_the_jax_code_in_float64() -> None:
    """flax's examples/wmt/models.py sinusoidal_init: concatenated, the last timescale included; min_timescale multiplies."""
    position, k = np.arange(9)[:, None], np.arange(4)
    angle = position * 2.0 * np.exp(k * (-np.log(5000 / 2) / 3))
    want = np.concatenate([np.sin(angle), np.cos(angle)], 1)
    got = table("concatenated", "included", 9, 8, min_timescale=2, max_timescale=5000)
    assert np.abs(got - want).max() <= 2**-24


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  layout: LAYOUT\n", "", "a table has both `positions:` and `layout:`"),
        ("LAYOUT", "halves", "expected one of concatenated, interleaved"),
        ("positions: S", "positions: 0", "a table has at least one position"),
    ],
)
def test_rules_of_tables_that_say_too_little(old: str, new: str, message: str) -> None:
    text = TABLE.replace(old, new).replace("LAYOUT", "interleaved").replace("LAST", "included")
    with pytest.raises(RuleError, match=message):
        rule_file(text, FACTS)


def test_an_odd_width_and_an_unknown_length_are_refused() -> None:
    with pytest.raises(PlanError, match="r.yaml:9: pe: .*expected an even width D, got 5"):
        table("interleaved", "included", 3, 5)
    text = TABLE.replace("positions: S", "positions: T").replace("LAYOUT", "interleaved").replace("LAST", "included")
    with pytest.raises(PlanError, match="r.yaml:9: pe: .*its number of positions T a size"):
        make_plan(rule_file(text, FACTS), MemorySource({"w": np.zeros((3, 4), np.float32)}))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_position_ids_are_those_that_a_class_saves(dtype: str | None) -> None:
    from transformers import VideoPrismTextConfig, VideoPrismTextModel

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 7, "num_hidden_layers": 1}
    want = VideoPrismTextModel(VideoPrismTextConfig(vocab_size=5, intermediate_size=8, **sizes)).state_dict()["embeddings.position_ids"]  # fmt: skip
    text = "- from: w\n  axes: SD\n  parameter: w\n- positions: POSITIONS\n  position_ids: embeddings.position_ids\n"
    for positions in ("S", "7"):
        rules = rule_file(text.replace("POSITIONS", positions))
        plan = make_plan(rules, MemorySource({"w": np.zeros((7, 2), np.float32)}), dtype=dtype)
        got = computed(plan.steps[-1])
        assert got.dtype == np.int64 and np.array_equal(got, want.numpy())
    with pytest.raises(PlanError, match="its number of positions T a size"):
        make_plan(rule_file(text.replace("POSITIONS", "T")), MemorySource({"w": np.zeros((7, 2), np.float32)}))


# ---- relative distances: a look-up is a product with a row of zeros and a one

BUCKETS = """
- einsum: ...B,NB->...N
  from: decoder/relpos_bias/rel_embedding
  linear: {module: attn.relative_attention_bias, einsum: "...B,BN->...N"}
"""


def test_a_table_of_buckets_as_t5x_stores_it() -> None:
    """T5X has [heads, buckets], transformers [buckets, heads]; square in neither, and the wrong one computes something else."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    rng = np.random.default_rng(0)
    stored = rng.standard_normal((12, 12)).astype(np.float32)  # as many heads as buckets: nothing but the rule tells
    made = run(make_plan(rule_file(BUCKETS), MemorySource({"decoder/relpos_bias/rel_embedding": stored})))
    config = T5Config(
        d_model=24, d_kv=2, num_heads=12, relative_attention_num_buckets=12, relative_attention_max_distance=17
    )
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)

    def bias(weight: np.ndarray) -> np.ndarray:
        module.relative_attention_bias.load_state_dict({"weight": torch.tensor(weight)})
        with torch.no_grad():
            return module.compute_bias(23, 23)[0].numpy()

    got = bias(made["attn.relative_attention_bias.weight"])
    bucket = buckets(np.arange(23)[None, :] - np.arange(23)[:, None], 12, 17)
    want = np.einsum(
        "nb,qkb->nqk", stored, np.eye(12)[bucket]
    )  # T5X layers.py RelativePositionBiases: a one-hot product
    assert np.abs(got - want).max() < 1e-6
    assert np.abs(bias(stored) - want).max() > 1


def buckets(distance: np.ndarray, count: int, limit: int) -> np.ndarray:
    """T5X's ``_relative_position_bucket``, both directions, as the paper's code has it."""
    half = count // 2
    side = (distance > 0) * half
    far = np.abs(distance)
    exact = half // 2
    large = exact + (np.log(np.maximum(far, 1) / exact) / np.log(limit / exact) * (half - exact)).astype(int)
    return np.asarray(side + np.where(far < exact, far, np.minimum(large, half - 1)))


def test_learnt_positions_without_their_batch_axis() -> None:
    leaves = {"pos_embedding": np.random.default_rng(0).standard_normal((1, 6, 4)).astype(np.float32)}
    rules = "- from: pos_embedding\n  axes: .SD\n  embedding: position_embedding\n"
    made: Any = run(make_plan(rule_file(rules), MemorySource(leaves)))
    assert np.array_equal(made["position_embedding.weight"], leaves["pos_embedding"][0])


def test_the_tables_of_whisper_are_its_leaves() -> None:
    """They lie in the tree, so they are kept, whatever they are."""
    import convert

    plan = convert.plan_conversion("whisper", checkpoint("whisper"))
    (step,) = (step for step in plan.steps if step.name == "model.encoder.embed_positions.weight")
    assert step.value is None and step.spec.shape == (14, 24) and golden_io("whisper")["logits"].shape[-1] == 59


@pytest.mark.parametrize("rows", ["\n  positions: S\n  layout: interleaved", ""])
def test_the_float64_run_of_a_check_has_tables_before_they_are_rounded(tmp_path: Path, rows: str) -> None:
    text = f"- from: w\n  axes: SD\n  parameter: w\n- timescales: D{rows}\n  endpoint: excluded\n  buffer: pe\n"
    plan = make_plan(rule_file(text, FACTS), MemorySource({"w": np.zeros((5, 6), np.float32)}))
    list(execute(plan, tmp_path / "out.safetensors"))
    written = open_written(tmp_path / "out.safetensors")
    exact, rounded = exact_state(plan, written, "cpu")["pe"].numpy(), written.read("pe")
    assert 0 < np.abs(exact - rounded).max() < 1e-7
    scales = 10000 ** (-np.arange(3) / 3)
    of = (
        scales
        if not rows
        else np.stack([f(np.arange(5)[:, None] * scales) for f in (np.sin, np.cos)], -1).reshape(5, 6)
    )
    np.testing.assert_allclose(exact, of, rtol=1e-14, atol=1e-15)
    other = dataclasses.replace(
        plan, steps=tuple(dataclasses.replace(s, value=(1.0, 0.5)) if s.value else s for s in plan.steps)
    )
    if not rows:  # the file has other numbers than these rules make
        np.testing.assert_array_equal(exact_state(other, written, "cpu")["pe"].numpy(), rounded)


PATCHES = HEAD + "facts: {side: ask, table: ask}\n"
GRID = "- from: w\n  axes: PD\n  parameter: w\n- width: D\n  image: side\n  patch: P\n  table: table\n  patch_positions: {name: pe, axes: .LD, zeros_before: {L: 2}}\n"
GIVEN = {"side": 9, "table": "sincos2d"}


def grid(rows: str = GRID, width: int = 8, **facts: object) -> np.ndarray:
    plan = make_plan(rule_file(rows, PATCHES), MemorySource({"w": np.zeros((3, width), np.float32)}), settings=facts)
    (step,) = (step for step in plan.steps if step.name == "pe")
    assert step.spec.dtype == "float32" and computed(step).shape == step.spec.shape
    return computed(step)


def test_patches_have_the_sines_of_their_column_and_row() -> None:
    """big_vision's posemb_sincos_2d in float64."""
    row, column = (x.reshape(-1, 1) for x in np.mgrid[:3, :3])
    scale = 1 / 10_000.0 ** np.array([0.0, 1.0])
    want = np.concatenate([np.sin(column * scale), np.cos(column * scale), np.sin(row * scale), np.cos(row * scale)], 1)
    made = grid(**GIVEN)
    assert made.shape == (1, 11, 8) and not made[0, :2].any() and np.abs(made[0, 2:] - want).max() <= 2**-24
    assert np.array_equal(grid(GRID.replace(", zeros_before: {L: 2}", ""), **GIVEN), made[:, 2:])
    assert np.array_equal(grid(GRID.replace("axes: .LD, zeros_before: {L: 2}", "axes: LD"), **GIVEN), made[0, 2:])


def test_tables_of_scenic() -> None:
    """get_fixed_sincos_position_embedding, and sinusoidal_init, where the class token is the first; in float64."""
    row, column = (x.reshape(-1, 1) for x in np.mgrid[:3, :3])
    scale = 1 / 10_000.0 ** (np.arange(2) / 2)
    want = np.concatenate([np.sin(column * scale), np.cos(column * scale), np.sin(row * scale), np.cos(row * scale)], 1)
    assert np.abs(grid(side=9, table="sinusoidal_2d")[0, 2:] - want).max() <= 2**-24
    angles = np.arange(10)[:, None] * np.exp(np.arange(0, 8, 2) * -(np.log(1e4) / 8))
    want = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(10, 8)
    for token in (0, 1):
        rows = GRID.replace("L: 2", "L: 1").replace("  table: table", "  table: table\n  class_token: true")
        rows = rows if token else GRID.replace(", zeros_before: {L: 2}", "")
        made = grid(rows, side=9, table="sinusoidal_1d")
        assert made.shape == (1, 9 + token, 8) and np.abs(made[0] - want[: 9 + token]).max() <= 2**-24
        assert not grid(rows, side=9, table="none").any()


@pytest.mark.parametrize(
    ("width", "facts", "code", "expected"),
    [
        (8, {"table": "sincos2d"}, "setting-invalid", "side to be a multiple of the patch's side 3"),
        (8, {"side": 10, "table": "sincos2d"}, "setting-invalid", "side to be a multiple of the patch's side 3"),
        (8, {"side": True, "table": "sincos2d"}, "setting-invalid", "side to be a multiple of the patch's side 3"),
        (8, {"side": 9}, "setting-invalid", f"table = {' or '.join(TABLES)}"),
        (8, {"side": 9, "table": "sincos3d"}, "setting-invalid", f"table = {' or '.join(TABLES)}"),
        (8, {"side": 9, "table": "sinusoidal_1d"}, "setting-invalid", "another table"),
        (6, GIVEN, "shape-mismatch", "a width D that 4 divides"),
        (6, GIVEN | {"table": "sinusoidal_2d"}, "shape-mismatch", "a width D that 4 divides"),
    ],
)
def test_a_table_of_patches_that_is_not_known_is_refused(width: int, facts: dict[str, object], code: str, expected: str) -> None:  # fmt: skip
    with pytest.raises(PlanError) as refused:
        grid(width=width, **facts)
    (found,) = refused.value.findings
    assert (found.code, found.expected) == (code, expected)


@pytest.mark.parametrize(
    "axes", ["axes: .L", "axes: DL", "axes: .LD, zeros_before: {D: 1}", "axes: .LD, zeros_before: {L: 0}"]
)
def test_the_axes_of_a_table_of_patches_are_its_own(axes: str) -> None:
    with pytest.raises(RuleError, match=r"r.yaml:\d+"):
        rule_file(GRID.replace("axes: .LD, zeros_before: {L: 2}", axes), PATCHES)
