"""Steps on fake tensors: on the CPU as programs that estimate memory run them, and on CUDA devices that are not there.

On fake `cuda` tensors wrong devices, and shapes that only CUDA's operators refuse, show without a GPU.
What stays uncovered there: autograd's own backward and streams, which ask the driver for a device; kernels; NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp2._torch
import fsdp2.core.agreement
import fsdp2.core.gradients
import fsdp2.core.mesh
import fsdp2.core.state
import fsdp2.plugs.states.whole_states
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from fsdp2.core.sharding import dtensor_like
from fsdp2.core.streams import HostDevice
from tests.harness import fake_world
from tests.harness.internals import SET_LATE_GRADIENTS, groups_of

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # torch says it once

CUDA = torch.device("cuda", 0)
NEEDS_CUDA_BUILD = pytest.mark.skipif(torch.version.cuda is None, reason="fake CUDA tensors need a build with CUDA")

POLICIES = {
    "full": MixedPrecisionPolicy(),
    "half": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp16": MixedPrecisionPolicy(torch.float16, torch.float32),
}


class Device(HostDevice):
    """Streams in name only: everything is issued in order."""

    has_streams = True


@contextmanager
def on_fake_cuda() -> Iterator[FakeTensorMode]:
    """Tensors that fsdp2 makes are fake; the mesh, which is of CPUs, counts as one of CUDA devices."""
    with ExitStack() as stack:
        for owner, name, value in (
            (fsdp2.core.mesh, "device_of", lambda mesh: CUDA),
            (fsdp2.core.state, "device_for", lambda device: Device()),
            (fsdp2.core.agreement, "disagreement", lambda *arguments: None),  # on real numbers of the device
            (fsdp2._torch, "coalescing", lambda group: nullcontext()),  # torch has no fake form of what it issues
            (fsdp2.core.gradients, "host_copy", lambda tensor: tensor.to("cpu", non_blocking=True)),  # nothing to pin
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def linear_layers(**options: Any) -> nn.Sequential:
    """Uneven rows, a parameter that travels alone, one without a bias."""
    return nn.Sequential(
        nn.Linear(64, 129, **options),
        nn.LayerNorm(129, **options),
        nn.Linear(129, 2048, bias=False, **options),
        nn.Linear(2048, 512, **options),
    )


def convolutions(**options: Any) -> nn.Sequential:
    """In another order in memory."""
    model = nn.Sequential(nn.Conv2d(3, 13, 3, **options), nn.Conv2d(13, 8, 3, **options))
    for layer in model:
        shape = layer.weight.shape
        layer.weight = nn.Parameter(torch.empty(shape, memory_format=torch.channels_last, **options))
    return model


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.children():
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 64])
def test_programs_that_estimate_memory_run_whole_steps_on_fake_tensors(world_size: int) -> None:
    with fake_world(world_size), FakeTensorMode():
        model = shard(linear_layers(), mp_policy=POLICIES["half"])
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(3):
            model(torch.ones(2, 64)).float().sum().backward()
            for parameter in model.parameters():
                assert isinstance(parameter.grad, DTensor) and isinstance(parameter.grad.to_local(), FakeTensor)
                assert parameter.grad.to_local().shape == parameter.to_local().shape  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("build", [linear_layers, convolutions], ids=lambda build: build.__name__)
@pytest.mark.parametrize("world_size", [2, 8, 512])
def test_everything_is_on_the_device(
    world_size: int, build: Callable[..., nn.Module], policy: str, replicas: int
) -> None:
    """Gathers, forward; packing, reduction and delivery of made-up gradients, one of them missing; clipping, a step."""
    with ExitStack() as stack:
        stack.enter_context(fake_world(world_size, 1))
        mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
        mesh = mesh if replicas > 1 else mesh["shard"]
        stack.enter_context(on_fake_cuda())
        model = shard(build(device="cuda"), mesh=mesh, mp_policy=POLICIES[policy])
        inputs = torch.ones(2, 64, device="cuda") if build is linear_layers else torch.ones(2, 3, 8, 8, device="cuda")
        assert model(inputs).device == CUDA
        for missing in (False, True):
            reduce_made_up_gradients(model, missing=missing)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert gradients
        for gradient in gradients:
            assert isinstance(gradient, DTensor) and gradient.to_local().device == CUDA
        clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.AdamW(model.parameters(), foreach=True).step()


def move(model: nn.Module) -> None:
    model.to("cuda")


def assign(model: nn.Module) -> None:
    states = {name: dtensor_like(each, each.to_local().to("cuda")) for name, each in model.state_dict().items()}
    with mock.patch.object(fsdp2.plugs.states.whole_states, "refuse_of_another_rank", lambda *arguments: None):  # reads
        model.load_state_dict(states, assign=True)


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("change", [move, assign], ids=lambda change: change.__name__)
def test_offloaded_parameters_that_are_moved_to_the_device_come_back(change: Callable[[nn.Module], None]) -> None:
    """Before the first step, and between two, with gradients."""
    with fake_world(4, 1):
        mesh = init_device_mesh("cpu", (4,))
        with on_fake_cuda():
            model = linear_layers(device="cuda")
            shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
            for _ in range(3):
                change(model)
                assert model(torch.ones(2, 64, device="cuda")).device == CUDA
                reduce_made_up_gradients(model)
                for parameter in model.parameters():
                    both = (parameter, parameter.grad)
                    places = {place for each in both for place in (each.device, each.to_local().device)}
                    assert places == {torch.device("cpu")}
            torch.optim.AdamW(model.parameters(), foreach=True).step()


def reduce_made_up_gradients(model: nn.Module, *, missing: bool = False) -> None:
    """A backward, without autograd's; one that is ``missing`` the first gradient of each group."""
    for group in groups_of(model):
        group.unshard()
        group.wait_for_unshard()
        for param in group.params[missing:]:
            assert param.unsharded is not None
            param.unsharded.grad = made_up(param.unsharded)
        group.reduce_or_keep()
        group.reshard()
        assert group.comm is not None
        with SET_LATE_GRADIENTS.replaced_by(lambda *arguments: None):  # reads
            group.comm.finish_reduces()


@NEEDS_CUDA_BUILD
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_offloaded_parameters_and_their_gradients_are_on_the_host(policy: str, moved: bool) -> None:
    """To torch, too, which refuses a gradient on another device; wherever the model was before."""
    with fake_world(4, 1):
        mesh = init_device_mesh("cpu", (4,))
        with on_fake_cuda():
            model = linear_layers(device="cpu" if moved else "cuda")
            shard(model, mesh=mesh, mp_policy=POLICIES[policy], offload_policy=CPUOffloadPolicy(pin_memory=False))
            host = torch.device("cpu")
            assert model(torch.ones(2, 64, device="cuda")).device == CUDA
            for _ in range(2):
                reduce_made_up_gradients(model)
                for parameter in model.parameters():
                    gradient = parameter.grad
                    assert isinstance(parameter, DTensor) and isinstance(gradient, DTensor)
                    assert {parameter.device, parameter.to_local().device} == {host}
                    assert {gradient.device, gradient.to_local().device} == {host}
                torch.optim.AdamW(model.parameters(), foreach=True).step()
                model.zero_grad()


def made_up(unsharded: Tensor) -> Tensor:
    return torch.ones_like(unsharded)
