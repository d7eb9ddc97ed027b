"""The two models that are compared: their runs, and the records of both in the form in which they are searched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.inference.candidates.source import Source
from convert.inference.derivation import Tensor
from convert.inference.draws import Draws, whole_rows
from convert.inference.forms.as_data import (
    constants_as_data,
    learned_inputs,
    outputs_as_data,
    parameters_as_data,
    tables_as_data,
)
from convert.inference.forms.experts_apart import experts_apart
from convert.inference.forms.hidden.shown import hidden_elements, shown_alone
from convert.inference.forms.kernels import kernels_opened
from convert.inference.forms.lookups.offsets import field_by_field
from convert.inference.forms.lookups.one_hot import chosen_rows_as_lookups, one_hot_as_lookups, rows_chosen_by_products
from convert.inference.forms.lookups.tables import table_by_table
from convert.inference.forms.products.constant_factors import at_other_operands, factors_behind
from convert.inference.forms.products.contractions import features_times_vectors, products_by_element, sums_as_products
from convert.inference.forms.products.distances import distances, distances_as_products
from convert.inference.forms.products.distributed import distributed, products_of_sums
from convert.inference.forms.products.taken_rows import rows_taken_behind
from convert.inference.forms.products.taps import convolutions, taps_as_convolutions
from convert.inference.forms.products.used_parts import products_of_joined_rows, used_parts
from convert.inference.forms.sums.biases import biases_together
from convert.inference.forms.sums.constant_parts import columns_apart, parts_apart, products_of_constant_columns
from convert.inference.forms.sums.constants_last import constants_last
from convert.inference.forms.sums.masks import visible_sums_first
from convert.inference.forms.sums.stacks import parts_of_stacks, stacks_apart
from convert.inference.grading import proof
from convert.inference.grading.proof import Masks
from convert.inference.recorded import recorded
from convert.inference.requirements import require_outputs_of_both, require_same_again
from convert.inference.search import Search
from convert.programs.program import Program
from convert.programs.rerun import can_rerun, rerun
from convert.programs.run_checks import require_finite_products
from convert.references.user_reference import require_inputs

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
JaxFunction = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
Run = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
Inputs = Callable[[int], Mapping[str, Array]]


@dataclass(frozen=True, eq=False)
class Records:
    """The records of one run of both models.

    Attributes:
        source: the JAX function's.
        target: the module's, in the source's form.
        as_run: the module's, as it ran.
        learned: leaves of the source that layers are applied to before an input takes part; they are data in both.
        learned_of_target: the parameters of the module that are data.
    """

    source: Program
    target: Program
    as_run: Program
    learned: Sequence[str]
    learned_of_target: Sequence[str]

    def search(self) -> Search:
        """Return the search for the target's parameters."""
        return _search(self.source, self.target, repeated=bool(self.learned))

    def search_what_shows(self, ended: Search) -> Search | None:
        """Return the search in which only those elements of the values count that an output depends on.

        Args:
            ended: the search in which all count; None if each does where it ended.
        """
        hidden = hidden_elements(ended.target)
        begin = ended.segments[-1].solution.end if ended.segments else 0
        if not any(x in hidden for op in ended.target.operations[begin : ended.failure.index + 1] for x in op.operands):
            return None
        source, target = ended.source.program, ended.target
        own = Source(shown_alone(source, hidden_elements(source)), repeated=bool(self.learned))
        return Search(own, shown_alone(target, hidden))


@dataclass(frozen=True, eq=False)
class Models:
    """A JAX function and a PyTorch module.

    Attributes:
        runs: of the function.
        module: the module.
        run: (module, inputs) -> its outputs.
        inputs: seed -> inputs.
        masks: inputs -> which rows of the outputs count.
    """

    runs: Runs
    module: torch.nn.Module
    run: Run
    inputs: Inputs
    masks: Masks

    def all_given(self, seed: int) -> Mapping[str, Array]:
        """Return the inputs of a seed.

        Raises:
            UserCodeError: they are not arrays of numbers by name.
        """
        return require_inputs(self.inputs(seed))

    def record(self, seed: int, known: Mapping[str, Array] | None = None) -> Records:
        """Return the records of the function with the weights of a seed, and of the module with its own.

        Args:
            seed: of weights and inputs.
            known: weights of the module.

        Raises:
            ConvertError: a side does not run, is not deterministic, or gives NaN; or the two have not the same outputs.
        """
        given = whole_rows(self.all_given(seed), self.masks)
        source = self.runs.program(seed, given)
        require_finite_products(source)
        as_run = recorded(self.module, self.run, given, known)
        require_same_again(self.module, self.run, as_run)
        return self._records(source, as_run, seed, given)

    def records_of(self, as_run: Program, seed: int) -> Records:
        """Return the records of the function with the weights of a seed, and of a run of the module that has its inputs.

        Raises:
            ConvertError: the two have not the same outputs.
        """
        given = whole_rows(self.all_given(seed), self.masks)
        return self._records(self.runs.program(seed, given), as_run, seed, given)

    def _records(self, source: Program, as_run: Program, seed: int, given: Mapping[str, Array]) -> Records:
        target = _in_one_form(as_run, self.runs.forms, keep=False)
        for form, differs in WRITTEN_IN_TWO_WAYS.items():
            if not getattr(self.runs.forms, form) and (needed := differs(source, target)):
                self.runs.forms = replace(self.runs.forms, **{form: needed})
                source, target = self.runs.program(seed, given), _in_one_form(as_run, self.runs.forms, keep=False)
        target = tables_as_data(source, target)
        require_outputs_of_both(source, target)
        learned, of_target = learned_inputs(source, target)
        source, target = parameters_as_data(source, learned), parameters_as_data(target, of_target)
        return Records(source, target, as_run, learned, of_target)

    def search_again(self, seed: int, known: Sequence[Tensor]) -> Search:
        """Return a search with the weights and inputs of another seed, along the path that the module takes with what is known."""
        given = self.all_given(seed)
        source = self.runs.program(seed, given)
        state = {name: x for name, x in proof.weights(known, source).items() if not np.isnan(x).any()}
        target = _in_one_form(recorded(self.module, self.run, given, state), self.runs.forms, keep=False)
        return _search(source, target)


def _search(source: Program, target: Program, *, repeated: bool = False) -> Search:
    return Search(Source(outputs_as_data(source), repeated=repeated), visible_sums_first(outputs_as_data(target)))


@dataclass(frozen=True)
class Forms:
    """Which forms both programs are given because one of them writes something in another way.

    Attributes:
        apart: products of rows of several values are taken apart.
        features: one feature that is multiplied by a vector is a product.
        spread: products of sums are taken apart.
        columns: products of data that has columns of constants are taken apart.
        stacks: parameters in a stack, each for the same data, are taken apart.
        taps: sums of shifted data times the taps of a kernel are convolutions, too.
        distances: sums of squared differences have a product.
        chosen: products of one-hot rows in the target are lookups.
        factors: numbers that stand behind the products that they scale.
    """

    apart: bool = False
    features: bool = False
    spread: bool = False
    columns: bool = False
    stacks: bool = False
    taps: bool = False
    distances: bool = False
    chosen: bool = False
    factors: frozenset[str] = frozenset()


def _unequal(count: Callable[[Program], Any]) -> Callable[[Program, Program], bool]:
    """Return whether two programs have not as many of what a function counts."""
    return lambda source, target: bool(count(source) != count(target))


# Form -> whether two programs need it, or where.
WRITTEN_IN_TWO_WAYS: Mapping[str, Callable[[Program, Program], Any]] = {
    "apart": _unequal(products_of_joined_rows),
    "features": _unequal(features_times_vectors),
    "spread": _unequal(products_of_sums),
    "columns": _unequal(products_of_constant_columns),
    "stacks": _unequal(parts_of_stacks),
    "taps": _unequal(convolutions),
    "distances": _unequal(distances),
    "chosen": _unequal(rows_chosen_by_products),
    "factors": at_other_operands,
}


def _in_one_form(program: Program, forms: Forms, *, keep: bool) -> Program:
    program = parts_apart(field_by_field(table_by_table(one_hot_as_lookups(products_by_element(program)))))
    program = chosen_rows_as_lookups(program) if forms.chosen and not keep else program
    program = experts_apart(program)
    program = distances_as_products(program, keep=keep) if forms.distances else program
    program = columns_apart(program, keep=keep) if forms.columns else program
    program = stacks_apart(program, keep=keep) if forms.stacks else program
    program = taps_as_convolutions(program) if forms.taps and keep else program
    program = constants_as_data(sums_as_products(program, keep=keep, features=forms.features))
    program = sums_as_products(program, keep=keep)  # of what is data now
    program = used_parts(constants_last(program), keep=keep, apart=forms.apart)
    program = distributed(program, keep=keep) if forms.spread else program
    program = rows_taken_behind(program, keep=keep)
    program = factors_behind(program, forms.factors, keep=keep) if forms.factors else program
    return biases_together(program) if keep else program


class Runs:
    """Runs of the source. It is recorded once for each shape of its inputs; further weights and inputs take the same operations.

    Attributes:
        forms: what both programs are given.
    """

    def __init__(self, function: JaxFunction, draws: Draws) -> None:
        self._function, self._draws = function, draws
        self._records: list[Program] = []
        self._infinite = False
        self.forms = Forms()

    def program(self, seed: int, given: Mapping[str, Array]) -> Program:
        """Return a run with the weights of a seed, of a size with which the outputs are finite, if there is one."""
        first, size = self._run(seed, given), self._draws.size
        found = first
        while not (self._infinite or _is_finite(found)):
            self._infinite = not self._draws.smaller()
            if self._infinite:  # as masked logits are with any weights
                self._draws.size = size
                return first
            found = self._run(seed, given)
        return found

    def _run(self, seed: int, given: Mapping[str, Array]) -> Program:
        from convert.programs.record_jax import record_jax

        known = next((record for record in self._records if can_rerun(record, given)), None)
        if known is not None:
            made: Program = self._draws.run(seed, lambda weights: rerun(known, weights, given))
        else:
            twice = not self._records
            made = self._draws.run(seed, lambda weights: record_jax(self._function, weights, given, twice=twice))
            self._records.append(made)
        return _in_one_form(kernels_opened(made), self.forms, keep=True)


def _is_finite(program: Program) -> bool:
    """Whether the outputs are finite."""
    return all(np.isfinite(value.array).all() for value in program.outputs.values() if value.array.dtype.kind == "f")
