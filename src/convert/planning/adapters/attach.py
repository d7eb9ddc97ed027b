"""Turn the LoRA pairs of a tree into merges with the weights that a rule converts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, is_float
from convert.layers import Rule
from convert.layers.base import Matched, MatchKey, Step
from convert.layers.leaves import MisfitError
from convert.planning.adapters.forms import pair_form
from convert.planning.adapters.names import NamedPair
from convert.planning.adapters.scale import ALPHA, Scaling
from convert.planning.adapters.stated import ORBAX_FILE, PEFT_FILE, places
from convert.planning.low_rank_source import Merge
from convert.planning.merged_leaf import MergedLeaf


@dataclass(frozen=True)
class Adapters:
    """The LoRA pairs of a tree, and what is known of their factor.

    Attributes:
        pairs: by the name of the weight.
        modules: of the target, by the name of the weight that they are made of; empty where they are not known yet.
    """

    pairs: Mapping[str, NamedPair]
    scaling: Scaling
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of_rule(self, found: Matched, source: Source, variant: str | None) -> dict[str, dict[MatchKey, Merge]]:
        """Return the merges of a rule's leaves: role of the leaf -> its place -> merge.

        Raises:
            MisfitError: a pair cannot be merged.
        """
        merges: dict[str, dict[MatchKey, Merge]] = {}
        for role, of_role in found.leaves.items():
            for key, leaf in of_role.items():
                if (pair := self.pairs.get(leaf)) is not None:
                    merges.setdefault(role, {})[key] = self._merge(found.rule, role, pair, source, variant)
        return merges

    def _merge(self, rule: Rule, role: str, pair: NamedPair, source: Source, variant: str | None) -> Merge:
        plain = role == "weight" and rule.kind.pair is None and rule.normalized is None
        equation = rule.kind.linear_map(variant) if plain else None
        base, first, second = (source.leaves[leaf].spec for leaf in (pair.base, pair.first, pair.second))
        stacked = tuple(sorted(rule.stacked.values()))
        if equation is None:
            raise _misfit(
                rule,
                pair,
                "adapter-not-linear",
                f"the LoRA pair is added to {pair.base}, and the rule does not say with which equation the source uses that leaf",
                fix="make the rule one of a linear layer or a convolution, or add the pair in the source's framework first",
            )
        if narrow := next((spec for spec in (base, first, second) if not is_float(spec.dtype)), None):
            problem = "the leaves of a LoRA pair and its weight are added"
            raise _misfit(rule, pair, "adapter-shape-mismatch", problem, "floating-point leaves", narrow.dtype)
        try:
            form = pair_form(equation, stacked, base, first, second, pair.writer)
        except ValueError as error:
            problem = f"these are not the shapes of a LoRA pair that {pair.writer.value} makes for {pair.base} ({base}, {equation.equation})"
            got = f"{first} and {second}"
            fix = "compare the checkpoint with the code that wrote it"
            raise _misfit(rule, pair, "adapter-shape-mismatch", problem, str(error), got, fix) from None
        modules = self.modules.get(pair.base, ())
        if (other := self.scaling.other_rank(form.rank, modules)) is not None:
            statement, rank = other
            problem = f"{statement.file} states another rank than the leaf has"
            expected, got = f"rank {rank}", f"{form.rank}, of {first}"
            raise _misfit(
                rule, pair, "adapter-shape-mismatch", problem, expected, got, "one of the two is of another checkpoint"
            )
        try:
            scale, reason = self.scaling.factor(pair, form.rank, modules)
        except ValueError as error:
            folders = ", ".join(map(str, places(source)))
            fix = f"give it with --set {ALPHA}=..., or as {ALPHA} of {PEFT_FILE}; that and {ORBAX_FILE} are read in {folders}"
            raise _misfit(rule, pair, "adapter-scale-unknown", str(error), fix=fix) from None
        dtype = "float64" if "float64" in (base.dtype, first.dtype, second.dtype) else "float32"
        spec = TensorSpec(base.shape, dtype)
        return Merge(
            pair.first,
            pair.second,
            pair.base,
            form.product,
            equation.weight,
            stacked,
            scale,
            spec,
            base.dtype,
            form.forms,
            adapter=reason,
        )


def modules_of(steps: Sequence[Step]) -> dict[str, tuple[str, ...]]:
    """Return leaf -> the modules of the target whose weights it goes into."""
    found: dict[str, dict[str, None]] = {}
    for step in steps:
        for part in step.parts:
            found.setdefault(part.leaf, {})[step.name.removesuffix(".weight")] = None
    return {leaf: tuple(modules) for leaf, modules in found.items()}


def adapter_alone(source: Source) -> Finding:
    """Explain that the checkpoint has LoRA pairs, and not the weights that they are added to."""
    return Finding(
        "adapter-alone",
        f"its {len(source.leaves)} leaves belong to LoRA pairs, and the weights that they are added to are not in the checkpoint",
        path=str(source.display_path),
        got=f"leaves such as {next(iter(source.leaves))}",
        fix="give the base model's checkpoint in its place, and this one with --lora, also for --adapter peft, which takes names and "
        "shapes from it (of PyTorch weights, `convert MODEL DIR BASE_CKPT --to orbax` makes one)",
    )


def merged_note(merges: Mapping[str, MergedLeaf]) -> Iterator[str]:
    """Say how many pairs are merged, and with which factor."""
    made = [merge for merge in merges.values() if isinstance(merge, Merge) and merge.adapter]
    if made:
        reasons = Counter(f"times {merge.scale:g} ({merge.adapter})" for merge in made)
        each = "; ".join(text if len(reasons) == 1 else f"{count} {text}" for text, count in reasons.items())
        first = made[0]
        yield (
            f"{'1 LoRA pair is' if len(made) == 1 else f'{len(made)} LoRA pairs are'} merged in {first.spec.dtype}, the product {each}; "
            f"for example {first.base} + {first.first} {first.second}"
        )


def _misfit(
    rule: Rule, pair: NamedPair, code: str, problem: str, expected: str = "", got: str = "", fix: str = ""
) -> MisfitError:
    return MisfitError(Finding(code, problem, rule.at.line_only, pair.first, expected, got, fix))
