"""A report of `convert check` for a terminal: one line for each level, then what is wrong, then the measures, worst first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from convert.cli import output
from convert.verify.report.facts import listed
from convert.verify.report.report import FLOAT64, LEVELS, NATIVE, Verdict, predictions

if TYPE_CHECKING:
    from convert.verify.report.report import LevelReport, Measure, Report

SHOWN = 8  # measures that failed, and findings; --json has all of them
SHOWN_PASSED = 3  # measures, where fewer failed
SHORTEST = 12  # characters of a path that are worth cutting out


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report; nothing is cut or wrapped."""
    source = str(report.source)
    for line in _lines(report):
        # Each message names the checkpoint; here the first line already does.
        yield line.replace(f"{source}: ", "") if len(source) >= SHORTEST else line


def _lines(report: Report) -> Iterator[str]:
    yield f"{_short(report.out)} against {_short(report.source)}"
    found = f"{report.plan.found}, by {_short(report.plan.rules.path)}" if report.plan else report.model
    yield f"{found} -> {report.target}"
    yield ""
    rows = [(level.level, _word(level.verdict), f"{level.seconds:.1f} s", level.summary) for level in report.levels]
    yield from output.table(rows, right=(2,))
    for level in report.levels:
        body = list(_level(level))
        if body:
            yield ""
            yield f"{level.level}: {_word(level.verdict)}"
            yield from (f"  {line}" for line in body)
    if known := listed(report.facts):
        yield ""
        yield from output.table([(f"{status}:", text) for status, text in known])
    yield ""
    yield _conclusion(report)


def _word(verdict: Verdict) -> str:
    """Return the verdict, in capitals if it is a failure."""
    return str(verdict).upper() if verdict is Verdict.FAILED else str(verdict)


def _level(level: LevelReport) -> Iterator[str]:
    yield from _diagnosis(level)
    yield from _findings(level)
    yield from _measures(level)
    yield from _matrix(level)
    shown = (
        1 if not (level.reason or level.findings or level.measures) else 0
    )  # the table of levels shows the first one
    for note in level.notes[shown:]:
        yield f"note: {note}"


def _findings(level: LevelReport) -> Iterator[str]:
    """Yield the first finding of each rule, and the number of its other findings."""
    groups: dict[object, list[str]] = {}
    for k, finding in enumerate(level.findings):
        groups.setdefault(finding.rule or k, []).append(str(finding))
    for group in list(groups.values())[:SHOWN]:
        yield f"- {group[0]}"
        if len(group) > 1:
            yield f"    and {len(group) - 1} more of this rule"
    left = sum(len(group) for group in list(groups.values())[SHOWN:])
    if left:
        yield f"- and {left} more of other rules (--json has all)"


def _diagnosis(level: LevelReport) -> Iterator[str]:
    found = level.diagnosis
    if found is None:
        return
    if found["name"]:
        yield f"diagnosis: {found['name']}"
        yield f"    {found['problem']}"
        yield f"    relative error of {found['boundary']}: {found['error_before']:.1e}; {found['error_after']:.1e} without the mistake"
        yield f"    fix: {found['fix']}"
    else:
        yield f"no diagnosis at {found['boundary']}, where the two differ first: {found['problem']}"
        yield f"    ruled out: {', '.join(found['ruled_out']) or 'nothing could be tried'}"
        if found["fix"]:
            yield f"    next: {found['fix']}"


def _measures(level: LevelReport) -> Iterator[str]:
    """Yield a table of the worst measures, and one line for the rest."""
    if not level.measures:
        return
    first = level.first_failure
    ordered = [*([first] if first else []), *(measure for measure in level.worst_first if measure is not first)]
    beyond = sum(not measure.passed for measure in ordered)
    shown = ordered[: min(SHOWN, max(beyond, SHOWN_PASSED))]
    head = ("", "first failure, then worst first" if first else "worst first", FLOAT64, "allowed", NATIVE, "allowed", "ULPs", "rule")  # fmt: skip
    rows = [head, *(_row(measure, measure is first) for measure in shown)]
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    yield from output.table(rows, right=(2, 3, 4, 5, 6))
    if folded := len(ordered) - len(shown):
        left = max(beyond - len(shown), 0)
        yield f"   ... and {folded} more, {f'{left} of them beyond' if left else 'each within its bounds'}"
    for measure in level.measures:
        if measure.logits is not None:
            yield f"   {measure.name}: {predictions(measure.logits)}"
        if measure.float64_logits is not None:
            yield f"   {measure.name}, {FLOAT64}: {predictions(measure.float64_logits)}"
    for word, tolerance in ((FLOAT64, shown[0].float64_tolerance), (NATIVE, shown[0].tolerance)):
        if tolerance is not None:
            yield f"   allowed in {word}, {shown[0].name}: {tolerance.why}"


def _matrix(level: LevelReport) -> Iterator[str]:
    """Yield the relative differences of all pairs of backends. Columns are numbered: names of backends are too long for them."""
    if not level.matrix:
        return
    yield "outputs, relative differences of all pairs; the row's are the reference"
    names = list(level.matrix)
    rows = [("", "", *(str(k + 1) for k in range(len(names))))]
    for k, name in enumerate(names):
        cells = ("." if name == other else f"{level.matrix[name][other]:.1e}" for other in names)
        rows.append((str(k + 1), name, *cells))
    yield from output.table(rows, right=(0, *range(2, len(names) + 2)))


def _row(measure: Measure, first: bool) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.1e}"

    return (
        " " if measure.passed else ">" if first else "!",
        measure.name,
        number(measure.float64.relative if measure.float64 else None),
        number(measure.float64_tolerance.value if measure.float64_tolerance else None),
        number(measure.difference.relative),
        number(measure.tolerance.value if measure.tolerance else None),
        f"{measure.difference.ulps:.1f}" if measure.difference.ulps < 1e4 else number(measure.difference.ulps),
        Path(measure.rule).name,
    )


def _short(path: str) -> str:
    """Return the path relative to the current directory if it lies in it."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd())) if Path(path).is_absolute() else path
    except (OSError, ValueError):
        return path


def _conclusion(report: Report) -> str:
    decided = [level.level for level in report.levels if level.verdict in (Verdict.PASSED, Verdict.FAILED)]
    verdicts = {level.level: level.verdict for level in report.levels}
    open_ = [name for name in LEVELS if verdicts.get(name, Verdict.SKIPPED) is Verdict.SKIPPED]
    if report.exit_code == 0:
        conclusion = (
            f"equal, as far as {', '.join(decided)} can tell; not checked: {', '.join(open_)}" if open_ else "equal"
        )
    elif report.only_backends:
        conclusion = report.verdict
    elif report.exit_code == 1:
        conclusion = (
            f"different: {', '.join(level.level for level in report.levels if level.verdict is Verdict.FAILED)}"
        )
    else:
        words = {Verdict.INCONCLUSIVE: "stopped with an error", None: "did not run"}
        proved = {level.level for level in report.levels if level.verdict is Verdict.INCONCLUSIVE and level.measures}
        told = dict.fromkeys(proved, "proves nothing")
        open_facts = {level.level for level in report.levels for f in level.findings if f.code == "fact-unverified"}
        told |= dict.fromkeys(open_facts, "depends on facts that are not verified")
        reasons = [
            f"{name} {told.get(name) or words.get(verdicts.get(name), 'was skipped')}" for name in report.inconclusive
        ]
        conclusion = f"inconclusive: {', '.join(reasons)}"
    return f"{conclusion} (exit code {report.exit_code})"
