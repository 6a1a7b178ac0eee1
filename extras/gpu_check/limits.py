"""What is complained of in what was measured. Each takes what the runs of a check have found, by their titles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from extras.gpu_check.runs import Found

SAME_MEMORY = 1.01
STEPS_TO_SETTLE = 2
SAME_TIME = 1.03
WORTH_PADDING = 1.1

BESIDE_PLAIN = ("clip", "AdamW foreach", "AdamW fused")
AS_PLAIN = 1.15
OF_TORCHS = 0.45

CHUNK_CAT = "chunk_cat"


def _measured(found: Mapping[str, Found]) -> dict[str, Found]:
    """Without those that said why they measured nothing."""
    return {title: each for title, each in found.items() if "skipped" not in each}


def apart_from_compute(found: Mapping[str, Found]) -> list[str]:
    """What gathers and reductions launch runs on other streams than products of matrices."""
    complaints = []
    for title, each in _measured(found).items():
        if "gemm_streams" not in each:
            continue  # tests
        streams = each["communication_streams"]
        shared = set(streams) & set(each["gemm_streams"])
        if shared:
            complaints.append(f"{title}: communication and products of matrices share streams {sorted(shared)}")
        if len(streams) < 2:
            complaints.append(f"{title}: gathers and reductions run on streams {streams}, not on two")
        if not each["gemm_streams"]:
            complaints.append(f"{title}: no product of matrices was seen")
    return complaints


def few_kernels(found: Mapping[str, Found]) -> list[str]:
    """One kernel copies what was packed out of the staging buffer, one packs and casts the gradients of a group."""
    complaints = []
    for title, each in _measured(found).items():
        copies = each["kernels"].get("all_gather_copy_out", 0)
        if each["packed"] and copies > each["gathers"]:
            complaints.append(f"{title}: {copies} kernels copy out of {each['gathers']} gathers")
        packs = sum(count for name, count in each["names"].items() if CHUNK_CAT in name)
        reductions = each["reductions"]
        if packs != reductions:
            complaints.append(f"{title}: {packs} kernels of {CHUNK_CAT} pack the gradients of {reductions} groups")
    return complaints


def one_launch(found: Mapping[str, Found]) -> list[str]:
    """NCCL has one kernel for each gather, and one for each reduction."""
    complaints = []
    for title, each in _measured(found).items():
        for range_name, wanted in (("all_gather", each["gathers"]), ("post_backward_reduce", each["reductions"])):
            launched = each["nccl_kernels"].get(range_name, 0)
            if launched != wanted:
                complaints.append(f"{title}: {launched} kernels of NCCL for {wanted} times {range_name}")
    return complaints


def _grows(series: Sequence[int], settled: int) -> bool:
    start = settled + STEPS_TO_SETTLE
    return max(series[start:]) > SAME_MEMORY * max(series[: start + 1])


def flat_memory(found: Mapping[str, Found]) -> list[str]:
    """Peaks do not grow from step to step, and the device is asked for no more memory."""
    complaints = []
    for title, each in _measured(found).items():
        settled = each["settled"]
        for what in ("allocated", "reserved"):
            if _grows(each[what], settled):
                complaints.append(f"{title}: {what} memory grows, {each[what][settled]} to {max(each[what])} bytes")
        asked = each["asked"][-1] - each["asked"][settled + STEPS_TO_SETTLE]
        if asked:
            complaints.append(f"{title}: the device was asked for memory {asked} times after the first steps")
    return complaints


def no_second_shards(found: Mapping[str, Found]) -> list[str]:
    """CUDA graphs take less than half of the shards' memory more: they have no copy of them."""
    complaints = []
    for title, each in _measured(found).items():
        if "shards" not in each:
            continue  # tests
        more = each["reserved"]["reduce-overhead"] - each["reserved"]["default"]
        if more > each["shards"] / 2:
            complaints.append(f"{title}: {more} bytes more in CUDA graphs, where all shards are {each['shards']}")
    return complaints


def known_backend(found: Mapping[str, Found]) -> list[str]:
    """Torch 2.15's backend is known by its name, as one that does not fuse; the one before fuses."""
    complaints = []
    for title, each in _measured(found).items():
        before = "TORCH_DIST_USE_NCCL2=0" in title
        expected = ("nccl", True) if before else ("nccl2", False)
        if (each["backend"], each["fuses"]) != expected:
            complaints.append(
                f"{title}: the backend is called {each['backend']!r} and taken to "
                f"{'launch several at once' if each['fuses'] else 'launch each by itself'}; expected {expected[0]!r}"
            )
    return complaints


def aligned(found: Mapping[str, Found]) -> list[str]:
    """The engine's rows are those that NCCL is fastest with; and it is: padding would not be worth its bytes else."""
    complaints = []
    for title, each in _measured(found).items():
        for row in each["row_bytes"]:
            if row % (128 if row >= 1024 else 16):
                complaints.append(f"{title}: a row has {row} bytes")
        odd, even = each["gigabytes_per_second"].values()
        if odd > WORTH_PADDING * even:
            complaints.append(f"{title}: {odd:.1f} GB/s with rows of any size, {even:.1f} with aligned ones")
    return complaints


def no_slower(found: Mapping[str, Found]) -> list[str]:
    """A step takes no longer than torch's, but for what torch's takes longer than itself; and no more memory."""
    complaints = []
    for title, each in _measured(found).items():
        times, peaks = each["milliseconds"], each["peak_mebibytes"]
        ours, slowest = times["fsdp2"], max(times["torch"], times["torch-again"])
        if ours > SAME_TIME * slowest:
            complaints.append(f"{title}: {ours:.1f} ms a step, torch's {times['torch']:.1f} and {slowest:.1f}")
        if peaks and "pool" not in title and peaks["fsdp2"] > SAME_MEMORY * peaks["torch"]:
            complaints.append(f"{title}: peak {peaks['fsdp2']:.0f} MiB, torch's {peaks['torch']:.0f}")
    return complaints


def little_host_time(found: Mapping[str, Found]) -> list[str]:
    """Clipping and optimizers cost what they cost of plain tensors; the whole step less than half of torch's."""
    complaints = []
    for title, each in _measured(found).items():
        plain, ours, torchs = each["plain"], each["fsdp2"], each["torch"]
        for phase, us in ours.items():
            if phase in BESIDE_PLAIN and us > AS_PLAIN * plain[phase]:
                complaints.append(f"{title}: {phase} takes {us:.1f} us a parameter, {plain[phase]:.1f} of plain ones")
        whole = sum(ours.values()) / sum(torchs.values())
        if whole > OF_TORCHS:
            complaints.append(f"{title}: a step takes the host {whole:.2f} of torch's time")
    return complaints


def kernels(**differing: Any) -> dict[str, Any]:
    """Made up: what `programs.kernels` finds of three blocks, as it should be but for ``differing``."""
    return {
        "gathers": 6,
        "reductions": 3,
        "direct": 7,
        "packed": 2,
        "fuses": True,
        "kernels": {"": 80, "all_gather_copy_out": 6, "post_backward_reduce": 6},
        "nccl_kernels": {"all_gather": 6, "post_backward_reduce": 3},
        "communication_streams": [20, 24],
        "gemm_streams": [7],
        "names": {"post_backward_reduce: void at::native::chunk_cat_cuda_kernel<float, BFloat16>": 3},
        **differing,
    }
