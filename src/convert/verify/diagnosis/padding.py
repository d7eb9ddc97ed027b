"""Search for another padding of a convolution: as many zeros, shared out otherwise before and after its input."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from convert.references.protocol import INPUT, Variant
from convert.verify.diagnosis.compare import Search, compare_variants
from convert.verify.diagnosis.site import Site

Array = np.ndarray[Any, np.dtype[Any]]
Pads = tuple[tuple[int, int], ...]  # zeros before and after, for each spatial axis
MISTAKE = "another padding"
MAX_PADDINGS = 64  # that are tried


def other_padding(site: Site) -> Search:
    """Search for another padding of the convolution at the boundary."""
    variants = list(_variants(site))
    if not variants:
        return Search()
    found: list[tuple[Pads, Pads]] = []

    def name(torch: Variant, jax: Variant) -> str:
        found.append((torch.params, jax.params))
        return MISTAKE

    search = compare_variants(site, variants, site.rule(site.name), name)
    if search.explanation is None or not found:
        return search
    problem, fix = _said(site.name, *found[0])
    return replace(search, explanation=replace(search.explanation, problem=problem, fix=fix))


def _said(layer: str, ours: Pads, theirs: Pads) -> tuple[str, str]:
    """Say how the paddings differ, and what to do."""
    shown = _torch_order(theirs)
    other = "or correct the reference if the JAX model does not"
    changes = [
        f"{abs(theirs[axis][side] - ours[axis][side])} {'more' if theirs[axis][side] > ours[axis][side] else 'fewer'} "
        f"{('in front of', 'behind')[side]} axis {axis + 2}"
        for axis in range(len(ours))
        for side in (0, 1)
        if theirs[axis][side] != ours[axis][side]
    ]
    problem = f"{layer} is computed with {_torch_order(ours)} zeros (as F.pad takes them); the JAX model has {', '.join(changes)}"
    if min(shown) >= 0:
        return problem, f"pad what {layer} is given by {shown} (F.pad), {other}"
    # Fewer zeros than none: the target's code has padded before.
    problem += ". These numbers are relative to what the target's code gives the layer, which has zeros of its own"
    return (
        problem,
        f"change the padding in the code in front of {layer} by {[a - b for a, b in zip(shown, _torch_order(ours), strict=True)]} (F.pad), {other}",
    )


def _variants(site: Site) -> Iterator[Variant]:
    """Yield every way to pad the input, or to crop the result of a transposed convolution; the most symmetric first.

    Yields nothing where the boundary is not the output of one of torch's convolutions.
    """
    import torch

    if site.boundary.endswith(INPUT) or not site.name or site.name not in site.calls:
        return
    conv: Any = site.module.get_submodule(site.name)
    if not isinstance(conv, torch.nn.modules.conv._ConvNd) or conv.padding_mode != "zeros":
        return
    x = site.calls[site.name].args[0].detach().double()
    weight, bias = conv.weight.detach().double(), None if conv.bias is None else conv.bias.detach().double()
    spatial = site.evidence.shape(site.boundary)[2:]
    functional, rank = torch.nn.functional, len(spatial)
    options = {"stride": conv.stride, "dilation": conv.dilation, "groups": conv.groups}

    if conv.transposed:
        call = getattr(functional, f"conv_transpose{rank}d")
        with torch.no_grad():
            uncropped = call(x, weight, **options)
        extra = [n - size for n, size in zip(uncropped.shape[2:], spatial, strict=True)]
        choices = [[(-low, low - more) for low in range(min(more, 0), max(more, 0) + 1)] for more in extra]

        def run(pads: Pads) -> Array:
            added = 0 if bias is None else bias.reshape(1, -1, *[1] * rank)
            return np.asarray((functional.pad(uncropped, _torch_order(pads)) + added).cpu().numpy())
    else:
        call = getattr(functional, f"conv{rank}d")
        widths = [d * (k - 1) + 1 for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
        totals = [
            (size - 1) * s + k - n for size, s, k, n in zip(spatial, conv.stride, widths, x.shape[2:], strict=True)
        ]
        # With a stride the last window may end before the input does, so a few more zeros at the end change nothing.
        choices = [
            [(low, total - low) for low in range(-k, total + k + 1)] for total, k in zip(totals, widths, strict=True)
        ]

        def run(pads: Pads) -> Array:
            with torch.no_grad():
                padded = functional.pad(x, _torch_order(pads))
                return np.asarray(call(padded, weight, bias, **options).cpu().numpy())

    symmetric_first = sorted(itertools.product(*choices), key=lambda pads: sum(abs(low - high) for low, high in pads))
    for pads in symmetric_first[:MAX_PADDINGS]:
        yield Variant(f"padding {_torch_order(pads)} by F.pad", lambda seen, pads=pads: run(pads), params=pads)  # type: ignore[misc]


def _torch_order(pads: Pads) -> list[int]:
    """Return the numbers as ``F.pad`` takes them: the last axis first."""
    return [n for pair in reversed(pads) for n in pair]
