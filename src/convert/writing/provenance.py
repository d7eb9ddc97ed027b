"""The metadata of a written file: what was converted, from what, by which tool."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version

from convert.checkpoints.digest import LENGTH
from convert.planning.plan import Plan


def tool_version() -> str:
    """Return the name and version of this tool, such as ``ckpt-convert 0.1.0``."""
    try:
        return f"ckpt-convert {version('ckpt-convert')}"
    except PackageNotFoundError:  # a source tree that was never installed
        return "ckpt-convert unknown"


def header_metadata(plan: Plan) -> dict[str, str]:
    """Return the metadata of the safetensors header: format, provenance, and the facts that no weight holds.

    It has no timestamps and no paths, so that the same conversion writes the same bytes. ``source_digest`` is a
    placeholder until all leaves were read.
    """
    return {
        **plan.format.metadata(),
        "converter": tool_version(),
        "model": plan.rules.model,
        "version": plan.version or "",
        "target": plan.target,
        "rules_sha256": plan.rules.sha256,
        "source_format": plan.source.format,
        "source_digest": "0" * LENGTH,
        "dtype": plan.dtype or "",
        "settings": json.dumps(plan.settings, sort_keys=True),
        "choices": json.dumps(plan.choices, sort_keys=True),
        "sizes": json.dumps(plan.sizes, sort_keys=True),
        "facts": json.dumps(plan.facts, sort_keys=True),
        "layers": json.dumps(plan.layers, sort_keys=True),
        **({"tokenizer": plan.tokenizer.digest} if plan.tokenizer else {}),
    }
