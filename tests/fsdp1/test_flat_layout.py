"""Flat layouts beside the flat parameters that torch's FSDP1 makes, on every rank of several numbers of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import FSDPValueError
from fsdp2.compat.fsdp1.layout import (
    FlatParamShardMetadata,
    FlatUnit,
    ParamEntry,
    UnitEntries,
    lay_out,
    units_of,
)
from tests.fsdp1.helpers.flat import (
    checkpointed,
    flat_units_of_torch,
    tower,
    tower_units,
    wrap_with_torch,
)
from tests.harness import FakeWorlds

Built = tuple[nn.Module, list[nn.Module], dict[str, Any]]
"""A model, its units bottom-up, and arguments for torch's FSDP1."""


def holder(**members: Any) -> nn.Module:
    """A module with these parameters (tensors) and submodules, in this order."""
    module = nn.Module()
    for name, member in members.items():
        setattr(module, name, member if isinstance(member, nn.Module) else nn.Parameter(member))
    return module


def fresh_tower() -> Built:
    model = tower(odd_memory=True)
    return model, tower_units(model), {"ignored_modules": [model.ignored]}


def one_unit() -> Built:
    model = tower(odd_memory=True)
    return model, [model], {}


def nested_units() -> Built:
    inner = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 2)))
    model = holder(a=torch.rand(2), blocks=nn.ModuleList([inner, nn.Linear(2, 2)]), z=torch.rand(1, 3))
    return model, [inner[1], inner, model.blocks[1], model], {}


def unit_without_parameters() -> Built:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return model, [model[0], model], {}


def tied_within() -> Built:
    shared = nn.Linear(3, 2)
    model = holder(x=shared, y=shared, z=nn.Sequential(shared, nn.Linear(3, 2)))
    model.z[1].weight = shared.weight
    model.again = model.x.bias
    return model, [model], {}


def tied_across() -> Built:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].weight = model[0].weight
    return model, [model[1], model], {}


def module_in_two_units() -> Built:
    shared = nn.Linear(2, 2)
    model = holder(x=nn.Sequential(shared), y=nn.Sequential(nn.Linear(2, 3), shared), w=torch.rand(3))
    return model, [model.x, model.y, model], {}


def odd_memory() -> Built:
    images = torch.rand(2, 3, 3, 2).to(memory_format=torch.channels_last)
    one = torch.empty_strided((2, 3, 1, 1), (3, 1, 3, 3)).fill_(1.0)
    strided = torch.empty_strided((1, 3), (100, 1)).fill_(2.0)
    model = holder(a=torch.rand(3, 5).t(), b=images, c=torch.rand(4, 1, 3).transpose(0, 1), d=strided, e=one)
    return model, [model], {}


def without_elements() -> Built:
    return (model := holder(a=torch.rand(3), e=torch.rand(0, 3), b=torch.rand(5), f=torch.rand(0))), [model], {}


def tiny() -> Built:
    return (model := holder(a=torch.rand(1))), [model], {}


def checkpointed_blocks() -> Built:
    model = tower()
    model.blocks[0] = checkpointed(model.blocks[0])
    return model, [model], {}


def ignored_parameters() -> Built:
    model = tower()
    return model, [model.blocks[1], model], {"ignored_states": [model.scale, model.blocks[0][0].weight]}


CASES: list[Callable[[], Built]] = [
    fresh_tower,
    one_unit,
    nested_units,
    unit_without_parameters,
    tied_within,
    tied_across,
    module_in_two_units,
    odd_memory,
    without_elements,
    tiny,
    checkpointed_blocks,
    ignored_parameters,
]


def ignored_of(arguments: dict[str, Any]) -> list[nn.Parameter]:
    below = [parameter for module in arguments.get("ignored_modules", ()) for parameter in module.parameters()]
    return [*arguments.get("ignored_states", ()), *below]


def assert_like_torch(unit: FlatUnit, handle: Any, rank: int) -> None:
    """Everything that torch records of a flat parameter."""
    torchs = handle.flat_param

    def clean(name: str) -> str:
        return name.replace("_checkpoint_wrapped_module.", "")

    assert [entry.fqn for entry in unit.entries] == [clean(name) for name in torchs._fqns]
    assert [entry.shape for entry in unit.entries] == list(torchs._shapes)
    assert [entry.stride for entry in unit.entries] == list(torchs._strides)
    assert [entry.is_contiguous for entry in unit.entries] == list(torchs._contiguities)
    assert tuple(entry.numel for entry in unit.entries) == torchs._numels
    assert unit.numels_with_padding == torchs._numels_with_padding
    assert list(unit.is_padding_mask) == list(torchs._is_padding_mask)
    assert (unit.numel,) == torchs._unpadded_unsharded_size
    assert (unit.shard_numel,) == torchs._sharded_size == torchs.shape
    assert unit.padding_numel(rank) == torchs._shard_numel_padded
    assert unit.dtype == torchs.dtype and unit.requires_grad == torchs.requires_grad
    assert [tuple(info) for info in unit.shard_param_infos(rank)] == [tuple(i) for i in torchs._shard_param_infos]
    ours, theirs = unit.shared_param_infos(), torchs._shared_param_infos
    assert len(ours) == len(theirs)
    for info, each in zip(ours, theirs, strict=True):
        assert info._fields == each._fields
        for field in ("param_name", "module_name", "prim_param_name", "prim_module_name"):
            found = f"{getattr(each, field)}."
            assert getattr(info, field) == clean(found).removesuffix(".").removesuffix("._checkpoint_wrapped_module")
    metadata, expected = unit.shard_metadata(rank), handle.shard_metadata()
    assert metadata._fields == expected._fields and type(metadata).__name__ == type(expected).__name__
    assert metadata == expected._replace(param_names=tuple(clean(name) for name in expected.param_names))


def assert_elements_like_torch(unit: FlatUnit, handle: Any, rank: int, whole: dict[str, Tensor]) -> None:
    """The rank's elements lie where the layout says, gaps included."""
    shard = handle.flat_param.detach()
    at = torch.ones(unit.shard_numel, dtype=torch.bool)
    for piece in unit.pieces(rank):
        expected = piece.entry.flatten(whole[unit.full_name(piece.entry.fqn)])[piece.start : piece.end]
        held = slice(piece.offset_in_shard, piece.offset_in_shard + piece.numel)
        assert torch.equal(shard[held], expected)
        assert at[held].all()
        at[held] = False
    gaps = shard[at]
    zeros = unit.padding_numel(rank)
    assert (gaps[gaps.numel() - zeros :] == 0).all() and (gaps[: gaps.numel() - zeros] == 42).all()


def compare(simulate: FakeWorlds, build: Callable[[], Built], use_orig_params: bool, world_size: int) -> None:
    for rank in range(world_size):
        simulate(world_size, rank)
        model, units, arguments = build()
        whole = {clean_name(name): p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
        precision = arguments.get("mixed_precision")
        entries = units_of(
            model,
            units,
            use_orig_params=use_orig_params,
            ignored=ignored_of(arguments),
            compute_dtype=precision.param_dtype if precision is not None else None,
        )
        layout = lay_out(entries, use_orig_params=use_orig_params, world_size=world_size)
        wrapped = wrap_with_torch(model, units, use_orig_params, **arguments)
        handles = flat_units_of_torch(wrapped)
        assert [unit.name for unit in layout.units] == list(handles)
        for unit in layout.units:
            assert_like_torch(unit, handles[unit.name], rank)
            assert_elements_like_torch(unit, handles[unit.name], rank, whole)


def clean_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_layouts_are_torchs(
    simulate: FakeWorlds, build: Callable[[], Built], use_orig_params: bool, world_size: int
) -> None:
    if not use_orig_params and build in (one_unit, checkpointed_blocks, ignored_parameters):
        with pytest.raises(FSDPValueError, match=r"=False: of 'frozen\.weight' and 'scale' one requires"):
            entries = units_of(*build()[:2], use_orig_params=False)
            lay_out(entries, use_orig_params=False, world_size=world_size)
        return
    compare(simulate, build, use_orig_params, world_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("compute_dtype", [None, torch.float16, torch.float32, torch.float64])
def test_where_parameters_begin_depends_on_the_dtype_of_computing(
    simulate: FakeWorlds, dtype: torch.dtype, compute_dtype: torch.dtype | None
) -> None:
    from torch.distributed.fsdp import MixedPrecision

    def build() -> Built:
        model = holder(a=torch.rand(1, dtype=dtype), b=torch.rand(5, dtype=dtype), c=torch.rand(1, dtype=dtype))
        return model, [model], {"mixed_precision": MixedPrecision(param_dtype=compute_dtype)}

    for use_orig_params in (True, False):
        compare(simulate, build, use_orig_params, 3)


@pytest.mark.parametrize("seed", range(24))
def test_drawn_models(simulate: FakeWorlds, seed: int) -> None:
    """Sizes, memory formats, dtypes, nesting, ties, ranks and frozen parts drawn together."""

    def draw(
        values: random.Random, dtype: torch.dtype, depth: int, units: list[nn.Module], pool: list[Any]
    ) -> nn.Module:
        module = nn.Module()
        for index in range(values.randint(0, 4)):
            if depth < 3 and values.random() < 0.45:
                setattr(module, f"m{index}", draw(values, dtype, depth + 1, units, pool))
                continue
            if pool and values.random() < 0.2:
                setattr(module, f"p{index}", values.choice(pool))
                continue
            shape = [values.randint(0 if values.random() < 0.1 else 1, 5) for _ in range(values.randint(1, 3))]
            made = torch.rand(shape, dtype=dtype)
            parameter = nn.Parameter(made.transpose(0, -1) if values.random() < 0.3 else made)
            pool.append(parameter)
            setattr(module, f"p{index}", parameter)
        if depth == 0 or values.random() < 0.4:
            units.append(module)
        return module

    values = random.Random(seed)
    world_size, use_orig_params = values.choice([2, 3, 5]), bool(seed % 2)
    dtype, drawing = values.choice([torch.float32, torch.bfloat16, torch.float64]), values.random()

    def build() -> Built:
        units: list[nn.Module] = []
        pool: list[Any] = []
        model = draw(random.Random(drawing), dtype, 0, units, pool)
        model.last = nn.Parameter(torch.rand(7, dtype=dtype))
        with_elements = {id(u) for u in units if sum(p.numel() for p in u.parameters())}
        units = [unit for unit in units if id(unit) in with_elements]
        for index, parameter in enumerate(pool):
            parameter.requires_grad_(not use_orig_params or index % 4 != 0)
        return model, units, {}

    try:
        compare(simulate, build, use_orig_params, world_size)
    except FSDPValueError as error:  # a unit whose own parameters have no element: torch fails an assertion there
        assert "without elements" in str(error)


def test_a_worked_example() -> None:
    """The one of the module's docstring: two ranks, with and without gaps."""
    entries = [
        ParamEntry(name, torch.Size(shape), stride, torch.float32)
        for name, shape, stride in (("a", (3,), (1,)), ("b", (2, 2), (2, 1)), ("c", (1,), (1,)))
    ]
    unit = UnitEntries("layer", tuple(entries))
    (plain,) = lay_out([unit], use_orig_params=False, world_size=2).units
    assert plain.key == "layer._flat_param" and (plain.numel, plain.shard_numel) == (8, 4)
    assert [entry.offset for entry in plain.entries] == [0, 3, 7]
    (gaps,) = lay_out([unit], use_orig_params=True, world_size=2).units
    assert [entry.offset for entry in gaps.entries] == [0, 4, 8] and (gaps.numel, gaps.shard_numel) == (10, 5)
    assert gaps.numels_with_padding == (3, 1, 4, 1, 1)
    assert gaps.shard_metadata(1) == FlatParamShardMetadata(
        ("b", "c"), (torch.Size([2, 2]), torch.Size([1])), ((2, 1), (1,)), (True, True), (4, 1), ((1, 3), (0, 0))
    )


@pytest.mark.parametrize(
    ("entries", "use_orig_params", "text"),
    [
        ([((), (), torch.float32)], True, r"'block\.p0' is a scalar.*shape \(1,\)"),
        ([((2,), (1,), torch.float32), ((2,), (1,), torch.bfloat16)], True, r"'block\.p1' is torch\.bfloat16.*own"),
        ([((2, 2), (3, 1), torch.float32)], True, r"'block\.p0' of shape \(2, 2\) has strides.*make it contiguous"),
        ([((2, 2), (0, 1), torch.float32)], False, r"leave gaps or overlap"),
        ([((0, 2), (2, 1), torch.float32)], False, r"'block' has only parameters without elements"),
    ],
)
def test_what_has_no_flat_parameter(entries: list[Any], use_orig_params: bool, text: str) -> None:
    parameters = tuple(
        ParamEntry(f"p{at}", torch.Size(shape), stride, dtype) for at, (shape, stride, dtype) in enumerate(entries)
    )
    with pytest.raises(FSDPValueError, match=text):
        lay_out([UnitEntries("block", parameters)], use_orig_params=use_orig_params, world_size=2)


def test_a_unit_that_is_no_module_of_the_model() -> None:
    with pytest.raises(FSDPValueError, match="a unit, Linear, is no module of the given Sequential"):
        units_of(nn.Sequential(), [nn.Linear(1, 1)], use_orig_params=True)


def test_units_may_have_ranks_of_their_own() -> None:
    """NO_SHARD beside FULL_SHARD: one rank has it all."""
    entry = ParamEntry("w", torch.Size([5]), (1,), torch.float32)
    units = [UnitEntries("", (entry,)), UnitEntries("x", (entry,), world_size=1), UnitEntries("y", ())]
    layout = lay_out(units, use_orig_params=True, world_size=4)
    assert [(unit.name, unit.world_size, unit.shard_numel) for unit in layout.units] == [("", 4, 2), ("x", 1, 5)]
    assert [metadata.param_offsets for metadata in layout.shard_metadata(0)] == [((0, 1),), ((0, 4),)]


def test_sharded_parameters_are_laid_out_by_their_global_shapes(simulate: FakeWorlds) -> None:
    """So that the layout of a model under `fully_shard` is that of the plain one."""
    from fsdp2 import fully_shard

    plain, sharded = tower(), tower()
    simulate(4, 1)
    for unit in tower_units(sharded):
        fully_shard(unit)
    for use_orig_params in (True, False):
        ours, expected = (
            units_of(model, tower_units(model), use_orig_params=use_orig_params) for model in (sharded, plain)
        )
        assert ours == expected
