"""Converts every checkpoint below a directory, from Python: many_checkpoints.py MODEL DIR OUT_DIR

The plan of each is made before anything is read, so that a tree which does not fit costs nothing.
"""

import sys
from pathlib import Path

import convert


def main(model: str, directory: Path, out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for checkpoint in sorted(path for path in directory.iterdir() if path.is_dir()):
        target = out / f"{checkpoint.name}.safetensors"
        if target.exists():
            continue
        try:
            plan = convert.plan_conversion(model, checkpoint)
            for event in convert.execute(plan, target):
                if isinstance(event, convert.Result):
                    print(f"{checkpoint.name}: {plan.found}, {event.tensors} tensors, source {event.source_digest}")
        except convert.ConvertError as error:
            print(f"{checkpoint.name}: {error}", file=sys.stderr)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])) else 0)
