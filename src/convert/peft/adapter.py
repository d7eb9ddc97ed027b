"""Open an adapter that PEFT wrote: its pairs by module, with the factor of each. What is no sum of low-rank products is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convert.core.errors import CheckpointError, OptionError, PlanError
from convert.core.findings import Finding
from convert.core.system.regular_file import read_regular
from convert.peft.plan import PREFIX
from convert.peft.write import CONFIG, FILE
from convert.writing.file_layout import INDICES, SINGLE_FILES
from convert.writing.written import MAX_JSON, Written, open_written

MERGE = "merge it with PEFT (`merge_and_unload`), save the model, and convert that"
# Keys of PEFT 0.21's LoraConfig that change the function where they have a value, and how.
REFUSED = {
    "use_dora": "DoRA scales the rows of the sum of weight and product, so that nothing is added to the weight",
    "lora_bias": "lora_B has a bias",
    "modules_to_save": "the adapter replaces whole modules",
    "trainable_token_indices": "the adapter replaces rows of an embedding",
    "target_parameters": "the adapter is added to parameters that are no module's weight",
    "layer_replication": "the adapter repeats layers of the model",
    "alora_invocation_tokens": "the adapter is added from some token on",
    "use_qalora": "the inputs are averaged before lora_A",
    "use_bdlora": "the pairs are block diagonal over several devices",
    "arrow_config": "several adapters are mixed for each token",
    "kasa_config": "the base weight is cut, and the product has a diagonal",
    "monteclora_config": "the adapter is drawn at random",
}
# Keys that do not: they say how it was trained, or what the names and shapes of the tensors say.
IGNORED = frozenset(
    {
        "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout",
        "fan_in_fan_out", "bias", "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern",
        "rank_pattern", "alpha_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config",
        "corda_config", "lora_ga_config", "velora_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
    }
)  # fmt: skip
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # values of init_lora_weights
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
    findings = list(_refused(path / CONFIG, config))
    if findings:
        raise PlanError(*findings)
    ends: dict[str, dict[str, str]] = {}
    for name in written.specs:
        found = _TENSOR.fullmatch(name)
        if found is None:
            problem = f"the tensor is no lora_A or lora_B of a module below {PREFIX}"
            findings.append(Finding("adapter-not-importable", problem, path=name, fix=MERGE))
        else:
            ends.setdefault(found["module"], {})[found["end"]] = name
    modules = {}
    for module, pair in ends.items():
        try:
            modules[module] = _module(config, module, pair, written)
        except ValueError as error:
            fix = "give the files as PEFT saved them"
            findings.append(Finding("adapter-not-importable", str(error), path=f"{PREFIX}{module}", fix=fix))
    if not modules and not findings:
        findings.append(Finding("adapter-not-importable", "the adapter has no tensor", path=str(path / FILE), fix="save the adapter again"))  # fmt: skip
    if findings:
        raise PlanError(*findings, headline=f"{path} is no adapter that a JAX tree can hold")
    return Adapter(written, modules, str(config.get("base_model_name_or_path") or ""))


def _refused(path: Path, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each setting that does more than add a product to a weight."""
    reasons = {key: reason for key, reason in REFUSED.items() if config.get(key)}
    if (kind := config.get("peft_type")) != "LORA":
        reasons["peft_type"] = "the adapter is no LoRA"
        config = {**config, "peft_type": kind}
    if config.get("bias", "none") != "none":
        reasons["bias"] = "the adapter has biases of the model, too"
    if str(config.get("init_lora_weights")).lower().startswith(CHANGES_BASE):
        reasons["init_lora_weights"] = (
            "PEFT changes the base weights when it loads the adapter; convert it to plain LoRA with PEFT, or"
        )
    for key, reason in reasons.items():
        yield Finding("adapter-not-importable", f"{reason} ({key}: {json.dumps(config[key])[:60]})", path=str(path), fix=MERGE)  # fmt: skip


def _module(config: Mapping[str, Any], module: str, pair: Mapping[str, str], written: Written) -> AdapterModule:
    """Return the pair of a module.

    Raises:
        ValueError: half of it is missing, or its shapes are not those of the configuration.
    """
    if missing := {"A", "B"} - pair.keys():
        raise ValueError(f"the pair has no lora_{missing.pop()}")
    first, second = (written.specs[pair[end]] for end in "AB")
    rank = _pattern(config, "rank_pattern", module, config.get("r"))
    alpha = _pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"the rank is {rank!r} in {CONFIG}, not a number above 0")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not alpha or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha is {alpha!r} in {CONFIG}, not a number other than 0")
    if min(len(first.shape), len(second.shape)) < 2 or (first.shape[0], second.shape[1]) != (rank, rank):
        raise ValueError(f"{CONFIG} states rank {rank}, and lora_A is {first}, lora_B {second}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterModule(pair["A"], pair["B"], rank, scale)


def _pattern(config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """Return the value of the first name of a pattern that is the module's, or ends it, as PEFT's `get_pattern_key` does.

    Raises:
        ValueError: it is a regular expression, which is not evaluated.
    """
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{key} of {CONFIG} is {patterns!r}, not names with numbers")  # noqa: TRY004 - what the file holds
    for pattern, value in patterns.items():
        name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if re.fullmatch(r"[\w.-]+", name) is None:
            raise ValueError(f"{key} of {CONFIG} has the regular expression {pattern!r}: write the names of the modules in its place")  # fmt: skip
        if module == name or (not pattern.startswith("^") and module.endswith(f".{name}")):
            return value
    return default


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
