"""List what a kernel with three or more axes could be: every reading that names and shapes allow, as lines of a rule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from convert.drafting.axis_letters import Letters
from convert.drafting.stacked_axes import STACK_INDICES
from convert.layers.conv.kernel_forms import conv_axes, conv_forms
from convert.layers.draft import flow, plain
from convert.layers.linear.einsum_guess import EquationGuess

Shape = tuple[int, ...]
# Names that libraries give to modules without a name: that of the class.
CLASS_OF_DENSE = re.compile(r"(Dense|DenseGeneral|Einsum)_[0-9]+|(einsum_)?dense(_[0-9]+)?")


@dataclass(frozen=True)
class Reading:
    """One possible meaning of a kernel.

    Attributes:
        kind_name: the kind of the target.
        lines: what a rule says of it besides: ``einsum: ...``.
        why: what it is, in the words of its library.
        inside: what the target says besides its module: ``einsum: ...``.
        stacked: whether the first axis counts layers.
    """

    kind_name: str
    lines: tuple[str, ...]
    why: str
    inside: str = ""
    stacked: bool = False

    def text(self, module: str) -> str:
        """Return its lines, the target first."""
        named = f"{module}.{{{STACK_INDICES[0]}}}" if self.stacked else module
        target = f"{{module: {flow(named)}, {self.inside}}}" if self.inside else plain(named)
        return "\n".join((f"{self.kind_name}: {target}", *self.lines))


def line_readings(
    key: str, shape: Shape, bias: Shape | None, name: str, forms: Sequence[EquationGuess], letters: Letters
) -> list[Reading]:
    """List what a kernel with three axes could be: a convolution over time, stacked layers, blocks, heads.

    Args:
        forms: the equations that split an axis into heads, or put heads together.
    """
    a, b, c = shape
    equinox = key == "weight"
    out = b if equinox else c
    found = [Reading("linear", (f"einsum: {form.equation}",), form.why) for form in forms]
    if bias in (None, (a, out)):
        into = letters.named("width", c if equinox else b)
        made = letters.named("width", out, int(b == c))
        weight = made + into if equinox else into + made
        stack = (f"einsum: ...{into},{weight}->...{made}", f"stacked: {{{STACK_INDICES[0]}: 0}}")
        found.append(Reading("linear", stack, f"{a} Dense layers stacked on axis 0 (vmap, scan)", stacked=True))
        block = letters.named("heads", a)
        own = f"...{block}{into},{block}{weight}->...{block}{made}"
        blocks = f"one tensor of {a} blocks (block diagonal), in a target that computes this"
        found.append(Reading("linear", (f"einsum: {own}",), blocks, inside=f"einsum: {flow(own)}"))
    if CLASS_OF_DENSE.fullmatch(name):
        return found
    wanted = [n for n in bias or () if n > 1]
    if bias is None or (len(wanted) <= 1 and (len(bias) == 1 or equinox)):
        for form in conv_forms(key, shape, bias, name):
            lines = (f"dimension_numbers: {form.numbers}", f"axes: {conv_axes(form, shape, letters)}", *form.lines)
            found.append(Reading(form.kind_name, lines, f"{form.why}, along time"))
    return found


def map_readings(key: str, shape: Shape, bias: Shape | None, name: str, letters: Letters) -> list[Reading]:
    """List what a kernel with four axes could be if its name is not that of a convolution."""
    a, b, c, d = (letters.named("width", n, sum(m == n for m in shape[:k])) for k, n in enumerate(shape))
    split = (
        (f"...{a}{b},{a}{b}{c}{d}->...{c}{d}", shape[2:], "axes 0 and 1 are the inputs"),
        (f"...{a},{a}{b}{c}{d}->...{b}{c}{d}", shape[1:], "axis 0 is the input"),
        (f"...{b},{a}{b}{c}{d}->...{a}{c}{d}", (shape[0], *shape[2:]), "axis 1 is the input"),
        (f"...{a}{b}{c},{a}{b}{c}{d}->...{d}", shape[3:], "axes 0, 1 and 2 are the inputs"),
    )
    found = []
    if (bias is None or sum(n > 1 for n in bias) <= 1) and not CLASS_OF_DENSE.fullmatch(name):
        for form in conv_forms(key, shape, bias, name):
            lines = (f"dimension_numbers: {form.numbers}", f"axes: {conv_axes(form, shape, letters)}", *form.lines)
            found.append(Reading(form.kind_name, lines, form.why))
    found += [Reading("linear", (f"einsum: {e}",), why) for e, takes, why in split if bias in (None, takes)]
    return found
