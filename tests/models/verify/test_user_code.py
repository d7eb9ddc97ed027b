"""What a user's own functions raise is said to be theirs: where, what, and what to do; the level could not tell."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from support.command_line import Run

RULES = """\
model: mine
title: a model of my own
root: params
targets: {torch: {loads: torch.nn.Linear}}
rules:
- einsum: ...D,DC->...C
  from: head/kernel
  linear: head
"""
# Each function fails at a line of its own, if the name of the module says so.
REFERENCE = """\
import numpy as np
import torch

from convert.references.protocol import Reference

FAILS = ""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(5, 3, bias=False)

    def forward(self, x):
        if FAILS == "run":
            return self.head(x.T)
        return self.head(x)


def draw(seed):
    if FAILS == "inputs":
        raise OSError("no such data")
    return {"x": np.random.default_rng(seed).normal(size=(2, 5)).astype(np.float32)}


def apply(weights, inputs):
    kernel = weights["params/head/kernel" if FAILS == "jax" else "head/kernel"]
    y = inputs["x"] @ kernel
    if FAILS == "jax output":
        return {"head": y}
    return y if FAILS == "jax type" else {"head": y, "y": y}


def build(state):
    module = Model()
    if FAILS == "build":
        module.heads.weight
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.eval()


def run(module, inputs):
    y = module(inputs["x"])
    return {"logits": y} if FAILS == "run output" else {"y": y}


def masks(inputs):
    if FAILS == "masks":
        raise SystemExit("that is it")
    return {}


def variants(name):
    if FAILS == "variants":
        raise RuntimeError
    return ()


def reference(plan):
    if FAILS == "factory":
        print(plan.size)
    if FAILS == "factory type":
        return apply, build
    return Reference(
        inputs=draw, jax=apply, build=build, run=run, outputs=("y",), reduction=5, depth=1, masks=masks, variants=variants
    )
"""
LINES = REFERENCE.splitlines()
NEXT = "correct your code there, or the code that it calls, and try again"
LEVELS = ("--level", "coverage,weights,model")


def line(text: str) -> int:
    """Where this stands in the module."""
    (found,) = (number for number, at in enumerate(LINES, 1) if text in at)
    return found


@pytest.fixture
def model(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a checkpoint, its conversion, and the module of both models."""
    monkeypatch.chdir(tmp_path)
    np.savez("ckpt.npz", **{"params/head/kernel": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)})
    Path("rules.yaml").write_text(RULES)
    run("./rules.yaml", "ckpt.npz", "out.safetensors")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_own")]:
        del sys.modules[name]


def module(fails: str) -> str:
    """Writes the module that fails so; gives the option that names it."""
    name = f"my_own_{fails.replace(' ', '_')}"
    Path(f"{name}.py").write_text(REFERENCE.replace('FAILS = ""', f'FAILS = "{fails}"'))
    return f"{name}:reference"


def check(run: Run, factory: str, *more: str, code: int = 2) -> tuple[str, str]:
    return run(
        "check", "out.safetensors", "--from", "ckpt.npz", "--model", "./rules.yaml", "--reference", factory, *LEVELS, *more, code=code
    )  # fmt: skip


BROKEN = {
    "inputs": ("OSError: no such data", 'raise OSError("no such data")', "draw"),
    "jax": ("KeyError: 'params/head/kernel'", "kernel = weights[", "apply"),
    "build": ("AttributeError: 'Model' object has no attribute 'heads'", "module.heads.weight", "build"),
    "run": (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (5x2 and 5x3)",
        "return self.head(x.T)",
        "forward",
    ),
    "masks": ("SystemExit: that is it", 'raise SystemExit("that is it")', "masks"),
}


ENDS = {"SystemExit: 0": "import sys; sys.exit(0)", "SystemExit": "raise SystemExit", "Own: why": "raise type('Own', (BaseException,), {})('why')"}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "said"),
    [
        *((name, "SystemExit: 0") for name in ("draw(seed)", "apply(weights, inputs)", "build(state)", "run(module, inputs)")),
        *(("reference(plan)", said) for said in ENDS),
        *(("build(state)", said) for said in ("SystemExit", "Own: why")),
        ("", "SystemExit: 0"),
    ],
)  # fmt: skip
def test_user_code_cannot_end_the_program(function: str, said: str, model: Path, run: Run) -> None:
    """Its exit code would be the verdict: 0 is "equal", and 1, that of a traceback, "different"."""
    name = f"my_own_{len(function)}_{list(ENDS).index(said)}"
    old = f"def {function}:\n" if function else "class Model"
    new = f"{old}    {ENDS[said]}\n" if function else f"{ENDS[said]}\n\n\nclass Model"
    assert old in REFERENCE
    Path(f"{name}.py").write_text(REFERENCE.replace(old, new, 1))
    text = "".join(check(run, f"{name}:reference", "--require", "model"))
    assert f"{said} ({name}.py:" in text and "correct your code there" in text and "Traceback" not in text


def test_code_that_is_run_outside_of_the_levels_cannot_end_the_program(model: Path, run: Run) -> None:
    Path("my_own_net.py").write_text(
        "import torch\n\n\nclass OwnNorm(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.weight = torch.nn.Parameter(torch.ones(4))\n\n"
        "    def forward(self, x):\n        raise SystemExit(0)\n\n\ndef make():\n    return torch.nn.Sequential(OwnNorm())\n"
    )
    text = "".join(run("rules", "new", "ckpt.npz", "draft.yaml", "--like", "my_own_net:make", code=2))
    assert "error[user-code-failed]: SystemExit: 0 (my_own_net.py:" in text and "Traceback" not in text
    text = "".join(run("rules", "new", "ckpt.npz", "draft.yaml", "--like", "sys:exit", code=2))
    assert "error[user-code-failed]: --like sys:exit: SystemExit; correct your code" in text


@pytest.mark.parametrize("fails", BROKEN)
def test_what_the_functions_raise(fails: str, model: Path, run: Run) -> None:
    """Not an internal error, and neither a pass nor a difference, whatever is required."""
    said, text, function = BROKEN[fails]
    factory = module(fails)
    out, err = check(run, factory)
    file = factory.replace(":reference", ".py")
    place = f"{file}:{line(text)}, in {function}"
    (level,) = re.findall(r"^model +inconclusive +[\d.]+ s +(.*)$", out, re.M)
    leaf = ": expected the name of a leaf that the code is given (head/kernel), got 'params/head/kernel'"
    assert level == f"--reference {factory}: {said} ({place}){leaf if fails == 'jax' else ''}; {NEXT}"
    assert f"  note: {place}: {text}" in out
    assert out.splitlines()[-1] == "inconclusive: model stopped with an error (exit code 2)"
    assert err == "" and re.search(r"^coverage +passed", out, re.M)
    assert ("load_state_dict(strict=True)" in out) == (fails != "build")


def test_the_same_in_the_reports(model: Path, run: Run) -> None:
    out, _ = check(run, module("jax"), "--json", "--junit", "r.xml", "--html", "r.html", "--backends")
    report = json.loads(out)
    levels = {level["level"]: level for level in report["levels"]}
    assert report["verdict"] == levels["model"]["verdict"] == levels["backends"]["verdict"] == "inconclusive"
    assert report["inconclusive"] == ["model", "backends"] and "KeyError" in levels["model"]["reason"]
    assert levels["model"]["notes"][-1].startswith(f"my_own_jax.py:{line('kernel = weights[')}, in apply: kernel = ")
    root = ET.parse("r.xml").getroot()
    assert (root.get("errors"), root.get("failures")) == ("2", "0")
    (error,) = root.findall("testsuite[@name='convert.model']/testcase/error")
    assert error.get("type") == "inconclusive" and "KeyError" in str(error.get("message"))
    page = Path("r.html").read_text()
    assert '<span class="verdict inconclusive">' in page and "inconclusive: model" in page


def test_a_difference_is_still_a_difference(model: Path, run: Run) -> None:
    """A file that the user's module refuses is a finding of the coverage level; code that fails besides does not hide it."""
    Path("wide.yaml").write_text(RULES.replace("linear: head", "linear: {module: head, weight: kernel}"))
    run("./wide.yaml", "ckpt.npz", "wide.safetensors")
    factory = module("")
    out, _ = run("check", "wide.safetensors", "--from", "ckpt.npz", "--model", "./wide.yaml", "--reference", factory, *LEVELS, code=1)  # fmt: skip
    assert re.search(r"^coverage +FAILED", out, re.M) and "RuntimeError: Error(s) in loading state_dict" in out
    assert check(run, factory, code=0)[0].splitlines()[-1].startswith("equal")


def test_a_reference_without_boundaries_is_asked_for_some(model: Path, run: Run) -> None:
    text = REFERENCE.replace('"head": y, "y": y', '"y": y')
    text = text.replace('module(inputs["x"])', 'torch.tensor(1 + module(inputs["x"]).numpy())')  # NumPy is in no record
    assert '"head": y, "y"' not in text and "1 + module" in text
    Path("my_own_bare.py").write_text(text)
    out, _ = check(run, "my_own_bare:reference", code=1)
    assert "no diagnosis at y, where the two differ first: no known mistake explains it" in out
    assert re.search(r"    next: .*reference's `jax`.*\(head\)$", out, re.M)


def test_a_diagnosis_that_fails(model: Path, run: Run) -> None:
    """The models differ, and the reference fails when it is asked why: what is known is that it could not tell."""
    factory = module("variants")
    file = Path("my_own_variants.py")
    file.write_text(file.read_text().replace('{"head": y, "y": y}', '{"head": y, "y": y + 1}'))
    out, _ = check(run, factory)
    assert f"RuntimeError (my_own_variants.py:{line('        raise RuntimeError')}, in variants)" in out


def reason(out: str) -> str:
    """Why the model level is inconclusive."""
    (text,) = re.findall(r"^model +inconclusive +[\d.]+ s +(.*)$", out, re.M)
    return str(text)


WRONG = {  # what is replaced in the module -> the function, what was expected, what it returned
    ("masks=masks", "masks=lambda inputs: {'y': np.ones((2, 4), bool)}"): ("masks", "[2, 3]", "bool of shape [2, 4]"),
    ("masks=masks", "masks=lambda inputs: {'y': np.ones(2)}"): ("masks", "[2, 3]", "float64 of shape [2]"),
    ("masks=masks", "masks=lambda inputs: {'y': np.zeros((2, 1), bool)}"): ("masks", "'y'", "false everywhere"),
    ("masks=masks", "masks=lambda inputs: None"): ("masks", "masks by the names", "NoneType"),
    ("inputs=draw", "inputs=lambda seed: []"): ("inputs", "NumPy arrays by name", "list"),
    ("inputs=draw", "inputs=lambda seed: {'x': 'text'}"): ("inputs", "array of numbers for 'x'", "str"),
    ("run=run", "run=lambda module, inputs: {'y': None}"): ("run", "an array for 'y'", "NoneType"),
    ("run=run", "run=lambda module, inputs: {'logits': 1}"): ("run", "the output 'y'", "values for logits"),
    ("jax=apply", "jax=lambda weights, inputs: {'y': [1]}"): ("jax", "an array for 'y'", "list"),
    ("jax=apply", "jax=lambda weights, inputs: {}"): ("jax", "the output 'y'", "no name"),
    ("jax=apply", "jax=lambda weights, inputs: weights['head/kernel']"): ("jax", "values by name (y)", "Array"),
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change[1])
def test_a_wrong_value_of_a_function(change: tuple[str, str], model: Path, run: Run) -> None:
    """It is the user's mistake: neither an internal error, nor a pass, nor a difference."""
    function, expected, got = WRONG[change]
    Path("my_own_values.py").write_text(REFERENCE.replace(*change))
    out, err = check(run, "my_own_values:reference")
    text = reason(out)
    assert text.startswith(f"--reference my_own_values:reference: the value of `{function}`: expected ") and err == ""
    assert expected in text.partition(", got ")[0] and got in text.rpartition(", got ")[2]


WRONG_FIELDS = {  # what is replaced in the module -> the field, what was expected, what it is
    ("def reference(plan):", "def reference():"): ("the factory", "a function of (plan)", "one of ()"),
    ("def reference(plan):", "def reference(plan, size):"): (
        "the factory",
        "a function of (plan)",
        "one of (plan, size)",
    ),
    ("return Reference(", "return dict("): ("the factory's value", "convert.Reference", "dict"),
    ("def run(module, inputs):", "def run(module):"): ("`run`", "a function of (module, inputs)", "one of (module)"),
    ("def apply(weights, inputs):", "def apply(weights):"): ("`jax`", "of (weights, inputs)", "one of (weights)"),
    ("build=build", "build=3"): ("`build`", "a function of (state_dict)", "3"),
    ('outputs=("y",)', "outputs=()"): ("`outputs`", "names of the outputs", "()"),
    ('outputs=("y",)', 'outputs="y"'): ("`outputs`", "names of the outputs", "'y'"),
    ('outputs=("y",)', 'outputs=("y",), logits=("z",)'): ("`logits`", "names of outputs", "'z'"),
    ("depth=1", "depth=0"): ("`depth`", "an integer of at least 1", "0"),
    ("depth=1", "depth=1, backends=[run]"): ("`backends`", "functions by name", "list"),
    ("depth=1", "depth=1, backends={'mine': draw}"): ("`backends['mine']`", "of (module, inputs)", "one of (seed)"),
}


@pytest.mark.parametrize("change", WRONG_FIELDS, ids=lambda change: change[1])
def test_a_reference_that_cannot_serve(change: tuple[str, str], model: Path, run: Run) -> None:
    """It is rejected before anything runs."""
    field, expected, got = WRONG_FIELDS[change]
    assert change[0] in REFERENCE
    Path("my_own_fields.py").write_text(REFERENCE.replace(*change))
    _, err = check(run, "my_own_fields:reference")
    start = f"error[reference-invalid]: --reference my_own_fields:reference: {field}: expected "
    assert err.startswith(start), err
    assert expected in err.partition(", got ")[0] and got in err.partition(", got ")[2]


def test_token_ids_out_of_range(model: Path, run: Run) -> None:
    """PyTorch refuses them, JAX does not: the inputs are the user's."""
    text = REFERENCE.replace("return self.head(x)", "return self.head(x)[torch.tensor([7])]")
    Path("my_own_range.py").write_text(text)
    out, _ = check(run, "my_own_range:reference")
    assert "IndexError: index 7 is out of bounds for dimension 0 with size 2 (my_own_range.py:" in out


def test_seeds(model: Path, run: Run) -> None:
    """None is below 0; and a recording has one of its own."""
    factory = module("")
    _, err = check(run, factory, "--seed", "-1")
    assert "--seed" in err and "-1" in err
    _, err = run("record", "./rules.yaml", "ckpt.npz", "r.safetensors", "--reference", factory, "--seed", "-1", code=2)
    assert "--seed" in err and "-1" in err
    run("record", "./rules.yaml", "ckpt.npz", "r.safetensors", "--reference", factory, "--seed", "4")
    out, _ = check(run, factory, "--recorded", "r.safetensors", code=0)
    assert (
        check(run, factory, "--recorded", "r.safetensors", "--seed", "4", code=0)[0].splitlines()[0]
        == out.splitlines()[0]
    )
    _, err = check(run, factory, "--recorded", "r.safetensors", "--seed", "5")
    assert "error[recording-mismatch]: r.safetensors" in err
    assert "seed 4" in err and "seed 5" in err and "with --seed 5" in err


def test_a_factory_and_an_import_that_fail(model: Path, run: Run) -> None:
    """There is no reference, so no level runs."""
    factory = module("factory")
    _, err = check(run, factory)
    place = f"my_own_factory.py:{line('print(plan.size)')}, in reference"
    assert err.startswith(
        f"error[user-code-failed]: --reference {factory}: AttributeError: 'Plan' object has no attribute 'size' ({place}); {NEXT}"
    )
    assert err.splitlines()[-1] == f"  {place}: print(plan.size)"
    for name, code, said in (
        ("name", "import numpy\nx = numpi.zeros(1)", "NameError: name 'numpi' is not defined (my_own_name.py:2)"),
        ("syntax", "def reference(plan)\n  pass", "SyntaxError: expected ':' (my_own_syntax.py:1)"),
        ("leaves", "import sys\n\nsys.exit(1)", "SystemExit: 1 (my_own_leaves.py:3)"),
        ("absent", "\nimport jaxx", "No module named 'jaxx' (my_own_absent.py:2)"),
    ):  # fmt: skip
        Path(f"my_own_{name}.py").write_text(code)
        _, err = check(run, f"my_own_{name}:reference")
        problem = "not-found" if name == "absent" else "failed"
        assert f"error[user-code-{problem}]: --reference my_own_{name}:reference: {said}" in err, err
        assert "internal error" not in err


def test_a_long_text_is_cut(model: Path, run: Run) -> None:
    Path("my_own_long.py").write_text("raise ValueError('x\\n' * 10_000)")
    _, err = check(run, "my_own_long:reference")
    assert f"ValueError: {'x ' * 250}... (my_own_long.py:1)" in err


def test_a_recording_says_the_same(model: Path, run: Run) -> None:
    _, err = run("record", "./rules.yaml", "ckpt.npz", "r.safetensors", "--reference", module("jax"), code=2)
    place = f"my_own_jax.py:{line('kernel = weights[')}, in apply"
    assert err.startswith(
        f"error[user-code-failed]: --reference my_own_jax:reference: KeyError: 'params/head/kernel' ({place}); {NEXT}\n"
    )
    assert not Path("r.safetensors").exists()


@pytest.mark.parametrize("what", ["Net", "sized"])
def test_a_skeleton_of_what_is_no_factory(what: str, model: Path, run: Run) -> None:
    """A class, or a function with parameters, is a likely slip."""
    Path("slip.py").write_text("class Net:\n    def __init__(self, width): ...\n\n\ndef sized(width): ...\n")
    _, err = run("skeleton", f"slip:{what}", code=2)
    assert f"slip:{what}" in err and "missing a required argument: 'width'" in err
    assert "def make(): return Model(...)" in err and "internal error" not in err


def test_a_skeleton_says_the_same(model: Path, run: Run) -> None:
    Path("my_own_skeleton.py").write_text(
        "def make():\n    return layer(3)\n\n\ndef layer(n):\n    return {}[n]\n\n\ndef off():\n    import jaxx\n"
    )
    _, err = run("skeleton", "my_own_skeleton:make", code=2)
    assert err.splitlines() == [
        f"error[user-code-failed]: my_own_skeleton:make: KeyError: 3 (my_own_skeleton.py:6, in layer); {NEXT}",
        "  my_own_skeleton.py:2, in make: return layer(3)",
        "  my_own_skeleton.py:6, in layer: return {}[n]",
    ]
    _, err = run("skeleton", "my_own_skeleton:off", code=2)
    assert "my_own_skeleton:off: No module named 'jaxx'; make the skeleton where the code of the model runs" in err


def test_a_fault_of_ours_stays_one(model: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's took part: it is an internal error, to be reported."""
    import convert.verify.sides.run_jax

    monkeypatch.setattr(convert.verify.sides.run_jax, "jax_weights", attrgetter("no_such_thing"))
    _, err = check(run, module(""))
    assert "internal error, please report it" in err and "no_such_thing" in err
