"""One leaf of which several layers have columns in turns: of each head the queries, the keys and the values; of each anchor the box and its score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade, Part
from convert.inference.rule_file.printing import equation
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats, grades, rules

B, T, D, H = 2, 5, 7, 4
Weights = Mapping[str, Any]


def _attended(parts: Any, w: Weights) -> Any:
    q, k, v = (part.swapaxes(1, 2) for part in parts)
    heads = jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v
    return heads.swapaxes(1, 2).reshape(B, T, -1) @ w["out"]


def general(w: Weights, x: Any) -> Any:
    """The kernel is [D, heads, 3, H], as that of nnx.LinearGeneral."""
    fused = jnp.einsum("btd,dnch->btnch", x, w["qkv"]) + w["b"]
    return _attended((fused[..., k, :] for k in range(3)), w)


def flat(w: Weights, x: Any) -> Any:
    """The kernel is [D, heads * 3 * H]."""
    fused = (x @ w["qkv"] + w["b"]).reshape(B, T, -1, 3, H)
    return _attended((fused[..., k, :] for k in range(3)), w)


def grouped(w: Weights, x: Any) -> Any:
    """For each of two heads of keys and values, two of queries."""
    fused = (x @ w["qkv"] + w["b"]).reshape(B, T, 2, 4, H)
    q = fused[..., :2, :].reshape(B, T, 4, H)
    return _attended((q, *(jnp.repeat(fused[..., k, :], 2, 2) for k in (2, 3))), w)


class Attention(nn.Module):
    def __init__(self, heads: int, of_keys: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({x: nn.Linear(D, n * H) for x, n in zip("qkv", (heads, of_keys, of_keys))})  # noqa: B905
        self.out = nn.Linear(heads * H, D, bias=False)
        self.times = heads // of_keys

    def forward(self, x: Any) -> Any:
        q, *others = (layer(x).view(B, T, -1, H).transpose(1, 2) for layer in self.layers.values())
        k, v = (other.repeat_interleave(self.times, 1) for other in others)
        return self.out((torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2))


def _shapes(heads: int, columns: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"qkv": (D, *columns), "b": columns, "out": (heads * H, D)}


GENERAL = '- einsum: ...D,DNCH->...NCH, from: qkv, bias: b, linear: "layers.{C:q,k,v}"'
CASES = {
    "an axis": (general, 2, 2, (2, 3, H), GENERAL),
    "an axis of as many heads": (general, 3, 3, (3, 3, H), GENERAL),
    "flat": (flat, 2, 2, (2 * 3 * H,), GENERAL.replace("...D,DNCH->...NCH", '"...D,D(N C H)->...(N C H)"')),
    "of several sizes": (
        grouped,
        4,
        2,
        (2 * 4 * H,),
        '- einsum: "...D,D(N (H + C + C))->...(N (H + C + C))", from: qkv, bias: b, linear: layers.{q,k,v}',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_queries_keys_and_values_of_each_head_are_one_rule(case: str) -> None:
    function, heads, of_keys, columns, rule = CASES[case]
    module = Attention(heads, of_keys)
    found = derive(function, module, _shapes(heads, columns), floats(B, T, D))
    assert grades(found) == {Grade.DERIVED}
    first, _ = rules(found, module)
    assert first.replace("\n  ", ", ") == rule
    for fault in ("layers.k.weight", "layers.q.bias"):
        _assert_not_written(_exchanged(found, fault), module, fault)


def test_an_axis_of_as_many_elements_is_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer would name the heads, as there are three of them."""
    function, heads, of_keys, columns, _ = CASES["an axis of as many heads"]
    module = Attention(heads, of_keys)
    found = derive(function, module, _shapes(heads, columns), floats(B, T, D))
    monkeypatch.setattr(equation, "_place_of_split", lambda *_: 0)
    wrong = write_rules(found, model_of_module(module, "Model")).decided
    assert "->...CNH" in wrong and {one.tensor for one in compare_rules(wrong, found)} == {
        f"layers.{x}.bias" for x in "qkv"
    }


ANCHORS = 2


class Detector(nn.Module):
    """A layer for the boxes and one for the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.box, self.head = nn.Linear(D, 6), nn.Linear(6, ANCHORS * 3), nn.Module()
        self.head.score = nn.Linear(6, ANCHORS)

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.stem(x))
        return torch.cat([self.box(h), torch.exp(self.head.score(h))], -1)


def detected(w: Weights, x: Any) -> Any:
    every = (jnp.tanh(x @ w["stem"] + w["c"]) @ w["w"] + w["b"]).reshape(*x.shape[:-1], ANCHORS, 4)
    return jnp.concatenate([every[..., :3].reshape(*x.shape[:-1], -1), jnp.exp(every[..., 3])], -1)


DETECTOR = {"stem": (D, 6), "c": (6,), "w": (6, ANCHORS * 4), "b": (ANCHORS * 4,)}


def _part(number: int, target: str) -> str:
    return f'- einsum: "...C,C(E (F + 1))->...(E (F + 1))", from: w, bias: b, part: {number} of 2, linear: {target}'


def test_two_layers_may_have_columns_of_each_anchor() -> None:
    module = Detector()
    found = derive(detected, module, DETECTOR, floats(B, T, D))
    assert grades(found) == {Grade.DERIVED}
    written = [rule.replace("\n  ", ", ") for rule in rules(found, module)]
    assert written[1:] == [_part(1, "box"), _part(2, "head.score")]
    for fault in ("box.weight", "box.bias"):
        _assert_not_written(_exchanged(found, fault), module, fault)


def test_the_target_may_have_the_boxes_number_by_number() -> None:
    module = Detector()
    found = derive(detected, module, DETECTOR, floats(B, T, D))
    for name in ("box.weight", "box.bias"):
        found = _moved(found, name, lambda at: at.reshape(ANCHORS, 3, -1).swapaxes(0, 1).ravel())
    written = [rule.replace("\n  ", ", ") for rule in rules(found, module)]
    assert written[1:] == [_part(1, '{module: box, axes: "(F E)C"}'), _part(2, "head.score")]


def test_a_leaf_of_two_open_layers_is_left_out_once() -> None:
    module = Detector()
    found = derive(detected, module, DETECTOR, floats(B, T, D))
    tensors = (t if t.name.startswith("stem") else replace(t, grade=Grade.OPEN) for t in found.tensors)
    some = replace(found, tensors=tuple(tensors))
    written = write_rules(some, model_of_module(module, "Model"))
    assert written.text.count("# question: ") == 2
    assert compare_rules(written.decided, some, ("box", "head.score")) == []


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.box, self.score = (nn.Conv2d(5, ANCHORS * n, (3, 2), padding=1) for n in (3, 1))

    def forward(self, x: Any) -> Any:
        x = x.permute(0, 3, 1, 2)
        return torch.cat([self.box(x), torch.exp(self.score(x))], 1)


def convolved(w: Weights, x: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NCHW")
    box, score = (
        jax.lax.conv_general_dilated(x, w[f"{n}/w"], (1, 1), [(1, 1)] * 2, dimension_numbers=numbers)
        + w[f"{n}/b"][:, None, None]
        for n in ("box", "score")
    )
    return jnp.concatenate([box, jnp.exp(score)], 1)


def test_convolutions_have_a_rule_for_each_tensor() -> None:
    """Their one leaf is made here of those of a pair with a leaf for each, as the search does not find it."""
    columns = {"box": np.s_[..., :3], "score": np.s_[..., 3:]}
    kinds = {"w": (3, 2, 5), "b": ()}
    apart = {f"{n}/{k}": (*of, ANCHORS * (3 if n == "box" else 1)) for n in columns for k, of in kinds.items()}
    module = Convolutions()
    found = derive(convolved, module, apart, floats(B, 4, 3, 5))
    assert grades(found) == {Grade.DERIVED}
    fused = {kind: (*of, ANCHORS * 4) for kind, of in kinds.items()}

    def of_one_leaf(part: Part) -> Part:
        name, _, kind = part.leaf.partition("/")
        every = np.arange(np.prod(fused[kind])).reshape(*kinds[kind], ANCHORS, 4)
        return replace(part, leaf=kind, positions=every[columns[name]].ravel()[part.positions])

    tensors = (replace(t, parts=tuple(map(of_one_leaf, t.parts))) for t in found.tensors)
    found = replace(found, leaves=fused, tensors=tuple(tensors))
    assert [rule.replace("\n  ", ", ") for rule in rules(found, module)] == [
        '- from: w, axes: PQD(C (E + 1)), part: 1 of 2, parameter: {name: box.weight, axes: "(C E)DPQ"}',
        "- from: b, axes: (C (E + 1)), part: 1 of 2, parameter: box.bias",
        "- from: w, axes: PQD(C (E + 1)), part: 2 of 2, parameter: {name: score.weight, axes: CDPQ}",
        "- from: b, axes: (C (E + 1)), part: 2 of 2, parameter: {name: score.bias, axes: C}",
    ]


def _moved(found: Derivation, name: str, move: Callable[[Any], Any]) -> Derivation:
    """A derivation in which the elements of a tensor lie in another order."""
    tensor = found.tensor(name)
    (part,) = tensor.parts
    order = np.argsort(part.elements)
    other = replace(part, elements=part.elements[order], positions=move(part.positions[order]))
    return replace(found, tensors=tuple(replace(t, parts=(other,)) if t is tensor else t for t in found.tensors))


def _exchanged(found: Derivation, name: str) -> Derivation:
    """A derivation in which the first two elements of a tensor lie in each other's place."""
    return _moved(found, name, lambda at: np.concatenate([at[1::-1], at[2:]]))


def _assert_not_written(wrong: Derivation, module: nn.Module, name: str) -> None:
    """The rules that are right for all else do not give it, and none is written for it."""
    written = write_rules(wrong, model_of_module(module, "Model"))
    assert name in written.open
    assert compare_rules(written.decided, wrong, written.open) == []
