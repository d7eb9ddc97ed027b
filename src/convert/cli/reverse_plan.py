"""What ``convert plan`` and ``--dry-run`` print of the way back."""

from __future__ import annotations

from collections.abc import Iterator

from convert.cli import output
from convert.cli.folding import fold
from convert.cli.output import HEADING, NOTE, Line
from convert.reversing.plan import MadeLeaf, ReversePlan


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
