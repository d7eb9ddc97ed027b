"""Find leaves that the rules drop although the JAX model reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.core.findings import Finding
from convert.numerics.compare import difference
from convert.numerics.precision import jax_precision
from convert.numerics.real_numbers import in_float64
from convert.numerics.used_leaves import used_leaves
from convert.planning.plan import Dropped, Plan
from convert.references.protocol import JaxSide, Reference
from convert.verify.report.facts import JudgedFact, Status
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.run_jax import as_jax, jax_specs, jax_weights, leaf_names

Array = np.ndarray[Any, np.dtype[Any]]


ROUNDING = 2e-6  # relative change that another order of the same sums may cause


@dataclass(frozen=True)
class ReadLeaf:
    """A dropped leaf that the outputs of the JAX model are computed from.

    Attributes:
        leaf: what is dropped, and by which rule.
        changes: the largest relative change of a value when the JAX model gets the leaf; None if it cannot run without it.
    """

    leaf: Dropped
    changes: float | None

    @property
    def matters(self) -> bool:
        """Whether the values of this checkpoint show it: a bias of zeros does not."""
        return self.changes is None or not self.changes <= ROUNDING

    @property
    def fact(self) -> JudgedFact:
        """Return what is not verified where the values do not show it."""
        following = "it changes nothing in this checkpoint: convert it, as it may in others"
        value = "dropped, and the JAX model reads it"
        return JudgedFact(f"leaf:{self.leaf.leaf}", value, self.leaf.rule.line_only, Status.UNVERIFIED, next=following)

    def finding(self) -> Finding:
        """Return that the conversion loses what the leaf does."""
        effect = (
            "and cannot run without it" if self.changes is None else f"which changes its values by {self.changes:.1e}"
        )
        return Finding(
            "dropped-leaf-read",
            f"the JAX model reads this leaf, {effect}",
            self.leaf.rule.line_only,
            self.leaf.leaf,
            "a leaf that no output is computed from",
            f"a `drop` rule ({self.leaf.reason})",
            "write a rule that converts the leaf, and give the target the tensor",
            {"diagnosis": "dropped leaf is read", "leaf": self.leaf.leaf},
        )


def read_by_the_model(plan: Plan, reference: Reference, seed: int, evidence: Evidence | None) -> tuple[ReadLeaf, ...]:
    """Return the dropped leaves that the JAX model reads when it gets them.

    Args:
        evidence: what the JAX model computed without them; None if it failed.
    """
    if not plan.dropped or reference.jax is None:
        return ()
    whole = replace(plan, dropped=())
    try:
        side = reference.jax_side()
        inputs = dict(reference.inputs(seed) if evidence is None else evidence.inputs)
        used = used_leaves(lambda given: side(given, inputs), jax_specs(whole))
    except Exception:  # noqa: BLE001 - the user's code does not take more leaves than the rules convert
        return ()
    called = leaf_names(plan)
    names = {called[d.leaf]: d for d in plan.dropped}
    read = [names[name] for name in used if name in names]
    if not read:
        return ()
    changes = _changes(side, whole, inputs, evidence)
    return tuple(ReadLeaf(d, changes) for d in read)


def with_read_leaves(level: LevelReport, leaves: Iterable[ReadLeaf]) -> LevelReport:
    """Return the level with the leaves that the rules drop and that matter as findings."""
    findings = tuple(leaf.finding() for leaf in leaves if leaf.matters)
    if not findings:
        return level
    return replace(level, verdict=Verdict.FAILED, reason="", findings=(*findings, *level.findings))


def _changes(side: JaxSide, plan: Plan, inputs: Mapping[str, Array], evidence: Evidence | None) -> float | None:
    """Return how much the values of the JAX model change with all leaves."""
    if evidence is None:
        return None
    precision = evidence.precision
    with jax_precision(precision):
        weights = {name: as_jax(value, precision) for name, value in jax_weights(plan).items()}
        values = side(weights, {name: as_jax(value, precision) for name, value in inputs.items()})
    return max(
        difference(in_float64(values[name]), value, mask=evidence.masks.get(name)).relative
        for name, value in evidence.native_values.items()
    )
