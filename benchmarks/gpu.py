"""Checks the converted goldens with PyTorch on a GPU and on the CPU.

    PYTHONPATH=src:tests python benchmarks/gpu.py [--backends] [--processes 8] [--json results/gpu.json]

Needs a CUDA device and the test environment. The JAX models run on the CPU. Of each golden it keeps the largest relative error of an output or
boundary, in the precision that is checked and in float64, and how near it comes to what is allowed. With `--backends` it keeps the differences
between the backends, too: JAX on both devices, torch eager and compiled on both, and TF32.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

from measuring import machine

HERE = Path(__file__).parent
PRECISIONS = ("float32", "bfloat16", "float64")
OF_BACKENDS = ("bert", "gpt2", "timesfm-2.5", "gemma3")


def compared(rules: str, path: Path, settings: dict[str, Any], device: str, precision: str, **options: Any) -> Any:
    """Convert a checkpoint and check it on a device."""
    from convert.api import convert
    from convert.verify.run import check

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        convert(rules, path, out, to="transformers", settings=settings)
        return check(out, path, device=device, precision=precision, **options)


def errors(report: Any) -> dict[str, Any]:
    """The largest errors of the model level, and the largest share of a tolerance that one takes."""
    (model,) = (level for level in report.levels if level.level == "model")
    native = [(measure.difference.relative, measure.tolerance.value) for measure in model.measures]
    float64 = [(m.float64.relative, m.float64_tolerance.value) for m in model.measures if m.float64]
    return {
        "verdict": model.verdict.value,
        "error": max(error for error, _ in native),
        "of_allowed": round(max(error / allowed for error, allowed in native), 3),
        "float64_error": max((error for error, _ in float64), default=None),
        "seconds": round(model.seconds, 2),
    }


def golden(case: str) -> tuple[str, dict[str, Any]]:
    from support.golden_conversions import conversions

    given = conversions()[case]
    found: dict[str, Any] = {}
    for precision in PRECISIONS:
        for device in ("cpu", "cuda"):
            found[f"{precision}, {device}"] = errors(compared(*given, device, precision, levels=["weights", "model"]))
    return case, found


def backends(case: str) -> tuple[str, dict[str, Any]]:
    from support.golden_conversions import conversions

    report = compared(*conversions()[case], "cpu", "float32", levels=["weights"], backends=True)
    level = report.levels[-1]
    return case, {
        "verdict": level.verdict.value,
        "from float64": {measure.name.partition(":")[0]: measure.difference.relative for measure in level.measures},
        "allowed": {m.name.partition(":")[0]: m.tolerance.value for m in level.measures if m.tolerance},
        "notes": level.notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backends", action="store_true", help="compare the backends, too; each compiles the model twice"
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "gpu.json")
    options = parser.parse_args()

    import torch

    from support.golden_conversions import GOLDENS_WITHOUT_REFERENCE, conversions

    cases = [case for case in conversions() if case not in GOLDENS_WITHOUT_REFERENCE]
    gpu = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    results: dict[str, Any] = {"machine": {**machine(), **gpu}}
    parts = {"goldens": (golden, cases), **({"backends": (backends, OF_BACKENDS)} if options.backends else {})}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for part, (measured, of) in parts.items():
            results[part] = {}
            for case, found in pool.imap_unordered(measured, of):
                results[part][case] = found
                print(part, case, flush=True)
                options.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
