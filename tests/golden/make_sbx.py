"""Writes the golden cases sbx/*: policies of SBX, on a CPU, and loads what they were converted to in stable-baselines3.

    python3.11 -m venv env && env/bin/pip install torch==2.13.0 && env/bin/pip install sbx-rl==0.28.0
    PYTHONPATH=src:tests env/bin/python tests/golden/make_sbx.py

SBX saves a zip with a pickle of its policy. sbx/CASE.msgpack is what the four lines of docs/models/policies.md make of a zip that SBX saved
and loaded again. sbx/CASE.npz has observations, actions and values that SBX computed, in float32 with matmul precision `highest` and in
float64 with casts removed; what stable-baselines3's own policy computed after `load_state_dict(..., strict=True)`, in both, too; and the
digest of the converted tensors with which it did. Every leaf is random.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flax
import gymnasium
import jax
import numpy as np
import sbx
import stable_baselines3
import torch
from gymnasium import spaces
from safetensors.torch import load_file

import convert
from convert.numerics.lift_jax import float64, lift
from convert.numerics.lift_torch import lifted
from support.drawn_cases import drawn
from support.sbx import digest

HERE = Path(__file__).parent / "sbx"
MEASURES = spaces.Box(-2, 2, (5,), np.float32)
ACTIONS = spaces.Box(-1, 1, (3,), np.float32)
CASES: dict[str, Any] = {  # of each: its algorithm, its actions, its hidden layers
    "ppo": ("PPO", ACTIONS, {"pi": [8, 8], "vf": [8, 8]}),
    "ppo-choices": ("PPO", spaces.Discrete(4), {"pi": [8, 7, 6], "vf": [9, 8, 7]}),
    "sac": ("SAC", ACTIONS, {"pi": [8, 8], "qf": [8, 8]}),
}


class Nothing(gymnasium.Env):  # type: ignore[type-arg]
    """An environment in which nothing happens."""

    def __init__(self, action_space: Any) -> None:
        self.observation_space, self.action_space = MEASURES, action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return MEASURES.sample(), {}

    def step(self, action: Any) -> Any:
        return MEASURES.sample(), 0.0, False, False, {}


def randomised(case: str, state: Any, name: str) -> Any:
    def draw(path: Any, leaf: Any) -> Any:
        return drawn(f"{case}/{name}/{jax.tree_util.keystr(path, simple=True, separator='/')}", leaf.shape)

    return jax.tree_util.tree_map_with_path(draw, state)


def recipe(policy: Any) -> dict[str, Any]:
    """Return the trees as docs/models/policies.md has them."""
    if hasattr(policy, "vf_state"):
        return {"actor": policy.actor_state.params, "vf": policy.vf_state.params}
    return {
        "actor": policy.actor_state.params,
        "qf": policy.qf_state.params,
        "qf_target": policy.qf_state.target_params,
    }


def saved_and_loaded(case: str, folder: Path) -> Any:
    """Make SBX's model with random weights, save it, and load it."""
    algorithm, actions, layers = CASES[case]
    model = getattr(sbx, algorithm)("MlpPolicy", Nothing(actions), policy_kwargs={"net_arch": layers})
    policy = model.policy
    policy.actor_state = policy.actor_state.replace(params=randomised(case, policy.actor_state.params, "actor"))
    if algorithm == "PPO":
        policy.vf_state = policy.vf_state.replace(params=randomised(case, policy.vf_state.params, "vf"))
    else:
        new = {name: randomised(case, policy.qf_state.params, name) for name in ("params", "target_params")}
        policy.qf_state = policy.qf_state.replace(**new)
    model.save(folder / "model.zip")
    return getattr(sbx, algorithm).load(folder / "model.zip").policy


def sb3_policy(case: str, out: Path) -> Any:
    """Return stable-baselines3's policy with the converted tensors."""
    algorithm, actions, layers = CASES[case]
    policy = getattr(stable_baselines3, algorithm)("MlpPolicy", Nothing(actions), policy_kwargs={"net_arch": layers}, device="cpu").policy  # fmt: skip
    policy.load_state_dict(load_file(out), strict=True)
    policy.set_training_mode(False)
    return policy


def in_float64(case: str, out: Path, given: Any) -> dict[str, Any]:
    """Return what stable-baselines3's policy computes in float64 with casts removed: the most likely action, and the values."""
    with lifted(), torch.no_grad():
        policy = sb3_policy(case, out).double()
        observed, acted = (torch.from_numpy(given[name]).double() for name in ("observations", "actions"))
        if CASES[case][0] == "PPO":
            return {"mode": policy.get_distribution(observed).mode().numpy(), "value": policy.predict_values(observed)[:, 0].numpy()}  # fmt: skip
        values = torch.stack(policy.critic(observed, acted))
        return {"mode": policy.actor(observed, deterministic=True).numpy(), "value": values.numpy()}


def in_sb3(case: str, out: Path, given: Any) -> dict[str, Any]:
    """Return what stable-baselines3's policy computes from the converted file."""
    algorithm, policy = CASES[case][0], sb3_policy(case, out)
    observed = torch.from_numpy(given["observations"])
    with torch.no_grad():
        acted = policy.predict(given["observations"], deterministic=True)[0]
        if algorithm == "PPO":
            return {"action": acted, "value": policy.predict_values(observed)[:, 0].numpy()}
        values = policy.critic(observed, torch.from_numpy(given["actions"]))
        return {"action": acted, "value": torch.stack(values).numpy()}


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    names = ("sbx-rl", "stable-baselines3", "flax", "jax", "torch", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{n} {version(n)}' for n in names)}")
    HERE.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES:
        rng = np.random.default_rng(97)
        given = {"observations": rng.uniform(-2, 2, (4, 5)).astype(np.float32), "actions": rng.uniform(-1, 1, (4, 3)).astype(np.float32)}  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            policy = saved_and_loaded(case, Path(folder))
            file = HERE / f"{case}.msgpack"
            file.write_bytes(flax.serialization.to_bytes(recipe(policy)))
            convert.convert("sbx", file, Path(folder) / "policy.safetensors", overwrite=True)
            sb3 = in_sb3(case, Path(folder) / "policy.safetensors", given)
            sb3_exact = in_float64(case, Path(folder) / "policy.safetensors", given)
            tensors = digest(Path(folder) / "policy.safetensors")

        def run(trees: Any, given: Any, policy: Any = policy) -> Any:
            if "vf" in trees:
                dist = policy.actor.apply(trees["actor"], given["observations"])
                return {"mode": dist.mode(), "value": policy.vf.apply(trees["vf"], given["observations"])[:, 0]}
            dist = policy.actor.apply(trees["actor"], given["observations"])
            return {"mode": dist.mode(), "value": policy.qf.apply(trees["qf"], given["observations"], given["actions"])}

        trees = recipe(policy)
        with float64():
            exact = {name: np.asarray(x) for name, x in lift(run)(trees, given).items()}
        rounded = {name: np.asarray(x) for name, x in run(trees, given).items()}
        outputs = {"action": np.asarray(policy.predict(given["observations"], deterministic=True)[0]), "value": rounded["value"]}  # fmt: skip
        errors = {name: float(np.abs(sb3[name] - x).max() / np.abs(x).max()) for name, x in outputs.items()}
        drift = {name: float(np.abs(exact[name] - x).max() / np.abs(exact[name]).max()) for name, x in rounded.items()}
        print(case, "stable-baselines3:", errors, "drift:", drift)
        stored = {f"in/{name}": x for name, x in given.items()} | {f"out/{name}": x for name, x in outputs.items()}
        stored |= {f"out64/{name}": x for name, x in exact.items()} | {f"sb3/{name}": x for name, x in sb3.items()}
        stored |= {f"sb364/{name}": x for name, x in sb3_exact.items()}
        np.savez_compressed(HERE / f"{case}.npz", tensors=json.dumps(tensors), **stored)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
