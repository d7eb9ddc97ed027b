"""Read a recording: one safetensors file with the values of a JAX model, validated before use.

The tensors are ``input/NAME``, ``mask/K``, ``exact/NAME`` (a value in float64), ``drifted/NAME`` (the value in the precision
that users run) and ``leaf/NAME``: the few leaves that cannot be computed back from converted weights, such as the scale of a
norm whose weight is ``1 + scale``. The manifest is in the header, under ``recording``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoints.digest import combine, digest_leaf
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.safetensors_header import TensorEntry, read_header
from convert.core.system.regular_file import open_regular
from convert.core.tensor_spec import numpy_dtype
from convert.stores import located
from convert.verify.recording.manifest import Manifest, ManifestReader, Value, damaged
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.sampling import Sample, positions

Array = np.ndarray[Any, np.dtype[Any]]
KEY = "recording"  # of the manifest in the file's metadata
INPUT, MASK, FLOAT64, NATIVE, LEAF = "input/", "mask/", "exact/", "drifted/", "leaf/"  # prefixes of tensor names
MAX_GRID = 2**28  # positions from which a sample is drawn; a forged shape could exhaust the memory


@dataclass(frozen=True)
class Recording:
    """A recording, read and validated.

    Attributes:
        evidence: what the JAX model computed, as `check_model` takes it.
        stored: the leaves that the file holds.
    """

    path: Path
    manifest: Manifest
    evidence: Evidence = field(repr=False)
    stored: Mapping[str, Array] = field(repr=False)


def load_recording(path: str | Path) -> Recording:
    """Read a recording. Needs neither JAX nor torch.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, not a recording, or of another format.
    """
    path = located(path)
    if path.is_dir() or not path.exists():
        raise CheckpointError(
            Finding(
                "file-not-found", "there is no such file", path=str(path), fix="make a recording with `convert record`"
            )
        )
    metadata, entries = read_header(path)
    if KEY not in metadata:
        raise CheckpointError(
            Finding(
                "recording-invalid",
                path=str(path),
                expected="a recording",
                got=f"a safetensors file without {KEY!r} in its metadata",
                fix="make a recording with `convert record MODEL CKPT OUT` where JAX runs",
            )
        )
    manifest = ManifestReader(path).manifest(metadata[KEY])
    arrays = {name: _read(path, entry) for name, entry in entries.items()}
    data = checksum(metadata[KEY], arrays)
    if data != manifest.data:
        damaged(path, "the checksum of its tensors and manifest differs", expected=manifest.data, got=data)
    stored = _with_prefix(arrays, LEAF)
    for name, array in stored.items():
        if manifest.digests.get(name) != digest_leaf(name, array, manifest.grid(name)):
            damaged(path, f"the checksum of leaf {name} differs from the manifest's")
    return Recording(path, manifest, _evidence(path, manifest, arrays), stored)


def checksum(manifest: str, arrays: Mapping[str, Array]) -> str:
    """Compute the checksum of the tensors and of the manifest without its own checksum.

    Args:
        manifest: a JSON object.
    """
    content = {key: value for key, value in json.loads(manifest).items() if key != "data"}
    text = np.frombuffer(json.dumps(content, sort_keys=True).encode(), np.uint8)
    return combine({name: digest_leaf(name, array) for name, array in {**arrays, KEY: text}.items()})


def _read(path: Path, entry: TensorEntry) -> Array:
    """Read one tensor."""
    try:
        with open_regular(path) as file:
            file.seek(entry.start)
            content = file.read(entry.stop - entry.start)
    except OSError as error:
        raise CheckpointError(
            Finding("file-not-readable", f"cannot be read: {error.strerror or error}", path=str(path))
        ) from None
    dtype = numpy_dtype(entry.spec.dtype)
    if len(content) != entry.spec.nbytes:
        damaged(path, "the file became shorter while it was read")
    return np.frombuffer(content, dtype).reshape(entry.spec.shape)


def _with_prefix(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    """Return the tensors whose names begin with the prefix, which is removed."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _evidence(path: Path, manifest: Manifest, arrays: Mapping[str, Array]) -> Evidence:
    """Assemble the evidence from the tensors that the manifest lists."""
    masks: dict[str, Array] = {}
    samples: dict[str, Sample] = {}
    float64: dict[str, Array] = {}
    native: dict[str, Array] = {}
    for value in manifest.values:
        mask = None if value.mask is None else _mask(path, value, arrays)
        stored = value.shape
        if value.positions is not None:
            sample = _sample(path, value, mask, manifest.seed)
            samples[value.name] = sample
            stored = (value.positions, value.shape[-1])
            mask = (
                None
                if mask is None or mask.ndim < len(value.shape)
                else sample.take(np.broadcast_to(mask, sample.shape))
            )
        if mask is not None:
            masks[value.name] = mask
        native[value.name] = _tensor(path, arrays, NATIVE + value.name, stored)
        if value.float64:
            float64[value.name] = _tensor(path, arrays, FLOAT64 + value.name, stored)
    listed = {prefix + name for prefix, kept in ((NATIVE, native), (FLOAT64, float64)) for name in kept}
    if extra := sorted(name for name in arrays if name.startswith((NATIVE, FLOAT64)) and name not in listed):
        more = f" and {len(extra) - 1} more tensors" if len(extra) > 1 else ""
        damaged(path, f"the manifest does not list {extra[0]}{more}")
    part = f", {len(samples)} of them in part" if samples else ""
    return Evidence(
        _with_prefix(arrays, INPUT),
        float64 or None,
        native,
        masks,
        manifest.precision,
        manifest.unlifted,
        f"recorded in {path.name}{part}",
        manifest.environment,
        samples,
        moved=manifest.moved,
    )


def _tensor(path: Path, arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """Return a tensor in float64, and validate its shape."""
    if name not in arrays or arrays[name].shape != shape:
        got = f"shape {list(arrays[name].shape)}" if name in arrays else "no such tensor"
        damaged(path, f"tensor {name}", expected=f"shape {list(shape)}", got=got)
    return np.asarray(arrays[name], np.float64)


def _mask(path: Path, value: Value, arrays: Mapping[str, Array]) -> Array:
    """Return the mask of a value, and validate its shape."""
    mask = arrays.get(f"{MASK}{value.mask}")
    fits = (
        mask is not None
        and mask.dtype == bool
        and mask.ndim <= len(value.shape)
        and all(n in (1, size) for n, size in zip(mask.shape, value.shape, strict=False))
    )
    if mask is None or not fits:
        damaged(path, f"the mask of {value.name} is missing, or does not fit the value's shape {list(value.shape)}")
    return mask


def _sample(path: Path, value: Value, mask: Array | None, seed: int) -> Sample:
    """Draw the sample of a value again."""
    assert value.positions is not None
    grid = math.prod(value.shape[:-1])
    if len(value.shape) < 2 or not 0 < value.positions <= grid or grid > MAX_GRID:
        damaged(path, f"{value.name} of shape {list(value.shape)} cannot have a sample of {value.positions} positions")
    chosen = positions(value.shape, mask, value.positions, seed)
    if len(chosen) != value.positions:
        damaged(path, f"positions of {value.name}", expected=str(value.positions), got=f"{len(chosen)} that count")
    return Sample(value.shape, chosen)
