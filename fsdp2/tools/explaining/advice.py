"""Advice: what is wrong, slow or wasteful about how a model is sharded, and the call that changes it.

Every check reads `ModelFacts` and nothing else. Its limits stand beside it. They are rules of thumb for devices with
fast links, not measurements of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from fsdp2.api.shown import dtype_name
from fsdp2.tools.explaining.similar import similar_groups
from fsdp2.tools.facts.data import ModelFacts
from fsdp2.tools.quantities import shown_bytes, shown_names

Level = Literal["wrong", "slow", "memory", "note"]

TINY_GROUP_BYTES = 2**20
"""In a smaller group a collective's latency (10 to 30 us) is longer than its transfer at 100 GB/s."""

HUGE_GROUP_BYTES = 2**31
"""Two larger groups (one computes, one is gathered ahead) take more than a twentieth of an 80 GB device."""

WORTH_MENTIONING_BYTES = 2**24
"""Smaller models and groups get no advice: a laptop's tests are no training runs."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that could be better.

    Attributes:
        kind: a short name of the check.
        level: "wrong" (numbers may not be what is expected), "slow", "memory", or "note".
        where: the names of groups or parameters.
        what: what was found, in sentences.
        change: code that changes it; "" if there is nothing to call.
    """

    kind: str
    level: Level
    where: tuple[str, ...]
    what: str
    change: str


def advice_for(facts: ModelFacts) -> tuple[Advice, ...]:
    """Everything that the checks find, sorted by level, "wrong" first."""
    found = [each for check in _CHECKS for each in check(facts)]
    ranks: dict[str, int] = {"wrong": 0, "memory": 1, "slow": 2, "note": 3}
    return tuple(sorted(found, key=lambda each: ranks[each.level]))


def code_of(name: str) -> str:
    """The code for the module called ``name`` below ``model``: ``model.blocks[3]``."""
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in name.split(".") if part)


# -- what is wrong


def _nothing_sharded(facts: ModelFacts) -> Iterator[Advice]:
    if facts.groups or not facts.unsharded:
        return
    yield Advice(
        "not-sharded",
        "wrong",
        (facts.class_name,),
        f"Nothing of {facts.class_name} is sharded: every rank keeps all {shown_bytes(facts.nbytes)}, and no gradient "
        "is averaged over the ranks.",
        "fsdp2.auto_shard(model)  # or: fully_shard(block) for each block, then fully_shard(model)",
    )


def _in_no_group(facts: ModelFacts) -> Iterator[Advice]:
    if not facts.groups or not facts.unsharded:
        return
    names = tuple(each.name for each in facts.unsharded)
    nbytes = sum(each.nbytes for each in facts.unsharded)
    several = len(names) != 1
    yield Advice(
        "in-no-group",
        "wrong",
        names,
        f"{len(names)} parameter{'s' if several else ''} ({shown_names(names)}; {shown_bytes(nbytes)}) lie below no "
        "module that fully_shard was called on: every rank keeps them whole, and nobody averages their gradients.",
        "fully_shard(model)  # last, on the outermost module",
    )


def _ignored_but_trained(facts: ModelFacts) -> Iterator[Advice]:
    names = tuple(each.name for each in facts.ignored if each.is_trainable)
    if names:
        yield Advice(
            "ignored-but-trained",
            "wrong",
            names,
            f"{shown_names(names)} {'are' if len(names) > 1 else 'is'} ignored and trained: nobody averages the "
            "gradients over the ranks, unless the program does.",
            "parameter.requires_grad_(False)  # or leave it out of ignored_params",
        )


def _never_reduced(facts: ModelFacts) -> Iterator[Advice]:
    """Find reductions that are switched off: right between microbatches, wrong for a whole step."""
    trained = [group for group in facts.groups if group.gradients]
    unreduced = [group for group in trained if ("requires_gradient_sync", "False") in group.settings]
    apart = [
        group
        for group in trained
        if group not in unreduced and group.replicate_size > 1 and ("requires_all_reduce", "False") in group.settings
    ]
    for groups, setter, becomes in (
        (
            unreduced,
            "set_requires_gradient_sync",
            "no backward reduces its gradients. They add up unsharded, as large as the whole group, and the optimizer "
            "gets none",
        ),
        (apart, "set_requires_all_reduce", "gradients are not summed over the copies, which drift apart"),
    ):
        names = tuple(group.title for group in groups)
        if names:
            yield Advice(
                "never-reduced",
                "wrong",
                names,
                f"{setter}(False) is on for {shown_names(names)}: {becomes}. That is right between the microbatches of "
                "a step, and the last one must reduce.",
                f"model.{setter}(True)  # before the last microbatch; or leave it at True, and put "
                "fsdp2.accumulate(model, last=...) around each microbatch",
            )


def _still_on_meta(facts: ModelFacts) -> Iterator[Advice]:
    if facts.is_meta and facts.groups:
        yield Advice(
            "meta",
            "note",
            (facts.class_name,),
            "The model is on the meta device: it has no values yet. Give it memory before the first forward, and then "
            "initialize it or load a checkpoint.",
            'model.to_empty(device="cuda")',
        )


def _not_reached(facts: ModelFacts) -> Iterator[Advice]:
    if not facts.order.is_learned:
        return
    reached = {*facts.order.forward, *facts.order.backward}
    missed = tuple(group.title for group in facts.groups if group.index not in reached)
    if missed:
        yield Advice(
            "not-reached",
            "note",
            missed,
            f"The last step did not call {shown_names(missed)}: nothing was gathered or reduced for "
            f"{'them' if len(missed) > 1 else 'it'}.",
            "",
        )


# -- how the model is cut into groups


def _one_group(facts: ModelFacts) -> Iterator[Advice]:
    """A model of one group is unsharded as a whole, and nothing computes while it is gathered."""
    if len(facts.groups) != 1 or facts.groups[0].unsharded_bytes < WORTH_MENTIONING_BYTES:
        return
    (group,) = facts.groups
    if group.shard_size == 1:
        return
    yield Advice(
        "one-group",
        "memory",
        (group.title,),
        f"The whole model is one group: all {shown_bytes(group.unsharded_bytes)} of it are unsharded at once, and "
        "nothing can compute while they are gathered.",
        "fsdp2.auto_shard(model)  # instead of fully_shard(model); or fully_shard(block) for each block before",
    )


def _heavy_root(facts: ModelFacts) -> Iterator[Advice]:
    """A root stays unsharded from forward to backward, so it should hold no more than two other groups do."""
    others = [group.unsharded_bytes for group in facts.groups if not group.is_root]
    for group in facts.groups:
        nbytes = group.unsharded_bytes
        if not (group.is_root and others) or nbytes < WORTH_MENTIONING_BYTES or group.shard_size == 1:
            continue
        is_half = nbytes > sum(others)
        if not is_half and nbytes <= 2 * max(others):
            continue
        share = "more than half of the model" if is_half else "more than twice its largest other group"
        largest = max(group.params, key=lambda param: param.unsharded_bytes)
        module = largest.name.rpartition(".")[0]
        change = f"fully_shard({code_of(module)})" if module != group.name else "fsdp2.auto_shard(model)"
        stays = "It stays unsharded from forward to backward"
        if group.reshard_after_forward is True:
            stays = "It is unsharded for as long as the whole model runs"
        yield Advice(
            "heavy-root",
            "memory",
            (group.title,),
            f"The root holds {shown_bytes(nbytes)}, {share}. {stays}, "
            "and its gather is not hidden behind anything. Its largest parameter is "
            f"'{largest.name}' ({shown_bytes(largest.unsharded_bytes)}).",
            f"{change}  # before fully_shard({code_of(group.name)})",
        )


def _huge_groups(facts: ModelFacts) -> Iterator[Advice]:
    for alike in similar_groups(facts):
        group = alike.first
        if group.is_root or group.shard_size == 1 or group.unsharded_bytes <= HUGE_GROUP_BYTES:
            continue
        yield Advice(
            "huge-group",
            "memory",
            tuple(each.title for each in alike.groups),
            f"'{alike.name}': {shown_bytes(group.unsharded_bytes)} are unsharded at once, and as much again while the "
            "next group is gathered ahead. A gather of that size is seldom hidden behind one computation.",
            f"fully_shard(each submodule of {code_of(group.name)})  # before the module itself; or "
            "fsdp2.auto_shard(model, max_bytes=2**29)",
        )


def _tiny_groups(facts: ModelFacts) -> Iterator[Advice]:
    """Find groups whose exchanges are all latency. A few do no harm, many do."""
    if sum(group.unsharded_bytes for group in facts.groups) < WORTH_MENTIONING_BYTES:
        return
    tiny = [
        group
        for group in facts.groups
        if not group.is_root and group.shard_size > 1 and group.unsharded_bytes < TINY_GROUP_BYTES
    ]
    if len(tiny) < 4:
        return
    names = tuple(group.title for group in tiny)
    largest = max(group.unsharded_bytes for group in tiny)
    yield Advice(
        "tiny-groups",
        "slow",
        names,
        f"{len(tiny)} groups ({shown_names(names)}) have {shown_bytes(largest)} or less: each of their collectives "
        "takes longer to start than to run.",
        "fsdp2.auto_shard(model, min_bytes=2**20)  # or fully_shard([one, another]), or leave out those calls",
    )


# -- in which dtypes


def _full_precision(facts: ModelFacts) -> Iterator[Advice]:
    """On accelerators a gather in fp32 takes twice the bytes of bf16, and products use slower matrix units."""
    groups = [group for group in facts.groups if group.device.type != "cpu" and group.shard_size > 1]
    wide = [group for group in groups if any(param.computes is torch.float32 for param in group.params)]
    nbytes = sum(p.unsharded_bytes for group in wide for p in group.params if p.computes is torch.float32)
    if 2 * nbytes <= sum(group.unsharded_bytes for group in groups) or nbytes < WORTH_MENTIONING_BYTES:
        return
    yield Advice(
        "full-precision",
        "slow",
        tuple(group.title for group in wide),
        f"{shown_bytes(nbytes)} of parameters are gathered and computed with in fp32. In bf16 a gather is half as "
        "large, and matrix products are several times as fast; the shards and the optimizer stay in fp32.",
        "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))",
    )


def _narrow_sums(facts: ModelFacts) -> Iterator[Advice]:
    """Sums over 64 ranks or more lose precision in dtypes with 8 bits of mantissa or so."""
    narrow = [
        group
        for group in facts.groups
        if group.shard_size * group.replicate_size >= 64
        and any(each.dtype in (torch.bfloat16, torch.float16) for each in group.gradients)
    ]
    if narrow:
        ranks = narrow[0].shard_size * narrow[0].replicate_size
        dtypes = {dtype_name(each.dtype) for group in narrow for each in group.gradients}
        yield Advice(
            "narrow-sums",
            "note",
            tuple(group.title for group in narrow),
            f"Gradients are summed over {ranks} ranks in {', '.join(sorted(dtypes))}, which rounds at every addition.",
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        )


# -- what is exchanged


def _needless_backward_gathers(facts: ModelFacts) -> Iterator[Advice]:
    """The backward of an embedding does not read its weight."""
    for group in facts.groups:
        gathers = [each for each in facts.exchanges_of(group.index) if each.kind == "all-gather"]
        if group.class_name != "Embedding" or group.shares_with or any(param.is_tied for param in group.params):
            continue
        backward = sum(each.times * each.part_bytes for each in gathers if each.during == "backward")
        if backward * group.shard_size < WORTH_MENTIONING_BYTES:
            continue
        yield Advice(
            "embedding",
            "slow",
            (group.title,),
            f"'{group.title}' is an embedding, whose backward does not need its weight, and it is gathered for that.",
            f"{code_of(group.name)}.set_unshard_in_backward(False)",
        )


def _slow_links(facts: ModelFacts) -> Iterator[Advice]:
    """When sharding spans several nodes, gathers of backward could stay inside of one."""
    size = facts.ranks_per_node
    again = [
        each
        for each in facts.exchanges
        if each.kind == "all-gather"
        and each.during == "backward"
        and each.between_bytes
        and len(each.ranks) % size == 0
    ]
    nbytes = sum(each.between_bytes for each in again)
    if size == 1 or nbytes < WORTH_MENTIONING_BYTES:
        return
    names = tuple(dict.fromkeys(facts.groups[each.group].title for each in again))
    sent = sum(each.between_bytes for each in facts.exchanges)
    yield Advice(
        "slow-links",
        "slow",
        names,
        f"Of the {shown_bytes(sent)} that a rank sends to other nodes in a step, {shown_bytes(nbytes)} are sent for "
        "backward again. Parameters that rest on the ranks of one node in between cost memory and spare that; a mesh "
        "(replicate, shard) with one node in each shard dim keeps all gathers inside of nodes.",
        f"fully_shard(..., reshard_after_forward={size})",
    )


_CHECKS: tuple[Callable[[ModelFacts], Iterator[Advice]], ...] = (
    _nothing_sharded,
    _in_no_group,
    _ignored_but_trained,
    _never_reduced,
    _still_on_meta,
    _not_reached,
    _one_group,
    _heavy_root,
    _huge_groups,
    _tiny_groups,
    _full_precision,
    _narrow_sums,
    _needless_backward_gathers,
    _slow_links,
)
