"""Compare the digests in the headers with the tensors that are right: a false one says that the header was changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from convert.core.findings import Finding
from convert.core.safetensors_header import read_header
from convert.writing.digests import TENSORS, digest
from convert.writing.digests import names as names_of
from convert.writing.written import Written


def false_digests(written: Written, equal: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for each file whose digests do not fit its tensors.

    Args:
        equal: the tensors that are what the plan makes, bit for bit; what is wrong in others is known.
    """
    for file in dict.fromkeys(file for file, _ in written.tensors.values()):
        metadata, entries = read_header(file)
        if TENSORS not in metadata:
            continue
        recorded = names_of(metadata[TENSORS]) or {}
        names = [name for name in entries if name in equal and written.tensors[name][0] == file]
        false = [name for name in names if recorded.get(name) != _digest(written, name)]
        if false:
            more = f" and {len(false) - 1} more" if false[1:] else ""
            yield Finding(
                "output-damaged",
                f"`{TENSORS}` of its header does not fit {false[0]}{more}, of which each value is right: the header was changed",
                path=str(file),
                expected=_digest(written, false[0]),
                got=recorded.get(false[0], "none"),
                fix="convert again",
                data={"diagnosis": "a false digest", "tensors": false},
            )


def _digest(written: Written, name: str) -> str:
    return digest(np.ascontiguousarray(written.read(name)).reshape(-1).view(np.uint8).data)
