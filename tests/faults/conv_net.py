"""The example conv-net for ``--reference faults.conv_net:reference``, whatever the working directory."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from faults.own_models import example

model_jax, model_torch = (example("conv-net", name) for name in ("model_jax", "model_torch"))
with mock.patch.dict(sys.modules, model_jax=model_jax, model_torch=model_torch):
    _reference = example("conv-net", "reference")


def reference(plan: Any) -> Any:
    return _reference.reference(plan)
