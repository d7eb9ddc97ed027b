"""The configuration of each block of a model whose config.json has lists with a value for each block: diffusers' U-Nets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from convert.planning.modules.formulas import Keys

WIDTHS = "block_out_channels"
LAYERS = "layers_per_block"
ACROSS = "only_cross_attention"  # keys and values of the first attention are made of the text, too
CROSS_WIDTH = "cross_attention_dim"


def blocks(
    keys: Keys, below: tuple[str, ...], key: str, default: str | None = None, backwards: bool = False
) -> Iterator[tuple[tuple[str, ...], Any, Keys]]:
    """Yield name, type and configuration of each block that a key names: of a list with a value for each block, its value.

    Args:
        below: name of the list of blocks.
        default: type where no key states one.
        backwards: whether the lists have the last block first.
    """
    types = keys.config.get(key, keys.defaults.get(key, default))
    if isinstance(types, list):
        order = range(len(types))[::-1] if backwards else range(len(types))
        for k, of in enumerate(types):
            yield (*below, str(k)), of, _of_block(keys, order, k, (*below, str(k)))
    elif types is not None:
        yield below, types, _of_block(keys, (), -1, below)


def _of_block(keys: Keys, order: Sequence[int], k: int, below: tuple[str, ...]) -> Keys:
    """Return the configuration of a block, with what its place adds.

    `last`: no block follows. `widens`: the block before it has another width. `first`: the width of the first block. Of each
    layer, the width that comes in (`entering`) and the width of the skip connection that is joined to it (`skipped`); of the first
    attention, that of what its keys are made of (`attended`).

    Args:
        order: the blocks' places in the lists, in the order of the model; none for a block that follows all.
        k: place of the block in the order.
    """
    at = order[k] if order else -1
    own, defaults = (_values(stated, len(order), at) for stated in (keys.config, keys.defaults))
    chosen_by: dict[str, str] = {}
    names = {key: f"{key}.{at % len(value)}" for key, value in keys.config.items() if value != own[key]}
    stated = own if WIDTHS in keys.config else defaults
    widths = keys.value(WIDTHS)
    if isinstance(widths, list) and len(widths) == (len(order) or len(widths)) > 0:
        before, after = (order[max(k - 1, 0)], order[min(k + 1, len(order) - 1)]) if order else (at, at)
        layers = own.get(LAYERS, defaults.get(LAYERS))
        layers = layers if isinstance(layers, int) else 0
        places = {"entering": [before, *[at] * layers], "skipped": [*[at] * layers, after]}
        stated["first"], own["widens"] = widths[0], widths[at] != widths[before]
        names["first"] = f"{WIDTHS}.0"
        for name, found in places.items():
            stated[name] = [widths[one] for one in found]
            names |= {f"{name}.{layer}": f"{WIDTHS}.{one % len(widths)}" for layer, one in enumerate(found)}
        across = own.get(ACROSS) is True
        own["attended"] = keys.value(CROSS_WIDTH) if across else widths[at]
        names["attended"] = CROSS_WIDTH if across else f"{WIDTHS}.{at % len(widths)}"
        chosen_by = {"attended": f", as {ACROSS} is {str(across).lower()}"}
    own["last"] = not order or k == len(order) - 1
    return Keys(own, defaults, keys.before, len(below), names, chosen_by)


def _values(stated: Mapping[str, Any], count: int, at: int) -> dict[str, Any]:
    """Return the value of a block for each key with a list of values; of the block that follows all, the last."""
    return {
        key: value[at] if isinstance(value, list) and value and len(value) == (count or len(value)) else value
        for key, value in stated.items()
    }
