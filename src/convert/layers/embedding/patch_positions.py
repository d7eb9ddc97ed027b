"""Tables of the positions of an image's patches, which no leaf holds: sines and cosines of columns and rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.fields import TEXT, Key, Record, Scalar
from convert.core.findings import Finding
from convert.core.path_pattern import Pattern
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import CompileContext, CompiledRule, LayerKind, Matched, Step
from convert.layers.embedding.sinusoids import COMPUTED, positions_of
from convert.layers.leaves import MisfitError
from convert.layers.parameter.parameter import Parameter
from convert.layers.shared_keys import parse_letter
from convert.layers.target import Sinusoids, TargetLayer

LONGEST = 10_000.0  # timescale; the shortest is 1
TABLE = "sincos2d"  # big_vision's name


@dataclass(frozen=True)
class PatchPositions(LayerKind):
    """A table with a row for each patch of a square image: sines and cosines of its column, then of its row, each over D/4 timescales.

    Source: big_vision@0127fb6 ``models/vit.py`` posemb_sincos_2d; the exponents are ``-k / (D/4 - 1)``. It is computed in float64
    here and rounded once, to float32.

    Attributes:
        width: letter of the table's width D.
        image: fact that is the side of the image in pixels.
        patch: letter of the side of a patch.
        table: fact that names the table; the tree does not say which one the source computes.
    """

    width: str
    image: str
    patch: str
    table: str

    guide: ClassVar[str] = "attention"
    kind_name: ClassVar[str] = "patch_positions"
    doc: ClassVar[str] = (
        "A table that is computed, not read: sines and cosines of the columns and rows of an image's patches."
    )
    keys: ClassVar[Mapping[str, Key]] = {
        "width": Key(
            Scalar(str, "an axis letter", parse_letter),
            "Letter of the table's width, which 4 divides.",
            required=True,
            example="D",
        ),
        "image": Key(TEXT, "Fact that is the side of the square image in pixels.", required=True, example="image_size"),
        "patch": Key(
            Scalar(str, "an axis letter", parse_letter), "Letter of the side of a patch.", required=True, example="P"
        ),
        "table": Key(
            TEXT,
            "Fact that names the table, which must be sincos2d: no leaf says that the source computes this one.",
            required=True,
            example="posemb",
        ),
    }
    from_key: ClassVar[str] = "none"
    target: ClassVar[Record] = Record(
        {key: Parameter.target.keys[key] for key in ("name", "axes", "zeros_before")}, Parameter.target.description
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> PatchPositions:
        return cls(values["width"], values["image"], values["patch"], values["table"])

    @property
    def facts_used(self) -> tuple[str, ...]:
        return (self.image, self.table)

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        return path

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        letters = [axis for axis in layer.axes or () if axis]
        if layer.axes is not None and letters[1:] != [self.width]:
            raise ValueError(f"the target's `axes` are those of the table, such as .L{self.width}")
        if set(layer.zeros_before) - set(letters[:1]) or any(count < 1 for count in layer.zeros_before.values()):
            raise ValueError("`zeros_before` gives a number of rows of zeros to the letter of the patches")

    def compile(
        self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None
    ) -> CompiledRule:
        where, name = matched.rule.at.line_only, layer.path.fill({})
        facts = context.facts
        if facts.get(self.table) != TABLE:
            problem = "no leaf has the positions of the patches, and the tree does not say how the source computes them"
            fix = f"if it computes this table: --set {self.table}={TABLE}; other tables are not supported"
            got = f"{self.table} = {facts.get(self.table)}"
            raise MisfitError(Finding("setting-invalid", problem, where, name, f"{self.table} = {TABLE}", got, fix))
        width, patch = (positions_of(letter, context, where, name) for letter in (self.width, self.patch))
        image: object = facts.get(self.image)
        if not isinstance(image, int) or isinstance(image, bool) or image < 1 or image % patch:
            problem, fix = "the side of the image gives the positions", f"set it: --set {self.image}=N"
            asked = f"{self.image} to be a multiple of the patch's side {patch}"
            raise MisfitError(Finding("setting-invalid", problem, where, name, asked, f"{self.image} = {image!r}", fix))
        if width % 4:
            problem, fix = "each position has sines and cosines of a column and a row", "correct the letter"
            asked = f"a width {self.width} that 4 divides"
            raise MisfitError(Finding("shape-mismatch", problem, where, name, asked, str(width), fix))
        side = image // patch
        table = Sinusoids(1.0, math.log(LONGEST) / max(width // 4 - 1, 1), False, side)
        ones = (1,) * tuple(layer.axes or ()).count("")
        spec = TensorSpec((*ones, side * side + sum(layer.zeros_before.values()), width), "float32")
        note = f"{layer.path} is computed: sines and cosines of the columns and rows of {side} x {side} patches"
        rule = matched.rule
        return CompiledRule((Step(name, spec, (), rule.kind_name, rule.at, COMPUTED, value=table),), (note,))
