"""Find the statistics of Equinox's BatchNorms: a State keeps them as arrays without names, in the order of the layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from convert.checkpoints.source import Leaf
from convert.drafting.companions import Partners
from convert.drafting.tree_paths import Paths
from convert.layers.draft import Group, Layer, PathKey
from convert.layers.norm.draft import DEBIASED


@dataclass(frozen=True)
class _Statistics:
    """Return the State of a BatchNorm: a flag (mode="ema") or a counter (mode="batch"), then mean and variance.

    Source: equinox 0.13 ``nn/_batch_norm.py``.
    """

    counted: bool
    mean: str
    var: str


def find_statistics(
    partners: Partners, layers: Sequence[Layer], paths: Paths, known: Mapping[str, Leaf]
) -> Iterator[Layer]:
    """Add the statistics of Equinox's BatchNorms to their layers; yield the layers that have no other leaf.

    The first statistics belong to the first layer, and so on, where there are as many of both and the shapes agree.
    """
    found, owners = list(_statistics(known)), list(_owners(known))
    affine = [owner for owner in owners if f"{owner}/weight" in known]
    owners = affine if len(affine) == len(found) else owners
    if not found or len(owners) != len(found) or not _whole(layers, {n for s in found for n in (s.mean, s.var)}):
        return
    by_leaf = {g.leaves: layer for layer in layers for g in layer.leaves.values()}
    for owner, one in zip(owners, found, strict=True):
        if owner in affine:
            scale = known[f"{owner}/weight"].spec.shape
            if scale != known[one.mean].spec.shape or (f"{owner}/weight",) not in by_leaf:
                return
    for owner, one in zip(owners, found, strict=True):
        steps = tuple(PathKey((key,)) for key in owner.split("/"))
        layer = by_leaf.get((f"{owner}/weight",)) or Layer(steps, {"mean": _group(one.mean, known)})
        for role, name in (("mean", one.mean), ("var", one.var)):
            at = [PathKey((key,)) for key in name.split("/")]
            partners.add(layer, role, paths.path(at), [name], known[name].spec.shape)
        if one.counted:
            partners.of[layer.steps, DEBIASED] = "batch"
        if owner not in affine:
            yield layer


def _statistics(known: Mapping[str, Leaf]) -> Iterator[_Statistics]:
    names = list(known)
    for k, name in enumerate(names):
        flag, at = known[name].spec, re.fullmatch(r"((?:.*/)?)([0-9]{1,18})", name)
        if at is None or flag.shape != () or not flag.dtype.startswith(("bool", "int")):
            continue
        stem = f"{at[1]}{int(at[2]) + 1}"
        pair = names[k + 1 : k + 3]
        if pair != [f"{stem}/0", f"{stem}/1"]:
            continue
        mean, var = (known[one].spec for one in pair)
        if mean == var and len(mean.shape) == 1:
            yield _Statistics(flag.dtype != "bool", *pair)


def _owners(known: Mapping[str, Leaf]) -> Iterator[str]:
    """Return modules that may be a BatchNorm: they have `inference`, and weight and bias with one axis, or nothing else."""
    for name in known:
        owner, _, last = name.rpartition("/")
        if last == "inference" and owner:
            shapes = {
                other: known[other].spec.shape for other in known if other.startswith(f"{owner}/") and other != name
            }
            if not shapes:
                yield owner
            elif shapes.keys() == {f"{owner}/weight", f"{owner}/bias"}:
                one, two = shapes.values()
                if one == two and len(one) == 1:
                    yield owner


def _whole(layers: Sequence[Layer], taken: set[str]) -> bool:
    """Whether these leaves are groups without other leaves."""
    groups = (set(g.leaves) for layer in layers for g in layer.leaves.values())
    return all(not (group & taken) or group <= taken for group in groups)


def _group(name: str, known: Mapping[str, Leaf]) -> Group:
    spec = known[name].spec
    return Group(tuple(PathKey((key,)) for key in name.split("/")), spec.shape, spec.dtype, (name,))
