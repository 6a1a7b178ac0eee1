"""What drawn programs cover: their features, and the pairs of features that occur together.

Owns the names of features and which of them exclude each other, with reasons. Run as a program it searches seeds whose
programs cover every other pair, and prints `seeds`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from tests.multi_rank.combinations.helpers.drawn.programs import MESHES, RANKS, SUMS_COPIES, Program, draw

Pair = tuple[str, str]

INCOMPATIBLE: tuple[tuple[str, str, str], ...] = (
    ("accumulation: mixed", "mesh: 1d_*", "no all-reduce to put off"),
    ("accumulation: mixed", "mesh: tp", "no all-reduce to put off"),
    ("accumulation: mixed", "mesh: dims shard", "no all-reduce to put off"),
    ("accumulation: mixed", "mesh: dims shard+tp", "no all-reduce to put off"),
    ("accumulation: mixed", "mesh: dims replicate", "no all-reduce to put off"),
    ("accumulation: partial", "mesh: 1d_*", "no all-reduce to put off"),
    ("accumulation: partial", "mesh: tp", "no all-reduce to put off"),
    ("accumulation: partial", "mesh: dims shard", "no all-reduce to put off"),
    ("accumulation: partial", "mesh: dims shard+tp", "no all-reduce to put off"),
    ("accumulation: partial", "mesh: dims replicate", "no all-reduce to put off"),
    ("accumulation: mixed", "tied: norms", "of a mesh without replicas"),
    ("accumulation: partial", "tied: norms", "of a mesh without replicas"),
    ("optimizer in backward", "accumulation: *", "it steps when a gradient arrives, which must be the whole one"),
    ("optimizer in backward", "several passes", "the same"),
    ("optimizer in backward", "zero_grad: *", "its hooks clear gradients"),
    ("optimizer in backward", "clip: *", "the norm is known when all gradients are"),
    ("optimizer in backward", "ignored", "its gradient is reduced after backward, by the caller"),
    ("optimizer in backward", "copy_on", "hooks of users refer to the optimizers of the original"),
    ("optimizer in backward", "fail_backward", "it would have stepped some parameters before the failure"),
    ("clip: torch", "mesh: tp", "torch's refuses several meshes"),
    ("clip: torch", "mesh: dims shard+tp", "the same"),
    ("clip: torch", "tied: norms", "of the mesh tp"),
    ("optimizer in backward", "fail_forward", "of a block that is skipped nothing fails, and it would have stepped"),
    ("fail_backward", "load_assign", "until it steps an optimizer's zero_grad clears parameters of before"),
    ("copy_on", "load_assign", "that is in test_copied_optimizers.py"),
    ("fail_*ward", "zero_grad: *", "recovery clears gradients, to None"),
    ("load_assign", "zero_grad: *", "what is assigned has no gradient"),
    ("unwrap", "zero_grad: keep", "`fully_shard` takes no gradients along"),
    ("unwrap", "zero_grad: zeros", "the same"),
    ("unwrap", "zero_grad: module_zeros", "the same"),
    ("ignored", "mesh: dims *", "it would be no DTensor, and meet DTensors"),
    *([("strides", "mesh: dims *", "autograd's copy of the gradient is summed over ranks")] if SUMS_COPIES else []),
    ("mesh: tp", "tied: blocks", "`parallelize_module` unties what it cuts; their norms are tied instead"),
    ("tied: norms", "mesh: [!t]*", "see above: other meshes tie more"),
    ("tied: norms", "uneven", "of the mesh tp"),
    ("mesh: tp", "uneven", "torch's tensor parallelism wants even sizes"),
    ("mesh: dims shard+tp", "uneven", "the same"),
    ("root only", "forward prefetch", "of one unit"),
    ("root only", "backward prefetch", "of one unit"),
    ("root only", "list of modules", "one unit is one module"),
    ("root only", "nested units", "the same"),
    ("root only", "tied: inp first", "inp and head are units"),
    ("root only", "tied: head first", "the same"),
    ("list of modules", "nested units", "drawn one or the other"),
    ("strategy replicate", "mesh: dims *shard*", "named dims say what is sharded"),
    ("strategy zero?", "mesh: dims replicate", "the same"),
    ("switch to replicate", "mesh: dims *shard*", "the same"),
    ("switch to zero?", "mesh: dims replicate", "the same"),
    ("set custom_*", "set group_memory", "fsdp2 refuses both together"),
    ("placement: balanced", "mesh: dims *", "`balanced_owners` leaves DTensors out"),
)
"""Features that no program has together, as patterns, and why. A feature "axis: value" excludes others of its axis."""


def excluded(pair: Pair) -> bool:
    """Whether no program may have both."""
    axes = [feature.split(":")[0] for feature in pair if ":" in feature]
    if len(axes) == 2 and axes[0] == axes[1]:
        return True
    return any(
        fnmatchcase(one, first) and fnmatchcase(other, second)
        for first, second, _ in INCOMPATIBLE
        for one, other in (pair, pair[::-1])
    )


def features(program: Program) -> set[str]:
    """What running this program covers."""
    return _of_model(program) | _of_calls(program) | _of_training(program)


def _of_model(program: Program) -> set[str]:
    model = program.model
    named = {
        f"tied: {model.tied}": model.tied != "no",
        "0-D parameters": model.gain,
        "strides": model.strided != "no",
        "frozen integers": model.codes,
        "repeated block": model.repeated,
        "skipped block": any(each is not None for each in model.skipped),
        "used on some ranks": model.some_ranks,
        "unused": model.unused,
        "frozen": bool(model.frozen),
        "uneven": model.width % RANKS[program.mesh] != 0 or model.hidden % RANKS[program.mesh] != 0,
    }
    kinds = {f"checkpoint {kind}" for kind in model.checkpoint if kind != "none"}
    return kinds | {name for name, holds in named.items() if holds}


def _of_calls(program: Program) -> set[str]:
    found = {f"mesh: {program.mesh}{'' if not program.dims else ' ' + '+'.join(sorted(program.dims))}"}
    found |= {f"reshard {unit.reshard}" for unit in program.units if unit.reshard is not None}
    found |= {f"strategy {unit.strategy}" for unit in program.units if unit.strategy is not None}
    named = {
        f"placement: {program.placement}": program.placement != "default",
        f"precision: {'by parameter' if program.by_parameter else 'bf16'}": program.param_dtype is not None,
        f"reduce_dtype: {program.reduce_dtype}": program.reduce_dtype is not None,
        f"cast: {program.cast}": program.cast != "all",
        "output_dtype": program.output_dtype is not None,
        "buffer_dtype": program.buffer_dtype is not None,
        f"offload: {program.offload}": program.offload != "no",
        "ignored": program.ignored,
        "root only": len(program.units) == 1,
        "list of modules": any(len(unit.names) > 1 for unit in program.units),
        "nested units": any(unit.names[0].endswith("feed") for unit in program.units),
    }
    return found | {name for name, holds in named.items() if holds}


def _of_training(program: Program) -> set[str]:
    settings = {name for name, _, _, _ in program.settings if name != "reduction"}
    reductions = {value for name, value, _, _ in program.settings if name == "reduction"}
    found = {f"set {name}" for name in settings}
    found |= {f"reduction {each}" if isinstance(each, str) else _kind_of_number(each) for each in reductions}
    found |= {f"switch to {value[1]}" for name, value, _, _ in program.settings if name == "strategy"}
    found |= {"a setting in mid-pass" for _, _, _, point in program.settings if point == "middle"}
    found |= {f"{direction} prefetch" for direction, _, _ in program.prefetch}
    found |= {event.action for event in program.events}
    found |= {f"an event {event.point}" for event in program.events}
    named = {
        f"accumulation: {program.accumulation}": program.accumulation != "plain",
        f"zero_grad: {program.zero}": program.zero != "none",
        f"clip: {program.clip}": program.clip != "no",
        "optimizer in backward": program.in_backward,
        f"optimizer: {program.optimizer}": program.optimizer != "plain",
        "two forwards": max(program.forwards) > 1,
        "several passes": len(program.forwards) > 1,
    }
    return found | {name for name, holds in named.items() if holds}


def _kind_of_number(value: object) -> str:
    return "reduction tensor" if isinstance(value, tuple) else "reduction number"


def pairs(program: Program) -> set[Pair]:
    """Every two of its features."""
    return set(itertools.combinations(sorted(features(program)), 2))


def covered(seeds: Mapping[str, Sequence[int]]) -> tuple[set[str], set[Pair]]:
    """The features and pairs of these programs."""
    programs = [draw(mesh, seed) for mesh, of_mesh in seeds.items() for seed in of_mesh]
    return set().union(*map(features, programs)), set().union(*map(pairs, programs))


def _news(program: Program) -> set[Pair]:
    return pairs(program) | {(feature, feature) for feature in features(program)}


COSTS = {"1d_2": 1.0, "1d_4": 2.0, "hsdp": 2.0, "tp": 3.0, "dims": 4.0}
"""Of programs on each mesh, in seconds of the first."""


def search(count: int, most: int) -> dict[str, list[int]]:
    """Seeds below ``count`` of each mesh, ``most`` together, each chosen for the most new pairs for what it costs."""
    missing = {(mesh, seed): _news(draw(mesh, seed)) for mesh in MESHES for seed in range(count)}
    chosen: dict[str, list[int]] = {mesh: [] for mesh in MESHES}
    for _ in range(most):
        best = max(missing, key=lambda where: len(missing[where]) / COSTS[where[0]])
        taken = missing.pop(best)
        chosen[best[0]].append(best[1])
        for where in missing:
            missing[where] -= taken
    return {mesh: sorted(seeds) for mesh, seeds in chosen.items()}


if __name__ == "__main__":
    for name, seeds in search(int(sys.argv[1]), int(sys.argv[2])).items():
        print(f'    "{name}": """{" ".join(map(str, seeds))}""",')
