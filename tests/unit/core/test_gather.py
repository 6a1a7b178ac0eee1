"""`Gather` by itself: copies in, an exchange as collectives do it, copies out; all parameters are what they were.

All ranks live in this process, one `Gather` each. At the end `GroupStorage`, on one of two simulated ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fsdp2.core.gather
from fsdp2 import FSDPRuntimeError, _torch, fully_shard
from fsdp2.core.buffers import Resizable
from fsdp2.core.gather import Gather, Source
from fsdp2.core.layout import DIRECT_ALIGNMENT_BYTES, BufferLayout
from fsdp2.core.sharding import Partition
from fsdp2.core.transport import Alone
from fsdp2.plugs.memory.reshard_to_fewer import layout_over
from tests.harness import fake_world
from tests.harness.counting import Kernels
from tests.harness.internals import allocated_bytes, groups_of, shard_buffers, unsharded_bytes
from tests.unit.core.helpers import (
    CPU,
    FULL,
    HALF,
    WIDE,
    Dtypes,
    FreshMemory,
    assert_gathered,
    cuts_of,
    exchange,
    sources_of,
)
from tests.unit.helpers import for_each

DTYPES: dict[str, list[Dtypes]] = {
    "as it lies": [(FULL, FULL)],
    "cast": [(FULL, HALF)],
    "widened": [(HALF, WIDE)],
    "two dtypes": [(FULL, FULL), (WIDE, WIDE)],
    "cast in part": [(FULL, HALF), (FULL, FULL), (torch.int32, torch.int32)],
}


@pytest.fixture(params=[False, True], ids=["on CPU", "on a device"])
def columns(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether slots are copied out as on devices, in one kernel."""
    with mock.patch.object(fsdp2.core.gather, "copies_columns", lambda device: request.param):
        yield request.param


def test_one_rank_casts_to_where_parameters_are_used_and_copies_no_more() -> None:
    whole, cuts = [torch.arange(64.0)], [Partition((64,), 0)]
    ((source,),) = sources_of([whole], [cuts], [(FULL, HALF)], world_size=1, threshold=0)
    gather = Gather([source], 1, 0, CPU, None)
    assert gather.allocated_bytes == 0
    gather.copy_in()
    with Kernels() as kernels:
        Alone().all_gather(gather.members, None)
    assert not kernels.counts and torch.equal(source.unsharded[:64], whole[0].to(HALF))


@for_each("custom", [False, True])
@for_each("dtypes", DTYPES.values())
@for_each("seed", range(5))
def test_every_rank_gets_every_parameter(seed: int, dtypes: list[Dtypes], custom: bool, columns: bool) -> None:
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 3, 4])
    whole, cuts = [], []
    for dtype, _ in dtypes:
        of_dtype = []
        for _ in range(generator.randint(1, 5)):
            shape = tuple(generator.choice([0, 1, 3, 8, 21]) for _ in range(3))
            order = tuple(generator.sample(range(3), 3)) if generator.random() < 0.3 else ()
            dim = generator.choice([0, 0, 1, 2, None])
            of_dtype.append(Partition(shape, dim, order, 1 if dim is None else generator.choice([1, 1, 2, 5])))
        whole.append([torch.randint(-99, 99, cut.shape).to(dtype) for cut in of_dtype])
        cuts.append(of_dtype)
    threshold = float("inf") if custom else generator.choice([0, 256, float("inf")])
    ranks = sources_of(whole, cuts, dtypes, world_size=world_size, threshold=threshold)
    comms = [FreshMemory() if custom else None for _ in range(world_size)]
    gathers = [
        Gather(sources, world_size, rank, CPU, comm and comm.allocate)
        for rank, (sources, comm) in enumerate(zip(ranks, comms, strict=True))
    ]
    for gather, sources in zip(gathers, ranks, strict=True):
        gather.free()
        for source in sources:
            source.buffers.unsharded.free()
    for _ in range(2):  # the second time in memory that was freed and given back
        for gather in gathers:
            gather.allocate()
            gather.copy_in()
        exchange(gathers)
        for gather, sources in zip(gathers, ranks, strict=True):
            gather.copy_out()
            assert gather.allocated_bytes == 0
            assert_gathered(sources, whole)
            for source in sources:
                source.buffers.unsharded.free()
    packs = any(source.layout.packed_numel for source in ranks[0])
    assert all(comm is None or comm.borrowed == 2 * packs for comm in comms)


@for_each("dtypes", DTYPES.values())
@for_each("threshold", [0, float("inf")])
def test_what_was_copied_in_is_sent_again_while_the_version_is_the_same(threshold: float, dtypes: list[Dtypes]) -> None:
    whole = [[torch.randint(-99, 99, (8, 64)).to(dtype), torch.ones(3, dtype=dtype)] for dtype, _ in dtypes]
    ranks = sources_of(whole, cuts_of(whole), dtypes, world_size=2, threshold=threshold)
    gathers = [Gather(sources, 2, rank, CPU, None) for rank, sources in enumerate(ranks)]
    for gather in gathers:
        gather.free()
    copies = sum(source.layout.shard_numel * source.unsharded.element_size() for source in ranks[0])
    joins = threshold > 0 and len(dtypes) > 1
    lies = [source.is_sent_as_it_lies and not joins for source in ranks[0]]
    shown: list[list[Tensor]] = []
    for version, is_new in (("a", True), ("a", False), ("b", True), (None, True), ("b", True), ("b", False)):
        for sources in ranks:
            for source in sources:
                source.shard.add_(1)  # not seen while the version is the same
        if is_new:
            shown = [[source.shard.clone() for source in sources] for sources in ranks]
        for gather in gathers:
            gather.allocate()
            gather.copy_in(version)
        exchange(gathers)
        for gather, sources in zip(gathers, ranks, strict=True):
            gather.copy_out()
            assert (gather.allocated_bytes == 0) == (version is None or all(lies))
            assert gather.allocated_bytes <= copies + len(dtypes) * 32 + DIRECT_ALIGNMENT_BYTES
            for index, source in enumerate(sources):
                slot = source.layout.slots[0]
                found = source.unsharded[slot.unsharded_offset :][: slot.shard_numel]
                sent = ranks[0][index].shard if lies[index] else shown[0][index]
                assert torch.equal(found, sent[slot.shard_offset :][: slot.shard_numel].to(found.dtype))
    for gather in gathers:
        gather.forget()
        assert gather.allocated_bytes == 0


def test_while_it_is_in_flight_a_packed_gather_holds_its_staging_buffer_only() -> None:
    whole = [[torch.randn(8, 3), torch.randn(5)]]
    (first, *_) = sources_of(whole, cuts_of(whole), [(FULL, FULL)], world_size=2, threshold=float("inf"))
    gather = Gather(first, 2, 0, CPU, None)
    gather.free()
    unsharded = first[0].buffers.unsharded
    unsharded.free()
    gather.allocate()
    assert unsharded.storage.nbytes() == 0
    assert gather.allocated_bytes == 2 * first[0].layout.packed_numel * 4
    gather.copy_out()
    assert unsharded.storage.nbytes() == unsharded.nbytes and gather.allocated_bytes == 0


def test_where_nothing_is_packed_no_columns_are_copied(columns: bool) -> None:
    """A device's kernel divides by the number of bytes in a row, and ends the process if there are none."""
    whole = [[torch.randn(8, 64)]]
    ranks = sources_of(whole, cuts_of(whole), [(FULL, FULL)], world_size=2, threshold=0)
    gathers = [Gather(sources, 2, rank, CPU, None) for rank, sources in enumerate(ranks)]
    exchange(gathers)
    with mock.patch.object(_torch, "copy_columns") as copies:
        for gather, sources in zip(gathers, ranks, strict=True):
            gather.copy_out()
            assert_gathered(sources, whole)
    copies.assert_not_called()


def test_one_dtype_is_sent_as_it_is_and_several_as_bytes() -> None:
    """Integers too: on the wire nothing may round."""

    def members(*dtypes: Dtypes) -> list[torch.dtype]:
        whole = [[torch.ones(4, dtype=dtype)] for dtype, _ in dtypes]
        sources = sources_of(whole, cuts_of(whole), dtypes, world_size=2, threshold=float("inf"))
        return [input.dtype for _, input in Gather(sources[0], 2, 0, CPU, None).members]

    assert members((FULL, FULL)) == [FULL]
    assert members((FULL, HALF)) == [HALF]
    assert members((torch.int64, torch.int64)) == [torch.uint8]
    assert members((FULL, FULL), (FULL, HALF)) == [torch.uint8]


def test_what_needs_no_copy_is_not_copied() -> None:
    whole = [[torch.randn(8, 4), torch.randn(3)]]
    for threshold, copies_out in ((0, False), (float("inf"), True)):
        (first, *_) = sources_of(whole, cuts_of(whole), [(FULL, FULL)], world_size=2, threshold=threshold)
        gather = Gather(first, 2, 0, CPU, None)
        assert all(input.untyped_storage().data_ptr() == first[0].shard.data_ptr() for _, input in gather.members)
        assert (gather.allocated_bytes > 0) == copies_out


@for_each("fewer", [False, True])
@for_each("seed", range(5))
def test_equal_parameters_are_copied_out_together(seed: int, fewer: bool, columns: bool) -> None:
    """As many copies as there are sizes, whatever the order of the parameters; also from fewer ranks than laid out.

    On a device one kernel copies all.
    """
    generator = random.Random(seed)
    world_size = generator.choice([1, 2, 3, 4])
    shapes = generator.sample([(1,), (5,), (6, 7), (40, 3), (64, 16)], 3)
    params = [torch.randn(shape) for shape in shapes for _ in range(generator.randint(1, 4))]
    generator.shuffle(params)
    cuts = [Partition(tuple(param.shape)) for param in params]
    layout = BufferLayout.build(cuts, world_size=world_size * (2 if fewer else 1), itemsize=4)
    if fewer:
        layout = layout_over(layout, world_size, 4)
    gathers, ranks = [], []
    for rank in range(world_size):
        shard = torch.zeros(layout.shard_numel)
        for param, slot in zip(params, layout.slots, strict=True):
            start, stop = slot.partition.part(slot.rows, rank)
            flat = param[start:stop].flatten()
            shard[slot.shard_offset : slot.shard_offset + flat.numel()] = flat
        unsharded = Resizable(torch.full((layout.unsharded_numel,), float("nan")))
        ranks.append([Source(SimpleNamespace(unsharded=unsharded), shard, layout)])  # type: ignore[arg-type]
        gathers.append(Gather(ranks[-1], world_size, rank, CPU, None))
    exchange(gathers)
    for gather, sources in zip(gathers, ranks, strict=True):
        with Kernels() as kernels:
            gather.copy_out()
        if columns:
            assert kernels.counts == {"split_with_sizes_copy": 1}
        else:
            assert kernels.counts == {"_foreach_copy_": 1} and len(gather._copies_out.sources) == len(shapes)
        assert_gathered(sources, [params])


# ---- worked by hand: two ranks, uneven rows, two dtypes ----------------------------------------------------

A = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
B = torch.tensor([10.0, 11])
C = torch.tensor([21.0, 22, 23], dtype=WIDE)
SENT = {0: ([1.0, 2, 3, 4, 10, 0, 0, 0], [21.0, 22]), 1: ([5.0, 6, 0, 0, 11, 0, 0, 0], [23.0, 0])}
"""By rank, what lies in the shard buffer of each dtype: ``A`` has two rows a rank, of which rank 1 has one; padding."""


def worked_example(rank: int) -> tuple[Gather, list[Source]]:
    whole = [[A, B], [C]]
    sources = sources_of(whole, cuts_of(whole), [(FULL, FULL), (WIDE, WIDE)], world_size=2, threshold=float("inf"))
    return Gather(sources[rank], 2, rank, CPU, None), sources[rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_two_dtypes_are_sent_in_one_message_of_bytes_each_at_its_alignment(rank: int) -> None:
    gather, sources = worked_example(rank)
    assert [source.shard.tolist() for source in sources] == [*SENT[rank]]
    gather.allocate()
    gather.copy_in()
    ((output, input),) = gather.members
    assert input.dtype is torch.uint8 and input.shape == (48,), "20 bytes, padded to 32, and 16 in the other dtype"
    assert output.shape == (96,)
    assert input[:32].view(FULL).tolist() == SENT[rank][0]
    assert input[32:].view(WIDE).tolist() == SENT[rank][1]


def test_what_arrives_is_copied_to_whole_parameters_and_padding_behind_their_rows() -> None:
    gather, sources = worked_example(rank=0)
    gather.allocate()
    ((output, _),) = gather.members
    for rank, (of_full, of_wide) in SENT.items():
        arrived = output[48 * rank : 48 * (rank + 1)]
        arrived[:32].view(FULL).copy_(torch.tensor(of_full))
        arrived[32:].view(WIDE).copy_(torch.tensor(of_wide, dtype=WIDE))
    gather.copy_out()
    full, wide = (source.unsharded for source in sources)
    assert full.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 10, 11] and wide.tolist() == [21, 22, 23, 0]


def test_a_direct_parameter_is_sent_from_where_it_lies_to_where_it_is_used() -> None:
    whole = [[torch.arange(64.0).view(8, 8)]]
    (first, _) = sources_of(whole, cuts_of(whole), [(FULL, FULL)], world_size=2, threshold=0)
    gather = Gather(first, 2, 0, CPU, None)
    ((output, input),) = gather.members
    source = first[0]
    assert input.data_ptr() == source.shard.data_ptr() and output.data_ptr() == source.unsharded.data_ptr()
    assert gather.allocated_bytes == 0


# ---- `GroupStorage` ----------------------------------------------------------------------------------------


class TwoDtypes(nn.Module):
    """Two parameters in fp32 and one in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Parameter(A.clone()), nn.Parameter(B.clone()), nn.Parameter(C.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a.sum() + self.b.sum() + self.c.sum())


@pytest.mark.full
def test_sharded_parameters_of_one_dtype_lie_on_one_buffer() -> None:
    with fake_world(2, rank=1):
        model = fully_shard(TwoDtypes())
        a, b, c = (each.to_local() for each in model.parameters())
        (group,) = groups_of(model)
        assert [(buffer.dtype, buffer.numel()) for buffer in shard_buffers(group)] == [(FULL, 8), (WIDE, 2)], (
            "padded to a multiple of 16 bytes"
        )
        assert b.data_ptr() - a.data_ptr() == 4 * 4, "after the room for two rows of a"
        assert (a.tolist(), b.tolist(), c.tolist()) == ([[5, 6]], [11], [23])


def test_unsharded_memory_comes_and_goes_under_the_same_parameters() -> None:
    with fake_world(2):
        model = fully_shard(TwoDtypes())
        model(torch.ones(1))
        (group,) = groups_of(model)
        assert allocated_bytes(group) == unsharded_bytes(group) == (8 + 2) * 4 + 4 * 8
        unsharded = list(model.parameters())
        model.reshard()
        assert allocated_bytes(group) == 0
        model.unshard()
        assert all(mine is yours for mine, yours in zip(model.parameters(), unsharded, strict=True))
        assert allocated_bytes(group) == unsharded_bytes(group)


def test_parameters_on_meta_and_elsewhere_are_named() -> None:
    with fake_world(2):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4))
        fully_shard(model)
        with pytest.raises(FSDPRuntimeError, match=r"still on the meta device: 0\.weight, 0\.bias"):
            model(torch.ones(2, 4))
