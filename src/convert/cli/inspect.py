"""``convert inspect CKPT``"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.cli import options as o
from convert.cli import output
from convert.cli.folding import fold
from convert.cli.output import GOOD, HEADING, NOTE, Line

if TYPE_CHECKING:
    from convert.checkpoints import Source
    from convert.core.path_index import PathIndex
    from convert.rules.file import RuleFile


def inspect(
    checkpoint: o.Checkpoint,
    step: o.Step = None,
    item: o.Item = None,
    skeleton: o.Skeleton = None,
    follow_links: o.FollowLinks = False,
    rules_dir: o.RulesDir = None,
    full: o.Full = False,
    as_json: o.Json = False,
) -> None:
    """Show the tree (paths, shapes, dtypes, bytes), its format on disk, and the rules that fit. Reads no arrays."""
    from convert.checkpoints import open_source
    from convert.core.path_index import PathIndex
    from convert.rules.library import available_rules

    source = open_source(checkpoint, step=step, item=item, skeleton=skeleton, follow_links=follow_links)
    index = PathIndex(source.leaves)
    fits = [_fit(rules, source, index) for rules in available_rules(rules_dir)]
    if as_json:
        output.data_json(_to_dict(source, fits))
        return
    output.data_lines(_lines(source, fits, checkpoint, full))


def _lines(source: Source, fits: list[dict[str, Any]], checkpoint: Path, full: bool) -> Iterator[str | Line]:
    yield Line(f"{source.display_path}: {source.format}", HEADING)
    for note in source.notes:
        yield Line(f"note: {note}", NOTE)
    rows: list[tuple[str, ...]] = [("PATH", "SHAPE", "DTYPE", "BYTES", "" if full else "LEAVES")]
    rows += _leaves(source, full)
    rows += [("/".join(absent.keys), "-", absent.why, "-", "") for absent in source.absent]
    yield from output.headed(output.table(rows, right=(3, 4)))
    yield ""
    elements = sum(leaf.spec.size for leaf in source.leaves.values())
    dtypes = ", ".join(f"{dtype} {output.size(n)}" for dtype, n in _by_dtype(source).items())
    yield (
        f"{output.count(len(source.leaves), 'leaf')}, {output.count(elements, 'element')}, "
        f"{output.size(source.nbytes)} ({dtypes})"
    )
    yield ""
    yield from _rules(fits, checkpoint, full)


def _leaves(source: Source, full: bool) -> Iterator[tuple[str, ...]]:
    """Yield a row for each leaf, or for each group of leaves that differ only in the number of their layer."""
    if full:
        for name, leaf in source.leaves.items():
            yield name, _shape(leaf.spec.shape), leaf.spec.dtype, f"{leaf.spec.nbytes:,}", ""
        return
    for folded in fold((leaf.spec, (name,)) for name, leaf in source.leaves.items()):
        spec = folded.key
        yield (
            folded.lines[0],
            _shape(spec.shape),
            spec.dtype,
            f"{spec.nbytes * folded.count:,}",
            str(folded.count) if folded.count > 1 else "",
        )


def _rules(fits: list[dict[str, Any]], checkpoint: Path, full: bool) -> Iterator[str | Line]:
    """Yield the rules that fit, and of the others the nearest; `full` lists all of them."""
    fitting = [fit for fit in fits if fit["fits"]]
    others = sorted((fit for fit in fits if not fit["fits"]), key=lambda fit: -fit["share"])
    if fitting:
        yield Line("Rules that fit", HEADING)
    for fit in fitting:
        yield Line(f"  {fit['model']}: {fit['found']}", GOOD)
        yield f"      convert {fit['model']} {checkpoint} OUT"
    similar = [fit for fit in others if fit["share"] > 0]
    near = similar if full else similar[:1]
    if near:
        yield Line("Nearest rules that do not fit" if not full else "Rules that do not fit", HEADING)
    for fit in near:
        yield f"  {fit['model']}: matches {fit['share']:.0%} of the leaves"
        if fit["problem"]:
            more = f" (and {output.count(fit['problems'] - 1, 'problem')} more)" if fit["problems"] > 1 else ""
            yield f"      {fit['problem']}{more}"
    if not fitting and not near:
        yield "No shipped rules match any leaf. `convert rules new CKPT mine.yaml` drafts rules from this tree."
    elif full and len(others) > len(near):
        yield f"No leaf matches: {', '.join(fit['model'] for fit in others if not fit['share'])}"
    elif len(others) > len(near):
        yield Line(f"{len(others) - len(near)} more do not fit; --full lists them", NOTE)


def _fit(rules: RuleFile, source: Source, index: PathIndex) -> dict[str, Any]:
    from convert.core.errors import PlanError
    from convert.planning.planner import plan_match
    from convert.planning.rule_match import match_rules

    match = match_rules(rules, source, index=index)
    fit: dict[str, Any] = {"model": rules.model, "family": rules.family, "share": round(match.coverage.fraction, 4)}
    fit |= {"problems": 0, "problem": None}
    if not fit["share"]:
        return {**fit, "fits": False, "found": None}
    try:
        return {**fit, "fits": True, "found": plan_match(match).found}
    except PlanError as error:
        problems = len(error.findings)
        return {**fit, "fits": False, "found": None, "problems": problems, "problem": str(error.findings[0])}


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def _by_dtype(source: Source) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for leaf in source.leaves.values():
        sizes[leaf.spec.dtype] += leaf.spec.nbytes
    return dict(sizes.most_common())


def _to_dict(source: Source, fits: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "format": source.format,
        "notes": [str(note) for note in source.notes],
        "leaves": [
            {
                "path": name,
                "keys": list(leaf.keys),
                "shape": list(leaf.spec.shape),
                "dtype": leaf.spec.dtype,
                "bytes": leaf.spec.nbytes,
            }
            for name, leaf in source.leaves.items()
        ],
        "absent": [{"keys": list(absent.keys), "why": absent.why} for absent in source.absent],
        "totals": {
            "leaves": len(source.leaves),
            "elements": sum(leaf.spec.size for leaf in source.leaves.values()),
            "bytes": source.nbytes,
            "bytes_by_dtype": _by_dtype(source),
        },
        "rules": fits,
    }
