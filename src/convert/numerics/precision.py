"""Validate the device and the native precision of a check, and fix both frameworks to full-precision products."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean

PRECISIONS = ("float32", "bfloat16", "float64")
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # without it, CUDA's matrix products are not deterministic


def require_precision(precision: str) -> None:
    """Refuse a precision that is none of `PRECISIONS`.

    Raises:
        ConvertError: with the known precisions.
    """
    if precision not in PRECISIONS:
        raise ConvertError(
            Finding(
                "usage",
                path="--precision",
                expected=f"one of {', '.join(PRECISIONS)}",
                got=precision,
                fix=did_you_mean(precision, PRECISIONS),
            )
        )


def require_device(device: str) -> None:
    """Refuse a device that PyTorch cannot compute on.

    Raises:
        ConvertError: no such device, or this PyTorch cannot use it, and why.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConvertError(
            Finding("usage", path="--device", expected="cpu, cuda, or cuda:N for one of several GPUs", got=device)
        )
    if kind == "cuda" and (problem := cuda_problem(int(index or 0))):
        raise ConvertError(
            Finding(
                "usage", problem, path=f"--device {device}", fix="check with --device cpu, or on a machine with a GPU"
            )
        )


def cuda_problem(index: int = 0) -> str:
    """Return why PyTorch cannot compute on a CUDA device; empty when it can."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    if not torch.backends.cuda.is_built():
        return f"this PyTorch ({torch.__version__}) was built without CUDA"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no CUDA device"
    if index >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} CUDA devices, counted from 0"
    os.environ.setdefault(CUBLAS, ":4096:8")
    return ""


@contextmanager
def jax_with_float64() -> Iterator[None]:
    """Enable float64 in JAX for all threads; restore the setting afterwards."""
    import jax

    # Read the global setting in another thread: the caller may run this within `with jax.enable_x64(...)`.
    with ThreadPoolExecutor(1) as thread:
        before = thread.submit(jax.config.read, "jax_enable_x64").result()
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@contextmanager
def jax_precision(precision: str) -> Iterator[None]:
    """Multiply matrices in JAX at the full precision of their dtype; enable float64 for the precision ``float64``."""
    import jax

    wide = jax_with_float64() if precision == "float64" else nullcontext()
    with jax.default_matmul_precision("highest"), wide:
        yield


@contextmanager
def torch_pinned() -> Iterator[None]:
    """Multiply in PyTorch at the full precision of the dtypes (no TF32), and deterministically where it can."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, cudnn.benchmark
    deterministic = torch.get_deterministic_debug_mode()
    matmul.allow_tf32 = cudnn.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = cudnn.benchmark = False
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports the compiler, which takes seconds
    try:
        with warnings.catch_warnings():  # an operation without a deterministic kernel uses another
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction, cudnn.benchmark = before
        torch.set_deterministic_debug_mode(deterministic)
