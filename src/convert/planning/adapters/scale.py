"""The factor of a LoRA product: from the library's code, from files next to the checkpoint, or from ``--set``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert.checkpoints.source import Source
from convert.core.errors import OptionError
from convert.core.findings import Finding
from convert.planning.adapters.names import NamedPair, Writer
from convert.planning.facts.sidecar import read_beside

ALPHA, RSLORA = "lora_alpha", "use_rslora"  # names of --set; those of PEFT's adapter_config.json
ADAPTER, BASE = "adapter", "base"  # --set adapter=base: the weights without the products
SETTINGS = (ALPHA, RSLORA, ADAPTER)
RANK = "rank"  # --set lora_alpha=rank: alpha is the rank of each pair, as in openpi's configurations, and the factor 1
PEFT_FILE = "adapter_config.json"
ORBAX_FILE = "_CHECKPOINT_METADATA"  # of a step: MaxText writes its `lora` settings there (common/checkpointing.py)


@dataclass(frozen=True)
class Scaling:
    """What is known of the factor.

    Attributes:
        alpha: the product is multiplied by ``alpha / rank``; None: unknown.
        rslora: by ``alpha / sqrt(rank)`` instead.
        rank: that the files state; None: they state none.
        origin: where alpha is from, for people.
        is_rank: whether alpha is the rank of each pair.
    """

    alpha: float | None = None
    rslora: bool = False
    rank: int | None = None
    origin: str = ""
    is_rank: bool = False

    def factor(self, pair: NamedPair, rank: int) -> tuple[float, str]:
        """Return the factor of a pair, and why it is that.

        Raises:
            ValueError: it is unknown.
        """
        if not applies(pair):
            return 1.0, f"{pair.writer.value} multiplies it by no factor"
        alpha = float(rank) if self.is_rank else self.alpha
        if alpha is None:
            raise ValueError(
                f"{pair.writer.value} multiplies the product by alpha / rank, and the checkpoint does not store alpha"
            )
        under = math.sqrt(rank) if self.rslora else rank
        shown = f"sqrt({rank})" if self.rslora else f"rank {rank}"
        return alpha / under, f"alpha {alpha:g} ({self.origin}) / {shown}"


def applies(pair: NamedPair) -> bool:
    """Whether the library multiplies the product of this pair by a factor."""
    if pair.writer is Writer.OPENPI:  # models/lora.py: Einsum does, FeedForward._dot does not
        return pair.first.removesuffix("/value").endswith("/lora_a")
    return pair.writer is Writer.QWIX


def read_scaling(source: Source, pairs: Mapping[str, NamedPair], settings: Mapping[str, Any]) -> Scaling:
    """Collect what is known; settings take precedence over files.

    Raises:
        OptionError: a setting is no number, or no pair is multiplied by it.
        CheckpointError: a file is damaged.
    """
    _check(pairs, settings)
    _check_ranks(source, pairs, settings)
    stated = _stated(source)
    alpha, origin = stated.alpha, stated.origin
    if ALPHA in settings:
        alpha, origin = None if settings[ALPHA] == RANK else float(settings[ALPHA]), f"--set {ALPHA}"
        if stated.alpha is not None and stated.alpha != alpha:
            origin += f"; {stated.origin} states {stated.alpha:g}"
    is_rank = settings.get(ALPHA) == RANK
    return Scaling(alpha, bool(settings.get(RSLORA, stated.rslora)), stated.rank, origin, is_rank)


def _check_ranks(source: Source, pairs: Mapping[str, NamedPair], settings: Mapping[str, Any]) -> None:
    """Refuse one alpha for pairs of several ranks: openpi gives PaliGemma and the action expert configurations of their own."""
    if settings.get(ALPHA, RANK) == RANK:
        return
    openpi = [pair for pair in pairs.values() if pair.writer is Writer.OPENPI and applies(pair)]
    ranks = sorted({source.leaves[pair.first].spec.shape[-1] for pair in openpi})
    if len(ranks) > 1:
        problem = f"the LoRA pairs of this tree have the ranks {' and '.join(map(str, ranks))}, and openpi gives each rank an alpha of its own"
        fix = f"--set {ALPHA}={RANK} where alpha equals the rank in both configurations, as in openpi's own"
        path = f"--set {ALPHA}={settings[ALPHA]}"
        raise OptionError(Finding("setting-invalid", problem, path=path, fix=fix))


def _check(pairs: Mapping[str, NamedPair], settings: Mapping[str, Any]) -> None:
    if settings.get(ADAPTER, BASE) != BASE:
        value = settings[ADAPTER]
        path, fix = f"--set {ADAPTER}={value}", "leave it out to have the pairs merged"
        raise OptionError(Finding("setting-invalid", path=path, expected=BASE, got=repr(value), fix=fix))
    for name in (ALPHA, RSLORA):
        if name not in settings:
            continue
        value = settings[name]
        if name == ALPHA and value == RANK and any(map(applies, pairs.values())):
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        expected = "true or false" if name == RSLORA else "a number other than 0"
        if not isinstance(value, bool) if name == RSLORA else not number or value == 0 or not math.isfinite(value):
            fix = f"correct the value of {name}"
            raise OptionError(
                Finding("setting-invalid", path=f"--set {name}={value}", expected=expected, got=repr(value), fix=fix)
            )
        if not any(map(applies, pairs.values())):
            writer = next(iter(pairs.values())).writer.value
            problem = f"the LoRA pairs of this tree are made by {writer}, which multiplies their products by no factor"
            path = f"--set {name}={value}"
            raise OptionError(Finding("setting-has-no-effect", problem, path=path, fix="leave it out"))


def _stated(source: Source) -> Scaling:
    """Read the files next to the checkpoint, or to that of the pairs, that state rank and alpha."""
    beside = source.adapter or source
    for above, file in ((0, PEFT_FILE), (1, PEFT_FILE), (0, ORBAX_FILE), (1, ORBAX_FILE)):
        content = read_beside(beside, file, above) or {}
        if file == ORBAX_FILE:
            custom = content.get("custom_metadata")
            content = custom if isinstance(custom, dict) else {}
            content = content["lora"] if isinstance(content.get("lora"), dict) else content
        alpha, rank = content.get(ALPHA), content.get("r", content.get("lora_rank"))
        if isinstance(alpha, int | float) and not isinstance(alpha, bool) and math.isfinite(alpha) and alpha:
            known = rank if isinstance(rank, int) and not isinstance(rank, bool) and rank > 0 else None
            return Scaling(float(alpha), content.get(RSLORA) is True, known, file)
    return Scaling()
