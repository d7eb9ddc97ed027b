"""Group leaves whose paths differ only in an index, or in the name of a sibling, into patterns."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from convert.checkpoints.source import Leaf
from convert.core.path_pattern import escape_path
from convert.layers.draft import KERNELS, Group, PathKey, Siblings

# Keys of one layer that are listed together, in this order, if their leaves have the same shapes.
ALTERNATIVES: tuple[tuple[str, ...], ...] = (
    ("query", "key", "value"),
    ("key", "value"),
    ("q", "k", "v"),
    ("k", "v"),
    ("q_proj", "k_proj", "v_proj"),
    ("k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("gate", "up"),
    ("wi_0", "wi_1"),
)
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})", re.DOTALL)
_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,9}(?![0-9])")
_MOST_NUMBERS = 16  # of one key that may be an index; a copy of the key is made for each
MANY_WIDTHS = 8  # shapes of kernels: a plain network has fewer, and a ResNet-18 has more
_RECORDS = "vars"  # Keras numbers the arrays of one layer below this key: they are no copies of each other

PartialPath = tuple[tuple[str, ...], str, Leaf]  # the keys that are left of a path, the whole name, the leaf


def has_many_widths(leaves: Mapping[str, Leaf]) -> bool:
    """Whether the convolutions of a tree have so many widths that letters which vary say more than a letter for each."""
    kernels = {
        leaf.spec.shape for name, leaf in leaves.items() if len(leaf.spec.shape) > 2 and keys_of(name)[-1] in KERNELS
    }
    return len(kernels) >= MANY_WIDTHS


def group(
    leaves: Mapping[str, Leaf], layers: Collection[tuple[str, ...]] = (), *, widths_vary: bool = False
) -> tuple[Group, ...]:
    """Group all leaves, in the order of the tree.

    An index runs from 0 without gaps, and all its leaves have one shape; what only some of them have is written out. The
    ``value`` that flax nnx appends to every path is left out.

    Args:
        leaves: of a tree, by name.
        layers: keys of the paths of layers whose leaves lie in several dicts. They are grouped in the same way: a layer that has one
            leaf of another shape is in no group with the others.
        widths_vary: whether the kernels of convolutions that differ only in their channels are grouped, and leaves of one axis.
    """
    entries = [(keys_of(name), name, leaf) for name, leaf in leaves.items()]
    found = _below(entries, layers=frozenset(layers), widths_vary=widths_vary)
    order = {name: k for k, name in enumerate(leaves)}
    return tuple(sorted(found, key=lambda g: order[g.leaves[0]]))


def keys_of(name: str) -> tuple[str, ...]:
    """Return the keys of a path, without the ``value`` that flax nnx appends."""
    return tuple(name.removesuffix("/value").split("/"))


def _below(
    entries: Sequence[PartialPath],
    siblings: Siblings = (),
    path: tuple[str, ...] = (),
    layers: frozenset[tuple[str, ...]] = frozenset(),
    widths_vary: bool = False,
) -> list[Group]:
    children: dict[str, list[PartialPath]] = defaultdict(list)
    here = tuple(sorted((keys[0], leaf.spec.shape, leaf.spec.dtype) for keys, _, leaf in entries if len(keys) == 1))
    done: list[Group] = []
    for keys, name, leaf in entries:
        if keys:
            children[keys[0]].append((keys[1:], name, leaf))
        else:
            done.append(Group((), leaf.spec.shape, leaf.spec.dtype, (name,), siblings))
    below = {key: _below(rest, here, (*path, key), layers, widths_vary) for key, rest in children.items()}
    taken: set[str] = set()
    for stem, tail, whole, members in _families(list(below)):
        if taken.isdisjoint(members):
            taken.update(members)
            done += _merged({key: below[key] for key in members}, stem if whole else None, tail, widths_vary)
    for names in ALTERNATIVES:
        if all(name in below and name not in taken for name in names) and len({_kernels(below[n]) for n in names}) == 1:
            taken.update(names)
            done += _merged({name: below[name] for name in names}, None, "")
    for key, groups in below.items():
        if key == _RECORDS:
            groups = _records(children[key])
        if key not in taken or key == _RECORDS:
            done += [replace(g, steps=(PathKey((key,)), *g.steps)) for g in groups]
    if path in layers:
        whole_layer = tuple(sorted(("/".join(keys), leaf.spec.shape, leaf.spec.dtype) for keys, _, leaf in entries))
        done = [replace(g, siblings=whole_layer) for g in done]
    return done


def _families(keys: Sequence[str]) -> Iterator[tuple[str, str, bool, list[str]]]:
    """Find keys that differ in one number: the text before and after it, whether it runs from 0 without gaps, and the keys.

    First those that end in such an index, then those that have it elsewhere, then those that end in other numbers.
    """
    found: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for key in keys:
        for number in itertools.islice(_NUMBER.finditer(key), _MOST_NUMBERS):
            if number[0] == "0" or number[0][0] != "0":
                found[key[: number.start()], key[number.end() :]].append((int(number[0]), key))
    several = {around: sorted(members) for around, members in found.items() if len(members) > 1}
    whole = {around: [n for n, _ in members] == list(range(len(members))) for around, members in several.items()}
    for wanted, at_end in ((True, True), (True, False), (False, True)):
        for (stem, tail), members in several.items():
            if whole[stem, tail] == wanted and (not tail) == at_end:
                yield stem, tail, wanted, [key for _, key in members]


def _kernels(groups: Iterable[Group]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a key's leaves with two or more axes; alternatives have the same."""
    return tuple(sorted(g.shape for g in groups if len(g.shape) > 1))


def _records(entries: Sequence[PartialPath]) -> list[Group]:
    siblings = tuple((keys[-1], leaf.spec.shape, leaf.spec.dtype) for keys, _, leaf in entries if keys)
    return [
        Group(tuple(PathKey((key,)) for key in keys), leaf.spec.shape, leaf.spec.dtype, (name,), siblings)
        for keys, name, leaf in entries
    ]


def _form(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a leaf with 0 for the sizes that may vary: the channels of a kernel, and the only wide axis of a leaf."""
    wide = {axis for axis, size in enumerate(shape) if size > 1}
    if len(wide) == 1 and key not in KERNELS:
        free = wide
    elif len(shape) > 2 and key in KERNELS:
        free = {0, 1} if key == "weight" else {len(shape) - 2, len(shape) - 1}
    else:
        free = set()
    return tuple(0 if axis in free and size > 1 else size for axis, size in enumerate(shape))


def _merged(
    members: Mapping[str, Sequence[Group]], stem: str | None, tail: str, widths_vary: bool = False
) -> Iterator[Group]:
    """Return the groups of several keys, with similar ones merged."""
    similar: dict[tuple[object, ...], list[tuple[str, Group]]] = defaultdict(list)
    for key, groups in members.items():
        for g in groups:
            siblings = g.siblings if g.steps else ()  # the keys that are merged here lie in one dict
            shape = g.shape
            if widths_vary and g.steps:
                shape = _form(g.steps[-1].words[0], g.shape)
                siblings = tuple(
                    (word, _form(word.rpartition("/")[2], other), dtype) for word, other, dtype in siblings
                )
            similar[g.steps, shape, g.dtype, siblings].append((key, g))
    for found in similar.values():
        first = found[0][1]
        keys = tuple(key for key, _ in found)
        index = stem if len(keys) == len(members) else None
        step = PathKey(keys, index, tail if index is not None else "")
        leaves = tuple(n for _, g in found for n in g.leaves)
        differ = {k for k, sizes in enumerate(zip(*(g.shape for _, g in found), strict=True)) if len(set(sizes)) > 1}
        varies = frozenset(differ.union(*(g.varies for _, g in found)))
        yield replace(first, steps=(step, *first.steps), leaves=leaves, varies=varies)


class Names:
    """Give each index its own name: stacks of layers are numbered separately.

    With `most`, longer lists of alternatives are cut, for people: such text is no pattern.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._known: dict[tuple[tuple[str, ...], str, int], str] = {}

    def text(self, steps: Sequence[PathKey]) -> str:
        """Return the steps as a pattern: ``block_{i}/{query,key,value}/kernel``."""
        out: list[str] = []
        for step in steps:
            if step.stem is not None:
                key = (tuple(out), step.stem, len(step.words))
                name = self._known.setdefault(key, self._next())
                out.append(f"{escape_path(step.stem)}{{{name}}}{escape_path(step.tail)}")
            elif len(step.words) > 1:
                numbered = [_NUMBERED.fullmatch(word) for word in step.words]
                stem = numbered[0][1] if numbered[0] else ""
                shared_stem = bool(numbered[0]) and all(n and n[1] == stem for n in numbered)
                words = tuple(word.removeprefix(stem) if shared_stem else word for word in step.words)
                if self._most is not None and len(words) > self._most:
                    words = (*words[: self._most - 1], "...", words[-1])
                listed = ",".join(escape_path(word).replace(",", "\\,") for word in words)
                out.append(f"{escape_path(stem) if shared_stem else ''}{{{listed}}}")
            else:
                out.append(escape_path(step.words[0]))
        return "/".join(out)

    def _next(self) -> str:
        k = len(self._known)
        return "ijklmnpq"[k] if k < 8 else f"i{k}"
