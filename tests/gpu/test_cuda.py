"""One GPU, a world of one rank on NCCL: streams, events and allocations for real, beside the reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    _torch,
    clip_grad_norm_,
    fully_shard,
    offload_optimizer_state,
)
from fsdp2.checkpoint import Checkpoints
from fsdp2.core.streams import Wait
from tests.gpu.helpers import NEEDS_CUDA, shard
from tests.harness.compare import SUM_ORDER
from tests.harness.internals import allocated_bytes, groups_of
from tests.harness.jitter import jittering
from tests.harness.models import MODEL_CASES, TRANSFORMER, Batch, ModelCase
from tests.harness.reference import Reference, adamw
from tests.harness.training import assert_trains_like

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_training_equals_the_reference(case: ModelCase, world_of_one: None) -> None:
    model = shard(case, case.build())
    assert all(parameter.is_cuda for parameter in model.parameters())
    assert_trains_like(
        Reference(case, world_size=1, device="cuda"),
        model,
        adamw([parameter for parameter in model.parameters() if parameter.requires_grad]),
        steps=5,
        tolerance=SUM_ORDER,  # cuBLAS may choose another algorithm for other addresses
    )


def jittered_losses(width: int, seed: int, dropped: frozenset[object] = frozenset()) -> tuple[list[float], list[float]]:
    """Of some steps, with streams that sleep at random and memory that holds garbage; and of the plain model."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(6)]
    model = nn.Sequential(*layers)
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).cuda()
    plain.load_state_dict(model.state_dict())
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    losses: tuple[list[float], list[float]] = ([], [])
    with jittering(seed, dropped):
        for each, found in zip((model, plain), losses, strict=True):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for step in range(6):
                x = torch.randn(32, width, generator=torch.Generator().manual_seed(step)).cuda()
                loss = each(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        torch.cuda.synchronize()
    return losses


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("width", [64, 1024], ids=["packed", "direct"])
def test_nothing_depends_on_how_long_communication_takes(width: int, seed: int, world_of_one: None) -> None:
    found, expected = jittered_losses(width, seed)
    assert found == pytest.approx(expected, rel=1e-5)  # fp32, other algorithms for other addresses


@pytest.mark.parametrize("why", [Wait.GATHERED, Wait.GRADIENTS_READY, Wait.REDUCED], ids=lambda why: why.name)
def test_a_missing_wait_shows(why: Wait, world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP2_COMM", "native")  # else one rank gathers nothing, and there is nothing to wait for
    for seed in range(10):
        found, expected = jittered_losses(1024, seed, frozenset({why}))
        if found != pytest.approx(expected, rel=1e-5):
            return
    pytest.fail("no wait of this kind was needed")


def test_memory_between_steps_is_the_shards(world_of_one: None) -> None:
    model = shard(TRANSFORMER, TRANSFORMER.build())
    assert isinstance(model, FSDPModule)
    for step in range(3):
        batch = TRANSFORMER.batch(0, step, 0).to(None, torch.device("cuda"))
        TRANSFORMER.loss(model, batch).backward()
        model.zero_grad()
    assert all(group.phase.value == "sharded" for group in groups_of(model))
    assert all(allocated_bytes(group) == 0 for group in groups_of(model))


def test_a_group_in_which_nothing_is_packed(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one matrix is large: the kernel that copies packed ones out gets nothing, and must not be called."""
    monkeypatch.setenv("FSDP2_COMM", "native")
    layer = nn.Linear(1024, 1024, bias=False)
    plain = copy.deepcopy(layer).cuda()
    fully_shard(layer)
    x = torch.randn(4, 1024, device="cuda")
    for each in (layer, plain):
        each(x).square().mean().backward()
    assert torch.equal(layer.weight.grad.to_local(), plain.weight.grad)  # type: ignore[union-attr, operator]


def test_unwrapped_state_that_was_offloaded_is_on_the_device(world_of_one: None) -> None:
    model = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(parameters=False, optimizer_state=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model = fsdp2.unwrap(model, optimizers=[optimizer])
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    assert all(each.is_cuda for state in optimizer.state.values() for each in state.values() if each.dim())


@pytest.mark.parametrize("factor", [1.0, 4.0, 3.0])
def test_sums_in_bf16_are_divided(factor: float, world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP2_COMM", "native")
    layer = fully_shard(nn.Linear(8, 8, dtype=torch.bfloat16))
    layer.set_gradient_divide_factor(factor)
    layer(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    expected = torch.full((8, 8), 2.0 / factor, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(layer.weight.grad.to_local(), expected)  # type: ignore[union-attr, operator]


def test_inputs_are_moved_to_the_device(world_of_one: None) -> None:
    model = fully_shard(nn.Linear(4, 4))
    assert model(torch.ones(2, 4)).is_cuda


@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy()], ids=["on_device", "offloaded"])
def test_the_norm_is_on_the_device_wherever_gradients_are(policy: OffloadPolicy, world_of_one: None) -> None:
    model = TRANSFORMER.build()
    for unit in TRANSFORMER.units(model):
        fully_shard(unit, offload_policy=policy)
    record = Reference(TRANSFORMER, world_size=1, device="cuda", max_norm=0.0625).step()
    TRANSFORMER.loss(model, TRANSFORMER.batch(0, 0, 0).to(None, torch.device("cuda"))).backward()
    norms = [clip_grad_norm_(model.parameters(), 0.0625) for _ in range(2)]
    assert all(type(norm) is torch.Tensor and norm.is_cuda for norm in norms)
    assert norms[0].item() == pytest.approx(record.gradient_norm.item(), rel=1e-5)  # summed in another order
    assert norms[1].item() == pytest.approx(0.0625, rel=1e-4)


def offloaded_apart(policy: OffloadPolicy) -> tuple[FSDPModule, torch.optim.Optimizer]:
    """A sharded transformer, and its optimizer, with a parameter group for each parameter."""
    model = TRANSFORMER.build()
    for unit in TRANSFORMER.units(model):
        fully_shard(unit, offload_policy=policy)
    assert isinstance(model, FSDPModule)
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    return model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)  # as `adamw`


@pytest.mark.parametrize("gradients", [False, True], ids=["state", "gradients_and_state"])
def test_offloaded_apart_it_trains_like_the_reference(gradients: bool, world_of_one: None) -> None:
    """The step is on the device; between steps the state is in pinned memory."""
    policy = CPUOffloadPolicy(parameters=False, gradients=gradients, optimizer_state=True)
    model, optimizer = offloaded_apart(policy)
    assert_trains_like(
        Reference(TRANSFORMER, world_size=1, microbatches=3, device="cuda"),
        model,
        optimizer,
        steps=3,
        tolerance=SUM_ORDER,
        before_forward=lambda micro: model.set_is_last_backward(micro == 2),
    )
    assert all(parameter.is_cuda for parameter in model.parameters())
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].to_local().is_pinned()


def test_gradients_before_the_last_backward_are_in_host_memory(world_of_one: None) -> None:
    model, optimizer = offloaded_apart(CPUOffloadPolicy(parameters=False, gradients=True))
    allocated = []
    for micro in range(6):
        model.set_is_last_backward(micro in (2, 5))
        batch = TRANSFORMER.batch(0, 0, 0, micro).to(None, torch.device("cuda"))
        TRANSFORMER.loss(model, batch).backward()
        groups_of(model)[0].comm.finish_reduces()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        if micro == 2:
            assert all(parameter.grad.is_cuda for parameter in model.parameters() if parameter.grad is not None)
            optimizer.zero_grad()
    own = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert allocated[5] - allocated[4] >= own


def test_offloaded_state_is_loaded_to_the_host_and_stepped_on_the_device(world_of_one: None) -> None:
    model, optimizer = offloaded_apart(OffloadPolicy())
    handle = offload_optimizer_state(optimizer)
    reference = Reference(TRANSFORMER, world_size=1, device="cuda")
    assert_trains_like(reference, model, optimizer, steps=2, tolerance=SUM_ORDER)
    optimizer.load_state_dict(optimizer.state_dict())
    states = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(not state.is_cuda and state.to_local().is_pinned() for state in states)
    handle.remove()
    assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
    batch = TRANSFORMER.batch(0, 2, 0).to(None, torch.device("cuda"))
    TRANSFORMER.loss(model, batch).backward()
    optimizer.step()


@pytest.mark.parametrize("width", [64, 1024], ids=["packed", "direct"])
def test_a_whole_step_is_captured_and_replayed(width: int, world_of_one: None) -> None:
    """Forward, backward and optimizer in one CUDA graph, though the blocks are resharded after forward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).cuda()
    plain.load_state_dict(model.state_dict())
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    if _torch.can_swap_memory:
        model.set_communication_memory_pool(True)
    else:
        model.set_keep_unsharded_storage(True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    inputs = torch.randn(8, width, device="cuda")

    def step(index: int) -> None:
        loss = (model, plain)[index](inputs).square().mean()
        loss.backward()
        optimizers[index].step()
        optimizers[index].zero_grad()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0)
    for _ in range(3):
        inputs.copy_(torch.randn_like(inputs))
        graph.replay()
    torch.cuda.synchronize()
    assert all(parameter.to_local().isfinite().all() for parameter in model.parameters())
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    for parameter, value in zip(plain.parameters(), before, strict=True):
        parameter.data.copy_(value)
    graph.replay()
    step(1)
    torch.cuda.synchronize()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.to_local(), expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_graphed_step_trains_as_the_reference(reshard_after_forward: bool, world_of_one: None) -> None:
    """Also with an evaluation and a step of another shape between two replays."""
    model = TRANSFORMER.build()
    for unit in TRANSFORMER.units(model):
        fully_shard(unit, reshard_after_forward=reshard_after_forward)

    def fused(parameters: Any) -> torch.optim.Optimizer:
        rate = torch.tensor(1e-2, device="cuda")
        return torch.optim.AdamW(parameters, lr=rate, eps=1e-3, fused=True, capturable=True)

    optimizer = fused(model.parameters())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = TRANSFORMER.loss(model, Batch(inputs, targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    reference = Reference(TRANSFORMER, world_size=1, device="cuda", make_optimizer=fused)
    graphed = fsdp2.make_graphed_step(step, model, optimizer)
    found, expected = [], []
    for index in range(8):
        batch = TRANSFORMER.batch(0, index, 0)
        found.append(graphed(batch.inputs.cuda(), batch.targets.cuda()))
        expected += reference.step().losses[0]
        with torch.no_grad():
            model(batch.inputs[:1].cuda())
    assert graphed.is_recorded
    losses = torch.stack(found), torch.stack([each.cuda() for each in expected])
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_is_of_its_moment(asynchronous: bool, world_of_one: None, tmp_path: Path) -> None:
    """What the device computes after a save has returned is not in it; what it had not yet computed then is."""
    model = shard(TRANSFORMER, TRANSFORMER.build())
    optimizer = adamw(list(model.parameters()))

    def step(index: int) -> None:
        TRANSFORMER.loss(model, TRANSFORMER.batch(0, index, 0).to(None, torch.device("cuda"))).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    with Checkpoints(tmp_path / "run", model, optimizer) as checkpoints:
        step(1)
        checkpoints.save(2, asynchronous=asynchronous)
        then = {name: p.to_local().clone() for name, p in model.named_parameters()}
        for index in range(2, 5):
            step(index)
    other = shard(TRANSFORMER, TRANSFORMER.build(seed=1))
    fresh = adamw(list(other.parameters()))
    assert Checkpoints(tmp_path / "run", other, fresh).restore() == 2
    for name, parameter in other.named_parameters():
        assert parameter.is_cuda and torch.equal(parameter.to_local(), then[name]), name
        assert fresh.state[parameter]["exp_avg"].to_local().is_cuda
