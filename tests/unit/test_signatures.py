"""Every call that the installed torch takes, ours takes: names, order, kinds and defaults of all arguments.

Ours may have more, and newer, names; then with defaults.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp2
from tests.harness import torch_api
from tests.harness.torch_api import assert_takes_the_same
from tests.unit.helpers import for_each

FUNCTIONS = sorted(torch_api.functions())
CLASSES = sorted(torch_api.classes())
METHODS = [(name, method) for name, cls in torch_api.classes().items() for method in torch_api.methods(cls)]
DATACLASSES = [name for name, cls in torch_api.classes().items() if dataclasses.is_dataclass(cls)]


def test_every_public_name_is_there() -> None:
    missing = set(torch_api.public_names()) - set(vars(fsdp2))
    assert not missing
    assert set(torch_api.public_names()) <= set(fsdp2.__all__)


@for_each("name", FUNCTIONS)
def test_functions_take_the_same_arguments(name: str) -> None:
    assert_takes_the_same(torch_api.functions()[name], getattr(fsdp2, name))


@for_each(("name", "method"), METHODS)
def test_methods_take_the_same_arguments(name: str, method: str) -> None:
    assert_takes_the_same(getattr(torch_api.classes()[name], method), getattr(getattr(fsdp2, name), method))


@for_each("name", CLASSES)
def test_constructors_take_the_same_arguments(name: str) -> None:
    assert_takes_the_same(torch_api.classes()[name], getattr(fsdp2, name))


@for_each("name", CLASSES)
def test_classes_derive_from_one_another_alike(name: str) -> None:
    theirs, ours = torch_api.classes()[name], getattr(fsdp2, name)
    bases = [base for base in torch_api.classes() if issubclass(theirs, torch_api.classes()[base])]
    assert all(issubclass(ours, getattr(fsdp2, base)) for base in bases), bases


@for_each("name", DATACLASSES)
def test_dataclasses_are_dataclasses_with_the_same_fields_first(name: str) -> None:
    theirs, ours = torch_api.classes()[name], getattr(fsdp2, name)
    assert dataclasses.is_dataclass(ours)
    expected = [field.name for field in dataclasses.fields(theirs)]
    assert [field.name for field in dataclasses.fields(ours)][: len(expected)] == expected


@for_each("name", CLASSES)
def test_properties_are_there(name: str) -> None:
    ours = getattr(fsdp2, name)
    assert [each for each in torch_api.properties(torch_api.classes()[name]) if not hasattr(ours, each)] == []


@for_each("name", ["Comm", "AllGather", "ReduceScatter"])
def test_the_same_methods_are_abstract(name: str) -> None:
    theirs, ours = torch_api.classes()[name], getattr(fsdp2, name)
    assert ours.__abstractmethods__ == theirs.__abstractmethods__ != frozenset()


@for_each(
    "policy",
    [fsdp2.MixedPrecisionPolicy(), fsdp2.OffloadPolicy(), fsdp2.CPUOffloadPolicy(), fsdp2.DataParallelMeshDims("dp")],
)
def test_policies_are_frozen(policy: Any) -> None:
    """`fully_shard` has read them: a change would do nothing."""
    for name in [field.name for field in dataclasses.fields(policy)] or ["anything"]:
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):  # TypeError: of slots, on some versions
            setattr(policy, name, None)


@for_each("field", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_policies_refuse_dtypes_that_lose_values(field: str) -> None:
    with pytest.raises(fsdp2.FSDPValueError, match=field):
        fsdp2.MixedPrecisionPolicy(**{field: torch.int32})
    with pytest.raises(fsdp2.FSDPTypeError, match=field):
        fsdp2.MixedPrecisionPolicy(**{field: "bfloat16"})


# Each differs from ``takes(a, *, b=1)`` in one thing.
DIFFERENT: dict[str, Callable[..., Any]] = {
    "name": lambda other, *, b=1: None,
    "order": lambda c=0, a=0, *, b=1: None,
    "kind": lambda a, b=1: None,
    "default": lambda a, *, b=2: None,
    "type of default": lambda a, *, b=True: None,
    "missing": lambda a: None,
    "more": lambda a, *, b=1, c: None,
}


@for_each("difference", list(DIFFERENT))
def test_the_comparison_notices(difference: str) -> None:
    def takes(a: int, *, b: int = 1) -> None: ...

    assert_takes_the_same(takes, lambda a, c=0, *, b=1, d=2: None)
    with pytest.raises(AssertionError):
        assert_takes_the_same(takes, DIFFERENT[difference])


def test_settings_that_take_keywords_only_refuse_positions() -> None:
    """By the way they are declared: what `recurse` is to all setters but one."""
    for method in ("set_requires_gradient_sync", "set_reshard_after_backward", "set_keep_unsharded_storage"):
        parameter = inspect.signature(getattr(fsdp2.FSDPModule, method)).parameters["recurse"]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(fsdp2.FSDPModule.set_reshard_after_forward).parameters
    assert parameters["recurse"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
