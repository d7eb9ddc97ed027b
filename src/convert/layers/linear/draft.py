"""How a projection is drafted: the equations that its names and its shape leave open."""

from __future__ import annotations

from collections.abc import Sequence

from convert.layers.draft import KERNELS, DraftContext, DraftEntry, Group, Layer, flow, plain
from convert.layers.linear.einsum_guess import KNOWN, EquationGuess, known_forms, lora_form, projections

QUERIES = ("query", "key", "value", "q", "k", "v", "q_proj", "k_proj", "v_proj", "query_dense", "key_dense", "value_dense", "query_proj", "key_proj", "value_proj", "qkv")  # fmt: skip
OUTPUTS = ("out", "o", "post", "o_proj", "out_proj", "output", "output_dense", "output_proj")


def draft_weight(context: DraftContext, layer: Layer, main: str, bias: str | None) -> DraftEntry:
    g = layer.leaves[main]
    entry = DraftEntry(g.leaves[0])
    known = guessed_by_name(context, layer, main)
    pair = [context.partner(layer, role) for role in ("lora_a", "lora_b")]
    biased = layer.leaves[bias].shape if bias else context.partner_shape(layer, "bias")
    role = attention_role(context, layer)
    forms = (
        known
        or ([lora_form(g.shape, context.letters)] if all(pair) else [])
        or projections(g.shape, biased, main, role, context.widths, context.letters)
    )
    _say_equation(entry, forms, g.shape, main)
    context.say_leaves(entry, layer, main, bias)
    context.say_normalized(entry, layer)
    if pair[0] and pair[1]:
        _say_lora(context, entry, layer, forms[0], pair[0], pair[1])
    _ask_flattened(context, entry, g, forms[0])
    module = context.module(layer.steps if main in (*KERNELS, "0", "1") else g.steps)
    apart = known[0].apart if known else ""
    context.ask_target(
        entry, layer, {"linear": ""}, "", f"{module.rpartition('.')[0] or module}.{apart}" if apart else module
    )
    if context.partner(layer, "weight_norm"):
        kept = f"linear: {{module: {plain(module)}, parametrization: weight_norm}}"
        entry.offer([(kept, "if the target keeps its two tensors")])
    return entry


def _say_equation(entry: DraftEntry, forms: Sequence[EquationGuess], shape: tuple[int, ...], main: str) -> None:
    if len(forms) == 1:
        entry.say("einsum", forms[0].equation, f"guess: {forms[0].why}")
        return
    shown = " x ".join(map(str, shape))
    known = [(f"einsum: {f.equation}", f.why) for f in forms]
    entry.ask("einsum", f"the sizes {shown} do not tell which axes are inputs", known, main)


def _say_lora(
    context: DraftContext, entry: DraftEntry, layer: Layer, form: EquationGuess, first: str, second: str
) -> None:
    shape = context.partner_shape(layer, "lora_a")
    assert shape is not None
    rank = context.letters.named("rank", shape[-1])
    into, out = form.inputs, form.equation[-1]
    pair = f'einsum: "...{into},{into}{rank},{rank}{out}->...{out}", from: {flow(first)}, times: {flow(second)}'
    if context.partner(layer, "lora_of") == "nnx":
        entry.say("plus", f"{{{pair}}}", "guess: flax nnx's pair, which is added as it is; it is merged here")
        return
    ways = [
        (f"plus: {{{pair}, scale: 1}}", ""),
        (f"plus: {{{pair}, scale: 16/{rank}}}", "alpha over the rank; your alpha in place of 16"),
    ]
    question = "by which scale does the source multiply the pair before it adds it? It is merged here"
    entry.ask("plus", question, ways, value=f"{{{pair}, scale: ask}}")


def _ask_flattened(context: DraftContext, entry: DraftEntry, g: Group, form: EquationGuess) -> None:
    into = g.shape[0]
    channels = next((n for n in sorted(context.channels, reverse=True) if 1 < n < into and into % n == 0), None)
    if channels and len(g.shape) == 2 and into not in context.widths:
        last = context.letters.named("width", channels)
        line = f"flattened: {{{form.inputs}: RS{last}}}"
        how = "rows, columns, channels; `axes` gives the sizes: R: {is: rows, equals: 7}, and S"
        question = "is the input a map of a convolution, flattened? If not, take the line away"
        entry.ask("flattened", question, [(line, how)])


def guessed_by_name(context: DraftContext, layer: Layer, main: str) -> list[EquationGuess]:
    """Return the equations that the name of the leaf, or of the module, says."""
    named = main if main in KNOWN else layer.hint
    return known_forms(named, layer.leaves[main].shape, context.widths, context.letters)


def attention_role(context: DraftContext, layer: Layer) -> str | None:
    """Whether the layer leads into the heads of attention or out of them, by its name and its siblings."""
    if layer.hint in QUERIES:
        return "in"
    return "out" if layer.hint in OUTPUTS and layer.around in context.queried else None
