"""README, docs and examples do what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import convert
from convert.layers import KINDS
from support import writers
from support.goldens import checkpoint
from support.pages import inside, play
from support.paths import DOCS, EXAMPLES, GOLDEN, ROOT

pytestmark = pytest.mark.slow  # takes long, as each test starts programs or models of its own

ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}


def shell(command: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["bash", "-c", command], cwd=cwd, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder in which the README's relative paths hold, without what a checkout may have left there."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    return tmp_path


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [body for word, body in found if word == language]


def test_the_python_of_the_readme(root: Path) -> None:
    code = blocks((ROOT / "README.md").read_text(), "python")[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("['G D -> D G', 'i D N H -> i (N H) D', ") and (root / "out.safetensors").exists()


MY_FLAX = """
import flax.linen as nn
import jax

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="stem")(x)
        x = x + nn.gelu(nn.Dense(16, name="mix")(nn.LayerNorm(name="norm")(x)))
        return nn.Dense(16, name="head")(x)

model = Net()
variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((3, 7, 5), "float32"))
if __name__ == "__main__":
    import orbax.checkpoint as ocp
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(__import__("pathlib").Path("CKPT").resolve(), model.init(jax.random.key(0), jax.numpy.zeros((3, 7, 5))))
"""
MY_TORCH = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.mix, self.head = nn.Linear(5, 16), nn.LayerNorm(16, eps=1e-6), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + nn.functional.gelu(self.mix(self.norm(x)), approximate="tanh"))
"""


def test_your_own_model_in_the_readme(tmp_path: Path) -> None:
    """The section is pasted: derived, converted, checked. With another GELU, `infer` names it and exits with 2."""
    text = (ROOT / "README.md").read_text()
    (tmp_path / "pair.py").write_text(blocks(text, "python")[0])
    (tmp_path / "my_flax.py").write_text(MY_FLAX)
    (tmp_path / "my_torch.py").write_text(MY_TORCH)
    section = text[text.index("## Your own model") :]
    infer, converted, checked = blocks(section, "sh")[0].splitlines()
    shell("python my_flax.py", tmp_path)
    assert "8 derived" in (done := shell(infer, tmp_path).stderr) and "proven" in done
    shell(converted, tmp_path)
    assert "equal (exit code 0)" in shell(checked, tmp_path).stdout
    draft = next(part for part in section.split("`") if part.startswith("convert rules new"))
    assert "questions open" in shell(draft.replace("my-model.yaml", "draft.yaml"), tmp_path).stderr
    (tmp_path / "my_torch.py").write_text(MY_TORCH.replace("tanh", "none"))
    assert "gelu_erf" in shell(f"{infer} --overwrite", tmp_path, code=2).stderr


def test_rule_pages_are_valid() -> None:
    full = next(
        block for block in blocks((DOCS / "guides" / "rules.md").read_text(), "yaml") if block.startswith("model:")
    )
    assert convert.parse_rules(full).model == "my-mlp"
    layers = (DOCS / "guides" / "layers.md").read_text()
    part = next(block for block in blocks(layers, "yaml") if "choice:" in block)
    header = "model: m\ntitle: m\ntargets: {torch: {loads: x}}\nrules:\n"
    assert convert.parse_rules(header + part).choices == {"gating": ("plain", "transposed")}


def test_each_kind_of_layer_is_in_its_guide() -> None:
    for word, kind in KINDS.items():
        text = (DOCS / "guides" / f"{kind.guide}.md").read_text()
        assert re.search(rf"\b{word}\b", text), (word, kind.guide)


def test_bundled_checkpoint_is_the_golden() -> None:
    a, b = (EXAMPLES / "checkpoints" / "timesfm-2.5"), checkpoint("timesfm-2.5")
    files = [sorted(str(p.relative_to(x)) for p in x.rglob("*") if p.is_file()) for x in (a, b)]
    assert files[0] == files[1] and all((a / name).read_bytes() == (b / name).read_bytes() for name in files[0])


def test_many_checkpoints(tmp_path: Path) -> None:
    """Two good checkpoints and a bad one: the good are converted, the bad is named, a second run does nothing again."""
    source, out = tmp_path / "in", tmp_path / "out"
    for case in ("timesfm-1.0", "timesfm-2.0"):
        shutil.copytree(GOLDEN / case, source / case)
    (source / "broken").mkdir()
    command = f"{sys.executable} {EXAMPLES / 'many_checkpoints.py'} timesfm {source} {out}"
    done = shell(command, tmp_path, code=1)
    assert "broken" in done.stderr
    assert sorted(p.name for p in out.iterdir()) == ["timesfm-1.0.safetensors", "timesfm-2.0.safetensors"]
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    (source / "broken").rmdir()
    shell(command, tmp_path)
    assert before == {p: p.stat().st_mtime_ns for p in out.iterdir()}


def test_batch(tmp_path: Path) -> None:
    """The jobs file is valid, its checkpoints are there, and each job has its own output."""
    done = shell(f"convert batch {EXAMPLES / 'batch' / 'jobs.yaml'} --dry-run", tmp_path)
    assert [line.split("#")[0].split("/")[-1].split()[0] for line in done.stdout.splitlines()] == [
        "timesfm-2.5.safetensors",
        "timesfm-2.5-transformers",
    ]


def test_own_model(tmp_path: Path) -> None:
    """flax against torch through the example's own rules; and the comparison fails when the rules are wrong."""
    here = EXAMPLES / "own-model"
    shell(f"{sys.executable} {here / 'model_jax.py'} ckpt io.npz", tmp_path)
    shell(f"convert {here / 'rules.yaml'} ckpt out.safetensors", tmp_path)
    assert (
        "relative error" in shell(f"{sys.executable} {here / 'model_torch.py'} out.safetensors io.npz", tmp_path).stdout
    )
    wrong = (here / "rules.yaml").read_text().replace("multiplies_by: scale", "multiplies_by: 1+scale")
    (tmp_path / "wrong.yaml").write_text(wrong)
    shell("convert ./wrong.yaml ckpt wrong.safetensors", tmp_path)
    shell(f"{sys.executable} {here / 'model_torch.py'} wrong.safetensors io.npz", tmp_path, code=1)


def test_own_reference(tmp_path: Path) -> None:
    """A pair of one's own, from the working directory: equal; and an erf GeLU is named although no boundary lies before it."""
    shutil.copytree(EXAMPLES / "own-model", tmp_path, dirs_exist_ok=True)
    shell(f"{sys.executable} model_jax.py ckpt io.npz", tmp_path)
    shell("convert ./rules.yaml ckpt out.safetensors", tmp_path)
    check = (
        "convert check out.safetensors --from ckpt --model ./rules.yaml --reference reference:reference --require model"
    )
    assert shell(check, tmp_path).stdout.rstrip().endswith("equal (exit code 0)")
    model = tmp_path / "model_torch.py"
    model.write_text(model.read_text().replace('approximate="tanh"', 'approximate="none"'))
    said = shell(check, tmp_path, code=1).stdout
    assert "diagnosis: gelu_erf for gelu_tanh" in said and "relative error of blocks.0.merge" in said
    said = shell("convert check out.safetensors --from ckpt", tmp_path, code=2).stderr
    assert "its metadata names the rules 'own-model', which are not available; name the rules with --model" in said


FORMATS = EXAMPLES / "formats"


def jax_side(format: str, folder: Path) -> tuple[str, str]:
    """Saves the example's model in `folder`; gives the checkpoint and the options and rules to convert it with."""
    if format in ("eqx", "h5"):
        script, rules = ("equinox_model.py", "equinox.yaml") if format == "eqx" else ("keras_model.py", "keras.yaml")
        checkpoint = "model.weights.h5" if format == "h5" else "model.eqx"
        shell(f"{sys.executable} {FORMATS / script} {checkpoint} io.npz", folder)
    else:
        checkpoint, rules = f"model.{format}", "flax.yaml"
        kind = "npz" if format == "t5x" else format
        shell(f"{sys.executable} {FORMATS / 'flax_model.py'} {kind} model.{kind} io.npz", folder)
    if format == "t5x":
        params = {name.replace("params/", "target/"): x for name, x in np.load(folder / "model.npz").items()}
        checkpoint = writers.t5x(folder / "checkpoint_7", params).name
    if format == "eqx":
        code = f"PYTHONPATH={FORMATS}:$PYTHONPATH convert skeleton equinox_model:make > skeleton.json"
        shell(code, folder)
        return f"{checkpoint} --skeleton skeleton.json", rules
    return checkpoint, rules


@pytest.mark.parametrize("format", ["npz", "safetensors", "t5x", "eqx", "h5"])  # msgpack: the page
def test_formats(format: str, tmp_path: Path) -> None:
    """The same outputs in torch, through the example's rules; and not the same with the square layers transposed."""
    checkpoint, rules = jax_side(format, tmp_path)
    shell(f"convert {FORMATS / rules} {checkpoint} out.safetensors", tmp_path)
    compare = f"{sys.executable} {FORMATS / 'model_torch.py'}"
    assert "relative error" in shell(f"{compare} out.safetensors io.npz", tmp_path).stdout
    if format not in ("npz", "eqx", "h5"):  # one for each rule file
        return
    swapped = {"...D,DE->...E": "...E,DE->...D", "...D,ED->...E": "...E,ED->...D"}
    text = (FORMATS / rules).read_text()
    wrong = next(text.replace(a, b) for a, b in swapped.items() if a in text)
    (tmp_path / "wrong.yaml").write_text(wrong)
    shell(f"convert ./wrong.yaml {checkpoint} wrong.safetensors", tmp_path)
    shell(f"{compare} wrong.safetensors io.npz", tmp_path, code=1)


@pytest.mark.parametrize(
    ("name", "codes"),
    [("haiku", [2, 1, 0]), ("nnx", [0, 1, 0]), ("formats", [0, 0, 0])],
    ids=["haiku", "nnx", "formats"],
)
def test_pages(name: str, codes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the example's README print what it says: refusals and wrong versions first, the model level last."""
    here = tmp_path / name
    shutil.copytree(EXAMPLES / name, here)
    with inside(here, monkeypatch):
        assert play((here / "README.md").read_text(), monkeypatch) == codes


def test_the_index_lists_every_example() -> None:
    listed = re.findall(r"\[?`([\w./-]+?)/?`", (EXAMPLES / "README.md").read_text())
    for path in (EXAMPLES).iterdir():
        assert path.name == "README.md" or path.name.endswith("cache") or any(path.name in name for name in listed), (
            path
        )


def test_conv_net(tmp_path: Path) -> None:
    """Convolutions: equal as they are; with the padding and the flattening that are usually written, not, and it is said why."""
    shutil.copytree(EXAMPLES / "conv-net", tmp_path, dirs_exist_ok=True)
    shell(f"{sys.executable} model_jax.py net.npz", tmp_path)
    shell("convert ./rules.yaml net.npz out.safetensors", tmp_path)
    check = "convert check out.safetensors --from net.npz --model ./rules.yaml --reference reference:reference --require model"
    assert shell(check, tmp_path).stdout.rstrip().endswith("equal (exit code 0)")
    plan = shell("convert plan ./rules.yaml net.npz", tmp_path).stdout
    assert "F.pad(x, (0, 1, 1, 1)), then padding=0" in plan and "(R S E) G -> G (E R S)" in plan
    assert (
        "then F.pad(y, (0, -1, 0, -1)), which takes off what is negative: torch's arguments alone cannot express this crop"
        in plan
    )
    model = tmp_path / "model_torch.py"
    wrong = model.read_text().replace("stride=2)\n        self.norm", "stride=2, padding=1)\n        self.norm")
    model.write_text(
        wrong.replace("self.stem(self.pad(x))", "self.stem(x)").replace(
            "x.flatten(1)", "x.permute(0, 2, 3, 1).flatten(1)"
        )
    )
    said = shell(check, tmp_path, code=1).stdout
    assert "expected F.pad(x, (0, 1, 1, 1)), then padding=0 of stem" in said
    assert "got padding=(1, 1) (the target's module stem)" in said and "diagnosis: another padding" in said


def test_nothing_committed_names_a_machine() -> None:
    """No absolute path of a developer's machine in what is shipped; checkpoints record such paths easily."""
    suspicious = re.compile(rb"/(?:home|root|Users|work|tmp)/[A-Za-z0-9_.-]+")
    for folder in ("src", "rules", "examples", "docs", "benchmarks", "tests/golden"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and not any(part.endswith("cache") or part == "__pycache__" for part in path.parts):
                assert not suspicious.search(path.read_bytes()), path
