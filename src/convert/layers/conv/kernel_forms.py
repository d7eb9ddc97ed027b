"""The convolutions that a kernel could be, by its shape and the names that libraries give."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from convert.layers.draft import AxisLetters

Shape = tuple[int, ...]
SPATIAL = ("W", "HW", "DHW")
# Default names that libraries give to unnamed modules: the class name.
CLASS_OF_CONV = re.compile(r"Conv_[0-9]+|conv[123]_d(_[0-9]+)?|conv[123]d(_([0-9]+|\{[0-9,]+\}))?")


@dataclass(frozen=True)
class ConvForm:
    """A convolution that a kernel could be: its dimension numbers, and whether it is transposed, by JAX's flag or without."""

    numbers: str
    transposed: bool
    turned: bool
    out: int
    why: str

    @property
    def kind_name(self) -> str:
        return "conv_transpose" if self.transposed else "conv"

    @property
    def lines(self) -> tuple[str, ...]:
        return ("transpose_kernel: true",) if self.turned else ()


def conv_forms(key: str, shape: Shape, bias: Shape | None, name: str) -> list[ConvForm]:
    """The convolutions that a kernel with three to five axes could be.

    Which axis is which, and what a transposed one does, is the library's own: flax 0.12.8 ``linen/linear.py`` (ConvTranspose: its
    kernel is flipped, and has its channels exchanged, with `transpose_kernel`), Keras 3.15.1 ``backend/jax/nn.py`` conv_transpose
    (always so), Haiku 0.0.17 ``_src/conv.py`` ConvNDTranspose (H W O I, not flipped), Equinox 0.13.8 ``nn/_conv.py`` (O I H W).

    Args:
        key: what the leaf is called, which tells the library.
        shape: of the kernel.
        bias: shape of its bias.
        name: what the module is called.
    """
    words = SPATIAL[len(shape) - 3]
    last = f"N{words}C,{words}IO->N{words}C"
    if key == "weight":
        first = f"NC{words},OI{words}->NC{words}"
        forms = [
            ConvForm(first, False, False, shape[0], "a convolution"),
            ConvForm(first, True, False, shape[0], "Equinox's ConvTranspose"),
        ]
    else:
        forms = [ConvForm(last, False, False, shape[-1], "a convolution")]
        if key.isdecimal():
            forms.append(ConvForm(last, True, True, shape[-2], f"Keras's Conv{len(words)}DTranspose"))
        elif key == "w":
            swapped = last.replace("IO", "OI")
            forms.append(ConvForm(swapped, True, False, shape[-2], f"Haiku's Conv{len(words)}DTranspose"))
        else:
            forms += [
                ConvForm(last, True, False, shape[-1], "flax's ConvTranspose, as it is by default"),
                ConvForm(last, True, True, shape[-2], "flax's ConvTranspose with transpose_kernel=True"),
            ]
    if "transpose" in name.lower() or "deconv" in name.lower():
        forms = [form for form in forms if form.transposed]
    elif CLASS_OF_CONV.fullmatch(name):
        forms = [form for form in forms if not form.transposed]
    sizes = [n for n in bias or () if n > 1]
    fitting = [form for form in forms if bias is None or sizes in ([form.out], [] if form.out == 1 else [form.out])]
    return fitting or forms


def conv_axes(form: ConvForm, shape: Shape, letters: AxisLetters, varies: Collection[int] = ()) -> str:
    """The letters of a kernel's axes, as stored.

    Args:
        varies: the axes whose sizes differ from layer to layer.
    """
    order = form.numbers.split(",")[1].split("->")[0]
    sizes = dict(zip(order, shape, strict=True))
    spatial = [x for x in order if x not in "OIC"]
    first, second = ("C", "O") if "C" in order else ("O", "I")  # Keras's depthwise kernels: channels, results of each
    same_size = int(sizes[first] == sizes[second] > 1)
    roles = {x: ("kernel", sizes[x], k) for k, x in enumerate(spatial)}
    roles[first] = ("width", sizes[first], 0)
    roles[second] = ("one" if sizes[second] == 1 else "width", sizes[second], same_size)
    roles |= {order[k]: ("varying out" if order[k] == first else "varying in", 0, 0) for k in varies}
    made = {x: letters.named(*role) for x, role in roles.items()}
    return "".join(made[x] for x in order)
