"""Which step and which item is opened, and saves that are not finished."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from convert.checkpoints.orbax.reader import looks_like_orbax, open_orbax
from support.orbax_checkpoints import WAIT, Copy, chosen, refusal
from support.source_contract import same


def test_takes_the_latest_step(managed: Path) -> None:
    source = open_orbax(managed / "plain")
    assert chosen(source) == [("step-chosen", 200, [0, 100, 200]), ("item-chosen", "default", [])]
    assert [str(note) for note in source.notes] == ["step 200 of 0, 100, 200", "reads the item default"]
    assert source.path == managed / "plain" / "200" / "default"
    assert same(source.read("w"), np.full(2, 200))


@pytest.mark.parametrize("step", [0, 100, 200])
def test_takes_the_step_that_was_asked_for(managed: Path, step: int) -> None:
    source = open_orbax(managed / "plain", step=step)
    assert chosen(source)[0] == ("step-chosen", step, [0, 100, 200])
    assert same(source.read("w"), np.full(2, step))


def test_a_step_that_is_not_there(managed: Path) -> None:
    finding = refusal(managed / "plain", step=150)
    assert (finding.code, finding.path, finding.expected) == ("step-not-found", "plain", "one of 0, 100, 200")


def test_steps_with_prefix_and_zeros(managed: Path) -> None:
    source = open_orbax(managed / "items", step=5)
    assert chosen(source) == [("step-chosen", 5, [5, 10]), ("item-chosen", "state", ["array", "config", "key"])]
    assert same(source.read("w"), np.full(2, 5))
    assert chosen(open_orbax(managed / "items"))[0] == ("step-chosen", 10, [5, 10])


def test_the_directory_of_a_step_or_an_item(managed: Path) -> None:
    for step in (None, 100):
        assert same(open_orbax(managed / "plain" / "100", step=step).read("w"), np.full(2, 100))
        assert same(open_orbax(managed / "plain" / "100" / "default", step=step).read("w"), np.full(2, 100))
    finding = refusal(managed / "plain" / "100", step=3)
    assert (finding.code, finding.path, finding.fix) == ("checkpoint-option", "100", "leave out --step 3")


def test_items(managed: Path) -> None:
    finding = refusal(managed / "two")
    assert (finding.code, finding.path) == ("checkpoint-ambiguous", "two")
    assert "config (JSON), opt (tree), params (tree)" in finding.problem and "--item" in finding.fix
    for i, name in enumerate(("params", "opt")):
        source = open_orbax(managed / "two", item=name)
        assert chosen(source) == [("item-chosen", name, [])]
        assert same(source.read("w"), np.full(2, i))
    for item in ("ema", "config"):
        finding = refusal(managed / "two", item=item)
        assert (finding.code, finding.path) == ("item-not-found", "two") and item in finding.problem
        assert finding.got == "config (JSON), opt (tree), params (tree)"
    finding = refusal(managed / "none")
    assert (finding.code, finding.got) == ("item-not-found", "config (JSON)")
    finding = refusal(managed / "plain" / "0" / "default", item="params")
    assert (finding.code, finding.fix) == ("checkpoint-option", "leave out --item params")


def test_a_directory_of_many_other_things_lists_the_trees(managed: Path, tmp_path: Path) -> None:
    """A wrong directory, such as /tmp: the error named each of a thousand folders in it."""
    shutil.copytree(managed / "two", tmp_path / "many")
    for k in range(40):
        (tmp_path / "many" / f"a{k}").mkdir()
    problem = refusal(tmp_path / "many").problem
    assert problem.startswith("several items are trees: opt (tree), params (tree), a0 (not a tree), ")
    assert problem.endswith("(not a tree) and 31 more") and problem.count("(") == 12


def test_a_single_array_can_be_named_as_item(managed: Path) -> None:
    assert same(open_orbax(managed / "items", item="array").read("checkpoint"), np.ones(2))


def test_steps_that_are_trees_themselves(small: Path, tmp_path: Path) -> None:
    for name in ("step_1", "step_20"):
        shutil.copytree(small / "ocdbt", tmp_path / "run" / name)
    (tmp_path / "run" / "logs_3").mkdir()
    assert chosen(open_orbax(tmp_path / "run")) == [("step-chosen", 20, [1, 20])]
    shutil.copytree(small / "ocdbt", tmp_path / "run" / "other_20")
    finding = refusal(tmp_path / "run")
    assert (finding.code, finding.path) == ("checkpoint-ambiguous", "run")
    assert "other_20, step_20" in finding.problem


def test_many_steps_are_not_all_listed(small: Path, tmp_path: Path) -> None:
    for step in range(20):
        (tmp_path / "run" / str(step)).mkdir(parents=True)
        shutil.copy(small / "ocdbt" / "_METADATA", tmp_path / "run" / str(step))
    finding = refusal(tmp_path / "run", step=99)
    assert (finding.code, finding.path, finding.got) == ("step-not-found", "run", "99")
    assert finding.expected == "one of 0, 1, 2, ... 17, 18, 19 (20 steps)"
    assert finding.data["steps"] == list(range(20))


def test_a_directory_called_checkpoints_is_looked_into(managed: Path, tmp_path: Path) -> None:
    shutil.copytree(managed / "plain", tmp_path / "run" / "checkpoints")
    assert looks_like_orbax(tmp_path / "run")
    assert chosen(open_orbax(tmp_path / "run"))[0] == ("step-chosen", 200, [0, 100, 200])


def test_a_name_of_a_save_that_has_not_ended(copy: Copy, tmp_path: Path) -> None:
    path = copy("ocdbt").rename(tmp_path / "ckpt.orbax-checkpoint-tmp-17")
    (tmp_path / "latest").symlink_to(path)
    for name in (path.name, "ckpt", "latest"):
        finding = refusal(tmp_path / name)
        assert (finding.code, finding.path, finding.fix) == ("checkpoint-unfinished", name, WAIT)
        assert "ckpt.orbax-checkpoint-tmp-17" in finding.problem


def test_unfinished_steps_are_passed_over(steps: Path) -> None:
    (steps / "200").rename(steps / "200.orbax-checkpoint-tmp")
    assert chosen(open_orbax(steps))[0] == ("step-chosen", 100, [0, 100])
    assert open_orbax(steps).notes[0].data["not_finished"] == ["200.orbax-checkpoint-tmp"]
    finding = refusal(steps, step=200)
    assert (finding.code, finding.path) == ("checkpoint-unfinished", "run/200.orbax-checkpoint-tmp")


def test_only_unfinished_steps(steps: Path) -> None:
    shutil.rmtree(steps / "0")
    shutil.rmtree(steps / "100")
    (steps / "200").rename(steps / "200.orbax-checkpoint-tmp-4")
    finding = refusal(steps)
    assert (finding.code, finding.path) == ("checkpoint-unfinished", "run")
    assert "200.orbax-checkpoint-tmp-4" in finding.problem


def test_a_step_without_commit_time(steps: Path) -> None:
    metadata = steps / "200" / "_CHECKPOINT_METADATA"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "commit_timestamp_nsecs": None}))
    (steps / "200" / "commit_success.txt").unlink()
    for path, step in ((steps / "200", None), (steps / "200" / "default", None), (steps, 200)):
        finding = refusal(path, step=step)
        assert (finding.code, finding.fix) == ("checkpoint-unfinished", WAIT)
        assert finding.path == ("run/200" if step else path.name)
        assert "_CHECKPOINT_METADATA has no commit time" in finding.problem
    assert chosen(open_orbax(steps))[0] == ("step-chosen", 100, [0, 100])
    assert open_orbax(steps).notes[0].data["not_finished"] == ["200"]


def test_commit_success_is_due_where_earlier_steps_have_it(steps: Path) -> None:
    # As on GCS before 0.5.11: no commit time, and no other sign.
    for step in ("0", "100", "200"):
        (steps / step / "_CHECKPOINT_METADATA").unlink()
    (steps / "200" / "commit_success.txt").unlink()
    assert chosen(open_orbax(steps))[0] == ("step-chosen", 100, [0, 100])
    assert open_orbax(steps).notes[0].data["not_finished"] == ["200"]
    finding = refusal(steps, step=200)
    assert (finding.code, finding.path) == ("checkpoint-unfinished", "run/200")
    assert "commit_success.txt" in finding.problem


def test_commit_success_is_not_due_before_orbax_0_12_3(steps: Path) -> None:
    # 0.5.11 to 0.12.2 on a disk: a commit time, and no file. Before 0.5.11: neither.
    for file in steps.rglob("commit_success.txt"):
        file.unlink()
    assert chosen(open_orbax(steps))[0] == ("step-chosen", 200, [0, 100, 200])
    for file in steps.rglob("_CHECKPOINT_METADATA"):
        file.unlink()
    assert chosen(open_orbax(steps))[0] == ("step-chosen", 200, [0, 100, 200])


def test_commit_success_after_an_upgrade(steps: Path) -> None:
    for step in ("0", "100"):
        (steps / step / "_CHECKPOINT_METADATA").unlink()
        (steps / step / "commit_success.txt").unlink()
    assert chosen(open_orbax(steps, step=100))[0] == ("step-chosen", 100, [0, 100, 200])


def test_a_damaged_step_is_not_passed_over(steps: Path) -> None:
    (steps / "200" / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {')
    finding = refusal(steps)
    assert (finding.code, finding.path) == ("checkpoint-corrupt", "run/200/_CHECKPOINT_METADATA")
    assert chosen(open_orbax(steps, step=100))[0] == ("step-chosen", 100, [0, 100, 200])


def test_an_item_that_is_not_finished(steps: Path) -> None:
    (steps / "200" / "default").rename(steps / "200" / "default.orbax-checkpoint-tmp")
    finding = refusal(steps / "200")
    assert (finding.code, finding.path) == ("checkpoint-unfinished", "200")
    assert "default.orbax-checkpoint-tmp" in finding.problem


@pytest.mark.parametrize("name", ["default", "default.orbax-checkpoint-tmp-3"])
def test_an_item_that_is_named_and_not_finished(name: str, steps: Path) -> None:
    """It was said not to be there; so it was where the whole step was interrupted."""
    (steps / "200" / "default").rename(steps / "200" / "default.orbax-checkpoint-tmp-3")
    for path, step in ((steps / "200", None), (steps, None), (steps, 200)):
        finding = refusal(path, item=name, step=step)
        assert (finding.code, Path(finding.path).name, finding.fix) == ("checkpoint-unfinished", name, WAIT)
        assert "default.orbax-checkpoint-tmp-3, an interrupted save" in finding.problem
    finding = refusal(steps / "200", item="other")
    assert (finding.code, finding.problem) == ("item-not-found", "there is no item other")


def test_a_step_that_is_not_finished_has_no_items(steps: Path) -> None:
    (steps / "200").rename(steps / "200.orbax-checkpoint-tmp-4")
    for path, step in ((steps / "200.orbax-checkpoint-tmp-4", None), (steps / "200", None), (steps, 200)):
        assert refusal(path, item="default", step=step).code == "checkpoint-unfinished"


def test_an_item_without_its_names_is_incomplete(managed: Path, tmp_path: Path) -> None:
    shutil.copytree(managed / "two", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "params")
    (tmp_path / "two" / "params" / "w").mkdir(parents=True)
    (tmp_path / "two" / "params" / "w" / ".zarray").write_text("{}")
    finding = refusal(tmp_path / "two", item="params")
    assert (finding.code, Path(finding.path).name) == ("checkpoint-incomplete", "params")
    assert "_METADATA is missing" in finding.problem
