"""`Gather` by itself: copies in, an exchange as collectives do it, copies out; all parameters are what they were.

No process group: all ranks live in this process, one `Gather` each.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fsdp2.core.buffers import Resizable
from fsdp2.core.gather import Gather, Source
from fsdp2.core.layout import BufferLayout, Partition
from tests.harness.shared.gathers import (
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

DTYPES: dict[str, list[Dtypes]] = {
    "as it lies": [(FULL, FULL)],
    "cast": [(FULL, HALF)],
    "widened": [(HALF, WIDE)],
    "two dtypes": [(FULL, FULL), (WIDE, WIDE)],
    "cast in part": [(FULL, HALF), (FULL, FULL), (torch.int32, torch.int32)],
}


@pytest.mark.parametrize("custom", [False, True], ids=["ours", "custom"])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_every_rank_gets_every_parameter(seed: int, dtypes: list[Dtypes], custom: bool) -> None:
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


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("threshold", [0, float("inf")], ids=["direct", "packed"])
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
            assert gather.allocated_bytes <= copies + len(dtypes) * 32
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


@pytest.mark.parametrize("fewer", [False, True], ids=["all ranks", "neighbours"])
@pytest.mark.parametrize("seed", range(12))
def test_equal_parameters_are_copied_out_together(seed: int, fewer: bool) -> None:
    """As many copies as there are sizes, whatever the order of the parameters; also from fewer ranks than laid out."""
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
        assert len(gather._copy_out_sources) == len(shapes)
        gather.copy_out()
        assert_gathered(sources, [params])
