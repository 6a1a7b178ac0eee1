"""`set_all_gather_layout`, `set_reduce_scatter_input_fn`: functions of the user that move parameters and gradients.

The functions here are the plainest there are: of slices and `torch.cat`.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPNotImplementedError,
    FSDPRuntimeError,
    FSDPTypeError,
    FSDPValueError,
    MixedPrecisionPolicy,
    Owned,
    RowBlocks,
    fully_shard,
)
from fsdp2.experimental import (
    DefaultAllGatherLayout,
    all_gather_output_fn_with_native_copy,
    reduce_scatter_input_fn_with_native_copy,
)
from tests.harness import Accumulation, Reference, adamw, assert_trains_like, multi_rank, others_full, tolerance_for
from tests.harness.compare import Tolerance, full_parameters
from tests.harness.models import MODEL_CASES, TIED, UNEVEN_MLP, ModelCase
from tests.harness.parity.custom_collectives import custom_all_gather, custom_reduce_scatter
from tests.harness.shared import merged_rows
from tests.harness.shared.training import loss_on, trainable

HALF = Tolerance(0.02, 0.02, "the reference sums halves in another order")


class Functions:
    """Both functions, and what they were given."""

    def __init__(self) -> None:
        self.gathers: list[dict[str, Any]] = []
        self.reductions: list[dict[str, Any]] = []

    def fill(self, gathered: Tensor, outputs: list[Tensor], splits: list[int], outers: list[int], size: int) -> None:
        assert not torch.is_grad_enabled() and gathered.dim() == 1 and gathered.numel() == size * sum(splits)
        self.gathers.append(
            {"gathered": gathered.clone(), "splits": splits, "outers": outers, "dtypes": [o.dtype for o in outputs]}
        )
        start = 0
        for output, split, outer in zip(outputs, splits, outers, strict=True):
            assert output.numel() >= size * split and (outer == 1 or output.numel() == size * split)
            firsts = [rank * sum(splits) + start for rank in range(size)]
            whole = torch.cat([gathered[first : first + split].view(outer, -1) for first in firsts], 1)
            output[: whole.numel()] = whole.flatten()
            start += split

    def prepare(self, gradients: list[Tensor], dims: list[int], size: int) -> Callable[[Tensor], None]:
        assert not torch.is_grad_enabled()
        self.reductions.append({"gradients": [each.clone() for each in gradients], "dims": dims})
        shards: list[list[Tensor]] = []
        for index, dim in enumerate(dims):
            gradient, gradients[index] = gradients[index], torch.empty(0)  # which nobody reads any more
            shape = list(gradient.shape)
            shape[dim] = -(-shape[dim] // size) * size
            padded = gradient.new_zeros(shape)
            padded.narrow(dim, 0, gradient.shape[dim]).copy_(gradient)
            shards.append([each.flatten() for each in padded.chunk(size, dim)])

        def copy_in(buffer: Tensor) -> None:
            buffer.fill_(float("nan"))
            rows = [torch.cat([each[rank].to(buffer.dtype) for each in shards]) for rank in range(size)]
            buffer.copy_(torch.cat(rows))

        return copy_in

    def install(self, model: Any) -> None:
        model.set_all_gather_layout(DefaultAllGatherLayout(self.fill))
        model.set_reduce_scatter_input_fn(self.prepare)


def built(case: ModelCase, **options: Any) -> tuple[Any, Functions]:
    model, functions = case.build(), Functions()
    for unit in case.units(model):
        fully_shard(unit, **options)
    functions.install(model)
    return model, functions


def train(case: ModelCase, model: Any, world_size: int, **options: Any) -> None:
    reference = Reference(case, world_size=world_size, **options)
    assert_trains_like(reference, model, adamw(trainable(model)), steps=3, tolerance=tolerance_for(world_size))


def last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.dim() - 1) if parameter.dim() > 1 else None


# ---- training ------------------------------------------------------------------------------------


@multi_rank(2, 4)
@pytest.mark.parametrize("case", others_full(MODEL_CASES, [UNEVEN_MLP, TIED]), ids=str)  # full: 10 s
@pytest.mark.parametrize("placement", [None, last_dim], ids=["rows", "last dim"])
def test_training_equals_the_reference(case: ModelCase, placement: Any, world_size: int) -> None:
    model, functions = built(case, shard_placement_fn=placement)
    train(case, model, world_size)
    assert functions.gathers and functions.reductions


@multi_rank(2, 4)
def test_rows_of_merged_dims_are_handed_on_as_matrices(world_size: int) -> None:
    """As torch will do it: of a `BlockShard` the function sees rows, cut in dim 0."""
    model, functions = merged_rows.sharded(), Functions()
    functions.install(model)
    merged_rows.train(model)
    seen = {tuple(each.shape) for call in functions.reductions for each in call["gradients"]}
    assert {(15, 4), (12, 5), (12, 1), (6, 4)} <= seen
    assert {dim for call in functions.reductions for dim in call["dims"]} == {0}


def make_large() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 300), nn.Tanh(), nn.Linear(300, 1000), nn.Tanh(), nn.Linear(1000, 1))


LARGE = ModelCase("large", make_large, UNEVEN_MLP.make_batch, ("0", "2"), UNEVEN_MLP.loss_of)


@multi_rank(2, 4)
def test_what_travels_alone_without_functions_is_moved_by_them(world_size: int) -> None:
    """Of 1.2 MB: gathered where it belongs, and reduced from where autograd left it."""
    model, functions = built(LARGE)
    train(LARGE, model, world_size)
    assert max(entry["gathered"].numel() for entry in functions.gathers) >= 300_000
    assert max(sum(each.numel() for each in entry["gradients"]) for entry in functions.reductions) >= 300_000


@multi_rank(2, 4)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_precision(reduce_dtype: torch.dtype, world_size: int) -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    model, functions = built(UNEVEN_MLP, mp_policy=MixedPrecisionPolicy(**precision))
    reference = Reference(UNEVEN_MLP, world_size=world_size, **precision)
    tolerance = tolerance_for(world_size) if reduce_dtype is torch.float32 or world_size == 2 else HALF
    assert_trains_like(reference, model, adamw(trainable(model)), steps=2, tolerance=tolerance)
    assert {entry["gathered"].dtype for entry in functions.gathers} == {torch.bfloat16}


@multi_rank(4)
def test_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, functions = built(UNEVEN_MLP, mesh=mesh)
    train(UNEVEN_MLP, model, 4)
    assert functions.gathers and functions.reductions


@multi_rank(4)
@pytest.mark.parametrize("placement", [None, last_dim], ids=["rows", "last dim"])
def test_resharding_to_fewer_ranks(placement: Any) -> None:
    """The gather in backward is between two ranks, and by the function as well."""
    model, functions = built(UNEVEN_MLP, reshard_after_forward=2, shard_placement_fn=placement)
    train(UNEVEN_MLP, model, 4)
    numels = [(entry["gathered"].numel(), sum(entry["splits"])) for entry in functions.gathers]
    assert {whole // part for whole, part in numels} == {2, 4}


@multi_rank(2, 4)
def test_accumulation_without_communication(world_size: int) -> None:
    model, functions = built(UNEVEN_MLP)
    reference = Reference(UNEVEN_MLP, world_size=world_size, microbatches=2, accumulation=Accumulation.REDUCE_LAST)

    def before_forward(micro: int) -> None:
        model.set_requires_gradient_sync(micro == 1)

    optimizer = adamw(trainable(model))
    assert_trains_like(
        reference, model, optimizer, steps=3, tolerance=tolerance_for(world_size), before_forward=before_forward
    )
    assert len(functions.reductions) == 3 * len(UNEVEN_MLP.unit_names), "the last of each step's two"


@multi_rank(2)
def test_offloaded_parameters() -> None:
    model, functions = built(UNEVEN_MLP, offload_policy=CPUOffloadPolicy())
    train(UNEVEN_MLP, model, 2)
    assert functions.gathers and functions.reductions


@multi_rank(2, 4)
def test_beside_custom_collectives(world_size: int) -> None:
    model, functions = built(UNEVEN_MLP)
    gathers: list[Any] = []
    scatters: list[Any] = []
    for unit in UNEVEN_MLP.units(model):
        unit.set_custom_all_gather(custom_all_gather(gathers))  # type: ignore[operator]
        unit.set_custom_reduce_scatter(custom_reduce_scatter(scatters))  # type: ignore[operator]
    train(UNEVEN_MLP, model, world_size)
    assert len(gathers) == len(functions.gathers) and len(scatters) == len(functions.reductions)


# ---- what functions are given ----------------------------------------------------------------------


class Several(nn.Module):
    """Of uneven rows, three dims, a transposed one, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(15.0).view(5, 3))
        self.wide = nn.Parameter(torch.arange(32.0).view(2, 8, 2) + 100)
        self.turned = nn.Parameter(torch.arange(24.0).view(4, 6).t() + 200)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        terms = [(parameter * parameter).sum() for parameter in (self.rows, self.wide, self.turned, self.scale)]
        return torch.stack(terms).sum() * x


def places(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 3 else None


@multi_rank(2, 4)
def test_what_they_are_given(world_size: int) -> None:
    functions, model = Functions(), Several()
    plain = [parameter.detach().clone() for parameter in model.parameters()]
    fully_shard(model, shard_placement_fn=places)
    functions.install(model)
    model(torch.tensor(1.0)).backward()
    (gather,) = functions.gathers  # the root stays unsharded
    # By parameter: of 5 rows of 3; of a dim behind one of 2; of 6 behind one of 4 in memory, which 4 ranks share
    # unevenly, so that it comes rank by rank; the whole of the number.
    uneven = (12, 4) if world_size == 2 else (8, 1)
    wanted = [(-(-5 // world_size) * 3, 1), (32 // world_size, 2), uneven, (1, 1)]
    assert list(zip(gather["splits"], gather["outers"], strict=True)) == wanted
    assert sum(gather["splits"]) * world_size == gather["gathered"].numel()
    (reduction,) = functions.reductions
    by_size = {each.numel(): (each, dim) for each, dim in zip(reduction["gradients"], reduction["dims"], strict=True)}
    assert set(by_size) == {15, 32, 24}, "the number, which every rank has, is none of the function's business"
    assert torch.equal(by_size[15][0], 2 * plain[0]) and by_size[15][1] == 0
    assert torch.equal(by_size[32][0], 2 * plain[1]) and by_size[32][1] == 1
    assert torch.equal(by_size[24][0], 2 * plain[2].t()), "as it lies in memory"
    assert by_size[24][1] == 1
    for parameter, before in zip(model.parameters(), plain, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.full_tensor(), 2 * before)  # type: ignore[attr-defined]


@multi_rank(2, 4)
def test_parameters_of_several_dtypes_come_as_bytes(world_size: int) -> None:
    torch.manual_seed(0)
    model, functions = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.Linear(7, 1)), Functions()
    model[1].bfloat16()
    model[2].weight.data = model[2].weight.data.double()
    plain = [parameter.detach().clone() for parameter in model.parameters()]
    fully_shard(model)
    model.set_all_gather_layout(DefaultAllGatherLayout(functions.fill))
    model.unshard()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), plain, strict=True))
    (entry,) = functions.gathers
    assert {entry["gathered"].dtype, *entry["dtypes"]} == {torch.uint8}
    rows = {size: -(-size // world_size) for size in (1, 3, 7)}
    wanted = [rows[3] * 5 * 4, rows[3] * 4, rows[7] * 3 * 2, rows[7] * 2, rows[1] * 7 * 8, rows[1] * 4]
    assert sorted(entry["splits"]) == sorted(wanted)


@multi_rank(2)
def test_nothing_is_called_for_a_module_without_elements() -> None:
    model, functions = nn.Sequential(nn.Linear(2, 2)), Functions()
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    fully_shard(model[0])
    fully_shard(model)
    model.set_all_gather_layout(DefaultAllGatherLayout(functions.fill))
    model(torch.ones(1, 2)).sum().backward()
    assert [len(entry["splits"]) for entry in functions.gathers] == [2, 2], "forward and backward of the child alone"


@multi_rank(1, 2)
def test_one_rank_asks_for_gradients_alone(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    model, functions = built(UNEVEN_MLP, mesh=mesh)
    train(UNEVEN_MLP, model, world_size)
    assert not functions.gathers and functions.reductions


@multi_rank(2)
def test_nothing_is_kept() -> None:
    kept: list[Any] = []

    def prepare(gradients: list[Tensor], dims: list[int], size: int) -> Callable[[Tensor], None]:
        copy_in = Functions().prepare(list(gradients), dims, size)
        kept.extend(weakref.ref(each) for each in (*gradients, copy_in))
        return copy_in

    model = UNEVEN_MLP.build()
    fully_shard(model)
    model.set_reduce_scatter_input_fn(prepare)  # type: ignore[operator]
    loss_on(UNEVEN_MLP, model, 0, dist.get_rank()).backward()
    assert kept and not [each for each in kept if each() is not None]


# ---- when they are set, and not ----------------------------------------------------------------------


@multi_rank(2)
def test_none_gives_back_what_was_before() -> None:
    model, functions = built(UNEVEN_MLP)
    loss_on(UNEVEN_MLP, model, 0, dist.get_rank()).backward()
    counts = (len(functions.gathers), len(functions.reductions))
    model.set_all_gather_layout(None)
    model.set_reduce_scatter_input_fn(None)
    for parameter in model.parameters():
        parameter.grad = None
    train(UNEVEN_MLP, model, 2)
    assert (len(functions.gathers), len(functions.reductions)) == counts


@multi_rank(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_modules_below(recurse: bool) -> None:
    model, functions = UNEVEN_MLP.build(), Functions()
    for unit in UNEVEN_MLP.units(model):
        fully_shard(unit)
    model.set_all_gather_layout(DefaultAllGatherLayout(functions.fill), recurse=recurse)  # type: ignore[operator]
    model.set_reduce_scatter_input_fn(functions.prepare, recurse=recurse)  # type: ignore[operator]
    loss_on(UNEVEN_MLP, model, 0, dist.get_rank()).backward()
    assert bool(functions.gathers) is bool(functions.reductions)
    below = len([unit for unit in UNEVEN_MLP.units(model)[:-1]])
    own = any(True for _ in UNEVEN_MLP.units(model)[-1].parameters(recurse=False))
    assert len(functions.reductions) == (below if recurse else 0) + own


@multi_rank(2)
def test_a_layout_cannot_change_under_unsharded_parameters() -> None:
    model, functions = built(UNEVEN_MLP)
    unit: Any = UNEVEN_MLP.units(model)[0]
    unit.unshard()
    for layout in (None, DefaultAllGatherLayout(Functions().fill)):
        with pytest.raises(FSDPValueError, match=r"whose parameters are unsharded.*before the first unshard"):
            model.set_all_gather_layout(layout)
    model.set_all_gather_layout(DefaultAllGatherLayout(functions.fill))  # equal: nothing changes
    handle = UNEVEN_MLP.units(model)[1].unshard(async_op=True)  # type: ignore[operator]
    with pytest.raises(FSDPValueError, match="before the first unshard"):
        UNEVEN_MLP.units(model)[1].set_all_gather_layout(None)  # type: ignore[operator]
    handle.wait()
    for each in UNEVEN_MLP.units(model):
        each.reshard()  # type: ignore[operator]
    model.set_all_gather_layout(None)
    train(UNEVEN_MLP, model, 2)


@multi_rank(2)
@pytest.mark.parametrize("which", ["output_fn", "input_fn", "copy_in", "no function"])
def test_what_a_function_raises_is_named_and_the_next_step_is_right(which: str) -> None:
    fails = [True]

    def fill(*arguments: Any) -> None:
        if which == "output_fn" and len(fails) == 1:
            fails.append(True)
            raise RuntimeError("the user's own")
        functions.fill(*arguments)

    def prepare(gradients: list[Tensor], dims: list[int], size: int) -> Any:
        if which in ("input_fn", "copy_in", "no function") and len(fails) == 1:
            fails.append(True)
            if which == "no function":
                return None
            if which == "input_fn":
                raise RuntimeError("the user's own")
            return lambda buffer: 1 // 0
        return functions.prepare(gradients, dims, size)

    model, functions = built(UNEVEN_MLP)
    model.set_all_gather_layout(DefaultAllGatherLayout(fill))
    model.set_reduce_scatter_input_fn(prepare)
    error = {"copy_in": ZeroDivisionError, "no function": FSDPTypeError}.get(which, RuntimeError)
    with pytest.raises(error) as caught:
        loss_on(UNEVEN_MLP, model, 0, dist.get_rank()).backward()
    (note,) = caught.value.__notes__
    assert ("set_all_gather_layout" if which == "output_fn" else "set_reduce_scatter_input_fn") in note
    assert "around '" in note
    for parameter in model.parameters():
        parameter.grad = None
    train(UNEVEN_MLP, model, 2)


@multi_rank(2)
def test_native_copies_are_the_engines_own() -> None:
    """Asking for them is asking for nothing: what travels alone without them does so with them."""
    model = LARGE.build()
    fully_shard(model)
    model.set_all_gather_layout(DefaultAllGatherLayout(all_gather_output_fn_with_native_copy))  # type: ignore[operator]
    model.set_reduce_scatter_input_fn(reduce_scatter_input_fn_with_native_copy)  # type: ignore[operator]
    (group,) = model._get_fsdp_state().unit  # type: ignore[operator]
    assert not group.settings.packs_gathers and not group.settings.packs_reductions
    model.set_all_gather_layout(DefaultAllGatherLayout())  # type: ignore[operator]
    assert not group.settings.packs_gathers


@multi_rank(2, 4)
@pytest.mark.parametrize("placement", [None, last_dim], ids=["rows", "last dim"])
def test_native_copies_do_their_work_when_they_are_called(placement: Any, world_size: int) -> None:
    model = UNEVEN_MLP.build()
    for unit in UNEVEN_MLP.units(model):
        fully_shard(unit, shard_placement_fn=placement)
    model.set_all_gather_layout(  # type: ignore[operator]
        DefaultAllGatherLayout(lambda *arguments: all_gather_output_fn_with_native_copy(*arguments))
    )
    model.set_reduce_scatter_input_fn(lambda *given: reduce_scatter_input_fn_with_native_copy(*given))  # type: ignore[operator]
    train(UNEVEN_MLP, model, world_size)


# ---- what is refused -----------------------------------------------------------------------------------


@multi_rank(2)
@pytest.mark.parametrize("placement", [Owned(1), RowBlocks(4)], ids=str)
def test_gradients_that_are_dealt_out_otherwise_are_refused(placement: Any) -> None:
    model, functions = nn.Linear(3, 10, bias=False), Functions()
    before = model.weight.detach().clone()
    fully_shard(model, shard_placement_fn=lambda parameter: placement)
    with pytest.raises(FSDPValueError, match=r"parameter 'weight' is owned by a rank, or dealt out in blocks of rows"):
        model.set_reduce_scatter_input_fn(functions.prepare)
    model.set_all_gather_layout(DefaultAllGatherLayout(functions.fill))
    model.unshard()
    assert torch.equal(model.weight, before) and functions.gathers


@multi_rank(2)
def test_all_modules_take_a_function_or_none_does_while_gradients_wait(world_size: int) -> None:
    """Those whose gradients lie as before could take it; no module changes then, and the step goes on."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 1024))  # the second one's gradients travel alone
    plain = copy.deepcopy(model)
    for each in (*model, model):
        fully_shard(each, mesh=mesh)
    functions, x = Functions(), torch.ones(2, 4)
    model.set_requires_all_reduce(False)
    model(x).sum().backward()
    with pytest.raises(
        FSDPRuntimeError, match=r"gradients of '0' wait for their all-reduce.*set_reduce_scatter_input_fn"
    ):
        model.set_reduce_scatter_input_fn(functions.prepare)
    model.set_requires_all_reduce(True)
    model(x).sum().backward()
    assert not functions.reductions
    for _ in range(2):
        plain(x).sum().backward()
    for mine, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), reference.grad)
    model.zero_grad()
    model.set_reduce_scatter_input_fn(functions.prepare)
    model(x).sum().backward()
    assert len(functions.reductions) == 2


@multi_rank(1)
def test_other_layouts_are_refused() -> None:
    class OfABackend:
        def prepare_output(self) -> None: ...

        def finalize_outputs(self) -> None: ...

    model: Any = fully_shard(nn.Linear(2, 2))
    with pytest.raises(FSDPNotImplementedError, match=r"private interface.*set_custom_all_gather"):
        model.set_all_gather_layout(OfABackend())
    with pytest.raises(FSDPTypeError, match=r"takes DefaultAllGatherLayout\(output_fn=...\) or None, got"):
        model.set_all_gather_layout(print)
    with pytest.raises(FSDPTypeError, match=r"takes a function \(unsharded_grads, shard_dims, world_size\) or None"):
        model.set_reduce_scatter_input_fn(3)
    with pytest.raises(FSDPTypeError, match="DefaultAllGatherLayout takes a function"):
        DefaultAllGatherLayout(None)  # type: ignore[arg-type]


@multi_rank(2)
def test_torchs_own_layout_is_taken() -> None:
    """Recognised by its name, for no torch so far has it; with its own default it asks for nothing."""

    class AllGatherLayout:
        comm = None

        def finalize_outputs(self) -> None: ...

    def _default_all_gather_output_fn(*arguments: Any) -> None: ...

    _default_all_gather_output_fn.__module__ = "torch.distributed.fsdp._fully_shard._all_gather_layout"

    def init(self: Any, output_fn: Any = _default_all_gather_output_fn) -> None:
        self.output_fn = output_fn

    theirs = type("DefaultAllGatherLayout", (AllGatherLayout,), {"__init__": init})
    model, functions = UNEVEN_MLP.build(), Functions()
    fully_shard(model)
    (group,) = model._get_fsdp_state().unit  # type: ignore[operator]
    model.set_all_gather_layout(theirs())  # type: ignore[operator]
    assert not group.settings.packs_gathers
    model.set_all_gather_layout(theirs(functions.fill))  # type: ignore[operator]
    train(UNEVEN_MLP, model, 2)
    assert functions.gathers and full_parameters(model)


@multi_rank(2)
def test_graphs_say_that_they_call_no_function() -> None:
    model, functions = built(UNEVEN_MLP)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    batch = UNEVEN_MLP.batch(0, 0, dist.get_rank())
    with pytest.raises(Exception, match=r"set_all_gather_layout, set_reduce_scatter_input_fn"):
        compiled(batch.inputs)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the graph break, and of what Dynamo looks at
        torch.compile(model, backend="eager")(batch.inputs).sum().backward()
    assert functions.gathers and functions.reductions
