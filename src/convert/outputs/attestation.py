"""An in-toto statement about an output: the SHA-256 of every file, and what made it. It is unsigned; other tools sign it.

The form is that of OpenSSF model-signing 1.1 (`_signing/signing.py`): one subject, whose digest is the SHA-256 of the digests of all
files in the order of their names, and the files as ``resources`` of the predicate. Verifiers ignore further keys of the predicate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.core.errors import CheckpointError, OutputError
from convert.core.findings import Finding
from convert.core.system.regular_file import open_unbuffered
from convert.outputs.integrity import provenance
from convert.writing.destination.atomic import write_text
from convert.writing.destination.permitted import real
from convert.writing.written import open_written

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"


def refuse_inside(statement: Path, out: Path, *sources: Path) -> None:
    """Check that the statement does not become a part of what it describes, or of a checkpoint.

    Raises:
        OutputError: it lies in the output, or in a source.
    """
    path = real(statement)
    for place, problem in (
        (out, "is part of what it attests"),
        *((source, "is part of what is converted") for source in sources),
    ):
        if real(place) in (path, *path.parents):
            raise OutputError(Finding("output-within-input", problem, path=str(statement), fix="write it elsewhere"))


def attest(out: Path, provenance: Mapping[str, str]) -> dict[str, Any]:
    """Return the statement about an output.

    Args:
        provenance: what the headers say of the conversion (`Integrity.provenance`).

    Raises:
        CheckpointError: a file cannot be read.
    """
    files = sorted(path for path in out.rglob("*") if path.is_file()) if out.is_dir() else [out]
    digests = [(path.relative_to(out).as_posix(), _sha256(path)) for path in files]
    root = hashlib.sha256(b"".join(digest for _, digest in digests)).hexdigest()
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": real(out).name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": []},
            "resources": [{"name": name, "algorithm": "sha256", "digest": digest.hex()} for name, digest in digests],
            "conversion": dict(provenance),
        },
    }


def write_statement(statement: Path, out: Path) -> None:
    """Write the statement about an output to a file.

    Raises:
        CheckpointError: as `attest`.
        OutputError: the statement cannot be written.
    """
    content = attest(out, provenance(open_written(out).metadata))
    write_text(statement, json.dumps(content, indent=2) + "\n")


def _sha256(path: Path) -> bytes:
    try:
        with open_unbuffered(path) as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        problem, fix = f"cannot be read: {error.strerror or error}", getattr(error, "fix", "")  # of a store
        raise CheckpointError(Finding("file-not-readable", problem, path=str(path), fix=fix)) from None
