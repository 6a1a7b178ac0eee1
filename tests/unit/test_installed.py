"""What sharding does to the process is undone by `uninstall`, and done again by the next `fully_shard`."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer

import fsdp2
from fsdp2.api import installed
from tests.harness import FakeWorlds


def found() -> dict[str, object]:
    """What is looked at, of all that the lines of `install_once` name."""
    return {
        "operators": dict(DTensor._op_dispatcher._custom_op_handlers),
        "backward": torch.autograd._engine_run_backward,
        "trunc_normal_": getattr(nn.init, "_no_grad_trunc_normal_", nn.init.trunc_normal_),
        "excepthook": sys.excepthook,
        "zero_grad": (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad),
        "steps": (dict(optimizer._global_optimizer_pre_hooks), dict(optimizer._global_optimizer_post_hooks)),
        "logger": (logging.getLogger("fsdp2.plan").level, list(logging.getLogger("fsdp2").handlers)),
    }


def test_all_that_is_installed_is_taken_back(simulate: FakeWorlds, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(2)
    monkeypatch.setenv("FSDP2_LOG", "plan")
    installed.uninstall()
    before = found()
    for _ in range(2):
        fsdp2.fully_shard(nn.Linear(4, 4))
        meanwhile = found()
        assert not [name for name in before if before[name] == meanwhile[name]]
        fsdp2.fully_shard(nn.Linear(4, 4))
        assert found() == meanwhile
        installed.uninstall()
        assert found() == before
    monkeypatch.delenv("FSDP2_LOG")
    installed.install_once()


def test_what_others_have_put_over_it_stays(simulate: FakeWorlds, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(2)
    fsdp2.fully_shard(nn.Linear(4, 4))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "excepthook", lambda *_: None)
        theirs = sys.excepthook
        installed.uninstall()
        assert sys.excepthook is theirs
    installed.install_once()
