"""The settings of PEFT's ``adapter_config.json``: what they multiply the product of a module by, and which of them do more than add it.

As PEFT 0.21.2 obeys them (tuners/lora/config.py and layer.py, `get_pattern_key` of utils/other.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from convert.core.similarity import did_you_mean

# Keys of LoraConfig that change the function where they have a value, and how.
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
# Keys that say by what the product is multiplied, or which modules have one.
READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"})  # fmt: skip
# Keys that say how it was trained, or what the names and shapes of the tensors say.
IGNORED = frozenset(
    {
        "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
        "lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "eva_config",
        "corda_config", "lora_ga_config", "velora_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
    }
)  # fmt: skip
ENDS = r"(.*\.)?({})$"  # the name of a module, or what stands behind a dot in it
MOST_REPEATS = 6
PLAIN = (True, False, None, "gaussian", "eva", "orthogonal", "mica")  # init_lora_weights that leave the base weights


class SettingError(ValueError):
    """A setting has no meaning.

    Attributes:
        key: its name.
        expected, got: what it should be, and what it is.
    """

    def __init__(self, key: str, expected: str, got: Any) -> None:
        super().__init__(f"{key} is {_shown(got)}, not {expected}")
        self.key, self.expected, self.got = key, expected, _shown(got)


@dataclass(frozen=True)
class PeftSettings:
    """By what PEFT multiplies the products.

    Attributes:
        rank, alpha: of the modules that no pattern names; None: not stated.
        rslora: whether alpha is divided by the root of the rank.
        ranks, alphas: of the modules whose name, or the end of it, matches the regular expression.
    """

    rank: int | None
    alpha: float | None
    rslora: bool
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    @property
    def patterns(self) -> list[tuple[str, str]]:
        """Each pattern, behind the key that has it."""
        return [*(("rank_pattern", name) for name in self.ranks), *(("alpha_pattern", name) for name in self.alphas)]

    def rank_of(self, module: str) -> int | None:
        """The rank of a module."""
        return self.ranks.get(_key(self.ranks, module), self.rank)

    def alpha_of(self, module: str) -> float | None:
        """The alpha of a module."""
        return self.alphas.get(_key(self.alphas, module), self.alpha)


def read_settings(config: Mapping[str, Any]) -> PeftSettings:
    """Read the settings.

    Raises:
        SettingError: one of them is of another type, or no number that PEFT could multiply by.
    """
    rslora = config.get("use_rslora")
    if not isinstance(rslora, bool | None):
        raise SettingError("use_rslora", "true or false", rslora)
    return PeftSettings(
        None if config.get("r") is None else whole("r", config["r"]),
        None if config.get("lora_alpha") is None else number("lora_alpha", config["lora_alpha"]),
        rslora is True,
        {name: whole(f"rank_pattern of {name}", value) for name, value in _patterns(config, "rank_pattern")},
        {name: number(f"alpha_pattern of {name}", value) for name, value in _patterns(config, "alpha_pattern")},
    )


def more_than_a_product(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each setting that does more than add a product to a weight, and what it does."""
    yield from ((key, reason) for key, reason in REFUSED.items() if config.get(key))
    if config.get("peft_type", "LORA") != "LORA":
        yield "peft_type", "the adapter is no LoRA"
    if config.get("bias", "none") != "none":
        yield "bias", "the adapter has biases of the model, too"
    if config.get("init_lora_weights") not in PLAIN:
        yield "init_lora_weights", "PEFT changes the base weights when it loads the adapter"
    for key, value in config.items():
        if value and key not in REFUSED.keys() | READ | IGNORED:
            closest = did_you_mean(key, READ | REFUSED.keys())
            yield (
                key,
                f"this is no setting of PEFT 0.21's LoRA{f' ({closest})' if closest else ''}, so what it does is not known",
            )


def shown(config: Mapping[str, Any], key: str) -> str:
    """Return a setting as the file has it."""
    return f"{key}: {_shown(config.get(key))}"


def whole(key: str, value: Any) -> int:
    """Return a rank.

    Raises:
        SettingError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingError(key, "a whole number above 0", value)
    return value


def number(key: str, value: Any) -> float:
    """Return an alpha.

    Raises:
        SettingError: it is none.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not value or not math.isfinite(value):
        raise SettingError(key, "a number other than 0", value)
    return value


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]


def _patterns(config: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise SettingError(key, "names of modules with numbers", patterns)
    for name in patterns:
        require_expression(key, name)
        require_expression(key, ENDS.format(name))
    yield from patterns.items()


def require_expression(key: str, pattern: str) -> None:
    """Check that a text is a regular expression that a name can be matched with in a second: the file may come from anywhere.

    A repeated group and each further repetition multiply the ways to read a name, and Python's `re` tries them all.

    Raises:
        SettingError: it is none.
    """
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise SettingError(key, f"names or regular expressions ({error})", pattern) from None
    plain = re.sub(r"\\.", "x", pattern)
    if re.search(r"\)[*+{]", plain) or len(re.findall(r"[*+]|\{\d*,\d*\}", plain)) > MOST_REPEATS:
        raise SettingError(
            key, f"a regular expression without a repeated group, and with at most {MOST_REPEATS} of * and +", pattern
        )


def _key(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that is the name of the module, or ends it behind a dot; else its name."""
    return next((key for key in patterns if ends_with(key, module)), module)


def ends_with(pattern: str, module: str) -> bool:
    """Whether a pattern of PEFT is the name of a module, or ends it behind a dot."""
    return re.match(ENDS.format(pattern), module) is not None
