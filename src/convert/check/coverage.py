"""Level 1: the names, shapes and dtypes in the file, against the plan and against the target's own state_dict."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from convert.check.directory import directory_findings
from convert.check.report import Finding, LevelReport, Verdict
from convert.check.written import Written
from convert.errors import OwnCodeError, UnavailableError
from convert.factories import own_code
from convert.fields import nearest
from convert.plan import Plan
from convert.spec import TensorSpec

if TYPE_CHECKING:
    from convert.references.protocol import Reference


def check_coverage(
    plan: Plan, written: Written, reference: Reference | str, *, factory: str | None = None
) -> LevelReport:
    """Every tensor that the plan makes is there, and no other; upstream's module, if it can be had, accepts the names.

    Args:
        reference: builds upstream's module; or the reason why there is none.
        factory: ``module:function`` that made the reference, if it is the user's own.
    """
    started = time.monotonic()
    findings = [*_against_plan(plan, written.specs), *directory_findings(plan, written)]
    notes = [f"{len(written.tensors)} tensors against {len(plan.steps)} of the plan"]
    if not isinstance(reference, str):
        try:
            with own_code(factory):
                refused = _strict_load(written.specs, reference, own=factory is not None)
        except ImportError as error:
            reference = f"{error.name} is not installed"
        except UnavailableError as error:
            reference = str(error)
        except OwnCodeError as error:  # on the meta device some code cannot run; the model level has the weights
            reference = error.said
        else:
            notes.append("the target's own module, on the meta device, was asked with strict=True")
            findings += [Finding(f"the target's module does not accept the file: {refused}")] if refused else []
    if isinstance(reference, str):
        notes.append(f"the target's own module was not asked: {reference}")
    verdict = Verdict.FAILED if findings else Verdict.PASSED
    return LevelReport("coverage", verdict, "", tuple(findings), notes=tuple(notes), seconds=time.monotonic() - started)


def _against_plan(plan: Plan, specs: Mapping[str, TensorSpec]) -> list[Finding]:
    steps = {step.name: step for step in plan.steps}
    missing = [name for name in steps if name not in specs]
    extra = [name for name in specs if name not in steps]
    findings = []
    for name, step in steps.items():
        leaves = ", ".join(part.leaf for part in step.parts)
        if name not in specs:
            findings.append(
                Finding(
                    f"{name} ({step.spec}, from {leaves}) is not in the file{nearest(name, extra)}",
                    name,
                    step.rule.line_only,
                    {"diagnosis": "not in the file"},
                )
            )
        elif specs[name] != step.spec:
            findings.append(
                Finding(
                    f"{name} is {specs[name]} in the file and {step.spec} by the rules (from {leaves})",
                    name,
                    step.rule.line_only,
                    {"diagnosis": "another shape or dtype"},
                )
            )
    findings += [
        Finding(
            f"{name} ({specs[name]}) is in the file, and no rule makes it{nearest(name, missing)}",
            name,
            data={"diagnosis": "no rule makes it"},
        )
        for name in extra
    ]
    return findings


def _strict_load(specs: Mapping[str, TensorSpec], reference: Reference, *, own: bool) -> str:
    """What upstream's module says to these names and shapes; empty when it takes them.

    Args:
        own: the user's code builds the module: what that raises is not about the file, but for what ``load_state_dict`` does.
    """
    import torch

    with torch.device("meta"):
        state = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
        try:
            reference.build(state)
        except (ImportError, UnavailableError):
            raise
        except Exception as error:
            if own and "load_state_dict" not in {frame.name for frame in traceback.extract_tb(error.__traceback__)}:
                raise
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""
