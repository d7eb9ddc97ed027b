"""Validate the device and the native precision of a check, and fix both frameworks to full-precision products."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import Any

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean

PRECISIONS = ("float32", "bfloat16", "float64")
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # without it, CUDA's matrix products are not deterministic
_ONE_AT_A_TIME = RLock()  # a check may run within another one, such as in the code of a user
XLA_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"  # without it, JAX takes three quarters of a GPU's memory


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


def jax_problem() -> str:
    """Return why JAX cannot compute here; empty when it can."""
    try:
        import jax

        jax.devices()
    except ImportError as error:
        return f"{error.name or 'JAX'} is not installed"
    except Exception as error:  # noqa: BLE001 - a jaxlib of another version, a platform of JAX_PLATFORMS that is not there
        said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
        chosen = os.environ.get("JAX_PLATFORMS")
        return f"JAX does not start ({said})" + (f"; JAX_PLATFORMS is {chosen!r}" if chosen else "")
    return ""


def require_jax(fix: str) -> None:
    """Check that JAX computes here.

    Raises:
        ConvertError: it is not installed, or does not start, and why.
    """
    if problem := jax_problem():
        problem = f"the JAX model cannot run here: {problem}"
        raise ConvertError(Finding("reference-unavailable", problem, fix=fix))


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


def gpu_name(device: str) -> str:
    """Return the name of a CUDA device, such as ``NVIDIA H200``; empty for the CPU."""
    if device == "cpu":
        return ""
    import torch

    return torch.cuda.get_device_name(device)


@contextmanager
def jax_with_float64() -> Iterator[None]:
    """Enable float64 in JAX for all threads; restore the setting afterwards."""
    import jax

    before = _for_all_threads("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _for_all_threads(setting: str) -> Any:
    """Return a setting of JAX as another thread reads it: this one may run within `with jax.enable_x64(...)`."""
    import jax

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(getattr, jax.config, setting).result()


@contextmanager
def jax_precision(precision: str) -> Iterator[None]:
    """Multiply matrices in JAX at the full precision of their dtype; enable float64 for the precision ``float64``."""
    import jax

    wide = jax_with_float64() if precision == "float64" else nullcontext()
    with jax.default_matmul_precision("highest"), wide:
        yield


@contextmanager
def jax_on_the_cpu() -> Iterator[None]:
    """Let JAX compute on the CPU in all threads, also where it has a GPU; restore the setting afterwards.

    Its values are the measure of all others, so they must not depend on the machine; and the GPU's memory is PyTorch's. This setting
    and the others of a check are those of the process, so a second check waits until the first has ended.
    """
    with _ONE_AT_A_TIME, _on_the_cpu():
        yield


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    try:
        import jax

        os.environ.setdefault(XLA_PREALLOCATE, "false")
        cpu = jax.devices("cpu")[0]
    except Exception:  # noqa: BLE001 - no JAX, or one that does not start (`jax_problem`), or JAX_PLATFORMS leaves the CPU out
        yield
        return
    before = _for_all_threads("jax_default_device")
    jax.config.update("jax_default_device", cpu)
    try:
        with jax.default_device(cpu):  # the caller's own, in this thread
            yield
    finally:
        jax.config.update("jax_default_device", before)


@contextmanager
def torch_pinned(*, tf32: bool = False) -> Iterator[None]:
    """Multiply in PyTorch at the full precision of the dtypes, and deterministically where it can.

    Args:
        tf32: whether a GPU rounds the factors of float32 products to TF32 all the same.
    """
    import torch

    from convert.numerics.float32_products import float32_products, pin_float32_products, set_float32_products

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = float32_products(), matmul.allow_bf16_reduced_precision_reduction, cudnn.benchmark
    deterministic = torch.get_deterministic_debug_mode()
    pin_float32_products(tf32=tf32)
    matmul.allow_bf16_reduced_precision_reduction = cudnn.benchmark = False
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports the compiler, which takes seconds
    try:
        with warnings.catch_warnings():  # an operation without a deterministic kernel uses another
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
            yield
    finally:
        of_float32, matmul.allow_bf16_reduced_precision_reduction, cudnn.benchmark = before
        set_float32_products(of_float32)
        torch.set_deterministic_debug_mode(deterministic)
