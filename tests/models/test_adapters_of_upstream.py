"""LoRA pairs that Tunix's and MaxText's own code made, saved with the model or alone (`--lora`), and what their models computed with them.

tests/golden/make_tunix_lora.py and make_maxtext_lora.py wrote the checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import convert
from convert.checkpoints import Source
from convert.numerics.lift_torch import lifted
from convert.planning.adapters.joined import joined
from convert.verify.run import check
from convert.writing.written import open_written
from support import maxtext, tunix
from support.command_line import Run
from support.goldens import relative_error
from support.memory_source import MemorySource
from support.paths import GOLDEN
from support.value_mistakes import replace_tensors

pytestmark = pytest.mark.slow

ROOT = GOLDEN / "adapters"
# case: its rules, the settings that it needs without LoRA, and the largest error: MaxText recorded float32 alone
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "tunix-gemma3": ("tunix-gemma3", tunix.SET, 2e-6),
    "maxtext-llama3.1": ("maxtext-llama3.1", maxtext.settings("llama3.1"), 2e-6),
    "maxtext-gemma3-unscanned": ("maxtext-gemma3", maxtext.settings("gemma3-unscanned"), 2e-6),
}
STATED = {case for case in CASES if case.startswith("maxtext")}  # MaxText writes alpha beside the pairs, Tunix does not


def said(case: str) -> dict[str, Any]:
    """The settings for the pairs alone."""
    return CASES[case][1] | ({} if case in STATED else {"lora_alpha": 5.0})


def base(case: str) -> Path:
    return ROOT / case / "base"


def pairs(case: str) -> Path:
    return ROOT / case / "pairs"


def tensors(out: Path) -> dict[str, np.ndarray]:
    return load_file(out / "model.safetensors")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def out(case: str, tmp_path: Path) -> Path:
    convert.convert(CASES[case][0], base(case), tmp_path / "out", settings=said(case), lora=pairs(case))
    return tmp_path / "out"


def test_transformers_computes_what_the_model_with_the_pairs_did(case: str, out: Path) -> None:
    from transformers import AutoModelForCausalLM

    io = dict(np.load(ROOT / case / "io.npz"))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad(), lifted():
        logits = model.double()(torch.tensor(io["tokens"]).long()).logits.numpy()
    assert relative_error(logits, io.get("logits64", io["logits"])) < CASES[case][2]


def test_the_whole_tree_gives_the_same_file(case: str, out: Path, tmp_path: Path) -> None:
    model, settings, _ = CASES[case]
    whole = convert.convert(model, ROOT / case / "whole", tmp_path / "whole", settings=settings | {"lora_alpha": 5.0})
    first, second = tensors(out), tensors(tmp_path / "whole")
    assert first.keys() == second.keys() and all(first[name].tobytes() == second[name].tobytes() for name in first)
    headers = [open_written(folder).metadata for folder in (out, tmp_path / "whole")]
    assert headers[0]["source_digest"] == headers[1]["source_digest"] == whole.source_digest
    assert headers[0]["source_format"] == "; LoRA pairs: ".join([headers[1]["source_format"]] * 2)
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(model, ROOT / case / "whole", settings=settings)
    assert {finding.code for finding in refused.value.findings} == {"adapter-scale-unknown"}


def test_maxtexts_own_converter_merges_the_same(tmp_path: Path) -> None:
    """But for the rounding of its merge, and for its table (test_maxtext_goldens.py). It cannot merge stacked layers."""
    case = "maxtext-gemma3-unscanned"
    peer = json.loads((ROOT / case / "peer.json").read_text())
    convert.convert(CASES[case][0], base(case), tmp_path / "base", settings=CASES[case][1])
    convert.convert(CASES[case][0], base(case), tmp_path / "out", settings=said(case), lora=pairs(case))
    ours, alone = maxtext.digests(tmp_path / "out"), maxtext.digests(tmp_path / "base")
    theirs = {name.replace("model.language_model.", "model."): made for name, made in peer.items()}
    assert ours.keys() == theirs.keys() and all(ours[name][0] == theirs[name][0] for name in ours)
    merged = {name for name in ours if ours[name] != alone[name]}
    assert len(merged) == 49 and not any(theirs[name] == alone[name] for name in merged)
    assert {name for name in ours if ours[name] != theirs[name]} - merged == {"model.embed_tokens.weight"}
    assert "does not match" in json.loads((ROOT / "maxtext-llama3.1" / "peer.json").read_text())["error"]


def test_the_check_passes_and_asks_for_the_pairs(case: str, out: Path) -> None:
    levels = ("coverage", "weights", "layers")
    report = check(out, base(case), lora=pairs(case), levels=levels)
    assert [level.verdict.value for level in report.levels] == ["passed"] * 3
    with pytest.raises(convert.ConvertError, match="--lora"):
        check(out, base(case), levels=levels)


def exchanged(leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A and B in each other's place, turned, where the sizes allow it."""
    made = dict(leaves)
    for first, a in leaves.items():
        second = first.replace("_lora_a", "_lora_b")
        b = leaves[second]
        if first != second and a.size == b.size:
            stacked = b.ndim == a.ndim == 3  # (inputs, layers, rank) and (rank, layers, outputs)
            made[first] = b.T if stacked else np.moveaxis(b, 0, -1).reshape(a.shape)
            made[second] = a.T if stacked else np.moveaxis(a, -1, 0).reshape(b.shape)
    return made


def without_one(leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    gone = next(name for name in leaves if "_lora_a" in name)
    return {name: x for name, x in leaves.items() if name not in (gone, gone.replace("_lora_a", "_lora_b"))}


def of_another_layer(leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Layers 0 and 1 exchange their pairs; stacked layers, of which axis 1 has the numbers, move by one."""
    if any("/layers/self_attention" in name for name in leaves):
        return {name: np.ascontiguousarray(np.roll(x, 1, 1)) if x.ndim == 3 else x for name, x in leaves.items()}
    words = {"layers/0/": "layers/1/", "layers/1/": "layers/0/", "layers_0/": "layers_1/", "layers_1/": "layers_0/"}

    def moved(name: str) -> str:
        found = next((word for word in words if word in name), None)
        return name if found is None else name.replace(found, words[found])

    return {moved(name): x for name, x in leaves.items()}


FAULTS: dict[str, tuple[Any, dict[str, Any], str]] = {  # what is done to the pairs, settings, what the check calls it
    "exchanged": (exchanged, {}, "leaves A and B of the pair exchanged"),
    "alpha missing": (dict, {"lora_alpha": "rank"}, "the product without its scale"),
    "one pair lost": (without_one, {}, "the weight alone"),
    "of another layer": (of_another_layer, {}, "added to this weight"),
    "scale doubled": (dict, {"lora_alpha": 10.0}, "the product added twice"),
    "not divided by the rank": (dict, {"lora_alpha": 15.0}, "the scale not divided by the rank"),
    "subtracted": (dict, {"lora_alpha": -5.0}, "the weight without the product"),
    "not merged": (None, {}, "the weight alone"),
}  # fmt: skip


NAMED = [
    (case, fault) for case in CASES for fault in FAULTS if (case, fault) != ("maxtext-gemma3-unscanned", "exchanged")
]  # no two sizes are equal there


@pytest.mark.parametrize(("case", "fault"), NAMED)
def test_a_planted_fault_is_named(case: str, fault: str, out: Path, tmp_path: Path) -> None:
    change, settings, name = FAULTS[fault]
    source: Source = convert.open_source(base(case))
    if change is None:
        wrong, settings = source, CASES[case][1]
    else:
        adapter = convert.open_source(pairs(case))
        wrong = joined(source, MemorySource(change({leaf: adapter.read(leaf) for leaf in adapter.leaves})))
        settings = said(case) | {"lora_alpha": 5.0} | settings
    convert.convert(CASES[case][0], wrong, tmp_path / "wrong", settings=settings)
    right, made = tensors(out), tensors(tmp_path / "wrong")
    differ = {key: x for key, x in made.items() if x.tobytes() != right[key].tobytes()}
    if fault == "one pair lost":
        assert 1 <= len(differ) < 4
    assert differ
    replace_tensors(out, differ)
    report = check(out, base(case), lora=pairs(case), levels=("weights",))
    assert name in " ".join(str(finding) for finding in report.levels[0].findings)


def test_an_adapter_for_peft_reads_no_weight_of_the_base(case: str, tmp_path: Path) -> None:
    model, settings, _ = CASES[case]

    class Unread(type(convert.open_source(base(case)))):  # type: ignore[misc]
        def __init__(self, stored: Source) -> None:
            self.__dict__.update(stored.__dict__)

        def read(self, name: str) -> np.ndarray:
            raise AssertionError(name)

        pieces = chunks = read_box = read

    convert.convert_adapter(model, Unread(convert.open_source(base(case))), tmp_path / "peft", settings=said(case), lora=pairs(case))  # fmt: skip
    convert.convert_adapter(model, ROOT / case / "whole", tmp_path / "whole", settings=settings | {"lora_alpha": 5.0})
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "whole"))
    assert first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
    one, two = (tmp_path / name / "adapter_config.json" for name in ("peft", "whole"))
    assert one.read_text() == two.read_text()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_computes_what_the_model_with_the_pairs_did(case: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, settings, bound = CASES[case]
    convert.convert(model, base(case), tmp_path / "base", settings=settings)
    convert.convert_adapter(model, base(case), tmp_path / "peft", settings=said(case), lora=pairs(case))
    io = dict(np.load(ROOT / case / "io.npz"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, attn_implementation="eager")
    adapted = PeftModel.from_pretrained(loaded, str(tmp_path / "peft")).eval().double()
    with torch.no_grad(), lifted():
        logits = adapted(torch.tensor(io["tokens"]).long()).logits.numpy()
    assert relative_error(logits, io.get("logits64", io["logits"])) < bound


def test_from_the_command_line(case: str, out: Path, tmp_path: Path, run: Run) -> None:
    words = [word for key, value in said(case).items() for word in ("--set", f"{key}={json.dumps(value)}")]
    run(CASES[case][0], base(case), tmp_path / "again", "--lora", pairs(case), *words)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    said_of_both, _ = run("diff", out, base(case), "--model", CASES[case][0], "--lora", pairs(case), *words)
    assert "equal" in said_of_both
    _, error = run(CASES[case][0], pairs(case), tmp_path / "alone", *words, code=2)
    assert "adapter-alone" in error and "--lora" in error
    _, error = run(CASES[case][0], pairs(case), tmp_path / "alone", "--adapter", "peft", *words, code=2)
    assert "adapter-alone" in error and "--lora, also for --adapter peft" in " ".join(error.split())
    _, error = run(CASES[case][0], base(case), pairs(case) / "out", "--lora", pairs(case), *words, code=2)
    assert "output-within-input" in error


@pytest.mark.parametrize(("there", "gone"), ["ab", "ba"])
def test_half_a_pair_is_refused_with_the_path_of_the_other_half(case: str, there: str, gone: str) -> None:
    stored = convert.open_source(ROOT / case / "whole")
    half = next(name for name in stored.leaves if name.removesuffix("/value").endswith(f"_lora_{there}"))
    missing = half.replace(f"_lora_{there}", f"_lora_{gone}")
    tree = MemorySource({name: stored.read(name) for name in stored.leaves if name != missing})
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(CASES[case][0], tree, settings=CASES[case][1] | {"lora_alpha": 5.0})
    (finding,) = refused.value.findings
    assert finding.code == "adapter-dropped" and finding.path == half and missing in finding.expected


def test_an_alpha_that_the_checkpoint_states_otherwise_is_named() -> None:
    case = "maxtext-llama3.1"
    plan = convert.plan_conversion(case, base(case), lora=pairs(case), settings=CASES[case][1] | {"lora_alpha": 7.0})
    assert any("alpha 7 (--set lora_alpha; _CHECKPOINT_METADATA states 5)" in str(note) for note in plan.notes)
