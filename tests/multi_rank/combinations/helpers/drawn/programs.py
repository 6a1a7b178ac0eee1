"""Programs drawn from a seed: everything that a user may combine around `fully_shard`, as frozen data.

Owns what is drawn and what is legal together; `training` runs a program and knows what it must compute.
Every rank draws the same program, and `features` says which of its features count as covered.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

T = TypeVar("T")

SUMS_COPIES = torch.__version__ < "2.13"
"""DTensor sums a gradient over all ranks when autograd copies it, as it does for parameters of other strides."""

MESHES = ("1d_2", "1d_4", "hsdp", "tp", "dims")
RANKS = {"1d_2": 2, "1d_4": 4, "hsdp": 4, "tp": 4, "dims": 4}
STEPS = 3


@dataclass(frozen=True)
class ModelDraw:
    """The model. Sizes are uneven where the mesh allows it."""

    width: int
    hidden: int
    blocks: int
    tied: str  # "no"; inp and head, of the "root" or in two units, "inp first" or "head first"; "blocks", "norms": two
    gain: bool  # a parameter of no dims in every block and in the root
    strided: str  # "no"; transposed, permuted and channels-last weights in every block; the last "conv" or "sum"
    codes: bool  # frozen integers in every block
    repeated: bool  # the first block is called twice in each forward
    skipped: tuple[int | None, ...]  # for each step, a block that no rank calls
    some_ranks: bool  # a parameter of every block is used on some ranks only
    unused: bool  # a parameter of every block is never used
    frozen: tuple[str, ...]  # prefixes of names
    checkpoint: tuple[str, ...]  # of each block: none, block or feed, reentrant or not

    def reduces_often(self, forwards: tuple[int, ...]) -> bool:
        """Whether a parameter is reduced several times in a pass: each reentrant recompute is a backward of its own."""
        return self.is_reentrant and (self.repeated or max(forwards) > 1)

    @property
    def is_reentrant(self) -> bool:
        """Whether something is computed again in a backward inside of the backward."""
        return any(kind.endswith("reentrant") for kind in self.checkpoint)


@dataclass(frozen=True)
class UnitDraw:
    """One `fully_shard` call: names of modules ("" is the root) and its own arguments."""

    names: tuple[str, ...]
    reshard: bool | int | None
    strategy: str | None = None


@dataclass(frozen=True)
class Event:
    """Something that happens beside training, at a point of a pass."""

    step: int
    number: int  # of the pass; -1 for points of a step
    point: str
    action: str
    target: int = 0  # index of a unit or block


@dataclass(frozen=True)
class Program:
    """A training program."""

    seed: int
    mesh: str
    dims: dict[str, Any]
    model: ModelDraw
    units: tuple[UnitDraw, ...]
    placement: str
    param_dtype: str | None
    reduce_dtype: str | None
    output_dtype: str | None
    buffer_dtype: str | None
    by_parameter: bool  # the policy is a function: norms stay float32, biases are reduced in another dtype
    cast: str  # which inputs `fully_shard` casts: "all", "none", or those "named"
    offload: str  # "no", "all", "some" parameters, or of "gradients" and "state" one or "both"
    ignored: bool
    forwards: tuple[int, ...]  # how many forwards each pass (one backward) has
    accumulation: str
    zero: str
    clip: str  # "no", or whose function: "torch", "fsdp2"
    in_backward: bool
    optimizer: str  # torch's, "plain", or of fsdp2.optim: "local", or "flat" too
    prefetch: tuple[tuple[str, int, tuple[int, ...]], ...]  # direction, unit, units to gather
    settings: tuple[tuple[str, Any, int, str], ...]  # name, value, step, and the point of its first pass
    events: tuple[Event, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the arithmetic is the reference's, bit for bit."""
        if self.accumulation == "manual" and len(self.forwards) > 1:
            return False  # what has no end of its own adds up unsharded until it is finalized
        if self.model.reduces_often(self.forwards) or self.model.tied in ("inp first", "head first", "blocks"):
            return False  # uses of a weight are added up in another order
        if self.model.is_reentrant and len(self.forwards) > 1 and any(len(unit.names) > 1 for unit in self.units):
            return False  # what earlier passes have left is reduced with the first module of a list
        return self.mesh == "1d_2" and not (self.param_dtype or self.clip != "no" or self.ignored)

    def dtypes_of(self, name: str) -> tuple[str | None, str | None]:
        """What the parameter of this name is computed in, and its gradients reduced in; None: as they are."""
        if not self.by_parameter:
            return self.param_dtype, self.reduce_dtype
        if "norm" in name:
            return None, "float32"
        other = "bfloat16" if self.reduce_dtype == "float32" else "float32"
        return self.param_dtype, other if name.endswith("bias") else self.reduce_dtype


def sharers(units: Sequence[UnitDraw], model: ModelDraw) -> set[int]:
    """The units that use a weight which another, earlier one owns."""
    tied = {"inp first": [("inp", "head")], "head first": [("inp", "head")], "root": [("inp", "head")]}
    last = model.blocks - 1
    norms = [("blocks.0.norm", f"blocks.{last}.norm")]
    tied |= {"norms": norms, "blocks": [*norms, ("blocks.0.feed", f"blocks.{last}.feed")]}
    found: set[int] = set()
    for modules in tied.get(model.tied, []):
        using = {_unit_of(units, module) for module in modules}
        found |= using - {min(using)}
    return found


def _unit_of(units: Sequence[UnitDraw], module: str) -> int:
    """The first unit that holds the module: calls go bottom-up."""
    for index, unit in enumerate(units):
        if any(name in ("", module) or module.startswith(f"{name}.") for name in unit.names):
            return index
    raise AssertionError(f"{module} is in no unit")


def _by_strategy(unit: UnitDraw, strategy: str | None) -> UnitDraw:
    """The same call with this strategy, and without an argument that contradicts it."""
    if strategy is None:
        return unit
    agrees = unit.reshard is None or bool(unit.reshard) == (strategy == "zero3")
    return UnitDraw(unit.names, unit.reshard if agrees else None, strategy)


def draw(mesh: str, seed: int) -> Program:
    """The program of this seed."""
    return _Drawing(mesh, seed).program()


class _Drawing:
    def __init__(self, mesh: str, seed: int) -> None:
        self.mesh = mesh
        self.seed = seed
        self.random = random.Random(f"{mesh}:{seed}")
        self.dims: dict[str, Any] = {}
        self.is_dense = self.chance(0.5)  # many features in one program, which covers pairs of rare ones

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choose(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    @property
    def is_tensor_parallel(self) -> bool:
        return self.mesh == "tp" or bool(self.dims.get("tp"))

    @property
    def has_replicas(self) -> bool:
        return self.mesh == "hsdp" or ("replicate" in self.dims and "shard" in self.dims)

    def program(self) -> Program:
        if self.mesh == "dims":
            self.dims = self.choose(
                [
                    {"shard": "a", "tp": "b"},
                    {"shard": ("a", "b")},
                    {"shard": "b", "replicate": "a"},
                    {"replicate": ("a", "b")},
                ]
            )
        model = self._model()
        units = self._strategies(self._units(model), model)
        replicates = [unit.strategy == "replicate" for unit in units]
        bf16 = self.chance(0.35)
        reduce_dtype = self.choose([None, "float32", "bfloat16"]) if bf16 else None
        forwards = self._forwards()
        accumulation = self._accumulation(len(forwards))
        in_backward = accumulation == "plain" and len(forwards) == 1 and self.chance(0.15)
        in_backward = in_backward and not model.reduces_often(forwards)
        zeros = ["none", "none", "none", "zeros", "module", "module_zeros", "keep"]
        zero = "none" if in_backward else self.choose(zeros)
        clip = "no"
        if not in_backward and self.chance(0.35):  # torch's cannot clip over several meshes
            is_one_mesh = not self.is_tensor_parallel and len(set(replicates)) == 1
            clip = self.choose(["torch", "fsdp2"]) if is_one_mesh else "fsdp2"
        placements = ["default", "default", "default", "zero", "one", "mixed", "uneven", "owned", "row blocks"]
        placements.append("merged rows")
        if self.mesh != "dims":  # `balanced_owners` leaves DTensors out
            placements.append("balanced")
        # Where units of tied weights may be of both kinds, which are asked for placements or not.
        is_asked = not all(replicates) and (self._has_shards or not any(replicates))
        return Program(
            seed=self.seed,
            mesh=self.mesh,
            dims=self.dims,
            model=model,
            units=units,
            placement=self.choose(placements) if is_asked else "default",
            param_dtype="bfloat16" if bf16 else None,
            reduce_dtype=reduce_dtype,
            output_dtype="float32" if bf16 and self.chance(0.5) else None,
            buffer_dtype="bfloat16" if self.chance(0.15) else None,
            by_parameter=bf16 and self.chance(0.4),
            cast=self.choose(["all", "all", "none", "named"]) if bf16 else "all",
            offload=self.choose(["all", "some", "gradients", "state", "both"]) if self.chance(0.35) else "no",
            ignored=self.mesh != "dims" and not in_backward and self.chance(0.2),
            forwards=forwards,
            accumulation=accumulation,
            zero=zero,
            clip=clip,
            in_backward=in_backward,
            optimizer=self.choose(["plain", "plain", "local", "flat"]),
            prefetch=self._prefetch(len(units)),
            settings=self._settings(units),
            events=self._events(len(units), model, forwards, zero, in_backward),
        )

    def _model(self) -> ModelDraw:
        blocks = self.choose([1, 2, 2, 3])
        parts = ["inp", "head", *(f"blocks.{index}" for index in range(blocks))]
        parts += [f"blocks.{index}.{name}" for index in range(blocks) for name in ("norm", "feed.up", "feed.down.bias")]
        frozen = tuple(self.random.sample(parts, self.choose([1, 1, 2]))) if self.chance(0.3) else ()
        skipped: tuple[int | None, ...] = (None,) * STEPS
        if blocks > 1 and self.chance(0.2):
            skipped = tuple(self.choose([None, self.random.randrange(blocks)]) for _ in range(STEPS))
        kinds = ["none", "none", "block", "block_reentrant", "feed", "feed_reentrant"]
        checkpoint = ("none",) * blocks
        if self.chance(0.35):
            checkpoint = tuple(self.choose(kinds) for _ in range(blocks))
        return ModelDraw(
            width=8 if self.is_tensor_parallel else self.choose([3, 5, 8]),
            hidden=self.choose([8, 12] if self.is_tensor_parallel else [5, 7, 12]),
            blocks=blocks,
            tied=self._tied(blocks),
            gain=self.chance(0.35),
            strided=self._strided() if self.chance(0.35) else "no",
            codes=self.chance(0.35),
            repeated=self.chance(0.2),
            skipped=skipped,
            some_ranks=self.chance(0.3),
            unused=self.chance(0.3),
            frozen=frozen,
            checkpoint=checkpoint,
        )

    def _strided(self) -> str:
        if self.mesh != "dims":
            return "conv"
        return "no" if SUMS_COPIES else "sum"

    def _tied(self, blocks: int) -> str:
        if not self.chance(0.4):
            return "no"
        shared = "norms" if self.mesh == "tp" else "blocks"  # `parallelize_module` unties what it cuts
        return self.choose(["root", "inp first", "head first", *([shared] * 2 if blocks > 1 else [])])

    def _units(self, model: ModelDraw) -> tuple[UnitDraw, ...]:
        """Bottom-up, the root last."""
        calls: list[tuple[str, ...]] = []
        names = [f"blocks.{index}" for index in range(model.blocks)]
        style = self.choose(["each", "each", "each", "some", "list", "root", "nested"])
        if style == "list" and model.blocks > 1:
            calls += [tuple(names[:2]), *((name,) for name in names[2:])]
        elif style == "nested":
            for name in names:
                calls += [(f"{name}.feed",), (name,)]
        elif style == "some":
            calls += [(name,) for name in names if self.chance(0.5)]
        elif style != "root":
            calls += [(name,) for name in names]
        if style != "nested" and self.chance(0.3):
            calls.reverse()  # of blocks that share a weight, the last owns it
        if style != "root" and self.chance(0.4):
            calls.append(("shift",))
        if model.tied in ("inp first", "head first"):
            first, last = ("inp",), ("head",)
            calls = [first, *calls, last] if model.tied == "inp first" else [last, *calls, first]
        calls.append(("",))
        uniform = self.chance(0.5)
        # The number of shards, or half of it.
        options: list[bool | int | None] = [None, True, False, *([2, 2] if self.mesh == "1d_4" else [2])]
        every = self.choose(options)
        units = [UnitDraw(call, every if uniform else self.choose(options)) for call in calls]
        return tuple(units)

    @property
    def _has_shards(self) -> bool:
        return not self.dims or "shard" in self.dims

    def _strategies(self, units: tuple[UnitDraw, ...], model: ModelDraw) -> tuple[UnitDraw, ...]:
        """The same calls, perhaps by strategy. Weights that are tied between units are sharded in both or in none."""
        if not self.chance(0.4):
            return units
        options = ["zero1", "zero2", "zero3"] if self._has_shards else ["replicate"]
        may_replicate = ["replicate"] if not self.dims else []
        if self.chance(0.5):
            every = self.choose([*options, *may_replicate])
            return tuple(_by_strategy(unit, every) for unit in units)
        mixed = [None, *options, *(may_replicate if not sharers(units, model) else [])]
        return tuple(_by_strategy(unit, self.choose(mixed)) for unit in units)

    def _switch(self, units: tuple[UnitDraw, ...]) -> tuple[int | None, str]:
        """A unit, or None for all, and the strategy that it goes on with: nothing is laid out anew."""
        replicated = [not self._has_shards or unit.strategy == "replicate" for unit in units]
        one: int | None = self.random.randrange(len(units))
        is_replicated = replicated[one]  # type: ignore[index]
        if len(set(replicated)) == 1 and self.chance(0.5):
            one = None
        return one, "replicate" if is_replicated else self.choose(["zero1", "zero2", "zero3"])

    def _forwards(self) -> tuple[int, ...]:
        passes = self.choose([1, 1, 2, 3])
        return tuple(2 if self.chance(0.15) else 1 for _ in range(passes))

    def _accumulation(self, passes: int) -> str:
        kinds = ["plain", "no_sync", "not_last", "manual", "manual_no_sync", "synchronized"]
        if self.has_replicas:
            kinds += ["partial", "partial", "mixed"]
        return self.choose(kinds) if passes > 1 else self.choose(["plain", "plain", "plain", "manual"])

    def _prefetch(self, units: int) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        if units < 2 or not self.chance(0.25):
            return ()
        lists = []
        for _ in range(self.choose([1, 2, 3])):
            upcoming = tuple(self.random.sample(range(units), self.random.randint(0, min(2, units))))
            lists.append((self.choose(["forward", "backward"]), self.random.randrange(units), upcoming))
        return tuple(lists)

    def _settings(self, units: tuple[UnitDraw, ...]) -> tuple[tuple[str, Any, int, str], ...]:
        """Each is made at the start of a step, or between forward and backward of its first pass."""
        chosen: list[tuple[str, Any]] = []
        one = self.random.randrange(len(units))
        possible: list[tuple[str, Any]] = [
            ("divide_factor", (one, self.choose([1.0, 2.0, 3.0]))),
            ("force_sum", one),
            ("unused_params", True),
            ("max_input_buffers", self.choose([2, 3])),
            ("separate_group", True),
            ("custom_all_gather", one),
            ("custom_reduce_scatter", one),
            ("group_memory", one),
            ("all_reduce_hook", one),
            ("keep_storage", True),
            ("reshard_after_backward", False),
            ("reshard_after_forward", self.chance(0.5)),
            ("prefetch_budget", self.choose([0, 2000, 10**6])),
            ("async_unshard", True),
            ("no_unshard_of_shift", True),
            ("refreeze", self.choose([True, False])),
        ]
        for name, value in possible:
            if self.chance(0.25 if self.is_dense else 0.08):
                chosen.append((name, value))
        names = {name for name, _ in chosen}
        if names & {"custom_all_gather", "custom_reduce_scatter"}:  # exclude each other
            chosen = [(name, value) for name, value in chosen if name != "group_memory"]
        # What these change is defined for whole passes only; a budget is refused while one runs.
        of_passes = ("divide_factor", "all_reduce_hook", "refreeze", "prefetch_budget")
        points = ["start", "start", "middle"]
        settings = [
            (name, value, self.choose([0, 0, 1, 2]), "start" if name in of_passes else self.choose(points))
            for name, value in chosen
        ]
        if self.chance(0.4):
            reductions = self.random.sample(["mean", "sum", 3.0, ("tensor", 5.0)], self.choose([1, 2, 3]))
            steps = sorted(self.random.sample(range(STEPS), len(reductions)))
            settings += [("reduction", each, step, "start") for each, step in zip(reductions, steps, strict=True)]
        if self.chance(0.25 if self.is_dense else 0.08):
            for step in sorted(self.random.sample(range(STEPS), self.choose([1, 2, 3]))):
                settings.append(("strategy", self._switch(units), step, "start"))
        return tuple(settings)

    def _events(
        self, units: int, model: ModelDraw, forwards: tuple[int, ...], zero: str, in_backward: bool
    ) -> tuple[Event, ...]:
        events = []
        for _ in range(self.choose([4, 6, 8] if self.is_dense else [0, 0, 1, 2])):
            step, number = self.random.randrange(STEPS), self.random.randrange(len(forwards))
            point = self.choose(["before forward", "before backward", "after backward", "before step", "after step"])
            actions = ["unshard", "unshard_async", "unshard_wait", "reshard", "eval", "inference", "save", "again"]
            action = self.choose(actions)
            if point in ("before step", "after step"):
                number = -1
                if self.chance(0.4):
                    assigns = zero == "none" and point == "after step"
                    action = self.choose(["load", "load_full", *(["load_assign"] if assigns else [])])
                elif self.chance(0.5):
                    action = self._replacement(point, zero, in_backward)
            elif number == 0 and zero == "none" and point == "before forward" and not in_backward and self.chance(0.5):
                action = self.choose(["fail_forward", "fail_backward"])
            target = self.random.randrange(model.blocks if action.startswith("fail") else units)
            events.append(Event(step, number, point, action, target))
        if any(
            event.action in ("copy_on", "fail_backward") for event in events
        ):  # its optimizer must know the new ones
            events = [replace(each, action="load") if each.action == "load_assign" else each for each in events]
        return tuple(events)

    def _replacement(self, point: str, zero: str, in_backward: bool) -> str:
        """An event that replaces the sharded model, or makes another."""
        actions = ["copy_aside"]
        if not in_backward:  # hooks of users refer to the optimizers that they were made with, also in a copy
            actions.append("copy_on")
        if point == "after step" and zero in ("none", "module"):  # `fully_shard` takes no gradients along
            actions.append("unwrap")
        return self.choose(actions)
