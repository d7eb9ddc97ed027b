"""Facts that `config.json` needs, and buffers that are computed from facts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from convert import PlanError
from support.memory_source import HEAD, zeros
from support.small_plans import ONE, findings, names, plan

CONFIG = """\
model: m
title: M
axes: {D: {is: width}, F: {is: hidden}, Z: {is: nothing has it}}
facts: {epsilon: 1e-6, theta: ask, mask: ask, rope: half}
versions:
  small: {sizes: {D: 7, F: 11}, facts: {theta: 10, mask: causal}}
targets:
  hf:
    loads: H
    config: {width: $D, rope: {theta: $theta, kind: $rope}, list: [$mask, 1], eps: $epsilon, name: x}
  bare: {loads: B}
"""


def test_config_of_a_published_size() -> None:
    made = plan(ONE, zeros(w=(7, 11)), CONFIG)
    assert (made.version, made.found) == ("small", "M, small")
    assert made.config == {
        "width": 7,
        "rope": {"theta": 10, "kind": "half"},
        "list": ["causal", 1],
        "eps": 1e-6,
        "name": "x",
        "dtype": "float32",
    }
    assert plan(ONE, zeros(w=(7, 11)), CONFIG, to="bare").config is None
    assert plan(ONE, zeros(w=(7, 11)), CONFIG, settings={"theta": 5}).facts["theta"] == 5


def test_facts_that_config_needs_are_asked_for_by_name() -> None:
    made = plan(ONE, zeros(w=(7, 13)), CONFIG)
    assert (made.version, made.found) == (None, "M, no published size (D=7, F=13)")
    with pytest.raises(PlanError) as refused:
        _ = made.config
    (finding,) = refused.value.findings
    assert (finding.code, finding.rule, finding.data) == ("fact-missing", "r.yaml", {"facts": ["theta", "mask"]})
    assert "small has D=7, F=11" in finding.problem and "--set theta=... --set mask=..." in finding.fix
    with pytest.raises(PlanError) as refused:
        _ = plan(ONE, zeros(w=(7, 13)), CONFIG, settings={"mask": "full"}).config
    assert refused.value.findings[0].data == {"facts": ["theta"]}
    config = plan(ONE, zeros(w=(7, 13)), CONFIG, settings={"mask": "full", "theta": 3}).config
    assert config is not None and config["list"] == ["full", 1]


FUSED = """\
model: r-small
family: r
title: M
axes: {D: {is: width}, J: {is: heads}, W: {is: width of a head}}
facts: {heads: ask, head_width: ask, theta: ask}
products: {heads: J, head_width: W}
targets: {hf: {loads: H, config: {theta: $theta}}}
"""


def test_facts_that_give_sizes_are_asked_for_by_their_names() -> None:
    rules, tree = "- einsum: ...D,D(J W)->...(J W)\n  from: w\n  linear: m", zeros(w=(7, 6))
    with pytest.raises(PlanError) as refused:
        plan(rules, tree, FUSED)
    (finding,) = refused.value.findings
    assert (finding.code, finding.data) == ("fact-missing", {"facts": ["heads", "head_width"]})
    assert "r-small needs heads (heads), head_width (width of a head), which the tree does not hold" in finding.problem
    assert finding.fix == "give them with --set heads=... --set head_width=..., and for config.json theta"
    with pytest.raises(PlanError, match=r"^r.yaml \(r-small\) does not fit /memory: 1 problem"):
        plan(rules, tree, FUSED, settings={"heads": 4, "head_width": 3})
    assert plan(rules, tree, FUSED, settings={"heads": 2, "head_width": 3}).sizes["J"] == 2


TIMES = HEAD + "facts: {use: ask, min_timescale: 1, max_timescale: 10000}\n"
BUFFER = (
    "- from: w\n  axes: D\n  parameter: p\n- timescales: D\n  when: use\n  buffer: t.inv"  # the buffer is in line 9
)


def test_timescales_with_the_fact_true_false_unknown() -> None:
    made = plan(BUFFER, zeros(w=(8,)), TIMES, settings={"use": True})
    (step,) = [s for s in made.steps if s.name == "t.inv"]
    assert (str(step.spec), step.parts, step.arithmetic) == ("float32[4]", (), "computed from sizes")
    assert step.value is not None
    low, increment = step.value
    np.testing.assert_allclose(
        [low * math.exp(-k * increment) for k in range(4)], [10000 ** (-k / 3) for k in range(4)], rtol=1e-15
    )
    made = plan(BUFFER, zeros(w=(8,)), TIMES, settings={"use": False})
    assert (names(made), made.notes) == (["p"], ())
    made = plan(BUFFER, zeros(w=(8,)), TIMES)
    assert (names(made), made.notes) == (
        ["p"],
        (
            "t.inv is left out: the target has it only when use is true, and nothing says whether it is "
            "(--set use=true|false)",
        ),
    )


def test_timescales_that_cannot_be_computed() -> None:
    on = {"use": True}
    (finding,) = findings(BUFFER, zeros(w=(8,)), TIMES, settings={"use": "yes"})
    assert "expected true or false, got 'yes'; set it with --set use=true" in finding
    (finding,) = findings(BUFFER.replace("axes: D", "axes: E"), zeros(w=(8,)), TIMES, settings=on)
    assert finding.startswith("r.yaml:9: t.inv: ") and "its width D" in finding and "`axes`" in finding
    (finding,) = findings(BUFFER, zeros(w=(8,)), TIMES.replace("10000", "ask"), settings=on)
    assert "expected two positive numbers, got 1 and None; " in finding and "--set max_timescale=..." in finding
    with pytest.raises(PlanError, match="--set max_timescale=0: expected an integer above 0, such as 10000"):
        plan(BUFFER, zeros(w=(8,)), TIMES, settings={**on, "max_timescale": 0})
