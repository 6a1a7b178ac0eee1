"""Flat shards and raw optimizer states of torch's FSDP1 become whole tensors by name, and the same files again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPRuntimeError, FSDPValueError
from fsdp2.compat.fsdp1 import sharded_files
from fsdp2.compat.fsdp1.flat_checkpoints import (
    NamedState,
    OptimizerOrder,
    named_state,
    read_model,
    read_optimizer,
    write_model,
    write_optimizer,
)
from fsdp2.compat.fsdp1.layout import FlatLayout, ParamEntry, UnitEntries, lay_out, units_of
from tests.fsdp1.helpers.files import put_together
from tests.fsdp1.helpers.flat import (
    OPTIMIZERS,
    full_state_dict,
    load_local_state_dict,
    local_state_dict,
    quiet,
    tower,
    tower_units,
    train,
    wrap_with_torch,
)
from tests.harness import multi_rank


def layout_of(
    use_orig_params: bool, world_size: int, dtype: torch.dtype = torch.float32, odd_memory: bool = False
) -> FlatLayout:
    model = tower(dtype, odd_memory=odd_memory)
    units = units_of(
        model, tower_units(model), use_orig_params=use_orig_params, ignored=list(model.ignored.parameters())
    )
    return lay_out(units, use_orig_params=use_orig_params, world_size=world_size)


def order_of(use_orig_params: bool, world_size: int) -> OptimizerOrder:
    return OptimizerOrder.of_model(tower(), layout_of(use_orig_params, world_size))


def torch_tower(
    use_orig_params: bool, dtype: torch.dtype = torch.float32, seed: int = 0, odd_memory: bool = False
) -> Any:
    model = tower(dtype, seed, odd_memory)
    return wrap_with_torch(model, tower_units(model), use_orig_params, ignored_modules=[model.ignored])


def of_all_ranks(folder: Path, name: str, value: Any, world_size: int) -> list[Any]:
    """What each rank saves, read without looking at the process group."""
    with quiet():
        torch.save(value, folder / f"{name}_{dist.get_rank()}.pt")
    dist.barrier()
    return [sharded_files.load(folder / f"{name}_{rank}.pt") for rank in range(world_size)]


def assert_same_values(ours: Any, expected: Any, where: str = "") -> None:
    """Equal to the bit, in structure and dtype; of a ShardedTensor, this rank's part."""
    if isinstance(expected, dict):
        assert ours.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same_values(ours[key], value, f"{where}.{key}")
    elif hasattr(expected, "local_shards"):
        (shape, dtype, tensors), other = parts_of(ours), parts_of(expected)
        assert (shape, dtype, len(tensors)) == (*other[:2], len(other[2])), where
        assert all(torch.equal(own, its) for own, its in zip(tensors, other[2], strict=True)), where
    elif isinstance(expected, Tensor):
        assert ours.dtype == expected.dtype and ours.shape == expected.shape and torch.equal(ours, expected), where
    else:
        assert ours == expected, where


def parts_of(sharded: Any) -> tuple[Any, Any, list[Tensor]]:
    """Of a record or a ShardedTensor: the whole's shape and dtype, and this rank's tensors."""
    with quiet():
        shards = sharded.local_shards() if callable(sharded.local_shards) else sharded.local_shards
        return sharded.shape, sharded.dtype, [shard.tensor for shard in shards]


def as_dict(items: Any) -> dict[str, Any]:
    return {name: value for names, value in items for name in names}


def whole_state(state: NamedState) -> dict[str, Any]:
    return {name: state.of(name) for name in state.names}


@multi_rank(2, 4)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_local_state_dicts(use_orig_params: bool, dtype: torch.dtype, world_size: int, tmp_path: Path) -> None:
    """What torch writes is read as its FULL state dict; what is written is what torch writes, and torch reads it."""
    model = torch_tower(use_orig_params, dtype, odd_memory=True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), dist.get_rank(), range(2))
    local = local_state_dict(model)
    layout = layout_of(use_orig_params, world_size, dtype, odd_memory=True)
    whole = as_dict(read_model(layout, of_all_ranks(tmp_path, "local", local, world_size)))
    assert_same_values(whole, full_state_dict(model))

    written = write_model(layout, whole, dist.get_rank())
    assert_same_values(written, local)
    of_all_ranks(tmp_path, "written", written, world_size)
    with quiet():
        loaded = torch.load(tmp_path / f"written_{dist.get_rank()}.pt", weights_only=False)
    assert [type(value) for value in loaded.values()] == [type(local[name]) for name in loaded]
    fresh = torch_tower(use_orig_params, dtype, seed=1, odd_memory=True)
    load_local_state_dict(fresh, loaded)
    assert_same_values(full_state_dict(fresh), whole)


@multi_rank(2, 4)
def test_pieces_by_name_suffice(world_size: int, tmp_path: Path) -> None:
    """A program may have saved the original parameters of each rank without asking for a type of state dict."""
    model = torch_tower(use_orig_params=True)
    pieces = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    whole = as_dict(read_model(layout_of(True, world_size), of_all_ranks(tmp_path, "pieces", pieces, world_size)))
    expected = full_state_dict(model)
    expected.pop("shift")
    assert_same_values(whole, expected)


@multi_rank(2, 4)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("given", ["all", "trainable"])
def test_raw_optimizer_states(
    use_orig_params: bool, optimizer: str, given: str, world_size: int, tmp_path: Path
) -> None:
    """Read as torch's SHARDED optimizer state says it is, and written as torch has it; training goes on to the bit."""
    rank = dist.get_rank()

    def parameters(model: nn.Module) -> list[nn.Parameter]:
        return [each for each in model.parameters() if given == "all" or each.requires_grad]

    model = torch_tower(use_orig_params)
    made = OPTIMIZERS[optimizer](parameters(model))
    train(model, made, rank, range(2))
    layout, order = layout_of(use_orig_params, world_size), order_of(use_orig_params, world_size)
    raw = made.state_dict()
    named = read_optimizer(layout, of_all_ranks(tmp_path, "raw", raw, world_size), order)
    assert_same_values(whole_state(named), sharded_optimizer_state(model, made))
    assert [name for group in named.param_groups for name in group["params"]][:2] == ["scale", "embedding.weight"]

    written = write_optimizer(layout, named, rank, order)
    assert_same_values(written["state"], raw["state"])
    assert_same_values(written["param_groups"][0], raw["param_groups"][0])

    again = torch_tower(use_orig_params, seed=1)
    load_local_state_dict(again, local_state_dict(model))
    other = OPTIMIZERS[optimizer](parameters(again))
    other.load_state_dict(written)
    for each, its in ((model, made), (again, other)):
        train(each, its, rank, range(2, 4))
    assert_same_values(full_state_dict(again), full_state_dict(model))


def sharded_optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Torch's own SHARDED optimizer state, put together. Its FULL one is wrong on the CPU in 2.13 (see issue 18)."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with quiet(), FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    return {name: {key: put_together(value) for key, value in kept.items()} for name, kept in state.items() if kept}


# ---- without ranks ----------------------------------------------------------------------------------


def small_layout(use_orig_params: bool, world_size: int = 2) -> FlatLayout:
    entries = [ParamEntry(name, torch.Size([3]), (1,), torch.float32) for name in ("a", "b")]
    return lay_out([UnitEntries("u", tuple(entries))], use_orig_params=use_orig_params, world_size=world_size)


ORDER = OptimizerOrder(("u.a", "u.b"), ("u.a", "u.b"))
FLAT_ORDER = OptimizerOrder(("u._flat_param",), ("u._flat_param",))


def state(values: dict[int, dict[str, Any]], *groups: list[int]) -> dict[str, Any]:
    return {"state": values, "param_groups": [{"lr": 1.0, "params": list(group)} for group in groups]}


def test_scalars_and_numbers_of_any_kind_pass() -> None:
    layout = small_layout(False)
    same = {"step": torch.tensor(3.0), "n": 2, "on": True, "none": None}
    states = [state({0: {**same, "m": torch.arange(3.0) + 3 * rank}}, [0]) for rank in range(2)]
    named = read_optimizer(layout, states, FLAT_ORDER)
    assert named.names == ("u.a", "u.b")
    assert_same_values(named.of("u.b"), {**same, "m": torch.tensor([3.0, 4, 5])})
    steps = [named.of(name)["step"] for name in named.names]  # an optimizer counts each of them up in place
    assert steps[0].data_ptr() != steps[1].data_ptr()
    assert [group["params"] for group in named.param_groups] == [["u.a", "u.b"]]


def test_one_value_in_a_tensor_is_a_scalar_unless_every_rank_has_as_many_elements() -> None:
    states = [
        state({0: {"step": torch.ones(1)}, 1: {"step": torch.ones(1)}}, [0, 1]),
        state({1: {"step": torch.ones(1)}}, [0, 1]),
    ]
    named = read_optimizer(small_layout(True), states, ORDER)
    assert_same_values(whole_state(named), {"u.a": {"step": torch.ones(1)}, "u.b": {"step": torch.ones(1)}})


def test_groups_are_kept_and_need_names() -> None:
    halves = [state({0: {"m": torch.zeros(3)}, 1: {"m": torch.ones(0)}}, [0], [1]) for _ in range(2)]
    halves[0]["state"].pop(1)
    halves[1]["state"] = {1: {"m": torch.ones(3)}}
    layout = small_layout(True)
    shards = {rank: [(piece.entry.fqn, piece.numel) for piece in layout.units[0].pieces(rank)] for rank in range(2)}
    assert shards == {0: [("a", 3)], 1: [("b", 3)]}
    with pytest.raises(FSDPValueError, match=r"has 2 parameter groups.*--optimizer-order"):
        read_optimizer(layout, halves, ORDER)
    for order in (OptimizerOrder.given(["u.a", "u.b"]), with_names(halves)):
        named = read_optimizer(layout, halves, order)
        assert [group["params"] for group in named.param_groups] == [["u.a"], ["u.b"]]
        written = [write_optimizer(layout, named, rank, ORDER) for rank in range(2)]
        assert [group["params"] for group in written[0]["param_groups"]] == [[0], [1]]
    with pytest.raises(FSDPValueError, match=r"'u\._flat_param' are in several groups.*use_orig_params=True"):
        write_optimizer(small_layout(False), named, 0, FLAT_ORDER)


def with_names(states: list[dict[str, Any]]) -> OptimizerOrder:
    """Optimizers that are given named parameters keep the names."""
    for each in states:
        each["param_groups"][0]["param_names"] = ["_fsdp_wrapped_module.u._fsdp_wrapped_module.a"]
        each["param_groups"][1]["param_names"] = ["_fsdp_wrapped_module.u._fsdp_wrapped_module.b"]
    return ORDER


def test_parameters_without_state_are_zeros_beside_others() -> None:
    named = named_state(
        {"state": {"u.a": {"m": torch.ones(3), "step": 4}}, "param_groups": [{"params": ["u.a", "u.b"]}]}, ORDER
    )
    written = [write_optimizer(small_layout(False), named, rank, FLAT_ORDER) for rank in range(2)]
    assert_same_values(written[0]["state"], {0: {"m": torch.ones(3), "step": 4}})
    assert_same_values(written[1]["state"], {0: {"m": torch.zeros(3), "step": 4}})
    nothing = NamedState((), named.of, named.param_groups)
    assert write_optimizer(small_layout(False), nothing, 0, FLAT_ORDER)["state"] == {}
    with pytest.raises(FSDPValueError, match=r"the optimizer has 'u\._flat_param', and the parameters to write it for"):
        write_optimizer(small_layout(False), named, 0, ORDER)


PROBLEMS: dict[str, tuple[bool, list[dict[str, Any]], str]] = {
    "ranks": (False, [state({}, [0])], r"1 optimizer states, for a layout of 2 ranks"),
    "count": (True, [state({}, [0])] * 2, r"of rank 0 has 1 parameters; the model has 2.*--optimizer-order"),
    "size": (
        True,
        [state({0: {"m": torch.ones(2)}, 1: {"m": torch.ones(2)}}, [0, 1])] * 2,
        r"'m' of 'u\.a' is of shape \(2,\) on rank 0, which holds 3 of the parameter's 3 elements",
    ),
    "matrix": (False, [state({0: {"row": torch.ones(2, 2)}}, [0])] * 2, r"'row' of 'u\.a' is of shape \(2, 2\)"),
    "scalars": (
        False,
        [state({0: {"step": rank, "m": torch.ones(3)}}, [0]) for rank in range(2)],
        r"'step' of 'u\.b' differs between ranks: 0 and 1",
    ),
    "missing": (
        False,
        [state({0: {"m": torch.ones(3)}}, [0]), state({}, [0])],
        r"rank 1 keeps nothing of 'u\.b'",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_optimizer_states_that_do_not_fit(problem: str) -> None:
    use_orig_params, states, text = PROBLEMS[problem]
    with pytest.raises(FSDPValueError, match=text):
        if problem == "scalars":  # each parameter is on one rank here, and three ranks share one of each
            wide = lay_out(
                [UnitEntries("u", (ParamEntry("b", torch.Size([6]), (1,), torch.float32),))],
                use_orig_params=False,
                world_size=2,
            )
            read_optimizer(wide, states, FLAT_ORDER).of("u.b")
        named = read_optimizer(small_layout(use_orig_params), states, ORDER if use_orig_params else FLAT_ORDER)
        whole_state(named)


def test_local_state_dicts_that_do_not_fit() -> None:
    layout = small_layout(False)
    whole = {"u.a": torch.ones(3), "u.b": torch.ones(3)}
    written = [write_model(layout, whole, rank) for rank in range(2)]
    assert as_dict(read_model(layout, written)).keys() == whole.keys()
    for states, text in (
        (written[:1], r"1 state dicts, for a layout of 2 ranks"),
        (written[::-1], r"'u\._flat_param' was written by rank 1 of 2, and is read as rank 0's of 2"),
        ([{}, {}], r"rank 0 has neither 'u\._flat_param' nor 'u\.a'.*give the units"),
        (
            [{"v._flat_param": torch.ones(3), **each} for each in written],
            r"rank 0 has 'v\._flat_param', and",
        ),
        ([{"u._flat_param": torch.ones(5)}] * 2, r"'u\._flat_param' has 5 elements on rank 0, and 3 in the layout"),
        ([{"u.a": torch.ones(2)}] * 2, r"'u\.a' has the shape \(2,\) on rank 0; of its 3 elements the rank holds 3"),
    ):
        with pytest.raises(FSDPValueError, match=text):
            list(read_model(layout, states))
    for use_orig_params in (True, False):  # 8 elements with gaps, 6 without
        wrong = [write_model(small_layout(not use_orig_params), whole, rank) for rank in range(2)]
        with pytest.raises(FSDPValueError, match=f"use_orig_params={use_orig_params} and the parameters"):
            list(read_model(small_layout(use_orig_params), wrong))


def test_plain_shards_need_no_record() -> None:
    """With the padding at the end, or without: 7 elements on 4 ranks are 2, 2, 2 and 1."""
    entry = ParamEntry("w", torch.Size([7]), (1,), torch.float32)
    layout = lay_out([UnitEntries("", (entry,))], use_orig_params=False, world_size=4)
    values = torch.arange(7.0)
    cut = [{"_flat_param": part} for part in values.split(2)]
    padded = [*cut[:3], {"_flat_param": torch.tensor([6.0, 0.0])}]
    for states in (cut, padded):
        assert_same_values(as_dict(read_model(layout, states)), {"w": values})


def test_whole_state_dicts_that_do_not_fit() -> None:
    layout = small_layout(True)
    for whole, text in (
        ({"u.a": torch.ones(3)}, r"no parameter 'u\.b'"),
        ({"u.a": torch.ones(3), "u.b": torch.ones(4)}, r"'u\.b' has the shape \(4,\), and \(3,\) in the model"),
        ({"u.a": torch.ones(3), "u.b": torch.ones(3).double()}, r"'u\.b' is torch\.float64, and others"),
    ):
        with pytest.raises(FSDPValueError, match=text):
            write_model(layout, whole, 0)


def test_files_with_code_are_refused_unless_trusted(tmp_path: Path) -> None:
    torch.save({"args": Path("x"), "w": torch.ones(2)}, tmp_path / "file.pt")
    with pytest.raises(FSDPValueError, match=r"file\.pt cannot be read, or holds more than tensors.*--trust"):
        sharded_files.load(tmp_path / "file.pt")
    assert sharded_files.load(tmp_path / "file.pt", trust=True)["args"] == Path("x")


def test_old_files_are_read(tmp_path: Path) -> None:
    """The format before torch 1.6, which cannot be mapped."""
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(sharded_files.load(tmp_path / "old.pt")["w"], torch.ones(2))


@pytest.mark.parametrize("trust", [True, False])
def test_records_are_read_back_and_compute_nothing(tmp_path: Path, trust: bool) -> None:
    written = write_model(small_layout(False), {"u.a": torch.ones(3), "u.b": torch.zeros(3)}, 1)
    torch.save(written, tmp_path / "rank1.pt")
    record = sharded_files.load(tmp_path / "rank1.pt", trust=trust)["u._flat_param"]
    assert (record.rank, record.world_size, tuple(record.shape)) == (1, 2, (6,))
    assert record.local_shards[0].offsets == (3,) and torch.equal(record.local_shards[0].tensor, torch.zeros(3))
    with pytest.raises(FSDPRuntimeError, match="computes nothing"):
        record + 1
