"""Find what the keys of ``config.json`` that the rules do not write change in the target's configuration class.

The class is built twice: from the keys of the rules, and with one more key. Defaults, aliases, keys of older versions and keys
that others depend on are therefore those of transformers, and none of them is listed here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from convert.core.findings import Finding
from convert.planning.plan import Plan
from convert.verify.config.same_value import same
from convert.verify.coverage.hf_directory import other_class
from convert.writing.written import WEIGHTS_KEY, Written

# Class, precision and provenance; keys that only training, generation or labelling read; keys that change memory or rounding,
# but not the function.
# fmt: off
HARMLESS = frozenset({
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "name_or_path", "auto_map", "_class_name", "_diffusers_version",
    "tokenizer_class", "processor_class", "use_cache", "cache_implementation", "return_dict", "use_return_dict",
    "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "id2label", "label2id", "num_labels",
    "problem_type", "finetuning_task", "task_specific_params", "attn_implementation", "pretraining_tp",
    "gradient_checkpointing", "chunk_size_feed_forward", "reorder_and_upcast_attn", "apply_spec_augment",
    "median_filter_width", "suppress_tokens", "begin_suppress_tokens", "max_length", "min_length", "num_beams",
    "do_sample", "early_stopping", "prefix", "initializer_range", "initializer_factor", "init_std",
})
# fmt: on
TRAINING = ("dropout", "layerdrop", "drop_path")  # parts of keys that change the function in training alone
RUNNING = ("reorder_and_upcast_attn", "chunk_size_feed_forward")  # how the same function is computed
TOKENS = ("pad", "bos", "eos", "sep", "cls", "mask", "unk", "decoder_start", "forced_bos", "forced_eos")
LOADER = ("quantization_config", "compression_config", "fusion_config")  # read by from_pretrained, not by the class
UNUSED = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version")
MAX_SETTINGS = 4  # settings that depend on a key, in a message


@dataclass(frozen=True)
class OtherKeys:
    """The outcome.

    Attributes:
        findings: keys that change the loaded model.
        notes: keys that were not compared.
        unread: keys that the class does not read.
        causes: setting of the class -> the key that changes it.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    causes: Mapping[str, str] = field(default_factory=dict)


def compare_other_keys(plan: Plan, written: Written) -> OtherKeys:
    """Compare the keys of ``config.json`` that the rules do not write with the defaults of the class, or list them.

    Values that the sidecar ``config.json`` of the source states are intended, like those of the rules.
    """
    templates = plan.rules.targets[plan.target].config
    if not templates or written.config is None or other_class(plan, written):
        return OtherKeys()
    config = {"model_type": templates.get("model_type"), **written.config}
    running = [_shown(key, config[key]) for key in RUNNING if config.get(key)]
    notes = _note(running, "it changes how the same function is computed; the models run without it")
    sidecar = {
        key: value for key, value in plan.sidecar.for_output.items() if key not in templates and not harmless(key)
    }
    keys = list(_unplanned(config, templates, sidecar))
    lost = [key for key in sidecar if key not in config]
    if not keys and not lost:
        return OtherKeys(notes=notes)
    planned = {**sidecar, **_planned(config, templates)}
    try:
        base = class_config(config, planned)
    except Exception as error:  # noqa: BLE001 - not installed, or it rejects the configuration with any exception
        why = f"{error.name} is not installed" if isinstance(error, ImportError) else " ".join(str(error).split())[:200]
        return _without_class(keys, why)
    probe = _ClassProbe(config, base, sidecar)
    for path, value in keys:
        probe.try_key(".".join(path), value, _with(planned, path, value))
    if lost:
        probe.try_key(", ".join(lost), None, {key: value for key, value in planned.items() if key not in lost})
    probe.try_key("all keys together", None, {**planned, **config})
    outcome = probe.outcome()
    return replace(outcome, notes=(*notes, *outcome.notes))


def class_config(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Build the transformers class for the `model_type` of `config` from `given`; return its values as ``a.b`` -> value."""
    from transformers import AutoConfig

    kept = {key: deepcopy(value) for key, value in given.items() if key not in UNUSED}  # the class modifies them
    return dict(flatten(AutoConfig.for_model(config.get("model_type", ""), **kept).to_dict()))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield paths such as ``rope_parameters.rope_theta`` with their values; lists are values."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def harmless(key: str) -> bool:
    """Whether a key does not change what a loaded model computes."""
    last = key.rsplit(".", 1)[-1]
    token = last.removesuffix("s").removesuffix("_token_id")
    parts = key.split(".")
    return (
        any(part.startswith("_") or part in HARMLESS for part in parts)
        or token in TOKENS
        or only_training(last)
        or last == WEIGHTS_KEY
    )


def only_training(key: str) -> bool:
    """Whether only training reads a key."""
    return any(part in key for part in TRAINING)


def compare_training_keys(plan: Plan, written: Written) -> Iterator[Finding]:
    """Yield the rates of dropout in ``config.json`` that are not those of the sidecar or of the transformers class."""
    templates = plan.rules.targets[plan.target].config
    stated = {**(written.config or {}), **plan.sidecar.for_output}
    if not templates or written.config is None or not any(only_training(key) for key in stated):
        return
    config = {"model_type": templates.get("model_type"), **written.config}
    try:
        base = class_config(config, {**plan.sidecar.for_output, **_planned(config, templates)})
        made = class_config(config, config)
    except Exception:  # noqa: BLE001 - not installed, or reported by `compare_other_keys`
        return
    for key, value in made.items():
        if only_training(key) and key in base and not same(key, base[key], value):
            problem = "this key of config.json changes the loaded model in training"
            fix = "set it back, or correct the config.json of the source"
            yield _finding(key, problem, [], value, expected=_value(base[key]), fix=fix)


def _unplanned(
    config: Mapping[str, Any], templates: Mapping[str, Any], sidecar: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys that neither the rules nor the sidecar of the source state with this value."""
    for key, value in config.items():
        if key not in templates:
            if harmless(key) or (key in sidecar and sidecar[key] == value):
                continue
            if _has_all_keys_of(value, sidecar.get(key)) and key not in LOADER:
                yield from _unplanned(value, {}, sidecar[key], (*path, key))
            else:
                yield (*path, key), value
        elif isinstance(value, Mapping) and isinstance(templates[key], Mapping):
            yield from _unplanned(value, templates[key], {}, (*path, key))


def _has_all_keys_of(value: Any, stated: Any) -> bool:
    """Whether the configuration of a part has each key that the source's has: then the keys that differ are named one by one."""
    return isinstance(value, Mapping) and isinstance(stated, Mapping) and bool(stated) and stated.keys() <= value.keys()


def _planned(config: Mapping[str, Any], templates: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the rules write, with the values of the file; `compare` checks these values."""
    return {
        key: _planned(value, templates[key])
        if isinstance(value, Mapping) and isinstance(templates[key], Mapping)
        else value
        for key, value in config.items()
        if key in templates
    }


def _with(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    return {**config, key: _with(config.get(key, {}), tuple(rest), value) if rest else value}


def _without_class(keys: list[tuple[tuple[str, ...], Any]], why: str) -> OtherKeys:
    """Report the keys of the loader, and list all others: without the class, their effect is unknown."""
    findings = tuple(_loader_finding(path[0], value) for path, value in keys if path[0] in LOADER)
    listed = [_shown(".".join(path), value) for path, value in keys if path[0] not in LOADER]
    return OtherKeys(findings, _note(listed, f"the defaults of the class are unknown: {why}"))


def _note(listed: list[str], why: str) -> tuple[str, ...]:
    return (f"config.json, not compared: {', '.join(listed)} ({why})",) if listed else ()


def _shown(key: str, value: Any) -> str:
    return f"{key} = {_value(value)}"


def _loader_finding(key: str, value: Any) -> Finding:
    return _finding(
        key,
        "from_pretrained loads another model because of this key of config.json",
        [],
        value,
        expected="no such key, as the rules do not write it",
        fix="remove the key, or check the model before it was changed",
    )


def _finding(key: str, problem: str, changes: list[str], value: Any, *, expected: str = "", fix: str) -> Finding:
    data = {"diagnosis": key.rsplit(".", 1)[-1], "key": key, "value": value, "changes": changes}
    got = _value(value) if value is not None else ""
    return Finding("config-key-unexpected", problem, path=key, expected=expected, got=got, fix=fix, data=data)


def _within(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def _value(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _repeats_rope_type(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting is the older name of `rope_type`, which the class has read and keeps."""
    section, _, last = name.rpartition(".")
    return last == "type" and settings.get(name) == settings.get(f"{section}.rope_type")


class _ClassProbe:
    """Build the class with one more key at a time, and collect what each key changes."""

    def __init__(self, config: Mapping[str, Any], base: Mapping[str, Any], sidecar: Collection[str]) -> None:
        self._config, self._base, self._sidecar = config, base, sidecar
        self._findings: list[Finding] = []
        self._unread: dict[str, Any] = {}
        self._kept: set[str] = set()  # keys that the class keeps under their own names
        self._causes: dict[str, str] = {}

    def try_key(self, key: str, value: Any, given: Mapping[str, Any]) -> None:
        if key in LOADER:
            self._findings.append(_loader_finding(key, value))
            return
        try:
            made = class_config(self._config, given)
        except Exception as error:  # noqa: BLE001 - upstream code rejects a configuration with any exception
            if not self._findings:
                text = " ".join(str(error).split())[:300]
                problem = f"the transformers class rejects this value in config.json: {text}"
                self._findings.append(_finding(key, problem, [], value, fix="remove the key"))
            return
        changed = [
            name
            for name in {**self._base, **made}
            if not same(name, self._base.get(name), made.get(name))
            and name not in self._causes
            and not _repeats_rope_type(name, made)
            and not harmless(name)
            and not any(_within(name, unread) for unread in (*self._kept, *LOADER))
        ]
        if not any(_within(name, key) for name in self._base):  # kept as it is
            dependent = [name for name in changed if not _within(name, key)]
            if len(dependent) < len(changed):
                self._kept.add(key)
                if not dependent:
                    self._unread[key] = value
            changed = dependent
        if changed:
            self._causes |= dict.fromkeys(changed, key)
            self._findings.append(self._changing(key, value, changed, made))

    def _changing(self, key: str, value: Any, changed: list[str], made: Mapping[str, Any]) -> Finding:
        """Report a key that changes settings of the class."""
        from_sidecar = key.partition(".")[0] in self._sidecar
        origin = "the sidecar of the source" if from_sidecar else "the default of transformers"
        fix = (
            "set it back, or check with the source that has this value: the conversion would carry it over"
            if from_sidecar
            else "remove the key, which the rules do not write, or correct the rules if the source computes so"
        )
        dependent = [f"{n} is {_value(made.get(n))}, not {_value(self._base.get(n))}" for n in changed if n != key]
        more = f" and {len(dependent) - MAX_SETTINGS} more settings" if len(dependent) > MAX_SETTINGS else ""
        problem = "this key of config.json changes the loaded model"
        if dependent:
            problem += f": {', '.join(dependent[:MAX_SETTINGS])}{more}"
        expected = f"{_value(self._base[key])} ({origin})" if key in changed else ""
        return _finding(key, problem, changed, value, expected=expected, fix=fix)

    def outcome(self) -> OtherKeys:
        listed = [_shown(key, value) for key, value in self._unread.items()]
        notes = _note(listed, f"the transformers class does not read {'them' if len(listed) > 1 else 'it'}")
        causes = {name.rsplit(".", 1)[-1]: key for name, key in self._causes.items() if not name.endswith(key)}
        return OtherKeys(tuple(self._findings), notes, frozenset(self._unread), causes)
