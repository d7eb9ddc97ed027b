"""Stage 2a of planning: solve for the size of every axis letter, and choose the variants that the sizes decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.layers.base import Matched, Rule
from convert.layers.leaves import MisfitError
from convert.planning.compile.named_leaf import constraints, sizes_of_layers
from convert.planning.constraints import Constraint, Statement, SumConstraint, bind, of_layers_before
from convert.planning.matching.match import Coverage
from convert.rules.file import references
from convert.rules.formula import END


@dataclass(frozen=True)
class Sizes:
    """The solution.

    Attributes:
        sizes: axis letters and indices -> size.
        variants: name of a choice -> the variant that fits; those of choices without leaves are missing.
        confirmed: settings that the tree gives, too: without them, it has the same size or fits the same variant only.
        of_layers: letter that `allowed`, or a list in the sidecar, is compared with from layer to layer -> its size in each.
    """

    sizes: Mapping[str, int]
    variants: Mapping[str, str]
    confirmed: frozenset[str]
    of_layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def solve_sizes(coverage: Coverage, source: Source, settings: Mapping[str, Any]) -> tuple[Sizes, list[Finding]]:
    """Bind letters to sizes; of the variants of a choice, choose the only one that does not contradict them.

    Leaves of one shape constrain the sizes in the same way. So one leaf of each shape is read first; only where that
    shows a contradiction, every leaf is read, so that each wrong leaf becomes a finding.
    """
    solution, findings = _Solver(coverage, source, settings, every_leaf=False).solve()
    if findings:
        return _Solver(coverage, source, settings, every_leaf=True).solve()
    return solution, findings


@dataclass(frozen=True)
class _Solver:
    coverage: Coverage
    source: Source
    settings: Mapping[str, Any]
    every_leaf: bool

    def solve(self) -> tuple[Sizes, list[Finding]]:
        axes = self.coverage.rules.axes
        known: list[Statement] = [*self._from_settings(), *self._from_counts()]
        findings: list[Finding] = []
        variants: dict[str, str] = {}
        undecided: dict[str, list[Matched]] = {}
        chosen: dict[str, list[Matched]] = {}
        for matched in self.coverage.matched:
            choice = matched.rule.choice
            if choice and not any(matched.leaves.values()):
                continue  # absent: there is nothing to choose
            if choice and choice not in self.settings:
                undecided.setdefault(choice, []).append(matched)
                continue
            if choice:
                variants[choice] = self.settings[choice]
                chosen.setdefault(choice, []).append(matched)
            findings += self._collect(known, matched, variants.get(choice or ""))
        progress = True
        while undecided and progress:
            progress = False
            for choice, group in list(undecided.items()):
                trials = {variant: self._try(known, group, variant) for variant in group[0].rule.kind.variants}
                fitting = [variant for variant, (_, problems) in trials.items() if not problems]
                if len(fitting) == 1:
                    progress, variants[choice] = True, fitting[0]
                    known = trials[fitting[0]][0]
                    del undecided[choice]
                elif not fitting:
                    del undecided[choice]
                    findings.append(_no_variant(choice, group, {v: problems[0] for v, (_, problems) in trials.items()}))
        findings += [self._several_variants(choice, group) for choice, group in undecided.items()]
        findings += self._stacked_elsewhere(known, variants)
        sizes, conflicts = bind(known, axes)
        sizes = {name: size for name, size in sizes.items() if "[" not in name}
        of_layers: dict[str, tuple[int, ...]] = {}
        if not findings and not conflicts:
            sizes |= dict(self._ends(variants))
            for letter in self._compared_by_layer():
                of_layers[letter] = tuple(size for _, size in sorted(self._of_layers(letter, variants).items()))
        return Sizes(sizes, variants, self._confirmed(known, chosen), of_layers), [*findings, *conflicts]

    def _compared_by_layer(self) -> set[str]:
        """Return the letters that `allowed`, or a list in the sidecar, is compared with layer by layer."""
        rules = self.coverage.rules
        found = {letter for one in rules.allowed.values() for letter in one.varying}
        stated = rules.sidecar.sizes if rules.sidecar is not None else ()
        return found | {one.text for one in stated if one.text in rules.axes and rules.axes[one.text].of_layers}

    def _ends(self, variants: Mapping[str, str]) -> Iterator[tuple[str, int]]:
        """Yield the sizes in the first and the last layer that a `config`, `allowed`, `formulas` or the sidecar refers to: ``H[0]``, ``H[-1]``."""
        rules = self.coverage.rules
        named = [name for target in rules.targets.values() for name in references(target.config)]
        named += [name for allowed in rules.allowed.values() for name in allowed.names]
        named += [name for formula in rules.formulas for name in formula.names]
        named += [name for size in (rules.sidecar.sizes if rules.sidecar is not None else ()) for name in size.names]
        for name in dict.fromkeys(named):
            if (found := END.fullmatch(name)) is None:
                continue
            if layers := self._of_layers(found["letter"], variants):
                yield name, layers[sorted(layers)[int(found["end"])]]

    def _of_layers(self, letter: str, variants: Mapping[str, str]) -> dict[tuple[int, ...], int]:
        """Return the size of an axis that varies in each layer."""
        layers: dict[tuple[int, ...], int] = {}
        for matched in self.coverage.matched:
            if letter in matched.rule.kind.letters_used:
                layers |= sizes_of_layers(matched, self.source, variants.get(matched.rule.choice or ""), letter)
        return layers

    def _confirmed(self, known: list[Statement], chosen: Mapping[str, list[Matched]]) -> frozenset[str]:
        """Return the settings that the tree gives, too."""
        if not self.settings:
            return frozenset()
        shown, _ = bind(
            [constraint for constraint in known if isinstance(constraint, SumConstraint) or not constraint.setting],
            self.coverage.rules.axes,
        )
        names = {name for name in self.settings if name in shown}
        for choice, group in chosen.items():
            others = [variant for variant in group[0].rule.kind.variants if variant != self.settings[choice]]
            if all(self._try(known, group, variant)[1] for variant in others):
                names.add(choice)
        return frozenset(names)

    def _stacked_elsewhere(self, known: list[Statement], variants: Mapping[str, str]) -> Iterator[Finding]:
        """Yield the rules that agree with all others when they stack another axis, and correct `known`."""
        while conflicts := bind(known, self.coverage.rules.axes)[1]:
            blamed = Counter(finding.rule for finding in conflicts)
            suspects = [m for m in self.coverage.matched if blamed[m.rule.at.line_only] and len(m.rule.stacked) == 1]
            suspects.sort(key=lambda matched: -blamed[matched.rule.at.line_only])
            tried = (self._other_axis(known, matched, variants, len(conflicts)) for matched in suspects)
            found = next((outcome for outcome in tried if outcome is not None), None)
            if found is None:
                return
            finding, known[:] = found
            yield finding

    def _other_axis(
        self, known: Sequence[Statement], matched: Matched, variants: Mapping[str, str], before: int
    ) -> tuple[Finding, list[Statement]] | None:
        """Return the finding and the constraints with the first stacked axis that leaves fewer than `before` conflicts."""
        rule, place = matched.rule, matched.rule.at.line_only
        ((index, stated),) = rule.stacked.items()
        others = [constraint for constraint in known if constraint.rule != place]
        leaves = [leaf for of_role in matched.leaves.values() for leaf in of_role.values()]
        for axis in range(max((len(self.source.leaves[leaf].spec.shape) for leaf in leaves), default=0)):
            own: list[Statement] = []
            elsewhere = replace(matched, rule=replace(rule, stacked={index: axis}))
            if axis == stated or self._collect(own, elsewhere, variants.get(rule.choice or "")):
                continue
            rest = bind([*others, *own], self.coverage.rules.axes)[1]
            if len(rest) < before and place not in {finding.rule for finding in rest}:
                wrong = [constraint for constraint in known if constraint.rule == place]
                finding = _wrong_axis(rule, _of_letters(wrong), _of_letters(own), _of_letters(others), axis)
                return finding, [*others, *own]
        return None

    def _from_settings(self) -> list[Constraint]:
        return [
            Constraint(key, value, "", "", "the setting", f"--set {key}={value}")
            for key, value in self.settings.items()
            if key in self.coverage.rules.axes and not self.coverage.rules.axes[key].varies
        ]

    def _from_counts(self) -> list[Constraint]:
        found = []
        for name, count in self.coverage.counts.items():
            rules = (m.rule for m in self.coverage.matched if m.rule.sources and name in m.rule.path.indices)
            place = next((rule.at.line_only for rule in rules), "")
            found.append(Constraint(name, count, place, "", f"the number of {{{name}}} in the tree"))
        return found

    def _collect(self, known: list[Statement], matched: Matched, variant: str | None) -> list[Finding]:
        """Add the constraints of a rule to `known`; return the leaves that contradict the rule on their own."""
        try:
            varying = {letter: axis.of_layers for letter, axis in self.coverage.rules.axes.items() if axis.varies}
            found = list(constraints(matched, self.source, variant, self.every_leaf, varying))
            known.extend([*found, *of_layers_before(found, self.coverage.rules.axes)])
        except MisfitError as misfit:
            return [misfit.finding]
        return []

    def _try(
        self, known: Sequence[Statement], group: Sequence[Matched], variant: str
    ) -> tuple[list[Statement], list[Finding]]:
        """Return the constraints with this variant, and the problems that it adds."""
        axes = self.coverage.rules.axes
        trial = list(known)
        problems: list[Finding] = []
        for matched in group:
            problems += self._collect(trial, matched, variant)
        before = bind(known, axes)[1]
        return trial, problems + [finding for finding in bind(trial, axes)[1] if finding not in before]

    def _several_variants(self, choice: str, group: Sequence[Matched]) -> Finding:
        variants = group[0].rule.kind.variants
        leaf = next(iter(group[0].leaves["weight"].values()), "")
        spec = f" ({self.source.leaves[leaf].spec})" if leaf in self.source.leaves else ""
        return Finding(
            "variant-undecided",
            f"this leaf{spec} fits {' and '.join(variants)}; the sizes do not decide between them",
            rule=group[0].rule.at.line_only,
            path=leaf,
            fix=f"choose with {' or '.join(f'--set {choice}={variant}' for variant in variants)}",
        )


def _of_letters(statements: Sequence[Statement]) -> list[Constraint]:
    """Return the statements about one letter each."""
    return [statement for statement in statements if isinstance(statement, Constraint)]


def _wrong_axis(
    rule: Rule, stated: Sequence[Constraint], fitting: Sequence[Constraint], others: Sequence[Constraint], axis: int
) -> Finding:
    """Report a rule that stacks another axis than the shapes of all other leaves allow."""
    ((index, wrong),) = rule.stacked.items()
    right = {constraint.letter: constraint.size for constraint in fitting}
    differing = [c for c in stated if right.get(c.letter, c.size) != c.size]
    differ = {c.letter: c.size for c in differing}
    places = {c.letter: c.place for c in reversed(others) if right.get(c.letter) == c.size}
    shown = (differing or stated)[0]
    letter = index if index in right else shown.letter  # layers that are counted with others have no letter
    size = right.get(letter, shown.size)
    return Finding(
        "size-conflict",
        f"stacked: {{{index}: {wrong}}} reads {shown.shown}, which makes "
        f"{', '.join(f'{letter} = {size}' for letter, size in differ.items())}; the other rules make "
        f"{', '.join(f'{letter} = {right[letter]} ({places[letter]})' for letter in differ if letter in places)}",
        rule=rule.at.line_only,
        path=shown.leaf,
        fix=f"with `stacked: {{{index}: {axis}}}` the rule agrees with the others",
        data={"letter": letter, "sizes": [differ.get(letter, size), size]},
    )


def _no_variant(choice: str, group: Sequence[Matched], problems: Mapping[str, Finding]) -> Finding:
    shown = "; ".join(f"{variant}: {finding}" for variant, finding in problems.items())
    return Finding(
        "variant-undecided",
        f"no variant of {choice!r} fits the checkpoint: {shown}",
        rule=group[0].rule.at.line_only,
    )
