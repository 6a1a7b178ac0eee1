"""`ModuleTree`: the submodules of a model that may become groups, each with the bytes of parameters that it brings.

Facts only: what is called, what cannot be taken apart, what several modules hold. Sizes are those of the unsharded
parameters, the same on every rank; nothing is read but shapes and dtypes, so that a model on meta will do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from fsdp2 import _torch
from fsdp2.api.module import FSDPModule
from fsdp2.core.param import fsdp_param_of, replacement_of
from fsdp2.core.state import state_of
from fsdp2.core.structure import has_forward
from fsdp2.errors import FSDPValueError

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

_CALL_THEIR_CHILDREN = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
"""Modules of torch with submodules that never compute with the parameters of these themselves."""

_PLAIN = (nn.Module, *CONTAINERS)

ItemSize = Callable[[str, nn.Parameter], int]
"""How many bytes an element of a parameter takes when it is unsharded, from its name and itself."""


@dataclass(eq=False, slots=True)
class Node:
    """A submodule, where it comes first in the model."""

    name: str  # fully qualified; that of the model is empty
    module: nn.Module
    parents: list[Node]  # where it is registered: more than one if it is shared
    children: list[Node] = field(default_factory=list)  # which come first here; none of an atom or a sharded module
    own_bytes: int = 0  # of the parameters that are registered here (in an atom: or below it) and nowhere before
    total_bytes: int = 0  # of all that count here and below
    can_be_called: bool = True  # it has a forward, so that parameters can be gathered before it
    holds_parameters: bool = False  # there are some that would count here if nowhere before
    is_sharded: bool = False  # `fully_shard` was called on it already

    @property
    def class_name(self) -> str:
        """Of its class, before `fully_shard` changed that."""
        return plain_class(self.module).__name__

    @property
    def can_be_split(self) -> bool:
        """Whether some of its parameters count in submodules."""
        return any(child.total_bytes for child in self.children)

    def walk(self) -> Iterator[Node]:
        """Itself and all nodes below, each before those below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def bottom_up(self) -> Iterator[Node]:
        """Itself and all nodes below, each after those below it."""
        for child in self.children:
            yield from child.bottom_up()
        yield self


@dataclass(slots=True)
class Held:
    """A parameter and the nodes that hold it."""

    nbytes: int
    holders: list[Node]  # in the order of the tree
    counted_in: list[Node]  # the last is where it does


class ModuleTree:
    """The nodes of a model, from its ``root`` on, and the parameters that count, tied ones once, in ``held``."""

    def __init__(self, model: nn.Module, ignored: Collection[nn.Parameter], item_size: ItemSize) -> None:
        self._ignored = ignored
        self._item_size = item_size
        self._nodes: dict[nn.Module, Node] = {}
        self._by_parameter: dict[nn.Parameter, Held] = {}
        self.root = self._visit(model, "", None)
        self.held = list(self._by_parameter.values())
        self.add_up()

    def _visit(self, module: nn.Module, name: str, parent: Node | None) -> Node:
        node = Node(name, module, [] if parent is None else [parent])
        self._nodes[module] = node
        node.can_be_called = has_forward(module)
        node.is_sharded = state_of(module) is not None
        if node.is_sharded:
            return node
        for each in _inseparable(module):
            if each is module or (each not in self._nodes and state_of(each) is None):
                self._nodes[each] = node
                self._hold(each, node)
        for child_name, child in module._modules.items():
            if child is None:
                continue
            known = self._nodes.get(child)
            if known is None:
                node.children.append(self._visit(child, f"{name}.{child_name}" if name else child_name, node))
            elif node is not known and node not in known.parents:
                known.parents.append(node)
        return node

    def _hold(self, module: nn.Module, node: Node) -> None:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in self._ignored:
                continue
            fqn = f"{node.name}.{name}" if node.name else name
            if is_lazy(parameter):
                raise FSDPValueError(
                    f"parameter '{fqn}' is not initialized: run a forward of the lazy module before fully_shard."
                )
            successor = replacement_of(parameter)
            if fsdp_param_of(parameter if successor is None else successor) is not None:
                continue  # tied to a parameter of a sharded module, whose group it counts in
            node.holds_parameters = True
            held = self._by_parameter.get(parameter)
            if held is None:
                nbytes = largest_local_numel(parameter) * self._item_size(fqn, parameter)
                self._by_parameter[parameter] = Held(nbytes, [node], [node])
            elif node not in held.holders:
                held.holders.append(node)

    def add_up(self) -> None:
        """Say in the nodes what counts where."""
        for node in self.root.walk():
            node.own_bytes = 0
        for held in self.held:
            held.counted_in[-1].own_bytes += held.nbytes
        for node in self.root.bottom_up():
            node.total_bytes = node.own_bytes + sum(child.total_bytes for child in node.children)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module`` before `fully_shard` changed it."""
    original: type[nn.Module] = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))  # type: ignore[assignment]
    return original


def is_atom(module: nn.Module) -> bool:
    """Whether ``module`` may compute with its submodules' parameters without calling them.

    Attention of torch reads the weight of its output projection, an encoder layer in its fast path everything. So all
    of torch's own modules that have submodules count, and what derives from them, but for containers and those that
    are known to call their submodules.
    """
    if not module._modules or isinstance(module, _CALL_THEIR_CHILDREN):
        return False
    return any(
        each.__module__.startswith(("torch.nn.modules.", "torch.ao.nn.")) and each not in _PLAIN
        for each in type(module).__mro__
    )


def _inseparable(module: nn.Module) -> list[nn.Module]:
    """``module`` and the submodules that belong to it: of an atom all, else those that compute its parameters.

    A parametrized weight is computed whenever it is read.
    """
    if is_atom(module):
        return list(module.modules())
    if parametrize.is_parametrized(module):
        return [module, *module.parametrizations.modules()]  # type: ignore[union-attr]
    return [module]


def largest_local_numel(parameter: torch.Tensor) -> int:
    """How many elements of ``parameter`` a rank has, were it not sharded by `fully_shard`; at most, over all ranks.

    Tensor parallelism deals out a dim in pieces of ``ceil(size / ranks)``, so this is the same number on every rank.
    """
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    shape = list(parameter.shape)
    for placement, ranks in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        if _torch.is_shard(placement):
            shape[placement.dim] = -(-shape[placement.dim] // ranks)  # type: ignore[attr-defined]
    return torch.Size(shape).numel()
