"""The rules of a draft for the layers of a tree: its tables, norms, projections and convolutions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from convert.checkpoints.source import Source
from convert.drafting.axis_letters import Letters, NoLetterError
from convert.drafting.companions import BIASES, KERNELS, SCALES, Partners
from convert.drafting.einsum_guess import KNOWN, Form, known_forms, lora_form, projections
from convert.drafting.equinox_state import DEBIASED
from convert.drafting.kernel_readings import (
    CLASS_OF_DENSE,
    SPATIAL,
    ConvForm,
    Reading,
    conv_axes,
    conv_forms,
    line_readings,
    map_readings,
)
from convert.drafting.path_groups import Group
from convert.drafting.tree_paths import Paths
from convert.drafting.yaml_entry import Entry, Layer, flow, plain

TABLES = ("embedding", "embeddings", "input_embedding", "emb_var", "embed")
QUERIES = ("query", "key", "value", "q", "k", "v", "q_proj", "k_proj", "v_proj", "query_dense", "key_dense", "value_dense", "query_proj", "key_proj", "value_proj", "qkv")  # fmt: skip
OUTPUTS = ("out", "o", "post", "o_proj", "out_proj", "output", "output_dense", "output_proj")
NAME = "what is the module called in PyTorch?"
FACTORS = [("multiplies_by: scale", "the factor starts at 1"), ("multiplies_by: 1+scale", "the leaf starts at 0")]
EITHER = [
    ("multiplies_by: scale", "center=False: it is the scale"),
    ("multiplies_by: 1", "scale=False: it is the bias; write `bias:` in place of `from:`"),
]
EPSILONS = [
    ("epsilon: 1e-6", "the default of flax's LayerNorm, RMSNorm and GroupNorm"),
    ("epsilon: 1e-5", "of flax's BatchNorm, of Equinox, of Haiku"),
    ("epsilon: 1e-3", "of Keras"),
]
PADDINGS = [("padding: SAME", "flax's default"), ("padding: VALID", "Haiku: SAME, Keras: VALID by default")]


class LayerRules:
    """Writes the rules of layers.

    Args:
        groups: the leaves that are not in rules yet.
    """

    def __init__(
        self, source: Source, paths: Paths, letters: Letters, partners: Partners, groups: Sequence[Group]
    ) -> None:
        self.source, self.paths, self.letters, self.partners = source, paths, letters, partners
        self.widths = {g.shape[0] for g in groups if len(g.shape) == 1}
        self.queried = {layer.around for g in groups if (layer := Layer(g.steps[:-1], {})).hint in QUERIES}
        self.channels: set[int] = set()  # of the results of convolutions
        for g in groups:
            layer = Layer(g.steps[:-1], {g.steps[-1].words[0]: g})
            if len(g.shape) > 2 and _convolves(layer, g):
                each = g.shape[-1] if _depthwise(layer, g.steps[-1].words[0]) else 1
                self.channels.add(
                    g.shape[0] if g.steps[-1].words[0] == "weight" else g.shape[-1 if each == 1 else -2] * each
                )

    def rules(self, layer: Layer) -> Iterator[Entry]:
        """The rules of one layer's leaves, but for those that belong to another layer."""
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
        sidecar = [left[role].shape for role in ("mean", "var") if role in left]  # nnx keeps them there
        lead = scale if main else bias
        if (lead and sidecar == [left[lead].shape] * 2) or (not lead and not main and sidecar == sidecar[:1] * 2 != []):
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

    def _keras(self, layer: Layer) -> Iterator[Entry]:
        """Keras numbers the arrays of a layer in the order in which they were made."""
        left = layer.leaves
        ones = all(len(g.shape) == 1 for g in left.values())
        slopes = layer.hint == "p_re_lu" and len(left) == 1
        if slopes or (
            ones and (layer.hint == "normalization" or "lu" in layer.hint)
        ):  # mean and variance of data; the slopes of a PReLU
            for key, g in left.items():
                yield self._raw(layer, key, g)
            return
        table = "embedding" in layer.hint and len(left) == 1
        if drops := list(self._keras_spectral(layer)):
            yield from drops
            return
        kernels = [key for key, g in left.items() if len(g.shape) > 2] if "separable" in layer.hint else ["0"]
        sidecar = "1" in left and (ones or ("0" in left and len(left["1"].shape) < len(left["0"].shape)))
        main, bias = "0", "1" if len(kernels) == 1 and sidecar and not table else None
        used = {main, bias}
        alike = ones and len({g.shape for g in left.values()}) == 1 and not table
        count = 4 if {"2", "3"} <= left.keys() else 3 if "2" in left else 2 if "batch" in layer.hint else 0
        if ones and (count == 4 or (alike and count == len(left))):
            for key, role in zip(list(left)[count - 2 : count], ("mean", "var"), strict=True):
                self.partners.add(layer, role, self.paths.path(left[key].steps), left[key].leaves)
                used.add(key)
        if alike and (count == len(left) == 3 or (len(left) == 1 and re.search("layer_norm|group_norm", layer.hint))):
            yield self._norm(layer, main, None, either=True)
        elif alike and count == len(left) == 2:
            yield self._norm(layer, None, None)
        else:
            yield from self._with(layer, main, bias, "table" if table else "scale" if ones else "kernel")
        for key in kernels[1:]:  # the pointwise kernel has the bias
            yield from self._with(layer, key, last if (last := str(len(kernels))) in left else None, "kernel")
            used |= {key, last}
        for key, g in left.items():
            if key not in used:
                yield from self._alone(layer, key, g)

    def _keras_spectral(self, layer: Layer) -> Iterator[Entry]:
        """A SpectralNormalization: the kernel of the layer in it once more, and the vector u. Keras uses neither at inference."""
        kernel, u = (layer.leaves.get(key) for key in "01")
        if kernel is None or u is None or len(layer.leaves) > 2 or u.shape != (1, kernel.shape[-1]):
            return
        inner = self.source.leaves.get(kernel.leaves[0].removesuffix("vars/0") + "layer/vars/0")
        if inner is None or inner.spec.shape != kernel.shape:
            return
        for g, why in (
            (kernel, "the kernel of the layer in it once more"),
            (
                u,
                "a state of training; at inference Keras computes with the kernel as it is stored, normalised",
            ),
        ):
            entry = Entry(g.leaves[0])
            entry.say("drop", plain(self.paths.drop(g)), "guess: a SpectralNormalization")
            entry.say("because", why)
            yield entry

    def bare(self, layer: Layer) -> Entry:
        """The rule of a norm that has statistics alone, which lie elsewhere."""
        return self._norm(layer, None, None)

    def _bare(self, layer: Layer, bias: str | None) -> bool:
        """Whether these leaves are a norm without a scale: by its statistics, or by its name."""
        if bias is not None and sum(n > 1 for n in layer.leaves[bias].shape) > 1:
            return False
        stats = all(self.partners.get(layer, role) for role in ("mean", "var"))
        named = re.search(r"norm|^(ln|bn|gn)$", layer.hint) is not None
        return stats or (bias is not None and named)

    def _with(self, layer: Layer, main: str | None, bias: str | None, what: str) -> Iterator[Entry]:
        if main is None:
            return
        try:
            if what == "table":
                yield self._table(layer, main)
            elif what == "scale":
                yield self._norm(layer, main, bias)
            elif 2 <= len(layer.leaves[main].shape) <= 5 and not _local(layer, main, bias):
                yield self._kernel(layer, main, bias)
            else:  # no weight of a layer has so few axes, or so many; and torch has no filters for each place
                yield from self._raws(layer, main, bias)
        except NoLetterError:
            yield from self._raws(layer, main, bias)

    def _raws(self, layer: Layer, main: str, bias: str | None) -> Iterator[Entry]:
        """The leaves of a layer, each by itself."""
        for key in (main, *((bias,) if bias else ())):
            yield self._raw(layer, key, layer.leaves[key])
        for role in ("mean", "var", "lora_a", "lora_b", "bias", "weight_norm", "spectral_norm", "spectral_norm_v"):
            if path := self.partners.get(layer, role):
                yield self._raw_path(path, self.paths.module(layer.steps) + f".{role}")

    def _alone(self, layer: Layer, key: str, g: Group) -> Iterator[Entry]:
        """A leaf beside the others of its layer."""
        gemma = key == "linear" and len(g.shape) == 2 and "gating_einsum" in layer.leaves
        if gemma or (key in KNOWN and known_forms(key, g.shape, self.widths, Letters())):
            yield from self._with(layer, key, None, "kernel")
        else:
            yield self._raw(layer, key, g)

    def _raw(self, layer: Layer, key: str, g: Group) -> Entry:
        """A leaf that no kind is guessed for."""
        said = f"{self._spec(g)}; guess: a raw parameter, kept as stored; names and shape do not tell more"
        entry = Entry(g.leaves[0])
        entry.say("from", plain(self.paths.path(g.steps)), said)
        self.paths.say_stacked(entry, g.steps)
        names = [(f"parameter: {plain(self.paths.module(g.steps))}", "")]
        entry.ask("parameter", "what is the tensor called in PyTorch?", names)
        return entry

    @staticmethod
    def _raw_path(path: str, name: str) -> Entry:
        entry = Entry()
        entry.say("from", plain(path), "guess: a raw parameter, kept as stored")
        entry.ask("parameter", "what is the tensor called in PyTorch?", [(f"parameter: {plain(name)}", "")])
        return entry

    # ---- parts of a rule

    def _spec(self, g: Group) -> str:
        return str(self.source.leaves[g.leaves[0]].spec)

    def _from(self, entry: Entry, layer: Layer, main: str, bias: str | None, remark: str = "") -> None:
        g = layer.leaves[main]
        count = f", {len(g.leaves)} leaves" if len(g.leaves) > 1 else ""
        entry.say("from", plain(self.paths.path(g.steps)), f"{self._spec(g)}{count}" + (f"; {remark}" if remark else ""))  # fmt: skip
        if bias:
            entry.say("bias", plain(self.paths.path(layer.leaves[bias].steps)), self._spec(layer.leaves[bias]))
        elif path := self.partners.get(layer, "bias"):
            entry.say("bias", plain(path), "guess: it lies beside")
        self.paths.say_stacked(entry, g.steps)

    def _target(self, entry: Entry, layer: Layer, words: Mapping[str, str], question: str = "", name: str = "") -> None:
        """The target, asked for: its name, and which of several kinds it is; the first is the guess."""
        module = name or self.paths.module(layer.steps)
        first = next(iter(words))
        asked = f"{question} And {NAME}" if question else NAME
        entry.ask(first, asked, [(f"{word}: {plain(module)}", remark) for word, remark in words.items()])

    # ---- kinds

    def _table(self, layer: Layer, main: str) -> Entry:
        g = layer.leaves[main]
        entry = Entry(g.leaves[0])
        self._from(entry, layer, main, None, "guess: an embedding, a row for each entry")
        entry.say("axes", self.letters.named("entries", g.shape[0]) + self.letters.named("width", g.shape[1]))
        module = self.paths.module(layer.steps)
        known = [(f"embedding: {plain(module)}", "")]
        if "{" not in module:  # one table, and so perhaps the head's
            tied = f"embedding: {{module: {plain(module)}, tied: head}}"
            known.append((tied, "flax's Embed.attend, in a model that has `head.weight = embed.weight`"))
        entry.ask("embedding", NAME, known)
        return entry

    def _norm(self, layer: Layer, main: str | None, bias: str | None, either: bool = False) -> Entry:
        """A norm.

        Args:
            main: the scale, if it has one.
            either: whether that may be the bias as well: Keras calls both by a number.
        """
        stats = {role: path for role in ("mean", "var") if (path := self.partners.get(layer, role))}
        g = next(layer.leaves[key] for key in (main, bias, "mean", "average", "0") if key and key in layer.leaves)
        entry = Entry(g.leaves[0])
        if main is not None:
            self._from(entry, layer, main, bias, "guess: a norm's scale")
        elif bias is not None:
            entry.say("bias", plain(self.paths.path(g.steps)), f"{self._spec(g)}; guess: a norm without a scale")
            self.paths.say_stacked(entry, g.steps)
        for role, path in stats.items() if len(stats) == 2 else ():
            entry.say(role, plain(path), "" if main or bias else "guess: a norm without scale and bias")
        kind = "batch_norm" if len(stats) == 2 else "layer_norm" if bias else "rms_norm"
        if either:
            entry.ask("multiplies_by", "Keras numbers the arrays: is this one the scale or the bias?", EITHER)
        elif main is not None:
            entry.ask("multiplies_by", "what does the source multiply by?", FACTORS, kind)
        else:
            entry.say("multiplies_by", "1", "guess: there is no scale")
        entry.ask("epsilon", "what does the source add to the variance?", EPSILONS, kind)
        if len(stats) == 2:
            if self.partners.get(layer, DEBIASED):
                entry.ask("momentum", "mode=\"batch\": Equinox divides both statistics by 1 - momentum**counter at inference, and no rule does; divide them in the tree first. Which momentum is it?", [("momentum: 0.99", "Equinox's default")])  # fmt: skip
            else:
                momenta = [("momentum: 0.99", "for training only: which share of the statistics a step keeps")]
                entry.offer(momenta, once=True)
        last = max((k for k, n in enumerate(g.shape) if n > 1), default=len(g.shape) - 1)
        ones = [n == 1 and k != last for k, n in enumerate(g.shape)]
        before = [sum(not one for one in ones[:k]) for k in range(len(ones))]
        axes = zip(ones, g.shape, before, strict=True)
        entry.say("axes", "".join("." if one else self.letters.named("width", n, k) for one, n, k in axes))
        groups = {"group_norm": "if it is one: add `num_groups: 32` (flax's default), or `group_size`"}
        more = {} if "layer" in layer.hint or "rms" in layer.hint else groups
        if bias and main == "weight":
            more = {"rms_norm": "an RMS norm with a bias, as Equinox's has by default", **more}
        if len(stats) == 2:
            lacks = (
                ""
                if main and bias
                else "; ones and zeros are written for what the source lacks, unless it says `parameters:`"
            )
            name = self.paths.module([step for step in layer.steps if step.words != ("mean_ema",)])
            known = {"batch_norm": f"guess: there are running statistics{lacks}"}
            self._target(entry, layer, known, "", name.removeprefix("batch_stats.").removeprefix("state."))
        elif _grouped(layer) and not either:  # the library's own name decides, whatever the norm lacks
            self._groups(entry, layer, g.shape[last])
            self._target(entry, layer, {"group_norm": "guess: by its name"})
        elif either:
            if "group" in layer.hint:
                self._groups(entry, layer, g.shape[last])
            self._target(entry, layer, {"group_norm" if "group" in layer.hint else "layer_norm": "guess: by its name"})
        elif bias:
            self._target(entry, layer, {"layer_norm": f"guess: a bias{' sidecar the scale' if main else ''}", **more})
        elif "rms" in layer.hint:
            self._target(entry, layer, {"rms_norm": "guess: by its name"})
        else:
            words = {"rms_norm": "", "layer_norm": "one without a bias", **more}
            self._target(entry, layer, words, "does it subtract the mean (layer norm) or not (RMS norm)?")
        return entry

    @staticmethod
    def _groups(entry: Entry, layer: Layer, channels: int) -> None:
        """How many groups of channels a norm makes."""
        if "instance" in layer.hint:
            entry.say("group_size", "1", "guess: an instance norm, by its name: each channel is a group")
            return
        count = math.gcd(channels, 32)
        said = (
            "the default of flax and Keras"
            if count == 32
            else f"flax's and Keras's default, 32, does not divide {channels}"
        )
        said += "; where the source says how many channels a group has: `group_size`"
        entry.ask("num_groups", "how many groups?", [(f"num_groups: {count}", said)], "groups")

    def _kernel(self, layer: Layer, main: str, bias: str | None) -> Entry:
        """A kernel with two axes or more: of a convolution, or of what an equation says."""
        g = layer.leaves[main]
        if _named_conv(layer, g):
            return self._conv(layer, main, bias)
        if main == "0" and len(g.shape) == 2 and len(layer.leaves) == 1 and not CLASS_OF_DENSE.fullmatch(layer.name):
            return self._readings(layer, main, bias, self._matrix_or_table(g))
        if len(g.shape) < 3 or self._known(layer, main) or self._role(layer) or self.partners.get(layer, "lora_a"):
            return self._weight(layer, main, bias)
        biased = layer.leaves[bias].shape if bias else None
        if len(g.shape) == 3:
            forms = projections(g.shape, biased, main, None, self.widths, self.letters)
            readings = line_readings(main, g.shape, biased, layer.name, forms, self.letters)
        elif main == "weight" or _a_map(g.shape, biased):
            readings = []
        else:
            readings = map_readings(main, g.shape, biased, layer.name, self.letters)
        if all(reading.word != "linear" for reading in readings):
            return self._conv(layer, main, bias)
        return self._readings(layer, main, bias, readings)

    def _readings(self, layer: Layer, main: str, bias: str | None, readings: Sequence[Reading]) -> Entry:
        """A rule whose target says what the layer computes, as names and shapes leave several things open."""
        g = layer.leaves[main]
        entry = Entry(g.leaves[0])
        module = self.paths.module(layer.steps)
        only = readings[0] if len(readings) == 1 else None
        for k, (key, value) in enumerate(line.split(": ", 1) for line in (only.lines if only else ())):
            entry.say(key, value, f"guess: {only.why}" if only and k == 0 else "")
        self._from(entry, layer, main, bias)
        self._normalized(entry, layer)
        if any("conv" in reading.word for reading in readings):
            entry.offer([("padding: SAME", "to be added to a convolution: what the source passes. No weight, but a check compares it")], once=True)  # fmt: skip
        if only:
            entry.ask(only.word, NAME, [(only.text(module).split("\n")[0], "")])
            return entry
        shown = " x ".join(map(str, g.shape))
        asked = f"what does the layer compute? The sizes {shown} do not tell. And {NAME}"
        entry.ask("linear", asked, [(reading.text(module), reading.why) for reading in readings])
        return entry

    def _matrix_or_table(self, g: Group) -> list[Reading]:
        """What a lone matrix of a Keras layer could be."""
        forms = projections(g.shape, None, "0", None, self.widths, self.letters)
        rows = self.letters.named("entries", g.shape[0]) + self.letters.named("width", g.shape[1])
        known = [Reading("linear", (f"einsum: {form.equation}",), form.why) for form in forms]
        return [*known, Reading("embedding", (f"axes: {rows}",), "an Embedding, a row for each entry")]

    def _normalized(self, entry: Entry, layer: Layer) -> None:
        """What the source does to the weight at every call."""
        u, v = (self.partners.get(layer, role) for role in ("spectral_norm", "spectral_norm_v"))
        if u and v:
            said = "guess: by their sizes and their place in Equinox's State"
            entry.say("spectral_norm", f"{{u: {flow(u)}, v: {flow(v)}}}", said)
        elif u:
            entry.say("spectral_norm", plain(u), "guess: by its name")
        if path := self.partners.get(layer, "weight_norm"):
            entry.say("weight_norm", plain(path), "guess: by its name")
        if epsilon := self.partners.get(layer, "normalization_epsilon"):
            entry.say("normalization_epsilon", epsilon, "Equinox adds nothing to the squared norm")

    def _known(self, layer: Layer, main: str) -> list[Form]:
        named = main if main in KNOWN else layer.hint
        return known_forms(named, layer.leaves[main].shape, self.widths, self.letters)

    def _role(self, layer: Layer) -> str | None:
        """Whether the layer leads into the heads of attention or out of them, by its name and what lies beside it."""
        if layer.hint in QUERIES:
            return "in"
        return "out" if layer.hint in OUTPUTS and layer.around in self.queried else None

    def _weight(self, layer: Layer, main: str, bias: str | None) -> Entry:
        g = layer.leaves[main]
        entry = Entry(g.leaves[0])
        known = self._known(layer, main)
        pair = [self.partners.get(layer, role) for role in ("lora_a", "lora_b")]
        biased = layer.leaves[bias].shape if bias else self.partners.shapes.get((layer.steps, "bias"))
        role = self._role(layer)
        forms = (
            known
            or ([lora_form(g.shape, self.letters)] if all(pair) else [])
            or projections(g.shape, biased, main, role, self.widths, self.letters)
        )
        self._equation(entry, forms, g.shape, main)
        self._from(entry, layer, main, bias)
        self._normalized(entry, layer)
        if pair[0] and pair[1]:
            self._lora(entry, layer, forms[0], pair[0], pair[1])
        self._flattened(entry, g, forms[0])
        module = self.paths.module(layer.steps if main in (*KERNELS, "0", "1") else g.steps)
        apart = known[0].apart if known else ""
        self._target(
            entry, layer, {"linear": ""}, "", f"{module.rpartition('.')[0] or module}.{apart}" if apart else module
        )
        if self.partners.get(layer, "weight_norm"):
            kept = f"linear: {{module: {plain(module)}, parametrization: weight_norm}}"
            entry.offer([(kept, "if the target keeps its two tensors")])
        return entry

    @staticmethod
    def _equation(entry: Entry, forms: Sequence[Form], shape: tuple[int, ...], main: str) -> None:
        if len(forms) == 1:
            entry.say("einsum", forms[0].equation, f"guess: {forms[0].why}")
            return
        shown = " x ".join(map(str, shape))
        known = [(f"einsum: {f.equation}", f.why) for f in forms]
        entry.ask("einsum", f"the sizes {shown} do not tell which axes are inputs", known, main)

    def _lora(self, entry: Entry, layer: Layer, form: Form, first: str, second: str) -> None:
        rank = self.letters.named("rank", self.partners.shapes[layer.steps, "lora_a"][-1])
        into, out = form.inputs, form.equation[-1]
        pair = f'einsum: "...{into},{into}{rank},{rank}{out}->...{out}", from: {flow(first)}, times: {flow(second)}'
        if self.partners.of[layer.steps, "lora_of"] == "nnx":
            entry.say("plus", f"{{{pair}}}", "guess: flax nnx's pair, which is added as it is; it is merged here")
            return
        ways = [
            (f"plus: {{{pair}, scale: 1}}", ""),
            (f"plus: {{{pair}, scale: 16/{rank}}}", "alpha over the rank; your alpha in place of 16"),
        ]
        asked = "by which scale does the source multiply the pair before it adds it? It is merged here"
        entry.ask("plus", asked, ways, value=f"{{{pair}, scale: ask}}")

    def _flattened(self, entry: Entry, g: Group, form: Form) -> None:
        into = g.shape[0]
        channels = next((n for n in sorted(self.channels, reverse=True) if 1 < n < into and into % n == 0), None)
        if channels and len(g.shape) == 2 and into not in self.widths:
            last = self.letters.named("width", channels)
            line = f"flattened: {{{form.inputs}: RS{last}}}"
            how = "rows, columns, channels; `axes` gives the sizes: R: {is: rows, equals: 7}, and S"
            asked = "is the input a map of a convolution, flattened? If not, take the line away"
            entry.ask("flattened", asked, [(line, how)])

    def _conv(self, layer: Layer, main: str, bias: str | None) -> Entry:
        g = layer.leaves[main]
        entry = Entry(g.leaves[0])
        if len(g.shape) == 2:
            return self._lone_filters(entry, layer, main, bias)
        words = SPATIAL[len(g.shape) - 3]
        keeps = "Equinox" if main == "weight" else "Keras" if main.isdecimal() else "Haiku" if main == "w" else "flax"
        depthwise = _depthwise(layer, main)
        biased = layer.leaves[bias].shape if bias else None
        forms = conv_forms(main, g.shape, biased, layer.name)
        if depthwise:
            forms = [ConvForm(f"N{words}C,{words}CO->N{words}C", False, False, g.shape[-2], "")]
        elif "separable" in layer.hint:
            forms = [form for form in forms if not form.transposed]
        axes = conv_axes(forms[0], g.shape, self.letters)
        alike = len({form.numbers for form in forms}) == 1
        if alike:
            entry.say(
                "dimension_numbers", forms[0].numbers, f"guess: {keeps} keeps {'depthwise ' * depthwise}kernels so"
            )
        entry.say("axes", axes, "" if alike else "in the order in which they lie there")
        if len(forms) == 1:
            for key, value in (line.split(": ", 1) for line in forms[0].lines):
                entry.say(key, value, f"guess: {forms[0].why}, which stores the channels out before those in")
        self._from(entry, layer, main, bias, "guess: a convolution's kernel")
        self._normalized(entry, layer)
        into, out = (g.shape[1], g.shape[0]) if main == "weight" else g.shape[-2:]
        if into == 1 and out > 1 and not depthwise and not forms[0].transposed:
            o = axes[0] if main == "weight" else axes[-1]
            ways = [(f"feature_group_count: {o}", "depthwise"), ("feature_group_count: 1", "one channel")]
            entry.ask("feature_group_count", "is it depthwise, or has its input one channel?", ways)
        sizes = g.shape[2:] if main == "weight" else g.shape[:-2]
        if max(sizes) > 1:
            entry.ask("padding", "what does the source pass?", PADDINGS, "conv")
        told = "with SAME say `input_size:`, too" if max(sizes) > 1 else "with `padding: VALID` beside it"
        entry.offer([("strides: 2", f"if they are not 1; {told}")])
        if any(not form.transposed for form in forms):
            entry.offer(
                [("weight_standardization: (w - mean) / (std + 1e-5)", "if the source standardises the kernel")],
                once=True,
            )
        if main == "weight" and any(form.transposed for form in forms):
            entry.offer([("feature_group_count: 2", "if a transposed convolution has groups: their number")], once=True)
        part = (".depthwise" if depthwise else ".pointwise") if "separable" in layer.hint else ""
        module = plain(self.paths.module(layer.steps) + part)
        if len(forms) == 1:
            entry.ask(forms[0].word, NAME, [(f"{forms[0].word}: {module}", "")])
            return entry
        ways = []
        for form in forms:
            lines = form.lines if alike else (f"dimension_numbers: {form.numbers}", *form.lines)
            ways.append(("\n".join((f"{form.word}: {module}", *lines)), form.why))
        asked = "is it a convolution or a transposed one? Its shape does not tell" if any(not form.transposed for form in forms) else "which transposed convolution is it? Its shape does not tell"  # fmt: skip
        entry.ask(forms[0].word, f"{asked}. And {NAME}", ways)
        return entry

    def _lone_filters(self, entry: Entry, layer: Layer, main: str, bias: str | None) -> Entry:
        """A kernel without an axis of input channels, as in Griffin's Conv1D."""
        rows, width = layer.leaves[main].shape
        axes = self.letters.named("kernel", rows) + self.letters.named("width", width)
        entry.say("dimension_numbers", "NWC,WO->NWC", "guess: by its name, and one filter for each channel")
        entry.say("axes", axes)
        self._from(entry, layer, main, bias, "guess: a convolution's kernel")
        entry.ask("padding", "what does the source pass?", [("padding: CAUSAL", "Griffin's"), *PADDINGS], "lone")
        self._target(entry, layer, {"conv": ""})
        return entry


def _grouped(layer: Layer) -> bool:
    """Whether a norm is one over groups of channels, by the name that libraries give it."""
    return re.search(r"(group|instance)_?norm(alization)?$", layer.hint) is not None


def _depthwise(layer: Layer, key: str) -> bool:
    """Whether a kernel is that of Keras's DepthwiseConv, or the first of its SeparableConv."""
    return key == "0" and ("depthwise" in layer.hint or "separable" in layer.hint)


def _convolves(layer: Layer, g: Group) -> bool:
    """Whether a kernel is likely a convolution's, by its name and its axes."""
    axes = len(g.shape)
    heads = layer.hint in (*QUERIES, *OUTPUTS, *KNOWN) or g.steps[-1].words[0] in KNOWN
    return _named_conv(layer, g) or (g.steps[-1].words[0] in (*KERNELS, "0", "1") and axes == 4 and not heads)


def _named_conv(layer: Layer, g: Group) -> bool:
    """Whether it is one by its name, or has as many axes as only the kernels of convolutions have."""
    axes = len(g.shape)
    named = "conv" in layer.hint
    alone = named and axes == 2 and g.shape[0] < g.shape[1]
    return (g.steps[-1].words[0] in (*KERNELS, "0", "1") or named) and (axes == 5 or (named and axes > 2) or alone)


def _local(layer: Layer, main: str, bias: str | None) -> bool:
    """Whether a kernel that a name calls a convolution's has filters for each place (flax's ConvLocal), by that name or by its bias."""
    if "conv" not in layer.hint or len(layer.leaves[main].shape) < 3:
        return False
    several = bias is not None and sum(n > 1 for n in layer.leaves[bias].shape) > 1
    return several or re.search("conv_?local$|locally_connected", layer.hint) is not None


def _a_map(shape: tuple[int, ...], bias: tuple[int, ...] | None) -> bool:
    """Whether a kernel with four axes is that of a convolution over a map: by its bias, or by small sizes that are alike."""
    if bias is not None:
        return len(bias) == 1
    return shape[0] == shape[1] <= 11
