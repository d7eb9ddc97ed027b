"""Checkpoints that Orbax writes once for all tests of this folder."""

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

from support.orbax_checkpoints import LAYOUTS, Copy, arrays_to_damage, run_writers, save, tree


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tree()` in every layout."""
    root = tmp_path_factory.mktemp("layouts")
    for name, (options, _) in LAYOUTS.items():
        save(root / name, tree(), **options)
    return root


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few leaves in every layout, to be damaged. `long` is too long for OCDBT to keep it inside its own nodes."""
    root = tmp_path_factory.mktemp("small")
    values = {"a": {"long": arrays_to_damage()["a/long"], "short": np.arange(3.0)}, "zeros": np.zeros(900, np.float32)}
    for name, (options, _) in LAYOUTS.items():
        save(root / name, values, **options)
    return root


@pytest.fixture
def copy(small: Path, tmp_path: Path) -> Copy:
    """Copies one of `small`'s layouts, to be changed."""

    def _copy(layout: str) -> Path:
        return shutil.copytree(small / layout, tmp_path / "checkpoint")

    return _copy


@pytest.fixture(scope="session")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written from eight devices of one process."""
    root = tmp_path_factory.mktemp("devices")
    run_writers(["devices", str(root)])
    return root


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by two processes of four devices each; `*-unmerged` is what is there before the first one merges."""
    root = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    run_writers(["process", "0", port, str(root)], ["process", "1", port, str(root)])
    for name in ("ocdbt", "zarr3"):
        unmerged = shutil.copytree(root / name, root / f"{name}-unmerged")
        (unmerged / "manifest.ocdbt").unlink()
        shutil.rmtree(unmerged / "d")
    return root


@pytest.fixture(scope="session")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import jax
    import orbax.checkpoint as ocp

    root = tmp_path_factory.mktemp("managed")
    options = ocp.CheckpointManagerOptions(max_to_keep=None)
    with ocp.CheckpointManager(root / "plain", options=options) as manager:
        for step in (0, 100, 200):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(2, step)}))
    options = ocp.CheckpointManagerOptions(step_prefix="checkpoint", step_format_fixed_length=8)
    names = ("state", "config", "array", "key")
    with ocp.CheckpointManager(root / "items", options=options, item_names=names) as manager:
        for step in (5, 10):
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave({"w": np.full(2, step)}),
                    config=ocp.args.JsonSave({"layers": 2}),
                    array=ocp.args.ArraySave(np.ones(2)),
                    key=ocp.args.JaxRandomKeySave(jax.random.key(0)),
                ),
                metrics={"loss": 0.5},
            )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        trees = {name: ocp.args.StandardSave({"w": np.full(2, i)}) for i, name in enumerate(("params", "opt"))}
        checkpointer.save(root / "two", args=ocp.args.Composite(**trees, config=ocp.args.JsonSave({})))
        checkpointer.save(root / "none", args=ocp.args.Composite(config=ocp.args.JsonSave({})))
    return root


@pytest.fixture
def steps(managed: Path, tmp_path: Path) -> Path:
    """Three steps, to be changed."""
    return shutil.copytree(managed / "plain", tmp_path / "run")
