"""Which parameters to offload: the largest within a budget of bytes; and policies by name of a whole model's groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from fsdp2.api.policies import CPUOffloadPolicy, OffloadPolicy, offload_policies
from fsdp2.arguments import checked
from fsdp2.errors import FSDPValueError


@checked()
def cpu_offload_by_budget(module: nn.Module, budget_bytes: int, pin_memory: bool = True) -> dict[str, CPUOffloadPolicy]:
    """Choose parameters of ``module`` to offload: the largest first, of at most ``budget_bytes`` together.

        >>> offloaded = fsdp2.cpu_offload_by_budget(model, 2 * 2**30)
        >>> fsdp2.auto_shard(model, offload_policy=offloaded)

    Sizes are those of whole parameters in their own dtype, so every rank then has its part of that many bytes less on
    its device (and of the gradients and the optimizer's state of these parameters). One that does not fit any more is
    left out, and smaller ones may follow; of equal ones the first by name. Tied parameters count once, frozen ones too.
    Changes and communicates nothing; the same on every rank.

    Args:
        module: not yet sharded, also on meta.
        budget_bytes: 0 offloads nothing.
        pin_memory: of the policies.

    Returns:
        Policies by names of parameters below ``module``, as `fully_shard` on it takes them for ``offload_policy`` if it
        shards all of them, and `auto_shard` in any case.

    Raises:
        FSDPTypeError: not a module, not an int.
        FSDPValueError: a negative budget.
    """
    if budget_bytes < 0:
        raise FSDPValueError(f"budget_bytes must be a number of bytes, 0 for none, got {budget_bytes}.")
    sizes = {name: each.numel() * each.element_size() for name, each in module.named_parameters()}
    policy, left = CPUOffloadPolicy(pin_memory), budget_bytes
    chosen: dict[str, CPUOffloadPolicy] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if 0 < sizes[name] <= left:
            chosen[name] = policy
            left -= sizes[name]
    return chosen


def policies_by_every_name(
    model: nn.Module, choice: Mapping[str, OffloadPolicy], ignored: Iterable[nn.Parameter]
) -> dict[str, OffloadPolicy]:
    """``choice``, which names parameters of ``model``, by all names that these have.

    Raises:
        FSDPValueError: a name that no parameter has, or one whose parameter is ignored; two names of one parameter with
            different policies.
    """
    names: dict[nn.Parameter, list[str]] = {}
    left_out = set(ignored)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in left_out:
            names.setdefault(parameter, []).append(name)
    params = [(its, parameter) for parameter, its in names.items()]
    policies = offload_policies(choice, params, type(model).__name__)
    return {name: policy for (its, _), policy in zip(params, policies, strict=True) for name in its}


@dataclass(frozen=True)
class OffloadByName:
    """An ``offload_policy`` for the group of the module ``prefix``: of a ``table`` by all names in the model."""

    prefix: str
    table: Mapping[str, OffloadPolicy]

    def __call__(self, fqn: str, parameter: nn.Parameter) -> OffloadPolicy:
        """The policy of a parameter by its name below the group's module."""
        return self.table[f"{self.prefix}.{fqn}" if self.prefix else fqn]
