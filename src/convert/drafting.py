"""Drafts a rule file from a tree: what names and shapes tell is a guess, what they do not tell is a question."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from convert.asking import ASK
from convert.draft_cells import find_cells
from convert.draft_entry import Entry, Layer, plain
from convert.draft_letters import Letters, NoLetterError
from convert.draft_shapes import Form, projections
from convert.draft_stacks import stacks
from convert.errors import CheckpointError
from convert.grouping import Group, Names, Step, escape, group
from convert.kinds.base import ACTIVATIONS
from convert.sources.base import Source

ROOTS = ("mdl_vars/params", "params/params", "state/params", "model/params", "params", "target")
OPTIMIZERS = ("opt_state", "opt_states", "optimizer", "optimizer_state", "opt", "state/opt_state", "state/param_states")
KERNELS = ("kernel", "w", "weight", "weights")
SCALES = ("scale", "gamma", "weight", "w", "g")
BIASES = ("bias", "b", "beta", "offset")
TABLES = ("embedding", "embeddings", "input_embedding", "emb_var", "embed")
QUERIES = ("query", "key", "value", "q", "k", "v", "q_proj", "k_proj", "v_proj", "q_einsum", "kv_einsum", "qkv")
OUTPUTS = ("out", "o", "post", "o_proj", "out_proj", "attn_vec_einsum", "output")


def draft_rules(source: Source, name: str = "my-model") -> str:
    """The text of a rule file that covers every leaf of a checkpoint. Reads no array.

    Args:
        source: from `convert.open_source`.
        name: what the file calls the model.

    Returns:
        YAML. What was guessed is marked ``# guess:``; what names and shapes do not tell is a value ``ask`` with a comment
        ``# question:`` and the alternatives below it. `convert.parse_rules` reads it; its `questions` are open.

    Raises:
        CheckpointError: the tree has no leaves.
    """
    return _Drafter(source, name).text()


def _sigma(path: str) -> str:
    """Where flax's SpectralNorm keeps sigma, beside u."""
    return path.removesuffix("/u") + "/sigma"


class _Drafter:
    def __init__(self, source: Source, name: str) -> None:
        if not source.leaves:
            raise CheckpointError(f"{source.called}: it has no leaves, so there is nothing to draft rules for")
        self.source, self.name = source, name
        groups = group(source.leaves)
        self.stacks = stacks([g for g in groups if not self._unwanted(g)])
        self.groups = tuple(self._unstacked(g) for g in groups)
        self.names, self.letters = Names(), Letters()
        self.root = self._root()
        self.taken: set[str] = set()  # leaves that some rule has
        shapes = [g.shape for g in self.groups if not self._unwanted(g)]
        ones = Counter(shape[0] for shape in shapes if len(shape) == 1)
        self.widths = {n for n, _ in ones.most_common()}
        self.channels = {shape[-1] for shape in shapes if len(shape) > 3}

    # ---- stacked layers

    def _stack(self, steps: Sequence[Step]) -> tuple[int, str, int] | None:
        """How many keys lead to the stack that a path is in, the index that it is counted by, and the axis."""
        for prefix, (index, axis) in self.stacks.items():
            if tuple(steps[: len(prefix)]) == prefix:
                return len(prefix), index, axis
        return None

    def _unstacked(self, g: Group) -> Group:
        """The group with the shape that one layer of its stack has."""
        stack = self._stack(g.steps)
        if stack is None or self._unwanted(g):
            return g
        return replace(g, shape=g.shape[: stack[2]] + g.shape[stack[2] + 1 :])

    def _stacked(self, entry: Entry, steps: Sequence[Step]) -> None:
        if stack := self._stack(steps):
            entry.say(
                "stacked", f"{{{stack[1]}: {stack[2]}}}", "guess: all leaves here have this axis, the norms' scales too"
            )

    # ---- paths

    def _root(self) -> str:
        """A prefix below which all leaves lie but those that no model needs."""
        for root in ROOTS:
            inside = [g for g in self.groups if g.leaves[0].startswith(f"{root}/")]
            if inside and all(g in inside or self._unwanted(g) for g in self.groups):
                return root
        return ""

    def _path(self, steps: Sequence[Step]) -> str:
        text = self.names.text(steps)
        return text.removeprefix(f"{self.root}/") if self.root and text.startswith(f"{self.root}/") else (
            f"/{text}" if self.root else text
        )  # fmt: skip

    def _module(self, steps: Sequence[Step]) -> str:
        """What the module would be called if PyTorch's names were those of the tree."""
        keys = self._path(steps).removeprefix("/").split("/")
        if stack := self._stack(steps):
            at = stack[0] - (self.root.count("/") + 1 if self.root else 0)
            keys.insert(at, f"{{{stack[1]}}}")
        kept = [key for k, key in enumerate(keys) if key != "vars" and not (k == 0 and key in ("params", "target"))]
        return ".".join(kept) or "module"

    @staticmethod
    def _unwanted(g: Group) -> bool:
        first = g.leaves[0]
        state = any(first == word or first.startswith(f"{word}/") for word in OPTIMIZERS)
        return state or (g.shape == () and g.dtype.startswith(("int", "uint", "bool"))) or "rng" in first.split("/")[0]

    # ---- the file

    def text(self) -> str:
        entries = list(self._entries())
        root = (
            [f"root: {plain(self.root)}    # guess: every leaf that a model needs lies below it"] if self.root else []
        )
        axes = [f"  {line}" for line in self.letters.declared()]
        return "\n".join(
            [
                f"# A draft, from the tree of {json.dumps(self.source.called.name)}. Each `# guess:` may be wrong. Each `{ASK}` is a question: write one of the",
                "# lines below it in its place (and take the comments away). `convert plan` and `convert rules validate` say what is still open.",
                f"model: {plain(self.name)}",
                f"title: {plain(self.name)}",
                *root,
                *(["", "axes:    # guess: axes of one size are called alike", *axes] if axes else []),
                "",
                "targets:",
                '  torch: {loads: "a module of your own"}',
                "",
                "rules:",
                "\n\n".join(entries),
                "",
            ]
        )

    def _entries(self) -> Iterator[str]:
        layers: dict[tuple[Step, ...], dict[str, Group]] = {}
        unwanted = [g for g in self.groups if self._unwanted(g)]
        cells = find_cells([g for g in self.groups if g not in unwanted])
        for prefix, fitting in cells.items():
            yield str(self._cell(prefix, fitting))
        for g in self.groups:
            if g not in unwanted and not any(g.steps[: len(prefix)] == prefix for prefix in cells):
                key = g.steps[-1].words[0] if len(g.steps[-1].words) == 1 else self.names.text(g.steps[-1:])
                layers.setdefault(g.steps[:-1], {})[key] = g
        found = [Layer(steps, leaves) for steps, leaves in layers.items()]
        self._find_partners(found)
        for layer in found:
            yield from self._layer(layer)
        yield from self._drops(unwanted)

    def _cell(self, prefix: tuple[Step, ...], fitting: Sequence[tuple[str, str]]) -> Entry:
        entry = Entry()
        entry.say("cell", fitting[0][1], "guess: its leaves are called so, and have such shapes")
        entry.offer([(f"cell: {name}", "its tree is the same") for _, name in fitting[1:]])
        entry.say("from", plain(self._path(prefix)))
        self._stacked(entry, prefix)
        module = self._module(prefix)
        longer = f"{fitting[0][0]}: {{module: {plain(module)}, layer: 0, direction: backward}}"
        entry.ask(fitting[0][0], "what is the module called in PyTorch?", [(f"{fitting[0][0]}: {plain(module)}", "one layer, one direction"), (longer, "")])  # fmt: skip
        return entry

    def _drops(self, unwanted: Sequence[Group]) -> Iterator[str]:
        said: set[str] = set()
        slash = "/" if self.root else ""
        for g in unwanted:
            first = g.leaves[0]
            word = next((w for w in OPTIMIZERS if first.startswith(f"{w}/")), None)
            entry = Entry()
            if word and word not in said:
                said.add(word)
                entry.say("drop", plain(f"{slash}{word}/**"), "guess")
                entry.say("because", "the optimizer's state")
            elif not word:
                path = self._path(g.steps)
                counts = {"step": "the training step", "count": "a counter", "rng": "the state of a random generator"}
                entry.say("drop", plain(re.sub(r"\{[a-z][a-z0-9]*\}", "*", path)), "guess")
                entry.say("because", counts.get(g.steps[-1].words[0], "a number that is no weight"))
            if entry.lines:
                yield str(entry)

    # ---- layers

    def _find_partners(self, layers: Sequence[Layer]) -> None:
        """Leaves that belong to a layer elsewhere: running statistics, and what flax's WeightNorm and SpectralNorm keep."""
        self.partners: dict[tuple[tuple[Step, ...], str], str] = {}
        known = self.source.leaves
        for layer in layers:
            for key, g in layer.leaves.items():
                path = self._path(g.steps)
                lead = path.startswith("params/")
                if lead and key in (*SCALES, *BIASES) and len(g.shape) == 1:
                    for role in ("mean", "var"):
                        leaves = [
                            re.sub(r"^params/", "batch_stats/", x).rsplit("/", 1)[0] + f"/{role}" for x in g.leaves
                        ]
                        if all(x in known for x in leaves):
                            said = "batch_stats/" + path.removeprefix("params/").rsplit("/", 1)[0] + f"/{role}"
                            self._pair(layer, role, said, leaves)
                if key in KERNELS and len(g.shape) > 1 and lead and len(g.leaves) == 1:
                    inner = g.leaves[0].removeprefix("params/")
                    for name in known:
                        for first, last, role in (
                            ("params", "scale", "weight_norm"),
                            ("batch_stats", "u", "spectral_norm"),
                        ):
                            if re.fullmatch(rf"{first}/[^/]+/{re.escape(inner)}/{last}", name):
                                self._pair(layer, role, self._path([Step((k,)) for k in name.split("/")]), [name])
                                self.taken |= {_sigma(name)} & known.keys()

    def _pair(self, layer: Layer, role: str, path: str, leaves: Sequence[str]) -> None:
        self.partners[layer.steps, role] = path
        self.taken.update(leaves)

    def _layer(self, layer: Layer) -> Iterator[str]:
        left = {key: g for key, g in layer.leaves.items() if not self.taken >= set(g.leaves)}
        rest = Layer(layer.steps, left)
        if layer.steps and layer.steps[-1].words == ("vars",) and "0" in left:
            yield from self._keras(layer, left)
            return
        table = rest.find(TABLES, (2,)) or (rest.find(KERNELS, (2,)) if "embed" in layer.hint else None)
        kernel = None if table else rest.find(KERNELS, (2, 3, 4, 5))
        scale = None if table or kernel else rest.find(SCALES, (1, 2, 3, 4))
        main = table or kernel or scale
        bias = rest.find(BIASES, (1, 2, 3, 4)) if main and not table else None
        used = {main, bias}
        stats = {role: role for role in ("mean", "var") if scale and role in left}
        for role in stats:  # nnx keeps them beside the scale
            self.partners[layer.steps, role] = self._path(left[role].steps)
            used.add(role)
        yield from self._with(rest, main, bias, "table" if table else "kernel" if kernel else "scale")
        for key, g in left.items():
            if key not in used and not self.taken >= set(g.leaves):
                yield from self._lone(layer, key, g)

    def _keras(self, layer: Layer, left: Mapping[str, Group]) -> Iterator[str]:
        """Keras numbers the arrays of a layer in the order in which they were made."""
        ones = all(len(g.shape) == 1 for g in left.values())
        table = "embedding" in layer.hint and len(left) == 1
        main, bias = "0", "1" if "1" in left and not table else None
        used = {main, bias}
        if ones and {"2", "3"} <= left.keys():
            self.partners[layer.steps, "mean"] = self._path(left["2"].steps)
            self.partners[layer.steps, "var"] = self._path(left["3"].steps)
            used |= {"2", "3"}
        yield from self._with(layer, main, bias, "table" if table else "scale" if ones else "kernel")
        for key, g in left.items():
            if key not in used:
                yield from self._lone(layer, key, g)

    def _with(self, layer: Layer, main: str | None, bias: str | None, what: str) -> Iterator[str]:
        if main is None:
            return
        try:
            if what == "table":
                yield str(self._table(layer, main))
            elif what == "scale":
                yield str(self._norm(layer, main, bias))
            else:
                yield str(self._weight(layer, main, bias))
                if (layer.steps, "spectral_norm") in self.partners:
                    yield from self._sigma(self.partners[layer.steps, "spectral_norm"])
        except NoLetterError:
            for key in (main, *((bias,) if bias else ())):
                yield from self._lone(layer, key, layer.leaves[key])

    def _spec(self, g: Group) -> str:
        return str(self.source.leaves[g.leaves[0]].spec)

    def _from(self, entry: Entry, layer: Layer, main: str, bias: str | None, remark: str = "") -> None:
        g = layer.leaves[main]
        count = f", {len(g.leaves)} leaves" if len(g.leaves) > 1 else ""
        entry.say("from", plain(self._path(g.steps)), f"{self._spec(g)}{count}" + (f"; {remark}" if remark else ""))
        if bias:
            entry.say("bias", plain(self._path(layer.leaves[bias].steps)), self._spec(layer.leaves[bias]))
        self._stacked(entry, g.steps)

    def _target(self, entry: Entry, layer: Layer, words: Sequence[tuple[str, str]], question: str = "") -> None:
        """The target, asked for: its name, and which of several kinds it is; the first is the guess."""
        module = self._module(layer.steps)
        asked = f"{question + ' And ' if question else ''}what is the module called in PyTorch?"
        entry.ask(words[0][0], asked, [(f"{word}: {plain(module)}", remark) for word, remark in words])

    def _table(self, layer: Layer, main: str) -> Entry:
        entry = Entry()
        g = layer.leaves[main]
        self._from(entry, layer, main, None, "guess: an embedding, a row for each entry")
        entry.say("axes", self.letters.named("entries", g.shape[0]) + self.letters.named("width", g.shape[1]))
        self._target(entry, layer, [("embedding", "")])
        return entry

    def _norm(self, layer: Layer, main: str, bias: str | None) -> Entry:
        entry = Entry()
        g = layer.leaves[main]
        stats = {role: self.partners.get((layer.steps, role)) for role in ("mean", "var")}
        batch = all(stats.values())
        self._from(entry, layer, main, bias, "guess: a norm's scale")
        for role, path in stats.items():
            if batch and path:
                entry.say(role, plain(path))
        factors = [
            ("multiplies_by: scale", "the factor starts at 1"),
            ("multiplies_by: 1+scale", "the leaf starts at 0"),
        ]
        entry.ask("multiplies_by", "what does the source multiply by?", factors)
        epsilons = [("epsilon: 1e-6", "the default of flax's LayerNorm, RMSNorm and GroupNorm"), ("epsilon: 1e-5", "of flax's BatchNorm, of Equinox, of Haiku"), ("epsilon: 1e-3", "of Keras")]  # fmt: skip
        entry.ask("epsilon", "what does the source add to the variance?", epsilons)
        if batch:
            momenta = [("momentum: 0.99", "flax's default, and Keras's"), ("momentum: 0.9", "")]
            entry.ask("momentum", "which share of the statistics does a step keep? For training only", momenta)
        axes = "".join("." if n == 1 and len(g.shape) > 1 else self.letters.named("width", n, k) for k, n in enumerate(g.shape))  # fmt: skip
        entry.say("axes", axes)
        groups = ("group_norm", "if it is one: add `num_groups: 32` (flax's default), or `group_size`")
        if batch:
            self._target(entry, layer, [("batch_norm", "guess: there are running statistics")])
        elif bias:
            more = [groups] if self.channels else []
            self._target(entry, layer, [("layer_norm", "guess: a bias beside the scale"), *more])
        else:
            kinds = [("rms_norm", ""), ("layer_norm", "one without a bias"), *([groups] if self.channels else [])]
            self._target(entry, layer, kinds, "does it subtract the mean (layer norm) or not (RMS norm)?")
        return entry

    def _weight(self, layer: Layer, main: str, bias: str | None) -> Entry:
        g = layer.leaves[main]
        shape = g.shape
        convolves = (
            len(shape) == 5 or "conv" in layer.hint or (len(shape) == 4 and layer.hint not in (*QUERIES, *OUTPUTS))
        )
        if convolves and len(shape) > 2:
            return self._conv(layer, main, bias)
        entry = Entry()
        biased = layer.leaves[bias].shape if bias else None
        role = "in" if layer.hint in QUERIES else "out" if layer.hint in OUTPUTS else None
        forms = projections(shape, biased, main, role, self.widths, self.letters)
        self._equation(entry, forms, shape)
        self._from(entry, layer, main, bias)
        self._partners_of_weight(entry, layer)
        channels = next((n for n in sorted(self.channels, reverse=True) if n > 1 and shape[0] % n == 0), None)
        if channels and len(shape) == 2 and shape[0] not in self.widths:
            last = self.letters.named("width", channels)
            line = f"flattened: {{{forms[0].inputs}: RS{last}}}"
            how = "rows, columns, channels; `axes` gives the sizes: R: {is: rows, equals: 7}, and S"
            entry.ask(
                "flattened", "is the input a map of a convolution, flattened? If not, take the line away", [(line, how)]
            )
        if role is None:
            self._activation(entry)
        words = [("linear", "")]
        if len(forms) > 1 and len(shape) == 3:
            words.append(
                ("conv", "if it is one along time: then `dimension_numbers: NWC,WIO->NWC` and `axes:`, no `einsum:`")
            )
        self._target(entry, layer, words)
        if (layer.steps, "weight_norm") in self.partners:
            module = plain(self._module(layer.steps))
            entry.offer(
                [(f"linear: {{module: {module}, parametrization: weight_norm}}", "if the target keeps its two tensors")]
            )
        return entry

    def _equation(self, entry: Entry, forms: Sequence[Form], shape: tuple[int, ...]) -> None:
        if len(forms) == 1:
            entry.say("einsum", forms[0].equation, f"guess: {forms[0].why}")
            return
        shown = " x ".join(map(str, shape))
        entry.ask("einsum", f"the sizes {shown} do not tell which axes are inputs", [(f"einsum: {f.equation}", f.why) for f in forms])  # fmt: skip

    def _partners_of_weight(self, entry: Entry, layer: Layer) -> None:
        for role in ("weight_norm", "spectral_norm"):
            if path := self.partners.get((layer.steps, role)):
                entry.say(role, plain(path), "guess: by its name")

    def _activation(self, entry: Entry) -> None:
        others = [word for word in ACTIVATIONS if word not in ("none", "gelu_tanh", "gelu_erf")]
        known = f"none | {' | '.join(others)} | gelu_tanh (flax's nn.gelu) | gelu_erf (nn.gelu with approximate=False)"
        entry.ask("activation", "what does the source apply next?", [(f"activation: {known}", "")])

    def _conv(self, layer: Layer, main: str, bias: str | None) -> Entry:
        entry = Entry()
        g = layer.leaves[main]
        spatial = len(g.shape) - 2
        words = ("W", "HW", "DHW")[spatial - 1]
        torch_order = main == "weight"
        numbers = f"NC{words},OI{words}->NC{words}" if torch_order else f"N{words}C,{words}IO->N{words}C"
        sizes = g.shape[2:] if torch_order else g.shape[:spatial]
        out, into = (g.shape[0], g.shape[1]) if torch_order else (g.shape[-1], g.shape[-2])
        rows = "".join(self.letters.named("kernel", n, k) for k, n in enumerate(sizes))
        o = self.letters.named("width", out)
        i = self.letters.named("one" if into == 1 else "width", into, int(into == out and into > 1))
        entry.say("dimension_numbers", numbers, f"guess: {'Equinox' if torch_order else 'flax'} keeps kernels so")
        entry.say("axes", o + i + rows if torch_order else rows + i + o)
        self._from(entry, layer, main, bias, "guess: a convolution's kernel")
        self._partners_of_weight(entry, layer)
        if into == 1 and out > 1:
            groups = [
                (f"feature_group_count: {o}", "depthwise"),
                ("feature_group_count: 1", "its input has one channel"),
            ]
            entry.ask("feature_group_count", "depthwise, or an input of one channel?", groups)
        entry.ask("padding", "what does the source pass?", [("padding: SAME", "flax's default"), ("padding: VALID", "Haiku: SAME, Keras: VALID by default")])  # fmt: skip
        entry.offer([("strides: 2", "if they are not 1; with SAME say `input_size:`, too"), ("standardized: (w - mean) / (std + 1e-5)", "if the source standardises the kernel")])  # fmt: skip
        self._activation(entry)
        self._target(entry, layer, [("conv", ""), ("conv_transpose", "if it is one; shapes do not tell")])
        return entry

    def _sigma(self, path: str) -> Iterator[str]:
        sigma = _sigma(path)
        if sigma in self.taken:
            entry = Entry()
            entry.say("drop", plain(escape(sigma)), "guess")
            entry.say("because", "found anew at every call, by a step from u")
            yield str(entry)

    def _lone(self, layer: Layer, key: str, g: Group) -> Iterator[str]:
        """A leaf that no kind is guessed for."""
        entry = Entry()
        path = self._path(g.steps)
        entry.say(
            "from",
            plain(path),
            f"{self._spec(g)}; guess: a raw parameter, kept as stored; names and shape do not tell more",
        )
        self._stacked(entry, g.steps)
        entry.ask(
            "parameter", "what is the tensor called in PyTorch?", [(f"parameter: {plain(self._module(g.steps))}", "")]
        )
        yield str(entry)
