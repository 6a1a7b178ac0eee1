"""What `fully_shard` is given of precision and offloading: one policy for all parameters of a call, or one for each.

Objects of torch's own classes of these names are accepted wherever ours are: `mixed_precision` and `offload` translate.
Parameters of one call that rest in different places are different groups of its unit, as those on different meshes are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from fsdp2.api.other_words import explain_mixed_precision, explain_offload
from fsdp2.arguments import checked_class, shown
from fsdp2.core.buffers import Offloading
from fsdp2.core.options import MixedPrecisionPolicy, ModulePolicy, PolicyFunction
from fsdp2.errors import FSDPTypeError, FSDPValueError

T = TypeVar("T")


def module_policy(
    mp_policy: MixedPrecisionPolicy | PolicyFunction, params: Sequence[tuple[str, nn.Parameter]], module: str
) -> ModulePolicy:
    """Ask ``mp_policy`` about every parameter.

    Of a function's answers (None is no mixed precision) those that cast inputs must agree on how, as must those that
    have an ``output_dtype`` or a ``buffer_dtype``: that is what is done in the module. Or the function has a policy as
    its attribute ``of_module``, which says it.

    Raises:
        FSDPTypeError: an answer is no policy.
        FSDPValueError: the answers contradict each other.
    """
    if isinstance(mp_policy, MixedPrecisionPolicy):
        each = tuple(mp_policy.for_parameter(parameter, fqn) for fqn, parameter in params)
        return ModulePolicy(mp_policy.input_cast, mp_policy.output_dtype, mp_policy.buffer_dtype, each)
    answers = [mp_policy(fqn, parameter) for fqn, parameter in params]
    policies = [
        MixedPrecisionPolicy() if answer is None else mixed_precision(answer, f"mp_policy('{fqn}', ...) must return")
        for answer, (fqn, _) in zip(answers, params, strict=True)
    ]
    names = [fqn for fqn, _ in params]
    each = tuple(
        policy.for_parameter(parameter, fqn) for policy, (fqn, parameter) in zip(policies, params, strict=True)
    )
    whole = getattr(mp_policy, "of_module", None)
    if isinstance(whole, MixedPrecisionPolicy):
        return ModulePolicy(whole.input_cast, whole.output_dtype, whole.buffer_dtype, each)
    return ModulePolicy(
        _agreed("inputs in", names, [each.input_cast for each in policies], module),
        _agreed("output_dtype", names, [each.output_dtype for each in policies], module),
        _agreed("buffer_dtype", names, [each.buffer_dtype for each in policies], module),
        each,
    )


def _agreed(what: str, names: Sequence[str], answers: Sequence[T | None], module: str) -> T | None:
    """The one answer that is not None, if there is one."""
    given = [(name, answer) for name, answer in zip(names, answers, strict=True) if answer is not None]
    for name, answer in given:
        if answer != given[0][1]:
            raise FSDPValueError(
                f"mp_policy asks for {what} {given[0][1]} for parameter '{given[0][0]}' of {module} and {answer} for "
                f"'{name}', but a module's forward is cast as a whole: return it for one kind of parameter only (for "
                "the others cast_forward_inputs=False, output_dtype=None, buffer_dtype=None)."
            )
    return given[0][1] if given else None


def policy_or_function(mp_policy: Any) -> MixedPrecisionPolicy | PolicyFunction:
    """``mp_policy`` as ours, if it is a policy; a function as it is.

    Raises:
        FSDPTypeError: it is neither.
    """
    if callable(mp_policy) and not isinstance(mp_policy, type):
        return mp_policy  # type: ignore[no-any-return]
    return mixed_precision(mp_policy)


def mixed_precision(policy: Any, what: str = "mp_policy must be") -> MixedPrecisionPolicy:
    """``policy`` as ours; torch's own is translated.

    Raises:
        FSDPTypeError: it is neither.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if isinstance(policy, type) or not all(hasattr(policy, name) for name in names):
        found = f"{shown(policy)}. {explain_mixed_precision(policy)}".strip()
        raise FSDPTypeError(f"{what} a MixedPrecisionPolicy, got {found}")
    return MixedPrecisionPolicy(
        *(getattr(policy, name) for name in names),
        param_dtype_override_fn=getattr(policy, "param_dtype_override_fn", None),
        grad_dtype=getattr(policy, "grad_dtype", None),
    )


@checked_class()
@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: the default."""


@checked_class()
@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, their gradients, and so the optimizer's state, live in host memory; or some of these only.

    All of them: shards are copied to the device before they are gathered, reduced gradients back to the host in
    backward; the optimizer steps on CPU. With ``parameters=False`` it steps on the device, and of the others each may
    be offloaded by itself.

    Attributes:
        pin_memory: whether that host memory is pinned, which lets the copies overlap with compute. No effect where
            there is no accelerator to copy to.
        parameters: whether sharded parameters are offloaded. An optimizer needs parameters, gradients and state in one
            place, so the others then are too.
        gradients: whether reduced gradients are; None: if parameters are. Without them: the sum of microbatches that
            are not the last (`FSDPModule.set_is_last_backward`) waits on the host, ``.grad`` being None, and the last
            backward adds it and sets ``.grad`` on the device.
        optimizer_state: whether optimizer states are; None: if parameters are. Without them: they rest on the host
            between steps, as `offload_optimizer_state` tells.

    Raises:
        FSDPTypeError: a choice that is no bool.
        FSDPValueError: choices that make no sense together.
    """

    pin_memory: bool = True
    parameters: bool = field(default=True, kw_only=True)
    gradients: bool | None = field(default=None, kw_only=True)
    optimizer_state: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients", "optimizer_state"):
            chosen = getattr(self, name)
            if not isinstance(chosen, bool) and (chosen is not None or name == "parameters"):
                raise FSDPTypeError(f"CPUOffloadPolicy.{name} must be a bool, got {chosen!r}.")
            if chosen is None:
                object.__setattr__(self, name, self.parameters)
        if self.parameters and not (self.gradients and self.optimizer_state):
            kept = "gradients" if not self.gradients else "optimizer_state"
            raise FSDPValueError(
                f"CPUOffloadPolicy(parameters=True, {kept}=False): an optimizer steps where its parameters are, and "
                "needs their gradients and its state there. Offload all three, or pass parameters=False and choose."
            )
        if not (self.parameters or self.gradients or self.optimizer_state):
            raise FSDPValueError(
                "CPUOffloadPolicy(parameters=False) offloads nothing: choose gradients=True or optimizer_state=True, "
                "or pass OffloadPolicy()."
            )


def offload(policy: Any, what: str = "offload_policy") -> OffloadPolicy:
    """``policy`` as ours; torch's own is translated. None offloads nothing.

    Raises:
        FSDPTypeError: it is neither.
    """
    # torch takes None for `OffloadPolicy()` too, and it is the default of programs whose options may be absent.
    if policy is None:
        return OffloadPolicy()
    if isinstance(policy, OffloadPolicy):
        return policy
    known = {"OffloadPolicy", "CPUOffloadPolicy"} & {each.__name__ for each in type(policy).__mro__}
    if not known:
        found = f"{shown(policy)}. {explain_offload(policy)}".strip()
        raise FSDPTypeError(f"{what} must be an OffloadPolicy, a CPUOffloadPolicy or None, got {found}")
    return CPUOffloadPolicy(policy.pin_memory) if "CPUOffloadPolicy" in known else OffloadPolicy()


OffloadFunction = Callable[[str, nn.Parameter], OffloadPolicy | None]
OffloadChoice = OffloadPolicy | Mapping[str, OffloadPolicy] | OffloadFunction
"""A policy for all; policies by the names of parameters below the module; or a function of name and parameter."""


def offload_choice(given: Any) -> OffloadChoice:
    """``given`` with policies of ours in the place of torch's own.

    Raises:
        FSDPTypeError: it is none, or an entry of a mapping is none.
    """
    if isinstance(given, Mapping):
        for name in given:
            if not isinstance(name, str):
                raise FSDPTypeError(f"offload_policy takes policies by the names of parameters, got a key {name!r}.")
        return {name: offload(policy, f"offload_policy['{name}']") for name, policy in given.items()}
    if callable(given) and not isinstance(given, type):
        return given  # type: ignore[no-any-return]
    return offload(given)


def offload_policies(
    choice: OffloadChoice, params: Sequence[tuple[Sequence[str], nn.Parameter]], module: str
) -> list[OffloadPolicy]:
    """The policy of each of ``params``, which come with all their names below ``module``.

    Raises:
        FSDPTypeError: a function has answered something else.
        FSDPValueError: a name that no parameter of the call has; two names of one parameter with different policies.
    """
    if isinstance(choice, OffloadPolicy):
        return [choice] * len(params)
    if not isinstance(choice, Mapping):
        return [
            offload(choice(names[0], parameter), f"offload_policy('{names[0]}', ...)") for names, parameter in params
        ]
    known = {name for names, _ in params for name in names}
    for name in choice:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise FSDPValueError(
                f"offload_policy names '{name}', and the fully_shard call on {module} shards no such parameter: names "
                f"are those below the module, of parameters that no other call has sharded.{hint}"
            )
    return [_of_names(choice, names) for names, _ in params]


def _of_names(choice: Mapping[str, OffloadPolicy], names: Sequence[str]) -> OffloadPolicy:
    given = [name for name in names if name in choice]
    for name in given:
        if choice[name] != choice[given[0]]:
            raise FSDPValueError(
                f"offload_policy says {choice[given[0]]} of '{given[0]}' and {choice[name]} of '{name}', which are one "
                "parameter; say it once."
            )
    return choice[given[0]] if given else OffloadPolicy()


def offloading_of(policy: OffloadPolicy, device: torch.device) -> Offloading:
    """Where shards live by ``policy``, of parameters that are computed with on ``device``."""
    if not isinstance(policy, CPUOffloadPolicy):
        return Offloading(device)
    return Offloading(
        device,
        offloaded=policy.parameters,
        pinned=policy.pin_memory,
        sums_on_host=bool(policy.gradients),
        state_on_host=bool(policy.optimizer_state),
    )
