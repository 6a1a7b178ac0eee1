"""Mixed precision in graphs: casts of inputs by name, of outputs, and the dtypes of gathers and reductions."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, fully_shard
from tests.compiled.helpers.models import WIDTH, batch, batch_of, build, by_blocks, loss_of, multi_rank, shard, whole
from tests.compiled.helpers.twins import assert_equal, assert_trains_alike, compiling, mine, one_backward

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


# Full: 5 s each.
@multi_rank(2, full=[4])
@pytest.mark.full
@pytest.mark.parametrize("compile", [whole, by_blocks])
@pytest.mark.parametrize(
    "policy",
    [
        HALF,
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cache_shards=True),
        MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
        MixedPrecisionPolicy(output_dtype=torch.float64),
    ],
    ids=["bf16", "bf16 reduced in fp32", "cached", "fp64", "only reduced", "only output"],
)
def test_policies(compile: Any, policy: MixedPrecisionPolicy) -> None:
    with compiling() as graphs:
        blocks = dataclasses.replace(policy, output_dtype=None)  # what follows them is in param_dtype

        def shard_mixed(model: nn.Module) -> None:
            for block in model.blocks:
                fully_shard(block, mp_policy=blocks)
            fully_shard(model, mp_policy=policy)

        assert_trains_alike(graphs, build, shard_mixed, one_backward(batch), compile=compile)


class Pair(NamedTuple):
    """Two tensors."""

    first: Tensor
    second: Tensor


@dataclass
class Inputs:
    """A tensor that is cast, and one that is not floating point."""

    values: Tensor
    rows: Tensor


class Named(nn.Module):
    """Takes arguments by position, by keyword, in containers; some are to stay in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, *rest: Tensor, pair: Pair, scale: Any = None) -> dict[str, Any]:
        assert x.dtype == self.layer.weight.dtype
        assert positions.dtype == torch.float32
        assert all(each.dtype == torch.float32 for each in rest)
        assert pair.first.dtype == torch.bfloat16 and pair.second.dtype == torch.int64
        out = self.layer(x) * torch.cos(positions).to(x.dtype) + pair.first
        for each in rest:
            out = out + each.to(x.dtype)
        return {"out": out, "pair": Pair(out * 2, pair.second), "list": [out.sum()]}


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Named(), Named()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(WIDTH, dtype=torch.float32)
        for block in self.blocks:
            found = block(x, positions, positions / 3, pair=Pair(x, torch.arange(3)), scale=None)
            x = found["out"] + found["pair"].first.float() + found["list"][0]
        return self.head(x)


def build_caller() -> nn.Module:
    torch.manual_seed(0)
    return Caller()


@multi_rank(2)
@pytest.mark.full  # 5 s each
@pytest.mark.parametrize("compile", [whole, by_blocks])
def test_inputs_that_are_cast_by_name(compile: Any) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
        cast_forward_inputs=["x", "pair"],
    )

    def shard_named(model: nn.Module) -> None:
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model)

    with compiling() as graphs:
        assert_trains_alike(graphs, build_caller, shard_named, one_backward(batch), compile=compile)


@multi_rank(2)
@pytest.mark.full  # 4 s
def test_inputs_in_containers() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 3)

        def forward(self, inputs: Inputs) -> Inputs:
            return Inputs(self.layer(inputs.values)[inputs.rows], inputs.rows)

    def build_reads() -> nn.Module:
        torch.manual_seed(0)
        return Reads()

    def step(model: nn.Module, number: int, rank: int) -> list[Tensor]:
        found = model(Inputs(batch_of(number, rank), torch.tensor([0, 2])))
        assert found.values.dtype == torch.float64
        loss = loss_of(found.values)
        loss.backward()
        return [loss.detach()]

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    with compiling() as graphs:
        assert_trains_alike(graphs, build_reads, lambda model: fully_shard(model, mp_policy=policy), step)


@dataclass
class Kept:
    """Its second field is no argument, and is not what it was."""

    values: Tensor
    note: int = field(init=False)

    def __post_init__(self) -> None:
        self.note = 0


@dataclass
class Checked:
    """It has an attribute that is no field."""

    values: Tensor

    def __post_init__(self) -> None:
        self.mask = self.values > 0


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Checked) -> Tensor:
        return self.layer(given.values) * given.mask  # type: ignore[no-any-return]


@multi_rank(2)
def test_dataclasses_that_set_more_are_made_anew() -> None:
    torch.manual_seed(0)
    model = fully_shard(Masked(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with compiling(), torch.no_grad():
        expected = model(Checked(batch_of(0, 0)))
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(Checked(batch_of(0, 0)))
    assert torch.equal(found, expected)


class Notes(nn.Module):
    """Writes into what it is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, seen: list[Any], kept: Kept, by_name: defaultdict[str, Tensor]) -> tuple[Tensor, int]:
        seen.append(x.dtype)
        return self.layer(x) + self.layer(kept.values) + self.layer(by_name["x"]), kept.note


@multi_rank(2)
@pytest.mark.full
def test_containers_are_copied_where_something_is_cast() -> None:
    """Those in which nothing is stay the caller's own; copies are made as in eager mode."""
    torch.manual_seed(0)
    model = fully_shard(Notes(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    results = []
    with compiling():
        for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            x, seen = batch_of(0, 0), [torch.ones(2, dtype=torch.bfloat16)]
            kept, by_name = Kept(x), defaultdict(list, x=x)
            kept.note = 7
            with torch.no_grad():
                output, note = call(x, seen, kept, by_name)
            assert len(seen) == 2 and seen[1] is torch.bfloat16 and note == 7
            assert kept.values is x and by_name["x"] is x
            results.append(output)
    assert torch.equal(*results)


@multi_rank(2)
@pytest.mark.full  # 5 s
def test_gradients_in_a_dtype_of_their_own() -> None:
    """`Tensor.grad_dtype`: reduced in bf16, delivered in fp32, or the other way round."""

    def shard_mixed(model: nn.Module) -> None:
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        for param in model.blocks[0].parameters():
            param.grad_dtype = torch.float32

    with compiling() as graphs:
        assert_trains_alike(graphs, build, shard_mixed, one_backward(batch))


@multi_rank(2)
@pytest.mark.full  # 5 s
@pytest.mark.parametrize("compile", [whole, by_blocks])
def test_evaluation_in_full_precision(compile: Any) -> None:
    """Graphs follow `FSDPModule.set_full_precision`, and go back."""
    models: list[Any] = [build(), build()]
    for model in models:
        shard(model, mp_policy=HALF)
    with compiling() as graphs:
        called = [compile(models[0], graphs.backend()), models[1]]
        for number, full in enumerate((False, True, False)):
            for model in models:
                model.set_full_precision(full)
            with torch.no_grad():
                found, expected = (each(batch_of(number, 0)) for each in called)
            assert found.dtype == expected.dtype == (torch.float32 if full else torch.bfloat16)
            assert torch.equal(found, expected)
            for each in called:
                loss_of(each(batch_of(number, 1))).backward()
            for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                assert_equal(name, mine(ours.grad), mine(theirs.grad))


# Full: a compilation.
@multi_rank(2)
@pytest.mark.full
def test_inputs_are_moved_to_the_device() -> None:
    """Before the graph, also in the caller's own containers, which hold again afterwards what they held."""

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return inputs["x"] @ self.weight

    with compiling() as graphs, pytest.MonkeyPatch.context() as patch:
        model = Takes()
        fully_shard(model)
        called = torch.compile(model, backend=graphs.backend(), fullgraph=True)
        inputs = {"x": torch.ones(4, WIDTH)}
        called(inputs)
        # As on an accelerator; "moved" is another value, as there is none.
        patch.setattr(model._get_fsdp_state(), "mesh", SimpleNamespace(device=torch.device("cuda")))
        patch.setattr("fsdp2.core.state.moved_to", torch.compiler.disable(lambda device, tensor: tensor + 1))
        before = inputs["x"]
        assert_equal("output", called(inputs), torch.full((4, WIDTH), 2.0))
        assert inputs["x"] is before
        assert len(graphs.forward) == 1
