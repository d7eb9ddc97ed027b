"""Draft a rule file from a tree: names and shapes give guesses; what they do not determine becomes a question."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from convert.checkpoints.source import Leaf, Source
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.path_pattern import escape_path
from convert.core.similarity import did_you_mean
from convert.drafting.attention import AttentionLeaves, find_attention
from convert.drafting.axis_letters import Letters, NoLetterError
from convert.drafting.companions import find_partners, reparametrized
from convert.drafting.copies import FoundCopies, find_copies
from convert.drafting.equinox_state import find_statistics
from convert.drafting.layer_rules import LayerRules
from convert.drafting.like.answers import Answered, answer
from convert.drafting.like.readings import Planner
from convert.drafting.like.target import TargetModel
from convert.drafting.needless import find_needless
from convert.drafting.path_groups import Names, has_many_widths
from convert.drafting.recurrent_cells import find_cells
from convert.drafting.tree_paths import Paths
from convert.drafting.yaml_entry import Draft, render
from convert.layers.draft import DraftEntry, Group, Layer, PathKey, flow, plain
from convert.rules.placeholders import ASK


@dataclass(frozen=True)
class KnownRules:
    """Rules that need no draft.

    Attributes:
        by: the code that they follow from, for people.
        entries: the rules.
        leaves: below the root, without flax nnx's ``/value``, that these rules leave to the draft.
        letters: of the axes of these rules.
    """

    by: str
    entries: tuple[DraftEntry, ...]
    leaves: Collection[str]
    letters: Letters


def draft_rules(
    source: Source,
    name: str = "my-model",
    root: str = "",
    like: TargetModel | None = None,
    known: KnownRules | None = None,
) -> str:
    """Draft a rule file that covers every leaf of a checkpoint. Reads no array.

    Args:
        source: from `convert.open_source`.
        name: name of the model in the file.
        root: path of the tree to draft, such as ``agent/actor``; the leaves outside of it are dropped. Empty: all leaves.
        like: the target, whose names, shapes and types of modules answer questions.
        known: rules that are known already; `like` is then what they leave of the target.

    Returns:
        YAML. A guess has the comment ``# guess:``. What names and shapes do not determine is a value ``ask`` with a comment
        ``# question:`` and the alternatives below it. A question that several rules share is asked once; the others refer
        to it by an alias. `convert.parse_rules` reads the text and lists its `questions`.

    Raises:
        CheckpointError: the tree has no leaves, or none below `root`.
    """
    drafter = _Drafter(source, root.strip("/"), known, widths_vary=like is None)
    if like is None:
        return render(drafter.draft(name, tuple(drafter.entries())))
    entries = tuple(drafter.entries())
    found = drafter.answered(entries, like)
    if lost := {line.value for entry in found.lost for line in entry.lines if line.key == "from"}:
        drafter = _Drafter(
            source, root.strip("/"), known
        )  # the attention of a library may be separate layers in the target
        found = drafter.answered(tuple(drafter.entries(lost)), like)
    return render(replace(drafter.draft(name, found.rules), loads=like.loads, missing=found.missing))


class _Drafter:
    """Drafts the rules of a tree.

    Args:
        known: rules that need no draft; the root is then that which was given.
        widths_vary: whether one rule may hold for convolutions of several widths, where a tree has many.
    """

    def __init__(
        self, source: Source, root: str, known: KnownRules | None = None, *, widths_vary: bool = False
    ) -> None:
        self.source, self.known = source, known
        inside = _below(source, root)
        self.outside = [name for name in source.leaves if name not in inside]
        if known is not None:
            left = {f"{root}/{name}" if root else name for name in known.leaves}
            inside = {name: leaf for name, leaf in inside.items() if name.removesuffix("/value") in left}
        self.needless = find_needless(source.leaves)
        self.copies = find_copies(inside, self.needless)
        others = tuple(f"{tree}/" for copies in self.copies for tree in copies.others)
        self.leaves = {name: leaf for name, leaf in inside.items() if not name.startswith(others)}
        vary = widths_vary and has_many_widths(self.leaves)
        self.paths, self.letters = Paths(self.leaves, root, self.needless, widths_vary=vary), Letters()
        if known is not None:
            self.paths.root, self.letters = root, known.letters
        normalized = reparametrized(self.leaves)
        self.paths.take_apart({*normalized, *(name for roles in normalized.values() for name in roles.values())})

    def answered(self, entries: Sequence[DraftEntry], like: TargetModel) -> Answered:
        """Answer the questions that a target decides."""
        planner = Planner(self.source, self.leaves, self.paths.root, tuple(self.letters.declared()))
        return answer(entries, planner, like, self.leaves)

    def draft(self, name: str, entries: Sequence[DraftEntry]) -> Draft:
        """Return the draft, its rules in the order of the tree."""
        order = {leaf: k for k, leaf in enumerate(self.source.leaves)}
        known = self.known.entries if self.known else ()
        rules = sorted(entries, key=lambda entry: order.get(entry.first, len(order)))
        return Draft(
            self.source.display_path.name,
            name,
            self.paths.root,
            bool(self.outside),
            tuple(map(_copies_entry, self.copies)),
            tuple(self.letters.declared(self._texts((*known, *entries)))),
            (*known, *rules, *self._drops_outside()),
            known=self.known.by if self.known else "",
            asks=bool(rules),
            leaf_names=self.source.names_in_order,
        )

    @staticmethod
    def _texts(entries: Sequence[DraftEntry]) -> Iterator[str]:
        """Yield all values of rules, and the answers that they offer: what may name an axis letter."""
        for entry in entries:
            for line in entry.lines:
                yield line.value
                yield from (text for text, _ in line.below)

    def entries(self, apart: Collection[str] = ()) -> Iterator[DraftEntry]:
        """Yield the rules; the attention at the paths `apart` as its layers."""
        left = list(self.paths.groups)
        attention = {
            prefix: found
            for prefix, found in find_attention(left).items()
            if plain(self.paths.path(prefix)) not in apart
        }
        for prefix, found in attention.items():
            taken = [g for g in left if g.steps[: len(prefix)] == prefix and found.leaves >= set(g.leaves)]
            left = [g for g in left if g not in taken]
            yield self._attention(prefix, found)
        cells = find_cells(left)
        for prefix, (word, cell) in cells.items():
            yield self._cell(prefix, word, cell)
        left = [g for g in left if not any(g.steps[: len(prefix)] == prefix for prefix in cells)]
        layers = _layers(left)
        partners = find_partners(layers, self.paths, self.leaves)
        bare = list(find_statistics(partners, layers, self.paths, self.leaves))
        write = LayerRules(self.leaves, self.paths, self.letters, partners, left)
        for layer in layers:
            yield from write.rules(layer)
        for layer in bare:
            yield write.bare(layer)
        for path, why in partners.dropped.items():
            entry = DraftEntry()
            entry.say("drop", plain(path), "guess")
            entry.say("because", why)
            yield entry
        yield from self._drops(self.paths.unneeded)

    def _cell(self, prefix: tuple[PathKey, ...], word: str, cell: str) -> DraftEntry:
        entry = DraftEntry(self._first(prefix))
        if cell.endswith("SimpleCell"):
            ways = [
                (f"cell: {cell}", "residual=False, the default"),
                (f"cell: {cell}(residual=True)", "the state is added before the activation"),
            ]
            entry.ask("cell", "was it made with residual=True? Its tree does not tell", ways, value=f"{cell}(residual={ASK})")  # fmt: skip
        else:
            entry.say("cell", cell, "guess: by the names and shapes of its leaves")
        entry.say("from", plain(self.paths.path(prefix)))
        self.paths.say_stacked(entry, prefix)
        named = prefix[:-1] if prefix[-1].words == ("cell",) and len(prefix) > 1 else prefix
        way = {"forward_layer": "forward", "backward_layer": "backward"}.get(named[-1].words[0], "")  # Keras
        module = self.paths.module(named[:-1] if way and len(named) > 1 else named)
        longer = f"{word}: {{module: {flow(module)}, layer: 0, direction: {way or 'backward'}}}"
        known = [
            (f"{word}: {plain(module)}", "one layer, one direction"),
            (longer, "one of several layers or directions"),
        ]
        entry.ask(word, "what is the module called in PyTorch?", known[::-1] if way else known)
        return entry

    def _attention(self, prefix: tuple[PathKey, ...], found: AttentionLeaves) -> DraftEntry:
        entry = DraftEntry(self._first(prefix))
        entry.say("layer", found.layer, "guess: by the names and shapes of its leaves")
        entry.say("from", plain(self.paths.path(prefix)), f"queries {found.shown}")
        try:
            entry.say("axes", found.axes(self.letters), "the width, the heads, the width of a head" if len(found.library.heads) == 2 else "the width, and that of all heads")  # fmt: skip
        except NoLetterError:
            raise AssertionError("attention is drafted first, and its letters are few") from None
        if found.biased != found.library.biased:
            entry.say("bias", "true" if found.biased else "false")
        self.paths.say_stacked(entry, prefix)
        module = self.paths.module(prefix)
        apart = f'attention: {{module: {flow(module)}, projections: "{{q,k,v}}_proj", output: out_proj}}'
        known = [(f"attention: {plain(module)}", "a torch.nn.MultiheadAttention")] if found.whole else []
        known.append((apart, "its projections, each a Linear of its own"))
        entry.ask("attention", "what is the module called in PyTorch?", known)
        return entry

    def _first(self, prefix: tuple[PathKey, ...]) -> str:
        """Return the first leaf below a path."""
        return next(g.leaves[0] for g in self.paths.groups if g.steps[: len(prefix)] == prefix)

    def _drops_outside(self) -> Iterator[DraftEntry]:
        """Drop the leaves outside of the root that was asked for, by the highest path that has no other leaves."""
        above = self.paths.root.split("/")
        found: dict[str, list[str]] = {}
        for name in self.outside:
            keys = name.split("/")
            apart = next(k for k, key in enumerate(keys) if k >= len(above) or key != above[k])
            found.setdefault("/".join(keys[: apart + 1]), []).append(name)
        for path, names in found.items():
            entry = DraftEntry()
            entry.say("drop", plain(f"/{escape_path(path)}" + ("" if names == [path] else "/**")))
            why = (
                "no weight"
                if all(name in self.needless for name in names)
                else "outside of the tree that these rules are for"
            )
            entry.say("because", why)
            yield entry

    def _drops(self, groups: Sequence[Group]) -> Iterator[DraftEntry]:
        dropped: set[str] = set()
        slash = "/" if self.paths.root else ""
        for g in groups:
            state = self.needless.states.get(g.leaves[0])
            entry = DraftEntry()
            if state and f"{state}/" in g.leaves[0]:
                if state in dropped:
                    continue
                dropped.add(state)
                entry.say("drop", plain(f"{slash}{state}/**"), "guess")
                entry.say("because", "the optimizer's state")
            else:
                counts = {"step": "the training step", "count": "a counter"}
                why = counts.get(g.steps[-1].words[0], "a number that is not a weight")
                entry.say("drop", plain(self.paths.drop(g)), "guess")
                entry.say("because", "the state of a random generator" if g.leaves[0] in self.needless.random else why)
            yield entry


def _below(source: Source, root: str) -> dict[str, Leaf]:
    """Return the leaves below a path.

    Raises:
        CheckpointError: there are none.
    """
    inside = {name: leaf for name, leaf in source.leaves.items() if not root or name.startswith(f"{root}/")}
    if inside:
        return inside
    path = str(source.display_path)
    if not source.leaves:
        raise CheckpointError(Finding("tree-empty", "the tree has no leaves", path=path))
    trees = list(dict.fromkeys("/".join(keys[:k]) for n in source.leaves for keys in [n.split("/")] for k in range(1, len(keys))))  # fmt: skip
    top = dict.fromkeys(tree.split("/")[0] for tree in trees)
    fix = did_you_mean(root, trees) or f"give one of {', '.join(top)}, or a path below it"
    raise CheckpointError(Finding("tree-empty", f"no leaf lies below {root}", path=path, fix=fix))


def _copies_entry(copies: FoundCopies) -> DraftEntry:
    entry = DraftEntry()
    known = []
    for tree in copies.of:
        leaves = f"{copies.leaves} leaves{' in each' if len(copies.within) > 1 else ''}"
        meaning = FoundCopies.meaning(tree) if tree != copies.of[0] else ""
        known.append((f"keep: {flow(tree)}", f"{leaves}; by its name {meaning}" if meaning else leaves))
    question = "they have the same paths and shapes; which is converted? The others are dropped. If all are parts of one model, write no `copies`, and rules for each"  # fmt: skip
    entry.ask("keep", question, known)
    entry.say("of", f"[{', '.join(map(flow, copies.of))}]", "the rules below name the first, for any answer")
    if copies.within != ("",):
        entry.say("in", f"[{', '.join(map(flow, copies.within))}]")
    return entry


def _layers(groups: list[Group]) -> list[Layer]:
    found: dict[tuple[PathKey, ...], dict[str, Group]] = {}
    names = Names()
    for g in groups:
        key = g.steps[-1].words[0] if len(g.steps[-1].words) == 1 else names.text(g.steps[-1:])
        found.setdefault(g.steps[:-1], {})[key] = g
    return [Layer(steps, leaves) for steps, leaves in found.items()]
