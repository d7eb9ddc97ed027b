"""The JSON manifest in the header of a recording: what was recorded, of which checkpoint, and how."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from convert.checkpoints.chunks import Grid
from convert.checkpoints.digest import combine
from convert.checkpoints.source import Leaf, name_leaves
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec
from convert.verify.sides.sampling import METHOD

FORMAT = 3  # of the manifest; a change that older versions would misread raises it
PRECISIONS = ("float32", "bfloat16", "float16", "float64")
RECORD_AGAIN = "record it again with `convert record`"


@dataclass(frozen=True)
class Value:
    """A recorded boundary or output.

    Attributes:
        shape: of the whole value.
        positions: how many positions were kept; None if the whole value was.
        mask: number of its mask; None if every element counts.
        float64: whether its float64 value is recorded as well.
    """

    name: str
    shape: tuple[int, ...]
    positions: int | None
    mask: int | None
    float64: bool

    def to_list(self) -> list[Any]:
        """Return the row of the manifest."""
        return [self.name, list(self.shape), self.positions, self.mask, self.float64]


@dataclass(frozen=True)
class Manifest:
    """The description of a recording. It has neither time nor path, so that the same run gives the same bytes.

    Attributes:
        converter: version of this package that wrote the recording.
        model, target: of the rules; boundaries have the names of the target's submodules.
        reference: ``module:factory`` of the two models; empty for the shipped reference.
        rules_sha256: of the rule file.
        settings, sizes: of the plan.
        source_format: format of the checkpoint, as text.
        leaves: name -> leaf of the checkpoint; merged: the same for leaves that the conversion merges from several.
        digests: name -> `digest_leaf`, of the leaves that the conversion reads.
        chunks: name -> shape of the chunks over which the digest is computed.
        seed: of the inputs and of the sample.
        precision: the dtype that users run in.
        unlifted: primitives that could not be computed in float64.
        environment: package -> version.
        values: in the order of the data.
        moved: as in `Evidence`.
        data: `checksum` of the tensors and of the other fields.
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
    moved: Mapping[str, float]
    data: str

    def grid(self, name: str) -> Grid | None:
        """Return the chunks over which a leaf's digest is computed; None for a leaf without digest."""
        return Grid(self.spec(name).shape, self.chunks[name]) if name in self.chunks else None

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of a leaf or merged leaf."""
        return (self.merged[name] if name in self.merged else self.leaves[name]).spec

    def _rows(self, leaves: Mapping[str, Leaf]) -> list[list[Any]]:
        return [
            [list(x.keys), list(x.spec.shape), x.spec.dtype, self.digests.get(name), list(self.chunks.get(name, ()))]
            for name, x in leaves.items()
        ]

    def to_json(self) -> str:
        """Return the manifest as JSON with sorted keys."""
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
                **({"moved": dict(self.moved)} if self.moved else {}),
                "data": self.data,
            },
            sort_keys=True,
        )


class ManifestReader:
    """Parse a manifest and validate every field: the file may come from anywhere."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def manifest(self, text: str) -> Manifest:
        """Parse the JSON text."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            damaged(self.path, f"the manifest is not JSON: {error}")
        if not isinstance(content, dict):
            damaged(self.path, "the manifest is not a JSON object")
        if content.get("format") != FORMAT:
            raise CheckpointError(
                Finding(
                    "recording-invalid",
                    path=str(self.path),
                    expected=f"a recording of format {FORMAT}",
                    got=f"format {content.get('format')!r}",
                    fix=f"{RECORD_AGAIN}, or check with the version that wrote it ({content.get('converter')})",
                )
            )
        if content.get("sampling") != METHOD:
            damaged(self.path, "the method that drew its samples", METHOD, repr(content.get("sampling")))
        leaves, digests, chunks = self._leaves(content, "leaves")
        merged, more, grids = self._leaves(content, "merged") if "merged" in content else ({}, {}, {})
        if leaves.keys() & merged.keys():
            damaged(self.path, "the manifest lists a leaf twice")
        strings = {key: self._of(content, key, str) for key in ("converter", "model", "target", "reference", "rules_sha256", "source_format", "precision", "data")}  # fmt: skip
        if strings["precision"] not in PRECISIONS:
            damaged(self.path, "the precision", " or ".join(PRECISIONS), repr(strings["precision"]))
        unlifted = self._of(content, "unlifted", list)
        if self._of(content, "seed", int) < 0:
            damaged(self.path, "the seed", "0 or more", str(content["seed"]))
        return Manifest(
            **strings,
            settings=self._flat(content, "settings"),
            sizes=self._flat(content, "sizes"),
            leaves=leaves,
            merged=merged,
            digests={**digests, **more},
            chunks={**chunks, **grids},
            seed=self._of(content, "seed", int),
            unlifted=tuple(map(str, unlifted)),
            environment={str(k): str(v) for k, v in self._of(content, "environment", dict).items()},
            values=self._values(content),
            moved=self._moved(content),
        )

    def _of(self, content: Mapping[str, Any], key: str, kind: type) -> Any:
        """Return the value of a key, which must have exactly this type."""
        if type(content.get(key)) is not kind:
            damaged(self.path, f"{key!r} in the manifest", kind.__name__, type(content.get(key)).__name__)
        return content[key]

    def _flat(self, content: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Return a map of single values, or of lists of them."""
        values: dict[str, Any] = self._of(content, key, dict)
        single = [item for value in values.values() for item in (value if isinstance(value, list) else [value])]
        if not all(isinstance(item, (bool, int, float, str)) for item in single):
            damaged(self.path, f"{key!r} in the manifest is not a map of single values")
        return values

    def _leaves(
        self, content: Mapping[str, Any], key: str
    ) -> tuple[dict[str, Leaf], dict[str, str], dict[str, tuple[int, ...]]]:
        leaves, digests, chunks = [], [], []
        for row in self._of(content, key, list):
            if not (isinstance(row, list) and len(row) == 5 and _texts(row[0]) and _sizes(row[1]) and _sizes(row[4])):
                damaged(
                    self.path,
                    "the manifest lists a leaf that is not described by keys, shape, dtype, checksum and chunk",
                )
            keys, shape, dtype, digest, chunk = row
            if (
                not isinstance(dtype, str)
                or dtype not in SAFETENSORS_TAGS
                or not (digest is None or isinstance(digest, str))
                or (digest is not None and (len(chunk) != len(shape) or 0 in chunk))
            ):
                damaged(
                    self.path, f"the manifest describes leaf {'/'.join(keys)} with a wrong dtype, checksum or chunk"
                )
            leaves.append(Leaf(tuple(keys), TensorSpec(tuple(shape), dtype)))
            digests.append(digest)
            chunks.append(tuple(chunk))
        named = name_leaves(leaves)
        if len(named) != len(leaves):
            damaged(self.path, "the manifest lists a leaf twice")
        known = {name: digest for name, digest in zip(named, digests, strict=True) if digest is not None}
        return named, known, {name: chunk for name, chunk in zip(named, chunks, strict=True) if name in known}

    def _values(self, content: Mapping[str, Any]) -> tuple[Value, ...]:
        values = []
        for row in self._of(content, "values", list):
            if not (
                isinstance(row, list)
                and len(row) == 5
                and isinstance(row[0], str)
                and _sizes(row[1])
                and all(n is None or _sizes([n]) for n in row[2:4])
                and isinstance(row[4], bool)
            ):
                damaged(self.path, "the manifest lists a value that is not described by name, shape, positions, mask and float64")  # fmt: skip
            values.append(Value(row[0], tuple(row[1]), *row[2:]))
        if not values or len({value.name for value in values}) != len(values):
            damaged(self.path, "the manifest lists no values, or one of them twice")
        if len({value.float64 for value in values}) != 1:
            damaged(self.path, "some values are recorded in float64, and others are not")
        return tuple(values)

    def _moved(self, content: Mapping[str, Any]) -> dict[str, float]:
        moved: dict[str, float] = self._of(content, "moved", dict) if "moved" in content else {}
        if not all(type(change) is float and 0 <= change < math.inf for change in moved.values()):
            damaged(self.path, "'moved' in the manifest is not a map of relative changes")
        return moved


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**40 for n in value)


def damaged(path: Path, problem: str, expected: str = "", got: str = "") -> NoReturn:
    """Raise the error of a recording whose content does not fit together."""
    raise CheckpointError(
        Finding(
            "recording-damaged",
            f"the recording is damaged: {problem}",
            path=str(path),
            expected=expected,
            got=got,
            fix=f"copy the file again, or {RECORD_AGAIN}",
        )
    )
