"""Policies of reinforcement learning: brax and SBX."""

from __future__ import annotations

from convert.references.published.entry import Published

_AT = "brax 0.14.2 brax/training"
_BRAX = Published({"epsilon": 1e-6, "min_std": 0.001}, f"flax.linen.LayerNorm; {_AT}/distribution.py")
_PPO = (
    _BRAX,
    Published({"activation": "swish"}, f"{_AT}/agents/ppo/networks.py, make_ppo_networks", binding=False),
)
_SAC = (
    _BRAX,
    Published({"activation": "relu"}, f"{_AT}/agents/sac/networks.py, make_sac_networks", binding=False),
)

MODELS: dict[str, tuple[Published, ...]] = {
    **dict.fromkeys(("brax-ppo", "brax-ppo-asymmetric"), _PPO),
    "brax-sac": _SAC,
    **dict.fromkeys((f"sbx-{algorithm}-{layers}" for algorithm in ("ppo", "sac") for layers in (1, 2, 3)), ()),
}  # fmt: skip
