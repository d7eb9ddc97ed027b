"""The layers level sees a derivation that is wrong, although file and plan agree; and what is said of torch's arguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import convert
from convert.core import weight_norm_ops
from convert.layers import BatchNorm, Convolution, ConvTranspose
from convert.layers.conv import padding as geometry
from convert.layers.conv import probe as probe_conv
from convert.layers.transforms import weight_transforms
from convert.references.module_facts import facts as module_facts
from convert.references.protocol import Reference
from convert.verify.config.compare import Facts, check_facts
from convert.verify.report.report import Verdict
from convert.verify.run import check
from convert.writing.written import open_written
from faults.catalogue import checkpoint_of, run
from faults.conv_net import reference
from faults.own_models import OWN
from faults.plants import InRule
from support.marks import slow_but
from support.memory_source import MemorySource

NET = "conv-net"


def broken_standardize(self: weight_norm_ops.Standardize, x: np.ndarray, out: np.ndarray) -> None:
    wide = x - x.mean()
    out[...] = (wide / wide.std()).reshape(out.shape)


def broken_spectral(self: weight_norm_ops.SpectralNorm, x: np.ndarray, out: np.ndarray) -> None:
    out[...] = (x / np.linalg.norm(x)).reshape(out.shape)


def same_pads(geometry_: Any, kernel: Any, size: Any) -> Any:
    """Symmetric, as torch's argument is."""
    return tuple(((k - 1) // 2 + 1 - k % 2, (k - 1) // 2 + 1 - k % 2) for k in kernel)


def cropped_at_the_start(geometry_: Any, kernel: Any) -> Any:
    made = geometry.torch_transposed(geometry_, kernel)
    return dataclasses.replace(made, extra=tuple((high, low) for low, high in made.extra))


def swapped_roles(self: BatchNorm, role: str, shape: Any, variant: Any) -> Any:
    return None


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "transposed kernel not turned": (ConvTranspose, "turned", lambda self, role, layer: (), "up.weight"),
    "channels in and out exchanged": (Convolution, "groups", lambda self, role, letters, variant, layer: (self.letter("O"),) if role == "bias" else tuple(self.letter(x) for x in "IO") + tuple(map(self.letter, self.numbers.spatial)), "mix.weight"),
    "the map in the source's order": (weight_transforms, "target_order", lambda rule, layer: "RSE", "dense.parametrizations.weight.original1"),
    "standardised over everything": (weight_norm_ops.Standardize, "fold", broken_standardize, "mix.weight"),
    "divided by another norm": (weight_norm_ops.SpectralNorm, "fold", broken_spectral, "head.weight"),
    "symmetric padding": (probe_conv, "pads", same_pads, "stem.weight"),
    "cropped at the other end": (probe_conv, "torch_transposed", cropped_at_the_start, "up.weight"),
    "statistics in each other's place": (BatchNorm, "tensor_name", lambda self, path, role, layer: f"{path}.{ {'running_mean': 'running_var', 'running_var': 'running_mean'}.get(role, role)}", "norm.weight"),
}  # fmt: skip


@pytest.mark.slow
def test_a_correct_conversion_passes() -> None:
    report = run(NET, "torch", InRule(()), levels=("weights", "layers"))
    assert {level.level: level.verdict for level in report.levels} == {
        "weights": Verdict.PASSED,
        "layers": Verdict.PASSED,
    }
    measured = {m.name for level in report.levels for m in level.measures}
    assert {"stem.weight", "up.weight", "norm.weight", "group.weight", "mix.weight", "head.weight"} <= measured


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(list(FAULTS)[::4], FAULTS))
def test_a_wrong_derivation_fails_the_layers_level(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, fault, at = FAULTS[name]
    monkeypatch.setattr(where, attribute, fault)
    report = run(NET, "torch", InRule(()), levels=("weights", "layers"))
    levels = {level.level: level for level in report.levels}
    assert levels["weights"].verdict is Verdict.PASSED, "the file is what the plan makes"
    assert levels["layers"].verdict is Verdict.FAILED
    assert at in {finding.path for finding in levels["layers"].findings}


# ---- facts


RULE = """
- dimension_numbers: NHWC,HWIO->NHWC
  axes: PQIO
  from: k
  padding: {padding}
  strides: {strides}
  {kind}: m
- from: s
  multiplies_by: scale
  epsilon: 1e-5
  mean: mean
  var: var
  momentum: 0.9
  batch_norm: n
"""


class Net(nn.Module):
    def __init__(self, conv: nn.Module, momentum: float) -> None:
        super().__init__()
        self.m, self.n = conv, nn.BatchNorm2d(4, momentum=momentum)
        self.n.bias = None


def facts_of(
    tmp_path: Path,
    padding: str,
    strides: int,
    kind: str,
    conv: nn.Module,
    momentum: float = 0.1,
    training: bool = False,
    rule: str = RULE,
) -> Facts:
    shape = (3, 3, 2, 4)
    tree = {"k": np.ones(shape, np.float32)} | {name: np.ones(4, np.float32) for name in ("s", "mean", "var")}
    file, out = tmp_path / "r.yaml", tmp_path / "out.safetensors"
    rules = rule.format(padding=padding, strides=strides, kind=kind)
    file.write_text(f"model: m\ntitle: M\ntargets: {{torch: {{loads: T}}}}\nrules:\n{rules}")
    source = MemorySource(tree)
    convert.convert(convert.load_rules(file), source, out, overwrite=True)
    plan = convert.plan_conversion(str(file), source)
    module = Net(conv, momentum)
    built = Reference(lambda seed: {}, lambda state: module, lambda m, x: {}, (), 1, 1)
    return check_facts(plan, open_written(out), built, training=training)


def findings(
    tmp_path: Path, padding: str, strides: int, kind: str, conv: nn.Module, momentum: float = 0.1
) -> list[str]:
    found = facts_of(tmp_path, padding, strides, kind, conv, momentum).findings
    return [f"{finding.data['fact']}: {finding.expected}; {finding.got}" for finding in found]


@pytest.mark.parametrize(
    ("padding", "strides", "kind", "conv"),
    [
        ("SAME", 1, "conv", nn.Conv2d(2, 4, 3, padding=1, bias=False)),
        ("SAME", 1, "conv", nn.Conv2d(2, 4, 3, padding="same", bias=False)),
        ("SAME", 1, "conv", nn.Conv2d(2, 4, 3, bias=False)),  # other code may pad
        ("SAME", 2, "conv", nn.Conv2d(2, 4, 3, stride=2, bias=False)),
        ("VALID", 2, "conv", nn.Conv2d(2, 4, 3, stride=2, bias=False)),
        ("[1, [1, 1]]", 2, "conv", nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False)),
        ("[[2, 0], [2, 0]]", 1, "conv", nn.Conv2d(2, 4, 3, padding=2, bias=False)),  # other code may cut the end off
        ("SAME", 2, "conv_transpose", nn.ConvTranspose2d(2, 4, 3, stride=2, bias=False)),
        ("SAME", 1, "conv_transpose", nn.ConvTranspose2d(2, 4, 3, padding=1, bias=False)),
    ],
)
def test_no_false_alarm(padding: str, strides: int, kind: str, conv: nn.Module, tmp_path: Path) -> None:
    assert findings(tmp_path, padding, strides, kind, conv) == []


@pytest.mark.parametrize(
    ("padding", "strides", "kind", "conv", "said"),
    [
        ("SAME", 2, "conv", nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), "padding: F.pad(x, (W low, W high, H low, H high)), then padding=0, where (low, high) is (0, 1) for sizes 2m and (1, 1) for sizes 2m+1 of H; "),
        ("VALID", 1, "conv", nn.Conv2d(2, 4, 3, padding=1, bias=False), "padding: padding=(0, 0) of m"),
        ("[[0, 2], [0, 2]]", 1, "conv", nn.Conv2d(2, 4, 3, padding=2, bias=False), "padding: F.pad(x, (0, 2, 0, 2)), then padding=0 of m"),
        ("SAME", 1, "conv", nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), "strides: [1, 1] of m"),
        ("SAME", 1, "conv", nn.Conv2d(2, 4, 3, dilation=2, padding=1, bias=False), "dilation: [1, 1] of m"),
        ("SAME", 2, "conv_transpose", nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, bias=False), "padding: padding=(0, 0), output_padding=(0, 0), then F.pad(y, (0, -1, 0, -1))"),
        ("VALID", 4, "conv_transpose", nn.ConvTranspose2d(2, 4, 3, stride=4, bias=False), "output_padding: [1, 1] of m"),
    ],
)  # fmt: skip
def test_other_arguments_are_findings(
    padding: str, strides: int, kind: str, conv: nn.Module, said: str, tmp_path: Path
) -> None:
    found = findings(tmp_path, padding, strides, kind, conv)
    assert any(what.startswith(said) for what in found), found


def test_momentum_is_compared_as_torch_means_it(tmp_path: Path) -> None:
    """For training; at inference nothing reads it. The source's 0.9 is torch's 0.1, and torch's 0.9 would be its 0.1."""
    conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
    assert findings(tmp_path, "SAME", 1, "conv", conv, momentum=0.9) == []
    compared = facts_of(tmp_path, "SAME", 1, "conv", conv, momentum=0.9)
    said = "only training sees this difference, which --training counts: "
    assert any(note.startswith(said) and "expected 0.1 of n, got 0.9" in note for note in compared.notes)
    (finding,) = facts_of(tmp_path, "SAME", 1, "conv", conv, momentum=0.9, training=True).findings
    assert (finding.expected, finding.got) == ("0.1 of n", "0.9 (the target's module n)")
    assert finding.fix == (
        "configure n with momentum 0.1, or correct the rules if the source has momentum 0.1, which is 0.9 in torch"
    )


def test_a_momentum_that_no_rule_states_is_no_matter_but_of_training(tmp_path: Path) -> None:
    conv, rule = nn.Conv2d(2, 4, 3, padding=1, bias=False), RULE.replace("  momentum: 0.9\n", "")
    notes = [
        facts_of(tmp_path, "SAME", 1, "conv", conv, training=training, rule=rule).notes for training in (False, True)
    ]
    assert ["the rules do not declare the momentum of n" in said for said in notes] == [False, True]


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("- dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQIO\n  from: k\n  conv: m", True),
        ("- einsum: ...PQI,PQIO->...O\n  from: k\n  linear: {{module: m, axes: OIPQ}}", False),
    ],
)
def test_a_product_of_patches_has_no_words_for_the_strides_of_a_convolution(
    tmp_path: Path, first: str, said: bool
) -> None:
    """A convolution that states nothing is one note."""
    rule = f"\n{first}\n{RULE[RULE.index('- from: s') :]}"
    notes = facts_of(tmp_path, "", 1, "", nn.Conv2d(2, 4, 3, stride=3, bias=False), rule=rule).notes
    about = [note for note in notes if note.startswith("the rules do not declare the strides")]
    matters = "nothing to do if the model level passes, as another value would change its outputs; if it does not run, compare the code of the two models"
    assert about == ([f"the rules do not declare the strides, dilation, padding of m: {matters}"] if said else [])


def test_a_padding_is_repaired_in_the_words_of_each_side(tmp_path: Path) -> None:
    (finding,) = facts_of(tmp_path, "VALID", 1, "conv", nn.Conv2d(2, 4, 3, padding=1, bias=False)).findings
    assert (finding.expected, finding.got) == ("padding=(0, 0) of m", "padding=(1, 1) (the target's module m)")
    assert finding.fix == (
        "make it padding=(0, 0) in the code of m, or correct `padding` of the rule if the source pads like padding=(1, 1); "
        "if the code around m does the rest, state its `padding` in the rule's target"
    )
    (finding,) = facts_of(tmp_path, "VALID", 1, "conv", nn.Conv2d(2, 4, 3, stride=2, bias=False)).findings
    assert finding.fix == "configure m with stride [1, 1], or correct the rules if the source has strides [2, 2]"


@pytest.mark.parametrize(
    ("norm", "epsilon"),
    [
        (nn.RMSNorm(4), 2**-23),
        (nn.RMSNorm(4, elementwise_affine=False), 2**-23),
        (nn.RMSNorm(4, dtype=torch.bfloat16), 2**-23),
        (nn.RMSNorm(4, dtype=torch.float64), 2**-52),
        (nn.RMSNorm(4, eps=1e-6), 1e-6),
        (nn.RMSNorm(4, eps=0), 0.0),
    ],
)
def test_the_epsilon_that_torch_takes_by_default(norm: nn.Module, epsilon: float) -> None:
    """`eps=None` is a machine epsilon; and the module computes with what is read."""
    (found,) = module_facts(nn.Sequential(norm)).values()
    assert found["epsilon"] == epsilon
    x = torch.tensor([[1e-3, -2e-3, 1e-4, 3e-3]], dtype=getattr(norm.weight, "dtype", torch.float32))
    want = x.double() / torch.sqrt((x.double() ** 2).mean(-1, keepdim=True) + epsilon)
    # In bfloat16 the normalized value is rounded, and its product with the weight: by 2**-9 each.
    torch.testing.assert_close(norm(x).double(), want, rtol=2**-8 if x.dtype == torch.bfloat16 else 1e-5, atol=0)


# ---- a recording


@pytest.mark.slow
def test_a_recording_keeps_what_cannot_be_computed_back(tmp_path: Path) -> None:
    """Kernels that were folded, and the vector beside them; and the check without the checkpoint finds a fault in them."""
    from convert.verify.recording.record import record

    rules, out = tmp_path / "rules.yaml", tmp_path / "out.safetensors"
    rules.write_text(OWN[NET].rules())
    convert.convert(convert.load_rules(rules), checkpoint_of(NET), out)
    plan = convert.plan_conversion(str(rules), checkpoint_of(NET))
    recorded = record(plan, reference(plan), tmp_path / "net.ref.safetensors", factory=OWN[NET].reference)
    report = check(out, recorded=recorded.out, model=str(rules), reference=OWN[NET].reference)
    verdicts = {level.level: level.verdict for level in report.levels}
    assert verdicts["weights"] is Verdict.PASSED and verdicts["model"] is Verdict.PASSED, report.to_dict()
