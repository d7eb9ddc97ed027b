"""The options of a conversion, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from convert.core.tensor_spec import TensorSpec


@dataclass(frozen=True)
class ConversionOptions:
    """What the user chose in addition to the model, the checkpoint and the output.

    Attributes:
        to: a target of the rule file; None is its first.
        dtype: dtype in which floating-point tensors are written; None keeps the dtype of each leaf.
        settings: facts, sizes and variants that the tree leaves open, such as ``{"use_positional_embedding": True}``.
        step: a step of a CheckpointManager or of paxml; None is the latest.
        item: an item of a composite checkpoint.
        skeleton: a file from `convert skeleton` with the names of an Equinox file's arrays.
        follow_links: whether links in the checkpoint may lead out of it.
        rules_dir: a directory of rule files that take precedence over the shipped ones.
        lora: a checkpoint of LoRA pairs alone, whose weights the checkpoint has.
        like: specs of a state_dict that the result must match in names and shapes.
        tokenizer: a directory whose tokenizer, processor, generation and licence files an output directory gets, too; or its URL.
    """

    to: str | None = None
    dtype: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    item: str | None = None
    skeleton: str | Path | None = None
    follow_links: bool = False
    rules_dir: str | Path | None = None
    lora: str | Path | None = None
    like: Mapping[str, TensorSpec] | None = None
    tokenizer: str | Path | None = None


class SourceKeywords(TypedDict, total=False):
    """The fields of `ConversionOptions` of the way back as keyword arguments."""

    to: str | None
    dtype: str | None
    settings: Mapping[str, Any]
    step: int | None
    item: str | None
    skeleton: str | Path | None
    follow_links: bool
    rules_dir: str | Path | None


class OptionKeywords(SourceKeywords, total=False):
    """The fields of `ConversionOptions` as keyword arguments."""

    lora: str | Path | None
    like: Mapping[str, TensorSpec] | None
    tokenizer: str | Path | None


DEFAULTS = ConversionOptions()
