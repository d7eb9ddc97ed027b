"""The check of files for Burn: what runs without Burn passes, what needs it is skipped with the reason, planted faults are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import convert
from convert import ConvertError
from convert.planning.target_formats.burn.format import BURN, LAYOUT
from convert.planning.target_formats.burn.modules import COMMIT
from convert.verify.report.report import Report, Verdict
from convert.verify.run import check
from support import burn_modules as burn
from support.cell_trees import LIVE
from support.command_line import Run
from support.paths import GOLDEN

TIMESFM = GOLDEN / "timesfm-2.5"
RULES = """
model: own
title: My model
targets: {torch: {loads: Mine}}
rules:
- {einsum: "...D,DE->...E", from: d/kernel, bias: d/bias, linear: d}
- {einsum: "...E,ENH->...NH", from: "{q,k,v}/kernel", linear: qkv}
- {from: n/scale, bias: n/bias, multiplies_by: 1+scale, epsilon: 1e-6, layer_norm: n}
- attention: at
  layer: flax.linen.MultiHeadDotProductAttention
  from: at
  axes: EMK
- {dimension_numbers: "NHWC,HWIO->NHWC", axes: PQIO, from: c/kernel, bias: c/bias, padding: SAME, strides: 2, conv: c}
- {dimension_numbers: "NWC,WIO->NWC", axes: WCO, from: t/kernel, padding: VALID, conv_transpose: t}
- {from: bn/scale, multiplies_by: scale, epsilon: 1e-5, mean: bn/mean, var: bn/var, batch_norm: bn}
- {from: gn/scale, multiplies_by: scale, epsilon: 1e-6, num_groups: 2, group_norm: gn}
- {from: e, embedding: e}
- {einsum: "...D,DUV->...UV", from: r/kernel, rope: {V: half-split}, linear: r}
- {rnn: rnn, cell: flax.linen.SimpleCell, from: rnn}
- {gru: enc, cell: haiku.GRU, from: gru}
- lstm: {module: dec, direction: "{forward,backward}"}
  cell: haiku.LSTM
  from: lstm/{forward,backward}
""".lstrip()
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32; the matrices are square where they can be, so that shapes catch little."""
    rng = np.random.default_rng(5)
    shapes = {"d/kernel": (6, 6), "d/bias": (6,), "n/scale": (6,), "n/bias": (6,), "at/out/kernel": (2, 3, 6), "at/out/bias": (6,)}  # fmt: skip
    shapes |= {f"{k}/kernel": (6, 3, 2) for k in "qkv"}
    for name in ("query", "key", "value"):
        shapes |= {f"at/{name}/kernel": (6, 2, 3), f"at/{name}/bias": (2, 3)}
    shapes |= {"c/kernel": (3, 2, 4, 5), "c/bias": (5,), "t/kernel": (3, 4, 5), "e": (7, 3), "r/kernel": (6, 3, 4)}
    shapes |= {
        "bn/scale": (6,),
        "bn/mean": (6,),
        "gn/scale": (6,),
        "rnn/i/kernel": (3, 5),
        "rnn/i/bias": (5,),
        "rnn/h/kernel": (5, 5),
    }
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays["bn/var"] = rng.uniform(0.5, 2, 6)
    arrays |= {f"gru/{k}": v for k, v in LIVE["haiku.GRU"][1]()[0].items()}
    for direction in ("forward", "backward"):
        arrays |= {f"lstm/{direction}/{name}": rng.permuted(v) for name, v in LIVE["haiku.LSTM"][1]()[0].items()}
    folder = tmp_path_factory.mktemp("burn")
    np.savez(folder / "ckpt.npz", **{k: v.astype(np.float32) for k, v in arrays.items()})
    (folder / "rules.yaml").write_text(RULES)
    return folder / "ckpt.npz"


def made(ckpt: Path, out: Path, to: str = "burn") -> Path:
    convert.convert(str(ckpt.parent / "rules.yaml"), ckpt, out, to=to)
    return out


def report_of(out: Path, ckpt: Path, **more: object) -> Report:
    return check(out, ckpt, model=str(ckpt.parent / "rules.yaml"), **more)  # type: ignore[arg-type]


def verdicts(report: Report) -> dict[str, Verdict]:
    return {level.level: level.verdict for level in report.levels}


@pytest.mark.slow
def test_what_runs_without_burn_passes_and_the_rest_is_skipped(ckpt: Path, tmp_path: Path) -> None:
    report = report_of(made(ckpt, tmp_path / "out.safetensors"), ckpt)
    passed = dict.fromkeys(("coverage", "weights", "layers"), Verdict.PASSED)
    assert verdicts(report) == {**passed, "model": Verdict.SKIPPED}, report.to_dict()
    levels = {level.level: level for level in report.levels}
    assert levels["model"].reason == BURN.not_run and BURN.run_as_torch in levels["layers"].notes
    names = {measure.name for measure in levels["layers"].measures}
    assert {
        "enc (l0)",
        "rnn (l0)",
        "n.weight",
        "c.weight",
        "t.weight",
        "bn.weight",
        "gn.weight",
        "r.weight",
    } <= names and any(name.startswith("dec (l0") for name in names)  # custom cells included
    assert report.exit_code == 0
    assert report_of(tmp_path / "out.safetensors", ckpt, require=("model",)).exit_code == 2  # a skip is no pass


def exchanged(a: str, b: str) -> Callable[[Tensors], None]:
    def change(file: Tensors) -> None:
        file[a], file[b] = file[b], file[a]

    return change


def turned(name: str) -> Callable[[Tensors], None]:
    def change(file: Tensors) -> None:
        file[name] = np.ascontiguousarray(file[name].T)

    return change


def shifted(name: str, value: float) -> Callable[[Tensors], None]:
    def change(file: Tensors) -> None:
        file[name] = file[name] + np.float32(value)

    return change


def negated(name: str) -> Callable[[Tensors], None]:
    def change(file: Tensors) -> None:
        file[name] = -file[name]

    return change


def torchs_names(file: Tensors) -> None:
    file["n.weight"], file["n.bias"] = file.pop("n.gamma"), file.pop("n.beta")


def columns(file: Tensors) -> None:
    q, k, v = np.split(file["qkv.weight"], 3, 1)
    file["qkv.weight"] = np.concatenate([k, q, v], 1)


def halves_left(file: Tensors) -> None:
    """The source's pairs, (0, H/2): what a target for PyTorch wants."""
    file["r.weight"] = np.ascontiguousarray(file["r.weight"].reshape(6, 3, 2, 2).swapaxes(2, 3).reshape(6, 12))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (turned("d.weight"), "transposed"),
        (turned("at.output.weight"), "transposed"),
        (turned("dec.forward.cell_gate.hidden_transform.weight"), "transposed"),
        (shifted("n.gamma", -1), "1+scale missing"),
        (shifted("n.gamma", 1), "1+scale doubled"),
        (halves_left, "RoPE pairs de-interleaved needlessly"),
        (shifted("gn.beta", 1), "bias that the source does not add"),
        (columns, "fused parts in another order"),
        (exchanged("at.query.weight", "at.key.weight"), "of another tensor"),
        (exchanged("enc.update_gate.input_transform.weight", "enc.reset_gate.input_transform.weight"), "gates in another order"),
        (exchanged("dec.forward.input_gate.input_transform.bias", "dec.reverse.input_gate.input_transform.bias"), "of another tensor"),
        (negated("enc.update_gate.hidden_transform.weight"), "update gate polarity"),
        (shifted("dec.reverse.forget_gate.input_transform.bias", -1), "forget bias missing"),
        (shifted("dec.forward.forget_gate.input_transform.bias", 1), "forget bias added twice"),
        (torchs_names, "not in the file"),
    ],
)  # fmt: skip
def test_planted_faults_are_caught_and_named(ckpt: Path, tmp_path: Path, change: Callable[[Tensors], None], said: str) -> None:  # fmt: skip
    out = made(ckpt, tmp_path / "out.safetensors")
    with safe_open(out, "numpy") as file:
        metadata = file.metadata()
    tensors = load_file(out)
    change(tensors)
    save_file(tensors, out, metadata)
    report = report_of(out, ckpt, levels=("coverage", "weights"))
    findings = [finding for level in report.levels for finding in level.findings]
    assert report.exit_code == 1 and said in {f.data.get("diagnosis") for f in findings}, [str(f) for f in findings]


@pytest.mark.slow
def test_a_derivation_that_is_wrong_fails_the_layers(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights level goes by the plan; that gates belong elsewhere shows when they are run."""
    from convert.layers.recurrent import compile as recurrent

    original = recurrent._arithmetic
    monkeypatch.setattr(recurrent, "_arithmetic", lambda *a: (*original(*a), recurrent.Multiply(-1.0)))
    report = report_of(made(ckpt, tmp_path / "out.safetensors"), ckpt)
    assert (verdicts(report)["weights"], verdicts(report)["layers"]) == (Verdict.PASSED, Verdict.FAILED)


def test_the_header_says_how_the_file_is_laid_out_and_what_no_weight_tells(ckpt: Path, tmp_path: Path) -> None:
    def header(to: str) -> dict[str, str]:
        with safe_open(made(ckpt, tmp_path / f"{to}.safetensors", to), "numpy") as file:
            return dict(file.metadata())

    native, torch = header("burn"), made(ckpt, tmp_path / "mine", "burn")
    assert native["format"] == "safetensors"  # as burn-store writes: it is not PyTorch's layout
    assert native["layout"] == LAYOUT and COMMIT in LAYOUT and "not run" in LAYOUT
    layers = {layer["layer"]: layer.get("burn") for layer in json.loads(native["layers"])}
    assert layers["n"] == "LayerNormConfig::new(..).with_epsilon(1e-06)"
    assert layers["enc.l0"] == "GruConfig::new(.., true).with_reset_after(false)"
    assert layers["dec.l0{,_reverse}"] == "BiLstmConfig::new(.., true)"
    card = (torch / "README.md").read_text()
    assert 'SafetensorsStore::from_file("path/of/this/directory/model.safetensors");' in card
    assert "- `enc`: `GruConfig::new(.., true).with_reset_after(false)`" in card and f"| Layout | {LAYOUT} |" in card
    assert "- in Burn n is LayerNormConfig::new(..).with_epsilon(1e-06): the defaults compute something else" in card


def test_burn_store_reads_one_file(ckpt: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "shards"
    _, err = run(ckpt.parent / "rules.yaml", ckpt, out, "--to", "burn", "--max-shard-size", "1KB", code=2)
    assert f"{out}: {BURN.one_file}" in err and "expected 1 file" in err and not out.exists()


def test_a_shipped_model_and_the_command_line(tmp_path: Path, run: Run) -> None:
    """TimesFM 2.5, its fused projections as columns: streamed to the file, and the file is the other one by the adapter."""
    native, ordinary = tmp_path / "burn.safetensors", tmp_path / "torch.safetensors"
    _, err = run("timesfm", TIMESFM, native, "--to", "burn")
    assert (
        "note: in Burn stacked_xf.{i}.attn.{query,key}_ln, " in err
        and "are RmsNormConfig::new(..).with_epsilon(1e-06): the defaults" in err
    )
    assert "for Burn: burn-store's SafetensorsStore, without an adapter; modules called as in timesfm 3.0" in err
    run("timesfm", TIMESFM, ordinary)
    tensors, theirs = load_file(native), load_file(ordinary)
    types = {}
    for name, tensor in theirs.items():
        module, _, parameter = name.rpartition(".")
        norm = "_ln" in module
        types[module] = (
            "RmsNorm" if norm else "Linear" if tensor.ndim == 2 or module in types else types.get(module, "")
        )
        assert parameter in ("weight", "bias", "scale", "query_ln", "key_ln", "per_dim_scale")
    plain = {name.replace("_ln.scale", "_ln.weight"): tensor for name, tensor in theirs.items()}
    brought = burn.adapted(plain, types, burn.TO_BURN)
    assert brought.keys() == tensors.keys() and all(np.array_equal(brought[name], tensors[name]) for name in tensors)
    out, _ = run("check", native, "--from", TIMESFM, "--level", "coverage", "--level", "weights")
    assert "equal, as far as coverage, weights can tell" in out
    out, _ = run("plan", "timesfm", TIMESFM, "--to", "burn")
    assert "columns 0:32" in out and "-> burn: Burn: burn-store's SafetensorsStore, without an adapter" in out


def test_a_reference_cannot_run_burn(ckpt: Path, tmp_path: Path) -> None:
    out = made(ckpt, tmp_path / "out.safetensors")
    with pytest.raises(ConvertError, match="Burn, which is not run here"):
        report_of(out, ckpt, reference="support.cell_model:reference")
