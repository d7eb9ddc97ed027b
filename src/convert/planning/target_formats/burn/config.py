"""Constructors of Burn's modules: epsilons, groups, biases, padding, the place of the reset gate.

No weight holds these, and Burn's defaults differ from flax's. The header of the file and the model card name them as the call of
the module's configuration, with ``..`` for sizes, which the tensors determine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from convert.layers import (
    BatchNorm,
    Convolution,
    ConvTranspose,
    GroupNorm,
    LayerNorm,
    Linear,
    Recurrent,
    Rule,
    TargetLayer,
)
from convert.layers.base import Step
from convert.layers.conv.conv import Convolving
from convert.layers.conv.padding import pads_by_rest, pads_shown, torch_transposed
from convert.planning.target_formats.base import LayerFacts
from convert.planning.target_formats.burn.modules import GATES, OUTPUT

EPSILON = 1e-5  # of all of Burn's norms: burn-nn modules/norm/{layer,rms,group,batch}.rs, `#[config(default = 1e-5)]`
MOMENTUM = 0.1  # norm/batch.rs; the share that a step replaces, as in torch
GELU = "Gelu::new_approximate()"  # activation/gelu.rs, since 0.21; Gelu::new() is the exact one, JAX's default is this
CONSTRUCTOR = "burn"  # key of a layer's facts
_SUFFIX = re.compile(r"\.l[^.]*$")
_TORCH_KEYS = ("target_padding", "allowed_padding", "output_padding", "module")  # of a layer's facts, in torch's terms


def constructor_notes(layers: Sequence[LayerFacts]) -> Iterator[str]:
    """Name the layers that Burn's defaults do not fit; layers with the same constructor are one note."""
    modules: dict[str, list[str]] = {}
    for layer in layers:
        if layer.constructor and not layer.is_default:
            modules.setdefault(layer.constructor, []).append(layer.module)
    for constructor, found in modules.items():
        names = list(dict.fromkeys(found))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        verb = "is" if len(names) == 1 else "are"
        yield f"in Burn {', '.join(names[:3])}{more} {verb} {constructor}: the defaults compute something else"


def module_name(layer: Mapping[str, Any]) -> str:
    """Return the module of a layer's facts; for a recurrent layer without the suffix that torch adds to its tensors."""
    return _SUFFIX.sub("", str(layer["layer"])) if layer["kind"] in GATES else str(layer["layer"])


def layer_facts(
    rule: Rule, layer: TargetLayer, facts: Mapping[str, Any], steps: Sequence[Step], sizes: Mapping[str, int]
) -> LayerFacts:
    """Replace torch's facts of a layer by the constructor of its module in Burn, where its tensors do not say everything.

    Args:
        facts: as for torch.
        steps: tensors of the layer, as torch has them.
        sizes: of the rule file's letters.
    """
    kept = {key: value for key, value in facts.items() if key not in _TORCH_KEYS}
    name = layer.path.text.removesuffix(f".{OUTPUT}") if layer.packed_in is not None else layer.path.text
    kind = rule.kind
    if layer.packed_in is not None and isinstance(kind, Linear):
        if not layer.path.text.endswith(f".{OUTPUT}"):
            return LayerFacts(name, kept)
        heads = next(iter(kind.equations.values())).inputs
        count = sizes.get(heads[0], "..") if len(heads) > 1 else ".."
        module, text, default = layer.packed_in.text, f"MultiHeadAttentionConfig::new(.., {count})", True
    else:
        text, default = _call(rule, facts, steps, sizes)
        if facts.get("activation") == "gelu_tanh":
            text, default = f"{text}, followed by {GELU}" if text else f"followed by {GELU}", False
        module = module_name({"layer": layer.path.text, "kind": rule.kind_name})
    if not text:
        return LayerFacts(name, kept)
    return LayerFacts(name, {**kept, CONSTRUCTOR: text}, text, default, module)


def _call(rule: Rule, facts: Mapping[str, Any], made: Sequence[Step], sizes: Mapping[str, int]) -> tuple[str, bool]:
    """Return the constructor of the module, and whether it passes nothing but Burn's defaults."""
    kind = rule.kind
    if isinstance(kind, LayerNorm):
        biased = any(step.role == "bias" for step in made)
        call, default = _norm("LayerNormConfig::new(..)", facts)
        return call + ("" if biased else ".with_bias(false)"), default and biased
    if isinstance(kind, GroupNorm):
        call, default = _norm(f"GroupNormConfig::new({facts.get('num_groups', '..')}, ..)", facts)
        bare = facts.get("target_has") == "nothing"
        return call + (".with_affine(false)" if bare else ""), default and not bare
    if isinstance(kind, BatchNorm):
        call, default = _norm("BatchNormConfig::new(..)", facts)
        momentum = facts.get("target_momentum")
        passed = momentum is not None and momentum != MOMENTUM
        return call + (f".with_momentum({momentum!r})" if passed else ""), default and not passed
    if isinstance(kind, Recurrent):
        return _recurrent(kind, made)
    if isinstance(kind, Convolution | ConvTranspose) and kind.geometry is not None and _known(kind, sizes):
        return _convolution(kind, sizes)
    if kind.burn_config:
        return _norm(f"{kind.burn_config}::new(..)", facts)
    return "", True


def _norm(call: str, facts: Mapping[str, Any]) -> tuple[str, bool]:
    epsilon = facts.get("epsilon")
    if epsilon is None:
        return f"{call}.with_epsilon(..)", False
    return f"{call}.with_epsilon({float(epsilon)!r})", epsilon == EPSILON


def _recurrent(kind: Recurrent, made: Sequence[Step]) -> tuple[str, bool]:
    word = {"gru": "Gru", "lstm": "Lstm", "rnn": "Rnn"}[kind.cell.kind_name]
    both = {step.group.suffix.endswith("_reverse") for step in made if step.group is not None} == {True, False}
    biased = any(step.role == "bias_ih" for step in made)
    call, default = f"{'Bi' if both else ''}{word}Config::new(.., {str(biased).lower()})", True
    if word == "Gru":
        after = kind.cell.reset == "after"
        call, default = f"{call}.with_reset_after({str(after).lower()})", after
    if word == "Rnn" and kind.cell.activation != "tanh":
        call, default = f"{call}.with_hidden_activation(ActivationConfig::{kind.cell.activation.capitalize()})", False
    return call, default


# ---- convolutions: burn-nn padding.rs, modules/conv/*.rs


def _known(kind: Convolving, sizes: Mapping[str, int]) -> bool:
    return all(kind.letter(axis) in sizes for axis in kind.numbers.spatial)


def _convolution(kind: Convolution | ConvTranspose, sizes: Mapping[str, int]) -> tuple[str, bool]:
    """Burn's Same is ONNX's SAME_UPPER, which is JAX's SAME, but counts no dilation; its Explicit has both ends of each axis in
    one and two dimensions (0.21 and later), and one number for both in three. A transposed one has torch's two arguments."""
    assert kind.geometry is not None
    geometry, rank = kind.geometry, len(kind.numbers.spatial)
    kernel = kind.kernel_sizes(sizes)
    transposed = isinstance(kind, ConvTranspose)
    calls: list[str] = []
    if set(geometry.strides) != {1}:
        calls.append(f".with_stride({_array(geometry.strides)})")
    if set(geometry.dilation) != {1}:
        calls.append(f".with_dilation({_array(geometry.dilation)})")
    if (groups := _groups(kind, sizes)) != 1:
        calls.append(f".with_groups({groups})")
    rest = ""
    if transposed:
        arguments = torch_transposed(geometry, kernel)
        calls += [f".with_padding({_array(arguments.padding)})"] if any(arguments.padding) else []
        calls += [f".with_padding_out({_array(arguments.output_padding)})"] if any(arguments.output_padding) else []
        if any(low or high for low, high in arguments.extra):
            rest = (
                f", then take {', '.join(map(str, arguments.extra))} off the ends of {' '.join(kind.numbers.spatial)}"
            )
            late = any(n < 0 for pair in arguments.extra for n in pair)
            rest += " (negative: add zeros, before the bias)" if late else ""
    else:
        padding, rest = _padding(kind, kernel)
        calls += [f".with_padding(PaddingConfig{rank}d::{padding})"] if padding != "Valid" else []
    call = f"Conv{'Transpose' if transposed else ''}{rank}dConfig::new(..){''.join(calls)}{rest}"
    return call, not calls and not rest


def _groups(kind: Convolving, sizes: Mapping[str, int]) -> int | str:
    try:
        return kind.group_count(sizes)
    except KeyError:
        return ".."


def _padding(kind: Convolving, kernel: tuple[int, ...]) -> tuple[str, str]:
    """What Burn's padding is, and what must be done by hand before the layer."""
    assert kind.geometry is not None
    geometry, rank = kind.geometry, len(kernel)
    if geometry.padding == "SAME" and set(geometry.dilation) == {1} and rank < 3:
        return "Same", ""
    found = [pads_by_rest(geometry, kernel, axis) for axis in range(rank)]
    fixed = [next(iter(by_rest.values())) for by_rest in found if len(set(by_rest.values())) == 1]
    if len(fixed) == rank and all(n >= 0 for pair in fixed for n in pair):
        if not any(n for pair in fixed for n in pair):
            return "Valid", ""
        if rank < 3:
            return f"Explicit({', '.join(str(pair[end]) for end in (0, 1) for pair in fixed)})", ""
        if all(low == high for low, high in fixed):
            return f"Explicit({', '.join(str(low) for low, _ in fixed)})", ""
    shown = "; ".join(
        pads_shown(kind.numbers.spatial[k], by_rest, geometry.strides[k]) for k, by_rest in enumerate(found)
    )
    return "Valid", f", behind zeros (low, high) {shown} (negative: taken off)"


def _array(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"[{', '.join(map(str, numbers))}]"
