"""Options of a conversion: one dataclass, whose fields are also keyword arguments."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from convert import plan_conversion
from convert.planning.options import ConversionOptions, OptionKeywords
from convert.planning.planner import make_plan
from support.memory_source import MemorySource, rule_file

RULES = rule_file("- from: w\n  parameter: p")
TREE = MemorySource({"w": np.zeros(3, np.float32)})


def test_keywords_are_the_fields() -> None:
    assert [field.name for field in fields(ConversionOptions)] == [*OptionKeywords.__annotations__]


def test_keywords_take_precedence() -> None:
    options = ConversionOptions(dtype="float16")
    assert make_plan(RULES, TREE, options).dtype == plan_conversion(RULES, TREE, options).dtype == "float16"
    assert make_plan(RULES, TREE, options, dtype="bfloat16").dtype == "bfloat16"
    assert plan_conversion(RULES, TREE, options, dtype="bfloat16").steps[0].spec.dtype == "bfloat16"


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="dtyp"):
        plan_conversion(RULES, TREE, dtyp="float16")  # type: ignore[call-arg]
