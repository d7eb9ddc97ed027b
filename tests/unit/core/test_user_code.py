"""Errors of the user's code."""

from __future__ import annotations

import pytest

from convert.core.errors import UserCodeError
from convert.core.user_code import user_code_errors

LEAVES = [f"layer_{k}/kernel" for k in range(7)]


def said(name: str, leaves: list[str], inputs: list[str]) -> str:
    with pytest.raises(UserCodeError) as raised, user_code_errors("my_model:forward", "--jax ", leaves, inputs):
        raise KeyError(name)
    return str(raised.value.findings[0])


@pytest.mark.parametrize(
    ("name", "leaves", "inputs", "names"),
    [
        ("x", ["w"], ["z"], "the name of a leaf that the code is given (w) or of an input (z), got 'x'"),
        ("x", ["w"], [], "the name of a leaf that the code is given (w), got 'x'"),
        ("kernal", ["w", "kernel"], [], "the name of a leaf that the code is given (kernel, w), got 'kernal'"),
        ("x", LEAVES, [], f"the name of a leaf that the code is given ({', '.join(LEAVES[:5])} and 2 more), got 'x'"),
    ],
)
def test_a_name_that_the_code_is_not_given(name: str, leaves: list[str], inputs: list[str], names: str) -> None:
    """Nothing was named where no name is like it, as in `given ( and 1 more)`, and a wrong name of an input was taken for a leaf's."""
    assert f": expected {names}; correct your code there" in said(name, leaves, inputs)
