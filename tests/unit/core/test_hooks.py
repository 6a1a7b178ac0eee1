"""Walking trees of tensors, and the order in which autograd calls back."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.core.backward import ForwardCall, after_backward_of_inputs, before_backward_of_outputs
from fsdp2.core.trees import Replaced, map_inputs, map_tensors, tensors_anywhere_in, tensors_in
from tests.unit.helpers import for_each

Pair = namedtuple("Pair", ["a", "b"])


class Owner:
    """Of a call: ``then`` is called at its end."""

    def __init__(self, then: Callable[[], object] = lambda: None, is_recorded: bool = False) -> None:
        self.then = then
        self.is_recorded = is_recorded

    def end_call(self, ended: ForwardCall) -> bool:
        self.then()
        return self.is_recorded

    def begin_second(self) -> None: ...


@dataclass
class Output:
    logits: Tensor
    extra: list[Tensor] = field(default_factory=list)
    name: str = "output"

    def method(self) -> None: ...


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

    same, other = torch.zeros(1), torch.ones(1)
    source = {"same": [same], "frozen": Frozen(other), "list": [other], "user": UserDict(x=other)}
    mapped = map_tensors(lambda tensor: tensor * 2 if tensor is other else tensor, source)
    assert mapped is not source and mapped["same"] is source["same"]
    assert mapped["frozen"].note == "kept"
    assert [tensor.item() for tensor in tensors_in(mapped)] == [0, 2, 2, 2]
    assert [tensor.item() for tensor in tensors_in(source)] == [0, 1, 1, 1]
    assert map_tensors(lambda tensor: tensor, source) is source


@for_each("container", [UserDict, dict, MappingProxyType])
def test_every_input_meets_its_own_output(container: type) -> None:
    a, b = torch.zeros(1, requires_grad=True) * 1, torch.ones(1, requires_grad=True) * 1
    changed = after_backward_of_inputs(ForwardCall(Owner()), (container({"a": a}), b), {}, Replaced())
    assert changed is not None
    (mapping, second), _ = changed
    assert mapping["a"].item() == 0 and second.item() == 1


def test_tensors_without_gradient_are_left_out() -> None:
    assert after_backward_of_inputs(ForwardCall(Owner()), (torch.zeros(1),), {}, Replaced()) is None
    assert after_backward_of_inputs(ForwardCall(Owner()), (torch.zeros(1), 3), {"x": [None]}, Replaced()) is None


def test_a_call_is_pending_while_the_same_backward_comes_to_it() -> None:
    pending: list[list[bool]] = []
    calls = [ForwardCall(Owner(lambda: pending.append([call.is_pending() for call in calls]))) for _ in range(3)]

    def run(call: ForwardCall, x: Tensor) -> Tensor:
        changed = after_backward_of_inputs(call, (x,), {}, Replaced())
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
    call = ForwardCall(Owner(lambda: calls.append("post")))
    changed = after_backward_of_inputs(call, (x,), {"scale": x * 3}, Replaced())
    assert changed is not None
    (x_inside,), kwargs = changed
    output = Output(x_inside * weight * kwargs["scale"])
    assert before_backward_of_outputs(lambda _: calls.append("pre"), tensors_in(output), output, -1, [])
    (output.logits * 2).sum().backward()
    assert calls == ["pre", "accumulated", "post", "before the module"]


@dataclass(frozen=True)
class Fixed:
    x: Tensor


@dataclass
class State:
    x: Tensor
    history: list[Tensor] = field(default_factory=list)


def doubled(tensor: Tensor) -> Tensor:
    return tensor * 2


def test_the_callers_containers_stay_and_hold_again_what_they_held() -> None:
    tensors = [torch.tensor(float(number)) for number in range(6)]
    items, mapping, user = [tensors[0], (tensors[1],)], {"x": [tensors[2]]}, UserDict(x=tensors[3])
    state, fixed = State(tensors[4]), Fixed(tensors[5])
    replaced = Replaced()
    args, kwargs = map_inputs(doubled, (items, mapping, state), {"user": user, "fixed": fixed}, replaced)
    assert (args[0], args[1], args[2]) == (items, mapping, state) and kwargs["user"] is user
    assert kwargs["fixed"] is not fixed and kwargs["fixed"].x.item() == 10, "nobody can write into it"
    assert [each.item() for each in tensors_in((args, kwargs))] == [0, 2, 4, 8, 6, 10]
    added = torch.tensor(7.0)
    items.append(added)
    items.insert(0, items.pop(1))
    state.history.append(state.x)
    mapping["y"] = added
    replaced.take_out()
    assert items[0][0] is tensors[1] and items[1] is tensors[0] and items[2] is added
    assert mapping["x"][0] is tensors[2] and mapping["y"] is added
    assert user["x"] is tensors[3] and state.x is tensors[4] and fixed.x is tensors[5]


def test_what_was_written_in_place_stays_written() -> None:
    x, y = torch.zeros(1), torch.zeros(1)
    items = [x, y]
    replaced = Replaced()
    map_inputs(doubled, (items,), {}, replaced)
    map_inputs(doubled, (items,), {}, replaced)
    items[0].add_(1)
    replaced.take_out()
    assert items[0].item() == 1 and items[1] is y


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self, hidden: object, shown: object) -> None:
        self.__hidden = hidden
        self.shown = shown


HIDING: dict[str, Callable[[Tensor], object]] = {
    "set": lambda x: {x},
    "deque in a tuple": lambda x: (None, deque([x])),
    "slots": lambda x: Slotted(x, 3),
    "namespace in a namespace": lambda x: SimpleNamespace(inner=SimpleNamespace(x=[x])),
    "closure": lambda x: lambda: x,
    "partial": lambda x: functools.partial(torch.add, x, other=2),
    "method": lambda x: Output(x).method,
    "itself": lambda x: _cycle(x),
}


def _cycle(x: Tensor) -> list[Any]:
    items: list[Any] = [x]
    items.append(items)
    return items


@for_each("kind", HIDING)
def test_tensors_are_found_wherever_an_output_hides_them(kind: str) -> None:
    x = torch.zeros(1)
    (found,) = (each for each in tensors_anywhere_in(HIDING[kind](x)) if each is x)
    assert found is x


def test_generators_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="forward returned a generator, whose code runs when it is iterated over"):
        tensors_anywhere_in(each for each in [torch.zeros(1)])


def test_the_differentiation_of_a_recorded_backward_is_noticed_first_of_all() -> None:
    calls: list[str] = []

    class Recorded(Owner):
        def begin_second(self) -> None:
            calls.append("second")

    weight = torch.ones(2, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    x = torch.ones(2, requires_grad=True)
    call = ForwardCall(Recorded(lambda: calls.append("end"), is_recorded=True))
    changed = after_backward_of_inputs(call, (x,), {}, Replaced())
    assert changed is not None
    (slope,) = torch.autograd.grad((changed[0][0] ** 3 * weight).sum(), x, create_graph=True)
    assert calls == ["end"]
    slope.sum().backward()
    assert calls[:2] == ["end", "second"] and set(calls[2:]) == {"end", "accumulated"}


def test_an_input_that_is_passed_twice_leaves_the_others_theirs() -> None:
    a, b, c = (torch.full((1,), float(value), requires_grad=True) * 1 for value in range(3))
    changed = after_backward_of_inputs(ForwardCall(Owner()), (a, [a, b], a), {"b": b, "c": c}, Replaced())
    assert changed is not None
    (first, (second, third), fourth), named = changed
    assert first is second is fourth and third is named["b"]
    assert [first.item(), third.item(), named["c"].item()] == [0, 1, 2]
