"""A report as one HTML page: verdict and diagnosis, the levels, the error along the depth, and the mapping.

The page is self-contained and loads nothing: its own security policy forbids it, and admits its style and script by their
hashes only. Everything but the filter of the mapping works without the script. ``#q=WORDS`` at the end of the page's address
fills the filter in.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from convert.verify.report.html_assets import SCRIPT, STYLE
from convert.verify.report.html_plot import plot
from convert.verify.report.report import LevelReport, Measure, Report, Verdict, percent, share

MOST_ON_TOP = 3  # findings of a level that has no diagnosis, beside the verdict
MOST_FINDINGS = 50  # of a level on the page; the JSON report has all
KINDS = {0: "equal", 1: "different", 2: "undecided"}
_LINE, _SQUARE = '<path class="line {0}" d="M0 5H34"/>', '<rect x="14" y="2" width="6" height="6"/>'
_DISC, _DASHES = '<circle cx="17" cy="5" r="3"/>', '<path class="bound {0}" d="M0 5H34"/>'


def to_html(report: Report, plan_dict: Mapping[str, Any] | None = None) -> str:
    """The page.

    Args:
        plan_dict: `Plan.to_dict()`, for the mapping; None leaves the mapping out.
    """
    title = f"{report.verdict.capitalize()}: {report.out}"
    policy = f"default-src 'none'; style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; base-uri 'none'; form-action 'none'"
    body = (
        *_header(report),
        "<main>",
        *_diagnoses(report),
        *_cards(report),
        *_plots(report),
        *(line for level in report.levels for line in _level(level)),
        *_mapping(report, plan_dict),
        *_identity(report),
        "</main>",
    )
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            *body,
            "<footer><p>Written by convert check. This page loads nothing from anywhere.</p></footer>",
            f"<script>{SCRIPT}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _text(value: object) -> str:
    """Safe within HTML and its attributes. Names come out of foreign files: what does not print is written out."""
    return escape("".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(value)))


def _header(report: Report) -> Iterator[str]:
    found = report.plan.found if report.plan else report.model
    yield "<header>"
    yield f'<h1 class="{KINDS[report.exit_code]}">{report.verdict.capitalize()}</h1>'
    yield f'<p class="what"><code>{_text(report.out)}</code> against <code>{_text(report.source)}</code></p>'
    yield f'<p class="soft">{_text(found)} → {_text(report.target)} · exit code {report.exit_code}{_open(report)}</p>'
    if report.error:
        yield f'<p class="what">The check stopped: {_text(report.error)}</p>'
    yield "</header>"


def _open(report: Report) -> str:
    if report.exit_code == 2:
        return f" · undecided: {_text(', '.join(report.undecided))}"
    skipped = [level.level for level in report.levels if level.verdict is Verdict.SKIPPED]
    return f" · skipped, so not proven: {', '.join(skipped)}" if skipped else ""


def _diagnoses(report: Report) -> Iterator[str]:
    for level in sorted(report.levels, key=lambda level: level.diagnosis is None):
        found = level.diagnosis
        if found is None and not level.findings:
            continue
        yield '<section class="card diagnosis">'
        if found is None:
            yield f"<h2>{level.level}: {_text(level.gist)}</h2>"
            yield from (f'<p class="what">{_text(str(finding))}</p>' for finding in level.findings[:MOST_ON_TOP])
            yield "</section>"
            continue
        if found["name"]:
            yield f"<h2>Diagnosis: {_text(found['name'])}</h2>"
            yield f'<p class="what">{_text(found["said"])}</p>'
            rows = {
                "Where": found["boundary"],
                "Rule": found["rule"],
                "Repair": found["repair"],
                "Relative error": f"{found['error_before']:.1e} as it is, {found['error_after']:.1e} when it is undone",
            }
        else:
            yield f"<h2>No diagnosis for {_text(found['boundary'])}</h2>"
            yield f'<p class="what">{_text(found["said"])}</p>'
            rows = {"Relative error": f"{found['error_before']:.1e}"}
            if found["repair"]:
                rows["Next"] = found["repair"]
        rows["Ruled out"] = ", ".join(found["ruled_out"])
        yield from _definitions(rows)
        yield "</section>"


def _definitions(rows: Mapping[str, object]) -> Iterator[str]:
    yield "<dl>"
    for term, value in rows.items():
        if value not in ("", None):
            yield f"<dt>{_text(term)}</dt><dd>{_text(value)}</dd>"
    yield "</dl>"


def _kind(verdict: Verdict) -> str:
    return str(verdict).replace(" ", "-")


def _cards(report: Report) -> Iterator[str]:
    yield '<div class="cards">'
    for level in report.levels:
        yield '<div class="card">'
        yield f'<span class="verdict {_kind(level.verdict)}">{_mark(level.verdict)} {level.verdict}</span>'
        yield f'<h3><a href="#level-{level.level}">{level.level}</a></h3>'
        yield f'<p class="what">{_text(level.gist)}</p>'
        yield f'<p class="soft">{level.seconds:.1f} s</p>'
        yield "</div>"
    yield "</div>"


def _mark(verdict: Verdict) -> str:
    return {Verdict.PASSED: "✓", Verdict.FAILED: "✗"}.get(verdict, "–")


def _plots(report: Report) -> Iterator[str]:
    """The model level first: it is the one that people ask for. Backends have no depth, but a matrix."""
    measured = [level for level in reversed(report.levels) if len(level.measures) > 1 and not level.matrix]
    for level in measured:
        yield f'<section id="plot-{level.level}">'
        yield f"<h2>Relative error along the depth: {level.level}</h2>"
        yield f"<figure>{plot(level, _text)}</figure>"
        yield '<div class="legend">'
        for name, word, shape in (("lifted", "lifted float64", _DISC), ("run", "as users run it", _SQUARE)):
            drawn = f'{_LINE.format(name)}<g class="point {name}">{shape}</g>'
            yield f'<span><svg class="drawn" aria-hidden="true">{drawn}</svg>{word}</span>'
            yield f'<span><svg class="drawn" aria-hidden="true">{_DASHES.format(name)}</svg>allowed, {word}</span>'
        yield "</div>"
        yield "</section>"


def _level(level: LevelReport) -> Iterator[str]:
    failed = level.verdict is Verdict.FAILED
    yield f'<section id="level-{level.level}">'
    yield f'<h2>{level.level}: <span class="{_kind(level.verdict)}">{level.verdict}</span></h2>'
    if level.reason:
        yield f'<p class="what">{_text(level.reason)}</p>'
    if level.findings:
        yield "<ul>"
        for finding in level.findings[:MOST_FINDINGS]:
            yield f'<li class="what">{_text(str(finding))}</li>'
        if len(level.findings) > MOST_FINDINGS:
            yield f"<li>and {len(level.findings) - MOST_FINDINGS} more, which the JSON report has</li>"
        yield "</ul>"
    if level.measures:
        yield f"<details{' open' if failed else ''}><summary>{len(level.measures)} measures, as data flows</summary>"
        yield from _measures(level)
        yield "</details>"
    yield from _matrix(level)
    if level.notes:
        yield '<ul class="soft">'
        yield from (f'<li class="what">{_text(note)}</li>' for note in level.notes)
        yield "</ul>"
    yield "</section>"


def _matrix(level: LevelReport) -> Iterator[str]:
    """Relative differences of all pairs of backends; the row's is the reference."""
    if not level.matrix:
        return
    names = list(level.matrix)
    yield "<p>Relative differences of the outputs, all pairs; the row's are the reference.</p>"
    yield '<div class="scroll"><table class="matrix"><thead><tr><th class="number">#</th><th></th>'
    yield "".join(_cell(k, "number", "th") for k in range(1, len(names) + 1))
    yield "</tr></thead><tbody>"
    for k, name in enumerate(names, 1):
        cells = ("·" if name == other else _number(level.matrix[name][other]) for other in names)
        yield f"<tr>{_cell(k, 'number')}{_cell(name, 'name')}{''.join(_cell(cell, 'number') for cell in cells)}</tr>"
    yield "</tbody></table></div>"


COLUMNS = (
    "",
    "lifted float64",
    "allowed",
    "as users run it",
    "allowed",
    "max abs",
    "ULPs",
    "cosine",
    "of bound",
    "rule",
)


LOGITS = ("KL (nats), lifted", "KL, as users run it", "top-1 agreement")


def _measures(level: LevelReport) -> Iterator[str]:
    predicts = any(measure.logits is not None for measure in level.measures)
    yield '<div class="scroll"><table><thead><tr><th class="number">#</th>'
    yield "".join(_cell(name, "number" if 0 < k < len(COLUMNS) - 1 else "", "th") for k, name in enumerate(COLUMNS))
    yield "".join(_cell(name, "number", "th") for name in (LOGITS if predicts else ()))
    yield "</tr></thead><tbody>"
    for k, measure in enumerate(level.measures, 1):
        yield f'<tr id="{level.level}-{k}"{"" if measure.passed else " class=bad"}>{_cell(k, "number")}'
        yield "".join(_measure(measure))
        if predicts:
            yield from _logits(measure)
        yield "</tr>"
    yield "</tbody></table></div>"
    worst = level.first_failure or level.worst_first[0]
    whys = (("lifted", worst.lifted_tolerance), ("as run", worst.tolerance))
    for word, allowed in whys:
        if allowed is not None:
            yield f'<p class="soft what">Allowed {word}, {_text(worst.name)}: {_text(allowed.why)}</p>'


def _logits(measure: Measure) -> Iterator[str]:
    """The cells of `LOGITS`; empty ones where the measure is not of logits."""
    lifted, run = measure.lifted_logits, measure.logits
    yield _cell(_number(lifted.kl) if lifted else "", "number")
    yield _cell(_number(run.kl) if run else "", "number")
    yield _cell(f"{share(run.top1)} of {run.positions:,}" if run else "", "number")


def _measure(measure: Measure) -> Iterator[str]:
    yield _cell(measure.name, "name")
    for found, allowed in (
        (measure.lifted, measure.lifted_tolerance),
        (measure.difference, measure.tolerance),
    ):
        beyond = found is not None and allowed is not None and not found.relative <= allowed.value
        yield _cell(_number(found.relative if found else None), "number beyond" if beyond else "number")
        why = f' title="{_text(allowed.why)}"' if allowed else ""
        yield f'<td class="number"{why}>{_number(allowed.value if allowed else None)}</td>'
    run = measure.difference
    yield _cell(_number(run.max_abs), "number")
    yield _cell(f"{run.ulps:.1f}" if run.ulps < 1e4 else _number(run.ulps), "number")
    yield _cell(f"{run.cosine:.9f}", "number")
    yield _cell(percent(measure.excess), "number")
    yield _cell(Path(measure.rule).name, "rule")


def _cell(value: object, kind: str = "", tag: str = "td") -> str:
    return f"<{tag}{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{_text(value)}</{tag}>"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _mapping(report: Report, plan: Mapping[str, Any] | None) -> Iterator[str]:
    if plan is None:
        return
    wrong = {
        str(name) for level in report.levels for f in level.findings for name in (f.path, *f.data.get("tensors", ()))
    }
    yield '<section id="mapping">'
    yield "<h2>What each tensor is made of</h2>"
    yield '<div class="filter"><input id="q" type="search" placeholder="filter by words: attn 2 key" aria-label="filter" autocomplete="off" spellcheck="false"><span id="count" class="soft"></span></div>'
    yield '<div class="scroll"><table><thead><tr><th>target tensor</th><th>from</th><th>layout</th><th>arithmetic</th><th>rule</th></tr></thead><tbody>'
    for tensor in plan["tensors"]:
        yield from _tensor(tensor, tensor["name"] in wrong)
    for leaf in plan["dropped"]:
        spec = _spec(leaf)
        yield f'<tr><td class="soft">left out</td><td class="name">{_text(leaf["leaf"])} <span class="soft">{spec}</span></td>'
        yield f'<td></td><td class="what">{_text(leaf["because"])}</td><td class="rule">{_text(Path(leaf["rule"]).name)}</td></tr>'
    yield "</tbody></table></div>"
    yield "</section>"


def _spec(of: Mapping[str, Any]) -> str:
    return _text(f"{of['dtype']}[{','.join(map(str, of['shape']))}]")


def _tensor(tensor: Mapping[str, Any], wrong: bool) -> Iterator[str]:
    flag = '<span class="failed">✗ wrong</span> ' if wrong else ""
    yield f'<tr{" class=bad" if wrong else ""}><td class="name">{flag}{_text(tensor["name"])} <span class="soft">{_spec(tensor)}</span></td>'
    yield f'<td class="name">{"".join(map(_from, tensor["from"]))}</td>'
    yield _parts("layout", dict.fromkeys(part["layout"] for part in tensor["from"]))
    remarks = [
        text for text in (tensor["arithmetic"], tensor["loses"], "" if tensor["from"] else tensor["kind"]) if text
    ]
    yield f'<td class="what">{_text("; ".join(remarks))}</td><td class="rule">{_text(Path(tensor["rule"]).name)}</td></tr>'


def _from(part: Mapping[str, Any]) -> str:
    rows = (
        f'<span class="rows">{"columns" if part.get("axis") else "rows"} {part["rows"][0]}:{part["rows"][1]} ←</span> '
        if part["rows"]
        else ""
    )
    at = f' <span class="soft">at {_text(part["at"])}</span>' if part["at"] else ""
    return f'<div class="part">{rows}{_text(part["leaf"])}{at}</div>'


def _parts(kind: str, parts: Iterable[str]) -> str:
    return (
        f'<td class="{kind}">{"".join(f"<div class={chr(34)}part{chr(34)}>{_text(part)}</div>" for part in parts)}</td>'
    )


def _identity(report: Report) -> Iterator[str]:
    yield '<section id="identity">'
    yield "<h2>What was checked, by what</h2>"
    rows: dict[str, object] = {"Output": report.out, "Source": report.source}
    if report.plan is not None:
        plan = report.plan
        rows |= {
            "Rules": f"{plan.rules.path}, sha256 {plan.rules.sha256}",
            "Loaded by": plan.rules.targets[plan.target].loads,
            "dtype": plan.dtype,
            "Settings": ", ".join(f"{k}={v}" for k, v in {**plan.settings, **plan.choices}.items()),
            "Tensors": f"{len(plan.steps)}, {plan.nbytes:,} bytes",
        }
    rows["Required"] = ", ".join(report.required)
    yield from _definitions({**rows, **report.environment})
    yield "</section>"
