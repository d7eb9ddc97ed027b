"""Buffers of sinusoidal position embeddings, which no leaf holds: they are computed from sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.fields import Choice, Key, Record, Scalar
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import CompileContext, CompiledRule, LayerKind, Matched, Step
from convert.layers.leaves import MisfitError
from convert.layers.shared_keys import (
    TENSOR_TARGET,
    parse_letter,
)
from convert.layers.target import Sinusoids, TargetLayer

FACTS = ("min_timescale", "max_timescale")
COMPUTED = "computed from sizes"


def parse_positions(value: str | int) -> str | int:
    """Parse a letter, or a number of positions above 0.

    Raises:
        ValueError: neither.
    """
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"a table has at least one position, not {value}")
        return value
    return parse_letter(value)


def positions_of(positions: str | int, context: CompileContext, rule: str, name: str) -> int:
    """Return a number of positions.

    Raises:
        MisfitError: it is a letter without a size.
    """
    rows = context.sizes.get(positions) if isinstance(positions, str) else positions
    if rows is None:
        raise _size_unknown(rule, name, f"its number of positions {positions}")
    return rows


@dataclass(frozen=True)
class Timescales(LayerKind):
    """Inverse timescales of a sinusoidal position embedding, ``min * (max/min) ** (-k / (D/2 - 1))`` for k < D/2; or the table.

    With `endpoint: excluded` the exponent is ``-k / (D/2)``: the longest timescale is one step short of ``max``.

    Sources: praxis ``layers/embedding_softmax.py`` PositionalEmbedding, transformers 5.23 TimesFmPositionalEmbedding and
    ``models/whisper`` sinusoids (included, concatenated); ``models/marian`` (excluded, concatenated); ``models/speecht5``, as
    the paper has it (excluded, interleaved). They are computed in float64 here and rounded once, to float32.

    Attributes:
        width: letter of the embedding's width D.
        positions: letter or number: the buffer is the table of so many positions, sines and cosines; None: the timescales.
        layout: of the table: all sines and then all cosines, or each sine next to its cosine.
        last: whether ``max`` itself is the last timescale.
    """

    width: str
    positions: str | int | None = None
    layout: str = "concatenated"
    last: str = "included"

    guide: ClassVar[str] = "attention"
    kind_name: ClassVar[str] = "buffer"
    doc: ClassVar[str] = (
        "A buffer that is computed, not read: the inverse timescales of a sinusoidal position embedding."
    )
    keys: ClassVar[Mapping[str, Key]] = {
        "timescales": Key(
            Scalar(str, "an axis letter", parse_letter),
            "Letter of the embedding's width; requires the facts min_timescale and max_timescale.",
            required=True,
            example="D",
        ),
        "positions": Key(
            Scalar((str, int), "an axis letter or a number", parse_positions),
            "Number of positions: the buffer is the table of sines and cosines. Default: the buffer has the timescales.",
        ),
        "layout": Key(
            Choice(("concatenated", "interleaved")),
            "Order of the table: `concatenated` (all sines, then all cosines) or `interleaved` (each sine next to its cosine).",
        ),
        "endpoint": Key(
            Choice(("included", "excluded")),
            "Whether max_timescale is the last timescale: `included` (exponents k / (D/2 - 1)) or `excluded` (k / (D/2)). Default: included.",
        ),
        "when": Key(
            Scalar(str, "the name of a fact"),
            "Fact that must be true for the target to have this buffer. Default: the target always has it.",
        ),
    }
    from_key: ClassVar[str] = "none"
    target: ClassVar[Record] = TENSOR_TARGET

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Timescales:
        if ("positions" in values) != ("layout" in values):
            raise ValueError("a table has both `positions:` and `layout:`; timescales alone have neither")
        return cls(
            values["timescales"],
            values.get("positions"),
            values.get("layout", "concatenated"),
            values.get("endpoint", "included"),
        )

    @property
    def facts_used(self) -> tuple[str, ...]:
        return FACTS

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        return path

    def compile(
        self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None
    ) -> CompiledRule:
        rule, facts, name = matched.rule, context.facts, layer.path.fill({})
        where = rule.at.line_only
        if rule.when and rule.when not in facts:
            note = (
                f"{name} is left out: the target has it only when {rule.when} is true, and nothing says whether it is "
                f"(--set {rule.when}=true|false)"
            )
            return CompiledRule((), (note,))
        if rule.when and not isinstance(facts[rule.when], bool):
            raise MisfitError(
                Finding(
                    "setting-invalid",
                    f"{rule.when} decides whether the target has {name}",
                    rule=where,
                    path=rule.when,
                    expected="true or false",
                    got=repr(facts[rule.when]),
                    fix=f"set it with --set {rule.when}=true or --set {rule.when}=false",
                )
            )
        if rule.when and not facts[rule.when]:
            return CompiledRule(())
        if self.width not in context.sizes:
            raise _size_unknown(where, name, f"its width {self.width}")
        width = context.sizes[self.width]
        low, high = self._timescales(where, name, facts)
        half = width // 2
        step = math.log(high / low) / max(half - (self.last == "included"), 1)
        if self.positions is None:
            spec = TensorSpec((half,), "float32")
            return CompiledRule((Step(name, spec, (), rule.kind_name, rule.at, COMPUTED, value=(low, step)),))
        rows = positions_of(self.positions, context, where, name)
        if width % 2:
            raise MisfitError(
                Finding(
                    "shape-mismatch",
                    "each position has pairs of a sine and a cosine",
                    rule=where,
                    path=name,
                    expected=f"an even width {self.width}",
                    got=str(width),
                    fix="correct the letter",
                )
            )
        table = Sinusoids(low, step, self.layout == "interleaved")
        spec = TensorSpec((rows, 2 * half), "float32")
        return CompiledRule((Step(name, spec, (), rule.kind_name, rule.at, COMPUTED, value=table),))

    def _timescales(self, where: str, name: str, facts: Mapping[str, Any]) -> tuple[float, float]:
        """Return the facts min_timescale and max_timescale."""
        scales = [facts.get(key) for key in FACTS]
        low, high = (float(x) if isinstance(x, int | float) and x > 0 else None for x in scales)
        if low is None or high is None:
            raise MisfitError(
                Finding(
                    "fact-missing",
                    "the timescales are computed from min_timescale and max_timescale",
                    rule=where,
                    path=name,
                    expected="two positive numbers",
                    got=f"{scales[0]} and {scales[1]}",
                    fix="set them with --set min_timescale=... --set max_timescale=...",
                )
            )
        return low, high


def _size_unknown(rule: str, name: str, what: str) -> MisfitError:
    fix = "correct the letter, or give it a size in `axes`"
    return MisfitError(
        Finding("size-unknown", f"no leaf and no product in `axes` gives {what} a size", rule=rule, path=name, fix=fix)
    )
