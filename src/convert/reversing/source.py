"""A checkpoint whose leaves are computed back from tensors, each element when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from threading import local
from typing import Any

import numpy as np

from convert.checkpoints.chunks import Box, Grid, Meter, Piece, full_box, tiles
from convert.checkpoints.source import Source
from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.ops import Op, apply, inverse, out_spec
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.core.value_ops import Add, Cast, Multiply
from convert.layers.base import Part, Step
from convert.numerics.bits import count_unequal, same_bits, unequal
from convert.reversing.plan import COMPUTING, TWO_BIASES, MadeLeaf, ReversePlan
from convert.writing.execute import computed
from convert.writing.scatter import destination_view, needed_box

Array = np.ndarray[Any, np.dtype[Any]]
PIECE = 1 << 19  # bytes that are computed at a time: a piece, its check and its compressed bytes are in memory together


class ReversedSource(Source):
    """The checkpoint of a reverse plan. Reading a box touches only the tensors that it is made of.

    Each value that is computed back is computed forward again, and must give the bits of its tensor.
    """

    def __init__(self, plan: ReversePlan) -> None:
        like = plan.forward.checkpoint
        self.plan, self._like, self._tensor = plan, like, plan.written.read
        self.path, self.format, self.leaves, self.absent = like.path, like.format, like.leaves, like.absent
        self._made = {made.leaf: made for made in plan.leaves}
        self._last = local()  # each thread reads the chunks of a leaf one after another

    def check_constants(self) -> None:
        """Check the tensors that no leaf holds.

        Raises:
            PlanError: one has another value than the source's model computes with.
        """
        findings = []
        for step in self.plan.constants:
            got, want = self._tensor(step.name), computed(step).astype(numpy_dtype(step.spec.dtype), copy=False)
            if not same_bits(got, want):
                findings.append(
                    Finding(
                        "value-not-reversible",
                        "the checkpoint has no leaf for this tensor, and its model computes with another value",
                        rule=step.rule.line_only,
                        path=step.name,
                        expected=step.arithmetic or "the values that the rule computes",
                        got=f"{count_unequal(got, want)} of {got.size} values differ",
                        fix=TWO_BIASES if step.group is not None and step.role.startswith("bias") else "",
                    )
                )
        if findings:
            raise PlanError(*findings, headline="the tensors cannot be converted back" if len(findings) > 1 else "")

    def chunks(self, name: str) -> Grid:
        return self._like.chunks(name)

    def read(self, name: str) -> Array:
        return self.read_box(name, full_box(self.leaves[name].spec.shape))

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        for tile in tiles(chunk.shape, numpy_dtype(self.leaves[name].spec.dtype).itemsize, PIECE):
            origin = tuple(a + b for a, b in zip(chunk.origin, tile.origin, strict=True))
            yield origin, self.read_box(name, Box(origin, tile.shape))

    def read_box(self, name: str, box: Box) -> Array:
        """Compute a part of a leaf.

        Raises:
            PlanError: a value of a tensor is that of no leaf.
            CheckpointError: a file cannot be read.
        """
        made = self._made.get(name)
        if made is None:
            return self._like.read_box(name, box)
        given = self._like.read_box(name, box) if made.rest or made.rounded else None
        out = given.copy() if given is not None and made.rest else np.empty(box.shape, numpy_dtype(made.spec.dtype))
        last: tuple[str, list[Share]] | None = getattr(self._last, "leaf", None)
        if last is None or last[0] != name:
            like = self._like if made.rounded else None
            last = name, [Share(made, step, part, self._tensor(step.name), like) for step, part in made.parts]
            self._last.leaf = last
        shares = last[1]
        for share in reversed(shares):  # the first ones have the last word; the others are compared with them
            share.fill(out, box)
            if made.rounded and given is not None:
                share.keep(out, given, box)
        for share in shares:
            share.compare(out, box)
        return out


class Share:
    """What a part of a tensor gives to a leaf.

    Args:
        like: the checkpoint whose values are taken where they give the tensor; None: those that are computed are taken.
    """

    def __init__(self, made: MadeLeaf, step: Step, part: Part, tensor: Array, like: Source | None = None) -> None:
        self._like = like
        self._made, self._step, self._part, self._values = made, step, part, part.share(tensor)
        self._box, self._rest = needed_box(part.ops, made.spec)
        self._view = destination_view(part.ops, made.spec, self._values)
        self._whole: tuple[Array, Array] | None = None

    def fill(self, out: Array, box: Box) -> None:
        """Write what it gives to a box of the leaf."""
        if self._box.overlap(box.origin, box.shape) is None:
            return
        if self._view is not None:
            for region, here in self._view.parts(box.origin, out):
                here[...] = back(self._view.ops, region, self._made.spec.dtype)
            return
        whole, mask = self._inverted()
        common = self._box.overlap(box.origin, box.shape)
        assert common is not None
        inside = common.within(self._box.origin)
        np.copyto(out[common.within(box.origin)], whole[inside], where=mask[inside])

    def keep(self, out: Array, given: Array, box: Box) -> None:
        """Write the values `given` to a box of the leaf, where they give the tensor."""
        if self._view is None or not self._view.ops:
            return
        mine = (values for _, values in self._view.parts(box.origin, given))
        for (region, here), values in zip(self._view.parts(box.origin, out), mine, strict=True):
            np.copyto(here, values, where=~unequal(region, _forward(self._view.ops, values)))

    def compare(self, out: Array, box: Box) -> None:
        """Compare the leaf with what this part gives to it, and the tensor with what is computed from the leaf.

        Raises:
            PlanError: a bit differs.
        """
        common = self._box.overlap(box.origin, box.shape)
        if common is None:
            return
        if self._view is None:
            whole, mask = self._inverted()
            inside, here = common.within(self._box.origin), out[common.within(box.origin)]
            self._require_one_value(here[mask[inside]], whole[inside][mask[inside]])
            return
        for region, here in self._view.parts(box.origin, out):
            if self._made.overlap:
                self._require_one_value(here, back(self._view.ops, region, self._made.spec.dtype))
            if self._view.ops:
                self._require_same_again(region, _forward(self._view.ops, here))

    def _inverted(self) -> tuple[Array, Array]:
        """Compute its box of the leaf at once, where the operations need all elements; and which of them it gives."""
        if self._whole is None:
            spec = TensorSpec(self._box.shape, self._made.spec.dtype)
            whole = np.array(_backwards(inverse(self._rest, spec), self._values))
            moves = tuple(op for op in self._rest if not isinstance(op, COMPUTING))
            flags = TensorSpec(spec.shape, "bool")
            if self._like is not None:
                given = self._like.read_box(self._made.leaf, self._box)
                same = ~unequal(self._values, _forward(self._rest, given))
                np.copyto(whole, given, where=apply(inverse(moves, flags), same))
            self._require_same_again(self._values, _forward(self._rest, whole))
            mask = apply(inverse(moves, flags), np.ones(out_spec(moves, flags).shape, bool))
            self._whole = whole, mask
        return self._whole

    def _require_one_value(self, here: Array, given: Array) -> None:
        if not same_bits(here, given):
            names = dict.fromkeys(step.name for step, _ in self._made.parts)
            raise PlanError(
                Finding(
                    "tied-weights-differ",
                    f"these tensors hold the same elements of the leaf {self._made.leaf}",
                    rule=self._step.rule.line_only,
                    path=" and ".join(names),
                    expected="equal values",
                    got=f"{count_unequal(here, given)} of {here.size} values that differ",
                    fix=self._made.remedy
                    or "a checkpoint of the source's model has one leaf for both: the tensors must be equal",
                )
            )

    def _require_same_again(self, got: Array, again: Array) -> None:
        if same_bits(got, again):
            return
        wrong = unequal(got, again)
        raise PlanError(
            Finding(
                "value-not-reversible",
                f"no {self._made.spec.dtype} in the leaf {self._made.leaf} gives this value ({self._step.arithmetic or 'cast'})",
                rule=self._step.rule.line_only,
                path=self._step.name,
                expected=str(got[wrong].ravel()[0]),
                got=f"{again[wrong].ravel()[0]} when the leaf is converted again",
                fix=(not self._step.arithmetic and self._made.remedy)  # rearranged, the value would be rounded as well
                or "give with --like a checkpoint whose leaf has a wider dtype, or a wider --dtype for leaves that it lacks, such as float32; or round the tensors first",
                data={"values": int(np.count_nonzero(wrong)), "leaf": self._made.leaf},
            )
        )


def _forward(ops: tuple[Op, ...], x: Array) -> Array:
    with np.errstate(all="ignore"):
        try:
            return apply(ops, x)
        except OverflowError:
            return np.full(out_spec(ops, TensorSpec(x.shape, x.dtype.name)).shape, np.nan)


def _backwards(ops: tuple[Op, ...], x: Array) -> Array:
    """Apply inverse operations. Values that do not fit are found when the result is computed forward."""
    for op in ops:
        with np.errstate(all="ignore"):
            x = x.astype(numpy_dtype(op.dtype)) if isinstance(op, Cast) else op.apply(x)
    return x


def back(ops: tuple[Op, ...], y: Array, dtype: str) -> Array:
    """Undo elementwise operations, of which the first takes values of `dtype`."""
    specs = [TensorSpec((), dtype)]
    for op in ops:
        specs.append(op.out_spec(specs[-1]))
    for op, before in zip(reversed(ops), reversed(specs[:-1]), strict=True):
        assert isinstance(op, Cast | Add | Multiply)
        y = _backwards((op.inverse(before),), y)
    return y
