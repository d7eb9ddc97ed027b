"""Level 1: compare the names, shapes and dtypes in the file with the plan and with the state_dict of the target."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace

from convert.core.errors import UnavailableError, UserCodeError
from convert.core.findings import Finding
from convert.core.similarity import ClosestNames
from convert.core.tensor_spec import TensorSpec, is_float
from convert.core.user_code import user_code_errors
from convert.layers.base import Step
from convert.layers.norm.group_batch import COUNTER
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.verify.coverage.hf_directory import directory_findings
from convert.verify.coverage.names import MIN_TENSORS, find_prefix_change
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.weights.tied import UNTIED, compare_tensors
from convert.writing.written import Written

# Ends of the names under which a table is stored again: a tied head, the tables of an encoder and a decoder.
COPIES = ("lm_head.weight", "predictions.decoder.weight", "proj_out.weight", "embed_tokens.weight")

WITH_WEIGHTS = "this is no fault: code that reads numbers while the module is built does not run on the meta device, and the model level loads the module with the weights"


def check_coverage(
    plan: Plan, written: Written, reference: Reference | str, *, factory: str | None = None
) -> LevelReport:
    """Check that the file holds every tensor of the plan and no other, and that the target's module loads it strictly.

    Args:
        reference: builds the target's module; the reason, when there is none.
        factory: ``module:function`` that built the reference, when it is user code.
    """
    started = time.monotonic()
    findings, notes = _compare_with_plan(plan, written)
    findings += directory_findings(plan, written)
    notes.insert(0, f"{len(written.tensors)} tensors in the file, {len(plan.steps)} in the plan")
    if not isinstance(reference, str):
        try:
            with user_code_errors(factory):
                refusal, counters = _load_strictly(written.specs, reference, user_code=factory is not None)
        except ImportError as error:
            reference = f"{error.name} is not installed"
        except UnavailableError as error:
            reference = str(error)
        except UserCodeError as error:  # some code cannot run on the meta device; the model level has the weights
            reference = str(replace(error.findings[0], fix=WITH_WEIGHTS))
        else:
            notes.append("load_state_dict(strict=True) of the target's module was run on the meta device")
            if refusal:
                problem = "load_state_dict(strict=True) of the target's module rejects the file"
                findings.append(Finding("module-rejects-file", problem, path=str(written.path), got=refusal))
            planned = {step.name for step in plan.steps}
            notes += [_without_counter(name) for name in counters if name not in planned]
    if isinstance(reference, str):
        notes.append(f"load_state_dict of the target's module was not run: {reference}")
    verdict = Verdict.FAILED if findings else Verdict.PASSED
    return LevelReport("coverage", verdict, "", tuple(findings), notes=tuple(notes), seconds=time.monotonic() - started)


def _compare_with_plan(plan: Plan, written: Written) -> tuple[list[Finding], list[str]]:
    """Return findings and notes. The tensors of a missing shard are not listed: the shard is one finding."""
    lost = {name for names in written.missing.values() for name in names}
    steps = {step.name: step for step in plan.steps if step.name not in lost}
    specs: Mapping[str, TensorSpec] = written.specs
    findings: list[Finding] = []
    missing, extra = _name_differences(steps, specs)
    if (prefixes := find_prefix_change(missing, extra)) is not None:
        ours, theirs = prefixes
        renamed = {name: _rename(name, theirs, ours) for name in extra}
        moved = {name: new for name, new in renamed.items() if new in steps and new not in specs}
        specs = {moved.get(name, name): spec for name, spec in specs.items()}
        findings.append(_prefix_finding(ours, theirs, list(moved.items()), len(steps)))
        missing, extra = _name_differences(steps, specs)
    other_dtype = _dtype_finding(plan, specs)
    findings += [other_dtype] if other_dtype is not None else []
    explained = other_dtype.data["tensors"] if other_dtype is not None else ()
    unexpected, unwritten = ClosestNames(extra), ClosestNames(missing)
    for name, step in steps.items():
        leaves = ", ".join(part.leaf for part in step.parts) or step.arithmetic
        spec, rule, expected = specs.get(name), step.rule.line_only, f"{step.spec} (from {leaves})"
        if spec is None:
            fix, data = unexpected.did_you_mean(name), {"diagnosis": "not in the file"}
            findings.append(Finding("tensor-missing", "", rule, name, expected, "no such tensor", fix, data))
        elif spec != step.spec and name not in explained:
            data = {"diagnosis": "another shape or dtype"}
            findings.append(Finding("tensor-spec-differs", "", rule, name, expected, str(spec), data=data))
    copies, harmless = _compare_copies(plan, written, extra)
    findings += copies
    known = {finding.path for finding in copies} | set(harmless)
    findings += [
        Finding(
            "tensor-unexpected",
            "no rule makes this tensor",
            path=name,
            got=str(specs[name]),
            fix=unwritten.did_you_mean(name),
            data={"diagnosis": "no rule makes it"},
        )
        for name in extra
        if name not in known
    ]
    return findings, list(harmless.values())


def _name_differences(steps: Mapping[str, Step], specs: Mapping[str, TensorSpec]) -> tuple[list[str], list[str]]:
    """Return the names that the file lacks, and the names that the plan lacks."""
    return [name for name in steps if name not in specs], [name for name in specs if name not in steps]


def _rename(name: str, theirs: str, ours: str) -> str:
    return ours + name[len(theirs) :] if name.startswith(theirs) else name


def _prefix_finding(ours: str, theirs: str, moved: list[tuple[str, str]], total: int) -> Finding:
    name, new = moved[0]
    return Finding(
        "prefix-differs",
        f"the names of {len(moved)} of {total} tensors have another prefix",
        expected=f"prefix {ours!r} ({new})",
        got=f"prefix {theirs!r} ({name})",
        fix="rename them, or give with --model the rules that write the names of this class",
        data={"diagnosis": "another prefix", "theirs": theirs, "ours": ours, "tensors": len(moved)},
    )


def _dtype_finding(plan: Plan, specs: Mapping[str, TensorSpec]) -> Finding | None:
    """Report all tensors in one other floating-point dtype as one finding: published files often choose one dtype."""
    planned = {step.name: step.spec for step in plan.steps if step.parts and is_float(step.spec.dtype)}
    dtypes = {name: specs[name].dtype for name in planned if name in specs and specs[name].shape == planned[name].shape}
    other = sorted(name for name, dtype in dtypes.items() if dtype != planned[name].dtype)
    if len(other) < MIN_TENSORS or len(set(dtypes.values())) != 1 or not is_float(dtype := dtypes[other[0]]):
        return None
    return Finding(
        "dtype-differs",
        f"all {len(dtypes)} floating-point tensors have one dtype, which is not that of the plan",
        expected=f"{' and '.join(sorted({planned[name].dtype for name in other}))} for {len(other)} of them",
        got=dtype,
        fix=f"if that is intended, check with --dtype {dtype}",
        data={"diagnosis": "another dtype", "dtype": dtype, "tensors": other},
    )


def _compare_copies(plan: Plan, written: Written, extra: list[str]) -> tuple[list[Finding], dict[str, str]]:
    """Compare further copies of an embedding table, such as a tied head, with the table.

    transformers 5.23 ties the two where they are equal, and keeps them apart where they differ (``tie_weights``).

    Returns:
        Findings for copies that differ, and a note for each copy that is equal.
    """
    tables = [step for step in plan.steps if step.kind_name == "embedding" and step.name in written.specs]
    findings, notes = [], {}
    for name in (name for name in extra if name.endswith(COPIES)):
        candidates = [step for step in tables if written.specs[step.name] == written.specs[name]]
        if not candidates:
            continue
        table = max(candidates, key=lambda step: step.spec.size)
        count, size = compare_tensors(written.read(name), written.read(table.name))
        if not count:
            notes[name] = f"{name} equals {table.name} bit for bit: a second copy, which is harmless"
            continue
        findings.append(
            Finding(
                "tied-weights-differ",
                f"{UNTIED}: transformers does not tie the two then, and computes with {name}",
                table.rule.line_only,
                name,
                expected=f"the values of {table.name}, to which it is tied",
                got=f"{count} of {table.spec.size} values differ, by at most {size:.1e}",
                fix="remove it, or set tie_word_embeddings to false if the source has a separate head",
                data={"diagnosis": UNTIED, "values": count, "max_abs": size, "tied_to": table.name},
            )
        )
    return findings, notes


def _without_counter(name: str) -> str:
    return (
        f"the file has no {name}, the counter of a BatchNorm: load_state_dict(strict=True) accepts a plain dict without it, but no "
        f'state_dict with the versions of its layers; a rule writes it: `constant: {name}`, with `value: 0`, `axes: ""` and `dtype: int64`'
    )


def _load_strictly(
    specs: Mapping[str, TensorSpec], reference: Reference, *, user_code: bool
) -> tuple[str, Sequence[str]]:
    """Load tensors of these names and shapes into the target's module.

    Args:
        user_code: the user's code builds the module: only an error of ``load_state_dict`` is about the file.

    Returns:
        Its error, empty when it accepts them; and the counters of BatchNorms that it does without.
    """
    import torch

    with torch.device("meta"):
        state = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
        try:
            module = reference.build(state)
        except (ImportError, UnavailableError):
            raise
        except Exception as error:
            functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
            if user_code and "load_state_dict" not in functions:
                raise
            return f"{type(error).__name__}: {' '.join(str(error).split())}", ()
    own = module.state_dict() if isinstance(module, torch.nn.Module) else {}
    counters = [name for name in own if name.endswith(f".{COUNTER}") and name not in specs]
    return "", [name for name in counters if f"{name.removesuffix(COUNTER)}running_mean" in specs]
