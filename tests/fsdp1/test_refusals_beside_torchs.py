"""What torch's own FSDP1 refuses, and what the wrapper: the same misuses, each with both answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

from fsdp2.compat.fsdp1 import ModuleWrapPolicy, ShardedStateDictConfig, ShardingStrategy, StateDictType, policies
from fsdp2.compat.fsdp1.config import TrainingState
from tests.fsdp1.helpers.both import backward, both, class_of, wrapped
from tests.harness import multi_rank
from tests.harness.models import UNEVEN_MLP

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of torch, about itself

Misuse = Callable[[str], Any]


def below(kind: str, act: Callable[[Any], Any]) -> Any:
    """``act`` on a wrapper that is not the root."""
    model = wrapped(kind)
    assert model.check_is_root()
    return act(model[0])


def hooked(kind: str, times: int = 1, **arguments: Any) -> Any:
    model = wrapped(kind, **arguments)
    for _ in range(times):
        model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)
    return model


def hooked_late(kind: str) -> None:
    model = wrapped(kind)
    backward(model)
    model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)


def half_wrapped(kind: str, **arguments: Any) -> Any:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain[0] = wrapped(kind, plain[0])
    return wrapped(kind, plain, **{name: value(plain) for name, value in arguments.items()})


def policies_of(kind: str) -> Any:
    from torch.distributed.fsdp import wrap as torchs

    return torchs if kind == "torch" else policies


def custom_answer(kind: str) -> None:
    policy = policies_of(kind).CustomPolicy(lambda module: "yes")
    wrapped(kind, nn.Sequential(nn.Linear(2, 2)), auto_wrap_policy=policy)


def nested(kind: str) -> None:
    module = policies_of(kind)
    with module.enable_wrap(wrapper_cls=class_of(kind)), module.enable_wrap(wrapper_cls=class_of(kind)):
        pass


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


def hybrid_mesh() -> Any:
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))


def single(kind: str, **arguments: Any) -> Any:
    return wrapped(kind, nn.Linear(2, 2), **arguments)


def summon(model: Any, **arguments: Any) -> None:
    with type(model).summon_full_params(model, **arguments):
        pass


def summoned_in(kind: str, where: str) -> None:
    model = wrapped(kind)
    if where == "forward":
        model[0].register_forward_hook(lambda *_: summon(model))
        model(torch.ones(2, UNEVEN_MLP.build()[0].in_features))
    else:
        output = model(torch.ones(2, UNEVEN_MLP.build()[0].in_features))
        output.register_hook(lambda _: summon(model))
        output.sum().backward()


HYBRID = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
MISUSES: dict[str, Misuse] = {
    "ignored twice": lambda kind: single(kind, ignored_modules=[], ignored_states=[]),
    "ignored tensors": lambda kind: single(kind, ignored_modules=[torch.ones(1)]),
    "ignored mixture": lambda kind: single(kind, ignored_states=[nn.Linear(1, 1), nn.Parameter(torch.ones(1))]),
    "ignored wrapper": lambda kind: half_wrapped(kind, ignored_modules=lambda plain: [plain[0]]),
    "policy of wrapped": lambda kind: half_wrapped(kind, auto_wrap_policy=lambda _: ModuleWrapPolicy({nn.Linear})),
    "group and mesh": lambda kind: single(kind, process_group=dist.group.WORLD, device_mesh=hybrid_mesh()["shard"]),
    "one group of two": lambda kind: single(kind, process_group=dist.group.WORLD, **HYBRID),
    "mesh of one dim": lambda kind: single(kind, device_mesh=hybrid_mesh()["shard"], **HYBRID),
    "no function": lambda kind: wrapped(kind, NoReset(), param_init_fn=3),
    "no reset": lambda kind: wrapped(kind, NoReset()),
    "hook twice": lambda kind: hooked(kind, times=2),
    "hook below": lambda kind: below(kind, lambda each: each.register_comm_hook(None, default_hooks.allreduce_hook)),
    "hook late": hooked_late,
    "hook of replicas": lambda kind: hooked(kind, sharding_strategy=ShardingStrategy.NO_SHARD),
    "hook of no function": lambda kind: wrapped(kind).register_comm_hook(None, None),
    "hook of hybrid": lambda kind: hooked(kind, device_mesh=hybrid_mesh(), **HYBRID),
    "custom answer": custom_answer,
    "nested enable_wrap": nested,
    "no_sync below": lambda kind: below(kind, lambda each: each.no_sync().__enter__()),
    "clip below": lambda kind: below(kind, lambda each: each.clip_grad_norm_(1.0)),
    "summon in forward": lambda kind: summoned_in(kind, "forward"),
    "summon in backward": lambda kind: summoned_in(kind, "backward"),
    "summon for one": lambda kind: summon(wrapped(kind), rank0_only=True, writeback=True),
    "state is running": lambda kind: wrapped(kind)._assert_state([TrainingState.FORWARD_BACKWARD]),
    "other config": lambda kind: class_of(kind).set_state_dict_type(
        wrapped(kind), StateDictType.FULL_STATE_DICT, ShardedStateDictConfig()
    ),
}


REFUSALS: dict[str, dict[str, tuple[type[Exception], str] | None]] = {
    "ignored twice": {
        "torch": (ValueError, "Cannot pass both ignored_modules and ignored_states at the same time"),
        "fsdp2": (ValueError, "Cannot pass both ignored_modules and ignored_states at the same time"),
    },
    "ignored tensors": {
        "torch": (ValueError, "ignored_modules expects nn.Module list elements"),
        "fsdp2": (TypeError, r"ignored_modules must be an iterable of modules.*got \['Tensor'\]"),
    },
    "ignored mixture": {
        "torch": (ValueError, "ignored_states expects all nn.Parameter or all nn.Module"),
        "fsdp2": (TypeError, r"ignored_states one of modules or of parameters, got \['Linear', 'Parameter'\]"),
    },
    "ignored wrapper": {
        "torch": (ValueError, "should not include FSDP modules"),
        "fsdp2": (ValueError, "wrapped already cannot be ignored"),
    },
    "policy of wrapped": {
        "torch": (ValueError, "FSDP auto wrapping requires modules to not already have FSDP applied"),
        "fsdp2": (ValueError, "FSDP auto wrapping requires modules to not already have FSDP applied but found 0 in"),
    },
    "group and mesh": {
        "torch": (ValueError, "Cannot pass both process_group and device_mesh at the same time"),
        "fsdp2": (ValueError, "Cannot pass both process_group and device_mesh at the same time"),
    },
    "one group of two": {
        "torch": (ValueError, r"either None or Tuple\[dist.ProcessGroup, dist.ProcessGroup\]"),
        "fsdp2": (ValueError, r"a tuple \(shard group, replicate group\) under HYBRID_SHARD"),
    },
    "mesh of one dim": {
        "torch": (ValueError, "Expected device_mesh to have ndim=2"),
        "fsdp2": (ValueError, r"needs a device_mesh of 2 dim\(s\)"),
    },
    "no function": {
        "torch": (ValueError, "to be callable"),
        "fsdp2": (TypeError, "param_init_fn must be a function of a module, got int"),
    },
    "no reset": {
        "torch": (AttributeError, "has no attribute 'reset_parameters'"),
        "fsdp2": (ValueError, r"no reset_parameters\(\): pass param_init_fn"),
    },
    "hook twice": {
        "torch": (AssertionError, "A communication hook is already registered"),
        "fsdp2": (AssertionError, "^A communication hook is already registered$"),
    },
    "hook below": {
        "torch": (AssertionError, "register_comm_hook can only be called on a root instance"),
        "fsdp2": (AssertionError, "register_comm_hook can only be called on a root instance"),
    },
    "hook late": {"torch": None, "fsdp2": None},
    "hook of replicas": {
        "torch": None,
        "fsdp2": (AssertionError, "Communication hook is not supported for NO_SHARD on several ranks"),
    },
    "hook of no function": {"torch": None, "fsdp2": (TypeError, "takes a function as hook, got None")},
    "hook of hybrid": {
        "torch": (AssertionError, "Communication hook is not supported for hybrid strategies"),
        "fsdp2": (AssertionError, "Communication hook is not supported for hybrid strategies"),
    },
    "custom answer": {
        "torch": (ValueError, "should return False/True or a kwarg dict"),
        "fsdp2": (ValueError, "should return False/True or a kwarg dict"),
    },
    "nested enable_wrap": {
        "torch": (NotImplementedError, "already within an autowrap context"),
        "fsdp2": (NotImplementedError, r"enable_wrap\(\) cannot be nested"),
    },
    "no_sync below": {
        "torch": (RuntimeError, r"`no_sync\(\)` on inner FSDP instances is not supported"),
        "fsdp2": (RuntimeError, r"`no_sync\(\)` on inner FSDP instances is not supported"),
    },
    "clip below": {
        "torch": (RuntimeError, "should only be called on the root FSDP instance"),
        "fsdp2": (RuntimeError, "should only be called on the root FSDP instance"),
    },
    "summon in forward": {
        "torch": (AssertionError, "Cannot manually unshard parameters during forward/backward"),
        "fsdp2": (AssertionError, "Cannot manually unshard parameters during forward/backward"),
    },
    "summon in backward": {
        "torch": (AssertionError, "Cannot manually unshard parameters during forward/backward"),
        "fsdp2": (AssertionError, "Cannot manually unshard parameters during forward/backward"),
    },
    "summon for one": {
        "torch": (NotImplementedError, "is not supported"),
        "fsdp2": (NotImplementedError, "is not supported"),
    },
    "state is running": {
        "torch": (ValueError, "expected to be in states"),
        "fsdp2": (ValueError, "expected to be in states"),
    },
    "other config": {
        "torch": (RuntimeError, "Expected state_dict_config of type"),
        "fsdp2": (RuntimeError, "Expected state_dict_config of type"),
    },
}


@multi_rank(2)
@both
@pytest.mark.parametrize("misuse", REFUSALS)
def test_what_is_refused(kind: str, misuse: str, world_size: int) -> None:
    refusal = REFUSALS[misuse][kind]
    if refusal is None:
        MISUSES[misuse](kind)
        return
    with pytest.raises(refusal[0], match=refusal[1]):
        MISUSES[misuse](kind)


def test_every_misuse_has_an_answer() -> None:
    assert MISUSES.keys() == REFUSALS.keys()
