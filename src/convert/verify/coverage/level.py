"""Level 1: the names, shapes and dtypes in the file, against the plan and against the target's own state_dict."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

from convert.core.errors import UnavailableError, UserCodeError
from convert.core.findings import Finding
from convert.core.ops import is_float
from convert.core.similarity import ClosestNames
from convert.core.tensor_spec import TensorSpec
from convert.core.user_code import user_code_errors
from convert.layers.base import Step
from convert.planning.plan import Plan
from convert.verify.coverage.hf_directory import directory_findings
from convert.verify.coverage.names import FEWEST, other_prefix
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.weights.tied import UNTIED, apart
from convert.verify.written import Written

if TYPE_CHECKING:
    from convert.references.protocol import Reference

# Endings of the names under which a table is stored a second time: a tied head, the tables of an encoder and a decoder.
COPIES = ("lm_head.weight", "predictions.decoder.weight", "proj_out.weight", "embed_tokens.weight")


def check_coverage(
    plan: Plan, written: Written, reference: Reference | str, *, factory: str | None = None
) -> LevelReport:
    """Every tensor that the plan makes is there, and no other; upstream's module, if it can be had, accepts the names.

    Args:
        reference: builds upstream's module; or the reason why there is none.
        factory: ``module:function`` that made the reference, if it is the user's own.
    """
    started = time.monotonic()
    findings, notes = _against_plan(plan, written)
    findings += directory_findings(plan, written)
    notes.insert(0, f"{len(written.tensors)} tensors against {len(plan.steps)} of the plan")
    if not isinstance(reference, str):
        try:
            with user_code_errors(factory):
                refused = _strict_load(written.specs, reference, own=factory is not None)
        except ImportError as error:
            reference = f"{error.name} is not installed"
        except UnavailableError as error:
            reference = str(error)
        except UserCodeError as error:  # on the meta device some code cannot run; the model level has the weights
            reference = error.said
        else:
            notes.append("the target's own module, on the meta device, was asked with strict=True")
            findings += (
                [Finding("module-rejects-file", f"the target's module does not accept the file: {refused}")]
                if refused
                else []
            )
    if isinstance(reference, str):
        notes.append(f"the target's own module was not asked: {reference}")
    verdict = Verdict.FAILED if findings else Verdict.PASSED
    return LevelReport("coverage", verdict, "", tuple(findings), notes=tuple(notes), seconds=time.monotonic() - started)


def _against_plan(plan: Plan, written: Written) -> tuple[list[Finding], list[str]]:
    """Findings and notes."""
    lost = {name for names in written.missing.values() for name in names}  # with their file, which is one finding
    steps = {step.name: step for step in plan.steps if step.name not in lost}
    specs: Mapping[str, TensorSpec] = written.specs
    findings: list[Finding] = []
    missing, extra = _unlike(steps, specs)
    if (prefixes := other_prefix(missing, extra)) is not None:
        ours, theirs = prefixes
        known = {name: _renamed(name, theirs, ours) for name in extra}
        moved = {name: new for name, new in known.items() if new in steps and new not in specs}
        specs = {moved.get(name, name): spec for name, spec in specs.items()}
        findings.append(_prefixed(ours, theirs, list(moved.items()), len(steps)))
        missing, extra = _unlike(steps, specs)
    narrow = _all_narrow(plan, specs)
    findings += [narrow] if narrow is not None else []
    near_extra, near_missing = ClosestNames(extra), ClosestNames(missing)
    for name, step in steps.items():
        leaves = ", ".join(part.leaf for part in step.parts) or step.arithmetic
        if name not in specs:
            findings.append(
                Finding(
                    "tensor-missing",
                    f"{name} ({step.spec}, from {leaves}) is not in the file",
                    fix=near_extra.did_you_mean(name),
                    rule=step.rule.line_only,
                    path=name,
                    data={"diagnosis": "not in the file"},
                )
            )
        elif specs[name] != step.spec and not (narrow is not None and name in narrow.data["tensors"]):
            findings.append(
                Finding(
                    "tensor-spec-differs",
                    f"{name} is {specs[name]} in the file and {step.spec} by the rules (from {leaves})",
                    rule=step.rule.line_only,
                    path=name,
                    data={"diagnosis": "another shape or dtype"},
                )
            )
    copies, notes = _copies(plan, written, extra)
    findings += copies
    said = {finding.path for finding in copies} | {name for name, _ in notes}
    findings += [
        Finding(
            "tensor-unexpected",
            f"{name} ({specs[name]}) is in the file, and no rule makes it",
            fix=near_missing.did_you_mean(name),
            path=name,
            data={"diagnosis": "no rule makes it"},
        )
        for name in extra
        if name not in said
    ]
    return findings, [text for _, text in notes]


def _unlike(steps: Mapping[str, Step], specs: Mapping[str, TensorSpec]) -> tuple[list[str], list[str]]:
    """Names that the file lacks, and those that it has beyond the plan."""
    return [name for name in steps if name not in specs], [name for name in specs if name not in steps]


def _renamed(name: str, theirs: str, ours: str) -> str:
    return ours + name[len(theirs) :] if name.startswith(theirs) else name


def _prefixed(ours: str, theirs: str, moved: list[tuple[str, str]], total: int) -> Finding:
    name, new = moved[0]
    how = (
        f"have {theirs!r} before the name that the rules give"
        if not ours
        else f"lack {ours!r} at the start"
        if not theirs
        else f"begin with {theirs!r} where the rules have {ours!r}"
    )
    return Finding(
        "prefix-differs",
        f"the names of {len(moved)} tensors (of {total} by the rules) {how}: {name} is {new}; rename them, or name rules with "
        "--model that write names for this class",
        data={"diagnosis": "another prefix", "theirs": theirs, "ours": ours, "tensors": len(moved)},
    )


def _all_narrow(plan: Plan, specs: Mapping[str, TensorSpec]) -> Finding | None:
    """All tensors in one other floating-point dtype, as published files often are: a choice, not a mistake of each."""
    made = {step.name: step.spec for step in plan.steps if step.parts and is_float(step.spec.dtype)}
    held = {name: specs[name].dtype for name in made if name in specs and specs[name].shape == made[name].shape}
    other = sorted(name for name, dtype in held.items() if dtype != made[name].dtype)
    dtypes = set(held.values())
    if len(other) < FEWEST or len(dtypes) != 1 or not is_float(dtype := dtypes.pop()):
        return None
    by_rules = " and ".join(sorted({made[name].dtype for name in other}))
    return Finding(
        "dtype-differs",
        f"all {len(held)} floating-point tensors are {dtype}, where the rules make {by_rules} of {len(other)}: check with "
        f"--dtype {dtype}, if that was meant",
        data={"diagnosis": "another dtype", "dtype": dtype, "tensors": other},
    )


def _copies(plan: Plan, written: Written, extra: list[str]) -> tuple[list[Finding], list[tuple[str, str]]]:
    """A head, or another table, that the model shares with the embedding, and that the file holds beside it.

    transformers 5.23 ties the two where both are equal, and leaves them apart where they differ (``tie_weights``).
    """
    tables = [step for step in plan.steps if step.word == "embedding" and step.name in written.specs]
    findings, notes = [], []
    for name in (name for name in extra if name.endswith(COPIES)):
        alike = [step for step in tables if written.specs[step.name] == written.specs[name]]
        if not alike:
            continue
        table = max(alike, key=lambda step: step.spec.size)
        count, size = apart(written.read(name), written.read(table.name))
        if not count:
            notes.append((name, f"{name} equals {table.name} bit for bit: it is stored twice, and does no harm"))
            continue
        findings.append(
            Finding(
                "tied-weights-differ",
                f"{name} is in the file, and differs from {table.name}, which the rules make of the same leaf and to which it is "
                f"tied, by {size:.1e} at most ({count} of {table.spec.size} values): transformers keeps the two apart then, and "
                f"computes with {name}; remove it, or set tie_word_embeddings to false if the source has a head of its own",
                rule=table.rule.line_only,
                path=name,
                data={"diagnosis": UNTIED, "values": count, "max_abs": size},
            )
        )
    return findings, notes


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
