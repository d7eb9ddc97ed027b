"""Burn (tracel-ai/burn) as a target: what its modules are called and hold, and which of them a rule's layer is.

All of it is read from Burn's source at `COMMIT`, and compared with the releases since burn-store exists (0.19.0, 0.20.1, 0.21.0);
``docs/guides/burn.md`` names the file for each statement. Burn itself is not run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from convert.core.path_pattern import parse_pattern
from convert.layers import (
    BatchNorm,
    Convolution,
    ConvTranspose,
    DataPath,
    Embedding,
    GroupNorm,
    Linear,
    Recurrent,
    RMSNorm,
    Rule,
    TargetLayer,
)
from convert.layers.norm.layer_rms import Norm
from convert.rules.file import RuleFile, Target

COMMIT = "tracel-ai/burn 2c06be351006 (0.22.0-pre.2)"
VERIFIED = f"Burn's as its source at {COMMIT} has them; Burn was not run"


@dataclass(frozen=True)
class Conventions:
    """How a file is laid out for burn-store.

    Attributes:
        called: what loads it, for people.
        transposed: whether a Linear's weight is (in, out), as Burn has it, and not (out, in), as PyTorch has it.
        norms: role of a norm's tensor -> what it is called, where it is not its role.
        format: in the header of the file. burn-store writes ``safetensors`` and reads none; ``pt`` would say that PyTorch code can
            load it, which would have square weights the wrong way round.
    """

    called: str
    transposed: bool
    norms: Mapping[str, str]
    format: str


# burn-nn modules/linear.rs (`Linear.weight`), modules/norm/*.rs; burn-store adapter.rs (`PyTorchToBurnAdapter`)
CONVENTIONS: Mapping[str, Conventions] = {
    "burn": Conventions(
        "Burn: burn-store's SafetensorsStore, without an adapter",
        True,
        {"weight": "gamma", "bias": "beta"},
        "safetensors",
    ),
    "burn_pytorch": Conventions("Burn: burn-store's SafetensorsStore with PyTorchToBurnAdapter", False, {}, "pt"),
}
# burn-store safetensors/store.rs, `safetensor_dtype_to_burn`
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint8", "bool")  # fmt: skip
# burn-nn modules/rnn/gru.rs, lstm/lstm_module.rs, basic.rs: fields of the modules; ours are torch's letters
GATES: Mapping[str, Mapping[str, str]] = {
    "gru": {"r": "reset_gate", "z": "update_gate", "n": "new_gate"},
    "lstm": {"i": "input_gate", "f": "forget_gate", "g": "cell_gate", "o": "output_gate"},
    "rnn": {"h": "gate"},
}
TRANSFORMS: Mapping[
    str, tuple[str, str]
] = {  # burn-nn modules/rnn/gate_controller.rs; role -> its Linear, and the parameter
    "weight_ih": ("input_transform", "weight"),
    "weight_hh": ("hidden_transform", "weight"),
    "bias_ih": ("input_transform", "bias"),
    "bias_hh": ("hidden_transform", "bias"),
}
QUERY_KEY_VALUE, OUTPUT = "{query,key,value}", "output"  # burn-nn modules/attention/mha.rs: fields
IN_PROJ = {"in_proj_weight", "in_proj_bias"}  # of torch.nn.MultiheadAttention: queries, keys and values in one
NAMES = {Linear: "Linear", Convolution: "Conv", ConvTranspose: "ConvTranspose", Embedding: "Embedding"}


def conventions_of(target: Target) -> Conventions | None:
    """How the target's file is laid out; None for PyTorch code."""
    return CONVENTIONS.get(target.conventions)


def with_burn(rules: RuleFile, to: str | None) -> RuleFile:
    """The rules, with what their layers are in Burn where `to` asks for that.

    Every file goes to ``burn`` and ``burn_pytorch``: under the names of its first target, with Burn's own layers in place of
    torch's. A target that says ``conventions: burn`` has names of its own.
    """
    first = next(iter(rules.targets.values()))
    if to is None or to in rules.targets:
        target = rules.targets[to] if to else first
        if target.conventions not in CONVENTIONS:
            return rules
        return _with_layers(rules, target, target.name)
    if to not in CONVENTIONS:
        return rules
    target = Target(to, f"{CONVENTIONS[to].called}; modules called as in {first.loads}", {}, conventions=to)
    return _with_layers(rules, target, first.name)


def _with_layers(rules: RuleFile, target: Target, like: str) -> RuleFile:
    """The rules with a target whose layers are those of the target `like`, as Burn has them."""
    changed = []
    alone = all(other.conventions in CONVENTIONS for other in rules.targets.values())
    for rule in rules.rules:
        layer = rule.layer(like)
        if layer is not None:
            own = alone or (like == target.name and None not in rule.targets)
            rule = replace(rule, targets={**rule.targets, target.name: _as_burn(rule, layer, own=own)})
        changed.append(rule)
    return replace(rules, targets={**rules.targets, target.name: target}, rules=tuple(changed))


def _as_burn(rule: Rule, layer: TargetLayer, *, own: bool) -> TargetLayer:
    """Where a rule's tensors go in Burn's own layers.

    Args:
        own: whether the rule says so of this target; otherwise it speaks of PyTorch code, too, whose names for the parameters of a
            norm, and whose ``1+weight``, are not Burn's.
    """
    if layer.packed_in is not None and (packed := _unpacked(rule, layer)):
        layer = replace(layer, path=parse_pattern(f"{layer.packed_in.text}.{packed}"), names={})
    if type(rule.kind) in NAMES and not own and _is_plain(layer):
        layer = replace(layer, computes=None)
    if isinstance(rule.kind, Norm) and not own:
        layer = replace(layer, names={}, multiplies_by="weight", has=None)
    if rule.rope is not None and layer.rope is None:  # modules/rope_encoding.rs: x is reshaped to (.., d / 2, 2)
        layer = replace(layer, rope="interleaved")
    return layer


def _is_plain(layer: TargetLayer) -> bool:
    """Whether PyTorch code of its own computes what a Linear or a convolution does, as transformers' Conv1D: only the weight is laid
    out otherwise."""
    own = layer.computes is not None and not any(role != name for role, name in layer.names.items())
    return own and not getattr(layer.computes, "batch", "")


def _unpacked(rule: Rule, layer: TargetLayer) -> str:
    """Which Linears of Burn's MultiHeadAttention these become; empty when they are none, or are called so already."""
    assert layer.packed_in is not None
    if layer.path == layer.packed_in:
        return QUERY_KEY_VALUE if len(layer.path.groups) < len(rule.path.groups) else ""
    return "" if layer.path.text.endswith(f".{QUERY_KEY_VALUE}") else OUTPUT


def refusal(rule: Rule, layer: TargetLayer) -> str:
    """Why Burn has no layer for this rule; empty when it has one. The message is the bare fact."""
    kind, called = rule.kind, layer.path.text
    if isinstance(kind, DataPath):
        return f"{called}: Burn has no {kind.module}; leave the path's coefficients to your own code"
    if isinstance(kind, Recurrent) and kind.cell.word == "gru" and kind.cell.reset == "none":
        return (
            f"{called.rpartition('.')[0]}: {kind.cell.name} computes n = {kind.cell.equations['n']}, and Burn's Gru has a reset gate wherever it "
            "stands: n = tanh(W x + b + r * (U h + c)), or with reset_after false n = tanh(W x + b + U (r * h) + c). No weights "
            "make the two equal"
        )
    if layer.parametrization:
        return f"{called}: Burn's layers hold one weight, and the target keeps the two of a weight norm; leave `parametrization` out, and they are folded"
    if layer.packed_in is not None and layer.names:
        return (
            f"{called}: queries, keys and values have widths of their own here, and Burn's MultiHeadAttention has one, d_model, for "
            "all three; give the target `projections:`, as Linears of your own module"
        )
    odd = [name for role, name in layer.names.items() if name != role]
    named = f"{' and '.join(odd)} {'is no parameter' if len(odd) == 1 else 'are no parameters'}"
    if type(kind) in NAMES and odd and layer.computes is None:
        packed = "write the layer as an `attention:` rule, from which Burn's MultiHeadAttention follows, or " if IN_PROJ & set(odd) else ""  # fmt: skip
        return (
            f"{called}: {named} of Burn's {NAMES[type(kind)]}, which has `weight` and `bias`; {packed}declare a target with "
            "`conventions: burn` and the names of your Rust module"
        )
    if isinstance(kind, Norm):
        if odd:
            return f"{called}: {named} of Burn's norms, which have `gamma` and `beta`; leave the names out"
        if layer.multiplies_by != "weight":
            return (
                f"{called}: Burn's norms multiply by gamma, not by {layer.multiplies_by}; leave `multiplies_by` out of the target, and "
                "1 is added once"
            )
        alone = isinstance(kind, BatchNorm) or (isinstance(kind, GroupNorm) and layer.has == "weight")
        if layer.has not in (None, "weight and bias") and alone:
            choice = "both, always" if isinstance(kind, BatchNorm) else "both or neither"
            return f"{called}: Burn's {type(kind).__name__} has gamma and beta, {choice}; leave `parameters` out, and what the source has not is written"
        if isinstance(kind, RMSNorm) and "bias" in rule.sources:
            return f"{called}: Burn's RmsNorm has gamma alone, and {rule.sources['bias']} would be lost"
        if isinstance(kind, RMSNorm) and kind.epsilon == 0:
            return f"{called}: Burn's RmsNorm panics at an epsilon of 0; write a module of your own, and keep its scale as a `parameter:`"
    return ""
