"""What the families were published with: facts that no weight holds, each with its source, apart from the rules.

The JAX model of a reference is often built from the facts of the rules, so a wrong fact is on both sides of the comparison.
This table is the other side: its numbers were copied from upstream's code, not from the rules. A test compares it with the
configuration classes of the packages that are installed there. There is a module for each writer of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from convert.references.published import (
    flax_transformers,
    gemma,
    gemma4,
    keras_hub,
    maxtext,
    openpi,
    policies,
    recurrentgemma,
    scenic,
    t5gemma,
    t5x,
    tabfm,
    timesfm,
    vision,
)
from convert.references.published.entry import Every, OneOf, Published

PUBLISHED: Mapping[str, tuple[Published, ...]] = {
    **timesfm.MODELS,
    **tabfm.MODELS,
    **gemma.MODELS,
    **gemma4.MODELS,
    **t5gemma.MODELS,
    **openpi.MODELS,
    **policies.MODELS,
    **recurrentgemma.MODELS,
    **vision.MODELS,
    **scenic.MODELS,
    **flax_transformers.MODELS,
    **t5x.MODELS,
    **maxtext.MODELS,
    **keras_hub.MODELS,
}


def published(model: str, sizes: Mapping[str, int]) -> Iterator[Published]:
    """Yield what holds for a model with these sizes.

    Args:
        model: name of the rules.
    """
    for entry in PUBLISHED.get(model, ()):
        if all(sizes.get(letter) == size for letter, size in entry.sizes.items()):
            yield entry


__all__ = ["PUBLISHED", "Every", "OneOf", "Published", "published"]
