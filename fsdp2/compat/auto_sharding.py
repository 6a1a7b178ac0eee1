"""Programs that shard nothing: their ``DistributedDataParallel(model)`` becomes ``fsdp2.auto_shard(model, config)``.

[Note: what a DDP program keeps, and what it does not]
    It keeps: training as under DDP. Rank 0's parameters and buffers are broadcast first, gradients are the mean over
    ranks, ``no_sync()`` accumulates, buffers are broadcast before each training forward, ``.module`` is the model,
    names in state dicts begin with "module.", and load_state_dict takes whole tensors, as a DDP program saves them.
    Other: parameters are DTensors, a rank's shard. ``.grad`` is None until gradients are reduced. What only rank 0 does
    with a model (saving it, most often) has only rank 0's shards: ``torch.save`` refuses these, with what to write.
    Refused: what has no counterpart (communication hooks of buckets, ``join()``, DDP's own mixed precision, a process
    group that is not the default one). Options about buckets and unused parameters mean nothing here, and pass.

Stands on the public face of fsdp2.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import parallel

import fsdp2
from fsdp2.compat.fsdp1.construction import used

LOG = logging.getLogger("fsdp2")

MEANS_NOTHING = frozenset(
    {
        *("bucket_cap_mb", "bucket_cap_mb_list", "check_reduction", "find_unused_parameters"),
        *("gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params"),
    }
)
"""Arguments of DDP about how it works inside."""

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Where a module names parameters and buffers that DDP leaves alone."""


class ShardedDataParallel(nn.Module):
    """What takes the place of ``DistributedDataParallel``: see the note above. Arguments are those of DDP.

    Attributes:
        module: the model, sharded in place.
        require_backward_grad_sync: as DDP's: False inside of `no_sync`.

    Raises:
        FSDPNotImplementedError: an argument that has no counterpart.
        FSDPValueError: the model is sharded already, or has no parameter that needs a gradient.
        FSDPTypeError: an argument that DDP does not have.
    """

    config: fsdp2.ShardingConfig | None = None
    made = 0
    """How many were made in this process."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        *,
        device_mesh: DeviceMesh | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self._refuse(module, device_ids, process_group, others)
        ignored_names = frozenset(getattr(module, _IGNORED, ()))
        parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers()
        ignored = [parameter for name, parameter in parameters if name in ignored_names]
        ignored_buffers = [buffer for name, buffer in buffers if name in ignored_names]
        mesh, config = self._mesh(module, device_mesh)
        self._ranks = _ranks_of(device_mesh)
        if init_sync:
            left = [*ignored, *ignored_buffers]
            fsdp2.broadcast_parameters(module, 0, process_group=self._ranks, ignored_params=left)
        more: dict[str, Any] = {"ignored_params": ignored} if ignored else {}
        self.module: Any = fsdp2.auto_shard(module, mesh, config=config, **more)
        self.require_backward_grad_sync = True
        self._buffers_may_differ = True
        self._broadcast_names = [
            name for name, _ in module.named_buffers() if broadcast_buffers and name not in ignored_names
        ]
        shards = config is None or config.strategy != "replicate"
        if shards and not ShardedDataParallel.made and dist.get_rank() == 0 and dist.get_world_size() > 1:
            LOG.warning("fsdp2 --auto-shard: the model is sharded, and torch.save of it will be refused. %s", SAVING)
        type(self).made += 1

    @staticmethod
    def _refuse(module: nn.Module, device_ids: Any, process_group: Any, others: Mapping[str, Any]) -> None:
        if process_group is not None and process_group is not dist.group.WORLD:
            raise fsdp2.FSDPNotImplementedError(
                "DistributedDataParallel(process_group=...) under --auto-shard: only the default process group is "
                "sharded over. Write mesh_shape in the config, or call fsdp2.auto_shard in the program."
            )
        if device_ids is not None and len(device_ids) > 1:
            raise fsdp2.FSDPValueError("DistributedDataParallel: device_ids names several devices; one rank has one.")
        for name, value in others.items():
            if name not in MEANS_NOTHING and value is not None:
                raise fsdp2.FSDPNotImplementedError(
                    f"DistributedDataParallel({name}=...) has no counterpart under --auto-shard. Leave it out; mixed "
                    "precision is mp_policy in the config, and hooks are module.register_comm_hook of fsdp2."
                )
        if any(isinstance(each, fsdp2.FSDPModule) for each in module.modules()):
            raise fsdp2.FSDPValueError(
                "DistributedDataParallel under --auto-shard: the model is sharded already. Run the program without "
                "--auto-shard."
            )
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise fsdp2.FSDPValueError("DistributedDataParallel: the model has no parameter that needs a gradient.")

    @classmethod
    def _mesh(
        cls, module: nn.Module, given: DeviceMesh | None
    ) -> tuple[DeviceMesh | None, fsdp2.ShardingConfig | None]:
        """On the kind of device that the model is on, as DDP does; and on that one, if no other was made current."""
        config = cls.config
        if given is not None:
            return given, config
        device_type = used(next(iter(module.parameters())).device).type
        if config is None or config.mesh_shape is None:
            return init_device_mesh(device_type, (dist.get_world_size(),)), config
        if config.device_type is None:
            config = dataclasses.replace(config, device_type=device_type)
        return None, config

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model, with rank 0's buffers on all ranks if a training forward may have changed them."""
        if self._buffers_may_differ and self._broadcast_names:
            self._broadcast_buffers()
        self._buffers_may_differ = torch.is_grad_enabled() and self.require_backward_grad_sync
        return self.module(*inputs, **kwargs)

    def _broadcast_buffers(self) -> None:
        found = dict(self.module.named_buffers())
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for name in self._broadcast_names:
            buffer = found.get(name)
            if buffer is not None and not isinstance(buffer, DTensor):
                alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        with torch.no_grad():
            for buffers in alike.values():
                flat = torch.cat([each.reshape(-1) for each in buffers])
                dist.broadcast(flat, group=self._ranks, group_src=0)
                for each, part in zip(buffers, flat.split([each.numel() for each in buffers]), strict=True):
                    each.copy_(part.view_as(each))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside of it add up gradients, which are reduced by the first backward after it."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
            self.module.set_requires_gradient_sync(before)

    def join(self, *arguments: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise fsdp2.FSDPNotImplementedError(
            "DistributedDataParallel.join() has no counterpart under --auto-shard: write 'on_divergence: join' in the "
            "config, and call model.module.join_step() on ranks that have no batch left: 'Ranks that run different "
            "modules on purpose' in the documentation."
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Refused: DDP's hooks are given buckets, which there are none of."""
        raise fsdp2.FSDPNotImplementedError(
            "DistributedDataParallel.register_comm_hook() has no counterpart under --auto-shard: its hooks take "
            "buckets. model.module.register_comm_hook of fsdp2 takes flat gradients: 'Reduce gradients with a function "
            "of your own' in the documentation."
        )

    def _set_static_graph(self) -> None:
        """Means nothing here: graphs may change."""

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Any) -> None:
        """As DDP's: called before ``module`` is wrapped."""
        setattr(module, _IGNORED, names)


def _ranks_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Those that start alike; None: all.

    Raises:
        FSDPNotImplementedError: they have no process group of their own.
    """
    if mesh is None or mesh.size() == dist.get_world_size():
        return None
    if mesh.ndim > 1:
        raise fsdp2.FSDPNotImplementedError(
            f"DistributedDataParallel(device_mesh=...) under --auto-shard: a mesh of {mesh.ndim} dims over a part of "
            "the ranks. Pass one of a single dim, as DistributedDataParallel takes it."
        )
    return mesh.get_group()


ShardedDataParallel.__name__ = ShardedDataParallel.__qualname__ = "DistributedDataParallel"


def to_save(value: Any, name: str = "", within: frozenset[int] = frozenset()) -> Any:
    """``value`` with plain tensors for DTensors that every rank has all of, as a DDP program would save it.

    ``name``: where it was found, for the message.

    Raises:
        FSDPRuntimeError: it holds a tensor of which this rank has only a part.
    """
    if id(value) in within:
        return value
    within |= {id(value)}
    if isinstance(value, DTensor):
        return _whole(value, name)
    if isinstance(value, nn.Module):
        for each, tensor in (*value.named_parameters(), *value.named_buffers()):
            to_save(tensor, _below(name, each), within)
    elif isinstance(value, dict):
        found = {key: to_save(each, _below(name, key), within) for key, each in value.items()}
        if any(found[key] is not each for key, each in value.items()):
            value = copy.copy(value)
            value.update(found)
    elif isinstance(value, (list, tuple)):
        items = [to_save(each, _below(name, index), within) for index, each in enumerate(value)]
        if any(one is not other for one, other in zip(items, value, strict=True)):
            value = type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    elif isinstance(value, (Mapping, set, frozenset)):
        for each in value.values() if isinstance(value, Mapping) else value:
            to_save(each, name, within)
    return value


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _whole(tensor: DTensor, name: str) -> torch.Tensor:
    cut = [not placement.is_replicate() for placement in tensor.placements]
    if any(is_cut and size > 1 for is_cut, size in zip(cut, tensor.device_mesh.shape, strict=True)):
        which = f", {name!r}" if name else ""
        raise fsdp2.FSDPRuntimeError(
            f"torch.save was called with a sharded tensor{which}: under --auto-shard a rank has only its part of the "
            f"model and the optimizer, and the file would hold no more. {SAVING}"
        )
    local = tensor.to_local().detach()
    return nn.Parameter(local, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else local


SAVING = (
    "Save on all ranks with fsdp2.checkpoint.save(path, model, optimizer). Or for a file as DDP's: the model's state "
    "dict on rank 0, while all ranks are inside of `with fsdp2.full_parameters(model.module):`, and the optimizer's as "
    "all ranks get it from torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer, "
    "options=StateDictOptions(full_state_dict=True)). Or write 'strategy: replicate' in the config."
)
"""How a program saves what is sharded."""


class AutoSharding:
    """What `install` replaced; `uninstall` puts it back."""

    def __init__(self, config: fsdp2.ShardingConfig | None) -> None:
        self._torchs = torchs = parallel.DistributedDataParallel
        save = torch.save
        ShardedDataParallel.config, ShardedDataParallel.made = config, 0
        modules = list(sys.modules.items())
        known = sorted(name for name, module in modules if not _is_torchs(name) and _bindings(module, torchs))
        if known:
            warnings.warn(
                f"--auto-shard comes too late for {', '.join(known)}: torch's DistributedDataParallel was imported "
                "there before, and stays in use.",
                stacklevel=3,
            )
        self._bound: list[tuple[Any, str, Any]] = [(torch, "save", save), (torch.serialization, "save", save)]
        for name, module in modules:
            if name.startswith(("torch.nn.parallel", "torch.distributed")):
                self._bound += [(module, each, torchs) for each in _bindings(module, torchs)]
        guarded = self._guarded(save)
        for module, name, value in self._bound:
            setattr(module, name, guarded if value is save else ShardedDataParallel)

    def _guarded(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def guarded(obj: Any, *arguments: Any, **kwargs: Any) -> Any:
            return save(to_save(obj), *arguments, **kwargs)

        return guarded

    @property
    def was_used(self) -> bool:
        """Whether the program has made a ``DistributedDataParallel`` since."""
        return ShardedDataParallel.made > 0

    def uninstall(self) -> None:
        """Put torch's names back, also in modules of torch that were imported since.

        Models that were sharded meanwhile stay what they are.
        """
        for module, name, value in self._bound:
            setattr(module, name, value)
        for place, module in list(sys.modules.items()):
            if place.startswith("torch."):
                for name in _bindings(module, ShardedDataParallel):
                    setattr(module, name, self._torchs)
        ShardedDataParallel.config = None


def _is_torchs(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "fsdp2")


def _bindings(module: Any, kind: type) -> list[str]:
    """The names that ``kind`` has in ``module``."""
    return [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is kind]


def install(config: fsdp2.ShardingConfig | None = None) -> AutoSharding:
    """Let ``DistributedDataParallel(model)`` shard its model from now on, and ``torch.save`` refuse shards.

    Call it before the program imports either by name, on every rank.
    """
    return AutoSharding(config)


def install_asked(value: str) -> AutoSharding:
    """`install`, with what the variable FSDP2_AUTO_SHARD says: 1, or the path of a config.

    Raises:
        FSDPValueError: the file is no config.
    """
    return install(None if value == "1" else fsdp2.ShardingConfig.from_file(value))
