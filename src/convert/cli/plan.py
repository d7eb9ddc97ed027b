"""``convert plan MODEL CKPT``, and what ``--dry-run`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.cli import options as o
from convert.cli import output
from convert.core.errors import CheckpointError

if TYPE_CHECKING:
    from convert.core.errors import PlanError
    from convert.core.tensor_spec import TensorSpec
    from convert.drafting.survey import Survey
    from convert.layers.base import Part, Step
    from convert.planning.options import ConversionOptions
    from convert.planning.plan import Plan
    from convert.writing.writer import Layout


@o.command(
    o.MODEL,
    o.CHECKPOINT,
    *o.PLANNING,
    o.JSON,
)
def plan(
    model: str,
    checkpoint: Path,
    to: str | None,
    dtype: str | None,
    step: int | None,
    item: str | None,
    skeleton: Path | None,
    settings: tuple[str, ...],
    custom_cells: bool,
    rules_dir: Path | None,
    like: Path | None,
    max_shard_size: str | None,
    as_json: bool,
) -> None:
    """What would be written, from what, and what a shape check could not catch. Reads no arrays.

    Where the rules do not fit, or are not finished: what they cover, what not, and the nearest rule; exit code 2.
    """
    from convert.api import plan_conversion
    from convert.core.errors import PlanError
    from convert.planning.options import ConversionOptions
    from convert.writing.execute import plan_layout

    options = ConversionOptions(
        to=to,
        dtype=dtype,
        settings=o.parse_settings(settings, custom_cells),
        step=step,
        item=item,
        skeleton=skeleton,
        rules_dir=rules_dir,
        like=read_specs(like) if like else None,
    )
    try:
        made = plan_conversion(model, checkpoint, options)
    except PlanError as error:
        _survey(model, checkpoint, options, error, as_json)
        raise
    print_plan(made, plan_layout(made, Path("model"), o.shard_bytes(max_shard_size, None))[1], as_json)


def read_specs(like: Path) -> Mapping[str, TensorSpec]:
    """The names and shapes that the result must have."""
    from convert.verify.written import open_written

    written = open_written(like)
    for file, names in written.missing.items():
        raise CheckpointError(f"{like}: {written.found} names {file} (for {names[0]}), and there is no such file")
    return written.specs


def _survey(
    model: str,
    checkpoint: Path,
    options: ConversionOptions,
    error: PlanError,
    as_json: bool,
) -> None:
    """What rules that do not fit cover; nothing where a family's name leaves open which rules are meant."""
    from convert.checkpoints import open_source
    from convert.drafting.survey import survey_rules
    from convert.rules.library import find_rules

    candidates = find_rules(model, Path(options.rules_dir) if options.rules_dir else None)
    if len(candidates) != 1:
        return
    leaf_names = [rules.leaf_names for rules in candidates if rules.leaf_names]
    source = open_source(
        checkpoint, step=options.step, item=options.item, skeleton=options.skeleton, leaf_names=leaf_names
    )
    found = survey_rules(candidates[0], source)
    if found.covered and not error.findings:
        return  # not the rules are wrong but an option
    if as_json:
        output.data_json({**found.to_dict(), "findings": list(error.findings)})
        return
    output.data_lines(_survey_lines(found))


def _survey_lines(found: Survey) -> Iterator[str]:
    yield f"Covered: {sum(c.leaves for c in found.covered):,} of {output.count(found.total, 'leaf')}"
    rows = [
        (
            c.path,
            c.word,
            output.count(c.leaves, "leaf"),
            c.rule.line_only,
            f"open: {', '.join(c.asked)}" if c.asked else "",
        )
        for c in found.covered
    ]
    yield from _indent(output.table(rows))
    if found.dropped:
        yield ""
        yield f"Left out: {output.count(sum(c.leaves for c in found.dropped), 'leaf')}"
        rows = [(c.path, c.word, output.count(c.leaves, "leaf"), c.rule.line_only, "") for c in found.dropped]
        yield from _indent(output.table(rows))
    if found.uncovered:
        yield ""
        yield f"No rule: {output.count(sum(len(u.leaves) for u in found.uncovered), 'leaf')}"
        for u in found.uncovered:
            yield f"  {u.path}  {u.spec}  {output.count(len(u.leaves), 'leaf')}"
            if u.near:
                yield f"      nearest: {u.near.path} ({u.near.word}, {u.near.rule.line_only}): {'; '.join(u.near.why)}"
    if found.questions:
        yield ""
        yield f"Open: {output.count(len(found.questions), 'question')}"
        more = [f", and {output.count(q.others, 'rule')} more" if q.others else "" for q in found.questions]
        asked = [(str(q.at), q.key, q.path + m) for q, m in zip(found.questions, more, strict=True)]
        yield from _indent(output.table(asked))


def print_plan(plan: Plan, layout: Layout, as_json: bool) -> None:
    """The plan with the file that each tensor goes to, for people or as JSON."""
    if as_json:
        value = plan.to_dict()
        for tensor in value["tensors"]:
            place = layout.placements[tensor["name"]]
            tensor |= {"file": place.file, "bytes": [place.start, place.stop]}
        value["files"] = list(layout.files)
        output.data_json(value)
        return
    output.data_lines(_lines(plan, layout))


def _lines(plan: Plan, layout: Layout) -> Iterator[str]:
    target = plan.rules.targets[plan.target]
    yield f"{plan.found} -> {plan.target}: {target.loads}"
    yield f"rules {plan.rules.path} (sha256 {plan.rules.sha256[:12]}), checkpoint {plan.source.format}"
    for note in (*plan.source.notes, *plan.notes, *plan.config_notes):
        yield f"note: {note}"
    axes = plan.rules.axes
    yield ""
    yield "Sizes"
    yield from _indent(
        output.table([(f"{k} = {n}", axes[k].meaning if k in axes else "") for k, n in plan.sizes.items()])
    )
    yield ""
    yield f"Tensors: {len(plan.steps)}, {output.size(plan.nbytes)} in {output.count(len(layout.files), 'file')}"
    for step in plan.steps:
        yield from _tensor(step, layout)
    yield ""
    yield f"Left out: {output.count(len(plan.dropped), 'leaf')}"
    yield from _indent(output.table([(d.leaf, str(d.spec), f"{d.reason} ({d.rule.line_only})") for d in plan.dropped]))
    if plan.layers:
        yield ""
        yield "Not weights: what the target must compute as the source does"
        yield from _indent(output.table([(str(layer["layer"]), _facts(layer)) for layer in plan.layers]))
    if plan.facts:
        yield from _indent(f"{name}: {_plain(value)}" for name, value in plan.facts.items())
    yield ""
    yield from _unprotected(plan)


def _tensor(step: Step, layout: Layout) -> Iterator[str]:
    from convert.core.ops import Cast

    widened = {str(op) for part in step.parts for op in part.ops if isinstance(op, Cast)} if not step.loses else set()
    tied = f"tied to {step.tied}" if step.tied else ""
    remarks = [text for text in (tied, step.arithmetic, step.loses, *sorted(widened)) if text]
    shown = f"  ({'; '.join(remarks)})" if remarks else ""
    yield f"  {step.name}  {step.spec}  {layout.placements[step.name].file}{shown}"
    if len(step.parts) == 1 and step.parts[0].rows is None:  # as most are
        part = step.parts[0]
        yield "      " + output.cell(f"{_from(part)}  {part.layout}").strip()
        return
    rows = []
    for part in step.parts:
        word = "rows" if part.axis == 0 else "columns"
        rows.append((f"{word} {part.rows[0]}:{part.rows[1]}" if part.rows else "", _from(part), part.layout))
    for line in output.table(rows):
        yield f"      {line.strip()}" if not rows[0][0] else f"      {line}"


def _from(part: Part) -> str:
    return f"{part.leaf} at {part.at}" if part.at else part.leaf


def _facts(layer: Any) -> str:
    return ", ".join(
        f"{key} {_plain(value)}" for key, value in layer.items() if key not in ("layer", "kind", "allowed_padding")
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _unprotected(plan: Plan) -> Iterator[str]:
    total = sum(len(group.names) for group in plan.unprotected)
    if not total:
        yield "A shape check would catch every wrong layout."
        return
    yield f"A shape check could not protect {total} of {output.count(len(plan.steps), 'tensor')}: these would load, and compute something else"
    for group in plan.unprotected:
        more = f" and {len(group.names) - 1} more" if len(group.names) > 1 else ""
        yield f"  {group.names[0]}{more}  ({group.rule})"
        if group.others:
            yield f"      {group.layout}; also fits: {', '.join(group.others)}"
        if group.parts:
            yield f"      any order of its {len(group.parts)} parts fits; the rule's is {', '.join(_apart(group.parts))}"
        if group.siblings > 1:
            yield f"      {group.siblings} tensors of this rule have the same shape; only their names tell them apart"


def _apart(paths: tuple[str, ...]) -> list[str]:
    """The keys in which paths differ: ``query, key, value``."""
    split = [path.split("/") for path in paths]
    if len({len(keys) for keys in split}) > 1:
        return list(paths)
    differ = [k for k, keys in enumerate(zip(*split, strict=True)) if len(set(keys)) > 1]
    return ["/".join(keys[k] for k in differ) for keys in split]


def _indent(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"
