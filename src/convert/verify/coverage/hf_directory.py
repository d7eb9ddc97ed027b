"""Check what transformers' ``from_pretrained`` loads from a directory: which files, which class, which dtype, which tokens.

Correct weights are useless in a directory that does not load, or that loads as another model. Only the files are read;
transformers is not imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.option_text import set_option
from convert.core.system.regular_file import read_regular
from convert.core.tensor_spec import is_float
from convert.planning.facts.settings import settable
from convert.planning.plan import Plan
from convert.rules.file import parse_reference
from convert.writing.file_layout import INDEX_SUFFIX, SUFFIX
from convert.writing.written import MAX_JSON, WEIGHTS_KEY, Written

CONFIG = "config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"  # transformers 5.23, maybe_load_adapters
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")  # huggingface_hub, split_torch_state_dict_into_shards


def directory_findings(plan: Plan, written: Written) -> Iterator[Finding]:
    """Report why a directory does not load as the rules intend; nothing for a single file."""
    if not written.path.is_dir():
        return
    planned = plan.rules.targets[plan.target].config
    yield from _check_files(written, plan.rules.targets[plan.target].files + SUFFIX, bool(planned))
    if not planned:
        return
    if written.config is None:
        loader = plan.rules.targets[plan.target].loads
        yield _finding(CONFIG, f"there is no such file, and {loader} needs it", fix="convert again to a directory")
        return
    if (finding := other_class(plan, written)) is not None:
        yield finding
    if "model_type" in planned and not written.config.get("model_type"):
        yield _finding(
            "model_type",
            f"{CONFIG} has no model_type, by which AutoModel finds the class",
            fix=f"add {json.dumps(planned['model_type'])}",
        )
    if (written.path / ADAPTER).is_file():
        yield _finding(
            ADAPTER,
            f"it stands next to {CONFIG}: where peft is installed, from_pretrained adds the adapter to these weights",
            fix="move the adapter to another directory",
        )
    yield from _check_dtype(plan, written, written.config)
    yield from _check_head(written, written.config, planned)
    yield from _check_generation(plan, written)


def other_class(plan: Plan, written: Written) -> Finding | None:
    """Report that config.json names another class than the rules; None when it does not."""
    planned = plan.rules.targets[plan.target].config
    for key in ("architectures", "model_type", "_class_name"):
        if written.config is not None and key in planned and (written.config.get(key) or planned[key]) != planned[key]:
            return _finding(
                key,
                f"{CONFIG} names another class than the rules",
                expected=json.dumps(planned[key]),
                got=json.dumps(written.config[key]),
                fix="write the class of the rules, or give with --model the rules of the other class",
            )
    return None


def _finding(path: str, problem: str, *, expected: str = "", got: str = "", fix: str = "") -> Finding:
    data = {"diagnosis": "the directory", "file": path}
    return Finding("directory-not-loadable", problem, path=path, expected=expected, got=got, fix=fix, data=data)


def _check_files(written: Written, single: str, has_config: bool) -> Iterator[Finding]:
    """Compare the files with what the loader looks for.

    Args:
        single: name of the file, if there is one.
    """
    of_shards = single + INDEX_SUFFIX
    for file, lost in written.missing.items():
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        yield _finding(
            file,
            f"there is no such file, and {written.index} names it for {lost[0]}{more}: the directory does not load",
            fix="copy the file there, or convert again",
        )
    if written.index == single and (written.path / of_shards).is_file():
        yield _finding(
            single,
            f"it stands next to {of_shards}: from_pretrained loads {single}, which is checked here, and not the shards that "
            "the index names; other code may load the shards",
            fix=f"delete {single} if the shards are meant, or else the index and its shards",
        )
    if written.index not in ("", single, of_shards):
        yield _finding(
            WEIGHTS_KEY,
            f"{CONFIG} names {written.index}: transformers loads that file, which is checked here, and other code loads "
            f"{single} or the shards of {of_shards}",
            fix=f"rename the file to {single} and remove the key",
        )
    if written.index:
        return
    names = sorted({file.name for file, _ in written.tensors.values()})
    shards = [name for name in names if _SHARD.fullmatch(name)]
    if shards or (has_config and names != [single]):
        yield _finding(
            of_shards,
            f"there is no such file next to {', '.join(names[:2])}{' ...' if len(names) > 2 else ''}, and from_pretrained "
            f"finds only {single} or the files that the index names",
            fix="write the index again",
        )


def _check_dtype(plan: Plan, written: Written, config: Mapping[str, Any]) -> Iterator[Finding]:
    computed = {step.name for step in plan.steps if not step.parts}  # buffers keep their own dtype
    stated = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    dtypes = sorted({s.dtype for name, s in written.specs.items() if is_float(s.dtype) and name not in computed})
    if stated and dtypes and dtypes != [stated]:
        yield _finding(
            "dtype",
            f"{CONFIG} and the tensors have different dtypes, and from_pretrained loads all tensors in that of {CONFIG}",
            expected=" and ".join(dtypes),
            got=stated,
            fix="set dtype to that of the tensors",
        )


def _check_head(written: Written, config: Mapping[str, Any], planned: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that a tied head, which is stored once, is not untied by the config: it would have no values."""
    untied = config.get("tie_word_embeddings") is False and planned.get("tie_word_embeddings") is True
    if untied and not any(name.endswith("lm_head.weight") for name in written.tensors):
        yield _finding(
            "lm_head.weight",
            f"the file does not hold it, and tie_word_embeddings is false in {CONFIG}: from_pretrained fills the head with "
            "random numbers",
            fix="set tie_word_embeddings to true",
        )


def _check_generation(plan: Plan, written: Written) -> Iterator[Finding]:
    """Compare the tokens that begin, end and pad a text with the rules and the settings."""
    path = written.path / GENERATION
    try:
        planned = plan.generation_config
    except PlanError:
        return  # the facts are unknown
    if planned is None or not path.exists():
        return
    try:
        stated = json.loads(read_regular(path, MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        yield _finding(GENERATION, f"cannot be read: {error}")
        return
    for key, value in planned.items():
        got = stated.get(key) if isinstance(stated, dict) else None
        if _as_list(got) != _as_list(value):
            yield _finding(
                key,
                f"{GENERATION} and {_origin(plan)} disagree",
                expected=json.dumps(value),
                got=json.dumps(got),
                fix=f"set it to {json.dumps(value)} in {GENERATION}; if {json.dumps(got)} is right for this checkpoint, "
                f"{_correction(plan, key, got)}",
            )


def _origin(plan: Plan) -> str:
    """Return what states the planned settings of generate(): see `Plan.generation_config`."""
    return "the rules" if plan.rules.targets[plan.target].generation else "the file next to the checkpoint"


def _correction(plan: Plan, key: str, value: Any) -> str:
    """Return how a conversion writes this value."""
    templates = plan.rules.targets[plan.target].generation
    if not templates:
        return f"change {GENERATION} next to the checkpoint and convert again"
    name, more = parse_reference(templates[key]) or ("", 0)
    if name in settable(plan.rules) and not more and value is not None:
        return f"convert with {set_option(name, value)}"
    return f"correct {key} in `generation` of {plan.rules.path} and convert again"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
