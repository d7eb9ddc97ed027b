"""The jobs of a batch: what a file says, and what is refused before a byte is read."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import jsonschema
import pytest

from convert.batch import preflight as module
from convert.batch.jobs import Job, command, expand, read_jobs, schema, take_shard
from convert.batch.preflight import preflight
from convert.cli.options import parse_settings
from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.yaml_nodes import load_yaml
from support.paths import EXAMPLES
from support.small_conversion import write_checkpoint, write_rules

JOBS = """\
defaults: {model: small.yaml}
jobs:
- {checkpoint: a.npz, out: out/a.safetensors}
- {checkpoint: b.npz, out: out/b.safetensors, set: {x: true, y: 2}, dtype: bfloat16, check: weights}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rules(tmp_path)
    for k, name in enumerate("ab"):
        write_checkpoint(tmp_path / f"{name}.npz", k)
    return tmp_path


def read(folder: Path, text: str) -> list[Job]:
    (folder / "jobs.yaml").write_text(text)
    return read_jobs(folder / "jobs.yaml", {})


def refused(folder: Path, text: str, *, overwrite: bool = False) -> tuple[Finding, ...]:
    with pytest.raises(ConvertError) as caught:
        jobs = read(folder, text)
        preflight(jobs, jobs, overwrite=overwrite)
    assert not (folder / "out").exists(), "a directory was created before all was checked"
    return caught.value.findings


def test_a_file_gives_jobs_with_its_defaults_lines_and_paths(folder: Path) -> None:
    a, b = read(folder, JOBS)
    assert (a.model, a.checkpoint, a.out) == (
        str(folder / "small.yaml"), folder / "a.npz", folder / "out" / "a.safetensors",
    )  # fmt: skip
    assert (a.at, b.at) == (f"{folder}/jobs.yaml:3", f"{folder}/jobs.yaml:4")
    assert b.options().settings == {"x": True, "y": 2} and b.levels == ("weights",)
    assert command(b.convert_arguments()) == (
        f"convert {folder}/small.yaml {folder}/b.npz {folder}/out/b.safetensors --dtype bfloat16 --set x=true --set y=2"
    )
    assert command(b.check_arguments()).endswith("--level weights --require weights")


def test_the_pairs_of_a_job_lie_where_its_other_paths_do(folder: Path) -> None:
    _, job = read(folder, JOBS.replace("set: {x: true, y: 2}", "lora: pairs"))
    assert job.options().lora == str(folder / "pairs")
    assert all(f"--lora {folder}/pairs" in command(words) for words in (job.convert_arguments(), job.check_arguments()))


def test_the_command_of_a_job_reads_back_as_its_values(folder: Path) -> None:
    settings = 'set: {number: "1", ids: [1, 106], words: [a, b], small: 1.0e-6}'
    _, job = read(folder, JOBS.replace("set: {x: true, y: 2}", settings))
    words = shlex.split(command(job.convert_arguments()))
    given = [words[k + 1] for k, word in enumerate(words) if word == "--set"]
    assert job.options().settings == {"number": 1, "ids": [1, 106], "words": ["a", "b"], "small": 1e-6}
    assert parse_settings(given) == job.options().settings
    dashed = Job("m", Path("-a.npz"), Path("-o"), {})
    assert command(dashed.convert_arguments()) == "convert m ./-a.npz ./-o"
    assert command(dashed.check_arguments()).startswith("convert check ./-o --from ./-a.npz")


@pytest.mark.parametrize(
    "report", ["a.npz", "jobs.yaml", "small.yaml", "out/b.safetensors", "out/b.safetensors/r.xml", "r.xml"]
)
def test_a_report_replaces_nothing_of_the_batch(folder: Path, report: str) -> None:
    jobs = read(folder, JOBS.replace("set: {x: true, y: 2}, ", ""))
    other = folder / "r.xml"
    with pytest.raises(ConvertError) as caught:
        preflight(jobs, jobs, overwrite=False, reports=[other, folder / report])
    (found,) = caught.value.findings
    assert (found.code, found.path) == ("output-within-input", str(folder / report))
    assert preflight(jobs, jobs, overwrite=False, reports=[other, folder / "other.html"], create=False)


def test_options_of_the_command_line_are_defaults_of_the_file(folder: Path) -> None:
    (folder / "jobs.yaml").write_text(JOBS)
    a, b = read_jobs(folder / "jobs.yaml", {"dtype": "float16", "rules": "mine"})
    assert (a.values["dtype"], b.values["dtype"], a.values["rules"]) == ("float16", "bfloat16", "mine")


def test_a_pattern_gives_a_job_for_each_match(folder: Path) -> None:
    jobs = expand({"model": "m", "checkpoint": str(folder / "*.npz"), "out": "o/{name}"})
    assert [(job.checkpoint.name, job.out) for job in jobs] == [("a.npz", Path("o/a")), ("b.npz", Path("o/b"))]


def test_the_shards_are_all_jobs_once() -> None:
    jobs = [Job("m", Path(f"{k}"), Path(f"o{k}"), {}) for k in range(11)]
    for count in (1, 3, 11, 20):
        parts = [take_shard(jobs, f"{k}/{count}") for k in range(1, count + 1)]
        assert sorted((job for part in parts for job in part), key=jobs.index) == jobs
    for wrong in ("0/2", "3/2", "1", "1/", "a/b", "1/2/3", "-1/2"):
        with pytest.raises(ConvertError):
            take_shard(jobs, wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code", "at"),
    [
        (JOBS.replace("checkpoint: b.npz", "chekpoint: b.npz"), "rule-unknown-key", "jobs.yaml:4:4"),
        (JOBS.replace("check: weights", "check: weigths"), "rule-wrong-value", "jobs.yaml:4"),
        (JOBS.replace("dtype: bfloat16", "max_shard_size: 2XB"), "rule-wrong-value", "jobs.yaml:4"),
        (JOBS.replace("defaults: {model: small.yaml}\n", ""), "batch-invalid", "jobs.yaml:2"),
        (JOBS.replace("out/b.s", "out/a.s"), "batch-invalid", "jobs.yaml:4"),
        (JOBS.replace("out/b.s", "out/a.safetensors/b.s"), "batch-invalid", "jobs.yaml:4"),
        (JOBS.replace("out/b.s", "./out/../out/a.s"), "batch-invalid", "jobs.yaml:4"),
        (JOBS.replace("b.npz", "absent.npz"), "checkpoint-missing", "jobs.yaml:4"),
        (JOBS.replace("b.npz", "az://container/b.npz"), "store-url", "jobs.yaml:4"),
        (JOBS.replace("b.npz", "absent*"), "checkpoint-missing", "jobs.yaml:4"),
        (JOBS.replace("checkpoint: b.npz", "checkpoint: '*.npz'"), "batch-invalid", "jobs.yaml:4"),
        (JOBS.replace("{checkpoint: b", "{model: gemmma, checkpoint: b"), "rules-not-found", "jobs.yaml:4"),
        (JOBS.replace("dtype: bfloat16", "dtype: bfloat17"), "dtype-unknown", "jobs.yaml:4"),
        (JOBS.replace("out/b.s", "b.npz/b.s"), "output-not-writable", "jobs.yaml:4"),
        (JOBS.replace("out/b.s", "a.npz/b.s"), "output-within-input", "jobs.yaml:4"),
        (JOBS.replace("out/a.safetensors", "."), "output-within-input", "jobs.yaml:3"),
        *(
            (JOBS.replace("check: weights", f"attest: {statement}"), code, "jobs.yaml:4")
            for statement, code in {
                "a.npz": "output-within-input",
                "b.npz": "output-within-input",
                "out/a.safetensors": "batch-invalid",
                "out/b.safetensors": "batch-invalid",
                "out/b.safetensors/it.json": "batch-invalid",
                "out": "batch-invalid",
                ".": "output-kind",
                "small.yaml/it.json": "output-not-writable",
            }.items()
        ),
        (JOBS.replace("check: weights", "trust: windw"), "fact-unknown", "jobs.yaml:4"),
        ("jobs: []\n", "batch-invalid", "jobs.yaml"),
        ("- a\n", "rule-wrong-value", "jobs.yaml:1"),
    ],
)
def test_bad_jobs_are_refused_at_their_line(folder: Path, text: str, code: str, at: str) -> None:
    text = text if "set:" not in text else text.replace("set: {x: true, y: 2}, ", "")
    found = refused(folder, text)
    assert (code, True) in [(finding.code, f"{folder}/{at}" in finding.rule) for finding in found], found


def test_all_problems_are_one_error(folder: Path) -> None:
    text = JOBS.replace("set: {x: true, y: 2}, ", "").replace("a.npz", "absent.npz").replace("bfloat16", "bfloat17")
    assert [finding.code for finding in refused(folder, text)] == ["checkpoint-missing", "dtype-unknown"]


def test_an_existing_output_and_a_disk_that_is_too_small(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = JOBS.replace("set: {x: true, y: 2}, ", "").replace("out/", "")
    (folder / "a.safetensors").write_bytes(b"old")
    assert [finding.code for finding in refused(folder, text)] == ["output-exists"]
    needed = 5 * 48 + 5 * 24  # float32, and bfloat16
    for free, codes in ((needed - 1, ["disk-full"]), (needed, [])):
        usage = shutil.disk_usage(folder)._replace(free=free)
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path, usage=usage: usage)
        jobs = read(folder, text)
        if codes:
            assert [finding.code for finding in refused(folder, text, overwrite=True)] == codes
        else:
            assert [one.nbytes for one in preflight(jobs, jobs, overwrite=True)] == [240, 120]


def test_two_jobs_with_one_statement_and_a_directory_that_is_read_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = JOBS.replace("set: {x: true, y: 2}, ", "")
    (found,) = refused(folder, text.replace("small.yaml}", "small.yaml, attest: one.json}"))
    assert (found.code, found.rule) == ("batch-invalid", f"{folder}/jobs.yaml:4") and found.path.endswith("one.json")
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)  # root may write to any directory
    assert {finding.code for finding in refused(folder, text)} == {"output-not-writable"}


def test_the_schema_takes_the_example_and_refuses_what_the_reader_refuses() -> None:
    example = EXAMPLES / "batch"
    assert json.loads((example / "jobs.schema.json").read_text()) == schema()
    content = load_yaml((example / "jobs.yaml").read_text(), "jobs.yaml").plain()
    jsonschema.validate(content, schema())
    for wrong in ({"jobs": [{"chekpoint": "a"}]}, {"jobs": [{"check": "weigths"}]}, {}, {"jobs": [{"step": "1"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema())
