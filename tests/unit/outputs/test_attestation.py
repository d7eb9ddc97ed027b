"""The in-toto statement: its digests are those of the files, in the form of model-signing."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from convert.core.errors import OutputError
from convert.outputs.attestation import attest, refuse_inside
from support.command_line import Run
from support.small_conversion import small_output, write_checkpoint, write_rules


def recompute(out: Path, statement: dict[str, object]) -> None:
    """As `dsse_payload_to_manifest` of model-signing 1.1.1 does, and with each file."""
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    predicate = statement["predicate"]
    assert isinstance(predicate, dict)
    total = hashlib.sha256()
    for resource in predicate["resources"]:
        path = out / resource["name"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == resource["digest"]
        total.update(bytes.fromhex(resource["digest"]))
    assert statement["subject"] == [{"name": out.name, "digest": {"sha256": total.hexdigest()}}]
    names = [resource["name"] for resource in predicate["resources"]]
    assert names == (sorted(path.name for path in out.iterdir()) if out.is_dir() else ["."])


def test_the_digests_are_those_of_the_files(tmp_path: Path) -> None:
    for out in (small_output(tmp_path, "a.safetensors"), small_output(tmp_path, "d", max_shard_bytes=50)):
        recompute(out, attest(out, {"model": "small"}))


def test_run_and_verify_write_the_same_statement_and_only_about_what_is_intact(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rules(tmp_path)
    write_checkpoint(Path("source.npz"))
    run("./small.yaml", "source.npz", "out", "--attest", "one.json")
    run("verify", "out", "--attest", "two.json")
    assert Path("one.json").read_text() == Path("two.json").read_text()
    statement = json.loads(Path("one.json").read_text())
    recompute(Path("out").absolute(), statement)
    assert statement["predicate"]["conversion"]["model"] == "small"
    with Path("out", "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    run("verify", "out", "--attest", "three.json", code=1)
    assert not Path("three.json").exists()


def test_a_statement_in_its_output_or_in_the_checkpoint_is_refused(tmp_path: Path) -> None:
    out, source = small_output(tmp_path, "out", max_shard_bytes=50), tmp_path / "source"
    for path in (out / "statement.json", out, source, source / "statement.json"):
        with pytest.raises(OutputError):
            refuse_inside(path, out, source)


def test_a_statement_that_cannot_be_written_is_refused_before_the_conversion(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rules(tmp_path)
    source = write_checkpoint(Path("source.npz")).read_bytes()
    for path, problem in (("source.npz", "of what is converted"), ("small.yaml", "of what is converted"), (".", "is a directory"), ("absent/a.json", "does not exist")):  # fmt: skip
        assert problem in run("./small.yaml", "source.npz", "out", "--attest", path, code=2)[1]
    monkeypatch.setattr("os.access", lambda path, mode: mode == os.R_OK)  # root may write to any directory
    assert "not writable" in run("./small.yaml", "source.npz", "out", "--attest", "a.json", code=2)[1]
    assert Path("source.npz").read_bytes() == source and not Path("out").exists()
