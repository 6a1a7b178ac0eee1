"""Checks 14 to 21: two GPUs are enough for most of them, eight say more."""

from __future__ import annotations

from collections.abc import Mapping

from extras.gpu_check import limits
from extras.gpu_check.check import Check, MadeUp, Plant
from extras.gpu_check.one_gpu import LEGACY
from extras.gpu_check.runs import Found, Program

KERNELS = [Program("kernels", several=True), Program("kernels", several=True, environment=LEGACY)]
ALIGNMENT = Program("alignment", several=True)


def _trained(**options: str) -> Program:
    return Program("beside_torch", options, several=True, limit_s=600)


BESIDE_TORCH = [
    _trained(),
    _trained(replicas="2"),
    _trained(replicas="half"),
    _trained(dtype="bf16"),
    _trained(dtype="bf16", replicas="2"),
    _trained(dtype="fp16"),
    _trained(factor="3"),
    _trained(accumulates="with sync"),
    _trained(accumulates="without sync"),
    _trained(accumulates="without sync", replicas="2"),
]

BOTH_BACKENDS = "cpu:gloo,cuda:nccl"
KINDS = [
    Program("groups", {**backend, **binds, **asynchronous}, several=True)
    for asynchronous in ({}, {"async": "yes"})
    for binds in ({}, {"binds": "yes"})
    for backend in ({}, {"backend": "nccl"}, {"backend": BOTH_BACKENDS})
]
"""The last are those that used to hang."""

SILENT = Program("groups", {"backend": BOTH_BACKENDS}, several=True, limit_s=25)

JITTERED = [
    Program("jittered", {"seeds": "35", "slow": "yes", **options}, several=True, limit_s=1200)
    for options in ({}, {"replicas": "2"}, {"apart": "yes"})
]

RECOVERY = [Program("recovery", {"what": what}, several=True) for what in ("out of memory", "exception", "interrupt")]

STEP_TIME = [
    Program("step_time", options, several=True, limit_s=900)
    for options in ({"shape": "1B"}, {"shape": "1B", "pool": "on"}, {"shape": "8B"}, {"shape": "1B", "offload": "yes"})
]

CHECKPOINTED = Program("checkpointed", several=True)


def _times(ours: float, peak: float = 1000.0) -> Mapping[str, Found]:
    milliseconds = {"torch": 100.0, "fsdp2": ours, "torch-again": 101.0}
    return {
        STEP_TIME[0].title: {
            "milliseconds": milliseconds,
            "peak_mebibytes": {"torch": 1000.0, "fsdp2": peak, "torch-again": 1000.0},
        }
    }


def _bandwidths(odd: float, rows: list[int]) -> Mapping[str, Found]:
    return {ALIGNMENT.title: {"gigabytes_per_second": {"odd": odd, "aligned": 100.0}, "row_bytes": rows}}


CHECKS = (
    Check(
        14,
        "launches",
        asks="How many kernels of NCCL does the gather of a Llama-like block take, and its reduction?",
        expected="One each; on torch 2.15 with its new backend and with the one before.",
        means="Coalesced collectives do not fuse, and are not packed instead: `fuses` in `fsdp2/_torch.py`.",
        runs=KERNELS,
        rehearsals=[
            MadeUp(
                {KERNELS[0].title: limits.kernels()},
                {
                    "times all_gather": {KERNELS[0].title: limits.kernels(nccl_kernels={"post_backward_reduce": 3})},
                    "times post_backward_reduce": {KERNELS[0].title: limits.kernels(nccl_kernels={"all_gather": 6})},
                },
            )
        ],
        gpus=2,
        limits=limits.one_launch,
    ),
    Check(
        15,
        "alignment",
        asks="How fast is a reduce-scatter by the alignment of its rows, and how are the engine's rows aligned?",
        expected="Rows of 128 bytes (16 below 1 KiB), and no slower than rows of 4 mod 16.",
        means="Slower aligned: padding costs more than it brings on this link, `padded_row` in `core/layout.py`.",
        runs=[ALIGNMENT],
        rehearsals=[
            MadeUp(
                _bandwidths(60.0, [1280, 48]),
                {
                    "a row has 1284 bytes": _bandwidths(60.0, [1284]),
                    "a row has 36 bytes": _bandwidths(60.0, [36]),
                    "GB/s with rows of any size": _bandwidths(120.0, [1280]),
                },
            )
        ],
        gpus=2,
        limits=limits.aligned,
    ),
    Check(
        16,
        "beside-torch",
        asks="Are losses of 50 steps those of torch's own: shards, replicas, bf16, fp16, factors, accumulation?",
        expected="Within 1e-5 in fp32, within 2e-2 in 16 bits.",
        means="Wrong numbers. The options of the first run that fails say where: compare `core/reduce.py`.",
        runs=BESIDE_TORCH,
        rehearsals=[
            Plant(run, "a reduction adds one to what it reduces", "beside torch's", ranks=2)
            for run in (BESIDE_TORCH[0], BESIDE_TORCH[3])
        ],
        gpus=2,
    ),
    Check(
        17,
        "groups",
        asks="Do process groups of every kind work, with gathers as works too?",
        expected="All train as the plain model, and none hangs.",
        means="A hang: which collectives a group takes, `transport_of` in `core/transport.py`.",
        runs=KINDS,
        rehearsals=[Plant(SILENT, "one rank never sends", "not done after", ranks=2)],
        gpus=2,
    ),
    Check(
        18,
        "jitter-of-ranks",
        asks="Do losses depend on how long communication takes, where one rank is slow now and then?",
        expected="No hang; bit for bit the same with 35 seeds each: shards, replicas, a group for reductions.",
        means="A hang: the order of collectives depends on the rank. Another loss: as check 4, between ranks.",
        runs=JITTERED,
        rehearsals=[Plant(JITTERED[0], "what is received is read too early", "the loss of step", ranks=2)],
        gpus=2,
    ),
    Check(
        19,
        "recovery",
        asks="Does training go on after a batch that ran out of memory on one rank, raised, or was interrupted?",
        expected="Losses as if that batch had not been there.",
        means="Something of it was kept, or ranks go on from different places: `recover_if_failed` in `core/root.py`.",
        runs=RECOVERY,
        rehearsals=[Plant(RECOVERY[1], "a forward does not start clean", "")],
        gpus=2,
    ),
    Check(
        20,
        "step-time",
        asks="How long is a step beside torch's, and how much memory does it take?",
        expected="No longer, but for what torch's differs from itself; no more memory (the pool keeps some).",
        means="Read checks 8, 13, 14 and 15 first, then a trace: what is exposed, and why.",
        runs=STEP_TIME,
        rehearsals=[
            MadeUp(
                _times(100.5),
                {"ms a step, torch's": _times(110.0), "peak 1200 MiB": _times(90.0, peak=1200.0)},
            )
        ],
        gpus=2,
        limits=limits.no_slower,
    ),
    Check(
        21,
        "around",
        asks="Do checkpoints, resharding to two ranks, other memory, and a graph with real collectives work?",
        expected="Loaded models are equal bit by bit; losses those of the plain model; replays too.",
        means="The program that is named has under 100 lines, and runs by itself.",
        runs=[
            CHECKPOINTED,
            Program("own_memory", {"of": "group"}, several=True),
            Program("own_memory", {"of": "symmetric"}, several=True),
            Program("replayed", several=True),
        ],
        rehearsals=[Plant(CHECKPOINTED, "nothing is loaded", "differs when it is loaded")],
        gpus=2,
        torch=(2, 13),
    ),
)
