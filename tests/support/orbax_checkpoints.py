"""Orbax checkpoints that the tests write, damage and open."""

import collections
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.checkpoints.orbax.reader import looks_like_orbax, open_orbax
from convert.checkpoints.source import Source
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from support.paths import GOLDEN, TESTS

ORBAX_0_5 = GOLDEN / "orbax-0.5"

LAYOUTS = {
    "ocdbt": ({"use_ocdbt": True}, "Orbax, OCDBT, zarr"),
    "directories": ({"use_ocdbt": False}, "Orbax, one directory per leaf, zarr"),
    "zarr3": ({"use_ocdbt": True, "use_zarr3": True}, "Orbax, OCDBT, zarr3"),
    "zarr3-directories": ({"use_ocdbt": False, "use_zarr3": True}, "Orbax, one directory per leaf, zarr3"),
}
Moments = collections.namedtuple("Moments", ["mu", "nu"])
Copy = Callable[[str], Path]


def arrays() -> dict[str, np.ndarray]:
    """Name -> array of `tree()`."""
    numbers = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return numbers.normal(size=shape)

    return {
        "params/blocks.0/attn/kernel": floats(3, 4, 5).astype(np.float32),
        "params/blocks.0/attn/vec/bias": floats(5).astype(ml_dtypes.bfloat16),
        "layers/0/scale": floats(2).astype(np.float16),
        "params/ä b/w": floats(1, 1).astype(np.float32),
        "opt/0/mu": floats(4).astype(np.float32),
        "opt/0/nu": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "opt/1/0": np.array(3.5, np.float32),
        "opt/1/1": np.zeros((4, 300), np.float32),
        "dtypes/bool": np.array([True, False]),
        "dtypes/complex64": np.array([1 + 2j, -3j], np.complex64),
        "dtypes/float64": floats(3),
        "dtypes/float8_e4m3fn": floats(9).astype(ml_dtypes.float8_e4m3fn),
        "dtypes/float8_e5m2": floats(9).astype(ml_dtypes.float8_e5m2),
        "dtypes/int4": np.arange(-8, 8).reshape(2, 8).astype(ml_dtypes.int4),
        **{
            f"dtypes/{kind}{bits}": np.array([0, 1, np.iinfo(f"{kind}{bits}").max], f"{kind}{bits}")
            for kind in ("int", "uint")
            for bits in (8, 16, 32, 64)
        },
        "scalars/bool": np.array(True),
        "scalars/float": np.array(0.1),
        "scalars/int": np.array(-3),
        "scalars/numpy": np.array(1.5, np.float32),
    }


def tree() -> dict[str, Any]:
    import jax.numpy as jnp

    a = arrays()
    small = ("float8_e4m3fn", "float8_e5m2", "int4", "complex64")  # as JAX arrays; the others as NumPy's
    dtypes = {name.removeprefix("dtypes/"): array for name, array in a.items() if name.startswith("dtypes/")}
    return {
        "params": {
            "blocks.0": {
                "attn/kernel": jnp.asarray(a["params/blocks.0/attn/kernel"]),
                "attn": {"vec/bias": jnp.asarray(a["params/blocks.0/attn/vec/bias"])},
            },
            "ä b": {"w": a["params/ä b/w"]},
        },
        "layers": {0: {"scale": a["layers/0/scale"]}},
        "opt": [Moments(jnp.asarray(a["opt/0/mu"]), a["opt/0/nu"]), (a["opt/1/0"], jnp.asarray(a["opt/1/1"]))],
        "dtypes": {name: jnp.asarray(array) if name in small else array for name, array in dtypes.items()},
        "scalars": {"bool": True, "float": 0.1, "int": -3, "numpy": np.float32(1.5)},
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "none": None,
        "text": "not an array",
    }


def save(path: Path, values: Any, **options: Any) -> Path:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, values)
    return path


def replace_in(file: Path, **entries: Any) -> None:
    """Changes entries of a JSON file; None takes one away."""
    content = {**json.loads(file.read_text()), **entries}
    gone = {name for name, value in entries.items() if value is None}
    file.write_text(json.dumps({name: value for name, value in content.items() if name not in gone}))


WAIT = "wait for the save to end, or choose another step with --step"


def refusal(path: Path, **options: Any) -> Finding:
    """Open a damaged checkpoint; return the first finding, with paths relative to the test's directory."""
    assert looks_like_orbax(path)
    with pytest.raises(CheckpointError) as caught:
        open_orbax(path, **options)
    return relative(caught.value, path)


def read_refusal(path: Path, name: str) -> Finding:
    """Read a damaged leaf; return the finding, with paths relative to the test's directory."""
    source = open_orbax(path)
    with pytest.raises(CheckpointError) as caught:
        source.read(name)
    finding = relative(caught.value, path)
    assert finding.path == f"{path.name}: leaf {name}" and finding.data["leaf"] == name and finding.fix
    return finding


def relative(error: CheckpointError, path: Path) -> Finding:
    finding = error.findings[0]
    return replace(finding, path=finding.path.replace(f"{path.parent}/", ""))


def chosen(source: Source) -> list[tuple[str, Any, Any]]:
    """The choices on the way to a tree: code, what was chosen, and the others."""
    keys = {"step-chosen": ("step", "steps"), "item-chosen": ("item", "others")}
    return [(note.code, *(note.data[key] for key in keys[note.code])) for note in source.notes]


def arrays_to_damage() -> dict[str, np.ndarray]:
    long = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    return {"a/long": long, "a/short": np.arange(3.0), "zeros": np.zeros(900, np.float32)}


def run_writers(*commands: list[str]) -> None:
    script = str(TESTS / "support" / "orbax_writers.py")
    running = [
        subprocess.Popen([sys.executable, script, *command], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
