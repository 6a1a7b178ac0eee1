"""Stand-ins where a part of torch must deal with modules of both implementations, or reads what only torch's has.

A program may hold both kinds after the swap: torch's `replicate` derives from torch's own `FSDPModule`, and models may
have been sharded before. What asks "is this an `FSDPModule`?" to decide whether to reduce gradients must not overlook
them.
"""

from __future__ import annotations

import abc
import copyreg
import functools
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import nn

PIPELINING = ("torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules")
"""They ask the states of data-parallel stages of any kind, and reduce their gradients."""
STATE_DICTS = ("torch.distributed.checkpoint.state_dict", "torch.distributed.optim.named_optimizer")
"""They ask ``isinstance(module, FullyShardedDataParallel)``, and call the class's methods of a model of either kind."""


@functools.cache  # so that what programs have imported stays the same if it is installed again
def either(torchs: type, ours: type) -> type:
    """A class that stands for both in ``isinstance``, and is otherwise ``ours``: what is set on it is set there."""

    before: dict[str, object] = {}

    class Either(abc.ABCMeta):  # which classes of programs may have beside it
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (torchs, ours)) if cls is made else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, (torchs, ours)) if cls is made else super().__subclasscheck__(subclass)

        def __setattr__(cls, name: str, value: object) -> None:
            if cls is not made or name.startswith("_abc_"):
                super().__setattr__(name, value)
                return
            if name in vars(ours):
                before.setdefault(name, vars(ours)[name])
            setattr(ours, name, value)

        def __delattr__(cls, name: str) -> None:
            if cls is not made:
                super().__delattr__(name)
            elif name in before:  # who has patched it, and found nothing of that name in this class, undoes it so
                setattr(ours, name, before[name])
            else:
                delattr(ours, name)

    made: type | None = None
    made = Either(ours.__name__, (ours,), {"__module__": ours.__module__, "__doc__": ours.__doc__})
    copyreg.pickle(Either, lambda cls: (_itself, (ours,)) if cls is made else cls.__qualname__)
    return made


def _itself(cls: Any) -> Any:
    return cls


LIGHTNING = ("lightning.fabric.strategies.model_parallel", "lightning_fabric.strategies.model_parallel")
"""Its strategies load whole checkpoints there: lazily, of FSDP1's wrappers, or else by DCP, of models of DTensors."""

OF_DTENSORS = "_has_dtensor_modules"
"""By which Lightning takes a model for one of `fully_shard`."""


def of_fully_shard(lightnings: Callable[[object], bool], ours_class: type) -> Callable[[object], bool]:
    """``_has_dtensor_modules``: no for FSDP1's wrappers of ours, whose parameters are DTensors."""

    @functools.wraps(lightnings)
    def has_dtensor_modules(module: object) -> bool:
        return not isinstance(module, ours_class) and lightnings(module)

    return has_dtensor_modules


TRANSFORMERS = ("transformers.trainer_pt_utils",)
"""Its Trainer asks there which parameters decay, and compares with ``named_parameters()``."""

PARAMETER_NAMES = "get_parameter_names"
"""The function, which goes down by ``named_children()``, where the wrapper is not hidden."""


def plain_names(theirs: Callable[..., list[str]], clean: Callable[[str], str]) -> Callable[..., list[str]]:
    """``get_parameter_names``: of FSDP1's wrappers of ours, as ``named_parameters()`` has them."""

    @functools.wraps(theirs)
    def get_parameter_names(*args: Any, **kwargs: Any) -> list[str]:
        return [clean(name) for name in theirs(*args, **kwargs)]

    return get_parameter_names


def of_sharded(ours: Callable[..., Any], torchs: Callable[..., Any], torchs_class: type) -> Callable[..., Any]:
    """``ours``, a function on modules; ``torchs`` where it gets modules of torch's implementation, as replicated ones.

    Of `share_comm_ctx` and `register_fsdp_forward_method`, of which the first takes a list.
    """

    @functools.wraps(ours)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        modules = given[0] if given and isinstance(given[0], (list, tuple)) else given
        is_torchs = any(isinstance(each, torchs_class) for each in modules)
        return (torchs if is_torchs else ours)(*args, **kwargs)

    return function


def for_importers(module: ModuleType, ours: Callable[[object], object]) -> Callable[[], None]:
    """Let ``module``, of torch's implementation, show what ``ours`` makes of its names to everyone but torch.

    Programs import ``FSDPModule`` from where it is defined. Torch's own code, and the module's dict, see torch's.

    Returns:
        What undoes it.
    """

    class Shown(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            asks = sys._getframe(1).f_globals.get("__name__", "")
            return value if name.startswith("__") or asks.partition(".")[0] == "torch" else ours(value)

    before = module.__class__
    module.__class__ = Shown

    def undo() -> None:
        module.__class__ = before

    return undo


def pipelined(ours: Any, torchs: Any, ours_class: type) -> Callable[..., Any]:
    """``ours``, with a ``state`` of modules of both implementations: pipelining up to 2.14 ends backwards by it."""

    def state(module: nn.Module) -> Any:
        return (ours if isinstance(module, ours_class) else torchs).state(module)

    @functools.wraps(ours)
    def fully_shard(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    fully_shard.state = state  # type: ignore[attr-defined]
    return fully_shard


SPLIT_BACKWARDS = ("stage_backward_input", "stage_backward_weight")
"""Functions of pipelining: the two halves of a zero-bubble schedule's backward. They look for weights in the graph."""


def gathering(torchs: Callable[..., Any], ours_class: Any) -> Callable[..., Any]:
    """One of `SPLIT_BACKWARDS`, which finds the stage unsharded, although the forward before may have resharded it.

    Sharded weights are in no graph, and would get no gradient. It is given ``submod.parameters()``, which has looked
    up none yet. Collective, as stages of all ranks of a mesh go alike.
    """

    @functools.wraps(torchs)
    def split_backward(*args: Any, **kwargs: Any) -> Any:
        stage = sys._getframe(1).f_locals["self"]  # whose method calls it, or a lambda in that
        for module in stage.submod.modules():
            if isinstance(module, ours_class):
                module.unshard(async_op=True).wait()  # not as one's that a program computes with, outside of forward
        return torchs(*args, **kwargs)

    return split_backward


def both_states(ours: Any, torchs: Callable[[nn.Module], Any], ours_class: type, offloading: str) -> Callable[..., Any]:
    """``_get_module_fsdp_state``, for modules of both. Torch's own, at ``offloading``, goes on seeing its own only."""

    def _get_module_fsdp_state(module: nn.Module) -> Any:
        if not isinstance(module, ours_class) or sys._getframe(1).f_globals.get("__name__") == offloading:
            return torchs(module)
        return ours.state(module)

    return _get_module_fsdp_state


def both_mappings(
    ours: Callable[[], MutableMapping[type, type]], torchs: Callable[[], MutableMapping[type, type]]
) -> Callable[[], Mapping[type, type]]:
    """``get_cls_to_fsdp_cls``, for the classes of both implementations. `torch._dynamo` writes guards with it."""

    def get_cls_to_fsdp_cls() -> Mapping[type, type]:
        return ChainMap(ours(), torchs())

    return get_cls_to_fsdp_cls


def both_contexts(
    ours: Callable[[], AbstractContextManager[Any]], torchs: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], AbstractContextManager[None]]:
    """``disable_fsdp_module_new_init``, for both implementations. `torch._dynamo` reads guards under it."""

    @contextmanager
    def disable_fsdp_module_new_init() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(ours())
            stack.enter_context(torchs())
            yield

    return disable_fsdp_module_new_init


def serve_both(torchs: Any, ours: Any) -> Callable[[], None]:
    """Let the static methods of ``ours``, FSDP1's wrapper, go by the model that they get, and have torch's others too.

    Torch's class calls them by its own name, which stands for ``ours``: programs ask ``type(model) is`` that.

    Returns:
        What undoes it.
    """

    def by_model(name: str, own: Any) -> Any:
        theirs = getattr(torchs, name)

        @functools.wraps(theirs if own is None else own)
        def method(*args: Any, **kwargs: Any) -> Any:
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, nn.Module)]
            is_torchs = any(isinstance(each, torchs) for module in given for each in module.modules())
            return (theirs if is_torchs or own is None else own)(*args, **kwargs)

        return staticmethod(method)

    before = {name: vars(ours).get(name) for name, value in vars(torchs).items() if isinstance(value, staticmethod)}
    for name, own in before.items():
        setattr(ours, name, by_model(name, None if own is None else own.__func__))

    def undo() -> None:
        for name, own in before.items():
            if own is None:
                delattr(ours, name)
            else:
                setattr(ours, name, own)

    return undo


def beneath(torchs: Any, ours: type) -> type:
    """A class that torch's own FSDP1 may go on making instances of, and nobody else: they get ``ours``' refusal."""

    class Beneath(type(torchs)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed.fsdp."):
                return super().__call__(*args, **kwargs)
            return ours(*args, **kwargs)

    return Beneath(ours.__name__, (torchs,), {"__module__": __name__, "__doc__": ours.__doc__})


def state_of_wrapper(torchs: Callable[[nn.Module], Any], ours_class: type) -> Callable[[nn.Module], Any]:
    """``_get_module_fsdp_state_if_fully_sharded_module``, for FSDP1's wrappers of both: a wrapper is its own state."""

    @functools.wraps(torchs)
    def state(module: nn.Module) -> Any:
        return module if isinstance(module, ours_class) else torchs(module)

    return state


def initialized_lazily(torchs: Callable[[Any, nn.Module], Any], ours_class: type) -> Callable[[Any, nn.Module], Any]:
    """``_lazy_init``, which programs call of a wrapper that they are about to move: ours has nothing to initialize."""

    @functools.wraps(torchs)
    def lazy_init(state: Any, module: nn.Module) -> Any:
        return state if isinstance(state, ours_class) else torchs(state, module)

    return lazy_init
