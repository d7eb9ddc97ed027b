"""Merge the leaves of each low-rank pair, and of the weight that it is added to, into one leaf; and the leaves of each sum, and the parts of complex numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from typing import Any

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, is_float, widens
from convert.layers import Rule
from convert.layers.base import Matched, MatchKey
from convert.layers.leaf_sums import IMAGINARY, NEXT, role_of_sum, sign_of, sums_of
from convert.layers.leaves import MisfitError, shape_mismatch
from convert.layers.low_rank import Pair
from convert.planning.adapters.attach import Adapters
from convert.planning.low_rank_source import Merge
from convert.planning.matching.match import Coverage
from convert.planning.merged_leaf import Complex, Joined, MergedLeaf, Sum


def merge_leaves(
    coverage: Coverage,
    source: Source,
    sizes: Mapping[str, int],
    facts: Mapping[str, Any],
    variants: Mapping[str, str],
    adapters: Adapters | None,
) -> tuple[Coverage, dict[str, MergedLeaf], list[Finding]]:
    """Merge every sum and every low-rank pair: return the coverage of the merged leaves, the merges by leaf name, and findings.

    Args:
        variants: name of a choice -> variant.
        adapters: pairs that no rule names.
    """
    merges: dict[str, MergedLeaf] = {}
    matched: list[Matched] = []
    findings: list[Finding] = []
    for stored in coverage.matched:
        try:
            variant = variants.get(stored.rule.choice or "")
            added = {} if adapters is None else adapters.of_rule(stored, source, variant)
            found, sums = _with_sums(stored, source)
        except MisfitError as misfit:
            findings.append(misfit.finding)
            continue
        merges |= {one.name: one for one in sums}
        if added:
            merges |= {merge.name: merge for of_role in added.values() for merge in of_role.values()}
            matched.append(_with_adapters(found, added))
            continue
        pair = found.rule.kind.pair
        if pair is None:
            matched.append(found)
            continue
        of_rule: dict[MatchKey, Merge] = {}
        try:
            of_rule = _merges_of_rule(found, pair, source, sizes, facts)
        except MisfitError as misfit:
            findings.append(misfit.finding)
        except ValueError as error:  # the scale cannot be computed
            findings.append(Finding("low-rank-mismatch", str(error), rule=found.rule.at.line_only))
        merges |= {merge.name: merge for merge in of_rule.values()}
        leaves = {"weight": {key: merge.name for key, merge in of_rule.items()}}
        if "bias" in found.leaves:
            leaves["bias"] = found.leaves["bias"]
        matched.append(Matched(_merged_rule(found.rule), leaves))
    if not merges and not findings:
        return coverage, {}, []
    return replace(coverage, matched=tuple(matched)), merges, findings


def _with_sums(found: Matched, source: Source) -> tuple[Matched, list[MergedLeaf]]:
    """Return the leaves of a rule with the sums in place of their terms, and the sums; leaves that stand one after the other in the same way.

    Raises:
        MisfitError: the leaves of a sum have different shapes, or are no floating-point numbers.
    """
    of_rule = sums_of([*found.rule.sources])
    if not of_rule:
        return found, []
    leaves, made = dict(found.leaves), list[MergedLeaf]()
    for role, terms in of_rule.items():
        listed = [leaves.pop(term, {}) for term in terms]
        whole = [key for key in listed[0] if all(key in of_role for of_role in listed)]  # match.cover reports others
        join = {NEXT: _joined, IMAGINARY: _complex}.get(sign_of(terms), _sum)
        sums = {key: join(found.rule, [of_role[key] for of_role in listed], source) for key in whole}
        leaves[role] = {key: one.name for key, one in sums.items()}
        made += sums.values()
    order = {role: pattern for role, pattern in found.rule.sources.items() if role_of_sum(role) == role}
    one_kind = any(isinstance(one, Joined) or one.places for one in made if isinstance(one, Joined | Sum))
    kind = found.rule.kind.merged if one_kind else found.rule.kind
    return Matched(
        replace(found.rule, kind=kind, sources=order), {role: leaves[role] for role in order if role in leaves}
    ), made


def _sum(rule: Rule, leaves: Sequence[str], source: Source) -> Sum:
    apart = bool(rule.kind.term_axes)  # then the letters say which axes are the same
    specs = _floats(rule, leaves, source, "adds leaves up", apart=apart)
    dtype = reduce(_wider, (spec.dtype for spec in specs))
    wide = "float64" if dtype == "float64" else "float32"
    if apart:
        shape, places = _spread(rule, [spec.shape for spec in specs])
        return Sum(tuple(leaves), TensorSpec(shape, wide), dtype, places)
    return Sum(tuple(leaves), TensorSpec(specs[0].shape, wide), dtype)


def _complex(rule: Rule, leaves: Sequence[str], source: Source) -> Complex:
    specs = _floats(rule, leaves, source, "makes complex numbers of two leaves")
    dtype = "complex128" if "float64" in {spec.dtype for spec in specs} else "complex64"
    real, imaginary = leaves
    return Complex(real, imaginary, TensorSpec(specs[0].shape, dtype), dtype)


def _floats(rule: Rule, leaves: Sequence[str], source: Source, does: str, *, apart: bool = False) -> list[TensorSpec]:
    """Return the specs of leaves that are put together element by element.

    Args:
        does: what the rule does with them.
        apart: whether their shapes may differ.

    Raises:
        MisfitError: they have different shapes, or are no floating-point numbers.
    """
    specs = [source.leaves[leaf].spec for leaf in leaves]
    for leaf, spec in zip(leaves, specs, strict=True):
        if not is_float(spec.dtype) or (spec.shape != specs[0].shape and not apart):
            floats = is_float(spec.dtype)
            raise shape_mismatch(
                rule,
                leaf,
                problem=f"the rule {does}, element by element",
                expected=f"the shape of {leaves[0]}: {specs[0]}" if floats else "floating-point numbers",
                got=str(spec),
                fix="correct the paths of the sum",
            )
    return specs


def _spread(rule: Rule, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the shape of a sum of leaves whose axes differ, and for each axis of each leaf that of the sum; -1 for one of size 1."""
    stacked = sorted(rule.stacked.values())
    names: list[str | int] = list(rule.kind.weight_axes[0][0])
    for axis in stacked:
        names.insert(axis, axis)
    sizes: dict[str | int, int] = {}
    places = []
    for letters, shape in zip(rule.kind.term_axes, shapes, strict=True):
        own = iter(letters)
        axes = [axis if axis in stacked else next(own) for axis in range(len(shape))]
        sizes |= zip(axes, shape, strict=True)
        places.append(tuple(names.index(axis) if axis != "." else -1 for axis in axes))
    return tuple(sizes[name] for name in names), tuple(places)


def _joined(rule: Rule, leaves: Sequence[str], source: Source) -> Joined:
    specs = [source.leaves[leaf].spec for leaf in leaves]
    equation = rule.kind.merged.linear_map(None)
    assert equation is not None, "leaves of a linear layer are joined"
    own = [axis for axis in range(len(specs[0].shape)) if axis not in rule.stacked.values()]
    axis = own[equation.weight.index(equation.inputs)]
    lengths = [spec.shape[axis] for spec in specs]
    dtype = reduce(_wider, (spec.dtype for spec in specs))
    shape = (*specs[0].shape[:axis], sum(lengths), *specs[0].shape[axis + 1 :])
    spec = TensorSpec(shape, "float64" if dtype == "float64" else "float32")
    return Joined(tuple(leaves), tuple(accumulate(lengths[:-1], initial=0)), axis, spec, dtype)


def _wider(one: str, two: str) -> str:
    """Return the dtype of two that holds the values of both; float32 where neither does."""
    return one if widens(two, one) else two if widens(one, two) else "float32"


def _with_adapters(found: Matched, added: Mapping[str, Mapping[MatchKey, Merge]]) -> Matched:
    """Return the leaves of a rule, those with a pair replaced by the results of their merges."""
    leaves = {
        role: {key: added[role][key].name if key in added.get(role, {}) else leaf for key, leaf in of_role.items()}
        for role, of_role in found.leaves.items()
    }
    return replace(found, leaves=leaves)


def _merged_rule(rule: Rule) -> Rule:
    """Return the rule for the merged leaves, which are weights of a plain linear layer."""
    sources = {role: path for role, path in rule.sources.items() if role in ("weight", "bias")}
    return replace(rule, kind=rule.kind.merged, sources=sources)


def _merges_of_rule(
    found: Matched, pair: Pair, source: Source, sizes: Mapping[str, int], facts: Mapping[str, Any]
) -> dict[MatchKey, Merge]:
    scale = pair.scale.value(sizes, facts)
    firsts, seconds = (found.leaves.get(role, {}) for role in pair.roles)
    letters = found.rule.kind.weight_axes[0][0]
    stacked = tuple(sorted(found.rule.stacked.values()))
    merges = {}
    for key, first in firsts.items():
        base = found.leaves["weight"].get(key) if pair.added else None
        if key not in seconds or (base is None and pair.added):
            continue  # reported by match.cover
        specs = {name: source.leaves[name].spec for name in (base, first, seconds[key]) if name is not None}
        layers = _stacked_layers(found.rule, stacked, specs)
        axes = iter(sizes.get(letter, 0) for letter in letters)
        shape = tuple(layers[k] if k in layers else next(axes) for k in range(len(letters) + len(stacked)))
        dtypes = [spec.dtype for spec in specs.values()]
        dtype = dtypes[0] if base or widens(dtypes[1], dtypes[0]) else dtypes[1]
        computed = TensorSpec(shape, "float64" if "float64" in dtypes else "float32")
        merges[key] = Merge(first, seconds[key], base, pair.product, letters, stacked, scale, computed, dtype)
    return merges


def _stacked_layers(rule: Rule, stacked: tuple[int, ...], specs: Mapping[str, TensorSpec]) -> dict[int, int]:
    """Return the stacked axes and their sizes, which all leaves of a pair share.

    Raises:
        MisfitError: a leaf is not floating-point, is not stacked, or stacks another number of layers.
    """
    first, *_ = specs
    counts = {
        name: {axis: spec.shape[axis] for axis in stacked if axis < len(spec.shape)} for name, spec in specs.items()
    }
    for name, spec in specs.items():
        expected = got = ""
        if not is_float(spec.dtype):
            expected, got = "a floating-point dtype, as the leaf is multiplied and added", spec.dtype
        elif len(counts[name]) < len(stacked):
            expected, got = f"layers stacked on axis {', '.join(map(str, stacked))}", str(spec)
        elif counts[name] != counts[first]:
            expected = f"as many stacked layers as in {first}: {specs[first]}"
            got = str(spec)
        if expected:
            finding = Finding(
                "low-rank-mismatch",
                rule=rule.at.line_only,
                path=name,
                expected=expected,
                got=got,
                fix="correct the paths of the pair and of its weight",
            )
            raise MisfitError(finding)
    return counts[first]
