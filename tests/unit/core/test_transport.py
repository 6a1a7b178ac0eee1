"""Which transport a process group gets: by the backend on the device that its ranks compute on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import FSDPValueError, _torch
from fsdp2.core.plan import Scaling
from fsdp2.core.reduce import _launches, _Sent
from fsdp2.core.transport import VARIABLE, Alone, Custom, Native, Transport, transport_of
from fsdp2.plugs.transports.gloo_p2p import MAX_PEERS, PeerToPeer
from tests.harness import fake_world
from tests.harness.counting import Collectives

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Group:
    """A process group of ``cpu:gloo,cuda:nccl``, as far as it is asked."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        """Ranks."""
        return self._size


def of(size: int, device: torch.device = CPU, custom: Any = None) -> Transport:
    group: Any = Group(size)
    with mock.patch.object(_torch, "backend_name", lambda _, device: BACKENDS[device.type]):
        return transport_of(group, device, custom)


def test_the_transport_follows_the_device_and_not_the_host() -> None:
    assert type(of(4)) is PeerToPeer
    assert type(of(4, CUDA)) is Native
    with mock.patch.dict(BACKENDS, cuda="gloo"):
        assert type(of(4, CUDA)) is Native, "gloo sends and receives host memory only"


def test_many_ranks_and_the_environment_have_the_backends_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(of(MAX_PEERS)) is PeerToPeer and type(of(MAX_PEERS + 1)) is Native
    monkeypatch.setenv(VARIABLE, "native")
    assert type(of(4)) is Native
    assert type(of(1)) is Native and type(transport_of(None, CPU)) is Alone, "so that NCCL runs with one GPU"
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(FSDPValueError, match=f"{VARIABLE} must be 'native' or unset, got 'fast'"):
        of(4)


def test_a_custom_collective_brings_its_memory_with_it_even_for_one_rank() -> None:
    custom = mock.Mock()
    assert type(of(4, custom=custom)) is Custom and of(4, custom=custom).allocate is custom.allocate
    assert type(of(1, custom=custom)) is Alone and of(1, custom=custom).allocate is custom.allocate
    assert type(transport_of(None, CPU)) is Alone and transport_of(None, CPU).allocate is None


def test_after_an_exception_a_group_does_not_batch_for_ever() -> None:
    with fake_world(4):
        group = dist.group.WORLD
        assert group is not None
        part, whole = torch.ones(2), torch.empty(8)
        for _ in range(2):
            with pytest.raises(KeyError), _torch.coalescing(group):
                _torch.all_gather_batched(whole, part, group)
                raise KeyError
        with Collectives() as collectives, _torch.coalescing(group):
            _torch.all_gather_batched(whole, part, group)
            _torch.all_gather_batched(whole, part, group)
        assert collectives.counts == {"allgather_into_tensor_coalesced": 1}


class Asynchronous(TorchDispatchMode):
    """Notes of each collective whether its backend may take another stream than the current one, the default."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        self.found[func._opname] = {**dict(zip(names, args, strict=False)), **(kwargs or {})}.get("async_op", True)
        return func(*args, **(kwargs or {}))


def test_several_members_are_exchanged_on_the_current_stream() -> None:
    with fake_world(4):
        group = dist.group.WORLD
        assert group is not None
        part, whole = torch.ones(2), torch.ones(8)
        with Asynchronous() as asynchronous:
            Native(group).all_gather([(whole, part)] * 2, None)
            Native(group).reduce_scatter([(part, whole)] * 2, dist.ReduceOp.SUM, None)
        assert asynchronous.found == dict.fromkeys(
            ["allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"], False
        )


def test_gloo_is_given_one_collective_after_the_other_on_a_device_too(tmp_path: Path) -> None:
    """Its batched all-gather reads the addresses that it is given on the host, whatever device they are of."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        part, whole = torch.ones(2), torch.ones(2)
        with Asynchronous() as asynchronous:
            Native(group).all_gather([(whole, part)] * 2, None)
            Native(group).reduce_scatter([(part, whole)] * 2, dist.ReduceOp.SUM, None)
        assert not any("coalesced" in name for name in asynchronous.found)
    finally:
        dist.destroy_process_group()


def test_reductions_that_multiply_by_other_factors_are_apart() -> None:
    """Operations of the same kind compare as equal, whatever they multiply by."""
    both = [Scaling.choose(torch.float32, 4, 1, factor=factor, premultiplies=True) for factor in (3.0, 5.0, 5.0)]
    packed: Any = SimpleNamespace(members=[(torch.empty(0), torch.empty(0))])
    sent: Any = [_Sent(SimpleNamespace(), packed, scaling) for scaling in both]  # type: ignore[arg-type]
    assert [len(members) for _, members in _launches(sent)] == [1, 2]
