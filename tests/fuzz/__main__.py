"""Fuzzes every reader and the rule loader: python -m fuzz [SECONDS] [SEED] [KIND ...], from tests/.

Damages small real checkpoints (bits flipped, cut, spliced, numbers made extreme, JSON values swapped), opens and reads them in a
child process with limited memory, and asks: nothing but a ConvertError, no memory beyond the limit, no crash, no other file
opened than those of the checkpoint. Deterministic by seed; a failure prints its kind and seed, which repeat it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from fuzz.harness import KINDS, fuzz


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=10.0)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    args = parser.parse_args()
    kinds = args.kinds or list(KINDS)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            done = fuzz(kind, Path(folder) / kind, args.seconds / len(kinds), args.seed)
            print(
                f"{kind:12} {done.cases:7} cases  {done.refused:7} refused  {done.read:7} read  {done.failures or 'no failures'}"
            )
            failed |= bool(done.failures)
    sys.exit(failed)


if __name__ == "__main__":
    main()
