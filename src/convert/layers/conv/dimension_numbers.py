"""The dimension numbers of a convolution, as ``jax.lax`` takes them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPATIAL = 3  # torch has Conv1d, Conv2d and Conv3d


@dataclass(frozen=True)
class DimensionNumbers:
    """The axes of a convolution's input, kernel and result, in the letters of ``jax.lax.conv_general_dilated``.

    Attributes:
        text: as written, spaces removed.
        input: N, C and the spatial axes.
        kernel: O, I and the spatial axes, as stored. Without I every channel is convolved on its own: to one result, or with
            C in place of I, to O results each (Keras: its `depth_multiplier`).
        result: N, C and the spatial axes.
    """

    text: str
    input: str
    kernel: str
    result: str

    @property
    def spatial(self) -> str:
        """The spatial axes in the input's order, which is also the order of torch's kernel."""
        return "".join(x for x in self.input if x not in "NC")

    @property
    def depthwise(self) -> bool:
        """Whether every channel is convolved on its own."""
        return "I" not in self.kernel

    @property
    def outputs(self) -> str:
        """The kernel's axes that make the output channels, the slowest first."""
        return "CO" if "C" in self.kernel else "O"


def parse_dimension_numbers(text: str) -> DimensionNumbers:
    """Parse ``NHWC,HWIO->NHWC``, which `jax.lax.conv_dimension_numbers` takes as three words.

    >>> parse_dimension_numbers("NWC,WIO->NWC").spatial
    'W'

    Raises:
        ValueError: not such words, with the reason.
    """
    bare = "".join(text.split())
    operands, arrow, result = bare.partition("->")
    given, comma, kernel = operands.partition(",")
    if not arrow or not comma or not (given + kernel + result).isalpha():
        raise ValueError(f"{text!r} is not the dimension numbers of a convolution, such as NHWC,HWIO->NHWC")
    for word in (given, kernel, result):
        if len(set(word)) < len(word):
            raise ValueError(f"{word!r} in {text!r} has a letter twice")
    for word in (given, result):
        if not {"N", "C"} <= set(word):
            raise ValueError(f"{word!r} in {text!r} needs N (the batch) and C (the channels)")
    if "O" not in kernel:
        raise ValueError(f"the kernel {kernel!r} in {text!r} needs O, its output channels")
    spatial = set(given) - set("NC")
    if not 1 <= len(spatial) <= MAX_SPATIAL:
        raise ValueError(f"{text!r} has {len(spatial)} spatial axes; torch convolves along one to {MAX_SPATIAL}")
    if {"C", "I"} <= set(kernel):
        raise ValueError(
            f"the kernel {kernel!r} in {text!r} has C and I: it has I where the channels of a group are summed, and C where each "
            "channel is convolved on its own"
        )
    if set(result) - set("NC") != spatial or set(kernel) - set("OIC") != spatial:
        raise ValueError(f"input, kernel and result of {text!r} have different spatial axes")
    return DimensionNumbers(bare, given, kernel, result)
