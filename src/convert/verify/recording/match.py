"""Decide whether a recording belongs to the file and the checkpoint that are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from convert.checkpoints.digest import combine, digest_leaf
from convert.checkpoints.source import Leaf
from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.core.tensor_spec import is_float
from convert.numerics.compare import epsilon
from convert.planning.options import ConversionOptions
from convert.planning.plan import Plan
from convert.verify.recording.file import Recording
from convert.verify.recording.manifest import RECORD_AGAIN
from convert.verify.recording.source import RecordedSource
from convert.verify.sides.evidence import Evidence
from convert.writing.transfer import used_leaves
from convert.writing.written import Written


def recording_defaults(
    recording: Recording,
    written: Written,
    options: ConversionOptions,
    precision: str | None,
    reference: str | None,
    seed: int | None = None,
) -> ConversionOptions:
    """Return target and settings for the plan: the user's, else those of the file's header, else the recording's.

    Raises:
        ConvertError: the recording is of another model, target, precision, reference or seed.
    """
    manifest, header = recording.manifest, written.metadata
    to = options.to or header.get("target") or manifest.target
    known_model = header.get("model") or manifest.model
    for name, recorded, wanted, option in (
        ("model", manifest.model, known_model, ""),
        ("target", manifest.target, to, f" with --to {to}"),
        ("precision", manifest.precision, precision or manifest.precision, f" with --precision {precision}"),
        ("seed", manifest.seed, manifest.seed if seed is None else seed, f" with --seed {seed}"),
    ):
        if recorded != wanted:
            raise ConvertError(
                _mismatch(
                    recording,
                    f"{name} {wanted}, as {written.path} is checked with it",
                    f"{name} {recorded}",
                    f"give the recording of this {name}, or {RECORD_AGAIN}{option}",
                )
            )
    if manifest.reference != (reference or ""):  # never taken from the file: it names code that will run
        give = f"give --reference {manifest.reference}" if manifest.reference else "leave --reference out"
        option = f" with --reference {reference}" if reference else ""
        raise ConvertError(
            _mismatch(
                recording,
                f"reference {reference or '(the shipped one)'}",
                f"reference {manifest.reference or '(the shipped one)'}",
                f"{give}, or {RECORD_AGAIN}{option}",
            )
        )
    stated = written.stated("settings")
    settings = {key: value for key, value in manifest.settings.items() if key not in stated}
    return replace(options, to=to, settings={**settings, **options.settings})


def evidence_of(recording: Recording, plan: Plan, written: Written) -> Evidence:
    """Return the recorded evidence for this plan.

    Raises:
        ConvertError: the recording is of another model, checkpoint or size.
    """
    manifest, name = recording.manifest, recording.path.name
    notes = [f"recorded with {', '.join(f'{package} {number}' for package, number in manifest.environment.items())}"]
    _require_equal(recording, "model", plan.rules.model, manifest.model)
    if manifest.rules_sha256 != plan.rules.sha256:
        notes.append(f"{name} was recorded with another version of the rules than {plan.rules.path}")
    _require_same_merges(recording, plan)
    if isinstance(plan.checkpoint, RecordedSource):
        notes += _require_digest_of_header(recording, plan, written)
    else:
        _require_leaves_of_checkpoint(recording, plan)
    _require_equal(recording, "sizes", dict(plan.sizes), dict(manifest.sizes))
    coarsest = rounded_dtype(plan)
    if coarsest:
        notes.append(
            f"the weights were rounded to {coarsest} and the checkpoint is not given (--from), so the comparison in float64 is no "
            f"finer than {coarsest}"
        )
    return replace(recording.evidence, rounded=coarsest, notes=tuple(notes))


def rounded_dtype(plan: Plan) -> str:
    """Return the coarsest dtype to which weights were rounded whose original values are unknown; empty when all are known."""
    source = plan.checkpoint
    if not isinstance(source, RecordedSource):
        return ""
    dtypes = {
        step.spec.dtype
        for leaf, work in used_leaves(plan).items()
        for step, _ in work
        if (step.loses or step.arithmetic) and is_float(step.spec.dtype) and leaf not in source.stored
    }
    dtypes |= {merge.spec.dtype for merge in plan.merges.values()}
    return max(dtypes, key=epsilon, default="")


def _mismatch(recording: Recording, expected: str, got: str, fix: str) -> Finding:
    return Finding(
        "recording-mismatch",
        "the recording was made of something else than what is checked",
        path=str(recording.path),
        expected=expected,
        got=got,
        fix=fix,
    )


def _require_equal(recording: Recording, name: str, planned: object, recorded: object) -> None:
    """Check that the recording was made with the same value."""
    if planned != recorded:
        fix = f"give the recording of this {name}, or {RECORD_AGAIN}"
        raise ConvertError(_mismatch(recording, f"{name} {planned}", f"{name} {recorded}", fix))


def _require_same_merges(recording: Recording, plan: Plan) -> None:
    """Check that the plan merges the same leaves as the recorded one; their names describe how."""
    planned, recorded = set(plan.merges), recording.manifest.merged.keys()
    if planned != recorded:
        raise ConvertError(
            _mismatch(
                recording,
                f"merged weight {min(planned - recorded, default='(none)')}, as {plan.rules.path} makes",
                f"merged weight {min(recorded - planned, default='(none)')}",
                f"check with the rules and settings of the recording, or {RECORD_AGAIN}",
            )
        )


def _require_digest_of_header(recording: Recording, plan: Plan, written: Written) -> list[str]:
    """Check that the file was made from the recorded checkpoint, by its header; return notes."""
    digests, stated = recording.manifest.digests, written.metadata.get("source_digest")
    if stated is None:
        return [
            f"{written.path} does not name the checkpoint it was made from; assuming the one of {recording.path.name}"
        ]
    recorded = combine({leaf: digests[leaf] for leaf in used_leaves(plan) if leaf in digests})
    if stated != recorded:
        raise ConvertError(
            _mismatch(
                recording,
                f"a checkpoint with the digest {stated}, as in the header of {written.path}",
                f"the digest {recorded}: another checkpoint or another step",
                f"give the recording of this checkpoint, or {RECORD_AGAIN}",
            )
        )
    return []


def _require_leaves_of_checkpoint(recording: Recording, plan: Plan) -> None:
    """Check that the checkpoint has the recorded leaves, with the same shapes, dtypes and values."""
    manifest, checkpoint = recording.manifest, plan.checkpoint
    fix = f"give the recording of this checkpoint, or {RECORD_AGAIN}"
    for name, leaf in manifest.leaves.items():
        if name not in checkpoint.leaves or checkpoint.leaves[name].spec != leaf.spec:
            here = _spec_or_missing(name, checkpoint.leaves)
            raise ConvertError(
                _mismatch(recording, f"leaf {name} {here}, as in {checkpoint.path}", f"{leaf.spec}", fix)
            )
    differing = [
        leaf
        for leaf in used_leaves(plan)
        if digest_leaf(leaf, plan.source.read(leaf), manifest.grid(leaf)) != manifest.digests.get(leaf)
    ]
    if differing:
        count = f"{len(differing)} of {len(manifest.digests)} leaves"
        got = f"other values in {count}, first in {differing[0]}"
        raise ConvertError(_mismatch(recording, f"the values of {checkpoint.path}", got, fix))


def _spec_or_missing(name: str, leaves: Mapping[str, Leaf]) -> str:
    """Return the leaf's shape and dtype as text, or ``missing`` with the nearest name."""
    if name in leaves:
        return str(leaves[name].spec)
    suggestion = did_you_mean(name, leaves)
    return f"missing ({suggestion})" if suggestion else "missing"
