"""What the files next to a checkpoint state of its LoRA pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.checkpoints.access import absolute
from convert.checkpoints.source import Source
from convert.core.errors import CheckpointError, PlanError
from convert.core.findings import Finding
from convert.planning.adapters import peft_config
from convert.planning.adapters.peft_config import PeftSettings, SettingError
from convert.planning.facts.sidecar import folder_of, read_beside

PEFT_FILE = "adapter_config.json"
ORBAX_FILE = "_CHECKPOINT_METADATA"  # of a step: MaxText writes its `lora` settings there (common/checkpointing.py)
QUANTIZED = "lora_weight_qtype"  # MaxText: the run computed with the weights of the base model rounded to this type


@dataclass(frozen=True)
class Statement:
    """What one file states.

    Attributes:
        file: its path.
        settings: with `rslora` as PEFT takes it, where the file does not state it.
        states_rslora: whether it does; MaxText's file has no such key.
    """

    file: Path
    settings: PeftSettings
    states_rslora: bool


def places(source: Source) -> list[Path]:
    """Return the folders whose files are read: from the arrays to the folder in which the given path lies, or at least one above them.

    They are those of the checkpoint of the pairs, where this is another one.
    """
    source = source.adapter or source
    folder = folder_of(source)
    here, top = absolute(folder), absolute(source.display_path).parent
    count = max(1, len(here.parts) - len(top.parts)) if here.is_relative_to(top) else 1
    above = folder.parents if len(folder.parents) >= count else here.parents
    return [folder, *(place for place in above[:count] if place.is_dir())]  # above a bucket there is no folder


def read_statements(source: Source) -> list[Statement]:
    """Read the files.

    Raises:
        CheckpointError: one is damaged, or has a value of another type.
        PlanError: one says that more is computed than a product that is added.
    """
    found = []
    for read in (_of_peft, _of_orbax):
        for folder in places(source):
            if (statement := read(source.adapter or source, folder)) is not None:
                found.append(statement)
    return found


def contradiction(statements: Sequence[Statement], name: str, values: Sequence[Any], option: str) -> Any:
    """Return the one value that the files state; None where none does.

    Args:
        name: of what they state.
        values: of each file; None: it states none.
        option: that decides between them.

    Raises:
        PlanError: they differ.
    """
    stated = [(s.file, value) for s, value in zip(statements, values, strict=True) if value is not None]
    for file, value in stated[1:]:
        first, wanted = stated[0]
        if value != wanted:
            problem = f"two files next to the checkpoint differ in {name}"
            fix = f"correct one of them, or give the right one with {option}"
            raise PlanError(Finding("adapter-scale-unknown", problem, path=str(file), expected=f"{_text(wanted)}, as {first} has it", got=_text(value), fix=fix))  # fmt: skip
    return stated[0][1] if stated else None


def _of_peft(source: Source, folder: Path) -> Statement | None:
    config = read_beside(source, PEFT_FILE, folder)
    if config is None:
        return None
    path = folder / PEFT_FILE
    _refuse(path, config, peft_config.more_than_a_product(config))
    return Statement(path, _settings(path, config), "use_rslora" in config or config.get("lora_alpha") is not None)


def _of_orbax(source: Source, folder: Path) -> Statement | None:
    """MaxText's settings lie below `lora`; a user's own may lie beside it."""
    custom = (read_beside(source, ORBAX_FILE, folder) or {}).get("custom_metadata")
    if not isinstance(custom, dict):
        return None
    inner = custom.get("lora")
    lora = inner if isinstance(inner, dict) else custom if "lora_alpha" in custom else {}
    if not lora or lora.get("enable_lora") is False:
        return None
    path = folder / ORBAX_FILE
    quantized = [(QUANTIZED, "the run computed with the base model's weights rounded to this type")]
    _refuse(path, lora, (found for found in quantized if lora.get(QUANTIZED)))
    names = {"r": ("lora_rank", "r", "rank"), "lora_alpha": ("lora_alpha", "alpha"), "use_rslora": ("use_rslora",)}
    config = {key: next((lora[name] for name in known if name in lora), None) for key, known in names.items()}
    config = {key: value for key, value in config.items() if value is not None}
    return Statement(path, _settings(path, config), "use_rslora" in config)


def _settings(path: Path, config: Mapping[str, Any]) -> PeftSettings:
    try:
        return peft_config.read_settings(config)
    except SettingError as error:
        fix = f"correct {error.key.partition(' ')[0]} in the file, or move it elsewhere and use --set"
        raise CheckpointError(Finding("sidecar-invalid", error.key, path=str(path), expected=error.expected, got=error.got, fix=fix)) from None  # fmt: skip


def _refuse(path: Path, config: Mapping[str, Any], reasons: Iterator[tuple[str, str]]) -> None:
    findings = [
        Finding(
            "adapter-not-a-product",
            f"{reason} ({peft_config.shown(config, key)})",
            path=str(path),
            expected="an adapter that adds a product to weights, and does nothing else",
            fix=f"merge it in the framework that trained it; or remove {key} from the file, if it is not so for the leaves of this checkpoint",
        )
        for key, reason in reasons
    ]
    if findings:
        raise PlanError(*findings)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
