"""`--device` and `--precision`: refused with one clear error, or pinned; goldens on every device and in every precision."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from convert.api import convert
from convert.cli import main
from convert.core.errors import ConvertError
from convert.numerics.float32_products import float32_products, rounds_float32_products, set_float32_products
from convert.numerics.precision import (
    CUBLAS,
    cuda_problem,
    jax_on_the_cpu,
    jax_precision,
    require_device,
    require_precision,
    torch_pinned,
)
from convert.verify.report.report import Verdict
from convert.verify.run import check
from convert.verify.sides.no_narrow_cast import TO_TF32, without_narrow_casts
from support.goldens import checkpoint
from support.upstream import timesfm_1

CASES: dict[str, dict[str, Any]] = {
    "timesfm-1.0": {"use_positional_embedding": True, "context_length": 512},
    "timesfm-2.0": {"use_positional_embedding": False, "context_length": 2048},
    "timesfm-2.5": {},
}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, target) -> the written golden; each made once."""
    known: dict[tuple[str, str], Path] = {}
    patch = pytest.MonkeyPatch()
    patch.setenv("CONVERT_TIMESFM_1", str(Path(timesfm_1().__file__).parents[1]))

    def make(case: str, target: str) -> Path:
        if (case, target) not in known:
            known[case, target] = tmp_path_factory.mktemp("machine") / "out"
            convert("timesfm", checkpoint(case), known[case, target], to=target, settings=CASES[case])
        return known[case, target]

    yield make
    patch.undo()


# ---- refusals


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("gpu", "got gpu"),
        ("cuda:x", "cuda:N for one of several GPUs, got cuda:x"),
        ("", "expected cpu, cuda"),
        ("mps", "expected cpu, cuda"),
    ],
)
def test_unknown_devices_are_refused(device: str, said: str) -> None:
    with pytest.raises(ConvertError, match=said):
        require_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_one_clear_error(
    golden: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, source = golden("timesfm-2.5", "timesfm"), checkpoint("timesfm-2.5")
    monkeypatch.setattr("sys.argv", ["convert", "check", str(out), "--from", str(source), "--device", "cuda"])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    assert stop.value.code == 2 and not said.out
    assert (
        len(said.err.splitlines()) == 1 and said.err.startswith("error[usage]: --device cuda: ") and "cpu" in said.err
    )


def test_what_is_wrong_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS, raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "was built without CUDA" in cuda_problem()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA device" in cuda_problem()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "there are 1 CUDA devices" in cuda_problem(1) and CUBLAS not in os.environ
    assert cuda_problem() == "" and os.environ[CUBLAS] == ":4096:8"
    require_device("cuda")
    with pytest.raises(ConvertError, match="--device cuda:2: there are 1 CUDA devices"):
        require_device("cuda:2")


def test_unknown_precisions_are_refused() -> None:
    with pytest.raises(ConvertError, match="did you mean 'bfloat16'"):
        require_precision("bfloat")
    for precision in ("float32", "bfloat16", "float64"):
        require_precision(precision)


# ---- pinned


def test_torch_is_pinned_and_restored() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = True
    try:
        with torch_pinned():
            assert not matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
            assert (
                torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
            )
        assert matmul.allow_tf32 and not torch.are_deterministic_algorithms_enabled()
    finally:
        matmul.allow_tf32 = False


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="older than PyTorch 2.9")
def test_both_sets_of_switches_are_pinned_and_restored() -> None:
    """The switches of PyTorch 2.9: where they contradict the older ones, these cannot be read."""
    backends: Any = torch.backends
    before = float32_products()
    try:
        backends.fp32_precision = backends.cuda.matmul.fp32_precision = "tf32"
        backends.mkldnn.matmul.fp32_precision = "bf16"
        assert rounds_float32_products()
        with torch_pinned():
            assert not rounds_float32_products()
            assert backends.cudnn.conv.fp32_precision == backends.cudnn.rnn.fp32_precision == "ieee"
            assert torch.get_float32_matmul_precision() == "highest" and not backends.cudnn.allow_tf32
            with torch_pinned(tf32=True):
                assert backends.cuda.matmul.allow_tf32 and backends.cudnn.allow_tf32
            assert not rounds_float32_products()
        assert backends.cuda.matmul.fp32_precision == "tf32" and backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        backends.fp32_precision = "none"
        set_float32_products(before)
    assert float32_products() == before


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_code_that_switches_to_rounded_products_is_named(precision: str) -> None:
    x = torch.ones(3, 3)
    with torch_pinned(), without_narrow_casts("float32") as casts:
        torch.set_float32_matmul_precision(precision)
        _ = x @ x  # the line that is named
        assert not rounds_float32_products()
    ((line, what),) = casts.items()
    assert Path(__file__).name in line and what == TO_TF32


def test_switches_that_stand_above_others_are_seen() -> None:
    backends: Any = torch.backends
    for place in (backends, backends.cudnn) if hasattr(backends.cuda.matmul, "fp32_precision") else ():
        with torch_pinned():
            assert not rounds_float32_products()
            place.fp32_precision = "tf32"
            assert rounds_float32_products()
        assert place.fp32_precision == "none"


def test_jax_computes_on_the_cpu_in_all_threads() -> None:
    import jax

    before = jax.config.jax_default_device
    with jax_on_the_cpu(), ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: jax.config.jax_default_device).result().platform == "cpu"
    assert jax.config.jax_default_device == before


def test_a_second_check_waits_for_the_first() -> None:
    """The settings are those of the process: the first would restore them while the second runs."""
    import jax

    before = jax.config.jax_default_device
    order, entered = [], Event()

    def second() -> None:
        with jax_on_the_cpu():
            order.append("the second begins")
            entered.set()

    with ThreadPoolExecutor(1) as thread:
        with jax_on_the_cpu():
            done = thread.submit(second)
            entered.wait(0.2)
            order.append("the first ends")
        done.result()
    assert order == ["the first ends", "the second begins"] and jax.config.jax_default_device == before


def test_jax_is_pinned_and_restored() -> None:
    import jax
    import jax.numpy as jnp

    with jax_precision("float64"):
        assert jax.config.jax_default_matmul_precision == "highest" and jnp.zeros(1, "float64").dtype == "float64"
    with jax_precision("bfloat16"):
        assert jax.config.jax_default_matmul_precision == "highest" and not jax.config.jax_enable_x64
    assert jax.config.jax_default_matmul_precision is None and not jax.config.jax_enable_x64


# ---- no false alarm


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
@pytest.mark.parametrize(
    ("case", "target"),
    [
        ("timesfm-1.0", "timesfm"),
        ("timesfm-1.0", "transformers"),
        ("timesfm-2.0", "timesfm"),
        ("timesfm-2.0", "transformers"),
        ("timesfm-2.5", "timesfm"),
        ("timesfm-2.5", "transformers"),
    ],
)
def test_goldens_pass_in_every_precision(golden: Any, case: str, target: str, precision: str) -> None:
    report = check(golden(case, target), checkpoint(case), levels=["model"], precision=precision)
    (model,) = report.levels
    assert model.verdict is Verdict.PASSED, [str(finding) for finding in model.findings]
    for measure in model.measures:
        assert measure.float64 and measure.float64_tolerance and measure.float64_tolerance.value < 1e-12, measure.name
        assert measure.float64.relative < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("case", "target"), [("timesfm-1.0", "timesfm"), ("timesfm-2.5", "timesfm"), ("timesfm-2.5", "transformers")])  # fmt: skip
def test_goldens_are_equal_in_all_backends(golden: Any, case: str, target: str) -> None:
    report = check(golden(case, target), checkpoint(case), levels=["weights"], backends=True)
    level = report.levels[-1]
    assert level.verdict is Verdict.PASSED, [str(finding) for finding in level.findings]
    assert {"JAX op by op", "JAX jit", "torch eager"} <= set(level.matrix)
