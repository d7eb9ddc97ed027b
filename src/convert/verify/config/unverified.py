"""What a check takes on trust: facts that no checkpoint says, from the file's header, a recording or the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert.planning.plan import Plan
from convert.planning.sidecar import facts_beside


def on_trust(plan: Plan, said: Mapping[str, Mapping[str, Any]]) -> str:
    """A note that names the settings which nothing beside the weights bears out; empty when there are none.

    Both models compute with them, so that a wrong one makes no difference.

    Args:
        said: who says settings, in words, and which; the first one that names a setting is the one who was believed.
    """
    known = facts_beside(plan.rules, plan.sidecar)
    groups: dict[str, list[str]] = {}
    for key, value in plan.settings.items():
        if key in known and known[key] == value:
            continue
        who = next((who for who, settings in said.items() if key in settings), "--set")
        groups.setdefault(who, []).append(f"{key} = {value}")
    if not groups:
        return ""
    listed = "; ".join(f"{who} says {', '.join(words)}" for who, words in groups.items())
    return (
        f"taken on trust, as the checkpoint does not say it: {listed}. Both models compute with this, so a wrong value would "
        "not show: compare it with what the model was trained with"
    )
