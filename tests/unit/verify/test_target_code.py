"""An error of the target's own code names the line of the model, and not that of PyTorch, which it called."""

from __future__ import annotations

import traceback

from convert.verify.sides.target_code import _place

MODEL = traceback.FrameSummary("/x/site-packages/transformers/models/gpt2/modeling_gpt2.py", 571, "forward", line="")
TORCH = traceback.FrameSummary("/x/site-packages/torch/_ops.py", 875, "__call__", line="")


def test_the_line_of_the_model_is_named() -> None:
    assert _place([MODEL, TORCH]) == "modeling_gpt2.py:571, in forward"


def test_without_one_the_last_line_is() -> None:
    assert _place([TORCH]) == "_ops.py:875, in __call__"
