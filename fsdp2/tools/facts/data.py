"""The dataclasses that `facts_of` returns. Sizes are bytes of this rank, unless said otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

Way = Literal["direct", "packed", "by itself", "stays"]
"""How a parameter or gradient travels.

``direct``: by a collective of its own, straight into place. ``packed``: together with others, with a copy on the way.
``by itself``: it is a tensor that gathers itself. ``stays``: nothing is exchanged.
"""

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]
Pass = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of a mesh: its name ("" without) and how many ranks it has."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}={self.size}" if self.name else str(self.size)


@dataclass(frozen=True, slots=True)
class ParamFacts:
    """One sharded parameter.

    Attributes:
        name: its name below the model.
        other_names: further names under which it is registered, as tied weights are.
        shape: the shape of the full parameter.
        local_shape: the shape of what this rank keeps at rest.
        rests: the dtype in which it is kept.
        computes: the dtype in which it is gathered, and in which modules compute.
        reduces: the dtype in which its gradient is reduced; None if it is frozen.
        placements: the placements of the sharded DTensor, one for each axis of ``mesh``.
        mesh: the mesh of that DTensor.
        dealt_out: what every rank keeps, in words: "2 rows per rank".
        owner: the rank of the shard group that has all of it (`fsdp2.Owned`); None: all ranks have a part.
        is_trainable: whether it requires a gradient.
        buffer: index into `GroupFacts.buffers` of the buffers that it lies in; None if it gathers itself.
        local_bytes: how many bytes this rank keeps at rest, without padding.
        unsharded_bytes: the bytes that this rank computes with.
        gather: how it is gathered.
        gather_reason: why it is gathered so, as a clause.
        reduce: how its gradient is reduced; "stays" if it is frozen.
        reduce_reason: why it is reduced so.
    """

    name: str
    other_names: tuple[str, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    rests: torch.dtype
    computes: torch.dtype
    reduces: torch.dtype | None
    placements: tuple[str, ...]
    mesh: tuple[MeshAxis, ...]
    dealt_out: str
    owner: int | None
    is_trainable: bool
    buffer: int | None
    local_bytes: int
    unsharded_bytes: int
    gather: Way
    gather_reason: str
    reduce: Way
    reduce_reason: str

    @property
    def is_tied(self) -> bool:
        """Whether it is registered under several names."""
        return bool(self.other_names)

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return _product(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameter, in the dtype in which it is kept."""
        return self.numel * self.rests.itemsize


@dataclass(frozen=True, slots=True)
class PlainParamFacts:
    """A parameter that belongs to no group: every rank keeps all of it, and nobody reduces its gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trainable: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return _product(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BufferFacts:
    """The parameters of one dtype in a group, which lie together.

    Attributes:
        dtype: the dtype of the shards.
        param_dtype: the dtype of the unsharded parameters.
        shard_bytes: bytes of the shard buffer at rest, the same on every rank.
        unsharded_bytes: bytes of the unsharded buffer, while there is one.
    """

    dtype: torch.dtype
    param_dtype: torch.dtype
    shard_bytes: int
    unsharded_bytes: int


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """The gradients of one group that are reduced in one dtype.

    Attributes:
        dtype: the dtype in which they are reduced.
        delivered_dtype: the dtype of ``.grad``; None if parameters differ, or it is not known before gradients arrive.
        params: indices into `GroupFacts.params`.
        delivered_bytes: bytes of the flat buffer that ``.grad`` lies on between backward and ``zero_grad()``.
    """

    dtype: torch.dtype
    delivered_dtype: torch.dtype | None
    params: tuple[int, ...]
    delivered_bytes: int


@dataclass(frozen=True, slots=True)
class RestFacts:
    """How parameters are sharded between forward and backward, if that is over fewer ranks than at other times.

    Attributes:
        ranks: the ranks that share them, counted in the whole job.
        nbytes: how many bytes this rank keeps for that time.
    """

    ranks: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The parameters of one `fully_shard` call on one mesh: they are gathered and reduced together.

    Attributes:
        index: its index in `ModelFacts.groups`.
        name: the name, below the model, of the module that `fully_shard` was called on; "" for the model itself.
        modules: all modules of the call, if it was called on a list; else that module.
        class_name: the class of the first module.
        shares_with: other sharded modules that use its parameters (tied weights).
        is_root: whether its module is outermost, so that its parameters stay unsharded from forward to backward by
            default.
        params: its parameters, in the order of the group.
        mesh: the axes of the data-parallel mesh.
        shard_ranks: the ranks of the whole job that hold the shards of one copy; one rank if nothing is sharded.
        replicate_ranks: the ranks that hold the same shard; one rank if there is one copy.
        device: where this rank computes.
        backend: the backend of its process groups: "nccl", "gloo", ...
        reshard_after_forward: whether the end of forward frees the unsharded parameters; an int: to how many ranks.
        reshard_after_backward: whether the end of backward frees them; None: if it reduces.
        strategy: the strategy that this amounts to: "replicate", "zero1", "zero2", "zero3"; "" if to none.
        unshards_in_backward: whether backward needs the parameters.
        offloads: what stays in host memory, of "parameters", "gradients", "optimizer_state", "gradient_sums".
        buffers: one for each pair of dtypes.
        gradients: one for each dtype of reduction.
        rests: how parameters are sharded between forward and backward, if over fewer ranks.
        prefetches: the groups that are gathered after this one in forward, as the user has set; None: as learned.
        settings: other settings of the user, by their names in `GroupSettings`.
        is_exact: False if some bytes are not known: for tensors that gather themselves, and communication hooks.
    """

    index: int
    name: str
    modules: tuple[str, ...]
    class_name: str
    shares_with: tuple[str, ...]
    is_root: bool
    params: tuple[ParamFacts, ...]
    mesh: tuple[MeshAxis, ...]
    shard_ranks: tuple[int, ...]
    replicate_ranks: tuple[int, ...]
    device: torch.device
    backend: str
    reshard_after_forward: bool | int
    reshard_after_backward: bool | None
    strategy: str
    unshards_in_backward: bool
    offloads: tuple[str, ...]
    buffers: tuple[BufferFacts, ...]
    gradients: tuple[GradientFacts, ...]
    rests: RestFacts | None
    prefetches: tuple[str, ...] | None
    settings: tuple[tuple[str, str], ...]
    is_exact: bool

    @property
    def title(self) -> str:
        """Its name, or the class of the model."""
        return self.name or self.class_name

    @property
    def shard_size(self) -> int:
        """How many ranks it is sharded over."""
        return len(self.shard_ranks)

    @property
    def replicate_size(self) -> int:
        """How many copies there are."""
        return len(self.replicate_ranks)

    @property
    def numel(self) -> int:
        """Elements of the full parameters."""
        return sum(param.numel for param in self.params)

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameters, in the dtypes in which they are kept."""
        return sum(param.nbytes for param in self.params)

    @property
    def local_bytes(self) -> int:
        """Bytes of the parameters that this rank keeps at rest, without padding."""
        return sum(param.local_bytes for param in self.params)

    @property
    def shard_bytes(self) -> int:
        """Bytes that this rank keeps at rest, padding included."""
        extended = sum(param.local_bytes for param in self.params if param.buffer is None)
        return extended + sum(buffer.shard_bytes for buffer in self.buffers)

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameters, while there are any."""
        extended = sum(param.unsharded_bytes for param in self.params if param.buffer is None)
        return extended + sum(buffer.unsharded_bytes for buffer in self.buffers)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the sharded gradients between backward and ``zero_grad()``."""
        return sum(each.delivered_bytes for each in self.gradients)


@dataclass(frozen=True, slots=True)
class ExchangeFacts:
    """One kind of exchange of a group in one step: one forward, one backward that reduces, one optimizer step.

    Attributes:
        group: index into `ModelFacts.groups`.
        during: the pass in which it happens.
        kind: the kind of collective.
        ranks: the ranks of the process group, counted in the whole job.
        times: how often it happens in a step.
        members: bytes of one rank in each collective: what it gives to an all-gather, what it gets of a reduce-scatter,
            all of an all-reduce. Several members are one launch on devices, one collective each on a CPU.
        inside_bytes: bytes that a rank sends in a step to ranks of its node: in a ring that goes through one node after
            the other, on the average of its ranks; where ranks exchange in pairs, as on gloo, for this rank.
        between_bytes: bytes that it sends likewise to ranks of other nodes.
        way: "ring" or "pairs".
    """

    group: int
    during: Pass
    kind: Kind
    ranks: tuple[int, ...]
    times: int
    members: tuple[int, ...]
    inside_bytes: int
    between_bytes: int
    way: Literal["ring", "pairs"]

    @property
    def part_bytes(self) -> int:
        """Bytes of one rank in all members of one exchange."""
        return sum(self.members)

    @property
    def collectives(self) -> int:
        """How many collectives there are in a step: one for each member."""
        return self.times * len(self.members)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in a step."""
        return self.inside_bytes + self.between_bytes


@dataclass(frozen=True, slots=True)
class OrderFacts:
    """The order in which groups are gathered, as indices.

    Attributes:
        is_learned: whether it comes from the last step; else it is the order of the modules, which is a guess.
        forward: the order in forward.
        backward: the order in backward.
        prefetch_bytes: how much is gathered ahead; None: one module's parameters.
        backward_prefetch: when a module's backward gathers what comes next: "before", "after" or "never".
    """

    is_learned: bool
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    prefetch_bytes: int | None
    backward_prefetch: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model, sharded or not.

    Attributes:
        class_name: the class of the model.
        world_size: ranks of the whole job; 1 without a process group.
        rank: the rank of this process.
        ranks_per_node: how many ranks share a node, as assumed for `ExchangeFacts`.
        is_meta: whether some parameters have no memory yet.
        roots: names of the outermost sharded modules.
        groups: the groups, in the order of the modules.
        ignored: parameters that `fully_shard` was told to ignore.
        unsharded: other parameters that belong to no group.
        order: the order of gathers.
        exchanges: what one step exchanges.
    """

    class_name: str
    world_size: int
    rank: int
    ranks_per_node: int
    is_meta: bool
    roots: tuple[str, ...]
    groups: tuple[GroupFacts, ...]
    ignored: tuple[PlainParamFacts, ...]
    unsharded: tuple[PlainParamFacts, ...]
    order: OrderFacts
    exchanges: tuple[ExchangeFacts, ...]

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return -(-self.world_size // self.ranks_per_node)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, unsharded, in the dtypes in which they are kept."""
        plain = (*self.ignored, *self.unsharded)
        return sum(group.nbytes for group in self.groups) + sum(each.nbytes for each in plain)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        plain = (*self.ignored, *self.unsharded)
        return sum(group.numel for group in self.groups) + sum(_product(each.shape) for each in plain)

    def exchanges_of(self, group: int) -> tuple[ExchangeFacts, ...]:
        """The exchanges of the group with this index."""
        return tuple(each for each in self.exchanges if each.group == group)


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
