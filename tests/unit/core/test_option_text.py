"""A suggested option is taken by a shell, and the command line reads the value again."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from convert.cli.options import parse_settings
from convert.core.option_text import set_option


@pytest.mark.parametrize(
    "value", [1, 1e-6, True, None, [1, 106], ["full", "sliding"], "gated-gelu", "relu", "two words", "it's", "$HOME"]
)
def test_a_shell_and_the_command_line_read_the_value(value: Any) -> None:
    option, given = shlex.split(set_option("name", value))
    assert option == "--set" and parse_settings([given]) == {"name": value}


def test_what_needs_no_quotes_has_none() -> None:
    assert set_option("feed_forward_proj", "gated-gelu") == "--set feed_forward_proj=gated-gelu"
    assert set_option("eos_token_id", [1, 106]) == "--set 'eos_token_id=[1, 106]'"
