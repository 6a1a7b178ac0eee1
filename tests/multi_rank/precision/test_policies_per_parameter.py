"""`mp_policy` as a function of the parameter, `buffer_dtype`, and which inputs are cast: beyond torch's policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPTypeError,
    FSDPValueError,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from tests.harness import multi_rank
from tests.harness.compare import Tolerance, assert_sharded_same, gradients_of, tolerance_for

HALF = torch.bfloat16
WIDTH = 12


class Norm(nn.Module):
    """Computes in fp32 whatever arrives, as norms should."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.dtype == torch.float32
        return F.rms_norm(x.float(), (WIDTH,), self.weight).to(x.dtype)


class LoRA(nn.Module):
    """A frozen base in bf16 with an fp32 adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter((torch.randn(WIDTH, WIDTH) / 4).to(HALF), requires_grad=False)
        self.down = nn.Parameter(torch.randn(3, WIDTH) / 4)
        self.up = nn.Parameter(torch.randn(WIDTH, 3) / 4)

    def forward(self, x: Tensor) -> Tensor:
        assert (self.base.dtype, self.down.dtype) == (HALF, torch.float32)
        return F.linear(x, self.base) + F.linear(F.linear(x.float(), self.down), self.up).to(x.dtype)


class Mixed(nn.Module):
    """bf16 matrices, an fp32 norm, an fp32 adapter, a router whose gradients are summed in fp64: all in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.adapted = LoRA()
        self.router = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.adapted(F.silu(self.linear(self.norm(x))))
        return x * F.linear(x.float(), self.router.float()).softmax(-1).amax(-1, keepdim=True).to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def policy(fqn: str, parameter: nn.Parameter) -> MixedPrecisionPolicy | None:
    if fqn.endswith("linear.weight"):
        return MixedPrecisionPolicy(HALF, HALF)
    if fqn.endswith("linear.bias"):
        return MixedPrecisionPolicy(HALF, torch.float32)
    if fqn.endswith("router"):
        return MixedPrecisionPolicy(None, torch.float64)
    return None if "norm" in fqn else MixedPrecisionPolicy(reduce_dtype=torch.float32)


def build(seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    return torch.randn(7, WIDTH, generator=generator).to(HALF), torch.randn(7, WIDTH, generator=generator)


def expected_gradients(model: Net, step: int, world_size: int) -> dict[str, Tensor | None]:
    """Each parameter in its own dtype, its gradient averaged in its own reduce dtype."""
    totals: dict[str, Tensor | None] = {}
    for rank in range(world_size):
        worker = build()
        worker.load_state_dict(model.state_dict())
        for block in worker.blocks:
            block.linear.to(HALF)
        x, y = data(step, rank)
        F.mse_loss(worker(x).float(), y).backward()
        for name, parameter in worker.named_parameters():
            asked = policy(name, parameter) or MixedPrecisionPolicy()
            if parameter.grad is None:
                totals[name] = None
                continue
            gradient = parameter.grad.to(asked.reduce_dtype or parameter.grad.dtype)
            before = totals.get(name)
            totals[name] = gradient if before is None else before + gradient
    return {
        name: None if total is None else (total / world_size).to(model.get_parameter(name).dtype)
        for name, total in totals.items()
    }


@multi_rank(2, 4)
@pytest.mark.parametrize("mode", ["resharded", "kept", "offloaded", "accumulated", "replicas"])
def test_every_parameter_has_its_own_policy(mode: str, world_size: int) -> None:
    options: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": mode != "kept"}
    if mode == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy()
    if mode == "replicas":
        options["mesh"] = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = build(), build()
    for block in model.blocks:
        fully_shard(block, **options)
    root: Any = fully_shard(model, **options)
    optimizers = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (root, plain)]
    tolerance: Tolerance | None = Tolerance(0.05, 1e-3, "bf16 sums in another order")
    if world_size == 2 and mode != "accumulated":
        tolerance = tolerance_for(2)
    for step in range(3):
        expected = expected_gradients(plain, step, world_size)
        if mode == "accumulated":  # the same batch twice, reduced once: twice the gradient
            root.set_requires_gradient_sync(False)
            _loss(root, step).backward()
            root.set_requires_gradient_sync(True)
            expected = {name: None if value is None else value * 2 for name, value in expected.items()}
        _loss(root, step).backward()
        assert_sharded_same(f"gradients in step {step}", gradients_of(root), expected, tolerance=tolerance)
        for name, parameter in plain.named_parameters():
            parameter.grad = expected[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _loss(model: nn.Module, step: int) -> Tensor:
    x, y = data(step, dist.get_rank())
    return F.mse_loss(model(x).float(), y)


@multi_rank(2)
def test_a_function_may_return_a_policy_of_torchs_own() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy as Theirs

    model = nn.Linear(4, 4)
    fully_shard(model, mp_policy=lambda fqn, parameter: Theirs(param_dtype=HALF) if fqn == "weight" else None)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append((module.weight.dtype, module.bias.dtype, args)))
    with pytest.raises(RuntimeError, match=r"same dtype|must have|[Bb]ias"):
        model(torch.randn(2, 4))
    assert seen[0][:2] == (HALF, torch.float32) and seen[0][2][0].dtype == HALF


@multi_rank(2)
def test_names_are_those_below_the_module() -> None:
    model, names = build(), []
    fully_shard(model.blocks[0], mp_policy=lambda fqn, parameter: names.append(fqn))
    assert names == [name for name, _ in build().blocks[0].named_parameters()]


@multi_rank(2)
@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            {"weight": MixedPrecisionPolicy(HALF), "bias": MixedPrecisionPolicy(torch.float16)},
            "inputs in torch.bfloat16 for parameter 'weight' of Linear and torch.float16 for 'bias'.*inputs=False",
        ),
        (
            {
                "weight": MixedPrecisionPolicy(output_dtype=HALF),
                "bias": MixedPrecisionPolicy(output_dtype=torch.float32),
            },
            "output_dtype torch.bfloat16 for parameter 'weight'",
        ),
    ],
    ids=["inputs", "outputs"],
)
def test_answers_that_contradict_each_other_are_refused(answers: dict[str, Any], message: str) -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(FSDPValueError, match=message):
        fully_shard(module, mp_policy=lambda fqn, parameter: answers[fqn])
    assert type(module) is nn.Linear and not isinstance(module.weight, DTensor)


@multi_rank(2)
def test_an_answer_that_is_no_policy_is_refused() -> None:
    with pytest.raises(
        FSDPTypeError, match=r"mp_policy\('weight', ...\) must return a MixedPrecisionPolicy, got torch"
    ):
        fully_shard(nn.Linear(4, 4), mp_policy=lambda fqn, parameter: HALF)  # type: ignore[arg-type,return-value]


# ---- inputs --------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Takes positions that must stay exact, and a cache that must stay fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *rest: Tensor, cache: Tensor, options: Any = None, **more: Any) -> Any:
        self.seen = [x.dtype, *(each.dtype for each in rest), cache.dtype]
        self.seen += [] if options is None else [options["scale"].dtype]
        self.seen += [each.dtype for each in more.values()]
        return self.linear(x.to(self.linear.weight.dtype))

    def other(self, y: Tensor, x: Tensor) -> Tensor:
        self.seen = [y.dtype, x.dtype]
        return self.linear(y.to(self.linear.weight.dtype))


FULL = torch.float32
CASTS: dict[str, tuple[Any, list[torch.dtype]]] = {
    "all": (True, [HALF] * 6),
    "none": (False, [FULL] * 6),
    "x": (("x",), [HALF, FULL, FULL, FULL, FULL, FULL]),
    "rest": (["rest"], [FULL, HALF, HALF, FULL, FULL, FULL]),
    "cache and options": ({"cache", "options"}, [FULL, FULL, FULL, HALF, HALF, FULL]),
    "a keyword": (("extra",), [FULL, FULL, FULL, FULL, FULL, HALF]),
}


@multi_rank(2)
@pytest.mark.parametrize("casts", CASTS)
def test_named_inputs_are_cast_and_others_are_not(casts: str) -> None:
    names, expected = CASTS[casts]
    model: Any = Rotary()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(HALF, cast_forward_inputs=names))
    one = torch.ones(2, 4)
    model(one, one, one, cache=one, options={"scale": one}, extra=one)
    assert model.seen == expected
    keywords = {"x": one, "cache": one, "options": {"scale": one}, "extra": one}
    model(**keywords)
    assert model.seen == [expected[0], *expected[3:]]


@multi_rank(2)
def test_names_are_those_of_the_method_that_is_called() -> None:
    model: Any = Rotary()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(HALF, cast_forward_inputs=("x",)))
    register_fsdp_forward_method(model, "other")
    model.other(torch.ones(2, 4), torch.ones(2, 4))
    assert model.seen == [FULL, HALF]


@multi_rank(2)
def test_a_name_that_forward_does_not_have_is_refused() -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(FSDPValueError, match="names 'inptu', but forward of Linear has the arguments input"):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(HALF, cast_forward_inputs=("inptu",)))
    assert not isinstance(module.weight, DTensor)


@pytest.mark.parametrize("casts", ["x", 1, (1,), None])
def test_what_is_no_collection_of_names_is_refused(casts: Any) -> None:
    with pytest.raises(FSDPTypeError, match="takes a bool or an iterable, each a str as 'cast_forward_inputs', got "):
        MixedPrecisionPolicy(HALF, cast_forward_inputs=casts)


def test_no_names_at_all_are_refused() -> None:
    with pytest.raises(FSDPValueError, match="a bool or names of arguments, got none; pass False"):
        MixedPrecisionPolicy(HALF, cast_forward_inputs=())


# ---- buffers -------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 1.5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@multi_rank(2)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_floating_point_buffers_are_cast(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(Buffered(), Buffered())
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(HALF, buffer_dtype=HALF))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(HALF))
    assert [model[0].scale.dtype, model[1].scale.dtype] == [HALF, FULL]
    assert model[0].count.dtype == torch.int64 and model[0].scale.device.type == device
    if device == "cpu":
        assert model[0](torch.ones(2, 4)).dtype == HALF and model[0].scale.tolist() == [1.5] * 4
