"""The policies for precision and offloading that `fully_shard` takes: for all parameters of a call, or for each one.

Objects of torch's classes with these names are accepted too: `mixed_precision` and `offload` translate them. Parameters
of one call that are offloaded differently form different groups of its unit, like those on different meshes.
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

    A module has one cast of inputs, one ``output_dtype`` and one ``buffer_dtype``. If ``mp_policy`` is a function, its
    answers (None is no mixed precision) must agree on each of these where they have it. Or the function has an
    attribute ``of_module``, a policy that says what the module does.

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
    """The answer on which all agree that are not None; None if there is none."""
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
    """``mp_policy`` as a policy of this package; a function is returned as it is.

    Raises:
        FSDPTypeError: it is neither.
    """
    if callable(mp_policy) and not isinstance(mp_policy, type):
        return mp_policy  # type: ignore[no-any-return]
    return mixed_precision(mp_policy)


def mixed_precision(policy: Any, what: str = "mp_policy must be") -> MixedPrecisionPolicy:
    """``policy`` as a policy of this package. A policy of torch is translated.

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
    """Sharded parameters, their gradients, and so the optimizer's state, live in host memory; or only some of these.

    If all of them do, shards are copied to the device before they are gathered, and reduced gradients back to the host
    in backward; the optimizer steps on CPU. With ``parameters=False`` it steps on the device, and gradients and
    optimizer states may be offloaded separately.

    Attributes:
        pin_memory: whether that host memory is pinned, which lets the copies overlap with compute. It has no effect
            without an accelerator to copy to.
        parameters: whether sharded parameters are offloaded. An optimizer needs parameters, gradients and state in one
            place, so the others are offloaded with them.
        gradients: whether reduced gradients are offloaded; None: if parameters are. If parameters are not, the sum over
            microbatches before the last (`FSDPModule.set_is_last_backward`) waits on the host and ``.grad`` is None;
            the last backward adds the sum and sets ``.grad`` on the device.
        optimizer_state: whether optimizer states are offloaded; None: if parameters are. If parameters are not, the
            states are on the host between steps, see `offload_optimizer_state`.

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
    """``policy`` as a policy of this package. A policy of torch is translated; None offloads nothing.

    Raises:
        FSDPTypeError: it is none of these.
    """
    # torch accepts None as well, and programs pass it where an option is absent.
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
"""A policy for all parameters; policies by the names of parameters; or a function of a name and a parameter."""


def offload_choice(given: Any) -> OffloadChoice:
    """``given``, in which policies of torch are translated to those of this package.

    Raises:
        FSDPTypeError: it is no policy, mapping or function, or a mapping has an entry that is no policy.
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
    """Where shards live under ``policy``, if ``device`` computes with the parameters."""
    if not isinstance(policy, CPUOffloadPolicy):
        return Offloading(device)
    return Offloading(
        device,
        offloaded=policy.parameters,
        pinned=policy.pin_memory,
        sums_on_host=bool(policy.gradients),
        state_on_host=bool(policy.optimizer_state),
    )
