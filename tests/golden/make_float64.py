"""Writes float64/WRITER.npz: what upstream's code computes from other goldens in float64 with casts removed, on a CPU.

    PYTHONPATH=src:tests:tests/golden:MORE python tests/golden/make_float64.py WRITER [CASE ...]

in the environment of the script that wrote the goldens, with what that script needs in MORE:

    gemma       make_gemma3_vision.py
    gemma_int   make_gemma3_int.py
    big_vision  make_big_vision.py
    keras_hub   make_keras_hub.py
    maxtext     make_maxtext.py
    flax        make_flax_families.py, with jax 0.4.38, flax 0.10.2 and numpy 2.2.6: older ones do not evaluate without casts
    timesfm, recurrentgemma, tabfm    make_timesfm_2p5.py, make_recurrentgemma.py, make_tabfm.py
    timesfm_1   praxis 1.4.0, fiddle 0.3.0, timesfm 1.2.9, and of lingvo 0.12.7 core/nested_map.py alone, with jax 0.4.38, flax 0.10.2, numpy 1.26.4

The weights are those of the goldens, and the inputs, too. Of each output, 64 numbers are kept.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from convert.numerics.lift_jax import Lifted, float64, lift
from support import float64 as recorded
from support.goldens import checkpoint, golden_io, relative_error
from support.stand_in import StandIn

Outputs = Mapping[str, Any]
Case = tuple[
    str, Callable[[Any], Outputs], Any, Outputs
]  # its name, upstream's code, its leaves, and the outputs in float32


def gemma() -> Iterator[Case]:
    import make_gemma3_vision as vision
    import read_back

    from support.gemma_models import CASES

    read_back.stand_in()
    from gemma.gm.ckpts import _checkpoint

    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            path = read_back.train_state(case, Path(folder)) if case == "gemma3-kauldron" else checkpoint(case)
            model, io = read_back.model(case), golden_io(case)

            def text(params: Any, model: Any = model, io: Any = io) -> Outputs:
                return {"logits": model.apply({"params": params}, io["tokens"]).logits}

            yield case, text, _checkpoint.load_params(path), io
    model, io = vision.transformer(), golden_io("gemma3-vision")

    def images(params: Any) -> Outputs:
        read = {"params": params}
        _, soft, logits = model.apply(read, io["tokens"], io["images"], method=vision.every_position)
        return {"soft_tokens": soft, "logits": logits, "text_logits": model.apply(read, io["tokens"]).logits}

    yield "gemma3-vision", images, _checkpoint.load_params(checkpoint("gemma3-vision")), io


def gemma_int() -> Iterator[Case]:
    import make_gemma3_int as made
    import make_gemma3_vision
    import orbax.checkpoint as ocp

    make_gemma3_vision._stand_in_for_kauldron()
    from gemma.gm.nn._quantization import IntWrapper

    for bits in (4, 8):
        case, wrapper = (
            f"gemma3-int{bits}",
            IntWrapper(model=made.transformer(), dtype=jnp.int4 if bits == 4 else jnp.int8),
        )
        io = golden_io(case)
        with ocp.StandardCheckpointer() as checkpointer:
            params = checkpointer.restore(checkpoint(case).resolve())

        def run(params: Any, wrapper: Any = wrapper, io: Any = io) -> Outputs:
            return {"logits": wrapper.apply({"params": params}, io["tokens"]).logits}

        yield case, run, params, io


def big_vision() -> Iterator[Case]:
    import make_big_vision as made

    made.stand_in_for_utils()
    models: dict[str, Callable[[], tuple[Any, Any]]] = {  # each sets the sizes of all, so each is made where it is run
        "paligemma1": lambda: (made.paligemma_model({"num_kv_heads": 1}, scan=True), made.read_by_paligemma),
        "paligemma2": lambda: (
            made.paligemma_model(made.SECOND | {"embed_dtype": "float64"}, scan=False),
            made.read_by_paligemma,
        ),
        "siglip": lambda: (made.siglip_model(), made.read_by_siglip),
    }
    for case, make in models.items():
        model, read = make()
        io, stored = golden_io(case), np.load(checkpoint(case).with_suffix(".npz"))
        leaves = {name.removeprefix("params/"): stored[name] for name in stored.files}
        leaves = {name: x.view(jnp.bfloat16).astype(np.float32) if x.dtype == "V2" else x for name, x in leaves.items()}
        params = unflatten_dict(leaves, sep="/")
        yield case, lambda params, model=model, read=read, io=io: read(model, params, io), params, io


def flax() -> Iterator[Case]:
    """One class of each family."""
    import make_flax_families as made

    from support import flax_families

    made.patched()
    first = {case.partition(".")[0]: case for case in reversed(flax_families.CASES)}
    for case in made.cases():
        if case.name not in first.values():
            continue
        model, leaves = made.built(case)
        given, outputs = flax_families.values(case.name, "in"), flax_families.values(case.name, "out")

        def run(
            params: Any, case: Any = case, model: Any = model, given: Any = given, outputs: Any = outputs
        ) -> Outputs:
            found = made.computed(case, model, params, given)
            return {name: found[name] for name in outputs}

        yield case.name, run, unflatten_dict(leaves, sep="/"), outputs


def keras_hub() -> Iterator[Case]:
    import make_keras_hub as made

    from support import keras_hub as goldens

    for case, make in made.CASES.items():
        model, io = make(), dict(np.load(goldens.ROOT / case / "io.npz"))
        names = [name for name in io if name not in goldens.OUTPUTS.values()]
        given = io["images"] if case == "vit" else {name: io[name] for name in names}
        model(given)
        with tempfile.TemporaryDirectory() as folder:
            saved = model if case in ("vit", "bert") else model.backbone  # a preset keeps the backbone
            saved.load_weights(goldens.checkpoint(case, Path(folder)) / "model.weights.h5")

        def run(weights: Any, case: str = case, model: Any = model, given: Any = given) -> Outputs:
            found, _ = model.stateless_call(*weights, given)
            found = found if isinstance(found, dict) else {"logits": found}
            return {name: goldens.seen(case, x) for name, x in found.items()}

        weights = (
            [np.asarray(x) for x in model.trainable_variables],
            [np.asarray(x) for x in model.non_trainable_variables],
        )
        yield case, run, weights, {name: goldens.seen(case, x) for name, x in io.items() if name in goldens.OUTPUTS.values()}  # fmt: skip


def timesfm() -> Iterator[Case]:
    """TimesFM 2.5; also its outputs as transformers' class gives them (support/timesfm_parity.py)."""
    import make_timesfm_2p5 as made
    import orbax.checkpoint as ocp
    from flax import nnx

    from support.timesfm_parity import as_in_transformers

    case, names = "timesfm-2.5", ("renormed_outputs", "quantile_spread", "ar_outputs")
    graph, state = nnx.split(made.SmallModule())
    io = golden_io(case)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(checkpoint(case).resolve(), state)

    def run(state: Any) -> Outputs:
        decoded = nnx.merge(graph, state).decode(int(io["horizon"]), jnp.asarray(io["inputs"]), jnp.asarray(io["masks"]))  # fmt: skip
        found = dict(zip(names, decoded, strict=True))
        return found | as_in_transformers(io, found)

    yield case, lift(run, staged=True), state, io | as_in_transformers(io, io)


def timesfm_1() -> Iterator[Case]:
    """The code of praxis 1.4.0 and timesfm 1.2.9, in a Python whose JAX evaluates without casts: lingvo and TensorFlow have no builds for it.

    Its forward pass needs lingvo's NestedMap alone, which is plain Python; names stand for the rest.
    """
    absent = ("tensorflow", "tensorflow_datasets", "paxml", "pandas", "lingvo")
    StandIn(*absent, but=("lingvo", "lingvo.core", "lingvo.core.nested_map")).__enter__()
    package = sys.modules["timesfm"] = types.ModuleType("timesfm")  # its __init__ imports what reads checkpoints
    package.__path__ = [str(Path(folder) / "timesfm") for folder in sys.path if (Path(folder) / "timesfm").is_dir()]
    import make_timesfm_1 as made
    from praxis import base_layer, py_utils

    from convert.checkpoints import open_source

    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
        for case in made.CASES:
            io = golden_io(case.name)
            inputs = py_utils.NestedMap({name: jnp.asarray(io[name]) for name in ("input_ts", "input_padding", "freq")})
            source, model = open_source(checkpoint(case.name)), made.build(case)
            shapes = jax.eval_shape(model.init, jax.random.PRNGKey(0), made.context_of(inputs))
            paths, tree = jax.tree_util.tree_flatten_with_path(shapes)
            names = ["/".join(("mdl_vars", *(str(key.key) for key in path))) for path, _ in paths]
            leaves = jax.tree_util.tree_unflatten(tree, [source.read(name) for name in names])

            def run(variables: Any, model: Any = model, inputs: Any = inputs) -> Outputs:
                lengths = {"horizon_len": made.HORIZON, "output_patch_len": made.OUTPUT_PATCH, "max_len": made.CONTEXT}
                mean, full = model.apply(variables, inputs, **lengths, method=model.decode)
                return {"mean": mean, "full": full}

            yield case.name, lift(run, staged=True), leaves, io


def recurrentgemma() -> Iterator[Case]:
    """Also the logits of the two sequences that transformers' class is given (support/recurrentgemma.py)."""
    import make_recurrentgemma as made
    import orbax.checkpoint as ocp

    case = "recurrentgemma"
    io = golden_io(case)
    model = made.griffin.Griffin(made.CONFIG, gradient_checkpointing=False)
    with ocp.StandardCheckpointer() as checkpointer:
        variables = checkpointer.restore(checkpoint(case).resolve())

    def run(variables: Any) -> Outputs:
        tokens, positions = (jnp.asarray(io[name]) for name in ("tokens", "positions"))
        logits, _ = model.apply(variables, tokens, positions, return_cache=False)
        return {"logits": logits, "first_logits": logits[:2]}

    yield case, run, variables, io | {"first_logits": io["logits"][:2]}


def tabfm() -> Iterator[Case]:
    import make_tabfm as made
    import orbax.checkpoint as ocp
    from flax import nnx

    for case, loss in (("tabfm-classification", "cross_entropy"), ("tabfm-regression", "rmse")):
        model = made.TabFM(loss=loss, rngs=nnx.Rngs(0), dtype=jnp.float32, **made.SIZES, **made.PUBLISHED)
        graph, state = nnx.split(model)
        io = golden_io(case)
        given = [jnp.asarray(io[f"in_{name}"]) for name in ("x", "y", "train_size", "d", "cat_mask")]
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore((checkpoint(case) / "orbax" / "0" / "params").resolve(), state)

        def run(state: Any, graph: Any = graph, given: Any = given) -> Outputs:
            return {"out": nnx.merge(graph, state)(*given)}

        yield case, lift(run, staged=True), state, io


def maxtext() -> Iterator[Case]:
    """Its code reads what a scan has traced: it is traced as a whole, and not run as Python."""
    import make_maxtext as made
    from flax import nnx

    for case, (name, _, changes) in made.CASES.items():
        if case.endswith(("-unscanned", "-tied", "-untied")) and not case.startswith("gemma4"):
            continue
        config = made.pyconfig.initialize_pydantic(made.configured(name, changes))
        mesh = made.maxtext_utils.get_mesh_from_config(config)
        io = dict(np.load(made.HERE / case / "io.npz"))
        with jax.set_mesh(mesh):
            model = made.model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))
            made.randomize(
                model,
                np.random.default_rng(int(hashlib.sha256(case.encode()).hexdigest()[:8], 16)),
                config,
            )
            graph, state = nnx.split(model)

            def run(state: Any, graph: Any = graph, io: Any = io, config: Any = config) -> Outputs:
                model = nnx.merge(graph, state)

                def logits(tokens: Any, where: Any = None, **images: Any) -> Any:
                    if where is None:
                        where = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
                    return model(
                        tokens, where, decoder_segment_ids=np.ones_like(tokens), enable_dropout=False, **images
                    )

                if "patches" in io:
                    pixels = io["patches"].reshape(made.pixels(config))
                    soft, deep = model.vision_encoder(pixels, deterministic=True)
                    found = {"soft_tokens": soft, **{f"deep_{k}": x for k, x in enumerate(deep)}}
                    heard = {"encoder_audios": io["sounds"]} if "sounds" in io else {}
                    if heard:
                        found["sound_tokens"] = model.audio_encoder(io["sounds"], deterministic=True)
                    found["logits"] = logits(io["tokens"], where=io["positions"], encoder_images=pixels, **heard)
                    return found | {"text_logits": logits(io["text_tokens"])}
                if "images" not in io:
                    return {"logits": logits(io["tokens"])}
                pixels = made.seen(io["images"], config)
                soft, _ = model.vision_encoder(pixels, deterministic=True)
                found = {"logits": logits(io["tokens"], encoder_images=pixels)[:, io["kept"]], "soft_tokens": soft[:, :, :: made.placeholders(config)[2]]}  # fmt: skip
                return found | {"text_logits": logits(io["text_tokens"])}

            yield case, lift(run, staged=True), state, io


def main() -> None:
    """Replaces the cases of a writer, or some of them."""
    jax.config.update("jax_platforms", "cpu")
    writer, *wanted = sys.argv[1:]
    made = {}
    for case, run, leaves, before in globals()[writer]():
        if wanted and case not in wanted:
            continue
        with float64():
            exact = jax.tree.map(np.asarray, (run if isinstance(run, Lifted) else lift(run))(leaves))
        drift = {name: f"{relative_error(before[name], x):.1e}" for name, x in exact.items()}
        print(f"{case}: float32 is off by {drift}", flush=True)
        made |= {f"{case}/{name}": x for name, x in exact.items()}
    recorded.save(writer, made)


if __name__ == "__main__":
    main()
