"""From a pair of programs to the rules of a file: derive them, print them, and compare their plan with the derivation."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.core.user_code import user_code_errors
from convert.drafting.like.target import TargetModel, join
from convert.inference.derivation import Arithmetic, Derivation, Grade
from convert.inference.grading.other_ways import in_other_way, numbers_of_ways
from convert.inference.infer import infer
from convert.inference.pair import Arrays, Pair
from convert.inference.requirements import packages_named, require_no_indices
from convert.inference.rule_file.proof import compare_rules, is_open
from convert.inference.rule_file.write import WrittenRules, write_rules
from convert.references.user_reference import require_inputs
from convert.rules.parse import parse_rules

Array = np.ndarray[Any, np.dtype[Any]]
WRONG = "the rule that would be written for it is wrong"
UNREADABLE = "the rule that would be written for it is no rule"
MOST_WAYS = 12  # in which the same outputs are given, and one may have a rule
BY_HAND = "write a rule for it by hand, and report this with both programs"
PLACE = re.compile(r"rules\.yaml:[0-9]+,? ")  # of rules that no file has yet


@dataclass(frozen=True, eq=False)
class InferredRules:
    """The rules of a pair of programs.

    Attributes:
        derivation: what was derived.
        target: the PyTorch model.
        written: the rules, printed.
    """

    derivation: Derivation
    target: TargetModel
    written: WrittenRules

    @property
    def open_target(self) -> TargetModel:
        """The modules and tensors of the PyTorch model that no rule makes, or only a guess."""
        left = set(self.written.left)
        sure = [t.name for t in self.derivation.tensors if left.isdisjoint(part.leaf for part in t.parts)]
        made = {name for name in sure if not is_open(name, self.written.open)}
        modules = (
            replace(
                m, tensors={tensor: shape for tensor, shape in m.tensors.items() if join(m.name, tensor) not in made}
            )
            for m in self.target.modules
        )
        return replace(self.target, modules=tuple(m for m in modules if m.tensors))


@packages_named()
def infer_rules(
    pair: Pair,
    target: TargetModel,
    leaves: Mapping[str, TensorSpec],
    name: str,
    root: str = "",
    *,
    option: str,
    numbers: Mapping[str, Array] | None = None,
    outside: bool = False,
    leaf_names: Sequence[str] = (),
    seed: int = 0,
) -> InferredRules:
    """Derive the rules of a pair, and compare their plan with the derivation, element by element.

    Args:
        pair: the two programs.
        target: the pair's module, described.
        leaves: their shapes and dtypes, by their names below `root`.
        name: of the model in the file.
        root: of the leaves in the checkpoint.
        option: which names the code, for its errors.
        numbers: leaves that are no weights; the function is given these values.
        outside: whether the checkpoint has leaves that are not below the root.
        leaf_names: of a checkpoint without names, in its order.
        seed: of the weights and inputs.

    Raises:
        ConvertError: a program does not run, or the rules are not the derivation: a bug of this package.
        UserCodeError: the code raised an error.
    """
    numbers = numbers or {}
    leaves = {leaf: spec for leaf, spec in leaves.items() if leaf not in numbers}

    def function(weights: Arrays, inputs: Arrays) -> Arrays:
        return pair.function({**weights, **numbers}, inputs)

    with user_code_errors(pair.code, option):
        inputs = require_inputs(pair.inputs(seed))
    with user_code_errors(pair.code, option, leaves, inputs):
        require_no_indices(function, leaves, inputs)
        found = infer(
            function if numbers else pair.function,
            pair.module,
            pair.run,
            pair.inputs,
            {leaf: spec.shape for leaf, spec in leaves.items()},
            masks=pair.masks,
            complex_leaves=[leaf for leaf, spec in leaves.items() if spec.dtype.startswith("complex")],
            seed=seed,
        )
    found = replace(found, leaves={**found.leaves, **dict.fromkeys(numbers, ())})
    write = partial(
        write_rules, target=target, name=name, root=root, numbers=tuple(numbers), outside=outside, leaf_names=leaf_names
    )
    written = write(found)
    if not found.differences:
        written = _without_wrong_rules(written, write, found, root)
        found, written = _in_a_way_with_rules(found, written, write, root)
    else:
        # no proof from end to end shows that the rules are those that were found
        seen: set[str] = set()
        while wrong := _blamed(written, found, (*written.open, *written.guessed), root).keys() - seen:
            seen |= wrong
            found = _unclaimed(found, wrong)
            written = write(found)
        written = _without_unreadable_rules(written, write, found)
    return InferredRules(found, target, written)


def _in_a_way_with_rules(
    derivation: Derivation, written: WrittenRules, write: Callable[..., WrittenRules], root: str
) -> tuple[Derivation, WrittenRules]:
    """Return the derivation in another way that gives the same outputs, with its rules, where one leaves fewer tensors open."""
    tensors = derivation.tensors
    lacking = [tensor for tensor in tensors if tensor.alternatives and is_open(tensor.name, written.open)]
    for way in numbers_of_ways(lacking)[:MOST_WAYS]:
        parts = [part for tensor in tensors for part in tensor.alternatives.get(way, ())]
        if any(part.arithmetic is Arithmetic.COMPUTED for part in parts):
            continue
        other = replace(derivation, tensors=in_other_way(tensors, way))
        rules = _without_wrong_rules(write(other), write, other, root)
        if len(rules.open) < len(written.open):
            return other, rules
    return derivation, written


def _blamed(
    written: WrittenRules, derivation: Derivation, open_tensors: Collection[str], root: str
) -> Mapping[str, str]:
    """Return the modules whose rules make something else than was derived, and tensors that no rule makes, with what is wrong.

    Of rules that are no file, or do not fit the leaves, each is to blame where the error names none.
    """
    try:
        wrong = compare_rules(written.decided, derivation, open_tensors, root)
        return {_maker(one.tensor, written.modules) or one.tensor: one.problem for one in wrong}
    except ConvertError as error:
        at_rule, about_leaf = (
            [one for one in error.findings if one.rule],
            [one for one in error.findings if not one.rule],
        )
        named = _named(at_rule, written) or _named(about_leaf, written)
        problem = "; ".join(one.problem or str(one) for one in error.findings)
        lacking = [tensor.name for tensor in derivation.tensors if not is_open(tensor.name, open_tensors)]
        return named or dict.fromkeys([module for module in written.modules if module] or lacking, problem)


def _named(findings: Sequence[Finding], written: WrittenRules) -> dict[str, str]:
    """Return the modules that findings are about, with what is wrong."""
    return {
        module: f"expected {one.expected}" if one.expected else one.problem
        for one in findings
        for module in _at(one, written)
    }


def _unclaimed(derivation: Derivation, wrong: Collection[str]) -> Derivation:
    """Return a derivation with the tensors that rules do not make, or make otherwise, as open ones."""
    tensors = (
        replace(tensor, grade=Grade.OPEN, guessed=True) if is_open(tensor.name, wrong) else tensor
        for tensor in derivation.tensors
    )
    return replace(derivation, tensors=tuple(tensors))


def _without_wrong_rules(
    written: WrittenRules, write: Callable[..., WrittenRules], derivation: Derivation, root: str
) -> WrittenRules:
    """Return the rules without those that make something else than was derived: their tensors are open, and the others are written.

    The tensors of a wrong rule have rules of parameters first: one layer of a stack may be described as another one is not.

    Raises:
        ConvertError: the others are no rule file, or make something else, too.
    """
    refused: dict[str, str] = {}
    plain: set[str] = set()
    while not all(is_open(tensor.name, written.open) for tensor in derivation.tensors):  # there is a plan to compare
        wrong = _blamed(written, derivation, written.open, root)
        if not wrong:
            break
        more = {
            name: f"{WRONG}: {PLACE.sub('', problem)}; {BY_HAND}"
            for name, problem in wrong.items()
            if name not in refused
        }
        if not more:
            raise _internal(next(iter(wrong.values())))
        tensors = {tensor.name for tensor in derivation.tensors if is_open(tensor.name, more)}
        if tensors <= plain:
            refused |= more
        plain |= tensors
        written = write(derivation, refused=refused, as_parameters=plain)
    write = partial(write, as_parameters=plain)
    return _without_unreadable_rules(written, write, derivation, refused)


def _without_unreadable_rules(
    written: WrittenRules,
    write: Callable[..., WrittenRules],
    derivation: Derivation,
    refused: Mapping[str, str] | None = None,
) -> WrittenRules:
    """Return the rules without those, open ones also, that are no rules of a file: their leaves are questions.

    Raises:
        ConvertError: the others are no rule file, too.
    """
    refused = refused or {}
    while True:
        try:
            parse_rules(written.text)
        except ConvertError as error:
            more = {
                module: f"{UNREADABLE}: {one.problem}; {BY_HAND}"
                for one in error.findings
                for module in _at_line(one, written.text, written.drafted)
                if module not in refused
            }
            if not more:
                raise _internal("; ".join(one.problem or str(one) for one in error.findings)) from error
            refused = {**refused, **more}
            written = write(derivation, refused=refused)
        else:
            return written


def _internal(problem: str) -> ConvertError:
    problem = f"the rules that were written make other tensors than were derived: {problem}"
    return ConvertError(Finding("internal", problem, fix="please report it, with both programs"))


def _names_any(path: str | None, leaves: Collection[str]) -> bool:
    """Whether a path in the tree, below its root or not, is that of a leaf."""
    return any(f"/{path}".endswith(f"/{leaf}") for leaf in leaves)


def _maker(tensor: str, modules: Sequence[str]) -> str:
    """Return the module, one of a pattern, that has a tensor; empty if none has."""
    return next((module for module in modules if module and is_open(tensor, [module])), "")


def _at(finding: Finding, written: WrittenRules) -> list[str]:
    """Return the module of the rule that a finding of `WrittenRules.decided` is about, or those made of the leaf that it is about; else nothing."""
    if _line(finding) is not None:
        return _at_line(finding, written.decided, written.modules)
    makers = zip(written.modules, written.leaves, strict=True)
    return [module for module, leaves in makers if module and _names_any(finding.path, leaves)]


def _line(finding: Finding) -> int | None:
    found = re.search(r":([0-9]+)", finding.rule or "")
    return int(found[1]) if found is not None else None


def _at_line(finding: Finding, text: str, modules: Sequence[str]) -> list[str]:
    """Return the module of the rule of a file that a finding is about; else nothing.

    Args:
        finding: with the line.
        text: of the file.
        modules: of its rules.
    """
    lines = text.splitlines()[: _line(finding) or 0]
    begun = sum(line.startswith("- ") for line in lines[lines.index("rules:") :]) if "rules:" in lines else 0
    return [module for module in modules[begun - 1 : begun] if begun and module]
