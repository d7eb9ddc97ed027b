"""Elements between those of an image, taken at computed places: what other settings of the target's operation give there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from convert.programs.program import Operation

Array = np.ndarray[Any, np.dtype[Any]]
SAMPLES = "grid_sampler_2d"
MODES, BEYOND = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
NAMES = {"interpolation_mode": "mode", "padding_mode": "padding_mode", "align_corners": "align_corners"}


def said(settings: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say the settings that are not the other ones, as `torch.nn.functional.grid_sample` takes them."""
    words = {"interpolation_mode": MODES, "padding_mode": BEYOND, "align_corners": (False, True)}
    return " and ".join(f"{NAMES[key]}={words[key][settings[key]]}" for key in words if settings[key] != other[key])


def with_other_settings(operation: Operation, given: tuple[Array, Array]) -> Iterator[tuple[Mapping[str, Any], Array]]:
    """Yield (settings, result) of an operation that samples, for settings that are not its own; those with one change first.

    Args:
        given: the image and the places.
    """
    import torch

    own = {key: operation.settings[key] for key in NAMES}
    every = [dict(zip(own, one, strict=True)) for one in itertools.product((0, 1), (0, 1, 2), (False, True))]
    image, places = (torch.from_numpy(np.array(x)) for x in given)
    for settings in sorted(every, key=lambda one: sum(one[key] != own[key] for key in own)):
        if settings != own:
            made = torch.nn.functional.grid_sample(
                image,
                places,
                MODES[settings["interpolation_mode"]],
                BEYOND[settings["padding_mode"]],
                align_corners=settings["align_corners"],
            )
            yield settings, made.numpy()
