"""What is checked when a root forms: that every parameter is owned and ready, and that the ranks agree.

Ranks compare a fingerprint; if they differ, every rank says how.
"""

from __future__ import annotations

import difflib
import gc
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import _torch
from fsdp2._remedies import DIVERGENCE, RUN_ALIKE
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.options import RootSettings, described
from fsdp2.core.param import FSDPParam, fsdp_param_of
from fsdp2.core.places import label
from fsdp2.core.plan import Waiting, fingerprint
from fsdp2.core.root import FSDPRoot
from fsdp2.core.transport import is_alone, of_backend
from fsdp2.errors import FSDPRuntimeError


def disagreement(
    description: str, group: dist.ProcessGroup | None, device: torch.device, what: str = "what the ranks are to do"
) -> str | None:
    """None if every rank of ``group`` passes the same ``description``, else how they differ.

    ``what`` they compare, for messages where other ranks do something else.

    Collective, and seen by no patched function or dispatch mode; the second exchange takes place only on disagreement,
    and then on all ranks.
    """
    return _compared(description, 0, group, device, what)[0]


def compared_over(
    meshes: Iterable[DataParallelMesh], described_on: Callable[[DataParallelMesh], str], what: str, number: int = 0
) -> tuple[str, int, bool]:
    """Whether the ranks say the same of each of ``meshes``. Collective over each of them, and twice over the widest.

    That is the first. What differs on it, if it has all ranks, ends it there, for they have other meshes, perhaps. What
    differs on others is told to all its ranks.

    Args:
        meshes: that this rank has; those of one size in the order of all. Some of them may be the same.
        described_on: what is to be the same on the ranks of one of them.
        what: they compare, for messages.
        number: which may differ.

    Returns:
        How they differ, empty if they do not; the highest number; and whether the numbers differ.
    """
    distinct = sorted({mesh.key: mesh for mesh in meshes}.values(), key=lambda mesh: -mesh.device_mesh.size())
    if not distinct:
        return "", number, False
    first, *others = distinct
    difference, highest, differ, has_others = "", number, False, bool(others)

    def compare(mesh: DataParallelMesh, text: str) -> None:
        nonlocal difference, highest, differ, has_others
        for group in (mesh.shard_group, mesh.replicate_group):
            # Of a rank's shard group, the ranks of its replicas learn all that it has found.
            seen = 4 * highest + 2 * differ + has_others
            now, found = _compared(f"{text}\n{difference}", seen, group, mesh.device, what)
            difference = now or difference
            if found:
                highest = max(found) // 4
                differ = len({each // 4 for each in found}) > 1 or any(each & 2 for each in found)
                has_others = any(each & 1 for each in found)

    compare(first, described_on(first))
    if not has_others or (difference and all(_ranks_of(mesh) <= _ranks_of(first) for mesh in others)):
        return difference, highest, differ
    for mesh in others:
        compare(mesh, described_on(mesh))
    compare(first, "")
    return difference, highest, differ


def _ranks_of(mesh: DataParallelMesh) -> set[int]:
    with _torch.unobserved():
        return set(mesh.device_mesh.mesh.flatten().tolist())


def _compared(
    description: str, number: int, group: dist.ProcessGroup | None, device: torch.device, what: str
) -> tuple[str | None, list[int]]:
    """As `disagreement`, and the ``number`` of each rank, which may differ."""
    if group is None or is_alone(group):
        return None, [number]
    world_size = dist.get_world_size(group)
    if device.type != "cpu" and not torch.accelerator.is_available():
        device = torch.device("cpu")  # ranks are simulated, on a device that is not there
    with _torch.unobserved():  # real numbers, also while tensors are fake
        mine = torch.tensor([fingerprint(description), number], dtype=torch.int64, device=device)
        everyone = mine.new_empty(2 * world_size)
        transport = of_backend(group, device)
        transport.label = label(f"the comparison of {what}")
        transport.compare(everyone, mine)
        found = everyone.tolist()
    if len(set(found[::2])) == 1:
        return None, found[1::2]
    descriptions: list[str] = [""] * world_size
    dist.all_gather_object(descriptions, description, group=group)
    reference = descriptions[0].splitlines()
    for rank, text in enumerate(descriptions):
        if text != descriptions[0]:
            lines = difflib.unified_diff(reference, text.splitlines(), "rank 0", f"rank {rank}", lineterm="", n=1)
            return "\n".join(lines), []
    return "the fingerprints differ, the descriptions do not", []


class _Kind:
    """Sharded modules whose roots have equal plans.

    Attributes:
        made: counts them.
        numbers: what they get; begins anew, above all that the ranks have agreed upon, when they had to.
        highest: the highest that the ranks have agreed upon.
        there: those that somebody holds.
    """

    def __init__(self) -> None:
        self.made, self.numbers = itertools.count(), itertools.count()
        self.highest = -1
        self.there: WeakSet[Number] = WeakSet()


class Number:
    """Which one a sharded module is, of those of its kind.

    Roots of one class and of equal sizes have equal plans: by their numbers ranks notice that one runs another than the
    others, and their exchanges are told apart. Modules are numbered in the order of the calls of `fully_shard`, until
    the ranks first run them and agree. A rank may have made modules that others have not, and dropped them; so where
    numbers differ, their order among the modules that are there counts. If ranks have run one of these by that order,
    another one is an error. If they have not, or some have more modules than others, then the order says nothing: the
    modules that ranks first run together are the same, and a warning says so.

    Attributes:
        value: the same on all ranks once they have agreed.
    """

    _kinds: ClassVar[dict[tuple[Any, ...], _Kind]] = {}

    __slots__ = ("__weakref__", "_by_order", "_kind", "_made_as", "_name", "value")

    def __init__(self, kind: tuple[Any, ...]) -> None:
        self._name = kind[0]
        self._kind = self._kinds.setdefault(kind, _Kind())
        self._made_as, self.value = next(self._kind.made), next(self._kind.numbers)
        self._by_order: bool | None = None  # whether ranks ran the same by the order; None: not yet
        self._kind.there.add(self)

    def agree(self, highest: int, differ: bool, mesh: DataParallelMesh) -> None:
        """Take the ``highest`` of the ranks' numbers. If they ``differ``: are their modules the same ones?

        Raises:
            FSDPRuntimeError: on all ranks, if not.
        """
        if differ:
            self._by_order = self._is_by_order(mesh)
        elif self._by_order is None:
            self._by_order = True
        self.value, kind = highest, self._kind
        kind.highest = max(kind.highest, highest)
        if differ:
            kind.numbers = itertools.count(kind.highest + 1)
            for each in self._all_there():
                if each._by_order is None:
                    each.value = next(kind.numbers)

    def _all_there(self) -> list[Number]:
        return sorted(self._kind.there, key=lambda each: each._made_as)

    def _is_by_order(self, mesh: DataParallelMesh) -> bool:
        gc.collect()
        there = self._all_there()
        place = f"is number {there.index(self) + 1} of {len(there)} of its kind, by the order of fully_shard"
        difference = self._difference(f"{self._name} {place}", mesh)
        if not difference:
            return True
        found = {each._by_order for each in there}
        counts = True in found and False not in found
        is_known = self._by_order is not None  # by a number that others have not
        contradicts = bool(self._difference(str(is_known), mesh)) or is_known
        if (not self._difference(f"{len(there)} {counts}", mesh) and counts) or contradicts:
            raise FSDPRuntimeError(
                f"the ranks run different modules of the class {self._name}, which are sharded alike, so that one "
                f"would compute with the parameters of another. {RUN_ALIKE} Difference:\n{difference}"
            )
        if False not in found:
            warnings.warn(
                f"the ranks called fully_shard on modules of the class {self._name}, which are sharded alike, in "
                "another order, or on another number of them. Those that the ranks first run together are taken for "
                "the same module from now on; if they are not, one computes with the parameters of another. "
                f"Difference:\n{difference}",
                stacklevel=2,
            )
        return False

    def _difference(self, description: str, mesh: DataParallelMesh) -> str:
        difference = ""
        for group in (mesh.shard_group, mesh.replicate_group):  # the second learn what the first have found
            found = disagreement(f"{description}\n{difference}", group, mesh.device, f"which {self._name} this is")
            difference = found or difference
        return difference


def refuse_unowned_parameters(
    modules: Sequence[nn.Module], class_name: str, params: Sequence[FSDPParam], ignored: Collection[nn.Parameter]
) -> None:
    """Every parameter below ``modules`` is of ``params``, ignored, frozen, or in a module of torch's `replicate`.

    Raises:
        FSDPRuntimeError: one is not, and would not be reduced.
    """
    owned = {(module, name) for param in params for module, name in param.uses}
    for root in modules:
        composed = [each for each in root.modules() if "replicate" in each.__dict__.get(_torch.COMPOSED, ())]
        replicated = {module for each in composed for module in each.modules()}
        for prefix, module in root.named_modules():
            if module in replicated:
                continue
            for name, parameter in module._parameters.items():
                is_frozen = parameter is not None and not parameter.requires_grad
                if parameter is None or is_frozen or parameter in ignored or (module, name) in owned:
                    continue
                raise FSDPRuntimeError(
                    f"parameter '{prefix + '.' + name if prefix else name}' of {class_name} was added after "
                    "fully_shard and belongs to no group: its gradient would not be reduced. Add parameters before "
                    "calling fully_shard, or call fully_shard on the module that holds it, or pass it in "
                    "ignored_params."
                )


def refuse_meta(modules: Sequence[nn.Module], class_name: str) -> None:
    """No sharded parameter and no buffer below ``modules`` is on meta.

    Raises:
        FSDPRuntimeError: some are, and have no values.
    """
    parameters = [name for each in modules for name, p in each.named_parameters() if p.is_meta and fsdp_param_of(p)]
    buffers = [name for each in modules for name, buffer in each.named_buffers() if buffer.is_meta]
    if parameters or buffers:
        kinds = " and ".join(["parameters"] * bool(parameters) + ["buffers"] * bool(buffers))
        raise FSDPRuntimeError(
            f"{kinds} of {class_name} are still on the meta device: {', '.join([*parameters, *buffers])}. Materialize "
            "the model before its first forward: model.to_empty(device=...), then initialize it or load a state dict."
        )


class Setting(NamedTuple):
    """A line of what the ranks of some meshes must have set alike.

    Attributes:
        meshes: the keys of these; None: of all that a root's groups are on.
    """

    line: str
    meshes: Collection[Any] | None = None


def settings_of(states: Iterable[Any], groups: Iterable[FSDPParamGroup], root: RootSettings) -> tuple[Setting, ...]:
    """What was set that decides which collectives there are, in which order, and how gradients are scaled.

    A line for each state, group and for the root, of what is not as it is by default.
    """
    of_root = described(root, without=("pools_memory",))  # which each rank may have as it likes
    lines = [Setting(_line("root", of_root))]
    for state in states:
        values = {name: getattr(state, name) for name in _STATE}
        found = {name: str(value) for name, value in values.items() if value != _STATE[name]}
        found |= _prefetch_of(state)
        lines.append(Setting(_line(f"module '{state.name}'", found), _meshes_of(state)))
    for group in groups:
        found, post_forward = described(group.settings, without=_OF_THIS_RANK), group.storage.post_forward
        if post_forward is not None:
            found["ranks_after_forward"] = str(post_forward.mesh.shard_size)
        lines.append(Setting(_line(f"group '{group.name}'", found), (group.mesh.key,)))
    return tuple(each for each in lines if each.line)


def _meshes_of(state: Any) -> Collection[Any]:
    """Those whose ranks have the module: of experts on a part of the ranks, others do not."""
    return {group.mesh.key for group in state.unit} or (state.mesh.key,)


_OF_THIS_RANK = ("keeps_unsharded_storage", "all_reduce_hook_stream")
_STATE = {"reshard_after_forward": None, "reshard_after_backward": True, "is_captured": True}
"""What is set on states, as it is by default."""


def _line(what: str, found: dict[str, str]) -> str:
    return f"{what}: set {', '.join(f'{name}={value}' for name, value in found.items())}" if found else ""


def _prefetch_of(state: Any) -> dict[str, str]:
    names = {name: _names(getattr(state, name)) for name in ("forward_prefetch", "backward_prefetch")}
    return {name: value for name, value in names.items() if value is not None}


def _names(prefetch: Any) -> str | None:
    if not isinstance(prefetch, tuple):  # of a copy: not looked up yet
        return None if prefetch is None else "as copied"
    return str([getattr(group, "name", "another group") for unit in prefetch for group in unit])


def refuse_disagreement(
    root_name: str,
    groups: Sequence[FSDPParamGroup],
    mesh: DataParallelMesh,
    settings: Sequence[Setting],
    number: Number | None = None,
) -> None:
    """The ranks that communicate have the same plans and settings. Collective over each mesh that ``groups`` are on.

    ``number``: of the root, which may become another.

    Raises:
        FSDPRuntimeError: on every rank, with the difference.
    """

    def described_on(each: DataParallelMesh) -> str:
        plans = [f"group '{group.name}' {group.plan}" for group in groups if group.mesh.key == each.key]
        return "\n".join([*plans, *(of.line for of in settings if of.meshes is None or each.key in of.meshes)])

    meshes = [mesh, *(group.mesh for group in groups)]
    difference, highest, differ = compared_over(
        meshes, described_on, f"the plans of {root_name}", 0 if number is None else number.value
    )
    if difference:
        raise FSDPRuntimeError(
            "the ranks have different plans, so their collectives would not match; every rank must build the same "
            "model, shard it alike, set the same and run the same modules (where a rank skips some on purpose: "
            f"{DIVERGENCE}). Difference:\n{difference}"
        )
    if number is not None:
        number.agree(highest, differ, mesh)


def refuse_finalization(root: FSDPRoot, name: str, *, is_root: bool) -> None:
    """Refuse `FSDPModule.finalize_backward`, called on the module ``name``, where it cannot be.

    Raises:
        FSDPRuntimeError: saying why not.
    """
    if not is_root:
        raise FSDPRuntimeError(f"finalize_backward() must be called on the root, {root.name}, not on '{name}'.")
    if not root.settings.finalizes_manually:
        raise FSDPRuntimeError(
            "finalize_backward() needs set_manual_backward_finalization(True), called on the root before backward."
        )
    if root.iteration.in_backward:
        raise FSDPRuntimeError("finalize_backward() must be called after backward has ended, not during it.")
    root.comm.refuse_unfinished_handle("finalize_backward()")
    for group in root.groups:
        reducer, settings = group.reducer, group.settings
        stops_early = settings.requires_gradient_sync and not settings.requires_all_reduce and reducer.is_due()
        if group.mesh.replicate_group is not None and (reducer.waiting & Waiting.REDUCE_SCATTERED or stops_early):
            raise FSDPRuntimeError(
                f"finalize_backward() cannot leave gradients of '{group.name}' between reduce-scatter and "
                "all-reduce: call set_requires_all_reduce(True) for every backward that it finalizes."
            )


def refuse_list_as_root(modules: Sequence[nn.Module]) -> None:
    """A list of modules that were sharded together is no root.

    Raises:
        FSDPRuntimeError: it is a list.
    """
    if len(modules) > 1:
        names = ", ".join(type(module).__name__ for module in modules)
        raise FSDPRuntimeError(
            f"a list of modules ({names}) that fully_shard was called on cannot be the root, as no forward "
            "contains them all: call fully_shard on the module that does as well, and run its forward."
        )
