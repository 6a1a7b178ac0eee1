"""`program`: a training program that runs with the settings of a request, as Python that is complete but for the model.

What is left to the user is named at its beginning: the model, the loss, the batches of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from fsdp2.api.policies import CPUOffloadPolicy
from fsdp2.core.options import MixedPrecisionPolicy
from fsdp2.grouping.blocks import class_names_of
from fsdp2.tools.estimating.request import Request


def program(request: Request) -> str:
    """How a training program says ``request``; ``make_model``, ``loss_of`` and ``batches`` are the program's."""
    return "\n".join([*_head(request), *_model(request), *_optimizer(request), *_steps(request)])


def _head(request: Request) -> Iterator[str]:
    samples = request.samples // request.data_parallel
    if _device(request) == "cuda":
        yield "import os"
        yield ""
    yield "import torch"
    yield "from torch.distributed.device_mesh import init_device_mesh"
    yield ""
    yield "import fsdp2"
    yield ""
    yield "# Yours: make_model(); loss_of(output, *batch); batches, each of them what THIS rank trains on in a step:"
    yield f"# {samples} of the {request.samples} samples of all ranks. Start it by torchrun, {request.ranks} processes."


def _model(request: Request) -> Iterator[str]:
    device = _device(request)
    shape, names = request.mesh_shape, request.mesh_dim_names
    if device == "cuda":
        yield 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
    yield f'mesh = init_device_mesh("{device}", {shape}, mesh_dim_names={names})'
    yield 'with torch.device("meta"):  # without memory, however large it is'
    yield "    model = make_model()"
    if request.checkpointing != "none":
        yield f"# {_HOW_TO_CHECKPOINT[request.checkpointing]}"
    yield f"fsdp2.auto_shard(model, mesh, {', '.join(_arguments(request))})"
    policy = request.offload_policy
    place = "cpu" if isinstance(policy, CPUOffloadPolicy) and policy.parameters else device
    yield f'model.to_empty(device="{place}")  # memory for this rank\'s shards'
    if place != device:
        yield "for module in model.modules():  # buffers, with which the device computes"
        yield "    for name, buffer in module.named_buffers(recurse=False):"
        yield f'        setattr(module, name, buffer.to("{device}"))'
    yield "with torch.no_grad():  # values, unless you load a checkpoint; parameters and buffers of your own need some"
    yield "    for module in model.modules():"
    yield '        if hasattr(module, "reset_parameters"):'
    yield "            module.reset_parameters()"


def _device(request: Request) -> str:
    return "cuda" if request.hardware.has_streams else "cpu"


def _arguments(request: Request) -> Iterator[str]:
    yield f'strategy="{request.strategy}"'
    if request.blocks is not None:
        yield f"blocks={class_names_of(request.blocks)}"
    if request.mp_policy != MixedPrecisionPolicy():
        yield f"mp_policy=fsdp2.MixedPrecisionPolicy({_differing(request.mp_policy)})"
    if isinstance(request.offload_policy, CPUOffloadPolicy):
        yield f"offload_policy=fsdp2.CPUOffloadPolicy({_differing(request.offload_policy)})"


def _differing(policy: MixedPrecisionPolicy | CPUOffloadPolicy) -> str:
    """The arguments of ``policy`` that are not as by default."""
    if policy == type(policy)():
        return ""
    found = ((each.name, getattr(policy, each.name), each.default) for each in fields(policy))
    return ", ".join(f"{name}={_written(value)}" for name, value, usual in found if value != usual)


def _written(value: Any) -> str:
    return str(getattr(value, "__name__", value)) if callable(value) else repr(value)


def _optimizer(request: Request) -> Iterator[str]:
    if request.optimizer is None:
        return
    name = getattr(request.optimizer, "__name__", "")
    if isinstance(getattr(torch.optim, name, None), type):
        yield f"optimizer = torch.optim.{name}(model.parameters(){', fused=True' if request.fused else ''})"
    else:
        said = "yours, with fused=True" if request.fused else "yours"
        yield f"optimizer = make_optimizer(list(model.parameters()))  # {said}"


def _steps(request: Request) -> Iterator[str]:
    count, inside = request.accumulation, "    "
    by_name = isinstance(request.batch, Mapping)
    kind, values = ("dicts", "**batch") if by_name else ("tuples", "*batch")
    yield ""
    if count == 1:
        yield f"for batch in batches:  # {kind} of arguments of model(...)"
        yield f"    loss_of(model({values}), {values}).backward()"
    else:
        yield f"for whole in batches:  # {kind} of arguments of model(...)"
        yield f"    for index in range({count}):  # microbatches"
        yield f"        batch = {_part(count, by_name=by_name)}"
        yield f'        with fsdp2.accumulate(model, last=index == {count - 1}, kept="{request.kept}"):'
        yield f"            (loss_of(model({values}), {values}) / {count}).backward()"
    if request.optimizer is not None:
        yield f"{inside}optimizer.step()"
    yield f"{inside}model.zero_grad()"


def _part(count: int, *, by_name: bool) -> str:
    if by_name:
        return f"{{name: each.chunk({count})[index] for name, each in whole.items()}}"
    return f"tuple(each.chunk({count})[index] for each in whole)"


_HOW_TO_CHECKPOINT = {
    "blocks": "before it is sharded, checkpoint_wrapper(block) around each block: see 'Make a model fit'",
    "selective": (
        "before it is sharded, checkpoint_wrapper(block, context_fn=...) around each block: see 'Make a model fit'"
    ),
}
