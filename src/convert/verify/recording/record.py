"""Run a JAX model and write its values to a recording, so that a conversion can be checked where JAX is not installed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.checkpoints.digest import digest_leaf
from convert.core import safetensors_header
from convert.core.errors import ConvertError, OutputError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.core.user_code import REFERENCE_OPTION, user_code_errors
from convert.numerics.precision import jax_on_the_cpu, require_jax, require_precision
from convert.planning.facts.sidecar import sidecar_facts
from convert.planning.plan import Plan
from convert.verify.recording.file import FLOAT64, INPUT, KEY, LEAF, MASK, NATIVE, checksum
from convert.verify.recording.manifest import Manifest, Value
from convert.verify.recording.source import computes
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.run_jax import live_evidence
from convert.verify.sides.sampling import Cost, Sample, allot, least, positions
from convert.writing.destination.atomic import AtomicOutput
from convert.writing.execute import refuse_overlap
from convert.writing.file_layout import OutTensor, lay_out
from convert.writing.provenance import tool_version
from convert.writing.transfer import used_leaves
from convert.writing.writer import Writer

if TYPE_CHECKING:
    from convert.references.protocol import Reference

Array = np.ndarray[Any, np.dtype[Any]]
MAX_BYTES = 64 * 10**6  # of a recording: small enough for a repository
ELSEWHERE = "record where JAX and the model's package are installed; the check itself needs neither"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "timesfm", "praxis", "paxml", "gemma", "recurrentgemma")
UNKNOWN = "0" * (len("xxh3_128:") + 32)  # stands for the checksum while the header is measured


@dataclass(frozen=True)
class Recorded:
    """A recording that was written.

    Attributes:
        out: the file; nbytes: its size.
        values: number of boundaries and outputs; sampled: how many of them were not kept whole.
        evidence: all values of the JAX model.
    """

    out: Path
    nbytes: int
    values: int
    sampled: int
    evidence: Evidence


def record(
    plan: Plan,
    reference: Reference,
    out: str | Path,
    *,
    factory: str = "",
    seed: int = 0,
    precision: str = "float32",
    max_bytes: int = MAX_BYTES,
    overwrite: bool = False,
) -> Recorded:
    """Run the JAX model in `precision` and in float64, and write its values to `out`.

    Args:
        plan: of the conversion that will be checked.
        factory: ``module:function`` that made `reference`; empty for a shipped reference.
        max_bytes: upper limit of the file's size; values that are too large for it are sampled.

    Raises:
        ConvertError: the reference has no JAX side, JAX or the model's package is not installed, or the output exists or
            cannot be written.
        UserCodeError: the user's reference failed.
    """
    require_precision(precision)
    if seed < 0:
        raise ConvertError(Finding("usage", "--seed", expected="0 or more", got=str(seed)))
    _check_out(Path(out), plan, overwrite)
    if reference.jax is None:
        raise ConvertError(
            Finding(
                "reference-unavailable", "the reference has no JAX side to record", fix="set `jax` of the reference"
            )
        )
    require_jax(ELSEWHERE)
    try:
        with jax_on_the_cpu(), user_code_errors(factory or None, REFERENCE_OPTION):
            evidence = live_evidence(plan, reference, precision=precision, seed=seed)
    except ImportError as error:
        raise ConvertError(
            Finding("reference-unavailable", f"the JAX model cannot run here: {error}", fix=ELSEWHERE)
        ) from error
    return write_recording(
        plan,
        evidence,
        out,
        outputs=tuple(reference.outputs),
        factory=factory,
        seed=seed,
        max_bytes=max_bytes,
        overwrite=overwrite,
    )


def write_recording(
    plan: Plan,
    evidence: Evidence,
    out: str | Path,
    *,
    outputs: tuple[str, ...] = (),
    factory: str = "",
    seed: int = 0,
    max_bytes: int = MAX_BYTES,
    overwrite: bool = False,
) -> Recorded:
    """Write evidence to a recording; an interrupted write leaves no file.

    Args:
        outputs: names of values that are kept whole if they take no more than half of `max_bytes`.

    Raises:
        OutputError: `out` has another suffix than ``.safetensors``, exists, or cannot be written; or `max_bytes` is too small.
    """
    out = Path(out)
    _check_out(out, plan, overwrite)
    leaves, digests = _leaves(plan, max_bytes // 4)
    masks, numbers = _masks(evidence)
    fixed = {
        **{INPUT + name: np.asarray(value) for name, value in evidence.inputs.items()},
        **{f"{MASK}{k}": mask for k, mask in enumerate(masks)},
        **{LEAF + name: array for name, array in leaves.items()},
    }
    manifest = Manifest(
        converter=tool_version(),
        model=plan.rules.model,
        target=plan.target,
        reference=factory,
        rules_sha256=plan.rules.sha256,
        settings={**sidecar_facts(plan.rules, plan.sidecar), **plan.settings},  # the check has no sidecar config.json
        sizes=plan.sizes,
        source_format=plan.source.format,
        leaves=plan.checkpoint.leaves,
        merged={name: plan.source.leaves[name] for name in plan.merges},
        digests=digests,
        chunks={leaf: plan.source.chunks(leaf).chunk for leaf in digests},
        seed=seed,
        precision=evidence.precision,
        unlifted=evidence.unlifted,
        environment={**_versions(), **evidence.environment},
        values=(),
        moved={name: change if math.isfinite(change) else 0.0 for name, change in evidence.moved.items()},
        data=UNKNOWN,
    )
    selection = _Selection(evidence, numbers, seed)
    budget, nbytes = max_bytes, max_bytes + 1
    while nbytes > max_bytes:  # once or twice: the length of the header depends on what is kept
        costs = selection.costs(outputs, max_bytes // 2)
        manifest = replace(manifest, values=selection.values(costs, _allot(costs, budget - _size(fixed), max_bytes)))
        specs = {name: TensorSpec(a.shape, a.dtype.name) for name, a in fixed.items()} | selection.specs(
            manifest.values
        )
        order = safetensors_header.file_order(specs.items())
        header = safetensors_header.encode(order, {KEY: manifest.to_json(), "format": "pt"})
        nbytes = len(header) + sum(spec.nbytes for spec in specs.values())
        budget -= max(nbytes - max_bytes, 0)
    arrays = {**fixed, **selection.arrays(manifest.values)}
    _write(out, arrays, replace(manifest, data=checksum(manifest.to_json(), arrays)), overwrite)
    sampled = sum(value.positions is not None for value in manifest.values)
    return Recorded(out, nbytes, len(manifest.values), sampled, evidence)


def _write(out: Path, arrays: Mapping[str, Array], manifest: Manifest, overwrite: bool) -> None:
    tensors = [OutTensor(name, TensorSpec(array.shape, array.dtype.name)) for name, array in arrays.items()]
    layout = lay_out(tensors, single=out.name)
    with Writer(out, layout, tensors, metadata={KEY: manifest.to_json()}, overwrite=overwrite) as writer:
        for name, array in arrays.items():
            writer.region(name)[...] = array
        writer.commit()


def _check_out(out: Path, plan: Plan, overwrite: bool) -> None:
    """Check that `out` can be written, before the model runs for long."""
    if out.suffix != ".safetensors":
        raise OutputError(
            Finding(
                "output-name-invalid",
                path=str(out),
                expected="a name that ends in .safetensors, as a recording is one file",
                got=out.name,
                fix=f"write {out.with_suffix('.safetensors')}",
            )
        )
    refuse_overlap(out, plan.source)
    AtomicOutput(out, directory=False, overwrite=overwrite).discard()


def _leaves(plan: Plan, room: int) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the leaves that cannot be computed back from converted weights, and the checksums of all leaves that are read.

    Args:
        room: bytes that the leaves may take; a leaf that does not fit is left out.
    """
    stored, digests = {}, {}
    for leaf, work in used_leaves(plan).items():
        array = plan.source.read(leaf)
        digests[leaf] = digest_leaf(leaf, array, plan.source.chunks(leaf))
        merged = leaf in plan.merges
        if (not work or any(computes(step, merged) for step, _ in work)) and array.nbytes <= room:
            stored[leaf] = array
            room -= array.nbytes
    return stored, digests


def _masks(evidence: Evidence) -> tuple[list[Array], dict[str, int]]:
    """Return the distinct masks, and the number of each value's mask."""
    found: dict[tuple[tuple[int, ...], bytes], int] = {}
    masks: list[Array] = []
    numbers = {}
    for name, given in evidence.masks.items():
        mask = np.ascontiguousarray(given, bool)
        key = mask.shape, mask.tobytes()
        if key not in found:
            found[key] = len(masks)
            masks.append(mask)
        numbers[name] = found[key]
    return masks, numbers


def _versions() -> dict[str, str]:
    """Return the versions of installed packages that a JAX model may come from."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _size(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _allot(costs: Mapping[str, Cost], budget: int, max_bytes: int) -> dict[str, int]:
    try:
        return allot(costs, budget)
    except ValueError as error:
        needed = int(error.args[0]) + max_bytes - budget
        raise OutputError(
            Finding(
                "recording-too-large",
                f"{len(costs)} boundaries and outputs at the fewest possible positions",
                expected=f"at most {max_bytes:,} bytes (--max-size)",
                got=f"{needed:,} bytes",
                fix="allow more with --max-size",
            )
        ) from None


class _Selection:
    """The part of the evidence that goes into the file."""

    def __init__(self, evidence: Evidence, masks: Mapping[str, int], seed: int) -> None:
        self.evidence, self.masks, self.seed = evidence, masks, seed
        self.dtypes = {name: _narrowest(value, evidence.precision) for name, value in evidence.native_values.items()}

    def costs(self, outputs: tuple[str, ...], limit: int) -> dict[str, Cost]:
        """Return the size of each value; `outputs` are kept whole if together they take no more than `limit`."""
        native = self.evidence.native_values
        float64_size = 0 if self.evidence.float64_values is None else 8
        item = {name: float64_size + numpy_dtype(dtype).itemsize for name, dtype in self.dtypes.items()}
        whole = sum(native[name].size * item[name] for name in outputs if name in native) <= limit
        costs = {}
        for name, value in native.items():
            fewest, counted = (0, 0) if value.ndim < 2 else least(value.shape, self.evidence.masks.get(name))
            if not counted or not value.size or (whole and name in outputs):  # as it is, or not at all
                costs[name] = Cost(value.size * item[name], 1, 1, 1)
            else:
                width = value.shape[-1]
                costs[name] = Cost(width * item[name], fewest, counted, value.size // width)
        return costs

    def values(self, costs: Mapping[str, Cost], counts: Mapping[str, int]) -> tuple[Value, ...]:
        """Return the values as the manifest lists them."""
        float64 = self.evidence.float64_values is not None
        return tuple(
            Value(
                name,
                value.shape,
                None if counts[name] == costs[name].whole else counts[name],
                self.masks.get(name),
                float64,
            )
            for name, value in self.evidence.native_values.items()
        )

    def specs(self, values: tuple[Value, ...]) -> dict[str, TensorSpec]:
        """Return shape and dtype of the tensors that hold these values, without drawing a sample."""
        specs = {}
        for value in values:
            shape = value.shape if value.positions is None else (value.positions, value.shape[-1])
            specs[NATIVE + value.name] = TensorSpec(shape, self.dtypes[value.name])
            if value.float64:
                specs[FLOAT64 + value.name] = TensorSpec(shape, "float64")
        return specs

    def arrays(self, values: tuple[Value, ...]) -> dict[str, Array]:
        """Return the tensors that hold these values."""
        arrays = {}
        for value in values:
            name, native = value.name, self.evidence.native_values[value.name]
            float64 = (
                None
                if self.evidence.float64_values is None
                else np.asarray(self.evidence.float64_values[name], np.float64)
            )
            if value.positions is not None:
                mask = self.evidence.masks.get(name)
                sample = Sample(value.shape, positions(value.shape, mask, value.positions, self.seed))
                native, float64 = sample.take(native), None if float64 is None else sample.take(float64)
            arrays[NATIVE + name] = native.astype(numpy_dtype(self.dtypes[name]))
            if float64 is not None:
                arrays[FLOAT64 + name] = float64
        return arrays


def _narrowest(value: Array, precision: str) -> str:
    """Return the narrowest dtype that holds `value` exactly: `precision`, unless the model computed it in a wider one."""
    for dtype in dict.fromkeys((precision, "float32")):
        with np.errstate(over="ignore", invalid="ignore"):
            back = value.astype(numpy_dtype(dtype)).astype(np.float64)
        if np.array_equal(back, value, equal_nan=True):
            return dtype
    return "float64"
