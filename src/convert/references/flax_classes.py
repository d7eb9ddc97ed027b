"""The class of transformers 5 that has the place of any flax class of transformers 4.

Both versions cannot be installed together, so that the values of the flax class come from a recording.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from convert.planning.modules.expand import class_table
from convert.planning.plan import Plan
from convert.references.loading import class_of, config_of, on, ready
from convert.references.module_facts import facts
from convert.references.plan_facts import not_installed
from convert.references.protocol import Reference

if TYPE_CHECKING:
    import torch

INSTALL = "pip install 'transformers>=5.23'"


def reference(plan: Plan) -> Reference:
    """Return the PyTorch model of the checkpoint's class; inputs and JAX's values are those of a recording."""
    name, model_type = class_of(plan)
    entry = class_table(plan.rules)["classes"][name]
    widths = [step.spec.shape[-1] for step in plan.steps if len(step.spec.shape) > 1]
    outputs = tuple(entry["outputs"])
    return Reference(
        inputs=lambda seed: {},
        build=partial(build_class, name, model_type, plan),
        run=partial(run_class, outputs),
        outputs=outputs,
        logits=tuple(output for output in outputs if output == "logits"),
        reduction=max(widths, default=1),
        facts=published_facts,
        places=places,
        depth=max((size for index, size in plan.sizes.items() if len(index) == 1 and index.islower()), default=1),
    )


def build_class(name: str, model_type: str, plan: Plan, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Build the class with these weights as `from_pretrained` does: transformers 5 renames some as it loads.

    Raises:
        UnavailableError: transformers is not installed.
        RuntimeError: the weights do not belong to this class.
    """
    try:
        import transformers
    except ImportError as error:
        raise not_installed("transformers", error, INSTALL) from error
    config = transformers.AutoConfig.for_model(model_type, **config_of(plan))
    if next(iter(weights.values())).is_meta:
        return _empty(getattr(transformers, name), config, weights)
    floating = [x.dtype for x in weights.values() if x.is_floating_point()]
    with _quiet():
        module, info = getattr(transformers, name).from_pretrained(
            None, config=config, state_dict=dict(weights), dtype=floating[0], attn_implementation="eager", output_loading_info=True
        )  # fmt: skip
    unfit = {kind: sorted(map(str, info[kind])) for kind in ("unexpected_keys", "mismatched_keys") if info[kind]}
    if unfit:
        raise RuntimeError(f"the weights are not those of {name}: {unfit}")
    built: torch.nn.Module = module.requires_grad_(False).eval()
    return built


def places(module: Any) -> dict[str, str]:
    """Return the name of each published tensor, which is not always that in its module -> its name in the module."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    own = list(module.state_dict())
    numbered = {name: torch.full((1,), float(k)) for k, name in enumerate(own)}
    return {name: own[int(k.item())] for name, k in revert_weight_conversion(module, numbered).items()}


def published_facts(module: Any) -> dict[str, Mapping[str, Any]]:
    """Return the facts of a class by the names of its published tensors."""
    published = {own: name for name, own in places(module).items()}
    return {
        published.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight"): values
        for name, values in facts(module).items()
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Show neither the progress of loading nor the tables that the class computes by itself."""
    from transformers.utils import logging

    before, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _empty(cls: Any, config: Any, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Build the class on the meta device, where `from_pretrained` does not, and compare the names that it would load.

    Raises:
        RuntimeError: the weights do not belong to this class.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Transpose, WeightRenaming, rename_source_key, revert_weight_conversion

    module = cls(config).eval()
    own = module.state_dict()
    reverted = revert_weight_conversion(
        module, dict(own)
    )  # fused tensors by the names of their parts, as files have them
    changes = get_model_conversion_mapping(module)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    exchanged = [  # axes that it exchanges where the shape of a tensor is not that of the class
        (name, op)
        for change in changes
        for op in getattr(change, "operations", ())
        for name in change.source_patterns
        if isinstance(op, Transpose) and op.check_dims
    ]

    def renamed(key: str) -> str:
        name: str = rename_source_key(key, renamings, [], module.base_model_prefix, own)[0]
        return name

    known = {**own, **reverted, **{renamed(name): x for name, x in reverted.items() if name not in own}}

    def place(key: str) -> Any:
        return known[key] if key in known else known.get(renamed(key))

    def fits(key: str, there: Any) -> bool:
        shapes = [there.shape, *(there.transpose(op.dim0, op.dim1).shape for name, op in exchanged if name in key)]
        return weights[key].shape in shapes

    unused = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()  # from_pretrained passes over them
    placed = {key: place(key) for key in weights}
    passed_over = {
        key for key, there in placed.items() if there is None and any(re.search(text, key) for text in unused)
    }
    unfit = [key for key, there in placed.items() if key not in passed_over and (there is None or not fits(key, there))]
    if unfit:
        raise RuntimeError(f"the weights are not those of {cls.__name__}: {', '.join(sorted(unfit))}")
    built: torch.nn.Module = module
    return built


def run_class(outputs: tuple[str, ...], module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a class of transformers and return these outputs by name."""
    with ready(module) as (device, _):
        given = {name: on(device, value) for name, value in inputs.items()}
        values = module(**{name: x if x.is_floating_point() or x.dtype.itemsize == 1 else x.long() for name, x in given.items()})  # fmt: skip
    return {name: values[name] for name in outputs}
