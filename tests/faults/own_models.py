"""Small models with rules of their own, which are not shipped, for the fault catalogue.

To add one: an entry in `OWN`, and a list of `faults.expected.Fault` with its name as `case` and ``torch`` as `to`, which
`faults.planted` adds to the others. Plants work as for the shipped models: `InRule` edits the text of the rules, `InFile` the
written tensors, `InTarget` what the adapter's `load` gives, `InReference` patches the JAX side.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from support.paths import EXAMPLES


@dataclass(frozen=True)
class OwnModel:
    """A model of the catalogue that has no shipped rules.

    Attributes:
        rules: the text of its rules.
        checkpoint: writes its checkpoint, once, and gives the path.
        reference: ``module:factory`` of its two models, as `--reference` takes it.
        adapter: the module whose `load` builds the PyTorch side, and which the reference calls as an attribute of the module.
    """

    rules: Callable[[], str]
    checkpoint: Callable[[], Path]
    reference: str
    adapter: Callable[[], Any]


@cache
def _folder() -> Path:
    """Kept for as long as the process lives: evidence is remembered by the checkpoint's path."""
    kept = tempfile.TemporaryDirectory(prefix="own-models-")
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[Any] = []


def example(name: str, module: str) -> Any:
    """A module of an example. Modules of several examples have one name, so it is loaded by its path under another."""
    known = f"{name}.{module}".replace("-", "_").replace("/", ".")
    if known not in sys.modules:
        path = EXAMPLES / name / f"{module}.py"
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[known] = made
        spec.loader.exec_module(made)
    return sys.modules[known]


@cache
def _conv_net() -> Path:
    path = _folder() / "conv-net.npz"
    example("conv-net", "model_jax").main(str(path))
    return path


@cache
def _cells() -> Path:
    return _in_npz("cells", importlib.import_module("support.cell_model").source())


@cache
def _conv_norm() -> Path:
    return _in_npz("conv-norm", importlib.import_module("support.conv_norm").source())


@cache
def _rope_model() -> Path:
    return _in_npz("rope-model", importlib.import_module("support.rope_model").source())


@cache
def _parts() -> Path:
    return _in_npz("parts", importlib.import_module("support.parts_model").source())


@cache
def _decoder() -> Path:
    return _in_npz("decoder", importlib.import_module("support.decoder").source())


@cache
def _small_decoder() -> Path:
    return _in_npz("small-decoder", importlib.import_module("support.small_decoder").source())


@cache
def _small(name: str) -> Path:
    return _in_npz(name, importlib.import_module("support.small_models").source(name))


@cache
def _series(name: str) -> Path:
    return _in_npz(name, importlib.import_module("support.series_model").source(name))


@cache
def _named_modules(library: str) -> Path:
    return _in_npz(f"{library}-modules", importlib.import_module("support.named_modules").source(library))


def _in_npz(name: str, source: Any) -> Path:
    path = _folder() / f"{name}.npz"
    np.savez(path, **source.arrays)
    return path


@cache
def _cde(kind: str) -> Path:
    """Equinox's leaves under the names that its skeleton gives them."""
    path = _folder() / f"cde-{kind}.npz"
    importlib.import_module("faults.cde_models").save(str(path))
    return path


@cache
def _cde_paths() -> Path:
    path = _folder() / "cde-paths.npz"
    importlib.import_module("faults.cde_models").write(str(path))
    return path


@cache
def _vector() -> Path:
    path = _folder() / "signal.npz"
    example("bugs/diffrax-derivative", "model_jax").main(str(path))
    return path


SMALL = ("norm-rope", "rope-norm", "positions", "experts", "states", "heads", "map", "cell")
STEPS = ("space", "peephole", "masked", "sloping", "distant", "grouped", "coded", "scaled")
CHOICES = ("quantised", "stepped")
OWN = {
    "conv-net": OwnModel(
        rules=lambda: (EXAMPLES / "conv-net" / "rules.yaml").read_text(),
        checkpoint=_conv_net,
        reference="faults.conv_net:reference",
        adapter=lambda: importlib.import_module("faults.conv_net").model_torch,
    ),
    "cells": OwnModel(
        rules=lambda: importlib.import_module("support.cell_model").RULES,
        checkpoint=_cells,
        reference="support.cell_model:reference",
        adapter=lambda: importlib.import_module("support.cell_model"),
    ),
    **{
        f"cde-{kind}": OwnModel(
            rules=lambda: (EXAMPLES / "cde" / "rules.yaml").read_text(),
            checkpoint=partial(_cde, kind),
            reference=f"faults.cde_models:{kind}",
            adapter=lambda: importlib.import_module("faults.cde_models").model_torch,
        )
        for kind in ("linear", "cubic")
    },
    "cde-paths": OwnModel(
        rules=lambda: str(importlib.import_module("faults.cde_models").RULES),
        checkpoint=_cde_paths,
        reference="faults.cde_models:paths",
        adapter=lambda: importlib.import_module("faults.cde_models"),
    ),
    "diffrax-derivative": OwnModel(
        rules=lambda: (EXAMPLES / "bugs" / "diffrax-derivative" / "rules.yaml").read_text(),
        checkpoint=_vector,
        reference="faults.cde_models:slopes",
        adapter=lambda: example("bugs/diffrax-derivative", "model_torch"),
    ),
    "conv-norm": OwnModel(
        rules=lambda: importlib.import_module("support.conv_norm").RULES,
        checkpoint=_conv_norm,
        reference="support.conv_norm:reference",
        adapter=lambda: importlib.import_module("support.conv_norm"),
    ),
    **{
        f"{library}-modules": OwnModel(
            rules=partial(lambda of: str(importlib.import_module("support.named_modules").rules(of)), library),
            checkpoint=partial(_named_modules, library),
            reference=f"support.named_modules:{factory}",
            adapter=lambda: importlib.import_module("support.named_modules"),
        )
        for library, factory in (("linen", "linen"), ("nnx", "in_nnx"), ("equinox", "equinox"))
    },
    "decoder": OwnModel(
        rules=lambda: importlib.import_module("support.decoder").RULES,
        checkpoint=_decoder,
        reference="support.decoder:reference",
        adapter=lambda: importlib.import_module("support.decoder"),
    ),
    "parts": OwnModel(
        rules=lambda: importlib.import_module("support.parts_model").RULES,
        checkpoint=_parts,
        reference="support.parts_model:reference",
        adapter=lambda: importlib.import_module("support.parts_model"),
    ),
    "rope-model": OwnModel(
        rules=lambda: importlib.import_module("support.rope_model").RULES,
        checkpoint=_rope_model,
        reference="support.rope_model:reference",
        adapter=lambda: importlib.import_module("support.rope_model"),
    ),
    **{
        name: OwnModel(
            rules=partial(lambda name: str(importlib.import_module("support.series_model").RULES[name]), name),
            checkpoint=partial(_series, name),
            reference="support.series_model:reference",
            adapter=lambda: importlib.import_module("support.series_model"),
        )
        for name in ("series", "lengths")
    },
    **{
        name: OwnModel(
            rules=partial(lambda name: str(importlib.import_module("support.small_models").rules(name)), name),
            checkpoint=partial(_small, name),
            reference="support.small_models:reference",
            adapter=lambda: importlib.import_module("support.small_models"),
        )
        for name in (*SMALL, *STEPS, *CHOICES)
    },
    "small-decoder": OwnModel(
        rules=lambda: importlib.import_module("support.small_decoder").RULES,
        checkpoint=_small_decoder,
        reference="support.small_decoder:reference",
        adapter=lambda: importlib.import_module("support.small_decoder"),
    ),
}
