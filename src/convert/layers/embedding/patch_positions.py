"""Tables of the positions of an image's patches, which no leaf holds: sines and cosines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.fields import FLAG, TEXT, Key, Record, Scalar
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
GRIDS = ("sincos2d", "sinusoidal_2d")  # sines and cosines of the column, then of the row
LINE, NOTHING = "sinusoidal_1d", "none"
TABLES = (*GRIDS, LINE, NOTHING)  # big_vision's name of the first, scenic's of the others


@dataclass(frozen=True)
class PatchPositions(LayerKind):
    """A table with a row for each patch of a square image, by its name in the source's code.

    ``sincos2d``: sines and cosines of the patch's column, then of its row, each over D/4 timescales with the exponents ``-k / (D/4 - 1)``
    (big_vision@0127fb6 ``models/vit.py``, posemb_sincos_2d). ``sinusoidal_2d``: the same with ``-k / (D/4)``; ``sinusoidal_1d``: sines next
    to cosines of its number, over D/2 timescales with ``-k / (D/2)``, where a class token is the first; ``none``: zeros (scenic@4a38d47
    ``model_lib/layers/attention_layers.py``, get_fixed_sincos_position_embedding and sinusoidal_init; ``projects/baselines/vit.py``).
    They are computed in float64 here and rounded once, to float32.

    Attributes:
        width: letter of the table's width D.
        image: fact that is the side of the image in pixels.
        patch: letter of the side of a patch.
        table: fact that names the table; the tree does not say which one the source computes.
        class_token: whether a class token stands before the patches; ``sinusoidal_1d`` counts it, the others give it no position.
    """

    width: str
    image: str
    patch: str
    table: str
    class_token: bool = False

    guide: ClassVar[str] = "attention"
    kind_name: ClassVar[str] = "patch_positions"
    doc: ClassVar[str] = "A table that is computed, not read: sines and cosines of the places of an image's patches."
    keys: ClassVar[Mapping[str, Key]] = {
        "width": Key(
            Scalar(str, "an axis letter", parse_letter),
            "Letter of the table's width, which 4 divides; 2, of sinusoidal_1d.",
            required=True,
            example="D",
        ),
        "image": Key(TEXT, "Fact that is the side of the square image in pixels.", required=True, example="image_size"),
        "patch": Key(
            Scalar(str, "an axis letter", parse_letter), "Letter of the side of a patch.", required=True, example="P"
        ),
        "table": Key(
            TEXT,
            "Fact that names the table: sincos2d, sinusoidal_2d, sinusoidal_1d or none. No leaf says which one the source computes.",
            required=True,
            example="posemb",
        ),
        "class_token": Key(
            FLAG,
            "Whether a class token stands before the patches, which sinusoidal_1d counts: then the target has `zeros_before` for its row. Default: false.",
        ),
    }
    from_key: ClassVar[str] = "none"
    target: ClassVar[Record] = Record(
        {key: Parameter.target.keys[key] for key in ("name", "axes", "zeros_before")}, Parameter.target.description
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> PatchPositions:
        return cls(values["width"], values["image"], values["patch"], values["table"], values.get("class_token", False))

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
        named = facts.get(self.table)
        if named not in TABLES:
            problem = "no leaf has the positions of the patches, and the tree does not say how the source computes them"
            fix = f"name the table that it computes: --set {self.table}={TABLES[0]}; other tables are not supported"
            asked = f"{self.table} = {' or '.join(TABLES)}"
            raise MisfitError(Finding("setting-invalid", problem, where, name, asked, f"{self.table} = {named}", fix))
        width, patch = (positions_of(letter, context, where, name) for letter in (self.width, self.patch))
        image: object = facts.get(self.image)
        if not isinstance(image, int) or isinstance(image, bool) or image < 1 or image % patch:
            problem, fix = "the side of the image gives the positions", f"set it: --set {self.image}=N"
            asked = f"{self.image} to be a multiple of the patch's side {patch}"
            raise MisfitError(Finding("setting-invalid", problem, where, name, asked, f"{self.image} = {image!r}", fix))
        parts = 4 if named in GRIDS else 2 if named == LINE else 1
        if width % parts:
            problem, fix = "each position has as many sines as cosines", "correct the letter"
            asked = f"a width {self.width} that {parts} divides"
            raise MisfitError(Finding("shape-mismatch", problem, where, name, asked, str(width), fix))
        if named == LINE and sum(layer.zeros_before.values()) != self.class_token:
            problem = "this table has a position for the class token, and the target's has no row for it"
            fix = "convert for another target (--to)"
            raise MisfitError(Finding("setting-invalid", problem, where, name, f"another {self.table}", LINE, fix))
        side, steps = image // patch, width // parts
        table: dict[str, Sinusoids | float] = {
            "sincos2d": Sinusoids(1.0, math.log(LONGEST) / max(steps - 1, 1), False, side),
            "sinusoidal_2d": Sinusoids(1.0, math.log(LONGEST) / steps, False, side),
            LINE: Sinusoids(1.0, math.log(LONGEST) / steps, True),
            NOTHING: 0.0,
        }
        ones = (1,) * tuple(layer.axes or ()).count("")
        spec = TensorSpec((*ones, side * side + sum(layer.zeros_before.values()), width), "float32")
        note = f"{layer.path} is computed ({self.table} = {named}), for {side} x {side} patches"
        step = Step(name, spec, (), matched.rule.kind_name, matched.rule.at, COMPUTED, value=table[named])
        return CompiledRule((step,), (note,))
