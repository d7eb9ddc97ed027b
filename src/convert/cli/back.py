"""``convert MODEL IN OUT --to orbax``: the way back, from PyTorch weights to a checkpoint of JAX code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.cli import output
from convert.cli.folding import fold
from convert.cli.output import HEADING, NOTE, Line
from convert.core.errors import ConvertError
from convert.core.findings import Finding

if TYPE_CHECKING:
    from convert.planning.options import ConversionOptions
    from convert.reversing.plan import MadeLeaf, ReversePlan
    from convert.reversing.write import CheckpointResult

FORMATS = ("orbax", "msgpack", "npz")  # values of --to that are no target of the rules


def plan_back(
    model: str, tensors: Path, like: Path | None, layout: str | None, options: ConversionOptions
) -> ReversePlan:
    """Plan the way back; the errors are those of `convert.plan_reverse`."""
    from convert.api import plan_reverse

    return plan_reverse(model, tensors, like, options, layout=layout)


def refuse_layout(layout: str | None) -> None:
    """Refuse the option of the way back.

    Raises:
        ConvertError: it was given.
    """
    if layout is not None:
        fix = f"add --to {' or '.join(FORMATS)}"
        raise ConvertError(
            Finding("usage", "only the way back to JAX has a choice of layout", path="--layout", fix=fix)
        )


def refuse_check(tensors: Path) -> None:
    """Refuse the check of an adapter, of which there is no model.

    Raises:
        ConvertError: the tensors are those of PEFT's adapter.
    """
    from convert.peft.adapter import is_adapter

    if is_adapter(tensors):
        problem = "the check compares models, and an adapter is none"
        fix = (
            "leave it out: every value is computed forward again while an adapter goes back; for all levels, merge the adapter with PEFT "
            "(`merge_and_unload`), and check the saved model against the tree with the pairs"
        )
        raise ConvertError(Finding("usage", problem, path=str(tensors), fix=fix))


def refuse_options(to: str, given: Mapping[str, object]) -> None:
    """Refuse options that only the way forth has.

    Raises:
        ConvertError: one of them was given.
    """
    for option, value in given.items():
        if value:
            problem = f"{option} is an option of a conversion to PyTorch"
            raise ConvertError(Finding("usage", problem, path=f"--to {to}", fix="leave it out"))


def write(
    plan: ReversePlan, out: Path, to: str, overwrite: bool, jobs: int | None, quiet: bool, as_json: bool
) -> CheckpointResult:
    """Write the checkpoint, and say so."""
    from convert.reversing.write import write_checkpoint

    with output.progress(quiet or as_json) as show:
        result = write_checkpoint(
            plan, out, to, overwrite=overwrite, jobs=jobs, on_event=lambda event: show(event.done, event.total)
        )
    if not quiet and not as_json:
        output.status(f"found {plan.forward.found} in {plan.written.path} ({plan.forward.target})")
        for note in plan.notes:
            output.status(f"note: {note}", output.NOTE)
        if plan.left_out:
            reasons = "; ".join(dict.fromkeys(plan.left_out.values()))
            output.status(f"left out {output.count(len(plan.left_out), 'tensor')}: {reasons}", output.NOTE)
        rate = f", {output.size(int(result.nbytes / result.seconds))}/s" if result.seconds > 0 else ""
        output.status(
            f"wrote {out}: {output.count(result.leaves, 'leaf')}, {output.size(result.nbytes)} in {result.seconds:.1f} s{rate}, {to}"
        )
    return result


def to_dict(plan: ReversePlan, result: CheckpointResult) -> dict[str, Any]:
    """Return the summary for ``--json``."""
    return {
        "found": plan.forward.found,
        "model": plan.forward.rules.model,
        "target": plan.forward.target,
        "out": str(result.out),
        "format": result.format,
        "leaves": result.leaves,
        "bytes": result.nbytes,
        "seconds": round(result.seconds, 3),
        "kept": [{"leaf": kept.leaf, "because": kept.reason} for kept in plan.kept],
        "left_out": dict(plan.left_out),
        "notes": list(plan.notes),
    }


def print_plan(plan: ReversePlan, full: bool, as_json: bool) -> None:
    """Print the reverse plan; repeated layers are folded unless `full`."""
    if as_json:
        output.data_json(plan.to_dict())
    else:
        output.data_lines(_lines(plan, full))


def _lines(plan: ReversePlan, full: bool) -> Iterator[str | Line]:
    like = plan.forward.checkpoint
    tree = f"the tree of {like.display_path}" if plan.layout is None else f"the layout {plan.layout or 'of the rules'}"
    yield Line(f"{plan.forward.found}: {plan.written.path} -> {tree}", HEADING)
    of = f", tree of {like.format}" if plan.layout is None else ""
    yield f"rules {plan.forward.rules.path} (sha256 {plan.forward.rules.sha256[:12]}), tensors of {plan.forward.target}{of}"
    for note in plan.notes:
        yield Line(f"note: {note}", NOTE)
    yield ""
    yield Line(f"Leaves: {len(plan.leaves)}, each made of the tensors below it", HEADING)
    yield from _folded([_leaf(made) for made in plan.leaves], full)
    if plan.left_out:
        yield ""
        yield Line(f"Tensors left out: {len(plan.left_out)}", HEADING)
        yield from _folded([(f"{name}  {why}",) for name, why in plan.left_out.items()], full)
    if plan.unwritten:
        yield ""
        yield Line("Leaves that the rules drop, not written without --like (where the model has them)", HEADING)
        yield from (f"  {leaves.pattern}  {leaves.reason} ({leaves.rule.line_only})" for leaves in plan.unwritten)
    if plan.layout is not None:
        return
    yield ""
    yield Line(f"Leaves of --like: {len(plan.kept)}", HEADING)
    yield from _folded([(f"{k.leaf}  {k.spec}  {k.reason} ({k.rule.line_only})",) for k in plan.kept], full)


def _leaf(made: MadeLeaf) -> tuple[str, ...]:
    """Describe a leaf: its tensors, of each rule those that differ in numbers only as one line."""
    head = f"{made.leaf}  {made.spec}" + (f"  ({made.rest:,} elements of --like)" if made.rest else "")
    parts = []
    for step, part in made.parts:
        word = "rows" if part.axis == 0 else "columns"
        rows = f" {word} {part.place}" if part.place else ""
        layout = part.layout
        arrow = f"{layout.written} -> {layout.stored}" if layout.written else layout.stored
        remark = f", {layout.remark}, backwards" if layout.remark else ""
        sums = f"  (the inverse of {step.arithmetic})" if step.arithmetic else ""
        parts.append((None, (f"{step.name}{rows}  {arrow}{remark}{sums}",)))
    return (head, *(f"    {one.lines[0]}" for one in fold(parts)))


def _folded(entries: list[tuple[str, ...]], full: bool) -> Iterator[str]:
    if full:
        yield from (f"  {line}" for lines in entries for line in lines)
        return
    for one in fold((None, lines) for lines in entries):
        first, *rest = one.lines
        yield f"  {first}  ({output.count(one.count, 'leaf')})" if one.count > 1 else f"  {first}"
        yield from (f"  {line}" for line in rest)
