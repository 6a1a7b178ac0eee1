"""The hooks of a sharded module in the form that `torch.compile` traces.

Everything that they read was fixed before the trace began (`fsdp2.compiled.entry`), since hooks are traced like the
user's code.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import UserDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.compiled.unsharding import unshard
from fsdp2.core.options import ModulePolicy
from fsdp2.core.trees import argument_names, cast_named
from fsdp2.errors import FSDPNotImplementedError


@dataclass(slots=True)
class TracedUse:
    """One place in which a parameter is registered.

    Attributes:
        module: the module that holds the parameter, as ``name``.
        index: the index of the parameter in its group.
        sharded: the parameter that is registered there outside of the module's forward.
        spec: under tensor parallelism, mesh, placements, shape and stride of the unsharded DTensor; else None.
    """

    module: nn.Module
    name: str
    index: int
    sharded: nn.Parameter
    spec: tuple[Any, Any, Any, Any] | None


@dataclass(slots=True, eq=False)
class TracedGroup:
    """One group, ready to be traced.

    Attributes:
        text: the text of its `GroupSpec`.
        shards: its shard buffers, without gradients.
        grad_sinks: the inputs at which its gradients arrive.
        handle: identifies it to our operators; None if the graph has torch's functional collectives.
        uses: the places where its parameters are registered.
    """

    text: str
    shards: tuple[torch.Tensor, ...]
    grad_sinks: tuple[torch.Tensor, ...]
    handle: torch.Tensor | None
    uses: tuple[TracedUse, ...]


class TracedState:
    """Stands in for the hooks of one `FSDPState` inside a graph: it gathers before forward, and restores after it.

    Attributes:
        groups: the groups that are gathered.
        policy: the dtypes of what forward takes and returns.
        escapes: how often the hooks ran outside of a graph in the last compiled call.
    """

    def __init__(self, groups: tuple[TracedGroup, ...], policy: ModulePolicy, module: nn.Module) -> None:
        self.groups = groups
        self.policy = policy
        self.escapes = 0
        self._has_warned = False
        self._is_called = False
        self._names = argument_names(module.forward)

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Register the unsharded parameters, and cast the inputs."""
        for group in self.groups:
            whole = unshard(group.text, group.handle, group.shards, group.grad_sinks)
            for use in group.uses:
                tensor = whole[use.index]
                if use.spec is not None:
                    mesh, placements, shape, stride = use.spec
                    tensor = DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
                use.module._parameters[use.name] = tensor  # type: ignore[assignment]
        cast = self.policy.inputs
        if cast is None:
            return None
        if cast.names is None:
            return _cast(cast.dtype, args), _cast(cast.dtype, kwargs)
        return cast_named(cast, self._names, args, kwargs, _cast)

    @contextmanager
    def called(self) -> Iterator[None]:
        """Surrounds the compiled call of the module: if its hooks run eagerly in this block, a graph break is why."""
        self._is_called = True
        try:
            yield
        finally:
            self._is_called = False

    def called_eagerly(self, name: str) -> None:
        """Note, and warn once, if the hooks of the module called ``name`` run outside of a graph in a compiled call."""
        if not self._is_called:
            return
        self.escapes += 1
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"'{name}' is called from a compiled function, but outside of its graph: its parameters are gathered "
                "by eager hooks, and may be kept from forward to backward. There is a graph break in it, or in a "
                "module around it; torch.compile(fullgraph=True) says where.",
                stacklevel=2,
            )

    def post_forward(self, output: Any) -> Any:
        """Register the sharded parameters, and cast the output."""
        for group in self.groups:
            for use in group.uses:
                use.module._parameters[use.name] = use.sharded
        if self.policy.output_dtype is None:
            return None
        return _cast(self.policy.output_dtype, output)


def _casts(dtype: torch.dtype, tree: Any) -> bool:
    """Whether a tensor in ``tree`` must be cast. This is a constant of the graph, since dtypes are."""
    if isinstance(tree, torch.Tensor):
        return tree.is_floating_point() and tree.dtype != dtype
    values: Any = ()
    if isinstance(tree, (list, tuple)):
        values = tree
    elif isinstance(tree, (dict, UserDict)):
        values = tree.values()
    elif dataclasses.is_dataclass(tree):
        values = _fields_of(tree).values()
    return any([_casts(dtype, value) for value in values])


def _fields_of(tree: Any) -> dict[str, Any]:
    """The fields of a dataclass instance; {} for a class."""
    if isinstance(tree, type):
        return {}
    return {each.name: getattr(tree, each.name) for each in dataclasses.fields(tree) if hasattr(tree, each.name)}


def _cast(dtype: torch.dtype, tree: Any) -> Any:
    """``tree`` with its floating-point tensors cast to ``dtype``. A container in which a tensor is cast is copied.

    `fsdp2.core.trees.cast_floating_point` does not serve here: Dynamo traces neither comparisons of containers by
    identity nor all of `copy`.
    """
    if not _casts(dtype, tree):
        return tree
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype)
    if isinstance(tree, (list, tuple)):
        values = [_cast(dtype, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if isinstance(tree, (dict, UserDict)):
        items = {key: _cast(dtype, value) for key, value in tree.items()}
        return type(tree)(tree.default_factory, items) if isinstance(tree, defaultdict) else type(tree)(items)
    if hasattr(tree, "__post_init__") and all([each.init for each in dataclasses.fields(tree)]):
        return type(tree)(**{name: _cast(dtype, value) for name, value in _fields_of(tree).items()})
    made = object.__new__(type(tree))  # a copy, without __init__ (other attributes torch 2.11 cannot trace)
    for name, value in _fields_of(tree).items():
        object.__setattr__(made, name, _cast(dtype, value))  # frozen dataclasses too
    return made


class RefusedState:
    """Stands in for the hooks of a state that cannot be traced: it raises while the graph is made."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def pre_forward(self, *_: Any) -> Any:
        """Raise.

        Raises:
            FSDPNotImplementedError: always, with the reason and what to do.
        """
        raise FSDPNotImplementedError(self.reason)

    def called_eagerly(self, name: str) -> None:
        """Do nothing: its hooks are expected to run outside of graphs."""

    def post_forward(self, output: Any) -> Any:
        """Return ``output``. (It is never called, as `pre_forward` raises.)"""
        return output
