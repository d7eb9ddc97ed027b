"""The finding of a checkpoint that is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convert import CheckpointError, open_source
from convert.core.findings import Finding


def refusal(path: Path, **options: Any) -> Finding:
    """Open a damaged or unknown checkpoint; return the only finding, with paths relative to the folder of `path`."""
    with pytest.raises(CheckpointError) as caught:
        open_source(path, **options)
    (finding,) = caught.value.findings
    return replace(finding, path=finding.path.replace(f"{path.parent}/", ""))
