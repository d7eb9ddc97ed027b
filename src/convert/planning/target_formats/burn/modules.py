"""Burn (tracel-ai/burn) as a target: what its modules are called and hold, and which of them a rule's layer is.

All of it is read from Burn's source at `COMMIT`, and compared with the releases since burn-store exists (0.19.0, 0.20.1, 0.21.0);
``docs/guides/burn.md`` names the file for each statement. Burn itself is not run here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from convert.core.findings import Finding
from convert.core.path_pattern import parse_pattern
from convert.layers import (
    BatchNorm,
    Convolution,
    ConvTranspose,
    DataPath,
    Embedding,
    Linear,
    Recurrent,
    RMSNorm,
    Rule,
    TargetLayer,
)
from convert.layers.norm.layer_rms import Norm
from convert.rules.file import RuleFile, Target

COMMIT = "tracel-ai/burn 2c06be351006 (0.22.0-pre.2)"
# burn-nn modules/norm/*.rs: fields of the norms; ours are torch's
NORM_PARAMETERS: Mapping[str, str] = {"weight": "gamma", "bias": "beta"}
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


def with_burn_layers(rules: RuleFile, target: Target) -> RuleFile:
    """Return the rules with the layers of `target` as Burn has them.

    A target that the rule file does not declare takes the names of the file's first target, and Burn's layers in place of torch's.
    """
    like = target.name if target.name in rules.targets else next(iter(rules.targets))
    burn_only = all(other.format == target.format for other in rules.targets.values())
    changed = []
    for rule in rules.rules:
        layer = rule.layer(like)
        if layer is not None:
            own = burn_only or (like == target.name and None not in rule.targets)
            others = [one.layer(like) for one in rule.each_layer(like)[1:]]
            made = tuple(_as_burn(rule, other, own=own) for other in others if other is not None)
            targets = {**rule.targets, target.name: _as_burn(rule, layer, own=own)}
            rule = replace(rule, targets=targets, also={**rule.also, target.name: made})
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


def refusal(rule: Rule, layer: TargetLayer) -> Finding | None:
    """Explain why Burn has no layer for a rule; None when it has one."""
    kind, path = rule.kind, layer.path.text

    def no_layer(problem: str, fix: str, path: str = path) -> Finding:
        return Finding("burn-has-no-layer", problem, rule=rule.at.line_only, path=path, fix=fix)

    if isinstance(kind, DataPath):
        return no_layer(f"Burn has no {kind.module}", "leave the path's coefficients to your own code")
    if isinstance(kind, Recurrent) and kind.cell.kind_name == "gru" and kind.cell.reset == "none":
        return no_layer(
            f"{kind.cell.name} computes n = {kind.cell.equations['n']}, and Burn's Gru always has a reset gate: "
            "n = tanh(W x + b + r * (U h + c)), or with reset_after false n = tanh(W x + b + U (r * h) + c). No weights make "
            "the two equal",
            "write a module for this cell",
            path.rpartition(".")[0],
        )
    if layer.axes is not None and type(kind) in NAMES:
        return no_layer(
            f"the target's weight has other axes than that of Burn's {NAMES[type(kind)]}",
            "declare a target with `format: burn` for which the rule has no `axes`",
        )
    if layer.parametrization:
        return no_layer(
            "Burn's layers hold one weight, and the target keeps the two tensors of a weight norm",
            "leave `parametrization` out; the two are then folded into one",
        )
    if layer.packed_in is not None and layer.names:
        return no_layer(
            "queries, keys and values have different widths, and Burn's MultiHeadAttention has one width, d_model, for all three",
            "give the target `projections:`, as Linears of your own module",
        )
    renamed = [name for role, name in layer.names.items() if name != role]
    named = f"{' and '.join(renamed)} {'is not a parameter' if len(renamed) == 1 else 'are not parameters'}"
    if type(kind) in NAMES and renamed and layer.computes is None:
        packed = "write the layer as an `attention:` rule, which gives Burn's MultiHeadAttention, or " if IN_PROJ & set(renamed) else ""  # fmt: skip
        return no_layer(
            f"{named} of Burn's {NAMES[type(kind)]}, which has `weight` and `bias`",
            f"{packed}declare a target with `format: burn` and the names of your Rust module",
        )
    if isinstance(kind, Norm):
        return _norm_refusal(rule, kind, layer, named if renamed else "", no_layer)
    return None


def _norm_refusal(
    rule: Rule, kind: Norm, layer: TargetLayer, renamed: str, no_layer: Callable[[str, str], Finding]
) -> Finding | None:
    if renamed:
        return no_layer(f"{renamed} of Burn's norms, which have `gamma` and `beta`", "leave the names out")
    if layer.multiplies_by != "weight":
        return no_layer(
            f"Burn's norms multiply by gamma, not by {layer.multiplies_by}",
            "leave `multiplies_by` out of the target; 1 is then added to the weight",
        )
    fixed = isinstance(kind, BatchNorm) or (kind.biased and layer.has == "weight")
    if layer.has not in (None, "weight and bias") and fixed:
        choice = "always" if isinstance(kind, BatchNorm) else "or neither"
        return no_layer(
            f"Burn's {type(kind).__name__} has both gamma and beta, {choice}",
            "leave `parameters` out; a constant is then written for what the source does not have",
        )
    if isinstance(kind, RMSNorm) and "bias" in rule.sources:
        return no_layer(
            f"Burn's RmsNorm has gamma only, and {rule.sources['bias']} would be lost", "write a module for this norm"
        )
    if isinstance(kind, RMSNorm) and kind.epsilon == 0:
        return no_layer(
            "Burn's RmsNorm panics at an epsilon of 0",
            "write a module for this norm, and keep its scale as a `parameter:`",
        )
    return None
