"""What `from_pretrained` makes of a directory: which files it finds, which class, which dtype, which tokens end a text.

Weights that are right are of no use in a directory that does not load, or loads into another model. All of it is told from the
files, without transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.ops import is_float
from convert.planning.plan import Plan
from convert.verify.written import INDEX, NAMED, WHOLE, Written

GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"  # transformers 5.23, maybe_load_adapters
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")  # huggingface_hub, split_torch_state_dict_into_shards


def directory_findings(plan: Plan, written: Written) -> Iterator[Finding]:
    """Why a directory does not load as the rules mean it; nothing for a single file."""
    if not written.path.is_dir():
        return
    wanted = plan.rules.targets[plan.target].config
    yield from _files(written, bool(wanted))
    if not wanted:
        return
    if written.config is None:
        yield _finding(
            f"there is no config.json, without which {plan.rules.targets[plan.target].loads} cannot be made; convert again to "
            "a directory",
            "config.json",
        )
        return
    if said := other_class(plan, written):
        yield _finding(
            f"{said}; write what the rules say, or name the rules of that class with --model", "architectures"
        )
    if "model_type" in wanted and not written.config.get("model_type"):
        yield _finding(
            f"config.json has no model_type, by which AutoModel knows the class; add {json.dumps(wanted['model_type'])}",
            "model_type",
        )
    if (written.path / ADAPTER).is_file():
        yield _finding(
            f"{ADAPTER} lies beside config.json: where peft is installed, from_pretrained puts that adapter on top of these "
            "weights; move the adapter to a directory of its own",
            ADAPTER,
        )
    yield from _dtype(plan, written, written.config)
    yield from _head(written, written.config, wanted)
    yield from _generation(plan, written)


def other_class(plan: Plan, written: Written) -> str:
    """How config.json names another class than the rules; empty when it does not."""
    wanted = plan.rules.targets[plan.target].config
    for key in ("architectures", "model_type"):
        if written.config is not None and key in wanted and (written.config.get(key) or wanted[key]) != wanted[key]:
            shown = [json.dumps(config[key]) for config in (written.config, wanted)]
            return f"config.json says {key} {shown[0]}, and the rules were written for {shown[1]}"
    return ""


def _finding(what: str, name: str) -> Finding:
    return Finding("directory-not-loadable", what, path=name, data={"diagnosis": "the directory", "file": name})


def _files(written: Written, loads: bool) -> Iterator[Finding]:
    for file, lost in written.missing.items():
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        yield _finding(
            f"{written.found} names {file}, which holds {lost[0]}{more}, and there is no such file: the directory does not load; "
            "copy the file there, or convert again",
            file,
        )
    if written.found == WHOLE and (written.path / INDEX).is_file():
        yield _finding(
            f"{WHOLE} lies beside {INDEX}: from_pretrained loads {WHOLE} (which is what is checked here) and none of the "
            f"shards that the index names, and other code may load these; delete {WHOLE} if the shards are meant, or else the "
            "index and its shards",
            WHOLE,
        )
    if written.found not in ("", WHOLE, INDEX):
        yield _finding(
            f"config.json says {NAMED} {written.found}: transformers loads that file (which is what is checked here), and other "
            f"code {WHOLE} or what {INDEX} names; call the file {WHOLE} and remove the key",
            NAMED,
        )
    if written.found:
        return
    names = sorted({file.name for file, _ in written.tensors.values()})
    shards = [name for name in names if _SHARD.fullmatch(name)]
    if shards or (loads and names != [WHOLE]):
        yield _finding(
            f"there is no {INDEX} beside {', '.join(names[:2])}{' ...' if len(names) > 2 else ''}: from_pretrained finds "
            f"{WHOLE}, or what the index names; write the index again",
            INDEX,
        )


def _dtype(plan: Plan, written: Written, config: Mapping[str, Any]) -> Iterator[Finding]:
    computed = {step.name for step in plan.steps if not step.parts}  # from sizes: a buffer has a dtype of its own
    said = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    held = sorted({s.dtype for name, s in written.specs.items() if is_float(s.dtype) and name not in computed})
    if said and held and held != [said]:
        yield _finding(
            f"config.json says dtype {said}, and the tensors are {' and '.join(held)}: from_pretrained loads all of them in "
            f"{said}; set dtype to that of the tensors",
            "dtype",
        )


def _head(written: Written, config: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[Finding]:
    """A head that is tied to the table is stored once; a configuration that unties it leaves it without values."""
    untied = config.get("tie_word_embeddings") is False and wanted.get("tie_word_embeddings") is True
    if untied and not any(name.endswith("lm_head.weight") for name in written.tensors):
        yield _finding(
            "config.json says tie_word_embeddings false, and there is no lm_head.weight in the file: from_pretrained would fill "
            "the head with random numbers; set tie_word_embeddings to true",
            "lm_head.weight",
        )


def _generation(plan: Plan, written: Written) -> Iterator[Finding]:
    """Tokens that begin, end and pad a text, against what the rules and the settings say."""
    path = written.path / GENERATION
    try:
        wanted = plan.generation_config
    except PlanError:
        return  # facts that nobody gave
    if wanted is None or not path.exists():
        return
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        yield _finding(f"{GENERATION} cannot be read: {error}", GENERATION)
        return
    for key, value in wanted.items():
        got = said.get(key) if isinstance(said, dict) else None
        if _listed(got) != _listed(value):
            yield _finding(
                f"{GENERATION} says {key} {json.dumps(got)}, and the rules say {json.dumps(value)}; if the checkpoint means the "
                f"first, convert with --set {key}={json.dumps(got)}",
                key,
            )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
