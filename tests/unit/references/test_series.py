"""The series of the references of TimesFM."""

from __future__ import annotations

import numpy as np
import pytest

from convert.references.timesfm.common import PATCHES, counted, series


@pytest.mark.parametrize("patches", [1, 2, 3, PATCHES])
def test_each_series_has_a_patch_without_padding_in_a_short_context_as_well(patches: int) -> None:
    values, padding = series(0, 8, slice(4, 7), patches)
    assert values.shape == padding.shape == (4, 8 * patches)
    whole = ~padding.reshape(4, patches, 8).any(-1)
    assert whole.any(1)[[0, 1, 3]].all() and counted(padding, 8).any(1).all()
    assert padding.any(1).tolist() == [False, patches > 1, True, False]
    assert np.isfinite(values).all()
