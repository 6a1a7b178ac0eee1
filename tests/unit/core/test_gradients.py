"""The ways of packing gradients, which all give the same bytes; what a bucket sends, keeps and delivers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp2 import FSDPNotImplementedError, MixedPrecisionPolicy, _torch, fully_shard
from fsdp2.core.buffers import view_as_wider_dtype
from fsdp2.core.gradients import PACKING, GradientBucket, PackedGradients
from fsdp2.core.layout import GradientLayout
from fsdp2.core.sharding import Partition
from fsdp2.plugs.memory import packing
from fsdp2.plugs.memory.packing import packing_for
from tests.harness import fake_world
from tests.harness.counting import Kernels
from tests.harness.internals import groups_of
from tests.unit.helpers import for_each

HOST = torch.device("cpu")


def layout_of(world_size: int, *cuts: Partition, itemsize: int = 4) -> GradientLayout:
    return GradientLayout.build(cuts, [False] * len(cuts), world_size=world_size, itemsize=itemsize)


@pytest.mark.parametrize(
    ("world_size", "cuts", "expected"),
    [
        (8, [Partition((8,))] * 3, _torch.chunk_cat),
        (1024, [Partition((1024,))] * 3, packing._columns),
        (1024, [Partition((1024,)), Partition((0,))], packing._columns),
        (1024, [Partition((1024, 1)), Partition((1024, 1))], packing._columns),
        (1024, [Partition((1024,)), Partition((1024, 1))], _torch.chunk_cat),
        (1024, [Partition((1024,)), Partition((2048,))], _torch.chunk_cat),
        (1024, [Partition((1024,)), Partition((1000,))], _torch.chunk_cat),  # padded
        (1024, [Partition((1024,), block_rows=2)], _torch.chunk_cat),
        (1024, [Partition((1024,), dim=None)], _torch.chunk_cat),
        (1024, [Partition((1, 1024), dim=1)], _torch.chunk_cat),
        (1024, [], _torch.chunk_cat),
    ],
)
def test_columns_are_for_single_elements_of_many_ranks(
    world_size: int, cuts: list[Partition], expected: packing.Pack
) -> None:
    layout = layout_of(world_size, *cuts)
    assert packing_for(layout, world_size, HOST, torch.float32, casts=False) is expected
    casting = packing._columns if expected is packing._columns else packing._cast_chunks
    assert packing_for(layout, world_size, HOST, torch.float32, casts=True) is casting
    assert packing_for(layout, world_size, torch.device("cuda"), torch.float32, casts=True) is packing.chunks_on_device


@for_each(
    ("dtype", "numel", "count", "are_columns"),
    [
        (torch.float32, 2, 2, True),
        (torch.float32, 4, 4, True),
        (torch.bfloat16, 2, 6, True),
        (torch.bfloat16, 8, 8, True),
        (torch.float64, 2, 2, True),
        (torch.float32, 2, 3, True),  # a row of 9 elements, padded to 12
        (torch.float32, 3, 3, False),  # no dtype has 12 bytes
        (torch.float32, 8, 8, False),
        (torch.float64, 4, 4, False),
    ],
)
@for_each("trailing", [False, True])
def test_columns_are_for_a_few_bytes_of_many_ranks(
    trailing: bool, dtype: torch.dtype, numel: int, count: int, are_columns: bool
) -> None:
    shape = (1024, numel) if trailing else (1024 * numel,)
    layout = layout_of(1024, *[Partition(shape)] * count, itemsize=dtype.itemsize)
    found = packing_for(layout, 1024, HOST, dtype, casts=False)
    assert found is (packing._columns if are_columns else _torch.chunk_cat)
    assert packing_for(layout, 1024, HOST, dtype, casts=True) is packing._cast_chunks


@pytest.mark.parametrize("order", [(), (0, 2, 3, 1)])
def test_columns_lie_alike_in_memory(order: tuple[int, ...]) -> None:
    """Gradients are packed in memory order, in which those of one shape may have several."""
    plain, other = Partition((1024, 2, 1, 2)), Partition((1024, 2, 1, 2), order=order)
    layout = layout_of(1024, plain, plain, other, other)
    found = packing_for(layout, 1024, HOST, torch.float32, casts=False)
    assert found is (_torch.chunk_cat if order else packing._columns)
    layout = layout_of(1024, *[other] * 4)
    assert packing_for(layout, 1024, HOST, torch.float32, casts=False) is packing._columns


@for_each("numel", [1, 2, 4])
@for_each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@for_each("kind", ["vectors", "expanded", "matrices", "transposed"])
@for_each("casts", [False, True])
def test_columns_are_chunks(casts: bool, kind: str, dtype: torch.dtype, numel: int) -> None:
    world_size, count = 1024, 4
    gradients = list(torch.randn(count, world_size * numel).to(dtype).unbind())
    if kind == "expanded":
        gradients = [each[:1].expand(world_size * numel) for each in gradients]
    elif kind == "matrices":
        gradients = [each.view(world_size, numel) for each in gradients]
    elif kind == "transposed":
        gradients = [each.view(numel, world_size).t() for each in gradients]
    last = torch.full((world_size, count), 2.0, dtype=dtype)
    last[:, 1] = 0
    to = torch.float32 if casts else dtype
    columns, chunks = torch.empty(2, world_size, count * numel + count, dtype=to).unbind()
    packing._columns([*gradients, last], world_size, columns)
    _torch.chunk_cat([*gradients, last], world_size, chunks)
    assert columns.equal(chunks)


def test_bits_stay_as_they_are() -> None:
    """Of numbers that arithmetic would change: signaling NaNs, and denormal ones where these are flushed to zero."""
    bits = torch.tensor([0x7F800001, 1, -0x80000000, 0x7FA00000], dtype=torch.int32).repeat(1024)
    gradient = bits.view(torch.float32)
    packed = torch.empty(1024, 8)
    torch.set_flush_denormal(True)
    try:
        packing._columns([gradient, torch.ones(1024, 4)], 1024, packed)
    finally:
        torch.set_flush_denormal(False)
    assert packed[:, :4].reshape(-1).view(torch.int32).equal(bits)


@for_each(
    ("shape", "strides", "offset", "itemsize"),
    [
        ((3, 4, 2), (8, 2, 1), 0, 8),
        ((3, 4, 2), (8, 2, 1), 1, 4),  # starts between two
        ((3, 4, 2), (9, 2, 1), 0, 4),
        ((3, 4, 2), (16, 4, 2), 0, 4),
        ((3, 4, 3), (12, 3, 1), 0, 4),
        ((3, 4, 1), (4, 1, 1), 0, 4),
        ((3, 4), (4, 1), 4, 16),
        ((3, 4), (4, 1), 2, 8),
        ((3, 8), (10, 1), 0, 8),
        ((3, 16), (16, 1), 0, 16),
        ((3, 20), (20, 1), 0, 4),  # large enough as it is
        ((4,), (1,), 0, 16),
        ((0, 2), (2, 1), 0, 8),
    ],
)
def test_pieces_are_seen_where_they_lie_on_multiples_of_wider_elements(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int
) -> None:
    other = torch.zeros(shape)
    one = torch.zeros(64).as_strided(shape, strides, offset)
    views = view_as_wider_dtype((one, other))
    assert all(each.element_size() == itemsize for each in views)
    assert all(each.data_ptr() == tensor.data_ptr() for each, tensor in zip(views, (one, other), strict=True))


@for_each("numel", [4, 1 << 16])
@for_each("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_casts_are_the_same_before_and_after(dtype: torch.dtype, numel: int) -> None:
    """The second size is cast by the operator, lest both forms take much memory."""
    world_size = 8
    gradients = [torch.randn(world_size, numel).to(dtype), torch.randn(world_size - 3).to(dtype)]
    found, expected = torch.empty(2, world_size, numel + 1).unbind()
    packing._cast_chunks(gradients, world_size, found)
    _torch.chunk_cat(gradients, world_size, expected)
    assert found.equal(expected)


@for_each(
    ("dtype", "to", "kernels"),
    [
        (torch.float32, torch.float32, {"_chunk_cat": 1}),
        (torch.bfloat16, torch.float32, {"_chunk_cat": 1}),
        (torch.float16, torch.float32, {"_chunk_cat": 1, "copy_": 1}),
        (torch.float32, torch.bfloat16, {"_chunk_cat": 1, "copy_": 1}),
    ],
)
def test_on_a_device_one_kernel_packs_all_and_one_more_casts(
    dtype: torch.dtype, to: torch.dtype, kernels: dict[str, int]
) -> None:
    """CUDA's `_chunk_cat` is one kernel of what is contiguous, and of the dtype that is packed, or bf16 in fp32."""
    world_size = 4
    gradients = [torch.randn(shape).to(dtype) for shape in ((8, 3), (5,), (1, 7))]
    packed = torch.empty(world_size, 6 + 2 + 7 + 1, dtype=to)
    expected = torch.empty_like(packed)
    last = torch.ones(world_size, 1, dtype=dtype)
    _torch.chunk_cat([*gradients, last], world_size, expected)
    with Kernels() as counted:
        packing.chunks_on_device([*gradients, last], world_size, packed)
    assert counted.counts == kernels and packed.equal(expected)
    strided = [gradients[0].t().contiguous().t(), gradients[1], gradients[2]]
    with Kernels() as counted:
        packing.chunks_on_device([*strided, last], world_size, packed)
    assert counted.counts == {**kernels, "clone": 1} and packed.equal(expected)


class Shapes(nn.Module):
    """Cut in dim 0: evenly, unevenly, and less than there are ranks; the last in dim 1, where it is dealt out."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((8, 3), (5,), (1, 7), (4, 2, 3), (9, 2), (2, 8))
        self.each = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(each.sum() for each in self.each)


def dim_of(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if tuple(parameter.shape) == (2, 8) else None


@for_each("odd", (0, 3, 5))
@for_each(("most", "other"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@for_each("lacks", [False, True])
def test_a_gradient_of_another_dtype_is_packed_by_itself_and_the_others_at_once(
    lacks: bool, most: torch.dtype, other: torch.dtype, odd: int
) -> None:
    """None of these is cast first, and none of all loses bits."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with fake_world(4), mock.patch.object(PACKING, "filling", lambda *layout: packing.chunks_on_device):
        model = fully_shard(Shapes(), mp_policy=policy, shard_placement_fn=dim_of)
        model(torch.ones(1))
        (group,) = groups_of(model)
        (bucket,) = group.reducer.buckets
        gradients: list[Tensor | None] = [torch.randn(each.shape).to(most) for each in bucket.params]
        gradients[odd] = torch.randn(bucket.params[odd].shape).to(other)
        if lacks:
            gradients[odd - 1] = None
        alike = pack(bucket, *[None if each is None else each.to(torch.float32) for each in gradients])
        with Kernels() as counted:
            mixed = pack(bucket, *gradients)
    assert mixed.members[0][1].equal(alike.members[0][1])
    assert [counted.counts[name] for name in ("_chunk_cat", "_to_copy", "copy_")] == [1, 1, 1]


# ---- `GradientBucket`, worked by hand: two ranks, a parameter of three rows and one of two ------------------


class Two(nn.Module):
    """``a`` has three rows, of which rank 0 has two; ``b`` has one for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a.sum() + self.b.sum())


GRADIENT_A, GRADIENT_B = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([10.0, 20])


@pytest.fixture(params=[0, 1], ids=["rank0", "rank1"])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process is that rank of two."""
    with fake_world(2, request.param):
        yield request.param


def prepared() -> tuple[nn.Module, GradientBucket]:
    """A sharded `Two` after a forward, its sharded parameters registered, and its one bucket."""
    model = fully_shard(Two())
    model(torch.ones(1))
    model.reshard()
    (group,) = groups_of(model)
    (bucket,) = group.reducer.buckets
    return model, bucket


def pack(bucket: GradientBucket, *gradients: Tensor | None, in_place: bool = True) -> PackedGradients:
    packed = bucket.begin(in_place=in_place)
    bucket.pack(packed, list(gradients))
    return packed


def arrive(packed: PackedGradients, *parts: Sequence[float]) -> None:
    """What the reduce-scatter writes on this rank: the sum of ``parts``, one for each rank that sent, and padding."""
    packed.output.copy_(torch.tensor([[*part, 0] for part in parts]).sum(0))


def delivered(model: nn.Module) -> list[Any]:
    return [None if each.grad is None else each.grad.to_local().tolist() for each in model.parameters()]


def test_what_is_packed_has_a_row_for_each_rank_and_says_which_gradients_there_are(rank: int) -> None:
    _, bucket = prepared()
    packed = pack(bucket, GRADIENT_A, GRADIENT_B)
    ((output, input),) = packed.members
    assert input.view(2, 8).tolist() == [[1, 2, 3, 4, 10, 1, 1, 0], [5, 6, 0, 0, 20, 1, 1, 0]], "padded to 16 bytes"
    assert output.shape == (8,) and packed.missing == []


def test_a_missing_gradient_is_sent_as_zeros_and_said_to_be_missing(rank: int) -> None:
    _, bucket = prepared()
    packed = pack(bucket, None, GRADIENT_B)
    ((_, input),) = packed.members
    assert input.view(2, 8).tolist() == [[0, 0, 0, 0, 10, 0, 1, 0], [0, 0, 0, 0, 20, 0, 1, 0]]
    assert packed.missing == [0]


def test_popping_takes_gradients_off_the_unsharded_parameters(rank: int) -> None:
    _, bucket = prepared()
    first, second = (param.unsharded for param in bucket.params)
    assert first is not None and second is not None
    first.grad = GRADIENT_A.clone()
    assert [each is not None for each in bucket.pop_grads()] == [True, False]
    assert first.grad is None and bucket.pop_grads() == [None, None]


def test_a_sum_is_divided_and_each_parameter_gets_its_rows(rank: int) -> None:
    model, bucket = prepared()
    packed = pack(bucket, GRADIENT_A, GRADIENT_B)
    row = ([1.0, 2, 3, 4, 10, 1, 1], [5.0, 6, 0, 0, 20, 1, 1])[rank]
    arrive(packed, row, row)
    bucket.finish(packed, 2.0, keeps=False)
    bucket.set_grads(packed, zeros_for_unused=False)
    assert delivered(model) == ([[[1, 2], [3, 4]], [10]], [[[5, 6]], [20]])[rank]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["on no rank", "on the other rank"])
def test_a_gradient_that_no_rank_has_is_left_alone_unless_zeros_are_asked_for(rank: int, elsewhere: bool) -> None:
    for zeros in (False, True):
        model, bucket = prepared()
        packed = pack(bucket, None, GRADIENT_B)
        arrive(packed, [0, 0, 0, 0, 10, 0, 1], [2, 2, 2, 2, 10, 1, 1] if elsewhere else [0, 0, 0, 0, 10, 0, 1])
        bucket.finish(packed, None, keeps=False)
        bucket.set_grads(packed, zeros_for_unused=zeros)
        found, other = delivered(model)
        rows = 2 - rank
        assert found == ([[2.0, 2.0]] * rows if elsewhere else [[0.0, 0.0]] * rows if zeros else None)
        assert other == [20]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["on no rank", "on the other rank"])
def test_where_the_host_learns_later_who_has_a_gradient_it_is_set_then(rank: int, elsewhere: bool) -> None:
    model, bucket = prepared()
    called: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))  # type: ignore[misc]
    for times in (1, 2):  # the second is added
        packed = pack(bucket, None, GRADIENT_B)
        arrive(packed, [0, 0, 0, 0, 10, 0, 1], [2, 2, 2, 2, 10, 1, 1] if elsewhere else [0, 0, 0, 0, 10, 0, 1])
        bucket.finish(packed, None, keeps=False)
        bucket.copy_presence(packed)
        bucket.set_grads(packed, zeros_for_unused=False)
        assert called.pop() == "b" and not called
        bucket.set_late_grads(packed)
        assert called == ["a"] * elsewhere
        called.clear()
        assert delivered(model) == [[[2.0 * times] * 2] * (2 - rank) if elsewhere else None, [20 * times]]


def test_nothing_is_asked_where_all_have_gradients(rank: int) -> None:
    _, bucket = prepared()
    packed = pack(bucket, GRADIENT_A, GRADIENT_B)
    bucket.copy_presence(packed)
    assert packed.presence is None


def test_a_gradient_that_is_kept_never_changes_and_a_second_one_is_added(rank: int) -> None:
    model, bucket = prepared()
    row = [1.0, 1, 1, 1, 1, 1, 1]

    def reduced() -> None:
        packed = pack(bucket, GRADIENT_A, GRADIENT_B)
        arrive(packed, row, row)
        bucket.finish(packed, None, keeps=False)
        bucket.set_grads(packed, zeros_for_unused=False)

    reduced()
    kept = model.b.grad
    reduced()
    assert model.b.grad is kept and kept.to_local().tolist() == [4], "added in place, as autograd does"
    model.zero_grad()
    reduced()
    assert model.b.grad is not kept and kept.to_local().tolist() == [4] and delivered(model)[1] == [2]


def test_what_waits_for_replicas_is_added_to_the_next_and_missing_only_if_it_always_was(rank: int) -> None:
    model, bucket = prepared()
    first = pack(bucket, None, GRADIENT_B, in_place=False)
    arrive(first, [0, 0, 0, 0, 1, 0, 1])
    bucket.keep_reduce_scattered(first)
    assert bucket.waits() and delivered(model) == [None, None]
    second = pack(bucket, GRADIENT_A, None)
    arrive(second, [3, 3, 3, 3, 0, 1, 0])
    bucket.add_reduce_scattered(second)
    assert not bucket.waits() and second.missing == []
    bucket.finish(second, None, keeps=False)
    bucket.set_grads(second, zeros_for_unused=False)
    assert delivered(model) == [[[3, 3]] * (2 - rank), [1]]


def test_what_waits_can_be_cleared_of_one_parameter_or_dropped(rank: int) -> None:
    _, bucket = prepared()
    packed = pack(bucket, GRADIENT_A, GRADIENT_B, in_place=False)
    arrive(packed, [1, 1, 1, 1, 1, 1, 1])
    bucket.keep_reduce_scattered(packed)
    bucket.clear([0], set_to_none=True)
    assert bucket.reduce_scattered is not None
    assert bucket.reduce_scattered[4:].tolist() == [1, 0, 1, 0], "b, the presence of a and of b, padding"
    assert not bucket.reduce_scattered[: 2 * (2 - rank)].any()
    bucket.drop()
    assert not bucket.waits()


def test_hooks_of_the_sharded_parameter_are_called_with_the_reduced_gradient(rank: int) -> None:
    model, bucket = prepared()
    seen: list[float] = []
    model.b.register_hook(lambda gradient: gradient * 3)
    model.b.register_post_accumulate_grad_hook(lambda parameter: seen.extend(parameter.grad.to_local().tolist()))
    packed = pack(bucket, GRADIENT_A, GRADIENT_B)
    arrive(packed, [1, 1, 1, 1, 5, 1, 1])
    bucket.finish(packed, None, keeps=False)
    bucket.set_grads(packed, zeros_for_unused=False)
    assert delivered(model)[1] == [15] and seen == [15], "what the first returns is the gradient, the second sees it"


def test_a_sparse_gradient_is_refused_by_name(rank: int) -> None:
    _, bucket = prepared()
    with pytest.raises(FSDPNotImplementedError, match=r"'a' has a sparse gradient"):
        pack(bucket, GRADIENT_A.to_sparse(), GRADIENT_B)
