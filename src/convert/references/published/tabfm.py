"""TabFM."""

from __future__ import annotations

from convert.references.published.entry import Published

_TABFM = (
    Published(
        {
            "epsilon": 1e-6,
            "rope": "interleaved",
            "query_scale": "1.442695041 / sqrt(head width) * softplus(per_dim_scale)",
        },
        "tabfm 1.0.1 tabfm/src/jax/model.py",
    ),
)

MODELS: dict[str, tuple[Published, ...]] = {
    **dict.fromkeys(("tabfm-classification", "tabfm-regression"), _TABFM),
}  # fmt: skip
