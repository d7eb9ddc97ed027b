"""Measures every family that upstream's own code wrote a golden for: its outputs, and faults planted in its converted file.

    PYTHONPATH=tests python -m support.family_table

It writes docs/explanation/families.csv, of which the documentation makes a table. The errors of the Flax models of transformers are those
of docs/models/flax-transformers.md, which `support.flax_table` measures for each class.
"""

from __future__ import annotations

import csv
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from support.paths import DOCS, GOLDEN

TABLE = DOCS / "explanation" / "families.csv"
COLUMNS = (
    "family",
    "run by",
    "bytes by",
    "read by",
    "error in float32",
    "error in float64",
    "drift of JAX",
    "faults planted and named",
)
MAXTEXT, T5X, KERAS = "maxtext 0.2.5", "google-research/t5x@cc342d4", "keras-hub 0.32.0"
FLAXFORMER = "google/flaxformer@399ea3a"
FLAX, VIT, GEMMA = "transformers 4.49 (Flax)", "vision_transformer@c6de1e5", "gemma 3.3.0"
OPENPI, BIG_VISION, TUNIX, GEMMA_4 = "openpi@15a9616", "big_vision@0127fb6", "google-tunix 0.1.7", "gemma 4.0.1"
VIDEOPRISM, TIPS, SCENIC = "videoprism@d481d91", "tips@4db271d", "scenic@4a38d47"
DIFFUSERS = "diffusers 0.35.2 (Flax)"
BRAX, SBX = "brax 0.14.2", "sbx-rl 0.28.0"
PRAXIS, TIMESFM, RECURRENT, TABFM = (
    "timesfm 1.2.9, praxis 1.4.0",
    "timesfm 3.0.2",
    "recurrentgemma 1.0.1",
    "tabfm 1.0.1",
)
HF, TIMM, LEROBOT = "transformers 5.23", "timm 1.0.31", "lerobot 0.6.1"
READERS = {
    DIFFUSERS: "diffusers 0.42.1",
    BRAX: "examples/brax",
    SBX: "stable-baselines3 2.9.2",
    TABFM: TABFM,
}  # and of all others, HF, unless the case names its target
TOWERS = " with towers"
TO = " for "  # in the name of a case: its target, where a family has several
TARGETS = {
    "timm": TIMM,
    "lerobot": LEROBOT,
    "recurrentgemma": RECURRENT,
    "timesfm": TIMESFM,
    "timesfm 1": "timesfm 1.3.0",
}
# Who wrote the bytes of the checkpoint: the run that computed the outputs, or the tests, from the names and shapes of its tree.
THAT_RUN, TESTS, EQUAL = "that run", "the tests", "the tests, equal by SHA-256"


@dataclass(frozen=True)
class Measured:
    """What one family's golden gives.

    Attributes:
        error: relative error of the PyTorch class in float32.
        exact: of both sides in float64 with casts removed.
        source, out: the checkpoint and the output.
    """

    error: float
    exact: float
    source: Path
    out: Path


Measure = Callable[[str, Path], Measured]


def _in_float64(writer: str, case: str, load: Callable[[], Any], run: Callable[[Any], Mapping[str, Any]]) -> float:
    """Return the error of a PyTorch model in float64 with casts removed, also while it is made."""
    from convert.numerics.lift_torch import lifted
    from support import float64

    with lifted():
        return float64.error(writer, case, run(load().double()))


def _timm(case: str, folder: Path) -> Measured:
    from support import timm_models

    source, out = timm_models.converted(case, folder)
    return Measured(*timm_models.errors(case, out), source, out)


def _lerobot(case: str, folder: Path) -> Measured:
    from support import lerobot

    source, out = lerobot.converted(case, folder)
    return Measured(*lerobot.errors(case, out), source, out)


def _timesfm(case: str, folder: Path) -> Measured:
    import convert
    from support import timesfm_parity
    from support.goldens import checkpoint

    case, _, target = case.partition(TO)
    target = "timesfm" if target else "transformers"
    settings = {} if target == "timesfm" else timesfm_parity.SETTINGS[case]
    out = folder / ("out.safetensors" if target == "timesfm" else "out")
    convert.convert("timesfm", checkpoint(case), out, to=target, settings=settings)
    return Measured(*timesfm_parity.errors(case, target, out), checkpoint(case), out)


def _recurrentgemma(case: str, folder: Path) -> Measured:
    from support import recurrentgemma
    from support.goldens import checkpoint

    target = "recurrentgemma" if TO in case else "transformers"
    out = recurrentgemma.converted(target, folder)
    return Measured(*recurrentgemma.errors(target, out), checkpoint(recurrentgemma.CASE), out)


def _tabfm(case: str, folder: Path) -> Measured:
    import convert
    from support import tabfm
    from support.goldens import checkpoint

    convert.convert("tabfm", checkpoint(case), folder / "out")
    return Measured(*tabfm.errors(case, folder / "out"), checkpoint(case), folder / "out")


def _maxtext(case: str, folder: Path) -> Measured:
    from support import maxtext

    out = maxtext.converted(case, folder / "out")
    return Measured(maxtext.error(case, out), maxtext.exact_error(case, out), maxtext.checkpoint(case), out)


def _keras(case: str, folder: Path) -> Measured:
    from support import keras_hub

    source, out = keras_hub.converted(case, folder)

    def run(model: Any) -> dict[str, Any]:
        return {name: keras_hub.seen(case, x) for name, x in keras_hub.outputs(case, model).items()}

    exact = _in_float64("keras_hub", case, lambda: keras_hub.load(out), run)
    return Measured(max(keras_hub.errors(case, out).values()), exact, source, out)


def _t5x(case: str, folder: Path) -> Measured:
    import convert
    from convert.numerics.lift_torch import lifted
    from support import t5x_cases
    from support.goldens import relative_error

    source, out = t5x_cases.write(case, folder / "source"), folder / "out"
    convert.convert(t5x_cases.rules(case), source, out, settings=t5x_cases.RULES[case][1])
    model = _loaded(out)
    given = t5x_cases.as_tensors(case)
    rounded, exact = (t5x_cases.ALL.values(case, kind)["logits"] for kind in ("out", "out64"))
    single = model(**given).logits[:, ::4].numpy()
    with lifted():
        given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
        double = model.double()(**given).logits[:, ::4].numpy()
    return Measured(relative_error(single, rounded), relative_error(double, exact), source, out)


def _openpi(case: str, folder: Path) -> Measured:
    import convert
    from support import openpi

    source = openpi.write(case, folder)
    convert.convert("openpi", source, folder / "out", settings=openpi.settings_of(case))
    return Measured(*openpi.errors(case, folder / "out"), source, folder / "out")


def _vit(case: str, folder: Path) -> Measured:
    from support import vit

    source, out = vit.converted(case, folder)
    return Measured(*vit.errors(case, out), source, out)


def _big_vision(case: str, folder: Path) -> Measured:
    import convert
    from support import siglip2, vit

    if case in vit.CASES:
        return _vit(case, folder)
    if case != siglip2.CASE:
        return _images(case, folder)
    source = siglip2.write(folder)
    convert.convert("siglip2", source, folder / "out")
    return Measured(*siglip2.errors(folder / "out"), source, folder / "out")


def _videoprism(case: str, folder: Path) -> Measured:
    from support import videoprism

    source, out = videoprism.converted(case, folder)
    return Measured(*videoprism.errors(case, out), source, out)


def _tips(case: str, folder: Path) -> Measured:
    from support import tips

    source, out = tips.converted(case, folder)
    return Measured(*tips.errors(case, out), source, out)


def _scenic(case: str, folder: Path) -> Measured:
    from support import owl_vit, vit, vivit

    if case in vit.SCENIC_CASES:
        return _vit(case, folder)
    if case == vivit.CASE:
        source, out = vivit.converted(folder)
        return Measured(*vivit.errors(out), source, out)
    source, out = owl_vit.converted(case, folder)
    return Measured(*owl_vit.errors(case, out), source, out)


def _diffusers(case: str, folder: Path) -> Measured:
    import convert
    from convert.numerics.lift_torch import lifted
    from support import diffusers_cases

    source = diffusers_cases.write(case, folder / "source")
    convert.convert("flax-diffusers", source, folder / "out")
    model = diffusers_cases.as_flax(diffusers_cases.loaded(folder / "out"))
    error = diffusers_cases.errors(model, case)
    with lifted():
        return Measured(error, diffusers_cases.errors(model.double(), case, "out64"), source, folder / "out")


def _brax(case: str, folder: Path) -> Measured:
    from support import brax

    source, out = brax.converted(case, folder)
    return Measured(*brax.errors(case, out), source, out)


def _sbx(case: str, folder: Path) -> Measured:
    from support import sbx

    source, out = sbx.converted(case, folder)
    assert sbx.digest(out) == sbx.loaded_by_sb3(case)
    return Measured(sbx.error(case), sbx.error(case, "64"), source, out)


def _tunix(case: str, folder: Path) -> Measured:
    import convert
    from support import tunix

    source = tunix.write(folder)
    convert.convert("tunix-gemma3", source, folder / "out", settings=tunix.SET)
    return Measured(*tunix.errors(folder / "out"), source, folder / "out")


def _images(case: str, folder: Path) -> Measured:
    from support import gemma_image_models

    out = gemma_image_models.directory(case, folder / "out")
    writer = "gemma" if case == "gemma3-vision" else "big_vision"
    exact = _in_float64(writer, case, lambda: gemma_image_models.load(out), partial(gemma_image_models.outputs, case))
    return Measured(max(gemma_image_models.errors(case, out).values()), exact, gemma_image_models.path(case), out)


def _gemma(case: str, folder: Path) -> Measured:
    from support import gemma_models
    from support.goldens import checkpoint

    if case not in (*gemma_models.CASES, *gemma_models.INTEGERS):
        return _images(case, folder)
    out = gemma_models.directory(case, folder / "out")

    def run(model: Any) -> dict[str, Any]:
        return {"logits": gemma_models.logits(model, case)}

    writer = "gemma_int" if case in gemma_models.INTEGERS else "gemma"
    return Measured(gemma_models.error(case, out), _in_float64(writer, case, lambda: gemma_models.load(out), run), checkpoint(case), out)  # fmt: skip


def _gemma_4(case: str, folder: Path) -> Measured:
    from support import gemma_drawn, gemma_models, gemma_towers, t5gemma

    if case in gemma_models.INTEGERS:
        return _gemma(case, folder)
    case, towers, _ = case.partition(TOWERS)
    cases = gemma_towers if towers else t5gemma if case in t5gemma.CASES else gemma_drawn
    source, out = cases.converted(case, folder)
    return Measured(*cases.errors(case, out), source, out)


def _flax(family: str, folder: Path) -> Measured:
    import convert
    from support import flax_families, flax_table

    case = flax_table.listed()[family][0]
    source = flax_families.write(case, folder / "source")
    convert.convert("flax-transformers", source, folder / "out")
    exact = _in_float64(
        "flax", case, lambda: flax_table.loaded(folder / "out")[0], lambda model: flax_table.outputs(model, case)
    )
    return Measured(flax_errors()[flax_families.config(case)["model_type"]], exact, source, folder / "out")


def flax_errors() -> dict[str, float]:
    """Return the largest error of each family's classes, from the page."""
    from support import flax_table

    cells = [line.split("|") for line in flax_table.PAGE.read_text().splitlines() if line.count("|") == 5]
    return {row[1].strip(): float(row[3]) for row in cells if "e-" in row[3]}


def _loaded(out: Path) -> Any:
    from support.flax_table import loaded

    return loaded(out)[0].requires_grad_(False)


MEASURES: Mapping[str, Measure] = {
    MAXTEXT: _maxtext,
    KERAS: _keras,
    T5X: _t5x,
    FLAXFORMER: _t5x,
    VIT: _vit,
    GEMMA: _gemma,
    FLAX: _flax,
    DIFFUSERS: _diffusers,
} | {
    OPENPI: _openpi,
    BIG_VISION: _big_vision,
    TUNIX: _tunix,
    GEMMA_4: _gemma_4,
    VIDEOPRISM: _videoprism,
    TIPS: _tips,
    SCENIC: _scenic,
    BRAX: _brax,
    SBX: _sbx,
    PRAXIS: _timesfm,
    TIMESFM: _timesfm,
    RECURRENT: _recurrentgemma,
    TABFM: _tabfm,
}
ELSEWHERE: Mapping[str, Measure] = {"timm": _timm, "lerobot": _lerobot}  # by target, for all writers


def measured(writer: str, case: str, folder: Path) -> Measured:
    """Convert and run a case of `families`."""
    name, _, target = case.partition(TO)
    return ELSEWHERE[target](name, folder) if target in ELSEWHERE else MEASURES[writer](case, folder)


def families() -> Iterator[tuple[str, str, str]]:
    """Yield the name of each row, its writer, and the case that is measured."""
    from support import flax_table, gemma_drawn, gemma_models, gemma_towers, keras_hub, maxtext, t5gemma, t5x_cases

    for case in ("timesfm-1.0", "timesfm-2.0", "timesfm-2.5"):
        writer, own = (TIMESFM, "timesfm") if case == "timesfm-2.5" else (PRAXIS, "timesfm 1")
        yield f"{case} (timesfm)", writer, f"{case}{TO}{own}"
        yield f"{case} (timesfm), transformers", writer, case
    for case in ("tabfm-classification", "tabfm-regression"):
        yield f"{case} (tabfm)", TABFM, case
    yield "recurrentgemma (recurrentgemma)", RECURRENT, f"recurrentgemma{TO}recurrentgemma"
    yield "recurrentgemma (recurrentgemma), transformers", RECURRENT, "recurrentgemma"
    for case in maxtext.CASES:
        if maxtext.family(case) == case:
            yield f"{case} ({maxtext.SHOWN.get(case, 'MaxText')})", MAXTEXT, case
    for case in t5x_cases.CASES:
        yield f"{t5x_cases.SHOWN.get(case, case)} (T5X)", FLAXFORMER if case in t5x_cases.FLAXFORMER else T5X, case
    for case in keras_hub.CASES:
        yield f"{case} (Keras Hub)", KERAS, case
    for case, shown in (("vit", "AugReg"), ("jax-pre-logits", "class token and pre_logits"), ("jax-gap", "mean")):
        yield f"vit, {shown} (vit_jax)", VIT, case
    for case in gemma_models.CASES:
        yield f"{case} (gemma)", GEMMA, case
    yield "gemma3 (Tunix)", TUNIX, "gemma3"
    yield "gemma3, images (gemma)", GEMMA, "gemma3-vision"
    for case in ("paligemma1", "paligemma2", "siglip"):
        yield f"{case} (big_vision)", BIG_VISION, case
    yield "siglip2, NaFlex (big_vision)", BIG_VISION, "naflex"
    for case, shown in (("encoder", "videoprism"), ("lvt", "videoprism, LvT")):
        yield f"{shown} (videoprism)", VIDEOPRISM, case
    for case, shown in (("text", "text"), ("image", "images"), ("image-swiglu", "images, SwiGLU")):
        yield f"tips, {shown} (tips)", TIPS, case
    for case in ("owlvit", "owlv2"):
        yield f"{case} (scenic, with its GELU and epsilon in the heads)", SCENIC, case
    yield "vivit (scenic)", SCENIC, "vivit"
    for case, shown in (("tok", "class token"), ("tok-rep", "class token and pre_logits"), ("gap", "mean")):
        yield f"vit, {shown} (big_vision)", BIG_VISION, case
    for case, shown in (
        ("vit-token", "class token"),
        ("vit-token-rep", "class token and pre_logits"),
        ("vit-gap", "mean"),
    ):
        yield f"vit, {shown} (scenic)", SCENIC, case
    for writer, name, cases in (
        (VIT, "vit_jax", {"vit": "vit, AugReg", "jax-gap": "vit, mean"}),
        (BIG_VISION, "big_vision", {"tok": "vit, class token", "gap": "vit, mean", "map": "vit, attention"}),
        (SCENIC, "scenic", {"vit-token": "vit, class token", "vit-gap": "vit, mean", "vit-gmp": "vit, maximum", "vit-map": "vit, attention"}),
        (BIG_VISION, "big_vision", {"clippo": "clippo", "siglip": "siglip, image tower", "naflex": "siglip2, NaFlex, image tower"}),
    ):  # fmt: skip
        for case, shown in cases.items():
            yield f"{shown} ({name}), timm", writer, f"{case}{TO}timm"
    for case in ("ppo", "ppo-asymmetric", "sac"):
        yield f"{case} (brax)", BRAX, case
    for case in ("ppo", "sac"):
        yield f"{case} (SBX)", SBX, case
    for case in ("pi0", "pi0-fast"):
        yield f"{case} (openpi)", OPENPI, case
    for case, shown in (("pi0", "pi0"), ("pi05", "pi0.5"), ("pi0-fast", "pi0-fast")):
        yield f"{shown} (openpi), lerobot", OPENPI, f"{case}{TO}lerobot"
    for case in gemma_drawn.CASES:
        yield f"{case} ({gemma_drawn.SHOWN.get(case, 'gemma')})", GEMMA_4, case
    for case in gemma_towers.CASES:
        yield f"{case}{TOWERS} (gemma, with its masks, windows and norms)", GEMMA_4, f"{case}{TOWERS}"
    for case in gemma_drawn.INTEGERS:
        yield f"{case} (gemma, with the divided weights)", GEMMA_4, case
    for case in (*gemma_models.INTEGERS, *t5gemma.CASES):
        yield f"{case} (gemma)", GEMMA_4, case
    for case in ("unet", "unet.linear", "vae", "controlnet"):
        yield f"{case} (diffusers)", DIFFUSERS, case
    for family in flax_table.listed():
        yield f"{family} (Flax)", FLAX, family


def bytes_by(writer: str, case: str) -> str:
    """Return who wrote the bytes of a row's checkpoint."""
    from support import gemma_drawn, gemma_models, siglip2, vit

    case = case.partition(TO)[0]
    if writer in (FLAX, DIFFUSERS):
        return EQUAL
    drawn = writer in (T5X, FLAXFORMER, VIT, OPENPI, TUNIX, VIDEOPRISM, TIPS, SCENIC, GEMMA_4) or case in (
        siglip2.CASE,
        "clippo",
        *vit.CASES,
    )
    return TESTS if drawn and case not in (*gemma_models.INTEGERS, *gemma_drawn.INTEGERS) else THAT_RUN


FOLDERS = {T5X: "t5x", FLAXFORMER: "t5x", VIT: "vit", OPENPI: "openpi", TUNIX: "tunix", VIDEOPRISM: "videoprism", TIPS: "tips", SCENIC: "scenic", BRAX: "brax", SBX: "sbx", MAXTEXT: "maxtext", KERAS: "keras-hub", FLAX: "flax-families"}  # fmt: skip
IN_SEVERAL = {GEMMA_4: ("gemma4", "gemma4-int", "t5gemma", "."), BIG_VISION: ("vit-big-vision", "clippo", "siglip2", ".")}  # fmt: skip
IN_FLOAT64 = {MAXTEXT: "maxtext", KERAS: "keras_hub", GEMMA: "gemma", FLAX: "flax", PRAXIS: "timesfm_1", TIMESFM: "timesfm", RECURRENT: "recurrentgemma", TABFM: "tabfm"}  # fmt: skip


def drift(writer: str, case: str) -> float:
    """Return how far the code of a row's writer is, in float32, from itself in float64."""
    from support import diffusers_cases, flax_table, gemma_models, jax_drift

    case = case.partition(TO)[0]
    if writer == DIFFUSERS:
        return diffusers_cases.drift(case)
    if case.endswith(TOWERS):
        return jax_drift.drift(case.removesuffix(TOWERS), ("gemma4-towers",))
    if writer == FLAX:
        case = flax_table.listed()[case][0]
    apart = {"paligemma1": "big_vision", "paligemma2": "big_vision", "siglip": "big_vision"} | dict.fromkeys(gemma_models.INTEGERS, "gemma_int")  # fmt: skip
    folders = IN_SEVERAL.get(writer) or (FOLDERS.get(writer, "."),)
    return jax_drift.drift(case, folders, apart.get(case) or IN_FLOAT64.get(writer, ""))


def in_layers(writer: str, case: str) -> int:
    """Return how many faults tests/faults/test_flax_families.py plants in layers, config.json and rules."""
    from faults import flax_cases
    from faults.planted.flax_families import faults_of

    if writer != FLAX or case not in flax_cases.FAMILIES:
        return 0
    return len(list(faults_of(flax_cases.case_of(case))))


def row(name: str, writer: str, case: str) -> dict[str, str]:
    """Measure a family, and plant the faults that any converted file can have; each must be named."""
    from support.value_mistakes import assert_mistakes_are_named

    with tempfile.TemporaryDirectory() as folder:
        made = measured(writer, case, Path(folder))
        planted = assert_mistakes_are_named(made.out, made.source) + in_layers(writer, case)
        stored = made.source.is_relative_to(GOLDEN) or writer == KERAS  # whose files are compressed
        assert stored is (bytes_by(writer, case) == THAT_RUN)
    values = (
        name,
        writer,
        bytes_by(writer, case),
        TARGETS.get(case.partition(TO)[2]) or READERS.get(writer, HF),
        f"{made.error:.1e}",
        f"{made.exact:.1e}",
        f"{drift(writer, case):.1e}",
        str(planted),
    )
    return dict(zip(COLUMNS, values, strict=True))


def read() -> list[dict[str, str]]:
    """Read the written table."""
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    logging.disable(logging.WARNING)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        rows = list(pool.map(row, *zip(*families(), strict=True)))
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    logging.disable(logging.NOTSET)


if __name__ == "__main__":
    main()
