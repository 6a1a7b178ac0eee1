"""Parameters that gather themselves, in groups that reshard to fewer ranks after forward."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.harness import Accumulation, Reference, StepRecord, multi_rank, others_full, use_native_collectives
from tests.harness.models import Batch, ModelCase
from tests.harness.parity.custom_collectives import custom_all_gather
from tests.harness.parity.extensions import (
    CALLS,
    FiveArguments,
    Halves,
    OneArgument,
    Releasing,
    Wrapped,
    parallelized_with_extension,
    plain_case,
    sharded,
    steps_like_the_reference,
)
from tests.harness.parity.language import EVEN
from tests.harness.parity.programs import is_sharded, loss_on, mesh_of, train
from tests.harness.parity.trace import GATHER, traced


class Encoding(FiveArguments):
    """What it sends says `encode`, and what of that the parameter is `decode`."""

    encode: Any
    decode: Any

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        (inner,), _ = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        return self.encode(inner), {"ranks": mesh.size()}

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        CALLS.append(("post", {"out": out is not None}))
        return _filled(out, self.decode(metadata["ranks"], *outputs).to(param_dtype))


class Scaled(Encoding):
    """Each rank sends its values divided by a power of two of its own, and that: two tensors, nothing rounded."""

    def encode(self, inner: Tensor) -> tuple[Tensor, ...]:
        scale = torch.full((1,), 2.0 ** (dist.get_rank() - 1))
        return inner / scale, scale

    def decode(self, ranks: int, *outputs: Tensor) -> Tensor:
        values, scales = outputs
        assert scales.shape == (ranks,)
        return (values.unflatten(0, (ranks, -1)) * scales[:, None, None]).flatten(0, 1)


class Coded(Encoding):
    """Travels as bytes."""

    def encode(self, inner: Tensor) -> tuple[Tensor, ...]:
        return (inner.contiguous().view(torch.uint8),)

    def decode(self, ranks: int, *outputs: Tensor) -> Tensor:
        return outputs[0].view(torch.float32)


class Overwriting(Encoding):
    """Sends halves of its values, and doubles them where they arrived."""

    def encode(self, inner: Tensor) -> tuple[Tensor, ...]:
        return (inner / 2,)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        CALLS.append(("post", {"out": out is not None}))
        (output,) = outputs
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(output):
            output.mul_(2)
        return (output, (output,)) if out is None else None


def _filled(out: Tensor | None, value: Tensor) -> Any:
    if out is None:
        value = value.clone()
        return value, (value,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(value.view(-1)[: out.numel()].view_as(out))
    return None


KINDS = [FiveArguments, Halves, Scaled, Coded, Releasing, Overwriting, Wrapped]
EXTENDED = pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.__name__)


def _posts() -> list[bool]:
    return [call["out"] for name, call in CALLS if name == "post"]


# ---- training, against the unsharded reference -------------------------------------------------------


@multi_rank(4)
@EXTENDED
@pytest.mark.parametrize(  # full: 7 cases, 5 s
    "rows", others_full([16, 13], [13]), ids=["even", "uneven"]
)
def test_extensions_on_fewer_ranks_train_like_the_unsharded_model(kind: type[Wrapped], rows: int) -> None:
    steps_like_the_reference(sharded(kind, rows, reshard_after_forward=2), rows)


@pytest.mark.full
@multi_rank(2)
@pytest.mark.parametrize("kind", [OneArgument, Halves], ids=lambda each: each.__name__)
def test_the_number_of_all_ranks_is_true(kind: type[Wrapped]) -> None:
    model = sharded(kind, 16, reshard_after_forward=2)
    steps_like_the_reference(model, 16)
    assert model._fsdp_state.unit[0].storage.post_forward is None


@pytest.mark.full  # 8 ranks
@multi_rank(8, timeout=180)
@pytest.mark.parametrize("kind", others_full([Halves, Coded], [Coded]), ids=lambda each: each.__name__)  # full: 1 s
def test_extensions_in_every_replica(kind: type[Wrapped]) -> None:
    model = sharded(kind, 13, mesh=mesh_of(2, 4), reshard_after_forward=2)
    steps_like_the_reference(model, 13)
    model = sharded(kind, 32, reshard_after_forward=4)
    steps_like_the_reference(model, 32)


@multi_rank(8, timeout=180)
def test_beside_tensor_parallelism() -> None:
    mesh = mesh_of(4, 2, names=("dp", "tp"))
    model = parallelized_with_extension(Halves, mesh, reshard_after_forward=2)
    record = Reference(EVEN, world_size=4).step()
    CALLS.clear()
    EVEN.loss(model, EVEN.batch(0, 0, dist.get_rank() // 2)).backward()
    assert sum(name == "post" for name, _ in CALLS) == 2 * sum(name == "pre" for name, _ in CALLS)
    _assert_gradients(model, record, rtol=1e-3, atol=1e-5)


@multi_rank(4)
def test_an_extension_must_send_what_it_sent_before() -> None:
    """Another dtype of the same size would be misread."""
    model = sharded(Halves, 16, reshard_after_forward=2)
    loss_on(plain_case(16), model).backward()
    model.zero_grad()
    with (
        mock.patch.object(Halves, "fsdp_pre_all_gather", _sends_integers),
        pytest.raises(
            fsdp2.FSDPRuntimeError, match=r"parameter 'first\.weight' returned 2 inputs .* must stay the same"
        ),
    ):
        loss_on(plain_case(16), model)
    steps_like_the_reference(model, 16)


def _sends_integers(self: Halves, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
    return tuple(torch.zeros(self._inner.shape, dtype=torch.int16) for _ in range(2)), {"terms": 2}


CASTING = [(Scaled, torch.bfloat16), (Coded, torch.bfloat16), (Wrapped, torch.bfloat16)]


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize(("kind", "param_dtype"), [*((kind, None) for kind in KINDS), *CASTING])
def test_every_bit_is_as_with_true(kind: type[Wrapped], param_dtype: torch.dtype | None) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    results = []
    for reshard_after_forward in (True, 2):
        model = sharded(kind, 13, reshard_after_forward=reshard_after_forward, mp_policy=policy)
        results.append(_bits(model))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def _bits(model: Any) -> list[Tensor]:
    found = []
    for step in range(3):
        loss = loss_on(plain_case(13), model, step)
        loss.backward()
        found.append(loss.detach())
        for parameter in model.parameters():
            found.append(parameter.grad.to_local().clone())
            with torch.no_grad():
                local = parameter.to_local()
                (local._inner if isinstance(local, Wrapped) else local).sub_(0.1 * found[-1])
            parameter.grad = None
    return found


@multi_rank(4)
def test_offloaded() -> None:
    policy = fsdp2.CPUOffloadPolicy(pin_memory=False)
    steps_like_the_reference(sharded(Scaled, 13, reshard_after_forward=2, offload_policy=policy), 13)


def _assert_gradients(
    model: nn.Module, record: StepRecord, *, times: float = 1, rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    for name, parameter in model.named_parameters():
        expected, gradient = record.gradients[name], parameter.grad
        assert expected is not None and isinstance(gradient, DTensor), name
        assert torch.allclose(gradient.full_tensor(), times * expected, rtol=rtol, atol=atol), name


# ---- beside ordinary parameters --------------------------------------------------------------------


class _Net(nn.Module):
    """Two layers with biases, one group if only the root is sharded; each may be a checkpoint."""

    def __init__(self, checkpoints: str = "none") -> None:
        super().__init__()
        self.first = nn.Linear(8, 13)
        self.last = nn.Linear(13, 5)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints == "none":
            return self.last(torch.tanh(self.first(x)))
        use_reentrant = self.checkpoints == "reentrant"
        hidden = checkpoint(self.first, x, use_reentrant=use_reentrant)
        return checkpoint(self.last, torch.tanh(hidden), use_reentrant=use_reentrant)  # type: ignore[no-any-return]


def _vectors(generator: torch.Generator) -> Batch:
    x = torch.randn(4, 8, generator=generator).requires_grad_()
    return Batch(x, torch.randn(4, 5, generator=generator))


def _net(units: tuple[str, ...] = ("first", "last"), checkpoints: str = "none") -> ModelCase:
    return ModelCase("net", lambda: _Net(checkpoints), _vectors, units, F.mse_loss)


def _extended(case: ModelCase, *, releases: bool = False, **options: Any) -> Any:
    """The model of ``case``, sharded; its weights gather themselves (as plain tensors do that torch's tests patch)."""
    model: Any = case.build()
    for unit in case.units(model):
        fsdp2.fully_shard(unit, reshard_after_forward=2, **options)
    for layer in (model.first, model.last):
        _extend(layer.weight, releases=releases)
    return model


def _extend(parameter: Any, *, releases: bool) -> None:
    local, rows = parameter._local_tensor, parameter.shape[0]

    def pre(mesh: Any) -> Any:
        padded = local.new_zeros(-(-rows // mesh.size()), local.shape[1])
        padded[: local.shape[0]] = local.detach()
        return (padded, torch.full((1,), float(dist.get_rank()))), {"rows": rows}

    def post(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        values, ranks = outputs
        assert ranks.tolist() == list(range(len(ranks))), "the second output arrives in its order"
        return _filled(out, values[: metadata["rows"]].to(dtype))

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post
    if releases:
        local.fsdp_should_release_all_gather_outputs_after_post_all_gather = lambda: True


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize("units", [("first", "last"), ("first",), ()], ids=["three", "two", "one"])
@pytest.mark.parametrize("releases", [False, True], ids=["keeps", "releases"])
@pytest.mark.parametrize("checkpoints", ["none", "reentrant", "no_reentrant"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_groups_that_mix_both(microbatches: int, checkpoints: str, releases: bool, units: tuple[str, ...]) -> None:
    case = _net(units, checkpoints)
    model = _extended(case, releases=releases)
    reference = Reference(case, world_size=4, microbatches=microbatches, accumulation=Accumulation.REDUCE_LAST)

    def before(micro: int) -> None:
        model.set_requires_gradient_sync(micro == microbatches - 1)

    train(case, model, reference=reference, before_forward=before)


@multi_rank(4)
def test_with_a_custom_all_gather_everything_travels_in_its_memory() -> None:
    case = _net()
    model = _extended(case)
    log: list[dict[str, Any]] = []
    for module in (model, model.first, model.last):
        module.set_custom_all_gather(custom_all_gather(log))
    train(case, model)
    assert {len(call["ranks"]) for call in log} == {2, 4}
    assert all(call["own_memory"] for call in log)


@multi_rank(4)
def test_a_custom_all_gather_may_come_while_they_rest() -> None:
    case = _net()
    model = _extended(case)
    record = Reference(case, world_size=4).step()
    loss = loss_on(case, model)
    log: list[dict[str, Any]] = []
    for module in (model.first, model.last):
        module.set_custom_all_gather(custom_all_gather(log))
    loss.backward()
    assert {len(call["ranks"]) for call in log} == {2}
    assert all(call["own_memory"] for call in log)
    _assert_gradients(model, record)


@multi_rank(4)
def test_keeping_the_unsharded_storage() -> None:
    case = _net()
    model = _extended(case)
    model.set_keep_unsharded_storage(True)
    train(case, model)


# ---- what is gathered, what rests ------------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
def test_backward_gathers_among_the_neighbours_and_asks_the_extension_for_nothing() -> None:
    use_native_collectives()
    model = sharded(Scaled, 16, reshard_after_forward=2)
    first = dist.get_rank() // 2 * 2
    for step in range(2):
        CALLS.clear()
        with traced() as trace:
            loss_on(plain_case(16), model, step).backward()
        assert {each.ranks for each in trace.of(GATHER)} == {(0, 1, 2, 3), (first, first + 1)}
        assert [name for name, _ in CALLS] == ["pre", "post", "post"]
        assert _posts() == [step > 0, True]


@multi_rank(4)
def test_at_rest_half_of_what_arrived_has_memory_and_the_sharded_parameter_is_registered() -> None:
    model = sharded(Scaled, 16, reshard_after_forward=2)
    sharded_weight = model.first.weight
    (group,) = model.first._fsdp_state.unit
    loss = loss_on(plain_case(16), model)
    assert model.first.weight is sharded_weight and is_sharded(sharded_weight)
    assert _bytes(group) == (16 * 8 + 4) * 4 // 2
    assert torch.equal(model.state_dict()["first.weight"].to_local()._inner, sharded_weight.to_local()._inner)
    loss.backward()
    assert _bytes(group) == 0


def _bytes(group: Any) -> int:
    extended = group.storage.extensions._extended
    rests = [rest.storage.nbytes() for each in extended for rest in each.rests]
    return sum(rests) + sum(each.storage.nbytes() for one in extended for each in (*one.outputs, *one.inner))


@multi_rank(4)
def test_forwards_that_follow_one_another() -> None:
    """A forward finds the parameters at rest, once more, and rests them again; each has a backward."""
    case = _net()
    model = _extended(case, releases=True)
    record = Reference(case, world_size=4).step()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            loss_on(case, model)
    assert torch.equal(loss_on(case, model).detach(), record.losses[dist.get_rank()][0])
    model.first.unshard()
    assert not is_sharded(model.first.weight)
    losses = [loss_on(case, model) for _ in range(2)]
    sum(losses).backward()  # type: ignore[union-attr]
    _assert_gradients(model, record, times=2)


# ---- what may happen while they rest ---------------------------------------------------------------


@pytest.mark.full
@multi_rank(4)
def test_backward_computes_with_what_forward_computed_with() -> None:
    """Though the sharded parameter was written in between, which shows in the next forward."""
    model = sharded(Halves, 16, reshard_after_forward=2)
    record = Reference(plain_case(16), world_size=4).step()
    loss = loss_on(plain_case(16), model)
    with torch.no_grad():
        model.first.weight.to_local()._inner.zero_()
    loss.backward()
    _assert_gradients(model, record, rtol=1e-3, atol=1e-5)
    output = model(plain_case(16).batch(0, 0, 0).inputs)
    assert torch.allclose(output, model.last.bias.full_tensor().expand_as(output))


@multi_rank(4)
def test_a_frozen_one_gets_no_gradient() -> None:
    model = sharded(Halves, 16, reshard_after_forward=2)
    loss_on(plain_case(16), model).backward()
    model.zero_grad()
    loss_on(plain_case(16), model)
    model.first.weight.requires_grad_(False)
    loss_on(plain_case(16), model).backward()
    assert model.first.weight.grad is None and model.last.weight.grad is not None


@multi_rank(4)
def test_a_replaced_one_is_refused_and_nothing_is_lost() -> None:
    model = sharded(Halves, 16, reshard_after_forward=2)
    loss = loss_on(plain_case(16), model)
    weight = model.first.weight
    model.first.weight = nn.Parameter(torch.zeros(16, 8))
    with pytest.raises(fsdp2.FSDPRuntimeError, match=r"parameter 'first\.weight' was replaced"):
        loss.backward()
    assert model.first.weight is weight
    model.zero_grad()
    steps_like_the_reference(model, 16)


@multi_rank(4)
@pytest.mark.parametrize("value", [True, False])
def test_another_way_of_resharding_from_then_on(value: bool) -> None:
    model = sharded(Scaled, 16, reshard_after_forward=2)
    (group,) = model.first._fsdp_state.unit
    loss_on(plain_case(16), model)
    model.set_reshard_after_forward(value)
    assert _bytes(group) == 0
    steps_like_the_reference(model, 16)


class Failing(Scaled):
    """Raises in the call of that number."""

    fails_at = -1
    method = ""

    @classmethod
    def _count(cls, method: str) -> None:
        if method == cls.method:
            cls.fails_at -= 1
            if cls.fails_at == 0:
                raise ZeroDivisionError(method)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> Any:
        self._count("pre")
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self._count("post")
        return super().fsdp_post_all_gather(*args, **kwargs)


@pytest.mark.full
@multi_rank(4)
@pytest.mark.parametrize(("method", "call"), [("pre", 1), ("pre", 2), ("post", 1), ("post", 2), ("post", 3)])
def test_after_an_exception_in_an_extension_training_goes_on(method: str, call: int) -> None:
    """In its first forward, in its first backward (the second call of post), and later."""
    model = sharded(Failing, 13, reshard_after_forward=2)
    Failing.method, Failing.fails_at = method, call
    with pytest.raises(ZeroDivisionError):
        for _ in range(2):
            loss_on(plain_case(13), model).backward()
    model.zero_grad()
    (group,) = model.first._fsdp_state.unit
    steps_like_the_reference(model, 13)
    assert _bytes(group) == 0
