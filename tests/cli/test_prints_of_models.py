"""What the code of the models prints goes to stderr: stdout has the result alone, which other programs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import parse_rules
from support.command_line import Run
from support.own_modules import work_with

pytest.importorskip("jax")
pytest.importorskip("torch")

D, F = 4, 3
RULES = "model: m\ntitle: m\ntargets: {torch: {loads: x}}\nrules:\n- {einsum: '...D,DF->...F', from: w, linear: l}\n"
MODELS = f"""
import numpy as np
import torch

from convert import Reference

print("loaded")


def forward(p, inputs):
    print("JAX")
    return {{"y": inputs["x"] @ p["w"]}}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        print("built")
        self.l = torch.nn.Linear({D}, {F}, bias=False)

    def forward(self, x):
        print("PyTorch")
        return {{"y": self.l(x)}}


def build(state):
    net = Net()
    net.load_state_dict(state, assign=True)
    return net.eval()


def inputs(seed):
    print("drawn")
    return {{"x": np.random.default_rng(seed).normal(size=(5, {D})).astype(np.float32)}}


def pair(plan):
    print("paired")
    return Reference(inputs=inputs, jax=forward, build=build, run=lambda m, x: m(**x), outputs=("y",), reduction={D}, depth=1)


def skeleton():
    print("made")
    import equinox
    import jax

    return equinox.nn.Linear({D}, {F}, key=jax.random.key(0))
"""
PAIR = ("--reference", "loud_models:pair")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work_with(tmp_path, monkeypatch, {"loud_models": MODELS})
    Path("r.yaml").write_text(RULES)
    np.savez("c.npz", w=np.random.default_rng(0).normal(size=(D, F)).astype(np.float32))
    return tmp_path


COMMANDS = {
    "infer": ("infer", "c.npz", "i.yaml", *PAIR, "--json"),
    "infer of parts": (
        *("infer", "c.npz", "i.yaml", "--jax", "loud_models:forward", "--torch", "loud_models:Net"),
        *("--inputs", "loud_models:inputs", "--json"),
    ),
    "convert --check": ("r.yaml", "c.npz", "o.safetensors", "--check", *PAIR, "--json"),
    "check": ("check", "out.safetensors", "--from", "c.npz", "--model", "r.yaml", *PAIR, "--json"),
    "record": ("record", "r.yaml", "c.npz", "rec.safetensors", *PAIR, "--json"),
    "skeleton": ("skeleton", "loud_models:skeleton"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_stdout_is_one_json_document(command: str, run: Run, folder: Path) -> None:
    if command == "skeleton":
        pytest.importorskip("equinox")
    if command == "check":
        run("r.yaml", "c.npz", "out.safetensors")
    stdout, stderr = run(*COMMANDS[command])
    said: Any = json.loads(stdout)
    assert said and "loaded\n" in stderr


@pytest.mark.parametrize("of", [PAIR, ("--like", "loud_models:Net")])
def test_stdout_is_the_draft(of: tuple[str, str], run: Run, folder: Path) -> None:
    stdout, stderr = run("rules", "new", "c.npz", *of)
    assert stdout.startswith("#") and len(parse_rules(stdout).rules) == 1 and "built\n" in stderr


def test_stdout_is_the_jobs_of_a_batch(run: Run, folder: Path) -> None:
    """The code of a reference is loaded before the first job starts."""
    job = "{model: r.yaml, checkpoint: c.npz, out: o.safetensors, check: model, reference: 'loud_models:pair'}"
    Path("jobs.yaml").write_text(f"jobs:\n- {job}\n")
    stdout, stderr = run("batch", "jobs.yaml", "--dry-run")
    assert stdout.startswith("convert r.yaml c.npz") and stdout.count("\n") == 1 and "loaded\n" in stderr


def test_a_model_with_the_name_of_its_file_is_in_quotes(run: Run, folder: Path) -> None:
    """found out in ckpt: a name that is a word reads as one."""
    run("infer", "c.npz", "out.yaml", *PAIR)
    _, stderr = run("out.yaml", "c.npz", "o.safetensors")
    assert stderr.startswith('found "out" in c.npz (')
