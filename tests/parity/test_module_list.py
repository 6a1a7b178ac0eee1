"""`fully_shard([a, b, ...])`: one group over several modules, of which a forward may run only some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance
from tests.harness.models import TIED, UNEVEN_MLP, Batch, ModelCase
from tests.harness.parity.implementation import API
from tests.harness.parity.programs import TOWER, WIDTH, is_sharded, loss_on, shard, train
from tests.harness.parity.trace import SCATTER, traced

CHUNKS = 4
CHUNKED = Tolerance(rtol=1e-4, atol=1e-6, reason="sums over chunks round otherwise")


class Chunked(nn.Module):
    """A tower, a norm and a head; the head may be left to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = TOWER.make_model()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, *, with_head: bool = True) -> Tensor:
        x = self.norm(self.tower(x))
        return self.head(x) if with_head else x


def _vectors(generator: torch.Generator) -> Batch:
    return Batch(torch.randn(8, WIDTH, generator=generator), torch.randn(8, 5, generator=generator))


CASE = ModelCase("chunked", Chunked, _vectors, ("tower.a", "tower.b"), nn.functional.mse_loss)


def grouped(**options: Any) -> Any:
    """Norm and head are one group; the rest as usual."""
    model = CASE.build()
    for name in CASE.unit_names:
        API.fully_shard(model.get_submodule(name), **options)
    API.fully_shard([model.norm, model.head], **options)
    return API.fully_shard(model, **options)


# ---- one group -----------------------------------------------------------------------------------


@pytest.mark.full
@multi_rank(2)
def test_the_list_is_returned_and_every_module_an_fsdp_module() -> None:
    modules = [nn.Linear(2, 3), nn.Linear(3, 2)]
    result = API.fully_shard(modules)
    assert result is modules
    assert all(isinstance(module, API.FSDPModule) for module in modules)


@multi_rank(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_parameters_of_a_list_are_gathered_and_resharded_together(reshard_after_forward: bool) -> None:
    model = TOWER.build()
    API.fully_shard([model.a, model.b, model.c], reshard_after_forward=reshard_after_forward)
    API.fully_shard(model)
    sharded: dict[str, list[bool]] = {}
    for name in "abcd":
        getattr(model, name).register_forward_pre_hook(
            lambda module, args, name=name: sharded.update({name: [is_sharded(p) for p in model.parameters()]})
        )
    output = model(TOWER.batch(0, 0, 0).inputs)
    assert sharded["a"] == sharded["b"] == sharded["c"] == [False] * 4  # with the root's own, "d"
    assert sharded["d"] == [reshard_after_forward] * 3 + [False]
    del output


@pytest.mark.full
@multi_rank(2)
def test_gradients_of_a_list_are_reduced_together() -> None:
    model = TOWER.build()
    API.fully_shard([model.a, model.b])
    API.fully_shard([model.c, model.d])
    API.fully_shard(model)
    sizes = {"ab": sum(p.numel() for p in (model.a.weight, model.b.weight))}
    sizes["cd"] = sum(p.numel() for p in (model.c.weight, model.d.weight))
    loss_on(TOWER, model).backward()
    with traced() as trace:
        loss_on(TOWER, model).backward()
    scattered = sum(each.numel for each in trace.of(SCATTER))
    assert sizes["ab"] + sizes["cd"] <= scattered <= (sizes["ab"] + sizes["cd"]) * 9 / 8
    assert len(trace.of(SCATTER)) == 2


@pytest.mark.full
@multi_rank(2)
def test_methods_work_on_the_group_of_a_list_through_any_member() -> None:
    model = grouped()
    loss_on(CASE, model).backward()
    model.norm.unshard()
    assert not is_sharded(model.norm.weight) and not is_sharded(model.head.weight)
    model.head.reshard()
    assert is_sharded(model.norm.weight) and is_sharded(model.head.weight)
    model.zero_grad()
    model.head.set_requires_gradient_sync(False)
    loss_on(CASE, model).backward()
    assert model.norm.weight.grad is None and model.head.weight.grad is None
    assert model.tower.a.weight.grad is not None


@multi_rank(2)
def test_a_module_within_another_of_the_list_belongs_to_it() -> None:
    model = UNEVEN_MLP.build()
    API.fully_shard([model, model[0]])
    train(UNEVEN_MLP, model, steps=2)


@multi_rank(2)
def test_a_list_cannot_be_the_root() -> None:
    first, second = API.fully_shard([nn.Linear(2, 3), nn.Linear(3, 2)])
    with pytest.raises(RuntimeError, match="root"):
        second(first(torch.randn(1, 2)))


@pytest.mark.full
@multi_rank(2)
def test_parameters_shared_within_the_list_stay_shared() -> None:
    model = TIED.build()
    API.fully_shard([model.embedding, model.head])
    API.fully_shard(model)
    assert model.head.weight is model.embedding.weight
    train(TIED, model)
    assert model.head.weight is model.embedding.weight


# ---- some of the modules -------------------------------------------------------------------------


def chunked_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The head runs on pieces, after the forward; one backward."""
    hidden = model(batch.inputs, with_head=False)
    pieces = zip(hidden.chunk(CHUNKS), batch.targets.chunk(CHUNKS), strict=True)
    return sum(nn.functional.mse_loss(model.head(piece), target) for piece, target in pieces) / CHUNKS


@pytest.mark.full
@multi_rank(2, 4)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_chunked_loss(reshard_after_forward: bool | None, world_size: int) -> None:
    train(CASE, grouped(reshard_after_forward=reshard_after_forward), loss=chunked_loss, tolerance=CHUNKED)


@pytest.mark.full
@multi_rank(2)
def test_chunked_loss_with_one_backward_per_chunk() -> None:
    """The saving of memory that it is for: each piece of logits lives for its own backward alone."""
    model, plain = grouped(), CASE.build()

    def gradients(each: nn.Module, rank: int) -> None:
        batch = CASE.batch(0, 0, rank)
        hidden = each(batch.inputs, with_head=False)
        leaf = hidden.detach().requires_grad_()
        for piece, target in zip(leaf.chunk(CHUNKS), batch.targets.chunk(CHUNKS), strict=True):
            (nn.functional.mse_loss(each.head(piece), target) / CHUNKS).backward()
        hidden.backward(leaf.grad)

    for _ in range(2):
        gradients(model, dist.get_rank())
        for rank in range(2):
            gradients(plain, rank)
    for name, parameter in plain.named_parameters():
        actual = model.get_parameter(name).grad
        assert actual is not None, name
        assert torch.allclose(actual.full_tensor(), parameter.grad / 2, rtol=1e-4, atol=1e-6), name


@pytest.mark.full
@multi_rank(2)
def test_forwards_of_varying_parts() -> None:
    """Everything, then without the head, then with pieces: no state is carried over."""
    model, plain = grouped(), CASE.build()
    for step, loss in enumerate((CASE.loss, chunked_loss, CASE.loss, chunked_loss)):
        loss(model, CASE.batch(0, step, dist.get_rank())).backward()
        for rank in range(2):
            loss(plain, CASE.batch(0, step, rank)).backward()
        for name, parameter in plain.named_parameters():
            actual = model.get_parameter(name).grad.full_tensor()
            assert torch.allclose(actual, parameter.grad / 2, rtol=1e-4, atol=1e-5), (step, name)
        assert all(is_sharded(parameter) for parameter in model.parameters())


@pytest.mark.full
@multi_rank(2)
def test_evaluation_of_a_part() -> None:
    model, plain = grouped(), CASE.build()
    batch = CASE.batch(0, 0, 0)
    with torch.no_grad():
        assert torch.equal(model(batch.inputs, with_head=False), plain(batch.inputs, with_head=False))
        assert torch.equal(model(batch.inputs), plain(batch.inputs))
    train(CASE, shard(CASE), tolerance=SUM_ORDER, steps=1)
    train(CASE, grouped(), loss=chunked_loss, tolerance=CHUNKED, steps=1)


@multi_rank(2)
def test_inputs_and_outputs_are_cast_for_every_module_and_every_call() -> None:
    policy = API.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = CASE.build()
    API.fully_shard([model.norm, model.head], mp_policy=policy)
    API.fully_shard(model)
    seen: list[torch.dtype] = []
    for module in (model.norm, model.head):
        module.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    hidden = model(CASE.batch(0, 0, 0).inputs, with_head=False)
    assert hidden.dtype == torch.float32
    for piece in hidden.chunk(2):
        assert model.head(piece).dtype == torch.float32
    assert seen == [torch.bfloat16] * 3


@multi_rank(2)
def test_each_piece_with_a_backward_of_its_own_is_one_reduction() -> None:
    model = grouped()
    loss_on(CASE, model).backward()
    batch = CASE.batch(0, 0, dist.get_rank())
    leaf = model(batch.inputs, with_head=False).detach().requires_grad_()
    with traced() as trace:
        for piece in leaf.chunk(CHUNKS):
            model.head(piece).square().mean().backward()
    assert len(trace.of(SCATTER)) == CHUNKS
    assert all(each.numel >= sum(p.numel() for p in model.head.parameters()) for each in trace.of(SCATTER))
