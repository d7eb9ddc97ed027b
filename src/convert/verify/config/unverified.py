"""Settings that the comparison cannot verify, because no file of the checkpoint states them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert.planning.plan import Plan
from convert.planning.sidecar import sidecar_facts


def note_unverified(plan: Plan, stated: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the settings that only the user, the header or a recording states; empty when there are none.

    Both models compute with these settings, so a wrong value makes no difference between them.

    Args:
        stated: who states settings -> the settings; the first that names a setting is the one that was used.
    """
    known = sidecar_facts(plan.rules, plan.sidecar)
    groups: dict[str, list[str]] = {}
    for key, value in plan.settings.items():
        if key in known and known[key] == value:
            continue
        origin = next((origin for origin, settings in stated.items() if key in settings), "--set")
        groups.setdefault(origin, []).append(f"{key}={value}")
    if not groups:
        return ""
    listed = "; ".join(f"{', '.join(settings)} (from {origin})" for origin, settings in groups.items())
    return (
        f"not verified: {listed}. Both models use this value, so the comparison cannot detect an error in it. "
        "Compare it with the training config"
    )
