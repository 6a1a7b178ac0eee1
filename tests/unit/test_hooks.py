"""Walking trees of tensors, and the order in which autograd calls back."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from fsdp2.runtime.hooks import (
    ForwardCall,
    after_backward_of_inputs,
    before_backward_of_outputs,
    map_tensors,
    tensors_in,
)

Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Output:
    logits: Tensor
    extra: list[Tensor] = field(default_factory=list)
    name: str = "output"


def tree(make) -> object:  # type: ignore[no-untyped-def]
    return {
        "pair": Pair(make(), 3),
        "list": [make(), None, "text"],
        "ordered": OrderedDict(x=make()),
        "data": Output(make(), [make()]),
    }


def test_every_kind_of_container_is_walked_and_rebuilt() -> None:
    source = tree(lambda: torch.zeros(1, requires_grad=True))
    assert len(list(tensors_in(source))) == 5
    mapped = map_tensors(lambda tensor: tensor + 1, source)
    assert all(tensor.item() == 1 for tensor in tensors_in(mapped))
    assert isinstance(mapped["pair"], Pair) and isinstance(mapped["ordered"], OrderedDict)
    assert mapped["data"].name == "output" and mapped["list"][1:] == [None, "text"]
    assert all(tensor.item() == 0 for tensor in tensors_in(source))


def test_containers_are_copied_only_where_something_changes() -> None:
    @dataclass(frozen=True)
    class Frozen:
        x: Tensor
        note: str = "kept"

    class Tagged(list[Tensor]):
        tag = ""

    same, other = torch.zeros(1), torch.ones(1)
    tagged = Tagged([other])
    tagged.tag = "kept"
    source = {"same": [same], "frozen": Frozen(other), "tagged": tagged, "user": UserDict(x=other)}
    mapped = map_tensors(lambda tensor: tensor * 2 if tensor is other else tensor, source)
    assert mapped is not source and mapped["same"] is source["same"]
    assert mapped["frozen"].note == "kept" and mapped["tagged"].tag == "kept"
    assert [tensor.item() for tensor in tensors_in(mapped)] == [0, 2, 2, 2]
    assert [tensor.item() for tensor in tensors_in(source)] == [0, 1, 1, 1]
    assert map_tensors(lambda tensor: tensor, source) is source


@pytest.mark.parametrize("container", [UserDict, dict, MappingProxyType], ids=lambda each: each.__name__)
def test_every_input_meets_its_own_output(container: type) -> None:
    a, b = torch.zeros(1, requires_grad=True) * 1, torch.ones(1, requires_grad=True) * 1
    changed = after_backward_of_inputs(ForwardCall(lambda: None), (container({"a": a}), b), {})
    assert changed is not None
    (mapping, second), _ = changed
    assert mapping["a"].item() == 0 and second.item() == 1


def test_tensors_without_gradient_are_left_out() -> None:
    assert after_backward_of_inputs(ForwardCall(lambda: None), (torch.zeros(1),), {}) is None
    assert after_backward_of_inputs(ForwardCall(lambda: None), (torch.zeros(1), 3), {"x": [None]}) is None


def test_a_call_is_pending_while_the_same_backward_comes_to_it() -> None:
    pending: list[list[bool]] = []
    calls = [ForwardCall(lambda: pending.append([call.is_pending() for call in calls])) for _ in range(3)]

    def run(call: ForwardCall, x: Tensor) -> Tensor:
        changed = after_backward_of_inputs(call, (x,), {})
        assert changed is not None
        return changed[0][0] * 2

    x = torch.ones(1, requires_grad=True) * 1
    kept = run(calls[0], x)
    output = run(calls[2], run(calls[1], x))
    for _ in range(2):
        output.sum().backward(retain_graph=True)
        assert pending == [[False, True, False], [False, False, False]]
        pending.clear()
    assert kept.grad_fn is not None


def test_callbacks_frame_the_backward_of_what_lies_between() -> None:
    calls: list[str] = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    x = torch.ones(3, requires_grad=True) * 2
    x.register_hook(lambda _: calls.append("before the module"))
    changed = after_backward_of_inputs(ForwardCall(lambda: calls.append("post")), (x,), {"scale": x * 3})
    assert changed is not None
    (x_inside,), kwargs = changed
    output = Output(x_inside * weight * kwargs["scale"])
    before_backward_of_outputs(lambda _: calls.append("pre"), output)
    (output.logits * 2).sum().backward()
    assert calls == ["pre", "accumulated", "post", "before the module"]
