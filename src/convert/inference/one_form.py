"""The form in which two programs are searched: what one of them writes in another way, both are given in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from convert.inference.forms.as_data import (
    constants_as_data,
)
from convert.inference.forms.batches_apart import batches_apart, joined_in_one
from convert.inference.forms.chunks_together import chunks_in_one_way, chunks_together
from convert.inference.forms.conditions import constant_conditions
from convert.inference.forms.experts_apart import experts_apart
from convert.inference.forms.joined_parts import parts_of_joined
from convert.inference.forms.joined_rows import joined_rows_apart
from convert.inference.forms.learned_rows import learned_rows_apart, learned_rows_together, scaled_with_learned
from convert.inference.forms.lookups.offsets import field_by_field
from convert.inference.forms.lookups.one_hot import (
    chosen_rows_as_lookups,
    fields_apart,
    one_hot_as_lookups,
    rows_chosen_by_products,
)
from convert.inference.forms.lookups.tables import table_by_table
from convert.inference.forms.lookups.zeroed_rows import rows_zeroed_behind
from convert.inference.forms.networks_apart import networks_apart
from convert.inference.forms.own_numbers import own_numbers_as_constants
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
from convert.inference.forms.products.zeroed import zeroed_as_masked, zeroed_in_both
from convert.inference.forms.rows_early import rows_early
from convert.inference.forms.sums.biased_tables import biased_tables, biases_in_tables
from convert.inference.forms.sums.biases import biases_together
from convert.inference.forms.sums.constant_parts import columns_apart, parts_apart, products_of_constant_columns
from convert.inference.forms.sums.constants_last import constants_last
from convert.inference.forms.sums.group_factors import group_factors_behind, sums_of_scaled_groups
from convert.inference.forms.sums.increased import by_one_more, increased_values
from convert.inference.forms.sums.masked_softmaxes import scores_masked_first
from convert.inference.forms.sums.masked_sums import chosen_as_products, sums_of_chosen
from convert.inference.forms.sums.means_first import means_first
from convert.inference.forms.sums.numbers_early import added_later, numbers_early
from convert.inference.forms.sums.stacks import parts_of_stacks, stacks_apart
from convert.inference.forms.weight_norms import without_weight_norms
from convert.programs.program import Program


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
        learned: learned rows that are scaled with what they are joined to are taken apart.
        zeroed: weights of the source of which code sets elements to zero are multiplied by a mask, as those of the target are.
        bases: bases of the target that looked-up numbers mix are mixed before the data meets them.
        ends: rows of data are taken behind the product with a parameter.
        early: rows are taken in front of what acts on each row.
        parts: all rows that are joined are taken apart, learned ones, too.
        masked: values of which a mask keeps some in a sum are products with the mask.
        increased: a value is multiplied by one more than a parameter where a multiple is added to it.
        biased: a bias that the source adds to the rows of a table is added to the table.
        numbers: a number is added to the bias of a layer where a program adds it to a part of what the layer gives.
        averaged: a mean stands behind the product with what is the same for all of it.
        own: numbers that the module has itself, such as tables that it saves, are constants.
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
    learned: bool = False
    zeroed: bool = False
    bases: bool = False
    ends: bool = False
    early: bool = False
    parts: bool = False
    masked: bool = False
    networks: tuple[int, int] = (0, 0)
    averaged: bool = False
    increased: bool = False
    biased: bool = False
    numbers: bool = False
    own: bool = False


def _unequal(count: Callable[[Program], Any]) -> Callable[[Program, Program], bool]:
    """Return whether two programs have not as many of what a function counts."""
    return lambda source, target: bool(count(source) != count(target))


# Form -> whether two programs need it, or where.
WRITTEN_IN_TWO_WAYS: Mapping[str, Callable[[Program, Program], Any]] = {
    "chunks": _unequal(chunks_in_one_way),
    "groups": _unequal(sums_of_scaled_groups),
    "batches": joined_in_one,
    "learned": _unequal(scaled_with_learned),
    "zeroed": zeroed_in_both,
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
    "biased": _unequal(biased_tables),
}


def with_needed(forms: Forms, name: str, source: Program, target: Program) -> Forms:
    """Return the forms with one more, if two programs write what it is about in two ways."""
    needed = WRITTEN_IN_TWO_WAYS[name](source, target) if not getattr(forms, name) else None
    return replace(forms, **{name: needed}) if needed else forms


def rows_apart(program: Program, forms: Forms, *, keep: bool) -> Program:
    """Return a program with those joined rows apart that the forms name; `keep` as in `in_one_form`."""
    if forms.parts:
        return joined_rows_apart(program, keep=keep)
    return batches_apart(program, keep=keep) if forms.batches else program


def rows_in_form(program: Program, forms: Forms) -> Program:
    """Return the target with rows early and joined rows apart, if the forms name it: otherwise values of more rows are none of the source's."""
    program = rows_early(program, keep=False) if forms.early else program
    return rows_apart(program, forms, keep=False)


def in_one_form(program: Program, forms: Forms, *, keep: bool) -> Program:
    """Return a program in the form in which the two are searched.

    Args:
        keep: whether the values that it had in its own form stay, as those of the source, where any of them may be the target's.
    """
    program = own_numbers_as_constants(program) if forms.own and not keep else program
    program = program if keep else parts_of_joined(constant_conditions(without_weight_norms(program)))
    program = rows_early(program, keep=keep) if forms.early else program
    program = chunks_together(program, keep=keep) if forms.chunks else program
    program = group_factors_behind(program, keep=keep) if forms.groups else program
    program = chosen_as_products(program) if forms.masked else program
    program = rows_zeroed_behind(scores_masked_first(program))
    program = zeroed_as_masked(program) if forms.zeroed or not keep else program
    program = products_by_element(data_once(program), features=forms.variables)
    program = fields_apart(one_hot_as_lookups(program))
    program = chosen_rows_as_lookups(program) if forms.chosen else program
    program = parts_apart(field_by_field(table_by_table(program)))
    program = biases_in_tables(program) if forms.biased and keep else program
    program = matrix_by_matrix(program) if keep else program
    program = experts_apart(program)
    program = rows_apart(learned_rows_together(program), forms, keep=keep)
    program = learned_rows_apart(program) if forms.learned else program
    program = networks_apart(program, forms.networks[not keep], keep=keep)
    program = distances_as_products(program, keep=keep) if forms.distances else program
    program = columns_apart(program, keep=keep) if forms.columns else program
    program = stacks_apart(program, keep=keep) if forms.stacks else program
    program = taps_as_convolutions(program) if forms.taps and keep else program
    program = means_of_products(program, keep=keep) if forms.averaged else program
    program = by_one_more(program, keep=keep) if forms.increased else program
    program = constants_as_data(sums_as_products(program, keep=keep, features=forms.features))
    program = sums_as_products(program, keep=keep)  # of what is data now
    program = rows_early(program, keep=keep) if forms.early else program
    program = bases_mixed_first(program) if forms.bases and not keep else program
    program = rows_of_data_behind(program, keep=keep) if forms.ends else program
    program = used_parts(constants_last(means_first(program, keep=keep)), keep=keep, apart=forms.apart)
    program = distributed(program, keep=keep) if forms.spread else program
    program = rows_taken_behind(program, keep=keep)
    program = factors_behind(program, forms.factors, keep=keep) if forms.factors else program
    program = row_factors_behind(program, keep=keep) if forms.rows else program
    if keep:
        return biases_together(program, added_later(program) if forms.numbers else {})
    return numbers_early(program) if forms.numbers else program
