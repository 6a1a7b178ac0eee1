"""Sharded modules used where nothing gathers them, or while something else does: errors that name cause and remedy.

One process, simulated ranks. Errors that DTensor raises in C++ outside of any call of ours stay what they are, and are
explained where they leave the program: `explained` reads what is printed there.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from fsdp2 import FSDPRuntimeError, FSDPTypeError, fully_shard, get_cls_to_fsdp_cls
from fsdp2.api.other_words import INSTEAD
from tests.harness.fake import FakeWorlds
from tests.unit.helpers import for_each

IDS = torch.zeros(2, 3, dtype=torch.long)
VECTORS = torch.zeros(2, 6)


@pytest.fixture(autouse=True)
def world(simulate: FakeWorlds) -> None:
    simulate(2, rank=0)


class Net(nn.Module):
    """A block that is sharded by itself; everything else belongs to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        self.head = nn.Linear(6, 4, bias=False)
        self.callback: Callable[[], object] = lambda: None

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.block(self.embedding(ids))
        self.callback()
        return self.head(hidden)

    def encode(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


def build() -> Net:
    model = Net()
    fully_shard(model.block)
    return fully_shard(model)


# ---- not called ----------------------------------------------------------------------------------


def explained(capsys: pytest.CaptureFixture[str], use: Callable[[], object]) -> str:
    """What is printed when the error of ``use`` leaves the program."""
    try:
        use()
    except (RuntimeError, NotImplementedError):
        capsys.readouterr()
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return capsys.readouterr().err.splitlines()[-1]
    raise AssertionError("no error")


def test_forward_is_called_directly(capsys: pytest.CaptureFixture[str]) -> None:
    model = build()
    said = explained(capsys, lambda: model.forward(IDS))
    assert "'embedding.weight' of Net is sharded" in said and "Net.forward() was called directly" in said
    assert "module(...), not module.forward(...)" in said


def test_another_method_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    model = build()
    said = explained(capsys, lambda: model.encode(IDS))
    assert "'embedding.weight' of Net" in said and "register_fsdp_forward_method(module, 'encode')" in said
    fsdp2.register_fsdp_forward_method(model, "encode")
    model.encode(IDS)


def test_a_submodule_is_called_whose_parameters_are_anothers(capsys: pytest.CaptureFixture[str]) -> None:
    model = build()
    model(IDS)
    said = explained(capsys, lambda: model.block[0](VECTORS))
    assert "'block.0.weight' or 'block.0.bias' of Sequential" in said
    assert "only a call of Sequential, which fully_shard was called on, gathers it" in said and "unshard()" in said


class Reader(nn.Module):
    """Its forward calls one child, and computes with the weight of the other itself."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(4, 18), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.read.weight + self.called(torch.ones(4)).view(3, 6)).T


@pytest.mark.parametrize("whole", [False, True])
def test_a_parent_reads_a_parameter_of_a_child(whole: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = Reader()
    for unit in (model.called, model.read, *([model] if whole else [])):
        fully_shard(unit)
    said = explained(capsys, lambda: model(VECTORS))
    assert "one of the sharded parameters 'called.weight' or 'read.weight' met plain tensors" in said or not whole
    assert "Reader.forward() was called, and only a call of Linear" in said and "_call_impl" not in said
    remedy = "leave out fully_shard of it, so that a call of Reader" if whole else "call fully_shard on Reader too"
    assert remedy in said


def test_forward_is_called_directly_with_rows_that_are_not_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(6, 7)), shard_placement_fn=lambda parameter: fsdp2.RowBlocks(5))
    assert isinstance(model[0].weight, fsdp2.RaggedDTensor)
    said = explained(capsys, lambda: model.forward(VECTORS))
    assert "'0.weight' or '0.bias' of Sequential is sharded" in said and "Sequential.forward() was called" in said


def test_a_parameter_meets_a_plain_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    def mask(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(torch.ones(parameter.shape))

    said = explained(capsys, lambda: mask(build()))
    assert "'embedding.weight'" in said and "distribute_tensor(tensor, parameter.device_mesh" in said


def test_inside_of_a_call_the_error_is_ours() -> None:
    """There a frame of ours lies around."""
    model = build()
    for misuse, said in (
        (lambda: model.block.forward(VECTORS), r"'block.0.weight' or.*Sequential.forward\(\) was called directly"),
        (lambda: model.block[0](VECTORS), r"only a call of Sequential, which fully_shard was called on, gathers it"),
    ):
        model.callback = misuse
        with pytest.raises(FSDPRuntimeError, match=said):
            model(IDS)
    model.callback = lambda: None
    model(IDS).sum().backward()


def test_other_errors_stay_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    model = build()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as failure:
        model.block(torch.zeros(2, 5))
    assert not isinstance(failure.value, fsdp2.FSDPError)
    plain = distribute_tensor(torch.zeros(4), fsdp2.core.mesh.default_mesh())  # type: ignore[attr-defined]
    assert "fsdp2" not in explained(capsys, lambda: plain.add_(torch.zeros(4)))


# ---- state dicts and conversions, at the wrong time ----------------------------------------------


@for_each(
    "use",
    [
        lambda model: model.state_dict(),
        lambda model: model.block.state_dict(),
        lambda model: model.load_state_dict({}, strict=False),
        lambda model: model.to(torch.float64),
    ],
)
@for_each("where", ["forward", "backward", "forward_of_a_block"])
def test_state_dicts_inside_of_a_pass(use: Callable[[Any], object], where: str) -> None:
    model = build()
    if where == "forward":
        model.callback = lambda: use(model)
    with pytest.raises(FSDPRuntimeError, match=rf"called inside a {where.split('_')[0]} of \w+.*between iterations"):
        if where == "forward_of_a_block":
            with contextlib.closing(_Hook(model.block[0].register_forward_hook(lambda *_: use(model)))):
                model.block(VECTORS)
        else:
            output = model(IDS)
            output.register_hook(lambda gradient: use(model) and None)
            output.sum().backward()
    model.callback = lambda: None
    model(IDS).sum().backward()
    use(model)


class _Hook:
    def __init__(self, handle: Any) -> None:
        self.close = handle.remove


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("parent", [False, True])
def test_whole_tensors_are_loaded(assign: bool, parent: bool) -> None:
    model = build()
    outer = nn.ModuleDict({"net": model}) if parent else model
    source = nn.ModuleDict({"net": Net()}) if parent else Net()
    outer.load_state_dict(source.state_dict(), assign=assign)
    for name, wanted in source.named_parameters():
        found = outer.get_parameter(name)
        assert isinstance(found, DTensor), name
        local = found.to_local()
        assert torch.equal(local, wanted[: len(local)]), name
    model(IDS).sum().backward()


# ---- what belongs to other systems ---------------------------------------------------------------


@pytest.mark.parametrize("where", ["model", "parent"])
def test_distributed_data_parallel_around(where: str) -> None:
    model = build()
    outer = model if where == "model" else nn.Sequential(model)
    with pytest.raises(FSDPTypeError, match=r"DistributedDataParallel got a model.*leave.*out.*strategy='replicate'"):
        nn.parallel.DistributedDataParallel(outer)
    model(IDS).sum().backward()


def test_collectives_of_sharded_tensors() -> None:
    model = build()
    for use in (
        lambda: dist.broadcast(model.head.weight, 0),
        lambda: dist.all_reduce(model.head.weight.data),
        lambda: dist.all_gather([torch.zeros(4, 6)] * 2, model.head.weight),
    ):
        with pytest.raises(FSDPTypeError, match=r"is sharded, and cannot be passed to a collective.*to_local\(\)"):
            use()
    dist.all_reduce(torch.zeros(3))


@for_each("word", sorted(INSTEAD))
def test_words_of_other_systems(word: str) -> None:
    model = Net()
    for shard in (fully_shard, fsdp2.auto_shard):
        with pytest.raises(FSDPTypeError, match=rf"fully_shard\(\) takes no argument '{word}'\. For '{word}=' write:"):
            shard(model, **{word: None})  # type: ignore[operator]
    assert not isinstance(model, fsdp2.FSDPModule)


def test_the_table_knows_all_words_of_fsdp1() -> None:
    import inspect

    from torch.distributed.fsdp import FullyShardedDataParallel

    words = set(inspect.signature(FullyShardedDataParallel.__init__).parameters) - {"self", "module"}
    assert words - set(INSTEAD) == set()


def test_objects_of_fsdp1() -> None:
    old = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    write = r"write fsdp2.MixedPrecisionPolicy\(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward"
    with pytest.raises(FSDPTypeError, match=write):
        fully_shard(Net(), mp_policy=old)  # type: ignore[arg-type]
    with pytest.raises(FSDPTypeError, match=r"write fsdp2.CPUOffloadPolicy\(\)"):
        fully_shard(Net(), offload_policy=CPUOffload(offload_params=True))  # type: ignore[arg-type]


# ---- meta, and classes ---------------------------------------------------------------------------


def test_what_is_on_meta_is_named_at_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    fully_shard(model[0])
    fully_shard(model)
    with pytest.raises(
        FSDPRuntimeError, match=r"parameters and buffers of Sequential.*0\.weight.*1\.bias.*1\.running_"
    ):
        model(VECTORS)
    with pytest.raises(FSDPRuntimeError, match=r"to_empty"):
        model[0](VECTORS)


def test_classes_made_in_functions_are_let_go() -> None:
    def make() -> weakref.ref[type]:
        class Local(nn.Linear):
            pass

        model = fully_shard(Local(4, 4))
        model(torch.zeros(2, 4)).sum().backward()
        assert get_cls_to_fsdp_cls()[Local] is type(model)
        return weakref.ref(Local)

    local = make()
    for _ in range(3):  # what the first frees holds more
        gc.collect()
    assert local() is None


def test_one_class_for_all_modules_of_a_class() -> None:
    assert type(fully_shard(nn.Linear(4, 4))) is type(fully_shard(nn.Linear(4, 4)))
