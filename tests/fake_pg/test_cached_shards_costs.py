"""`MixedPrecisionPolicy(cache_shards=True)`: what it saves in copies, and what it costs in memory and in calls."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from tests.fake_pg.helpers.stacks import Block, PeakMeter
from tests.harness import fake_world
from tests.harness.internals import groups_of, unsharded_bytes, unsharded_bytes_now

HALF = torch.bfloat16
WORLD_SIZE, BLOCKS, MICROBATCHES, WIDTH, LAYERS = 4, 6, 5, 512, 2
SHARDS = BLOCKS * LAYERS * WIDTH * WIDTH // WORLD_SIZE
NO_OFFLOAD = OffloadPolicy()


def stack(
    cache_shards: bool, *, param_dtype: torch.dtype | None = HALF, offload: OffloadPolicy = NO_OFFLOAD
) -> nn.Module:
    """Blocks of large parameters, each a group, below a root without any."""
    policy = MixedPrecisionPolicy(param_dtype, torch.float32, cache_shards=cache_shards)
    model = nn.Sequential(*(Block(WIDTH, LAYERS) for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mp_policy=policy, offload_policy=offload)
    return fully_shard(model, mp_policy=policy, offload_policy=offload)


class CastElements(TorchDispatchMode):
    """How many elements `_foreach_copy_` writes, by dtype of source and destination."""

    def __init__(self) -> None:
        super().__init__()
        self.numel: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._foreach_copy_.default:
            for to, source in zip(*args[:2], strict=True):
                self.numel[source.dtype, to.dtype] += to.numel()
        return func(*args, **(kwargs or {}))


def run(model: nn.Module, microbatches: int = MICROBATCHES) -> None:
    for _ in range(microbatches):
        model(torch.zeros(2, WIDTH)).float().sum().backward()


@pytest.mark.full
@pytest.mark.parametrize(("cache_shards", "casts"), [(False, 2 * MICROBATCHES), (True, 1)])
def test_shards_are_cast_once_in_a_step(cache_shards: bool, casts: int) -> None:
    """Not in the forward and in the backward of every microbatch."""
    with fake_world(WORLD_SIZE):
        model = stack(cache_shards)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with CastElements() as copied:
                run(model)
            assert copied.numel[torch.float32, HALF] == casts * SHARDS
            optimizer.step()


@pytest.mark.parametrize("offload", [NO_OFFLOAD, CPUOffloadPolicy()], ids=["", "offloaded"])
def test_a_cache_keeps_as_many_bytes_as_a_rank_sends(offload: OffloadPolicy) -> None:
    with fake_world(WORLD_SIZE):
        model = stack(True, offload=offload)
        assert unsharded_bytes_now(model) == 0
        run(model)
        assert unsharded_bytes_now(model) == 2 * SHARDS
        with torch.no_grad():
            model(torch.zeros(2, WIDTH))
        assert unsharded_bytes_now(model) == 0, "what is cast without gradients is cast for one gather"
        run(model)
        model.state_dict()
        assert unsharded_bytes_now(model) == 0, "the tensors of a state dict may be written unseen"


@pytest.mark.full
def test_peaks_rise_by_what_is_kept() -> None:
    with fake_world(WORLD_SIZE):
        peaks = []
        for cache_shards in (False, True):
            model = stack(cache_shards)
            run(model)
            with PeakMeter(model) as meter:
                run(model)
            peaks.append(meter.peak)
        block = unsharded_bytes(groups_of(model)[0])
        assert peaks[0] <= peaks[1] <= peaks[0] + 2 * SHARDS
        assert peaks[1] <= 2 * block + 2 * SHARDS


def test_where_nothing_is_copied_nothing_is_kept() -> None:
    with fake_world(WORLD_SIZE):
        model = stack(True, param_dtype=None)
        run(model)
        assert unsharded_bytes_now(model) == 0


def test_of_custom_all_gathers_nothing_is_kept() -> None:
    """Which bring the memory that is sent from."""

    class Own:
        def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> None:
            """Communicates nothing, as the fake group."""

    with fake_world(WORLD_SIZE):
        model = stack(True)
        for block in model:  # type: ignore[attr-defined]
            block.set_custom_all_gather(Own())
        with CastElements() as copied:
            run(model)
        assert copied.numel[torch.float32, HALF] == 2 * MICROBATCHES * SHARDS
        assert unsharded_bytes_now(model) == 0
