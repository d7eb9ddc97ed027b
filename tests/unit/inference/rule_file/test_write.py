"""A derivation becomes a rule file: its plan is the derivation again, in the words that a person would write."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from convert.cli.infer_text import hint, summary
from convert.drafting.axis_letters import Letters
from convert.drafting.like.target import TargetModel
from convert.inference.derivation import NOT_REACHED, Derivation, Difference, Grade, Tensor
from convert.inference.open_tensors import NOT_PROVEN
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from support.derived import derived
from support.paths import GOLDEN

GEMMA = {"vocab_size": 256, "context_length": 1024}
GEMMA2 = {**GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 12}
GEMMA3 = {**GEMMA2, "rope_factor_global": 1.0}
CASES = {
    "gpt2": ("gpt2", {}),
    "bert": ("bert", {}),
    "t5-v1.1": ("t5", {}),
    "whisper": ("whisper", {}),
    "llama": ("llama", {}),
    "recurrentgemma": ("recurrentgemma", {}),
    "gemma1-mqa": ("gemma", GEMMA),
    "gemma2-9b": ("gemma", GEMMA2),
    "gemma3": ("gemma", GEMMA3),
    "gemma3-stacked": ("gemma", GEMMA3),
    "timesfm-2.5": ("timesfm", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_plan_of_the_written_rules_is_the_derivation(case: str) -> None:
    model, settings = CASES[case]
    derivation, target = derived(model, GOLDEN / case / "ckpt", settings)
    written = write_rules(derivation, target)
    assert written.open == {}
    assert compare_rules(written.text, derivation) == []


def rules_of(text: str) -> dict[str, dict[str, str]]:
    """Target -> the lines of its rule."""
    found = {}
    for rule in text.split("rules:\n")[1].split("\n\n"):
        lines = dict(re.match(r"[- ] (\w+): (.*?)(?:    #.*)?$", line).groups() for line in rule.strip().splitlines())
        *said, (kind, target) = lines.items()
        found[target] = {"kind": kind, **dict(said)}
    return found


def test_the_words_are_those_that_a_person_writes() -> None:
    derivation, target = derived("gemma", GOLDEN / "gemma2-9b" / "ckpt", GEMMA2)
    rules = rules_of(write_rules(derivation, target).text)
    assert rules["model.layers.{i}.self_attn.{k,v}_proj"] == {
        "kind": "linear", "einsum": "...D,CKDH->...CKH", "from": "layer_{i}/attn/kv_einsum/w"
    }  # fmt: skip
    assert rules['{module: "model.layers.{i}.{input,post_attention,pre_feedforward,post_feedforward}_layernorm", multiplies_by: "1+weight"}'] == {
        "kind": "rms_norm", "from": "layer_{i}/{pre_attention,post_attention,pre_ffw,post_ffw}_norm/scale",
        "multiplies_by": "1+scale", "epsilon": "1e-6", "axes": "D",
    }  # fmt: skip
    assert len(rules) == 8, "as few as the shipped file has"


@pytest.mark.slow
def test_layers_that_are_stacked_in_units_are_numbered_by_two_digits() -> None:
    derivation, target = derived("gemma", GOLDEN / "gemma3-stacked" / "ckpt", GEMMA3)
    rules = rules_of(write_rules(derivation, target).text)
    rule = rules["model.layers.{i}.self_attn.o_proj"]
    assert (rule["stacked"], rule["index_from"]) == ("{j: 0}", "{i: [j, k]}")
    assert rule["from"] == "transformer/stacked_layers/attention_type_{k}/attn/attn_vec_einsum/w"


def test_two_stacks_of_layers_have_indices_of_their_own() -> None:
    derivation, target = derived("t5", GOLDEN / "t5-v1.1" / "ckpt", {})
    targets = rules_of(write_rules(derivation, target).text)
    letters = {re.search(r"\{([a-z])\}", name)[1]: name.split(".")[0] for name in targets if "block.{" in name}
    assert len(set(letters)) == 2 and set(letters.values()) == {"encoder", "decoder"}


def test_the_evidence_stands_beside_the_rule() -> None:
    derivation, target = derived("gpt2", GOLDEN / "gpt2" / "ckpt", {})
    text = write_rules(derivation, target).text
    assert "# derived: dot_general of block and mm of net; 2 other candidates refuted; the same in" in text


def small() -> tuple[Derivation, TargetModel]:
    return derived("gpt2", GOLDEN / "gpt2" / "ckpt", {})


def test_another_layout_than_the_derived_one_is_found() -> None:
    """The comparison can fail: one equation transposed, one leaf for another, one number of a layer."""
    derivation, target = small()
    text = write_rules(derivation, target).text
    assert "ln_{1,2}/scale" in text
    exchanged = compare_rules(text.replace("ln_{1,2}/scale", "ln_{2,1}/scale"), derivation)
    assert {found.tensor.rpartition("ln_")[2] for found in exchanged} == {"1.weight", "2.weight"}
    tensor = next(t for t in derivation.tensors if t.name.endswith("h.1.attn.c_proj.weight"))
    part = tensor.parts[0]
    moved = dataclasses.replace(part, positions=part.positions.reshape(tensor.shape).T.ravel())
    other = dataclasses.replace(tensor, parts=(moved,))
    changed = dataclasses.replace(derivation, tensors=tuple(other if t is tensor else t for t in derivation.tensors))
    assert [found.tensor for found in compare_rules(text, changed)] == [tensor.name]


def test_names_of_leaves_may_have_leading_zeros() -> None:
    derivation, target = small()

    def padded(name: str) -> str:
        return re.sub("[0-9]+", lambda found: found[0].zfill(2), name)

    def renamed(tensor: Tensor) -> Tensor:
        return dataclasses.replace(
            tensor, parts=tuple(dataclasses.replace(part, leaf=padded(part.leaf)) for part in tensor.parts)
        )

    changed = dataclasses.replace(
        derivation,
        tensors=tuple(map(renamed, derivation.tensors)),
        leaves={padded(name): shape for name, shape in derivation.leaves.items()},
        weights={padded(name): array for name, array in derivation.weights.items()},
        dropped=tuple(map(padded, derivation.dropped)),
    )
    text = write_rules(changed, target).text
    assert "ln_{01,02}/scale" in text
    assert compare_rules(text, changed) == []


def test_what_is_open_is_a_question_with_its_candidates() -> None:
    derivation, target = small()
    tensor = next(t for t in derivation.tensors if t.name.endswith("wpe.weight"))
    opened = Tensor(tensor.name, tensor.shape, Grade.OPEN, candidates=(tensor.parts[0].leaf,))
    changed = dataclasses.replace(derivation, tensors=tuple(opened if t is tensor else t for t in derivation.tensors))
    written = write_rules(changed, target)
    assert written.open == {tensor.name: "nothing was found that fits"}
    question = written.text.split("- from: transformer/wpe/embedding\n")[1]
    assert "parameter: ask    # question: which tensor of the target is made of it?" in question
    assert f"\n  # parameter: {tensor.name}\n" in question, "no remark denies what is offered"
    assert [found.tensor for found in compare_rules(written.decided, changed)] == [tensor.name]


def opened(derivation: Derivation, **others: Tensor) -> Derivation:
    """The derivation with other tensors in place of those whose names end so."""
    return dataclasses.replace(
        derivation,
        tensors=tuple(next((o for o in others.values() if o.name == t.name), t) for t in derivation.tensors),
    )


def question_of(leaf: str, text: str) -> str:
    return text.split(f"- from: {leaf}\n")[1].split("\n\n")[0]


def test_an_open_tensor_is_offered_where_its_nearest_leaf_is_and_the_remark_is_about_that_leaf() -> None:
    """Two tables of one size: the guess of one is an element of a stack that has no rule, the other is a candidate."""
    derivation, target = small()
    made = next(t for t in derivation.tensors if t.name.endswith("wpe.weight"))
    table = made.parts[0].leaf
    leaves = {**derivation.leaves, "other": made.shape, "stack": (2, *made.shape)}
    guess = dataclasses.replace(made.parts[0], leaf="stack")
    named = dataclasses.replace(made, grade=Grade.OPEN, guessed=True, parts=(guess,), candidates=("other", "stack"))
    changed = dataclasses.replace(opened(derivation, wpe=named), leaves=leaves)
    why = (
        "it is made of part 0 of the 2 along axis 0 of stack, as one layer of a stack; "
        "a rule makes the tensors of all 2 parts at once, and those of the others are open, of another kind, or have names that no pattern joins with these"
    )
    assert write_rules(changed, target).open == {made.name.removesuffix(".weight"): why}
    written = write_rules(where_it_ended(changed, made), target)
    assert written.open == {made.name.removesuffix(".weight"): NOT_PROVEN}
    said = "one part of axis 0; the nearest guess; the search ended before it was proven"
    assert f"\n  # parameter: {made.name}    # {said}" in question_of("stack", written.text)
    for leaf in ("other", table):
        assert "#   parameter" not in question_of(leaf, written.text), "the nearest leaf is another one"
        assert made.name not in question_of(leaf, written.text)


def where_it_ended(derivation: Derivation, tensor: Tensor) -> Derivation:
    """The derivation without a proof: the search ended where a tensor is used."""
    site = dataclasses.replace(tensor.parts[0].evidence.target, where="net.py:7")
    return dataclasses.replace(derivation, differences=(Difference(site, "it differs", shown=False),), proof=None)


def test_summary_and_file_say_the_same_of_a_part_that_a_tensor_may_be_made_of() -> None:
    """No guess was found, and its leaf or one part of a stack has its size: neither says that nothing fits."""
    derivation, target = small()
    made = next(t for t in derivation.tensors if t.name.endswith("wpe.weight"))
    leaves = {**derivation.leaves, "stack": (2, 3, *made.shape)}
    leaf = made.parts[0].leaf
    named = Tensor(made.name, made.shape, Grade.OPEN, candidates=("stack", leaf))
    changed = where_it_ended(dataclasses.replace(opened(derivation, wpe=named), leaves=leaves), made)
    written = write_rules(changed, target)
    lines = [line for line in summary(changed, written.open) if made.name in line]
    known = f"which nothing tells apart so far: one part of axes 0 and 1 of stack; {leaf}"
    assert lines == [f"open: {made.name}: may be made of any of 2 leaves or parts of leaves of its size, {known}"]
    offered = f"\n  # parameter: {made.name}"
    assert question_of("stack", written.text).rstrip().endswith(f"{offered}    # one part of axes 0 and 1")
    assert question_of(leaf, written.text).rstrip().endswith(offered)
    assert "nothing was found" not in written.text


def test_a_guess_without_words_is_said_to_be_a_guess() -> None:
    """Its elements come from two leaves in turns: which leaf is right is open, and its order is not what is the matter."""
    derivation, target = small()
    made = next(t for t in derivation.tensors if t.name.endswith("wpe.weight"))
    size, part = made.parts[0].elements.size, made.parts[0]
    parts = tuple(
        dataclasses.replace(
            part, leaf=leaf, elements=np.arange(k, size, 2), positions=np.random.default_rng(k).permutation(size)[::2]
        )
        for k, leaf in enumerate(("one", "two"))
    )
    named = dataclasses.replace(made, grade=Grade.OPEN, guessed=True, parts=parts, candidates=("one", "two"))
    leaves = {**derivation.leaves, "one": made.shape, "two": made.shape}
    changed = dataclasses.replace(opened(derivation, wpe=named), leaves=leaves)
    (why,) = write_rules(changed, target).open.values()
    assert why.startswith("its rows and its columns")
    written = write_rules(where_it_ended(changed, made), target)
    assert list(written.open.values()) == [NOT_PROVEN]
    said = f"# the nearest guess is made of one and two; {NOT_PROVEN}"
    assert all(question_of(leaf, written.text).rstrip().endswith(said) for leaf in ("one", "two"))


@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_offered_beside_what_was_not_reached_is_not_called_not_reached(stacked: bool) -> None:
    derivation, target = small()
    made = next(t for t in derivation.tensors if t.name.endswith("wpe.weight"))
    other = next(t for t in derivation.tensors if t.name.endswith("wte.weight"))
    site = dataclasses.replace(made.parts[0].evidence.target, where="net.py:7")
    leaf = "stack" if stacked else made.parts[0].leaf
    changed = dataclasses.replace(
        opened(
            derivation,
            wpe=Tensor(made.name, made.shape, Grade.OPEN, candidates=(leaf,)),
            wte=Tensor(other.name, made.shape, Grade.OPEN, not_reached=True),
        ),
        differences=(Difference(site, "it differs", shown=False),),
        proof=None,
        leaves=derivation.leaves | {"stack": (2, *made.shape)},
    )
    assert question_of(leaf, write_rules(changed, target).text).rstrip() == (
        "  parameter: ask    # question: which tensor of the target is made of it? It may also be one behind net.py:7, which is undecided\n"
        f"  # parameter: {made.name}{'    # one part of axis 0' if stacked else ''}"
    )


def test_the_file_says_where_it_fits_one_size_alone() -> None:
    letters = Letters()
    letters.named("width", 8)
    assert not letters.share_sizes
    letters.named("width", 8, 1)
    letters.fixed.add(letters.named("map", 5))
    letters.named("one", 1, 1)
    assert letters.share_sizes
    assert list(letters.declared())[:3] == [
        "D: {is: a width}    # 8 in this checkpoint",
        "C: {is: a width, equals: D}    # 8 in this checkpoint",
        "X: {is: size of a map that is flattened, equals: 5}    # 5 in this checkpoint; a model of another size needs its number here",
    ]
    derivation, target = small()
    text = write_rules(derivation, target).text
    said = "axes:    # axes of one kind and size are equal in these rules; for a model in which they differ, derive them from a pair in which they do\n"
    assert (said in text) is (re.search("equals: [A-Z]", text) is not None)


@pytest.mark.parametrize(
    ("shown", "of_the_question", "of_the_summary", "of_the_plan"),
    [
        (
            True,
            "behind the difference at net.py:7; correct it first",
            "behind the difference; correct it first",
            "the two programs differ at net.py:7: it differs; correct that",
        ),
        (
            False,
            "behind net.py:7, which is undecided",
            "behind that place",
            "`convert infer` does not know whether the two programs differ at net.py:7: it differs; write that place, or what follows it, in one way",
        ),
    ],
)
def test_behind_the_difference_nothing_is_offered(
    shown: bool, of_the_question: str, of_the_summary: str, of_the_plan: str
) -> None:
    derivation, target = small()
    tensors = [t for t in derivation.tensors if t.name.endswith(("wpe.weight", "ln_f.weight"))]
    opened = {t.name: Tensor(t.name, t.shape, Grade.OPEN, not_reached=True) for t in tensors}
    site = dataclasses.replace(tensors[0].parts[0].evidence.target, where="net.py:7")
    changed = dataclasses.replace(
        derivation,
        tensors=tuple(opened.get(t.name, t) for t in derivation.tensors),
        differences=(Difference(site, "it differs", shown=shown),),
        proof=None,
    )
    written = write_rules(changed, target)
    assert written.open.keys() >= opened.keys() and {written.open[name] for name in opened} == {NOT_REACHED}
    question = written.text.split("- from: transformer/wpe/embedding\n")[1].split("\n\n")[0]
    assert question.strip() == f"parameter: ask    # question: not reached: {of_the_question}"
    assert f'    "{of_the_plan}' in written.text
    lines = list(summary(changed, written.open))
    assert [line for line in lines if "wpe" in line or "not reached" in line] == [
        f"not reached: {len(opened)} tensors {of_the_summary}"
    ]
    assert lines[0].startswith("differs" if shown else "undecided") and (hint(changed) in lines) is not shown


def test_an_order_without_words_is_open() -> None:
    derivation, target = small()
    tensor = next(t for t in derivation.tensors if t.name.endswith("wpe.weight"))
    part = tensor.parts[0]
    mixed = dataclasses.replace(part, positions=np.random.default_rng(0).permutation(part.positions))
    changed = dataclasses.replace(
        derivation,
        tensors=tuple(dataclasses.replace(t, parts=(mixed,)) if t is tensor else t for t in derivation.tensors),
    )
    assert write_rules(changed, target).open == {tensor.name: "its elements lie in an order that has no name"}


@pytest.mark.slow
def test_arithmetic_of_norms_is_compared() -> None:
    derivation, target = derived("gemma", GOLDEN / "gemma2-9b" / "ckpt", GEMMA2)
    text = write_rules(derivation, target).text
    wrong = text.replace('multiplies_by: "1+weight"', "multiplies_by: weight")
    assert len(compare_rules(wrong, derivation)) == sum("norm" in t.name for t in derivation.tensors)


def test_the_remark_of_a_rule_has_all_grades_of_its_layers() -> None:
    derivation, target = small()
    changed = dataclasses.replace(
        derivation,
        tensors=tuple(
            dataclasses.replace(t, grade=Grade.INTERCHANGEABLE) if t.name.endswith("h.1.attn.c_proj.weight") else t
            for t in derivation.tensors
        ),
    )
    remarks = {rule.split("    # ")[1].split(":")[0] for rule in write_rules(changed, target).text.split("\n- ")[1:]}
    assert remarks == {"derived", "derived or interchangeable"}


def test_a_layer_of_a_stack_whose_others_are_open_has_no_rule_and_its_leaf_is_named() -> None:
    derivation, target = derived("gemma", GOLDEN / "gemma3-stacked" / "ckpt", GEMMA3)
    layer = next(t for t in derivation.tensors if t.name.endswith("layers.0.mlp.down_proj.weight"))
    leaf = layer.parts[0].leaf
    others = [t for t in derivation.tensors if t is not layer and any(part.leaf == leaf for part in t.parts)]
    count = derivation.leaves[leaf][0]
    assert count == len(others) + 1 > 1
    changed = dataclasses.replace(
        derivation,
        tensors=tuple(Tensor(t.name, t.shape, Grade.OPEN) if t in others else t for t in derivation.tensors),
    )
    why = write_rules(changed, target).open["model.layers.{l}.mlp.down_proj"]
    every = leaf.replace("attention_type_0", "attention_type_{l}")
    assert why == (
        f"it is made of part 0 of the {count} along axis 0 of {every}, as one layer of a stack; "
        f"a rule makes the tensors of all {count} parts at once, and those of the others are open, of another kind, or have names that no pattern joins with these"
    )
