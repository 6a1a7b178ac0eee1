"""`Blocks`: which modules of a model repeat, and so make good groups: as its user says, or as can be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from fsdp2.core.structure import has_forward
from fsdp2.errors import FSDPTypeError, FSDPValueError
from fsdp2.grouping.module_tree import CONTAINERS, ModuleTree, Node, plain_class

Kind = type[nn.Module] | str
"""A class of modules, or its name."""


class Blocks:
    """Finds blocks below a node: those of given classes, or those that repeat.

    Raises:
        FSDPTypeError: ``blocks`` is neither a class of modules, a name, nor a collection of these.
        FSDPValueError: a class or name that no module which can be a group has.
    """

    def __init__(self, tree: ModuleTree, blocks: Any, min_bytes: int) -> None:
        self._min_bytes = min_bytes
        self._kinds: tuple[Kind, ...] | None = None
        self._reason = "a block: its class is in blocks"
        if blocks is not None:
            self._kinds = _validated(blocks)
            _refuse_unknown(tree, self._kinds)
        else:
            named = getattr(tree.root.module, "_no_split_modules", None)
            names = tuple(named) if isinstance(named, (list, tuple, set, frozenset)) else ()
            present = tuple(name for name in names if _there_is(tree, name))
            if present:
                self._kinds = present
                self._reason = "a block: its class is in _no_split_modules"

    def is_block(self, node: Node) -> bool:
        """Whether ``node`` is of a class that was named."""
        return self._kinds is not None and any(_is_of(node.module, kind) for kind in self._kinds)

    def below(self, region: Node) -> list[tuple[Node, str]]:
        """The outermost blocks below ``region``, which may be one itself, and why each is one."""
        return list(self._repeating(region) if self._kinds is None else self._named(region))

    def _named(self, region: Node) -> Iterator[tuple[Node, str]]:
        for child in region.children:
            if self.is_block(child) and child.can_be_called and child.total_bytes:
                yield child, self._reason
            else:
                yield from self._named(child)

    def _repeating(self, region: Node) -> Iterator[tuple[Node, str]]:
        counts: Counter[type[nn.Module]] = Counter()
        if isinstance(region.module, CONTAINERS):
            able = [each for each in region.children if each.can_be_called and (each.total_bytes or each.is_sharded)]
            counts.update(plain_class(child.module) for child in able)
        for child in region.children:
            count = counts[plain_class(child.module)]
            if count > 1 and child.can_be_called and child.total_bytes >= max(self._min_bytes, 1):
                yield child, f"a block: one of {count} of its class in a {region.class_name}"
            else:
                yield from self._repeating(child)


def names_of(blocks: Any) -> str:
    """``blocks``, as validated, for comparing and for messages."""
    if blocks is None:
        return "None"
    return f"({', '.join(sorted(kind if isinstance(kind, str) else kind.__qualname__ for kind in _validated(blocks)))})"


def _validated(blocks: Any) -> tuple[Kind, ...]:
    kinds = tuple(blocks) if isinstance(blocks, Collection) and not isinstance(blocks, str) else (blocks,)
    for kind in kinds:
        if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise FSDPTypeError(
                f"blocks must be a class of modules, the name of one, a collection of these, or None, got {kind!r}."
            )
    return kinds


def _is_of(module: nn.Module, kind: Kind) -> bool:
    return plain_class(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind)


def _there_is(tree: ModuleTree, kind: Kind) -> bool:
    """Whether a module of ``kind`` can be a group, or lies in one that is sharded already."""
    for node in tree.root.walk():
        inside = node.module.modules() if node.is_sharded else (node.module,)
        if any(_is_of(module, kind) and has_forward(module) for module in inside):
            return True
    return False


def _refuse_unknown(tree: ModuleTree, kinds: tuple[Kind, ...]) -> None:
    unknown = [kind for kind in kinds if not _there_is(tree, kind)]
    if not unknown:
        return
    names = ", ".join(repr(kind if isinstance(kind, str) else kind.__name__) for kind in unknown)
    able = Counter(node.class_name for node in tree.root.walk() if node.can_be_called and node.total_bytes)
    there_are = ", ".join(f"{name} ({count})" for name, count in sorted(able.items()))
    raise FSDPValueError(
        f"blocks names {names}, but {tree.root.class_name} has no module of that class that can be a group. Those with "
        f"parameters and a forward are: {there_are or 'none'}."
    )
