"""State dicts: sharded whenever they are taken, saved and loaded on any number of ranks, converted to other dtypes."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import FSDPModule, FSDPRuntimeError, fully_shard
from tests.harness import Reference, adamw, assert_trains_like, multi_rank, tolerance_for
from tests.harness.compare import assert_same, assert_sharded_same, parameters_of
from tests.harness.models import CONV, FROZEN, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.pool import WorkerPools

# The root owns the parameters of "4", so that they stay unsharded after forward.
CASE = dataclasses.replace(UNEVEN_MLP, name="root_owns_the_last_layer", unit_names=("0", "2"))
STEPS_BEFORE, STEPS_AFTER = 2, 2


def shard(case: ModelCase = CASE, model: nn.Module | None = None) -> nn.Module:
    model = case.build() if model is None else model
    for unit in case.units(model):
        fully_shard(unit)
    return model


def inputs(case: ModelCase = CASE, step: int = 0) -> Tensor:
    return case.batch(0, step, dist.get_rank()).inputs


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return adamw([parameter for parameter in model.parameters() if parameter.requires_grad])


# ---- the form of a state dict --------------------------------------------------------------------


def fresh(model: nn.Module) -> object:
    return None


def after_training_forward(model: nn.Module) -> object:
    return model(inputs())  # kept, so that its backward may still come


def after_evaluation_forward(model: nn.Module) -> object:
    with torch.no_grad():
        return model(inputs())


def after_inference_forward(model: nn.Module) -> object:
    with torch.inference_mode():
        return model(inputs())


def after_backward(model: nn.Module) -> object:
    return model(inputs()).sum().backward()


def after_backward_that_keeps_parameters(model: nn.Module) -> object:
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(False)
    return model(inputs()).sum().backward()


def after_unshard(model: nn.Module) -> object:
    for module in reversed(list(model.modules())):
        if isinstance(module, FSDPModule) and module is not model:
            continue
        if isinstance(module, FSDPModule):
            module.unshard()
    return None


def while_unsharding(model: nn.Module) -> object:
    assert isinstance(model, FSDPModule)
    return model.unshard(async_op=True)


MOMENTS = pytest.mark.parametrize(
    "bring",
    [
        fresh,
        after_training_forward,
        after_evaluation_forward,
        after_inference_forward,
        after_backward,
        after_backward_that_keeps_parameters,
        after_unshard,
        while_unsharding,
    ],
    ids=lambda each: each.__name__,
)


@multi_rank(2, 4)
@MOMENTS
def test_state_dict_is_sharded_at_any_moment(bring: Callable[[nn.Module], object], world_size: int) -> None:
    model, plain = shard(), CASE.build()
    kept = bring(model)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert value.placements == (Shard(0),), name
        rows, whole = -(-value.shape[0] // world_size), plain.state_dict()[name]
        start = min(rows * dist.get_rank(), value.shape[0])
        assert torch.equal(value.to_local(), whole[start : start + rows]), name
        assert value.full_tensor().equal(whole), name
    kept = bring(model)
    for part in (model[4], model[0]):  # a plain submodule too: its parameters belong to the root's group
        assert all(isinstance(value, DTensor) for value in part.state_dict().values())
    if isinstance(kept, Tensor) and kept.requires_grad:
        kept.sum().backward()
        plain(inputs()).sum().backward()  # of this rank alone; the shapes and the presence of gradients count
        assert all(parameter.grad is not None for parameter in model.parameters())


@multi_rank(2, 4)
def test_state_dict_aliases_the_parameters() -> None:
    """As on a plain model: what is written into it shows in the model, and the other way round."""
    model = shard()
    state = model.state_dict()
    for name, parameter in model.named_parameters():
        local = state[name].to_local()
        assert local.data_ptr() == parameter.to_local().data_ptr()
        assert local.untyped_storage().nbytes() == local.nbytes, f"{name} would drag its group along"
    before = model(inputs())
    model(inputs()).sum().backward()
    with torch.no_grad():
        for value in state.values():
            value.zero_()
    assert before.abs().sum() > 0
    assert model(inputs()).abs().sum() == 0


@multi_rank(2)
@pytest.mark.parametrize("bring", [fresh, after_training_forward, after_backward], ids=lambda each: each.__name__)
def test_parameters_lie_in_one_buffer_per_group(bring: Callable[[nn.Module], object]) -> None:
    """Loading must not break that, or every step would copy."""
    model, other = shard(), shard(model=CASE.build(seed=1))
    kept = bring(model)
    model.load_state_dict(other.state_dict())
    del kept
    model.reshard()
    addresses = [parameter.to_local().data_ptr() for parameter in model.parameters()]
    model(inputs()).sum().backward()
    model.reshard()
    assert [parameter.to_local().data_ptr() for parameter in model.parameters()] == addresses
    assert_sharded_same("loaded", parameters_of(model), dict(CASE.build(seed=1).named_parameters()))


@multi_rank(2)
@MOMENTS
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_load_state_dict_at_any_moment(bring: Callable[[nn.Module], object], assign: bool) -> None:
    check_loading(bring, assign)


@multi_rank(4)
@pytest.mark.parametrize("bring", [fresh, after_training_forward], ids=lambda each: each.__name__)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_load_state_dict_on_four_ranks(bring: Callable[[nn.Module], object], assign: bool) -> None:
    check_loading(bring, assign)


def check_loading(bring: Callable[[nn.Module], object], assign: bool) -> None:
    world_size = dist.get_world_size()
    model = shard()
    kept = bring(model)
    source = shard(model=CASE.build(seed=1))
    result = model.load_state_dict(source.state_dict(), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    del kept
    model.zero_grad()
    model.set_reshard_after_backward(True)
    reference = Reference(CASE, world_size=world_size, model=CASE.build(seed=1))
    assert_trains_like(reference, model, optimizer_of(model), steps=STEPS_AFTER, tolerance=tolerance_for(world_size))


@multi_rank(2)
def test_loading_into_a_part_while_it_is_unsharded() -> None:
    model = shard()
    model.unshard()
    model[0].unshard()
    source = shard(model=CASE.build(seed=1))
    model[4].load_state_dict(source[4].state_dict())
    model[0].load_state_dict(source[0].state_dict())
    model[2].load_state_dict(source[2].state_dict())
    with torch.no_grad():
        assert torch.equal(model(inputs()), source(inputs()))


@multi_rank(2)
def test_loading_plain_tensors_is_torchs_own_error() -> None:
    model = shard()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor|DTensor"):
        model.load_state_dict(CASE.build().state_dict())


@multi_rank(2)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_loading_between_forward_and_backward_is_an_error(assign: bool) -> None:
    """Backward would mix old and new weights. A plain model says "modified by an inplace operation"."""
    model, source = shard(), shard(model=CASE.build(seed=1))
    loss = model(inputs()).sum()
    model.load_state_dict(source.state_dict(), assign=assign)
    with pytest.raises(FSDPRuntimeError, match=r"between a forward and its backward"):
        loss.backward()
    model.zero_grad()
    reference = Reference(CASE, world_size=2, model=CASE.build(seed=1))
    assert_trains_like(reference, model, optimizer_of(model), steps=1)


class WithBuffers(nn.Module):
    """State of every kind: a buffer, a buffer that is not saved, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(13, 5)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("cache", torch.ones(5), persistent=False)
        self.version = 7

    def get_extra_state(self) -> Any:
        return {"version": self.version}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.cache + self.count


@multi_rank(2)
def test_buffers_and_extra_state_are_as_on_a_plain_model() -> None:
    model, plain = WithBuffers(), WithBuffers()
    fully_shard(model.layer)
    fully_shard(model)
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    assert state["_extra_state"] == {"version": 7} and type(state["count"]) is Tensor
    state["_extra_state"], state["count"] = {"version": 8}, torch.tensor(4)
    model.load_state_dict(state)
    assert model.version == 8 and model.count == 4


# ---- torch.save ----------------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("bring", [fresh, after_training_forward], ids=lambda each: each.__name__)
def test_torch_save_writes_this_ranks_share_and_no_more(bring: Callable[[nn.Module], object], world_size: int) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = [nn.Linear(13, 403), nn.GELU(), nn.Linear(403, 101), nn.GELU(), nn.Linear(101, 1)]
        return shard(model=nn.Sequential(*layers))

    model = make(0)
    kept = bring(model)
    state = model.state_dict()
    own_bytes = sum(value.to_local().nbytes for value in state.values())
    whole = io.BytesIO()
    torch.save(state, whole)
    overhead_bytes = 8_000  # names, DTensorSpecs, the archive's own records
    assert own_bytes < whole.getbuffer().nbytes < own_bytes + overhead_bytes
    one = io.BytesIO()
    torch.save({"bias": state["0.bias"]}, one)
    assert one.getbuffer().nbytes < state["0.bias"].to_local().nbytes + overhead_bytes, "one parameter, not its group"
    whole.seek(0)
    loaded = torch.load(whole, weights_only=False)
    target = make(1)
    target.load_state_dict(loaded)
    assert_sharded_same("loaded", parameters_of(target), {n: v.full_tensor() for n, v in state.items()})
    del kept


@multi_rank(2)
def test_torch_load_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(shard().state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_sharded_same("loaded", loaded, dict(CASE.build().named_parameters()))


@multi_rank(2)
def test_one_parameter_can_be_saved_and_copied() -> None:
    """Not only state dicts: a parameter itself, which must not take its group, module or process group along."""
    model = shard(model=nn.Sequential(nn.Linear(13, 403), nn.GELU(), nn.Linear(403, 403), nn.GELU(), nn.Linear(403, 1)))
    bias = model[2].bias
    file = io.BytesIO()
    torch.save(bias, file)
    assert file.getbuffer().nbytes < bias.to_local().nbytes + 8_000
    twin = copy.deepcopy(bias)
    assert torch.equal(twin.to_local(), bias.to_local())
    assert twin.to_local().data_ptr() != bias.to_local().data_ptr()
    clones = copy.deepcopy(model.state_dict())
    assert_sharded_same("copy", clones, {name: value.full_tensor() for name, value in model.state_dict().items()})


@multi_rank(2)
def test_state_dict_with_keep_vars_gives_the_parameters() -> None:
    model = shard()
    after = after_training_forward(model)
    state = model.state_dict(keep_vars=True)
    model.reshard()
    assert all(state[name] is parameter for name, parameter in model.named_parameters())
    del after


# ---- distributed checkpoints ---------------------------------------------------------------------


def train_and_save(case: ModelCase, folder: Path, way: str) -> None:
    """`STEPS_BEFORE` steps on this world, then a checkpoint."""
    model = shard(case)
    optimizer = optimizer_of(model)
    reference = Reference(case, world_size=dist.get_world_size())
    assert_trains_like(reference, model, optimizer, steps=STEPS_BEFORE, tolerance=tolerance_for(dist.get_world_size()))
    if way == "bare":
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
    else:
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        options = full if way == "full" else StateDictOptions()
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        if way == "sharded":
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        elif dist.get_rank() == 0:
            torch.save({"model": model_state, "optimizer": optimizer_state}, folder / "full.pt")
    if dist.get_rank() == 0:
        # What the run would have gone on with: the reference as it is, on the world that saved.
        torch.save((reference.model.state_dict(), reference.optimizer.state_dict()), folder / "reference.pt")


def load_and_train(case: ModelCase, folder: Path, way: str) -> None:
    """A fresh model takes the checkpoint and goes on like a reference that never stopped."""
    world_size = dist.get_world_size()
    model = shard(model=case.build(seed=1), case=case)
    optimizer = optimizer_of(model)
    if way == "full":
        loaded = torch.load(folder / "full.pt", weights_only=False)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, loaded["model"], options=options)
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"], options=options)
    elif way == "bare":
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)  # in place: the model has it now
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    reference = Reference(case, world_size=world_size)
    model_state, optimizer_state = torch.load(folder / "reference.pt", weights_only=False)
    reference.model.load_state_dict(model_state)
    reference.optimizer.load_state_dict(optimizer_state)
    reference.steps_done = STEPS_BEFORE
    tolerance = tolerance_for(max(world_size, int((folder / "world_size").read_text())))
    if (
        tolerance is not None
    ):  # the saving world rounded its sums otherwise than the reference: start from what it saved
        with torch.no_grad():
            for name, parameter in reference.model.named_parameters():
                parameter.copy_(model.state_dict()[name].full_tensor())
    assert_trains_like(reference, model, optimizer, steps=STEPS_AFTER, tolerance=tolerance)


@contextmanager
def world_of_one(folder: Path) -> Iterator[None]:
    """The test process as the only rank of a gloo world."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_on(pools: WorkerPools, world_size: int, body: Callable[..., None], *args: Any) -> None:
    if world_size > 1:
        pools[world_size].run(body, *args)
        return
    with world_of_one(args[1]):
        body(*args)


SAME, GROW, SHRINK, FROM_FOUR, FROM_ONE = (2, 2), (2, 4), (2, 1), (4, 2), (1, 2)


@pytest.mark.parametrize(
    ("way", "saving", "loading"),
    [
        *[("sharded", *worlds) for worlds in (SAME, GROW, SHRINK, FROM_FOUR, FROM_ONE)],
        *[("bare", *worlds) for worlds in (SAME, GROW)],
        *[("full", *worlds) for worlds in (SAME, GROW, SHRINK)],
    ],
)
def test_checkpoint_moves_between_worlds(
    way: str, saving: int, loading: int, pools: WorkerPools, tmp_path: Path
) -> None:
    (tmp_path / "world_size").write_text(str(saving))
    run_on(pools, saving, train_and_save, CASE, tmp_path, way)
    store = tmp_path / "store"
    if store.exists():
        os.remove(store)
    run_on(pools, loading, load_and_train, CASE, tmp_path, way)


@pytest.mark.parametrize(
    ("case", "way"),
    [(TRANSFORMER, "sharded"), (TIED, "sharded"), (TIED, "full"), (CONV, "sharded"), (FROZEN, "full")],
    ids=str,
)
def test_checkpoint_of_every_kind_of_model(case: ModelCase, way: str, pools: WorkerPools, tmp_path: Path) -> None:
    (tmp_path / "world_size").write_text("2")
    run_on(pools, 2, train_and_save, case, tmp_path, way)
    run_on(pools, 2, load_and_train, case, tmp_path, way)


@multi_rank(2, 4)
def test_full_state_dict_is_the_plain_models(world_size: int) -> None:
    model, plain = shard(), CASE.build()
    kept = after_training_forward(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert_same("full state", state, plain.state_dict())
    else:
        assert state == {}
    del kept


@multi_rank(2, 4)
def test_full_state_dict_from_rank_0_alone_is_broadcast(world_size: int) -> None:
    model, source = shard(), CASE.build(seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, source.state_dict() if dist.get_rank() == 0 else {}, options=options)
    reference = Reference(CASE, world_size=world_size, model=source)
    assert_trains_like(reference, model, optimizer_of(model), steps=2, tolerance=tolerance_for(world_size))


@multi_rank(2)
def test_full_state_dict_is_broadcast_into_a_model_on_meta() -> None:
    """The usual way to load a large checkpoint: only rank 0 reads it."""
    with torch.device("meta"):
        model = CASE.make_model()
    shard(model=model)
    model.to_empty(device="cpu")
    source = CASE.build(seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, source.state_dict() if dist.get_rank() == 0 else {}, options=options)
    assert_trains_like(Reference(CASE, world_size=2, model=source), model, optimizer_of(model), steps=2)


@multi_rank(2)
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_optimizer_state_right_after_an_evaluation(full: bool) -> None:
    """Evaluate, then save: the usual order. And the same for loading."""
    options = StateDictOptions(full_state_dict=full)
    model = shard()
    optimizer = optimizer_of(model)
    reference = Reference(CASE, world_size=2)
    assert_trains_like(reference, model, optimizer, steps=2)
    with torch.no_grad():
        model(inputs())
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    if not full or dist.get_rank() == 0:
        assert set(saved["state"]) == set(dict(CASE.build().named_parameters()))
    second = shard()
    second.load_state_dict(model.state_dict())
    second_optimizer = optimizer_of(second)
    with torch.no_grad():
        second(inputs())
    set_optimizer_state_dict(second, second_optimizer, saved if not full else broadcast(saved), options=options)
    second.reshard()
    assert_trains_like(reference, second, second_optimizer, steps=2)


def broadcast(value: Any) -> Any:
    """Rank 0's object, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


@multi_rank(2)
def test_checkpoint_between_forward_and_backward_changes_nothing(tmp_path: Path) -> None:
    """A signal handler may save at any moment; the running iteration must go on."""
    model, plain = shard(), CASE.build()
    reference = Reference(CASE, world_size=2, model=plain)
    record = reference.step()
    loss = CASE.loss(model, CASE.batch(0, 0, dist.get_rank()))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    loss.backward()
    assert_sharded_same("gradients", {n: p.grad for n, p in model.named_parameters()}, record.gradients)


@multi_rank(2)
def test_asynchronous_checkpoint_is_of_the_moment_it_was_taken(tmp_path: Path) -> None:
    """Training goes on, over the same buffers, while the checkpoint is written."""
    model = shard()
    optimizer = optimizer_of(model)
    reference = Reference(CASE, world_size=2)
    assert_trains_like(reference, model, optimizer, steps=1)
    expected = {name: value.clone() for name, value in reference.model.state_dict().items()}
    own_group = dist.new_group(backend="gloo")  # a thread's collectives must not meet those of the training
    writing = dcp.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path, process_group=own_group)
    assert_trains_like(reference, model, optimizer, steps=2)
    writing.result()
    second = shard(model=CASE.build(seed=1))
    state = {"model": second.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    assert_sharded_same("checkpoint", parameters_of(second), expected)


# ---- conversions ---------------------------------------------------------------------------------


def half(module: nn.Module) -> None:
    module.half()


def double(module: nn.Module) -> None:
    module.double()


def to_bfloat16(module: nn.Module) -> None:
    module.to(torch.bfloat16)


def by_swapping(module: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


class InItsDtype(nn.Module):
    """Computes in the dtype of its layer and returns the dtype that it was given."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


def _layers() -> nn.Module:
    return nn.Sequential(*[InItsDtype(nn.Linear(m, n)) for m, n in [(13, 23), (23, 9), (9, 1)]])


LAYERS = ModelCase("layers", _layers, UNEVEN_MLP.make_batch, ("0",), UNEVEN_MLP.loss_of)
"""The root owns two layers, so that converting one of them splits its group's buffers."""


def root(model: nn.Module) -> nn.Module:
    return model


def sharded_child(model: nn.Module) -> nn.Module:
    return model[0]


def inside_a_sharded_child(model: nn.Module) -> nn.Module:
    return model[0].layer


def plain_child(model: nn.Module) -> nn.Module:
    return model[1]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """For low precision: exact where AdamW's foreach and for-loop forms may round differently."""
    return torch.optim.SGD(parameters, lr=0.125)


PARTS = [root, sharded_child, inside_a_sharded_child, plain_child]


@multi_rank(2)
@pytest.mark.parametrize(
    ("convert", "part", "when"),
    [
        *[(half, part, "before_first") for part in PARTS],
        *[(double, part, "after_first") for part in PARTS],
        *[(to_bfloat16, part, "while_unsharded") for part in (root, sharded_child)],
        *[(by_swapping, part, "after_first") for part in (root, plain_child)],
        (to_bfloat16, root, "before_first"),
        (half, root, "after_first"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_conversion_of_any_part(
    convert: Callable[[nn.Module], None], part: Callable[[nn.Module], nn.Module], when: str
) -> None:
    model, plain = shard(LAYERS), LAYERS.build()
    optimizer = sgd(list(model.parameters()))
    if when != "before_first":
        reference = Reference(LAYERS, world_size=2, model=plain, make_optimizer=sgd)
        assert_trains_like(reference, model, optimizer, steps=1)
    if when == "while_unsharded":
        model.unshard()
        model[0].unshard()
    convert(part(plain))
    convert(part(model))
    reference = Reference(LAYERS, world_size=2, model=plain, make_optimizer=sgd)
    model.reshard()
    dtypes = {name: value.dtype for name, value in plain.state_dict().items()}
    assert {name: value.dtype for name, value in model.state_dict().items()} == dtypes
    assert_trains_like(reference, model, optimizer, steps=2)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes


@multi_rank(4)
@pytest.mark.parametrize("part", [root, plain_child], ids=lambda f: f.__name__)
def test_conversion_on_four_ranks(part: Callable[[nn.Module], nn.Module]) -> None:
    model, plain = shard(LAYERS), LAYERS.build()
    with torch.no_grad():
        model(inputs(LAYERS))
    part(plain).double()
    part(model).double()
    reference = Reference(LAYERS, world_size=4, model=plain, make_optimizer=sgd)
    assert_trains_like(reference, model, sgd(list(model.parameters())), steps=2, tolerance=tolerance_for(4))


@multi_rank(2)
def test_conversion_between_forward_and_backward_is_an_error_or_right() -> None:
    """The saved weights are of the old dtype and their memory may be gone; wrong gradients are what must not happen."""
    model, reference = shard(LAYERS), Reference(LAYERS, world_size=2)
    loss = LAYERS.loss(model, LAYERS.batch(0, 0, dist.get_rank()))
    model.double()
    try:
        loss.backward()
    except RuntimeError:
        pass
    else:
        expected = {name: gradient.double() for name, gradient in reference.step().gradients.items()}
        assert_sharded_same("gradients", {name: p.grad for name, p in model.named_parameters()}, expected)
    model.zero_grad()
    plain = LAYERS.build().double()
    reference = Reference(LAYERS, world_size=2, model=plain)
    assert_trains_like(reference, model, optimizer_of(model), steps=1)


@multi_rank(2)
@pytest.mark.parametrize("sync", [True, False], ids=["reduced", "not_reduced_yet"])
@pytest.mark.parametrize("part", [root, plain_child], ids=lambda f: f.__name__)
def test_conversion_between_two_backwards_keeps_the_gradients(
    part: Callable[[nn.Module], nn.Module], sync: bool
) -> None:
    """As on a plain model, where `_apply` converts gradients too."""
    model, plain = shard(LAYERS), LAYERS.build()
    assert isinstance(model, FSDPModule)
    same = torch.linspace(-1, 1, 4 * 13).view(4, 13)  # on every rank, so that one plain model is the reference
    model.set_requires_gradient_sync(sync)
    for each in (model, plain):
        each(same).sum().backward()
        part(each).double()
    model.set_requires_gradient_sync(True)
    for each in (model, plain):
        each(same).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert_sharded_same("gradients", {name: p.grad for name, p in model.named_parameters()}, expected)


def back_and_forth(module: nn.Module) -> None:
    """Neither dtype nor values change in the end, but the memory does."""
    module.double().float()


@multi_rank(2)
@pytest.mark.parametrize(
    ("convert", "then"),
    [(half, "reshard"), (double, "state_dict"), (by_swapping, "train"), (back_and_forth, "train")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_conversion_of_a_plain_child_while_it_is_unsharded(convert: Callable[[nn.Module], None], then: str) -> None:
    """No hook of the engine's sees it. It must be an error: else that child would train apart from its shards."""
    model = shard(LAYERS)
    model.unshard()  # as it is between forward and backward
    convert(model[1])
    act = {
        "reshard": model.reshard,
        "state_dict": model.state_dict,
        "train": lambda: LAYERS.loss(model, LAYERS.batch(0, 0, 0)).backward(),
    }[then]
    with pytest.raises(FSDPRuntimeError, match=r"'1\.layer\.(weight|bias)'.*converted.*while.* unsharded.*reshard\(\)"):
        act()
    model.reshard()
    model.zero_grad()
    assert_trains_like(Reference(LAYERS, world_size=2), model, optimizer_of(model), steps=2)


@multi_rank(2)
def test_round_trip_through_another_dtype_keeps_the_optimizer() -> None:
    model, plain = shard(LAYERS), LAYERS.build()
    optimizer = adamw(list(model.parameters()))
    reference = Reference(LAYERS, world_size=2, model=plain)
    assert_trains_like(reference, model, optimizer, steps=2)
    for each in (model, plain):
        each.double().float()
    assert_trains_like(reference, model, optimizer, steps=2)


@multi_rank(2)
@pytest.mark.parametrize("ran_before", [False, True], ids=["before_first", "after_first"])
def test_moving_to_where_it_is_changes_nothing(ran_before: bool) -> None:
    model = shard()
    if ran_before:
        with torch.no_grad():
            model(inputs())
    before = list(model.parameters())
    addresses = [parameter.to_local().data_ptr() for parameter in before]
    model.to("cpu").float().cpu()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert [parameter.to_local().data_ptr() for parameter in model.parameters()] == addresses
    assert_trains_like(Reference(CASE, world_size=2), model, optimizer_of(model), steps=2)
