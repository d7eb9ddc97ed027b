"""The draft of a convolution's rule: which convolution it is, by its names and shape, and the open questions."""

from __future__ import annotations

from convert.layers.conv.kernel_forms import SPATIAL, ConvForm, conv_axes, conv_forms
from convert.layers.draft import NAME, DraftContext, DraftEntry, Layer, plain

PADDINGS = [("padding: SAME", "flax's default"), ("padding: VALID", "Haiku: SAME, Keras: VALID by default")]


def depthwise_kernel(layer: Layer, key: str) -> bool:
    """Whether a kernel is that of Keras's DepthwiseConv, or the first of its SeparableConv."""
    return key == "0" and ("depthwise" in layer.hint or "separable" in layer.hint)


def draft_conv(context: DraftContext, layer: Layer, main: str, bias: str | None) -> DraftEntry:
    g = layer.leaves[main]
    entry = DraftEntry(g.leaves[0])
    if len(g.shape) == 2:
        return _draft_lone_filters(context, entry, layer, main, bias)
    words = SPATIAL[len(g.shape) - 3]
    keeps = "Equinox" if main == "weight" else "Keras" if main.isdecimal() else "Haiku" if main == "w" else "flax"
    depthwise = depthwise_kernel(layer, main)
    biased = layer.leaves[bias].shape if bias else None
    forms = conv_forms(main, g.shape, biased, layer.name)
    if depthwise:
        forms = [ConvForm(f"N{words}C,{words}CO->N{words}C", False, False, g.shape[-2], "")]
    elif "separable" in layer.hint:
        forms = [form for form in forms if not form.transposed]
    axes = conv_axes(forms[0], g.shape, context.letters, g.varies)
    same_numbers = len({form.numbers for form in forms}) == 1
    if same_numbers:
        entry.say("dimension_numbers", forms[0].numbers, f"guess: {keeps} keeps {'depthwise ' * depthwise}kernels so")
    entry.say("axes", axes, "" if same_numbers else "in the order in which they lie there")
    if len(forms) == 1:
        for key, value in (line.split(": ", 1) for line in forms[0].lines):
            entry.say(key, value, f"guess: {forms[0].why}, which stores the channels out before those in")
    context.say_leaves(entry, layer, main, bias, "guess: a convolution's kernel")
    context.say_normalized(entry, layer)
    into, out = (g.shape[1], g.shape[0]) if main == "weight" else g.shape[-2:]
    if into == 1 and out > 1 and not depthwise and not forms[0].transposed:
        o = axes[0] if main == "weight" else axes[-1]
        ways = [(f"feature_group_count: {o}", "depthwise"), ("feature_group_count: 1", "one channel")]
        entry.ask("feature_group_count", "is it depthwise, or has its input one channel?", ways)
    sizes = g.shape[2:] if main == "weight" else g.shape[:-2]
    if max(sizes) > 1:
        entry.ask("padding", "what does the source pass?", PADDINGS, "conv")
    remark = "with SAME say `input_size:`, too" if max(sizes) > 1 else "with `padding: VALID`"
    apart = "; where they differ, write a rule for each" if g.varies else ""
    entry.offer([("strides: 2", f"if they are not 1; {remark}{apart}")])
    if any(not form.transposed for form in forms):
        entry.offer(
            [("weight_standardization: (w - mean) / (std + 1e-5)", "if the source standardises the kernel")],
            once=True,
        )
    if main == "weight" and any(form.transposed for form in forms):
        entry.offer([("feature_group_count: 2", "if a transposed convolution has groups: their number")], once=True)
    part = (".depthwise" if depthwise else ".pointwise") if "separable" in layer.hint else ""
    module = plain(context.module(layer.steps) + part)
    if len(forms) == 1:
        entry.ask(forms[0].kind_name, NAME, [(f"{forms[0].kind_name}: {module}", "")])
        return entry
    ways = []
    for form in forms:
        lines = form.lines if same_numbers else (f"dimension_numbers: {form.numbers}", *form.lines)
        ways.append(("\n".join((f"{form.kind_name}: {module}", *lines)), form.why))
    question = "is it a convolution or a transposed one? Its shape does not tell" if any(not form.transposed for form in forms) else "which transposed convolution is it? Its shape does not tell"  # fmt: skip
    entry.ask(forms[0].kind_name, f"{question}. And {NAME}", ways)
    return entry


def _draft_lone_filters(
    context: DraftContext, entry: DraftEntry, layer: Layer, main: str, bias: str | None
) -> DraftEntry:
    """A kernel without an axis of input channels, as in Griffin's Conv1D."""
    rows, width = layer.leaves[main].shape
    axes = context.letters.named("kernel", rows) + context.letters.named("width", width)
    entry.say("dimension_numbers", "NWC,WO->NWC", "guess: by its name, and one filter for each channel")
    entry.say("axes", axes)
    context.say_leaves(entry, layer, main, bias, "guess: a convolution's kernel")
    entry.ask("padding", "what does the source pass?", [("padding: CAUSAL", "Griffin's"), *PADDINGS], "lone")
    context.ask_target(entry, layer, {"conv": ""})
    return entry
