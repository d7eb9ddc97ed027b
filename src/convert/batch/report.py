"""The report of a batch: JSON, JUnit, and one HTML page with a row for each job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

from jinja2 import Environment, PackageLoader, StrictUndefined

from convert.batch.run import Outcome, Status
from convert.core.text import one_line
from convert.verify.report.junit import clean


@dataclass(frozen=True)
class BatchReport:
    """What came of a batch.

    Attributes:
        tool: name and version of the converter.
        outcomes: of each job of this machine.
        seconds: from the first job's start to the last one's end.
    """

    tool: str
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The jobs that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.status is Status.FAILED)

    @property
    def counts(self) -> dict[str, int]:
        """Number of jobs of each status, without those that have none."""
        found = Counter(str(outcome.status) for outcome in self.outcomes)
        return {str(status): found[str(status)] for status in Status if found[str(status)]}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all outputs."""
        return sum(outcome.nbytes for outcome in self.outcomes)

    @property
    def exit_code(self) -> int:
        """1 if a job failed."""
        return 1 if self.failures else 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "format": 1,
            "tool": self.tool,
            "seconds": round(self.seconds, 3),
            "bytes": self.nbytes,
            "counts": self.counts,
            "jobs": [outcome.to_dict() for outcome in self.outcomes],
        }


def to_junit(report: BatchReport) -> str:
    """Render the report as JUnit XML: a test case for each job, named after its output."""
    counts = {
        "tests": str(len(report.outcomes)),
        "failures": str(len(report.failures)),
        "errors": "0",
        "skipped": str(report.counts.get(Status.NOT_RUN, 0)),
    }
    root = ET.Element("testsuites", {"name": "convert batch", "time": f"{report.seconds:.3f}", **counts})
    suite = ET.SubElement(root, "testsuite", {"name": "convert.batch", "time": f"{report.seconds:.3f}", **counts})
    for outcome in report.outcomes:
        name, time = clean(one_line(outcome.job.name)), f"{outcome.seconds:.3f}"
        case = ET.SubElement(suite, "testcase", classname=f"convert.batch.{outcome.job.model}", name=name, time=time)
        if outcome.status is Status.FAILED:
            failure = ET.SubElement(case, "failure", message=clean(outcome.error), type="failed")
            failure.text = clean(f"{outcome.error}\n{outcome.command}")
        elif outcome.status is Status.NOT_RUN:
            ET.SubElement(case, "skipped", message="another job failed before it started")
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def to_html(report: BatchReport) -> str:
    """Render the report as one page that loads nothing else; every value is escaped."""
    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: one_line(value) if isinstance(value, str) and type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("batch.html.j2").render(report=report)
