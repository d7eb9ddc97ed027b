"""The two models that are compared: their runs, and the records of both in the form in which they are searched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.derivation import Tensor
from convert.inference.draws import Draws, whole_rows
from convert.inference.forms.as_data import learned_inputs, parameters_as_data, tables_as_data
from convert.inference.forms.joined_rows import joins_rows
from convert.inference.forms.kernels import kernels_opened
from convert.inference.forms.networks_apart import stacked_networks
from convert.inference.forms.own_numbers import own_numbers
from convert.inference.forms.rows_early import rows_early, takes_rows_late
from convert.inference.forms.sums.numbers_early import added_later
from convert.inference.forms.weight_norms import (
    WeightNorm,
    normalises_parameters,
    norms_of,
    weight_norms,
    with_lengths,
)
from convert.inference.grading import proof
from convert.inference.grading.proof import Masks
from convert.inference.isolated.found import Allowance
from convert.inference.one_form import WRITTEN_IN_TWO_WAYS, Forms, in_one_form, with_needed
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
        as_run = self._recorded(source, given, known)
        require_same_again(self.module, self.run, as_run)
        return self._records(source, as_run, seed, given)

    def record_without_weight_norms(self, both: Records, search: Search, seed: int, *, alone: bool) -> Records | None:
        """Return the records in which the weight norm of the place where a search ended gives its direction; unless `alone`, so do those of the same kind.

        None where it has none, or they have been such.
        """
        at = search.target.operations[min(search.failure.index, len(search.target.operations) - 1)]
        more = self.runs.plain | norms_of(at, both.as_run, alone=alone)
        if more == self.runs.plain:
            return None
        self.runs.plain = more
        return self.record(seed)

    def _recorded(
        self, source: Program, given: Mapping[str, Array], known: Mapping[str, Array] | None = None
    ) -> Program:
        """Return the record of the module; where the source normalises no weight, its weight norms give the direction."""
        as_run = recorded(self.module, self.run, given, known)
        norms = weight_norms(as_run)
        if norms and not self.runs.plain and not normalises_parameters(source):
            self.runs.plain = frozenset(norms)
        own = with_lengths(as_run, self.runs.plain)
        return recorded(self.module, self.run, given, {**(known or {}), **own}) if own else as_run

    def record_apart(self, both: Records, seed: int) -> Records | None:
        """Return the records in which several networks that a program runs at once are apart; None if both run as many."""
        source, target = stacked_networks(both.source), stacked_networks(both.target)
        if source == target or any(self.runs.forms.networks):
            return None
        self.runs.forms = replace(self.runs.forms, networks=(source, 0) if source > target else (0, target))
        return self.records_of(both.as_run, seed)

    def record_rows_early(self, both: Records, seed: int) -> Records | None:
        """Return the records in which rows are taken in front of what acts on each; None where both programs do so, or were given that form."""
        needed = takes_rows_late(both.source) or takes_rows_late(both.target)
        return self._in_form("early", both, seed) if needed else None

    def record_joined_apart(self, both: Records, seed: int) -> Records | None:
        """Return the records in which all rows that are joined are apart; None where neither joins any, or both were given that form."""
        needed = joins_rows(both.source) or joins_rows(both.target)
        return self._in_form("parts", both, seed) if needed else None

    def record_numbers_early(self, both: Records, seed: int) -> Records | None:
        """Return the records in which biases have the numbers that are added to parts of what layers give; None where neither adds any, or they have had them."""
        needed = added_later(both.source) or added_later(both.target)
        return self._in_form("numbers", both, seed) if needed else None

    def record_own_numbers(self, both: Records, seed: int) -> Records | None:
        """Return the records in which numbers that the module has itself are constants; None where it has none, or they have been such."""
        return self._in_form("own", both, seed) if own_numbers(both.target) else None

    def _in_form(self, name: str, both: Records, seed: int) -> Records | None:
        """Return the records in one more form; None where both programs were given it."""
        if getattr(self.runs.forms, name):
            return None
        more: dict[str, Any] = {name: True}
        self.runs.forms = replace(self.runs.forms, **more)
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
        target = in_one_form(as_run, self.runs.forms, keep=False)
        for form in WRITTEN_IN_TWO_WAYS:
            forms = with_needed(self.runs.forms, form, source, target)
            if forms != self.runs.forms:
                self.runs.forms = forms
                source, target = self.runs.program(seed, given), in_one_form(as_run, forms, keep=False)
        target = tables_as_data(source, target)
        target = rows_early(target, keep=False) if self.runs.forms.early else target
        require_outputs_of_both(source, target)
        learned, of_target = learned_inputs(source, target)
        source, target = parameters_as_data(source, learned), parameters_as_data(target, of_target)
        return Records(source, target, as_run, learned, of_target)

    def search_again(self, seed: int, known: Sequence[Tensor]) -> Search:
        """Return a search with the weights and inputs of another seed, along the path that the module takes with what is known."""
        given = self.all_given(seed)
        source = self.runs.program(seed, given)
        target = in_one_form(self._recorded(source, given, proof.weights(known, source)), self.runs.forms, keep=False)
        return search_of(source, target)


class Runs:
    """Runs of the source. It is recorded once for each shape of its inputs; further weights and inputs take the same operations.

    Attributes:
        forms: what both programs are given.
        plain: the module's weight norms that give their direction, as the source has none there, or has others.
    """

    def __init__(self, function: JaxFunction, draws: Draws) -> None:
        self._function, self._draws = function, draws
        self._records: list[Program] = []
        self._infinite = False
        self.forms = Forms()
        self.plain = frozenset[WeightNorm]()

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
        return in_one_form(kernels_opened(self.as_run(seed, given)), self.forms, keep=True)

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
