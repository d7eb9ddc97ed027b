"""Write PEFT's adapter: ``adapter_model.safetensors`` and ``adapter_config.json`` in a directory, which appears complete or not at all."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from convert.checkpoints.digest import LENGTH
from convert.core.errors import OutputError
from convert.core.findings import Finding
from convert.core.ops import apply
from convert.core.system import signals
from convert.peft.plan import AdapterPlan
from convert.writing.destination.permitted import refuse_existing
from convert.writing.execute import refuse_overlap
from convert.writing.file_layout import OutTensor, lay_out
from convert.writing.provenance import header_metadata
from convert.writing.transfer import require_unchanged
from convert.writing.writer import Writer

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class AdapterResult:
    """What was written.

    Attributes:
        out: the directory.
        modules: number of adapted modules.
        nbytes: of their tensors.
        seconds: from the first read to the rename.
    """

    out: Path
    modules: int
    nbytes: int
    seconds: float


def refuse(adapter: AdapterPlan, out: Path, overwrite: bool) -> None:
    """Check everything about the output that can be refused before a leaf is read.

    Raises:
        OutputError: it is a file, exists, or lies in the checkpoint.
    """
    if out.suffix == ".safetensors":
        fix = f"write {out.with_suffix('')}"
        raise OutputError(Finding("output-kind", path=str(out), expected=f"a directory, for {FILE} and {CONFIG}", got="one file", fix=fix))  # fmt: skip
    refuse_overlap(out, adapter.plan.source)
    refuse_existing(out, overwrite, or_one_file=False)


def write_adapter(adapter: AdapterPlan, out: str | Path, *, overwrite: bool = False) -> AdapterResult:
    """Write the adapter; after an error, `out` is unchanged. Memory: the leaves and tensors of one module, and 4 bytes for each element of its weight.

    Raises:
        OutputError: as `refuse`, or it cannot be written.
        CheckpointError: a leaf cannot be read.
    """
    started, out = time.monotonic(), Path(out)
    refuse(adapter, out, overwrite)
    tensors = [OutTensor(step.name, step.spec) for step in adapter.steps]
    config = (json.dumps(adapter.config, indent=2, sort_keys=True) + "\n").encode()
    metadata = {key: value for key, value in header_metadata(adapter.plan).items() if value != "0" * LENGTH}
    layout = lay_out(tensors, single=FILE)
    with Writer(out, layout, tensors, metadata=metadata, overwrite=overwrite, extra_files={CONFIG: config}) as writer:
        for step in adapter.steps:
            region = writer.region(step.name)
            for part in step.parts:
                part.share(region)[...] = apply(part.ops, adapter.plan.checkpoint.read(part.leaf))
            writer.done(step.name)
            signals.check()
        require_unchanged(adapter.plan.checkpoint)
        writer.commit()
    return AdapterResult(out, len(adapter.modules), adapter.nbytes, time.monotonic() - started)
