"""A table under two names: flax's `Embed.attend` to a torch model whose head is its embedding's weight."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import convert
from convert.planning.planner import make_plan
from convert.rules.schema import schema
from convert.verify.run import check
from convert.writing.execute import execute
from support import burn_modules as burn
from support.command_line import Run
from support.memory_source import MemorySource, rule_file
from support.memory_source import run as run_plan

ENTRIES, PADDED, WIDTH = 97, 104, 12  # the source pads its table to a multiple of 8
HEAD = """model: tied
title: An embedding and its head
root: [params]
facts: {vocab: 97}
targets: {torch: {loads: tied_pair.Net}}
rules:
- {from: norm/scale, bias: norm/bias, axes: D, multiplies_by: scale, epsilon: 1e-6, layer_norm: norm}
"""
TABLE = HEAD + "- from: embed/embedding\n  axes: VD\n  rows: $vocab\n  padded: [104]\n"
RULES = TABLE + "  embedding: {module: emb, tied: head}\n"
PAIR = """
import numpy as np
import torch
import flax.linen as nn
from convert.references.protocol import Reference


class Lm(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(104, 12, name="embed")
        return table.attend(nn.LayerNorm(name="norm")(table(tokens)))[..., :97]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm = torch.nn.Embedding(97, 12), torch.nn.LayerNorm(12, eps=1e-6)
        self.head = torch.nn.Linear(12, 97, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.norm(self.emb(tokens)))


def apply(weights, inputs):
    tree = {"embed": {"embedding": weights["embed/embedding"]}}
    tree["norm"] = {"scale": weights["norm/scale"], "bias": weights["norm/bias"]}
    return {"y": Lm().apply({"params": tree}, inputs["x"])}


def build(state):
    net = Net()
    net.load_state_dict(dict(state), strict=True, assign=next(iter(state.values())).is_meta)
    return net.eval()


def pair(plan):
    def draw(seed):
        return {"x": np.random.default_rng(seed).integers(0, 97, size=(2, 5))}
    return Reference(inputs=draw, jax=apply, build=build, run=lambda net, i: {"y": net(i["x"])}, outputs=("y",),
                     reduction=12, depth=2)
"""


class Table(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(PADDED, WIDTH, name="embed")
        return table.attend(nn.LayerNorm(name="norm")(table(tokens)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint that flax wrote, and the two models beside it."""
    here = tmp_path_factory.mktemp("tied")
    variables = Table().init(jax.random.key(3), jnp.zeros((1, 2), jnp.int32))
    variables = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), variables)
    (here / "ckpt.msgpack").write_bytes(flax.serialization.to_bytes(variables))
    (here / "tied_pair.py").write_text(PAIR)
    (here / "tied.yaml").write_text(RULES)
    yield here


def written(place: Path, out: Path, *more: str, run: Run) -> Path:
    run(place / "tied.yaml", place / "ckpt.msgpack", out, "--quiet", *more)
    return out


@pytest.mark.slow
def test_a_strict_load_and_the_whole_proof(place: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(place)
    out = written(place, tmp_path / "tied.safetensors", run=run)
    file = load_file(out)
    assert {name: x.shape for name, x in file.items()} == {"emb.weight": (97, 12), "head.weight": (97, 12), "norm.weight": (12,), "norm.bias": (12,)}  # fmt: skip
    assert np.array_equal(file["emb.weight"], file["head.weight"])
    report = check(out, place / "ckpt.msgpack", model=str(place / "tied.yaml"), reference="tied_pair:pair")
    assert [(level.level, level.verdict.value) for level in report.levels] == [
        ("coverage", "passed"), ("weights", "passed"), ("layers", "passed"), ("model", "passed"),
    ]  # fmt: skip
    names = {measure.name for level in report.levels if level.level == "layers" for measure in level.measures}
    assert {"emb.weight", "head.weight"} <= names, "the head is run as a head, not as a table"


@pytest.mark.slow
def test_the_plan_says_it(place: Path, run: Run) -> None:
    stdout, _ = run("plan", place / "tied.yaml", place / "ckpt.msgpack")
    assert "  head.weight  float32[97,12]  (tied to emb.weight)  model.safetensors" in stdout
    assert stdout.count("keeps rows 0 to 96 of 104") == 1, "said once of the table"
    stdout, _ = run("plan", place / "tied.yaml", place / "ckpt.msgpack", "--json")
    tensors = {tensor["name"]: tensor for tensor in json.loads(stdout)["tensors"]}
    assert tensors["head.weight"]["tied_to"] == "emb.weight" and "tied_to" not in tensors["emb.weight"]
    assert (tensors["emb.weight"]["kind"], tensors["head.weight"]["kind"]) == ("embedding", "linear")
    assert tensors["head.weight"]["from"] == tensors["emb.weight"]["from"]


def test_padding_factor_and_dtype_agree() -> None:
    """One leaf, read once; rows, the carried factor and the dtype are the table's under every name."""
    table = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)

    class Counted(MemorySource):
        reads = 0

        def read(self, name: str) -> np.ndarray:
            Counted.reads += 1
            return super().read(name)

    rules = rule_file(
        "- from: e\n  axes: VD\n  prescaled_by: sqrt(D)\n  rows: $vocab\n  padded: [8]\n  dtype: float16\n"
        "  embedding: {module: emb, tied: {linear: head, embedding: [enc.emb, dec.emb], parameter: w_out}}",
        'model: m\ntitle: m\nfacts: {vocab: 7}\ntargets: {torch: {loads: "x"}}\n',
    )
    plan = make_plan(rules, Counted({"e": table}))
    made = run_plan(plan)
    assert [*made] == ["emb.weight", "head.weight", "enc.emb.weight", "dec.emb.weight", "w_out"]
    assert [step.kind_name for step in plan.steps] == ["embedding", "linear", "embedding", "embedding", "parameter"]
    want = (table[:7] * np.float32(0.5)).astype(np.float16)
    assert all(np.array_equal(x, want) and x.dtype == np.float16 for x in made.values())
    assert all(group.siblings == 1 for group in plan.shape_ambiguous), "their names are no accident of one layer"


def test_the_leaf_is_read_once(tmp_path: Path) -> None:
    reads: list[str] = []

    class Counted(MemorySource):
        def read(self, name: str) -> np.ndarray:
            reads.append(name)
            return super().read(name)

    plan = make_plan(
        rule_file("- from: e\n  embedding: {module: emb, tied: head}"), Counted({"e": np.ones((5, 3), np.float32)})
    )
    for _ in execute(plan, tmp_path / "out.safetensors"):
        pass
    assert reads == ["e"]


def test_stacked_tables_and_renamed_targets() -> None:
    """Indices and alternatives go over to the second name; so do the names that a target has."""
    rules = rule_file(
        "- from: t_{i}/{a,b}/e\n  axes: VD\n  embedding: {module: 'codes.{i}.{a,b}', tied: 'heads.{i}.{x,y}'}",
        'model: m\ntitle: m\ntargets: {torch: {loads: "x"}, other: {loads: "y", rename_prefixes: {heads: out.heads}}}\n',
    )
    values = {f"t_{i}/{x}/e": np.full((5, 3), 2.0 * i + k, np.float32) for i in range(2) for k, x in enumerate("ab")}
    made = run_plan(make_plan(rules, MemorySource(values), to="other"))
    assert [*made][:4] == ["codes.0.a.weight", "out.heads.0.x.weight", "codes.0.b.weight", "out.heads.0.y.weight"]
    assert [float(made[f"out.heads.{i}.{x}.weight"][0, 0]) for i in range(2) for x in "xy"] == [0, 1, 2, 3]


def test_a_shard_for_each(place: Path, tmp_path: Path, run: Run) -> None:
    """Sharded output has both names; torch loads it strictly."""
    out = written(place, tmp_path / "out", "--max-shard-size", "5KB", run=run)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["emb.weight"] != index["head.weight"]
    assert check(out, place / "ckpt.msgpack", model=str(place / "tied.yaml"), levels=["coverage", "weights"]).exit_code == 0  # fmt: skip


def edited(out: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> Path:
    with safe_open(out, "np") as file:
        said, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    edit(tensors)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, out, said)
    return out


def head_trained_on(file: dict[str, np.ndarray]) -> None:
    file["head.weight"][4] += 0.25


def table_trained_on(file: dict[str, np.ndarray]) -> None:
    file["emb.weight"][4] += 0.25


def both_scaled(file: dict[str, np.ndarray]) -> None:
    for name in ("emb.weight", "head.weight"):
        file[name] *= np.float32(np.sqrt(WIDTH))


@pytest.mark.parametrize(
    ("edit", "level", "said"),
    [
        pytest.param(head_trained_on, "weights", "head.weight: an untied head", id="the head differs"),
        pytest.param(table_trained_on, "weights", "head.weight: an untied head", id="the table differs"),
        pytest.param(lambda file: file.pop("head.weight"), "coverage", "head.weight: expected float32[97,12] (from params/embed/embedding), got no such tensor", id="one name alone"),
        pytest.param(both_scaled, "weights", "all values are multiplied by 3.46", id="both alike: the mistake is named, not the tie"),
    ],
)  # fmt: skip
def test_names_that_differ_are_caught_and_named(edit: Callable[[dict[str, np.ndarray]], None], level: str, said: str, place: Path, tmp_path: Path, run: Run) -> None:  # fmt: skip
    out = edited(written(place, tmp_path / "tied.safetensors", run=run), edit)
    report = check(out, place / "ckpt.msgpack", model=str(place / "tied.yaml"), levels=["coverage", "weights"])
    assert report.exit_code == 1
    texts = [str(finding) for one in report.levels if one.level == level for finding in one.findings]
    assert any(said in text for text in texts), texts
    if "an untied head" in said:
        (first, *_) = [f for one in report.levels for f in one.findings]
        assert first.got == "12 of 1164 values differ, by at most 2.5e-01" and first.data["tied_to"] == "emb.weight"
        assert "computes with the tensor that is loaded last" in first.problem
    else:
        assert not any("untied" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("edit", [None, head_trained_on, table_trained_on])
def test_a_recording_tells_it_without_the_checkpoint(edit: Callable[[dict[str, np.ndarray]], None] | None, place: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A leaf is computed back from the table; that the head is the same is seen for itself."""
    monkeypatch.chdir(place)
    rules = tmp_path / "tied.yaml"
    rules.write_text(RULES.replace("  rows: $vocab\n  padded: [104]\n", ""))
    tree = flax.serialization.msgpack_restore((place / "ckpt.msgpack").read_bytes())
    tree["params"]["embed"]["embedding"] = tree["params"]["embed"]["embedding"][:ENTRIES].copy()
    ckpt, recorded, out = tmp_path / "c.msgpack", tmp_path / "rec.safetensors", tmp_path / "out.safetensors"
    ckpt.write_bytes(flax.serialization.msgpack_serialize(tree))
    factory = tmp_path / "tied_whole.py"
    factory.write_text(PAIR.replace("104", "97"))
    monkeypatch.syspath_prepend(tmp_path)
    run("record", rules, ckpt, recorded, "--reference", "tied_whole:pair")
    run(rules, ckpt, out, "--quiet")
    if edit is not None:
        edited(out, edit)
    report = check(out, recorded=recorded, model=str(rules), reference="tied_whole:pair", levels=["coverage", "weights"])  # fmt: skip
    found = {one.level: one for one in report.levels}["weights"]
    assert report.exit_code == (0 if edit is None else 1), found
    assert (edit is None) or any((f.code, f.path) == ("tied-weights-differ", "head.weight") for f in found.findings)  # fmt: skip


@pytest.mark.slow
def test_burn_gets_a_transposed_copy(place: Path, tmp_path: Path, run: Run) -> None:
    """Burn's Linear has (in, out); its head is a Linear of its own, loaded with the table turned."""
    out = written(place, tmp_path / "burn.safetensors", "--to", "burn", run=run)
    file = load_file(out)
    assert file["emb.weight"].shape == (97, 12)
    assert np.array_equal(file["head.weight"], file["emb.weight"].T)
    tokens = np.array([[3, 96, 41]])
    x = burn.layer_norm(file, "norm", file["emb.weight"][tokens], 1e-6)
    tree = flax.serialization.msgpack_restore((place / "ckpt.msgpack").read_bytes())
    want = np.asarray(Table().apply(tree, jnp.asarray(tokens)))[..., :97]
    np.testing.assert_allclose(burn.linear(file, "head", x), want, atol=2e-5)
    levels = ["coverage", "weights", "layers"]
    report = check(out, place / "ckpt.msgpack", model=str(place / "tied.yaml"), levels=levels)
    assert report.exit_code == 0, [level.findings for level in report.levels]
    edited(out, lambda tensors: tensors["head.weight"].__setitem__((5, 7), 9.0))
    report = check(out, place / "ckpt.msgpack", model=str(place / "tied.yaml"), levels=["weights"])
    finding = report.levels[0].findings[0]
    assert (finding.code, finding.path) == ("tied-weights-differ", "head.weight") and "1 of 1164 values" in finding.got


def test_two_rules_for_one_table_name_this_form() -> None:
    rules = rule_file("- from: e\n  axes: VD\n  embedding: emb\n- from: e\n  einsum: ...D,VD->...V\n  linear: head")
    with pytest.raises(convert.PlanError) as error:
        make_plan(rules, MemorySource({"e": np.ones((5, 3), np.float32)}))
    assert str(error.value.findings[0]).endswith(
        "remove one or narrow its path. If the model has one table under two names (tied weights, flax's Embed.attend), remove "
        "r.yaml:8 and write `embedding: {module: emb, tied: head}` in r.yaml:5"
    )
    rules = rule_file("- from: e\n  parameter: w_out\n- from: e\n  embedding: 'emb'")
    with pytest.raises(convert.PlanError) as error:
        make_plan(rules, MemorySource({"e": np.ones((5, 3), np.float32)}))
    assert "`embedding: {module: emb, tied: {parameter: w_out}}` in r.yaml:7" in error.value.findings[0].fix
    rules = rule_file("- from: e\n  parameter: a\n- from: e\n  parameter: b")
    with pytest.raises(convert.PlanError) as error:
        make_plan(rules, MemorySource({"e": np.ones((5, 3), np.float32)}))
    assert error.value.findings[0].fix.endswith("remove one or narrow its path")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("{module: emb, tied: emb}", "r.yaml:5:3: emb.weight is named twice; `tied` gives the table's other names"),
        ("{module: emb, tied: [head, head]}", "head.weight is named twice; `tied` gives the table's other names"),
        ("{module: emb, tied: []}", "expected the name of at least one tensor, got a list; leave `tied` out where the table has one name"),
        ("{module: emb, tied: 'head.{i}'}", "head.{i} is tied to emb, so it has the same indices (none), as many alternatives, and no wildcard"),
        ("{module: emb, tied: '{a,b}'}", "{a,b} is tied to emb, so it has the same indices (none), as many alternatives, and no wildcard"),
        ("{module: emb, tied: {liner: head}}", "unknown key 'liner' in `tied`: expected one of linear, embedding, parameter; did you mean 'linear'?"),
        ("{module: emb, part: 1 of 2, tied: head}", "a table that is tied is a whole tensor; leave `part` or `tied` out"),
    ],
)  # fmt: skip
def test_what_cannot_be_tied(target: str, said: str) -> None:
    with pytest.raises(convert.RuleError) as error:
        rule_file(f"- from: e\n  embedding: {target}")
    assert said in str(error.value)
    assert str(error.value).startswith("r.yaml:")


def test_only_tables_are_tied_and_no_name_is_made_twice() -> None:
    with pytest.raises(convert.RuleError, match="unknown key 'tied'"):
        rule_file("- from: e\n  einsum: ...D,VD->...V\n  linear: {module: head, tied: emb}")
    rules = rule_file("- from: e\n  embedding: {module: emb, tied: head}\n- from: f\n  parameter: head.weight")
    with pytest.raises(
        convert.PlanError, match="head.weight: this target tensor .* is made twice, here and at r.yaml:5"
    ):
        make_plan(rules, MemorySource({"e": np.ones((5, 3), np.float32), "f": np.ones((5, 3), np.float32)}))


@pytest.mark.slow
def test_the_schema_has_it() -> None:
    import jsonschema

    rule = {"from": "e", "embedding": {"module": "emb", "tied": {"linear": "head", "embedding": ["a", "b"]}}}
    file = {"model": "m", "title": "m", "targets": {"torch": {"loads": "x"}}, "rules": [rule]}
    jsonschema.validate(file, schema())
    rule["embedding"] = {"module": "emb", "tied": {"liner": "head"}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(file, schema())


def test_torch_keeps_what_is_loaded_last() -> None:
    """The reason why two names that differ are a fault: no loader says so."""
    emb, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    head.weight = emb.weight
    net = torch.nn.ModuleDict({"emb": emb, "head": head})
    net.load_state_dict({"emb.weight": torch.zeros(5, 3), "head.weight": torch.ones(5, 3)}, strict=True)
    assert float(emb.weight.detach()[0, 0]) == 1
