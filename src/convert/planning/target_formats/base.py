"""How the code that loads an output lays out its tensors. Every plan is made for torch's layers; a format translates it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.layers import Rule, TargetLayer
from convert.layers.base import Step
from convert.rules.file import RuleFile, Target


@dataclass(frozen=True)
class TranslatedTensor:
    """A tensor of torch, and the tensors of the output that hold it.

    Attributes:
        torch: the tensor as torch's layer has it.
        names: tensors of the output that hold its rows, in order; empty when the output does not have it.
        transposed: whether each of them is transposed.
    """

    torch: Step
    names: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Translation:
    """Tensors of the output.

    Attributes:
        steps: in the order of torch's tensors.
        tensors: torch's tensors and where the output has them; empty when the output has them unchanged.
        findings: tensors that the format cannot hold.
    """

    steps: tuple[Step, ...]
    tensors: tuple[TranslatedTensor, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class LayerFacts:
    """What no weight says of a layer.

    Attributes:
        name: of the layer in the target.
        facts: activation, epsilon, padding and the like.
        constructor: the call that makes the module, in a format that needs one; empty otherwise.
        is_default: whether the constructor passes nothing but the defaults of the module.
        module: name of the module that the constructor makes.
    """

    name: str
    facts: Mapping[str, Any]
    constructor: str = ""
    is_default: bool = True
    module: str = ""


class TargetFormat(ABC):
    """The layout of an output file.

    Attributes:
        name: value of `format:` in a target of a rule file.
        custom_cells: whether it holds recurrent cells that torch.nn cannot compute.
        one_file: why the output must be a single file; empty when it may be sharded.
        not_run: why `convert check` cannot run the target's model; empty when it can.
        run_as_torch: note of the layers level when the layers were run as torch's; empty for torch.
    """

    name: str
    custom_cells: bool = False
    one_file: str = ""
    not_run: str = ""
    run_as_torch: str = ""

    @abstractmethod
    def target(self, rules: RuleFile) -> Target | None:
        """Return a target for rules that declare none of this format; None when there is none."""

    @abstractmethod
    def with_layers(self, rules: RuleFile, target: Target) -> RuleFile:
        """Return the rules with the layers of a target as this format has them."""

    @abstractmethod
    def refuse(self, rule: Rule, layer: TargetLayer) -> Finding | None:
        """Explain why the format has no layer that computes what a rule's does; None when it has one."""

    @abstractmethod
    def layer_facts(
        self, rule: Rule, layer: TargetLayer, facts: Mapping[str, Any], steps: Sequence[Step], sizes: Mapping[str, int]
    ) -> LayerFacts:
        """Return a layer's facts in the terms of the format.

        Args:
            facts: in torch's terms.
            steps: tensors of the layer, as torch has them.
        """

    @abstractmethod
    def notes(self, layers: Sequence[LayerFacts]) -> Iterator[str]:
        """Say what a user must do beyond loading the file."""

    @abstractmethod
    def translate(self, steps: Iterable[Step], spec_of: Callable[[str], TensorSpec], target: str) -> Translation:
        """Translate tensors of torch's layers.

        Args:
            spec_of: returns the spec of a leaf.
        """

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """Return the entries of the safetensors header that name the layout."""

    @abstractmethod
    def card_rows(self) -> list[tuple[str, str]]:
        """Return rows of the model card's table."""

    @abstractmethod
    def loading_code(self, target: Target, layers: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return lines of the model card that show how to load a directory."""


class TorchFormat(TargetFormat):
    """PyTorch: the identity."""

    name = "torch"

    def target(self, rules: RuleFile) -> Target | None:
        return None

    def with_layers(self, rules: RuleFile, target: Target) -> RuleFile:
        return rules

    def refuse(self, rule: Rule, layer: TargetLayer) -> Finding | None:
        return None

    def layer_facts(
        self, rule: Rule, layer: TargetLayer, facts: Mapping[str, Any], steps: Sequence[Step], sizes: Mapping[str, int]
    ) -> LayerFacts:
        return LayerFacts(layer.path.text, facts)

    def notes(self, layers: Sequence[LayerFacts]) -> Iterator[str]:
        return iter(())

    def translate(self, steps: Iterable[Step], spec_of: Callable[[str], TensorSpec], target: str) -> Translation:
        return Translation(tuple(steps))

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def card_rows(self) -> list[tuple[str, str]]:
        return []

    def loading_code(self, target: Target, layers: Sequence[Mapping[str, Any]]) -> list[str]:
        names = target.config.get("architectures")
        if target.name != "transformers" or not names or not str(names[0]).isidentifier():
            return []
        code = [
            f"from transformers import {names[0]}",
            "",
            f'model = {names[0]}.from_pretrained("path/of/this/directory")',
        ]
        return ["", "```python", *code, "```"]


TORCH = TorchFormat()
