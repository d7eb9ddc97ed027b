"""The factor of a LoRA product: from the library's code, from files next to the checkpoint, or from ``--set``."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from convert.checkpoints.source import Source
from convert.core.errors import OptionError, PlanError
from convert.core.findings import Finding
from convert.planning.adapters.names import NamedPair, Writer
from convert.planning.adapters.peft_config import PeftSettings, ends_with
from convert.planning.adapters.stated import PEFT_FILE, Statement, contradiction, read_statements

ALPHA, RSLORA = "lora_alpha", "use_rslora"  # names of --set; those of PEFT's adapter_config.json
ADAPTER, BASE = "adapter", "base"  # --set adapter=base: the weights without the products
SETTINGS = (ALPHA, RSLORA, ADAPTER)
RANK = "rank"  # --set lora_alpha=rank: alpha is the rank of each pair, as in openpi's configurations, and the factor 1


@dataclass(frozen=True)
class Scaling:
    """What is known of the factor.

    Attributes:
        alpha: the product is multiplied by ``alpha / rank``; None: unknown.
        rslora: by ``alpha / sqrt(rank)`` instead.
        origin: where alpha is from, for people.
        is_rank: whether alpha is the rank of each pair.
        by_module: the settings whose patterns give modules an alpha of their own; None: there are none, or the user gave alpha.
        statements: what the files next to the checkpoint state.
    """

    alpha: float | None = None
    rslora: bool = False
    origin: str = ""
    is_rank: bool = False
    by_module: PeftSettings | None = None
    statements: tuple[Statement, ...] = ()

    @property
    def needs_modules(self) -> bool:
        """Whether it differs from module to module."""
        return self.by_module is not None or any(s.settings.ranks for s in self.statements)

    def factor(self, pair: NamedPair, rank: int, modules: Collection[str] = ()) -> tuple[float, str]:
        """Return the factor of a pair, and why it is that.

        Args:
            modules: of the target, to whose weights the product is added.

        Raises:
            ValueError: it is unknown, or the modules have several.
        """
        if not applies(pair):
            return 1.0, f"{pair.writer.value} multiplies it by no factor"
        alpha = float(rank) if self.is_rank else self._alpha(modules)
        if alpha is None:
            raise ValueError(
                f"{pair.writer.value} multiplies the product by alpha / rank, and the checkpoint does not store alpha"
            )
        under = math.sqrt(rank) if self.rslora else rank
        shown = f"sqrt({rank})" if self.rslora else f"rank {rank}"
        return alpha / under, f"alpha {alpha:g} ({self.origin}) / {shown}"

    def _alpha(self, modules: Collection[str]) -> float | None:
        if self.by_module is None or not modules:
            return self.alpha
        alphas = {module: self.by_module.alpha_of(module) for module in modules}
        if len(set(alphas.values())) > 1:
            each = ", ".join(f"{alpha:g} of {module}" for module, alpha in alphas.items() if alpha is not None)
            raise ValueError(f"alpha_pattern gives the modules that share this leaf several alphas: {each}")
        return next(iter(alphas.values()))

    def unknown_patterns(self, tensors: Collection[str]) -> Iterator[Finding]:
        """Yield the patterns that name no module of the target: PEFT would ignore them."""
        modules = [name.removesuffix(".weight") for name in tensors]
        for statement in self.statements:
            for key, pattern in statement.settings.patterns:
                if not any(ends_with(pattern, module) for module in modules):
                    problem = f"{key} names a module that the target does not have"
                    fix = "name modules of the PyTorch model, as PEFT does"
                    yield Finding(
                        "sidecar-invalid",
                        problem,
                        path=str(statement.file),
                        expected=f"names such as {modules[0]}",
                        got=pattern,
                        fix=fix,
                    )

    def other_rank(self, rank: int, modules: Collection[str]) -> tuple[Statement, int] | None:
        """Return a file that states another rank of a pair, and the rank."""
        for statement in self.statements:
            settings = statement.settings
            ranks = (
                {settings.rank_of(module) for module in modules}
                if modules
                else set()
                if settings.ranks
                else {settings.rank}
            )
            if other := next((stated for stated in ranks if stated not in (None, rank)), None):
                return statement, other
        return None


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
        PlanError: a file says that more is computed than a product, or two contradict each other.
    """
    _check(pairs, settings)
    if settings.get(ADAPTER) == BASE:  # no product is added, so what the files say of it does not matter
        return Scaling()
    statements = read_statements(source)
    rslora = settings.get(RSLORA)
    if rslora is None:
        stated = [s.settings.rslora if s.states_rslora else None for s in statements]
        rslora = bool(contradiction(statements, RSLORA, stated, f"--set {RSLORA}=..."))
    if ALPHA in settings:
        is_rank = settings[ALPHA] == RANK
        alpha, origin = None if is_rank else float(settings[ALPHA]), f"--set {ALPHA}"
        others = {
            f"{s.file.name} states {s.settings.alpha:g}" for s in statements if s.settings.alpha not in (None, alpha)
        }
        scaling = Scaling(alpha, rslora, "; ".join((origin, *sorted(others))), is_rank, None, tuple(statements))
    else:
        said, stating = f"--set {ALPHA}=...", [s for s in statements if s.settings.alpha is not None]
        alpha = contradiction(stating, ALPHA, [s.settings.alpha for s in stating], said)
        patterns = contradiction(stating, "alpha_pattern", [s.settings.alphas for s in stating], said)
        origin = stating[0].file.name if stating else ""
        scaling = Scaling(alpha, rslora, origin, False, stating[0].settings if patterns else None, tuple(statements))
    _check_ranks(source, pairs, scaling)
    _check_effect(pairs, scaling)
    return scaling


def _check_ranks(source: Source, pairs: Mapping[str, NamedPair], scaling: Scaling) -> None:
    """Refuse one alpha for pairs of several ranks: openpi gives PaliGemma and the action expert configurations of their own."""
    if scaling.alpha is None or scaling.by_module is not None:
        return
    openpi = [pair for pair in pairs.values() if pair.writer is Writer.OPENPI and applies(pair)]
    ranks = sorted({source.leaves[pair.first].spec.shape[-1] for pair in openpi})
    if len(ranks) > 1:
        problem = f"the LoRA pairs of this tree have the ranks {' and '.join(map(str, ranks))}, and openpi gives each rank an alpha of its own"
        fix = f"--set {ALPHA}={RANK} where alpha equals the rank in both configurations, as in openpi's own; else give the modules of one their own with alpha_pattern of {PEFT_FILE}"
        raise OptionError(Finding("setting-invalid", problem, path=scaling.origin, expected="an alpha for each rank", got=f"{scaling.alpha:g}", fix=fix))  # fmt: skip


def _check_effect(pairs: Mapping[str, NamedPair], scaling: Scaling) -> None:
    """Refuse a file with another factor than 1 for pairs of a library that has none."""
    if scaling.alpha is None or any(map(applies, pairs.values())):
        return
    for statement in scaling.statements:
        settings, writer = statement.settings, next(iter(pairs.values())).writer.value
        if settings.alpha is not None and (settings.alpha != settings.rank or settings.rslora or settings.alphas):
            problem = f"the LoRA pairs of this tree are made by {writer}, which multiplies their products by no factor"
            got = f"alpha {settings.alpha:g} and rank {settings.rank or 'not stated'}"
            fix = "give an alpha that is the rank, or move the file elsewhere"
            raise PlanError(Finding("setting-has-no-effect", problem, path=str(statement.file), expected="no alpha, or that of the factor 1", got=got, fix=fix))  # fmt: skip


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
