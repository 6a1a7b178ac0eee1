"""What the hooks of a sharded module do while `torch.compile` traces through them.

Everything read here was fixed before the trace began (`fsdp2.compiled.entry`): hooks are traced like the user's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.common import FSDPNotImplementedError
from fsdp2.compiled.unsharding import unshard
from fsdp2.plan.policies import ModulePolicy
from fsdp2.runtime.hooks import cast_floating_point, cast_inputs


@dataclass(slots=True)
class TracedUse:
    """One place in which a parameter is registered.

    Attributes:
        module: which holds it, as ``name``.
        index: of the parameter in its group.
        sharded: what is registered there outside of the module's forward.
        spec: of the unsharded DTensor under tensor parallelism: mesh, placements, shape, stride; else None.
    """

    module: nn.Module
    name: str
    index: int
    sharded: nn.Parameter
    spec: tuple[Any, Any, Any, Any] | None


@dataclass(slots=True)
class TracedGroup:
    """One group, ready to be traced.

    Attributes:
        text: of its `GroupSpec`.
        shards: its shard buffers, without gradients.
        carriers: where its gradients arrive.
        uses: where its parameters are registered.
    """

    text: str
    shards: tuple[torch.Tensor, ...]
    carriers: tuple[torch.Tensor, ...]
    uses: tuple[TracedUse, ...]


class TracedState:
    """Stands in for the hooks of one `FSDPState` inside a graph: gathers before forward, restores after it."""

    def __init__(self, groups: tuple[TracedGroup, ...], policy: ModulePolicy) -> None:
        self.groups = groups
        self.policy = policy

    def pre_forward(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: Callable[..., Any] | None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Register the unsharded parameters, and cast the inputs."""
        for group in self.groups:
            whole = unshard(group.text, group.shards, group.carriers)
            for use in group.uses:
                tensor = whole[use.index]
                if use.spec is not None:
                    mesh, placements, shape, stride = use.spec
                    tensor = DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)
                use.module._parameters[use.name] = tensor  # type: ignore[assignment]
        if self.policy.inputs is None:
            return None
        return cast_inputs(self.policy.inputs, method or module.forward, args, kwargs)

    def post_forward(self, output: Any) -> Any:
        """Register the sharded parameters, and cast the output."""
        for group in self.groups:
            for use in group.uses:
                use.module._parameters[use.name] = use.sharded
        if self.policy.output_dtype is None:
            return None
        return cast_floating_point(self.policy.output_dtype, output)


class RefusedState:
    """Stands in for a state that cannot be traced: raises while the graph is made."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def pre_forward(self, *_: Any) -> Any:
        """Raise.

        Raises:
            FSDPNotImplementedError: always, with the reason and what to do.
        """
        raise FSDPNotImplementedError(self.reason)

    def post_forward(self, output: Any) -> Any:
        """Never reached."""
        return output
