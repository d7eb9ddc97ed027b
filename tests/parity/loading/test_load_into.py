"""`load_into` and `state_dict` on small modules: what fits, what is refused, and where the values go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import convert
from convert.checkpoints.chunks import Box, Grid, Meter
from convert.core.ops import Flip, Interleave, Permute, Reshape, Take, apply, out_spec
from convert.core.tensor_spec import TensorSpec
from convert.loading.slots import Destination
from convert.writing.scatter import destination_view
from support.memory_source import MemorySource, rule_file

RULES = """
- from: table
  axes: VD
  embedding: embed
- einsum: ...D,DF->...F
  from: layers/up/kernel
  stacked: {i: 0}
  bias: layers/up/bias
  linear: layers.{i}.up
- from: norm
  axes: D
  multiplies_by: 1+scale
  epsilon: 1e-6
  rms_norm: norm
- einsum: ...D,DV->...V
  from: head
  linear: head
"""
V, D, F, LAYERS = 7, 4, 6, 3


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(D, width)


class Model(nn.Module):
    def __init__(self, width: int = F, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("window", torch.arange(3.0), persistent=False)


def arrays(dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "table": (V, D),
        "layers/up/kernel": (LAYERS, D, F),
        "layers/up/bias": (LAYERS, F),
        "norm": (D,),
        "head": (D, V),
    }
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


class Counted(MemorySource):
    """Counts the elements that are read."""

    read_elements = 0

    def chunks(self, name: str) -> Any:
        shape = self.leaves[name].spec.shape
        return Grid(shape, (1, *shape[1:]) if name.startswith("layers/") else shape)

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Any:
        self.read_elements += chunk.size
        yield chunk.origin, self.arrays[name][chunk.within((0,) * len(chunk.shape))]


TIED = RULES[: RULES.index("- einsum: ...D,DV")]


def written(tmp_path: Path, source: MemorySource, dtype: str | None = None) -> dict[str, torch.Tensor]:
    convert.convert(rule_file(RULES), source, tmp_path / "out.safetensors", dtype=dtype)
    return load_file(tmp_path / "out.safetensors")


def plain(tensor: torch.Tensor) -> bool:
    """Whether its values can be compared."""
    lazy = isinstance(tensor, nn.UninitializedParameter)
    return not lazy and not tensor.is_meta and tensor.layout == torch.strided


def refused(module: nn.Module, source: MemorySource | None = None, rules: str = RULES, **options: Any) -> Any:
    before = {name: tensor.clone() for name, tensor in module.state_dict().items() if plain(tensor)}
    counted = source or Counted(arrays())
    with pytest.raises(convert.ConvertError) as error:
        convert.load_into(module, rule_file(rules), counted, **options)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    assert getattr(counted, "read_elements", 0) == 0  # before a byte is read
    return {(finding.code, finding.path) for finding in error.value.findings}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_module_gets_the_bits_of_the_file_of_its_dtype(dtype: str, stored: str, tmp_path: Path) -> None:
    source = MemorySource({k: v.astype(getattr(ml_dtypes, stored, stored)) for k, v in arrays().items()})
    module = Model().to(getattr(torch, dtype))
    kept = dict(module.named_parameters())
    loaded = convert.load_into(module, rule_file(RULES), source)
    want = written(tmp_path, source, dtype)
    assert module.state_dict().keys() == want.keys()
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, want[name]), name
    assert all(kept[name] is parameter for name, parameter in module.named_parameters())  # the same objects
    assert (loaded.tensors, loaded.materialised) == (len(want), ())
    assert torch.equal(module.window, torch.arange(3.0).to(module.window.dtype))


def test_each_tensor_of_a_mixed_module_keeps_its_dtype(tmp_path: Path) -> None:
    module = Model().to(torch.bfloat16)
    module.norm.float()
    source = MemorySource(arrays())
    convert.load_into(module, rule_file(RULES), source)
    wide, narrow = written(tmp_path, source, "float32"), None
    assert module.norm.weight.dtype == torch.float32 and torch.equal(module.norm.weight, wide["norm.weight"])
    (tmp_path / "out.safetensors").unlink()
    narrow = written(tmp_path, source, "bfloat16")
    assert torch.equal(module.head.weight, narrow["head.weight"])


def test_a_module_of_another_size_is_refused() -> None:
    assert refused(Model(width=F + 1)) == {
        ("state-dict-mismatch", f"layers.{i}.up.{name}") for i in range(LAYERS) for name in ("weight", "bias")
    }


def test_a_parameter_that_the_checkpoint_lacks_is_refused() -> None:
    module = Model()
    module.head.bias = nn.Parameter(torch.zeros(V))
    assert refused(module) == {("state-dict-mismatch", "head.bias")}


def test_a_tensor_that_the_module_lacks_is_refused() -> None:
    module = Model()
    module.layers[1].up.bias = None
    assert refused(module) == {("state-dict-mismatch", "layers.1.up.bias")}


def test_a_parameter_of_integers_is_refused() -> None:
    module = Model()
    module.norm.weight = nn.Parameter(torch.ones(D, dtype=torch.int32), requires_grad=False)
    assert refused(module) == {("state-dict-mismatch", "norm.weight")}


def test_tied_parameters_stay_tied_where_the_checkpoint_has_one_leaf() -> None:
    module = Model(tied=True)
    values = {name: x for name, x in arrays().items() if name != "head"}
    convert.load_into(module, rule_file(TIED), MemorySource(values))
    assert module.head.weight is module.embed.weight
    assert np.array_equal(module.head.weight.detach(), values["table"])


def test_tied_parameters_are_refused_where_the_checkpoint_has_two_leaves() -> None:
    assert refused(Model(tied=True)) == {("tied-weights-differ", "embed.weight and head.weight")}


def test_parameters_on_the_meta_device_get_memory_and_stay_tied() -> None:
    with torch.device("meta"):
        module = Model(tied=True)
    module.window = torch.arange(3.0)
    module.norm.weight.requires_grad_(False)
    values = {name: x for name, x in arrays().items() if name != "head"}
    loaded = convert.load_into(module, rule_file(TIED), MemorySource(values))
    assert module.head.weight is module.embed.weight
    assert len(loaded.materialised) == loaded.tensors == 2 + 2 * LAYERS
    assert isinstance(module.norm.weight, nn.Parameter) and not module.norm.weight.requires_grad
    assert module.embed.weight.requires_grad
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    assert np.array_equal(module.layers[2].up.weight.detach(), values["layers/up/kernel"][2].T)


def test_a_buffer_without_values_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        module = Model()
    assert refused(module) == {("module-tensor-unsupported", "window")}
    assert all(parameter.is_meta for parameter in module.parameters())


class Computed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, V, bias=False)
        self.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}weight": module.weight * 2}))  # fmt: skip


class Quantised(nn.Parameter):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "head", Computed()),
        lambda module: setattr(module, "head", nn.LazyLinear(V, bias=False)),
        lambda module: setattr(module.head, "weight", Quantised(torch.zeros(V, D))),
        lambda module: setattr(module.head, "weight", nn.Parameter(torch.zeros(V, D).to_sparse())),
    ],
    ids=["computed by a hook", "lazy", "of another class", "sparse"],
)
def test_a_tensor_that_cannot_be_filled_is_refused(change: Callable[[nn.Module], None]) -> None:
    module = Model()
    change(module)
    assert ("module-tensor-unsupported", "head.weight") in refused(module)


def test_the_dtype_is_that_of_the_module() -> None:
    assert refused(Model(), dtype="bfloat16") == {("usage", "dtype")}


def test_a_value_that_does_not_fit_is_an_error() -> None:
    values = arrays()
    values["head"][0, 0] = 1e30
    with pytest.raises(convert.PlanError) as error:
        convert.load_into(Model().half(), rule_file(RULES), MemorySource(values))
    assert (error.value.code, error.value.findings[0].path) == ("value-overflow", "head.weight")


def test_parameters_in_another_order_of_memory_are_filled() -> None:
    module = Model()
    module.head.weight = nn.Parameter(torch.zeros(D, V).T)
    values = arrays()
    convert.load_into(module, rule_file(RULES), MemorySource(values))
    assert np.array_equal(module.head.weight.detach(), values["head"].T) and not module.head.weight.is_contiguous()


def test_events_count_every_leaf() -> None:
    events: list[convert.Event] = []
    convert.load_into(Model(), rule_file(RULES), MemorySource(arrays()), on_event=events.append)
    assert {event.leaf for event in events} == set(arrays()) and events[-1].done == events[-1].total


OPS = st.lists(
    st.sampled_from([Permute((2, 0, 1)), Flip((0, 2)), Interleave(0), Reshape((2, 2, 12)), Permute((0, 2, 1))]),
    max_size=4,
)


@given(OPS, st.integers(0, 4), st.sampled_from(["float32", "bfloat16"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_pieces_reach_a_device_that_numpy_does_not_see(ops: Any, layer: int, dtype: str, offset: bool) -> None:
    """Through strided views, as for a GPU: the array has only addresses, and stays as it was made."""
    ops = (Take(0, layer), *ops)
    spec = TensorSpec((5, 4, 6, 2), dtype)
    try:
        made = out_spec(ops, spec)
    except ValueError:
        return
    x = np.arange(240).reshape(spec.shape).astype(getattr(ml_dtypes, dtype, dtype))
    memory = torch.zeros(made.size + 8, dtype=getattr(torch, dtype))
    tensor = memory[8:].view(made.shape) if offset else memory[: made.size].view(made.shape)
    place = Destination(tensor, direct=False)
    before = place.array.copy()
    view = destination_view(ops, spec, place.array)
    if view is None:  # all elements are needed at once: the result is written in tiles
        place.put(place.array, apply(ops, x))
        assert np.array_equal(tensor.float(), apply(ops, x).astype(np.float32))
        return
    for k in range(5):
        for half in (slice(0, 3), slice(3, 6)):
            for region, values in view.parts((k, 0, half.start, 0), x[k : k + 1, :, half]):
                place.put(region, apply(view.ops, values))
    place.complete()
    assert np.array_equal(tensor.float(), apply(ops, x).astype(np.float32))
    assert np.array_equal(before.view(np.int8), place.array.view(np.int8))


def test_a_state_dict_reads_one_tensor_at_a_time(tmp_path: Path) -> None:
    source = Counted(arrays())
    tensors = convert.state_dict(rule_file(RULES), source)
    assert tensors.specs["layers.1.up.weight"] == TensorSpec((F, D), "float32")
    assert "layers.1.up.weight" in tensors and "other" not in tensors and len(tensors) == 3 + 2 * LAYERS
    assert source.read_elements == 0
    assert tensors["layers.1.up.weight"].shape == (F, D)
    assert source.read_elements == F * D  # one layer of the stack
    want = written(tmp_path, MemorySource(source.arrays))
    assert set(tensors) == set(want) and all(torch.equal(tensors[name], want[name]) for name in want)
    module = Model()
    module.load_state_dict(tensors)
    assert torch.equal(module.head.weight, want["head.weight"])
    with pytest.raises(KeyError):
        tensors["other"]


def test_a_state_dict_has_the_dtype_asked_for(tmp_path: Path) -> None:
    tensors = convert.state_dict(rule_file(RULES), MemorySource(arrays()), dtype="bfloat16")
    want = written(tmp_path, MemorySource(arrays()), "bfloat16")
    assert all(tensors[name].dtype == torch.bfloat16 and torch.equal(tensors[name], want[name]) for name in want)
    values = arrays()
    values["head"][0, 0] = 1e30
    with pytest.raises(convert.PlanError) as error:
        convert.state_dict(rule_file(RULES), MemorySource(values), dtype="float16")["head.weight"]
    assert error.value.code == "value-overflow"
