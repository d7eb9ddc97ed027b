"""What lies beside a checkpoint and says what its tree does not hold: the ``config.json`` of a ``flax_model.msgpack``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from convert.checkpoints.source import Source
from convert.core.errors import CheckpointError
from convert.core.fields import nearest
from convert.rules.file import RuleFile, parse_reference

MAX_BYTES = 1 << 20  # of a file beside the checkpoint; they have a few kilobytes
GENERATION = "generation_config.json"
# What the code that wrote the file says of itself, and what the conversion knows better.
OWN = ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "_commit_hash")


@dataclass(frozen=True)
class Found:
    """The files beside a checkpoint.

    Attributes:
        config: contents of the file that the rules name; empty when there is none.
        generation: contents of ``generation_config.json``, likewise.
    """

    config: Mapping[str, Any]
    generation: Mapping[str, Any]


def look_beside(rules: RuleFile, source: Source) -> Found:
    """Reads the files, where the rules ask for them and they are there.

    Raises:
        CheckpointError: one of them is damaged or far too large.
    """
    if rules.sidecar is None:
        return Found({}, {})
    return Found(_read(source, rules.sidecar.file), _read(source, GENERATION))


def _read(source: Source, name: str) -> Mapping[str, Any]:
    path = (source.path if source.path.is_dir() else source.path.parent) / name
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if len(text) > MAX_BYTES:
        raise CheckpointError(
            f"{path}: it has more than {MAX_BYTES} bytes, which is no configuration; move it elsewhere"
        )
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no JSON ({error}); correct it, or move it elsewhere and use --set") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(found).__name__}; move it elsewhere")
    return found


def facts_beside(rules: RuleFile, found: Found) -> dict[str, Any]:
    """The facts of the rules that the file has under their names."""
    return {key: value for key, value in found.config.items() if key in rules.facts and value is not None}


def contradictions(
    rules: RuleFile, target: str, found: Found, sizes: Mapping[str, int], settings: Mapping[str, Any]
) -> Iterator[str]:
    """Findings: what the file says and these rules cannot be true of, and sizes that the tree does not have."""
    if rules.sidecar is None:
        return
    file = rules.sidecar.file
    for key, known in rules.sidecar.supported.items():
        if key in found.config and found.config[key] not in known and key not in settings:
            said = found.config[key]
            near = nearest(said, [str(word) for word in known]) if isinstance(said, str) else ""
            yield (
                f"{rules.sidecar.at}: the {file} beside the checkpoint says {key} = {json.dumps(said)}, and these rules "
                f"are of {' or '.join(json.dumps(word) for word in known)}{near}; the source's code computes nothing else, or "
                "it is another model"
            )
    for key, template in rules.targets[target].config.items():
        reference = parse_reference(template)
        if reference is None or reference[0] not in sizes or not isinstance(found.config.get(key), int):
            continue
        size = sizes[reference[0]] + reference[1]
        if found.config[key] != size:
            yield (
                f"the {file} beside the checkpoint says {key} = {found.config[key]}, and the tree has {reference[0]} = "
                f"{size}; one of the two is of another checkpoint"
            )


def carried(found: Found, config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of the output: what the rules write, on top of what the file says and the rules know nothing of."""
    return {**{key: value for key, value in found.config.items() if key not in OWN}, **config}
