"""Burn (tracel-ai/burn) as a target format: the entry of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.core.text import code_span
from convert.layers import Rule, TargetLayer
from convert.layers.base import Step
from convert.planning.target_formats.base import LayerFacts, TargetFormat, Translation
from convert.planning.target_formats.burn.config import CONSTRUCTOR, constructor_notes, layer_facts, module_name
from convert.planning.target_formats.burn.modules import COMMIT, refusal, with_burn_layers
from convert.planning.target_formats.burn.tensors import translate
from convert.rules.file import RuleFile, Target

LAYOUT = f"Burn, as in its source at {COMMIT}; Burn was not run"


class BurnFormat(TargetFormat):
    """A safetensors file that burn-store's SafetensorsStore loads without an adapter."""

    name = "burn"
    custom_cells = True
    one_file = "burn-store reads a single safetensors file"
    not_run = "Burn is Rust code, which `convert check` does not run; only its published layout is followed"
    run_as_torch = (
        "the layers were run as torch's, with the file's tensors translated back as burn-store's BurnToPyTorchAdapter does; "
        "Burn was not run"
    )

    def target(self, rules: RuleFile) -> Target:
        first = next(iter(rules.targets.values()))
        loads = f"Burn: burn-store's SafetensorsStore, without an adapter; modules called as in {first.loads}"
        return Target(self.name, loads, {}, format=self.name)

    def with_layers(self, rules: RuleFile, target: Target) -> RuleFile:
        return with_burn_layers(rules, target)

    def refuse(self, rule: Rule, layer: TargetLayer) -> Finding | None:
        return refusal(rule, layer)

    def layer_facts(
        self, rule: Rule, layer: TargetLayer, facts: Mapping[str, Any], steps: Sequence[Step], sizes: Mapping[str, int]
    ) -> LayerFacts:
        return layer_facts(rule, layer, facts, steps, sizes)

    def notes(self, layers: Sequence[LayerFacts]) -> Iterator[str]:
        return constructor_notes(layers)

    def translate(self, steps: Iterable[Step], spec_of: Callable[[str], TensorSpec], target: str) -> Translation:
        return translate(steps, spec_of, target)

    def metadata(self) -> dict[str, str]:
        # burn-store writes "safetensors" and ignores the entry. "pt" would claim that PyTorch code can load the file,
        # and a square weight would load transposed.
        return {"format": "safetensors", "layout": LAYOUT}

    def card_rows(self) -> list[tuple[str, str]]:
        return [("Layout", LAYOUT)]

    def loading_code(self, target: Target, layers: Sequence[Mapping[str, Any]]) -> list[str]:
        store = 'let mut store = SafetensorsStore::from_file("path/of/this/directory/model.safetensors");'
        made = [
            f"- {code_span(module_name(layer))}: {code_span(layer[CONSTRUCTOR])}"
            for layer in layers
            if CONSTRUCTOR in layer
        ]
        constructors = ["", "Constructors of modules whose sizes do not determine them:", "", *made] if made else []
        return ["", "```rust", store, "model.load_from(&mut store)?;", "```", *constructors]


BURN = BurnFormat()
