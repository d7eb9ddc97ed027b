"""Names of tensors in published files that transformers renames as it loads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from convert.core.errors import OptionError, PlanError
from convert.reversing.config_json import MODEL_TYPE
from convert.reversing.plan import ReversePlan
from convert.rules.file import RuleFile
from convert.writing.written import Written

_EVERY = (
    (r"LayerNorm\.gamma$", "LayerNorm.weight"),
    (r"LayerNorm\.beta$", "LayerNorm.bias"),
    (r"\.weight_g$", ".parametrizations.weight.original0"),
    (r"\.weight_v$", ".parametrizations.weight.original1"),
)
_IMAGES_AND_TEXT = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^(model\.)?vision_tower\.vision_model\.", "model.vision_tower."),
    (r"^multi_modal_projector\.", "model.multi_modal_projector."),
)
_DINOV2 = (
    (r"\.attention\.attention\.(q)uery\.", r".attention.\1_proj."),
    (r"\.attention\.attention\.(k)ey\.", r".attention.\1_proj."),
    (r"\.attention\.attention\.(v)alue\.", r".attention.\1_proj."),
    (r"\.attention\.output\.dense\.", ".attention.o_proj."),
)
# transformers 5.23, conversion_mapping.py: model_type -> what stands in published names, what its class has there
_OF_TYPE: dict[object, tuple[tuple[str, str], ...]] = {
    "gemma3": _IMAGES_AND_TEXT,
    "paligemma": _IMAGES_AND_TEXT,
    "dinov2": _DINOV2,
}


def forms_of(written: Written, candidates: Iterable[RuleFile]) -> tuple[Written, ...]:
    """Return the tensors as their files name them and, where that differs, as the class of transformers does.

    The class is that of ``config.json``; without one, those of the rules' targets.
    """
    templates = [target.config or {} for rules in candidates for target in rules.targets.values()]
    stated = (written.config or {}).get(MODEL_TYPE)
    types = [stated] if stated else [template.get(MODEL_TYPE) for template in templates]
    renames = dict.fromkeys(pair for one in types for pair in _OF_TYPE.get(one, ())) | dict.fromkeys(_EVERY)
    names = {name: _renamed(name, renames) for name in written.tensors}
    if all(name == new for name, new in names.items()) or len(set(names.values())) < len(names):
        return (written,)
    return written, replace(written, tensors={names[name]: entry for name, entry in written.tensors.items()})


def plan_any(forms: Sequence[Written], plan_for: Callable[[Written], ReversePlan]) -> ReversePlan:
    """Return the plan of the first of these forms that has one, with a note if its names are not those of the files.

    Raises:
        PlanError: none has; of several errors, the one that finds the tensors of the model, or fewer problems.
    """
    errors = []
    for form in forms:
        try:
            plan = plan_for(form)
        except OptionError:
            raise
        except PlanError as error:
            errors.append(error)
        else:
            changed = [f"{old} is {new}" for old, new in zip(forms[0].tensors, form.tensors, strict=True) if old != new]
            note = (
                f"transformers renames {len(changed)} of the tensors as it loads them: {changed[0]}" if changed else ""
            )
            return replace(plan, notes=(*plan.notes, *filter(None, [note])))
    raise min(errors, key=lambda error: (error.findings[0].code == "rules-of-another-model", len(error.findings)))


def _renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    for pattern, new in renames:
        name = re.sub(pattern, new, name)
    return name
