"""Runs the fault catalogue: every fault of `faults.planted` goes through `convert check`, as a user would run it.

``PYTHONPATH=tests python -m faults.catalogue [CASE ...]`` writes the tables of docs/explanation/faults.md, which are CSV files,
from such a run.
"""

from __future__ import annotations

import csv
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import convert
from convert.references.timesfm import timesfm_1, timesfm_2p5
from convert.rules import library
from convert.rules.file import RuleFile
from convert.verify.report.report import Report
from convert.verify.run import check
from convert.verify.sides import run_jax
from convert.verify.sides.evidence import Evidence
from faults import applies, flax_cases
from faults.own_models import OWN
from faults.planted import FAULTS, Fault
from faults.plants import InRule, InSettings, InSidecar, Plant
from support import goldens, upstream
from support.paths import DOCS

TABLE, BY_FAMILY = (DOCS / "explanation" / name for name in ("faults.csv", "faults-by-family.csv"))
COLUMNS = ("fault", "planted in", "model", "caught at", "localised to", "diagnosed as", "error before", "error after")
CASES = [(case, to) for case in ("timesfm-1.0", "timesfm-2.0", "timesfm-2.5") for to in ("timesfm", "transformers")]
CASES += [(case, "torch") for case in OWN]
SETTINGS: dict[str, dict[str, Any]] = {
    "timesfm-1.0": {"use_positional_embedding": True, "context_length": 512},
    "timesfm-2.0": {"use_positional_embedding": False, "context_length": 512},
    "timesfm-2.5": {},
    "recurrentgemma": {"attention_window": 5, "logits_soft_cap": 3.0},
    # Soft caps and scales that matter at this size, and are not 1/sqrt(H); rows of the table that have no token.
    "gemma1-mha": {"vocab_size": 256, "context_length": 1024},
    "gemma2-2b": {"vocab_size": 250, "sliding_window": 8, "query_pre_attn_scalar": 5},
    "gemma3": {
        "vocab_size": 250,
        "sliding_window": 8,
        "query_pre_attn_scalar": 20,
        "rope_factor_global": 8.0,
        "context_length": 1024,
    },
}
# The models of transformers' flax classes have a config.json beside their checkpoints.
SETTINGS |= {
    case: {} for case in ("bert", "gpt2", "t5", "t5-v1.1", "whisper", "llama", "mistral", "gemma-flax", "dinov2")
}
_EVIDENCE: dict[tuple[Any, ...], Evidence] = {}


@contextmanager
def jax_once() -> Iterator[None]:
    """Within this context the JAX side runs once for each checkpoint, target, precision and seed."""
    live = run_jax.live_evidence

    def kept(plan: Any, reference: Any, *, precision: str = "float32", seed: int = 0) -> Evidence:
        side = getattr(reference.jax, "__name__", "")
        key = (str(plan.source.path), plan.target, str(sorted(plan.settings.items())), precision, seed, side)
        if key not in _EVIDENCE:
            _EVIDENCE[key] = live(plan, reference, precision=precision, seed=seed)
        return _EVIDENCE[key]

    with mock.patch.object(run_jax, "live_evidence", kept), mock.patch.object(timesfm_2p5, "_flax", _flax_once):
        yield


_FLAX = timesfm_2p5._flax
_TRACED: dict[tuple[Any, ...], Any] = {}


def _flax_once(plan: convert.Plan) -> Any:
    """JAX's side, which takes a third of a second to trace."""
    key = (plan.target, *sorted(plan.sizes.items()))
    if key not in _TRACED:
        _TRACED[key] = _FLAX(plan)
    return _TRACED[key]


_LOAD = library.load_models


@cache
def _parsed(path: str, text: str) -> tuple[RuleFile, ...]:
    return _LOAD(path)


def rules_once() -> AbstractContextManager[Any]:
    """Within this context a rule file's text is parsed once."""
    return mock.patch.object(library, "load_models", lambda path: _parsed(str(path), Path(path).read_text()))


@contextmanager
def upstream_found() -> Iterator[None]:
    """Within this context, timesfm 1.3 is where the tests keep it."""
    folder = str(Path(upstream.timesfm_1().__file__ or "").parents[1])
    with mock.patch.dict(os.environ, {timesfm_1.VARIABLE: folder}):
        yield


def _upstream_of(case: str) -> AbstractContextManager[Any]:
    """What a case needs that is not installed."""
    return nullcontext() if case in OWN or case in flax_cases.CASES else upstream_found()


@contextmanager
def one_thread() -> Iterator[None]:
    """Within this context torch uses one thread: on models this small, more of them wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def converted(case: str, to: str, dtype: str | None, name: str) -> dict[Path, bytes]:
    """A golden, converted without any fault: the files of the output of this name."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as made:
        rules, out = Plant().rules(case, Path(folder)), Path(made, name)
        convert.convert(rules, checkpoint_of(case), out, to=to, dtype=dtype, settings=SETTINGS.get(case, {}))
        return {file.relative_to(made): file.read_bytes() for file in Path(made).rglob("*") if file.is_file()}


def checkpoint_of(case: str) -> Path:
    """A golden, or the checkpoint of a model with rules of its own."""
    if case in flax_cases.CASES:
        return flax_cases.checkpoint(case)
    return OWN[case].checkpoint() if case in OWN else goldens.checkpoint(case)


def _jax_side(case: str) -> dict[str, Any]:
    """What a check needs to know of the JAX side that the rules do not name."""
    if case in flax_cases.CASES:
        return {"recorded": flax_cases.recording(case)}
    return {"reference": OWN[case].reference} if case in OWN else {}


def run(case: str, to: str, plant: Plant | None = None, *, dtype: str | None = None, **options: Any) -> Report:
    """Converts a golden with a fault in it, and checks the outcome."""
    plant = plant or Plant()
    options = {**_jax_side(case), **options, **plant.options}
    name = "out" if plant.directory or case in flax_cases.CASES else "out.safetensors"
    with tempfile.TemporaryDirectory() as folder, _upstream_of(case), one_thread(), rules_once():
        rules, out = plant.rules(case, Path(folder)), Path(folder, name)
        checkpoint = plant.checkpoint(checkpoint_of(case), Path(folder))
        if not isinstance(plant, InRule | InSidecar) and type(plant) is not InSettings:
            for file, data in converted(case, to, dtype, name).items():
                (Path(folder) / file).parent.mkdir(exist_ok=True)
                (Path(folder) / file).write_bytes(data)
        else:
            given = plant.settings if isinstance(plant, InSettings) else {}
            convert.convert(rules, checkpoint, out, to=to, dtype=dtype, settings={**SETTINGS.get(case, {}), **given})
        plant.file(out)
        with plant.code(case):
            if plant.jax:
                return check(out, checkpoint, model=rules, **options)
            with jax_once():
                return check(out, checkpoint, model=rules, **options)


@dataclass(frozen=True)
class Outcome:
    """What a check says about a fault.

    Attributes:
        levels: that failed, cheapest first; ``facts`` where nothing failed, and ``--require model`` names a fact.
        at: what the first of them names: a tensor, a layer or a boundary.
        diagnosis: by name; empty when there is none.
        model: the same two of the model level; empty when it did not fail.
        before, after: relative errors of the model level's diagnosis.
        ruled_out: by the model level.
        rule: ``file:line`` that the model level's diagnosis points to.
    """

    levels: tuple[str, ...]
    at: str = ""
    diagnosis: str = ""
    model: tuple[str, str] | None = None
    before: float | None = None
    after: float | None = None
    ruled_out: tuple[str, ...] = ()
    rule: str = ""


def outcome(report: Report) -> Outcome:
    """Read off a report, as its JSON has it."""
    levels = {level["level"]: level for level in report.to_dict()["levels"]}
    failed = tuple(name for name, level in levels.items() if level["verdict"] == "failed")
    if not failed:
        found = [f for level in levels.values() for f in level["findings"] if f["code"] == "fact-unverified"]
        return Outcome(("facts",), ", ".join(found[0]["data"]["facts"]), "not verified") if found else Outcome(())
    said = levels["model"]["diagnosis"] or {} if "model" in failed else {}
    found = Outcome(
        failed,
        model=(said["boundary"], said["name"]) if said else None,
        before=float(said["error_before"]) if said else None,
        after=float(said["error_after"]) if said else None,
        ruled_out=tuple(said.get("ruled_out", ())),
        rule=said.get("rule", ""),
    )
    if failed[0] == "model":
        first = levels["model"]["findings"][0]
        if not said and (name := first["data"].get("diagnosis")):
            return dataclasses.replace(found, at=first["path"], diagnosis=name, model=(first["path"], name))
        return dataclasses.replace(found, at=said.get("boundary", first["path"]), diagnosis=said.get("name", ""))
    findings = levels[failed[0]]["findings"]
    named = next((f for f in findings if f["data"].get("diagnosis")), findings[0])
    return dataclasses.replace(found, at=named["path"], diagnosis=named["data"].get("diagnosis", ""))


def run_fault(fault: Fault) -> Outcome:
    """A fault's outcome. What the rules or the plan refuse is never converted, and counts as caught."""
    try:
        return outcome(run(fault.case, fault.to, fault.plant))
    except convert.PlanError as error:
        return Outcome(("plan",), error.findings[0].path, "refused")
    except convert.RuleError as error:
        return Outcome(("rules",), Path(error.findings[0].rule).name, "refused")


# ---- the tables


def cells(fault: Fault, found: Outcome) -> list[str]:
    """Write a row of the table, without its errors. Where the model level fails as well, its word follows a semicolon."""
    second = found.model if found.model and found.levels[0] != "model" else None

    def both(first: str, other: str) -> str:
        return f"{first}; {other}" if second and other != first else first

    levels = found.levels[0] + (f"; {', '.join(found.levels[1:])}" if len(found.levels) > 1 else "")
    at = both(found.at, second[0] if second else "")
    named = both(found.diagnosis or "not named", (second[1] or "not named") if second else "")
    return [*key(fault), levels, at, named]


def key(fault: Fault) -> tuple[str, str, str]:
    """Get the cells that identify a row."""
    return fault.name, fault.plant.where, f"{fault.case} → {fault.to}"


def documented() -> list[list[str]]:
    """Read the rows of the table."""
    with TABLE.open(newline="") as file:
        return list(csv.reader(file))[1:]


def write(path: Path, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)


def main() -> None:
    """Run all faults, or those of the cases that are named; write the tables, and show what is not as expected."""
    cases = set(sys.argv[1:]) or {fault.case for fault in FAULTS}
    rows = {tuple(row[:3]): row for row in documented()}
    for fault in FAULTS:
        if fault.case in cases:
            found = run_fault(fault)
            errors = ["" if error is None else f"{float(error):.0e}" for error in (found.before, found.after)]
            rows[key(fault)] = [*cells(fault, found), *errors]
            for problem in fault.problems(found):
                sys.stderr.write(f"{fault.id}: {problem}\n")
    write(TABLE, COLUMNS, [rows[key(fault)] for fault in FAULTS])
    write(BY_FAMILY, applies.COLUMNS, applies.rows(FAULTS))


if __name__ == "__main__":
    main()
