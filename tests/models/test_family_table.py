"""The table of families in the documentation: it has every family that has a golden of these writers, and what a run measures."""

from __future__ import annotations

import pytest

from support import family_table

pytestmark = pytest.mark.slow

ROWS = {row["family"]: row for row in family_table.read()}
FAMILIES = {name: (writer, case) for name, writer, case in family_table.families()}
BOUNDS = {family_table.T5X: 1e-5, family_table.GEMMA: 5e-6, family_table.OPENPI: 5e-6, family_table.TUNIX: 1e-5}
BOUNDS[family_table.FLAXFORMER] = 1e-5
BOUNDS[family_table.DIFFUSERS] = 1e-5
BOUNDS[family_table.GEMMA_4] = 4e-5  # as far as JAX is from its own float64
BOUNDS |= dict.fromkeys(
    (f"gemma4-{size} with towers (gemma, with its masks, windows and norms)" for size in ("e2b", "e4b")),
    1e-4,  # 71 positions: JAX is 2.3e-5 from its own float64
)
BOUNDS |= dict.fromkeys(
    (name for name in ROWS if name.startswith("gemma4") and "MaxText" in name), 5e-5
)  # its scores are not divided
BOUNDS["qwen3-next (MaxText)"] = 1e-5  # MaxText is 4e-6 from its own float64
BOUNDS |= {"qwen3.5 (MaxText)": 2e-5, "deepseek3.2 (MaxText)": 4e-6}  # 1.2e-5, 1.2e-6
BOUNDS["qwen3.5-vision (MaxText, with its GELU in the mergers)"] = 6e-5  # 1.5e-5
BOUNDS |= {"pi0 (openpi), lerobot": 4e-5, "pi0.5 (openpi), lerobot": 2e-5}  # openpi is 3.1e-5 and 1.6e-5 from its own
ROUNDING = 1e-12  # in float64, of the deepest models
EXACT = {family_table.MAXTEXT: 1e-6}  # norms less 1, tables over sqrt(D) and queries times sqrt(H), rounded once


def bound(name: str) -> float:
    """Return how far a family may be off in float32."""
    return BOUNDS.get(name, BOUNDS.get(ROWS[name]["run by"], 2e-6))


def test_every_family_has_a_row() -> None:
    assert list(ROWS) == list(FAMILIES) and len(ROWS) >= 60
    for name, row in ROWS.items():
        assert (row["run by"], row["bytes by"]) == (FAMILIES[name][0], family_table.bytes_by(*FAMILIES[name]))
        assert 0 < float(row["error in float32"]) < bound(name), name
        if row["run by"] in (family_table.FLAX, family_table.DIFFUSERS):
            assert float(row["error in float32"]) <= max(2e-6, float(row["drift of JAX"])), name
        assert 0 < float(row["error in float64"]) < EXACT.get(row["run by"], 3e-7), name
        assert int(row["faults planted and named"]) >= 6, name


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_what_a_run_measures(name: str) -> None:
    """The errors are rounding errors: another processor may double them, or has more where the writer's bound allows it."""
    row = family_table.row(name, *FAMILIES[name])
    written = ROWS[name]
    assert row["faults planted and named"] == written["faults planted and named"]
    assert float(row["error in float32"]) < max(2 * float(written["error in float32"]), bound(name))
    assert row["drift of JAX"] == written["drift of JAX"]  # of numbers that were recorded
    assert float(row["error in float64"]) < max(2 * float(written["error in float64"]), ROUNDING)
