"""`AllGatherInput`: what `fsdp_pre_all_gather` returns may be joined along a dim, and seen in a size, of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import FSDPRuntimeError, FSDPTypeError, FSDPValueError, fully_shard
from fsdp2.experimental import AllGatherInput
from tests.harness import multi_rank
from tests.harness.parity.extensions import FiveArguments, Wrapped, plain_case, sharded, steps_like_the_reference
from tests.harness.parity.programs import loss_on, mesh_of


def filled(out: Tensor | None, value: Tensor) -> Any:
    if out is None:
        value = value.clone()
        return value, (value,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(value.reshape(-1)[: out.numel()].view_as(out))
    return None


class Recorded(FiveArguments):
    """Sends its values transposed, divided by a power of two of this rank's, and that as a tensor without dims."""

    record: Any = AllGatherInput

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Any, ...], Any]:
        (inner,), _ = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        scale, ranks = torch.tensor(2.0 ** (mesh.get_local_rank() - 1)), mesh.size()
        numbers = torch.full((1, 2), float(mesh.get_local_rank()))
        values = (inner / scale).T.contiguous()
        return (
            self.record(values, dim=-1),
            self.record(scale, output_size=(ranks, 1, 1)),
            numbers,  # a plain tensor beside them, joined as the parameter is
        ), ranks

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        values, scales, numbers = outputs
        assert scales.shape == (metadata, 1, 1) and numbers.shape == (metadata, 2)
        assert numbers[:, 0].tolist() == list(range(metadata))
        parts = values.T.unflatten(0, (metadata, -1)) * scales
        return filled(out, parts.flatten(0, 1).to(param_dtype))


@dataclass(frozen=True)
class OfTorch:
    """As torch's own has it."""

    tensor: Tensor
    _: KW_ONLY
    dim: int = 0
    output_size: Sequence[int] | None = None


OfTorch.__name__ = "AllGatherInput"


class RecordedByTorch(Recorded):
    record = OfTorch


@multi_rank(2, 4)
@pytest.mark.parametrize("rows", [16, 13], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", [Recorded, RecordedByTorch], ids=lambda each: each.__name__)
def test_they_train_like_the_unsharded_model(kind: type[Wrapped], rows: int, world_size: int) -> None:
    steps_like_the_reference(sharded(kind, rows), rows)


@multi_rank(4)
@pytest.mark.parametrize("where", ["replicas", "neighbours", "offloaded", "kept"])
def test_beside_other_features(where: str) -> None:
    options: dict[str, Any] = {
        "replicas": {"mesh": mesh_of(2, 2)},
        "neighbours": {"reshard_after_forward": 2},
        "offloaded": {"offload_policy": fsdp2.CPUOffloadPolicy()},
        "kept": {"reshard_after_forward": False},
    }[where]
    steps_like_the_reference(sharded(Recorded, 13, **options), 13)


class Columns(Wrapped):
    """Of a parameter whose dim 1 is sharded: its columns travel as rows, which are joined along dim 0."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Any, ...], Any]:
        return (AllGatherInput(self._inner.T.contiguous()),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        return filled(out, outputs[0].T.contiguous())


@multi_rank(2)
def test_the_dim_is_the_inputs_own(world_size: int) -> None:
    torch.manual_seed(0)
    layer, plain = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
    layer.weight = nn.Parameter(Columns(layer.weight.detach()))
    fully_shard(layer, shard_placement_fn=lambda parameter: Shard(1))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        assert torch.equal(layer(x), plain(x))


class OfEachPass(FiveArguments):
    """Sends rows in forward and columns in backward, which it tells by what torch's state says: Transformer Engine."""

    told: ClassVar[list[tuple[bool, bool]]] = []

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Any, ...], Any]:
        (inner,), _ = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
        in_backward = group._training_state == TrainingState.PRE_BACKWARD
        assert in_backward or group._training_state == TrainingState.FORWARD
        self.told.append((group._reshard_after_forward, in_backward))
        return (inner.T.contiguous() if in_backward else inner,), in_backward

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (output,) = outputs
        if metadata:
            output = torch.cat([part.T for part in output.chunk(dist.get_world_size())])
        return filled(out, output.to(param_dtype))


@multi_rank(2)
@pytest.mark.parametrize("reshards", [True, False])
def test_backward_may_send_another_layout(reshards: bool, world_size: int) -> None:
    OfEachPass.told.clear()
    steps_like_the_reference(sharded(OfEachPass, 16, reshard_after_forward=reshards), 16, steps=2)
    assert OfEachPass.told == ([(True, False), (True, True)] if reshards else [(False, False)]) * 2


# ---- mistakes ----------------------------------------------------------------------------------


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(FSDPTypeError, match="takes the tensor to send, got list"):
        AllGatherInput([1.0])  # type: ignore[arg-type]
    for dim in (2, -3, True, 0.5):
        with pytest.raises(FSDPValueError, match="of 2 dims cannot be joined along dim"):
            AllGatherInput(torch.zeros(2, 3), dim=dim)  # type: ignore[arg-type]
    assert AllGatherInput(torch.tensor(1.0), dim=-1).dim == -1


class Wrong(FiveArguments):
    inputs: Any = None

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Any, ...], Any]:
        (inner,), metadata = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        return type(self).inputs(inner), metadata


@multi_rank(2)
def test_inputs_that_do_not_fit_are_refused(world_size: int) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda inner: ([1.0],), FSDPTypeError, "must return tensors or AllGatherInput records, got list"),
        (
            lambda inner: (AllGatherInput(inner, output_size=(3, 3)),),
            FSDPValueError,
            r"output_size=\(3, 3\), and 2 ranks send \d+ elements together",
        ),
    ]
    for inputs, error, message in wrong:
        Wrong.inputs = staticmethod(inputs)
        model = sharded(Wrong, 16)
        with pytest.raises(error, match=message):
            loss_on(plain_case(16), model)


@multi_rank(2)
@pytest.mark.parametrize("change", ["number", "dtype", "numel"])
def test_they_must_stay_the_same(change: str, world_size: int) -> None:
    Wrong.inputs = staticmethod(lambda inner: (AllGatherInput(inner),))
    model = sharded(Wrong, 16)
    loss_on(plain_case(16), model).backward()
    Wrong.inputs = staticmethod(
        {
            "number": lambda inner: (AllGatherInput(inner), inner),
            "dtype": lambda inner: (AllGatherInput(inner.int()),),
            "numel": lambda inner: (AllGatherInput(inner[1:]),),
        }[change]
    )
    with pytest.raises(FSDPRuntimeError, match=r"'first\.weight' returned . inputs .* must stay the same"):
        loss_on(plain_case(16), model)
