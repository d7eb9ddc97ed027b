"""A rule that would make something else than was derived is an open question, and the others are written: it was an internal error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.core.tensor_spec import TensorSpec
from convert.inference.pair import Pair
from convert.inference.rule_file import from_pair
from convert.inference.rule_file.write import WrittenRules
from convert.rules.parse import parse_rules
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH

LEAVES = {"a": (WIDTH, WIDTH), "ab": (WIDTH,), "o": (WIDTH, 3), "ob": (3,)}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.first(x)))


def _written(
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    of: str = "decided",
    *,
    parameters: tuple[str, str] = (" none ", ""),
) -> WrittenRules:
    """The rules where the writer would say one thing wrongly, and another one in the rules of `parameters`."""
    write = from_pair.write_rules

    def wrong(*args: Any, **keywords: Any) -> WrittenRules:
        made = write(*args, **keywords)
        return WrittenRules(**{**vars(made), of: re.sub(old, new, getattr(made, of)).replace(*parameters)})

    monkeypatch.setattr(from_pair, "write_rules", wrong)
    module = Net()
    return _inferred(lambda p, x: jnp.tanh(x @ p["a"] + p["ab"]) @ p["o"] + p["ob"], module, LEAVES)


def _inferred(function: Any, module: torch.nn.Module, leaves: Mapping[str, tuple[int, ...]]) -> WrittenRules:
    pair = Pair(
        lambda p, given: {"y": function(p, given["x"])},
        module,
        lambda net, given: {"y": net(given["x"])},
        lambda seed: {"x": np.random.default_rng(seed).normal(size=(5, WIDTH)).astype(np.float32)},
        "pair:pair",
    )
    specs = {name: TensorSpec(shape, "float32") for name, shape in leaves.items()}
    return from_pair.infer_rules(pair, model_of_module(module, "Net"), specs, "net", option="--reference ").written


LAYOUT = r",(.)(.)->...\2(.*\n  from: a\n)"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (LAYOUT, r",\2\1->...\2\3"),
        (LAYOUT, r",\1->...\2\3"),
        (r"linear: first", "linear: '{first,x}.{y,z}'"),
        (r"  bias: ab\n", "  bias: ob\n"),
    ],
    ids=["another layout", "not valid", "alternatives on one side", "sizes that do not fit"],
)
def test_the_tensors_of_a_wrong_rule_have_rules_of_parameters(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = _written(monkeypatch, old, new)
    assert written.open == {} and "linear: last" in written.text and "linear: first" not in written.text
    assert "from: a " in written.text and "parameter: {name: first.weight, axes: DC}" in written.text


def test_where_these_are_wrong_too_the_tensors_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = ("first.weight, axes: DC", "first.weight, axes: CD")
    written = _written(monkeypatch, LAYOUT, r",\2\1->...\2\3", parameters=swapped)
    ((tensor, why),) = written.open.items()
    assert (
        tensor == "first.weight"
        and why.startswith(from_pair.WRONG)
        and "its rule would write another number for" in why
    )
    assert why.endswith("write a rule for it by hand, and report this with both programs") and "rules.yaml" not in why
    assert "linear: last" in written.text and "parameter: first.bias" in written.text
    assert "the two programs show that it becomes first.weight; the summary says why" in written.text


def test_right_rules_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _written(monkeypatch, "nothing of the kind", "").open


def test_what_is_wrong_of_no_rule_leaves_all_open(monkeypatch: pytest.MonkeyPatch) -> None:
    written = _written(monkeypatch, "model: net\n", "model: [net]\n")
    assert set(written.open) == {f"{layer}.{tensor}" for layer in ("first", "last") for tensor in ("weight", "bias")}
    assert all(why.startswith(from_pair.WRONG) and "\\n" not in why for why in written.open.values())
    assert written.text.count("parameter: ask") == len(LEAVES)


def test_a_rule_that_no_file_can_have_is_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    written = _written(monkeypatch, r"einsum: .*(\n  from: a\n)", r"einsum: ...D,()D->...D\1", "text")
    ((module, why),) = written.open.items()
    assert module == "first" and "() is not letters" in why and why.endswith(from_pair.BY_HAND)
    parse_rules(written.text)
    assert "linear: last" in written.text and "linear: first" not in written.text


class Norms(torch.nn.Module):
    """Layers with two norms each, the last of which is another function than in the source."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm_1 = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.norm_2 = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(1))

    def forward(self, x: Any) -> Any:
        norms = (self.norm_1[0], self.norm_2[0], self.norm_1[1], torch.sin)
        for linear, norm in zip(self.linear, norms, strict=True):
            x = torch.tanh(linear(norm(x)))
        return x


@pytest.mark.slow
def test_a_norm_that_is_open_and_one_element_of_a_stacked_leaf_is_a_question() -> None:
    def norm(x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    def function(p: Any, x: Any) -> Any:
        for k in range(4):
            name = f"ln{k % 2 + 1}"
            x = jnp.tanh((norm(x) * p[f"{name}/g"][k // 2] + p[f"{name}/b"][k // 2]) @ p["w"][k])
        return x

    shapes = {f"ln{k}/{name}": (2, WIDTH) for k in (1, 2) for name in "gb"}
    written = _inferred(function, Norms(), {"w": (4, WIDTH, WIDTH), **shapes})
    parse_rules(written.text)
    alone = "it is made of part 0 of the 2 along axis 0 of ln{1,2}/g and of ln{1,2}/b, as one layer of a stack; "
    every = "a rule makes the tensors of all 2 parts at once, and those of the others are open, of another kind, or have names that no pattern joins with these"
    assert alone + every in written.open.values()


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.scale = torch.nn.Linear(WIDTH, 5, bias=False), torch.nn.Parameter(torch.ones(5))

    def forward(self, x: Any) -> Any:
        return self.k(x) * self.scale


@pytest.mark.parametrize(
    "scale",
    [jnp.abs, lambda g: g / jnp.sqrt((g * g).sum()), lambda g: jnp.where(g > 0, g, 0.1 * g), lambda g: g - g.mean()],
)
def test_numbers_of_the_drawn_leaves_are_no_rule(scale: Callable[[Any], Any]) -> None:
    """Signs, a norm and a mean of the first draw: the rules are compared on fresh leaves, too."""
    written = _inferred(lambda p, x: (x @ p["k"]) * scale(p["g"]), Scaled(), {"k": (WIDTH, 5), "g": (5,)})
    assert {*written.open} == {"scale"}, written.open
    assert "prescaled_by" not in written.text


def test_the_scale_of_a_low_rank_product_is_a_number_of_the_code() -> None:
    def function(p: Any, x: Any) -> Any:
        update = p["a"] @ p["b"]
        return x @ (p["k"] + update / jnp.sqrt((p["a"] ** 2).sum()))

    shapes = {"k": (WIDTH, 5), "a": (WIDTH, 2), "b": (2, 5)}
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, 5, bias=False))
    assert _inferred(function, module, shapes).open
    half = _inferred(lambda p, x: x @ (p["k"] + 0.5 * p["a"] @ p["b"]), module, shapes)
    assert not half.open and "scale: 0.5" in half.text


def test_a_name_that_a_rule_reads_as_a_pattern_has_no_rule() -> None:
    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = torch.nn.ModuleDict({"a{i}": torch.nn.Linear(WIDTH, WIDTH, bias=False)})
            self.o = torch.nn.Linear(WIDTH, 3, bias=False)

        def forward(self, x: Any) -> Any:
            return self.o(torch.tanh(self.m["a{i}"](x)))

    written = _inferred(lambda p, x: jnp.tanh(x @ p["a"]) @ p["o"], Named(), {"a": (WIDTH, WIDTH), "o": (WIDTH, 3)})
    assert list(written.open) == ["m.a{i}.weight"] and "has a brace or a star" in written.open["m.a{i}.weight"]
