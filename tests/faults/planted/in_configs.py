"""Faults in the JSON files of a written directory: settings that only ``generate()`` reads, so that no logit tells them."""

from __future__ import annotations

from typing import Any

from faults.expected import HUGGING, Fault
from faults.plants import InDirectory

CONFIG, GENERATION = "config.json", "generation_config.json"


def setting(case: str, file: str, level: str, key: str, value: Any) -> Fault:
    name = f"{key} of {file} is another"
    return Fault(name, case, HUGGING, InDirectory(file, {key: value}), level, key, key)


IN_CONFIGS: tuple[Fault, ...] = (
    setting("gpt2", CONFIG, "layers", "do_sample", True),
    setting("gpt2", CONFIG, "layers", "temperature", 0.7),
    setting("gpt2", GENERATION, "layers", "top_k", 3),
    setting("gpt2", GENERATION, "layers", "repetition_penalty", 1.3),
    setting("t5", CONFIG, "layers", "decoder_start_token_id", 5),
    setting("t5", GENERATION, "layers", "decoder_start_token_id", 5),
    setting("whisper", GENERATION, "layers", "suppress_tokens", [1, 2]),
    setting("whisper", CONFIG, "layers", "forced_bos_token_id", 3),
)
