"""Draft the rules of layers: tables, norms, projections and convolutions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from convert.checkpoints.source import Leaf
from convert.drafting.axis_letters import Letters, NoLetterError
from convert.drafting.companions import BIASES, SCALES, Partners
from convert.drafting.kernel_readings import CLASS_OF_DENSE, Reading, line_readings, map_readings
from convert.drafting.tree_paths import Paths
from convert.layers import KINDS, Convolution, Embedding, LayerKind, Linear, Parameter, RMSNorm
from convert.layers.conv.draft import depthwise_kernel
from convert.layers.draft import KERNELS, NAME, DraftEntry, Group, Layer, PathKey, flow, plain
from convert.layers.linear.draft import OUTPUTS, QUERIES, attention_role, guessed_by_name
from convert.layers.linear.einsum_guess import KNOWN, known_forms, projections

TABLES = ("embedding", "embeddings", "input_embedding", "emb_var", "embed")


class LayerRules:
    """Drafts the rules of layers.

    Args:
        known: the leaves of the tree.
        groups: the leaves that are not in rules yet.
    """

    def __init__(
        self, known: Mapping[str, Leaf], paths: Paths, letters: Letters, partners: Partners, groups: Sequence[Group]
    ) -> None:
        self.known, self.paths, self.letters, self.partners = known, paths, letters, partners
        self.widths = {g.shape[0] for g in groups if len(g.shape) == 1}
        self.queried = {layer.around for g in groups if (layer := Layer(g.steps[:-1], {})).hint in QUERIES}
        self.channels: set[int] = set()  # of the results of convolutions
        for g in groups:
            layer = Layer(g.steps[:-1], {g.steps[-1].words[0]: g})
            if len(g.shape) > 2 and _convolves(layer, g):
                each = g.shape[-1] if depthwise_kernel(layer, g.steps[-1].words[0]) else 1
                self.channels.add(
                    g.shape[0] if g.steps[-1].words[0] == "weight" else g.shape[-1 if each == 1 else -2] * each
                )

    def rules(self, layer: Layer) -> Iterator[DraftEntry]:
        """Yield the rules of a layer, without leaves that belong to another layer."""
        left = {key: g for key, g in layer.leaves.items() if not self.partners.taken >= set(g.leaves)}
        rest = Layer(layer.steps, left)
        used: set[str | None]
        if layer.steps and layer.steps[-1].words == ("vars",) and "0" in left:
            yield from self._keras(rest)
            return
        alone = "emb" in layer.hint and rest.find(BIASES, (1, 2)) is None
        table = rest.find(TABLES, (2,)) or (rest.find(KERNELS, (2,)) if alone else None)
        kernel = None if table else rest.find(KERNELS, (2, 3, 4, 5))
        if kernel == "weight" and "bias" in left and left["bias"].shape == left["weight"].shape:
            kernel = None  # Equinox's LayerNorm over several axes
        scale = None if table or kernel else rest.find(SCALES, (1, 2, 3, 4))
        main = table or kernel or scale
        bias = rest.find(BIASES, (1, 2, 3, 4)) if main and not table else None
        if main is None:
            bias = rest.find(BIASES, (1, 2, 3, 4))
        used = {main, bias} if main else set()
        # flax nnx stores mean and var next to the scale.
        statistics = [left[role].shape for role in ("mean", "var") if role in left]
        lead = scale if main else bias
        if (lead and statistics == [left[lead].shape] * 2) or (
            not lead and not main and statistics == statistics[:1] * 2 != []
        ):
            for role in ("mean", "var"):
                self.partners.add(layer, role, self.paths.path(left[role].steps), left[role].leaves)
                used.add(role)
        if main is None and self._bare(rest, bias):
            used.add(bias)
            yield self._norm(layer, None, bias)
        yield from self._with(rest, main, bias, "table" if table else "kernel" if kernel else "scale")
        for key, g in left.items():
            if key not in used and not self.partners.taken >= set(g.leaves):
                yield from self._alone(rest, key, g)

    def _keras(self, layer: Layer) -> Iterator[DraftEntry]:
        """Yield the rules of a Keras layer, whose arrays are numbered in the order of their creation."""
        left = layer.leaves
        ones = all(len(g.shape) == 1 for g in left.values())
        slopes = layer.hint == "p_re_lu" and len(left) == 1
        if slopes or (
            ones and (layer.hint == "normalization" or "lu" in layer.hint)
        ):  # mean and variance of data; the slopes of a PReLU
            for key in left:
                yield Parameter.draft(self, layer, key, None)
            return
        table = "embedding" in layer.hint and len(left) == 1
        if drops := list(self._keras_spectral(layer)):
            yield from drops
            return
        kernels = [key for key, g in left.items() if len(g.shape) > 2] if "separable" in layer.hint else ["0"]
        has_bias = "1" in left and (ones or ("0" in left and len(left["1"].shape) < len(left["0"].shape)))
        main, bias = "0", "1" if len(kernels) == 1 and has_bias and not table else None
        used = {main, bias}
        same_shapes = ones and len({g.shape for g in left.values()}) == 1 and not table
        count = 4 if {"2", "3"} <= left.keys() else 3 if "2" in left else 2 if "batch" in layer.hint else 0
        if ones and (count == 4 or (same_shapes and count == len(left))):
            for key, role in zip(list(left)[count - 2 : count], ("mean", "var"), strict=True):
                self.partners.add(layer, role, self.paths.path(left[key].steps), left[key].leaves)
                used.add(key)
        if same_shapes and (
            count == len(left) == 3 or (len(left) == 1 and re.search("layer_norm|group_norm", layer.hint))
        ):
            yield self._norm(layer, main, None, either=True)
        elif same_shapes and count == len(left) == 2:
            yield self._norm(layer, None, None)
        else:
            yield from self._with(layer, main, bias, "table" if table else "scale" if ones else "kernel")
        for key in kernels[1:]:  # the pointwise kernel has the bias
            yield from self._with(layer, key, last if (last := str(len(kernels))) in left else None, "kernel")
            used |= {key, last}
        for key, g in left.items():
            if key not in used:
                yield from self._alone(layer, key, g)

    def _keras_spectral(self, layer: Layer) -> Iterator[DraftEntry]:
        """Yield `drop` rules for a SpectralNormalization: a copy of the inner kernel, and u. Keras uses neither at inference."""
        kernel, u = (layer.leaves.get(key) for key in "01")
        if kernel is None or u is None or len(layer.leaves) > 2 or u.shape != (1, kernel.shape[-1]):
            return
        inner = self.known.get(kernel.leaves[0].removesuffix("vars/0") + "layer/vars/0")
        if inner is None or inner.spec.shape != kernel.shape:
            return
        for g, why in (
            (kernel, "the kernel of the layer in it once more"),
            (
                u,
                "a state of training; at inference Keras computes with the kernel as it is stored, normalised",
            ),
        ):
            entry = DraftEntry(g.leaves[0])
            entry.say("drop", plain(self.paths.drop(g)), "guess: a SpectralNormalization")
            entry.say("because", why)
            yield entry

    def bare(self, layer: Layer) -> DraftEntry:
        """Return the rule of a norm whose only leaves are statistics elsewhere in the tree."""
        return self._norm(layer, None, None)

    def _bare(self, layer: Layer, bias: str | None) -> bool:
        """Whether these leaves are a norm without a scale, by its statistics or its name."""
        if bias is not None and sum(n > 1 for n in layer.leaves[bias].shape) > 1:
            return False
        stats = all(self.partners.get(layer, role) for role in ("mean", "var"))
        named = re.search(r"norm|^(ln|bn|gn)$", layer.hint) is not None
        return stats or (bias is not None and named)

    def _with(self, layer: Layer, main: str | None, bias: str | None, what: str) -> Iterator[DraftEntry]:
        if main is None:
            return
        try:
            if (named := kind_named(layer)) is not None:
                yield named.draft(self, layer, main, bias)
            elif what == "table":
                yield Embedding.draft(self, layer, main, None)
            elif what == "scale":
                yield self._norm(layer, main, bias)
            elif 2 <= len(layer.leaves[main].shape) <= 5 and not _local(layer, main, bias):
                yield self._kernel(layer, main, bias)
            else:  # 1 or more than 5 axes, or local filters (ConvLocal), which torch lacks: keep as a parameter
                yield from self._raws(layer, main, bias)
        except NoLetterError:
            yield from self._raws(layer, main, bias)

    def _raws(self, layer: Layer, main: str, bias: str | None) -> Iterator[DraftEntry]:
        """Yield a rule for each leaf of a layer."""
        for key in (main, *((bias,) if bias else ())):
            yield Parameter.draft(self, layer, key, None)
        for role in ("mean", "var", "lora_a", "lora_b", "bias", "weight_norm", "spectral_norm", "spectral_norm_v"):
            if path := self.partners.get(layer, role):
                yield self._raw_path(path, self.paths.module(layer.steps) + f".{role}")

    def _alone(self, layer: Layer, key: str, g: Group) -> Iterator[DraftEntry]:
        """Yield the rule of an additional leaf of a layer."""
        gemma = key == "linear" and len(g.shape) == 2 and "gating_einsum" in layer.leaves
        if gemma or (key in KNOWN and known_forms(key, g.shape, self.widths, Letters())):
            yield from self._with(layer, key, None, "kernel")
        else:
            yield Parameter.draft(self, layer, key, None)

    @staticmethod
    def _raw_path(path: str, name: str) -> DraftEntry:
        entry = DraftEntry()
        entry.say("from", plain(path), "guess: a raw parameter, kept as stored")
        entry.ask("parameter", "what is the tensor called in PyTorch?", [(f"parameter: {plain(name)}", "")])
        return entry

    # ---- parts of a rule

    def spec(self, group: Group) -> str:
        return group.shown if group.varies else str(self.known[group.leaves[0]].spec)

    def module(self, steps: Sequence[PathKey]) -> str:
        return self.paths.module(steps)

    def partner(self, layer: Layer, role: str) -> str | None:
        return self.partners.get(layer, role)

    def partner_shape(self, layer: Layer, role: str) -> tuple[int, ...] | None:
        return self.partners.shapes.get((layer.steps, role))

    def say_from(self, entry: DraftEntry, group: Group, remark: str) -> None:
        entry.say("from", plain(self.paths.path(group.steps)), remark)
        self.paths.say_stacked(entry, group.steps)

    def say_bias(self, entry: DraftEntry, layer: Layer, bias: str, remark: str) -> None:
        steps = layer.leaves[bias].steps
        entry.say("bias", plain(self.paths.path(steps)), remark)
        self.paths.say_stacked(entry, steps)

    def say_leaves(self, entry: DraftEntry, layer: Layer, main: str, bias: str | None, remark: str = "") -> None:
        g = layer.leaves[main]
        count = f", {len(g.leaves)} leaves" if len(g.leaves) > 1 else ""
        entry.say("from", plain(self.paths.path(g.steps)), f"{self.spec(g)}{count}" + (f"; {remark}" if remark else ""))  # fmt: skip
        if bias:
            entry.say("bias", plain(self.paths.path(layer.leaves[bias].steps)), self.spec(layer.leaves[bias]))
        elif path := self.partners.get(layer, "bias"):
            entry.say("bias", plain(path), "guess: it is in the same dict")
        self.paths.say_stacked(entry, g.steps)

    def ask_target(
        self, entry: DraftEntry, layer: Layer, words: Mapping[str, str], question: str = "", name: str = ""
    ) -> None:
        """Ask for the target: its name, and which of several kinds it is; the first is the guess."""
        module = name or self.paths.module(layer.steps)
        first = next(iter(words))
        text = f"{question} And {NAME}" if question else NAME
        entry.ask(first, text, [(f"{word}: {plain(module)}", remark) for word, remark in words.items()])

    # ---- kinds

    def _norm(self, layer: Layer, main: str | None, bias: str | None, either: bool = False) -> DraftEntry:
        """Return the rule of a norm: of the kind that its name suggests, or of one that its leaves allow."""
        return (kind_named(layer) or RMSNorm).draft(self, layer, main, bias, either)

    def _kernel(self, layer: Layer, main: str, bias: str | None) -> DraftEntry:
        """Return the rule of a kernel with two or more axes: a convolution, or an equation."""
        g = layer.leaves[main]
        if _named_conv(layer, g):
            return Convolution.draft(self, layer, main, bias)
        if main == "0" and len(g.shape) == 2 and len(layer.leaves) == 1 and not CLASS_OF_DENSE.fullmatch(layer.name):
            return self._readings(layer, main, bias, self._matrix_or_table(g))
        if (
            len(g.shape) < 3
            or guessed_by_name(self, layer, main)
            or attention_role(self, layer)
            or self.partners.get(layer, "lora_a")
        ):
            return Linear.draft(self, layer, main, bias)
        biased = layer.leaves[bias].shape if bias else None
        if len(g.shape) == 3:
            forms = projections(g.shape, biased, main, None, self.widths, self.letters)
            readings = line_readings(main, g.shape, biased, layer.name, forms, self.letters)
        elif main == "weight" or _a_map(g.shape, biased):
            readings = []
        else:
            readings = map_readings(main, g.shape, biased, layer.name, self.letters)
        if all(reading.kind_name != "linear" for reading in readings):
            return Convolution.draft(self, layer, main, bias)
        return self._readings(layer, main, bias, readings)

    def _readings(self, layer: Layer, main: str, bias: str | None, readings: Sequence[Reading]) -> DraftEntry:
        """Return a rule whose target decides what the layer computes, as names and shapes allow several readings."""
        g = layer.leaves[main]
        entry = DraftEntry(g.leaves[0])
        module = self.paths.module(layer.steps)
        only = readings[0] if len(readings) == 1 else None
        for k, (key, value) in enumerate(line.split(": ", 1) for line in (only.lines if only else ())):
            entry.say(key, value, f"guess: {only.why}" if only and k == 0 else "")
        self.say_leaves(entry, layer, main, bias)
        self.say_normalized(entry, layer)
        if any("conv" in reading.kind_name for reading in readings):
            entry.offer([("padding: SAME", "to be added to a convolution: what the source passes. No weight, but a check compares it")], once=True)  # fmt: skip
        if only:
            entry.ask(only.kind_name, NAME, [(only.text(module).split("\n")[0], "")])
            return entry
        shown = " x ".join(map(str, g.shape))
        text = f"what does the layer compute? The sizes {shown} do not tell. And {NAME}"
        entry.ask("linear", text, [(reading.text(module), reading.why) for reading in readings])
        return entry

    def _matrix_or_table(self, g: Group) -> list[Reading]:
        """Return what a single matrix of a Keras layer could be."""
        forms = projections(g.shape, None, "0", None, self.widths, self.letters)
        rows = self.letters.named("entries", g.shape[0]) + self.letters.named("width", g.shape[1])
        known = [Reading("linear", (f"einsum: {form.equation}",), form.why) for form in forms]
        return [*known, Reading("embedding", (f"axes: {rows}",), "an Embedding, a row for each entry")]

    def say_normalized(self, entry: DraftEntry, layer: Layer) -> None:
        """Write how the source normalizes the weight at every call."""
        u, v = (self.partners.get(layer, role) for role in ("spectral_norm", "spectral_norm_v"))
        if u and v:
            remark = "guess: by their sizes and their place in Equinox's State"
            entry.say("spectral_norm", f"{{u: {flow(u)}, v: {flow(v)}}}", remark)
        elif u:
            entry.say("spectral_norm", plain(u), "guess: by its name")
        if path := self.partners.get(layer, "weight_norm"):
            entry.say("weight_norm", plain(path), "guess: by its name")
        if epsilon := self.partners.get(layer, "normalization_epsilon"):
            entry.say("normalization_epsilon", epsilon, "Equinox adds nothing to the squared norm")


def kind_named(layer: Layer) -> type[LayerKind] | None:
    """Return the kind whose name in some library is that of the module."""
    return next(
        (kind for kind in KINDS.values() if kind.module_names and re.search(kind.module_names, layer.hint)), None
    )


def _convolves(layer: Layer, g: Group) -> bool:
    """Whether a kernel is probably that of a convolution, by its name and axes."""
    axes = len(g.shape)
    heads = layer.hint in (*QUERIES, *OUTPUTS, *KNOWN) or g.steps[-1].words[0] in KNOWN
    return _named_conv(layer, g) or (g.steps[-1].words[0] in (*KERNELS, "0", "1") and axes == 4 and not heads)


def _named_conv(layer: Layer, g: Group) -> bool:
    """Whether it is a convolution by its name, or by a number of axes that only convolutions have."""
    axes = len(g.shape)
    named = "conv" in layer.hint
    alone = named and axes == 2 and g.shape[0] < g.shape[1]
    return (g.steps[-1].words[0] in (*KERNELS, "0", "1") or named) and (axes == 5 or (named and axes > 2) or alone)


def _local(layer: Layer, main: str, bias: str | None) -> bool:
    """Whether a convolution kernel has its own filters for each position (flax's ConvLocal), by its name or bias."""
    if "conv" not in layer.hint or len(layer.leaves[main].shape) < 3:
        return False
    several = bias is not None and sum(n > 1 for n in layer.leaves[bias].shape) > 1
    return several or re.search("conv_?local$|locally_connected", layer.hint) is not None


def _a_map(shape: tuple[int, ...], bias: tuple[int, ...] | None) -> bool:
    """Whether a kernel with four axes is that of a 2d convolution: by its bias, or by two small equal sizes."""
    if bias is not None:
        return len(bias) == 1
    return shape[0] == shape[1] <= 11
