"""Compare the path of a layer with the name of a module: words, of which some mean the same, and numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

SAME = (
    ("attention", "attn", "self_attn", "self_attention", "mha", "MultiHeadDotProductAttention", "MultiHeadAttention"),
    ("query", "q", "q_proj", "query_proj", "to_q", "wq", "q_einsum", "query_dense", "q_lin"),
    ("key", "k", "k_proj", "key_proj", "to_k", "wk", "key_dense", "k_lin"),
    ("value", "v", "v_proj", "value_proj", "to_v", "wv", "value_dense", "v_lin"),
    ("out", "o", "o_proj", "out_proj", "output", "output_proj", "to_out", "wo", "attn_vec_einsum", "output_dense"),
    ("norm", "ln", "layernorm", "layer_norm", "rmsnorm", "rms_norm", "LayerNorm", "RMSNorm", "bn", "batchnorm", "batch_norm", "BatchNorm", "gn", "group_norm", "GroupNorm", "normalization"),
    ("embed", "embedding", "embeddings", "emb", "Embed", "embedder", "embedders"),
    ("token", "tok", "word", "vocab", "tokens"),
    ("position", "pos", "positional"),
    ("layer", "layers", "block", "blocks", "h", "encoderblock", "resblock", "stages", "stage"),
    ("dense", "linear", "fc", "lin", "Dense", "Linear"),
    ("conv", "convolution", "conv1d", "conv2d", "Conv"),
    ("mlp", "ffn", "feed_forward", "feedforward", "ff", "ffw", "MlpBlock"),
    ("head", "lm_head", "classifier", "logits"),
    ("gate", "gate_proj"),
    ("up", "up_proj"),
    ("down", "down_proj"),
    ("final", "f", "last", "top"),
    ("patch", "patches"),
    ("shortcut", "downsample", "skip"),
)  # fmt: skip
SILENT = frozenset(
    ("params", "model", "module", "vars", "net", "network", "transformer", "state", "kernel", "weight", "w")
)
EXACT = 1.3
_NUMBER = re.compile(r"[0-9]+")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD.findall(text))


_CANONICAL = {_words(name): group[0] for group in SAME for name in group}
_LONGEST = max(map(len, _CANONICAL))


def words_of(key: str) -> tuple[str, ...]:
    """Return the words of a key; those that mean the same are the same word.

    >>> words_of("self_attn"), words_of("q_proj"), words_of("ln_1")
    (('attention',), ('query',), ('norm',))
    """
    plain, found, k = _words(key), [], 0
    while k < len(plain):
        for length in range(min(_LONGEST, len(plain) - k), 0, -1):
            if plain[k : k + length] in _CANONICAL:
                found.append(_CANONICAL[plain[k : k + length]])
                break
        else:
            length = 1
            found.append(plain[k])
        k += length
    return tuple(found)


def similarity(path: str, name: str) -> float:
    """Return how similar a path in the tree and the name of a module are: from 0 to 1, and `EXACT` for the same words in this order."""
    ours, theirs = _keys(path), _keys(name)
    flat, other = ([word for key in keys for word in key if word not in SILENT] for keys in (ours, theirs))
    if flat == other:
        return EXACT
    one, two = (keys[-1] if keys else () for keys in (ours, theirs))
    letters = SequenceMatcher(None, "".join(one), "".join(two)).ratio()
    return 0.5 * _dice(flat, other) + 0.4 * _dice(one, two) + 0.1 * float(letters)


OPPOSITES = (
    ({"pre", "before", "input", "in"}, {"post", "after", "output", "out"}),
    ({"encoder", "enc"}, {"decoder", "dec"}),
    ({"up", "gate"}, {"down"}),
    ({"gate"}, {"up"}),
    ({"image", "img", "vision", "visual"}, {"text", "txt", "language"}),
    ({"forward", "fwd"}, {"backward", "bwd"}),
    ({"source", "src"}, {"target", "tgt"}),
    ({"left", "first"}, {"right", "second"}),
    ({"actor", "policy"}, {"critic"}),
    ({"online", "student"}, {"target", "teacher"}),
    ({"cross", "encoder"}, {"self"}),
)


def opposed(path: str, name: str) -> bool:
    """Return whether one of two names has the opposite of a word of the other: ``pre_norm`` and ``post_norm``."""
    ours, theirs = ({word for key in re.split(r"[/.]", text) for word in _words(key)} for text in (path, name))
    return any(
        (ours & a - theirs and theirs & b - ours) or (ours & b - theirs and theirs & a - ours) for a, b in OPPOSITES
    )


def differing(path: str, name: str) -> bool:
    """Return whether the last keys of two names each have a word that the other lacks."""
    one, two = (set(keys[-1]) if (keys := _keys(text)) else set[str]() for text in (path, name))
    return bool(one - two and two - one)


def _keys(text: str) -> list[tuple[str, ...]]:
    return [words for key in re.split(r"[/.]", text) if (words := words_of(key))]


def _dice(a: Iterable[str], b: Iterable[str]) -> float:
    """Return the share of words that both have."""
    one, two = list(a), list(b)
    if not one and not two:
        return 1.0
    rest, common = list(two), 0
    for word in one:
        if word in rest:
            rest.remove(word)
            common += 1
    return 2 * common / (len(one) + len(two))


def template(name: str) -> str:
    return _NUMBER.sub("#", name)


def numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(name)))


@dataclass(frozen=True)
class Numbered:
    """The numbers in a name, each by its place among the names that differ in it: ``fc1`` of ``fc1``, ``fc2`` is 0 of 2."""

    places: tuple[tuple[int, int], ...]

    def marked(self, varying: Iterable[int]) -> tuple[tuple[int, int] | None, ...]:
        """Return the places, with None for numbers that are an index; a number that no other name has tells nothing."""
        index = set(varying)
        return tuple(None if k in index else p for k, p in enumerate(self.places) if k in index or p[1] > 1)


def number_places(names: Mapping[str, str]) -> dict[str, Numbered]:
    """Return the numbers of each name.

    Args:
        names: name -> what else must be the same for two names to be compared, such as the kind of layer.
    """
    seen: dict[tuple[str, str, tuple[int, ...]], set[int]] = defaultdict(set)
    for name, kind in names.items():
        found = numbers(name)
        for k, number in enumerate(found):
            seen[template(name), kind, found[:k]].add(number)
    result = {}
    for name, kind in names.items():
        found = numbers(name)
        families = [sorted(seen[template(name), kind, found[:k]]) for k in range(len(found))]
        result[name] = Numbered(
            tuple((family.index(n), len(family)) for family, n in zip(families, found, strict=True))
        )
    return result


Marked = tuple[tuple[int, int] | None, ...]


def agree(ours: Marked, theirs: Marked) -> bool | None:
    """Return whether the numbers of two names say that they are the same layer; None if they say nothing.

    An index that has no number in a path is a stacked axis.
    """
    if ours.count(None) == theirs.count(None) and _sizes(ours) == _sizes(theirs) and _order(ours) != _order(theirs):
        return False
    fixed = [[place for place in places if place is not None] for places in (ours, theirs)]
    if not same_families(ours, theirs):
        return None
    return fixed[0] == fixed[1] if fixed[0] else None


def same_families(ours: Marked, theirs: Marked) -> bool:
    """Return whether two layers are members of families of the same sizes; a layer that occurs once is of none."""
    return _sizes(ours) == _sizes(theirs)


def _sizes(places: Marked) -> list[int]:
    return [place[1] for place in places if place is not None]


def _order(places: Marked) -> list[bool]:
    return [place is None for place in places]
