"""A mistake in a user's reference is said to be one: what `build` returned, and which value has which name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn

import convert
from convert.verify.diagnosis import diagnose, whole_model
from convert.verify.diagnosis.other_operation import OtherOperation
from convert.verify.report.report import LevelReport, Report, Verdict
from convert.verify.run import check
from support import small_decoder
from support.small_decoder import RULES, SAID, source

REFERENCE = "support.small_decoder:reference"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rules, a checkpoint and its conversion."""
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "rules.yaml").write_text(RULES)
    np.savez(folder / "ckpt.npz", **source().arrays)
    convert.convert(str(folder / "rules.yaml"), folder / "ckpt.npz", folder / "out.safetensors")
    return folder


@pytest.fixture(autouse=True)
def said() -> Iterator[dict[str, Any]]:
    """What the reference is told to do."""
    SAID.clear()
    yield SAID
    SAID.clear()


def checked(folder: Path, rules: str = "rules.yaml", **options: Any) -> Report:
    given = {"reference": REFERENCE, "levels": ("coverage", "weights", "model"), **options}
    return check(folder / "out.safetensors", folder / "ckpt.npz", model=str(folder / rules), **given)


def model(report: Report) -> LevelReport:
    return next(level for level in report.levels if level.level == "model")


@pytest.mark.slow
def test_the_right_reference_passes(converted: Path) -> None:
    report = checked(converted, require=("model",))
    assert report.exit_code == 0
    assert not any("in float64" in note for note in model(report).notes)
    assert not report.facts


def test_float64_beside_float32_is_a_note(converted: Path, tmp_path: Path) -> None:
    """Both runs have one dtype, and are equal; the module that is loaded with the file as it is multiplies float32 by float64."""
    arrays = source().arrays
    np.savez(tmp_path / "ckpt.npz", **{**arrays, "blocks_0/norm": arrays["blocks_0/norm"].astype(np.float64)})
    shutil.copy(converted / "rules.yaml", tmp_path)
    convert.convert(str(tmp_path / "rules.yaml"), tmp_path / "ckpt.npz", tmp_path / "out.safetensors")
    level = model(checked(tmp_path))
    assert level.verdict is Verdict.PASSED
    assert any("in float64, and other tensors in float32" in note for note in level.notes)
    assert any("convert with --dtype float32" in note for note in level.notes)


@pytest.mark.slow
def test_only_the_tensors_that_are_wrong_are_blamed(converted: Path, tmp_path: Path) -> None:
    """The statistics of the same layer are right."""
    with safe_open(converted / "out.safetensors", "np") as file:
        metadata = file.metadata()
    tensors = load_file(converted / "out.safetensors")
    tensors["last.weight"], tensors["last.bias"] = tensors["last.bias"], tensors["last.weight"]
    for name in ("ckpt.npz", "rules.yaml"):
        shutil.copy(converted / name, tmp_path)
    save_file(tensors, tmp_path / "out.safetensors", metadata)
    diagnosis = model(checked(tmp_path)).diagnosis
    assert diagnosis is not None and diagnosis["name"] == "other values in the file"
    assert diagnosis["problem"].startswith("last.weight and last.bias in the file are not what ")


@pytest.mark.slow
def test_a_layer_that_is_right_is_not_tried_with_other_weights(
    converted: Path, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model runs only for tensors that no equal layer has."""
    tried: list[set[str]] = []
    with_tensors = whole_model.Replay.with_tensors

    def counted(self: Any, tensors: Mapping[str, Any]) -> Any:
        tried.append({name.rpartition(".")[0] for name in tensors})
        return with_tensors(self, tensors)

    def disturbed(module: nn.Module, state: Any) -> None:
        noise = torch.tensor(np.random.default_rng(0).standard_normal(small_decoder.WIDTH))
        module.get_submodule("blocks.1.o").register_forward_hook(lambda layer, given, y: y * noise.to(y))

    said["build"] = disturbed
    monkeypatch.setattr(diagnose, "_search", lambda site, reference, names: (None, []))
    monkeypatch.setattr(diagnose, "other_operation", lambda site, reference, names: OtherOperation())
    monkeypatch.setattr(whole_model.Replay, "with_tensors", counted)
    level = model(checked(converted))
    assert level.diagnosis is not None and level.diagnosis["boundary"] == "blocks.1.o"
    assert tried and not any({"embed", "blocks.0.o", "blocks.0.q", "blocks.1.q"} & holders for holders in tried)


# ---- what `build` returned


def forgotten(module: nn.Module, state: Any) -> None:
    module.get_submodule("blocks.1.norm").weight.data = torch.ones(
        small_decoder.WIDTH, dtype=state["embed.weight"].dtype
    )


def trained(module: nn.Module, state: Any) -> None:
    module.get_submodule("blocks.0.q").weight.data = state["blocks.0.q.weight"] * 1.01


def tied(module: nn.Module, state: Any) -> None:
    module.get_submodule("head").weight = module.get_submodule("embed").weight


def transposed(module: nn.Module, state: Any) -> None:
    module.get_submodule("blocks.0.k").weight.data = state["blocks.0.k.weight"].T.clone()


def other_block(module: nn.Module, state: Any) -> None:
    module.get_submodule("blocks.0.v").weight.data = state["blocks.1.v.weight"].clone()


def statistics(module: nn.Module, state: Any) -> None:
    module.get_submodule("last").running_var.fill_(1.0)


BUILDS: Mapping[str, tuple[Callable[..., None], str, str]] = {
    "a norm is left at its initial value": (forgotten, "blocks.1.norm.weight", "ones"),
    "a weight is changed": (trained, "blocks.0.q.weight", "other values"),
    "a head is tied afterwards": (tied, "head.weight", "those of embed.weight"),
    "a weight is transposed": (transposed, "blocks.0.k.weight", "their transpose"),
    "a weight of another layer": (other_block, "blocks.0.v.weight", "those of blocks.1.v.weight"),
    "a buffer is overwritten": (statistics, "last.running_var", "ones"),
}


@pytest.mark.slow
@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("name", BUILDS)
def test_build_changes_the_weights(name: str, boundaries: bool, converted: Path, said: dict[str, Any]) -> None:
    said["build"], tensor, instead = BUILDS[name]
    said["boundaries"] = boundaries
    level = model(checked(converted))
    assert level.verdict is Verdict.FAILED
    assert level.diagnosis is not None
    assert level.diagnosis["name"] == "module does not hold the file's values"
    assert tensor in level.diagnosis["problem"] and f"it holds {instead}" in level.diagnosis["problem"]
    assert "strict=True" in level.diagnosis["fix"]
    assert level.diagnosis["error_after"] <= 1e-9


@pytest.mark.slow
def test_build_changes_what_no_output_shows(converted: Path, said: dict[str, Any]) -> None:
    """Equal outputs do not hide that another model was compared."""

    def unused_row(module: nn.Module, state: Any) -> None:
        weight = state["embed.weight"].clone()
        weight[5] = 1.0
        module.get_submodule("embed").weight.data = weight

    said["build"] = unused_row
    said["inputs"] = lambda seed: {"tokens": np.random.default_rng(seed).integers(6, 13, (3, 7))}
    level = model(checked(converted))
    assert level.verdict is Verdict.FAILED
    assert [(f.code, f.path) for f in level.findings] == [("module-not-loaded", "embed.weight")]


@pytest.mark.parametrize("part", ["", "blocks.1.drop", "last"])
def test_a_module_in_training_mode(part: str, converted: Path, said: dict[str, Any]) -> None:
    said["build"] = lambda module, state: (module.get_submodule(part).train(), module)[1]
    level = model(checked(converted))
    assert level.verdict is Verdict.FAILED
    assert level.diagnosis is not None
    assert level.diagnosis["name"] == "module in training mode"
    assert (part or "a module") in level.diagnosis["problem"]
    assert "eval()" in level.diagnosis["fix"]


@pytest.mark.slow
def test_training_mode_without_an_effect_is_a_note(converted: Path, said: dict[str, Any]) -> None:
    said["build"] = lambda module, state: (module.get_submodule("blocks.0.q").train(), module)[1]
    level = model(checked(converted))
    assert level.verdict is Verdict.PASSED
    assert any("blocks.0.q in training mode" in note for note in level.notes)


@pytest.mark.slow
def test_a_module_that_is_not_deterministic(converted: Path, said: dict[str, Any]) -> None:
    def noisy(module: nn.Module, state: Any) -> None:
        module.get_submodule("blocks.0.o").register_forward_hook(lambda m, args, y: y + torch.randn_like(y))

    said["build"] = noisy
    level = model(checked(converted))
    assert level.diagnosis is not None
    assert level.diagnosis["name"] == "module that is not deterministic"
    assert "two runs" in level.diagnosis["problem"]


def stateful(part: Any, kind: str) -> None:
    """Let a layer add what it kept from the call before."""
    kept: dict[str, Any] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = nn.Linear.forward(part, x)
        if kind == "tensor":
            y = y + getattr(part, "before", 0.0)
            part.before = y
        elif kind == "number":
            part.calls = getattr(part, "calls", -1) + 1
            y = y + part.calls
        elif kind == "list":
            part.before = [*getattr(part, "before", []), y.mean()]
            y = y + sum(part.before[:-1])
        else:
            y = y + kept.get("before", 0.0)
            kept["before"] = y
        return y

    part.forward = forward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said_to_keep"),
    [("tensor", "`head.before`"), ("number", "`head.calls`"), ("list", "`head.before`"), ("closure", "something outside of its attributes")],
)  # fmt: skip
def test_a_module_that_keeps_state_from_call_to_call(
    kind: str, said_to_keep: str, converted: Path, said: dict[str, Any]
) -> None:
    """Its first call is right: the second one is not."""
    said["build"] = lambda module, state: stateful(module.head, kind)
    level = model(checked(converted))
    assert level.verdict is Verdict.FAILED
    (finding,) = level.findings
    assert finding.code == "run-not-deterministic"
    assert finding.data["diagnosis"] == "state kept from call to call"
    assert f"when it is called again: it keeps {said_to_keep}" in str(finding)
    assert "start each call from the first state" in str(finding)


@pytest.mark.slow
def test_a_module_in_another_dtype(converted: Path, said: dict[str, Any]) -> None:
    """The float64 run removes casts, so only native precision shows it."""

    class Rounding(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.inner.weight
            return nn.functional.linear(x.to(weight.dtype), weight).to(x.dtype)

    def cast(module: Any, state: Any) -> None:
        module.head.weight.data = module.head.weight.data.to(torch.bfloat16)
        module.head.forward = lambda x: nn.functional.linear(x.to(module.head.weight.dtype), module.head.weight).to(
            x.dtype
        )

    said["build"] = cast
    level = model(checked(converted))
    assert level.verdict is Verdict.FAILED
    assert level.findings[0].data["diagnosis"] == "module cast to another dtype"
    assert "head.weight" in level.findings[0].fix and "bfloat16" in level.findings[0].fix


@pytest.mark.slow
def test_weights_that_build_rounds(converted: Path, said: dict[str, Any]) -> None:
    """They are float32 again afterwards, and the module of the float64 run takes the values of the file."""

    def rounded(state: Mapping[str, torch.Tensor]) -> nn.Module:
        short = {n: x.to(torch.bfloat16).to(x.dtype) if x.dtype is torch.float32 else x for n, x in state.items()}
        return small_decoder.load(short)

    said["load"] = rounded
    level = model(checked(converted))
    assert level.verdict is Verdict.FAILED
    assert level.findings[0].data["diagnosis"] == "module does not hold the file's values"
    assert "it holds them rounded to bfloat16" in level.findings[0].fix
    assert "the weights are right" not in level.findings[0].fix


# ---- names of boundaries


@pytest.mark.slow
def test_two_boundaries_have_each_others_name(converted: Path, said: dict[str, Any]) -> None:
    said["names"] = {"blocks.0.norm": "blocks.1.norm", "blocks.1.norm": "blocks.0.norm"}
    level = model(checked(converted))
    assert level.diagnosis is not None
    assert level.diagnosis["name"] == "boundary names exchanged"
    assert "under the name blocks.0.norm, it returns the value of blocks.1.norm" in level.diagnosis["problem"]


@pytest.mark.slow
def test_a_boundary_has_the_name_of_another_place(converted: Path, said: dict[str, Any]) -> None:
    """The value in front of the layer."""
    said["names"] = {"blocks.1.o": "blocks.0"}
    level = model(checked(converted))
    assert level.diagnosis is not None
    assert level.diagnosis["name"] == "boundary with another name"
    assert "it returns the value of blocks.0" in level.diagnosis["problem"]


# ---- what the inputs do not show


def tokens(draw: Callable[[np.random.Generator], Any]) -> Callable[[int], dict[str, Any]]:
    return lambda seed: {"tokens": draw(np.random.default_rng(seed))}


UNSEEN: Mapping[str, tuple[Callable[[int], dict[str, Any]], str, str]] = {
    "shorter than the window": (
        tokens(lambda rng: rng.integers(0, 13, (3, 4))),
        "small_decoder.py:{window}",
        "x < 4 is always true (x is from -3 to 3)",
    ),
    "one position": (tokens(lambda rng: rng.integers(0, 13, (3, 1))), "inputs:tokens", "one element along axis 1"),
    "one sample": (tokens(lambda rng: rng.integers(0, 13, (1, 7))), "inputs:tokens", "one element along axis 0"),
    "one sample, repeated": (
        tokens(lambda rng: np.tile(rng.integers(0, 13, 7), (3, 1))),
        "inputs:batch",
        "one sample, repeated",
    ),
    "one token": (tokens(lambda rng: np.full((3, 7), 5)), "inputs:tokens", "5 throughout"),
    "one token in each sample": (
        tokens(lambda rng: np.repeat(rng.permutation(13)[:3, None], 7, 1)),
        "inputs:tokens",
        "the same along axis 1",
    ),
}


def window() -> int:
    """The line of the JAX side that compares with the window."""
    lines = Path(small_decoder.__file__).read_text().splitlines()
    return next(k for k, line in enumerate(lines, 1) if "jnp.where((far >= 0)" in line)


@pytest.mark.slow
@pytest.mark.parametrize("case", UNSEEN)
def test_inputs_that_cannot_show_a_difference(case: str, converted: Path, said: dict[str, Any]) -> None:
    said["inputs"], name, value = UNSEEN[case]
    name = name.format(window=window())
    report = checked(converted, require=("model",))
    assert report.exit_code == 2
    (fact,) = [fact for fact in report.facts if fact.name == name]
    assert value in fact.value and "give" in fact.next
    assert f"--trust {name}" in model(report).findings[0].fix


@pytest.mark.slow
def test_unseen_facts_can_be_trusted(converted: Path, said: dict[str, Any]) -> None:
    """They are listed, and they fail only a required level."""
    said["inputs"] = tokens(lambda rng: np.full((3, 7), 5))
    assert checked(converted).exit_code == 0
    assert checked(converted, require=("model",), trust=("inputs:tokens",)).exit_code == 0


@pytest.mark.slow
def test_a_target_without_the_window_is_not_proven(converted: Path, said: dict[str, Any]) -> None:
    said.update(target="no window", inputs=UNSEEN["shorter than the window"][0])
    assert checked(converted, require=("model",)).exit_code == 2
    said.pop("inputs")
    assert checked(converted).exit_code == 1


# ---- leaves that the rules drop


def without_bias(folder: Path, name: str, arrays: Mapping[str, np.ndarray], keep: bool = False) -> Path:
    """Convert with rules that drop a bias which the JAX model reads."""
    made = folder / name
    made.mkdir()
    drop = "- drop: blocks_{i}/o/bias\n  because: unused\n"
    (made / "rules.yaml").write_text(RULES.replace("  bias: blocks_{i}/o/bias\n", "") + drop)
    np.savez(made / "ckpt.npz", **arrays)
    convert.convert(str(made / "rules.yaml"), made / "ckpt.npz", made / "out.safetensors")
    return made


def target_without_bias(state: Mapping[str, torch.Tensor]) -> nn.Module:
    module = small_decoder.Decoder()
    for block in module.blocks:
        block.o.bias = None
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()


@pytest.mark.slow
@pytest.mark.parametrize("required", [False, True])
def test_a_dropped_leaf_that_the_model_reads(required: bool, tmp_path: Path, said: dict[str, Any]) -> None:
    """Whether the JAX model fails without the leaf or takes it as zero."""
    if required:
        said["jax"] = lambda weights, inputs: small_decoder.apply(
            {**weights, "blocks_0/o/bias": weights["blocks_0/o/bias"]}, inputs
        )
    said["load"] = target_without_bias
    level = model(checked(without_bias(tmp_path, "biases", source().arrays)))
    assert level.verdict is Verdict.FAILED
    found = [f for f in level.findings if f.code == "dropped-leaf-read"]
    assert [f.path for f in found] == ["blocks_0/o/bias", "blocks_1/o/bias"]
    assert found[0].rule.startswith(str(tmp_path / "biases" / "rules.yaml")) or "rules.yaml:" in found[0].rule
    assert found[0].data["diagnosis"] == "dropped leaf is read"


@pytest.mark.slow
def test_a_dropped_leaf_of_zeros_is_not_verified(tmp_path: Path, said: dict[str, Any]) -> None:
    said["load"] = target_without_bias
    arrays = {name: np.zeros_like(x) if name.endswith("o/bias") else x for name, x in source().arrays.items()}
    report = checked(without_bias(tmp_path, "zeros", arrays), require=("model",))
    assert report.exit_code == 2
    assert {f.name for f in report.facts if f.open} == {"leaf:blocks_0/o/bias", "leaf:blocks_1/o/bias"}


@pytest.mark.slow
def test_a_dropped_leaf_that_is_not_read_says_nothing(tmp_path: Path) -> None:
    made = tmp_path / "step"
    made.mkdir()
    (made / "rules.yaml").write_text(RULES + "- drop: step\n  because: the training step\n")
    np.savez(made / "ckpt.npz", **source().arrays, step=np.float32(3))
    convert.convert(str(made / "rules.yaml"), made / "ckpt.npz", made / "out.safetensors")
    report = checked(made, require=("model",))
    assert (report.exit_code, report.facts) == (0, ())


# ---- names that the user gives to the leaves


@pytest.mark.slow
def test_the_order_of_leaves_without_names_is_not_verified(tmp_path: Path) -> None:
    """Both models take the leaves by the names of the list."""
    arrays = source().arrays
    with (tmp_path / "ckpt.eqx").open("wb") as file:
        for array in arrays.values():
            np.save(file, array)
    names = ", ".join(arrays)
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES.replace("title: a small decoder", f"title: a small decoder\nleaf_names: [{names}]"))
    convert.convert(str(rules), tmp_path / "ckpt.eqx", tmp_path / "out.safetensors")
    options: dict[str, Any] = {"model": str(rules), "reference": REFERENCE, "levels": ("model",), "require": ("model",)}
    report = check(tmp_path / "out.safetensors", tmp_path / "ckpt.eqx", **options)
    assert report.exit_code == 2
    (fact,) = report.facts
    assert fact.name == "names:leaves" and "blocks_0/norm, blocks_0/o/bias" in fact.value
    assert "--trust names:leaves" in fact.next
    assert "equal shapes" in fact.next and fact.origin == "the rules"
    assert check(tmp_path / "out.safetensors", tmp_path / "ckpt.eqx", **options, trust=("names:leaves",)).exit_code == 0


# ---- outputs that prove nothing


def constant_module(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the JAX side, which the reference keeps."""
    return {"logits": torch.tensor(np.asarray(KEPT["logits"]))}


def keeping(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    found = small_decoder.apply(weights, inputs)
    KEPT["logits"] = found["logits"]
    return {"logits": found["logits"]}


def of_the_file(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Compute with weights of its own, which are those of the checkpoint."""
    return small_decoder.apply({name: jnp.asarray(x) for name, x in source().arrays.items()}, inputs)


KEPT: dict[str, Any] = {}
NOTHING: Mapping[str, tuple[dict[str, Any], str]] = {
    "the tokens of highest probability": ({"outputs": lambda y: y.argmax(-1)}, "none of the numbers"),
    "one decimal": ({"outputs": lambda y: (y * 10 + 0.5) // 1 / 10}, "only"),
    "the values of the JAX side": (
        {"run": constant_module, "jax": keeping},
        "none of the numbers of logits changes on the PyTorch side",
    ),
    "weights of its own": ({"jax": of_the_file}, "none of the numbers of logits changes on the JAX side"),
    "the inputs": ({"outputs": lambda y: y * 0 + 1}, "are the same"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", NOTHING)
def test_outputs_that_prove_nothing(case: str, converted: Path, said: dict[str, Any]) -> None:
    KEPT.clear()
    told, reason = NOTHING[case]
    said.update(told, logits=(), boundaries=False)
    level = model(checked(converted))
    assert level.verdict is Verdict.INCONCLUSIVE
    assert reason in level.reason


@pytest.mark.slow
def test_a_jax_side_with_other_weights_of_its_own(converted: Path, said: dict[str, Any]) -> None:
    """Its outputs differ, and the conversion is not the cause."""
    said["jax"] = lambda weights, inputs: small_decoder.apply(
        {name: jnp.asarray(x) for name, x in source(5).arrays.items()}, inputs
    )
    level = model(checked(converted))
    assert level.verdict is Verdict.INCONCLUSIVE and level.diagnosis is None
    assert level.reason.startswith("the JAX side does not use the weights: its outputs stay the same")


@pytest.mark.slow
def test_a_difference_in_chosen_tokens_is_a_difference(converted: Path, said: dict[str, Any]) -> None:
    """The tokens stay the same for weights that change a little, and not for shuffled ones."""
    said.update(outputs=lambda y: y.argmax(-1), logits=(), boundaries=False)

    def negative(module: nn.Module, state: Any) -> None:
        module.get_submodule("blocks.0.norm").weight.data = -3 * state["blocks.0.norm.weight"]

    said["build"] = negative
    assert model(checked(converted)).verdict is Verdict.FAILED


@pytest.mark.slow
def test_tolerances_come_from_numbers_that_the_model_can_have(converted: Path, said: dict[str, Any]) -> None:
    """Otherwise an epsilon outside of the root would be within them."""

    def outside(module: nn.Module, state: Any) -> None:
        norm = module.get_submodule("blocks.0.norm")
        norm.forward = lambda x: x / ((x * x).mean(-1, keepdim=True) + 3e-6).sqrt() * norm.weight  # type: ignore[method-assign]

    said.update(build=outside, reduction=10**12, depth=10**9)
    level = model(checked(converted))
    assert level.verdict is Verdict.FAILED
    assert any("`reduction` = 1,000,000,000,000" in note for note in level.notes)
    assert level.findings[0].path == "blocks.0.norm"


@pytest.mark.slow
def test_masks_that_hide_most(converted: Path, said: dict[str, Any]) -> None:
    def first(inputs: Any) -> dict[str, Any]:
        mask = np.zeros((3, 7), bool)
        mask[0, 0] = True
        return {"logits": mask}

    said.update(masks=first, boundaries=False)
    report = checked(converted, require=("model",))
    assert report.exit_code == 2
    assert [(f.name, f.value) for f in report.facts] == [("masks:logits", "4.8% of the numbers are compared")]


# ---- mistakes of rules that one tensor alone does not show


@pytest.mark.slow
@pytest.mark.parametrize("boundaries", [True, False])
def test_the_target_rotates_other_pairs_and_keys_share_a_rule_with_values(
    boundaries: bool, converted: Path, said: dict[str, Any]
) -> None:
    said.update(target="half-split pairs", boundaries=boundaries)
    level = model(checked(converted))
    assert level.diagnosis is not None
    assert level.diagnosis["name"] in (
        "RoPE of other pairs",
        "RoPE pairs still interleaved",
    )  # in the code, or in two rules
    assert level.diagnosis["error_after"] <= 1e-9
