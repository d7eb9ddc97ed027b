"""Find LoRA pairs by their names, and the weight that each is added to.

The names are those of the libraries that make them:

* qwix, and so Tunix and MaxText: ``q_proj/kernel_lora_a`` beside ``q_proj/kernel`` (google/qwix@0.1.8 _src/providers/lora.py)
* gemma (kauldron): ``q_einsum/_LoRAEinsum_0/lora/a`` below the module of ``q_einsum/w``; ``mlp/_LoRAEinsum_linear/lora/a`` beside
  ``mlp/linear``; ``dense/lora/a`` beside ``dense/kernel`` (gemma 3.3.0 gm/nn/_lora.py, peft/_lora.py)
* openpi: ``q_einsum/lora_a`` beside ``q_einsum/w``; ``mlp/linear_lora_a`` beside ``mlp/linear`` (openpi@15a9616 models/lora.py)
* flax nnx: ``dense/lora/lora_a`` beside ``dense/kernel`` (flax 0.12.8 nnx/nn/lora.py, LoRALinear)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

_WEIGHTS = ("kernel", "w", "weight")  # the names that these libraries' layers give to their weight
_WORD = re.compile(r"(^|_)lora(_|$|[0-9])|^lora|LoRA")  # of a key of the path of a leaf that belongs to an adapter
# Of adapters that are no sum of low-rank products.
_OTHERS = re.compile(r"(^|_)(dora|hada|loha|lokr|ia3|vera)(_|$|[0-9])")
# A layer of openpi: q_einsum, and q_einsum_1 of the action expert; or one with pairs in the feed-forward alone, below the model's own keys.
_OF_OPENPI = re.compile(r"(^|/)\w*einsum(_\d+)?/lora_a|(^|/)PaliGemma/llm/")
_FEED_FORWARD = ("gating_einsum_lora_a", "linear_lora_a")  # openpi's; other names with this ending are qwix's
BOOKKEEPING = ("step", "count")  # of a train state: MaxText saves it beside the pairs
_WRAPPED = re.compile(r"_LoRA[A-Za-z]*_(?P<of>\w+)")  # module that gemma puts around an einsum


class Writer(Enum):
    """A library that makes pairs. They differ in axes and scale, not only in names."""

    QWIX = "qwix"
    GEMMA = "gemma"
    OPENPI = "openpi"
    FLAX = "flax.nnx"


@dataclass(frozen=True)
class NamedPair:
    """Two leaves, and the leaf that their product is added to."""

    base: str
    first: str
    second: str
    writer: Writer


def has_word(name: str) -> bool:
    """Whether a key of the path says that the leaf belongs to an adapter."""
    return "lora" in name.lower() and any(_WORD.search(key) for key in name.split("/"))


def is_of_adapter(name: str) -> bool:
    """Whether a key of the path says that the leaf belongs to an adapter of any kind."""
    return has_word(name) or any(_OTHERS.search(key) for key in name.split("/"))


def find_pairs(leaves: Collection[str]) -> dict[str, NamedPair]:
    """Return the pairs of a tree by the name of their weight."""
    known = set(leaves)
    named = [name for name in leaves if has_word(name)]
    openpi = any(_OF_OPENPI.search(_stem(name)) for name in named)
    pairs: dict[str, NamedPair] = {}
    for first in named:
        if not _stem(first).endswith(("_a", "/a")):
            continue
        second = f"{_stem(first)[:-1]}b{_ending(first)}"
        for base, writer in _bases(_stem(first), openpi):
            found = next((name for name in (base + _ending(first), base) if name in known), None)
            if found is not None and second in known and found not in pairs:
                pairs[found] = NamedPair(found, first, second, writer)
                break
    return pairs


@dataclass(frozen=True)
class HalfPair:
    """A leaf of a LoRA pair without the other one.

    Attributes:
        missing: path of the other one.
        base: the leaf that the product of both is added to.
    """

    missing: str
    base: str


def half_pairs(leaves: Collection[str]) -> dict[str, HalfPair]:
    """Return the leaves of a tree that are half of a pair, whose weight is there."""
    known = set(leaves)
    halves: dict[str, HalfPair] = {}
    for name in leaves:
        stem, ending = _stem(name), _ending(name)
        if not has_word(name) or not stem.endswith(("_a", "/a", "_b", "/b")):
            continue
        missing = f"{stem[:-1]}{'b' if stem.endswith('a') else 'a'}{ending}"
        bases = (weight + end for weight, _ in _bases(f"{stem[:-1]}a", openpi=False) for end in (ending, ""))
        base = next((base for base in bases if base in known), None)
        if missing not in known and base is not None:
            halves[name] = HalfPair(missing, base)
    return halves


def pair_keys(base: tuple[str, ...], writer: Writer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys that a library gives to the two leaves of the pair of a weight.

    >>> pair_keys(("q_einsum", "w"), Writer.GEMMA)[0]
    ('q_einsum', '_LoRAEinsum_0', 'lora', 'a')
    >>> pair_keys(("mlp", "linear"), Writer.OPENPI)
    (('mlp', 'linear_lora_a'), ('mlp', 'linear_lora_b'))
    """
    value = base[-1:] if base[-1] == "value" else ()
    keys = base[: len(base) - len(value)]
    flat = any("/" in key for key in keys)
    *place, last = "/".join(keys).split("/") if flat else keys
    named = last in _WEIGHTS  # the weight of a module of its own; else the module has several
    if writer is Writer.GEMMA:
        einsum = (f"_LoRAEinsum_{0 if named else last}",) if last != "kernel" else ()
        ends: tuple[tuple[str, ...], ...] = tuple((*einsum, "lora", end) for end in "ab")
    elif writer is Writer.QWIX or not named:
        ends = tuple((f"{last}_lora_{end}",) for end in "ab")
    else:
        ends = tuple((*(("lora",) if writer is Writer.FLAX else ()), f"lora_{end}") for end in "ab")
    first, second = ((*place, *end) for end in ends)
    if flat:
        first, second = (("/".join(path[:-1]), path[-1]) for path in (first, second))
    return (*first, *value), (*second, *value)


def alone(leaves: Collection[str]) -> bool:
    """Whether all leaves belong to an adapter: Tunix and MaxText save the LoRA parameters without their weights."""
    others = [name for name in leaves if not has_word(name)]
    return len(others) < len(leaves) and all(name.rpartition("/")[2] in BOOKKEEPING for name in others)


def weights_of_first(name: str) -> Iterator[str]:
    """Yield the weights that a leaf A may belong to, without the ``value`` of flax nnx; none for other leaves."""
    if _stem(name).endswith(("_a", "/a")):
        yield from (weight for weight, _ in _bases(_stem(name), openpi=False))


def weights_of(name: str) -> Iterator[str]:
    """Yield the weights that a leaf of a pair, A or B, may belong to, without the ``value`` of flax nnx; none for other leaves."""
    stem = _stem(name)
    if stem.endswith(("_a", "/a", "_b", "/b")):
        yield from (weight for weight, _ in _bases(f"{stem[:-1]}a", openpi=False))


def place_of(leaf: str) -> str:
    """Return the path below which the weight of an adapter's leaf is found."""
    return "/".join(key for key in _stem(leaf).split("/")[:-1] if not _WORD.search(key))


def _bases(first: str, openpi: bool) -> Iterator[tuple[str, Writer]]:
    """Yield the weights that a leaf A may belong to.

    Args:
        openpi: whether the tree is openpi's, whose feed-forward layers have the names of qwix.
    """
    place, _, last = first.rpartition("/")
    above, _, module = place.rpartition("/")
    if last == "lora_a":
        nnx = module == "lora"
        yield from ((f"{above if nnx else place}/{w}", Writer.FLAX if nnx else Writer.OPENPI) for w in _WEIGHTS)
    elif last.endswith("_lora_a"):
        yield (
            f"{place}/{last.removesuffix('_lora_a')}".lstrip("/"),
            Writer.OPENPI if openpi and last in _FEED_FORWARD else Writer.QWIX,
        )
    elif last == "a" and module == "lora":
        outer, _, wrapper = above.rpartition("/")
        wrapped = _WRAPPED.fullmatch(wrapper)
        if wrapped is None:
            yield from ((f"{above}/{w}", Writer.GEMMA) for w in _WEIGHTS)
        elif wrapped["of"].isdecimal():
            yield from ((f"{outer}/{w}", Writer.GEMMA) for w in _WEIGHTS)
        else:
            yield from ((f"{outer}/{wrapped['of']}{w}", Writer.GEMMA) for w in ("", *(f"/{w}" for w in _WEIGHTS)))


def _stem(name: str) -> str:
    """Return the name without the ``value`` of flax nnx."""
    return name.removesuffix("/value")


def _ending(name: str) -> str:
    return name[len(_stem(name)) :]
