"""Each part of the doctor, on made-up devices and environments."""

from __future__ import annotations

import json

import pytest
import torch

from fsdp2.tools import doctor
from fsdp2.tools.doctor import Diagnosis, Finding


def test_releases_of_torch() -> None:
    levels = [doctor.about_torch(each).level for each in ("2.10.1", "2.11.0", "2.15.0+cu129", "2.16.0a0", "unknown")]
    assert levels == ["problem", "ok", "ok", "warning", "problem"]
    found = {each.topic: each for each in doctor.versions()}
    assert found["torch"].values is not None and found["torch"].values["torch"] == torch.__version__
    assert "gloo" in found["backend"].what


VARIABLES: list[tuple[dict[str, str], str, str]] = [
    ({"NCCL_P2P_DISABLE": "1"}, "warning", "NCCL_P2P_DISABLE=1: GPUs of one machine exchange through the host"),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "warning", "do not overlap"),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warning", "waits for ever"),
    ({"FSDP2_COMPT": "1"}, "warning", "Did you mean 'FSDP2_COMPAT'"),
    ({"FSDP2_LOG": "everything"}, "problem", "it takes plan, order, comm, memory"),
    ({"FSDP2_COMM": "native"}, "note", "FSDP2_COMM=native. Ranks exchange by"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "problem", "RANK, WORLD_SIZE set, and MASTER_ADDR, MASTER_PORT not"),
    ({"NCCL_DEBUG": "WARN"}, "note", "Set: NCCL_DEBUG."),
]


@pytest.mark.parametrize(("environ", "level", "says"), VARIABLES, ids=[next(iter(each[0])) for each in VARIABLES])
def test_variables(environ: dict[str, str], level: str, says: str) -> None:
    assert any(each.level == level and says in each.what for each in doctor.variables(environ))


def test_variables_that_are_right() -> None:
    for environ in ({}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}):
        assert [each.level for each in doctor.variables(environ)] == ["ok"]


def test_memory_that_others_use() -> None:
    assert doctor.memory_of("cuda:0 (H100)", 79 * 2**30, 80 * 2**30).level == "ok"
    found = doctor.memory_of("cuda:0 (H100)", 40 * 2**30, 80 * 2**30)
    assert found.level == "warning" and "40 GiB of cuda:0 (H100)'s 80 GiB are in use" in found.what


def test_what_is_said_of_an_exchange() -> None:
    found = {"ranks": 2, "backend": "gloo", "is_right": True, "gathered_bytes": 2**24, "bytes_per_second": 1.5e9}
    assert "2 ranks made a mesh, and gathered 16 MiB by gloo at 1.50 GB/s" in doctor.judge(found).what
    assert doctor.judge({**found, "is_right": False}).level == "problem"
    assert doctor.judge({**found, "ranks": 1}).level == "note"


def test_a_diagnosis_as_text_and_as_json() -> None:
    found = Diagnosis([Finding("torch", "ok", "right"), Finding("variables", "problem", "wrong", "Unset it.")])
    assert "PROBLEM  variables  wrong\n" in str(found) and "> Unset it." in str(found)
    assert str(found).endswith("found: 1 problem") and not found.is_well
    assert json.loads(found.to_json())["findings"][1]["remedy"] == "Unset it."
    assert str(Diagnosis(found.findings[:1])).endswith("nothing is wrong")
