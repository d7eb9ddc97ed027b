"""A conversion of a few hundred bytes, for tests that repeat it or damage its output."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import convert

RULES = """\
model: small
title: Small
targets: {torch: {loads: "`torch.nn.Module`"}}
rules:
- from: layer_{i}/w
  axes: DF
  parameter: layers.{i}.w
"""


def write_rules(folder: Path, text: str = RULES) -> Path:
    """Write the rules."""
    path = folder / "small.yaml"
    path.write_text(text)
    return path


def write_checkpoint(path: Path, seed: int = 0, layers: int = 5, size: int = 3) -> Path:
    """Write an ``.npz`` of small arrays."""
    random = np.random.default_rng(seed)
    np.savez(path, **{f"layer_{k}/w": random.random((size, size + 1), np.float32) for k in range(layers)})
    return path


def small_output(
    folder: Path, out: str, *, seed: int = 0, layers: int = 5, size: int = 3, max_shard_bytes: int | None = None
) -> Path:
    """Convert a small checkpoint to `out` in `folder`."""
    rules = write_rules(folder)
    source = write_checkpoint(folder / f"source-{seed}.npz", seed, layers, size)
    convert.convert(str(rules), source, folder / out, max_shard_bytes=max_shard_bytes)
    return folder / out
