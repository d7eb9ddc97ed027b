"""Writes tests/golden/recordings: what `convert record` keeps of the goldens' JAX models, for checks that run without JAX.

It runs in the environment of the tests, which has JAX:

    python tests/golden/make_recordings.py

The bytes are the same on every run of one machine with the same versions. Run it again when the inputs or the boundaries of
a reference change; `tests/models/verify/test_recording.py` says so then.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import convert  # noqa: E402
from convert.verify.comparison import load_reference  # noqa: E402
from convert.verify.recording.record import record  # noqa: E402
from support import goldens, upstream  # noqa: E402

MAX_BYTES = 600_000
SETTINGS: dict[str, dict[str, Any]] = {
    "timesfm-1.0": {"use_positional_embedding": True},
    "timesfm-2.0": {"use_positional_embedding": False},
    "timesfm-2.5": {},
}


def main() -> None:
    os.environ["CONVERT_TIMESFM_1"] = str(Path(upstream.timesfm_1().__file__ or "").parents[1])
    (HERE / "recordings").mkdir(exist_ok=True)
    for case, settings in SETTINGS.items():
        plan = convert.plan_conversion("timesfm", goldens.checkpoint(case), settings=settings)
        reference = load_reference(plan, None)
        if isinstance(reference, str):
            raise SystemExit(f"{case}: {reference}")
        out = HERE / "recordings" / f"{case}.safetensors"
        done = record(plan, reference, out, max_bytes=MAX_BYTES, overwrite=True)
        print(f"{out.name}: {done.values} values, {done.sampled} in part, {done.nbytes:,} bytes")


if __name__ == "__main__":
    main()
