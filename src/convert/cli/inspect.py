"""``convert inspect CKPT``"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.cli import options as o
from convert.cli import output

if TYPE_CHECKING:
    from convert.checkpoints import Source
    from convert.core.path_index import PathIndex


@o.command(o.CHECKPOINT, o.STEP, o.ITEM, o.SKELETON, o.RULES_DIR, o.JSON)
def inspect(
    checkpoint: Path,
    step: int | None,
    item: str | None,
    skeleton: Path | None,
    rules_dir: Path | None,
    as_json: bool,
) -> None:
    """The tree: paths, shapes, dtypes, bytes; how it lies on disk; which rules fit. Reads no arrays."""
    from convert.checkpoints import open_source
    from convert.core.path_index import PathIndex
    from convert.rules.library import available_rules

    source = open_source(checkpoint, step=step, item=item, skeleton=skeleton)
    index = PathIndex(source.leaves)
    fits = [_fit(rules, source, index) for rules in available_rules(rules_dir)]
    if as_json:
        output.data_json(_report(source, fits))
        return
    output.data(f"{source.called}: {source.format}")
    for note in source.notes:
        output.data(f"note: {note}")
    rows = [("PATH", "SHAPE", "DTYPE", "BYTES")]
    rows += [
        (name, _shape(leaf.spec.shape), leaf.spec.dtype, f"{leaf.spec.nbytes:,}")
        for name, leaf in source.leaves.items()
    ]
    rows += [("/".join(absent.keys), "-", absent.why, "-") for absent in source.absent]
    output.data_lines(output.table(rows, right=(3,)))
    output.data("")
    output.data(
        f"{output.count(len(source.leaves), 'leaf')}, {output.count(sum(leaf.spec.size for leaf in source.leaves.values()), 'element')}, "
        f"{output.size(source.nbytes)} ({', '.join(f'{dtype} {output.size(n)}' for dtype, n in _by_dtype(source).items())})"
    )
    for fit in fits:
        if fit["fits"]:
            output.data(f"rules {fit['model']} fit: {fit['found']}; convert {fit['model']} {checkpoint} OUT")
    for fit in fits:
        if not fit["fits"]:
            known = f"they know {fit['share']:.0%} of the leaves"
            more = f" (and {fit['problems'] - 1} problems more)" if fit["problems"] > 1 else ""
            why = f"; {fit['problem']}{more}" if fit["problem"] and fit["share"] > 0.5 else ""
            output.data(f"rules {fit['model']} do not fit: {known}{why}")


def _fit(rules: Any, source: Source, index: PathIndex) -> dict[str, Any]:
    from convert.core.errors import PlanError
    from convert.planning.match import cover
    from convert.planning.planner import make_plan
    from convert.planning.select_rules import share

    coverage = cover(rules, source, index)
    said: dict[str, Any] = {"model": rules.model, "family": rules.family, "share": round(share(coverage, source), 4)}
    said |= {"problems": 0, "problem": None}
    if not said["share"]:
        return {**said, "fits": False, "found": None}
    try:
        return {**said, "fits": True, "found": make_plan(rules, source, coverage=coverage).found}
    except PlanError as error:
        found = error.findings or (str(error),)
        return {**said, "fits": False, "found": None, "problems": len(found), "problem": found[0]}


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def _by_dtype(source: Source) -> dict[str, int]:
    found: Counter[str] = Counter()
    for leaf in source.leaves.values():
        found[leaf.spec.dtype] += leaf.spec.nbytes
    return dict(found.most_common())


def _report(source: Source, fits: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "format": source.format,
        "notes": list(source.notes),
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
