"""What collectives cost, and what machines are known: numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp2 import FSDPTypeError, FSDPValueError
from fsdp2.tools.estimating.hardware import KNOWN, Hardware, hardware_of
from fsdp2.tools.estimating.links import Kind, Shape, exchange, shape_of

MACHINE = Hardware(
    name="mine",
    ranks_per_node=4,
    memory_bytes=10**9,
    peak_flops={"bfloat16": 100.0, "float32": 10.0},
    memory_bandwidth=1000.0,
    bandwidth_inside=100.0,
    bandwidth_between=10.0,
    achieved_links=0.5,
    latency_inside=1.0,
    latency_between=7.0,
    launch_seconds=3.0,
)


def test_inside_a_node() -> None:
    """Four ranks, 800 bytes: each sends 3/4 of them, 600, over links of which 50 bytes a second are reached."""
    found = exchange(Kind.ALL_GATHER, 800, shape_of(range(4), MACHINE), MACHINE)
    assert (found.sent_inside, found.sent_between) == (600, 0)
    assert found.seconds == pytest.approx(3 + 3 * 1 + 600 / 50)


def test_over_nodes() -> None:
    """Eight ranks on two nodes: 700 of 800 bytes, of which one rank in four sends to the next node, on four cards."""
    found = exchange(Kind.REDUCE_SCATTER, 800, shape_of(range(8), MACHINE), MACHINE)
    assert (found.sent_inside, found.sent_between) == (525, 175)
    assert found.seconds == pytest.approx(3 + 6 * 1 + 1 * 7 + 700 / (4 * 10 * 0.5))


def test_replicas_of_one_rank_in_each_node_have_one_card() -> None:
    """Ranks 0, 4, 8: each on its node. An all-reduce is two rounds."""
    shape = shape_of([0, 4, 8], MACHINE)
    assert shape == Shape(3, 3)
    found = exchange(Kind.ALL_REDUCE, 300, shape, MACHINE)
    assert (found.sent_inside, found.sent_between) == (0, 400)
    assert found.seconds == pytest.approx(3 + 2 * 2 * 7 + 400 / 5)


def test_one_rank_exchanges_nothing() -> None:
    found = exchange(Kind.ALL_GATHER, 800, Shape(1, 1), MACHINE)
    assert (found.sent_inside, found.sent_between, found.seconds) == (0, 0, 0)


def test_names_of_machines() -> None:
    assert hardware_of("h100-8x").ranks_per_node == 8 and hardware_of("h100-8x").nodes is None
    assert hardware_of("a100-4x2").ranks_per_node == 4 and hardware_of("a100-4x2").nodes == 2
    assert hardware_of("cpu") is KNOWN["cpu"] and not KNOWN["cpu"].has_streams
    assert hardware_of(MACHINE) is MACHINE


@pytest.mark.parametrize("name", ["h101-8x", "h100", "h100-0x", "h100-8x0", "", "x"])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    if name == "h100":  # nodes of eight, as the name of the kind says
        assert hardware_of(name).ranks_per_node == 8
        return
    with pytest.raises(FSDPValueError, match=r"is not known. Known are 'a100-8x', 'h100-8x'.*fsdp2.Hardware"):
        hardware_of(name)


def test_too_many_ranks() -> None:
    hardware_of("h100-8x2").refuse_more_ranks(16)
    with pytest.raises(FSDPValueError, match="the mesh has 17 ranks, and h100-8x2 has 16: 2 nodes of 8"):
        hardware_of("h100-8x2").refuse_more_ranks(17)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ranks_per_node": 0}, FSDPValueError),
        ({"memory_bytes": "80"}, FSDPTypeError),
        ({"achieved_links": 0.0}, FSDPValueError),
        ({"achieved_flops": 1.5}, FSDPValueError),
        ({"peak_flops": {1: 2.0}}, FSDPTypeError),
        ({"peak_flops": {"bfloat16": -1.0}}, FSDPValueError),
        ({"name": None}, FSDPTypeError),
        ({"nodes": 0}, FSDPValueError),
        ({"has_streams": 1}, FSDPTypeError),
    ],
)
def test_numbers_that_make_no_sense(change: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"Hardware takes .*{next(iter(change))}"):
        replace(MACHINE, **change)  # type: ignore[arg-type]


def test_peaks_by_dtype() -> None:
    assert MACHINE.flops_of(torch.bfloat16) == 100
    assert MACHINE.flops_of(torch.float64) == 10
    assert KNOWN["h100"].flops_of(torch.float8_e4m3fn) == 1979e12
