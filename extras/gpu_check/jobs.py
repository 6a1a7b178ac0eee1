"""The jobs, in the order of their worth: those at the end may find no time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from extras.gpu_check.machine import Machine

RIGHT, BETWEEN, TIMES = "right or wrong", "between GPUs", "times"
REHEARSED_RANKS = 2


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
        says: Whether it says what it found; else its exit status is all.
        torch: The oldest release that it is about.
        own_gib: Of a GPU's memory, that it needs on each.
        shared_gib: ... that all GPUs share.
        on_cpu: Further arguments in a rehearsal.
        not_on_cpu: Why there is none.
        needs_tests: Whether it uses the harness of the tests, and hence pytest.
    """

    name: str
    asks: str
    means: str
    command: tuple[str, ...]
    limit_s: int
    kind: str = RIGHT
    environment: Mapping[str, str] = field(default_factory=dict)
    under: tuple[str, ...] = ()
    says: bool = True
    torch: tuple[int, int] = (2, 11)
    own_gib: float = 0.0
    shared_gib: float = 0.0
    on_cpu: tuple[str, ...] = ()
    not_on_cpu: str = ""
    needs_tests: bool = True

    def cannot_run(self, place: Place, machine: Machine) -> str | None:
        """Why not; None if it can."""
        if self.needs_tests and "pytest" not in machine.programs:
            return "needs pytest, which this Python has not"
        if machine.torch_release < self.torch:
            return f"is about torch {'.'.join(map(str, self.torch))} and later; here is {machine.torch}"
        if place.is_rehearsal:
            return self.not_on_cpu or None
        if not machine.gpus:
            return "needs a GPU; there is none"
        if self.kind == BETWEEN and machine.gpus < 2:
            return f"needs 2 GPUs; there {machine.gpus_text}"
        if missing := [name for name in self.under[:1] if name not in machine.programs]:
            return f"needs {missing[0]}, which is not there"
        if machine.is_exclusive and self.command[1:2] == ("gloo",):
            return "needs several processes on one GPU, which is set to take one"
        needed = self.own_gib + self.shared_gib / (place.gpus if self.kind == BETWEEN else 1)
        if needed > machine.gpu_gib:
            return f"needs {needed:.0f} GiB on each GPU, which has {machine.gpu_gib:.0f}"
        return None

    def arguments(self, place: Place) -> list[str]:
        """The whole command."""
        found = [*self.under, sys.executable, "-m", *(each.format(gpus=place.gpus) for each in self.command)]
        if self.says:
            found += ["--device", place.device]
        return [*found, *(self.on_cpu if place.is_rehearsal else ())]


def _beside_torch(name: str, asks: str, *command: str, limit_s: int, kind: str = RIGHT, not_on_cpu: str = "") -> Job:
    means = "Wrong numbers, or a missing wait. The case that is named shows it again: compare `core/reduce.py`."
    module = "extras.gpu_check.beside_torch"
    return Job(name, asks, means, (module, *command), limit_s, kind=kind, not_on_cpu=not_on_cpu)


def _batch(name: str, asks: str, means: str, *command: str, limit_s: int, kind: str = RIGHT, **more: str) -> Job:
    module = "extras.gpu_check.batch"
    return Job(name, asks, means, (module, *(command or (name,))), limit_s, kind=kind, environment=more)


def _tests(name: str, asks: str, means: str, *command: str, limit_s: int) -> Job:
    return Job(name, asks, means, ("extras.gpu_check.tests", *command), limit_s)


def _llama(
    name: str,
    asks: str,
    command: str,
    *,
    limit_s: int,
    own_gib: float = 0.0,
    shared_gib: float = 0.0,
    kind: str = TIMES,
    environment: Mapping[str, str] | None = None,
    not_on_cpu: str = "",
) -> Job:
    tiny = ("--shape", "tiny", "--batch", "1", "--seq", "32", "--steps", "2", "--impl", "torch,fsdp2")
    return Job(
        name,
        asks,
        "Slower, or more memory, than torch's takes, by more than torch's second process. Take a trace: `--trace`.",
        ("benchmarks.llama_step", *command.split()),
        limit_s,
        kind=kind,
        environment=environment or {},
        own_gib=own_gib,
        shared_gib=shared_gib,
        on_cpu=tiny,
        not_on_cpu=not_on_cpu,
        needs_tests=False,
    )


CUDA, COMPILE = "tests/gpu/test_cuda.py", "tests/gpu/test_compile_cuda.py"
COMPILES = "kernels of the CPU take minutes to compile, and are tests' (`tests/multi_rank`, `benchmarks.compile`)"
AS_GLOO = "gloo-2 is the same there"
ALL = "unsharded,torch,fsdp2,fsdp2-native,torch-again"
OF_8B = "--shape 8B --seq 8192 --ac --steps 4"
EXPANDABLE = "expandable_segments:True"

JOBS = (
    _beside_torch(
        "copies",
        "Does rank 0 of 8, with copies in the place of NCCL, train as torch's, delayed too; do missing waits show?",
        "copies",
        limit_s=150,
    ),
    _tests(
        "tests",
        "Do the models of the tests train on a GPU as without sharding: offloaded, clipped, captured, jittered?",
        "Of many tests: the engine on CUDA is wrong. Of a few, by 1e-5: another algorithm of cuBLAS.",
        *(CUDA, "tests/gpu/test_timeline_cuda.py", "-k", "not (alone and depends)"),
        limit_s=200,
    ),
    _tests(
        "compiled",
        "Do compiled models train as the reference?",
        "A name in the test says whether communication was in the graphs: `fsdp2/compiled/`.",
        *(COMPILE, "-k", "alone and (transformer or blocks or optimizer)"),
        limit_s=150,
    ),
    _beside_torch("gloo-2", "Do 2 ranks on one GPU train as torch's?", "gloo", "--ranks", "2", limit_s=120),
    _beside_torch(
        "nccl-1",
        "Does a rank that has NCCL's collectives with itself?",
        "nccl",
        "--ranks",
        "1",
        limit_s=120,
        not_on_cpu=AS_GLOO,
    ),
    _batch(
        "training",
        "Mixed dtypes, kinds of groups, checkpoints; does the host wait for the device in a step?",
        "The program that is named has under 100 lines. A wait: nothing overlaps; the traceback shows where.",
        limit_s=120,
    ),
    _batch(
        "races",
        "Does torch's detector of races between kernels find one? Does it where a wait is left out?",
        "A race: the report names both kernels, and `fsdp2/core/streams.py` the wait that should be there.",
        limit_s=90,
    ),
    _batch(
        "graphs",
        "Is a captured step right when it is replayed, also after an eager step of another shape?",
        "Memory of the graph was given to others: `hold` in `features/memory_pool.py`; or `features/graphed_step/`.",
        limit_s=60,
    ),
    _batch(
        "failures",
        "Does training go on after a batch that ran out of memory, raised, or was interrupted?",
        "Something of the batch was kept: `recover_if_failed` in `core/root.py`.",
        limit_s=60,
    ),
    _beside_torch("gloo-4", "Do 4 ranks on one GPU train as torch's?", "gloo", "--ranks", "4", limit_s=90),
    Job(
        "doctor",
        "Does `fsdp2 doctor --gpu`, the part of this in the wheel, find a problem?",
        "It says itself what is wrong.",
        ("fsdp2", "doctor", "--gpu"),
        60,
        says=False,
        needs_tests=False,
        not_on_cpu="it looks for a GPU; `tests/unit/test_doctor.py` rehearses it",
    ),
    _beside_torch(
        "nccl",
        "Do all GPUs train as torch's?",
        "nccl",
        "--ranks",
        "{gpus}",
        limit_s=120,
        kind=BETWEEN,
        not_on_cpu=AS_GLOO,
    ),
    _batch(
        "between",
        "Kinds of groups, failed batches, checkpoints, other memory and a graph, with real collectives between GPUs?",
        "A hang: which collectives a group takes, `transport_of` in `core/transport.py`. Else as training, failures.",
        *("between", "--ranks", "{gpus}"),
        limit_s=150,
        kind=BETWEEN,
    ),
    _batch(
        "links",
        "How many kernels of NCCL does a gather take? How fast is a reduce-scatter by the alignment of its rows?",
        "Collectives do not fuse: `fuses` in `fsdp2/_torch.py`. Padding is not worth it: `core/layout.py`.",
        *("links", "--ranks", "{gpus}"),
        limit_s=60,
        kind=BETWEEN,
    ),
    _llama(
        "8B-between",
        "A step of 8B parameters, shared by all GPUs, beside torch's?",
        f"{OF_8B} --gpus {{gpus}} --impl torch,fsdp2,torch-again",
        limit_s=150,
        own_gib=22,
        shared_gib=128,
        kind=BETWEEN,
    ),
    _llama(
        "3B-between",
        "A step of 3B parameters, shared by all GPUs?",
        "--shape 3B --seq 8192 --ac --gpus {gpus}",
        limit_s=120,
        own_gib=16,
        shared_gib=52,
        kind=BETWEEN,
    ),
    _batch(
        "measured",
        "How many kernels, on which streams; does memory grow on a full device; what does the host take?",
        "Communication on the stream of compute overlaps with nothing; launches take 5 us each; a leak or fragments.",
        "alone",
        limit_s=90,
        kind=TIMES,
    ),
    _llama("8B", "A step of rank 0 of 8, without the wire, of 8B?", f"{OF_8B} --world 8", limit_s=130, own_gib=38),
    _llama(
        "1B",
        "What does sharding cost on one GPU?",
        f"--shape 1B --world 1 --batch 4 --impl {ALL}",
        limit_s=100,
        own_gib=56,
    ),
    _llama(
        "8B-wire",
        "... over a wire of 150 GB/s: what of it is exposed?",
        f"{OF_8B} --world 8 --gbps 150",
        limit_s=130,
        own_gib=38,
    ),
    _llama(
        "1B-host", "A step that waits for the host?", "--shape 1B --world 8 --seq 64 --steps 20", limit_s=60, own_gib=12
    ),
    _llama(
        "1B-offloaded",
        "... with all on the host?",
        "--shape 1B --world 1 --batch 4 --offload --impl torch,fsdp2 --steps 4",
        limit_s=120,
        own_gib=40,
        environment={"OMP_NUM_THREADS": "16"},
    ),
    _llama("3B", "A step of rank 0 of 8 of 3B?", "--shape 3B --world 8 --seq 8192 --ac", limit_s=100, own_gib=20),
    _llama(
        "1B-compiled",
        "... compiled block by block?",
        "--shape 1B --world 1 --batch 4 --compile --impl torch,fsdp2,fsdp2-hooks --limit 60",
        limit_s=150,
        own_gib=56,
        not_on_cpu=COMPILES,
    ),
    _batch(
        "expandable",
        "Does memory grow on a full device with expandable segments?",
        "As measured; an illegal access is memory unmapped under its reader: `core/streams.py`.",
        "memory",
        limit_s=60,
        kind=TIMES,
        PYTORCH_CUDA_ALLOC_CONF=EXPANDABLE,
    ),
    _batch(
        "shards",
        "Do CUDA graphs of compiled models read the shards where they lie?",
        "More memory: the shards are no static addresses, `mark_static_address` in `fsdp2/compiled/`.",
        limit_s=90,
    ),
    Job(
        "memcheck",
        "Does a kernel read what is not its own, without an allocator that hides it?",
        "The report names the kernel: an address past its end, or memory that was freed.",
        ("extras.gpu_check.tests", CUDA, "-k", "native-transformer and reference"),
        100,
        kind=TIMES,
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        under=("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9"),
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
