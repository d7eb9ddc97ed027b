"""The shapes of the leaves: the rules are compiled for made-up sizes, and the axes of the tensors are solved for the true ones."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from convert.checkpoints.source import Source
from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.ops import Pad
from convert.core.tensor_spec import TensorSpec
from convert.layers import Rule
from convert.layers.base import Step
from convert.layers.leaves import MisfitError
from convert.planning.compile.compiler import Compiler
from convert.planning.constraints import Constraint, Statement, SumConstraint, bind
from convert.planning.matching.match import Coverage
from convert.planning.outputs import join
from convert.reversing.derived.leaves import WantedLeaf
from convert.rules.file import Axis, RuleFile

UNIT = 221_760  # a made-up size is a multiple of it, as sizes must divide by numbers of groups
MOST_AXES = 9


@dataclass(frozen=True)
class Known:
    """What is known about the sizes besides the tensors, the most certain first.

    Attributes:
        given: the user's.
        stated: source of a statement -> letter -> size, such as those of ``config.json``.
    """

    given: Mapping[str, int]
    stated: Mapping[str, Mapping[str, int]]


def letters_of(rule: Rule, role: str, variant: str | None) -> str | None:
    """Return the letters of a leaf's axes but the stacked ones; None: it is kept as stored.

    Raises:
        MisfitError: the rule alone does not give them.
    """
    if rule.normalized is not None or rule.kind.pair is not None:
        raise _underivable(rule, role, "its weight is computed from several leaves")
    if rule.kind.packed:
        return None
    usual = rule.kind.rank(role, variant)
    for rank in range(MOST_AXES) if usual is None else (usual,):
        for shape in ((1,) * rank, *itertools.product((1, UNIT), repeat=min(rank, 4))):  # a group norm counts channels
            try:
                return rule.kind.letters(role, shape, variant)
            except ValueError:
                continue
    raise _underivable(rule, role, "the rule gives its axes no letters")


def _underivable(rule: Rule, role: str, why: str) -> MisfitError:
    return MisfitError(
        Finding(
            "tree-not-derived",
            f"the tensors do not give the shape of this leaf: {why}",
            rule=rule.at.line_only,
            path=str(rule.sources.get(role, rule.kind_name)),
            fix="give a checkpoint of the same model with --like",
        )
    )


@dataclass
class Shapes:
    """Solves for the shapes of leaves.

    Args:
        rules: of the model.
        variants: name of a choice -> variant.
        specs: of the tensors.
    """

    rules: RuleFile
    variants: Mapping[str, str]
    specs: Mapping[str, TensorSpec]

    def __post_init__(self) -> None:
        self.varying = frozenset(letter for letter, axis in self.rules.axes.items() if axis.varies)

    def made_up(self, wanted: Sequence[WantedLeaf]) -> tuple[dict[str, int], list[tuple[int, ...]]]:
        """Return a size for each letter, and the shapes that the leaves then have."""
        letters: dict[str, None] = {}
        for leaf in wanted:
            letters |= dict.fromkeys(_inside(leaf.rule, leaf.role, self._variant(leaf.rule)))
        axes = self._axes(wanted)
        base = [x for x in letters if x not in axes or not axes[x].equals]
        base += [x for axis in axes.values() for x in axis.equals if isinstance(x, str) and x not in axes]
        base += [x for axis in axes.values() for x in axis.equals if isinstance(x, str) and x in axes and not axes[x].equals]  # fmt: skip
        fixed = {x: size for leaf in wanted for x, size in _counted(leaf, self._variant(leaf.rule)).items()}
        known = [
            Constraint(x, fixed.get(x, UNIT * (k + 1)), "", "", x) for k, x in enumerate(dict.fromkeys([*base, *fixed]))
        ]
        sizes, _ = bind(known, axes)
        for k, x in enumerate(letters):  # a letter that only a product of unknowns has
            sizes.setdefault(x, UNIT * (len(known) + k + 1))
        return sizes, [self._shape(leaf, sizes) for leaf in wanted]

    def _axes(self, wanted: Sequence[WantedLeaf]) -> dict[str, Axis]:
        """Return the declared axes, and those that flattening a map makes."""
        axes = dict(self.rules.axes)
        for leaf in wanted:
            flattened = leaf.rule.flattened
            if flattened is not None and not (flattened.axis in axes and axes[flattened.axis].equals):
                axes[flattened.axis] = Axis("", tuple(flattened.order), leaf.rule.at)
        return axes

    def _variant(self, rule: Rule) -> str | None:
        return self.variants.get(rule.choice) if rule.choice else None

    def _shape(self, leaf: WantedLeaf, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a leaf.

        Raises:
            MisfitError: a size is unknown, or the leaf has no letters and there is no tensor of it.
        """
        rule, variant = leaf.rule, self._variant(leaf.rule)
        letters = letters_of(rule, leaf.role, variant)
        if letters is None:
            if not leaf.tensors:
                raise _underivable(rule, leaf.role, "there is no tensor of it")
            try:
                shape = list(rule.kind.leaf_shape(leaf.role, self.specs[leaf.tensors[0]].shape))
            except (KeyError, IndexError):
                raise _underivable(rule, leaf.role, f"{leaf.tensors[0]} is {self.specs[leaf.tensors[0]]}") from None
        else:
            groups = rule.kind.axis_groups(variant)
            shape = [
                sum(math.prod(sizes[y] for y in term) for term in groups[x].terms)
                if x in groups
                else 1
                if x == "."
                else sizes[x]
                for x in letters
            ]
        if not rule.kind.shared(leaf.role, tuple(shape)):
            for index, axis in sorted(rule.stacked.items(), key=lambda item: item[1]):
                shape.insert(axis, leaf.stack[index])
        return tuple(shape)

    def steps(self, coverage: Coverage, source: Source, target: str, sizes: Mapping[str, int]) -> list[Step]:
        """Compile the rules for a tree of made-up sizes.

        Raises:
            MisfitError: a rule cannot be compiled without the values of its tree.
        """
        facts = dict(self.rules.facts)
        for matched in coverage.matched:
            rows, axes = getattr(matched.rule.kind, "rows", None), getattr(matched.rule.kind, "axes", None)
            if isinstance(rows, str) and axes:
                facts[rows] = sizes[axes.replace(".", "")[0]]
        compiler = Compiler(source, target, None, facts, (), sizes, {}, True, self.varying)
        steps: list[Step] = []
        for matched in coverage.matched:
            if not any(matched.leaves.values()):
                continue
            for written in matched.rule.each_layer(target):
                layer = written.layer(target)
                assert layer is not None
                try:
                    rule = replace(written, kind=written.kind.resolved(sizes, facts))
                except ValueError as error:
                    raise _underivable(written, written.lead, str(error)) from None
                if rule.concatenated:  # the order of parts, whose sizes are made up, changes no shape
                    layer = replace(layer, concatenated={})
                    rule = replace(rule, concatenated={}, targets={None: layer}, also={})
                steps += rule.kind.compile(compiler, replace(matched, rule=rule), layer, self._variant(rule)).steps
        return list(join(steps)[0])

    def solve(
        self, wanted: Sequence[WantedLeaf], steps: Iterable[Step], names: Mapping[str, int], known: Known
    ) -> tuple[list[TensorSpec], dict[str, int]]:
        """Return shape and dtype of each leaf, and the sizes.

        Args:
            steps: of the tree with made-up sizes.
            names: name of each of the `wanted` leaves in that tree, and its number.

        Raises:
            MisfitError: a size cannot be told.
            PlanError: the tensors contradict each other.
        """
        own: list[SumConstraint] = []
        of_leaf: dict[int, list[SumConstraint]] = defaultdict(list)
        dtypes: dict[int, str] = {}
        for step in steps:
            spec = self.specs.get(step.name)
            if spec is None or not step.parts:
                continue
            statements = list(_statements(step, spec))
            for part in step.parts:
                number = names[part.leaf]
                dtypes.setdefault(number, spec.dtype)
                of_leaf[number] += statements
            own += [one for one in statements if self.varying.isdisjoint("".join(one.terms))]
        axes = self._axes(wanted)
        counted = [Constraint(x, n, "", "", "the names") for leaf in wanted for x, n in _counted(leaf, self._variant(leaf.rule)).items()]  # fmt: skip
        needed = {x for leaf in wanted for x in _inside(leaf.rule, leaf.role, self._variant(leaf.rule))} - self.varying
        sizes = self._bound([*counted, *own], axes, needed, known)
        specs = []
        for k, leaf in enumerate(wanted):
            local = dict(sizes)
            if not self.varying.isdisjoint(_inside(leaf.rule, leaf.role, self._variant(leaf.rule))):
                first: list[Statement] = [Constraint(x, n, "", "", x) for x, n in sizes.items()]
                local, _ = bind([*first, *of_leaf[k]], axes)
            try:
                shape = self._shape(leaf, local)
            except KeyError as error:
                raise self._unknown(leaf, str(error.args[0]), own) from None
            dtype = dtypes.get(k) or next((self.specs[name].dtype for name in leaf.tensors), "")
            specs.append(TensorSpec(shape, dtype or next(iter(dtypes.values()), "float32")))
        return specs, sizes

    def _bound(
        self, statements: Sequence[Statement], axes: Mapping[str, Axis], needed: Iterable[str], known: Known
    ) -> dict[str, int]:
        """Solve, first with the tensors and what the user gives, then with what each of the others states about the unknown letters."""
        given = [Constraint(x, n, "", "", "the setting", f"--set {x}={n}") for x, n in known.given.items()]
        sizes, conflicts = bind([*given, *statements], axes)
        for place, stated in known.stated.items():
            if conflicts or all(x in sizes for x in needed):
                break
            more = [Constraint(x, n, place, "", f"{place} has {x} = {n}") for x, n in stated.items() if x not in sizes]
            trial, problems = bind([*given, *more, *statements], axes)
            if place != CONFIG and (problems or any(sizes.get(x, n) != n for x, n in stated.items())):
                continue  # another published size
            if problems:
                raise PlanError(self._contradicted(stated, problems))
            sizes = trial
        if conflicts:
            count = f"{len(conflicts)} problems" if len(conflicts) > 1 else "1 problem"
            raise PlanError(*conflicts, headline=f"{self.rules.path} does not fit the tensors: {count}")
        return sizes

    def _contradicted(self, stated: Mapping[str, int], problems: Sequence[Finding]) -> Finding:
        """Say that ``config.json`` has sizes that the tensors have not."""
        meanings = {x: f" ({self.rules.axes[x].meaning})" for x in stated if x in self.rules.axes}
        return Finding(
            "config-conflict",
            f"the config.json of the tensors contradicts their shapes: {problems[0].problem}",
            rule=problems[0].rule,
            path=problems[0].path,
            expected="sizes that give the shapes of the tensors",
            got=", ".join(f"{x} = {n}{meanings.get(x, '')}" for x, n in stated.items()),
            fix="one of the two is of another model: correct config.json, or give all tensors of its model",
        )

    def _unknown(self, leaf: WantedLeaf, letter: str, statements: Sequence[SumConstraint]) -> MisfitError:
        """Say which size the tensors leave open, and where they have only a product of it."""
        meaning = f" ({self.rules.axes[letter].meaning})" if letter in self.rules.axes else ""
        found = next((one for one in statements if any(letter in term for term in one.terms)), None)
        got = f"{' + '.join('*'.join(term) for term in found.terms)} = {found.size} ({found.leaf})" if found else "no tensor has it"  # fmt: skip
        return MisfitError(
            Finding(
                "size-unknown",
                f"the tensors do not give {letter}{meaning}",
                rule=leaf.rule.at.line_only,
                path=leaf.path,
                got=got,
                fix=f"give it with --set {letter}=..., put the model's config.json next to the tensors, or give a checkpoint with --like",
            )
        )


CONFIG = "config.json"


def _statements(step: Step, spec: TensorSpec) -> Iterator[SumConstraint]:
    """Yield what the shape of a tensor says about the letters of its axes."""
    first = step.parts[0]
    if (
        any(part.rule is not None and part.rule.kind.packed for part in step.parts)  # letters of one layer
        or not all(part.layout.written for part in step.parts)
        or any(len(part.groups) != len(spec.shape) for part in step.parts)
        or len(step.spec.shape) != len(spec.shape)
    ):
        return  # kept as stored; or another number of axes, which is found when the plan is compared with the tensors
    along = first.axis % len(spec.shape) if first.rows is not None and spec.shape else None
    for axis, size in enumerate(spec.shape):
        terms = tuple(part.groups[axis] for part in step.parts) if axis == along else (first.groups[axis],)
        size -= sum(op.before for op in first.ops if isinstance(op, Pad) and op.axis == axis)
        yield SumConstraint(terms, size, step.rule.line_only, step.name, f"{spec} with rows {terms}" if axis == along else f"{spec} as {first.layout.written}")  # fmt: skip


def _inside(rule: Rule, role: str, variant: str | None) -> str:
    """Return the letters that a leaf's axes have or are made of."""
    letters = letters_of(rule, role, variant) or ""
    groups = rule.kind.axis_groups(variant)
    return "".join("".join(groups[x].terms) if x in groups else x for x in letters if x != ".")


def _counted(leaf: WantedLeaf, variant: str | None) -> dict[str, int]:
    """Return the sizes of axes of which the targets' names list or number the elements."""
    rule, counted = leaf.rule, dict(leaf.split)
    letters = {role: _inside(rule, role, variant) for role in rule.sources}
    for _, layer in rule.layers:
        for piece in layer.path.pieces:
            words = getattr(piece, "words", ())
            name = getattr(piece, "name", "")
            if name and words and any(name in inside for inside in letters.values()):
                counted[name] = len(words)
        if len(layer.path.groups) > len(rule.path.groups) and not rule.kind.parts:
            letter = rule.kind.split_axis(rule.lead, letters[rule.lead], variant)
            counted[letter] = len(layer.path.groups[-1].words)
    return counted
