"""`FSDPRoot`: when an iteration begins, ends or has failed, what it learns; and which of several roots has a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import FSDPRuntimeError, fully_shard
from fsdp2.core import several_roots
from fsdp2.core.failure import recover_if_failed, reset
from fsdp2.core.root import FSDPRoot
from fsdp2.core.several_roots import claim, refuse_busy, release, roots_of, supersede
from fsdp2.core.state import state_of
from tests.harness import fake_world
from tests.harness.internals import groups_of

INPUT = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """This process is the first of two ranks."""
    with fake_world(2):
        yield


class Failing(nn.Module):
    """Raises in its forward, or in its backward, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise ValueError("in forward")
        output = self.layer(x)
        if self.fails == "backward":
            output.register_hook(self._fail)
        return output

    @staticmethod
    def _fail(gradient: Tensor) -> None:
        raise ValueError("in backward")


def build() -> tuple[nn.Sequential, FSDPRoot]:
    """Three sharded blocks, the second a `Failing`, below a root without parameters, and that root."""
    model = nn.Sequential(nn.Linear(4, 4), Failing(), nn.Linear(4, 4))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    state = state_of(model)
    assert state is not None
    return model, state.ensure_root()


def phases(model: nn.Module) -> list[str]:
    return [group.phase.name for group in groups_of(model)]


# ---- an iteration ------------------------------------------------------------------------------------------


def test_an_iteration_begins_with_the_roots_forward_and_ends_with_its_backward() -> None:
    model, root = build()
    seen: list[tuple[bool, bool]] = []
    model[1].layer.register_forward_hook(
        lambda *_: seen.append((root.iteration.in_forward, root.iteration.in_backward))
    )
    first = root.iteration
    loss = model(INPUT).sum()
    assert seen == [(True, False)] and not root.is_running()
    assert root.iteration is first and not first.in_forward
    loss.backward()
    assert root.iteration is not first, "all state of an iteration goes with it"
    assert not root.is_running() and not root.iteration.in_backward and not root.iteration.reduced
    assert phases(model) == ["SHARDED"] * 3


def test_in_backward_the_root_runs() -> None:
    model, root = build()
    seen: list[tuple[bool, bool]] = []

    def note(gradient: Tensor) -> None:
        seen.append((root.iteration.in_backward, root.is_running()))

    x = INPUT.clone().requires_grad_()
    x.register_hook(note)
    model(x).sum().backward()
    assert seen == [(True, True)]


NONE = [[False] * 3] * 3
NEXT = [[False, True, False], [False, False, True], [False] * 3]


def gathered_ahead(model: nn.Module) -> list[list[bool]]:
    """In one forward, after each block was resharded: which blocks are unsharded, or on their way."""
    seen: list[list[bool]] = []
    handles = [
        block.register_forward_hook(lambda *_: seen.append([phase != "SHARDED" for phase in phases(model)]))
        for block in model
    ]
    output = model(INPUT)
    for handle in handles:
        handle.remove()
    if output.requires_grad:
        output.sum().backward()
    return seen


def test_the_next_block_is_gathered_ahead_once_an_order_was_learned() -> None:
    model, _ = build()
    assert gathered_ahead(model) == NONE
    assert gathered_ahead(model) == gathered_ahead(model) == NEXT


def test_an_order_is_learned_by_a_backward_that_reduced_and_by_no_other() -> None:
    model, _ = build()
    model.set_requires_gradient_sync(False)
    assert gathered_ahead(model) == gathered_ahead(model) == NONE
    model.set_requires_gradient_sync(True)
    assert [gathered_ahead(model), gathered_ahead(model)] == [NONE, NEXT]


def test_an_evaluation_learns_an_order_of_its_own_at_its_end() -> None:
    model, _ = build()
    with torch.no_grad():
        assert [gathered_ahead(model), gathered_ahead(model)] == [NONE, NEXT]
    assert [gathered_ahead(model), gathered_ahead(model)] == [NONE, NEXT]
    assert phases(model) == ["SHARDED"] * 3, "what was gathered in vain is dropped"


# ---- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_the_next_iteration_starts_clean(where: str) -> None:
    model, root = build()
    model(INPUT).sum().backward()
    model[1].fails = where
    with pytest.raises(ValueError, match=f"in {where}"):
        model(INPUT).sum().backward()
    failed = root.iteration
    model[1].fails = ""
    recover_if_failed(root)
    assert root.iteration is not failed and not root.is_running()
    assert phases(model) == ["SHARDED"] * 3
    before = root.iteration
    recover_if_failed(root)
    assert root.iteration is before, "there is nothing left to recover from"
    model.zero_grad()
    model(INPUT).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_failed_forward_keeps_the_gradients_of_earlier_microbatches() -> None:
    model, _ = build()
    model.set_requires_gradient_sync(False)
    model(INPUT).sum().backward()
    model[1].fails = "forward"
    with pytest.raises(ValueError, match="in forward"):
        model(INPUT)
    model[1].fails = ""
    model.set_requires_gradient_sync(True)
    model(INPUT).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_reset_that_loses_gradients_warns_only_where_nobody_asked_for_it() -> None:
    model, root = build()
    model.set_requires_gradient_sync(False)
    model(INPUT).sum().backward()
    reset(root)
    model(INPUT).sum().backward()
    with pytest.warns(UserWarning, match="gradients that earlier microbatches had accumulated"):
        reset(root, warns=True)
    reset(root, warns=True)  # nothing was left to lose


# ---- several roots -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeRoot:
    """As much of a root as claims ask of it."""

    name: str
    owner: Any = None
    runs: bool = False
    is_disturbed: bool = False
    recovered: int = 0
    dissolved: int = 0

    def is_running(self) -> bool:
        return self.runs

    def dissolve(self) -> None:
        self.dissolved += 1


@dataclass(eq=False)
class FakeState:
    """As much of a state."""

    class_name: str = "Block"
    root: Any = None
    roots: list[Any] = field(default_factory=list)
    own_root: Any = None
    is_root: bool = False


def test_a_claim_takes_states_and_disturbs_whoever_had_them() -> None:
    owners, shared = [FakeState(), FakeState()], FakeState()
    first, second = FakeRoot("First", owners[0]), FakeRoot("Second", owners[1])
    claim(first, [owners[0], shared])  # type: ignore[arg-type]
    assert owners[0].is_root and not shared.is_root and shared.root is first
    claim(second, [owners[1], shared])  # type: ignore[arg-type]
    assert shared.root is second and shared.roots == [first, second]
    assert first.is_disturbed and not second.is_disturbed and owners[0].root is first
    assert roots_of([*owners, shared]) == [first, second]
    claim(first, [shared])  # type: ignore[arg-type]
    assert shared.root is first and shared.roots == [first, second] and second.is_disturbed and not first.is_disturbed


def test_a_release_leaves_the_states_to_the_other_roots_which_notice() -> None:
    owner, shared = FakeState(), FakeState()
    first, second = FakeRoot("First", owner), FakeRoot("Second", FakeState())
    claim(second, [shared])  # type: ignore[arg-type]
    claim(first, [owner, shared])  # type: ignore[arg-type]
    owner.own_root = first
    second.is_disturbed = False
    release(first, [owner, shared])  # type: ignore[arg-type]
    assert owner.own_root is None and owner.root is None and shared.root is None and shared.roots == [second]
    assert second.is_disturbed, "it must claim them again before its next forward"


def test_a_state_that_another_root_uses_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def recover(root: FakeRoot) -> None:
        root.recovered += 1

    monkeypatch.setattr(several_roots, "recover_if_failed", recover)
    state, busy = FakeState(), FakeRoot("Other", runs=True)
    state.roots = [busy]
    refuse_busy("Model", {state: "encoder"}, busy)  # type: ignore[arg-type]
    assert busy.recovered == 0, "its own root is not asked"
    with pytest.raises(FSDPRuntimeError, match=r"Model begins a forward, but its submodule 'encoder' .*used by Other"):
        refuse_busy("Model", {state: "encoder"}, None)  # type: ignore[type-var]
    assert busy.recovered == 1, "a root that has failed is recovered first"
    busy.runs = False
    refuse_busy("Model", {state: "encoder"}, None)  # type: ignore[type-var]


def test_states_that_were_roots_are_none_below_another() -> None:
    former, other = FakeState(own_root=FakeRoot("Former")), FakeState()
    supersede([former, other])
    assert former.own_root.dissolved == 1
