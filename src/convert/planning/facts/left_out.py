"""Keys of the source's ``config.json`` that the output's has not: at the top, and in the configurations of its parts (`encoder`, `text_config`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

# Keys about the code that wrote the file; the output has its own.
NOT_COPIED = (
    "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "_commit_hash", "_class_name",
    "quantization_config",  # transformers would quantise the weights when it loads them
    "split_head_dim", "use_memory_efficient_attention",  # of diffusers' flax classes: how they compute, not what
)  # fmt: skip


def is_part(key: str, value: Any) -> bool:
    """Whether the value of a key is the configuration of a part of the model."""
    return isinstance(value, Mapping) and key != "quantization_config" and ("model_type" in value or key.endswith(("_config", "_config_dict")))  # fmt: skip


def copied_keys(config: Mapping[str, Any], ignored: Collection[str] = (), above: str = "") -> dict[str, Any]:
    """Return the keys that the output has, too.

    Args:
        ignored: keys that the source's code does not read; ``encoder.is_decoder`` is one of the part `encoder`.
        above: the name of the part, and a dot.
    """
    return {
        key: copied_keys(value, ignored, f"{above}{key}.") if is_part(key, value) else value
        for key, value in config.items()
        if key not in NOT_COPIED and f"{above}{key}" not in ignored
    }


def ignored_in_parts(config: Mapping[str, Any], ignored: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield path and value of the keys in the parts that the source's code does not read.

    Args:
        ignored: keys of any part, or of one: ``encoder.is_decoder``.
    """
    for key, value in config.items():
        if is_part(key, value):
            for inner, stated in value.items():
                if inner in ignored or f"{key}.{inner}" in ignored:
                    yield f"{key}.{inner}", stated
