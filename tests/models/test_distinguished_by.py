"""Models of one tree are told apart by a file next to the checkpoint: T5X's LongT5 with local attention has the tree of T5 1.1."""

from __future__ import annotations

from pathlib import Path

import pytest

import convert
from support import t5x_cases
from support.memory_source import HEAD, rule_file

SAID = {"feed_forward_proj": "gated-gelu"}
LOCAL = "longt5_architecture.LongEncoderLayer:\n  attention_factory = @long_attention.EncoderLocalSelfAttention\n"
FULL = "network.T5Config:\n  mlp_activations = ('gelu', 'linear')  # no EncoderLocalSelfAttentions\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    t5x_cases.write("longt5-local", folder)
    return folder


@pytest.mark.parametrize("where", ["config.gin", "checkpoint_1000/config.gin"])
@pytest.mark.parametrize(
    ("text", "of", "refused"),
    [(LOCAL, "t5x-longt5-local", ["t5x-1.1", "t5x-mt5"]), (FULL, "t5x-1.1", ["t5x-longt5-local"])],
)
def test_the_file_of_the_run_tells(where: str, text: str, of: str, refused: list[str], run: Path) -> None:
    (run / where).write_text(text)
    try:
        for given in (run, run / "checkpoint_1000"):
            plan = convert.plan_conversion("t5x", given, settings=SAID)
            assert plan.rules.model == of and "same tree" not in str(plan.notes)
        for model in refused:
            with pytest.raises(convert.PlanError, match="EncoderLocalSelfAttention") as error:
                convert.plan_conversion(model, run, settings=SAID)
            (finding,) = error.value.findings
            assert finding.code == "config-conflict" and finding.path == str(run / where)
            assert finding.fix.startswith(f"name t5x in place of {model}")
    finally:
        (run / where).unlink()


def test_without_the_file_a_note_names_the_other_classes(run: Path) -> None:
    plan = convert.plan_conversion("t5x", run, settings=SAID)
    (note,) = plan.notes
    assert plan.rules.model == "t5x-1.1" and "LongT5ForConditionalGeneration may have the same tree" in note
    assert "no config.gin next to the checkpoint says which one it is" in note
    assert convert.plan_conversion("t5x-longt5-local", run, settings=SAID).notes == ()


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("{file: a.gin}", "one of `with` and `without`"),
        ("{file: a.gin, with: A, without: B}", "one of `with` and `without`"),
        ("{file: ../a.gin, with: A}", "a file name without a folder"),
    ],
)
def test_what_the_key_may_say(declared: str, said: str) -> None:
    with pytest.raises(convert.RuleError, match=said):
        rule_file("- from: w\n  parameter: p", f"{HEAD.rstrip()}\ndistinguished_by: {declared}\n")
