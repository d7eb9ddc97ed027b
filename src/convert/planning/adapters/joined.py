"""A view of a checkpoint with the LoRA pairs of another one beside its weights: Tunix and MaxText save the pairs alone.

Everything behind it sees one tree, as if the whole model had been saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from convert.checkpoints.chunks import Box, Grid, Meter, Piece
from convert.checkpoints.source import Leaf, Source
from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.nnx_names import VALUE
from convert.planning.adapters.names import BOOKKEEPING, find_pairs, has_word, weights_of_first
from convert.planning.quantised import quantised_weight

LORA_PAIRS = "; LoRA pairs: "  # in the format of a view, which the header of an output keeps


def joined(base: Source, adapter: Source) -> Source:
    """Return the view; its `adapter` is the second checkpoint.

    The trees may begin with other keys, such as ``params/params`` and ``base``. The pairs get the keys of the tree of `base`.

    Raises:
        PlanError: `adapter` has no pairs, or weights beside them, or none of a weight of `base`; or `base` has pairs itself.
    """
    if peft := next((name for name in adapter.leaves if name.endswith((".lora_A.weight", ".lora_B.weight"))), None):
        fix = "make leaves of it with `convert MODEL ADAPTER_DIR CKPT --to orbax --like BASE_CKPT --adapter FORM`, and convert CKPT without --lora"
        raise _refused(adapter, "the adapter is one of PEFT, and not of JAX code", f"tensors such as {peft}", fix)
    words = [name for name in adapter.leaves if has_word(name)]
    if not words:
        raise _refused(adapter, "the checkpoint of the adapter has no LoRA pair", f"leaves such as {next(iter(adapter.leaves), 'none')}", "give the checkpoint that the LoRA run saved")  # fmt: skip
    others = [name for name in adapter.leaves if not has_word(name) and name.rpartition("/")[2] not in BOOKKEEPING]
    if others:
        raise _refused(adapter, "the checkpoint of the adapter has weights beside the LoRA pairs", f"leaves such as {others[0]}", "convert it alone: it needs no base")  # fmt: skip
    if own := next((name for name in base.leaves if has_word(name)), None):
        raise _refused(base, "the checkpoint of the base model has LoRA pairs itself", f"leaves such as {own}", "give the base model that the pairs were trained on")  # fmt: skip
    placed = _placed(words, base.leaves)
    if not placed and (quantised := quantised_weight(base.leaves, base.leaves, str(base.display_path))):
        raise PlanError(quantised)
    if not placed:
        raise _refused(adapter, f"the LoRA pairs belong to no weights of {base.display_path}", f"pairs such as {words[0]}", "give the checkpoint of the base model that the pairs were trained on")  # fmt: skip
    return JoinedSource(
        base, adapter, placed[0], [next(iter(find_pairs([*base.leaves, *names.values()]))) for names in placed[1:]]
    )


def _placed(words: list[str], known: Collection[str]) -> list[dict[str, str]]:
    """Return leaf of the adapter -> its name in the tree of the base model, in each way that fits equally well; none where no pair has its weight there.

    Of all exchanges of the first keys, it is that which gives most pairs a weight, more than half of them, and of these the one that
    takes away the fewest keys; the first is the shortest. Paths that are equal as they are need none.
    """
    firsts = {first: tuple(weights_of_first(first)) for first in words}
    plain = {_stem(name): name for name in known}
    ends: dict[str, list[str]] = {}
    for name in plain:
        ends.setdefault(name.rpartition("/")[2], []).append(name)
    found: dict[tuple[str, str], int] = {("", ""): 0}
    sample = next((weights for weights in firsts.values() if weights), ())
    for weight in sample:
        keys = weight.split("/")
        for count in range(len(keys) - 1):  # the last two name a weight of a module
            old, rest = "".join(f"{key}/" for key in keys[:count]), "/".join(keys[count:])
            for name in ends.get(keys[-1], ()):
                if name == rest or name.endswith(f"/{rest}"):
                    found[old, name.removesuffix(rest)] = 0
    for old, new in found:
        moved = ((new + weight.removeprefix(old) for weight in weights) for weights in firsts.values() if weights)
        found[old, new] = sum(any(name in plain for name in each) for each in moved)
    most = max(found.values())
    best = [way for way, count in found.items() if count == most]
    fewest = min(old.count("/") for old, _ in best)
    ways = [("", "")] if ("", "") in best else [way for way in best if way[0].count("/") == fewest]
    ways.sort(key=lambda way: len(way[0]) + len(way[1]))
    if not most or (ways[0] != ("", "") and 2 * most <= sum(map(bool, firsts.values()))):
        return []
    valued = any(name.endswith(VALUE) for name in known)
    placed: list[dict[str, str]] = []
    for old, new in ways:
        names = {name: new + _stem(name).removeprefix(old) + (VALUE if valued else "") for name in words}
        placed += [names] if names not in placed else []
    return placed


def _stem(name: str) -> str:
    return name.removesuffix(VALUE)


def _refused(source: Source, problem: str, got: str, fix: str) -> PlanError:
    return PlanError(Finding("adapter-not-joined", problem, path=str(source.display_path), got=got, fix=fix))


class JoinedSource(Source):
    """The view.

    Args:
        base, adapter: the two checkpoints.
        names: leaf of the adapter -> its name here.
        elsewhere: a weight of each other place in the tree of `base` to which the pairs may belong as well.
    """

    def __init__(self, base: Source, adapter: Source, names: dict[str, str], elsewhere: Sequence[str] = ()) -> None:
        self._base, self.adapter, self._elsewhere = base, adapter, elsewhere
        self._names = {new: old for old, new in names.items()}
        self.path, self.absent, self.given_path, self.boundary = base.path, base.absent, base.given_path, base.boundary
        self.names_from, self.format = base.names_from, f"{base.format}{LORA_PAIRS}{adapter.format}"
        self.watched = {**base.watched, **adapter.watched}
        self.leaves = {**base.leaves, **{new: Leaf(tuple(new.split("/")), adapter.leaves[old].spec) for old, new in names.items()}}  # fmt: skip
        text = f"{len(names)} leaves of LoRA pairs are those of {adapter.display_path}"
        self.notes = (*base.notes, Finding("adapter-joined", text))

    def several_places(self, converted: Collection[str]) -> PlanError | None:
        """Return the error where the pairs may belong to several weights that are converted; copies, such as moments, are not."""
        other = next((name for name in self._elsewhere if name in converted), None)
        if other is None or self.adapter is None:
            return None
        new, old = next(iter(self._names.items()))
        problem = f"the keys of the LoRA pairs do not say to which part of {self.display_path} they belong"
        got = f"{old}, which may be {new}, or belong to {other}"
        return _refused(
            self.adapter,
            problem,
            got,
            "save the pairs with the keys above their layers, as the tree of the model has them",
        )

    def _of(self, name: str) -> tuple[Source, str]:
        return (self.adapter, self._names[name]) if name in self._names and self.adapter else (self._base, name)

    def read(self, name: str) -> np.ndarray:
        source, stored = self._of(name)
        return source.read(stored)

    def read_box(self, name: str, box: Box) -> np.ndarray:
        source, stored = self._of(name)
        return source.read_box(stored, box)

    def chunks(self, name: str) -> Grid:
        source, stored = self._of(name)
        return source.chunks(stored)

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        source, stored = self._of(name)
        return source.pieces(stored, chunk, meter)
