"""What a check measured, for the model card: one row for each level. No time and no path, so that equal checks give equal rows."""

from __future__ import annotations

from convert.verify.report.report import LevelReport, Measure, Report, predictions


def figures(report: Report) -> tuple[tuple[str, str, str], ...]:
    """Rows of level, verdict and figure, for `convert.writing.model_card.add_figures`."""
    return tuple((level.level, str(level.verdict), _figure(level)) for level in report.levels)


def _figure(level: LevelReport) -> str:
    if level.reason or not level.measures:
        return level.gist
    said = [f"{len(level.measures)} comparisons"]
    lifted = [(m.lifted.relative, m) for m in level.measures if m.lifted is not None]
    run = [(m.difference.relative, m) for m in level.measures]
    for where, errors in (("in lifted float64", lifted), ("as users run it", run)):
        if errors:
            error, measure = max(errors, key=lambda pair: pair[0])
            said.append(f"largest relative error {where} {error:.1e} ({measure.name})")
    return "; ".join([*said, *(text for m in level.measures for text in _logits(m))])


def _logits(measure: Measure) -> list[str]:
    return [f"{measure.name}: {predictions(measure.logits)}"] if measure.logits is not None else []
