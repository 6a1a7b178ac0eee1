"""What is a container of tensors, and what is a class of the program's, which is neither read nor written."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2.core.trees import Replaced, map_inputs, map_tensors, tensors_anywhere_in, tensors_in
from tests.unit.helpers import for_each

Pair = namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Record:
    x: Any
    other: Any = None


@dataclasses.dataclass(eq=False)
class Module(nn.Module):
    """A module that is a dataclass: its weight is a field."""

    weight: nn.Parameter

    def __post_init__(self) -> None:
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" in self.__dict__:
            super().__setattr__(name, value)
        else:
            self.__dict__[name] = value


class ReadOnly(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("it cannot be written")


class OnlyAppends(list):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("it only appends")


class Both(tuple):  # type: ignore[type-arg]
    def __new__(cls, one: Any, other: Any) -> Both:
        return super().__new__(cls, (one, other))


class Named(Pair):
    """With attributes."""


class Reordering(OrderedDict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)


class Decoding(Mapping):  # type: ignore[type-arg]
    """Reading it takes long, and may fail."""

    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError("it was read")

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("it was read")

    def __len__(self) -> int:
        return 1


CLASSES: list[Callable[[Tensor], Any]] = [
    lambda x: Module(nn.Parameter(x)),
    lambda x: ReadOnly(x=x),
    lambda x: OnlyAppends([x]),
    lambda x: Both(x, x),
    lambda x: Named(x, x),
    lambda x: Reordering(x=x, y=x),
    lambda x: Decoding(),
]

CONTAINERS: list[Callable[[Tensor], Any]] = [
    lambda x: [x],
    lambda x: (x, 1),
    lambda x: {"x": x},
    lambda x: Pair(x, None),
    lambda x: OrderedDict(x=x),
    lambda x: defaultdict(list, x=x),
    lambda x: UserDict(x=x),
    lambda x: Record(x),
    lambda x: {"deep": [(Record([x]),)]},
]


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


@for_each("make", CLASSES)
def test_objects_of_the_programs_classes_go_through_unread_and_unwritten(make: Callable[[Tensor], Any]) -> None:
    value = make(torch.ones(2))
    replaced = Replaced()
    (mapped, inside), _ = map_inputs(double, (value, [value]), {}, replaced)
    assert mapped is value and inside[0] is value and not replaced.containers
    assert not list(tensors_in(value))
    tensors_anywhere_in(value)


@for_each("make", CONTAINERS)
def test_containers_are_mapped_in_their_own_type_and_written_ones_are_restored(make: Callable[[Tensor], Any]) -> None:
    x = torch.ones(2)
    value = make(x)
    mapped = map_tensors(double, value)
    assert type(mapped) is type(value)
    assert [each.sum().item() for each in tensors_in(mapped)] == [4] and next(tensors_in(value)) is x
    replaced = Replaced()
    map_tensors(double, value, replaced)
    replaced.take_out()
    assert next(tensors_in(value)) is x


def test_one_object_is_mapped_once_wherever_it_is() -> None:
    x, shared = torch.ones(1), [torch.ones(1)]
    x.note = "kept"  # type: ignore[attr-defined]
    (first, second, inside), named = map_inputs(double, (x, x, (x, shared)), {"c": x, "s": shared}, Replaced())
    assert first is second is inside[0] is named["c"] and first.note == "kept"
    assert inside[1] is named["s"] is shared and shared[0].item() == 2


def test_what_contains_itself_has_an_end() -> None:
    one, other = Record(torch.ones(1)), Record(torch.ones(1))
    one.other, other.other = other, one
    assert len(list(tensors_in(one))) == 2
    replaced = Replaced()
    assert map_tensors(double, one, replaced) is one and other.x.item() == 2
    replaced.take_out()
    assert one.x.item() == other.x.item() == 1
