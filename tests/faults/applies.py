"""Which faults of the project's list are in the catalogue for which models, and why the others are not.

`LIST` has an entry for each fault that the list names: the beginnings of the names of its rows, and, for the families that have no
such row, why. A family without a row and without a reason, or with both, fails the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from faults.expected import Fault

FAMILIES: Mapping[str, tuple[str, ...]] = {  # as the page calls them -> cases
    "TimesFM 1.0 and 2.0": ("timesfm-1.0", "timesfm-2.0"),
    "TimesFM 2.5": ("timesfm-2.5",),
    "RecurrentGemma": ("recurrentgemma",),
    "Gemma": ("gemma1-mha", "gemma2-2b", "gemma3"),
}
ONE, FIVE, GRIFFIN, GEMMA = FAMILIES
TIMESFM = (ONE, FIVE)


@dataclass(frozen=True)
class Listed:
    """A fault of the list.

    Attributes:
        name: as the list has it.
        rows: beginnings of the names of its rows.
        without: families without a row -> why.
    """

    name: str
    rows: tuple[str, ...]
    without: Mapping[str, str]

    def rows_of(self, faults: Iterable[Fault]) -> list[Fault]:
        """Its rows."""
        return [fault for fault in faults if fault.name.startswith(self.rows)]


def listed(name: str, rows: str | tuple[str, ...], *without: tuple[Iterable[str], str]) -> Listed:
    families = {family: why for names, why in without for family in names}
    return Listed(name, (rows,) if isinstance(rows, str) else rows, families)


def elsewhere(*families: str) -> tuple[tuple[str, ...], str]:
    """It applies, and the check that catches it elsewhere has nothing of the model in it."""
    return families, "applies; not planted again, as the same rule or hypothesis catches it in the models above"


LIST: tuple[Listed, ...] = (
    listed("output projection transposed (square)", ("output projection transposed", "recurrent output projection", "attention output projection")),
    listed("q/k swapped", "q and k swapped", ([GRIFFIN], "one key head: queries and keys differ in shape")),
    listed("gate/up swapped", "gate and up swapped", (TIMESFM, "its feed-forward layers have no gate")),
    listed("heads permuted", "heads permuted", elsewhere(ONE, GRIFFIN)),
    listed("head and feature axes swapped within a projection", "head and feature axes swapped", elsewhere(GRIFFIN)),
    listed("1+scale missing", "1+scale missing", ([FIVE], "its norms multiply by the plain scale")),
    listed("1+scale doubled", ("1+scale doubled", "1+scale folded and added again"), ([FIVE], "its norms multiply by the plain scale")),
    listed("1+scale put on a plain norm", ("1+scale on a plain norm", "1+scale on a norm that adds 1"), ([GRIFFIN], "all its norms have the 1")),
    listed("LayerNorm for RMSNorm", "LayerNorm for RMSNorm", elsewhere(GRIFFIN)),
    listed("epsilon 1e-5 for 1e-6", "epsilon 1e-5 for 1e-6"),
    listed("erf for tanh GeLU and the reverse", "erf for tanh GeLU", (TIMESFM, "it has ReLU and SiLU; GeLU in their place is planted")),
    listed("SiLU for GeLU", "SiLU for GeLU", (TIMESFM, "it has no GeLU; GeLU for SiLU is planted"), elsewhere(GRIFFIN)),
    listed("half-split for interleaved RoPE", ("interleaved for half-split RoPE", "interleaved RoPE"), ([ONE], "no RoPE"), elsewhere(GRIFFIN)),
    listed("wrong RoPE base", ("wrong RoPE base", "RoPE base"), ([ONE], "no RoPE"), elsewhere(GRIFFIN)),
    listed("per-dim scale without softplus", "per-dim scale without softplus", ([GRIFFIN, GEMMA], "no per-dim scale")),
    listed("attention scale missing", ("per-dim scale without 1/√H", "attention scale missing"), elsewhere(GRIFFIN)),
    listed("soft cap missing", ("soft cap missing", "soft cap of"), (TIMESFM, "no soft cap; one that the source does not have is planted in 2.5")),
    listed("window off by one", ("window off by one", "attention window one short"), (TIMESFM, "no window; one that the source does not have is planted")),
    listed("embedding √D missing", "embedding √D missing", (TIMESFM, "no token embedding"), elsewhere(GRIFFIN)),
    listed("two layers swapped", "two layers swapped", elsewhere(GRIFFIN)),
    listed("layer index shifted", ("layer index shifted", "layers shifted by one"), ([FIVE], "its layers are stacked on one axis: no name has an index"), elsewhere(GRIFFIN)),
    listed("lexical order (10 before 2)", "layers in lexical order", ([FIVE], "its layers are stacked on one axis: no name has an index"), elsewhere(GRIFFIN)),
    listed("bias dropped", "bias dropped", ([GEMMA], "no biases"), elsewhere(FIVE, GRIFFIN)),
    listed("one bias added to another's layer", "a bias added to another's layer", ([GEMMA], "no biases"), elsewhere(FIVE, GRIFFIN)),
    listed("tied head untied", "tied head untied", (TIMESFM, "no token head"), elsewhere(GRIFFIN)),
    listed("wrong slice of a padded vocabulary", "wrong slice of the padded vocabulary", (TIMESFM, "no vocabulary"), ([GRIFFIN], "its table has a row for each entry, and no more")),
    listed("a norm folded in bfloat16", "norm folded in bfloat16", ([FIVE], "its norms multiply by the plain scale"), ([GRIFFIN], "its targets add the 1 themselves: nothing is folded")),
    listed("one bit flipped in one weight", ("last bit of one weight flipped", "an exponent bit", "one bit flipped"), elsewhere(ONE, GRIFFIN)),
    listed("one row zeroed", "one row zeroed", elsewhere(ONE, GRIFFIN)),
    listed("NaN", "NaN in one weight", elsewhere(ONE, GRIFFIN)),
    listed("stale state in a recurrence", ("stale state", "both, as Burn"), ([*TIMESFM, GEMMA], "no recurrence"), ([GRIFFIN], "both sides run upstream's scan; its gates, swapped and transposed, are planted")),
    listed("reset gate on the wrong side of the matmul", ("reset gate on the wrong side", "both, as Burn"), ([*TIMESFM, GEMMA], "no recurrence"), ([GRIFFIN], "its recurrence has no reset gate")),
    listed("b_hn folded into b_in", "b_hn folded into b_in", ([*TIMESFM, GEMMA], "no recurrence"), ([GRIFFIN], "its recurrence has no bias inside a gate")),
    listed("convolution not flipped", ("convolution kernel flipped", "convolution flipped", "kernel turned round", "transposed convolution without its turn"), ([*TIMESFM, GEMMA], "no convolution")),
    listed("HWIO read as OIHW", "OIHW and HWIO", ([*TIMESFM, GEMMA], "no convolution"), ([GRIFFIN], "its convolution is depthwise, and its kernel has no channels in")),
    listed("NHWC flatten fed to an NCHW dense", ("NHWC flatten left as it is", "the map's flattening not declared"), (FAMILIES, "no flattened map")),
    listed("`LinearInterpolation` derivative broadcast to (T, T)", "derivative at all times at once", (FAMILIES, "no path through data")),
    listed("a backend with a wrong fused kernel", "fused kernel", (FAMILIES, "not of a model: the check of backends is the same for all; planted in `conv-norm`")),
)  # fmt: skip

COLUMNS = ("fault", "planted in", "not planted in")


def rows(faults: Iterable[Fault]) -> list[list[str]]:
    """Write the table: each fault of the list, where it is planted, and why it is not planted elsewhere."""
    faults, table = list(faults), []
    for entry in LIST:
        reasons: dict[str, list[str]] = {}
        for family, why in entry.without.items():
            reasons.setdefault(why, []).append(family)
        without = [f"{', '.join(families)}: {why}" for why, families in reasons.items()]
        table.append(
            [entry.name, ", ".join(sorted({fault.case for fault in entry.rows_of(faults)})), "; ".join(without)]
        )
    return table
