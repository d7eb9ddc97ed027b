"""A record of a JAX run: every operation, what it is computed from, where it stands, and that it can be run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from convert.core.errors import ConvertError
from convert.numerics.lift_jax import lift
from convert.programs.program import Program, Value
from convert.programs.record_jax import outputs_jax, record_jax

Arrays = Mapping[str, Any]
RNG = np.random.default_rng(0)
W = {"a": RNG.normal(size=(4, 4)), "b": RNG.normal(size=4)}
X = {"x": RNG.normal(size=(3, 4))}


def recorded(function: Callable[[Arrays, Arrays], Arrays], weights: Arrays = W, inputs: Arrays = X) -> Program:
    """Record, and check what holds of every record."""
    program = record_jax(function, weights, inputs)
    expected = lift(function)(dict(weights), dict(inputs))
    for name, value in program.outputs.items():
        np.testing.assert_allclose(value.given, np.asarray(expected[name]), rtol=1e-12, atol=1e-12)
    known = {id(value) for value in (*program.parameters.values(), *program.inputs.values())}
    for operation in program.operations:
        for operand in operation.operands:
            assert id(operand) in known or operand.constant, f"{operation} is given a value that nothing computed"
        known |= {id(value) for value in operation.results}
        for value in (*operation.operands, *operation.results):
            assert value.array.dtype not in (np.float32, np.float16, ml_dtypes.bfloat16)
        repeated = operation.again([operand.array for operand in operation.operands])
        assert len(repeated) == len(operation.results)
        for value, again in zip(operation.results, repeated, strict=True):
            np.testing.assert_array_equal(value.array, again, err_msg=str(operation))
    return program


def names(program: Program) -> list[str]:
    return [operation.name for operation in program.operations]


def product(program: Program) -> Any:
    return next(operation for operation in program.operations if operation.name == "dot_general")


def test_an_operation_has_its_operands_results_line_and_settings() -> None:
    def function(w: Arrays, i: Arrays) -> Arrays:
        return {"y": i["x"] @ w["a"] + w["b"]}

    program = recorded(function)
    at = product(program)
    assert [value.array.shape for value in (*at.operands, *at.results)] == [(3, 4), (4, 4), (3, 4)]
    assert at.operands[1] is program.parameters["a"]
    assert at.operands[0] is program.inputs["x"]
    assert at.where == f"test_record_jax.py:{function.__code__.co_firstlineno + 1}"
    assert at.settings["dimension_numbers"] == (((1,), (0,)), ((), ()))
    assert program.operations[-1].results[0] is program.outputs["y"]
    assert not program.path_taken
    assert not program.opaque


def test_a_value_knows_whether_inputs_and_which_parameters_are_in_it() -> None:
    def function(w: Arrays, i: Arrays) -> Arrays:
        scale = jnp.exp(w["b"])
        mask = jnp.arange(4) < 2
        return {"scale": scale, "mask": mask, "y": jnp.where(mask, i["x"] * scale, 0.0), "x": i["x"]}

    outputs = recorded(function).outputs
    assert list(outputs) == ["scale", "mask", "y", "x"]
    assert (outputs["scale"].of_parameters, outputs["scale"].leaves) == (True, {"b"})
    assert outputs["mask"].constant
    assert (outputs["y"].data, outputs["y"].leaves) == (True, {"b"})
    assert (outputs["x"].data, outputs["x"].leaves) == (True, frozenset())


@pytest.mark.slow
def test_narrow_weights_are_lifted_exactly_and_casts_are_no_operations() -> None:
    weights = {"a": W["a"].astype(ml_dtypes.bfloat16), "b": W["b"].astype(np.float16)}

    def function(w: Arrays, i: Arrays) -> Arrays:
        return {"y": (i["x"].astype(jnp.bfloat16) @ w["a"]).astype(jnp.float32) + w["b"].astype(jnp.float32)}

    program = recorded(function, weights)
    assert "convert_element_type" not in names(program)
    np.testing.assert_array_equal(program.parameters["a"].array, weights["a"].astype(np.float64))
    np.testing.assert_allclose(
        program.outputs["y"].array, X["x"] @ weights["a"].astype(np.float64) + weights["b"].astype(np.float64), 1e-15
    )


def test_weights_in_float64_are_not_copied() -> None:
    assert recorded(lambda w, i: {"y": i["x"] @ w["a"]}).parameters["a"].array is W["a"]


def test_an_operation_runs_again_on_other_operands() -> None:
    at = product(recorded(lambda w, i: {"y": jax.jit(jnp.matmul)(i["x"], w["a"])}))
    np.testing.assert_allclose(at.again([2 * X["x"], W["a"]])[0], 2 * X["x"] @ W["a"], 1e-14)


def test_an_operation_with_a_function_of_its_own_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    """What a scatter does where two rows meet is a jaxpr; for a new one XLA compiles again, and that takes longer than all runs."""
    program = recorded(lambda w, i: {"y": jnp.zeros((2, 4)).at[np.array([0, 1, 1])].add(i["x"] @ w["a"])})
    (scatter,) = (operation for operation in program.operations if operation.name.startswith("scatter"))
    scatter.again([operand.array for operand in scatter.operands])
    with caplog.at_level("WARNING"), jax.log_compiles():
        scatter.again([operand.array for operand in scatter.operands])
    assert not [record for record in caplog.records if "ompil" in record.getMessage()]


def layers(w: Arrays, i: Arrays) -> Arrays:
    def layer(x: Any, kernel: Any) -> Any:
        x = jnp.tanh(x @ kernel)
        return x, x.sum()

    y, sums = lax.scan(layer, i["x"], w["stack"])
    return {"y": y, "sums": sums}


STACK = {"stack": RNG.normal(size=(5, 4, 4))}


def traced_layers(w: Arrays, i: Arrays) -> Arrays:
    return jax.jit(jax.remat(layers))(w, i)


@pytest.mark.parametrize("function", [layers, traced_layers])
def test_a_scan_is_recorded_as_its_iterations(function: Callable[[Arrays, Arrays], Arrays]) -> None:
    program = recorded(function, STACK)
    products = [operation for operation in program.operations if operation.name == "dot_general"]
    for k, operation in enumerate(products):
        np.testing.assert_array_equal(operation.operands[1].array, STACK["stack"][k])
        assert operation.where == f"test_record_jax.py:{layers.__code__.co_firstlineno + 2}"
    assert len(products) == 5
    assert not program.path_taken


@pytest.mark.slow
def test_a_scan_of_no_iterations_and_a_reversed_one() -> None:
    def function(w: Arrays, i: Arrays) -> Arrays:
        def step(carry: Any, row: Any) -> Any:
            return carry + row, carry

        end, rows = lax.scan(step, w["b"], i["x"], reverse=True)
        _, none = lax.scan(step, w["b"], i["x"][:0])
        return {"end": end, "rows": rows, "none": none}

    assert recorded(function).outputs["none"].array.shape == (0, 4)


def loop(w: Arrays, i: Arrays) -> Arrays:
    state = lax.while_loop(lambda x: jnp.abs(x).sum() < 1e3, lambda x: 2 * x + jnp.abs(w["b"]), i["x"])
    return {"y": lax.cond(state.sum() > 0, jnp.sin, jnp.cos, state)}


def batched_loop(w: Arrays, i: Arrays) -> Arrays:
    return jax.vmap(lambda x: loop(w, {"x": x}))(i["x"][:, None])


@pytest.mark.parametrize("function", [loop, jax.jit(loop), jax.checkpoint(loop), batched_loop])
def test_loops_and_branches_that_values_choose_follow_them_and_say_so(function: Any) -> None:
    program = recorded(function)
    assert program.path_taken.startswith("test_record_jax.py:")
    assert "sin" in names(program)


def test_a_loop_that_counts_depends_on_no_value() -> None:
    program = recorded(lambda w, i: {"y": lax.fori_loop(0, 3, lambda _, x: x @ w["a"], i["x"])})
    assert names(program).count("dot_general") == 3
    assert not program.path_taken


@pytest.mark.slow
def test_the_staged_mode_records_too() -> None:
    def function(w: Arrays, i: Arrays) -> Arrays:
        x = i["x"].astype(jnp.float32)
        if x.dtype != jnp.float32:  # the eager mode is refused
            raise TypeError("float32, please")
        return {"y": loop(w, {"x": x})["y"] + layers({"stack": w["a"][None]}, {"x": x})["y"]}

    program = recorded(function)
    assert product(program).where == f"test_record_jax.py:{layers.__code__.co_firstlineno + 2}"
    assert program.path_taken


def test_a_callback_is_one_opaque_operation() -> None:
    def function(w: Arrays, i: Arrays) -> Arrays:
        shape = jax.ShapeDtypeStruct((3, 4), jnp.float32)
        return {"y": jax.pure_callback(lambda x: np.tanh(x).astype(np.float32), shape, i["x"] @ w["a"])}

    program = recorded(function)
    assert program.opaque == ("pure_callback",)
    assert names(program).count("pure_callback") == 1


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, deterministic: bool = True) -> Any:
        x = nn.LayerNorm(name="norm")(x)
        x = nn.gelu(nn.Dense(4, name="up")(x))
        return nn.Dropout(0.5)(x, deterministic=deterministic)


def flat(variables: Any) -> dict[str, Any]:
    return {"/".join(str(k.key) for k in path): np.asarray(x) for path, x in jax.tree.leaves_with_path(variables)}


def nested(w: Arrays) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in w.items():
        *path, last = name.split("/")
        at = out
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return out


@pytest.mark.slow
def test_an_operation_knows_its_module() -> None:
    weights = flat(Block().init(jax.random.key(0), X["x"]))
    program = recorded(
        lambda w, i: {"y": Block().apply(nested(w), i["x"], rngs={"dropout": jax.random.key(0)})}, weights
    )
    assert product(program).module == "up"
    assert {"norm", "up"} <= {operation.module for operation in program.operations}
    assert program.outputs["y"].leaves == set(weights)


class Tied(nn.Module):
    def setup(self) -> None:
        self.embed = nn.Embed(7, 4)

    def __call__(self, tokens: Any) -> Any:
        return self.embed.attend(self.embed(tokens))


def test_a_product_in_another_method_of_a_module_is_of_the_module() -> None:
    weights = {"params/embed/embedding": RNG.normal(size=(7, 4))}
    tokens = {"x": np.array([[1, 2, 6]])}
    program = recorded(lambda w, i: {"y": Tied().apply(nested(w), i["x"])}, weights, tokens)
    assert product(program).module == "embed"


@pytest.mark.slow
def test_random_numbers_with_a_fixed_seed_are_constants() -> None:
    program = recorded(lambda w, i: {"y": i["x"] + jax.random.normal(jax.random.key(3), (4,))})
    assert any(operation.name.startswith("random") for operation in program.operations)
    assert next(o for o in program.operations if o.name == "add" and o.data).operands[1].constant


CALLS = iter(range(100))


def refused(code: str, function: Callable[[Arrays, Arrays], Arrays], inputs: Arrays = X) -> ConvertError:
    with pytest.raises(ConvertError) as raised:
        record_jax(function, W, inputs)
    assert raised.value.code == code
    return raised.value


def test_a_function_that_leaves_jax_is_refused_with_its_line() -> None:
    def branches(w: Arrays, i: Arrays) -> Arrays:
        if i["x"].sum() > 0:
            return {"y": w["a"]}
        return {"y": w["b"]}

    def leaves_jax(w: Arrays, i: Arrays) -> Arrays:
        return {"y": jnp.asarray(np.tanh(np.asarray(i["x"]))) @ w["a"]}

    for function in (branches, leaves_jax):
        error = refused("function-not-traceable", function)
        assert error.findings[0].path == f"test_record_jax.py:{function.__code__.co_firstlineno + 1}"


def test_an_array_that_changes_in_place_is_refused_with_its_line() -> None:
    def function(w: Arrays, i: Arrays) -> Arrays:
        total = jax.new_ref(jnp.zeros((3, 4)))
        total[...] = i["x"] @ w["a"]
        return {"y": total[...]}

    for of_jax in (function, jax.jit(function)):
        error = refused("function-not-traceable", of_jax)
        assert error.findings[0].path == f"test_record_jax.py:{function.__code__.co_firstlineno + 1}"


def test_a_function_that_returns_no_arrays_by_name_is_refused() -> None:
    wrong: tuple[Any, ...] = (lambda w, i: i["x"], lambda w, i: {"y": (i["x"], w["a"])}, lambda w, i: [i["x"]])
    for function, got in zip(wrong, ("an array", "tuple", "list"), strict=True):
        assert refused("reference-values-invalid", function).findings[0].got == got


@pytest.mark.slow
def test_complex_values_are_lifted() -> None:
    def function(w: Arrays, i: Arrays) -> Arrays:
        turned = i["x"] * w["turn"]
        return {"y": turned, "power": (turned * turned.conj()).real}

    program = recorded(function, {"turn": np.exp(1j * np.arange(4)).astype(np.complex64)})
    assert program.parameters["turn"].given.dtype == program.outputs["y"].given.dtype == np.complex128


def test_gradients_within_a_function_are_recorded() -> None:
    def function(w: Arrays, i: Arrays) -> Arrays:
        return {"y": jax.grad(lambda x: jnp.sum(jax.nn.relu(x @ w["a"]) ** 2))(i["x"])}

    assert names(recorded(function)).count("dot_general") == 2


def test_a_function_whose_runs_differ_is_refused() -> None:
    refused("run-not-deterministic", lambda w, i: {"y": i["x"] * next(CALLS)})
    refused("run-not-deterministic", lambda w, i: {"y": i["x"] / (0 if next(CALLS) % 2 else 1)})
    refused("run-not-deterministic", lambda w, i: {"y": i["x"][: 1 + next(CALLS) % 2]})


def test_nan_is_refused_with_the_operation_and_the_weights_that_gave_it() -> None:
    error = refused("output-not-a-number", lambda w, i: {"y": i["x"] * jnp.sqrt(-jnp.abs(w["b"]))})
    assert error.findings[0].data == {"operation": "sqrt", "module": "", "leaves": ["b"], "alone": ["b"]}
    refused("output-not-a-number", lambda w, i: {"y": i["x"]}, {"x": np.array([np.nan])})


def test_the_outputs_alone_are_those_of_the_record() -> None:
    def function(w: Arrays, x: Arrays) -> Arrays:
        return {"y": lax.scan(lambda y, _: (jnp.tanh(y @ w["a"]), None), x["x"], None, length=3)[0], "b": w["b"] * 2}

    whole, alone = record_jax(function, W, X), outputs_jax(function, W, X)
    assert alone.outputs.keys() == whole.outputs.keys() and not alone.operations
    for name, value in whole.outputs.items():
        np.testing.assert_array_equal(alone.outputs[name].array, value.array)
    with pytest.raises(ConvertError, match="the first comes from `log`"):
        outputs_jax(lambda w, x: {"y": jnp.log(w["b"] - 10)}, W, X)


def test_constants_are_values_without_data() -> None:
    table = np.linspace(0, 1, 4)
    at = next(o for o in recorded(lambda w, i: {"y": i["x"] * jnp.asarray(table)}).operations if o.name == "mul")
    assert isinstance(at.operands[1], Value)
    assert at.operands[1].constant


@pytest.mark.slow
def test_a_table_by_indices_of_numpy_is_recorded_again_and_again() -> None:
    """JAX remembers the int32 or int64 that it made of them, without and with float64."""
    places = np.arange(4)[None] - np.arange(4)[:, None] + 3  # of relative positions; int64
    table, x = np.arange(14.0).reshape(7, 2), np.ones((4, 4, 2))
    for _ in range(2):
        program = record_jax(lambda w, given: {"y": given["x"] * w["t"][places]}, {"t": table}, {"x": x})
        np.testing.assert_array_equal(program.outputs["y"].array, table[places])


def test_one_array_of_numpy_as_two_indices_is_recorded() -> None:
    """JAX finds the int32 that it made of it beside an int64 that it makes now."""
    order, x = np.random.default_rng(1).permutation(6), np.ones((3, 6)) * np.arange(6)

    def function(w: Arrays, given: Arrays) -> Arrays:
        return {"y": given["x"][..., jnp.array(order)] @ jnp.eye(6)[order].T @ w["w"]}

    for _ in range(2):
        program = record_jax(function, {"w": np.eye(6)}, {"x": x})
        np.testing.assert_array_equal(program.outputs["y"].array, x[..., order[order]])
