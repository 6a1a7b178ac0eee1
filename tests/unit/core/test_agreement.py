"""What is checked when a root forms, and what ranks say of their differences. The other rank is simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPRuntimeError, fully_shard
from fsdp2.core import agreement
from fsdp2.core.agreement import (
    Number,
    compared_over,
    disagreement,
    refuse_finalization,
    refuse_list_as_root,
    refuse_meta,
    refuse_unowned_parameters,
    settings_of,
)
from fsdp2.core.mesh import DataParallelMesh, FSDPMeshInfo, default_mesh
from fsdp2.core.options import RootSettings
from fsdp2.core.plan import fingerprint
from fsdp2.core.state import states_below
from tests.harness import fake_world
from tests.harness.internals import groups_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_world(2):
        yield


def the_mesh() -> DataParallelMesh:
    return DataParallelMesh.from_info(FSDPMeshInfo(default_mesh(), 0))


@contextlib.contextmanager
def beside(*others: tuple[str, int]) -> Iterator[list[str]]:
    """The other rank says these, one after the other, with these numbers. Yields what exchanges are labelled."""
    labels, said = [], list(others)

    class Exchange:
        label: Any = None

        def compare(self, everyone: Tensor, mine: Tensor) -> None:
            labels.append(self.label.text)
            self.theirs, number = said.pop(0)
            everyone.copy_(torch.cat([mine, torch.tensor([fingerprint(self.theirs), number])]))

    exchange = Exchange()

    def all_gather_object(found: list[str], mine: str, group: Any) -> None:
        found[:] = [mine, exchange.theirs]

    with (
        mock.patch.object(agreement, "of_backend", lambda group, device: exchange),
        mock.patch.object(dist, "all_gather_object", all_gather_object),
    ):
        yield labels
    assert not said, "so many exchanges"


def test_ranks_that_say_the_same_agree_after_one_exchange() -> None:
    with beside(("a\nb", 0)) as labels:
        assert disagreement("a\nb", dist.group.WORLD, CPU, "the plans") is None
    assert labels == ["the comparison of the plans"]


def test_the_difference_is_the_lines_that_differ() -> None:
    with beside(("a\nB\nc", 0)):
        found = disagreement("a\nb\nc", dist.group.WORLD, CPU)
    assert found is not None
    assert [line for line in found.splitlines() if line[0] in "+-"] == ["--- rank 0", "+++ rank 1", "-b", "+B"]


def test_a_rank_that_is_alone_exchanges_nothing() -> None:
    with beside():
        assert disagreement("a", None, CPU) is None and disagreement("a", dist.new_group([0]), CPU) is None
        assert compared_over([], lambda mesh: "a", "the plans", 5) == ("", 5, False)


@pytest.mark.parametrize(("theirs", "highest", "differ"), [(5, 5, False), (7, 7, True), (2, 5, True)])
def test_the_highest_number_is_taken_and_whether_they_differ(theirs: int, highest: int, differ: bool) -> None:
    """Numbers travel beside what is compared: four times each, for two more bits."""
    with beside(("plan\n", 4 * theirs)):
        assert compared_over([the_mesh()], lambda mesh: "plan", "the plans", 5) == ("", highest, differ)
    with beside(("plan\n", 4 * 5 + 2)):  # another rank has found that they differ
        assert compared_over([the_mesh()], lambda mesh: "plan", "the plans", 5) == ("", 5, True)


def test_modules_of_a_kind_are_numbered_and_those_to_come_begin_above_what_was_agreed() -> None:
    kind, mesh = (f"{__name__}.Net", 1), the_mesh()
    first, second = Number(kind), Number(kind)
    assert (first.value, second.value, Number((f"{__name__}.Other", 1)).value) == (0, 1, 0)
    first.agree(0, False, mesh)
    place = f"{kind[0]} is number 2 of 2 of its kind, by the order of fully_shard\n"
    with beside((place, 0)):  # this rank had made fewer before, but its order is the same
        second.agree(6, True, mesh)
    assert (second.value, Number(kind).value) == (6, 7)


def test_ranks_that_run_another_module_than_their_order_said_before_are_refused() -> None:
    kind, mesh = (f"{__name__}.Swapped", 1), the_mesh()
    first, second = Number(kind), Number(kind)
    first.agree(0, False, mesh)
    place = f"{kind[0]} is number 1 of 2 of its kind, by the order of fully_shard\n"
    with (
        beside((place, 0), ("False\n", 0), ("2 True\n", 0)),
        pytest.raises(FSDPRuntimeError, match=r"the ranks run different modules of the class .*Swapped"),
    ):
        second.agree(1, True, mesh)


def test_a_trainable_parameter_of_no_group_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    params = [param for group in groups_of(model) for param in group.params]
    refuse_unowned_parameters([model], "Net", params, ())
    late, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    model[1].frozen = frozen
    model[1].late = late
    refuse_unowned_parameters([model], "Net", params, {late})
    with pytest.raises(FSDPRuntimeError, match=r"parameter '1\.late' of Net was added after fully_shard"):
        refuse_unowned_parameters([model], "Net", params, ())


def test_what_is_on_meta_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    fully_shard(model[0])
    with pytest.raises(FSDPRuntimeError, match=r"parameters and buffers .*: 0\.weight, 0\.bias, 1\.running_mean"):
        refuse_meta([model], "Net")
    model.to_empty(device="cpu")
    refuse_meta([model], "Net")


def blocks() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model._get_fsdp_state().ensure_root()
    return model


def test_what_was_set_is_a_line_for_each_module_and_group_it_is_set_on() -> None:
    model = blocks()
    groups = groups_of(model)

    def lines() -> list[str]:
        return [each.line for each in settings_of(states_below(model), groups, RootSettings())]

    assert lines() == []
    model[0].set_gradient_divide_factor(3.0)
    model[1].set_reshard_after_backward(False)
    assert lines() == [
        "module '1': set reshard_after_backward=False",
        "group '0': set divide_factor=3.0",
    ]


def test_a_backward_is_finalized_by_the_root_alone_where_it_was_said_to_be() -> None:
    model = blocks()
    root = model._get_fsdp_state().ensure_root()
    with pytest.raises(FSDPRuntimeError, match=r"must be called on the root, .*, not on '0'"):
        refuse_finalization(root, "0", is_root=False)
    with pytest.raises(FSDPRuntimeError, match="needs set_manual_backward_finalization"):
        refuse_finalization(root, "", is_root=True)
    model.set_manual_backward_finalization(True)
    refuse_finalization(root, "", is_root=True)
    root.iteration.in_backward = True
    with pytest.raises(FSDPRuntimeError, match="after backward has ended"):
        refuse_finalization(root, "", is_root=True)


def test_a_list_of_modules_is_no_root() -> None:
    refuse_list_as_root([nn.Linear(2, 2)])
    with pytest.raises(FSDPRuntimeError, match=r"a list of modules \(Linear, ReLU\)"):
        refuse_list_as_root([nn.Linear(2, 2), nn.ReLU()])
