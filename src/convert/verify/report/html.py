"""A report as one HTML page, rendered by jinja2 from `templates/report.html.j2`.

The page is self-contained. Its security policy allows no request and admits its own style and script by their hashes. Only the
filter of the mapping needs the script; ``#q=WORDS`` at the end of the address fills the filter in.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from convert.core.text import one_line
from convert.verify.report.facts import listed
from convert.verify.report.plot import make_plot
from convert.verify.report.report import FLOAT64, NATIVE, Report, Verdict, percent, share


def to_html(report: Report, plan_dict: Mapping[str, Any] | None = None) -> str:
    """Render the page.

    Args:
        plan_dict: `Plan.to_dict()`, for the mapping; None leaves the mapping out.
    """
    style, script = (_asset(name) for name in ("report.css", "report.js"))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    measured = [level for level in reversed(report.levels) if len(level.measures) > 1 and not level.matrix]
    findings = [finding for level in report.levels for finding in level.findings]
    return render(
        "report.html.j2",
        report=report,
        plan=plan_dict,
        style=style,
        script=script,
        policy=f"{policy}; base-uri 'none'; form-action 'none'",
        skipped=[level.level for level in report.levels if level.verdict is Verdict.SKIPPED],
        plots=[(level, make_plot(level)) for level in measured],
        wrong={str(name) for finding in findings for name in (finding.path, *finding.data.get("tensors", ()))},
        unconfirmed=listed(report.facts),
        identity=_identity(report),
        float64=FLOAT64,
        native=NATIVE,
    )


def render(template: str, **values: Any) -> str:
    """Render a template of this package; every value is escaped."""
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "css_class": lambda verdict: str(verdict).replace(" ", "-"),
        "file_name": lambda path: Path(path).name,
        "number": "{:.1e}".format,
        "percent": percent,
        "px": "{:.1f}".format,
        "share": share,
        "spec": lambda of: f"{of['dtype']}[{','.join(map(str, of['shape']))}]",
    }
    return environment.get_template(template).render(values)


def _asset(name: str) -> Markup:
    return Markup((Path(__file__).parent / "templates" / name).read_text(encoding="utf-8"))


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _printable(value: object) -> object:
    """Write out the characters of a value that do not print: names come from files of others."""
    if isinstance(value, Markup):
        return value
    return one_line(str(value))


def _identity(report: Report) -> dict[str, str]:
    rows = {"Output": report.out, "Source": report.source}
    if (plan := report.plan) is not None:
        rows |= {
            "Rules": f"{plan.rules.path}, sha256 {plan.rules.sha256}",
            "Loaded by": plan.rules.targets[plan.target].loads,
            "dtype": str(plan.dtype or ""),
            "Settings": ", ".join(f"{key}={value}" for key, value in {**plan.settings, **plan.choices}.items()),
            "Tensors": f"{len(plan.steps)}, {plan.nbytes:,} bytes",
        }
    return {**rows, "Required": ", ".join(report.required), **report.environment}
