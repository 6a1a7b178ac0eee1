"""Checks 1 to 13: one GPU is enough."""

from __future__ import annotations

from collections.abc import Mapping

from extras.gpu_check import limits
from extras.gpu_check.check import Check, Instead, MadeUp, Plant
from extras.gpu_check.faults import drops
from extras.gpu_check.runs import Found, Program, Run, Suite, Tests
from fsdp2.core.streams import Wait

GREEN = "tests/unit/test_bits.py"
"""Tests of a second that pass everywhere."""

NCCL_ALONE = {"FSDP2_COMM": "native"}
"""One rank has NCCL's collectives with itself."""

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
LEGACY = {"TORCH_DIST_USE_NCCL2": "0"}
NEEDED_WAITS = (Wait.GATHERED, Wait.GRADIENTS_READY, Wait.REDUCED)
"""Those whose removal must show in a plain step. The others need memory to be handed on just then."""


def _without_gpu(*paths: str) -> Instead:
    return Instead(Tests((GREEN,)), Tests(paths), "no test ran")


SANITIZED = Program("sanitized", environment=NCCL_ALONE)
JITTERED = Program("jittered", {"seeds": "100"}, limit_s=900, environment=NCCL_ALONE)
LATE = Program("jittered", several=True)
FOUND_BY_SANITIZER: list[Run] = [
    Program("sanitized", plants=drops(why), environment=NCCL_ALONE) for why in NEEDED_WAITS
]
FOUND_BY_JITTER: list[Run] = [
    Program("jittered", {"seeds": "10"}, plants=drops(why), environment=NCCL_ALONE) for why in NEEDED_WAITS
]
WAYS = ("plain", "unused", "offload", "pool")
HOST_WAITS = [Program("host_waits", {"way": way}, environment=NCCL_ALONE) for way in WAYS]
KERNELS_ALONE = Program("kernels", environment=NCCL_ALONE)
MEMORY = [
    Program("memory", {"pool": pool}, environment={**NCCL_ALONE, **environment})
    for pool in ("off", "on")
    for environment in ({}, EXPANDABLE)
]
REDUCE_OVERHEAD = Program("reduce_overhead", environment=NCCL_ALONE)
HOST_TIME = Program("host_time", environment=NCCL_ALONE)
BACKENDS = [Program("backend", several=True), Program("backend", several=True, environment=LEGACY)]


def _memory(**differing: list[int]) -> Mapping[str, Found]:
    flat = {"allocated": [9, 9, 9] + [8] * 7, "reserved": [10] * 3 + [90] * 7, "asked": [1, 2, 2] + [5] * 7}
    return {MEMORY[0].title: {**flat, "settled": 3, **differing}}


def _reserved(more: int) -> Mapping[str, Found]:
    return {REDUCE_OVERHEAD.title: {"reserved": {"default": 1000, "reduce-overhead": 1000 + more}, "shards": 400}}


def _host_times(**differing: float) -> Mapping[str, Found]:
    plain = {"forward and backward": 14.0, "clip": 4.0, "AdamW foreach": 9.0, "AdamW fused": 3.0, "zero_grad": 0.2}
    torchs = {"forward and backward": 80.0, "clip": 16.0, "AdamW foreach": 34.0, "AdamW fused": 20.0, "zero_grad": 0.4}
    ours = {"forward and backward": 30.0, "clip": 4.4, "AdamW foreach": 3.0, "AdamW fused": 2.0, "zero_grad": 0.4}
    return {HOST_TIME.title: {"plain": plain, "torch": torchs, "fsdp2": {**ours, **differing}}}


def _backend(name: str, fuses: bool, legacy: str = "nccl") -> Mapping[str, Found]:
    return {
        BACKENDS[0].title: {"backend": name, "fuses": fuses},
        BACKENDS[1].title: {"backend": legacy, "fuses": True},
    }


CHECKS = (
    Check(
        1,
        "suite",
        asks="Does the suite of the CPU pass on this machine, whose GPUs are hidden from it?",
        expected="All tests pass.",
        means="The machine, not the GPU: its processor, its torch build, its time limits. Send the end of the output.",
        runs=[Suite()],
        rehearsals=[Instead(Suite(arguments=(GREEN,)), Suite(arguments=(f"{GREEN}::test_missing",)), "exit status")],
    ),
    Check(
        2,
        "training",
        asks="Do the models of the tests train on a GPU as without sharding: offloaded, clipped, captured, jittered?",
        expected="All tests pass, without communication and with NCCL's of one rank.",
        means="A failure of many tests: the engine on CUDA is wrong. Of a few, by 1e-5: another algorithm of cuBLAS.",
        runs=[Tests(("tests/gpu/test_cuda.py",), limit_s=1200)],
        rehearsals=[_without_gpu("tests/gpu/test_cuda.py")],
    ),
    Check(
        3,
        "sanitizer",
        asks="Does torch's detector of races between kernels find one? Does it where a wait is left out?",
        expected="No report; with a wait left out, a report.",
        means="A race: the report names both kernels, and `fsdp2/core/streams.py` the wait that should be there.",
        runs=[SANITIZED, *FOUND_BY_SANITIZER],
        rehearsals=[Plant(SANITIZED, drops(why), "races") for why in NEEDED_WAITS],
    ),
    Check(
        4,
        "jitter",
        asks="Do losses depend on how long communication takes, or on what freed memory holds?",
        expected="Bit for bit the same with 100 seeds; with a wait left out, another loss within 10.",
        means="A missing wait, or memory that is read after it was freed. The seed that is named shows it again.",
        runs=[JITTERED, *FOUND_BY_JITTER],
        rehearsals=[Plant(LATE, "what is received is read too early", "the loss of step", ranks=2)],
    ),
    Check(
        5,
        "mixed-dtypes",
        asks="Is a group that is gathered in bf16 and in fp32 cast as on the CPU?",
        expected="Equal bits; gradients within the precision of bf16.",
        means="A fused copy casts wrongly: copies must be apart by dtype (torch up to 2.12), `core/gather.py`.",
        runs=[Program("mixed_dtypes")],
        rehearsals=[Plant(Program("mixed_dtypes"), "copies that cast write wrong values", "differs from the original")],
    ),
    Check(
        6,
        "nccl-alone",
        asks="Does all that runs on one GPU run with NCCL's collectives of one rank, on streams of their own?",
        expected="All of tests/gpu passes; what gathers and reductions launch is on two streams without products.",
        means="Communication on the stream of compute overlaps with nothing.",
        runs=[Tests(("tests/gpu",), limit_s=1800), KERNELS_ALONE],
        rehearsals=[
            _without_gpu("tests/gpu"),
            MadeUp(
                {KERNELS_ALONE.title: limits.kernels()},
                {
                    "share streams": {KERNELS_ALONE.title: limits.kernels(communication_streams=[7, 24])},
                    "not on two": {KERNELS_ALONE.title: limits.kernels(communication_streams=[20])},
                    "no product": {KERNELS_ALONE.title: limits.kernels(gemm_streams=[])},
                },
            ),
        ],
        limits=limits.apart_from_compute,
    ),
    Check(
        7,
        "host-waits",
        asks="Does the host wait for the device in a step? (Plainly, with an unused layer, offloaded, with the pool.)",
        expected="Never, but for what docs/devices.md names: an event, which torch's debug mode does not count.",
        means="Nothing overlaps with what follows, and no such step can be captured. The traceback shows where.",
        runs=HOST_WAITS,
        rehearsals=[Plant(run, "a reduction asks the device for a number", "the host waits") for run in HOST_WAITS[:2]],
    ),
    Check(
        8,
        "kernels",
        asks="How many kernels does a Llama-like block cost, beside those of its own?",
        expected="One copy out of each gather, one that packs and casts the gradients of each group.",
        means="Launches take 5 us each: the report has the names of all kernels, by range.",
        runs=[KERNELS_ALONE],
        rehearsals=[
            MadeUp(
                {KERNELS_ALONE.title: limits.kernels()},
                {
                    "copy out of": {KERNELS_ALONE.title: limits.kernels(kernels={"all_gather_copy_out": 12})},
                    "pack the gradients": {KERNELS_ALONE.title: limits.kernels(names={})},
                },
            )
        ],
        limits=limits.few_kernels,
    ),
    Check(
        9,
        "memory",
        asks="Does memory grow over 50 steps on a nearly full device, with or without pool and expandable segments?",
        expected="Flat after the first steps, no illegal access, and the device is asked for nothing more.",
        means="A leak, fragments, or (an illegal access) memory unmapped under its reader: see `core/streams.py`.",
        runs=MEMORY,
        rehearsals=[
            MadeUp(
                _memory(),
                {
                    "allocated memory grows": _memory(allocated=[8] * 6 + [9, 10, 11, 12]),
                    "reserved memory grows": _memory(reserved=[10] * 3 + [90] * 5 + [99, 99]),
                    "was asked for memory 2 times": _memory(asked=[1, 2, 2] + [5] * 5 + [7, 7]),
                },
            )
        ],
        limits=limits.flat_memory,
    ),
    Check(
        10,
        "replay",
        asks="Is a captured step right when it is replayed, also after an eager step of another shape?",
        expected="Parameters like the plain model's after 100 replays and after 100 more; losses of graphed steps too.",
        means="Memory of the graph was given to others: `hold` in `features/memory_pool.py`. Only losses of graphed "
        "steps: `features/graphed_step/`.",
        runs=[
            Program("replayed"),
            Program("replayed", environment=NCCL_ALONE),
            Program("graphed"),
            Program("graphed", environment=NCCL_ALONE),
        ],
        rehearsals=[
            Plant(Program("replayed", environment=NCCL_ALONE), "memory of graphs is given back", "were given back"),
            Plant(Program("graphed"), "a graph reads the inputs of its recording", "the loss of step"),
        ],
        torch=(2, 11),
    ),
    Check(
        11,
        "compiled",
        asks="Do compiled models train as the reference, and do CUDA graphs read the shards where they lie?",
        expected="All tests pass; CUDA graphs take no second copy of the shards.",
        means="More memory: the shards are no static addresses, `mark_static_address` in `fsdp2/compiled/`.",
        runs=[Tests(("tests/gpu/test_compile_cuda.py",), limit_s=1800), REDUCE_OVERHEAD],
        rehearsals=[
            _without_gpu("tests/gpu/test_compile_cuda.py"),
            MadeUp(_reserved(100), {"bytes more in CUDA graphs": _reserved(400)}),
        ],
        limits=limits.no_second_shards,
    ),
    Check(
        12,
        "nccl2",
        asks="What is torch 2.15's backend for NCCL taken for, and the one before it?",
        expected="'nccl2', which launches each collective by itself and scales as it sums; 'nccl', which fuses.",
        means="Slow where it is not known: parameters of 1 MiB would be gathered by a launch each.",
        runs=BACKENDS,
        rehearsals=[
            Plant(BACKENDS[0], "NCCL is known by its old name only", "is not known as NCCL", ranks=2),
            MadeUp(
                _backend("nccl2", False),
                {
                    "launch several at once": _backend("nccl2", True),
                    "called 'other'": _backend("other", False),
                    "called 'nccl2' and taken to launch several": _backend("nccl2", False, legacy="nccl2"),
                },
            ),
        ],
        torch=(2, 15),
        limits=limits.known_backend,
    ),
    Check(
        13,
        "host-time",
        asks="What does the host take for forward and backward, clipping, AdamW and zero_grad of 384 small parameters?",
        expected="Clipping and AdamW at most 1.15 of plain tensors' time; together at most 0.45 of torch's.",
        means="The GPU waits between small kernels. `benchmarks.checks` and `benchmarks.optimizers` say for what.",
        runs=[HOST_TIME],
        rehearsals=[
            MadeUp(
                _host_times(),
                {
                    "AdamW foreach takes 30.0": _host_times(**{"AdamW foreach": 30.0}),
                    "clip takes 9.0": _host_times(clip=9.0),
                    "of torch's": _host_times(**{"forward and backward": 120.0}),
                },
            )
        ],
        limits=limits.little_host_time,
    ),
)
