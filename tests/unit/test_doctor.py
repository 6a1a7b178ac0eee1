"""Each part of the doctor, on made-up machines, drivers and environments."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.tools.doctor import exchange, gpus, machine, on_gpu, software, variables
from fsdp2.tools.doctor.finding import Diagnosis, Finding


def levels(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(each.level, each.topic) for each in findings]


def only(findings: Iterable[Finding], level: str) -> str:
    (found,) = [f"{each.what} > {each.remedy}" for each in findings if each.level == level]
    return found


def test_releases_of_torch() -> None:
    assert [software.about_torch(each).level for each in ("2.10.1", "2.11.0", "2.15.0+cu129", "2.16.0a0")] == [
        "problem",
        "ok",
        "ok",
        "warning",
    ]
    assert software.about_torch("unknown").level == "problem"
    assert "Update torch" in software.about_torch("2.4.0").remedy
    found = {each.topic: each for each in software.findings()}
    assert found["torch"].values is not None and found["torch"].values["torch"] == torch.__version__
    assert "gloo" in found["backend"].what


VARIABLES: list[tuple[dict[str, str], str, str]] = [
    ({"NCCL_P2P_DISABLE": "1"}, "warning", "NCCL_P2P_DISABLE=1: GPUs of one machine exchange through the host"),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "warning", "do not overlap with them"),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "warning", "nothing overlaps"),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warning", "waits for ever"),
    ({"NCCL_BLOCKING_WAIT": "1"}, "warning", "is called TORCH_NCCL_BLOCKING_WAIT today"),
    ({"NCCL_SOCKET_IFNME": "eth0"}, "warning", "Did you mean 'NCCL_SOCKET_IFNAME'"),
    ({"NCCL_QQQQQQQQQQQ": "1"}, "note", "not a variable that is known here. "),
    ({"NCCL_SOCKET_IFNAME": "ib0"}, "problem", "this machine has eth0, lo: ranks will not find each other"),
    ({"GLOO_SOCKET_IFNAME": "eth"}, "problem", "this machine has eth0, lo"),
    ({"NCCL_SOCKET_IFNAME": "=eth"}, "problem", "this machine has eth0, lo"),
    ({"FSDP2_COMPT": "1"}, "warning", "Did you mean 'FSDP2_COMPAT'"),
    ({"FSDP2_LOG": "everything"}, "problem", "it takes plan, order, comm, memory"),
    ({"FSDP2_COMM": "native"}, "note", "FSDP2_COMM=native. Ranks exchange by"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "problem", "RANK, WORLD_SIZE set, and MASTER_ADDR, MASTER_PORT not"),
    ({"OMP_NUM_THREADS": "9999"}, "warning", "want more threads than the"),
]


@pytest.mark.parametrize(("environ", "level", "says"), VARIABLES, ids=[next(iter(each[0])) for each in VARIABLES])
def test_variables(environ: dict[str, str], level: str, says: str, tmp_path: Path) -> None:
    for name in ("eth0", "lo"):
        (tmp_path / name).mkdir()
    assert says in only(variables.findings(environ, interfaces=tmp_path), level)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NCCL_P2P_DISABLE": "0", "NCCL_SOCKET_IFNAME": "eth", "NCCL_DEBUG": "WARN"},
        {"NCCL_SOCKET_IFNAME": "^docker0", "GLOO_SOCKET_IFNAME": "eth0"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    ],
)
def test_variables_that_are_right(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "eth0").mkdir()
    assert {each.level for each in variables.findings(environ, interfaces=tmp_path)} == {"ok"}


def test_limits_and_shared_memory(tmp_path: Path) -> None:
    def get(files: int, locked: int) -> Any:
        return lambda which: (files if which == resource.RLIMIT_NOFILE else locked, -1)

    assert levels(machine.limits(get(65536, -1), has_adapters=True)) == [("ok", "ulimit")]
    assert levels(machine.limits(get(1024, 2**16), has_adapters=False)) == [("warning", "ulimit")]
    assert levels(machine.limits(get(1024, 2**16), has_adapters=True)) == [("warning", "ulimit"), ("problem", "ulimit")]
    assert machine.shared_memory(tmp_path / "none").level == "note"


def test_a_name_that_is_not_found() -> None:
    def fail(name: str) -> object:
        raise socket.gaierror("Name or service not known")

    found = machine.host_name(fail)
    assert found.level == "warning" and "/etc/hosts" in found.remedy
    assert machine.host_name(lambda name: "127.0.0.1").level == "ok"


GPU = "0, NVIDIA H100 80GB HBM3, 570.1, 81559, {used}, {clock}, 1980, {reasons}, 5, {lanes}, 16, {errors}\n"
RIGHT = {"used": 4, "clock": 345, "reasons": "0x0000000000000001", "lanes": 16, "errors": 0}
DRIVER: list[tuple[dict[str, Any], str, str]] = [
    ({"reasons": "0x0000000000000040", "clock": 600}, "warning", "runs at 600 of 1980 MHz: it is too hot"),
    ({"used": 40000}, "warning", "39.1 GiB of GPU 0 (NVIDIA H100 80GB HBM3)'s 79.6 GiB are in use already"),
    ({"lanes": 8}, "warning", "8 of 16 PCIe lanes"),
    ({"errors": 3}, "problem", "3 memory errors that could not be corrected"),
]


@pytest.mark.parametrize(("changes", "level", "says"), DRIVER)
def test_what_the_driver_says(changes: dict[str, Any], level: str, says: str) -> None:
    assert says in only(gpus.about(GPU.format(**{**RIGHT, **changes})), level)


def test_a_gpu_without_faults_or_counters() -> None:
    assert levels(gpus.about(GPU.format(**RIGHT))) == [("ok", "gpu")]
    assert levels(gpus.about(GPU.format(**{**RIGHT, "errors": "[N/A]", "reasons": "[N/A]"}))) == [("ok", "gpu")]


MATRIX = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \t{a}\t{b}\tPIX\t0-63
GPU1\t{a}\t X \t{c}\tSYS\t0-63
GPU2\t{b}\t{c}\t X \tSYS\t64-127
NIC0\tPIX\tSYS\tSYS\t X
"""


def test_topology() -> None:
    assert gpus.links(MATRIX.format(a="NV18", b="NV18", c="NV18")) == {(0, 1): "NV18", (0, 2): "NV18", (1, 2): "NV18"}
    found = [gpus.topology(MATRIX.format(a=a, b=b, c=c)) for a, b, c in (("NV18",) * 3, ("NV4", "SYS", "SYS"))]
    assert [each.level for each in found] == ["ok", "warning"]
    assert "Some GPUs are linked by NVLink and some are not: 1 pairs by NV4, 2 pairs by SYS" in found[1].what
    assert "HSDP" in gpus.topology(MATRIX.format(a="PIX", b="SYS", c="SYS")).remedy


def test_what_links_should_give() -> None:
    assert gpus.nominal_bandwidth("NVIDIA H100 80GB HBM3", "NV18", 5, 16) == (450e9, "NVLink")
    found = gpus.nominal_bandwidth("NVIDIA L4", "PHB", 4, 16)
    assert found is not None and found[1] == "PCIe 4 x16"
    assert found[0] == pytest.approx(16e9 * 16 * 128 / 130 / 8, rel=1e-3)  # transfers a second, of which 2 in 130 frame
    assert gpus.nominal_bandwidth("another", "NV2", 4, 16) is None and gpus.nominal_bandwidth("a", "SYS", 0, 0) is None


MEASURED = {
    "ranks": 4,
    "backend": "gloo",
    "mesh_is_right": True,
    "gathered_is_right": True,
    "gathered_bytes": 2**24,
    "bytes_per_second": 1e9,
    "copy_bytes_per_second": 4e9,
}


def test_an_all_gather_is_judged() -> None:
    assert levels(exchange.judge(MEASURED)) == [("ok", "mesh"), ("ok", "exchange")]
    assert "16 MiB by gloo at 1.00 GB/s each, 25 % of what copies in memory should give (4.0 GB/s)" in only(
        [list(exchange.judge(MEASURED))[1]], "ok"
    )
    assert levels(exchange.judge({**MEASURED, "bytes_per_second": 1e8}))[1] == ("note", "exchange")
    assert levels(exchange.judge({**MEASURED, "gathered_is_right": False})) == [("problem", "exchange")]
    assert levels(exchange.judge({**MEASURED, "ranks": 1}))[1] == ("note", "exchange")
    nccl = {**MEASURED, "backend": "nccl", "bytes_per_second": 100e9}
    assert [exchange.speed(nccl, each).level for each in ((450e9, "NVLink"), (150e9, "NVLink"), None)] == [
        "warning",
        "ok",
        "note",
    ]


def test_a_diagnosis() -> None:
    well = Diagnosis([Finding("a", "ok", "All is well."), Finding("b", "warning", "It is slow.", "Change it.")])
    ill = Diagnosis([*well.findings, Finding("c", "problem", "x " * 90)])
    assert well.is_well and not ill.is_well
    assert (
        str(well).splitlines()[-1] == "found: 1 warning" and str(ill).splitlines()[-1] == "found: 1 problem, 1 warning"
    )
    assert "WARNING  b  It is slow." in str(well) and "> Change it." in str(well)
    assert str(Diagnosis([])).strip() == "nothing is wrong"
    assert json.loads(ill.to_json())["well"] is False
    assert max(map(len, str(ill).splitlines())) < 120


def test_training_steps_of_the_gpu_part_on_cpu() -> None:
    found = list(on_gpu.findings("cpu", width=16))
    assert {each.level for each in found[:-1]} == {"ok"} and found[-1] is on_gpu.THE_REST
    assert [each.values["way"] for each in found if each.topic == "training" and each.values] == list(on_gpu.WAYS)
    assert not torch.distributed.is_initialized()


def test_a_model_that_is_trained_wrongly_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = on_gpu.auto_shard
    monkeypatch.setattr(on_gpu, "auto_shard", lambda *a, **k: spoiled(real(*a, **k)))
    problems = [each for each in on_gpu.findings("cpu", width=16) if each.level == "problem"]
    assert len(problems) >= 3 and all("differs from the plain one" in each.what for each in problems)


def spoiled(model: Any) -> Any:
    model.set_gradient_reduction(0.5)
    return model


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu() -> None:
    assert levels(on_gpu.findings()) == [("problem", "gpu")]
    assert levels(gpus.findings()) == [("note", "gpu")]
