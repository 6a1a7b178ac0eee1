"""Streams, waits and lifetimes, without a GPU: recorded training steps go through a happens-before checker.

What is recorded and how, see `tests.harness.recording.recorder`; what is checked, see `tests.harness.happens_before`.
"""

from __future__ import annotations

import ast
import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from itertools import count, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2.core.gather
import fsdp2.optim.offload
from fsdp2 import FSDPRuntimeError, MixedPrecisionPolicy, offload_optimizer_state
from fsdp2.core.buffers import Offloading
from fsdp2.core.gather import Gather
from fsdp2.core.gradients import GradientBucket, PackedGradients
from fsdp2.core.group import FSDPParamGroup, Unsharding
from fsdp2.core.streams import HostDevice, Wait
from tests.fake_pg.helpers.passes import Passes
from tests.fake_pg.helpers.sites import SEAM, Site, device_waits, functions, method_calls, sources, wait_sites
from tests.harness import fake_world, others_full
from tests.harness.happens_before import (
    HOST,
    Allocation,
    EventRecord,
    Kind,
    Mark,
    Operation,
    Order,
    Release,
    StreamWait,
    TraceEvent,
    Violation,
    beside,
    find_violations,
)
from tests.harness.internals import (
    ALLOCATE_STAGING,
    ALLOCATE_UNSHARDED,
    COPY_OUT,
    STATE_TO_DEVICE,
    STATE_TO_HOST,
    Seam,
)
from tests.harness.recording.graphs import refuse_what_no_capture_allows
from tests.harness.recording.offload import offloaded, offloaded_state
from tests.harness.recording.recorder import BLOCKED, COMPUTE, WORKED, Recorder, RecordingDevice, recording
from tests.harness.recording.scenarios import SCENARIOS, Recording, record
from tests.harness.recording.training import BACKWARD, FORWARD, ROOT, UPDATE, Stack, Training, gradients_of


def report(recorded: Recording, violations: Iterable[Violation]) -> str:
    """The first violations, for a message."""
    return "\n".join(violation.describe(recorded.trace) for violation in list(violations)[:10])


# ---- every recorded program ----------------------------------------------------------------------------------

SHORT = {
    "checkpointed_blocks", "copied", "extensions_on_neighbours", "finalized_by_hand", "forward_fails",
    "frozen_and_unfrozen", "gathered_on_compute", "half_cached_direct", "hook_fails", "hooked_deleted_in_flight",
    "memory_of_the_process_group", "neighbours_interrupted", "offloaded_and_loaded", "offloaded_and_written",
    "offloaded_and_written_between", "offloaded_contexts_joined", "offloaded_fails", "offloaded_state",
    "offloaded_sums_are_read", "offloaded_written_whole", "one_group_reduces_twice",
    "only_replicated_updated_elsewhere", "owned_direct", "plain", "pooled_in_half_on_replicas", "post_optim_event",
    "replaced_in_flight", "settings_in_flight", "shared_context_late", "synchronized_outside_of_backward",
    "tensor_parallel", "two_streams", "unused_on_this_rank", "updated_elsewhere_before_a_compiled_call",
    "written_whole",
}  # fmt: skip
"""They come to every call that waits, and to every kind of setting."""

RANKS = (
    "mesh.",
    "meshes.",
    "_torch.concatenate_meshes",
    "reshard_to_fewer._neighbours",
    "whole_states.refuse_of_another_rank",
)
"""Who reads the ranks of a mesh, which torch keeps on the host."""

SAID = {
    "agreement._compared",  # ranks compare their plans, once for each way of laying out
    "replica_check._described",  # replicas compare checksums, once, when training begins
    "tensor_extensions._refuse_disagreement",  # the same
    "param.lie_on",  # shards move to the host, once
    "options.denominator_of",  # a check of what the user gave
    "full_parameters._changed_anywhere",  # ranks say what was written to whole parameters, once for each block
    "full_parameters._copied_to",  # of shards in host memory, the same; and the next two
    "full_parameters._keep",
    "whole_tensors.whole_tensors",
    "whole_tensors._pack",
    "step_targets._agreement",  # counters of optimizers, when runs of parameters are made anew
    "slices._is_part_of",  # ranks of meshes, which lie on the host, once for each root
    "inside.step_with",  # torch's own optimizers, which read their counters on the host
}
"""Who else makes the host wait for the device, as docs/design.md says: never in a step."""


TWO_STREAMS = "two_streams"
"""The program's own: what compute runs on changes from one to the other, and so does what memory belongs to."""

UNBOUNDED = {
    "accumulated_without_reshard",
    "block_called_alone",
    "extensions_on_neighbours",
    "gathered_by_extensions",
    "gathered_far_ahead",
    "neighbours_fail",
    "neighbours_interrupted",
    "never_resharded",
    "one_group_for_both_ends",
    "storage_kept",
    "storage_kept_by_neighbours",
    "trained_inside",  # the next forward of the method is expected, and gathered for, before a backward inside of it
    "two_roots",
    "unsharded_by_hand",
    "custom_collectives",  # by hand too, as are the next
    "custom_collectives_on_neighbours",
    "memory_of_the_process_group",
    "only_replicated",  # parameters are read where the shards lie, which stays, as are the next
    "only_replicated_updated_elsewhere",
}
"""In these, the user, the policy or the structure of the model keeps more groups unsharded than two."""


@pytest.mark.parametrize("scenario", others_full(SCENARIOS, SHORT))
def test_a_recorded_program(scenario: str) -> None:
    """Each access follows what it must; the host does not wait; two groups are unsharded at a time."""
    recorded = record(scenario)
    violations = violations_of(recorded)
    assert not violations, report(recorded, violations)
    # Memory goes back to the device after its last use, also where the allocator waits for the stream that it belongs
    # to only: with expandable segments.
    early = [violation for violation in violations_of(recorded, True) if violation.kind is Kind.UNMAPPED]
    assert not early or scenario == TWO_STREAMS, report(recorded, early)
    # No value is read from the device, no index or memory of the host's copied there while the host waits for it.
    sites = {innermost.split(":")[0] for _, (innermost, *_) in recorded.synchronizing}
    assert {site for site in sites if not site.startswith(RANKS)} <= SAID
    assert scenario in UNBOUNDED or most_unsharded(recorded) <= 2


def most_unsharded(recorded: Recording) -> int:
    """How many groups but the root may be unsharded at a time on the device."""
    order = Order(recorded.trace)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, event in enumerate(recorded.trace):
        if isinstance(event, Operation):
            for access in event.accesses:
                first.setdefault(access.block, index)
                last[access.block] = index
    groups = {block: name for block, name in recorded.names.items() if name != ROOT and "gradients" not in name}
    unsharded = [
        event.block
        for event in recorded.trace
        if isinstance(event, Allocation) and event.block in first and event.block in groups
    ]
    most = 0
    for position, block in enumerate(unsharded):
        others = {groups[each] for each in unsharded[:position] if not order.before(last[each], first[block])}
        most = max(most, len(others | {groups[block]}))
    return most


# ---- no race, no early reuse ---------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (64, 63)])
@pytest.mark.parametrize("scenario", ["plain", "uneven_mlp", "accumulated_reduced"])
def test_whatever_the_rank_holds(scenario: str, world_size: int, rank: int) -> None:
    recorded = record(scenario, world_size=world_size, rank=rank)
    violations = list(find_violations(recorded.trace))
    assert not violations, report(recorded, violations)


def test_recording_disturbs_nothing() -> None:
    """The engine reuses its gradient buffers only if nobody else holds them: a recorder that does would show here."""
    recorded = record("plain")
    storages: dict[str, set[int]] = {}
    for event in recorded.trace:
        if isinstance(event, Allocation) and event.block in recorded.names:
            storages.setdefault(recorded.names[event.block], set()).add(event.storage)
    groups = [ROOT, "blocks.0", "blocks.1", "blocks.2"]
    assert {name: len(found) for name, found in storages.items()} == dict.fromkeys(
        [*groups, *map(gradients_of, groups)], 1
    )


def test_forward_and_backward_never_make_the_host_wait() -> None:
    for scenario in (
        *("plain", "owned_direct", "checkpointed_blocks", "replicated_in_half", "half_in_part", "tensor_parallel"),
        *("resharded_to_neighbours", "hooked_on_its_own_stream", "gathered_on_compute"),
    ):
        recorded = record(scenario)
        found = [event.name for _, event in Passes(recorded).operations(FORWARD, UPDATE)]
        assert found and not {"aten._local_scalar_dense", "aten.nonzero", "aten.item"}.intersection(found), scenario
        assert not [wait for _, wait in waits(recorded) if wait.stream == HOST], scenario


# ---- which pool memory comes from, and how much --------------------------------------------------------------


def live_bytes(trace: Sequence[TraceEvent], pools: set[int]) -> dict[str, list[int]]:
    """By mark, how much memory of ``pools`` was allocated after each event since that was last set."""
    nbytes: dict[int, int] = {}
    found: dict[str, list[int]] = {"": []}
    at = ""
    for event in trace:
        if isinstance(event, Mark):
            found[at := event.name] = []
        elif isinstance(event, Allocation) and event.stream in pools:
            nbytes[event.block] = event.nbytes
        elif isinstance(event, Release):
            nbytes.pop(event.block, None)
        found[at].append(sum(nbytes.values()))
    return found


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=["sharded", "replicated"])
def test_what_a_reduction_packs_and_receives_comes_from_the_pool_of_compute(mesh: tuple[int, ...]) -> None:
    """The memory of a stream of reductions would be of no use to anybody else."""
    with fake_world(4):
        options = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])}
        for policy in (MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy()):
            with recording() as recorder:
                Training.of_stack(recorder, mp_policy=policy, **options).steps(3)
            trace = recorder.trace[recorder.trace.index(Mark(UPDATE)) :]  # constants are made before
            allocated = {event.stream for event in trace if isinstance(event, Allocation)}
            operations = [event for event in trace if isinstance(event, Operation)]
            reducing = {event.stream for event in operations if event.name in (PACK, ALL_REDUCE)}
            assert len(reducing) == len(mesh) and COMPUTE not in reducing | {HOST} and not reducing & allocated


@pytest.mark.full
def test_unsharded_gradients_are_let_go_of_when_they_are_packed() -> None:
    """A block in backward: two of parameters, one of gradients, two (as fp32) of what is sent. Not the one before."""
    model = Stack(64, 256, blocks=4)
    block = 2 * sum(parameter.numel() for parameter in model.blocks[0].parameters())
    with fake_world(64), recording() as recorder:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        Training.of_stack(recorder, model, mp_policy=policy).steps(3)
    pools = {event.stream for event in recorder.trace if isinstance(event, Allocation)} - {HOST}
    found = live_bytes(recorder.trace, pools)
    assert (max(found[BACKWARD]) - found[FORWARD][0]) / block < 5.7, "with activations and the outer layers"


class Between(Stack):
    """Work that is no block's runs between two of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
            for _ in range(10):
                x = torch.sin(x)
        return self.outputs(x)


def of_compute(recorder: Recorder, allocate: Callable[..., None]) -> Callable[..., None]:
    """``allocate`` of a gather, with memory of compute's pool, which compute may have used until now."""

    def allocated(self: Gather, *memory: Any) -> None:
        device, gathering = RecordingDevice(recorder), recorder.stream
        device.wait(gathering, device.record(COMPUTE), Wait.READ)
        with device.use(COMPUTE):
            allocate(self, *memory)

    return allocated


@pytest.mark.full
def test_gathers_have_a_pool_of_their_own_as_with_that_of_compute_less_would_run_beside_them() -> None:
    """And what is staged, which goes back when its copy was issued, would be used again before that is done."""
    counts, kinds = [], []
    for pooled in (False, True):
        with fake_world(4), recording() as recorder, ExitStack() as stack:
            for seam in (ALLOCATE_STAGING, ALLOCATE_UNSHARDED) if pooled else ():
                stack.enter_context(seam.replaced_by(of_compute(recorder, seam.function)))
            Training.of_stack(recorder, Between(blocks=6)).steps(3)
        step = max(index for index, event in enumerate(recorder.trace) if event == Mark(FORWARD))
        gathers = [event.stream for event in recorder.trace if isinstance(event, Operation) and event.name == GATHER]
        pools = {event.stream for event in recorder.trace[step:] if isinstance(event, Allocation)} - {HOST}
        assert pools == ({COMPUTE} if pooled else {COMPUTE, *gathers})
        counts.append(list(beside(recorder.trace, GATHER, COMPUTE, since=step)))
        kinds.append({violation.kind for violation in find_violations(recorder.trace)})
    assert kinds == [set(), {Kind.REUSE}]
    own, shared = counts
    assert all(more >= less for more, less in zip(own, shared, strict=True)) and sum(own) > 1.5 * sum(shared)


def test_state_comes_and_leaves_at_once_while_an_optimizer_steps_on_another_group() -> None:
    """Six groups. Compute waits (W) for copies up (u) and down (d), issues the next ones, and steps (k) beside them."""
    trace = record("offloaded_state").trace
    begin = max(index for index, event in enumerate(trace) if event == Mark(UPDATE))
    recorded_on = {event.event: event.stream for event in trace if isinstance(event, EventRecord)}
    on_host = {event.block for event in trace if isinstance(event, Allocation) and event.stream == HOST}
    found = ""
    lanes: dict[str, set[int]] = {"u": set(), "d": set()}
    for event in trace[begin:]:
        if isinstance(event, StreamWait) and event.why is Wait.STATE_COPIED:
            assert event.stream == COMPUTE
            found += "W"
        elif isinstance(event, StreamWait) and event.why is Wait.STATE_USED:
            assert recorded_on[event.event] == COMPUTE, "neither waits for the other"
        elif isinstance(event, Operation) and event.stream == COMPUTE:
            found += "k"
        elif isinstance(event, Operation) and event.stream != HOST:
            way = "u" if any(access.reads and access.block in on_host for access in event.accesses) else "d"
            lanes[way].add(event.stream)
            found += way
    found = "".join(letter for letter, following in pairwise(found + " ") if letter != following)
    assert found.lstrip("k") == "uWuk" + 4 * "Wduk" + "Wdk" + "WdW"
    (up,), (down,) = lanes.values()
    assert up != down


def test_an_optimizer_whose_state_comes_and_leaves_steps_as_any() -> None:
    found = []
    for offloads in (False, True):
        torch.manual_seed(0)
        with fake_world(4), recording() as recorder:
            training = offloaded_state(recorder, offloads=offloads)
        found.append([each.to_local() for each in training.model.parameters()])
    assert all(map(torch.equal, *found))


class Streams(HostDevice):
    """Says that it has some."""

    has_streams = True


def test_state_that_came_ahead_and_is_not_asked_for_goes_back_without_a_copy() -> None:
    """Of groups that a step leaves out, or does not come to as it raises: the tensors on the host are the same ones."""
    parameters = [nn.Parameter(torch.randn(4)) for _ in range(3)]
    optimizer = torch.optim.Adam([{"params": [each]} for each in parameters], foreach=True)
    offload_optimizer_state(optimizer)
    for each in parameters:
        each.grad = torch.ones(4)
    with mock.patch.object(fsdp2.optim.offload, "device_for", lambda device: Streams()):
        optimizer.step()
        before = [optimizer.state[each]["exp_avg"] for each in parameters]
        values = [each.clone() for each in before]
        with (
            STATE_TO_HOST.counted() as copied,
            mock.patch.object(optimizer, "_init_group", lambda group, *_: optimizer.state[group["params"][0]].missing),
            pytest.raises(AttributeError, match="missing"),
        ):
            optimizer.step()
        optimizer.state_dict()
        after = [optimizer.state[each]["exp_avg"] for each in parameters]
        assert all(one is other for one, other in zip(before, after, strict=True)) and all(
            map(torch.equal, after, values)
        )
        assert copied.call_count == 0, "nothing but the first was asked for, and that is taken back by state_dict"
        optimizer.step()
    assert all(not each.equal(value) for each, value in zip(before, values, strict=True))


@pytest.mark.parametrize("fails_at", range(1, 9))
def test_state_stays_on_the_host_where_memory_runs_out_as_it_comes(fails_at: int) -> None:
    """Memory that it was to come to has no values yet: none of that is taken back."""
    parameters = [nn.Parameter(torch.randn(4)) for _ in range(4)]
    optimizer = torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:]}], foreach=True)
    offload_optimizer_state(optimizer)
    for each in parameters:
        each.grad = torch.ones(4)
    optimizer.step()
    expected = [copy.deepcopy(dict(optimizer.state[each])) for each in parameters]
    calls, bring = count(1), STATE_TO_DEVICE.function

    def runs_out(value: Tensor, device: torch.device, copies: Any) -> Any:
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError("no memory")
        return bring(value, device, copies)

    with mock.patch.object(fsdp2.optim.offload, "device_for", lambda device: Streams()):
        with (
            STATE_TO_DEVICE.replaced_by(runs_out),
            mock.patch.object(optimizer, "_init_group", lambda group, *_: optimizer.state[group["params"][0]].missing),
            pytest.raises(torch.OutOfMemoryError if fails_at < 9 else AttributeError),
        ):
            optimizer.step()
        optimizer.state_dict()
    for each, state in zip(parameters, expected, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in optimizer.state[each].items())


PIECE = 1 << 10


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("world_size", [1, 4])
def test_what_leaves_the_host_to_be_cast_takes_the_memory_of_one_piece(world_size: int, casts: bool) -> None:
    """A copy that casts brings its source to the device first. What is not cast goes at once, group by group."""
    policy = MixedPrecisionPolicy(torch.bfloat16 if casts else None)
    model = Stack(8, 130)
    with (
        fake_world(world_size),
        mock.patch.object(fsdp2.core.gather, "CAST_UPLOAD_BYTES", PIECE),
        recording() as recorder,
    ):
        offloaded(recorder, model, mp_policy=policy)
    on_host = {event.block: event for event in recorder.trace if isinstance(event, Allocation) and event.stream == HOST}
    uploads = [
        [access.stop - access.start for access in event.accesses if access.block in on_host and access.reads]
        for event in recorder.trace
        if isinstance(event, Operation) and event.name == "aten._foreach_copy_" and event.stream not in (HOST, COMPUTE)
    ]
    shard = max(event.nbytes for event in on_host.values())
    blocks = [upload for upload in uploads if sum(upload) > 0.8 * shard]
    assert shard > 1.5 * PIECE and len(blocks) > 6
    for upload in blocks:
        assert len(upload) == (-(-sum(upload) // PIECE) if casts else 1), "few, large pieces"
        assert max(upload) <= PIECE or not casts


def test_pinned_memory_has_a_piece_for_the_shards_and_one_for_the_gradients_of_each_group() -> None:
    """torch rounds each up to a power of two, see docs/how-to/offload.md: there are few, and nothing beside them."""
    asked: list[int] = []
    with fake_world(4), recording() as recorder:
        zeros, empty = Offloading.zeros, Offloading.empty

        def counted(allocate: Callable[..., Tensor], *args: Any) -> Tensor:
            result = allocate(*args)
            asked.append(result.nbytes)
            return result

        with (
            mock.patch.object(Offloading, "zeros", lambda *args: counted(zeros, *args)),
            mock.patch.object(Offloading, "empty", lambda *args: counted(empty, *args)),
        ):
            offloaded(recorder, Stack(64, 64))
    whole = 4 * sum(parameter.numel() for parameter in Stack(64, 64).parameters())
    assert len(asked) == 2 * 4, "in all steps"
    assert 2 * whole / 4 <= sum(asked) < 1.03 * 2 * whole / 4


def test_where_a_gradient_is_missing_the_host_asks_at_the_end_of_backward() -> None:
    """Whether another rank has one: when nothing is left to issue. Not if those without one get zeros anyway."""
    for scenario in ("plain", "zeros_for_unused", "unused", "unused_on_this_rank"):
        recorded = record(scenario)
        asked = [index for index, wait in waits(recorded) if wait.stream == HOST]
        assert bool(asked) == (scenario == "unused_on_this_rank"), scenario
        for begin, end in pairwise([index for index, event in enumerate(recorded.trace) if isinstance(event, Mark)]):
            events = recorded.trace[min([index for index in asked if begin < index < end], default=end) : end]
            assert not [event for event in events if isinstance(event, Operation) and event.name.startswith("c10d")]


def test_a_training_forward_leaves_the_host_alone_where_shards_are_in_its_memory() -> None:
    """It waits for copies that read the shards at the end of backward, or before a step."""
    for scenario in ("offloaded_replicas", "offloaded_cached"):
        trace = record(scenario).trace
        for begin, mark in enumerate(trace):
            if mark == Mark(FORWARD):
                forward = trace[begin : trace.index(Mark(BACKWARD), begin)]
                assert not [each for each in forward if isinstance(each, StreamWait) and each.stream == HOST], scenario


def test_a_missing_gradient_is_refused_by_name_while_a_graph_is_captured() -> None:
    """There the host can ask nothing; with zeros it need not."""
    for zeros in (False, True):
        with fake_world(4, 1), recording() as recorder:
            training = Training.of_stack(recorder)
            training.model.set_reduce_scatter_unused_params(zeros)
            training.steps(1)
            training.model.outputs.bias.requires_grad_(True)
            training.model.outputs.register_forward_hook(
                lambda module, args, output: nn.functional.linear(args[0], module.weight)
            )
            recorder.captures, start = True, len(recorder.trace)
            loss = training.loss()
            with nullcontext() if zeros else pytest.raises(FSDPRuntimeError, match=r"'outputs\.bias' has no gradient"):
                loss.backward()
            refuse_what_no_capture_allows(recorder.trace[start:])  # else CUDA would say that, and not what is missing


# ---- every wait is needed --------------------------------------------------------------------------------------


def breaks(recorded: Recording, keep: Callable[[int, StreamWait], bool]) -> bool:
    """Whether there are more violations with only the waits that ``keep`` accepts."""
    present = violations_of(recorded)
    return any(violation not in present for violation in find_violations(recorded.trace, keep))


@cache
def violations_of(recorded: Recording, unmaps: bool = False) -> frozenset[Violation]:
    """Those with all waits."""
    return frozenset(find_violations(recorded.trace, unmaps=unmaps))


def waits(recorded: Recording) -> Iterator[tuple[int, StreamWait]]:
    """The recorded waits and their indices in the trace."""
    return ((index, event) for index, event in enumerate(recorded.trace) if isinstance(event, StreamWait))


REASONS = (*Wait, WORKED, BLOCKED)


@pytest.mark.full
@pytest.mark.parametrize("why", REASONS, ids=lambda why: why.name if isinstance(why, Wait) else why)
def test_no_reason_to_wait_can_be_dropped(why: object) -> None:
    assert any(breaks(record(name), lambda index, wait: wait.why is not why) for name in SCENARIOS)


UNSEEN = {
    ("never_resharded", Wait.READ),  # nothing is gathered twice between two optimizer steps
    ("one_group_reduces_twice", Wait.READ),
    ("two_streams", Wait.PACKED),  # each backward's gradients are of the other stream
}
"""Where a reason is given, and something else happens to order the same."""


REASONS_GIVEN = {
    "gathered_on_compute", "half_in_part", "hook_fails", "neighbours_interrupted", "offloaded_state",
    "offloaded_written_whole", "one_group_reduces_twice", "only_replicated_updated_elsewhere", "plain",
    "post_optim_event", "replicated_in_half", "two_streams",
}  # fmt: skip


@pytest.mark.parametrize("scenario", others_full(SCENARIOS, REASONS_GIVEN))
def test_every_reason_that_is_given_is_one(scenario: str) -> None:
    """Not only somewhere: in every scenario each kind of wait that it comes to closes a race."""
    recorded = record(scenario)
    given = {wait.why for _, wait in waits(recorded)}.intersection(REASONS)
    needed = {why for why in given if breaks(recorded, lambda index, wait, why=why: wait.why is not why)}  # type: ignore[misc]
    assert {(scenario, why) for why in given - needed} <= UNSEEN
    everywhere = {Wait.GRADIENTS_READY, Wait.REDUCED}
    assert needed >= everywhere | (
        set() if scenario.startswith("only_replicated") else {Wait.PARAMETERS_WRITTEN, Wait.GATHERED}
    )


NO_RACE = {
    ("reduce", "reduce", "retire_reduces"),  # the same: there it is make_room
    ("root", "recover_if_failed", "drop_reduces"),  # so that nothing is delivered later; see test_features_together
    ("group", "_prepare_anew", "finish_reduces"),  # so that buckets keep what waits in them; see test_recovery
    ("group", "_adopt_toggled", "finish_reduces"),  # the same
    ("grad_sinks", "backward", "finish_reduces"),  # the same buffer, and the order of sums; see test_waiting_gradients
    ("entry", "_prepare_state", "gathers_follow_compute"),  # as in `join`; graphs are not recorded, see test_exchanges
    ("staging", "_copy", "block_host"),  # a thread reads on the host what was copied there; see gpu/test_cuda.py
    ("root", "_end_iteration", "end_step"),  # ends the capture of a graph; see test_memory_pool_allocations
}
"""Calls that wait for another reason than a race between streams: file, function and method."""


@pytest.mark.full
@pytest.mark.parametrize(
    "site", [site for site in wait_sites() if (site.file, site.function, site.method) not in NO_RACE], ids=str
)
def test_no_call_that_waits_can_be_removed(site: Site) -> None:
    """Nor one of the reasons that it waits for."""

    def is_here(wait: StreamWait) -> bool:
        return any(map(site.is_at, wait.sites[:1]))

    occurs = {name: {wait.why for _, wait in waits(record(name)) if is_here(wait)} for name in SCENARIOS}
    reasons = set().union(*occurs.values())
    assert reasons, f"no scenario comes to {site} (line {site.lines.start}): add one"
    for why in reasons:
        names = [name for name, given in occurs.items() if why in given]
        assert any(
            breaks(record(name), lambda index, wait, why=why: not (is_here(wait) and wait.why is why))  # type: ignore[misc]
            for name in names
        ), f"{site} (line {site.lines.start}) can be removed, or not wait for {why}, without a race in {names}"


PACK, ALL_REDUCE, GATHER = "aten._chunk_cat", "c10d.allreduce_", "c10d._allgather_base_"


@pytest.mark.parametrize(
    ("scenario", "operation", "at"),
    [
        ("reduce_fails", PACK, "reduce.reduce:"),
        ("all_reduce_fails", ALL_REDUCE, "reduce.reduce:"),
        ("hook_fails", ALL_REDUCE, "reduce.reduce:"),
        ("deleted_in_flight", PACK, None),
        ("deleted_in_flight", GATHER, None),
        ("replicated_deleted_in_flight", ALL_REDUCE, None),
        ("hooked_deleted_in_flight", ALL_REDUCE, None),
    ],
)
def test_no_stream_can_be_forgotten(scenario: str, operation: str, at: str | None) -> None:
    """Where several streams are waited for at once: after an exception, and when a root dies (by no call)."""
    recorded = record(scenario)
    recorded_on = {event.event: event.stream for event in recorded.trace if isinstance(event, EventRecord)}
    streams = {event.stream for event in recorded.trace if isinstance(event, Operation) and event.name == operation}

    def is_here(wait: StreamWait) -> bool:
        site = wait.sites[0] if wait.sites else ""
        return site.startswith(at) if at else not site

    dropped = {index for index, wait in waits(recorded) if is_here(wait) and recorded_on[wait.event] in streams}
    assert dropped and breaks(recorded, lambda index, wait: index not in dropped)


@pytest.mark.full
@pytest.mark.parametrize(
    "scenario",
    ["transformer", "plain", "direct", "root_resharded", "never_resharded", "checkpointed_blocks", "used_twice"]
    + ["replicated", "replicated_in_half", "half", "resharded_to_neighbours", "hooked_on_its_own_stream"],
)
def test_no_single_wait_can_be_dropped(scenario: str) -> None:
    """One at a time; but for those that are followed, before anything depends on them, by one for the same stream."""
    recorded = record(scenario)
    needed = []
    for dropped, wait in waits(recorded):
        needed.append(breaks(recorded, lambda index, wait, dropped=dropped: index != dropped))  # type: ignore[misc]
        is_there_for_hooks = wait.why is Wait.REDUCED and comes_again(recorded, dropped)
        assert needed[-1] or is_superseded(recorded, dropped) or is_there_for_hooks, recorded.trace[dropped]
    assert sum(needed) > len(needed) / 2


def comes_again(recorded: Recording, index: int) -> bool:
    """Whether compute waits for the same stream of all-reduces again before the optimizer reads gradients.

    Before that only hooks might read what the earlier one has brought.
    """
    trace = recorded.trace
    recorded_on = {event.event: event.stream for event in trace if isinstance(event, EventRecord)}
    scattered = {event.stream for event in trace if isinstance(event, Operation) and "reduce_scatter" in event.name}
    wait = trace[index]
    assert isinstance(wait, StreamWait)
    end = next((at for at, event in enumerate(trace) if at > index and event == Mark(UPDATE)), len(trace))
    later = [event for event in trace[index + 1 : end] if isinstance(event, StreamWait) and event.stream == wait.stream]
    own = recorded_on[wait.event]
    return own not in scattered and any(recorded_on[event.event] == own for event in later)


def is_superseded(recorded: Recording, index: int) -> bool:
    """Whether the waiting stream does nothing before it waits for the same stream again (or the trace ends).

    Or for another one, which has waited for the same event: an all-reduce comes after a reduce-scatter.
    """
    trace = recorded.trace
    recorded_on = {event.event: event.stream for event in trace if isinstance(event, EventRecord)}
    wait = trace[index]
    assert isinstance(wait, StreamWait)
    after = {event.stream for event in trace[:index] if isinstance(event, StreamWait) and event.event == wait.event}
    for event in trace[index + 1 :]:
        if isinstance(event, Operation) and event.stream == wait.stream:
            return False
        again = isinstance(event, StreamWait) and event.stream == wait.stream
        if again and recorded_on[event.event] in {recorded_on[wait.event], *after}:
            return True
    return True


def test_a_root_that_another_thread_collects_lets_compute_wait() -> None:
    """Its memory belongs to compute; the thread's own current stream is another."""
    with fake_world(4, 1), recording() as recorder:
        training = Training.of_stack(recorder)
        training.steps(1)
        training.model.set_is_last_backward(False)
        training.loss().backward()
        start, recorder.stream = len(recorder.trace), next(recorder.new_streams)
        del training
        gc.collect()
        waiting = {event.stream for event in recorder.trace[start:] if isinstance(event, StreamWait)}
    assert waiting == {COMPUTE}


@pytest.mark.full
def test_every_wait_gives_its_reason() -> None:
    used = set()
    for file, tree in sources().items():
        for function in functions(tree):
            annotations = {each.arg: ast.unparse(each.annotation) for each in function.args.args if each.annotation}
            for call in device_waits(function):
                why = call.args[2] if len(call.args) == 3 else call.keywords[-1].value
                passed_on = isinstance(why, ast.Name) and annotations.get(why.id) == "Wait"
                assert passed_on or ast.unparse(why).removeprefix("Wait.") in Wait.__members__, f"{file}:{call.lineno}"
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_wait(node.value)}
    assert used == set(Wait.__members__)


def _is_wait(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "Wait"


@pytest.mark.full
def test_streams_are_reached_through_the_device_only() -> None:
    bypasses = {"wait_event", "wait_stream", "record_stream", "record_event", "synchronize"}
    found = {(file, name) for file, tree in sources().items() for name, _ in method_calls(tree) if name in bypasses}
    of_graphs = {("recording", "wait_stream")}  # the stream that a graph is recorded on, around the engine's
    assert found == {(SEAM, "wait_event"), (SEAM, "record_event"), (SEAM, "synchronize")} | of_graphs


# ---- lifetimes: what the waits alone do not guarantee -----------------------------------------------------------


@pytest.mark.full
def test_gradients_must_be_held_until_compute_has_waited() -> None:
    pack = GradientBucket.pack

    def forgetful(self: GradientBucket, packed: PackedGradients, *args: Any, **options: Any) -> None:
        pack(self, packed, *args, **options)
        packed.inputs = []

    with mock.patch.object(GradientBucket, "pack", forgetful), fake_world(4, 1), recording() as recorder:
        Training.of_stack(recorder).steps(3)
    assert {violation.kind for violation in find_violations(recorder.trace)} == {Kind.REUSE}


@pytest.mark.full
@pytest.mark.parametrize("seam", [ALLOCATE_STAGING, ALLOCATE_UNSHARDED], ids=["staging", "unsharded"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16)], ids=["full", "half"])
def test_buffers_of_a_gather_must_be_allocated_on_its_stream(seam: Seam, policy: MixedPrecisionPolicy) -> None:
    with fake_world(4, 1), recording() as recorder:
        allocate = seam.function

        def misplaced(self: Gather, *memory: Any) -> None:
            gathering, recorder.stream = recorder.stream, COMPUTE
            allocate(self, *memory)
            recorder.stream = gathering

        with seam.replaced_by(misplaced):
            Training.of_stack(recorder, mp_policy=policy).steps(3)
    assert {violation.kind for violation in find_violations(recorder.trace)} == {Kind.REUSE}


@pytest.mark.full
def test_what_rests_on_neighbours_must_be_held_until_compute_has_waited() -> None:
    copy_out = COPY_OUT.function

    def forgetful(self: FSDPParamGroup, unsharding: Unsharding) -> None:
        copy_out(self, unsharding)
        if unsharding.resumes and self.storage.post_forward is not None:
            self.storage.post_forward.free()

    with COPY_OUT.replaced_by(forgetful), fake_world(4, 1), recording() as recorder:
        Training.of_stack(recorder, reshard_after_forward=2).steps(3)
    assert {violation.kind for violation in find_violations(recorder.trace)} == {Kind.REUSE}


@pytest.mark.full
def test_gradients_between_reduce_scatter_and_all_reduce_are_added_on_their_stream() -> None:
    add = GradientBucket.add_reduce_scattered

    with fake_world(4, 1), recording() as recorder:

        def misplaced(self: GradientBucket, packed: PackedGradients) -> None:
            reducing, recorder.stream = recorder.stream, COMPUTE
            add(self, packed)
            recorder.stream = reducing

        with mock.patch.object(GradientBucket, "add_reduce_scattered", misplaced):
            SCENARIOS["replicated_accumulating"](recorder)
    assert Kind.RACE in {violation.kind for violation in find_violations(recorder.trace)}
