"""Print a derivation as a rule file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

from convert.core.path_pattern import escape_path, parse_pattern
from convert.drafting.axis_letters import Letters, NoLetterError
from convert.drafting.like.target import TargetModel
from convert.drafting.yaml_entry import leaf_names_lines, rule_texts
from convert.inference.derivation import NOT_REACHED, Derivation, Difference, Grade, Tensor
from convert.inference.open_tensors import NOT_PROVEN, equal_widths, part_of, stacked_along
from convert.inference.rule_file.attention import join_attention
from convert.inference.rule_file.complex_tensors import in_complex_numbers, of_two_leaves
from convert.inference.rule_file.computed import settle
from convert.inference.rule_file.joining.copies import with_copies
from convert.inference.rule_file.joining.cut_rows import with_cut_rows
from convert.inference.rule_file.joining.joined import join_layers
from convert.inference.rule_file.joining.patterns import NUMBER, PatternRule, indexed
from convert.inference.rule_file.joining.taken import in_tensors, other_parts, parts_of, with_biases_apart, with_taken
from convert.inference.rule_file.layers.modules import COUNTER, describe_layers
from convert.inference.rule_file.layers.parametrized import words_for_vector
from convert.inference.rule_file.layers.rule import LayerRule, NoWordsError
from convert.inference.rule_file.leaf_sums import with_sums
from convert.inference.rule_file.low_rank import with_products
from convert.inference.rule_file.printing.buffers import describe_buffers
from convert.inference.rule_file.printing.constants import Neighbour
from convert.inference.rule_file.printing.entry import axes_of_tensor, entry_of, tied_head
from convert.inference.rule_file.proof import is_open
from convert.layers.draft import DraftEntry, plain
from convert.layers.shared_keys import ASK
from convert.planning.plan import CONFIGURED, UNUSED

NEAREST = "which module is made of it? The two programs do not show it; this is the nearest"
EQUAL = "axes of one kind and size are equal in these rules; for a model in which they differ, derive them from a pair in which they do"
NO_PATTERN = "no pattern says the paths of its leaves, or it is made of one leaf twice, or of elements of several axes"


@dataclass(frozen=True)
class WrittenRules:
    """A rule file, printed.

    Attributes:
        text: of the file.
        decided: the same without questions and guesses, where leaves that are open are dropped: what can be planned and compared.
        guessed: modules whose rule is a guess: a tensor of it is open.
        open: tensor or module -> why no rule makes it.
        modules: of each rule of `decided`, what it makes; of the others, such as constants, ``""``.
        leaves: of each rule of `decided`, what it makes that of; of the others, none.
        drafted: of each rule of `text`, what it makes, as `modules`; those of constants and the like, which stand last, are left out.
        sure: the rules without guesses, and with the questions about leaves that the language has no words for.
        left: leaves that `sure` says nothing of.
        letters: of the axes.
    """

    text: str
    decided: str
    open: Mapping[str, str]
    guessed: Collection[str]
    modules: tuple[str, ...]
    leaves: tuple[frozenset[str], ...]
    drafted: tuple[str, ...]
    sure: tuple[DraftEntry, ...]
    left: tuple[str, ...]
    letters: Letters


def write_rules(
    derivation: Derivation,
    target: TargetModel,
    name: str = "my-model",
    root: str = "",
    *,
    numbers: Collection[str] = (),
    outside: bool = False,
    leaf_names: Sequence[str] = (),
    refused: Mapping[str, str] | None = None,
    as_parameters: Collection[str] = (),
) -> WrittenRules:
    """Print a derivation as a rule file.

    A leaf that is not derived, or whose layout the rule language has no words for, is a rule with the value ``ask``.

    Args:
        derivation: the result of `infer`.
        target: names, shapes and types of the modules.
        name: of the model, for ``model:`` and ``title:``.
        root: of the leaves in the checkpoint.
        numbers: leaves that are no weights.
        outside: whether the checkpoint has leaves that are not below it.
        leaf_names: of a checkpoint without names, in its order.
        refused: modules, as `WrittenRules.modules` has them, whose rule makes something else, and tensors that no rule makes; and what is wrong.
        as_parameters: tensors that have rules of parameters, and not of layers.
    """
    derivation, parts_alone = in_complex_numbers(derivation)
    layers = describe_layers(with_products(with_sums(derivation)), target, {*as_parameters, *of_two_leaves(derivation)})
    letters = Letters()
    entries: list[DraftEntry] = []
    unfinished: dict[int, PatternRule] = {}  # position of an entry with a question
    described, lost = settle(layers.found, derivation, target)
    described, taken = with_copies(described)
    described, facts = with_cut_rows(described)
    unwritten = {**layers.open, **lost, **parts_alone, **taken}
    made: set[str] = set()
    tied: set[str] = set()  # tables whose rules name the head
    guessed = {part.leaf for tensor in derivation.tensors if tensor.guessed for part in tensor.parts}
    guesses: dict[int, frozenset[str]] = {}  # position of an entry -> its leaves
    doubtful: list[str] = []  # modules of which a tensor is open
    parts = parts_of(described)
    described = with_biases_apart(described, parts)
    described = join_attention(described, derivation, target)
    rules, unjoined = join_layers(described, derivation.leaves)
    rules = [with_taken(one, parts) for rule in rules for one in in_tensors(rule, parts)]
    rules, lost = _writable(rules, unjoined, target)
    unwritten |= {**lost, **(refused or {})}
    makers: list[tuple[str, frozenset[str]]] = []  # of each rule, what it makes, and of which leaves
    neighbours: list[Neighbour] = []
    for rule in rules:
        module = rule.module or _own_tensor(rule.layer)
        if refused and module in refused:
            continue
        try:
            entries.append(entry_of(rule, letters, target))
            makers.append((module, rule.leaves))
            neighbours += _neighbours(rule, letters)
            made |= rule.leaves
            tied |= (
                {f"{rule.module}.weight"} if rule.layer.kind_name == "embedding" and tied_head(rule, target) else set()
            )
            if rule.leaves & guessed:
                guesses[len(entries) - 1] = rule.leaves
            if rule.grade is Grade.OPEN:
                entries[-1] = _asked(entries[-1])
                unfinished[len(entries) - 1] = rule
                doubtful.append(module)
            if asked := [key for key, value in rule.layer.keys if value == ASK]:
                unfinished[len(entries) - 1] = rule
                why = (
                    "without a proof, the module's number need not be the JAX model's"
                    if derivation.proof is None
                    else "it is seen in neither program; write the JAX model's in place of `ask`"
                )
                unwritten[rule.module] = f"`{'` and `'.join(asked)}` of its rule is `ask`: {why}"
        except NoLetterError:
            unwritten[module] = "the rule file has no more letters"
    letters.fix_sums()
    lacking = [t for t in derivation.tensors if t.name in layers.lacking and t.name not in (refused or {})]
    batch_norms = (rule for rule in rules if rule.layer.kind_name == "batch_norm")
    norms = [name for rule in batch_norms for name in (rule.module, *rule.layer.also)]
    shared = _shared(target, derivation, tied, unwritten)
    counters = _counters(target, norms, unwritten)
    buffers = describe_buffers(derivation, letters, lacking, neighbours, shared, counters)
    entries += buffers.entries
    unwritten = {name: words_for_vector(name, why) for name, why in {**unwritten, **buffers.open}.items()}
    of_tensors = _of_tensors(derivation.tensors, unwritten)
    unwritten = {name: _of_a_guess(why, of_tensors[name], derivation) for name, why in unwritten.items()}
    gone = {*derivation.dropped, *numbers}
    for leaves, why in ((derivation.dropped, UNUSED), (numbers, CONFIGURED)):
        entries += _drops(leaves, [leaf for leaf in derivation.leaves if leaf not in gone], why)
    if outside:
        entries.append(_drop("/**", f"outside of {root}", rest=True))
    left = [leaf for leaf in derivation.leaves if leaf not in made and leaf not in gone]
    ruleless = [(t, unwritten[name]) for name, tensors in of_tensors.items() for t in tensors]
    questions = [_question(leaf, derivation, ruleless) for leaf in left]
    wordless = {leaf for t in derivation.tensors for part in t.parts for leaf in (part.leaf, *part.leaves)} - guessed
    head = [
        "# Derived from the two programs. The remark of a rule is its evidence: the operations in which data meets the parameter.",
        f"model: {plain(name)}",
        f"title: {plain(name)}",
    ]
    if root:
        head.append(f"root: {plain(root)}")
    head += leaf_names_lines(leaf_names)
    if declared := list(letters.declared()):
        head += ["", f"axes:{f'    # {EQUAL}' if letters.share_sizes else ''}", *(f"  {axis}" for axis in declared)]
    facts |= buffers.facts
    if facts:
        head += ["", "facts:", *(f"  {name}: {value}" for name, value in facts.items())]
    decided = [entry for k, entry in enumerate(entries) if k not in unfinished]
    drafted = tuple(module for module, _ in makers)
    makers = [maker for k, maker in enumerate(makers) if k not in unfinished]
    makers += [("", frozenset())] * (len(decided) - len(makers))
    modules, leaves = zip(*makers, strict=True) if makers else ((), ())
    undecided = dict.fromkeys([*left, *(leaf for rule in unfinished.values() for leaf in sorted(rule.leaves))])
    drops = [_drop(escape_path(leaf), "open") for leaf in undecided]
    texts = []
    for of, lacks in (([*entries, *questions], unwritten), ([*decided, *drops], {*unwritten, *doubtful})):
        rest = _targets(target, _shared(target, derivation, tied, lacks), derivation)
        texts.append("\n".join([*head, *rest, "", "rules:", "\n\n".join(rule_texts(of)), ""]))
    sure = [entry for k, entry in enumerate(entries) if k not in guesses]
    sure += [question for leaf, question in zip(left, questions, strict=True) if leaf in wordless]
    unsure = guessed.union(*guesses.values(), set(left) - wordless)
    asked = [leaf for leaf in derivation.leaves if leaf in unsure]
    return WrittenRules(
        texts[0], texts[1], unwritten, tuple(doubtful), modules, leaves, drafted, tuple(sure), tuple(asked), letters
    )


def _targets(target: TargetModel, shared: Mapping[str, Sequence[str]], derivation: Derivation) -> list[str]:
    said = f"loads: {json.dumps(target.loads)}"
    if shared:
        names = ", ".join(f"{name}: [{', '.join(others)}]" for name, others in shared.items())
        said += f", shared: {{{names}}}"
    if not derivation.differences:
        return ["", "targets:", f"  torch: {{{said}}}"]
    differs = (f"    {json.dumps(_in_words(one, derivation), ensure_ascii=False)}," for one in derivation.differences)
    return ["", "targets:", f"  torch: {{{said}, differs: [", *differs, "  ]}"]


def _in_words(one: Difference, derivation: Derivation) -> str:
    """Return a difference as a note of the plan."""
    place = one.site.where or one.site.module or one.site.operation
    said = one.brief or one.problem
    if one.made_up_by:
        others = ", ".join(map(str, one.made_up_by))
        return f"the code of the two programs differs at {place}: {said}; with {others} they compute the same; write that place in one way in both, and derive the rules again"
    if one.shown:
        return f"the two programs differ at {place}: {said}; correct that and derive the rules again"
    doubt = f"`convert infer` does not know whether the two programs differ at {place}: {said}"
    widths = ", or give the layers different widths," if equal_widths(derivation) else ""
    return f"{doubt}; write that place, or what follows it, in one way in both{widths} and derive the rules again"


def _shared(
    target: TargetModel, derivation: Derivation, tied: Collection[str], unwritten: Collection[str]
) -> dict[str, Sequence[str]]:
    """Return the further names of modules and tensors that rules make, but those that a rule says itself."""
    made = [t.name for t in derivation.tensors if t.name not in tied and not is_open(t.name, unwritten)]
    return {
        name: others
        for name, others in target.shared.items()
        if any(tensor == name or tensor.startswith(f"{name}.") for tensor in made)
    }


def _counters(target: TargetModel, norms: Collection[str], unwritten: Collection[str]) -> list[str]:
    """Return the counters of the BatchNorms that no rule for a norm makes, as each of their tensors has a rule of its own."""
    modules = (name.removesuffix(f".{COUNTER}") for name in target.tensors if name.endswith(f".{COUNTER}"))
    return [
        f"{module}.{COUNTER}"
        for module in modules
        if not is_open(module, norms) and not is_open(f"{module}.running_mean", unwritten)
    ]


def _of_tensors(tensors: Sequence[Tensor], unwritten: Collection[str]) -> dict[str, list[Tensor]]:
    """Return of each module or tensor that has no rule the tensors, each once."""
    found: dict[str, list[Tensor]] = {name: [] for name in unwritten}
    patterns = [name for name in unwritten if "{" in name]
    for tensor in tensors:
        words = tensor.name.split(".")
        names = (".".join(words[:k]) for k in range(len(words), 0, -1))
        of = next((x for x in names if x in found), None) or next(
            (x for x in patterns if is_open(tensor.name, [x])), None
        )
        if of is not None:
            found[of].append(tensor)
    return found


def _of_a_guess(why: str, tensors: Sequence[Tensor], derivation: Derivation) -> str:
    """Return why tensors have no rule; where that is about the nearest guess of a search that ended, that nothing proved it."""
    guesses = [t for t in tensors if t.grade is Grade.OPEN and t.nearest and t.guessed]
    if not guesses or not derivation.differences or why in (NOT_REACHED, *(t.lack for t in tensors)):
        return why
    whole = all(sum(len(part.elements) for part in t.parts) + t.unseen == prod(t.shape) for t in guesses)
    return NOT_PROVEN if whole else why


def _offered(leaf: str, tensor: Tensor, derivation: Derivation) -> bool:
    """Whether a tensor without a rule is offered where a leaf is: by the nearest guess, else as a candidate, else by its size or that of one part of the leaf, for what is behind the difference."""
    leaves, shape = tensor.nearest or tensor.candidates, derivation.leaves[leaf]
    if leaves:
        return leaf in leaves
    return prod(tensor.shape) == prod(shape) or (tensor.not_reached and bool(stacked_along(tensor.shape, shape)))


def _question(leaf: str, derivation: Derivation, ruleless: Sequence[tuple[Tensor, str]]) -> DraftEntry:
    """Ask what a leaf becomes; the tensors that are nearest to it, or have as many elements, are the alternatives.

    Those behind the difference are none: nothing was tried for them.

    Args:
        ruleless: tensors without a rule, and why.
    """
    entry = DraftEntry()
    fitting = [(t, why) for t, why in ruleless if _offered(leaf, t, derivation)]
    behind = any(t.not_reached for t, _ in fitting)
    entry.say("from", plain(escape_path(leaf)))
    ways = [
        (f"parameter: {plain(t.name)}", _remark(t, why, derivation.leaves[leaf]))
        for t, why in fitting
        if not t.not_reached
    ]
    question = "which tensor of the target is made of it? The two programs do not show it"
    derived = (Grade.DERIVED, Grade.INTERCHANGEABLE)
    made = [
        t.name
        for t in derivation.tensors
        if t.grade in derived and any(leaf == part.leaf or leaf in part.leaves for part in t.parts)
    ]
    if made:
        ways = []
        more = f" and {len(made) - 2} more" if len(made) > 2 else ""
        question = (
            f"the two programs show that it becomes {', '.join(made[:2])}{more}; the summary says why no rule does"
        )
    elif ways and behind:
        question = f"which tensor of the target is made of it? It may also be one {_behind(derivation.differences)}"
    elif behind or (not ways and any(t.not_reached for t in derivation.tensors)):
        question = f"not reached: {_behind(derivation.differences)}"
    entry.ask("parameter", question, ways)
    return entry


def _remark(tensor: Tensor, why: str, leaf: Sequence[int]) -> str:
    """Return which part of a leaf a tensor that is offered is made of, if not of the whole, and why it has no rule, where that says more than the question."""
    if why not in (NOT_REACHED, NOT_PROVEN, tensor.lack):
        return why
    several = f" is made of {' and '.join(tensor.nearest)}" if len(tensor.nearest) > 1 else ""
    guess = f"the nearest guess{several}; {NOT_PROVEN}" if why == NOT_PROVEN else ""
    return "; ".join(filter(None, [part_of(tensor.shape, leaf), guess]))


def _behind(differences: Sequence[Difference]) -> str:
    """Say behind what nothing was found."""
    if not differences:
        return "behind the place where the search ended"
    one = differences[0]
    place = one.site.where or one.site.module or one.site.operation
    return (
        f"behind the difference at {place}; correct it first"
        if one.is_certain
        else f"behind {place}, which is undecided"
    )


def _asked(entry: DraftEntry) -> DraftEntry:
    """Return the rule of a layer that is open, with the target as a question; what was found is the answer that it offers."""
    *lines, target = entry.lines
    if target.value == ASK:
        return entry
    asked = DraftEntry(entry.first, lines)
    asked.ask(target.key, NEAREST, [(f"{target.key}: {target.value}", "")])
    return asked


def _writable(
    rules: Sequence[PatternRule], unjoined: Sequence[LayerRule], target: TargetModel
) -> tuple[list[PatternRule], dict[str, str]]:
    """Return the rules that the language has words for, without those of other parts of a leaf or tensor; and why not the others, by their modules.

    Args:
        rules: of the layers.
        unjoined: layers that have no rule.
        target: the modules.
    """
    lost: dict[int, str] = {}
    for k, rule in enumerate(rules):
        with suppress(NoLetterError):
            try:
                entry_of(rule, Letters(), target)
            except NoWordsError as error:
                lost[k] = str(error).replace(
                    "the leaf", " and of ".join(dict.fromkeys(path for _, path in rule.sources))
                )
    lost |= dict.fromkeys(other_parts(rules, lost, unjoined), "another part of its leaf, or of the tensor, has no rule")
    kept = [rule for k, rule in enumerate(rules) if k not in lost]
    without = {rules[k].module or _own_tensor(rules[k].layer): why for k, why in lost.items()}
    return kept, without | {layer.module or _own_tensor(layer): NO_PATTERN for layer in unjoined}


def _neighbours(rule: PatternRule, letters: Letters) -> list[Neighbour]:
    """Return the weights that a rule makes, with the letters of their axes."""
    layer, axes = rule.layer, axes_of_tensor(rule, letters)
    names = (rule.module, *(() if layer.also_as else layer.also)) if axes else ()
    modules = (name.rpartition(".")[0] if layer.kind_name == "parameter" else name for name in names)
    shape, outputs = layer.main[0].layout.shape, int(layer.kind_name == "conv_transpose")
    whole = (
        module for module in modules if module and module.count("{") == module.count("}")
    )  # not of parameters in several
    return [Neighbour(parse_pattern(module), shape, axes, outputs) for module in whole]


def _own_tensor(layer: LayerRule) -> str:
    """Return the name of the first tensor of a rule of the model itself."""
    return next((name for _, name in layer.names), "weight")


def _drops(names: Collection[str], kept: Sequence[str], why: str) -> Iterator[DraftEntry]:
    """Yield the rules of leaves that are not needed, those that differ in numbers together."""
    templates = {NUMBER.sub("#", name) for name in kept}
    groups: Mapping[str, list[str]] = defaultdict(list)
    for name in names:
        groups[NUMBER.sub("#", name)].append(name)
    for template, group in groups.items():
        joined = len(group) > 1 and template not in templates
        for path in [indexed(group[0])] if joined else map(escape_path, group):
            yield _drop(path, why)


def _drop(path: str, why: str, *, rest: bool = False) -> DraftEntry:
    entry = DraftEntry()
    entry.say("drop", plain(path))
    if rest:
        entry.say("rest", "true")
    entry.say("because", why)
    return entry
