"""Programs drawn from a seed: everything that a user may combine around `fully_shard`, as frozen data.

Owns what is drawn and what is legal together; `drawn_training` runs a program and knows what it must compute.
Every rank draws the same program, and `features` says which of its features count as covered.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

MESHES = ("1d_2", "1d_4", "hsdp", "tp", "dims")
RANKS = {"1d_2": 2, "1d_4": 4, "hsdp": 4, "tp": 4, "dims": 4}
STEPS = 3

REFUSALS = {"int_with_dims": "dp_mesh_dims"}
"""The only reasons for which a drawn program may be refused with `FSDPNotImplementedError`, and a part of the text."""


@dataclass(frozen=True)
class ModelDraw:
    """The model. Sizes are uneven where the mesh allows it."""

    width: int
    hidden: int
    blocks: int
    tied: bool
    repeated: bool  # the first block is called twice in each forward
    skipped: tuple[int | None, ...]  # for each step, a block that no rank calls
    some_ranks: bool  # a parameter of every block is used on some ranks only
    unused: bool  # a parameter of every block is never used
    frozen: tuple[str, ...]  # prefixes of names
    checkpoint: tuple[str, ...]  # of each block: none, block or feed, reentrant or not

    def reduces_often(self, forwards: tuple[int, ...]) -> bool:
        """Whether a parameter is reduced several times in a pass: each reentrant recompute is a backward of its own."""
        is_reentrant = any(kind.endswith("reentrant") for kind in self.checkpoint)
        return is_reentrant and (self.repeated or max(forwards) > 1)


@dataclass(frozen=True)
class UnitDraw:
    """One `fully_shard` call: names of modules ("" is the root) and its own arguments."""

    names: tuple[str, ...]
    reshard: bool | int | None


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
    cast_inputs: bool
    offload: bool
    ignored: bool
    forwards: tuple[int, ...]  # how many forwards each pass (one backward) has
    accumulation: str
    zero: str
    clip: bool
    in_backward: bool
    prefetch: tuple[tuple[str, int, tuple[int, ...]], ...]  # direction, unit, units to gather
    settings: tuple[tuple[str, Any, int, str], ...]  # name, value, step, and the point of its first pass
    events: tuple[Event, ...]
    refusal: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the arithmetic is the reference's, bit for bit."""
        if self.accumulation == "manual" and len(self.forwards) > 1:
            return False  # what has no end of its own adds up unsharded until it is finalized
        if self.model.reduces_often(self.forwards):
            return False
        return self.mesh == "1d_2" and not (self.param_dtype or self.clip or self.ignored)

    def features(self) -> set[str]:
        """What running this program covers."""
        model = self.model
        found = {
            f"mesh {self.mesh}{'' if not self.dims else ' ' + '+'.join(sorted(self.dims))}",
            f"placement {self.placement}",
            f"param_dtype {self.param_dtype}",
            f"reduce_dtype {self.reduce_dtype}",
            f"accumulation {self.accumulation}",
            f"zero_grad {self.zero}",
        }
        found |= {f"reshard {unit.reshard}" for unit in self.units}
        found |= {f"checkpoint {kind}" for kind in model.checkpoint}
        found |= {f"set {name}" for name, _, _, _ in self.settings}
        found |= {"a setting between forward and backward" for _, _, _, point in self.settings if point == "middle"}
        found |= {f"{direction} prefetch" for direction, _, _ in self.prefetch}
        found |= {f"{event.action} {event.point}" for event in self.events}
        found |= {"list of modules" for unit in self.units if len(unit.names) > 1}
        found |= {"nested units" for unit in self.units if unit.names[0].endswith("feed")}
        named = {
            "tied": model.tied,
            "repeated block": model.repeated,
            "skipped block": any(each is not None for each in model.skipped),
            "used on some ranks": model.some_ranks,
            "unused": model.unused,
            "frozen": bool(model.frozen),
            "output_dtype": self.output_dtype is not None,
            "inputs not cast": not self.cast_inputs,
            "offload": self.offload,
            "ignored": self.ignored,
            "two forwards": max(self.forwards) > 1,
            "several passes": len(self.forwards) > 1,
            "clip": self.clip,
            "optimizer in backward": self.in_backward,
            "root only": len(self.units) == 1,
            "uneven": model.width % RANKS[self.mesh] != 0 or model.hidden % RANKS[self.mesh] != 0,
            f"refused {self.refusal}": self.refusal is not None,
        }
        return found | {name for name, holds in named.items() if holds}


def draw(mesh: str, seed: int) -> Program:
    """The program of this seed."""
    return _Drawing(mesh, seed).program()


class _Drawing:
    def __init__(self, mesh: str, seed: int) -> None:
        self.mesh = mesh
        self.seed = seed
        self.random = random.Random(f"{mesh}:{seed}")
        self.dims: dict[str, Any] = {}

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
        refusal = self._refusal() if self.chance(0.04) else None
        model = self._model()
        units = self._units(model, refusal)
        bf16 = self.chance(0.25)
        reduce_dtype = self.choose([None, "float32", "bfloat16"]) if bf16 else None
        forwards = self._forwards()
        accumulation = self._accumulation(len(forwards))
        in_backward = accumulation == "plain" and len(forwards) == 1 and self.chance(0.15)
        in_backward = in_backward and not model.reduces_often(forwards)
        zeros = ["none", "none", "none", "zeros", "module", "module_zeros", "keep"]
        zero = "none" if in_backward else self.choose(zeros)
        clip = not in_backward and not self.is_tensor_parallel and self.chance(0.2)
        return Program(
            seed=self.seed,
            mesh=self.mesh,
            dims=self.dims,
            model=model,
            units=units,
            placement=self.choose(["default", "default", "default", "zero", "one", "mixed", "uneven"]),
            param_dtype="bfloat16" if bf16 else None,
            reduce_dtype=reduce_dtype,
            output_dtype="float32" if bf16 and self.chance(0.5) else None,
            cast_inputs=not (bf16 and self.chance(0.3)),
            offload=self.chance(0.2),
            ignored=self.mesh != "dims" and not in_backward and self.chance(0.2),
            forwards=forwards,
            accumulation=accumulation,
            zero=zero,
            clip=clip,
            in_backward=in_backward,
            prefetch=self._prefetch(len(units)),
            settings=self._settings(len(units)),
            events=self._events(len(units), model, forwards, zero),
            refusal=refusal,
        )

    def _refusal(self) -> str | None:
        return "int_with_dims" if self.mesh == "dims" and "shard" in self.dims else None

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
            tied=self.mesh != "dims" and self.chance(0.2),
            repeated=self.chance(0.2),
            skipped=skipped,
            some_ranks=self.chance(0.3),
            unused=self.chance(0.3),
            frozen=frozen,
            checkpoint=checkpoint,
        )

    def _units(self, model: ModelDraw, refusal: str | None) -> tuple[UnitDraw, ...]:
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
        if style != "root" and self.chance(0.4):
            calls.append(("shift",))
        calls.append(("",))
        uniform = self.chance(0.5)
        options: list[bool | int | None] = [None, True, False]
        if self.mesh != "dims":  # the number of shards, or half of it
            options += [2, 2] if self.mesh == "1d_4" else [2]
        first = self.choose(options)
        units = [UnitDraw(call, first if uniform else self.choose(options)) for call in calls]
        if refusal == "int_with_dims":
            units[0] = UnitDraw(units[0].names, 2)
        return tuple(units)

    def _forwards(self) -> tuple[int, ...]:
        passes = self.choose([1, 1, 2, 3])
        return tuple(2 if self.chance(0.15) else 1 for _ in range(passes))

    def _accumulation(self, passes: int) -> str:
        kinds = ["plain", "no_sync", "not_last", "manual", "manual_no_sync"]
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

    def _settings(self, units: int) -> tuple[tuple[str, Any, int, str], ...]:
        """Each is made at the start of a step, or between forward and backward of its first pass."""
        chosen: list[tuple[str, Any]] = []
        one = self.random.randrange(units)
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
            ("async_unshard", True),
            ("no_unshard_of_shift", True),
            ("refreeze", self.choose([True, False])),
        ]
        for name, value in possible:
            if self.chance(0.1):
                chosen.append((name, value))
        names = {name for name, _ in chosen}
        if names & {"custom_all_gather", "custom_reduce_scatter"}:  # exclude each other
            chosen = [(name, value) for name, value in chosen if name != "group_memory"]
        # What these change is defined for whole passes only.
        of_passes = ("divide_factor", "all_reduce_hook", "refreeze")
        points = ["start", "start", "middle"]
        return tuple(
            (name, value, self.choose([0, 0, 1, 2]), "start" if name in of_passes else self.choose(points))
            for name, value in chosen
        )

    def _events(self, units: int, model: ModelDraw, forwards: tuple[int, ...], zero: str) -> tuple[Event, ...]:
        events = []
        for _ in range(self.choose([0, 0, 1, 2, 4, 6])):
            step, number = self.random.randrange(STEPS), self.random.randrange(len(forwards))
            point = self.choose(["before forward", "before backward", "after backward", "before step", "after step"])
            action = self.choose(["unshard", "unshard_async", "unshard_wait", "reshard", "eval", "inference", "save"])
            if point in ("before step", "after step"):
                number = -1
                if self.chance(0.4):
                    assigns = zero == "none" and point == "after step"
                    action = self.choose(["load", "load_full", *(["load_assign"] if assigns else [])])
            elif number == 0 and zero == "none" and point == "before forward" and self.chance(0.3):
                action = self.choose(["fail_forward", "fail_backward"])
            target = self.random.randrange(model.blocks if action.startswith("fail") else units)
            events.append(Event(step, number, point, action, target))
        return tuple(events)
