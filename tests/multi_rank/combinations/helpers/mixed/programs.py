"""Small training programs in which features meet: an option of each axis, drawn or chosen to cover pairs.

Owns the axes and what cannot be together; `training` runs a program. `drawn` draws the settings of the engine; here are
the things around it: what modules take and return, hooks, what a loop does between two statements, what users do to
parameters and gradients, threads.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping
from fnmatch import fnmatchcase

AXES: dict[str, tuple[str, ...]] = {
    "mesh": ("1d", "1d of 4", "replicas"),
    "units": ("blocks", "root", "several roots", "nested"),
    "reshard": ("default", "True", "False", "2"),
    "precision": ("full", "float32", "float32, inputs as they are", "float32, outputs back"),
    "inputs": ("tensor", "tuple", "list", "dict", "keywords", "dataclass", "namedtuple", "slots", "namespace"),
    "outputs": (
        "tensor", "tuple", "list", "dict", "dataclass", "namedtuple", "slots", "namespace",
        "set", "deque", "closure", "attribute", "detached",
    ),
    "result": ("tensor", "loss", "dict", "dataclass", "slots", "closure", "attribute"),
    "state": ("none", "skips", "cache", "dataclass", "callers", "deque"),
    "hooks": (
        "none", "pre", "pre with keywords", "forward", "global", "backward", "backward pre", "activation",
        "parameter", "post accumulate",
    ),
    "place": ("block", "root", "inner"),
    "order": ("first", "penalty", "penalty and loss", "two forwards", "retained", "slopes", "two calls"),
    "checkpoint": ("no", "feed", "feed, reentrant"),
    "surgery": (
        "none", "data scaled", "written", "averaged", "foreach",
        "gradient scaled", "gradient replaced", "gradient dropped", "gradient given", "gradients foreach",
        "clipped", "clipped by fsdp2",
    ),
    "event": (
        "none", "raise in loss", "raise late", "raise late on one", "raise in backward", "evaluate", "inference",
        "save", "load", "zero by model", "zero by optimizer", "forward only",
        "func.grad", "func.vmap", "func.jvp", "copy",
    ),
    "point": ("before forward", "after forward", "after backward", "after step"),
    "zero": ("optimizer", "model", "optimizer to zeros", "model to zeros", "kept"),
    "steps": ("all", "one left out"),
    "microbatches": ("one", "two", "two, synchronized once", "two, the last one said"),
    "optimizer": ("sgd", "adamw", "local", "in backward"),
    "threads": ("none", "loader", "backward", "step"),
}  # fmt: skip
"""Each axis with its options; the first is the plain one."""

Mix = Mapping[str, str]
"""A program: an option of every axis, and under "seed" a number for what is left to chance."""

Rules = tuple[tuple[str, str, str], ...]
"""Options that no program has together, as patterns of "axis: option", and why."""

EXCLUDED: Rules = (
    ("optimizer: in backward", "microbatches: two*", "it steps when a gradient arrives, which must be the whole one"),
    ("optimizer: in backward", "surgery: gradient*", "its hooks have cleared the gradients"),
    ("optimizer: in backward", "surgery: clipped*", "the norm is known when all gradients are"),
    ("optimizer: in backward", "zero: [!o]*", "its hooks clear gradients"),
    ("optimizer: in backward", "zero: optimizer to zeros", "the same"),
    ("optimizer: in backward", "steps: one left out", "it has stepped"),
    ("optimizer: in backward", "order: retained", "the graph's parameters are changed by the first backward"),
    ("optimizer: in backward", "order: two calls", "the same"),
    ("optimizer: in backward", "event: raise in backward", "it would have stepped some parameters"),
    ("optimizer: in backward", "checkpoint: feed, reentrant", "a backward for each checkpoint: the same"),
    ("optimizer: in backward", "hooks: post accumulate", "two hooks, of which the first clears the gradient"),
    ("hooks: parameter", "microbatches: two, synchronized once", "a hook on parameters sees the sum, once"),
    ("hooks: post accumulate", "microbatches: two, synchronized once", "the same"),
    ("checkpoint: feed, reentrant", "hooks: parameter", "each checkpoint is a backward, of which each calls them"),
    ("checkpoint: feed, reentrant", "hooks: post accumulate", "the same"),
    ("event: raise in backward", "hooks: [bampg]*", "how many were called before is not said"),
    ("event: raise in backward", "checkpoint: feed*", "the same, of hooks in what is computed again"),
    ("event: raise late on one", "order: [tps]*", "the others would go on to a forward or backward without it"),
    ("event: copy", "microbatches: two, *", "copies are refused while gradients wait"),
    ("event: copy", "outputs: attribute", "torch refuses to copy tensors of a graph"),
    ("event: copy", "outputs: detached", "the same"),
    ("event: copy", "result: attribute", "the same"),
    ("event: func.*", "hooks: backward*", "torch has none inside its transforms"),
    ("checkpoint: feed, reentrant", "order: penalty*", "torch refuses autograd.grad through it"),
    ("checkpoint: feed, reentrant", "order: two forwards", "the same"),
    ("checkpoint: feed, reentrant", "order: slopes", "the same"),
    ("checkpoint: feed*", "event: func.*", "torch refuses hooks on saved tensors inside its transforms"),
    ("units: several roots", "precision: float32, inputs as they are", "nobody casts what linear layers are given"),
    ("result: loss", "order: penalty*", "slopes are those of outputs"),
    ("event: load", "point: after forward", "it would change what backward needs"),
    ("event: none", "point: [!b]*", "nothing happens anywhere"),
    ("event: raise*", "point: [!b]*", "it says itself where"),
    ("hooks: none", "place: [!b]*", "no hook is anywhere"),
    ("hooks: global", "place: [!b]*", "the same"),
    ("hooks: activation", "place: root", "one place will do"),
    ("hooks: parameter", "place: [!b]*", "the same"),
    ("hooks: post accumulate", "place: [!b]*", "the same"),
    ("hooks: backward*", "place: [!i]*", "torch has them on modules that take and return tensors"),
)
"""What makes no sense together, or not even on the plain model."""

KNOWN: Rules = (
    ("outputs: attribute", "checkpoint: feed*", "an error, after a look at the state or the first of two backwards"),
    ("outputs: detached", "checkpoint: feed*", "the same"),
    ("result: attribute", "checkpoint: feed*", "the same"),
)
"""What fsdp2 is known to do otherwise than the plain model: not drawn. Take an entry out when it is mended."""

RULES = EXCLUDED + KNOWN

PLAIN: Mix = {"seed": "0"} | {axis: options[0] for axis, options in AXES.items()}


def named() -> list[str]:
    """Every option, as "axis: option"."""
    return [f"{axis}: {option}" for axis, options in AXES.items() for option in options]


@functools.cache
def clashes(rules: Rules) -> dict[str, frozenset[str]]:
    """What no program may have beside each option; itself, if it may not be drawn at all."""

    def exclude(one: str, other: str) -> bool:
        return any(
            (fnmatchcase(one, first) and fnmatchcase(other, second))
            or (fnmatchcase(other, first) and fnmatchcase(one, second))
            for first, second, _ in rules
        )

    return {one: frozenset(other for other in named() if exclude(one, other)) for one in named()}


def chosen(mix: Mix) -> list[str]:
    """Its options, as "axis: option"."""
    return [f"{axis}: {mix[axis]}" for axis in AXES]


def is_legal(mix: Mix, rules: Rules = EXCLUDED) -> bool:
    """Whether no two of its options exclude each other."""
    names = chosen(mix)
    return not any(clashes(rules)[name].intersection(names) for name in names)


def pairs(mix: Mix) -> set[tuple[str, str]]:
    """Every two of its options."""
    return set(itertools.combinations(chosen(mix), 2))


def possible_pairs(rules: Rules = RULES) -> set[tuple[str, str]]:
    """Every two options that may be together, of other axes each."""
    return {
        (one, other)
        for one, other in itertools.combinations(named(), 2)
        if one.split(":")[0] != other.split(":")[0] and other not in clashes(rules)[one]
    }


def _completed(taken: dict[str, str], generator: random.Random, rules: Rules, plain: str = "") -> Mix | None:
    """These options, the plain one on axis ``plain``, and drawn ones of the others that fit; None if none do."""
    mix, clashing = dict(taken), set[str]()
    for axis, option in taken.items():
        clashing |= clashes(rules)[f"{axis}: {option}"]
    others = [axis for axis in AXES if axis not in taken]
    generator.shuffle(others)
    for axis in others:
        options = [option for option in AXES[axis] if f"{axis}: {option}" not in clashing]
        if not options:
            return None
        mix[axis] = options[0] if axis == plain else generator.choice(options)
        clashing |= clashes(rules)[f"{axis}: {mix[axis]}"]
    mix["seed"] = str(generator.randrange(10**6))
    return mix if is_legal(mix, rules) else None


def draw(seed: int, rules: Rules = RULES) -> Mix:
    """The program of this seed."""
    generator = random.Random(seed)
    while True:
        mix = _completed({}, generator, rules)
        if mix is not None:
            return {**mix, "seed": str(seed)}


def covering(rules: Rules = RULES, tries: int = 12) -> list[Mix]:
    """Few programs that have every two options together that may be, most of them on the plain mesh, of 2 ranks."""
    generator = random.Random(0)
    missing = possible_pairs(rules)
    found: list[Mix] = []
    while missing:
        wanted = sorted(missing)
        attempts = [_completed(_taken(generator.choice(wanted)), generator, rules, plain="mesh") for _ in range(tries)]
        candidates = [mix for mix in attempts if mix is not None]
        if not candidates:
            continue
        best = max(candidates, key=lambda mix: len(pairs(mix) & missing))
        missing -= pairs(best)
        found.append(best)
    return found


def _taken(pair: tuple[str, str]) -> dict[str, str]:
    return dict(name.split(": ", 1) for name in pair)  # type: ignore[arg-type]


def ranks_of(mix: Mix) -> int:
    return 2 if mix["mesh"] == "1d" else 4


def printed(mix: Mix) -> str:
    """What is special about the program, a line for each option."""
    special = [f"    {axis}: {mix[axis]}" for axis in AXES if mix[axis] != PLAIN[axis]]
    return "\n".join([f"program {mix['seed']}, plain but for", *special])
