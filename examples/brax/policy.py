"""The networks of brax's PPO and SAC in PyTorch: what `convert brax CKPT OUT_DIR` writes, loaded and run.

model = load("OUT_DIR")
action = model.act(observation)          # what brax's policy does with deterministic=True
"""

import json
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

ACTIVATIONS = {  # by brax's names; its gelu is the tanh approximation
    "swish": nn.SiLU(), "silu": nn.SiLU(), "relu": nn.ReLU(), "relu6": nn.ReLU6(), "elu": nn.ELU(), "celu": nn.CELU(), "selu": nn.SELU(),
    "leaky_relu": nn.LeakyReLU(0.01), "gelu": nn.GELU("tanh"), "mish": nn.Mish(), "tanh": nn.Tanh(), "hard_tanh": nn.Hardtanh(),
    "sigmoid": nn.Sigmoid(), "hard_sigmoid": nn.Hardsigmoid(), "log_sigmoid": nn.LogSigmoid(), "hard_swish": nn.Hardswish(),
    "hard_silu": nn.Hardswish(), "softplus": nn.Softplus(), "soft_sign": nn.Softsign(), "linear": nn.Identity(),
}  # fmt: skip


class Normalize(nn.Module):
    """Observations with the mean and the standard deviation that brax has counted; or as they are."""

    def __init__(self, width: int, used: bool) -> None:
        super().__init__()
        self.used = used
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))

    def forward(self, observation: Tensor) -> Tensor:
        return (observation - self.mean) / self.std if self.used else observation


def network(tensors: dict[str, Tensor], activation: nn.Module, normalize: bool) -> nn.Sequential:
    """Make the empty network that has these tensors: an activation, and a norm where there is one, after all layers but the last."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(normalize=Normalize(len(tensors["normalize.mean"]), normalize))
    count = sum(name.startswith("hidden_") and name.endswith(".weight") for name in tensors)
    for i in range(count):
        width, inputs = tensors[f"hidden_{i}.weight"].shape
        layers[f"hidden_{i}"] = nn.Linear(inputs, width)
        if i < count - 1:
            layers[f"activation_{i}"] = activation
            if f"norm_{i}.weight" in tensors:
                layers[f"norm_{i}"] = nn.LayerNorm(width, eps=1e-6)
    return nn.Sequential(layers)


class ActorCritic(nn.Module):
    """The policy, and the value where the checkpoint has one: SAC's has none."""

    def __init__(self, tensors: dict[str, Tensor], config: dict) -> None:
        super().__init__()
        self.min_std = config["min_std"]
        for part in ("policy", "value"):
            own = {name.removeprefix(f"{part}."): x for name, x in tensors.items() if name.startswith(f"{part}.")}
            if own:
                setattr(self, part, network(own, ACTIVATIONS[config["activation"]], config["normalize_observations"]))

    def act(self, observation: Tensor) -> Tensor:
        """Return the action of the largest density."""
        return self.policy(observation).chunk(2, -1)[0].tanh()

    def sample(self, observation: Tensor) -> Tensor:
        """Draw an action."""
        mean, scale = self.policy(observation).chunk(2, -1)
        return torch.normal(mean, nn.functional.softplus(scale) + self.min_std).tanh()


def load(folder: str | Path) -> ActorCritic:
    """Make the networks that the folder holds."""
    tensors = load_file(Path(folder) / "model.safetensors")
    model = ActorCritic(tensors, json.loads((Path(folder) / "config.json").read_text()))
    model.load_state_dict(tensors, strict=True)
    return model.eval()
