"""How faults are planted: in a rule file, in the written tensors, in the target's PyTorch code, or in the JAX side."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from convert.references.flax_transformers import transformers_module
from convert.references.gemma import text as gemma
from convert.references.recurrentgemma import recurrentgemma
from convert.references.timesfm import timesfm_1, timesfm_2p5
from convert.rules.library import shipped_rules_dir
from faults import flax_cases
from faults.own_models import OWN

Tensors = dict[str, np.ndarray]
RULES = {
    "timesfm-1.0": "timesfm-1",
    "timesfm-2.0": "timesfm-1",
    "timesfm-2.5": "timesfm-2.5",
    "recurrentgemma": "recurrentgemma",
    "gemma1-mha": "gemma",
    "gemma2-2b": "gemma",
    "gemma3": "gemma",
    "bert": "bert",
    "gpt2": "gpt2",
    "t5": "t5",
    "t5-v1.1": "t5",
    "whisper": "whisper",
    "llama": "llama",
    "mistral": "llama",
    "gemma-flax": "llama",
    "dinov2": "dinov2",
}
ADAPTERS: dict[str, Any] = {
    "timesfm-1": timesfm_1,
    "timesfm-2.5": timesfm_2p5,
    "recurrentgemma": recurrentgemma,
    "gemma": gemma,
    "bert": transformers_module,
    "gpt2": transformers_module,
    "t5": transformers_module,
    "whisper": transformers_module,
    "llama": transformers_module,
    "dinov2": transformers_module,
}


def rules_of(case: str) -> str:
    """The name of the shipped rules of a case."""
    return flax_cases.rules(case) if case in flax_cases.CASES else RULES[case]


def rules_text(case: str) -> tuple[str, str]:
    """The rules that a case is converted with, shipped or its own: name of the file, and contents."""
    if case in OWN:
        return f"{case}.yaml", OWN[case].rules()
    path = shipped_rules_dir() / f"{rules_of(case)}.yaml"
    return path.name, path.read_text()


def adapter_of(case: str) -> Any:
    """The module whose `load` builds the PyTorch side."""
    return OWN[case].adapter() if case in OWN else ADAPTERS[RULES[case]]


@dataclass(frozen=True)
class Plant:
    """A fault's edit. The base class edits nothing.

    Attributes:
        where: what is edited, for the table.
        jax: whether the JAX side computes something else, so that it must be run again.
        directory: whether a directory is written, and not a file.
        options: that the check is called with.
    """

    where: ClassVar[str] = "nothing"
    jax: ClassVar[bool] = False
    directory: ClassVar[bool] = False
    options: ClassVar[dict[str, Any]] = {}

    def rules(self, case: str, folder: Path) -> str:
        """The rules to convert and check with: the shipped file, or one written into `folder`."""
        if case not in OWN:
            return str(shipped_rules_dir() / f"{rules_of(case)}.yaml")
        name, text = rules_text(case)
        (folder / name).write_text(text)
        return str(folder / name)

    def checkpoint(self, path: Path, folder: Path) -> Path:
        """The checkpoint to convert, or a copy of it in `folder`."""
        return path

    def file(self, out: Path) -> None:
        """Edits what was written."""

    def code(self, case: str) -> AbstractContextManager[Any]:
        """Within this context, code of one of the models is another."""
        return nullcontext()


@dataclass(frozen=True)
class InRule(Plant):
    """Text edits of a copy of the rules; each `old` must be there. `count` edits the first so many only."""

    edits: tuple[tuple[str, str], ...]
    count: int = -1
    where: ClassVar[str] = "rule"

    def rules(self, case: str, folder: Path) -> str:
        name, text = rules_text(case)
        for old, new in self.edits:
            assert old in text, old
            text = text.replace(old, new, self.count)
        (folder / name).write_text(text)
        return str(folder / name)


ALONE: dict[str, Any] = {"reference": "faults.outputs_alone:reference"}  # of the models, with their outputs alone


@dataclass(frozen=True)
class InRuleAlone(InRule):
    """The same, where the reference returns the outputs alone."""

    where: ClassVar[str] = "rule, outputs alone"
    options: ClassVar[dict[str, Any]] = ALONE


@dataclass(frozen=True)
class InSidecar(Plant):
    """The config.json of a checkpoint states something else."""

    config: Mapping[str, Any]
    where: ClassVar[str] = "sidecar"

    def checkpoint(self, path: Path, folder: Path) -> Path:
        copy = folder / "checkpoint"
        shutil.copytree(path, copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **self.config}))
        return copy


@dataclass(frozen=True)
class InFacts(InRule):
    """A fact of the rules has another value. The JAX side may be built from it, so it is run again.

    `unstated` is left out of the config.json of the checkpoint, so that the value of the rules counts.
    """

    unstated: tuple[str, ...] = ()
    jax: ClassVar[bool] = True

    def checkpoint(self, path: Path, folder: Path) -> Path:
        if not self.unstated:
            return path
        copy = folder / "checkpoint"
        shutil.copytree(path, copy)
        config = json.loads((copy / "config.json").read_text())
        kept = {key: value for key, value in config.items() if key not in self.unstated}
        (copy / "config.json").write_text(json.dumps(kept))
        return copy


@dataclass(frozen=True)
class InSettings(Plant):
    """``--set`` gives a fact another value, at the conversion and so at the check."""

    settings: Mapping[str, Any]
    trust: tuple[str, ...] = ()  # the other facts that nothing confirms
    where: ClassVar[str] = "setting"

    @property
    def options(self) -> dict[str, Any]:  # type: ignore[override]
        return {"require": ("model",), "trust": self.trust}


@dataclass(frozen=True)
class InHeader(InSettings):
    """The header of the written file states another setting, and the fact that follows from it."""

    where: ClassVar[str] = "header"

    def file(self, out: Path) -> None:
        with safe_open(out, "np") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        changed = {
            k: json.dumps({**json.loads(metadata[k]), **self.settings}, sort_keys=k == "settings")
            for k in ("settings", "facts")
        }
        save_file({name: np.array(x, order="C") for name, x in tensors.items()}, out, {**metadata, **changed})


@dataclass(frozen=True)
class InFile(Plant):
    """An edit of the written tensors; the header stays."""

    edit: Callable[[Tensors], None]
    where: ClassVar[str] = "file"

    def file(self, out: Path) -> None:
        file = out / "model.safetensors" if out.is_dir() else out
        with safe_open(file, "np") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        self.edit(tensors)
        save_file({name: np.array(x, order="C") for name, x in tensors.items()}, file, metadata)


@dataclass(frozen=True)
class InDirectory(Plant):
    """A JSON file of the written directory states something else; a key with None is removed."""

    name: str
    stated: Mapping[str, Any]
    where: ClassVar[str] = "file"
    directory: ClassVar[bool] = True

    def file(self, out: Path) -> None:
        given = json.loads((out / self.name).read_text()) if (out / self.name).exists() else {}
        kept = {key: value for key, value in {**given, **self.stated}.items() if value is not None}
        (out / self.name).write_text(json.dumps(kept))


@dataclass(frozen=True)
class InTarget(Plant):
    """An edit of the target's module behind loading, or of a module of Python that it calls."""

    edit: Callable[[Any], None] | None = None
    patch: Callable[[], AbstractContextManager[Any]] | None = None
    where: ClassVar[str] = "target"

    @contextmanager
    def code(self, case: str) -> Iterator[None]:
        adapter = adapter_of(case)
        load = adapter.load

        def edited(*args: Any) -> torch.nn.Module:
            module: torch.nn.Module = load(*args)
            if self.edit is not None:
                self.edit(module)
            return module

        with mock.patch.object(adapter, "load", edited), self.patch() if self.patch else nullcontext():
            yield


@dataclass(frozen=True)
class InTraining(InTarget):
    """An edit of the target's module that only training sees, and a check that counts it."""

    options: ClassVar[dict[str, Any]] = {"training": True}


@dataclass(frozen=True)
class InReference(Plant):
    """The JAX side computes something else."""

    patch: Callable[[], AbstractContextManager[Any]]
    where: ClassVar[str] = "reference"
    jax: ClassVar[bool] = True

    def code(self, case: str) -> AbstractContextManager[Any]:
        return self.patch()


@dataclass(frozen=True)
class InBackend(Plant):
    """A further backend of a model of its own computes something else; the models themselves are right."""

    backend: Callable[..., Any]
    where: ClassVar[str] = "backend"
    options: ClassVar[dict[str, Any]] = {"backends": True}

    @contextmanager
    def code(self, case: str) -> Iterator[None]:
        from convert.verify.model import backend_runs, backends

        module, _, factory = OWN[case].reference.partition(":")
        owner = importlib.import_module(module)
        made, every = getattr(owner, factory), backends.torch_runs
        known = {self.backend.__name__: self.backend}
        # torch.compile takes longer than everything else; tests/models/verify/test_backends.py has it.
        quick = lambda *args: (run for run in every(*args) if run.name != backend_runs.COMPILED)  # noqa: E731
        with (
            mock.patch.object(owner, factory, lambda plan: replace(made(plan), backends=known)),
            mock.patch.object(backends, "torch_runs", quick),
        ):
            yield


class Shim:
    """A module of Python with some of its functions replaced."""

    def __init__(self, module: Any, **changed: Any) -> None:
        self._module = module
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def each(kind: str, change: Callable[[Any], None]) -> Callable[[Any], None]:
    """An edit of every submodule whose class has this name."""

    def edit(module: Any) -> None:
        found = [m for m in module.modules() if type(m).__name__ == kind]
        assert found, kind
        for submodule in found:
            change(submodule)

    return edit


def forward(function: Callable[..., Any]) -> Callable[[Any], None]:
    """An edit of a submodule: `function` takes the submodule and what its `forward` takes."""

    def change(module: Any) -> None:
        module.forward = lambda *args, **kwargs: function(module, *args, **kwargs)

    return change


def attribute(name: str, value: Any) -> Callable[[Any], None]:
    """An edit of a submodule."""

    def change(module: Any) -> None:
        assert hasattr(module, name), name
        setattr(module, name, value)

    return change


def tensor(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Tensors], None]:
    """An edit of a written tensor: `change` returns another one, or edits the copy that it is given."""

    def edit(tensors: Tensors) -> None:
        copy = tensors[name].copy()
        changed = change(copy)
        tensors[name] = copy if changed is None else changed

    return edit


def exchange(one: str, two: str) -> Callable[[Tensors], None]:
    """An edit of the written tensors: everything under prefix `one` is under `two`, and the other way round."""

    def edit(tensors: Tensors) -> None:
        names = [name for name in tensors if name.startswith(one)]
        assert names, one
        for name in names:
            other = two + name.removeprefix(one)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return edit
