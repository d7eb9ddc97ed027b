"""What a newcomer sees first: help with groups and examples, shell completion, folded output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.command_line import Run
from support.goldens import checkpoint

CONVERT = str(Path(sys.executable).with_name("convert"))
COMMANDS = ("run", "batch", "inspect", "plan", "check", "verify", "diff", "record", "skeleton")


def test_help_lists_commands_and_examples(run: Run) -> None:
    out, err = run("--help")
    assert err == ""
    assert all(f"│ {command} " in out for command in (*COMMANDS, "rules"))
    assert "convert timesfm ckpt/ out.safetensors" in out and "--install-completion" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_an_example(run: Run, command: str) -> None:
    assert f"Example: convert {'gemma' if command == 'run' else command} " in run(command, "--help")[0]


@pytest.mark.parametrize("command", ["list", "show", "new", "validate", "schema"])
def test_each_command_of_rules_has_an_example(run: Run, command: str) -> None:
    assert f"Example: convert rules {command}" in run("rules", command, "--help")[0]


def test_flags_have_no_type_and_arguments_no_braces(run: Run) -> None:
    assert "Usage: convert [OPTIONS] MODEL CKPT OUT | COMMAND ..." in run("--help")[0]
    assert "Usage: convert run [OPTIONS] MODEL CKPT OUT " in run("run", "--help")[0]
    for command in (*COMMANDS, "rules"):
        assert "<bool>" not in run(command, "--help")[0]


def test_options_stand_in_groups(run: Run) -> None:
    out = run("run", "--help")[0]
    groups = ["What to write", "What to read", "What to prove", "What to print"]
    assert [line.split("─ ")[1].split(" ─")[0] for line in out.splitlines() if "─ What" in line] == groups
    read = out[out.index("What to read") : out.index("What to prove")]
    assert "--step" in read and "--set" in read and "--dtype" not in read


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["convert plan times", "convert times"])
def test_models_are_completed(typed: str) -> None:
    """bash asks the program itself for the words that fit."""
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    env = {**os.environ, "_CONVERT_COMPLETE": "complete_bash", **words}
    done = subprocess.run([CONVERT], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["timesfm", "timesfm-1", "timesfm-2.5"], done.stderr


def test_full_lists_every_layer(run: Run) -> None:
    args = ("plan", "timesfm", checkpoint("timesfm-2.5"))
    folded, full = run(*args)[0], run(*args, "--full")[0]
    assert "stacked_xf.{0..2}.attn.out.weight" in folded and "stacked_xf.2.attn.out.weight  float32" not in folded
    assert all(f"stacked_xf.{i}.attn.out.weight  float32[32,32]" in full for i in range(3))


@pytest.mark.slow
def test_inspect_folds_layers_and_names_the_nearest_rules(run: Run) -> None:
    folded, full = (run("inspect", checkpoint("timesfm-1.0"), *more)[0] for more in ((), ("--full",)))
    assert "x_layers_{0.." in folded and "x_layers_0/" not in folded
    assert "x_layers_0/self_attention/post/w" in full and "No leaf matches: " in full
    assert len(folded.splitlines()) < len(full.splitlines())
