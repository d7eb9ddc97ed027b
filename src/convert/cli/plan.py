"""``convert plan MODEL CKPT``, and what ``--dry-run`` prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.cli import options as o
from convert.cli import output
from convert.cli.folding import fold
from convert.cli.output import HEADING, NOTE, Line

if TYPE_CHECKING:
    from convert.core.errors import PlanError
    from convert.core.tensor_spec import TensorSpec
    from convert.drafting.survey import Survey
    from convert.layers.base import Part, Step
    from convert.planning.plan import Plan
    from convert.planning.rule_match import RuleMatch
    from convert.writing.file_layout import Layout


def plan(
    model: o.Model,
    checkpoint: o.Checkpoint,
    to: o.ToOrBack = None,
    dtype: o.Dtype = None,
    step: o.Step = None,
    item: o.Item = None,
    lora: o.Lora = None,
    skeleton: o.Skeleton = None,
    follow_links: o.FollowLinks = False,
    settings: o.Settings = None,
    custom_cells: o.CustomCells = False,
    rules_dir: o.RulesDir = None,
    like: o.Like = None,
    tree_layout: o.Layout = None,
    max_shard_size: o.ShardSize = None,
    full: o.Full = False,
    as_json: o.Json = False,
) -> None:
    """Show what would be written, from what, and which tensors would load even with a wrong layout.

    Reads no arrays. If the rules do not fit or are not finished, it lists the leaves that they cover, and for each
    other leaf the nearest rule; the exit code is then 2.
    """
    from convert.api import plan_selected, select_rules
    from convert.core.errors import OptionError, PlanError
    from convert.planning.options import ConversionOptions
    from convert.writing.execute import plan_layout
    from convert.writing.shard_size import shard_bytes

    if to in o.JAX_FORMATS:
        o.refuse_options_of_pytorch(to, {"--lora": lora, "--max-shard-size": max_shard_size})
    options = ConversionOptions(
        to=None if to in o.JAX_FORMATS else to,
        dtype=dtype,
        settings=o.parse_settings(settings, custom_cells),
        step=step,
        item=item,
        lora=lora,
        skeleton=skeleton,
        follow_links=follow_links,
        rules_dir=rules_dir,
        like=read_specs(like) if like and to not in o.JAX_FORMATS else None,
    )
    if to in o.JAX_FORMATS:
        from convert.api import plan_reverse
        from convert.cli.reverse_plan import print_plan as print_reverse_plan

        print_reverse_plan(plan_reverse(model, checkpoint, like, options, layout=tree_layout), full, as_json)
        return
    o.refuse_layout(tree_layout)
    match = select_rules(model, checkpoint, options)
    try:
        made = plan_selected(match)
    except OptionError:
        raise  # an option is wrong, not the rules
    except PlanError as error:
        _print_survey(match, error, as_json)
        raise
    layout = plan_layout(made, Path("model"), shard_bytes(max_shard_size, None))[1]
    print_plan(made, layout, full, as_json)


def read_specs(like: Path) -> Mapping[str, TensorSpec]:
    """Read the names and shapes that the result must have."""
    from convert.writing.written import open_written

    written = open_written(like)
    written.require_files()
    return written.specs


def _print_survey(match: RuleMatch, error: PlanError, as_json: bool) -> None:
    """Print the leaves that rules cover which do not fit the checkpoint; nothing if no rule matches a leaf."""
    from convert.drafting.survey import survey_coverage

    survey = survey_coverage(match.coverage, match.source)
    if not (survey.covered or survey.incomplete or survey.dropped or as_json):
        return  # rules of another model: a list of all leaves would say no more than the error
    if as_json:
        output.data_json({**survey.to_dict(), "findings": [finding.to_dict() for finding in error.findings]})
        return
    output.data_lines(_survey_lines(survey))


def _survey_lines(survey: Survey) -> Iterator[str | Line]:
    yield Line(f"Covered: {sum(c.leaves for c in survey.covered):,} of {output.count(survey.total, 'leaf')}", HEADING)
    rows = [
        (
            c.path,
            c.kind_name,
            output.count(c.leaves, "leaf"),
            c.rule.line_only,
            f"open: {', '.join(c.asked)}" if c.asked else "",
        )
        for c in survey.covered
    ]
    yield from _indent(output.table(rows))
    if survey.incomplete:
        yield ""
        yield Line(f"Main leaf missing: {output.count(len(survey.incomplete), 'rule')}", HEADING)
        rows = [
            (c.path, c.kind_name, f"matches {output.count(c.leaves, 'leaf')}", c.rule.line_only, "")
            for c in survey.incomplete
        ]
        yield from _indent(output.table(rows))
    if survey.dropped:
        yield ""
        yield Line(f"Dropped: {output.count(sum(c.leaves for c in survey.dropped), 'leaf')}", HEADING)
        rows = [(c.path, c.kind_name, output.count(c.leaves, "leaf"), c.rule.line_only, "") for c in survey.dropped]
        yield from _indent(output.table(rows))
    if survey.uncovered:
        yield ""
        yield Line(f"No rule: {output.count(sum(len(u.leaves) for u in survey.uncovered), 'leaf')}", HEADING)
        for u in survey.uncovered:
            yield f"  {u.path}  {u.spec}  {output.count(len(u.leaves), 'leaf')}"
            if u.near:
                yield f"      nearest: {u.near.path} ({u.near.kind_name}, {u.near.rule.line_only}): {'; '.join(u.near.why)}"
    if survey.questions:
        yield ""
        yield Line(f"Open: {output.count(len(survey.questions), 'question')}", HEADING)
        more = [f", and {output.count(q.others, 'rule')} more" if q.others else "" for q in survey.questions]
        rows3 = [(str(q.at), q.key, q.path + m) for q, m in zip(survey.questions, more, strict=True)]
        yield from _indent(output.table(rows3))


def print_plan(plan: Plan, layout: Layout, full: bool, as_json: bool) -> None:
    """Print the plan with the file of each tensor; repeated layers are folded unless `full`."""
    if as_json:
        value = plan.to_dict()
        for tensor in value["tensors"]:
            placement = layout.placements[tensor["name"]]
            tensor |= {"file": placement.file, "bytes": [placement.start, placement.stop]}
        value["files"] = list(layout.files)
        output.data_json(value)
        return
    output.data_lines(_plan_lines(plan, layout, full))


def _plan_lines(plan: Plan, layout: Layout, full: bool) -> Iterator[str | Line]:
    target = plan.rules.targets[plan.target]
    yield Line(f"{plan.found} -> {plan.target}: {target.loads}", HEADING)
    yield f"rules {plan.rules.path} (sha256 {plan.rules.sha256[:12]}), checkpoint {plan.source.format}"
    for note in (*plan.source.notes, *plan.notes, *plan.config_notes):
        yield Line(f"note: {note}", NOTE)
    axes = plan.rules.axes
    yield ""
    yield Line("Sizes", HEADING)
    yield from _indent(
        output.table(
            [(f"{k} = {n}", axes[k].meaning if k in axes else "") for k, n in plan.sizes.items()]
            + [(f"{k} varies", axis.meaning) for k, axis in axes.items() if axis.varies]
        )
    )
    yield ""
    yield Line(
        f"Tensors: {len(plan.steps)}, {output.size(plan.nbytes)} in {output.count(len(layout.files), 'file')}", HEADING
    )
    yield from _tensors(plan, layout, full)
    yield ""
    yield Line(f"Dropped: {output.count(len(plan.dropped), 'leaf')}", HEADING)
    dropped = [((), (f"{d.leaf}  {d.spec}  {d.reason} ({d.rule.line_only})",)) for d in plan.dropped]
    yield from _indent(_unfolded(dropped) if full else _folded(dropped, "leaf"))
    if plan.layers or plan.facts:
        yield ""
        yield Line("Hyperparameters that the target must match (not stored in the weights)", HEADING)
        layers = [((), (f"{layer['layer']}  {_facts(layer)}",)) for layer in plan.layers]
        yield from _indent(_unfolded(layers) if full else _folded(layers, "layer"))
        yield from _indent(f"{name}: {_plain(value)}" for name, value in plan.facts.items())
    yield ""
    yield from _ambiguous(plan)


def _tensors(plan: Plan, layout: Layout, full: bool) -> Iterator[str]:
    one_file = len(layout.files) == 1
    entries = []
    for step in plan.steps:
        file = layout.placements[step.name].file
        name, *parts = _tensor(step)
        shown = f"{name}  {file}" if full or one_file else name
        entries.append((None if one_file else file, (shown, *parts)))
    yield from _indent(_unfolded(entries) if full else _folded(entries, "tensor"))


def _unfolded(entries: Iterable[tuple[Any, tuple[str, ...]]]) -> Iterator[str]:
    for _, lines in entries:
        yield from lines


def _folded(entries: Iterable[tuple[Any, tuple[str, ...]]], noun: str) -> Iterator[str]:
    for folded in fold((None, lines) for _, lines in entries):
        first, *rest = folded.lines
        yield f"{first}  ({output.count(folded.count, noun)})" if folded.count > 1 else first
        yield from rest


def _tensor(step: Step) -> Iterator[str]:
    from convert.core.value_ops import Cast

    widened = {str(op) for part in step.parts for op in part.ops if isinstance(op, Cast)} if not step.loses else set()
    tied = f"tied to {step.tied}" if step.tied else ""
    remarks = [text for text in (tied, step.arithmetic, step.loses, *sorted(widened)) if text]
    yield f"{step.name}  {step.spec}" + (f"  ({'; '.join(remarks)})" if remarks else "")
    if len(step.parts) == 1 and step.parts[0].rows is None:
        part = step.parts[0]
        yield "    " + f"{_from(part)}  {part.layout}".strip()
        return
    rows = []
    for part in step.parts:
        word = "rows" if part.axis == 0 else "columns"
        rows.append((f"{word} {part.place}" if part.place else "", _from(part), str(part.layout)))
    for line in output.table(rows):
        yield f"    {line.strip()}" if not rows[0][0] else f"    {line}"


def _from(part: Part) -> str:
    return f"{part.leaf} at {part.at}" if part.at else part.leaf


def _facts(layer: Any) -> str:
    return ", ".join(
        f"{key} {_plain(value)}" for key, value in layer.items() if key not in ("layer", "kind", "allowed_padding")
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _ambiguous(plan: Plan) -> Iterator[str | Line]:
    total = sum(len(group.names) for group in plan.shape_ambiguous)
    if not total:
        yield "A shape check would catch every wrong layout."
        return
    yield Line(
        f"{total} of {output.count(len(plan.steps), 'tensor')} are shape-ambiguous: "
        "with a wrong layout they would load with strict=True, too",
        HEADING,
    )
    for group in plan.shape_ambiguous:
        for folded in fold((None, (name,)) for name in group.names):
            yield f"  {folded.lines[0]}  ({group.rule})"
        if group.others is None:
            yield f"      {group.layout}; other orders of so many axes were not searched"
        elif group.others:
            yield f"      {group.layout}; also fits: {', '.join(group.others)}"
        if group.parts:
            parts = ", ".join(_differing_keys(group.parts))
            yield f"      its {len(group.parts)} parts fit in any order; the rule's order is {parts}"
        if group.sum_of_parts:
            yield f"      the parts of {group.sum_of_parts} fit in any order"
        if group.rope_axis:
            yield f"      RoPE rotates pairs of {group.rope_axis}; with other pairs the rows have another order and the same shape"
        if group.siblings > 1:
            yield f"      {group.siblings} tensors of this rule have the same shape; only their names tell them apart"


def _differing_keys(paths: tuple[str, ...]) -> list[str]:
    """Return the keys in which paths differ: ``query, key, value``."""
    split = [path.split("/") for path in paths]
    if len({len(keys) for keys in split}) > 1:
        return list(paths)
    differ = [k for k, keys in enumerate(zip(*split, strict=True)) if len(set(keys)) > 1]
    return ["/".join(keys[k] for k in differ) for keys in split]


def _indent(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"
