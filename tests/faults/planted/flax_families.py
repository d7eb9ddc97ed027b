"""Faults of any Flax family of transformers: in the written tensors, in config.json and in the rules of all families.

They are made from the plan of the family's golden: the tensors follow from the kinds of layers, the shapes, and the few names that
many classes share. The Flax side is a recording of the outputs, so that the model level names an output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from convert.layers.base import Step
from convert.planning.modules.expand import class_table
from faults import flax_cases
from faults.expected import HUGGING, Fault
from faults.planted.in_files import OTHER, gone
from faults.plants import InDirectory, InFile, InRule, Plant, Tensors, exchange, tensor
from support import flax_families

Edit = Callable[[Tensors], None]
OTHERS = "other values in the file"
RECORDED = 2e-6  # relative: the recording is in float32
KEYS = {"q_proj": "k_proj", "query": "key", "q_lin": "k_lin", "q": "k"}
POSITIONS = re.compile(r"position|wpe")
ACTIVATION = re.compile(r"hidden_act|activation_function|activation|feed_forward_proj|dense_act_fn")
EPSILON = re.compile(r"layer_norm_eps(ilon)?")
HEADS = re.compile(r"num_attention_heads|encoder_attention_heads|n_head|n_heads|attention_heads")
HEAD = re.compile(r"lm_head|decoder\.weight|projector")
PARTS = ("encoder", "decoder", "text_config", "vision_config")
ORDERS = {2: "halves swapped", 3: "thirds in another order"}  # of two heads, of three
PLAIN = ("multiplies_by: scale", "multiplies_by: 1+scale")
LEAVES = ('from: "{module}/scale"\n  bias: "{module}/bias"', 'from: "{module}/bias"\n  bias: "{module}/scale"')
SPATIAL = ("HWIO->NHWC\n  axes: PQIO", "WHIO->NHWC\n  axes: PQIO")


@dataclass(frozen=True)
class Converted:
    """What a case is converted to."""

    case: str

    @cached_property
    def steps(self) -> dict[str, Step]:
        return {step.name: step for step in flax_cases.plan(self.case).steps}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return flax_cases.plan(self.case).config or {}

    @cached_property
    def output(self) -> str:
        """The first output that was recorded."""
        return next(iter(flax_families.values(self.case, "out")))

    @cached_property
    def kinds(self) -> set[str]:
        return {step.kind_name for step in self.steps.values()}

    @cached_property
    def ties_its_head(self) -> bool:
        plan = flax_cases.plan(self.case)
        (name,) = self.config["architectures"]
        tied = class_table(plan.rules)["classes"][name]["tied"]
        return self.config.get("tie_word_embeddings", True) and any(map(HEAD.search, tied))

    def first(self, kind: str, fits: Callable[[Step], Any]) -> str:
        """The name of the first such tensor of a kind of layer; empty if there is none."""
        return next((name for name, step in self.steps.items() if step.kind_name == kind and fits(step)), "")

    def file(self, name: str, edit: Edit, at: str, diagnosis: str, model: str = OTHER) -> Fault:
        return self.fault(name, InFile(edit), "weights", at, diagnosis, model)

    def rule(self, name: str, edit: tuple[str, str], diagnosis: str) -> Fault:
        return self.fault(name, InRule((edit,)), "model", self.output, diagnosis)

    def config_fault(self, name: str, at: str, stated: Mapping[str, Any], diagnosis: str, model: str = "") -> Fault:
        return self.fault(name, InDirectory("config.json", stated), "layers", at, diagnosis, model)

    def fault(self, name: str, plant: Plant, level: str, at: str, diagnosis: str, model: str | None = None) -> Fault:
        seen = None if model is None else (self.output, model)
        return Fault(name, self.case, HUGGING, plant, level, at, diagnosis, seen, RECORDED)


def kernels(of: Converted) -> Iterator[Fault]:
    """A kernel whose shape does not show that it is transposed."""

    def square(step: Step) -> bool:
        *_, rows, columns = (0, *step.spec.shape)
        return step.role == "weight" and rows == columns > 1

    turned = lambda x: np.swapaxes(x, -1, -2)  # noqa: E731
    if name := of.first("linear", square):
        yield of.file("a square kernel transposed", tensor(name, turned), name, "transposed")
    elif name := of.first("conv", square):
        yield of.file("height and width of a kernel exchanged", tensor(name, turned), name, "spatial axes exchanged")


def layers(of: Converted) -> Iterator[Fault]:
    """Two numbered modules with tensors of the same names and shapes."""

    def below(start: str) -> dict[str, Any]:
        return {name.removeprefix(start): step.spec for name, step in of.steps.items() if name.startswith(start)}

    starts = {name[: found.start()] for name in sorted(of.steps) for found in re.finditer(r"(?<=\.)0\.", name)}
    for start in sorted(starts, key=len):
        one, other = f"{start}0.", f"{start}1."
        if below(one) == below(other):
            first = next(name for name in of.steps if name.startswith(one))
            yield of.file("two layers exchanged", exchange(one, other), first, "of another layer", OTHERS)
            return


def queries(of: Converted) -> Iterator[Fault]:
    """The kernels of queries and keys, and the heads within the one of the queries."""
    heads = next((value for _, key, value in stated(of) if HEADS.fullmatch(key) or key == "num_heads"), None)
    for name, step in of.steps.items():
        around, _, last = name.removesuffix(".weight").rpartition(".")
        key = f"{around}.{KEYS.get(last)}.weight"
        if not name.endswith(".weight") or key not in of.steps or of.steps[key].spec != step.spec:
            continue
        first = next(one for one in of.steps if one in (name, key))
        yield of.file("queries and keys exchanged", exchange(name, key), first, "of another tensor", OTHERS)
        if heads in ORDERS and step.spec.shape[0] % heads == 0:
            width = step.spec.shape[0] // heads
            order = np.r_[width : 2 * width, :width, 2 * width : step.spec.shape[0]]
            yield of.file(
                "heads in another order", tensor(name, partial(np.take, indices=order, axis=0)), name, ORDERS[heads]
            )
        return


def norms(of: Converted) -> Iterator[Fault]:
    kinds = of.kinds & {"layer_norm", "batch_norm"}
    for kind in sorted(kinds, reverse=True)[:1]:
        name = of.first(kind, lambda step: step.role == "weight")
        bias = f"{name.removesuffix('weight')}bias"
        yield of.file(
            "scale and bias of a norm exchanged", exchange(name, bias), name, "scale and bias exchanged", OTHERS
        )
        yield of.rule("scales and biases of norms exchanged", LEAVES, "scale and bias exchanged")
    if kinds | (of.kinds & {"rms_norm"}):
        yield of.rule("1+scale on plain norms", PLAIN, "1+scale on a plain norm")


def biases(of: Converted) -> Iterator[Fault]:
    """Of a layer whose bias counts: that of keys adds the same to all scores of a query."""
    name = of.first("linear", lambda step: step.role == "bias" and step.name.split(".")[-2] not in KEYS.values())
    if name:
        yield of.fault("a bias is missing", InFile(gone(name)), "coverage", name, "not in the file")
        yield of.file("a bias is zero", tensor(name, np.zeros_like), name, "bias dropped")


def tables(of: Converted) -> Iterator[Fault]:
    def rolled(rows: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: np.roll(x, rows, axis=0)

    def long(step: Step) -> bool:
        return step.spec.shape[0] > 3

    if name := of.first("embedding", lambda step: long(step) and not POSITIONS.search(step.name)):
        yield of.file("rows of a table begin one later", tensor(name, rolled(1)), name, "rows rolled")
    if name := of.first("embedding", lambda step: long(step) and POSITIONS.search(step.name)):
        yield of.file("positions begin two later", tensor(name, rolled(2)), name, "rows rolled")


def convolutions(of: Converted) -> Iterator[Fault]:
    if of.first("conv", lambda step: len(step.spec.shape) == 4 and step.spec.shape[-1] > 1):
        yield of.rule("height and width of kernels exchanged", SPATIAL, "spatial axes exchanged")


def stated(of: Converted) -> Iterator[tuple[str, str, Any]]:
    """The keys of config.json and of its parts: part, key, value."""
    yield from (("", key, value) for key, value in of.config.items())
    for part in PARTS:
        if isinstance(inner := of.config.get(part), Mapping):
            yield from ((part, key, value) for key, value in inner.items())


def another_activation(old: str) -> str:
    """Gated as the old one."""
    start, dash, last = old.rpartition("-")
    return f"{start}{dash}{'gelu' if last == 'relu' else 'relu'}"


def configured(of: Converted) -> Iterator[Fault]:
    def other(keys: re.Pattern[str], change: Callable[[Any], Any]) -> tuple[str, dict[str, Any]]:
        """The first of these keys, and all of its part with other values."""
        found = [(part, key, value) for part, key, value in stated(of) if keys.fullmatch(key) and value is not None]
        new = {key: change(value) for part, key, value in found if part == found[0][0]}
        if not found:
            return "", {}
        part = found[0][0]
        at = ".".join(filter(None, (part, min(new))))
        return at, {part: {**of.config[part], **new}} if part else new

    at, new = other(ACTIVATION, another_activation)
    if at:
        yield of.config_fault("another activation", at, new, at.rpartition(".")[2])
    at, new = other(EPSILON, lambda _: 1e-2)
    if at:
        # The rules state it of each norm; the check knows the parts of a composite that hold one by their names.
        fact = "layer_norm" in of.kinds and at.startswith(("layer_norm", "text_config."))
        yield of.config_fault("another epsilon", at, new, "epsilon" if fact else at.rpartition(".")[2])
    at, new = other(HEADS, lambda _: 1)
    if at:
        yield of.config_fault("one head", at, new, at.rpartition(".")[2])
    if of.ties_its_head:
        key = "tie_word_embeddings"
        scaled = (
            "values multiplied by a number" if "rms_norm" in of.kinds else ""
        )  # T5 scales the outputs of a tied head
        yield of.config_fault("the tied head is its own", key, {key: False}, key, scaled)


def faults_of(case: str) -> Iterator[Fault]:
    """The faults of a case, those that it has the layers and keys for."""
    for kind in (kernels, layers, queries, norms, biases, tables, convolutions, configured):
        yield from kind(Converted(case))
