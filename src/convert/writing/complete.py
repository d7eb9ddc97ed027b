"""The one place that decides that an output is complete. `Writer.commit` publishes nothing before `check_complete` returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from convert.core.errors import OutputError
from convert.core.findings import Finding


def check_complete(out: Path, tensors: Iterable[str], requested: Collection[str]) -> None:
    """Check that every tensor of the output was requested from the writer, so that it could be filled.

    Args:
        out: the output, for the message.
        tensors: names of the tensors in the output's layout.
        requested: names of the tensors that `Writer.region` returned.

    Raises:
        OutputError: a tensor was never requested.
    """
    missing = [name for name in tensors if name not in requested]
    if missing:
        raise OutputError(
            Finding(
                "output-incomplete",
                f"{len(missing)} tensors were never requested from the writer: {', '.join(missing[:10])}",
                path=str(out),
            )
        )
