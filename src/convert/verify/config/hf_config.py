"""Keys of ``config.json`` that the rules do not write: what the target's configuration class makes of them.

The class is asked twice, with what the rules write and with the key beside it. So defaults, aliases, keys of older versions
and keys from which others follow are known as transformers knows them, and nothing about them is written down here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from convert.core.findings import Finding
from convert.planning.plan import Plan
from convert.verify.coverage.hf_directory import other_class
from convert.verify.written import WEIGHTS_KEY, Written

# Which class loads it and in what precision, who wrote it, what training, generating or labelling alone reads, and what
# changes memory or rounding but not the function.
# fmt: off
HARMLESS = frozenset({
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "name_or_path", "auto_map",
    "tokenizer_class", "processor_class", "use_cache", "cache_implementation", "return_dict", "use_return_dict",
    "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16", "id2label", "label2id", "num_labels",
    "problem_type", "finetuning_task", "task_specific_params", "attn_implementation", "pretraining_tp",
    "gradient_checkpointing", "chunk_size_feed_forward", "reorder_and_upcast_attn", "apply_spec_augment",
    "median_filter_width", "suppress_tokens", "begin_suppress_tokens", "max_length", "min_length", "num_beams",
    "do_sample", "early_stopping", "prefix", "initializer_range", "initializer_factor", "init_std", "layerdrop",
    "encoder_layerdrop", "decoder_layerdrop",
})
# fmt: on
RUNNING = ("reorder_and_upcast_attn", "chunk_size_feed_forward")  # how the same function is computed
TOKENS = ("pad", "bos", "eos", "sep", "cls", "mask", "unk", "decoder_start", "forced_bos", "forced_eos")
LOADER = ("quantization_config", "compression_config", "fusion_config")  # read by from_pretrained, and by no class
UNUSED = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version")
SHOWN = 4  # settings that follow from a key


@dataclass(frozen=True)
class OtherKeys:
    """What came of asking.

    Attributes:
        findings: keys that change what is loaded.
        notes: keys that were not compared.
        unread: keys that the class does not read.
        causes: a setting of the class -> the key that changes it.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    causes: Mapping[str, str] = field(default_factory=dict)


def other_keys(plan: Plan, written: Written) -> OtherKeys:
    """Compares the keys of ``config.json`` that the rules do not write with the class's defaults, or lists them.

    What the source's own ``config.json`` says beside its checkpoint is meant, and counts as written by the rules.
    """
    templates = plan.rules.targets[plan.target].config
    if not templates or written.config is None or other_class(plan, written):
        return OtherKeys()
    config = {"model_type": templates.get("model_type"), **written.config}
    running = [_shown(key, config[key]) for key in RUNNING if config.get(key)]
    notes = _note(running, "it says how the same function is computed; the models are run without it")
    sidecar = {key: value for key, value in plan.sidecar.config.items() if key not in templates and not harmless(key)}
    keys = list(_beyond(config, templates, sidecar))
    lost = [key for key in sidecar if key not in config]
    if not keys and not lost:
        return OtherKeys(notes=notes)
    meant = {**sidecar, **_meant(config, templates)}
    try:
        plain = class_config(config, meant)
    except Exception as error:  # noqa: BLE001 - not installed, or a configuration that it refuses in a way of its own
        why = f"{error.name} is not installed" if isinstance(error, ImportError) else " ".join(str(error).split())[:200]
        return _by_hand(keys, why)
    asked = _Asked(config, plain, sidecar)
    for path, value in keys:
        asked.ask(".".join(path), value, _with(meant, path, value))
    if lost:
        asked.ask(", ".join(lost), None, {key: value for key, value in meant.items() if key not in lost})
    asked.ask("all keys together", None, {**meant, **config})
    said = asked.said()
    return replace(said, notes=(*notes, *said.notes))


def class_config(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``a.b`` -> value of transformers' configuration class for the `model_type` of `config`, made from what is `given`."""
    from transformers import AutoConfig

    kept = {
        key: deepcopy(value) for key, value in given.items() if key not in UNUSED
    }  # the class changes what it is given
    return dict(flat(AutoConfig.for_model(config.get("model_type", ""), **kept).to_dict()))


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``rope_parameters.rope_theta`` and its value; lists are values."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
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
        or "dropout" in last
        or last == WEIGHTS_KEY
    )


def _beyond(
    config: Mapping[str, Any], templates: Mapping[str, Any], sidecar: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Keys that neither the rules nor the source's own file has so."""
    for key, value in config.items():
        if key not in templates:
            if not harmless(key) and (key not in sidecar or sidecar[key] != value):
                yield (*path, key), value
        elif isinstance(value, Mapping) and isinstance(templates[key], Mapping):
            yield from _beyond(value, templates[key], {}, (*path, key))


def _meant(config: Mapping[str, Any], templates: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the rules write, with the values of the file: whether these are right is compared elsewhere."""
    return {
        key: _meant(value, templates[key])
        if isinstance(value, Mapping) and isinstance(templates[key], Mapping)
        else value
        for key, value in config.items()
        if key in templates
    }


def _with(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    return {**config, key: _with(config.get(key, {}), tuple(rest), value) if rest else value}


def _by_hand(keys: list[tuple[tuple[str, ...], Any]], why: str) -> OtherKeys:
    """Without the class: its loader's own keys are findings, all others are listed."""
    findings = tuple(_of_loader(path[0], value) for path, value in keys if path[0] in LOADER)
    listed = [_shown(".".join(path), value) for path, value in keys if path[0] not in LOADER]
    return OtherKeys(findings, _note(listed, f"the class's defaults are not known here: {why}"))


def _note(listed: list[str], why: str) -> tuple[str, ...]:
    return (f"config.json, not compared: {', '.join(listed)} ({why})",) if listed else ()


def _shown(key: str, value: Any) -> str:
    return f"{key} = {_value(value)}"


def _of_loader(key: str, value: Any) -> Finding:
    return _finding(
        key,
        f"config.json has a {key}, which the rules do not write: from_pretrained loads another model by it than the tensors here "
        "are. Remove the key, or check the model before it was changed",
        [],
        value,
    )


def _finding(key: str, what: str, changes: list[str], value: Any) -> Finding:
    data = {
        "diagnosis": key.rsplit(".", 1)[-1],
        "key": key,
        "value": value,
        "changes": changes,
        "repair": "remove the key",
    }
    return Finding("config-key-unexpected", what, path=key, data=data)


def _within(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def _value(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


class _Asked:
    """Asks the class what each key changes."""

    def __init__(self, config: Mapping[str, Any], plain: Mapping[str, Any], sidecar: Collection[str]) -> None:
        self._config, self._plain, self._beside = config, plain, sidecar
        self._findings: list[Finding] = []
        self._unread: dict[str, Any] = {}
        self._kept: set[str] = set()  # by the class, under their own names
        self._causes: dict[str, str] = {}

    def ask(self, key: str, value: Any, given: Mapping[str, Any]) -> None:
        if key in LOADER:
            self._findings.append(_of_loader(key, value))
            return
        try:
            made = class_config(self._config, given)
        except Exception as error:  # noqa: BLE001 - upstream's code says in its own ways that a configuration is wrong
            if not self._findings:
                said = " ".join(str(error).split())[:300]
                text = f"config.json says {_shown(key, value)}, which transformers' class does not take: {said}. Remove the key"
                self._findings.append(_finding(key, text, [], value))
            return
        changed = [
            name
            for name in {**self._plain, **made}
            if self._plain.get(name) != made.get(name)
            and name not in self._causes
            and not harmless(name)
            and not any(_within(name, unread) for unread in (*self._kept, *LOADER))
        ]
        if not any(_within(name, key) for name in self._plain):  # kept as it is
            follows = [name for name in changed if not _within(name, key)]
            if len(follows) < len(changed):
                self._kept.add(key)
                if not follows:
                    self._unread[key] = value
            changed = follows
        if not changed:
            return
        self._causes |= dict.fromkeys(changed, key)
        said = f"config.json says {_shown(key, value)}" if value is not None else f"config.json: {key}"
        repair = (
            "The conversion would carry that over: set it back, or check with the source that has this value"
            if key in self._beside
            else "The rules do not write it: remove it, or correct them if the source computes so"
        )
        whose = "the source's own file has" if key in self._beside else "transformers' default is"
        default = [f"{whose} {_value(self._plain[key])}"] if key in changed else []
        follows = [f"{n} is {_value(made.get(n))}, not {_value(self._plain.get(n))}" for n in changed if n != key]
        more = f" and {len(follows) - SHOWN} more settings" if len(follows) > SHOWN else ""
        what = "; with it ".join(
            [said + (f"; {default[0]}" if default else ""), *([", ".join(follows[:SHOWN]) + more] if follows else [])]
        )
        self._findings.append(
            _finding(
                key,
                f"{what}. {repair}",
                changed,
                value,
            )
        )

    def said(self) -> OtherKeys:
        listed = [_shown(key, value) for key, value in self._unread.items()]
        notes = _note(
            listed,
            "transformers' class does not read them" if len(listed) > 1 else "transformers' class does not read it",
        )
        causes = {name.rsplit(".", 1)[-1]: key for name, key in self._causes.items() if not name.endswith(key)}
        return OtherKeys(tuple(self._findings), notes, frozenset(self._unread), causes)
