"""Compare the settings that only ``generate()`` and pipelines read, such as `temperature`, with those of the source.

No output of a forward pass depends on them. They stand in ``generation_config.json``, and in ``config.json`` of older models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.system.regular_file import read_regular
from convert.planning.facts.sidecar import GENERATION
from convert.planning.plan import Plan
from convert.verify.config.hf_config import class_config
from convert.writing.written import MAX_JSON, Written

CONFIG = "config.json"
LABELS = ("id2label", "label2id")  # no output depends on them either; pipelines name the classes by them
# fmt: off
# Keys of transformers' GenerationConfig (4.46 and 5.23) that may stand in config.json, with the value that a missing key has.
DEFAULTS: Mapping[str, Any] = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0, "diversity_penalty": 0.0, "penalty_alpha": None, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "max_length": 20, "max_new_tokens": None, "min_length": 0, "min_new_tokens": None,
    "early_stopping": False, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "bad_words_ids": None,
    "force_words_ids": None, "sequence_bias": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_decoder_ids": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "remove_invalid_values": False,
    "renormalize_logits": False, "exponential_decay_length_penalty": None, "guidance_scale": None, "stop_strings": None,
}
# Keys of generation_config.json that change what is returned or how it is computed, and not the tokens.
RUNNING = frozenset({
    "transformers_version", "use_cache", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile",
    "low_memory", "prefill_chunk_size",
})
# fmt: on


@dataclass(frozen=True)
class GenerationSettings:
    """The outcome.

    Attributes:
        findings: settings that differ from those of the source.
        notes: settings that no file of the source states.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def compare_generation(plan: Plan, written: Written) -> GenerationSettings:
    """Compare both files of a directory with the files next to the checkpoint, or list their settings."""
    target = plan.rules.targets[plan.target]
    if written.config is None or not written.path.is_dir() or not target.config:
        return GenerationSettings()
    stated, source = _read(written), plan.sidecar
    if not source.config and not source.generation:
        return GenerationSettings(notes=tuple(_unverified(plan, written.config, stated or {})))
    ours, theirs = _in_config(written.config, written.config), _in_config(source.config, written.config)
    keys = _given(written.config, source.config, target.config)
    keys += [key for key in LABELS if key in written.config and key in source.config and key not in target.config]
    findings = list(_differences(CONFIG, ours, theirs, keys))
    if stated is not None or source.generation:
        ours = written.config if stated is None else stated
        theirs = source.generation or source.config
        compared = _compared_by_coverage(plan) if stated is not None else {}
        given = [key for key in {**(stated or {}), **source.generation} if _decides(key) and key not in compared]
        findings += _differences(GENERATION, ours, theirs, given)
    return GenerationSettings(tuple(findings))


def _read(written: Written) -> Mapping[str, Any] | None:
    """Read ``generation_config.json``; None without one. The coverage level reports a damaged file."""
    try:
        stated = json.loads(read_regular(written.path / GENERATION, MAX_JSON))
    except (OSError, ValueError, RecursionError):
        return None
    return stated if isinstance(stated, dict) else None


def _compared_by_coverage(plan: Plan) -> Mapping[str, Any]:
    try:
        return plan.generation_config or {}
    except PlanError:
        return {}


def _given(config: Mapping[str, Any], source: Mapping[str, Any], templates: Mapping[str, Any]) -> list[str]:
    """Return the settings that one of two ``config.json`` has and the rules do not write."""
    return [key for key in {**config, **source} if key in DEFAULTS and key not in templates]


def _decides(key: str) -> bool:
    return key not in RUNNING and not key.startswith("_")


def _in_config(given: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the defaults of the transformers class to a ``config.json``, if transformers is installed."""
    try:
        return {**class_config(config, given), **given}
    except Exception:  # noqa: BLE001 - not installed, or it rejects the configuration with any exception
        return given


def _differences(file: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], keys: list[str]) -> Iterator[Finding]:
    for key in keys:
        got, expected = _value(ours, key), _value(theirs, key)
        if got == expected or (isinstance(got, list) and got == [expected]) or [got] == expected:
            continue
        yield Finding(
            "generation-differs",
            f"{file} and the files next to the checkpoint disagree, and {_reader(key)} this setting",
            path=key,
            expected=json.dumps(expected),
            got=json.dumps(got),
            fix=f"set it to {json.dumps(expected)} in {file}, or change the file next to the checkpoint and convert again",
            data={"diagnosis": key, "key": key, "value": got, "file": file},
        )


def _reader(key: str) -> str:
    return "pipelines name the classes by" if key in LABELS else "generate() reads"


def _value(stated: Mapping[str, Any], key: str) -> Any:
    value = stated.get(key)
    return DEFAULTS.get(key) if value is None else value


def _unverified(plan: Plan, config: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[str]:
    """List the settings of both files that the rules do not write."""
    target, compared = plan.rules.targets[plan.target], _compared_by_coverage(plan)
    listed = {
        CONFIG: {key: config[key] for key in _given(config, {}, target.config)},
        GENERATION: {key: value for key, value in stated.items() if _decides(key) and key not in compared},
    }
    for file, settings in listed.items():
        shown = ", ".join(f"{key} {json.dumps(value)}" for key, value in settings.items() if value is not None)
        if shown:
            yield (
                f"not verified: {shown} of {file}: only generate() reads them, and no file next to the checkpoint states them. "
                "Compare them with the settings of the source"
            )
