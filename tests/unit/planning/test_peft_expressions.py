"""Regular expressions of ``adapter_config.json``: those that people write are read, and none can cost more than a moment."""

from __future__ import annotations

import pytest

from convert.peft.selection import read_selection
from convert.planning.adapters.peft_config import SettingError, read_settings

# As Unsloth writes it (unsloth_zoo/peft_utils.py, `get_peft_regex`), and PEFT's documentation.
WRITTEN = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn)\.(?:(?:k_proj|v_proj|q_proj)))",
    r".*\.layers\.\d+\.(self_attn|mlp)\..*_proj",
    r"^model\.decoder\.layers\.(0|1)\.encoder_attn\.k_proj",
)


@pytest.mark.parametrize("pattern", WRITTEN)
def test_an_expression_that_people_write_is_read(pattern: str) -> None:
    assert read_selection({"target_modules": pattern}).targets == pattern
    if pattern is not WRITTEN[0]:
        assert read_settings({"alpha_pattern": {pattern: 3}}).alphas == {pattern: 3}


@pytest.mark.parametrize("pattern", [r"((a|b)*)*c", ".*" * 7, r"(x+x+)+y"])
@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "layers_pattern"])
def test_an_expression_that_costs_hours_is_refused(key: str, pattern: str) -> None:
    with pytest.raises(SettingError, match="at most 6 of"):
        read_selection({key: pattern})
