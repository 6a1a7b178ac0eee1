"""`replicate_below`: small parameters of all calls in one replicated group, reduced once at the end of the backward."""

from __future__ import annotations

import copy
import itertools
import operator
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    FSDPNotImplementedError,
    FSDPTypeError,
    FSDPValueError,
    MixedPrecisionPolicy,
    accumulate,
    clip_grad_norm_,
    fully_shard,
    unwrap,
)
from tests.harness import fake_world, multi_rank
from tests.harness.compare import SUM_ORDER, Tolerance, full_parameters, tolerance_for
from tests.harness.models import FROZEN, MLP, TIED, TRANSFORMER, UNEVEN_MLP, ModelCase
from tests.harness.parity.custom_collectives import custom_all_gather, custom_reduce_scatter
from tests.harness.pool import WorkerPools
from tests.harness.reference import adamw
from tests.harness.shared.slices import backward_of, sharded_mixture, whole_gradients, whole_mixture
from tests.harness.shared.strategies import HOW, reference_for, shard, train
from tests.harness.shared.training import loss_on, trainable

ROUNDED = Tolerance(0.05, 0.02, "a sum in another order is rounded to another bfloat16 parameter")
SOME, ALL = 256, 10**9


def is_replicated(parameter: Any) -> bool:
    return all(isinstance(placement, Replicate) for placement in parameter.placements)


def assert_small_ones_are_replicated(model: Any, below: int) -> None:
    for parameter in model.parameters():
        assert is_replicated(parameter) is (parameter.numel() * parameter.element_size() < below)


@multi_rank(2, full=[4])  # those of this file on 4 ranks: about 20 s on two cores
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("below", [SOME, ALL])
@pytest.mark.parametrize("setting", ["uneven", "transformer", "frozen", "tied", "mixed precision", "offloaded", "kept"])
def test_small_replicated_parameters_train_like_the_reference(
    setting: str, below: int, how: str, world_size: int
) -> None:
    case = {"transformer": TRANSFORMER, "frozen": FROZEN, "tied": TIED}.get(setting, UNEVEN_MLP)
    options: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    tolerance = SUM_ORDER if setting == "tied" else tolerance_for(world_size)
    if setting == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        extra = {"param_dtype": torch.bfloat16, "grad_dtype": torch.float32, "reduce_dtype": torch.float32}
        tolerance = None if world_size == 2 else ROUNDED
    elif setting == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy()
    elif setting == "kept":
        options["reshard_after_forward"] = False
    model = shard(case, None, replicate_below=below, **options)
    assert_small_ones_are_replicated(model, below)
    train(reference_for(case, world_size, how, **extra), model, how=how, tolerance=tolerance)


@multi_rank(4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("setting", ["hsdp", "neighbours"])
def test_over_parts_of_the_ranks(setting: str, how: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"mesh": mesh} if setting == "hsdp" else {"reshard_after_forward": 2}
    model = shard(UNEVEN_MLP, None, replicate_below=SOME, **options)
    assert_small_ones_are_replicated(model, SOME)
    train(reference_for(UNEVEN_MLP, 4, how), model, how=how, tolerance=SUM_ORDER)


def micro(case: ModelCase, model: Any, step: int = 0) -> None:
    loss_on(case, model, step, dist.get_rank()).backward()


@multi_rank(2)
def test_clipping_agrees_with_the_sharded_model() -> None:
    models = [shard(TRANSFORMER, None, replicate_below=below) for below in (0, SOME)]
    norms = []
    for model in models:
        micro(TRANSFORMER, model)
        norms.append(clip_grad_norm_(model.parameters(), 0.1))
    values = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    torch.testing.assert_close(*values)


@multi_rank(2)
def test_copies_pickles_unwrap_and_second_calls() -> None:
    model = shard(TRANSFORMER, None, replicate_below=SOME)
    optimizer = adamw(trainable(model))
    micro(TRANSFORMER, model)
    optimizer.step()
    optimizer.zero_grad()
    assert shard(TRANSFORMER, None, model, replicate_below=SOME) is model
    with pytest.raises(FSDPValueError, match="another argument 'replicate_below'"):
        fully_shard(model, replicate_below=SOME + 1)
    expected = full_parameters(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_small_ones_are_replicated(copied, SOME)
        for name, value in full_parameters(copied).items():
            assert torch.equal(value, expected[name])
        for each in (copied, model):
            micro(TRANSFORMER, each)
        for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
        optimizer.zero_grad()
    unwrap(model, optimizers=[optimizer])
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    for name, value in model.named_parameters():
        assert torch.equal(value, expected[name])


@multi_rank(2)
def test_an_optimizer_between_the_calls_steps_on_the_bucket() -> None:
    """The parameters are those of the inner calls, in another group."""
    model = UNEVEN_MLP.build()
    units = UNEVEN_MLP.units(model)
    for unit in units[:-1]:
        fully_shard(unit, replicate_below=ALL)
    before = list(model.parameters())
    optimizer = adamw(before)
    fully_shard(units[-1], replicate_below=ALL)
    assert all(map(operator.is_, before, model.parameters()))
    train(reference_for(UNEVEN_MLP, 2, "each"), model, how="each", optimizer=optimizer)


@multi_rank(2)
def test_blocks_that_ran_alone_before() -> None:
    model = UNEVEN_MLP.build()
    units = UNEVEN_MLP.units(model)
    for unit in units[:-1]:
        fully_shard(unit, replicate_below=ALL)
    with torch.no_grad():
        units[0](UNEVEN_MLP.batch(0, 0, 0).inputs)
    fully_shard(units[-1], replicate_below=ALL)
    train(reference_for(UNEVEN_MLP, 2, "no_sync"), model, how="no_sync")


@pytest.mark.parametrize("wrong", [None, True, 1.5, "1"])
def test_the_threshold_is_a_number_of_bytes(wrong: Any) -> None:
    with fake_world(2), pytest.raises(FSDPTypeError, match="replicate_below must be a number of bytes"):
        fully_shard(torch.nn.Linear(2, 2), replicate_below=wrong)


def test_contradictions_are_refused() -> None:
    with fake_world(4):
        with pytest.raises(FSDPValueError, match="replicate_below must be"):
            fully_shard(torch.nn.Linear(2, 2), replicate_below=-1)
        with pytest.raises(FSDPValueError, match="replicate_below replicates small parameters"):
            fully_shard(torch.nn.Linear(2, 2), replicate_below=1, strategy="replicate")
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        with pytest.raises(FSDPNotImplementedError, match="dp_mesh_dims"):
            fully_shard(
                torch.nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), replicate_below=1
            )


@multi_rank(2)
def test_checkpoints_go_to_models_that_shard_everything_and_back() -> None:
    below = [SOME, 0, ALL]
    models = [shard(UNEVEN_MLP, None, UNEVEN_MLP.build(seed), replicate_below=n) for seed, n in enumerate(below)]
    for source, target in itertools.pairwise(models):
        values = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
        set_model_state_dict(target, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    expected = full_parameters(models[0])
    for model in models[1:]:
        for name, value in full_parameters(model).items():
            assert torch.equal(value, expected[name])
    target = shard(UNEVEN_MLP, None, UNEVEN_MLP.build(7), replicate_below=SOME)
    target.load_state_dict(models[0].state_dict())
    for name, value in full_parameters(target).items():
        assert torch.equal(value, expected[name])
    train(reference_for(UNEVEN_MLP, 2, "each"), models[0], how="each")


def train_and_save(folder: Path, below: int) -> None:
    """Two steps, then a checkpoint of the model and the optimizer, and of the reference beside it."""
    reference = reference_for(UNEVEN_MLP, dist.get_world_size(), "one")
    model = shard(UNEVEN_MLP, None, replicate_below=below)
    optimizer = train(reference, model, how="one", steps=2)
    values, state = get_state_dict(model, optimizer)
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save((reference.model.state_dict(), reference.optimizer.state_dict()), folder / "reference.pt")


def load_and_train(folder: Path, below: int) -> None:
    """Another model takes the checkpoint, and goes on like a reference that never stopped."""
    world_size = dist.get_world_size()
    model = shard(UNEVEN_MLP, None, UNEVEN_MLP.build(seed=1), replicate_below=below)
    optimizer = adamw(trainable(model))
    values, state = get_state_dict(model, optimizer)
    dcp.load({"model": values, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)
    reference = reference_for(UNEVEN_MLP, world_size, "one")
    values, state = torch.load(folder / "reference.pt", weights_only=False)
    reference.model.load_state_dict(values)
    reference.optimizer.load_state_dict(state)
    reference.steps_done = 2
    train(reference, model, how="one", optimizer=optimizer, steps=2, tolerance=tolerance_for(world_size))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("saving", "loading"), [(SOME, SOME), (SOME, 0), (0, SOME), (ALL, SOME)])
def test_checkpoints_in_a_folder(
    saving: int, loading: int, world_size: int, pools: WorkerPools, tmp_path: Path
) -> None:
    """Saved on 2 ranks; what is replicated may differ, and the number of ranks."""
    pools[2].run(train_and_save, tmp_path, saving)
    pools[world_size].run(load_and_train, tmp_path, loading)


@multi_rank(4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("below", [SOME, ALL])
def test_beside_tensor_parallelism(below: int, how: str) -> None:
    """A DTensor of tensor parallelism is as small as the whole of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = MLP.build()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = shard(MLP, None, model, mesh=mesh["dp"], replicate_below=below)
    optimizer = train(reference_for(MLP, 2, how), model, how=how, tolerance=SUM_ORDER, rank=mesh.get_local_rank("dp"))
    for name, parameter in model.named_parameters():
        is_small = parameter.numel() * parameter.element_size() < below
        assert isinstance(parameter.placements[0], Replicate) is is_small, name
        is_cut = name.startswith("0.") or name == "2.weight"
        assert (len(parameter.placements) == 2 and not isinstance(parameter.placements[1], Replicate)) is is_cut, name
    clip_grad_norm_(model.parameters(), 1.0)
    unwrap(model, optimizers=[optimizer])


def two_linears() -> tuple[Any, Any]:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    return block, nn.Sequential(block, nn.Linear(4, 4, bias=False))


@multi_rank(2)
def test_what_was_set_on_a_bucket_stays_when_a_call_above_takes_it(world_size: int) -> None:
    block, model = two_linears()
    plain = copy.deepcopy(model)
    fully_shard(block, replicate_below=40)
    block.set_gradient_reduction("sum")
    fully_shard(model, replicate_below=40)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        factor = world_size if name.startswith("0.") else 1
        torch.testing.assert_close(parameter.grad.full_tensor(), factor * plain.get_parameter(name).grad, msg=name)


@multi_rank(2)
def test_settings_that_differ_cannot_be_in_one_bucket() -> None:
    block, _ = two_linears()
    other = nn.LayerNorm(4)
    for each in (block, other):
        fully_shard(each, replicate_below=40)
    block.set_gradient_reduction("sum")
    with pytest.raises(FSDPValueError, match=r"their settings differ.*after the outermost fully_shard"):
        fully_shard(nn.Sequential(block, other), replicate_below=40)


# ---- what is set on a module below -----------------------------------------------------------------


def small_and_large() -> Any:
    """Two blocks and a layer of their own, each with a small bias and a weight that is sharded."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))


def sharded_small_and_large() -> Any:
    model = small_and_large()
    for each in (model[0], model[1], model):
        fully_shard(each, replicate_below=40)
    return model


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def assert_gradients(model: Any, factor: float, world_size: int, layers: int = 3) -> None:
    """Those of the first ``layers``: ``factor`` times the sum over the ranks."""
    plain = small_and_large()[:layers]
    for rank in range(world_size):
        plain(rows_of(rank)).square().sum().backward()
    for name, parameter in model.named_parameters():
        found = parameter.grad.full_tensor()
        torch.testing.assert_close(found, factor * plain.get_parameter(name).grad, msg=name)


@multi_rank(2)
@pytest.mark.parametrize("order", [1, -1], ids=["root first", "root last"])
@pytest.mark.parametrize("ran", [False, True])
def test_setters_on_all_modules_in_any_order(ran: bool, order: int, world_size: int) -> None:
    model = sharded_small_and_large()
    if ran:
        model(rows_of(dist.get_rank()))
    for count in (torch.tensor(5.0), 3.0):
        for each in [each for each in model.modules() if isinstance(each, FSDPModule)][::order]:
            each.set_gradient_reduction(count, recurse=False)
    for each in [each for each in model.modules() if isinstance(each, FSDPModule)][::order]:
        each.set_gradient_divide_factor(1.0)
    model(rows_of(dist.get_rank())).square().sum().backward()
    assert_gradients(model, 1.0, world_size)


@multi_rank(2)
def test_what_is_set_on_a_block_alone_is_refused_for_its_small_parameters(world_size: int) -> None:
    model = sharded_small_and_large()
    model(rows_of(dist.get_rank())).square().sum().backward()
    assert_gradients(model, 1 / world_size, world_size)
    model.zero_grad()
    model[0].set_gradient_divide_factor(1.0)
    for _ in range(2):
        with pytest.raises(FSDPValueError, match=r"set_gradient_divide_factor\(\).*on '0', whose small.*'Sequential'"):
            model(rows_of(dist.get_rank()))
    model.set_gradient_reduction("mean")  # of all below, too
    model(rows_of(dist.get_rank())).square().sum().backward()
    assert_gradients(model, 1 / world_size, world_size)


@multi_rank(2)
@pytest.mark.parametrize("order", [1, -1], ids=["root first", "root last"])
def test_an_all_reduce_hook_on_all_modules(order: int, world_size: int) -> None:
    model = sharded_small_and_large()
    hook = operator.methodcaller("mul_", 2)
    for each in [each for each in model.modules() if isinstance(each, FSDPModule)][::order]:
        each.set_all_reduce_hook(hook)
    model(rows_of(dist.get_rank())).square().sum().backward()
    assert_gradients(model, 2 / world_size, world_size)


@multi_rank(2)
def test_custom_collectives_are_those_of_the_sharded_ones(world_size: int) -> None:
    model, gathered, scattered = sharded_small_and_large(), [], []
    model.set_custom_all_gather(custom_all_gather(gathered))
    model.set_custom_reduce_scatter(custom_reduce_scatter(scattered))
    model(rows_of(dist.get_rank())).square().sum().backward()
    assert_gradients(model, 1 / world_size, world_size)
    assert len(gathered) == len(scattered) == 1 and gathered[0]["numel"] == 16


@multi_rank(2)
def test_equal_settings_are_one(world_size: int) -> None:
    """Though each was made by a call of its own."""
    model = small_and_large()[:2]
    for each in model:
        fully_shard(each, replicate_below=40)
        each.set_gradient_reduction(torch.tensor(4.0))
    fully_shard(model, replicate_below=40)
    model(rows_of(dist.get_rank())).square().sum().backward()
    assert_gradients(model, 1 / 4, world_size, layers=2)


@multi_rank(2)
@pytest.mark.parametrize("kept", ["unsharded", "sharded"])
def test_accumulating_in_a_block_withholds_nothing_of_others(kept: Any, world_size: int) -> None:
    model = sharded_small_and_large()
    with accumulate(model[0], last=False, kept=kept):
        model(rows_of(dist.get_rank())).square().sum().backward()
    others = nn.ModuleDict({"1": model[1], "2": model[2]})
    assert_gradients(others, 1 / world_size, world_size)
    with accumulate(model[0], last=True, kept=kept):
        model(rows_of(dist.get_rank())).square().sum().backward()
    assert_gradients(model, 2 / world_size, world_size)


@multi_rank(4)
@pytest.mark.parametrize("below", [40, ALL])
def test_small_parameters_of_experts_stay_on_the_ranks_of_theirs(below: int) -> None:
    """Which have other values on the other ranks."""
    model = sharded_mixture(replicate_below=below)
    backward_of(model)
    for name, parameter in model.named_parameters():
        is_small = parameter.numel() * parameter.element_size() < below
        assert is_replicated(parameter) is (is_small and "experts" not in name)
    expected = whole_mixture()
    for name, gradient in whole_gradients(model).items():
        torch.testing.assert_close(gradient, expected.get_parameter(name).grad)
    norm = clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(norm, nn.utils.get_total_norm([each.grad for each in expected.parameters()]))


# ---- tied across calls ------------------------------------------------------------------------------


class TiedCoder(nn.Module):
    """An embedding in a module of its own, and a decoder beside that module with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 4))
        self.decoder = nn.Linear(4, 16)
        self.decoder.weight = self.encoder[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


class TiedBlocks(nn.Module):
    """Two blocks with one weight, each with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(nn.functional.one_hot(x % 4, 4).float()))


def tied_and_small(kind: type[Any]) -> Any:
    model = kind()
    inside = [model.encoder[0], model.decoder, model.encoder] if kind is TiedCoder else [model.first, model.second]
    for each in (*inside, model):
        fully_shard(each, replicate_below=ALL)
    return model


@multi_rank(2)
@pytest.mark.parametrize("kind", [TiedCoder, TiedBlocks])
def test_a_small_weight_tied_across_calls_is_one_in_all_of_them(kind: type[Any], world_size: int) -> None:
    model, plain = tied_and_small(kind), kind()
    optimizers = [adamw(each.parameters()) for each in (model, plain)]
    for step in range(4):
        x = torch.randint(16, (world_size, 6), generator=torch.Generator().manual_seed(step))
        torch.testing.assert_close(model(x), plain(x))
        model(x[dist.get_rank()]).square().mean().backward()
        plain(x).square().mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:  # the others go on from what both had then
            other = tied_and_small(kind)
            other.load_state_dict(model.state_dict())
            model = other
            optimizers[0] = adamw(model.parameters())
            optimizers[1] = adamw(plain.parameters())


# ---- below several roots ----------------------------------------------------------------------------


class Around(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x)).square().mean()


def two_around_one() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    encoder = nn.Linear(4, 4)
    return Around(encoder), Around(encoder)


@multi_rank(2)
@pytest.mark.parametrize("below", [40, ALL])
def test_a_module_below_two_roots_stays_with_the_first(below: int, world_size: int) -> None:
    models, plain = two_around_one(), two_around_one()
    fully_shard(models[0].encoder, replicate_below=below)
    for model in models:
        fully_shard(model, replicate_below=below)
    for _ in range(2):
        for order in ([0, 1], [1], [0]):
            for pair in (models, plain):
                for each in pair:
                    each.zero_grad()
            sum(models[each](rows_of(dist.get_rank())) for each in order).backward()
            for rank in range(world_size):
                (sum(plain[each](rows_of(rank)) for each in order) / world_size).backward()
            for model, expected in zip(models, plain, strict=True):
                for name, parameter in model.named_parameters():
                    wanted = expected.get_parameter(name).grad
                    found = None if parameter.grad is None else parameter.grad.full_tensor()
                    torch.testing.assert_close(found, wanted, msg=name)


def test_what_is_refused_of_buckets_leaves_the_module_above_as_it_was() -> None:
    with fake_world(2):
        block, model = two_linears()
        fully_shard(block, replicate_below=40)
        block.set_gradient_reduction("sum")
        model.append(nn.LayerNorm(4))
        with pytest.raises(FSDPValueError, match="their settings differ"):
            fully_shard(model, replicate_below=40)
        assert not any(isinstance(parameter, DTensor) for parameter in model[1:].parameters())
        block.set_gradient_reduction("mean")
        fully_shard(model, replicate_below=40)
