"""Which submodules become units: the wrapping policies of FSDP1, and ``wrap`` within ``enable_wrap``.

A policy is one of torch's or ours (they are told apart by what they carry, for a torch without FSDP1 has none), or any
callable ``(module, recurse, nonwrapped_numel) -> bool``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import nn

import fsdp2

Arguments = dict[str, Any]
"""Those of the wrapper's constructor, but the module."""


class ModuleWrapPolicy:
    """Every module of these classes is a unit, with the root's arguments."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """As a callable policy."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module_classes})"


class CustomPolicy:
    """``lambda_fn`` says of each module: no unit (False), a unit (True), or one whose arguments differ in a dict's."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Arguments]) -> None:
        self._lambda_fn = lambda_fn


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Every module is a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Modules of which ``lambda_fn`` says so are units."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Collection[type[nn.Module]]
) -> bool:
    """Modules of these classes are units."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: Collection[type[nn.Module]]
) -> bool:
    return recurse or isinstance(module, tuple(module_classes))


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type[nn.Module]], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    return recurse or isinstance(module, tuple(module_classes))


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """What any of ``policies`` makes a unit."""
    return any(each(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for each in policies)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Modules with at least ``min_num_params`` elements that are in no unit below are units.

    Those of ``force_leaf_modules`` have no units below; those of ``exclude_wrap_modules`` are none.
    """
    settings: Any = size_based_auto_wrap_policy
    leaves = settings.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = settings.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(leaves if recurse else excluded))


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


class Ignored(NamedTuple):
    """What no unit manages."""

    modules: frozenset[nn.Module]
    params: frozenset[nn.Parameter]


def wrap_submodules(
    root: nn.Module, policy: Any, ignored: Ignored, arguments: Arguments, wrapper: Callable[..., nn.Module]
) -> None:
    """Put ``wrapper(module, **arguments)`` in the place of every module below ``root`` that ``policy`` makes a unit.

    Innermost first. ``root`` itself is left to the caller. A module that is held in several places is wrapped once.

    Raises:
        FSDPTypeError: no policy.
        FSDPValueError: what a `CustomPolicy` calls returned neither a bool nor a dict.
    """
    if hasattr(policy, "_run_policy") or isinstance(policy, (ModuleWrapPolicy, CustomPolicy)):
        chosen = _chosen(root, policy, ignored, arguments)
    elif callable(policy):
        chosen = {}
        _choose_below(root, policy, ignored, arguments, chosen)
    else:
        raise fsdp2.FSDPTypeError(
            f"auto_wrap_policy must be a policy of torch.distributed.fsdp.wrap, or a callable (module, recurse, "
            f"nonwrapped_numel) -> bool, got {type(policy).__name__}."
        )
    chosen.pop(root, None)
    for module in [each for each in chosen if _is_container(each)]:
        if all(_is_in_units(child, chosen, ignored) for child in module.children()):
            del chosen[module]  # torch makes a unit of nothing
    _replace_below(root, chosen, wrapper, {})


def _is_container(module: nn.Module) -> bool:
    """Whether ``module`` is a ModuleList or ModuleDict: it has no forward to gather parameters before."""
    without = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward in without


def _is_in_units(module: nn.Module, chosen: Collection[nn.Module], ignored: Ignored) -> bool:
    """Whether every parameter of ``module`` is in a unit at or below it, or ignored."""
    if module in ignored.modules or (module in chosen and not _is_container(module)):
        return True
    has_own = any(parameter not in ignored.params for parameter in module.parameters(recurse=False))
    return not has_own and all(_is_in_units(child, chosen, ignored) for child in module.children())


def _chosen(root: nn.Module, policy: Any, ignored: Ignored, arguments: Arguments) -> dict[nn.Module, Arguments]:
    classes: Any = getattr(policy, "_module_classes", None)
    function: Any = getattr(policy, "_lambda_fn", None)
    if classes is None and function is None:  # a subclass of the user's
        found: dict[nn.Module, Arguments] = policy._run_policy(root, set(ignored.modules), dict(arguments))
        return found
    chosen: dict[nn.Module, Arguments] = {}
    for module in root.modules():
        if module in ignored.modules:
            continue
        answer = isinstance(module, tuple(classes)) if function is None else function(module)
        if not isinstance(answer, (bool, dict)):
            raise fsdp2.FSDPValueError(
                "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned "
                f"{answer!r} for a {type(module).__name__}."
            )
        if answer:
            chosen[module] = copy.copy(arguments) | (answer if isinstance(answer, dict) else {})
    return chosen


def _choose_below(
    module: nn.Module,
    policy: Callable[..., bool],
    ignored: Ignored,
    arguments: Arguments,
    chosen: dict[nn.Module, Arguments],
    *,
    is_root: bool = True,
) -> int:
    """Ask a callable policy about ``module`` and what is below; the number of elements that lie in units then."""
    numel = sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored.params)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped = sum(
        _choose_below(child, policy, ignored, arguments, chosen, is_root=False)
        for child in module.children()
        if child not in ignored.modules and child not in chosen
    )
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        return wrapped
    chosen[module] = copy.copy(arguments) | getattr(module, "_wrap_overrides", {})
    return numel


def _replace_below(
    module: nn.Module,
    chosen: Mapping[nn.Module, Arguments],
    wrapper: Callable[..., nn.Module],
    done: dict[nn.Module, nn.Module],
) -> None:
    for child in module.children():
        if child not in done:
            _replace_below(child, chosen, wrapper, done)
            done[child] = wrapper(child, **chosen[child]) if child in chosen else child
    for name, held in list(module._modules.items()):  # every place, also a second one of the same child
        if held is not None and done.get(held, held) is not held:
            setattr(module, name, done[held])


class _Wrapping:
    """What `enable_wrap` has set."""

    current: ClassVar[tuple[Callable[..., nn.Module], Arguments] | None] = None


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, ``wrap(module)`` is ``wrapper_cls(module, **wrapper_kwargs)``.

    Raises:
        FSDPNotImplementedError: inside of another one.
    """
    if _Wrapping.current is not None:
        raise fsdp2.FSDPNotImplementedError("enable_wrap() cannot be nested: leave the outer one first.")
    _Wrapping.current = (wrapper_cls, wrapper_kwargs)
    try:
        yield
    finally:
        _Wrapping.current = None


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` as `enable_wrap` says, but for what ``wrap_overrides`` says; outside of it, leave the module."""
    if _Wrapping.current is None:
        return module
    wrapper, arguments = _Wrapping.current
    return wrapper(module, **{**arguments, **wrap_overrides})


__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
