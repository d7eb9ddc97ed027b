"""Compare what the header of a file records about its conversion with the checkpoint and the rules of the check."""

from __future__ import annotations

import json
import re
from typing import Any

from convert.checkpoints.digest import PREFIX
from convert.core.findings import Finding
from convert.core.ops import Slice
from convert.core.option_text import set_option
from convert.planning.plan import Plan
from convert.writing.provenance import header_metadata
from convert.writing.written import Written

PROVENANCE = {  # key of the metadata -> what it records
    "rules_sha256": "rules",
    "target": "target",
    "dtype": "--dtype",
    "settings": "--set",
    "choices": "variants",
}
_DIGEST = re.compile(re.escape(PREFIX) + "[0-9a-f]{32}")


def check_provenance(plan: Plan, written: Written, digest: str, *, equal: bool) -> tuple[list[Finding], list[str]]:
    """Compare the checkpoint and the rules that the metadata records with those of the check.

    Files of other code record nothing. Changed rules that still make every tensor and every fact of the file are a note.

    Args:
        equal: whether all tensors equal those of the plan.

    Returns:
        Findings and notes.
    """
    recorded, current = written.metadata, header_metadata(plan)
    if "source_digest" not in recorded:
        return false_facts(plan, written), ["the file does not record its checkpoint"]
    findings = false_facts(plan, written)
    changed = {key for key in PROVENANCE if key in recorded and recorded[key] != current[key]}
    facts = [key for key in ("sizes", "facts", "layers") if key in recorded and recorded[key] != current[key]]
    same_source = recorded["source_digest"] == digest
    notes = []
    if changed == {"rules_sha256"} and equal and not facts and same_source:
        changed = set()
        notes.append("the text of the rules has changed since the conversion, but not what they make of the checkpoint")
    kept = _added(recorded.get("facts", "{}"), current["facts"]) is not None
    if "settings" in changed and equal and kept and (more := _added(recorded["settings"], current["settings"])):
        changed.discard("settings")
        notes.append(f"this check has more settings than the conversion ({more}); the tensors are the same")
    for key in (key for key in PROVENANCE if key in changed):
        also = f", and their {', '.join(facts)} differ" if key == "rules_sha256" and facts else ""
        findings.append(
            Finding(
                "provenance-differs",
                f"the file was converted with other {PROVENANCE[key]} than this check uses{also}",
                path=str(written.path),
                expected=current[key] or "none",
                got=recorded[key] or "none",
                fix="check with the same options, or convert again",
                data={"diagnosis": f"other {PROVENANCE[key]}"},
            )
        )
    if not same_source and changed & {"rules_sha256", "target", "choices"} and equal:
        notes.append("it is unknown whether the checkpoint is the same: other rules may use other leaves")
    elif not same_source and equal and _holds_all(plan) and _DIGEST.fullmatch(recorded["source_digest"]):
        notes.append(
            "the digest of the checkpoint in the header is not that of this checkpoint, although all tensors are made of its values: "
            "the checkpoint was stored in another way, or the header was changed"
        )
    elif not same_source:
        findings.insert(
            0,
            Finding(
                "provenance-differs",
                "the file was converted from another checkpoint or step, or the checkpoint has changed since",
                path=str(written.path),
                expected=f"the digest {digest}",
                got=recorded["source_digest"],
                fix="check against the checkpoint of the conversion, or convert again",
                data={"diagnosis": "another checkpoint"},
            ),
        )
    return findings, notes


def false_facts(plan: Plan, written: Written) -> list[Finding]:
    """Return a finding for each kind of fact that the metadata states otherwise than rules and checkpoint give it.

    Other rules, targets or settings, which give other facts, are findings of their own.
    """
    recorded, current = written.metadata, header_metadata(plan)
    if any(key in recorded and recorded[key] != current[key] for key in PROVENANCE if key != "settings"):
        return []
    return [
        Finding(
            "provenance-differs",
            f"the metadata states other {key} than the rules give for this checkpoint",
            path=str(written.path),
            expected=current[key],
            got=recorded[key],
            fix="convert again, or find out who changed the file",
            data={"diagnosis": f"other {key}"},
        )
        for key in ("sizes", "facts", "layers")
        if key in recorded and not _agrees(json.loads(current[key]), written.stated(key))
    ]


def _agrees(planned: Any, stated: Any) -> bool:
    """Whether everything that is stated is planned; older versions state less."""
    if isinstance(planned, dict) and isinstance(stated, dict):
        return all(key in planned and planned[key] == value for key, value in stated.items())
    if isinstance(planned, list) and isinstance(stated, list):
        return all(any(_agrees(layer, entry) for layer in planned) for entry in stated)
    return bool(planned == stated)


def _holds_all(plan: Plan) -> bool:
    """Whether the tensors determine every value of the leaves: none was rounded, computed or cut off."""
    return not any(
        step.loses or step.arithmetic or any(isinstance(op, Slice) for part in step.parts for op in part.ops)
        for step in plan.steps
    )


def _added(recorded: str, current: str) -> str | None:
    """Return the settings that `current` adds to `recorded`, both JSON; None when they contradict each other."""
    try:
        before, now = json.loads(recorded), json.loads(current)
        same = all(now[key] == value for key, value in before.items())
    except (ValueError, KeyError, AttributeError):
        return None
    return ", ".join(set_option(key, now[key]) for key in now if key not in before) if same else None
