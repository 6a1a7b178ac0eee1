"""Rows, elements and masks of sharded tensors are written like those of whole ones, and numbers are the whole tensor's.

Each case runs on a plain tensor and on a sharded one. torch's own ``fully_shard`` loses most of these writes.
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import init

from fsdp2 import CPUOffloadPolicy, FSDPRuntimeError, fully_shard
from tests.harness import multi_rank

ROWS, COLUMNS = 7, 4

WRITES: dict[str, Callable[[Tensor], object]] = {
    "a row": lambda w: w[1].zero_(),
    "the last row": lambda w: w[-1].zero_(),
    "rows": lambda w: w[2:3].add_(5),
    "every other row": lambda w: w[::2].mul_(3),
    "a row that is set": lambda w: w.__setitem__(4, 7.0),
    "rows that are set": lambda w: w.__setitem__(slice(1, 6), torch.arange(5.0)[:, None]),
    "an element": lambda w: w.__setitem__((5, 1), 100.0),
    "a row of a column": lambda w: w[:, 1][3].fill_(100),
    "a column of rows": lambda w: w[2:5][:, 1].fill_(100),
    "a column of the transposed": lambda w: w.t()[1, 3].fill_(100),
    "what is behind": lambda w: w.narrow(0, 4, 3).mul_(0),
    "a chunk": lambda w: w.chunk(2)[1].zero_(),
    "a part of a split": lambda w: w.split([5, 2])[1].zero_(),
    "rows, one by one": lambda w: [row.fill_(index) for index, row in enumerate(w)],
    "the diagonal": lambda w: w.diagonal().zero_(),
    "a row from another": lambda w: w[0].copy_(w[6]),
    "rows from those below": lambda w: w.__setitem__(slice(0, 3), w[3:6].clone()),
    "a row out of place": lambda w: torch.add(w[4], 1, out=w[4]),
    "several rows at once": lambda w: torch._foreach_mul_([w[0], w[6]], 2),
    "a row that was looked at before the whole was written": lambda w: [row := w[0], w.fill_(1), row.add_(1)],
    "where it is large": lambda w: w.__setitem__(w > 10, 0.0),
    "where a plain mask says": lambda w: w.__setitem__(torch.arange(ROWS) % 2 == 0, 0.0),
    "rows by number": lambda w: w.__setitem__([1, 5], 0.0),
    "a row of its data": lambda w: w.data[5].zero_(),
    "a row without its history": lambda w: w.detach()[5].zero_(),
    "a view of a row": lambda w: w[5].view(2, 2)[1].zero_(),
    "initialized rows": lambda w: init.normal_(w[:3]),
    "initialized in two parts": lambda w: [init.xavier_uniform_(w[:4]), init.kaiming_uniform_(w[4:])],
    "truncated normal rows": lambda w: init.trunc_normal_(w.data[2:5]),
}


def numbered() -> Tensor:
    return torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


def layer() -> nn.Linear:
    module = nn.Linear(COLUMNS, ROWS)
    with torch.no_grad():
        module.weight.copy_(numbered())
    return module


def arguments(kind: str) -> dict[str, Any]:
    if kind == "replicas":
        return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    if kind == "columns":
        return {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)}
    return {"offload": {"offload_policy": CPUOffloadPolicy()}, "kept": {"reshard_after_forward": False}}.get(kind, {})


def assert_written_alike(sharded: Tensor, write: Callable[[Tensor], object]) -> None:
    whole = numbered()
    with torch.no_grad():
        for each in (whole, sharded):
            torch.manual_seed(3)
            write(each)
    assert isinstance(sharded, DTensor)
    assert torch.equal(sharded.full_tensor(), whole)


@multi_rank(2, 4)
def test_parameters() -> None:
    for write in WRITES.values():
        module = fully_shard(layer())
        assert_written_alike(module.weight, write)
        parameters = [whole_of(parameter) for parameter in module.parameters()]
        with torch.no_grad():
            assert torch.equal(module(torch.eye(COLUMNS)), nn.functional.linear(torch.eye(COLUMNS), *parameters))


def whole_of(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().full_tensor()


@multi_rank(4)
@pytest.mark.parametrize("kind", ["replicas", "columns", "offload", "kept"])
def test_parameters_that_lie_otherwise(kind: str) -> None:
    for write in WRITES.values():
        module = fully_shard(layer(), **arguments(kind))
        try:
            assert_written_alike(module.weight, write)
        except (NotImplementedError, RuntimeError):  # DTensor refuses to set rows that are cut themselves
            assert kind == "columns" and torch.equal(whole_of(module.weight), numbered())


@multi_rank(2)
def test_gradients() -> None:
    for write in WRITES.values():
        module = fully_shard(layer())
        (module(torch.eye(COLUMNS)) * numbered().t()).sum().backward()
        assert module.weight.grad is not None
        with torch.no_grad():
            module.weight.grad.copy_(module.weight)
        assert_written_alike(module.weight.grad, write)


@multi_rank(2)
def test_views_taken_with_gradients_enabled() -> None:
    module = fully_shard(layer())
    init.zeros_(module.weight[:3])
    assert torch.equal(whole_of(module.weight)[:4].sum(1), torch.tensor([0.0, 0.0, 0.0, 54.0]))
    (module.weight[4] ** 2).sum().backward()  # a penalty on a row
    assert module.weight.grad is not None
    assert torch.equal(whole_of(module.weight.grad)[4], 2 * numbered()[4])


@multi_rank(2)
def test_an_embedding_forgets_its_padding() -> None:
    torch.manual_seed(1)
    plain = nn.Embedding(5, 3, padding_idx=4)
    module = fully_shard(copy.deepcopy(plain))
    for each in (plain, module):
        torch.manual_seed(2)
        each.reset_parameters()
    assert torch.equal(whole_of(module.weight), plain.weight.detach())


@multi_rank(2)
def test_views_travel_as_tensors_of_torch() -> None:
    row = fully_shard(layer()).weight.detach()[1]
    file = io.BytesIO()
    torch.save(row, file)
    for each in (copy.deepcopy(row), torch.load(io.BytesIO(file.getvalue()), weights_only=False), row.clone(), row + 0):
        assert type(each) is DTensor
        assert torch.equal(each.full_tensor(), numbered()[1])


@multi_rank(2, 4)
def test_numbers_are_those_of_the_whole() -> None:
    module = fully_shard(layer())
    weight, whole = module.weight.detach(), numbered()
    for read in (torch.sum, torch.norm, torch.max, torch.min, torch.mean, torch.count_nonzero, torch.prod, torch.var):
        assert read(weight).item() == pytest.approx(read(whole).item())
    assert float((weight > 10).sum()) == 17
    if torch.__version__ >= "2.13":  # else its own gather raises
        assert int(weight.argmax()) == 27
    if dist.get_rank() == 0:
        weight.to_local().fill_(float("nan"))
    assert bool(torch.isnan(weight).any()), "a guard against NaN"
    assert not bool(torch.isfinite(weight).all())
    assert not bool(torch.isfinite(weight.norm()))


def largest(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, math.inf)


def smallest(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, -math.inf)


@multi_rank(2, 4)
def test_extremes_of_what_some_ranks_have_nothing_of() -> None:
    """On a rank without rows they have no value; with torch it raises, and the others wait."""
    for rows in (1, 2, 3, 5):
        torch.manual_seed(rows)
        plain = nn.Linear(3, rows)
        module = fully_shard(copy.deepcopy(plain))
        for sharded, whole in zip(module.parameters(), plain.parameters(), strict=True):
            for read in (Tensor.max, Tensor.min, Tensor.amax, Tensor.amin, lambda each: each.abs().max()):
                assert read(sharded).item() == read(whole).item()  # type: ignore[operator]
            assert isinstance(sharded, DTensor) and isinstance(sharded.max(), DTensor)
            for read in (
                Tensor.argmax,
                Tensor.argmin,
                lambda each: each.norm(math.inf),
                lambda each: each.norm(-math.inf),
            ):
                assert whole_of(read(sharded)).item() == read(whole).item()  # type: ignore[operator]
        for foreach in (False, True):
            for each in (module, plain):
                each.zero_grad()
                each(torch.ones(3)).square().sum().backward()
            found = nn.utils.clip_grad_norm_(module.parameters(), 0.1, math.inf, foreach=foreach)
            assert whole_of(found).item() == nn.utils.clip_grad_norm_(plain.parameters(), 0.1, math.inf).item()
            for sharded, whole in zip(module.parameters(), plain.parameters(), strict=True):
                assert sharded.grad is not None and whole.grad is not None
                assert torch.equal(whole_of(sharded.grad), whole.grad)
        module.zero_grad()
        plain.zero_grad()
        module.bias.max().backward()
        plain.bias.max().backward()
        assert module.bias.grad is not None and plain.bias.grad is not None
        assert torch.equal(whole_of(module.bias.grad), plain.bias.grad)


# ---- every operator ------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row, `w[1]`": lambda w: w[1],
    "rows, `w[3:5]`": lambda w: w[3:5],
    "an element, `w[4, 2]`": lambda w: w[4, 2],
    "a part, `w.split(5)[1]`": lambda w: w.split(5)[1],
    "a column, `w[:, 1]`": lambda w: w[:, 1],
    "the whole, `w`": lambda w: w.view_as(w),
}
NOT_WRITES = {"requires_grad_", "share_memory_", "apply_", "map_", "map2_", "detach_", "set_"}
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "write-into-shards.md"


def in_place() -> Iterator[tuple[str, Callable[..., object]]]:
    for name in dir(Tensor):
        if name.endswith("_") and not name.startswith("_") and name not in NOT_WRITES and "sparse" not in name:
            yield name, getattr(Tensor, name)
    for name in dir(init):
        if name.endswith("_") and not name.startswith("_"):
            yield f"init.{name}", getattr(init, name)


def possible_arguments(view: Tensor) -> list[tuple[Any, ...]]:
    """One of them fits the operator."""
    half, zeros, first = torch.full(view.shape, 0.5), torch.zeros(view.shape, dtype=torch.long), torch.tensor([0])
    mask, one_row = torch.ones(view.shape, dtype=torch.bool), half[:1] if view.ndim else half
    with_tensors = [(half,), (half, half), (half, 0.25), (0, zeros, half), (0, zeros, 0.5), (0, first, 0.5)]
    with_tensors += [(0, first, one_row), (mask, 0.25), (mask, half), (zeros, half), (0, zeros, half, "sum")]
    with_tensors += [(0, first, one_row, "prod"), ((first,) * max(view.ndim, 1), torch.tensor(0.5))]
    return [(), (0.5,), (2,), (0.25, 0.75), (0,), (0, 1), (2, 0, 0.1), *with_tensors]


@multi_rank(2)
def test_no_operator_loses_what_it_writes() -> None:
    """It writes what it writes into a plain tensor, or it raises: the page has the table of those that raise."""
    torch.manual_seed(1)
    before = torch.rand(ROWS, COLUMNS) * 2 - 1.1
    refused: dict[str, set[str]] = {name: set() for name in VIEWS}
    tried = 0
    for name, operator in in_place():
        for place, view in VIEWS.items():
            for given in possible_arguments(view(before)):
                expected = attempt(operator, view, before.clone(), given)
                if expected is None or torch.equal(expected, before) or expected.shape != before.shape:
                    continue
                tried += 1
                module = nn.Linear(COLUMNS, ROWS, bias=False)
                module.weight.data.copy_(before)
                found = attempt(operator, view, fully_shard(module).weight, given)
                if found is None:
                    refused[place].add(name)
                    found = module.weight
                    expected = before
                assert torch.allclose(whole_of(found), expected, equal_nan=True), (name, place, given)
                break
    assert tried > 700
    if torch.__version__.startswith("2.13"):  # with others, others are refused
        table = [f"| {place} | {', '.join(f'`{name}`' for name in sorted(refused[place]))} |" for place in VIEWS]
        missing = [row for row in table if row not in PAGE.read_text()]
        assert not missing, "\n".join(["docs/how-to/write-into-shards.md is to have:", *missing])


def attempt(operator: Callable[..., object], view: Callable[[Tensor], Tensor], tensor: Any, given: Any) -> Any:
    """``tensor`` after it; None if it raises."""
    torch.manual_seed(3)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, on overloads
            operator(view(tensor), *given)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
        return None
    return tensor


@multi_rank(2)
def test_data_that_is_set_on_a_gradient_is_refused() -> None:
    """At the next reduction, as on a parameter: a DTensor ignores it."""
    module = fully_shard(layer())
    module(torch.ones(2, COLUMNS)).sum().backward()
    assert module.weight.grad is not None
    module.weight.grad.data.mul_(0.5)
    assert torch.equal(whole_of(module.weight.grad), torch.ones(ROWS, COLUMNS))
    module.zero_grad()
    for _ in range(2):
        module(torch.ones(2, COLUMNS)).sum().backward()
        module.weight.grad.data = module.weight.grad.data * 0.5
        module.zero_grad()
        with pytest.raises(FSDPRuntimeError, match=r"\.data was set on the gradient of parameter 'weight'.*grad.mul_"):
            module(torch.ones(2, COLUMNS)).sum().backward()
        module.zero_grad()
