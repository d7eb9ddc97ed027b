"""Copies of weights that aqt quantised: they lie in the module of their weight, in the collection `aqt` (linen) or beside it (nnx).

And the numbers by which weights in float8 are multiplied; and weights that qwix quantised, of which QLoRA keeps the pairs beside them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from convert.checkpoints.source import Leaf
from convert.core.findings import Finding
from convert.core.nnx_names import VALUE
from convert.core.path_index import keys_above
from convert.core.path_pattern import parse_pattern
from convert.layers import Rule

SCALE = "_scale"  # behind the name of a weight, in MaxText
FLOAT8 = "float8"
QVALUE = "qvalue"  # of qwix's and aqt's QArray: kernel/array/qvalue, beside kernel/array/scale
AQT = "Aqt"  # AqtDotGeneral_0 beside a kernel, AqtEinsum_0 where a module computes with several weights


def of_unknown_modules(claims: Mapping[str, Rule], paths: Mapping[str, Rule]) -> list[str]:
    """Return leaves of aqt in modules of which no rule has another leaf: they are weights of their own.

    Args:
        claims: leaf -> the rule that matches it.
        paths: paths of the rules, from the top of the tree.
    """
    of_aqt = {name: module for name in claims if (module := _module(name))}
    if not of_aqt:
        return []
    known = keys_above(name for name in claims if name not in of_aqt)
    written = [
        parse_pattern(module)
        for path, rule in paths.items()
        if rule.kind.drop_reason is None and (module := path.rpartition("/")[0])
    ]
    return [
        name
        for name, module in of_aqt.items()
        if module not in known and not any(pattern.match(module) for pattern in written)
    ]


def scales_of_float8(names: Collection[str], leaves: Mapping[str, Leaf]) -> set[str]:
    """Return those of `names` by which a weight in float8 beside them is multiplied."""
    return {name for name in names if (of := _scaled(name)) in leaves and leaves[of].spec.dtype.startswith(FLOAT8)}


def _scaled(name: str) -> str:
    """Return the leaf that this one would scale by its name."""
    value = "/value" if name.endswith("/value") else ""
    scale = name.removesuffix(value)
    return scale.removesuffix(SCALE) + value if scale.endswith(SCALE) else ""


def lost_scales(scales: Collection[str], rule_file: str) -> Iterator[Finding]:
    """Report scales of weights in float8 that no rule matches."""
    if scales:
        first = min(scales)
        more = f" and {len(scales) - 1} more like it" if len(scales) > 1 else ""
        yield Finding(
            "leaf-without-rule",
            f"this leaf{more}: weights in float8 are multiplied by them, which no rule does; without them they are other numbers",
            rule=rule_file,
            path=first,
            fix="convert a checkpoint whose weights are multiplied: MaxText does so as it loads this one into a model with weights of another dtype, and can save that",
        )


def quantised_weight(names: Collection[str], known: Collection[str], place: str) -> Finding | None:
    """Report the first weight that is there as whole numbers and their scale alone; None: there is none.

    Args:
        names: leaves that no rule matches.
        known: all leaves.
        place: the checkpoint.
    """
    for name in names:
        above, _, last = name.removesuffix(VALUE).rpartition("/")
        if last == QVALUE and (f"{above}/scale" in known or f"{above}/scale{VALUE}" in known):
            return Finding(
                "leaf-without-rule",
                f"the weights of {place} are quantised: this leaf holds numbers that a scale multiplies, which no rule does",
                path=name,
                expected="weights as floating-point numbers",
                got=f"{QVALUE} and scale of {above}",
                fix="dequantise the weights in the framework that quantised them (qwix, aqt), and save them; LoRA pairs beside them can stay",
            )
    return None


def _module(leaf: str) -> str:
    """Return the path of the module of a leaf of aqt; empty: it is another leaf."""
    keys = leaf.split("/")
    at = next((k for k, key in enumerate(keys) if key.startswith(AQT)), 0)
    return "/".join("params" if key == "aqt" else key for key in keys[:at])
