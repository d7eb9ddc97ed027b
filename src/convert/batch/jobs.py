"""The jobs of a batch: from a YAML file, or from a model, a pattern of checkpoints and a directory."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convert.core.errors import ConvertError
from convert.core.fields import FLAG, INTEGER, TEXT, Choice, Key, ListOf, MapOf, Record, Scalar
from convert.core.findings import Finding
from convert.core.yaml_nodes import YamlNode, load_yaml, parse_scalar, read_text
from convert.planning.options import ConversionOptions
from convert.rules.library import is_path
from convert.stores import StorePath, located
from convert.verify.report.report import LEVELS
from convert.writing.shard_size import parse_size

NAME = "{name}"


class _Setting(Scalar):
    """A value as ``--set`` reads it, or a list of them."""

    def read(self, node: YamlNode) -> Any:
        if isinstance(node.value, tuple):
            return [super(_Setting, self).read(item) for item in node.value]
        return super().read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [super().schema(), {"type": "array", "items": super().schema()}]}


SETTING = _Setting((str, int, float, bool), "a value", lambda value: parse_scalar(_scalar(value)))
_PATHS = ("checkpoint", "out", "lora", "skeleton", "rules", "like", "attest", "tokenizer")


def _size(text: str) -> str:
    """Check a size.

    Raises:
        ValueError: it is none.
    """
    try:
        parse_size(text, "max_shard_size")
    except ConvertError as error:
        raise ValueError(str(error)) from None
    return text


JOB = Record(
    {
        "model": Key(TEXT, "a shipped model, or the path of a rule file", example="gemma"),
        "checkpoint": Key(TEXT, "a checkpoint, or a pattern such as `ckpts/*` for many", example="ckpts/1000"),
        "out": Key(
            TEXT, "file or directory; {name} stands for the checkpoint's name", example="out/{name}.safetensors"
        ),
        "to": Key(TEXT, "target of the rules"),
        "dtype": Key(TEXT, "dtype of the floating-point tensors"),
        "step": Key(INTEGER, "training step"),
        "item": Key(TEXT, "item of a composite checkpoint"),
        "lora": Key(TEXT, "checkpoint of LoRA pairs alone, whose weights the checkpoint has"),
        "skeleton": Key(TEXT, "leaf names of an Equinox file"),
        "follow_links": Key(FLAG, "follow links that lead out of the checkpoint"),
        "set": Key(MapOf(SETTING, "settings such as {vocab_size: 32000}"), "what the checkpoint does not store"),
        "allow_custom_cells": Key(FLAG, "allow recurrent cells that torch.nn lacks"),
        "rules": Key(TEXT, "directory of rule files"),
        "like": Key(TEXT, "weights whose names and shapes the result must have"),
        "max_shard_size": Key(Scalar(str, "a size such as 2GB", _size), "largest file of an output directory"),
        "tokenizer": Key(
            TEXT, "directory of the tokenizer and processor files that are copied into the output directory"
        ),
        "attest": Key(TEXT, "file for an in-toto statement; {name} stands for the checkpoint's name"),
        "check": Key(ListOf(Choice(LEVELS), or_one=True), "levels of the check that must pass after the conversion"),
        "reference": Key(TEXT, "function that builds your own pair of models, for the check"),
        "trust": Key(ListOf(TEXT, or_one=True), "facts that the check accepts although nothing confirms them"),
    },
    "a job",
)
FILE = Record(
    {
        "defaults": Key(JOB, "keys that every job has unless it sets them itself"),
        "jobs": Key(ListOf(JOB), "the conversions", required=True),
    },
    "a jobs file",
)
_REQUIRED = ("model", "checkpoint", "out")
_OPTIONS = {  # key -> option of the command line
    "to": "--to",
    "dtype": "--dtype",
    "step": "--step",
    "item": "--item",
    "lora": "--lora",
    "skeleton": "--skeleton",
    "rules": "--rules",
}
_WRITING = {"like": "--like", "tokenizer": "--tokenizer", "max_shard_size": "--max-shard-size", "attest": "--attest"}


@dataclass(frozen=True)
class Job:
    """One conversion.

    Attributes:
        model, checkpoint, out: the arguments of ``convert run``.
        values: the other keys of the job, by their names in a jobs file.
        at: ``file:line`` in the jobs file; empty without one.
    """

    model: str
    checkpoint: Path
    out: Path
    values: Mapping[str, Any]
    at: str = ""

    @property
    def name(self) -> str:
        """What a report calls it."""
        return str(self.out)

    @property
    def statement(self) -> Path | None:
        """The file of the in-toto statement."""
        return located(self.values["attest"]) if "attest" in self.values else None

    @property
    def written(self) -> tuple[Path, ...]:
        """What it writes: the output, and the statement."""
        return (self.out, *filter(None, [self.statement]))

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels of the check that must pass."""
        return tuple(self.values.get("check", ()))

    def options(self) -> ConversionOptions:
        """Return the options of the plan, without `like`."""
        custom = {"custom_cells": True} if self.values.get("allow_custom_cells") else {}
        return ConversionOptions(
            to=self.values.get("to"),
            dtype=self.values.get("dtype"),
            settings={**custom, **self.values.get("set", {})},
            step=self.values.get("step"),
            item=self.values.get("item"),
            lora=self.values.get("lora"),
            skeleton=self.values.get("skeleton"),
            follow_links=self.values.get("follow_links", False),
            rules_dir=self.values.get("rules"),
            tokenizer=self.values.get("tokenizer"),
        )

    def convert_arguments(self, extra: Sequence[str] = ()) -> list[str]:
        """Return the arguments of the conversion."""
        written = [
            word for key, option in _WRITING.items() if key in self.values for word in (option, self.values[key])
        ]
        cells = ["--allow-custom-cells"] if self.values.get("allow_custom_cells") else []
        return ["run", self.model, _word(self.checkpoint), _word(self.out), *self._shared(), *written, *cells, *extra]

    def check_arguments(self) -> list[str]:
        """Return the arguments of the check: a level that is skipped has not passed."""
        levels = ",".join(self.levels)
        reference = ["--reference", self.values["reference"]] if "reference" in self.values else []
        trust = ["--trust", ",".join(self.values["trust"])] if "trust" in self.values else []
        start = ["check", _word(self.out), "--from", _word(self.checkpoint), "--model", self.model]
        return [*start, *self._shared(), "--level", levels, "--require", levels, *reference, *trust]

    def _shared(self) -> list[str]:
        words = [
            word for key, option in _OPTIONS.items() if key in self.values for word in (option, str(self.values[key]))
        ]
        words += ["--follow-links"] if self.values.get("follow_links") else []
        return [
            *words,
            *(
                word
                for key, value in self.values.get("set", {}).items()
                for word in ("--set", f"{key}={_scalar(value)}")
            ),
        ]


def _word(path: Path) -> str:
    """Write a path as an argument that is not taken for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _scalar(value: Any) -> str:
    """Write a value as ``--set`` reads it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def command(arguments: Sequence[str]) -> str:
    """Return the command line that a user can paste into a shell."""
    words = list(arguments[1:] if arguments[0] == "run" else arguments)
    return shlex.join(["convert", *words])


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a jobs file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Jobs of `convert batch`",
        **FILE.schema(),
    }


def read_jobs(path: Path, common: Mapping[str, Any]) -> list[Job]:
    """Read a jobs file. Its paths are relative to its directory.

    Args:
        common: keys for all jobs, which the file overrides.

    Raises:
        ConvertError: it cannot be read, or a key, value or pattern is wrong.
    """
    if not path.is_file():
        raise ConvertError(
            Finding("file-not-found", "there is no such jobs file", path=str(path), fix="correct the path")
        )
    root = load_yaml(read_text(path, str(path)), str(path))
    content = FILE.read(root)
    nodes: tuple[YamlNode, ...] = root.value["jobs"].value
    if not nodes:
        raise ConvertError(Finding("batch-invalid", "the list of jobs is empty", rule=str(path), fix="add a job"))
    jobs: list[Job] = []
    findings: list[Finding] = []
    for values, node in zip(content["jobs"], nodes, strict=True):
        values, at = {**common, **content.get("defaults", {}), **values}, node.at.line_only
        if missing := [key for key in _REQUIRED if key not in values]:
            fix = f"add {' and '.join(f'`{key}:`' for key in missing)} to the job or to the defaults"
            findings.append(Finding("batch-invalid", f"the job has no {', '.join(missing)}", rule=at, fix=fix))
            continue
        if is_path(values["model"]):
            values["model"] = str(path.parent / values["model"])
        try:
            for key in _PATHS:
                if key in values and values[key] != common.get(key):
                    values[key] = _below(path.parent, values[key])
            jobs += expand(values, at)
        except ConvertError as error:
            findings += (replace(finding, rule=finding.rule or at) for finding in error.findings)
    if findings:
        raise refuse(findings, len(nodes))
    return jobs


def _below(folder: Path, text: str) -> str:
    """Return a path of a jobs file as the command line has it; a URL stays as it is."""
    return text if isinstance(located(text), StorePath) else str(folder / text)


def refuse(findings: Sequence[Finding], jobs: int) -> ConvertError:
    """Return the error for jobs that cannot be started."""
    problems = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
    headline = f"Nothing was converted: {problems} in {'1 job' if jobs == 1 else f'{jobs} jobs'}:"
    return ConvertError(*findings, headline=headline)


def expand(values: Mapping[str, Any], at: str = "") -> list[Job]:
    """Return the job, or one for each checkpoint that its pattern matches.

    Raises:
        ConvertError: nothing matches, or all would have one output.
    """
    values = dict(values)
    model, pattern, out = (values.pop(key) for key in _REQUIRED)
    if not glob.has_magic(pattern) or located(pattern).exists():
        return [_job(model, located(pattern), out, values, at)]
    found = sorted(path for path in _matches(pattern) if not path.name.startswith("."))
    if not found:
        raise ConvertError(
            Finding(
                "checkpoint-missing",
                "no checkpoint matches the pattern",
                rule=at,
                path=pattern,
                fix="correct the pattern",
            )
        )
    if NAME not in out:
        problem = f"all {len(found)} checkpoints of the pattern would be written to it"
        raise ConvertError(Finding("batch-invalid", problem, rule=at, path=out, fix=f"put {NAME} into its name"))
    return [_job(model, path, out, values, at) for path in found]


def _matches(pattern: str) -> list[Path]:
    """Return the paths that match a pattern; of a URL, the names below its bucket."""
    there = located(pattern)
    if not isinstance(there, StorePath):
        return [Path(path) for path in glob.glob(pattern)]  # noqa: PTH207 - any pattern
    if there.bucket.scheme.startswith("http"):
        problem = f"{there.bucket.scheme}:// has no listing in which a pattern could be looked up"
        raise ConvertError(Finding("store-url", problem, path=pattern, fix="name each checkpoint in a jobs file"))
    found: list[Path] = [StorePath(*there.parts[:2])]
    for part in there.parts[2:]:
        found = [match for path in found for match in (path.glob(part) if glob.has_magic(part) else (path / part,))]
    return [path for path in found if path.exists()]


def _job(model: str, path: Path, out: str, values: Mapping[str, Any], at: str) -> Job:
    name = path.name if path.is_dir() or not path.suffix else path.stem
    named = {"attest": values["attest"].replace(NAME, name)} if "attest" in values else {}
    return Job(model, path, located(out.replace(NAME, name)), {**values, **named}, at)


def take_shard(jobs: Sequence[Job], shard: str | None) -> list[Job]:
    """Return the jobs of one of several machines: of ``2/4`` every fourth, from the second.

    Raises:
        ConvertError: `shard` has another form.
    """
    if shard is None:
        return list(jobs)
    first, slash, count = shard.partition("/")
    if not (slash and first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise ConvertError(
            Finding("usage", path="--shard", expected="K/N with 1 <= K <= N, such as 2/8", got=repr(shard))
        )
    return list(jobs[int(first) - 1 :: int(count)])
