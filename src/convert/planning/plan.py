"""The plan of a conversion: everything that is decided before an array is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from convert.checkpoints.source import Source
from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.core.yaml_nodes import Position
from convert.layers.base import Step
from convert.planning.ambiguity import ShapeAmbiguity, shape_ambiguities
from convert.planning.facts.sidecar import NO_SIDECAR, Sidecar, merge_config
from convert.planning.facts.values import missing_facts
from convert.planning.low_rank_source import in_float64, with_merges
from convert.planning.merged_leaf import MergedLeaf
from convert.planning.modules.not_taken import TRANSFORMERS, with_floats
from convert.planning.target_formats.base import TargetFormat, TranslatedTensor
from convert.planning.target_formats.registry import format_of
from convert.planning.tokenizer.files import TokenizerFiles
from convert.planning.tokenizer.fits import misfits
from convert.planning.tokenizer.processors import missing_processor
from convert.rules.file import RuleFile, Target, parse_reference, references

# Reasons of rules by `infer` for leaves that the JAX function needs nonetheless, if only to fill its tree.
UNUSED, CONFIGURED = "the function computes nothing with it", "a number of the configuration"


@dataclass(frozen=True)
class Dropped:
    """A leaf that is not converted."""

    leaf: str
    spec: TensorSpec
    reason: str
    rule: Position


@dataclass(frozen=True)
class Plan:
    """What will be written, from what, and how.

    Attributes:
        rules: the rule file.
        checkpoint: the source that the user named, opened.
        merges: leaves that are computed from several of the checkpoint's (low-rank pairs, sums), by name.
        target: name of the target.
        version: name of the published size with the sizes of this tree; None if there is none.
        root: prefix of the tree under which the rules apply.
        steps: one for each output tensor, in the order of the rules.
        dropped: leaves left out, with the reason.
        sizes: axis letters and indices -> size.
        facts: hyperparameters that no leaf holds; those without a known value are missing.
        layers: facts of single layers (activation, epsilon, factors), in the order of the rules.
        choices: name of a choice -> the variant that the sizes or the user chose.
        dtype: dtype that the user chose for floating-point tensors; None keeps the dtype of each leaf.
        settings: what the user set.
        confirmed: settings that the tree gives, too.
        notes: remarks for the user, such as a tensor left out because a fact is unknown.
        sidecar: files next to the checkpoint that hold facts.
        translated: for an output that is not laid out for torch: torch's tensors and where the output has them.
        tokenizer: files of ``--tokenizer`` that an output directory gets, too.
        written_config: contents of the ``config.json`` of a directory that is being checked; its model is built from it.
    """

    rules: RuleFile
    checkpoint: Source = field(repr=False)
    target: str
    version: str | None
    root: str
    steps: tuple[Step, ...] = field(repr=False)
    dropped: tuple[Dropped, ...] = field(repr=False)
    sizes: Mapping[str, int]
    facts: Mapping[str, Any]
    layers: tuple[Mapping[str, Any], ...] = field(repr=False)
    choices: Mapping[str, str]
    dtype: str | None
    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    merges: Mapping[str, MergedLeaf] = field(default_factory=dict, repr=False)
    confirmed: frozenset[str] = field(default=frozenset(), repr=False)
    written_config: Mapping[str, Any] | None = field(default=None, repr=False)
    sidecar: Sidecar = field(default=NO_SIDECAR, repr=False)
    translated: tuple[TranslatedTensor, ...] = field(default=(), repr=False)
    tokenizer: TokenizerFiles | None = field(default=None, repr=False)

    @cached_property
    def source(self) -> Source:
        """The leaves that the steps read: those of the checkpoint, each group of merged leaves replaced by its result."""
        return with_merges(self.checkpoint, self.merges)

    @cached_property
    def source_in_float64(self) -> Source:
        """`source` with merged leaves in float64."""
        return with_merges(self.checkpoint, in_float64(self.merges))

    @cached_property
    def torch_tensors(self) -> Mapping[str, tuple[TranslatedTensor, int]]:
        """Tensor of the output -> the tensor of torch whose rows it holds, and its position among those that do."""
        return {name: (tensor, k) for tensor in self.translated for k, name in enumerate(tensor.names)}

    @property
    def as_torch(self) -> Plan:
        """The plan for torch's layers; the plan itself, unless the output is for another format."""
        if not self.translated:
            return self
        return replace(self, steps=tuple(tensor.torch for tensor in self.translated), translated=())

    @property
    def format(self) -> TargetFormat:
        """The layout of the output."""
        return format_of(self.loader)

    @property
    def loader(self) -> Target:
        """The target: the code that loads the result."""
        return self.rules.targets[self.target]

    @property
    def nbytes(self) -> int:
        """Bytes of all output tensors."""
        return sum(step.spec.nbytes for step in self.steps)

    @property
    def found(self) -> str:
        """Name of the model and its size: ``TimesFM 2.5 (flax nnx), 2.5-200m``."""
        if self.version:
            return f"{self.rules.title}, {self.version}"
        if not self.rules.versions:
            return self.rules.title
        shown = ", ".join(f"{name}={self.sizes[name]}" for name in self.rules.versions[0].sizes if name in self.sizes)
        return f"{self.rules.title}, no published size ({shown})"

    @cached_property
    def shape_ambiguous(self) -> tuple[ShapeAmbiguity, ...]:
        """Shape-ambiguous tensors."""
        return shape_ambiguities(self.steps)

    @property
    def config_notes(self) -> tuple[str, ...]:
        """Remarks on facts of ``config.json`` that no tree holds, and on what the output's directory lacks."""
        target = self.rules.targets[self.target]
        used = {*references(target.config), *references(target.generation), *target.requires}
        of_version = next((one.needs_confirmation for one in self.rules.versions if one.name == self.version), {})
        needs_confirmation = {**self.rules.needs_confirmation, **of_version}
        known = self.settings.keys() | {key for key, value in self.sidecar.config.items() if value is not None}
        notes = [text for fact, text in needs_confirmation.items() if fact in used and fact not in known]
        stated = {**self.sidecar.config, **target.config}
        missing = missing_processor(stated, self.tokenizer)
        beside = [] if self.tokenizer is None else misfits(self.config or stated, self.tokenizer)
        return (*notes, *target.differs, *([missing] if missing and target.config else []), *beside)

    @property
    def config(self) -> dict[str, Any] | None:
        """Contents of ``config.json``; None when the target has none.

        Raises:
            PlanError: a required fact is unknown.
        """
        if self.written_config is not None:
            return dict(self.written_config)
        config = self._filled(self.rules.targets[self.target].config)
        if config is None:
            return None
        config = merge_config(self.sidecar, config)
        config = with_floats(config) if self.target == TRANSFORMERS and self.sidecar.exists else config
        if len(self.float_dtypes) == 1 and "_class_name" not in config:  # a class of diffusers takes no dtype
            config.setdefault("dtype", next(iter(self.float_dtypes)))
        return config

    @property
    def float_dtypes(self) -> dict[str, int]:
        """Floating-point dtype -> number of tensors with it; tensors that no leaf goes into do not count."""
        found: dict[str, int] = {}
        for step in self.steps:
            if step.parts and step.spec.dtype in ("float32", "bfloat16", "float16", "float64"):
                found[step.spec.dtype] = found.get(step.spec.dtype, 0) + 1
        return found

    @property
    def generation_config(self) -> dict[str, Any] | None:
        """Contents of ``generation_config.json``; None when the target has none.

        Raises:
            PlanError: as `config`.
        """
        filled = self._filled(self.rules.targets[self.target].generation)
        if filled is None and self.sidecar.generation and self.rules.targets[self.target].config:
            return {key: value for key, value in self.sidecar.generation.items() if key != "transformers_version"}
        return filled

    def _filled(self, templates: Mapping[str, Any]) -> dict[str, Any] | None:
        if not templates:
            return None
        missing: dict[str, list[str]] = {}
        filled = {key: self._fill(value, key, missing) for key, value in templates.items()}
        if missing:
            needed, weights = (
                f"config.json needs {', '.join(missing)}",
                ", or write only the weights, to a .safetensors file",
            )
            raise PlanError(missing_facts(self.rules, needed, list(missing), self.sizes, self.settings, weights))
        return filled

    def _fill(self, value: Any, key: str, missing: dict[str, list[str]]) -> Any:
        if (reference := parse_reference(value)) is not None:
            name, more = reference
            if name in self.sizes:
                return self.sizes[name] + more
            if name in self.facts:
                if more and not isinstance(self.facts[name], int | float):
                    raise PlanError(
                        Finding(
                            "fact-not-a-number",
                            f"config.json's {key} is {value}",
                            rule=self.rules.path,
                            expected=f"{name} to be a number",
                            got=repr(self.facts[name]),
                            fix=f"correct the fact {name}, or the template of {key}",
                        )
                    )
                return self.facts[name] + more if more else self.facts[name]
            missing.setdefault(name, []).append(key)
            return None
        if isinstance(value, dict):
            return {inner: self._fill(child, f"{key}.{inner}", missing) for inner, child in value.items()}
        if isinstance(value, list):
            return [self._fill(child, key, missing) for child in value]
        return value

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return {
            "rules": {"model": self.rules.model, "file": self.rules.path, "sha256": self.rules.sha256},
            "found": self.found,
            "version": self.version,
            "target": self.target,
            "loads": self.rules.targets[self.target].loads,
            "source": {
                "format": self.source.format,
                "root": self.root,
                "notes": [str(note) for note in self.source.notes],
            },
            "bytes": self.nbytes,
            "sizes": dict(self.sizes),
            "facts": dict(self.facts),
            "layers": [dict(layer) for layer in self.layers],
            "choices": dict(self.choices),
            "dtype": self.dtype,
            "settings": dict(self.settings),
            "tensors": [
                {
                    "name": step.name,
                    "shape": list(step.spec.shape),
                    "dtype": step.spec.dtype,
                    "kind": step.kind_name,
                    "rule": step.rule.line_only,
                    "from": [part.to_dict() for part in step.parts],
                    "arithmetic": step.arithmetic,
                    "loses": step.loses,
                    **({"tied_to": step.tied} if step.tied else {}),
                }
                for step in self.steps
            ],
            "dropped": [
                {
                    "leaf": d.leaf,
                    "shape": list(d.spec.shape),
                    "dtype": d.spec.dtype,
                    "because": d.reason,
                    "rule": d.rule.line_only,
                }
                for d in self.dropped
            ],
            "shape_ambiguous": [group.to_dict() for group in self.shape_ambiguous],
            "notes": [*self.notes, *self.config_notes],
        }
