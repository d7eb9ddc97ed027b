"""A PyTorch model as names, shapes and types of modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from convert.layers import KINDS

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TargetModule:
    """A module of the target that has tensors of its own.

    Attributes:
        name: in the state_dict.
        kind_name: the kind of rule that makes it; empty if its type is not known.
        tensors: name in the module -> shape, buffers included.
        facts: what it is configured to compute, by the keys of rules: ``epsilon``, ``padding``, ``strides``, ...
        stored_in_out: whether its weight is (in, out), as that of transformers' Conv1D is.
    """

    name: str
    kind_name: str
    tensors: Mapping[str, Shape]
    facts: Mapping[str, Any] = field(default_factory=dict)
    stored_in_out: bool = False


@dataclass(frozen=True)
class TargetModel:
    """The target of a draft.

    Attributes:
        loads: its class, for people.
        modules: in the order of their definition.
        tied: tensor that is stored with the model -> other names of the same tensor, and the kind of each.
        shared: module or tensor -> its other names in the state_dict, where the model does not tie them itself after loading.
    """

    loads: str
    modules: tuple[TargetModule, ...]
    tied: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Shape]:
        """All tensors by their names in the state_dict."""
        return {join(m.name, tensor): shape for m in self.modules for tensor, shape in m.tensors.items()}


def join(module: str, tensor: str) -> str:
    return ".".join(filter(None, (module, tensor)))


def model_of_tensors(tensors: Mapping[str, Shape], loads: str) -> TargetModel:
    """Return a model of which only names and shapes are known."""
    modules: dict[str, dict[str, Shape]] = {}
    for name, shape in tensors.items():
        module, _, tensor = name.rpartition(".")
        modules.setdefault(module, {})[tensor] = shape
    return TargetModel(loads, tuple(TargetModule(name, "", own) for name, own in modules.items()))


@dataclass(frozen=True)
class Place:
    """Where a layer may go: a module, or a tensor that belongs to no module of a known type.

    Attributes:
        name: of the module or the tensor.
        module: the module.
        tensors: role in a rule -> shape; the role of a tensor alone is empty.
        names: role -> name in the module, where it is another one.
    """

    name: str
    module: TargetModule
    tensors: Mapping[str, Shape]
    names: Mapping[str, str]

    @property
    def makes(self) -> set[str]:
        """Names of the tensors in the state_dict."""
        return {join(self.name, self.names.get(role, role)) for role in self.tensors}


WEIGHTS = ("weight", "scale", "gamma", "g", "kernel", "w", "embedding")
BIASES = ("bias", "beta", "b", "offset", "shift")
_PATTERN = re.compile(r"[{}*\\,]")  # characters that mean something else in a rule; such modules stay open
COUNTERS = ("num_batches_tracked",)


def places(model: TargetModel) -> Iterator[Place]:
    """Yield the places of all tensors: each module, and each tensor of a module whose type is not known."""
    for module in model.modules:
        if _PATTERN.search(module.name):
            continue
        own = {
            name: shape for name, shape in module.tensors.items() if name not in COUNTERS and not _PATTERN.search(name)
        }
        if module.kind_name not in ("", "parameter") or _plain(own):
            names = {"weight": _first(own, WEIGHTS), "bias": _first(own, BIASES)}
            roles = {name: role for role, name in names.items() if name is not None}
            yield Place(
                module.name,
                module,
                {roles.get(name, name): shape for name, shape in own.items()},
                {role: name for role, name in names.items() if name is not None and name != role},
            )
        if module.kind_name in ("", "parameter"):
            for name, shape in own.items():
                yield Place(join(module.name, name), module, {"": shape}, {})


def _first(own: Mapping[str, Shape], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in own), None)


def _plain(own: Mapping[str, Shape]) -> bool:
    """Whether the tensors could be those of a layer of this package."""
    return any(name in WEIGHTS for name in own) or any(name.startswith("weight_") for name in own) or "in_proj_weight" in own  # fmt: skip


def fits_kind(place: Place, kind_name: str) -> bool:
    """Whether a rule of this kind can make what lies there."""
    if "" in place.tensors:
        return kind_name == "parameter"
    if kind_name == "parameter":
        return False
    return place.module.kind_name in ("", kind_name) and kind_name in (*KINDS, "attention")
