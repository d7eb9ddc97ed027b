"""Settings of the libraries that write the checkpoints of this folder."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _on_cpu() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("KERAS_BACKEND", "jax")
