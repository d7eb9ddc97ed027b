"""Mistakes that any converted file can have: planted one by one, and each must be found and named.

One helper serves every family: `assert_mistakes_are_named` takes a converted checkpoint and its source.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from convert.verify.run import check


def tensor_of(tensors: dict[str, np.ndarray]) -> tuple[str, str]:
    """Return a square matrix, or a convolution with a square kernel, or a matrix; and another tensor of its shape."""
    forms = (
        lambda shape: len(shape) == 2 and shape[0] == shape[1],
        lambda shape: len(shape) == 4 and shape[2] == shape[3] > 1,
        lambda shape: len(shape) == 2,
    )
    for fits in forms:
        for name, x in tensors.items():
            others = [other for other, y in tensors.items() if other != name and y.shape == x.shape]
            if fits(x.shape) and (others or x.ndim == 4):
                return name, others[0] if others else ""
    raise AssertionError("no tensor")


def turned(x: np.ndarray) -> np.ndarray:
    """Exchange the last two axes; the values of a matrix that is not square are then cut into rows of the right length."""
    return np.ascontiguousarray(np.swapaxes(x, -1, -2)).reshape(x.shape)


FAULTS: dict[str, tuple[Any, str]] = {
    "transposed": (turned, "transposed|laid out|the values are those of shape"),
    "scaled": (lambda x: x * np.float32(2), "all values are multiplied by 2|weight rescaled"),
    "negated": (lambda x: -x, "all values are multiplied by -1"),
    "zeros": (np.zeros_like, "all values are zeros"),
    "reversed": (lambda x: np.ascontiguousarray(x[::-1]), "reverse order"),
    "rounded": (lambda x: x.astype(np.float16).astype(np.float32), "rounded through float16"),
    "one value": (lambda x: np.where(np.arange(x.size).reshape(x.shape) == 5, x + np.float32(1), x), "1 of .* values? differ"),
}  # fmt: skip


def _file(out: Path) -> Path:
    """Return the one file of weights of an output."""
    (found,) = out.glob("*.safetensors") if out.is_dir() else [out]
    return found


def replace_tensors(out: Path, changed: dict[str, np.ndarray]) -> None:
    """Write other values for some tensors of a converted directory; the header stays."""
    file = _file(out)
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    save_file({**load_file(file), **changed}, file, metadata=metadata)


def assert_mistakes_are_named(out: Path, source: Path, **options: Any) -> int:
    """Plant seven mistakes in the values of a tensor (six of two bytes), let two tensors change places, leave one out and add one.

    Args:
        options: of the check.

    Returns:
        How many were planted; each is named.
    """
    file = _file(out)
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    right = load_file(file)
    name, other = tensor_of(right)

    def said(tensors: dict[str, np.ndarray], level: str) -> tuple[str, str, set[str]]:
        save_file(tensors, file, metadata=metadata)
        (report,) = check(out, source, levels=[level], **options).levels
        return report.verdict.value, " ".join(map(str, report.findings)), {f.code for f in report.findings}

    assert said(right, "coverage") == said(right, "weights") == ("passed", "", set())
    wrong = {fault: change(right[name]).astype(right[name].dtype) for fault, (change, _) in FAULTS.items()}
    if right[name].dtype.itemsize == 2:  # float16 rounds no bfloat16
        del wrong["rounded"]
    for fault, x in wrong.items():
        words = FAULTS[fault][1]
        verdict, text, _ = said({**right, name: x}, "weights")
        assert verdict == "failed" and f"{name}: " in text and re.search(words, text), (fault, text)
    if other:
        verdict, text, _ = said({**right, name: right[other], other: right[name]}, "weights")
        assert verdict == "failed" and re.search("of another (tensor|layer)", text), text
    verdict, text, codes = said({key: x for key, x in right.items() if key != name}, "coverage")
    assert verdict == "failed" and "tensor-missing" in codes, text
    verdict, text, _ = said({**right, "extra.weight": right[name]}, "coverage")
    assert verdict == "failed" and "extra.weight: no rule makes this tensor" in text
    save_file(right, file, metadata=metadata)
    return len(wrong) + bool(other) + 2
