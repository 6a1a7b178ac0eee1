"""Which rank owns a matrix: `Owned`, the placement, and `balanced_owners`, which chooses owners for a model's matrices.

Optimizers such as Muon and Shampoo compute with full matrices. An owned parameter lives unsharded on one rank, and its
full gradient arrives there. That rank steps it without communication; the next all-gather sends it to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2 import _torch
from fsdp2.arguments import ANYTHING, checked, checked_class
from fsdp2.core.mesh import DataParallelMesh
from fsdp2.core.sharding import PartitionKey, RowPlacement, Wanted
from fsdp2.errors import FSDPTypeError, FSDPValueError


@checked_class(rank=ANYTHING)
@dataclass(frozen=True, slots=True)
class Owned(RowPlacement):
    """What a ``shard_placement_fn`` returns for a parameter that is to live unsharded on one rank.

    Its DTensor has all rows on that rank and 0 rows on the others; so have its gradient and its optimizer state.

    Attributes:
        rank: the owner, counted from 0 in the mesh dim that is sharded over.

    Raises:
        FSDPValueError: ``rank`` is not an int, or is negative.
    """

    form = "Owned(rank)"
    rank: int

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise FSDPValueError(f"Owned takes a rank in the mesh dim that is sharded over, from 0; got {self.rank!r}.")

    @property
    def partition_key(self) -> PartitionKey:
        """Dim 0, all rows of which one rank has."""
        return PartitionKey(0, owner=self.rank)

    def checked_for(self, parameter: nn.Parameter, fqn: str, mesh: DataParallelMesh) -> Wanted:
        """This placement; or dim 0, as for unsharded parameters, where the mesh shards nothing."""
        if parameter.dim() == 0:
            raise FSDPValueError(
                f"parameter '{fqn}' has no dims, and cannot be {self}: every rank keeps the whole of it; return None."
            )
        if mesh.shard_group is None:  # nothing is sharded: every rank has the whole anyway
            return 0
        if self.rank >= mesh.shard_size:
            raise FSDPValueError(
                f"parameter '{fqn}' is to be {self}, but it is sharded over {mesh.shard_size} ranks: the rank counts "
                "in that mesh dim, from 0."
            )
        return self

    def refuse_cut(self, parameter: DTensor, where: str) -> None:
        """Raise if tensor parallelism cuts ``parameter``: no rank could own all of it."""
        if _torch.local_of(parameter).shape != parameter.shape:
            raise FSDPValueError(
                f"{where} is to be {self}, but is cut by tensor parallelism ({list(parameter.placements)} on "
                f"{parameter.device_mesh}): no rank could have it whole. Return Shard(i) or None for it."
            )


Cost = Callable[[nn.Parameter], float]
Select = Callable[[str, nn.Parameter], bool]
StepTargets = Sequence[nn.Module | Sequence[nn.Module]]

_NEWTON_SCHULZ_STEPS = 5


def newton_schulz_flops(parameter: nn.Parameter) -> float:
    """Floating point operations of a Newton-Schulz orthogonalization of ``parameter``, (..., m, n), of five steps.

    Each step is three products: X Xᵀ and the last with 2 k² l operations, a square in between with 2 k³, where k is the
    smaller of m and n, and l the larger. Leading dims are a stack of matrices.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    *stack, rows, columns = parameter.shape
    small, large = min(rows, columns), max(rows, columns)
    return float(math.prod(stack) * _NEWTON_SCHULZ_STEPS * (4 * small**2 * large + 2 * small**3))


def assign_ranks(groups: Sequence[Sequence[float]], world_size: int) -> list[list[int]]:
    """Choose a rank for each item of each group, given what the items cost.

    Within a group, items go to ``world_size`` hands, the most expensive first, each to the hand that has least so far
    (Graham, 1969: at most 4/3 of the best). Then the heaviest hand goes to the rank that has least of the groups
    before, and so on. Ties go to the earlier item, hand and rank, so all ranks compute the same.
    """
    totals = [0.0] * world_size
    dealt = []
    for costs in groups:
        hands = [0.0] * world_size
        hand_of = [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
            hand = hands.index(min(hands))
            hand_of[index] = hand
            hands[hand] += costs[index]
        heaviest_first = sorted(range(world_size), key=lambda hand: -hands[hand])
        least_first = sorted(range(world_size), key=totals.__getitem__)
        rank_of = dict(zip(heaviest_first, least_first, strict=True))
        for hand, load in enumerate(hands):
            totals[rank_of[hand]] += load
        dealt.append([rank_of[hand] for hand in hand_of])
    return dealt


@checked(mesh=ANYTHING)
def balanced_owners(
    module: nn.Module | Iterable[nn.Parameter],
    mesh: DeviceMesh,
    *,
    units: StepTargets = (),
    cost: Cost = newton_schulz_flops,
    select: Select | None = None,
) -> Callable[[nn.Parameter], Owned | None]:
    """A ``shard_placement_fn`` that gives each matrix of ``module`` an owner, so that all ranks have equal work.

        >>> owners = fsdp2.balanced_owners(model.blocks, mesh, units=model.blocks)
        >>> for block in model.blocks:
        ...     fully_shard(block, mesh=mesh, shard_placement_fn=owners)
        >>> fully_shard(model, mesh=mesh, shard_placement_fn=owners)

    Two things are balanced. Within a group, the rank that owns most decides what every rank sends, and what room the
    unsharded buffer has for each rank. Over the model, the optimizer's step waits for the rank that owns most. So
    each group's matrices are split into one share per rank: the most expensive matrix first, each to the share that
    has least. Then the heaviest share goes to the rank that has least of the groups before. Ties go to the first. The
    result is the same on all ranks, without communication, if the model and ``cost`` are.

    Call it before `fully_shard`. The answers are noted on the parameters: they outlive `unwrap`, not ``copy.deepcopy``,
    and a second call on the same parameters replaces them.

    Args:
        module: a module whose matrices get owners, or parameters, which then form one group. A ``ModuleList`` is fine.
        mesh: what `fully_shard` is called with: of one dim, or (replicate, shard).
        units: what `fully_shard` will be called on, in that order: modules, or lists of modules that form one group.
            Matrices that lie in none of them form a last group. Without ``units`` all matrices form one group.
        cost: the cost of one parameter: a number, 0 or more. ``torch.numel`` balances memory rather than work.
        select: ``(name, parameter) -> bool``: which parameters get owners. Default: trainable parameters of 2 dims, and
            of 3 (stacks of matrices, such as experts), but none of an ``nn.Embedding`` and no DTensors.

    Returns:
        A function of a parameter: `Owned`, or None for those that keep the default placement.

    Raises:
        FSDPTypeError: an argument is not a module, parameters, a mesh or a function.
        FSDPValueError: the mesh has more dims, a cost is no number, or a selected parameter cannot have an owner.
    """
    world_size = _ranks(mesh)
    named = _named_parameters(module)
    embedded = _of_embeddings(module)
    chosen: dict[nn.Parameter, str] = {}
    for name, parameter in named.items():
        if select is None:
            is_matrix = parameter.dim() in (2, 3) and parameter.requires_grad and not isinstance(parameter, DTensor)
            selected = is_matrix and id(parameter) not in embedded
        else:
            selected = bool(select(name, parameter))
        if selected:
            chosen[parameter] = name
        # An earlier call's answer goes, also from parameters that this call does not select.
        parameter.__dict__.pop(_MARK, None)
    groups = _grouped(chosen, units)
    costs = [[_checked_cost(cost, parameter, chosen[parameter]) for parameter in group] for group in groups]
    for group, ranks in zip(groups, assign_ranks(costs, world_size), strict=True):
        for parameter, rank in zip(group, ranks, strict=True):
            setattr(parameter, _MARK, Owned(rank))
    return noted_owner


_MARK = "_fsdp_owner"


def noted_owner(parameter: nn.Parameter) -> Owned | None:
    """The owner that `balanced_owners` has noted on ``parameter``; None without one."""
    noted: Owned | None = getattr(parameter, _MARK, None)
    return noted


def _ranks(mesh: DeviceMesh) -> int:
    if not isinstance(mesh, DeviceMesh):
        raise FSDPTypeError(f"balanced_owners takes the DeviceMesh that fully_shard gets, got {type(mesh).__name__}.")
    if mesh.ndim > 2:
        raise FSDPValueError(
            f"balanced_owners takes a mesh of one dim, or (replicate, shard); got {mesh.ndim} dims. Slice the mesh: "
            "mesh['dp'] or mesh['replicate', 'shard']."
        )
    return mesh.size(mesh.ndim - 1)


def _named_parameters(module: nn.Module | Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
    if isinstance(module, nn.Module):
        return dict(module.named_parameters())
    if isinstance(module, (str, nn.Parameter)) or not isinstance(module, Iterable):
        raise FSDPTypeError(f"balanced_owners takes a module or a list of parameters, got {type(module).__name__}.")
    parameters = list(module)
    for each in parameters:
        if not isinstance(each, nn.Parameter):
            raise FSDPTypeError(f"balanced_owners takes a module or a list of parameters, got a {type(each).__name__}.")
    return {str(index): parameter for index, parameter in enumerate(dict.fromkeys(parameters))}


def _of_embeddings(module: nn.Module | Iterable[nn.Parameter]) -> set[int]:
    if not isinstance(module, nn.Module):
        return set()
    embeddings = (each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
    return {id(parameter) for each in embeddings for parameter in each.parameters(recurse=False)}


def _grouped(chosen: Iterable[nn.Parameter], units: StepTargets) -> list[list[nn.Parameter]]:
    """The chosen parameters, each in the first unit that has it; those of no unit form the last group."""
    left = dict.fromkeys(chosen)
    groups = []
    for unit in units:
        modules = [unit] if isinstance(unit, nn.Module) else list(unit)
        for each in modules:
            if not isinstance(each, nn.Module):
                raise FSDPTypeError(f"units are modules or lists of modules, got a {type(each).__name__}.")
        of_unit = dict.fromkeys(parameter for each in modules for parameter in each.parameters() if parameter in left)
        for parameter in of_unit:
            del left[parameter]
        groups.append(list(of_unit))
    return [*groups, list(left)]


def _checked_cost(cost: Cost, parameter: nn.Parameter, name: str) -> float:
    if isinstance(parameter, DTensor):
        raise FSDPValueError(
            f"balanced_owners: '{name}' is a DTensor. Call it before fully_shard, and leave parameters of tensor or "
            "expert parallelism out of 'select': what each rank has of them is no whole matrix."
        )
    if parameter.dim() == 0:
        raise FSDPValueError(
            f"balanced_owners: '{name}' has no dims, and cannot have an owner; leave it out of 'select'."
        )
    value = cost(parameter)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise FSDPValueError(f"balanced_owners: the cost of '{name}' must be a number, 0 or more, got {value!r}.")
    return number
