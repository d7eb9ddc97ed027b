"""Where a check runs and in what precision: asked for, refused when it cannot be had, and pinned on both sides."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

from convert.core.errors import ConvertError
from convert.core.fields import nearest

PRECISIONS = ("float32", "bfloat16", "float64")
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # without it, CUDA's matrix products are not deterministic


def require_precision(precision: str) -> None:
    """Refuses a precision that models are not checked in.

    Raises:
        ConvertError: it is none of `PRECISIONS`.
    """
    if precision not in PRECISIONS:
        raise ConvertError(
            f"--precision {precision}: not a precision to check in{nearest(precision, PRECISIONS)} "
            f"(known: {', '.join(PRECISIONS)})"
        )


def require_device(device: str) -> None:
    """Refuses a device that torch cannot compute on.

    Raises:
        ConvertError: no such device, or this torch cannot use it; the message says what is missing.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConvertError(f"--device {device}: torch runs on cpu or cuda here, or on one of several, such as cuda:1")
    if kind == "cuda" and (problem := cuda_problem(int(index or 0))):
        raise ConvertError(f"--device {device}: {problem}. Check on --device cpu, or where there is a GPU")


def cuda_problem(index: int = 0) -> str:
    """Why torch cannot compute on a CUDA device; empty when it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.backends.cuda.is_built():
        return f"this torch ({torch.__version__}) was built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    if index >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} CUDA devices, counted from 0"
    os.environ.setdefault(CUBLAS, ":4096:8")
    return ""


@contextmanager
def jax_with_float64() -> Iterator[None]:
    """JAX has float64 in all threads; afterwards it is as it was."""
    import jax

    # A thread of its own says what holds for the process: in this one, `with jax.enable_x64(...)` may stand around the check.
    with ThreadPoolExecutor(1) as aside:
        before = aside.submit(jax.config.read, "jax_enable_x64").result()
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@contextmanager
def jax_precision(precision: str) -> Iterator[None]:
    """Within this context JAX multiplies matrices as precisely as their dtype is; float64 exists when it is asked for."""
    import jax

    wide = jax_with_float64() if precision == "float64" else nullcontext()
    with jax.default_matmul_precision("highest"), wide:
        yield


@contextmanager
def torch_pinned() -> Iterator[None]:
    """Within this context torch multiplies as precisely as its dtypes are (no TF32) and, where it can, deterministically."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    matmul.allow_tf32 = cudnn.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():  # an operation that has no deterministic kernel runs with the one that it has
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, cudnn.benchmark = before
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
