"""The two models that are compared: their runs, and the records of both in the form in which they are searched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.derivation import Tensor
from convert.inference.draws import Draws, whole_rows
from convert.inference.forms.as_data import (
    constants_as_data,
    learned_inputs,
    parameters_as_data,
    tables_as_data,
)
from convert.inference.forms.batches_apart import batches_apart, joined_in_one
from convert.inference.forms.chunks_together import chunks_in_one_way, chunks_together
from convert.inference.forms.experts_apart import experts_apart
from convert.inference.forms.kernels import kernels_opened
from convert.inference.forms.lookups.offsets import field_by_field
from convert.inference.forms.lookups.one_hot import (
    chosen_rows_as_lookups,
    fields_apart,
    one_hot_as_lookups,
    rows_chosen_by_products,
)
from convert.inference.forms.lookups.tables import table_by_table
from convert.inference.forms.lookups.zeroed_rows import rows_zeroed_behind
from convert.inference.forms.networks_apart import networks_apart, stacked_networks
from convert.inference.forms.products.averaged import means_of_products, products_of_means
from convert.inference.forms.products.chosen_matrices import matrix_by_matrix
from convert.inference.forms.products.constant_factors import at_other_operands, factors_behind
from convert.inference.forms.products.contractions import (
    features_times_vectors,
    products_by_element,
    sums_as_products,
    vectors_of_each_feature,
)
from convert.inference.forms.products.distances import distances, distances_as_products
from convert.inference.forms.products.distributed import distributed, products_of_sums
from convert.inference.forms.products.mixed_bases import bases_mixed_first, products_of_mixed_bases
from convert.inference.forms.products.repeated import data_once
from convert.inference.forms.products.row_factors import products_of_scaled_rows, row_factors_behind
from convert.inference.forms.products.rows_of_data import products_of_taken_rows, rows_of_data_behind
from convert.inference.forms.products.taken_rows import rows_taken_behind
from convert.inference.forms.products.taps import convolutions, taps_as_convolutions
from convert.inference.forms.products.used_parts import products_of_joined_rows, used_parts
from convert.inference.forms.products.zeroed import zeroed_as_masked
from convert.inference.forms.sums.biases import biases_together
from convert.inference.forms.sums.constant_parts import columns_apart, parts_apart, products_of_constant_columns
from convert.inference.forms.sums.constants_last import constants_last
from convert.inference.forms.sums.group_factors import group_factors_behind, sums_of_scaled_groups
from convert.inference.forms.sums.increased import by_one_more, increased_values
from convert.inference.forms.sums.masked_softmaxes import scores_masked_first
from convert.inference.forms.sums.masked_sums import chosen_as_products, sums_of_chosen
from convert.inference.forms.sums.means_first import means_first
from convert.inference.forms.sums.stacks import parts_of_stacks, stacks_apart
from convert.inference.grading import proof
from convert.inference.grading.proof import Masks
from convert.inference.isolated.found import Allowance
from convert.inference.recorded import recorded
from convert.inference.records import Records, search_of
from convert.inference.requirements import require_outputs_of_both, require_same_again
from convert.inference.search import Search
from convert.programs.program import REFUSALS, Program
from convert.programs.rerun import can_rerun, fits, rerun
from convert.programs.run_checks import require_finite_products, require_same_outputs
from convert.references.user_reference import require_inputs

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
JaxFunction = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
Run = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
Inputs = Callable[[int], Mapping[str, Array]]
LARGE = 1e8  # an output of this size has no digit in which a number below 1e-2 shows up to a relative error of 1e-10
FALLS = (
    100  # times smaller must outputs be with half the weights: many products with weights follow one another in them
)


@dataclass(frozen=True, eq=False)
class Models:
    """A JAX function and a PyTorch module.

    Attributes:
        runs: of the function.
        module: the module.
        run: (module, inputs) -> its outputs.
        inputs: seed -> inputs.
        masks: inputs -> which rows of the outputs count.
        allowance: of runs, for the search by the outputs alone.
    """

    runs: Runs
    module: torch.nn.Module
    run: Run
    inputs: Inputs
    masks: Masks
    allowance: Allowance = field(default_factory=Allowance)

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

    def record_apart(self, both: Records, seed: int) -> Records | None:
        """Return the records in which several networks that a program runs at once are apart; None if both run as many."""
        source, target = stacked_networks(both.source), stacked_networks(both.target)
        if source == target or any(self.runs.forms.networks):
            return None
        self.runs.forms = replace(self.runs.forms, networks=(source, 0) if source > target else (0, target))
        return self.records_of(both.as_run, seed)

    def further(
        self, both: Records, known: Sequence[Tensor], given: Mapping[int, Mapping[str, Array]]
    ) -> list[Program]:
        """Return the source's runs with other weights and inputs; none where a side runs other operations than in its record.

        Inputs of other shapes are left out.

        Args:
            both: the records.
            known: what is known of the module's weights.
            given: seed -> inputs.
        """
        runs = [self.runs.program(seed, x) for seed, x in given.items() if fits(both.as_run, x)]
        found = [parameters_as_data(run, both.learned) for run in runs]
        if both.as_run.path_taken and not all(
            _has_operations_of(program, both.source) and self._follows(both.as_run, proof.weights(known, run), run)
            for program, run in zip(found, runs, strict=True)
        ):
            return []
        return found

    def _follows(self, as_run: Program, weights: Mapping[str, Array], source: Program) -> bool:
        """Whether a record gives the module's outputs with other weights, and the inputs of a run of the source."""
        state = {
            name: np.where(np.isnan(weights[name]), value.array, weights[name])
            for name, value in as_run.parameters.items()
        }
        try:
            again = rerun(as_run, state, {name: value.array for name, value in source.inputs.items()})
            made = proof.made_by(self.module, self.run, state, source)
            require_same_outputs({name: value.array for name, value in again.outputs.items()}, made)
        except (ConvertError, *REFUSALS):
            return False
        return True

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
        target = _in_one_form(
            recorded(self.module, self.run, given, proof.weights(known, source)), self.runs.forms, keep=False
        )
        return search_of(source, target)


@dataclass(frozen=True)
class Forms:
    """Which forms both programs are given because one of them writes something in another way.

    Attributes:
        apart: products of rows of several values are taken apart.
        features: one feature that is multiplied by a vector is a product.
        variables: a product of one feature is multiplied element by element, as several features with a vector each are.
        spread: products of sums are taken apart.
        columns: products of data that has columns of constants are taken apart.
        stacks: parameters in a stack, each for the same data, are taken apart.
        taps: sums of shifted data times the taps of a kernel are convolutions, too.
        distances: sums of squared differences have a product.
        chosen: products of one-hot rows of data are lookups.
        factors: numbers that stand behind the products that they scale.
        rows: a number for each row of the data stands behind the product with a parameter.
        chunks: operations that are applied to each chunk of a value are applied to the whole.
        groups: a number for each group of what is added up stands behind the sum.
        batches: rows of several values that are joined are taken apart.
        bases: bases of the target that looked-up numbers mix are mixed before the data meets them.
        ends: rows of data are taken behind the product with a parameter.
        masked: values of which a mask keeps some in a sum are products with the mask.
        increased: a value is multiplied by one more than a parameter where a multiple is added to it.
        averaged: a mean stands behind the product with what is the same for all of it.
        networks: so many networks, of the source and of the target, that run at once over stacked parameters are taken apart.
    """

    apart: bool = False
    features: bool = False
    variables: bool = False
    spread: bool = False
    columns: bool = False
    stacks: bool = False
    taps: bool = False
    distances: bool = False
    chosen: bool = False
    factors: frozenset[str] = frozenset()
    rows: bool = False
    chunks: bool = False
    groups: bool = False
    batches: bool = False
    bases: bool = False
    ends: bool = False
    masked: bool = False
    networks: tuple[int, int] = (0, 0)
    averaged: bool = False
    increased: bool = False


def _unequal(count: Callable[[Program], Any]) -> Callable[[Program, Program], bool]:
    """Return whether two programs have not as many of what a function counts."""
    return lambda source, target: bool(count(source) != count(target))


# Form -> whether two programs need it, or where.
WRITTEN_IN_TWO_WAYS: Mapping[str, Callable[[Program, Program], Any]] = {
    "chunks": _unequal(chunks_in_one_way),
    "groups": _unequal(sums_of_scaled_groups),
    "batches": joined_in_one,
    "apart": _unequal(products_of_joined_rows),
    "features": _unequal(features_times_vectors),
    "variables": _unequal(vectors_of_each_feature),
    "spread": _unequal(products_of_sums),
    "columns": _unequal(products_of_constant_columns),
    "stacks": _unequal(parts_of_stacks),
    "taps": _unequal(convolutions),
    "distances": _unequal(distances),
    "chosen": _unequal(rows_chosen_by_products),
    "factors": at_other_operands,
    "rows": _unequal(products_of_scaled_rows),
    "bases": _unequal(products_of_mixed_bases),
    "ends": _unequal(products_of_taken_rows),
    "masked": _unequal(sums_of_chosen),
    "averaged": _unequal(products_of_means),
    "increased": _unequal(increased_values),
}


def _in_one_form(program: Program, forms: Forms, *, keep: bool) -> Program:
    program = chunks_together(program, keep=keep) if forms.chunks else program
    program = group_factors_behind(program, keep=keep) if forms.groups else program
    program = chosen_as_products(program) if forms.masked else program
    program = rows_zeroed_behind(scores_masked_first(program))
    program = program if keep else zeroed_as_masked(program)
    program = products_by_element(data_once(program), features=forms.variables)
    program = fields_apart(one_hot_as_lookups(program))
    program = chosen_rows_as_lookups(program) if forms.chosen else program
    program = parts_apart(field_by_field(table_by_table(program)))
    program = matrix_by_matrix(program) if keep else program
    program = experts_apart(program)
    program = batches_apart(program, keep=keep) if forms.batches else program
    program = networks_apart(program, forms.networks[not keep], keep=keep)
    program = distances_as_products(program, keep=keep) if forms.distances else program
    program = columns_apart(program, keep=keep) if forms.columns else program
    program = stacks_apart(program, keep=keep) if forms.stacks else program
    program = taps_as_convolutions(program) if forms.taps and keep else program
    program = means_of_products(program, keep=keep) if forms.averaged else program
    program = by_one_more(program, keep=keep) if forms.increased else program
    program = constants_as_data(sums_as_products(program, keep=keep, features=forms.features))
    program = sums_as_products(program, keep=keep)  # of what is data now
    program = bases_mixed_first(program) if forms.bases and not keep else program
    program = rows_of_data_behind(program, keep=keep) if forms.ends else program
    program = used_parts(constants_last(means_first(program, keep=keep)), keep=keep, apart=forms.apart)
    program = distributed(program, keep=keep) if forms.spread else program
    program = rows_taken_behind(program, keep=keep)
    program = factors_behind(program, forms.factors, keep=keep) if forms.factors else program
    program = row_factors_behind(program, keep=keep) if forms.rows else program
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
        """Return a run with the weights of a seed, of a size with which the outputs are finite, if there is one; the first is of usual size."""
        alone = not self._records
        first, size = self._run(seed, given), self._draws.size
        found = first
        while not (self._infinite or _is_finite(found)):
            self._infinite = not self._draws.smaller()
            if self._infinite:  # as masked logits are with any weights
                self._draws.size = size
                return first
            found = self._run(seed, given)
        return self._of_usual_size(found, seed, given) if alone else found

    def _of_usual_size(self, found: Program, seed: int, given: Mapping[str, Array]) -> Program:
        """Return a run whose outputs are not so large that what a bias adds to them is lost, if smaller weights make them much smaller."""
        while (large := _largest(found)) > LARGE:
            size = self._draws.size
            smaller = self._run(seed, given) if self._draws.smaller() else found
            if _largest(smaller) * FALLS > large:  # a number that stands for a mask stays
                self._draws.size = size
                break
            found = smaller
        return found

    def _run(self, seed: int, given: Mapping[str, Array]) -> Program:
        return _in_one_form(kernels_opened(self.as_run(seed, given)), self.forms, keep=True)

    def as_run(self, seed: int, given: Mapping[str, Array]) -> Program:
        """Return a run with the weights of a seed, as it ran."""
        from convert.programs.record_jax import record_jax

        known = next((record for record in self._records if can_rerun(record, given)), None)
        if known is not None:
            made: Program = self._draws.run(seed, lambda weights: rerun(known, weights, given))
        else:
            twice = not self._records
            made = self._draws.run(seed, lambda weights: record_jax(self._function, weights, given, twice=twice))
            self._records.append(made)
        return made


def _has_operations_of(program: Program, like: Program) -> bool:
    """Whether a run has the operations of another, with results of the same shapes: other tokens may choose an expert."""

    def shapes(of: Program) -> list[tuple[str, list[tuple[int, ...]]]]:
        return [(x.name, [result.array.shape for result in x.results]) for x in of.operations]

    return shapes(program) == shapes(like)


def _largest(program: Program) -> float:
    """Return the largest finite magnitude in the outputs."""
    outputs = [np.abs(value.array) for value in program.outputs.values() if value.array.dtype.kind == "f"]
    return max((float(x.max(initial=0.0, where=np.isfinite(x))) for x in outputs), default=0.0)


def _is_finite(program: Program) -> bool:
    """Whether the outputs are finite."""
    return all(np.isfinite(value.array).all() for value in program.outputs.values() if value.array.dtype.kind == "f")
