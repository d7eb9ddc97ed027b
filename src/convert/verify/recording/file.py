"""A recorded reference: what a JAX model gave, in one safetensors file, read back without trusting it.

The tensors are ``input/NAME``, ``mask/K``, ``exact/NAME`` and ``drifted/NAME`` (a value in lifted float64 and in the
precision that users run), and ``leaf/NAME``: the few leaves that cannot be computed back from converted weights, such as
the scale of a norm whose weight is ``1 + scale``. The rest is a JSON manifest in the header, under ``recording``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from convert.checkpoints.chunks import Grid
from convert.checkpoints.digest import combine, digest_leaf
from convert.checkpoints.source import Leaf, name_leaves
from convert.core.errors import CheckpointError
from convert.core.safetensors_header import Entry, read_header
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, numpy_dtype
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.sampling import METHOD, Sample, positions

Array = np.ndarray[Any, np.dtype[Any]]
FORMAT = 3  # of the manifest; a change that older versions would misread raises it
KEY = "recording"  # of the manifest in the file's metadata
INPUT, MASK, EXACT, DRIFTED, LEAF = "input/", "mask/", "exact/", "drifted/", "leaf/"
AGAIN = "record it again with `convert record`"


@dataclass(frozen=True)
class Value:
    """A boundary or an output, as it was recorded.

    Attributes:
        shape: of the whole value.
        positions: how many positions were kept; None: all of it.
        mask: number of its mask; None: all of it counts.
        exact: whether it is also there in lifted float64.
    """

    name: str
    shape: tuple[int, ...]
    positions: int | None
    mask: int | None
    exact: bool

    def to_list(self) -> list[Any]:
        return [self.name, list(self.shape), self.positions, self.mask, self.exact]


@dataclass(frozen=True)
class Manifest:
    """What a recording says of itself. No time, no path: the same run gives the same bytes.

    Attributes:
        converter: the version of this package that made it.
        model, target: of the rules; the names of boundaries are those of the target's module.
        reference: ``module:factory`` of the two models; empty for the shipped one.
        rules_sha256: of the rule file.
        settings, sizes: of the plan.
        source_format: of the checkpoint, for people.
        leaves: name -> leaf of the checkpoint; merged: likewise, of those that the conversion computes from several of them.
        digests: name -> `digest_leaf` of those that were read for it.
        chunks: name -> shape of the chunks that the digest is made of.
        seed: of the inputs and of the sample.
        precision: what users run in.
        unlifted: primitives that could not be lifted.
        environment: package -> version.
        values: in the order in which data flows.
        data: `checksum` of the tensors in the file and of all this.
    """

    converter: str
    model: str
    target: str
    reference: str
    rules_sha256: str
    settings: Mapping[str, Any]
    sizes: Mapping[str, int]
    source_format: str
    leaves: Mapping[str, Leaf]
    merged: Mapping[str, Leaf]
    digests: Mapping[str, str]
    chunks: Mapping[str, tuple[int, ...]]
    seed: int
    precision: str
    unlifted: tuple[str, ...]
    environment: Mapping[str, str]
    values: tuple[Value, ...]
    data: str

    def grid(self, name: str) -> Grid | None:
        """The chunks that a leaf's digest is made of; None for a leaf without one."""
        return Grid(self.spec(name).shape, self.chunks[name]) if name in self.chunks else None

    def spec(self, name: str) -> TensorSpec:
        """Of a leaf, or of one that is computed from several."""
        return (self.merged[name] if name in self.merged else self.leaves[name]).spec

    def _rows(self, leaves: Mapping[str, Leaf]) -> list[list[Any]]:
        return [
            [list(x.keys), list(x.spec.shape), x.spec.dtype, self.digests.get(name), list(self.chunks.get(name, ()))]
            for name, x in leaves.items()
        ]

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": FORMAT,
                "converter": self.converter,
                "model": self.model,
                "target": self.target,
                "reference": self.reference,
                "rules_sha256": self.rules_sha256,
                "settings": dict(self.settings),
                "sizes": dict(self.sizes),
                "source_format": self.source_format,
                "source_digest": combine(self.digests),
                "leaves": self._rows(self.leaves),
                **({"merged": self._rows(self.merged)} if self.merged else {}),
                "seed": self.seed,
                "precision": self.precision,
                "unlifted": list(self.unlifted),
                "environment": dict(self.environment),
                "sampling": METHOD,
                "values": [value.to_list() for value in self.values],
                "data": self.data,
            },
            sort_keys=True,
        )


@dataclass(frozen=True)
class Recording:
    """A recording, read and found whole.

    Attributes:
        evidence: what the JAX model gave, as `check_model` takes it.
        stored: the leaves that it holds.
    """

    path: Path
    manifest: Manifest
    evidence: Evidence = field(repr=False)
    stored: Mapping[str, Array] = field(repr=False)


def load_recording(path: str | Path) -> Recording:
    """Reads a recording. Needs neither JAX nor torch.

    Raises:
        CheckpointError: there is no such file; it is no recording, truncated, damaged, or of another format.
    """
    path = Path(path)
    if path.is_dir() or not path.exists():
        raise CheckpointError(f"{path}: there is no such file; `convert record` makes a recording")
    metadata, entries = read_header(path)
    if KEY not in metadata:
        raise CheckpointError(
            f"{path}: a safetensors file, but no recording; `convert record MODEL CKPT OUT` makes one, where JAX runs"
        )
    manifest = _Reader(path).manifest(metadata[KEY])
    arrays = {name: _read(path, entry) for name, entry in entries.items()}
    data = checksum(metadata[KEY], arrays)
    if data != manifest.data:
        _fail(
            path,
            f"its tensors and its manifest have the checksum {data}, the manifest says {manifest.data}: it is damaged",
        )
    stored = _below(arrays, LEAF)
    for name, array in stored.items():
        if manifest.digests.get(name) != digest_leaf(name, array, manifest.grid(name)):
            _fail(path, f"leaf {name} is not what its header says")
    return Recording(path, manifest, _evidence(path, manifest, arrays), stored)


def checksum(manifest: str, arrays: Mapping[str, Array]) -> str:
    """Of the tensors and of all that the manifest says, but for the checksum itself.

    Args:
        manifest: a JSON object.
    """
    said = {key: value for key, value in json.loads(manifest).items() if key != "data"}
    text = np.frombuffer(json.dumps(said, sort_keys=True).encode(), np.uint8)
    return combine({name: digest_leaf(name, array) for name, array in {**arrays, KEY: text}.items()})


def _read(path: Path, entry: Entry) -> Array:
    try:
        with path.open("rb") as file:
            file.seek(entry.start)
            content = file.read(entry.stop - entry.start)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    dtype = numpy_dtype(entry.spec.dtype)
    if len(content) != entry.spec.nbytes:
        _fail(path, "it became shorter while it was read")
    return np.frombuffer(content, dtype).reshape(entry.spec.shape)


def _below(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _evidence(path: Path, manifest: Manifest, arrays: Mapping[str, Array]) -> Evidence:
    masks: dict[str, Array] = {}
    samples: dict[str, Sample] = {}
    exact: dict[str, Array] = {}
    drifted: dict[str, Array] = {}
    for value in manifest.values:
        mask = None if value.mask is None else _mask(path, value, arrays)
        stored = value.shape
        if value.positions is not None:
            sample = _sample(path, value, mask, manifest.seed)
            samples[value.name] = sample
            stored = (value.positions, value.shape[-1])
            mask = None if mask is None or mask.ndim < len(value.shape) else _sampled_mask(sample, mask)
        if mask is not None:
            masks[value.name] = mask
        drifted[value.name] = _tensor(path, arrays, DRIFTED + value.name, stored)
        if value.exact:
            exact[value.name] = _tensor(path, arrays, EXACT + value.name, stored)
    listed = {prefix + name for prefix, kept in ((DRIFTED, drifted), (EXACT, exact)) for name in kept}
    if more := sorted(name for name in arrays if name.startswith((DRIFTED, EXACT)) and name not in listed):
        _fail(
            path,
            f"it holds {more[0]}{f' and {len(more) - 1} more tensors' if len(more) > 1 else ''}, and its manifest does not",
        )
    part = f", {len(samples)} of them in part" if samples else ""
    return Evidence(
        _below(arrays, INPUT),
        exact or None,
        drifted,
        masks,
        manifest.precision,
        manifest.unlifted,
        f"recorded in {path.name}{part}",
        manifest.environment,
        samples,
    )


def _tensor(path: Path, arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    if name not in arrays or arrays[name].shape != shape:
        found = f"{list(arrays[name].shape)}" if name in arrays else "missing"
        _fail(path, f"tensor {name} should have the shape {list(shape)} and is {found}")
    return np.asarray(arrays[name], np.float64)


def _mask(path: Path, value: Value, arrays: Mapping[str, Array]) -> Array:
    mask = arrays.get(f"{MASK}{value.mask}")
    fits = (
        mask is not None
        and mask.dtype == bool
        and mask.ndim <= len(value.shape)
        and all(n in (1, size) for n, size in zip(mask.shape, value.shape, strict=False))
    )
    if mask is None or not fits:
        _fail(path, f"the mask of {value.name} is missing or does not fit its shape {list(value.shape)}")
    return mask


def _sample(path: Path, value: Value, mask: Array | None, seed: int) -> Sample:
    assert value.positions is not None
    grid = math.prod(value.shape[:-1])
    # A sample is drawn from all positions, so a header that invents an enormous shape would take as much memory.
    if len(value.shape) < 2 or not 0 < value.positions <= grid or grid > 2**28:
        _fail(path, f"{value.name}, {list(value.shape)}, cannot have a sample of {value.positions} positions")
    chosen = positions(value.shape, mask, value.positions, seed)
    if len(chosen) != value.positions:
        _fail(path, f"{value.name} has {len(chosen)} positions that count, and says that {value.positions} were kept")
    return Sample(value.shape, chosen)


def _sampled_mask(sample: Sample, mask: Array) -> Array:
    return sample.take(np.broadcast_to(mask, sample.shape))


class _Reader:
    """Takes a manifest apart, believing nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def manifest(self, text: str) -> Manifest:
        try:
            said = json.loads(text)
        except (ValueError, RecursionError) as error:
            _fail(self.path, f"its manifest is not JSON: {error}")
        if not isinstance(said, dict):
            _fail(self.path, "its manifest is not a JSON object")
        if said.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.path}: a recording of format {said.get('format')!r}; this version reads format {FORMAT}. "
                f"Record it again with this version, or check with the one that made it ({said.get('converter')})"
            )
        if said.get("sampling") != METHOD:
            _fail(self.path, f"its samples are drawn by {said.get('sampling')!r}, not by {METHOD}")
        leaves, digests, chunks = self._leaves(said, "leaves")
        merged, more, grids = self._leaves(said, "merged") if "merged" in said else ({}, {}, {})
        if leaves.keys() & merged.keys():
            _fail(self.path, "its manifest lists a leaf twice")
        strings = {key: self._of(said, key, str) for key in ("converter", "model", "target", "reference", "rules_sha256", "source_format", "precision", "data")}  # fmt: skip
        if strings["precision"] not in ("float32", "bfloat16", "float16", "float64"):
            _fail(self.path, f"{strings['precision']!r} is no precision")
        unlifted = self._of(said, "unlifted", list)
        if self._of(said, "seed", int) < 0:
            _fail(self.path, f"its seed is {said['seed']}")
        return Manifest(
            **strings,
            settings=self._flat(said, "settings"),
            sizes=self._flat(said, "sizes"),
            leaves=leaves,
            merged=merged,
            digests={**digests, **more},
            chunks={**chunks, **grids},
            seed=self._of(said, "seed", int),
            unlifted=tuple(map(str, unlifted)),
            environment={str(k): str(v) for k, v in self._of(said, "environment", dict).items()},
            values=self._values(said),
        )

    def _of(self, said: Mapping[str, Any], key: str, kind: type) -> Any:
        if type(said.get(key)) is not kind:
            _fail(self.path, f"its manifest has no {key!r} that is of type {kind.__name__}")
        return said[key]

    def _flat(self, said: Mapping[str, Any], key: str) -> dict[str, Any]:
        """A map of single values, or of lists of them."""
        values: dict[str, Any] = self._of(said, key, dict)
        single = [item for value in values.values() for item in (value if isinstance(value, list) else [value])]
        if not all(isinstance(item, (bool, int, float, str)) for item in single):
            _fail(self.path, f"its manifest's {key!r} is not a map of single values")
        return values

    def _leaves(
        self, said: Mapping[str, Any], key: str
    ) -> tuple[dict[str, Leaf], dict[str, str], dict[str, tuple[int, ...]]]:
        leaves, digests, chunks = [], [], []
        for row in self._of(said, key, list):
            if not (isinstance(row, list) and len(row) == 5 and _texts(row[0]) and _sizes(row[1]) and _sizes(row[4])):
                _fail(
                    self.path,
                    "its manifest lists a leaf that is not described by keys, shape, dtype, checksum and chunk",
                )
            keys, shape, dtype, digest, chunk = row
            if (
                not isinstance(dtype, str)
                or dtype not in SAFETENSORS_TAGS
                or not (digest is None or isinstance(digest, str))
                or (digest is not None and (len(chunk) != len(shape) or 0 in chunk))
            ):
                _fail(self.path, f"its manifest describes leaf {'/'.join(keys)} wrongly")
            leaves.append(Leaf(tuple(keys), TensorSpec(tuple(shape), dtype)))
            digests.append(digest)
            chunks.append(tuple(chunk))
        named = name_leaves(leaves)
        if len(named) != len(leaves):
            _fail(self.path, "its manifest lists a leaf twice")
        known = {name: digest for name, digest in zip(named, digests, strict=True) if digest is not None}
        return named, known, {name: chunk for name, chunk in zip(named, chunks, strict=True) if name in known}

    def _values(self, said: Mapping[str, Any]) -> tuple[Value, ...]:
        values = []
        for row in self._of(said, "values", list):
            if not (
                isinstance(row, list)
                and len(row) == 5
                and isinstance(row[0], str)
                and _sizes(row[1])
                and all(n is None or _sizes([n]) for n in row[2:4])
                and isinstance(row[4], bool)
            ):
                _fail(self.path, "its manifest lists a value that is not described by name, shape, positions, mask and exactness")  # fmt: skip
            values.append(Value(row[0], tuple(row[1]), *row[2:]))
        if not values or len({value.name for value in values}) != len(values):
            _fail(self.path, "its manifest lists no values, or one of them twice")
        if len({value.exact for value in values}) != 1:
            _fail(self.path, "some of its values are there in lifted float64, others are not")
        return tuple(values)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**40 for n in value)


def _fail(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path}: not a whole recording: {what}; copy it again, or {AGAIN}")
