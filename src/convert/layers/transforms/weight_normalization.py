"""Weights that are computed from others at every call: weight norm and spectral norm.

Sources of the formulas: flax 0.12.8 ``linen/normalization.py`` (WeightNorm, SpectralNorm; nnx has the same). The feature
axes of a weight norm are the last one unless the source says otherwise. A spectral norm reshapes to (-1, last axis), the bias too if it
has several axes. It runs `n_steps` power iterations from the stored u at every call, also at inference. Equinox 0.13 ``nn/_weight_norm.py`` and
``nn/_spectral_norm.py``: at inference it takes no step, and divides by u w v of both stored vectors, w the matrix of the first axis
against all others. torch 2.13 ``torch.nn.utils.parametrizations.weight_norm`` (original0 is g, original1 is v) and
``torch.nn.utils.weight_norm`` (weight_g, weight_v).
"""

from __future__ import annotations

from typing import Any

from convert.layers.base import Rule
from convert.layers.target import TargetLayer
from convert.layers.weight_keys import V

SCALE = "weight_norm"  # role of torch's scale


def check_normalized(rule: Rule) -> None:
    """Check that the targets of a rule can hold its weight.

    Raises:
        ValueError: they cannot; the message is the reason.
    """
    norm = rule.normalized
    for _, layer in rule.layers:
        if norm is None and layer.parametrization is None:
            continue
        axes = layer.axes is not None and (norm is not None or layer.axes[0] not in _outputs(rule))
        if len(layer.path.groups) != len(rule.path.groups) or layer.computes is not None or axes:
            word = f"weight with `{norm.role}`" if norm is not None else "module with a `parametrization`"
            raise ValueError(f"a {word} can be neither fused nor split, and not be used by an einsum of the target")
        if layer.parametrization and (layer.part or rule.part):
            raise ValueError("a module with a `parametrization` is made of whole leaves; leave `part` out")
    if norm is None:
        return
    rule.kind.check_normalized(norm.role)
    for letters, _ in rule.kind.weight_axes:
        if strange := [x for x in norm.axes if x not in letters]:
            raise ValueError(f"`{norm.role}` has the axis {strange[0]}, and the weight the axes {' '.join(letters)}")


def _outputs(rule: Rule) -> set[str]:
    """Return the letters of the outputs of a weight, of each of its variants."""
    return {outputs for _, outputs in rule.kind.weight_axes}


def features(rule: Rule, letters: str, sizes: tuple[int, ...], own: tuple[int, ...]) -> str:
    """Return the letters of the weight's axes for which a second leaf has values, in the order of that leaf.

    Args:
        letters, sizes: of the weight's axes, as stored.
        own: shape of the leaf, stacked axes left out.

    Raises:
        ValueError: they are not determined, or do not fit; the message is the reason.
    """
    assert rule.normalized is not None
    axes, size = rule.normalized.axes, dict(zip(letters, sizes, strict=True))
    if axes:
        return axes
    if own == ():
        return ""  # one number: the norm is that of the whole weight (flax: feature_axes=None)
    outputs = next((outputs for known, outputs in rule.kind.weight_axes if known == letters), "")
    if len(outputs) == 1:
        return outputs
    count = 1 if rule.normalized.role == "spectral_norm" else len(own)
    found = letters[-count:]
    if V in rule.normalized.paths or (rule.normalized.role == "weight_norm" and own != tuple(size[x] for x in found)):
        key = "u: ..., v: ..." if V in rule.normalized.paths else "scale: ..."
        shown = ", ".join(f"{x}={size[x]}" for x in letters)
        raise ValueError(
            f"its shape does not determine for which axes of the weight it has values ({shown}); say it: "
            f"`{rule.normalized.role}: {{{key}, axes: {outputs}}}`"
        )
    return found


def kept(rule: Rule, layer: TargetLayer) -> bool:
    """Return whether the target stores the two tensors of the source's weight norm as they are: it has a scale for each row, as torch's."""
    norm = rule.normalized
    if norm is None or norm.role != "weight_norm" or layer.parametrization is None:
        return False
    return all(
        len(outputs) == 1 and (norm.axes or outputs) == rule.kind.rows_of_torch(outputs)
        for _, outputs in rule.kind.weight_axes
    )


def lengths_role(rule: Rule, layer: TargetLayer) -> str | None:
    """Return the role of the scale that no leaf has, as the weight's own rows have its lengths; None where a leaf has it, or the target has no weight norm."""
    return None if layer.parametrization is None or kept(rule, layer) else SCALE


def facts(rule: Rule, layer: TargetLayer) -> dict[str, Any]:
    """Return the entries of the plan and the header."""
    if rule.normalized is None:
        return {}
    word = "kept" if kept(rule, layer) else "folded"
    return {rule.normalized.role: word, "normalization_epsilon": rule.normalized.epsilon}
