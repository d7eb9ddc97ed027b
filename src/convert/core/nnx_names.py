"""Names of leaves without the key ``value``, below which flax nnx keeps the array of each variable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

VALUE = "/value"


def without_value(names: Iterable[str]) -> dict[str, str]:
    """Return each name, and what the model calls the leaf.

    A leaf with others beside it has this name from its own model, such as the values of an attention.

    >>> without_value(["mlp/kernel/value", "att/key", "att/value"])
    {'mlp/kernel/value': 'mlp/kernel', 'att/key': 'att/key', 'att/value': 'att/value'}
    """
    every = tuple(names)
    below = Counter(name[:at] for name in every for at, character in enumerate(name) if character == "/")
    return {name: outer if below[outer := name.removesuffix(VALUE)] == 1 and outer != name else name for name in every}
