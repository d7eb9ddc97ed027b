"""How a norm is drafted: which of its kinds it is, by its leaves and by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from convert.layers.draft import DraftContext, DraftEntry, Layer, plain

DEBIASED = "debiased"  # role: the statistics are not those that Equinox computes with
FACTORS = [("multiplies_by: scale", "the factor starts at 1"), ("multiplies_by: 1+scale", "the leaf starts at 0")]
EITHER = [
    ("multiplies_by: scale", "center=False: it is the scale"),
    ("multiplies_by: 1", "scale=False: it is the bias; write `bias:` in place of `from:`"),
]
EPSILONS = [
    ("epsilon: 1e-6", "the default of flax's LayerNorm, RMSNorm and GroupNorm"),
    ("epsilon: 1e-5", "of flax's BatchNorm, of Equinox, of Haiku"),
    ("epsilon: 1e-3", "of Keras"),
]


@dataclass(frozen=True)
class NamedNorm:
    """A kind of norm that a module's name tells.

    Attributes:
        kind_name: its key in a rule.
        draft_keys: writes the keys that it has besides those of every norm, given the number of channels.
    """

    kind_name: str
    draft_keys: Callable[[DraftEntry, Layer, int], None]


def draft_norm(
    context: DraftContext, layer: Layer, main: str | None, bias: str | None, either: bool, named: NamedNorm | None
) -> DraftEntry:
    """Draft the rule of a norm.

    Args:
        main: the scale, if it has one.
        either: whether that may be the bias as well: Keras calls both by a number.
        named: the kind, where the name of the module says it.
    """
    stats = {role: path for role in ("mean", "var") if (path := context.partner(layer, role))}
    g = next(layer.leaves[key] for key in (main, bias, "mean", "average", "0") if key and key in layer.leaves)
    entry = DraftEntry(g.leaves[0])
    if main is not None:
        context.say_leaves(entry, layer, main, bias, "guess: a norm's scale")
    elif bias is not None:
        context.say_bias(entry, layer, bias, f"{context.spec(g)}; guess: a norm without a scale")
    for role, path in stats.items() if len(stats) == 2 else ():
        entry.say(role, plain(path), "" if main or bias else "guess: a norm without scale and bias")
    kind = "batch_norm" if len(stats) == 2 else "layer_norm" if bias else "rms_norm"
    if either:
        entry.ask("multiplies_by", "Keras numbers the arrays: is this one the scale or the bias?", EITHER)
    elif main is not None:
        entry.ask("multiplies_by", "what does the source multiply by?", FACTORS, kind)
    else:
        entry.say("multiplies_by", "1", "guess: there is no scale")
    entry.ask("epsilon", "what does the source add to the variance?", EPSILONS, kind)
    if len(stats) == 2:
        if context.partner(layer, DEBIASED):
            entry.ask("momentum", "mode=\"batch\": Equinox divides both statistics by 1 - momentum**counter at inference, which rules cannot express: divide them in the checkpoint first. Which momentum?", [("momentum: 0.99", "Equinox's default")])  # fmt: skip
        else:
            momenta = [("momentum: 0.99", "for training only: which share of the statistics a step keeps")]
            entry.offer(momenta, once=True)
    last = max((k for k, n in enumerate(g.shape) if n > 1), default=len(g.shape) - 1)
    ones = [n == 1 and k != last for k, n in enumerate(g.shape)]
    before = [sum(not one for one in ones[:k]) for k in range(len(ones))]
    axes = zip(ones, g.shape, before, range(len(ones)), strict=True)
    letters = [
        "." if one else context.letters.named(*(("varying out", 0, 0) if axis in g.varies else ("width", n, k)))
        for one, n, k, axis in axes
    ]
    entry.say("axes", "".join(letters))
    groups = {"group_norm": "if it is one: add `num_groups: 32` (flax's default), or `group_size`"}
    more = {} if "layer" in layer.hint or "rms" in layer.hint else groups
    if bias and main == "weight":
        more = {"rms_norm": "an RMS norm with a bias, as Equinox's has by default", **more}
    if len(stats) == 2:
        lacks = (
            ""
            if main and bias
            else "; ones and zeros are written for what the source lacks, unless it says `parameters:`"
        )
        name = context.module([step for step in layer.steps if step.words != ("mean_ema",)])
        known = {"batch_norm": f"guess: there are running statistics{lacks}"}
        context.ask_target(entry, layer, known, "", name.removeprefix("batch_stats.").removeprefix("state."))
    elif named is not None:  # the library's own name decides, also when the norm lacks a scale or a bias
        named.draft_keys(entry, layer, g.shape[last])
        context.ask_target(entry, layer, {named.kind_name: "guess: by its name"})
    elif either:
        context.ask_target(entry, layer, {"layer_norm": "guess: by its name"})
    elif bias:
        context.ask_target(entry, layer, {"layer_norm": f"guess: a bias{' next to the scale' if main else ''}", **more})
    elif "rms" in layer.hint:
        context.ask_target(entry, layer, {"rms_norm": "guess: by its name"})
    else:
        words = {"rms_norm": "", "layer_norm": "one without a bias", **more}
        context.ask_target(entry, layer, words, "does it subtract the mean (layer norm) or not (RMS norm)?")
    return entry
