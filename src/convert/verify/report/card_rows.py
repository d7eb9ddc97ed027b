"""The rows of a check in the model card: its levels, and the facts that nothing confirms.

They hold no time and no path, so that equal checks give equal rows.
"""

from __future__ import annotations

from operator import itemgetter

from convert.verify.report.facts import listed
from convert.verify.report.report import FLOAT64, NATIVE, LevelReport, Report, predictions


def card_rows(report: Report) -> tuple[tuple[str, str, str], ...]:
    """Give level, verdict and figures of each level, then the facts, for `convert.writing.model_card.add_figures`."""
    levels = tuple((level.level, str(level.verdict), _figures(level)) for level in report.levels)
    return levels + tuple(("facts", status, text) for status, text in listed(report.facts))


def _figures(level: LevelReport) -> str:
    if level.reason or not level.measures:
        return level.summary
    parts = [f"{len(level.measures)} comparisons"]
    float64 = [(m.float64.relative, m.name) for m in level.measures if m.float64 is not None]
    native = [(m.difference.relative, m.name) for m in level.measures]
    for label, errors in ((f"{FLOAT64} (casts removed)", float64), (NATIVE, native)):
        if errors:
            error, name = max(errors, key=itemgetter(0))
            parts.append(f"largest relative error in {label} {error:.1e} ({name})")
    parts += [f"{m.name}: {predictions(m.logits)}" for m in level.measures if m.logits is not None]
    return "; ".join(parts)
