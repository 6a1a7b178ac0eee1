"""A reduction between its stops: what it still holds, and what an exception there leaves."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.core import transport
from fsdp2.core.streams import FSDPCommContext, HostDevice, PendingReduce
from fsdp2.core.transport import Native
from tests.harness.fake import fake_world
from tests.harness.internals import groups_of


def test_what_was_sent_is_let_go_of_before_the_all_reduce_over_replicas() -> None:
    sent: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []
    scatter, reduce = Native.reduce_scatter, transport.all_reduce

    def scattered(self: Native, members: Any, *args: Any) -> None:
        sent.extend(weakref.ref(input) for _, input in members)
        scatter(self, members, *args)

    def reduced(*args: Any) -> None:
        alive.extend(each() is not None for each in sent)
        reduce(*args)

    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fsdp2.fully_shard(nn.Linear(8, 8), mesh=mesh)
        with (
            mock.patch.object(Native, "reduce_scatter", scattered),
            mock.patch.object(transport, "all_reduce", reduced),
        ):
            model(torch.ones(2, 8)).sum().backward()
    assert alive and not any(alive)


def test_an_exception_before_anything_was_launched() -> None:
    comm = FSDPCommContext(HostDevice())
    comm.add_pending(PendingReduce(HostDevice()))  # as Ctrl-C leaves it there
    comm.drop_reduces()
    assert not comm._pending


def test_a_hook_that_raises_leaves_no_reduction_under_way() -> None:
    def raises(_: torch.Tensor) -> None:
        raise ValueError("the user's")

    with fake_world(2):
        model = fsdp2.fully_shard(nn.Linear(4, 4))
        model.set_all_reduce_hook(raises)
        with pytest.raises(ValueError, match="the user's"):
            model(torch.ones(2, 4)).sum().backward()
        assert not groups_of(model)[0].reducer.is_reducing


def test_groups_that_are_set_alike_share_their_settings() -> None:
    with fake_world(2):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for block in model:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
        model.set_requires_gradient_sync(False)
        model[0].set_requires_all_reduce(True)
        first, *others = (group.settings for group in groups_of(model))
        assert len({*map(id, others)}) == 1 and first is not others[0]
        assert all(group.settings is group.reducer.settings for group in groups_of(model))
        assert not first.requires_gradient_sync and first.requires_all_reduce


def test_a_layout_that_cannot_be_changed_leaves_the_settings_as_they_were() -> None:
    with fake_world(2):
        model = fsdp2.fully_shard(nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        (group,) = groups_of(model)
        before = group.settings
        with (
            mock.patch.object(type(group.reducer), "lay_out", side_effect=fsdp2.FSDPRuntimeError("gradients wait")),
            pytest.raises(fsdp2.FSDPRuntimeError, match="gradients wait"),
        ):
            model.set_force_sum_reduction_for_comms(True)
        assert group.settings is before and group.reducer.settings is before
