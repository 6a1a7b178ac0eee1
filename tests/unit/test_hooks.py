"""Walking trees of tensors, and the order in which autograd calls back."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp2.hooks import after_backward_of_inputs, before_backward_of_outputs, collect_tensors, map_tensors

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
    assert len(collect_tensors(source)) == 5
    mapped = map_tensors(lambda tensor: tensor + 1, source)
    assert all(tensor.item() == 1 for tensor in collect_tensors(mapped))
    assert isinstance(mapped["pair"], Pair) and isinstance(mapped["ordered"], OrderedDict)
    assert mapped["data"].name == "output" and mapped["list"][1:] == [None, "text"]
    assert all(tensor.item() == 0 for tensor in collect_tensors(source))


def test_tensors_without_gradient_are_left_out() -> None:
    assert collect_tensors((torch.zeros(1), torch.ones(1, dtype=torch.int64))) == []
    assert after_backward_of_inputs(lambda: None, (torch.zeros(1),), {}) is None


def test_callbacks_frame_the_backward_of_what_lies_between() -> None:
    calls: list[str] = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    x = torch.ones(3, requires_grad=True) * 2
    x.register_hook(lambda _: calls.append("before the module"))
    changed = after_backward_of_inputs(lambda: calls.append("post"), (x,), {"scale": x * 3})
    assert changed is not None
    (x_inside,), kwargs = changed
    output = Output(x_inside * weight * kwargs["scale"])
    before_backward_of_outputs(lambda _: calls.append("pre"), output)
    (output.logits * 2).sum().backward()
    assert calls == ["pre", "accumulated", "post", "before the module"]
