"""`fsdp2.estimate`: against the CPU's allocator, against numbers computed by hand, and what it refuses.

Estimates make a simulated world of their own, so that these tests have none.
"""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import CPUOffloadPolicy, Estimate, FSDPRuntimeError, FSDPTypeError, FSDPValueError, Hardware, fully_shard
from fsdp2.tools.commands.estimate import loss_named
from fsdp2.tools.estimating import rank
from fsdp2.tools.estimating.hardware import KNOWN, hardware_of
from tests.fake_pg.helpers.allocations import Run, allocator_peaks, drawn_runs, estimated_peaks
from tests.harness import fake_world
from tests.harness.llama import SIZES, Llama, next_token_loss

MIB = 2**20
POLICY = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
SHORT = (
    Run("perceptron", (8,), None, "float32", False, 1, "unsharded", False, "adamw", 2),
    Run("wide", (2, 4), "zero3", "bfloat16", False, 1, "unsharded", True, "adamw foreach", 5),
    Run("wide", (64,), "zero2", "bfloat16 throughout", True, 1, "unsharded", False, "sgd momentum foreach", 1),
    Run("llama", (4,), "zero1", "bfloat16", False, 2, "unsharded", False, "adamw fused", 2),
    Run("llama", (4, 2), None, "float32", False, 3, "sharded", True, "sgd", 1),
    Run("llama-wide", (2,), "zero3", "bfloat16", False, 1, "unsharded", False, "adamw foreach", 2),
    Run("convolutions", (2,), "replicate", "float32", False, 1, "unsharded", False, "sgd momentum foreach", 2),
    Run("convolutions", (8,), "zero3", "float32", True, 2, "sharded", True, "adamw", 1),
)
DRAWN = drawn_runs(21, 40)


def assert_near(run: Run, tolerance: float = 0.05) -> None:
    """Every phase, and so the whole step."""
    truth, said = allocator_peaks(run), estimated_peaks(run)
    errors = {phase: said[phase] / truth[phase] - 1 for phase in truth}
    print(run, {phase: f"{error:+.2%}" for phase, error in errors.items()}, truth)
    assert max(map(abs, errors.values())) < tolerance, errors


@pytest.mark.parametrize(
    "run",
    # The two of whole transformers take 8 s.
    [pytest.param(run, marks=pytest.mark.full if run.model == "llama" else ()) for run in SHORT],
    ids=lambda run: f"{run.model}-{run.strategy}",
)
def test_peaks_are_those_of_the_allocator(run: Run) -> None:
    assert_near(run)


@pytest.mark.full  # 3 minutes together
@pytest.mark.parametrize("run", DRAWN, ids=[str(index) for index in range(len(DRAWN))])
def test_drawn_peaks_are_those_of_the_allocator(run: Run) -> None:
    assert_near(run)


# -- by hand

MACHINE = Hardware(name="two nodes", ranks_per_node=4, nodes=2, memory_bytes=2**30)


class Layers(nn.Module):
    """Square matrices of 1 MiB without biases, each a group."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def shard_layers(model: nn.Module, mesh: Any) -> None:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def layers(count: int = 4, **arguments: Any) -> Estimate:
    given: dict[str, Any] = {"batch": torch.empty(8, 512), "shard": shard_layers, "hardware": MACHINE, **arguments}
    return fsdp2.estimate(lambda: Layers(count), given.pop("mesh_shape", 8), **given)


def test_four_matrices_by_hand() -> None:
    """4 MiB of parameters over 8 ranks: 512 KiB of shards, as much of gradients, twice that of AdamW's state."""
    found = layers()
    assert found.parameters == 4 * 512 * 512 and found.groups == 4
    optimizer = found.phases["optimizer step"].by_use
    assert optimizer["shards"] == 4 * MIB // 8
    assert optimizer["gradients"] == 4 * MIB // 8 + 4 * 128  # with a row of what says which gradients there are
    assert optimizer["optimizer state"] == 2 * 4 * MIB // 8 + 4 * 4  # and a step for each
    # One group computes while the next one arrives.
    assert found.phases["forward"].by_use["unsharded parameters"] == 2 * MIB
    assert found.phases["backward"].by_use["unsharded parameters"] == 2 * MIB
    # A row of 512 float32 as each layer's input, which is the tanh before; and the first one's, which is the batch.
    assert found.activation_bytes == 4 * 512 * 4 + 4


def test_what_four_matrices_exchange() -> None:
    """Each is gathered for forward and for backward; the last stays in between only if it is the root's."""
    found = {each.kind: each for each in layers().collectives}
    gather, scatter = found["all-gather"], found["reduce-scatter"]
    assert (gather.count, gather.nbytes) == (8, 8 * MIB) and (scatter.count, scatter.nbytes) == (4, 4 * MIB + 4 * 128)
    assert gather.ranks == 8 and gather.nodes == 2
    # Of 8 ranks on 2 nodes each sends 7/8, a fourth of it between nodes.
    assert gather.sent_inside + gather.sent_between == 8 * MIB * 7 / 8
    assert gather.sent_between == 8 * MIB * 7 / 8 / 4


def test_replicas_reduce_over_nodes() -> None:
    found = {(each.kind, each.ranks): each for each in layers(mesh_shape=(2, 4)).collectives}
    assert set(found) == {("all-gather", 4), ("reduce-scatter", 4), ("all-reduce", 2)}
    assert found["all-gather", 4].sent_between == 0
    assert found["all-reduce", 2].nodes == 2 and found["all-reduce", 2].sent_inside == 0


def llama(**arguments: Any) -> Estimate:
    given = {
        "batch": torch.empty(16, 64, dtype=torch.int64, device="meta"),
        "loss": next_token_loss,
        "mp_policy": POLICY,
        "blocks": "Block",
        **arguments,
    }
    return fsdp2.estimate(lambda: Llama(SIZES["tiny"], 64), 8, **given)


# -- what is offloaded, what does not fit


def test_offloading_moves_bytes_to_the_host() -> None:
    on_device = layers(shard=None, blocks="Linear", batch=torch.empty(8, 512))
    offloaded = layers(shard=None, blocks="Linear", batch=torch.empty(8, 512), offload_policy=CPUOffloadPolicy())
    assert offloaded.host_bytes >= 4 * 4 * MIB // 8 and on_device.host_bytes == 0
    assert "shards" not in offloaded.phases["forward"].by_use
    assert offloaded.peak_bytes < on_device.peak_bytes
    # To the device for forward and backward, back once; the sum is padded by what says which gradients exist.
    assert offloaded.to_host >= 3 * 4 * MIB // 8


def _half_on_host(model: nn.Module, mesh: Any) -> None:
    for index, layer in enumerate(model.layers):  # type: ignore[union-attr,arg-type]
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy() if index % 2 else None)
    fully_shard(model, mesh=mesh)


def test_offloading_of_some_parameters_moves_their_part() -> None:
    """As the engine does it, whoever has said so: names, a function, or the program that shards."""
    batch = torch.empty(8, 512)
    of_all = {"shard": None, "blocks": "Linear", "batch": batch}
    none, every = (layers(**of_all, offload_policy=policy) for policy in (None, CPUOffloadPolicy()))
    names = {f"layers.{index}.weight": CPUOffloadPolicy() for index in (1, 3)}
    every_other = itertools.cycle([None, CPUOffloadPolicy()])
    halves = [
        layers(**of_all, offload_policy=names),
        layers(**of_all, offload_policy=lambda name, _: next(every_other)),
        layers(batch=batch, shard=_half_on_host),
    ]
    for half in halves:
        # The optimizer's temporary tensors there are of one parameter, in each of them.
        assert every.host_bytes / 2 <= half.host_bytes < every.host_bytes / 2 + MIB // 4
        assert half.to_host == pytest.approx(every.to_host / 2, rel=0.01)
        assert every.peak_bytes < half.peak_bytes < none.peak_bytes
        assert half.phases["forward"].by_use["shards"] == none.phases["forward"].by_use["shards"] / 2
        assert half.settings["offload"] == "shards, gradients, optimizer of 50% of the parameters"
    with pytest.raises(FSDPValueError, match="offload_policy names 'nothing'"):
        layers(**of_all, offload_policy={"nothing": CPUOffloadPolicy()})


def test_activations_that_are_given() -> None:
    """The engine's part is that of a run that computes; what is given is added to what a forward has."""
    found = layers(activation_bytes=3 * MIB)
    assert found.activation_bytes == 3 * MIB
    computed = layers()
    for phase in ("forward", "backward"):
        kinds = {name: value for name, value in found.phases[phase].by_use.items() if name != "activations"}
        theirs = computed.phases[phase].by_use
        assert kinds["unsharded parameters"] == theirs["unsharded parameters"] and kinds["shards"] == theirs["shards"]
        assert found.phases[phase].by_use["activations"] >= 3 * MIB
    assert [(each.kind, each.count, each.nbytes) for each in found.collectives] == [
        (each.kind, each.count, each.nbytes) for each in computed.collectives
    ]


# -- microbatches, of which three are simulated, and checkpointing


@pytest.mark.parametrize("kept", ["unsharded", "sharded"])
def test_middle_microbatches_are_counted_as_if_they_were_simulated(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"batch": torch.empty(8 * 6, 512), "accumulation": 6, "kept": kept}
    found = layers(**given)
    monkeypatch.setattr(rank, "SIMULATED_MICROBATCHES", 6)
    every = layers(**given)
    assert found.phases == every.phases and found.collectives == every.collectives
    scatter = next(each for each in found.collectives if each.kind == "reduce-scatter")
    assert scatter.count == (4 if kept == "unsharded" else 6 * 4)


def test_checkpointing_keeps_less() -> None:
    found = {how: llama(checkpointing=how) for how in ("none", "selective", "blocks")}
    kept = {how: each.activation_bytes for how, each in found.items()}
    assert kept["none"] > kept["selective"] > kept["blocks"]


# -- what it leaves as it was


def test_nothing_stays() -> None:
    model = Layers(2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    resize, enabled = torch.UntypedStorage.resize_, gc.isenabled()
    found = fsdp2.estimate(model, 8, batch=torch.empty(8, 512), hardware=MACHINE, shard=shard_layers)
    assert found.peak_bytes == layers(2).peak_bytes, "as if it were made inside"
    assert not dist.is_initialized() and torch.UntypedStorage.resize_ is resize and gc.isenabled() is enabled
    assert type(model) is Layers and all(torch.equal(before[name], each) for name, each in model.named_parameters())
    assert torch.ones(2).sum().item() == 2, "tensors have memory again"


def test_models_on_meta() -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return Layers(2)

    found = fsdp2.estimate(make, 8, batch=torch.empty(8, 512), hardware=MACHINE, shard=shard_layers)
    assert found.peak_bytes == layers(2).peak_bytes


class Tied(nn.Module):
    """Its head is its embedding; a part is frozen; one parameter is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(128, 64), nn.Linear(64, 128, bias=False)
        self.head.weight = self.embedding.weight
        self.middle = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.middle(self.middle(self.embedding(tokens))))
        return self.head(checkpoint(torch.tanh, x, use_reentrant=False))


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("make_optimizer", [None, torch.optim.SGD])
def test_tied_and_frozen_parameters(ranks: int, make_optimizer: Any) -> None:
    batch = torch.empty(8, 16, dtype=torch.int64)
    found = fsdp2.estimate(Tied, ranks, batch=batch, optimizer=make_optimizer)
    assert ("optimizer step" in found.phases) is (make_optimizer is not None)
    assert found.parameters == 128 * 64 + 2 * (64 * 64 + 64) and found.fits


# -- what it says


def test_it_says_which_loss() -> None:
    assert layers(1).settings["loss"] == "sum of the output (default)"
    assert layers(1, loss=lambda output, x: output.mean()).settings["loss"] == "given (<lambda>)"


def test_as_text_and_as_json() -> None:
    found = llama(checkpointing="blocks", accumulation=2)
    text = str(found)
    for said in (
        "Llama: ",
        "on shard 8",
        "microbatches 2",
        "fits: ",
        "unsharded parameters",
        "all-gather",
        "loss given",
    ):
        assert said in text, said
    assert "devices with room for that: a100, h100, h200, b200, mi300x" in text and "--suggest" not in text
    data = json.loads(found.to_json())
    assert data["peak_bytes"] == found.peak_bytes and data["hardware"]["name"] == "h100-8x"
    assert data["phases"]["forward"]["by_use"] == dict(found.phases["forward"].by_use)
    small = layers(1, hardware=replace(MACHINE, memory_bytes=1000))
    assert not small.fits and "`fsdp2 estimate --suggest`, or fsdp2.suggest in Python, says what would" in str(small)


def test_logits_of_a_loss_of_the_command_line_are_activations() -> None:
    ranks, rows, classes = 2, 6, 500

    def own(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def estimated(loss: Any) -> Estimate:
        batch = torch.empty(ranks, rows, dtype=torch.int64, device="meta")
        policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return fsdp2.estimate(
            lambda: nn.Sequential(nn.Embedding(classes, 4), nn.Linear(4, classes)),
            ranks,
            batch=batch,
            loss=loss,
            mp_policy=policy,
            hardware="cpu",
        )

    named, mine = estimated(loss_named("cross-entropy")), estimated(own)
    assert named.phases == mine.phases
    forward = named.phases["forward"].by_use
    assert forward["activations"] >= rows * classes * 4  # the logits in float32
    assert forward.get("communication buffers", 0) < rows * classes * 4
    assert named.settings["loss"] == "given (cross-entropy)"


# -- what it refuses


class Reads(nn.Linear):
    """Its result depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


def test_forwards_that_depend_on_values() -> None:
    with pytest.raises(FSDPRuntimeError, match=r"the forward of \w*Reads depends on values.*activation_bytes="):
        fsdp2.estimate(lambda: Reads(8, 8), 2, batch=torch.empty(2, 8))
    assert fsdp2.estimate(lambda: Reads(8, 8), 2, batch=torch.empty(2, 8), activation_bytes=64).fits


class Fails(nn.Linear):
    """Its forward has a mistake."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(3, -1))


def test_forwards_that_refuse_the_batch() -> None:
    with pytest.raises(
        FSDPValueError, match=r"forward of Linear refused the batch \(8x3:float32\): .*[Ss]hapes?.*takes"
    ):
        fsdp2.estimate(lambda: nn.Linear(8, 8), 2, batch=torch.empty(8, 3))
    with pytest.raises(FSDPValueError, match=r"refused the batch \(4x8:float32\)") as raised:
        fsdp2.estimate(lambda: Fails(8, 8), 2, batch={"x": torch.empty(4, 8)})
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 computes embeddings of fake numbers of any dtype")
def test_a_forward_that_takes_indices_says_what_to_write() -> None:
    with pytest.raises(FSDPValueError, match=r"write 4x2:int64 .*dtype=torch.int64 in a program"):
        fsdp2.estimate(lambda: nn.Embedding(8, 8), 2, batch=torch.empty(4, 2))


@fake_world(2)
def test_a_process_group_that_exists() -> None:
    with pytest.raises(FSDPRuntimeError, match=r"fsdp2.estimate simulates 8 ranks.*already rank 0 of 2"):
        layers()
    assert dist.get_world_size() == 2


def sharded_already() -> nn.Module:
    return fully_shard(nn.Linear(4, 4))


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "sharded already": (
        lambda: fsdp2.estimate(sharded_already, 2, batch=torch.empty(2, 4)),
        FSDPValueError,
        "sharded already.*shard=",
    ),
    "no module": (
        lambda: fsdp2.estimate(lambda: 3, 2, batch=torch.empty(2, 4)),
        FSDPTypeError,
        "an nn.Module, got int",
    ),  # type: ignore[arg-type,return-value]
    "too large a mesh": (lambda: layers(mesh_shape=16), FSDPValueError, "the mesh has 16 ranks, and two nodes has 8"),
    "samples": (lambda: layers(batch=torch.empty(9, 512)), FSDPValueError, "9 samples, which 8 data-parallel ranks"),
    "microbatches": (lambda: layers(accumulation=2), FSDPValueError, "8 samples.*2 microbatches"),
    "no tensor": (lambda: layers(batch={"a": 1}), FSDPTypeError, "batch is what all ranks together"),
    "hardware": (lambda: layers(hardware="h1000"), FSDPValueError, "Known are"),
    "three dims": (lambda: layers(mesh_shape=(2, 2, 2), shard=None), FSDPValueError, "pass shard="),
    "no ranks": (lambda: layers(mesh_shape=0), FSDPValueError, "mesh_shape is"),
    "names": (lambda: layers(mesh_dim_names=("a", "b")), FSDPValueError, "of different lengths"),
    "both": (lambda: layers(strategy="zero2"), FSDPValueError, "shard and strategy contradict"),
    "unsharded": (lambda: layers(shard=lambda model, mesh: None), FSDPRuntimeError, "nothing in the model is sharded"),
    "checkpointing": (lambda: layers(checkpointing="all"), FSDPValueError, "'none', 'selective', 'blocks'"),
    "accumulation": (lambda: layers(accumulation=0), FSDPValueError, "1 or more, got 0"),
    "activations": (lambda: layers(activation_bytes=-1), FSDPValueError, "0 or more"),
    "ranks": (lambda: fsdp2.suggest(Tied, 0, batch=torch.empty(2, 4)), FSDPValueError, "mesh_shape is"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_refusals(what: str) -> None:
    call, error, said = REFUSED[what]
    with pytest.raises(error, match=said):
        call()
    assert not dist.is_initialized()


def test_machines_by_name() -> None:
    assert hardware_of("h100-8x").nodes is None and hardware_of("h100").ranks_per_node == 8
    assert hardware_of("a100-4x2").ranks_per_node == 4 and hardware_of("a100-4x2").nodes == 2
    assert hardware_of("cpu") is KNOWN["cpu"] and hardware_of(MACHINE) is MACHINE
    for name in ("h101-8x", "h100-0x", "h100-8x0", ""):
        with pytest.raises(FSDPValueError, match=r"is not known. Known are 'a100-8x', 'h100-8x'.*fsdp2.Hardware"):
            hardware_of(name)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ranks_per_node": 0}, FSDPValueError),
        ({"reserved_bytes": -1}, FSDPValueError),
        ({"memory_bytes": "80"}, FSDPTypeError),
        ({"name": None}, FSDPTypeError),
        ({"has_streams": 1}, FSDPTypeError),
    ],
)
def test_numbers_that_make_no_sense(change: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"Hardware takes .*{next(iter(change))}"):
        replace(MACHINE, **change)  # type: ignore[arg-type]


# -- suggestions


def test_suggestions() -> None:
    """Activations of 8 MiB for each block decide; where they do not fit, checkpointing makes it fit."""
    batch, asked = torch.empty(8 * 1024, 512), []  # type: tuple[Tensor, list[str]]
    given: dict[str, Any] = {"batch": batch, "blocks": "Tanh"}
    model = nn.Sequential(*[Tanh() for _ in range(4)])
    every = fsdp2.suggest(model, 8, hardware=MACHINE, progress=asked.append, **given)
    assert asked == [each.arguments for each in every.tried] and len(asked) == 2 * 3
    assert every.best is every.tried[0] and "strategy='zero2', checkpointing='none'" in str(every)
    alone = fsdp2.estimate(model, 8, hardware=MACHINE, strategy="zero2", **given)
    assert alone.peak_bytes == every.tried[0].estimate.peak_bytes
    small = replace(MACHINE, memory_bytes=every.tried[-1].estimate.peak_bytes)
    found = fsdp2.suggest(model, 8, hardware=small, **given)
    assert found.best is not None and "checkpointing='blocks'" in found.best.arguments
    assert json.loads(found.to_json())["best"] == found.best.arguments


class Tanh(nn.Module):
    """A block that keeps more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(self.layer(x)))


def test_offloading_is_tried_where_nothing_fits_without() -> None:
    tiny = replace(MACHINE, memory_bytes=MIB // 4, host_memory_bytes=MIB // 4)
    found = fsdp2.suggest(lambda: Layers(4), 8, batch=torch.empty(8, 512), hardware=tiny, blocks="Linear")
    assert found.best is None and "nothing that was tried fits" in str(found)
    assert "CPUOffloadPolicy()" in found.tried[-1].arguments and found.tried[-1].estimate.host_bytes > 0


# -- large ones


@pytest.mark.full  # 20 to 30 s
def test_seventy_billion_on_a_thousand_ranks() -> None:
    """In under 30 s of a processor, and 4 GiB. (Measured alone: the processor's seconds, as the machine is shared.)"""
    import resource

    began = time.process_time()
    batch = torch.empty(1024, 8192, dtype=torch.int64, device="meta")
    found = fsdp2.estimate(
        lambda: Llama(SIZES["70B"], 8192),
        1024,
        batch=batch,
        loss=next_token_loss,
        mp_policy=POLICY,
        checkpointing="blocks",
    )
    seconds, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{seconds:.1f} s, {peak / MIB:.0f} MiB\n{found}")
    assert seconds < 30 and peak < 4 * 2**30
    assert 70e9 < found.parameters < 71e9 and found.fits
