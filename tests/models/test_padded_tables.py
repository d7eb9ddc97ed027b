"""Both tables of Gemma 3n and Gemma 4's small models may have rows beyond the vocabulary; what is written loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers

import convert
from support.gemma_drawn import ALL, settings
from support.memory_source import MemorySource


@pytest.mark.parametrize(
    ("case", "table"), [("gemma3n", "per_layer_input_embedding"), ("gemma4-e2b", "per_layer_embeddings")]
)
def test_a_padded_table_for_each_layer_has_its_rows_in_the_configuration(case: str, table: str, tmp_path: Path) -> None:
    leaves = dict(ALL.leaves(case))
    padded = [name for name in leaves if name.endswith(("embedder/input_embedding", f"embedder/{table}"))]
    assert len(padded) == 2
    rows = len(leaves[padded[0]])
    for name in padded:
        leaves[name] = np.concatenate([leaves[name], leaves[name][:3]])
    convert.convert("gemma", MemorySource(leaves), tmp_path / "out", settings=settings(case))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out").get_text_config()
    assert (config.vocab_size, config.vocab_size_per_layer_input) == (rows, rows + 3)
    model_class = getattr(transformers, config.architectures[0])
    _, report = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
