"""Variables of the environment: those of fsdp2, NCCL, torch and the launcher that are set, and what they do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fsdp2.arguments import nearest
from fsdp2.tools import environment
from fsdp2.tools.doctor.finding import Finding

Environment = Mapping[str, str]

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
_NAMES = """
NCCL_ALGO NCCL_BUFFSIZE NCCL_CHECK_POINTERS NCCL_CGA_CLUSTER_SIZE NCCL_COLLNET_ENABLE NCCL_COMM_BLOCKING
NCCL_CONF_FILE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS
NCCL_DMABUF_ENABLE NCCL_GRAPH_DUMP_FILE NCCL_GRAPH_FILE NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_HOSTID
NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_ADDR_FAMILY NCCL_IB_AR_THRESHOLD NCCL_IB_CUDA_SUPPORT NCCL_IB_DISABLE
NCCL_IB_ECE_ENABLE NCCL_IB_FIFO_TC NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_MERGE_NICS NCCL_IB_PCI_RELAXED_ORDERING
NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT NCCL_IB_RETURN_ASYNC_EVENTS NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SL
NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY NCCL_LAUNCH_MODE NCCL_LL128_NTHREADS
NCCL_LL_THRESHOLD NCCL_LOCAL_REGISTER NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MAX_P2P_NCHANNELS NCCL_MAX_RINGS
NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_MIN_NRINGS NCCL_MNNVL_ENABLE NCCL_NCHANNELS_PER_NET_PEER NCCL_NET
NCCL_NET_DISABLE_INTRA NCCL_NET_FORCE_FLUSH NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_PLUGIN
NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVB_DISABLE NCCL_NVLS_ENABLE
NCCL_NVLSTREE_MAX_CHUNKSIZE NCCL_OOB_NET_ENABLE NCCL_OOB_NET_IFNAME NCCL_P2P_DIRECT_DISABLE NCCL_P2P_DISABLE
NCCL_P2P_LEVEL NCCL_P2P_NET_CHUNKSIZE NCCL_PROFILER_PLUGIN NCCL_PROTO NCCL_PXN_DISABLE NCCL_RAS_ADDR NCCL_RAS_ENABLE
NCCL_RAS_TIMEOUT_FACTOR NCCL_RUNTIME_CONNECT NCCL_SET_STACK_SIZE NCCL_SET_THREAD_NAME NCCL_SHM_DISABLE
NCCL_SHM_LOCALITY NCCL_SHM_USE_CUDA_MEMCPY NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS
NCCL_SOCKET_RETRY_CNT NCCL_SOCKET_RETRY_SLEEP_MSEC NCCL_SINGLE_RING_THRESHOLD NCCL_TOPO_DUMP_FILE NCCL_TOPO_FILE
NCCL_TUNER_PLUGIN NCCL_WIN_ENABLE NCCL_WORK_FIFO_DEPTH TORCH_NCCL_ABORT_IN_DESTROY_PG TORCH_NCCL_ASYNC_ERROR_HANDLING
TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_COORD_CHECK_MILSEC
TORCH_NCCL_DEBUG_INFO_PIPE_FILE TORCH_NCCL_DEBUG_INFO_TEMP_FILE TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_DUMP_ON_TIMEOUT
TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY
TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN TORCH_NCCL_NAN_CHECK TORCH_NCCL_PROPAGATE_ERROR TORCH_NCCL_RANKS_PER_ROOT
TORCH_NCCL_RETHROW_CUDA_ERRORS TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_TRACE_CPP_STACK TORCH_NCCL_USE_COMM_NONBLOCKING
TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC GLOO_SOCKET_IFNAME
GLOO_DEVICE_TRANSPORT
"""
KNOWN = frozenset(_NAMES.split())
"""Names that there are, to find misspelled ones. One that is not here and not near one of these is only listed."""


def _on(value: str) -> bool:
    return value.strip() not in ("", "0")


Rule = tuple[str, Callable[[str], bool], str, str]
"""A variable, which of its values are meant, what they do, and the remedy."""

SLOW: tuple[Rule, ...] = (
    (
        "NCCL_P2P_DISABLE",
        _on,
        "GPUs of one machine exchange through the host's memory, several times slower than by NVLink or PCIe",
        "Unset it; it is for finding faults of the machine.",
    ),
    ("NCCL_SHM_DISABLE", _on, "ranks of one machine exchange over the network", "Unset it."),
    ("NCCL_IB_DISABLE", _on, "nodes exchange over sockets, whatever adapters there are", "Unset it on InfiniBand."),
    ("NCCL_NVLS_ENABLE", lambda value: value == "0", "the switches' own reductions are off", "Unset it."),
    (
        "NCCL_ALGO",
        bool,
        "NCCL uses this algorithm for all sizes, instead of the one that it measured to be the best",
        "Unset it, except to measure.",
    ),
    ("NCCL_PROTO", bool, "NCCL uses this protocol for all sizes", "Unset it, except to measure."),
    ("NCCL_DEBUG", lambda value: value.upper() in ("INFO", "TRACE"), "NCCL prints much", "Set it to WARN."),
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        _on,
        "the host waits for every collective, so nothing overlaps",
        "Unset it; a hang is found by the watchdog anyway.",
    ),
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        lambda value: value == "0",
        "a rank that waits for a dead one waits for ever",
        "Unset it.",
    ),
    ("TORCH_NCCL_NAN_CHECK", _on, "every collective is searched for NaN first", "Unset it, except to find faults."),
    ("CUDA_LAUNCH_BLOCKING", _on, "every kernel is waited for, so nothing overlaps", "Unset it."),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda value: value == "1",
        "gathers and reductions queue behind the kernels of the layers, and do not overlap with them",
        "Unset it; it is for Megatron's tensor parallelism.",
    ),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value: value.upper() == "DETAIL",
        "every collective is compared between ranks before it runs",
        "Unset it, except to find faults.",
    ),
    ("TORCH_CPP_LOG_LEVEL", lambda value: value.upper() == "INFO", "torch prints much", "Unset it."),
    (
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _on,
        "every tensor is allocated by the driver, which waits for the device",
        "Unset it.",
    ),
)
FORMER = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
}
"""Former names of torch's own variables, which it does not read any more, or warns of."""


def findings(environ: Environment | None = None, *, interfaces: Path = Path("/sys/class/net")) -> Iterator[Finding]:
    """Look at all of them; ``interfaces`` is the folder of the network interfaces."""
    environ = os.environ if environ is None else environ
    yield from ours(environ)
    yield from of_launcher(environ)
    found = [*slow(environ), *misspelled(environ), *absent_interfaces(environ, interfaces), *threads(environ)]
    yield from found
    if not found:
        names = [name for name in sorted(environ) if name.startswith(PREFIXES)]
        what = f"Set, and harmless: {', '.join(names)}." if names else "No variables of NCCL or gloo are set."
        yield Finding("variables", "ok", what, values={name: environ[name] for name in names})


def ours(environ: Environment) -> Iterator[Finding]:
    """Those of fsdp2."""
    known = {variable.name: variable for variable in environment.VARIABLES}
    for sentence in environment.unknown(environ).values():
        yield Finding("variables", "warning", sentence, "Correct the name, or unset it.")
    for name, value in environment.of_ours(environ).items():
        if name in known and not known[name].accepts(value):
            yield Finding("variables", "problem", f"{name}={value}: it takes {known[name].takes}.", "Correct it.")
        elif name in known:
            yield Finding("variables", "note", f"{name}={value}. {known[name].means}")


def of_launcher(environ: Environment) -> Iterator[Finding]:
    """What a launcher sets: all of it, or nothing."""
    there = [name for name in LAUNCHER if environ.get(name)]
    if there and len(there) < len(LAUNCHER):
        missing = ", ".join(name for name in LAUNCHER if name not in there)
        what = f"{', '.join(there)} set, and {missing} not: init_process_group() cannot read them."
        yield Finding("launcher", "problem", what, "Start the program with torchrun, or set all four.")
    elif there:
        where = f"rank {environ['RANK']} of {environ['WORLD_SIZE']}, store at {environ['MASTER_ADDR']}"
        yield Finding("launcher", "ok", f"This is {where}:{environ['MASTER_PORT']}.")


def slow(environ: Environment) -> Iterator[Finding]:
    """Those that make runs slow, or hang."""
    for name, is_meant, does, remedy in SLOW:
        value = environ.get(name)
        if value is not None and is_meant(value):
            yield Finding("variables", "warning", f"{name}={value}: {does}.", remedy)
    for former, now in FORMER.items():
        if former in environ:
            yield Finding("variables", "warning", f"{former} is called {now} today.", f"Set {now} instead.")


def misspelled(environ: Environment) -> Iterator[Finding]:
    """Names that begin like NCCL's, and are near to one that there is."""
    for name in sorted(environ):
        if name.startswith(PREFIXES) and name not in KNOWN and name not in FORMER:
            meant = nearest(name, KNOWN)
            what = f"{name} is set, and not a variable that is known here.{meant}"
            if meant:
                yield Finding("variables", "warning", what, "Correct it if it is misspelled.")
            else:
                yield Finding("variables", "note", what)


def absent_interfaces(environ: Environment, interfaces: Path) -> Iterator[Finding]:
    """Interfaces that NCCL or gloo are told to use, and that there are none of."""
    if not interfaces.is_dir():
        return
    there = sorted(each.name for each in interfaces.iterdir())
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(name, "")
        if not value or value.startswith("^"):
            continue
        exact = value.startswith("=") or name.startswith("GLOO")
        asked = [each for each in value.lstrip("=").split(",") if each]
        if not any(each == one or (not exact and each.startswith(one)) for one in asked for each in there):
            what = f"{name}={value}, and this machine has {', '.join(there)}: ranks will not find each other."
            yield Finding("variables", "problem", what, "Name an interface that there is, or unset it.")


def threads(environ: Environment) -> Iterator[Finding]:
    """How many threads each rank computes with."""
    ranks, value = environ.get("LOCAL_WORLD_SIZE", "1"), environ.get("OMP_NUM_THREADS", "")
    cores = os.cpu_count() or 1
    if value.isdigit() and ranks.isdigit() and int(value) * int(ranks) > cores:
        what = f"OMP_NUM_THREADS={value} and {ranks} ranks want more threads than the {cores} cores there are."
        yield Finding("variables", "warning", what, f"Set it to {max(cores // int(ranks), 1)}.")
