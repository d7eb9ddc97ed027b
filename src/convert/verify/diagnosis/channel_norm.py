"""What a norm over channels, or a convolution, of the target and the JAX model compute where no weight is wrong: epsilons, the
number of groups, and where the window of a convolution stands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.path_pattern import parse_pattern
from convert.references.protocol import INPUT, Observed, Variant
from convert.verify.diagnosis.site import Site

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
CHANNEL_NORMS = ("group_norm", "batch_norm")
EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12, 0.0)  # Keras and praxis, torch and flax, and others that occur
MOST = 64  # paddings that are tried


def channel_norm_variants(inner: torch.nn.Module, site: Site) -> Iterator[Variant]:
    """By the rule's declaration first; nothing when the rule has no such norm there. Channels are axis 1, as torch has them."""
    step = next((s for s in site.steps(site.name) if s.word in CHANNEL_NORMS and s.spec.shape), None)
    if step is None:
        return
    said: dict[str, Any] = next(
        (dict(e) for e in site.plan.layers if parse_pattern(str(e["layer"])).match(site.name) is not None), {}
    )
    w = {name: x.detach().double().cpu().numpy() for name, x in (*inner.named_parameters(), *inner.named_buffers())}
    epsilon = float(said.get("epsilon", EPSILONS[1]))
    factor = str(said.get("target_multiplies_by", "weight"))
    epsilons = (epsilon, *(e for e in EPSILONS if e != epsilon))
    factors = (factor, *({"weight", "1+weight"} - {factor}))
    given = site.name + INPUT
    if step.word == "batch_norm":
        for e, f in itertools.product(epsilons, factors):
            yield Variant(f"batch_norm x {f}, epsilon {e:g}", partial(_batch, given, w, f, e))
        return
    channels = step.spec.size
    declared = int(said.get("num_groups", 1))
    counts = (declared, *(n for n in range(1, channels + 1) if channels % n == 0 and n != declared))
    for n, e, f in itertools.product(counts, epsilons, factors):
        yield Variant(f"{n} groups x {f}, epsilon {e:g}", partial(_group, given, w, n, f, e))


def _along(x: Array, value: Array) -> Array:
    return value.reshape(1, -1, *[1] * (x.ndim - 2))


def _affine(y: Array, w: dict[str, Array], factor: str) -> Array:
    scale = _along(y, w["weight"]) if "weight" in w else 1
    scale = 1 + scale if factor == "1+weight" else scale
    return y * scale + (_along(y, w["bias"]) if "bias" in w else 0)


def _batch(given: str, w: dict[str, Array], factor: str, epsilon: float, seen: Observed) -> Array:
    x = seen.values[given]
    with np.errstate(invalid="ignore", divide="ignore"):
        y = (x - _along(x, w["running_mean"])) / np.sqrt(_along(x, w["running_var"]) + epsilon)
    return _affine(y, w, factor)


def _group(given: str, w: dict[str, Array], groups: int, factor: str, epsilon: float, seen: Observed) -> Array:
    x = seen.values[given]
    apart = x.reshape(x.shape[0], groups, -1)
    apart = apart - apart.mean(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        y = apart / np.sqrt(np.square(apart).mean(-1, keepdims=True) + epsilon)
    return _affine(y.reshape(x.shape), w, factor)


def padding_variants(site: Site) -> Iterator[Variant]:
    """Every way to share out as many zeros before and after the input of a convolution, or to crop a transposed one's result.

    Those that are nearest to symmetric come first. Nothing where the boundary is not the output of a convolution of torch.
    """
    import torch

    if site.boundary.endswith(INPUT) or not site.name or site.name not in site.calls:
        return
    inner: Any = site.module.get_submodule(site.name)
    if not isinstance(inner, torch.nn.modules.conv._ConvNd) or inner.padding_mode != "zeros":
        return
    args, _ = site.calls[site.name]
    x = args[0].detach().double()
    weight, bias = inner.weight.detach().double(), None if inner.bias is None else inner.bias.detach().double()
    spatial = site.evidence.shape(site.boundary)[2:]
    functional, many = torch.nn.functional, len(spatial)
    options = {"stride": inner.stride, "dilation": inner.dilation, "groups": inner.groups}

    def sides(pairs: tuple[tuple[int, int], ...]) -> list[int]:
        return [n for pair in reversed(pairs) for n in pair]

    if inner.transposed:
        call = getattr(functional, f"conv_transpose{many}d")
        with torch.no_grad():
            whole = call(x, weight, **options)
        extra = [n - size for n, size in zip(whole.shape[2:], spatial, strict=True)]
        ways = [[(-low, low - more) for low in range(min(more, 0), max(more, 0) + 1)] for more in extra]

        def made(pairs: tuple[tuple[int, int], ...]) -> Array:
            added = 0 if bias is None else bias.reshape(1, -1, *[1] * many)
            return np.asarray((functional.pad(whole, sides(pairs)) + added).cpu().numpy())
    else:
        call = getattr(functional, f"conv{many}d")
        widths = [d * (k - 1) + 1 for k, d in zip(inner.kernel_size, inner.dilation, strict=True)]
        totals = [
            (size - 1) * s + k - n for size, s, k, n in zip(spatial, inner.stride, widths, x.shape[2:], strict=True)
        ]
        # A stride leaves over what the window does not reach, so a few zeros more at the end change nothing.
        ways = [
            [(low, total - low) for low in range(-k, total + k + 1)] for total, k in zip(totals, widths, strict=True)
        ]

        def made(pairs: tuple[tuple[int, int], ...]) -> Array:
            with torch.no_grad():
                return np.asarray(call(functional.pad(x, sides(pairs)), weight, bias, **options).cpu().numpy())

    nearest = sorted(itertools.product(*ways), key=lambda pairs: sum(abs(low - high) for low, high in pairs))
    for pairs in nearest[:MOST]:
        yield Variant(f"padding {sides(pairs)} by F.pad", lambda seen, pairs=pairs: made(pairs))  # type: ignore[misc]
