"""Writes the golden cases brax/*: networks of brax's PPO and SAC with the statistics of their observations, on a CPU.

    python3.11 -m venv env && env/bin/pip install brax==0.14.2
    PYTHONPATH=src:tests env/bin/python tests/golden/make_brax.py

brax/CASE/ckpt is what brax's own `checkpoint.save` writes, with Orbax, and the configuration beside the arrays. brax/CASE/io.npz has
observations and what brax's networks computed, in float32 with matmul precision `highest`, and in float64 with casts removed.
The actions are those of brax's policy, deterministic, from the checkpoint that it loads again: `load_policy` itself cannot read the
configuration where `mean_kernel_init_fn` is left out. Every leaf is random.
"""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from brax.io import model as brax_model
from brax.training.acme import running_statistics
from brax.training.agents.ppo import checkpoint as ppo_checkpoint
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.sac import checkpoint as sac_checkpoint
from brax.training.agents.sac import networks as sac_networks
from flax import linen

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import drawn

HERE = Path(__file__).parent / "brax"
ACTIONS = 3
PPO = functools.partial(ppo_networks.make_ppo_networks, policy_hidden_layer_sizes=(8, 8), value_hidden_layer_sizes=(8, 8, 6))  # fmt: skip
CASES: dict[str, Any] = {  # of each: the size of its observations, its networks, whether they normalise
    "ppo": (5, PPO, True),
    "ppo-plain": ({"state": (5,)}, functools.partial(PPO, activation=linen.elu), False),
    "ppo-asymmetric": (
        {"state": (5,), "privileged_state": (11,)},
        functools.partial(PPO, value_obs_key="privileged_state"),
        True,
    ),
    "sac": (
        6,
        functools.partial(sac_networks.make_sac_networks, hidden_layer_sizes=(8, 8, 8), policy_network_layer_norm=True),
        True,
    ),
}


def random_tree(case: str, tree: Any) -> Any:
    """Draw every leaf, the deviations positive."""

    def draw(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if np.issubdtype(leaf.dtype, np.integer):
            return np.asarray(4711, leaf.dtype)
        noise = drawn(f"{case}/{name}", leaf.shape)
        return np.asarray(0.5 + np.abs(noise) if "std" in name or "variance" in name else noise, np.float32)

    return jax.tree_util.tree_map_with_path(draw, tree)


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    names = ("brax", "flax", "jax", "orbax-checkpoint", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{n} {version(n)}' for n in names)}")
    for case, (size, factory, normalized) in CASES.items():
        checkpoint: Any = sac_checkpoint if case == "sac" else ppo_checkpoint
        config = checkpoint.network_config(size, ACTIONS, normalized, factory)
        normalize = running_statistics.normalize if normalized else lambda x, _: x
        networks = factory(size, ACTIONS, preprocess_observations_fn=normalize)
        sizes = size if isinstance(size, dict) else (size,)
        empty = jax.tree.map(np.zeros, sizes, is_leaf=lambda x: isinstance(x, tuple))
        parts = (networks.policy_network, *(() if case == "sac" else (networks.value_network,)))
        tree = (running_statistics.init_state(empty), *(part.init(jax.random.key(0)) for part in parts))
        params = random_tree(case, jax.tree.map(np.asarray, tree))
        rng = np.random.default_rng(83)
        observed = jax.tree.map(lambda x, rng=rng: 2 * rng.standard_normal((4, *x.shape)).astype(np.float32), empty)

        def run(params: Any, observed: Any, parts: Any = parts) -> Any:
            return [part.apply(params[0], own, observed) for part, own in zip(parts, params[1:], strict=True)]

        with float64():
            exact = [np.asarray(x) for x in lift(run)(params, observed)]
        rounded = [np.asarray(x) for x in jax.jit(run)(params, observed)]
        folder = HERE / case
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint.save((folder / "ckpt").absolute(), 1000, params, config)
        for file in folder.rglob("commit_success.txt"):  # Orbax names the directory on this machine
            file.write_text("Checkpoint commit was successful.")
        again = checkpoint.load(folder.absolute() / "ckpt" / f"{1000:012}")
        assert all(map(np.array_equal, jax.tree.leaves(tuple(again)), jax.tree.leaves(params)))
        infer = sac_networks.make_inference_fn if case == "sac" else ppo_networks.make_inference_fn
        acted = infer(networks)(again, deterministic=True)(observed, jax.random.key(0))
        with tempfile.NamedTemporaryFile() as file:  # the older way: a pickle of the same tuple
            brax_model.save_params(file.name, params)
            assert jax.tree.structure(brax_model.load_params(file.name)) == jax.tree.structure(params)
        outputs = dict(zip(("policy", "value"), rounded, strict=False)) | {"action": np.asarray(acted[0])}
        given = {
            f"in/{name}": x for name, x in (observed if isinstance(observed, dict) else {"state": observed}).items()
        }
        wanted = {f"out/{name}": x for name, x in outputs.items()}
        in_float64 = {f"out64/{name}": x for name, x in zip(("policy", "value"), exact, strict=False)}
        np.savez_compressed(folder / "io.npz", **given, **wanted, **in_float64)  # type: ignore[arg-type]
        drift = [np.abs(x - y).max() / np.abs(x).max() for x, y in zip(exact, rounded, strict=True)]
        print(f"{case}: {len(jax.tree.leaves(params))} leaves, drift {drift}")


if __name__ == "__main__":
    main()
