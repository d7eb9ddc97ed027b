"""Open an adapter that PEFT wrote: its pairs by module, with the factor of each. What is no sum of low-rank products is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convert.core.errors import CheckpointError, OptionError, PlanError
from convert.core.findings import Finding
from convert.core.system.regular_file import read_regular
from convert.peft.plan import PREFIX
from convert.peft.selection import read_selection
from convert.peft.write import CONFIG, FILE
from convert.planning.adapters.peft_config import PeftSettings, SettingError, more_than_a_product, read_settings, shown
from convert.writing.file_layout import INDICES, SINGLE_FILES
from convert.writing.written import MAX_JSON, Written, open_written

CODE = "adapter-not-importable"
MERGE = "merge it with PEFT (`merge_and_unload`), save the model, and convert that"
_TENSOR = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<end>[AB])\.weight")


@dataclass(frozen=True)
class AdapterModule:
    """A pair of the adapter: names of its tensors, the rank, and what the product is multiplied by."""

    down: str
    up: str
    rank: int
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An adapter of PEFT.

    Attributes:
        written: its tensors.
        modules: by the name of the module.
        base: name or path of the model that it is added to; empty where the file does not say.
    """

    written: Written = field(repr=False)
    modules: Mapping[str, AdapterModule]
    base: str


def is_adapter(path: Path) -> bool:
    """Whether a directory has PEFT's files, and no model beside them; or the file of the pairs in such a directory."""
    if path.name == FILE and path.is_file():
        return True
    if not path.is_dir() or any((path / name).exists() for name in (*SINGLE_FILES, *INDICES)):
        return False
    return (path / FILE).exists() or (path / CONFIG).exists()


def no_adapter(path: Path, form: str) -> OptionError:
    """Explain that the form of pairs was given for tensors that are no adapter."""
    problem = f"{form} is a form of the pairs of PEFT's adapter, and {path} is none"
    fix = f"leave it out, or give a directory with {FILE} and {CONFIG}"
    return OptionError(Finding("usage", problem, path=f"--adapter {form}", fix=fix))


def open_adapter(path: Path) -> Adapter:
    """Open an adapter: its directory, or the file of the pairs in it. Reads no tensor.

    Raises:
        CheckpointError: a file is missing or damaged.
        PlanError: it is no sum of low-rank products; or a pair is incomplete or contradicts the configuration.
    """
    path = path.parent if path.name == FILE and path.is_file() else path
    for name, more in ((CONFIG, ""), (FILE, "; a pickle (adapter_model.bin) is not loaded")):
        if not (path / name).is_file():
            fix = "save the adapter with `save_pretrained` of PEFT"
            raise CheckpointError(Finding("converted-not-found", f"there is no {name} in it{more}", path=str(path), fix=fix))  # fmt: skip
    config = _read(path / CONFIG)
    written = replace(open_written(path / FILE), path=path)
    findings = [
        Finding(CODE, f"{reason} ({shown(config, key)})", path=str(path / CONFIG), fix=MERGE)
        for key, reason in more_than_a_product({"peft_type": None, **config})
    ]
    if findings:
        raise PlanError(*findings)
    try:
        settings, selected = read_settings(config), read_selection(config)
    except SettingError as error:
        fix = "give the files as PEFT saved them"
        raise PlanError(Finding(CODE, str(error), path=str(path / CONFIG), fix=fix)) from None
    ends: dict[str, dict[str, str]] = {}
    for name in written.specs:
        found = _TENSOR.fullmatch(name)
        if found is None:
            problem = f"the tensor is no lora_A or lora_B of a module below {PREFIX}"
            findings.append(Finding(CODE, problem, path=name, fix=MERGE))
        else:
            ends.setdefault(found["module"], {})[found["end"]] = name
    modules = {}
    for module, pair in ends.items():
        try:
            modules[module] = _module(settings, module, pair, written)
            if not selected.has(module):
                raise ValueError(f"{CONFIG} selects other modules ({selected}), so that PEFT does not load the pair")
        except ValueError as error:
            fix = "give the files as PEFT saved them"
            findings.append(Finding(CODE, str(error), path=f"{PREFIX}{module}", fix=fix))
    if not modules and not findings:
        findings.append(Finding(CODE, "the adapter has no tensor", path=str(path / FILE), fix="save the adapter again"))  # fmt: skip
    if findings:
        raise PlanError(*findings, headline=f"{path} is no adapter that a JAX tree can hold")
    return Adapter(written, modules, str(config.get("base_model_name_or_path") or ""))


def _module(settings: PeftSettings, module: str, pair: Mapping[str, str], written: Written) -> AdapterModule:
    """Return the pair of a module.

    Raises:
        ValueError: half of it is missing, or its shapes are not those of the configuration.
    """
    if missing := {"A", "B"} - pair.keys():
        raise ValueError(f"the pair has no lora_{missing.pop()}")
    first, second = (written.specs[pair[end]] for end in "AB")
    rank, alpha = settings.rank_of(module), settings.alpha_of(module)
    if rank is None or alpha is None:
        raise ValueError(
            f"{CONFIG} has no {'r' if rank is None else 'lora_alpha'}, and no pattern gives one to this module"
        )
    if min(len(first.shape), len(second.shape)) < 2 or (first.shape[0], second.shape[1]) != (rank, rank):
        raise ValueError(f"{CONFIG} states rank {rank}, and lora_A is {first}, lora_B {second}")
    return AdapterModule(pair["A"], pair["B"], rank, alpha / (math.sqrt(rank) if settings.rslora else rank))


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_regular(path, MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            Finding("converted-metadata-invalid", f"cannot be read: {error}", path=str(path))
        ) from None
    if not isinstance(config, dict):
        raise CheckpointError(Finding("converted-metadata-invalid", path=str(path), expected="a JSON object"))
    return config
