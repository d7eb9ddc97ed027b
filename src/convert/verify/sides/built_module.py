"""Compare the module that a reference's `build` returned with the weights that it was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convert.core.findings import Finding

if TYPE_CHECKING:
    import torch

FIX = "load the weights in `build` with load_state_dict(state_dict, strict=True), and do not change them afterwards"
SHOWN = 3


@dataclass(frozen=True)
class Built:
    """What `build` returned.

    Attributes:
        training: submodules in training mode.
        active: those of them that compute something else than in eval mode, by their type.
        other: tensors of the file whose values the module does not hold under their names -> what it holds instead.
        dtypes: tensors that have another dtype than the weights that `build` was given -> that dtype.
    """

    training: tuple[str, ...]
    active: tuple[str, ...]
    other: Mapping[str, str]
    dtypes: Mapping[str, str]
    fix = FIX

    @property
    def in_training(self) -> str:
        """The module and its mode, with the parts that depend on it."""
        what = "a module" if "" in self.training else _listed(self.training)
        return f"{what} in training mode" + (f" (active: {_listed(self.active)})" if self.active else "")

    @property
    def cast(self) -> str:
        """Which tensors have another dtype."""
        name, dtype = next(iter(self.dtypes.items()))
        more = f" and {len(self.dtypes) - 1} more tensors" if len(self.dtypes) > 1 else ""
        return f"the module that `build` returned holds {name}{more} in {dtype}"

    def notes(self, precision: str) -> Iterator[str]:
        """Yield what a reader must know although the outputs agree."""
        if self.training:
            yield f"`build` of the reference returned {self.in_training}; return module.eval()"
        if self.dtypes:
            yield f"{self.cast}, not in {precision}"

    def problem(self, state: Mapping[str, torch.Tensor]) -> str:
        """Say which tensors are not the file's."""
        name, got = next(iter(self.other.items()))
        more = f", nor those of {len(self.other) - 1} other tensors" if len(self.other) > 1 else ""
        first = ", ".join(f"{x:.6g}" for x in state[name].flatten()[:2].tolist())
        return f"the module that `build` returned does not hold the file's values of {name} ({first}, ...){more}: it holds {got}"

    def finding(self, state: Mapping[str, torch.Tensor]) -> Finding | None:
        """Return the problem with the values; None if the module holds those of the file."""
        if not self.other:
            return None
        name, got = next(iter(self.other.items()))
        return Finding(
            "module-not-loaded",
            self.problem(state),
            path=name,
            expected="the values of the file",
            got=got,
            fix=self.fix,
            data={"diagnosis": "module does not hold the file's values", "tensors": sorted(self.other)},
        )


def built_with(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> Built:
    """Compare a module with the weights that it was built with."""
    held = module.state_dict()
    buffers = {name for name, _ in module.named_buffers()}
    training = tuple(name for name, part in module.named_modules() if part.training)
    modes = ("Dropout", "BatchNorm", "InstanceNorm", "RReLU")
    parts = ((name, part) for name, part in module.named_modules() if part.training)
    active = tuple(name for name, part in parts if any(word in type(part).__name__ for word in modes))
    known = {name: x for name, x in state.items() if name in held and held[name].shape == x.shape}
    compared = {name: x for name, x in known.items() if not training or name not in buffers}  # training changes buffers
    other = {name: _instead(held[name], x, state) for name, x in compared.items() if not _same(held[name], x)}
    dtypes = {
        name: str(held[name].dtype).removeprefix("torch.")
        for name, x in known.items()
        if x.is_floating_point() and held[name].dtype != x.dtype
    }
    return Built(training, active, other, dtypes)


def _same(got: torch.Tensor, want: torch.Tensor) -> bool:
    import torch

    want = want.to(got.device)
    if got.dtype != want.dtype:  # the dtype is a matter of its own
        wide = torch.complex128 if got.is_complex() or want.is_complex() else torch.float64
        got, want = got.to(wide), want.to(got.dtype if got.is_complex() or not want.is_complex() else wide).to(wide)
    return bool(torch.equal(got, want) or torch.allclose(got, want, rtol=0, atol=0, equal_nan=True))


def _instead(got: torch.Tensor, want: torch.Tensor, state: Mapping[str, torch.Tensor]) -> str:
    """Say what a module holds in place of the file's values."""
    import torch

    if got.numel() > 1 and bool((got == got.flatten()[0]).all()):
        number = got.flatten()[0].item()
        return {0.0: "zeros", 1.0: "ones"}.get(number, f"{number:.6g} throughout")
    for name, x in state.items():
        if x is not want and x.shape == got.shape and _same(got, x):
            return f"those of {name}"
    if got.ndim > 1 and got.shape == got.mT.shape and _same(got.mT, want):
        return "their transpose"
    for narrow in (torch.bfloat16, torch.float16):
        if want.is_floating_point() and _same(got, want.to(narrow).to(got.dtype)):
            return f"them rounded to {str(narrow).removeprefix('torch.')}"
    return "other values: they were not loaded, or were changed afterwards"


def _listed(names: tuple[str, ...]) -> str:
    shown = [name or "the module" for name in names[:SHOWN]]
    return ", ".join(shown) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
