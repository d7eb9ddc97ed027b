"""Functions between the layers of BERT and GPT-2, with known mistakes, for the diagnosis (`Reference.variants`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from convert.references.protocol import INPUT, Observed, Variant
from convert.references.variants import Attention, attention_variants

Array = np.ndarray[Any, np.dtype[Any]]
_BERT = re.compile(rf"(?P<block>.+\.attention)\.output\.dense{INPUT}")
UNMASKED = ("padding is attended to", "attention scale missing", "attention scale doubled")
_GPT2 = re.compile(rf"(?P<block>.*h\.\d+\.attn)\.c_proj{INPUT}")


def variants(heads: int, width: int, steps: int, name: str) -> Iterator[Variant]:
    """Yield `Reference.variants` of attention with `heads` heads of a total width over `steps` positions."""
    if found := _BERT.fullmatch(name):
        block = found["block"]
        parts = {part: f"{block}.self.{word}" for part, word in (("q", "query"), ("k", "key"), ("v", "value"))}

        def read(seen: Observed, part: str) -> Array:
            return seen.values[parts[part]]

        meant = Attention(reach=None)
    elif found := _GPT2.fullmatch(name):
        fused = f"{found['block']}.c_attn"

        def read(seen: Observed, part: str) -> Array:
            return np.asarray(np.split(seen.values[fused], 3, axis=-1)["qkv".index(part)])

        meant = Attention()
    else:
        return

    def split(x: Array, count: int) -> Array:
        return x.reshape(*x.shape[:2], count, -1)

    def attended(count: int, how: Attention) -> Iterator[Variant]:
        def finish(seen: Observed, probabilities: Array) -> Array:
            out = np.einsum("bhqk,bkhd->bqhd", probabilities, split(read(seen, "v"), count))
            return np.asarray(out.reshape(*out.shape[:2], -1))

        yield from attention_variants(
            lambda seen, _: split(read(seen, "q"), count) * (width / count) ** -0.5,
            lambda seen: split(read(seen, "k"), count),
            finish,
            lambda seen: np.asarray(seen.inputs["attention_mask"]) == 0,
            steps,
            meant=how,
        )

    first, *mistakes = attended(heads, meant)
    if meant.reach is None:  # bidirectional: the only mistake in the mask is that there is one
        yield replace(first, name="attention")
        yield replace(next(attended(heads, Attention())), name="causal mask")
        mistakes = [mistake for mistake in mistakes if mistake.name in UNMASKED]
    else:
        yield first
    yield from mistakes
    for count in range(1, width + 1):
        if count != heads and width % count == 0:
            yield replace(next(attended(count, meant)), name=f"{count} heads" if count > 1 else "1 head")
