"""The wording of each command, pinned in one file: `UPDATE_SNAPSHOTS=1 pytest tests/cli/test_snapshots.py` writes them anew.

Other tests assert the codes and fields of findings; only these files hold whole texts.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from support.command_line import Run
from support.goldens import checkpoint
from support.paths import ROOT

SNAPSHOTS = Path(__file__).parent / "snapshots"
SMALL = "examples/checkpoints/timesfm-2.5"
HELP = ("run", "batch", "inspect", "plan", "check", "verify", "diff", "record", "infer", "skeleton", "rules")


def convert_twice(run: Run, folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """A conversion, a bfloat16 conversion to a directory, and the refusal to overwrite."""
    out, directory = folder / "out.safetensors", folder / "out"
    return [
        ("timesfm CKPT OUT", run("timesfm", SMALL, out)),
        ("timesfm CKPT DIR", run("timesfm", SMALL, directory, "--to", "transformers", "--dtype", "bfloat16")),
        ("timesfm CKPT OUT", run("timesfm", SMALL, out, code=2)),
    ]


def check_all(run: Run, folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """A check that passes on the weights level, one that finds a planted fault, and one without its file."""
    out, rules = folder / "out.safetensors", folder / "mine.yaml"
    run("timesfm", SMALL, out, "--quiet")
    text = run("rules", "show", "timesfm-2.5")[0]
    rules.write_text(text.replace("- einsum: ...NH,NHD->...D", "- einsum: ...NH,DNH->...D"))
    wrong = folder / "wrong.safetensors"
    shutil.copy(out, wrong)
    data = bytearray(wrong.read_bytes())
    data[-100] ^= 0x40
    wrong.write_bytes(data)
    level = ("--level", "coverage,weights")
    return [
        ("check OUT --from CKPT --level coverage,weights", run("check", out, "--from", SMALL, *level)),
        ("check WRONG --from CKPT --level coverage,weights", run("check", wrong, "--from", SMALL, *level, code=1)),
        ("check ABSENT --from CKPT", run("check", folder / "absent.safetensors", "--from", SMALL, code=2)),
    ]


def verify_all(run: Run, folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """An intact file, a damaged one, and one without digests."""
    out = folder / "out.safetensors"
    run("timesfm", SMALL, out, "--quiet")
    wrong, bare = folder / "wrong.safetensors", folder / "bare.safetensors"
    data = bytearray(out.read_bytes())
    data[-100] ^= 0x40
    wrong.write_bytes(data)
    save_file(load_file(out), bare)
    return [
        ("verify OUT", run("verify", out)),
        ("verify WRONG", run("verify", wrong, code=1)),
        ("verify BARE", run("verify", bare, code=2)),
    ]


def diff_all(run: Run, folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """Equal weights, others, a checkpoint through rules, and an absent file."""
    a, b = folder / "a.safetensors", folder / "b.safetensors"
    run("timesfm", SMALL, a, "--quiet")
    tensors = load_file(a)
    first, second, third = list(tensors)[:3]
    del tensors[first]
    tensors[second] = tensors[second] * np.float32(1.5)
    tensors[third] = tensors[third][..., :1].copy()
    save_file(tensors, b)
    return [
        ("diff A A", run("diff", a, a)),
        ("diff A B", run("diff", a, b, code=1)),
        ("diff B CKPT --model timesfm", run("diff", b, SMALL, "--model", "timesfm", code=1)),
        ("diff A ABSENT", run("diff", a, folder / "absent", code=2)),
    ]


def rules_all(run: Run, folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """The list, a valid file, a file with mistakes, and a draft."""
    mine = folder / "mine.yaml"
    text = run("rules", "show", "timesfm-2.5")[0]
    mine.write_text(
        text.replace("  activation: silu", "  activaton: silu", 1).replace("epsilon: $epsilon", "epsilon: x", 1)
    )
    return [
        ("rules list", run("rules", "list")),
        ("rules validate rules/timesfm-2.5.yaml", run("rules", "validate", "rules/timesfm-2.5.yaml")),
        ("rules validate MINE", run("rules", "validate", mine, code=2)),
        ("rules new CKPT DRAFT", run("rules", "new", SMALL, folder / "draft.yaml")),
    ]


def plan_all(run: Run, folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """A plan; rules that lack a leaf; rules of another model; a misspelt model and target."""
    mine = folder / "mine.yaml"
    text = run("rules", "show", "timesfm-1")[0]
    mine.write_text(text.replace("- drop: /step\n  because: the training step\n", ""))
    return [
        ("plan timesfm CKPT", run("plan", "timesfm", SMALL)),
        ("plan MINE CKPT", run("plan", mine, checkpoint("timesfm-1.0"), code=2)),
        ("plan timesfm-1 CKPT", run("plan", "timesfm-1", SMALL, code=2)),
        ("plan timesfn CKPT", run("plan", "timesfn", SMALL, code=2)),
        ("plan timesfm CKPT --to transformer", run("plan", "timesfm", SMALL, "--to", "transformer", code=2)),
        ("plan timesfm CKPT --set thetha=1", run("plan", "timesfm", SMALL, "--set", "thetha=1", code=2)),
    ]


def inspect_all(run: Run, folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """Two checkpoints, and what is none: an absent path, a directory of notes, a truncated file, a pickle."""
    notes, cut, pickle = folder / "notes", folder / "cut.npz", folder / "model.pkl"
    notes.mkdir()
    (notes / "notes.txt").write_text("hello")
    cut.write_bytes(b"PK\x03\x04" + bytes(40))
    pickle.write_bytes(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s.")
    return [
        ("inspect TIMESFM-2.5", run("inspect", SMALL)),
        ("inspect TIMESFM-1.0", run("inspect", checkpoint("timesfm-1.0"))),
        *((f"inspect {path.name}", run("inspect", path, code=2)) for path in (folder / "absent", notes, cut, pickle)),
    ]


def help_all(run: Run, folder: Path) -> list[tuple[str, tuple[str, str]]]:
    """The help of every command."""
    return [("--help", run("--help")), *((f"{name} --help", run(name, "--help")) for name in HELP)]


COMMANDS = {
    "convert": convert_twice,
    "inspect": inspect_all,
    "plan": plan_all,
    "check": check_all,
    "verify": verify_all,
    "diff": diff_all,
    "rules": rules_all,
    "help": help_all,
}


def _stable(text: str, folder: Path) -> str:
    """Replace what differs between runs: paths, times and rates."""
    text = text.replace(str(folder), "TMP").replace(str(ROOT), "ROOT")
    text = re.sub(r"[\d.]+ s, [\d.]+ [kMG]?B/s", "T s, R B/s", text)
    return re.sub(r" +[\d.]+ s(?= )", "  T s", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_wording_of_a_command(command: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "110")
    shown = [f"$ convert {line}\n{stdout}{stderr}" for line, (stdout, stderr) in COMMANDS[command](run, tmp_path)]
    found = _stable("\n".join(shown), tmp_path)
    file = SNAPSHOTS / f"{command}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    assert found == file.read_text(), f"the wording has changed; if that is meant, see {Path(__file__).name}"
