"""Measure the activation behind a layer while the target's model runs, where no attribute of a module tells it.

The output of the layer is compared, after each activation that a rule can name, with what torch's functions give next, and with the
inputs and outputs of the modules that run next. A declaration that agrees with none of them, where another activation does, is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from convert.core.findings import Finding
from convert.layers.activations import ACTIVATIONS, torch_activation
from convert.numerics.precision import torch_pinned
from convert.references.protocol import Reference
from convert.verify.config.compare import Facts
from convert.verify.config.declared import DeclaredFact
from convert.verify.config.impact import impact_of
from convert.verify.config.same_value import canonical
from convert.verify.sides.evidence import Values
from convert.verify.sides.run_torch import input_tensors, written_state
from convert.writing.written import Written

if TYPE_CHECKING:
    import torch

MODULES = 4  # of one rule that are watched; the others have the same code
VALUES = 16  # with which the output of a layer is compared
FACTORS = 3  # latest outputs by which an activation may be multiplied
SMALLEST = 8  # numbers in an output; fewer do not tell two activations apart
ROUNDING = 256.0  # in units of the last place, of the mean difference
EPS = 2.0**-52  # of float64
TELLING = 1e3  # by how much the activation that is found must be nearer than the declared one


@dataclass
class _Watched:
    """A layer, and how near each activation of its output came to a value behind it.

    Attributes:
        declared: its activation in the rules.
        output: of its first call; None before.
        factors: outputs of other modules with as many numbers.
        errors: activation -> the smallest mean difference, relative to the size of the value.
        compared: number of values that it was compared with.
    """

    declared: str
    output: torch.Tensor | None = None
    factors: list[torch.Tensor] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    compared: int = 0

    def see(self, value: torch.Tensor) -> None:
        """Compare a value with each activation of the output."""
        x = self.output
        if x is None or value.numel() != x.numel() or not value.is_floating_point() or self.compared >= VALUES:
            return
        if self.errors.get(self.declared, 1.0) <= ROUNDING * EPS:
            return
        self.compared += 1
        value = value.detach().double().reshape(-1)
        size = float(value.abs().mean())
        for name in ACTIVATIONS:
            made = torch_activation(name)(x)
            for factor in (None, *self.factors):
                product = made if factor is None else made * factor
                error = float((product - value).abs().mean()) / size if size else 1.0
                self.errors[name] = min(error, self.errors.get(name, 1.0))
        self.factors = [*self.factors[1 - FACTORS :], value]

    def found(self) -> str:
        """Return the name of the activation in float64; empty if none agrees, or if several do."""
        if self.errors.get(self.declared, 1.0) <= ROUNDING * EPS:
            return self.declared
        name = min(self.errors, key=lambda name: self.errors[name], default="")
        clear = self.errors.get(self.declared, 1.0) > TELLING * max(self.errors.get(name, 1.0), EPS)
        return name if name and self.errors[name] <= ROUNDING * EPS and clear else ""


@contextmanager
def watched(module: torch.nn.Module, layers: Mapping[str, _Watched]) -> Iterator[None]:
    """Within this context the layers see what runs behind them."""
    import torch
    from torch.overrides import TorchFunctionMode

    def tensors(given: Any) -> Iterator[torch.Tensor]:
        for value in given if isinstance(given, tuple | list) else (given,):
            if isinstance(value, torch.Tensor):
                yield value

    comparing = False  # what `see` computes is no value of the model

    def show(given: Any, own: _Watched | None = None) -> None:
        nonlocal comparing
        if comparing:
            return
        comparing = True
        for value in tensors(given):
            for layer in layers.values():
                if layer is not own:
                    layer.see(value)
        comparing = False

    def after(own: _Watched | None, out: Any) -> None:
        show(out, own)
        first = next(tensors(out), None)
        if own is None or own.output is not None or first is None:
            return
        if first.is_floating_point() and first.numel() >= SMALLEST:
            own.output = first.detach().double().reshape(-1).clone()

    class Shown(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            show(out)
            return out

    handles = []
    try:
        for name, inner in module.named_modules():
            own = layers.get(name)
            handles.append(inner.register_forward_pre_hook(lambda _, args: show(args)))
            handles.append(inner.register_forward_hook(lambda _, args, out, own=own: after(own, out)))
        with Shown():
            yield
    finally:
        for handle in handles:
            handle.remove()


def with_measured(
    facts: Facts, written: Written, reference: Reference, inputs: Values, *, device: str = "cpu"
) -> Facts:
    """Run the target's model in float64 and compare the activations that it computes with those that the rules declare.

    Args:
        facts: those whose `unread` lists activations that no attribute of the target tells.

    Returns:
        A finding for each wrong declaration; what is still unread.
    """
    started = time.monotonic()
    declared = [fact for fact in facts.unread if fact.name == "activation" and fact.layer is not None]
    if not declared:
        return replace(facts, findings=(), notes=(), seconds=0.0)
    outcomes = [_outcome(fact, modules) for fact, modules in _run(declared, written, reference, inputs, device)]
    findings = tuple(finding for finding, _ in outcomes if finding is not None)
    known = [fact for fact, (_, measured) in zip(declared, outcomes, strict=True) if measured]
    unread = tuple(fact for fact in facts.unread if fact not in known)
    return Facts(findings, (), time.monotonic() - started, unread, facts.constants)


def _run(
    declared: Sequence[DeclaredFact], written: Written, reference: Reference, inputs: Values, device: str
) -> list[tuple[DeclaredFact, dict[str, _Watched]]]:
    """Return for each fact what the first of its layers saw."""
    import torch

    from convert.numerics.lift_torch import lifted

    with torch_pinned(), torch.no_grad(), lifted():
        module = reference.build(written_state(written, device)).to(device)
        names = [name for name, _ in module.named_modules()]
        watching = []
        for fact in declared:
            matching = [name for name in names if fact.layer is not None and fact.layer.match(name) is not None]
            watching.append((fact, {name: _Watched(str(canonical(fact.value))) for name in matching[:MODULES]}))
        layers = {name: layer for _, modules in watching for name, layer in modules.items()}
        with watched(module, layers):
            reference.run(module, input_tensors(inputs, "float64", device))
    return watching


def _outcome(fact: DeclaredFact, modules: Mapping[str, _Watched]) -> tuple[Finding | None, bool]:
    """Return the finding of a wrong declaration, and whether the activation was measured."""
    found = {name: kind for name, layer in modules.items() if (kind := layer.found())}
    if not found or canonical(fact.value) in found.values():
        return None, bool(found)
    return _wrong(fact, *next(iter(found.items()))), True


def _wrong(fact: DeclaredFact, name: str, computed: str) -> Finding:
    impact = impact_of("activation", canonical(fact.value), computed, {}, 0)
    return Finding(
        "fact-differs",
        "the rules declare another activation than both models compute" + (f" ({impact.text})" if impact.text else ""),
        fact.at,
        name,
        str(fact.value),
        f"{computed} (measured behind {name})",
        f"declare {computed} in the rule",
        {
            "fact": "activation",
            "declared": fact.value,
            "configured": computed,
            "where": f"measured behind {name}",
            "impact": dict(impact.data),
            "diagnosis": "activation",
        },
    )
