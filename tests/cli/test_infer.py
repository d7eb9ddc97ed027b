"""`convert infer`: from two programs to a rule file that converts, its summary, its exit codes, and its errors."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from support.command_line import Run
from support.goldens import checkpoint
from support.own_modules import work_with
from support.paths import EXAMPLES

pytest.importorskip("jax")
pytest.importorskip("torch")

MODELS = """
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

D = 6


def shapes():
    return {"one": {"w": np.zeros((D, 2, 3))}, "norm": {"g": np.zeros(D)}, "two": {"w": np.zeros((2, 3, D)), "b": np.zeros(D)}, "step": np.zeros(())}


def sizes():
    return {"one/w": (D, 2, 3), "norm/g": (D,), "two/w": [2, 3, D], "two/b": (D,), "step": ()}


def forward(p, inputs):
    x = inputs["x"]
    y = jnp.tanh(jnp.einsum("td,dnh->tnh", x, p["one/w"]))
    y = jnp.einsum("tnh,nhd->td", y, p["two/w"]) + p["two/b"]
    return y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * (1 + p["norm/g"])


class Net(nn.Module):
    def __init__(self, other=False):
        super().__init__()
        self.first, self.second, self.other = nn.Linear(D, D, bias=False), nn.Linear(D, D), other
        self.norm = nn.RMSNorm(D, eps=1e-6)

    def forward(self, x):
        y = self.first(x)
        y = self.second(torch.relu(y) if self.other else torch.tanh(y))
        return self.norm(y)


def other():
    return Net(other=True)


def inputs(seed):
    return {"x": np.random.default_rng(seed).normal(size=(5, D))}


def turned(p, inputs):  # by angles so large that rounding them to float32 shows
    return jnp.einsum("td,de->te", inputs["x"], p["w"]) * jnp.sin(1e4 * jnp.arange(1.0, D + 1) / 3)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(D, D, bias=False)
        self.register_buffer("angles", 1e4 * torch.arange(1.0, D + 1, dtype=torch.float32) / 3, persistent=False)

    def forward(self, x):
        return self.first(x) * torch.sin(self.angles.float())


def constant(seed):
    return {"x": np.concatenate([np.zeros((5, 2)), np.random.default_rng(seed).normal(size=(5, D - 2))], 1)}


def trains(seed):
    return {"x": np.full((5, D), np.nan)}
"""


FUSED = """
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

D, PARTS = 6, (6, 3, 3)


def forward(p, inputs):
    q, k, v = jnp.split(inputs["x"] @ p["layer0/qkv/w"] + p["layer0/qkv/b"], (6, 9), -1)
    x = jnp.concatenate([jnp.tanh(q[:, :3]) * k, jnp.sin(q[:, 3:]) + v], -1)
    g, u = jnp.split(jnp.square(jnp.maximum(x @ p["layer0/up/w"], 0)), 2, -1)
    return g * jnp.tanh(u)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, part) for part in PARTS)
        self.gate, self.up = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x):
        q = self.q(x)
        x = torch.cat([q[:, :3].tanh() * self.k(x), q[:, 3:].sin() + self.v(x)], -1)
        return self.gate(x).relu() ** 2 * (self.up(x).relu() ** 2).tanh()


def inputs(seed):
    return {"x": np.random.default_rng(seed).normal(size=(40, D))}
"""

SMALL = """
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from convert import Reference

D = 6


def shapes():
    return {"w": np.zeros((D, D))}


def forward(p, inputs):
    return jnp.tanh(inputs["x"] @ p["w"])


def named(p, inputs):
    return {"y": forward(p, inputs)}


def nothing(p, inputs):
    return {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(D, D, bias=False)

    def forward(self, x):
        return torch.tanh(self.first(x))


class Nothing(nn.Module):
    def forward(self, x):
        return x


class NoWeights(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.eye(D).to_sparse())

    def forward(self, x):
        return torch.tanh(torch.sparse.mm(self.first, x.T).T)


class Exits(Net):
    def forward(self, x):
        raise SystemExit(3)


class Kept(Net):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.LazyLinear(D, bias=False)

    def forward(self, x):
        return torch.tanh(self.first(x))


class Exported(nn.Module):
    def eval(self):
        raise NotImplementedError("as those of torch.export do")


class Tuple(Net):
    def forward(self, x):
        return super().forward(x), None


class Nested(Net):
    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        y = super().forward(x)
        return y, (y.cos(), {"h": self.factor * y.sin()}), object()


def other_nested():
    return Nested(2.0)


def nested(p, inputs):
    y = forward(p, inputs)
    return y, [jnp.cos(y), {"h": jnp.sin(y)}], None


def number(p, inputs):
    return forward(p, inputs), (3.0,)


def one_name(p, inputs):
    y = forward(p, inputs)
    return {"a.b": y, "a": {"b": y}}


class Flat(Net):
    def forward(self, x):
        return super().forward(x).reshape(-1)


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(D, D, bias=False)


def inputs(seed):
    return {"x": np.random.default_rng(seed).normal(size=(5, D))}


def zeros(seed):
    return {"x": np.zeros((5, D))}


def empty(seed):
    return {"x": np.zeros((0, D))}


def listed(seed):
    return [inputs(seed)["x"]]


def numbered(seed):
    return {0: inputs(seed)["x"]}


def indices():
    return {**shapes(), "order": np.zeros(D, np.int32)}


def of_indices(p, inputs):
    return jnp.tanh(jnp.take(inputs["x"], p["order"], axis=1) @ p["w"])


def truth_values():
    return {**shapes(), "kept": np.zeros(D, bool)}


def of_truth_values(p, inputs):
    return jnp.tanh(jnp.where(p["kept"], inputs["x"], 0) @ p["w"])


@jax.jit
def of_whole_weights(p, inputs):
    return forward(p, inputs)


def whole_weights():
    return {"w": np.zeros((D, D), np.int8), "unused": np.zeros(D, bool)}


def negative():
    return {"w": (D, -1)}


def other_input(seed):
    return {"z": inputs(seed)["x"]}


def words(seed):
    return {"x": np.array(["a", "b"])}


def objects(seed):
    return {"x": np.array([None, 1.0])}


def ragged(seed):
    return {"x": [[1.0], [1.0, 2.0]]}


def unseeded(seed):
    return {"x": np.random.default_rng().normal(size=(5, D))}


def fails(seed):
    raise ValueError("no data")


def reference(plan, run=lambda module, given: {"y": module(**given)}, draw=inputs, jax=named, masks=lambda given: {}):
    return Reference(inputs=draw, jax=jax, build=lambda state: Net(), run=run, outputs=("y",), reduction=D, depth=1, masks=masks)


def without_plan():
    return reference(None)


def other_name(plan):
    return reference(plan, lambda module, given: {"z": module(**given)})


def unnamed(plan):
    return reference(plan, lambda module, given: module(**given))


def jax_other_name(plan):
    return reference(plan, jax=lambda p, inputs: {"z": forward(p, inputs)})


def of_words(plan):
    return reference(plan, draw=words)


def no_masks(plan):
    return reference(plan, masks=lambda given: None)


def short_mask(plan):
    return reference(plan, masks=lambda given: {"y": np.ones(3, bool)})


def word_as_mask(plan):
    return reference(plan, masks=lambda given: {"y": "all"})


def nothing_counts(plan):
    return reference(plan, masks=lambda given: {"y": np.zeros(5, bool)})


def without_run(plan):
    return reference(plan, None)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    modules = {"pair_of_models": MODELS, "small_models": SMALL}
    work_with(tmp_path, monkeypatch, modules, others=("fused_models", "reference", "model_jax", "model_torch"))
    rng = np.random.default_rng(0)
    leaves = {"one/w": (6, 2, 3), "two/w": (2, 3, 6), "two/b": (6,), "norm/g": (6,), "step": ()}
    np.savez("ckpt.npz", **{name: rng.normal(size=shape).astype(np.float32) for name, shape in leaves.items()})
    return tmp_path


def parts(torch: str = "Net", inputs: str = "inputs") -> tuple[str, ...]:
    m = "pair_of_models"
    return ("--jax", f"{m}:forward", "--torch", f"{m}:{torch}", "--inputs", f"{m}:{inputs}")


@pytest.mark.slow
def test_the_rules_are_written_and_convert(run: Run, folder: Path) -> None:
    _, said = run("infer", "ckpt.npz", "mine.yaml", *parts())
    assert "wrote mine.yaml: 4 tensors (" in said
    assert "proven with 3 further draws" in said
    text = Path("mine.yaml").read_text()
    assert "model: mine\ntitle: mine\n" in text
    assert "einsum: ...D,DNH->...NH" in text and "activation: tanh" in text
    assert "multiplies_by: 1+scale" in text and "epsilon: 1e-6" in text
    assert "- drop: step" in text
    run("mine.yaml", "ckpt.npz", "out.safetensors")
    from pair_of_models import Net, forward, inputs  # type: ignore[import-not-found]
    from safetensors.torch import load_file

    net = Net()
    net.load_state_dict(load_file("out.safetensors"), strict=True)
    x = inputs(7)["x"].astype(np.float32)
    import torch

    want = np.asarray(forward(dict(np.load("ckpt.npz")), {"x": x}))
    assert np.abs(net(torch.tensor(x)).detach().numpy() - want).max() < 1e-5


@pytest.mark.slow
def test_the_parts_of_a_fused_leaf_are_one_rule(run: Run, folder: Path) -> None:
    """Parts of equal and of other sizes, with their bias; relu2 is an activation that rules have no name for."""
    Path("fused_models.py").write_text(FUSED)
    leaves = {
        "layer0/qkv/w": (6, 12),
        "layer0/qkv/b": (12,),
        "layer0/up/w": (6, 12),
        "layer0/n1/b": (2,),
        "layer1/n1/b": (2,),
        "layer0/nq/b": (2,),
    }
    np.savez(
        "fused.npz",
        **{name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in leaves.items()},
    )
    m = "fused_models"
    run("infer", "fused.npz", "mine.yaml", "--jax", f"{m}:forward", "--torch", f"{m}:Net", "--inputs", f"{m}:inputs")
    text = Path("mine.yaml").read_text()
    assert (
        "+ E + E)" in text
        and "linear: {q,k,v}" in text.replace('"', "")
        and "linear: {gate,up}" in text.replace('"', "")
    )
    assert "drop: layer{i}/n{j}/b" in text.replace('"', ""), "digits only: * would take layer0/nq/b too"
    run("mine.yaml", "fused.npz", "out.safetensors")
    from safetensors.numpy import load_file

    made, stored = load_file("out.safetensors"), dict(np.load("fused.npz"))
    assert (np.concatenate([made[f"{c}.weight"] for c in "qkv"]) == stored["layer0/qkv/w"].T).all()
    assert (np.concatenate([made[f"{c}.bias"] for c in "qkv"]) == stored["layer0/qkv/b"]).all()
    assert (np.concatenate([made["gate.weight"], made["up.weight"]]) == stored["layer0/up/w"].T).all()


def test_a_tree_below_a_root_is_converted_and_the_rest_is_dropped(run: Run, folder: Path) -> None:
    stored = dict(np.load("ckpt.npz"))
    moments = {f"opt_state/0/mu/{name}": value for name, value in stored.items()}
    np.savez("whole.npz", **{f"model/params/{name}": value for name, value in stored.items()}, **moments)
    run("infer", "whole.npz", "mine.yaml", "--root", "model/params", *parts())
    run("mine.yaml", "whole.npz", "out.safetensors")
    run("infer", "ckpt.npz", "small.yaml", *parts())
    run("small.yaml", "ckpt.npz", "small.safetensors")
    from safetensors.numpy import load_file

    whole, small = load_file("out.safetensors"), load_file("small.safetensors")
    assert whole.keys() == small.keys() and all((whole[name] == small[name]).all() for name in whole)


def test_tables_that_a_module_keeps_beside_its_weights_are_exact(run: Run, folder: Path) -> None:
    """Angles of RoPE that the module rounds to float32 when it is built are no difference of the models."""
    np.savez("turned.npz", w=np.random.default_rng(0).normal(size=(6, 6)))
    models = ("--jax", "pair_of_models:turned", "--torch", "pair_of_models:Turned", "--inputs", "pair_of_models:inputs")
    _, said = run("infer", "turned.npz", "mine.yaml", *models)
    assert "1 tensor (1 derived)" in said and "proven" in said


def test_models_that_differ_are_never_derived(run: Run, folder: Path) -> None:
    """The planted fault: the target has another activation between its two layers."""
    _, said = run("infer", "ckpt.npz", "mine.yaml", *parts("other"), code=2)
    assert "differs: " in said and "proven with" not in said
    out, _ = run("plan", "mine.yaml", "ckpt.npz")  # each tensor is found behind the difference, which a note names
    assert "note: the two programs differ at pair_of_models.py:33: behind first: " in out


@pytest.mark.parametrize("shapes", ["shapes", "sizes"])
def test_json_says_what_the_summary_says(run: Run, folder: Path, shapes: str) -> None:
    out, _ = run("infer", "mine.yaml", "--shapes", f"pair_of_models:{shapes}", *parts(), "--json")
    found = json.loads(out)
    assert found["complete"] and found["open"] == {} and found["file"] == "mine.yaml"
    assert {tensor["name"] for tensor in found["tensors"]} == {
        "first.weight",
        "second.weight",
        "second.bias",
        "norm.weight",
    }
    assert found["dropped"] == ["step"]


@pytest.mark.parametrize("target", ["upstream", "burn"])
def test_a_target_that_the_shipped_rules_lack_is_one_error(run: Run, folder: Path, target: str) -> None:
    reference = "convert.references.flax_transformers.gpt2:reference"
    options = ("--reference", reference, "--set", "n_head=4", "--to", target)
    _, said = run("infer", str(checkpoint("gpt2")), "mine.yaml", *options, code=2)
    assert said.count("error[") == 1 and target in said and "transformers" in said


def test_an_existing_file_stays(run: Run, folder: Path) -> None:
    Path("mine.yaml").write_text("mine")
    _, said = run("infer", "ckpt.npz", "mine.yaml", *parts(), code=2)
    assert "error[output-exists]: mine.yaml" in said
    assert Path("mine.yaml").read_text() == "mine"


def test_a_file_in_no_directory_is_refused_before_the_search(run: Run, folder: Path) -> None:
    _, said = run("infer", "no/such/mine.yaml", "--shapes", "not_there:shapes", *parts(), code=2)
    assert "error[output-not-writable]: no/such: the directory does not exist; create it first" in said


def test_an_existing_file_is_replaced_on_demand_and_stays_if_it_cannot_be(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    given = ("infer", "mine.yaml", *small(), "--overwrite")
    Path("mine.yaml").write_text("mine")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", full)
        _, said = run(*given, code=2)
        assert "error[output-not-writable]: mine.yaml: cannot be written: No space left on device" in said
    assert Path("mine.yaml").read_text() == "mine" and not Path("mine.yaml.part").exists()
    run(*given)
    assert "linear: first" in Path("mine.yaml").read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "the two models: expected --reference MODULE:FACTORY, or all of --jax, --torch and --inputs, got none of them"),
        (("--jax", "a:b", "--reference", "c:d"), "got --reference and --jax"),
        (("--to", "transformers", *parts()), "--to transformers: expected --reference of a shipped family, got no --reference"),
        (("--to", "transformers", "--reference", "small_models:reference"), "--to transformers: expected the reference of a shipped family, got small_models:reference, which no shipped rules name"),
        (("--root", "absent", *parts()), "--root absent: expected a tree of the checkpoint (norm, one, step, two)"),
        (parts("D"), "--torch pair_of_models:D: expected a function, got int"),
        (parts("shapes"), "expected a torch.nn.Module, got dict"),
        (parts(inputs="forward"), "expected a function of (seed), got one of other arguments"),
        (("--shapes", "pair_of_models:shapes", *parts()), "convert infer: expected FILE, got ckpt.npz mine.yaml"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_error(run: Run, folder: Path, options: tuple[str, ...], text: str) -> None:
    _, said = run("infer", "ckpt.npz", "mine.yaml", *options, code=2)
    assert text in said
    assert not Path("mine.yaml").exists()


def test_inputs_that_are_no_numbers_are_one_error(run: Run, folder: Path) -> None:
    _, said = run("infer", "ckpt.npz", "mine.yaml", *parts(inputs="trains"), code=2)
    text = (
        "the output 'output' has NaN: expected finite inputs, got nan in the input 'x' at [0, 0]; give finite numbers"
    )
    assert f"error[output-not-a-number]: {text}" in said
    assert "Traceback" not in said


def small(jax: str = "forward", torch: str = "Net", inputs: str = "inputs", shapes: str = "shapes") -> tuple[str, ...]:
    m = "small_models"
    return ("--shapes", f"{m}:{shapes}", "--jax", f"{m}:{jax}", "--torch", f"{m}:{torch}", "--inputs", f"{m}:{inputs}")


def small_reference(factory: str) -> tuple[str, ...]:
    return ("--shapes", "small_models:shapes", "--reference", f"small_models:{factory}")


VALUES = "error[reference-values-invalid]: "
INPUTS = f"{VALUES}--inputs small_models:"


@pytest.mark.parametrize(
    ("models", "text"),
    [
        (small("named"), f"{VALUES}the outputs: expected those of the JAX function (y), got those of the PyTorch module (output); return the same from both"),
        (small(torch="Tuple"), "expected those of the JAX function (output), got those of the PyTorch module (output.0); return"),
        (small(shapes="negative"), "error[reference-invalid]: --shapes small_models:negative: expected sizes of 0 or more for 'w', got [6, -1]"),
        (small(inputs="other_input"), "expected the name of a leaf that the code is given (w) or of an input (z), got 'x'"),
        (small("of_indices", shapes="indices"), "error[reference-invalid]: order: expected weights, as infer gives every leaf random numbers, got int32[6], which the JAX function takes as whole numbers, such as indices; give --shapes without it"),
        (small("of_truth_values", shapes="truth_values"), "error[reference-invalid]: kept: expected weights, as infer gives every leaf random numbers, got bool[6], which the JAX function takes as truth values; give --shapes"),
        (small("number"), "error[reference-invalid]: --jax small_models:number: expected arrays, alone or in tuples, lists and dicts, got float as output.1.0"),
        (small("one_name"), "expected arrays, alone or in tuples, lists and dicts, got two outputs of the name a.b"),
        (small("nested"), "got those of the PyTorch module (output); return"),
        (small("nothing"), f"{VALUES}the outputs: expected an array of the JAX function, got none"),
        (small(torch="Nothing"), f"{VALUES}the PyTorch module: expected one that computes with its weights, got one that returns its inputs as they are"),
        (small(torch="NoWeights"), "expected one that computes with its weights, got one without weights of floating-point numbers"),
        (small(torch="Sparse"), "error[module-not-runnable]: the tensor first is sparse: expected dense weights, got torch.sparse_coo"),
        (small(torch="Exits"), "error[module-not-runnable]: small_models.py:"),
        (small(torch="Kept"), "error[run-not-deterministic]: the output 'output': expected the same values in two runs, got a relative difference of 1.0e+00; the module keeps a value from the first call"),
        (small(torch="Lazy"), "error[module-not-runnable]: the tensor first.weight has no elements: expected a module with weights, got a lazy module that has not run"),
        (small(torch="Exported"), "error[reference-invalid]: --torch small_models:Exported: expected a module with an eval mode, got one of torch.export, which has none"),
        (small(inputs="empty"), f"{VALUES}the output 'output': expected elements, to be compared, got shape [0, 6]; give inputs that are not empty"),
        (small(inputs="listed"), f"{INPUTS}listed: the value of `inputs`: expected NumPy arrays by name, got list"),
        (small(inputs="numbered"), f"{INPUTS}numbered: the value of `inputs`: expected NumPy arrays by name, got the name 0"),
        (small(inputs="words"), f"{INPUTS}words: the value of `inputs`: expected a NumPy array of numbers for 'x', got an array of <U1"),
        (small(inputs="objects"), "expected a NumPy array of numbers for 'x', got an array of object"),
        (small(inputs="ragged"), "expected a NumPy array of numbers for 'x', got list"),
        (small(inputs="unseeded"), "error[run-not-deterministic]: the input 'x': expected the same values in two calls with the seed 0, got other values; draw them from np.random.default_rng(seed)"),
        (small(inputs="fails"), "error[user-code-failed]: --inputs small_models:fails: ValueError: no data (small_models.py:"),
        (small_reference("other_name"), f"{VALUES}--reference small_models:other_name: the value of `run`: expected a value for the output 'y', which `outputs` lists, got values for z"),
        (small_reference("jax_other_name"), "the value of `jax`: expected a value for the output 'y', which `outputs` lists, got values for z"),
        (small_reference("unnamed"), "the value of `run`: expected values by name (y), got Tensor"),
        (small_reference("of_words"), f"{VALUES}--reference small_models:of_words: the value of `inputs`: expected a NumPy array of numbers for 'x'"),
        (small_reference("no_masks"), f"{VALUES}--reference small_models:no_masks: the value of `masks`: expected masks by the names of the values, got NoneType"),
        (small_reference("short_mask"), "the value of `masks`: expected bool for 'y', with the leading axes of [5, 6], with 1 for an axis along which all elements count the same, got bool of shape [3]"),
        (small_reference("word_as_mask"), "the value of `masks`: expected bool for 'y', with the leading axes of [5, 6]"),
        (small_reference("nothing_counts"), "the value of `masks`: expected true where 'y' counts, got false everywhere, so that nothing is compared"),
        (small_reference("without_plan"), "--reference small_models:without_plan: the factory: expected a function of (plan), got one of ()"),
        (small_reference("without_run"), "error[reference-invalid]: --reference small_models:without_run: `run`: expected a function of (module, inputs), got None"),
    ],
)  # fmt: skip
def test_models_and_inputs_that_cannot_be_compared_are_one_error(
    run: Run, folder: Path, models: tuple[str, ...], text: str
) -> None:
    _, said = run("infer", "mine.yaml", *models, code=2)
    assert text in said and said.count("error[") == 1 and "Traceback" not in said
    assert not Path("mine.yaml").exists()


def test_whole_numbers_that_are_weights_are_drawn_as_those(run: Run, folder: Path) -> None:
    run("infer", "mine.yaml", *small("of_whole_weights", shapes="whole_weights"))
    assert "linear: first" in Path("mine.yaml").read_text(encoding="utf-8")


def test_outputs_inside_tuples_and_dicts_are_compared(run: Run, folder: Path) -> None:
    run("infer", "mine.yaml", *small("nested", torch="Nested"))
    _, said = run("infer", "other.yaml", *small("nested", torch="other_nested"), code=2)
    assert (
        "differs: small_models.py:" in said and "multiplies by 2, the JAX model does not; an output differs by" in said
    )


def test_inputs_of_zeros_leave_all_open(run: Run, folder: Path) -> None:
    _, said = run("infer", "mine.yaml", *small(inputs="zeros"), code=2)
    assert "note: the input x has nothing but zeros" in said and "error[" not in said
    assert "ask" in Path("mine.yaml").read_text()


def test_outputs_of_other_shapes_are_said_with_both(run: Run, folder: Path) -> None:
    _, said = run("infer", "mine.yaml", *small(torch="Flat"), code=2)
    assert "the output 'output' differs: the target gives shape [30], the source [5, 6]" in said


def test_a_tensor_that_the_module_never_uses_is_open_and_said_to_be_unread(run: Run, folder: Path) -> None:
    out, _ = run("infer", "mine.yaml", *small(torch="Unused"), "--json", code=2)
    found = json.loads(out)
    assert {tensor["name"]: tensor["unread"] for tensor in found["tensors"]} == {
        "first.weight": False,
        "second.weight": True,
    }
    assert found["open"] == {"second.weight": "no operation of the target reads it"}
    _, said = run("infer", "again.yaml", *small(torch="Unused"), code=2)
    assert "open: second.weight: no operation of the target reads it" in said


EXAMPLE = {  # folder: the script, its arguments, the reference, options; the first argument that has a dot or is `ckpt` is the checkpoint
    "own-model": ("model_jax", ("ckpt", "io.npz"), "reference", ("--set=D=12", "--set=i=3")),
    "nnx": ("model_jax", ("ckpt",), "reference", ("--set=V=11", "--set=F=14", "--set=i=2")),
    "conv-net": ("model_jax", ("ckpt.npz",), "reference", ()),
    "formats/flax": ("flax_model", ("msgpack", "model.msgpack", "io.npz"), "flax", ("--set=D=6", "--root=params")),
    "formats/equinox": ("equinox_model", ("model.eqx", "io.npz"), "equinox", ("--set=D=6",)),
    "formats/keras": ("keras_model", ("model.weights.h5", "io.npz"), "keras", ("--set=D=6",)),
    "cde": ("model_jax", ("model.eqx", "paths.npz"), "cubic", ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLE)
def test_the_examples_give_the_bytes_of_their_rules(run: Run, folder: Path, example: str) -> None:
    from safetensors.numpy import load_file

    name, _, form = example.partition("/")
    script, arguments, reference, options = EXAMPLE[example]
    for file in (EXAMPLES / name).glob("*.*"):
        shutil.copy(file, folder)
    importlib.import_module(script).main(*arguments)
    checkpoint = next(argument for argument in arguments if argument == "ckpt" or "." in argument)
    names: tuple[str, ...] = ()
    if checkpoint.endswith(".eqx"):
        Path("skeleton.json").write_text(run("skeleton", f"{script}:make")[0])
        names = ("--skeleton", "skeleton.json")
    run("infer", checkpoint, "mine.yaml", "--reference", f"reference:{reference}", *options, *names)
    run("./mine.yaml", checkpoint, "inferred.safetensors")  # it has the names of the skeleton
    run(f"./{form or 'rules'}.yaml", checkpoint, "shipped.safetensors", *names)
    inferred, shipped = load_file("inferred.safetensors"), load_file("shipped.safetensors")
    assert inferred.keys() == shipped.keys()
    assert all(inferred[name].tobytes() == shipped[name].tobytes() for name in shipped)


GEMMA = (
    "vocab_size=256",
    "sliding_window=8",
    "query_pre_attn_scalar=5",
    "rope_factor_global=8.0",
    "context_length=1024",
)
SIZES = {"V": (40, 48), "vocab_size": (40, 48), "D": (24, 36), "F": (28, 44), "N": (4, 6), "K": (2, 3), "H": (8, 12)}


def _shrunk(sizes: dict[str, tuple[int, int]]) -> list[str]:
    settings = [word for setting in GEMMA for word in ("--set", setting)]
    shrink = [word for name, (one, two) in sizes.items() for word in ("--shrink", f"{name}={one},{two}")]
    return ["--reference", "convert.references.gemma.text:reference", *settings, *shrink]


@pytest.mark.slow
def test_a_shipped_family_at_other_sizes_gives_the_rules_of_its_checkpoint(run: Run, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    pytest.importorskip("transformers")
    file, source = tmp_path / "mine.yaml", checkpoint("gemma3")
    _, said = run("infer", str(source), str(file), *_shrunk(SIZES))
    assert "confirmed at the other sizes" in said and "not confirmed" not in said
    run(str(file), str(source), str(tmp_path / "mine.safetensors"))
    run("gemma3", str(source), str(tmp_path / "shipped.safetensors"), *_shrunk({})[2:])
    mine, shipped = (load_file(tmp_path / f"{name}.safetensors") for name in ("mine", "shipped"))
    assert all(mine[name].tobytes() == array.tobytes() for name, array in shipped.items())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["D"], "--shrink D"),
        (["D=8"], "NAME=SIZE,OTHER, such as D=32,48"),
        (["D=8,x"], "NAME=SIZE,OTHER, such as D=32,48"),
        (["D=0,4"], "NAME=SIZE,OTHER, such as D=32,48"),
        (["D=8,8"], "8 twice, which confirms nothing"),
        (["S=5,7"], "S, which follows from others"),
    ],
)
def test_a_size_that_cannot_be_given_is_an_error(run: Run, tmp_path: Path, given: list[str], said: str) -> None:
    words = [word for size in given for word in ("--shrink", size)]
    _, message = run("infer", str(checkpoint("gemma3")), str(tmp_path / "mine.yaml"), *_shrunk({}), *words, code=2)
    assert said in message


def test_only_a_shipped_family_can_be_shrunk(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_pair.py").write_text("def reference(plan):\n    raise AssertionError\n")
    arguments = ["infer", str(checkpoint("gemma3")), str(tmp_path / "mine.yaml"), "--shrink", "D=4,8"]
    _, message = run(*arguments, "--reference", "own_pair:reference", code=2)
    assert "the reference of a shipped family" in message and "--shapes" in message


CALLED_VALUE = """
import jax.numpy as jnp
import numpy as np
import torch
from flax.traverse_util import unflatten_dict
from torch import nn

from convert import Reference

D = 6


def forward(p, inputs):
    att = unflatten_dict(dict(p), sep="/")["att"]
    return {"y": jnp.tanh(inputs["x"] @ att["key"]) * (inputs["x"] @ att["value"])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x):
        return torch.tanh(self.key(x)) * self.value(x)


def inputs(seed):
    return {"x": np.random.default_rng(seed).normal(size=(5, D)).astype(np.float32)}


def run(module, x):
    return {"y": module(x["x"])}


def build(state_dict):
    net = Net()
    net.load_state_dict(state_dict, strict=True)
    return net


def pair(plan):
    return Reference(inputs=inputs, jax=forward, build=build, run=run, outputs=("y",), reduction=D, depth=2)
"""


@pytest.mark.slow
def test_a_leaf_that_its_model_calls_value_keeps_its_name(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """flax nnx keeps each variable below the key `value`, which is left out of the names that a function gets."""
    monkeypatch.delitem(sys.modules, "called_value", raising=False)
    Path("called_value.py").write_text(CALLED_VALUE)
    rng = np.random.default_rng(0)
    np.savez("values.npz", **{f"att/{name}": rng.normal(size=(6, 6)).astype(np.float32) for name in ("key", "value")})
    run("infer", "values.npz", "values.yaml", "--reference", "called_value:pair")
    assert "from: att/value" in Path("values.yaml").read_text() or "att/{key,value}" in Path("values.yaml").read_text()
    run("values.yaml", "values.npz", "values.safetensors")
    stdout, _ = run("check", "values.safetensors", "--from", "values.npz", "--model", "values.yaml", "--reference", "called_value:pair")  # fmt: skip
    assert "equal (exit code 0)" in stdout
