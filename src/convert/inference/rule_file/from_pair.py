"""From a pair of programs to the rules of a file: derive them, print them, and compare their plan with the derivation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
from convert.inference.rule_file.proof import compare_rules, is_open
from convert.inference.rule_file.write import WrittenRules, write_rules

Array = np.ndarray[Any, np.dtype[Any]]


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
    written = write_rules(found, target, name, root, numbers=tuple(numbers), outside=outside, leaf_names=leaf_names)
    if not found.differences:
        if not all(is_open(tensor.name, written.open) for tensor in found.tensors):  # there is a plan to compare
            _require_same(name, written, found, root)
    elif wrong := _wrong(written, found, root):
        found = replace(found, tensors=tuple(_unclaimed(tensor, wrong) for tensor in found.tensors))
        written = write_rules(found, target, name, root, numbers=tuple(numbers), outside=outside, leaf_names=leaf_names)
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


def _require_same(name: str, written: WrittenRules, derivation: Derivation, root: str) -> None:
    """Refuse rules whose plan is not the derivation.

    Raises:
        ConvertError: it is another one.
    """
    try:
        wrong = [
            f"{found.tensor}: {found.problem}"
            for found in compare_rules(written.decided, derivation, written.open, root)
        ]
    except ConvertError as error:
        wrong = [str(error)]
    if wrong:
        problem = f"the rules that were written make other tensors than were derived: {wrong[0]}"
        raise ConvertError(Finding("internal", problem, path=name, fix="please report it, with both programs"))
