"""A weight whose values are whole, truth values, complex or in float8 without scales is refused: it was written as it is, with exit code 0."""

from __future__ import annotations

import pytest

import convert
from support import maxtext
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly
from support.paths import GOLDEN

CASES = [  # golden, family, settings, and a leaf: of a dense layer, a norm, a convolution, a table, a batch norm
    ("t5x/t5-1.1", "t5x", {"feed_forward_proj": "gated-gelu"}, "dense/kernel|mlp/wo/kernel"),
    ("t5x/t5-1.1", "t5x", {"feed_forward_proj": "gated-gelu"}, "scale"),
    ("t5x/t5-1.1", "t5x", {"feed_forward_proj": "gated-gelu"}, "token_embedder/embedding"),
    ("tips/image", "tips", {"mlp_ratio": 2}, "bias"),
    ("vit/vit", "vit-jax", {"image_size": 12}, "embedding/kernel"),
    ("vit/vit", "vit-jax", {"image_size": 12}, "cls"),  # a plain parameter
    ("t5x/t5-1.1", "t5x", {"feed_forward_proj": "gated-gelu"}, "relpos_bias/rel_embedding"),
]


DTYPES = ("int8", "bool", "complex64", "int32", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize(
    ("golden", "family", "settings", "ends", "dtype"), [(*case, dtype) for case in CASES for dtype in DTYPES]
)
def test_a_weight_that_no_layer_computes_with(
    golden: str, family: str, settings: dict[str, object], ends: str, dtype: str
) -> None:
    folder, _, case = golden.partition("/")
    specs = {leaf: (shape, "float32") for leaf, shape in DrawnCases(GOLDEN / folder).shapes(case).items()}
    leaf = next(name for name in specs if name.endswith(tuple(ends.split("|"))))
    for wide in ("float32", "float64", "bfloat16") if dtype == "bool" else ():
        every = {name: (shape, wide) for name, (shape, _) in specs.items()}
        assert convert.plan_conversion(family, SpecsOnly(every), settings=settings).steps
    cast = (
        "bfloat16" if dtype == "float8_e5m2" else None
    )  # nor is what a cast makes of them what the model computes with
    changed = SpecsOnly({**specs, leaf: (specs[leaf][0], dtype)})
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(family, changed, settings=settings, dtype=cast)
    (finding,) = refused.value.findings
    assert finding.code == "dtype-mismatch" and finding.path.endswith(leaf) and dtype in finding.got
    assert finding.expected.startswith("real numbers") and ("16 bits" in finding.expected) == (dtype in DTYPES[-2:])
    assert ("scales" in finding.fix) == (dtype != "complex64")


def test_a_table_of_whole_numbers_is_converted() -> None:
    """The experts of each token, in MaxText's DeepSeek V4; the rule says so by its `dtype`."""
    source = convert.open_source(maxtext.checkpoint("deepseek4"))
    specs = {leaf: (x.spec.shape, x.spec.dtype) for leaf, x in source.leaves.items()}
    leaf = next(name for name in specs if name.endswith("tid2eid"))
    specs[leaf] = (specs[leaf][0], "int32")
    plan = convert.plan_conversion("maxtext-deepseek4", SpecsOnly(specs), settings=maxtext.settings("deepseek4"))
    assert any(step.name.endswith("tid2eid") for step in plan.steps)
