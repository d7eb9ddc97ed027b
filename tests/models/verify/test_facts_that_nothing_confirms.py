"""A fact that both models take from the rules: listed, refused with ``--require model``, accepted with ``--trust``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from support.command_line import Run

RULES = """
model: scaled
title: A scaled layer
targets: {torch: {loads: x}}
facts: {scale: 2.5, note: in words}
rules:
- {einsum: '...D,DF->...F', from: k, linear: l}
"""
# Both sides read the scale from the plan, as the shipped references do.
PAIR = """
import numpy as np
import torch
from convert.references.protocol import Reference


def build(state):
    net = torch.nn.Sequential()
    net.add_module("l", torch.nn.Linear(3, 4, bias=False))
    net.load_state_dict(dict(state), strict=True, assign=True)
    return net.eval()


def pair(plan):
    scale = plan.facts["scale"]
    def draw(seed):
        return {"x": np.random.default_rng(seed).normal(size=(2, 3)).astype(np.float32)}
    return Reference(inputs=draw, jax=lambda w, i: {"y": scale * (i["x"] @ w["k"])}, build=build,
                     run=lambda net, i: {"y": scale * net(i["x"])}, outputs=("y",), reduction=3, depth=1)
"""


@pytest.fixture
def made(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """The arguments of a check."""
    np.savez(tmp_path / "c.npz", k=np.arange(12, dtype=np.float32).reshape(3, 4) / 12)
    (tmp_path / "r.yaml").write_text(RULES)
    (tmp_path / "scaled_pair.py").write_text(PAIR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    run("./r.yaml", "c.npz", "out.safetensors")
    return "check", "out.safetensors", "--from", "c.npz", "--model", "./r.yaml", "--reference", "scaled_pair:pair"


@pytest.mark.slow
def test_it_is_listed_with_its_value_and_where_it_comes_from(made: tuple[Any, ...], run: Run) -> None:
    stdout, _ = run(*made, code=0)
    assert "not verified:  scale = 2.5 (r.yaml:5)" in stdout and "note = in words (r.yaml:5)" in stdout
    report = json.loads(run(*made, "--json", "--html", "r.html", code=0)[0])
    assert report["facts"][0] == {
        "name": "scale",
        "value": 2.5,
        "from": "r.yaml:5",
        "status": "not verified",
        "evidence": "",
        "decides": True,
        "layers": "",
        "next": "",
    }
    assert "not verified: scale = 2.5 (r.yaml:5)" in Path("r.html").read_text()


def test_a_required_model_level_needs_it(made: tuple[Any, ...], run: Run) -> None:
    """What only describes the source is not needed."""
    stdout, _ = run(*made, "--require", "model", "--junit", "r.xml", code=2)
    assert "inconclusive: model depends on facts that are not verified (exit code 2)" in stdout
    assert (
        "got scale = 2.5 (r.yaml:5); compare them with the training configuration, then give --trust scale\n" in stdout
    )
    errors = ET.parse("r.xml").getroot().findall(".//testcase/error")
    assert errors and all(
        "not verified" in (e.get("message") or "") or "nothing confirms" in (e.text or "") for e in errors
    )
    assert not ET.parse("r.xml").getroot().findall(".//failure")
    (model,) = (
        x for x in json.loads(run(*made, "--require", "model", "--json", code=2)[0])["levels"] if x["level"] == "model"
    )
    assert model["verdict"] == "inconclusive" and [f["code"] for f in model["findings"]] == ["fact-unverified"]


def test_it_is_accepted_by_name(made: tuple[Any, ...], run: Run) -> None:
    stdout, _ = run(*made, "--require", "model", "--trust", "scale", code=0)
    assert "trusted:       scale = 2.5 (r.yaml:5)" in stdout and "not verified:  note" in stdout
    _, stderr = run(*made, "--trust", "scales", code=2)
    assert "error[fact-unknown]: r.yaml: --trust scales" in stderr and "did you mean 'scale'?" in stderr
    _, stderr = run("./r.yaml", "c.npz", "new.safetensors", "--check", "--trust", "scales", code=2)
    assert "error[fact-unknown]" in stderr and not Path("new.safetensors").exists()
    assert (
        "--trust is an option of the check"
        in run("./r.yaml", "c.npz", "new.safetensors", "--trust", "scale", code=2)[1]
    )


def test_a_model_that_does_not_read_it_needs_no_trust(made: tuple[Any, ...], run: Run) -> None:
    """The JAX model has a value of its own, and agrees."""
    path = Path("scaled_pair.py")
    path.write_text(path.read_text().replace('plan.facts["scale"]', "2.5"))
    import sys

    sys.modules.pop("scaled_pair", None)
    stdout, _ = run(*made, "--require", "model", code=0)
    assert "not verified:  scale = 2.5 (r.yaml:5)" in stdout
