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
from convert.inference.derivation import Derivation, Grade, Tensor
from convert.inference.infer import infer
from convert.inference.pair import Arrays, Pair
from convert.inference.requirements import packages_named
from convert.inference.rule_file.proof import Mismatch, compare_rules, is_open
from convert.inference.rule_file.write import WrittenRules, write_rules

Array = np.ndarray[Any, np.dtype[Any]]
WRONG = "its rule would make something else, please report it"


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
    elif wrong := _wrong(written, found, root):
        found = replace(found, tensors=tuple(_unclaimed(tensor, wrong) for tensor in found.tensors))
        written = write(found)
    return InferredRules(found, target, written)


def _wrong(written: WrittenRules, derivation: Derivation, root: str) -> Mapping[str, str] | None:
    """Return the tensors that the rules make otherwise than they were found, with the problem; None: none. ``""`` stands for all.

    Where the programs differ, no proof from end to end shows that the rules are those that were found.
    """
    try:
        left = (*written.open, *written.guessed)
        return {one.tensor: one.problem for one in compare_rules(written.decided, derivation, left, root)} or None
    except ConvertError as error:
        return {"": str(error)}


def _unclaimed(tensor: Tensor, wrong: Collection[str]) -> Tensor:
    """Return a tensor; open, if the rules do not make it."""
    return replace(tensor, grade=Grade.OPEN, guessed=True) if "" in wrong or tensor.name in wrong else tensor


def _without_wrong_rules(
    written: WrittenRules, write: Callable[..., WrittenRules], derivation: Derivation, root: str
) -> WrittenRules:
    """Return the rules without those that make something else than was derived: their tensors are open, and the others are written.

    Raises:
        ConvertError: no rule is to blame, and the plan is not the derivation.
    """
    refused: dict[str, str] = {}
    while not all(is_open(tensor.name, written.open) for tensor in derivation.tensors):  # there is a plan to compare
        try:
            wrong = compare_rules(written.decided, derivation, written.open, root)
            found = {_maker(one.tensor, written.modules): one.problem for one in wrong}
        except ConvertError as error:
            wrong = [Mismatch("", str(error))]
            found = {module: one.expected or one.problem for one in error.findings for module in _at(one, written)}
        more = {module: f"{WRONG}: {problem}" for module, problem in found.items() if module and module not in refused}
        if not wrong:
            break
        if not more:
            problem = f"the rules that were written make other tensors than were derived: {wrong[0].problem}"
            raise ConvertError(
                Finding("internal", problem, path=wrong[0].tensor, fix="please report it, with both programs")
            )
        refused |= more
        written = write(derivation, refused=refused)
    return written


def _maker(tensor: str, modules: Sequence[str]) -> str:
    """Return the module, one of a pattern, that has a tensor; empty if none has."""
    return next((module for module in modules if module and is_open(tensor, [module])), "")


def _at(finding: Finding, written: WrittenRules) -> list[str]:
    """Return the module of the rule that a finding of `WrittenRules.decided` is about; nothing if it is about no rule."""
    line = re.search(r":([0-9]+)", finding.rule or "")
    if line is None:
        return []
    lines = written.decided.splitlines()[: int(line[1])]
    begun = sum(text.startswith("- ") for text in lines[lines.index("rules:") :]) if "rules:" in lines else 0
    return [module for module in written.modules[begun - 1 : begun] if begun and module]
