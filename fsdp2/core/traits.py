"""What a program has made of a parameter: its attributes, class and hooks. All forms of the parameter get them."""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _torch

OWN = (
    "_is_param",
    "_fsdp_param",
    "_fsdp_successor",
    "_fsdp_former",
    "_fsdp_delivered",
    "share_memory_",
    "__deepcopy__",
    "__reduce_ex__",
)
"""Attributes of parameters that torch or this package sets, not the user."""

Traits = tuple[dict[str, Any], type[nn.Parameter]]
"""The attributes that a program has set on a parameter, and the parameter's class."""


def traits_of(parameter: nn.Parameter) -> Traits:
    """The attributes that a program has set on ``parameter``, and its class (`nn.Parameter` if that cannot be kept)."""
    attributes = {name: value for name, value in parameter.__dict__.items() if name not in OWN}
    if attributes and type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor):
        with _torch.without_grad():
            for name in vars(parameter.detach()):  # a tensor subclass has attributes that make it up
                attributes.pop(name, None)
    kind = getattr(type(parameter), "_fsdp_class", type(parameter))
    is_kept = nn.Parameter in kind.__mro__ and (kind is not type(parameter) or not loses_its_class(kind))
    return attributes, kind if is_kept else nn.Parameter


def give_traits(traits: Traits, successor: nn.Parameter) -> None:
    """Give ``successor`` the ``traits`` of another parameter."""
    attributes, kind = traits
    successor.__dict__.update(attributes)
    if kind is not nn.Parameter and not isinstance(successor, kind):
        of_successor: Any = _sharded_class(type(successor), kind) if isinstance(successor, DTensor) else kind
        successor.__class__ = of_successor


@functools.cache
def loses_its_class(kind: type) -> bool:
    """Whether ``kind`` is a program's class of parameters that the sharded and unsharded forms cannot have.

    This is so if it has slots, or overrides what tensors do: the other forms are tensors over other memory.
    """
    classes = kind.__mro__
    if nn.Parameter not in classes:
        return False
    own = {name for each in classes[: classes.index(nn.Parameter)] for name in vars(each)}
    return "__slots__" in own or not own.intersection(dir(DTensor)) <= _OF_ANY_CLASS


_OF_ANY_CLASS = frozenset(vars(type("Any", (), {}))) | {"__init__", "__new__", "__repr__", "__annotations__"}


@functools.cache
def _sharded_class(own: type[DTensor], kind: type[nn.Parameter]) -> type[DTensor]:
    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        self.__class__ = own  # torch knows how to copy this class
        try:
            copied = copy.deepcopy(self, memo)
        finally:
            self.__class__ = sharded
        copied.__class__ = sharded
        return copied

    attributes = {"_fsdp_class": kind, "__deepcopy__": deepcopy, "__module__": kind.__module__}
    made: Any = type(kind)
    sharded: type[DTensor] = made(kind.__name__, (own, kind), attributes)
    return sharded


def carry_attributes_over(predecessor: nn.Parameter, successor: nn.Parameter) -> None:
    """Give ``successor`` the attributes that the user set on ``predecessor``, and its class."""
    give_traits(traits_of(predecessor), successor)


def carry_over(predecessor: nn.Parameter, successor: nn.Parameter) -> None:
    """Give ``successor`` the attributes, ``grad_dtype`` and hooks that the user set on ``predecessor``."""
    carry_attributes_over(predecessor, successor)
    explicit, dtype = _torch.grad_dtype_policy(predecessor)
    if explicit:
        successor.grad_dtype = dtype
    hooks = (_torch.post_accumulate_grad_hooks(predecessor) or {}).values()
    tensor_hooks = (_torch.tensor_hooks(predecessor) or {}).values()
    if not hooks and not tensor_hooks:
        return
    requires_grad = successor.requires_grad
    # A hook can only be registered on a tensor that requires a gradient; the predecessor may have been frozen since.
    successor.requires_grad_()
    for hook in hooks:
        successor.register_post_accumulate_grad_hook(hook)
    for tensor_hook in tensor_hooks:
        successor.register_hook(tensor_hook)
    successor.requires_grad_(requires_grad)
