"""What a projection's shape says about its equation, and what it leaves open."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from convert.layers.draft import AxisLetters


@dataclass(frozen=True)
class EquationGuess:
    """An equation that the shape allows.

    Attributes:
        equation: with the letters of the draft.
        inputs: letters of its inputs.
        why: the reason for this guess.
        apart: the targets that it would be split into.
    """

    equation: str
    inputs: str
    why: str
    apart: str = ""


# Names in Gemma's code (github.com/google-deepmind/gemma, gemma/gm/nn/_modules.py) -> equations: D is the width, N or K
# are heads, H is the width of one, C is the number of fused tensors, F is the width of a hidden layer.
KNOWN: Mapping[str, tuple[tuple[str, str], ...]] = {
    "q_einsum": (("...D,NDH->...NH", ""),),
    "kv_einsum": (("...D,CKDH->C...KH", "{k,v}_proj"),),
    "qkv_einsum": (("...D,CNDH->C...NH", "{q,k,v}_proj"),),
    "attn_vec_einsum": (("...NH,NHD->...D", ""),),
    "gating_einsum": (("...D,CFD->C...F", "{gate,up}_proj"), ("...D,CDF->C...F", "{gate,up}_proj")),
}
_ROLES = {"D": "width", "N": "heads", "K": "heads", "H": "head", "C": "parts", "F": "width"}


def known_forms(
    name: str, shape: tuple[int, ...], widths: Collection[int], letters: AxisLetters
) -> list[EquationGuess]:
    """The equations of a weight whose name says what it is: those whose D is a width of the tree, if any is."""
    forms, wide = [], []
    for equation, apart in KNOWN.get(name, ()):
        weight = equation.split(",")[1].split("->")[0]
        sizes = dict(zip(weight, shape, strict=False))
        if len(weight) != len(shape) or ("C" in sizes and sizes["C"] != apart.count(",") + 1):
            continue
        again = {letter: int(letter == "F" and sizes["F"] == sizes["D"]) for letter in weight}
        named = {letter: letters.named(_ROLES[letter], n, again[letter]) for letter, n in sizes.items()}
        text = "".join(named.get(c, c) for c in equation)
        inputs = "".join(named[c] for c in equation.split(",")[0].removeprefix("..."))
        forms.append(EquationGuess(text, inputs, f"Gemma's code has this name for {equation}", apart))
        if sizes["D"] in widths and sizes.get("F") not in widths:
            wide.append(forms[-1])
    return wide or forms


def lora_form(shape: tuple[int, ...], letters: AxisLetters) -> EquationGuess:
    """The equation of a matrix to which a LoRA pair is added: the first of the pair has the axis of the inputs."""
    into, out = letters.named("width", shape[0]), letters.named("width", shape[1], int(shape[0] == shape[1]))
    return EquationGuess(f"...{into},{into}{out}->...{out}", into, "(in, out), as the first of its pair has the inputs")


def projections(
    shape: tuple[int, ...],
    bias: tuple[int, ...] | None,
    key: str,
    role: str | None,
    widths: Collection[int],
    letters: AxisLetters,
) -> list[EquationGuess]:
    """The equations that a weight may have: one when names and shapes tell, several when they do not.

    Args:
        shape: of the weight, two to four axes.
        bias: shape of its bias.
        key: what the leaf is called: ``kernel`` is flax's, ``weight`` Equinox's.
        role: ``in`` for queries, keys and values, ``out`` for the projection behind them, None when its name does not say.
        widths: sizes of vectors in the tree, such as norm scales: an axis of such a size is more likely a width than heads.
        letters: gives the axes their letters.
    """
    if len(shape) == 2:
        return _matrices(shape, bias, key, letters)
    if len(shape) == 3:
        found = _heads(shape, bias, role, widths, letters)
        return found or ([_split(shape, 0, "in", letters), _split(shape, 2, "out", letters)] if role else [])
    a, b, c, d = (letters.named("width", n, k) for k, n in enumerate(shape))
    return [
        EquationGuess(f"...{b},{a}{b}{c}{d}->...{a}{c}{d}", b, "the second axis is the input"),
        EquationGuess(
            f"...{c},{a}{b}{c}{d}->{a}...{b}{d}", c, "Gemma's keys and values, when the target has one tensor of each"
        ),
        EquationGuess(f"...{a},{a}{b}{c}{d}->...{b}{c}{d}", a, "the first axis is the input"),
    ]


def _matrices(
    shape: tuple[int, ...], bias: tuple[int, ...] | None, key: str, letters: AxisLetters
) -> list[EquationGuess]:
    a, b = shape
    if a == b:
        d, e = letters.named("width", a), letters.named("width", a, 1)
        return [
            EquationGuess(f"...{d},{d}{e}->...{e}", d, "(in, out): flax, Haiku, Keras"),
            EquationGuess(f"...{d},{e}{d}->...{e}", d, "(out, in): Equinox, and code that writes w @ x"),
        ]
    first, second = letters.named("width", a), letters.named("width", b)
    forward = EquationGuess(
        f"...{first},{first}{second}->...{second}", first, "(in, out), as flax, Haiku and Keras keep it"
    )
    back = EquationGuess(f"...{second},{first}{second}->...{first}", second, "(out, in), as Equinox keeps it")
    if bias == (b,):
        return [EquationGuess(forward.equation, forward.inputs, "the bias has the size of the last axis")]
    if bias == (a,):
        return [EquationGuess(back.equation, back.inputs, "the bias has the size of the first axis")]
    return [back if key == "weight" else forward]


def _heads(
    shape: tuple[int, ...],
    bias: tuple[int, ...] | None,
    role: str | None,
    widths: Collection[int],
    letters: AxisLetters,
) -> list[EquationGuess]:
    wide = [k for k, n in enumerate(shape) if n in widths]
    forms: list[EquationGuess] = []
    for k in (0, 2, 1):
        heads, head = (n for j, n in enumerate(shape) if j != k)
        likely = wide == [k] or len(wide) != 1 or bias == (heads, head)
        fits = {"in": bias in (None, (heads, head)), "out": bias in (None, (shape[k],)) and (k != 1 or wide == [k])}
        wanted = [way for way in ("in", "out") if likely and fits[way] and role in (None, way)]
        forms += [_split(shape, k, way, letters) for way in wanted]
    return forms


def _split(shape: tuple[int, ...], k: int, way: str, letters: AxisLetters) -> EquationGuess:
    """The equation in which axis `k` is split into heads, or put together from them."""
    heads, head = (n for j, n in enumerate(shape) if j != k)
    d, n, h = letters.named("width", shape[k]), letters.named("heads", heads), letters.named("head", head)
    weight = (d + n + h, n + d + h, n + h + d)[k]
    if way == "in":
        return EquationGuess(f"...{d},{weight}->...{n}{h}", d, f"axis {k} is the input, split into heads")
    return EquationGuess(f"...{n}{h},{weight}->...{d}", n + h, f"axis {k} is the result, put together from heads")
