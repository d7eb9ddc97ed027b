"""Packages of upstream that cannot be installed beside those of the tests: each lies in a folder of its own, without what it requires."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path
from typing import Any

from support.paths import ROOT
from support.stand_in import StandIn

CACHE = ROOT / ".cache"


def installed(requirement: str) -> Path:
    """Return the folder of a package, which is installed on first use, also where several processes need it at once."""
    folder = CACHE / requirement.replace("==", "-")
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=CACHE))
        options = ("--quiet", "--no-deps", "--ignore-requires-python", "--target", str(made))
        subprocess.run([sys.executable, "-m", "pip", "install", *options, requirement], check=True)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


@cache
def timm() -> Any:
    """timm 1.0.31. Its data sets need torchvision, whose build of PyPI needs CUDA's torch; its models do not."""
    sys.path.append(str(installed("timm==1.0.31")))
    with StandIn("torchvision"):
        import timm as loaded
    return loaded


@cache
def tabfm() -> Any:
    """tabfm 1.0.1's module of `TabFM_HF`: the package itself imports pandas, and its JAX side needs an older jaxtyping."""
    folder = installed("tabfm==1.0.1")
    for name in ("tabfm", "tabfm.src"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
    from tabfm.src.pytorch import tabfm_v1_0_0 as loaded

    return loaded
