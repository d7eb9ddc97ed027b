"""What will be written, from what, and how: everything that is decided before a byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from convert.checkpoints.source import Source
from convert.core.errors import PlanError
from convert.core.tensor_spec import TensorSpec
from convert.core.yaml_nodes import Position
from convert.layers.base import Step
from convert.planning.ambiguity import Unprotected, unprotected
from convert.planning.low_rank_source import Merge, in_float64, with_merges
from convert.planning.sidecar import Found, carried
from convert.rules.file import RuleFile, Target, parse_reference, references


@dataclass(frozen=True)
class Dropped:
    """A leaf that is left out."""

    leaf: str
    spec: TensorSpec
    reason: str
    rule: Position


@dataclass(frozen=True)
class Held:
    """Where the file has a tensor of torch's, when its layout is another's.

    Attributes:
        step: the tensor, as torch has it.
        names: tensors of the file that hold its rows, in their order; empty: it is left out.
        turned: whether each is transposed.
    """

    step: Step
    names: tuple[str, ...]
    turned: bool


def expand(value: Any, sizes: Mapping[str, int]) -> Any:
    """A fact that is a list of the length of a size, ``{repeat: [a, a, b], length: $i}``, written out; others as they are."""
    if isinstance(value, dict) and set(value) == {"repeat", "length"} and isinstance(value["repeat"], list):
        length = sizes.get(str(value["length"]).removeprefix("$"))
        if length is not None:
            return [value["repeat"][k % len(value["repeat"])] for k in range(length)]
    return value


def one_off(rules: RuleFile, sizes: Mapping[str, int], settings: Mapping[str, Any]) -> str:
    """What to say of a tree that differs from a published size in the number of its layers alone; empty for others.

    A truncated stack looks like that. A number that the user gives (``--set i=17``) is meant.
    """
    counted = {
        index for rule in rules.rules if rule.sources for index in (*rule.path.indices, *rule.stacked, *rule.index_from)
    }
    for version in rules.versions:
        differs = [name for name, size in version.sizes.items() if sizes.get(name) != size]
        if len(differs) == 1 and differs[0] in counted and differs[0] in sizes and differs[0] not in settings:
            (name,) = differs
            meaning = rules.axes[name].meaning if name in rules.axes else name
            return (
                f"the tree has {sizes[name]} {meaning} and is otherwise {version.name}, which has {version.sizes[name]}: "
                f"it may be truncated; --set {name}={sizes[name]} says that it is whole"
            )
    return ""


@dataclass(frozen=True)
class Plan:
    """What will be written, from what, and how.

    Attributes:
        rules: the rule file.
        checkpoint: the source that the user named, opened.
        merges: leaves that are computed from several of the checkpoint's (low-rank pairs), by name.
        target: name of the target.
        version: name of the published size that the tree has; None: none of them.
        root: prefix of the tree under which the rules apply.
        steps: one for each output tensor, in the order of the rules.
        dropped: leaves left out, with the reason.
        sizes: axis letters and indices -> size.
        facts: what is no weight; those that nothing gave a value for are missing.
        layers: facts of single layers (activation, epsilon, factors), in the order of the rules.
        choices: variants that sizes or the user chose.
        dtype: what was asked for floating-point tensors; None keeps each leaf's.
        settings: what the user set.
        notes: what a person should know, such as a tensor left out because a fact is unknown.
        sidecar: files beside the checkpoint that say what its tree does not hold.
        held: for a file that is not laid out as torch's layers are: where it has each of their tensors.
        written_config: contents of the ``config.json`` of a directory that is being checked: its model is built by that.
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
    merges: Mapping[str, Merge] = field(default_factory=dict, repr=False)
    written_config: Mapping[str, Any] | None = field(default=None, repr=False)
    sidecar: Found = field(default=Found({}, {}), repr=False)
    held: tuple[Held, ...] = field(default=(), repr=False)

    @cached_property
    def source(self) -> Source:
        """The leaves that the steps read: those of the checkpoint, each group of merged leaves replaced by its result."""
        return with_merges(self.checkpoint, self.merges)

    @cached_property
    def source_in_float64(self) -> Source:
        """`source` with merged leaves in float64."""
        return with_merges(self.checkpoint, in_float64(self.merges))

    @cached_property
    def holders(self) -> Mapping[str, tuple[Held, int]]:
        """Tensor of the file -> the tensor of torch's that it holds rows of, and its place among those that do."""
        return {name: (one, k) for one in self.held for k, name in enumerate(one.names)}

    @property
    def in_torch(self) -> Plan:
        """The plan as torch's layers have it, for a file that is laid out otherwise."""
        return replace(self, steps=tuple(one.step for one in self.held), held=()) if self.held else self

    @property
    def loader(self) -> Target:
        """What loads the result."""
        return self.rules.targets[self.target]

    @property
    def nbytes(self) -> int:
        """Bytes of all output tensors."""
        return sum(step.spec.nbytes for step in self.steps)

    @property
    def found(self) -> str:
        """What the checkpoint is, in words: ``TimesFM 2.5 (flax nnx), 2.5-200m``."""
        if self.version:
            return f"{self.rules.title}, {self.version}"
        if not self.rules.versions:
            return self.rules.title
        shown = ", ".join(f"{name}={self.sizes[name]}" for name in self.rules.versions[0].sizes if name in self.sizes)
        return f"{self.rules.title}, no published size ({shown})"

    @cached_property
    def unprotected(self) -> tuple[Unprotected, ...]:
        """Tensors that a wrong layout would fit, too."""
        return unprotected(self.steps)

    @property
    def config_notes(self) -> tuple[str, ...]:
        """What a person should know of an output directory: facts of its configuration that no tree tells."""
        target = self.rules.targets[self.target]
        used = {*references(target.config), *references(target.generation)}
        needs_confirmation = self.rules.needs_confirmation.items()
        return tuple(text for fact, text in needs_confirmation if fact in used and fact not in self.settings)

    @property
    def config(self) -> dict[str, Any] | None:
        """Contents of ``config.json``; None when the target has none.

        Raises:
            PlanError: a fact that it needs is not known; the message asks for it by name.
        """
        if self.written_config is not None:
            return dict(self.written_config)
        config = self._filled(self.rules.targets[self.target].config)
        if config is None:
            return None
        config = carried(self.sidecar, config)
        if len(self.float_dtypes) == 1:
            config.setdefault("dtype", next(iter(self.float_dtypes)))
        return config

    @property
    def float_dtypes(self) -> dict[str, int]:
        """Floating-point dtype -> how many tensors have it, those that no leaf goes into left out."""
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
            raise PlanError(self._ask(missing), tuple(missing))
        return filled

    def _fill(self, value: Any, key: str, missing: dict[str, list[str]]) -> Any:
        if (reference := parse_reference(value)) is not None:
            name, more = reference
            if name in self.sizes:
                return self.sizes[name] + more
            if name in self.facts:
                if more and not isinstance(self.facts[name], int | float):
                    raise PlanError(f"{self.rules.path}: config.json's {key} is {value}, and {name} is no number but {self.facts[name]!r}")  # fmt: skip
                return self.facts[name] + more if more else self.facts[name]
            missing.setdefault(name, []).append(key)
            return None
        if isinstance(value, dict):
            return {inner: self._fill(child, f"{key}.{inner}", missing) for inner, child in value.items()}
        if isinstance(value, list):
            return [self._fill(child, key, missing) for child in value]
        return value

    def _ask(self, missing: Mapping[str, list[str]]) -> str:
        published = "; ".join(
            f"{version.name} has {', '.join(f'{k}={v}' for k, v in version.sizes.items())}"
            for version in self.rules.versions
        )
        wanted = " ".join(f"--set {name}=..." for name in missing)
        return (
            f"{self.rules.path}: config.json needs {', '.join(missing)}, which the tree does not hold"
            + (f", and this is no published size ({published})" if published else "")
            + (f"; {said}" if (said := one_off(self.rules, self.sizes, self.settings)) else "")
            + (f". Put {sidecar.file} beside the checkpoint, or give" if (sidecar := self.rules.sidecar) else ". Give")
            + f" {'it' if len(missing) == 1 else 'them'} with {wanted}, or write the weights alone to a .safetensors file"
        )

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as JSON-able values."""
        return {
            "rules": {"model": self.rules.model, "file": self.rules.path, "sha256": self.rules.sha256},
            "found": self.found,
            "version": self.version,
            "target": self.target,
            "loads": self.rules.targets[self.target].loads,
            "source": {"format": self.source.format, "root": self.root, "notes": list(self.source.notes)},
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
                    "kind": step.word,
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
            "unprotected": [group.to_dict() for group in self.unprotected],
            "notes": [*self.notes, *self.config_notes],
        }
