"""The jobs, in the order of their worth: those at the end may find no time."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from extras.gpu_check.machine import Machine

RIGHT, BETWEEN, TIMES = "right or wrong", "between GPUs", "times"
REHEARSED_RANKS = 2

BESIDE, BATCH, TESTS = (f"extras.gpu_check.{name}" for name in ("beside_torch", "batch", "tests"))
LLAMA, DOCTOR = "benchmarks.llama_step", "fsdp2"
TINY = "--shape tiny --batch 1 --seq 32 --steps 2 --impl torch,fsdp2"
"""The Llama step in a rehearsal."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where jobs run: on ``gpus`` GPUs, or, in a rehearsal, on the CPU, as that many ranks."""

    device: str
    gpus: int

    @property
    def is_rehearsal(self) -> bool:
        """Figures are worth nothing."""
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Job:
    """A command, and what it takes to run.

    Attributes:
        name: On the command line.
        asks: The question, in one sentence.
        means: What a failure means, and where to look.
        command: A module and its arguments; ``{gpus}`` is how many there are.
        limit_s: Seconds after which it is killed, with all that it started.
        kind: Of `RIGHT` several run beside each other on one GPU; each other has the machine to itself.
        environment: Set beside what is inherited.
        under: What the command is run by, if by anything.
        own_gib: Of a GPU's memory, that it needs on each.
        shared_gib: ... that all GPUs share.
        not_on_cpu: Why it has no rehearsal.
    """

    name: str
    asks: str
    means: str
    command: str
    limit_s: int
    kind: str = RIGHT
    environment: Mapping[str, str] = field(default_factory=dict)
    under: str = ""
    own_gib: float = 0.0
    shared_gib: float = 0.0
    not_on_cpu: str = ""

    @property
    def words(self) -> list[str]:
        """Of the command."""
        return shlex.split(self.command)

    @property
    def module(self) -> str:
        """That is run."""
        return self.words[0]

    @property
    def says(self) -> bool:
        """Whether it says what it found; else its exit status is all."""
        return self.module != DOCTOR

    def cannot_run(self, place: Place, machine: Machine) -> str | None:
        """Why not; None if it can."""
        if self.module not in (LLAMA, DOCTOR) and "pytest" not in machine.programs:
            return "needs pytest, for the harness of the tests, and this Python has none"
        if place.is_rehearsal:
            return self.not_on_cpu or None
        if not machine.gpus:
            return "needs a GPU; there is none"
        if self.kind == BETWEEN and machine.gpus < 2:
            return f"needs 2 GPUs; there {machine.gpus_text}"
        if missing := [name for name in self.under.split()[:1] if name not in machine.programs]:
            return f"needs {missing[0]}, which is not there"
        if machine.is_exclusive and (f"{BESIDE} gloo" in self.command or "FSDP2_TEST_DEVICE" in self.environment):
            return "needs several processes on one GPU, which is set to take one"
        needed = self.own_gib + self.shared_gib / place.gpus
        if needed > machine.gpu_gib:
            return f"needs {needed:.0f} GiB on each GPU, which has {machine.gpu_gib:.0f}"
        return None

    def arguments(self, place: Place) -> list[str]:
        """The whole command."""
        found = [*self.under.split(), sys.executable, "-m", *(word.format(gpus=place.gpus) for word in self.words)]
        found += ["--device", place.device] if self.says else []
        return found + (TINY.split() if self.module == LLAMA and place.is_rehearsal else [])


WRONG = "Wrong numbers, or a missing wait. The case that is named shows it again: compare `core/reduce.py`."
SLOWER = "Slower, or more memory, than torch's takes, by more than torch's second process does. Take a `--trace`."
COMPILED = "alone and (transformer or blocks or optimizer)"
GPU_TESTS = "tests/gpu/test_cuda.py tests/gpu/test_timeline_cuda.py"
ALL = "unsharded,torch,fsdp2,fsdp2-native,torch-again"
OF_8B = f"{LLAMA} --shape 8B --seq 8192 --ac --steps 4"
OF_1B = f"{LLAMA} --shape 1B --world 1 --batch 4"

JOBS = (
    Job(
        "copies",
        "Does rank 0 of 8, with copies in the place of NCCL, train as torch's, delayed too; do missing waits show?",
        WRONG,
        f"{BESIDE} copies",
        150,
    ),
    Job(
        "tests",
        "Do the models of the tests train on a GPU as without sharding: offloaded, clipped, captured, jittered?",
        "Of many tests: the engine on CUDA is wrong. Of a few, by 1e-5: another algorithm of cuBLAS.",
        f"{TESTS} {GPU_TESTS} -k 'not (alone and depends)'",
        200,
    ),
    Job(
        "compiled",
        "Do compiled models train as the reference?",
        "The test's name says whether communication was in the graphs: `fsdp2/compiled/`.",
        f"{TESTS} tests/gpu/test_compile_cuda.py -k '{COMPILED}'",
        150,
    ),
    Job("gloo-2", "Do 2 ranks on one GPU train as torch's?", WRONG, f"{BESIDE} gloo --ranks 2", 120),
    Job(
        "nccl-1",
        "Does a rank that has NCCL's collectives with itself train as torch's?",
        WRONG,
        f"{BESIDE} nccl --ranks 1",
        120,
        not_on_cpu="on the CPU gloo-2 is the same",
    ),
    Job(
        "training",
        "Mixed dtypes, kinds of groups, checkpoints; does the host wait for the device in a step?",
        "The program that is named has under 100 lines. A wait: nothing overlaps; the traceback shows where.",
        f"{BATCH} training",
        120,
    ),
    Job(
        "races",
        "Does torch's detector of races between kernels find one? Does it where a wait is left out?",
        "A race: the report names both kernels, and `fsdp2/core/streams.py` the wait that should be there.",
        f"{BATCH} races",
        90,
    ),
    Job(
        "graphs",
        "Is a captured step right when it is replayed, also after an eager step of another shape?",
        "Memory of the graph was given to others: `hold` in `plugs/memory/memory_pool.py`; or `model/graphed_step/`.",
        f"{BATCH} graphs",
        60,
    ),
    Job(
        "failures",
        "Does training go on after a batch that ran out of memory, raised, or was interrupted?",
        "Something of the batch was kept: `recover_if_failed` in `core/root.py`.",
        f"{BATCH} failures",
        60,
    ),
    Job("gloo-4", "Do 4 ranks on one GPU train as torch's?", WRONG, f"{BESIDE} gloo --ranks 4", 90),
    Job(
        "doctor",
        "Does `fsdp2 doctor` find a problem?",
        "It says itself what is wrong.",
        f"{DOCTOR} doctor",
        60,
        not_on_cpu="`tests/programs/test_commands.py` runs it",
    ),
    Job(
        "nccl",
        "Do all GPUs train as torch's?",
        WRONG,
        f"{BESIDE} nccl --ranks {{gpus}}",
        120,
        kind=BETWEEN,
        not_on_cpu="on the CPU gloo-2 is the same",
    ),
    Job(
        "between",
        "Kinds of groups, failed batches, checkpoints, other memory and a graph, with real collectives between GPUs?",
        "A hang: which collectives a group takes, `transport_of` in `core/transport.py`. Else as training, failures.",
        f"{BATCH} between --ranks {{gpus}}",
        150,
        kind=BETWEEN,
    ),
    Job(
        "links",
        "How many kernels of NCCL does a gather take? How fast is a reduce-scatter by the alignment of its rows?",
        "Collectives do not fuse: `fuses` in `fsdp2/_torch.py`. Padding is not worth it: `core/layout.py`.",
        f"{BATCH} links --ranks {{gpus}}",
        60,
        kind=BETWEEN,
    ),
    Job(
        "8B-between",
        "A step of 8B parameters that all GPUs share, beside torch's?",
        SLOWER,
        f"{OF_8B} --gpus {{gpus}}",
        150,
        kind=BETWEEN,
        own_gib=22,
        shared_gib=128,
    ),
    Job(
        "3B-between",
        "A step of 3B parameters that all GPUs share, beside torch's?",
        SLOWER,
        f"{LLAMA} --shape 3B --seq 8192 --ac --gpus {{gpus}}",
        120,
        kind=BETWEEN,
        own_gib=16,
        shared_gib=52,
    ),
    Job(
        "measured",
        "How many kernels, on which streams; does memory grow on a full device; what does the host take?",
        "Communication on the stream of compute overlaps with nothing; launches take 5 us each; a leak or fragments.",
        f"{BATCH} alone",
        90,
        kind=TIMES,
    ),
    Job(
        "8B",
        "A step of 8B, as rank 0 of 8 without the wire, beside torch's?",
        SLOWER,
        f"{OF_8B} --world 8",
        130,
        kind=TIMES,
        own_gib=38,
    ),
    Job(
        "1B",
        "A step of 1B on one GPU: what does sharding cost there?",
        SLOWER,
        f"{OF_1B} --impl {ALL}",
        100,
        kind=TIMES,
        own_gib=56,
    ),
    Job(
        "8B-wire",
        "A step of 8B, as rank 0 of 8, over a wire of 150 GB/s: what of it is exposed?",
        SLOWER,
        f"{OF_8B} --world 8 --gbps 150",
        130,
        kind=TIMES,
        own_gib=38,
    ),
    Job(
        "1B-host",
        "A step of 1B with 64 tokens: all of it is the host's?",
        SLOWER,
        f"{LLAMA} --shape 1B --world 8 --seq 64 --steps 20",
        60,
        kind=TIMES,
        own_gib=12,
    ),
    Job(
        "1B-offloaded",
        "A step of 1B with all on the host, beside torch's?",
        SLOWER,
        f"{OF_1B} --offload --impl torch,fsdp2 --steps 4",
        120,
        kind=TIMES,
        environment={"OMP_NUM_THREADS": "16"},
        own_gib=40,
    ),
    Job(
        "3B",
        "A step of 3B, as rank 0 of 8 without the wire, beside torch's?",
        SLOWER,
        f"{LLAMA} --shape 3B --world 8 --seq 8192 --ac",
        100,
        kind=TIMES,
        own_gib=20,
    ),
    Job(
        "1B-compiled",
        "A step of 1B, compiled block by block, beside torch's?",
        SLOWER,
        f"{OF_1B} --compile --impl torch,fsdp2,fsdp2-hooks --limit 60",
        150,
        kind=TIMES,
        own_gib=56,
        not_on_cpu="kernels of the CPU take minutes to compile: `benchmarks.compile`",
    ),
    Job(
        "expandable",
        "Does memory grow on a full device with expandable segments?",
        "As measured; an illegal access is memory unmapped under its reader: `core/streams.py`.",
        f"{BATCH} memory",
        60,
        kind=TIMES,
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    Job(
        "shards",
        "Do CUDA graphs of compiled models read the shards where they lie?",
        "More memory: the shards are no static addresses, `mark_static_address` in `fsdp2/compiled/`.",
        f"{BATCH} shards",
        90,
    ),
    Job(
        "ranks",
        "Do 2 and 4 ranks on one GPU train as the reference of the tests?",
        "A test that compares with the CPU: `tests/harness/device.py`. Else as gloo-2, whose cases torch's trains too.",
        f"{TESTS} tests/multi_rank/training/test_matches_reference.py",
        120,
        environment={"FSDP2_TEST_DEVICE": "cuda"},
        not_on_cpu="`make test` runs them there",
    ),
    Job(
        "memcheck",
        "Does a kernel read what is not its own, without an allocator that hides it?",
        "The report names the kernel: an address past its end, or memory that was freed.",
        f"{TESTS} tests/gpu/test_cuda.py -k 'native-transformer and reference'",
        100,
        kind=TIMES,
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        under="compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9",
        not_on_cpu="compute-sanitizer looks at CUDA only",
    ),
)


def chosen(names: str) -> list[Job]:
    """Those that are named, with commas between, in their order; all for "".

    Raises:
        SystemExit: there is no such job.
    """
    wanted = [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in {job.name for job in JOBS}]:
        raise SystemExit(f"unknown: {', '.join(unknown)}; the jobs are {', '.join(job.name for job in JOBS)}")
    return [job for job in JOBS if not wanted or job.name in wanted]
