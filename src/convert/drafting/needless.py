"""Find the leaves that no model needs: states of optimizers, counters, random generators.

An optimizer's state is known by its name (``opt_state``, ``policyOptimizerState``), at any depth, or by its moments: two trees with
the paths of the weights that are called ``mu`` and ``nu``, such as optax saves them in a tuple without names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from convert.checkpoints.source import Leaf
from convert.planning.ambiguity import MEANING, words_of

_FULL = {"optimizer", "optimizers", "optimiser", "optimisers"}
_SHORT = {"opt", "opts", "optim", "optims", "optax"}
_NAMED = {"param_states", "optstate", "optstates"}  # T5X; without a border between the words
_RANDOM = {"rng", "rngs", "prng", "key", "keys", "seed", "random"}
# What optimizers call the trees that they keep for the weights, in pairs and alone.
_PAIRS = (("m", "v"), ("first_moment", "second_moment"), ("e_g", "e_x"))
_ALONE = {
    *("trace", "momentum", "momentum_buffer", "velocity", "acc_grads", "grad_acc", "sum_of_squares", "prev_updates"),
    *("mu", "nu", "exp_avg", "exp_avg_sq", "v_row", "v_col"),
}
_WEIGHTS = ("target", "model", "params")  # the weights that an optimizer object holds: flax.optim, T5X, nnx.Optimizer

Tree = Mapping[str, Leaf]  # path below the tree -> leaf


@dataclass(frozen=True)
class Needless:
    """The leaves of a checkpoint that no model needs.

    Attributes:
        states: leaf of an optimizer's state -> path of the state.
        random: leaves of random generators.
        counters: integers and flags.
    """

    states: Mapping[str, str]
    random: frozenset[str]
    counters: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return name in self.states or name in self.random or name in self.counters


def find_needless(leaves: Mapping[str, Leaf]) -> Needless:
    """Return the leaves that no model needs."""
    return Needless(
        optimizer_states(leaves),
        frozenset(name for name, leaf in leaves.items() if _is_random(name, leaf)),
        frozenset(name for name, leaf in leaves.items() if is_counter(leaf)),
    )


def is_counter(leaf: Leaf) -> bool:
    """Whether a leaf is a counter or a flag."""
    return leaf.spec.shape == () and leaf.spec.dtype.startswith(("int", "uint", "bool"))


def _is_random(name: str, leaf: Leaf) -> bool:
    """Whether a leaf is the state of a random generator: by its path, or two numbers called ``key``."""
    keys = name.split("/")
    if any(key in ("rngs", "rng", "seed_generator") or (k == 0 and "rng" in key) for k, key in enumerate(keys)):
        return True
    last = keys[-2] if keys[-1] == "value" and len(keys) > 1 else keys[-1]
    return leaf.spec.dtype == "uint32" and leaf.spec.shape[-1:] in ((2,), (4,)) and not _RANDOM.isdisjoint(words_of(last))  # fmt: skip


def optimizer_states(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Return the leaves of optimizers' states, each with the path of the state."""
    trees = _trees(leaves)
    states = set(_named(trees))
    states |= set(_by_moments(trees, states))
    found: dict[str, str] = {}
    for name in leaves:
        keys = name.split("/")
        state = next((path for k in range(1, len(keys) + 1) if (path := "/".join(keys[:k])) in states), None)
        if state is not None:
            found[name] = state
    return found


def _trees(leaves: Mapping[str, Leaf]) -> dict[str, dict[str, Leaf]]:
    """Return the leaves below each path."""
    trees: dict[str, dict[str, Leaf]] = defaultdict(dict)
    for name, leaf in leaves.items():
        keys = name.split("/")
        for k in range(1, len(keys) + 1):
            trees["/".join(keys[:k])]["/".join(keys[k:])] = leaf
    return trees


def _named(trees: Mapping[str, Tree]) -> Iterator[str]:
    """Yield the states that are called so. The weights that an optimizer object holds are none of it."""
    known: list[str] = []
    for path in sorted(trees, key=lambda path: path.count("/")):
        if not _called_optimizer(path.rpartition("/")[2], trees[path]) or path.startswith(
            tuple(f"{x}/" for x in known)
        ):
            continue
        known.append(path)
        inside = {inner.split("/")[0] for inner in trees[path]}
        held = next((word for word in _WEIGHTS if word in inside and _holds(trees, path, word)), None)
        if held is None:
            yield path
        else:
            yield from (f"{path}/{word}" for word in inside if word != held)


def _called_optimizer(key: str, below: Tree) -> bool:
    """Whether the name says that a tree is the state of an optimizer; a short name only of a tree that looks like one."""
    words = set(words_of(key))
    if key in _NAMED or words & _FULL or (words & _SHORT and words & {"state", "states"}):
        return True
    inside = {inner for path in below for inner in path.split("/")}
    moments = any(inside.issuperset(pair) for pair in _PAIRS) or not inside.isdisjoint(_ALONE)
    return bool(words & _SHORT) and (moments or any(map(is_counter, below.values())))


def _holds(trees: Mapping[str, Tree], path: str, word: str) -> bool:
    """Whether a tree in an optimizer is the weights themselves: no tree outside has the same paths, and moments are beside it."""
    own = trees[f"{path}/{word}"].keys()
    outside = (
        other for other, below in trees.items() if not f"{other}/".startswith(f"{path}/") and below.keys() == own
    )
    return len(own) > 1 and len(trees[path]) > len(own) and next(outside, None) is None


def _by_moments(trees: Mapping[str, Tree], states: set[str]) -> Iterator[str]:
    """Yield the states that have no name, by the moments in them."""
    named = {path: tree for path, tree in trees.items() if _called_moments(path, trees)}
    moments: dict[str, str] = {}
    for path, below in named.items():
        if not any(f"{path}/".startswith(f"{state}/") for state in states):
            weights = _weights_of(path, below, trees, named)
            if weights is not None:
                moments[path] = weights
    found: set[str] = set()
    for path, weights in moments.items():
        keys, others = path.split("/"), weights.split("/")
        shared = next(
            (k for k, (one, other) in enumerate(zip(keys, others, strict=False)) if one != other), len(others)
        )
        highest = ("/".join(keys[:k]) for k in range(shared + 1, len(keys) + 1))
        found.add(next(state for state in highest if state == path or _is_state(trees, state, moments, trees[weights])))
    yield from (path for path in found if not any(path.startswith(f"{other}/") for other in found))


def _called_moments(path: str, trees: Mapping[str, Tree]) -> bool:
    """Whether a tree has the name of what an optimizer keeps for each weight, and a tree with the other name of a pair beside it."""
    above, _, key = path.rpartition("/")
    beside = f"{above}/" if above else ""
    paired = any(f"{beside}{one[one[0] == key]}" in trees for one in _PAIRS if key in one)
    return "" not in trees[path] and (paired or key in _ALONE)


def _weights_of(path: str, below: Tree, trees: Mapping[str, Tree], named: Mapping[str, Tree]) -> str | None:
    """Return the tree with the paths of some moments that is nearest to them; None: there is none.

    The moments of a group of weights have the paths of some of them. One layer has the paths of many others.
    """
    above, _, key = path.rpartition("/")
    is_network = any("/" in inner for inner in below)
    if not is_network and key not in ("mu", "nu"):
        return None
    found: dict[str, int] = {}
    for weights, others in trees.items():
        if len(others) < len(below) or weights in named or not others.keys() >= below.keys():
            continue
        place, _, name = weights.rpartition("/")
        if f"{path}/".startswith(f"{weights}/") or (place == above and name not in _WEIGHTS):
            continue
        if is_network or others.keys() == below.keys():
            pairs = zip(path.split("/"), weights.split("/"), strict=False)
            found[weights] = next((k for k, (one, other) in enumerate(pairs) if one != other), 0)

    def suits(weights: str) -> tuple[bool, int, int]:
        """An average of the updates has the same paths, too."""
        is_copy = not MEANING.keys().isdisjoint(words_of(weights.rpartition("/")[2]))
        return not is_copy, found[weights], -len(trees[weights])

    return max(found, key=suits) if found else None


def _is_state(trees: Mapping[str, Tree], path: str, moments: Mapping[str, str], weights: Tree) -> bool:
    """Whether a tree has nothing but moments, numbers, and trees with names and with the paths and shapes of weights."""
    named = {name.rpartition("/")[2] for name in weights}
    for inner, leaf in trees[path].items():
        keys = [path.rpartition("/")[2], *inner.split("/")]
        if any("/".join([path, *keys[1:k]]) in moments for k in range(1, len(keys) + 1)):
            continue
        if len(leaf.spec.shape) < 2 and (leaf.spec.shape == () or keys[-1] not in named):
            continue
        copied = (k for k in range(1, len(keys)) if (twin := weights.get("/".join(keys[k:]))) and _ends(leaf, twin))
        if keys[next(copied, 1) - 1].isdecimal():
            return False
        if not any("/".join(keys[k:]) in weights for k in range(1, len(keys))):
            return False
    return True


def _ends(leaf: Leaf, twin: Leaf) -> bool:
    """Whether a leaf has the shape of another one, maybe once for each of several steps."""
    shape = twin.spec.shape
    return leaf.spec.shape[len(leaf.spec.shape) - len(shape) :] == shape
