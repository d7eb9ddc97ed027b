"""A checkpoint that is known from a recording alone: its leaves' names, shapes and checksums, and the written weights, from
which most leaves can be computed back. What a check can tell without the checkpoint itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convert.checkpoints.chunks import Grid
from convert.checkpoints.digest import combine, digest_leaf
from convert.checkpoints.source import Source
from convert.core.errors import CheckpointError, ConvertError
from convert.core.fields import nearest
from convert.core.findings import Finding
from convert.core.ops import (
    Add,
    Cast,
    Deinterleave,
    Flip,
    Interleave,
    Multiply,
    Op,
    Pad,
    Permute,
    Place,
    Reshape,
    Slice,
    Take,
    apply,
    inverse,
    is_float,
)
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.core.weight_norm_ops import LossyError
from convert.layers.base import Part, Step, expected
from convert.layers.mistake import Mistake
from convert.planning.low_rank_source import HoldsMerged, Merge
from convert.planning.options import ConversionOptions
from convert.planning.plan import Plan
from convert.verify.mistakes.catalogue import known_mistakes
from convert.verify.numerics.bits import nearly, same_bits
from convert.verify.numerics.compare import epsilon
from convert.verify.recording.file import AGAIN, Recording
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.sides.evidence import Evidence
from convert.verify.weights.level import unlike_computed
from convert.verify.weights.tied import compare_tied
from convert.verify.written import Written
from convert.writing.transfer import used_leaves

Array = np.ndarray[Any, np.dtype[Any]]
_VIEWS = (Take, Slice, Permute, Flip)  # give views of the array, which can be written through
_MOVES = (*_VIEWS, Reshape, Pad, Place, Deinterleave, Interleave, Cast)  # compute nothing


class RecordedSource(Source, HoldsMerged):
    """The checkpoint of a recording. Leaves are the recorded ones, or are computed back from the written weights."""

    def __init__(self, recording: Recording, written: Written) -> None:
        self.path = recording.path
        self.format = f"{recording.manifest.source_format}, known from a recording"
        self.leaves = recording.manifest.leaves
        self._spec, self._merged = recording.manifest.spec, recording.manifest.merged
        self.stored, self.digests, self._written = recording.stored, recording.manifest.digests, written
        self._grid = recording.manifest.grid
        self.made_by: Mapping[str, list[tuple[Step, Part]]] = {}  # leaf -> its steps, as soon as there is a plan
        self._last: tuple[str, Array] | None = None  # read: the layers of a stack are asked for one after another

    def read(self, name: str) -> Array:
        """A leaf: as it was recorded, or such that the plan makes of it what was written; zeros where nothing was."""
        if name in self.stored:
            return self.stored[name]
        if name not in self.made_by:
            raise CheckpointError(
                f"{self.path}: leaf {name} is not in the recording, and no written tensor is made of it"
            )
        last = self._last
        if last is not None and last[0] == name:
            return last[1]
        spec = self._spec(name)
        leaf = np.zeros(spec.shape, numpy_dtype(spec.dtype))
        for step, part in self.made_by[name]:
            if self._holds(step) and not step.tied:
                view, ops = _view(leaf, part.ops)
                rows = part.share(self._written.read(step.name))
                try:
                    back = inverse(ops, TensorSpec(view.shape, spec.dtype))
                except LossyError as error:
                    raise CheckpointError(f"{self.path}: leaf {name} is not in the recording, and of {step.name} it cannot be computed back: {error}; record again with a larger --max-size") from None  # fmt: skip
                view[...] = _back(back, rows)
        leaf.setflags(write=False)
        self._last = name, leaf
        return leaf

    def read_merged(self, merge: Merge) -> Array:
        """The written tensor is the result; the leaves that it was computed from are not known."""
        return self.read(merge.name)

    def chunks(self, name: str) -> Grid:
        return self._grid(name) or super().chunks(name)

    def whole(self, name: str) -> bool:
        """Whether `read` gives the leaf bit for bit, if the weights are right."""
        if name in self.stored:
            return True
        covered = np.zeros(self._spec(name).shape, bool)
        for step, part in self.made_by[name]:
            if step.tied:
                continue
            if not self._holds(step) or computes(step, name in self._merged) or step.loses:
                return False
            view, ops = _view(covered, part.ops)
            rows = part.share(np.ones(step.spec.shape, bool))
            moves = tuple(op for op in ops if not isinstance(op, (Cast, Add, Multiply)))
            view[...] |= apply(inverse(moves, TensorSpec(view.shape, "bool")), rows)
        return bool(covered.all())

    def _holds(self, step: Step) -> bool:
        return self._written.specs.get(step.name) == step.spec


def computes(step: Step, merged: bool) -> bool:
    """Whether a tensor's values are computed from its leaf's, and not only moved.

    Args:
        merged: whether the leaf is itself computed from others, which the step's words tell as well.
    """
    return bool(step.arithmetic) and (not merged or any(not isinstance(op, _MOVES) for part in step.parts for op in part.ops))  # fmt: skip


def _view(leaf: Array, ops: tuple[Op, ...]) -> tuple[Array, tuple[Op, ...]]:
    """The part of a leaf that the first operations select, to write into, and the operations that are left."""
    for k, op in enumerate(ops):
        if not isinstance(op, _VIEWS):
            return leaf, ops[k:]
        leaf = op.apply(leaf)
    return leaf, ()


def _back(ops: tuple[Op, ...], rows: Array) -> Array:
    for op in ops:
        with np.errstate(over="ignore", invalid="ignore"):
            rows = rows.astype(numpy_dtype(op.dtype)) if isinstance(op, Cast) else op.apply(rows)
    return rows


def recording_defaults(
    recording: Recording,
    written: Written,
    model: str | None,
    options: ConversionOptions,
    precision: str | None,
    reference: str | None,
    seed: int | None = None,
) -> tuple[str, ConversionOptions]:
    """Model, target and settings for the plan: what the user says, else the file's header, else the recording.

    Raises:
        ConvertError: the recording is of another model, target, precision, reference or seed than the user or the file says.
    """
    said, path = recording.manifest, recording.path
    header = written.metadata
    to = options.to or header.get("target") or said.target
    known = header.get("model") or said.model
    for word, recorded, wanted, option in (
        ("model", said.model, known, ""),
        ("target", said.target, to, f" with --to {to}"),
        ("precision", said.precision, precision or said.precision, f" with --precision {precision}"),
        ("seed", said.seed, said.seed if seed is None else seed, f" with --seed {seed}"),
        ("reference", said.reference, reference or "", f" with --reference {reference}" if reference else ""),
    ):
        if recorded == wanted:
            continue
        if word == "reference":  # named by the user and never by the file: it is code that will be run
            ask = f"give --reference {recorded}" if recorded else "leave --reference out"
            raise ConvertError(
                f"{path} was recorded with {recorded or 'the shipped reference'}; {ask}, or {AGAIN}{option}"
            )
        raise ConvertError(
            f"{path} is a recording of {word} {recorded}, and {written.path} is to be checked as {word} {wanted}; "
            f"give the recording of this {word}, or {AGAIN}{option}"
        )
    more = {key: value for key, value in said.settings.items() if key not in written.stated("settings")}
    return model or known, replace(options, to=to, settings={**more, **options.settings})


def evidence_of(recording: Recording, plan: Plan, written: Written) -> Evidence:
    """The recorded evidence, for this plan.

    Raises:
        ConvertError: the recording is of another model, checkpoint or size.
    """
    said, path = recording.manifest, recording.path
    if said.model != plan.rules.model:
        raise ConvertError(f"{path} is a recording of model {said.model}, and the rules are those of {plan.rules.model}; give the recording of this model, or {AGAIN}")  # fmt: skip
    notes = [f"recorded with {', '.join(f'{name} {number}' for name, number in said.environment.items())}"]
    if said.rules_sha256 != plan.rules.sha256:
        notes.append(f"{path.name} was recorded with another version of the rules than {plan.rules.path}")
    _same_merges(recording, plan)
    if isinstance(plan.checkpoint, RecordedSource):
        plan.checkpoint.made_by = used_leaves(plan)
        notes += _against_header(recording, plan, written)
    else:
        _against_source(recording, plan)
    if dict(said.sizes) != dict(plan.sizes):
        raise ConvertError(
            f"{path} was recorded with the sizes {dict(said.sizes)}, the plan has {dict(plan.sizes)}; {AGAIN}"
        )
    coarsest = rounded(plan)
    if coarsest:
        notes.append(f"the weights were rounded to {coarsest} and the checkpoint is not given (--from), so that lifted float64 tells no more than {coarsest}")  # fmt: skip
    return replace(recording.evidence, rounded=coarsest, notes=tuple(notes))


def _same_merges(recording: Recording, plan: Plan) -> None:
    """Whether the plan computes the same leaves from several as the recorded one did; their names say how."""
    ours = set(plan.merges)
    theirs = recording.manifest.merged.keys()
    if ours == theirs:
        return
    other = min(theirs - ours, default="nothing of the kind")
    raise ConvertError(
        f"{recording.path} was recorded with other merged weights than {plan.rules.path} makes: "
        f"{min(ours - theirs, default='nothing of the kind')} here, {other} there. Check with the rules and settings that it was "
        f"recorded with, or {AGAIN}"
    )


def _against_header(recording: Recording, plan: Plan, written: Written) -> list[str]:
    digests = recording.manifest.digests
    ours = written.metadata.get("source_digest")
    used = used_leaves(plan)
    recorded = combine({leaf: digests[leaf] for leaf in used if leaf in digests})
    if ours is None:
        return [
            f"{written.path} does not say of which checkpoint it was made; taken to be that of {recording.path.name}"
        ]
    if ours != recorded:
        raise ConvertError(
            f"{written.path} says it was made from a checkpoint with the digest {ours}, and {recording.path} was recorded "
            f"from one with {recorded}: another checkpoint or another step. Give the recording of this one, or {AGAIN}"
        )
    return []


def _against_source(recording: Recording, plan: Plan) -> None:
    said, here = recording.manifest, plan.checkpoint
    for name, leaf in said.leaves.items():
        if name not in here.leaves or here.leaves[name].spec != leaf.spec:
            found = str(here.leaves[name].spec) if name in here.leaves else f"missing{nearest(name, here.leaves)}"
            raise ConvertError(
                f"{recording.path} was recorded from another checkpoint than {here.path}: leaf {name} was {leaf.spec} "
                f"there and is {found} here. Give the recording of this one, or {AGAIN}"
            )
    differ = [
        leaf
        for leaf in used_leaves(plan)
        if digest_leaf(leaf, plan.source.read(leaf), said.grid(leaf)) != said.digests.get(leaf)
    ]
    if differ:
        raise ConvertError(
            f"{recording.path} was recorded from another checkpoint than {here.path}: {len(differ)} of {len(said.digests)} "
            f"leaves have other values, the first is {differ[0]}. Give the recording of this one, or {AGAIN}"
        )


def rounded(plan: Plan) -> str:
    """The coarsest dtype to which weights were rounded whose unrounded values nobody knows; empty when all are known."""
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


def check_recorded_weights(plan: Plan, written: Written) -> LevelReport:
    """Level 2 without the checkpoint: every leaf is computed back from what was written, and its checksum compared.

    Passes when the checksums of all leaves agree: the file holds the recorded checkpoint bit for bit. A leaf that cannot
    be computed back (its tensor was rounded) leaves the level undecided.
    """
    started = time.monotonic()
    source = plan.checkpoint
    assert isinstance(source, RecordedSource)
    findings: list[Finding] = []
    unknown: list[str] = []
    compared = 0
    findings += compare_tied(plan, written).values()
    for leaf, work in used_leaves(plan).items():
        work = [(step, part) for step, part in work if not step.tied]  # equal to others, or in `loose`
        steps = {step.name: step for step, _ in work if step.name in written.tensors}
        if not steps or any(written.specs[name] != step.spec for name, step in steps.items()):
            continue  # the coverage level names it
        if not source.whole(leaf):
            unknown.append(leaf)
            continue
        compared += 1
        wrong = list(_wrong(leaf, work, written, source))
        if wrong:
            findings.append(_finding(plan, leaf, [steps[name] for name in wrong], written))
    findings += unlike_computed(plan, written)
    reason = ""
    if unknown:
        reason = (
            f"{len(unknown)} of {compared + len(unknown)} leaves cannot be computed back from the rounded weights, "
            f"{unknown[0]} for example; --from compares them"
        )
    elif not compared:
        reason = "none of the plan's tensors is in the file"
    return LevelReport(
        "weights",
        Verdict.FAILED if findings else Verdict.SKIPPED if reason else Verdict.PASSED,
        "" if findings else reason,
        tuple(findings),
        notes=(f"{compared} leaves computed back from the file, their checksums compared with {source.path.name}",),
        seconds=time.monotonic() - started,
    )


def _finding(plan: Plan, leaf: str, wrong: list[Step], written: Written) -> Finding:
    step, names = wrong[0], [step.name for step in wrong]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    source = plan.checkpoint
    known = isinstance(source, RecordedSource) and leaf in source.stored
    match = _match(plan, step, written.read(step.name)) if known else None
    if match is not None:
        said = (
            f"{match.name}: {step.name}{more} is {match.gives}; {step.rule.line_only} makes of {leaf}: {match.instead}"
        )
    elif known:
        said = f"{step.name}{more} is not what {step.rule.line_only} makes of {leaf}, and no known mistake gives it"
    else:
        said = (
            f"{step.name}{more}: {leaf}, computed back from it by {step.rule.line_only}, has another checksum; the checkpoint "
            "itself (--from) would show which values differ"
        )
    data = {"leaf": leaf, "tensors": names, "diagnosis": match.name if match else ""}
    return Finding("weights-differ", said, step.rule.line_only, step.name, data=data)


def _match(plan: Plan, step: Step, got: Array) -> Mistake | None:
    """The first mistake that gives these values, bit for bit or within a few roundings, where the leaf is known."""
    right = expected(step, plan.source)
    for mistake in known_mistakes(step, plan):
        try:
            made = mistake.make()
        except CheckpointError:  # of leaves that were not recorded: those that a merged one was computed from
            continue
        if same_bits(got, made) or (nearly(got, made) and not nearly(right, made)):
            return mistake
    return None


def _wrong(leaf: str, work: list[tuple[Step, Part]], written: Written, source: RecordedSource) -> Iterator[str]:
    """The tensors that do not hold the recorded leaf; all that are made of it, where its checksum is all that is known."""
    array = source.read(leaf)
    if leaf in source.stored:
        for step, part in work:
            if not same_bits(part.share(written.read(step.name)), apply(part.ops, array)):
                yield step.name
    elif digest_leaf(leaf, array, source.chunks(leaf)) != source.digests.get(leaf):
        yield from dict.fromkeys(step.name for step, _ in work)
