"""A whole step in a CUDA graph: replayed, then eager steps of another shape and of one layer, then replayed again."""

from __future__ import annotations

import torch

from extras.gpu_check.programs.stacks import sharded, stack
from extras.gpu_check.says import COMPLAINTS, SKIPPED, Found
from extras.gpu_check.setting import Setting
from fsdp2 import _torch

REPLAYS = 100


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _eager_steps(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    """Of another shape, and of one layer: they need less memory for communication than a step of all."""
    _step(model, optimizer, inputs)
    for _ in range(3):
        _step(torch.nn.Sequential(*model[:1]), optimizer, inputs)


def run(setting: Setting) -> Found:
    """Parameters after replays are those of a plain model after as many steps."""
    if setting.is_rehearsal:
        return {SKIPPED: "the CPU captures nothing"}
    width = 1024
    with setting.group():
        model = sharded(stack(setting, width), reshard_after_forward=True)
        plain = stack(setting, width)
        if _torch.can_swap_memory:
            model.set_communication_memory_pool(True)
        else:
            model.set_keep_unsharded_storage(True)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, plain)]
        inputs = torch.ones(8, width, device=setting.device)
        other = torch.ones(200, width, device=setting.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                _step(model, optimizers[0], inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _step(model, optimizers[0], inputs)
        for _ in range(5):
            _step(plain, optimizers[1], inputs)
        complaints = []
        for when in ("at first", "after eager steps"):
            for _ in range(REPLAYS):
                graph.replay()
                _step(plain, optimizers[1], inputs)
            torch.cuda.synchronize()
            for name, found in model.named_parameters():
                expected = plain.get_parameter(name)
                if not torch.allclose(found.full_tensor(), expected, rtol=1e-3, atol=1e-5):
                    complaints.append(f"{name} differs {when}")
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                _eager_steps(each, optimizer, other)
        del graph
    return {"replays": 2 * REPLAYS, COMPLAINTS: complaints}
