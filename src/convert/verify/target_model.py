"""Read the target of ``rules new --like``: a module that the user's code makes, a safetensors file, or a directory of transformers.

Not in `convert.drafting`, which may import neither `references` nor `writing`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.user_code import find_factory, signature_error, user_code_errors
from convert.drafting.like.target import TargetModel, TargetModule, join, model_of_tensors
from convert.references.module_facts import facts
from convert.writing.file_layout import INDICES, SINGLE_FILES
from convert.writing.written import open_written

if TYPE_CHECKING:
    import torch

OPTION = "--like "
CONFIG = "config.json"
WEIGHTS = (*INDICES, *SINGLE_FILES)


def read_target(target: str) -> TargetModel:
    """Read names, shapes and types of modules. No weight is read, and a module takes no memory where its code allows it.

    Args:
        target: ``module:function``, or a path.

    Raises:
        ConvertError: there is no such code, file or directory, or it cannot be read.
    """
    path = Path(target)
    if not path.exists() and ":" in target:
        return _of_factory(target)
    if path.is_dir() and (path / CONFIG).is_file():
        return _of_directory(path)
    written = open_written(path)
    return model_of_tensors({name: spec.shape for name, spec in written.specs.items()}, f"the names of {path.name}")


def _of_factory(target: str) -> TargetModel:
    make = find_factory(target, OPTION)
    if (error := signature_error(make)) is not None:
        fix = "name a function that makes the whole module, such as `def make(): return Model(...)`"
        raise ConvertError(
            Finding(
                "user-code-not-found",
                path=OPTION + target,
                expected="a factory without arguments",
                got=str(error),
                fix=fix,
            )
        )
    torch = _torch()
    with user_code_errors(target, OPTION):
        module = _on_meta(make)
    if not isinstance(module, torch.nn.Module):
        raise ConvertError(
            Finding(
                "user-code-not-found", path=OPTION + target, expected="a torch.nn.Module", got=type(module).__name__
            )
        )
    return model_of_module(module, f"{type(module).__module__}.{type(module).__qualname__}")


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        problem = "the types of modules are read with torch, and torch is not installed"
        fix = "install torch, or give a .safetensors file of the target"
        raise ConvertError(Finding("package-missing", problem, path=OPTION.strip(), fix=fix)) from None
    return torch


def _on_meta(make: Any) -> Any:
    """Call a function so that its tensors take no memory; code that needs values runs again, on the CPU."""
    import torch

    try:
        with torch.device("meta"):
            return make()
    except Exception:  # noqa: BLE001 - code that computes with its weights, or that reads a file
        return make()


def _of_directory(path: Path) -> TargetModel:
    """Read a directory of transformers: the class that config.json names, and the weights' names where they are there."""
    written = open_written(path) if any((path / name).is_file() for name in WEIGHTS) else None
    try:
        import transformers
    except ImportError:
        if written is not None:
            return model_of_tensors(
                {name: spec.shape for name, spec in written.specs.items()}, f"the names of {path.name}"
            )
        problem = "the directory has no weights, and its class is made with transformers, which is not installed"
        raise ConvertError(
            Finding("package-missing", problem, path=f"{OPTION}{path}", fix="install transformers")
        ) from None
    _torch()
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        named = (getattr(config, "architectures", None) or [None])[0]
        cls = getattr(transformers, str(named), None) if named else None
        module = _on_meta(lambda: cls(config) if cls is not None else transformers.AutoModel.from_config(config))  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - transformers rejects a configuration with any exception
        text = " ".join(str(error).split())[:300]
        problem = f"transformers does not make a model from {CONFIG}: {type(error).__name__}: {text}"
        raise ConvertError(Finding("converted-not-found", problem, path=f"{OPTION}{path}", fix="name the module that you load with MODULE:FACTORY")) from None  # fmt: skip
    model = model_of_module(module, f"transformers `{type(module).__name__}`")
    others = {name for tied in model.tied.values() for name, _ in tied}
    stored = set(written.specs) if written is not None else set(model.tensors) - others
    modules = tuple(
        TargetModule(m.name, m.kind_name, own, m.facts, m.stored_in_out)
        for m in model.modules
        if (own := {tensor: shape for tensor, shape in m.tensors.items() if join(m.name, tensor) in stored})
    )
    return TargetModel(model.loads, modules)  # transformers stores a tied tensor once, and ties it again


def _require_tensors(state: Mapping[str, Any]) -> None:
    """Raise if an entry of a state_dict is no tensor.

    Raises:
        ConvertError: one is none (``module-not-runnable``), as the packed weights of a quantized layer.
    """
    import torch

    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ConvertError(
                Finding(
                    "module-not-runnable",
                    f"{name!r} of the module's state_dict is no tensor",
                    expected="tensors, which a safetensors file can hold",
                    got=type(value).__name__,
                    fix="give the module before it is quantized, or without extra state",
                )
            )


def model_of_module(module: torch.nn.Module, loads: str) -> TargetModel:
    """Describe a module."""
    names: dict[int, list[tuple[str, str]]] = {}
    found = []
    inside_attention: tuple[str, ...] = ()
    state = module.state_dict(keep_vars=True)  # the parameters themselves: a tied one stands twice
    _require_tensors(state)
    for name, part in module.named_modules():
        if name.startswith(inside_attention) and inside_attention:
            continue
        kind = _kind(part)
        own = {key for key in state if key.rpartition(".")[0] == name}
        if kind == "attention":
            inside_attention = (*inside_attention, f"{name}.")
            own |= {key for key in state if key.startswith(f"{name}.")}
        tensors = {}
        for key in (key for key in state if key in own):
            tensor = key.removeprefix(f"{name}.") if name else key
            tensors[tensor] = tuple(state[key].shape)
            names.setdefault(id(state[key]), []).append((key, kind))
        if tensors:
            in_out = type(part).__name__ == "Conv1D" and hasattr(part, "nf")
            found.append(TargetModule(name, kind, tensors, _facts(part, kind), in_out))
    tied = {first: tuple(others) for (first, _), *others in names.values() if others}
    kept = _without({name for others in tied.values() for name, _ in others}, found)
    return TargetModel(loads, kept, tied, {} if hasattr(module, "tie_weights") else _shared(module))


def _shared(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the modules, and then the tensors, that have several names in the state_dict: the first -> the others."""
    found: dict[str, tuple[str, ...]] = {}
    state = module.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    again: dict[str, str] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        own = first.setdefault(id(part), name)
        inside = any(name.startswith(f"{other}.") for other in again)
        if own != name and not inside and any(key.startswith(f"{name}.") for key in state):
            again[name] = own
    for key, x in state.items():
        if not any(key.startswith(f"{name}.") for name in again) and first.setdefault(id(x), key) != key:
            again[key] = first[id(x)]
    for name, own in again.items():
        found[own] = (*found.get(own, ()), name)
    return found


def _without(tied: set[str], modules: list[TargetModule]) -> tuple[TargetModule, ...]:
    """Leave out the second names of tied tensors: a rule writes them with the first."""
    kept = []
    for m in modules:
        own = {tensor: shape for tensor, shape in m.tensors.items() if join(m.name, tensor) not in tied}
        if own:
            kept.append(TargetModule(m.name, m.kind_name, own, m.facts, m.stored_in_out))
    return tuple(kept)


def _kind(module: torch.nn.Module) -> str:
    """Return the kind of rule that makes a module's tensors; empty if its type does not tell."""
    from torch import nn

    from convert.layers import torch_modules

    known: tuple[tuple[str, tuple[type, ...]], ...] = (
        ("attention", (nn.MultiheadAttention,)),
        ("linear", (nn.Linear,)),
        ("conv_transpose", (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)),
        ("conv", (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
        ("embedding", (nn.Embedding,)),
        ("layer_norm", (nn.LayerNorm,)),
        ("rms_norm", (nn.RMSNorm,)),
        ("group_norm", (nn.GroupNorm,)),
        ("batch_norm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)),
        ("instance_norm", (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)),
        ("gru", (nn.GRU, nn.GRUCell, torch_modules.GRU)),
        ("lstm", (nn.LSTM, nn.LSTMCell)),
        ("rnn", (nn.RNN, nn.RNNCell)),
    )
    for kind, types in known:
        if isinstance(module, types):  # an instance norm with running statistics computes something else
            return "" if kind == "instance_norm" and module.track_running_stats else kind
    name = type(module).__name__
    if name == "Conv1D" and hasattr(module, "nf"):  # transformers': a Linear whose weight is (in, out)
        return "linear"
    return _norm_kind(module) if "norm" in name.lower() else ""


def _norm_kind(module: torch.nn.Module) -> str:
    """Return the kind of a norm of other code, by whether it subtracts the mean; empty if it cannot be run."""
    import torch

    part = _with_values(module)
    weights = [p for p in part.parameters(recurse=False) if p.ndim == 1] if part is not None else []
    if part is None or not weights:
        return ""
    x = torch.linspace(-1, 1, weights[0].numel()).sin()[None] * 2
    try:
        with torch.no_grad():
            one, other = part(x), part(x + 1)
    except Exception:  # noqa: BLE001 - it takes something else
        return ""
    if not isinstance(one, torch.Tensor) or one.shape != x.shape:  # a flow gives the log of a determinant, too
        return ""
    return "layer_norm" if torch.allclose(one, other, atol=1e-3) else "rms_norm"


def _with_values(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return a copy of a small module on the CPU, with ones as parameters."""
    import torch

    if sum(p.numel() for p in module.parameters()) > 1 << 20:
        return None
    try:
        part = copy.deepcopy(module).to_empty(device="cpu").float().eval()
        with torch.no_grad():
            for tensor in (*part.parameters(), *part.buffers()):
                tensor.fill_(1)
    except Exception:  # noqa: BLE001 - code that cannot be copied
        return None
    return part


def _facts(module: torch.nn.Module, kind: str) -> Mapping[str, Any]:
    """Return what a module is configured to compute, by the keys of rules."""
    if kind == "conv":
        return _geometry(module)
    if kind == "rnn":
        return {"activation": module.nonlinearity}
    if kind == "gru":
        return {"reset": getattr(module, "reset", "after")}
    if not kind.endswith("_norm"):
        return {}
    part = _with_values(module)
    groups = {"num_groups": module.num_groups} if kind == "group_norm" else {}
    try:
        values = {**facts(part).get("", {}), **groups} if part is not None else groups
    except Exception:  # noqa: BLE001 - a norm that the probe cannot run
        return groups
    return {key: values[key] for key in ("epsilon", "multiplies_by", "num_groups") if key in values}


def _geometry(module: Any) -> dict[str, Any]:
    """Return padding, strides, dilation and groups of a convolution, as a rule writes them."""
    found: dict[str, Any] = {"feature_group_count": module.groups}
    pads = module.padding
    if module.padding_mode != "zeros":
        return found
    if isinstance(pads, str):
        found["padding"] = pads.upper()
    else:
        found["padding"] = [[n, n] for n in pads] if any(pads) else "VALID"
    for key, value in (("strides", module.stride), ("dilation", module.dilation)):
        if any(n != 1 for n in value):
            found[key] = list(value)
    return found
