"""Pairs of small models for the tests of `infer`: plain functions of JAX, and modules whose names say nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from convert.inference.derivation import Arithmetic, Derivation, Grade, Tensor
from convert.inference.infer import infer
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module

WIDTH = 16
HEADS = 4
UNPROVEN = {Grade.IN_FRONT, Grade.BEHIND, Grade.OPEN}  # grades where the programs differ


def floats(*shape: int) -> Callable[[int], dict[str, Any]]:
    """Inputs: random numbers."""
    return lambda seed: {"x": np.random.default_rng(seed).normal(size=shape)}


def tokens(count: int, *shape: int) -> Callable[[int], dict[str, Any]]:
    """Inputs: random numbers of tokens."""
    return lambda seed: {"x": np.random.default_rng(seed).integers(0, count, shape)}


def derive(
    function: Callable[[Mapping[str, Any], Any], Any],
    module: torch.nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    inputs: Callable[[int], dict[str, Any]] | None = None,
) -> Derivation:
    """Derive a module from a function of (leaves, x); both give one array."""
    return _derive(function, module, shapes, inputs or floats(3, 7, WIDTH), lambda module, x: module(x))


def derive_logits(
    function: Callable[[Mapping[str, Any], Any], Any],
    module: torch.nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    inputs: Callable[[int], dict[str, Any]],
) -> Derivation:
    """Derive a language model of transformers from a function of (leaves, tokens) that gives the logits."""
    return _derive(function, module, shapes, inputs, lambda module, x: module(input_ids=x, use_cache=False).logits)


def _derive(
    function: Callable[[Mapping[str, Any], Any], Any],
    module: torch.nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    inputs: Callable[[int], dict[str, Any]],
    run: Callable[[Any, Any], Any],
) -> Derivation:
    return infer(
        lambda leaves, given: {"y": function(leaves, given["x"])},
        module.eval(),
        lambda module, given: {"y": run(module, given["x"])},
        inputs,
        shapes,
    )


def linen(model: Any, x: Any) -> tuple[Callable[[Mapping[str, Any], Any], Any], dict[str, tuple[int, ...]]]:
    """A linen model as a function of (leaves by name, x), and the shapes of its leaves."""
    import jax

    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.asarray(x))
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = ["/".join(str(key.key) for key in path) for path, _ in paths]

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        return model.apply(jax.tree_util.tree_unflatten(structure, [leaves[name] for name in names]), x)

    return function, {name: leaf.shape for name, (_, leaf) in zip(names, paths, strict=True)}


def rules(found: Derivation, module: torch.nn.Module) -> list[str]:
    """The rules that are written, without their remarks; their plan is the derivation, and nothing is open."""
    written = write_rules(found, model_of_module(module, "Model"))
    assert found.complete, (found.differences, found.proof)
    assert written.open == {}
    assert compare_rules(written.text, found) == []
    return [re.sub(r" +#.*", "", rule).strip() for rule in written.text.split("\nrules:\n")[1].split("\n\n")]


def sources(found: Derivation | Tensor) -> Any:
    """The leaf of each tensor; several as a tuple; a constant as its number, a computed part as its leaves."""
    if isinstance(found, Derivation):
        return {tensor.name: sources(tensor) for tensor in found.tensors}
    named = []
    for part in found.parts:
        if part.arithmetic is Arithmetic.CONSTANT:
            named.append(part.factor)
        else:
            named.append(part.leaves if part.arithmetic is Arithmetic.COMPUTED else part.leaf)
    return named[0] if len(named) == 1 else tuple(named)


def grades(found: Derivation) -> set[Grade]:
    """The grades of all tensors."""
    return {tensor.grade for tensor in found.tensors}


def layer_norm(x: Any, scale: Any, bias: Any = None, epsilon: float = 1e-6) -> Any:
    """LayerNorm as JAX code has it."""
    x = x - x.mean(-1, keepdims=True)
    y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale
    return y if bias is None else y + bias


def rms_norm(x: Any, scale: Any, epsilon: float = 1e-6) -> Any:
    """RMSNorm as JAX code has it."""
    return x * (1 / jnp.sqrt((x * x).mean(-1, keepdims=True) + epsilon)) * scale
