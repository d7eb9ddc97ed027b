"""Read hyperparameters from a live PyTorch module: activations, epsilons, factors of norms."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.references.protocol import INPUT, observe

if TYPE_CHECKING:
    import torch

PROBES = 2**13  # numbers on which an activation is measured, at least
SEED = 0
# attribute of a module's `config` -> name of the fact
CONFIGURED: Mapping[str, str] = {
    "context_limit": "context_length",
    "context_length": "context_length",
    "quantiles": "quantiles",
    "decode_index": "decode_index",
    "tolerance": "tolerance",
    "pad_val": "pad_value",
    "use_positional_embedding": "use_positional_embedding",
}


@dataclass(frozen=True)
class Block:
    """An activation between two layers.

    Attributes:
        holder: the submodule that runs; it takes one tensor, as wide as the input of its first Linear.
        before: the layer whose output the activation gets; ``mlp.up[0]`` is the first member of its output.
        behind: the layer that gets the output of the activation.
        times: the layer whose output the activation is multiplied by; empty for none.
    """

    holder: str
    before: str
    behind: str
    times: str = ""


def facts(module: torch.nn.Module, blocks: Iterable[Block] = ()) -> dict[str, Mapping[str, Any]]:
    """Return the facts by submodule: its ``activation``, ``epsilon`` and ``multiplies_by`` of a norm, the base of its RoPE.

    The empty name is the whole module, with the facts of its `config`.

    An activation is often a function in `forward`, not a module, so it is measured: `holder` runs on random numbers, and the
    input of `behind` is compared with each activation of the output of `before`. The fact is the name of the nearest
    activation, or ``unknown`` if none agrees up to rounding. A block that does not run alone has no such fact.
    """
    found: dict[str, dict[str, Any]] = {}
    config = getattr(module, "config", None)
    parts = _parts(config)
    for name, submodule in module.named_modules():
        if values := _norm(submodule) or _convolution(submodule) or _timescales(submodule, parts):
            found[name] = values
    if values := {fact: getattr(config, key) for key, fact in CONFIGURED.items() if hasattr(config, key)}:
        found[""] = values
    measured: dict[Any, str | None] = {}  # equal blocks are measured once
    for block in blocks:
        kind = (
            tuple(name.removeprefix(block.holder) for name in (block.before, block.behind, block.times)),
            _code(module.get_submodule(block.holder)),
        )
        if kind not in measured:
            measured[kind] = activation(module, block)
        if (name := measured[kind]) is not None:
            found.setdefault(_member(block.before)[0], {})["activation"] = name
    return {name: dict(values) for name, values in found.items()}


def _code(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for modules with the same code, attributes and submodules but other weights."""
    attributes: list[Any] = []
    for name, value in sorted(vars(module).items()):
        if name == "_modules" or (isinstance(value, Collection) and not value):
            continue
        if name in ("_parameters", "_buffers"):
            shapes = ((key, None if tensor is None else tuple(tensor.shape)) for key, tensor in value.items())
            attributes.append((name, tuple(shapes)))
        elif isinstance(value, bool | int | float | str | None):
            attributes.append((name, value))
        else:  # a function or config that layers share, or an object of this layer only
            attributes.append((name, id(value)))
    return type(module), tuple(attributes), tuple((name, _code(child)) for name, child in module.named_children())


def _norm(module: torch.nn.Module) -> dict[str, Any]:
    """Return epsilon and factor of a norm; empty for other modules."""
    if "norm" not in type(module).__name__.lower():
        return {}
    for attribute in ("eps", "epsilon", "variance_epsilon"):
        epsilon = _default_epsilon(module) if attribute == "eps" else getattr(module, attribute, None)
        if isinstance(epsilon, float | int):
            return {"epsilon": float(epsilon), "multiplies_by": _factor(module), **_of_channels(module)}
    return {}


def _default_epsilon(module: torch.nn.Module) -> float | None:
    """Return `eps`; ``torch.nn.RMSNorm(eps=None)`` takes that of the dtype it computes in: float32, or float64.

    So torch 2.13 does. Its documentation says the dtype of the input, also for bfloat16.
    """
    import torch

    epsilon: float | None = getattr(module, "eps", None)
    if epsilon is None and isinstance(module, torch.nn.RMSNorm):
        dtype = torch.get_default_dtype() if module.weight is None else module.weight.dtype
        return torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return epsilon


def _of_channels(module: torch.nn.Module) -> dict[str, Any]:
    """Return the momentum of a batch norm or the groups of a group norm."""
    values = {key: getattr(module, key, None) for key in ("momentum", "num_groups")}
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def _convolution(module: torch.nn.Module) -> dict[str, Any]:
    """Return strides, dilation and padding of torch's convolutions and their subclasses."""
    import torch

    if not isinstance(module, torch.nn.modules.conv._ConvNd):
        return {}
    names = {"strides": "stride", "dilation": "dilation", "padding": "padding"}
    if module.transposed:
        names["output_padding"] = "output_padding"
    values = {fact: getattr(module, name, None) for fact, name in names.items()}
    if module.padding_mode != "zeros":
        values["padding"] = "unknown"  # rules have no word for it
    return {fact: list(value) if isinstance(value, tuple) else value for fact, value in values.items()}


def _parts(config: Any) -> dict[type, str]:
    """Return the class of each config within a config -> its key without `_config`: ``text``, ``vision``."""
    keys = [key for key in getattr(config, "__dict__", {}) if key.endswith("_config")]
    within = [(type(getattr(config, key)), key.removesuffix("_config")) for key in keys]
    counts = Counter(of for of, _ in within)
    return {of: part for of, part in within if counts[of] == 1}


def _timescales(module: torch.nn.Module, parts: Mapping[type, str]) -> dict[str, Any]:
    """Return the base of a rotary embedding or the two timescales of a sinusoidal one, if attributes have them.

    Models in one class may have bases of their own: that of a module with the model's `vision_config` is `rope_theta_vision` as well.
    """
    low, high = (getattr(module, f"{word}_timescale", None) for word in ("min", "max"))
    if "rotary" not in type(module).__name__.lower():
        return {} if low is None or high is None else {"min_timescale": low, "max_timescale": high}
    if low is not None and high is not None:
        return {"rope_theta": float(high) / float(low)}
    config = getattr(module, "config", None)
    rope, part = getattr(config, "rope_parameters", None), parts.get(type(config))
    for value in (getattr(module, "rope_theta", None), getattr(module, "base", None), rope):
        theta = value.get("rope_theta") if isinstance(value, Mapping) else value
        if isinstance(theta, int | float):
            return {"rope_theta": theta, **({f"rope_theta_{part}": theta} if part else {})}
    return {}


def _factor(module: torch.nn.Module) -> str:
    """Return ``weight`` or ``1+weight``, measured with a weight of zeros and one of ones; ``unknown`` otherwise.

    The code of a norm may take the channels first, or images alone: other shapes are tried where it does not run.
    """
    import torch

    if isinstance(module, torch.nn.modules.batchnorm._NormBase):  # takes more axes than the probe below has
        return "weight" if module.affine else "none"
    parameters = dict(module.named_parameters(recurse=False))
    name = next((name for name in ("weight", "scale") if name in parameters), None)
    if name is None:
        return "none"
    weight = parameters[name]
    x = torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype, device=weight.device)
    bias = parameters.get("bias")
    zeros = torch.zeros_like(weight)
    gate = inspect.signature(module.forward).parameters.get("gate")
    given = (x,) if gate is None or gate.default is not inspect.Parameter.empty else (x, torch.ones_like(x))

    def run(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        swapped = {name: value} | ({} if bias is None else {"bias": zeros})
        with torch.no_grad():
            out: torch.Tensor = torch.func.functional_call(module, swapped, tuple(y.reshape(shape) for y in given))
        return out

    own = tuple(weight.shape)
    for shape in ((1, *own), *((1, *own, *(1,) * k) for k in (1, 2, 3)), *((*(1,) * k, *own) for k in (2, 3, 4))):
        try:
            at_zero, at_one = run(zeros, shape), run(torch.ones_like(weight), shape)
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
            continue
        if not at_one.any():
            return "unknown"
        if not at_zero.any():
            return "weight"
        return "1+weight" if torch.allclose(at_one, 2 * at_zero) else "unknown"
    return "unknown"


def activation(module: torch.nn.Module, block: Block) -> str | None:
    """Measure the activation between two layers and return its name; None if the block does not run alone.

    The layers of Gemma 4 E2B need the keys of another layer.
    """
    import torch

    holder = module.get_submodule(block.holder)
    (before, first), (behind, _), (times, second) = (
        _member(name.removeprefix(block.holder + ".")) for name in (block.before, block.behind, block.times)
    )
    layer: Any = holder.get_submodule(before)
    weight = next(p for p in layer.parameters() if p.ndim > 1)
    width = getattr(layer, "in_features", weight.shape[-2])
    positions = max(2, PROBES // width)
    x = torch.as_tensor(np.random.default_rng(SEED).normal(0, 3, (1, positions, width)))
    names = [before, behind + INPUT, *([times] if times else [])]
    with torch.no_grad(), observe(holder, names) as seen:
        try:
            _call(holder, x.to(weight.device, weight.dtype))
        except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
            return None
    given, got = seen[before][first].double(), seen[behind + INPUT]
    factor = seen[times][second].double() if times else torch.ones_like(given)
    # The mean: in bfloat16, the rounding of one large value exceeds the difference between two kinds of GeLU.
    errors = {
        name: float(((value * factor).to(got.dtype).double() - got.double()).abs().mean())
        for name, value in _activations(given).items()
    }
    best = min(errors, key=lambda name: errors[name])
    size = float((given * factor).abs().mean())
    return best if errors[best] <= torch.finfo(got.dtype).eps * size else "unknown"


def _member(name: str) -> tuple[str, Any]:
    """Split ``mlp.up[0]`` into the submodule ``mlp.up`` and member 0 of its output; without brackets, the whole output."""
    path, bracket, index = name.partition("[")
    return path, int(index.rstrip("]")) if bracket else ...


def _activations(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute every activation that a rule can name by its formula, without PyTorch's functions, which are under test."""
    import torch

    return {
        "none": x,
        "relu": x.clamp(min=0),
        "silu": x / (1 + torch.exp(-x)),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "gelu_erf": 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        "tanh": torch.tanh(x),
        "sigmoid": 1 / (1 + torch.exp(-x)),
        "softplus": x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())),
        "elu": torch.where(x > 0, x, torch.expm1(x)),
    }


def _call(holder: Any, x: torch.Tensor) -> None:
    """Run a block; some need positions or a mask as well."""
    import torch

    positions = torch.arange(x.shape[1], device=x.device)[None]
    known = {
        "patch_mask": torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device),
        "segment_pos": positions,
        "position_ids": positions,
        "attention_mask": None,
        "use_cache": False,
    }
    parameters = list(inspect.signature(holder.forward).parameters)[1:]
    holder(x, **{name: known[name] for name in parameters if name in known})
