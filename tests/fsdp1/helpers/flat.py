"""Models wrapped by torch's own FSDP1, whose flat parameters and files ours are compared with.

Torch's classes are imported where they are used: the package itself must do without them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

CPU = torch.device("cpu")


class Tower(nn.Module):
    """Blocks of uneven sizes, a tied head, a part without gradients, one that FSDP1 ignores, and buffers.

    With ``odd_memory`` a parameter is dense but not contiguous; torch has no SHARDED optimizer state of such.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, odd_memory: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5, dtype=dtype)
        scale = torch.rand(3, 5, dtype=dtype).t()
        self.scale = nn.Parameter(scale if odd_memory else scale.contiguous())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7, dtype=dtype), nn.Tanh(), nn.Linear(7, 5, dtype=dtype)) for _ in range(2)
        )
        self.frozen = nn.Linear(5, 5, bias=False, dtype=dtype).requires_grad_(False)
        self.ignored = nn.Linear(5, 5, dtype=dtype)
        self.register_buffer("shift", torch.rand(5, dtype=dtype))
        self.head = nn.Linear(5, 11, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.scale.sum(1) + self.shift
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.ignored(self.frozen(x)))


def tower(dtype: torch.dtype = torch.float32, seed: int = 0, odd_memory: bool = False) -> Tower:
    """The same parameters wherever it is built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Tower(dtype, odd_memory)


def meta_tower() -> Tower:
    """What a converter is told to build."""
    with torch.device("meta"):
        return Tower()


def tower_units(model: Tower) -> list[nn.Module]:
    """Bottom-up. The frozen part is a unit, because with ``use_orig_params=False`` it must be."""
    return [*model.blocks, model.frozen, model]


def wrap_with_torch(model: nn.Module, units: list[nn.Module], use_orig_params: bool, **arguments: Any) -> Any:
    """``model`` with each of ``units`` (bottom-up) under torch's FSDP1; the wrapper of the model if it is one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return wrap_units(FullyShardedDataParallel, model, units, use_orig_params=use_orig_params, **arguments)


def wrap_units(kind: Any, model: nn.Module, units: list[nn.Module], **arguments: Any) -> Any:
    """The same under wrappers of any ``kind``: torch's or ours."""
    for unit in units:
        with quiet():
            wrapped = kind(unit, **{"device_id": CPU, **arguments})
        if unit is model:
            return wrapped
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if child is unit:
                    setattr(parent, name, wrapped)
    return model


def flat_units_of_torch(model: nn.Module) -> dict[str, Any]:
    """The handles of flat parameters in a wrapped model, by the clean names of their units."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            clean = f"{name}.".replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")
            found[clean.removesuffix(".")] = module._handle
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Torch warns of FSDP1's deprecated parts, which these tests mean to use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def local_state_dict(model: nn.Module) -> dict[str, Any]:
    """``LOCAL_STATE_DICT`` of a model under torch's FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with quiet(), FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict()


def load_local_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """The inverse. With ``use_orig_params=True`` torch calls the flat parameters unexpected keys (pytorch#102667)."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with quiet(), FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        found = model.load_state_dict(state, strict=False)
    assert not found.missing_keys
    assert all(key.endswith("_flat_param") for key in found.unexpected_keys)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """``FULL_STATE_DICT`` of a model under torch's FSDP1, on every rank."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with quiet(), FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.clone() for name, value in model.state_dict().items()}


def checkpointed(model: nn.Module) -> nn.Module:
    """``model`` under a wrapper for activation checkpointing, which names must not show."""
    with quiet():
        return checkpoint_wrapper(model)


def tokens(rank: int, step: int) -> Tensor:
    """One rank's batch."""
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    return torch.randint(11, (4,), generator=generator)


Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With one tensor per parameter, and no scalar."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def amsgrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With three tensors per parameter, and a scalar."""
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, weight_decay=0.1)


OPTIMIZERS: dict[str, Optimizer] = {"sgd": sgd, "amsgrad": amsgrad}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Some steps of a model under FSDP1; the ignored part has the same gradients on all ranks, as it would with DDP."""
    for step in steps:
        with quiet():
            model(tokens(rank, step)).float().square().sum().backward()
        for name, parameter in model.named_parameters():
            if "ignored" in name and parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
