"""Which modules become groups, by blocks and sizes: `choose_groups`, and `auto_shard`, which does it.

The choice is data (`GroupChoice`) and a function of the modules' classes and the parameters' shapes and dtypes alone,
so that all ranks make the same.

[Note: how groups are chosen]
A *region* is the model, or a block above ``max_bytes``. Of a region, blocks are taken first; where there are none, it
is cut by size. Its *rest* is what is then in no group: embeddings, heads, norms. It is unsharded for as long as the
region runs, so it is *relieved*, of its largest submodules first, while it is above the largest block.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.api.fully_shard import fully_shard, ignored_below, validated_ignored
from fsdp2.api.policies import offload_choice, policy_or_function
from fsdp2.arguments import ANYTHING, Rule, checked
from fsdp2.core.options import MixedPrecisionPolicy, PolicyFunction
from fsdp2.core.state import state_of
from fsdp2.core.structure import refuse_container
from fsdp2.errors import FSDPTypeError, FSDPValueError
from fsdp2.grouping.blocks import Blocks, names_of
from fsdp2.grouping.config import MAX_BYTES, MIN_BYTES, PolicyByName, ShardingConfig, apply_settings, arguments_of
from fsdp2.grouping.group_choice import GroupChoice, ModuleGroup
from fsdp2.grouping.module_tree import ModuleTree, Node
from fsdp2.grouping.offload_budget import OffloadByName, policies_by_every_name

Module = TypeVar("Module", bound=nn.Module)

_BLOCKS = Rule("classes of modules, their names, or None", lambda value: not isinstance(value, torch.Tensor))

_LOGGER = logging.getLogger("fsdp2")


@checked(model=ANYTHING, blocks=_BLOCKS, mesh=ANYTHING)
def auto_shard(
    model: Module,
    mesh: DeviceMesh | ShardingConfig | None = None,
    *,
    config: ShardingConfig | None = None,
    blocks: Any = None,
    max_bytes: int = MAX_BYTES,
    min_bytes: int = MIN_BYTES,
    **fully_shard_arguments: Any,
) -> Module:
    """Call `fully_shard` on the groups that `choose_groups` finds in ``model``, bottom-up, and on ``model`` itself.

        >>> model = fsdp2.auto_shard(model, mesh, mp_policy=policy)
        >>> model = fsdp2.auto_shard(model, fsdp2.ShardingConfig.from_file("sharding.yaml"))

    The choice is logged at INFO by the logger ``"fsdp2"``. If ``model`` itself is sharded already, no groups are
    chosen: a second call with the same arguments changes nothing, one with others raises. If a `fully_shard` call
    raises, the groups before it stay sharded: `unwrap` the model before calling again with other arguments.

    Every rank must call it, as it must `fully_shard`.

    Args:
        model: to be sharded, in place. Submodules that are sharded already stay as they are.
        mesh: as in `fully_shard`; or a config.
        config: what to shard how, as a value. Then the other arguments say what it does not: a mesh that the program
            has, or what cannot be written down.
        blocks: as in `choose_groups`.
        max_bytes: the same.
        min_bytes: the same.
        fully_shard_arguments: all others of `fully_shard`, the same for each call. Names in an ``offload_policy`` by
            name are those in ``model``.

    Returns:
        ``model`` itself.

    Raises:
        FSDPError: what `choose_groups` and `fully_shard` raise.
        FSDPValueError: a config beside arguments that it says already; a pattern of it that fits nothing in the model.
    """
    if isinstance(mesh, ShardingConfig):
        if config is not None:
            raise FSDPTypeError("auto_shard got a config twice; pass auto_shard(model, mesh, config=config).")
        mesh, config = None, mesh
    if not isinstance(model, nn.Module):
        raise FSDPTypeError(f"groups are chosen in an nn.Module, got {type(model).__name__}.")
    how = {"blocks": blocks, "max_bytes": max_bytes, "min_bytes": min_bytes}
    arguments = {**fully_shard_arguments, **how, "mesh": mesh}
    policies = () if config is None else tuple(config.mp_policy_of.items())
    if config is not None:
        arguments = arguments_of(config, model, arguments)
    how = {name: arguments.pop(name) for name in how}
    ignored, policy = validated_ignored(arguments.pop("ignored_params", None)), arguments.get("mp_policy")
    policy = MixedPrecisionPolicy() if policy is None else policy
    choice = choose_groups(model, ignored_params=ignored, mp_policy=policy, **how)
    grouping = tuple({**how, "blocks": names_of(how["blocks"])}.items())
    state = state_of(model)
    for (name, before), (_, now) in zip(() if state is None else state.arguments.grouping, grouping, strict=False):
        if before != now:
            raise FSDPValueError(
                f"auto_shard was already called on this {choice.model} with another argument '{name}': {before} "
                f"before, {now} now. Repeat the call with equal arguments, which changes nothing, or undo it with "
                "fsdp2.unwrap() first."
            )
    _LOGGER.info("%s", choice)
    offloads = offload_choice(arguments.get("offload_policy"))
    table = policies_by_every_name(model, offloads, ignored) if isinstance(offloads, Mapping) else None
    names = [group.name for group in choice.groups] or [""]  # the model is sharded: compare arguments
    for number, name in enumerate(names):
        if policies:
            arguments["mp_policy"] = PolicyByName(name, policy, policies)
        if table is not None:
            arguments["offload_policy"] = OffloadByName(name, table)
        try:
            fully_shard(model.get_submodule(name), ignored_params=ignored, **arguments)
        except BaseException:
            if number:
                _LOGGER.warning(
                    "auto_shard failed at '%s', when %d groups were sharded already; call fsdp2.unwrap(model) before "
                    "you call it again with other arguments",
                    name,
                    number,
                )
            raise
    state = state_of(model)
    if state is not None and (choice.groups or config is not None):
        grouping += () if config is None else (("config", str(config)),)
        state.arguments = replace(state.arguments, grouping=grouping)
    if config is not None:
        apply_settings(config, model)
    return model


@checked(model=ANYTHING, blocks=_BLOCKS, mp_policy=ANYTHING)
def choose_groups(
    model: nn.Module,
    *,
    blocks: Any = None,
    max_bytes: int = MAX_BYTES,
    min_bytes: int = MIN_BYTES,
    mp_policy: MixedPrecisionPolicy | PolicyFunction = MixedPrecisionPolicy(),  # noqa: B008, frozen
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> GroupChoice:
    """Choose the modules of ``model`` to call `fully_shard` on, without calling it. Changes and communicates nothing.

        >>> print(choose_groups(model, max_bytes=2**28))
        >>> for group in choose_groups(model).groups:
        ...     fully_shard(model.get_submodule(group.name))

    'Let fsdp2 choose the groups' in the documentation says how. Works on meta. Bytes are those of unsharded parameters,
    of the rank with the largest part: in ``mp_policy.param_dtype`` if ``mp_policy`` is a policy that has one, else in
    their own dtypes. Tied parameters count once.

    What modules do in forward cannot be seen. One whose parameters another reads without calling it, or that some ranks
    skip (experts), must be in one group with that other or its caller: name that one in ``blocks``, with ``max_bytes``
    above its size; or leave groups out of the loop above.

    Args:
        model: not yet sharded, or in parts, which stay as they are.
        blocks: a module class, the name of one, or a collection of these: the outermost modules of these classes are
            blocks. None: ``model._no_split_modules`` where a model of transformers has it; else children of
            ``ModuleList``, ``ModuleDict`` and ``Sequential`` of which at least two have the same class and parameters,
            from ``min_bytes`` on: the outermost that are not above ``max_bytes``. An empty collection: by size only.
        max_bytes: groups above it are split as far as possible.
        min_bytes: what is below it is no group, unless ``blocks`` names it or the rest is above ``max_bytes``.
        mp_policy: as will be passed to `fully_shard`.
        ignored_params: the same; they do not count.

    Returns:
        The choice, in the order to call `fully_shard` in; the last is the model itself, unless that is sharded already.

    Raises:
        FSDPTypeError: not a module, or an argument of another type.
        FSDPValueError: a container without forward, a class in ``blocks`` that is not in the model, negative or crossed
            sizes, an uninitialized parameter.
    """
    if not isinstance(model, nn.Module):
        raise FSDPTypeError(f"groups are chosen in an nn.Module, got {type(model).__name__}.")
    refuse_container(model, "auto_shard")
    if not 0 <= min_bytes <= max_bytes or max_bytes == 0:
        expected = "0 <= min_bytes <= max_bytes, and max_bytes above 0"
        raise FSDPValueError(f"min_bytes={min_bytes} and max_bytes={max_bytes} must be {expected}.")
    policy = policy_or_function(mp_policy)
    tree = ModuleTree(model, ignored_below([model], ignored_params), functools.partial(_item_size, policy))
    finder = Blocks(tree, blocks, min_bytes)
    param_dtype = policy.param_dtype if isinstance(policy, MixedPrecisionPolicy) else None
    return GroupChoice(
        model=tree.root.class_name,
        groups=() if tree.root.is_sharded else _groups(tree, finder, max_bytes, min_bytes),
        sharded_before=tuple(node.name for node in tree.root.walk() if node.is_sharded),
        max_bytes=max_bytes,
        min_bytes=min_bytes,
        param_dtype=param_dtype,
    )


def _item_size(policy: MixedPrecisionPolicy | PolicyFunction, fqn: str, parameter: nn.Parameter) -> int:
    if not isinstance(policy, MixedPrecisionPolicy) or not parameter.is_floating_point():
        return parameter.dtype.itemsize
    dtype = policy.for_parameter(parameter, fqn).param_dtype
    return (parameter.dtype if dtype is None else dtype).itemsize


def _groups(tree: ModuleTree, finder: Blocks, max_bytes: int, min_bytes: int) -> tuple[ModuleGroup, ...]:
    """Choose, until every parameter counts in the group that the `fully_shard` calls will put it in.

    They put a tied parameter into the first of the groups that hold it, bottom-up, which need not be where it counted:
    then it is counted there, and all is chosen again. The same for modules that turn out to lie below several groups:
    they become groups, or if they have no forward keep these from being groups.
    """
    shared: dict[Node, str] = {}
    order = {node: number for number, node in enumerate(tree.root.bottom_up())}
    while True:
        chosen = _Chooser(tree, finder, max_bytes, min_bytes, shared).chosen
        group_of = _group_of(tree, chosen)
        hindered = _hindered(tree, group_of, order)
        for node in hindered:
            node.can_be_called = False
            shared.pop(node, None)
        apart = {} if hindered else _below_several_groups(tree, group_of)
        shared.update(apart)
        if not (hindered or apart or _count_where_they_go(tree, group_of, order)):
            break
    sizes = dict.fromkeys(chosen, 0)
    for held in tree.held:
        sizes[min((group_of[node] for node in held.holders), key=order.__getitem__)] += held.nbytes
    kept = [node for node in order if sizes.get(node) or node in shared or node is tree.root]
    return tuple(ModuleGroup(node.name, node.class_name, sizes[node], chosen[node]) for node in kept)


def _count_where_they_go(tree: ModuleTree, group_of: dict[Node, Node], order: dict[Node, int]) -> bool:
    """Count tied parameters in the first group that holds them. A parameter counts in each holder at most once."""
    moved = False
    for held in tree.held:
        holder = min(held.holders, key=lambda node: order[group_of[node]])
        if group_of[holder] is not group_of[held.counted_in[-1]] and holder not in held.counted_in:
            held.counted_in.append(holder)
            moved = True
    tree.add_up()
    return moved


def _group_of(tree: ModuleTree, chosen: dict[Node, str]) -> dict[Node, Node]:
    """The group that each node's own parameters are in."""
    group_of = {tree.root: tree.root}
    for node in tree.root.walk():
        for child in node.children:
            group_of[child] = child if child in chosen else group_of[node]
    return group_of


def _below_several_groups(tree: ModuleTree, group_of: dict[Node, Node]) -> dict[Node, str]:
    """The modules with parameters that are registered below several groups, and are none themselves."""
    found: dict[Node, str] = {}
    for node in tree.root.walk():
        groups = dict.fromkeys(group_of[parent] for parent in node.parents)
        if len(groups) < 2 or group_of[node] is node or node.is_sharded:
            continue
        names = ", ".join(group.name or "(model)" for group in groups)
        for each in _outermost(node, lambda each: each.can_be_called):
            if group_of[each] is not each and any(inside.holds_parameters for inside in each.walk()):
                found[each] = f"registered below several groups: {names}"
    return found


def _hindered(tree: ModuleTree, group_of: dict[Node, Node], order: dict[Node, int]) -> set[Node]:
    """Groups that must not be ones, as they share a module that has parameters, but no forward, with others."""
    found: set[Node] = set()
    for node in tree.root.walk():
        groups = {group_of[parent] for parent in node.parents}
        if len(groups) > 1 and any(each.holds_parameters for each in _without_forward(node)):
            found.add(min(groups, key=order.__getitem__))
    return {node for node in found if node.can_be_called}


def _without_forward(node: Node) -> Iterator[Node]:
    """``node`` and what is below it, as far as nothing can be called."""
    if not node.can_be_called:
        yield node
        for child in node.children:
            yield from _without_forward(child)


def _outermost(node: Node, condition: Callable[[Node], bool]) -> Iterator[Node]:
    if condition(node):
        yield node
    else:
        for child in node.children:
            yield from _outermost(child, condition)


class _Chooser:
    """One choice, ``chosen``, and the reason for each group: see [Note: how groups are chosen]."""

    def __init__(
        self, tree: ModuleTree, finder: Blocks, max_bytes: int, min_bytes: int, shared: dict[Node, str]
    ) -> None:
        self._finder = finder
        self._max_bytes = max_bytes
        self._min_bytes = max(min_bytes, 1)
        self.chosen = dict(shared)
        root = tree.root
        if finder.is_block(root) and root.total_bytes <= max_bytes:
            self.chosen[root] = "the model is a block itself"
            return
        for node, reason in shared.items():
            if self._rest(node) > max_bytes and node.can_be_split:
                self._cut(node, is_model=False)
            self.chosen[node] = self._remark(node, reason)
        self._cut(root, is_model=True)
        self.chosen[root] = "no parameters" if not root.total_bytes else self._remark(root, "the rest")

    def _rest(self, node: Node) -> int:
        """What counts in ``node`` or below, and in no group below."""
        return node.own_bytes + sum(self._rest(child) for child in node.children if child not in self.chosen)

    def _stuck(self, node: Node) -> int:
        """What of the rest no submodule can take over, as none of those that have it can be called."""
        inside = (child for child in node.children if child not in self.chosen and not child.can_be_called)
        return node.own_bytes + sum(map(self._stuck, inside))

    def _remark(self, node: Node, reason: str) -> str:
        if self._rest(node) <= self._max_bytes:
            return reason
        return f"{reason}; above max_bytes, but cannot be split"

    def _take(self, node: Node, reason: str) -> None:
        """Make ``node`` a group, if need be after groups inside it."""
        if self._rest(node) > self._max_bytes and node.can_be_split:
            self._cut(node, is_model=False)
            if self._rest(node) < self._min_bytes:
                return  # left to the region around it
            reason = f"the rest of {node.class_name}, which is above max_bytes"
        self.chosen[node] = self._remark(node, reason)

    def _cut(self, region: Node, *, is_model: bool) -> None:
        """Take groups inside ``region``, and leave a rest."""
        blocks = [(node, reason) for node, reason in self._finder.below(region) if node not in self.chosen]
        sizes = [self._rest(node) for node, _ in blocks]
        for node, reason in blocks:
            self._take(node, reason)
        if not any(sizes):
            reason = (
                "by size: there are no blocks" if is_model else f"part of {region.class_name}, which is above max_bytes"
            )
            for part in list(self._parts(self._fork(region) if is_model else region)):
                self._take(part, reason)
        bound = min(self._max_bytes, max(sizes, default=0) or self._max_bytes)
        self._relieve(region, bound, "the largest block" if bound < self._max_bytes else "max_bytes")

    def _fork(self, node: Node) -> Node:
        """The first node, down the tree, below which there is more than one piece: wrappers are no groups."""
        pieces = list(self._parts(node))
        return self._fork(pieces[0]) if len(pieces) == 1 else node

    def _parts(self, node: Node) -> Iterator[Node]:
        """The outermost submodules that can be called and are not too small."""
        for child in node.children:
            for each in _outermost(child, lambda each: each.can_be_called or each in self.chosen):
                if each not in self.chosen and self._rest(each) >= self._min_bytes:
                    yield each

    def _relieve(self, region: Node, bound: int, bound_name: str) -> None:
        """Take more groups out of ``region``'s rest while it is above ``bound``, the largest first.

        Modules without groups inside come first: others would keep their rest while these run. Too small ones are
        taken only if the rest is above ``max_bytes`` and gets below it that way.
        """
        reason = f"the rest was above {bound_name}"
        self._take_from(region, self._min_bytes, bound, reason)
        if self._stuck(region) <= self._max_bytes:
            self._take_from(region, 1, self._max_bytes, reason)

    def _take_from(self, region: Node, least: int, limit: int, reason: str) -> None:
        """Take submodules of at least ``least`` bytes until the rest is at most ``limit``."""
        rest = self._rest(region)
        for node, has_groups in self._takeable(region):
            before = self._rest(node)
            if rest <= limit or before < least:
                continue
            if has_groups:
                self._relieve(node, self._max_bytes, "max_bytes")
                self.chosen[node] = self._remark(node, reason)
            else:
                self._take(node, reason)
            rest -= before - (0 if node in self.chosen else self._rest(node))

    def _takeable(self, region: Node) -> Iterator[tuple[Node, bool]]:
        """The modules below ``region`` that can be called, and whether there are groups inside.

        The outermost without, the largest first; then, as things are by then, the others, innermost first.
        """
        busy = self._around_groups(region)
        outermost = [
            each
            for child in region.children
            for each in _outermost(child, lambda each: each in self.chosen or (each.can_be_called and each not in busy))
        ]
        for node in sorted((each for each in outermost if each not in self.chosen), key=self._rest, reverse=True):
            yield node, False
        for node in self._around_groups(region):
            if node is not region and node.can_be_called and node not in self.chosen:
                yield node, True

    def _around_groups(self, region: Node) -> dict[Node, None]:
        busy: dict[Node, None] = {}  # innermost first
        for node in region.bottom_up():
            if any(child in busy or child in self.chosen or child.is_sharded for child in node.children):
                busy[node] = None
        return busy
