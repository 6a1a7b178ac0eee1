"""The state of optimizers by names of parameters, whole or sharded, and back: what FSDP1's static methods do."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fsdp2
from fsdp2.compat.fsdp1 import whole
from fsdp2.compat.fsdp1.config import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp2.compat.fsdp1.names import clean, named_parameters

StateDict = dict[str, Any]


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The first clean name of every parameter, as optimizers hold it."""
    names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters(model):
        names.setdefault(parameter, name)
    return names


def state_of(
    model: nn.Module, optimizer: Optimizer, given: StateDict | None, settings: Any, ranks: whole.Ranks
) -> StateDict:
    """``{"state": {name: ...}, "param_groups": [...]}`` with the names of parameters in both.

    In the order of the model, in which ranks agree: their optimizers may have the parameters in another one.

    ``given``: what the optimizer's ``state_dict()`` returned, if not what it returns now. Collective, if whole.

    Raises:
        FSDPRuntimeError: whole, and ranks have other states.
    """
    fsdp2.optim.guard.rekey(optimizer)
    given = optimizer.state_dict() if given is None else given
    names, indices = names_of(model), _indices(optimizer)
    is_full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
    config = settings.optim_state_dict_config
    drops = is_full and config.rank0_only and not ranks.is_first
    keys = {key: _name(names, parameter) for key, parameter in _keys(given, indices, names).items()}
    found: StateDict = {keys.get(key, key): _copied(entry) for key, entry in given["state"].items()}
    order = {name: index for index, name in enumerate(names.values())}
    state: StateDict = dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))
    places = [
        (inside, what)
        for inside in (state, *(entry for entry in state.values() if isinstance(entry, dict)))
        for what, value in inside.items()
        if isinstance(value, torch.Tensor)
    ]
    tensors, offload = [inside[what] for inside, what in places], config.offload_to_cpu
    if is_full:
        _refuse_difference(names, state)
        made = whole.wholes(tensors, offload=offload, keep=not drops)
    else:
        made = [_sharded(each, offload) for each in tensors]
    if drops:
        return {}
    for (inside, what), value in zip(places, made, strict=True):
        inside[what] = value
    groups = [
        {
            **{what: copy.deepcopy(value) for what, value in group.items() if what not in ("params", "param_names")},
            "params": [keys.get(key, key) for key in group["params"]],
        }
        for group in given.get("param_groups", ())
    ]
    return {"state": state, "param_groups": groups} if "param_groups" in given else {"state": state}


def _refuse_difference(names: dict[nn.Parameter, str], state: StateDict) -> None:
    """See that all ranks gather the same, before one waits for what never comes. Collective over every mesh."""
    difference = ""  # told after all meshes: a rank that left early would be missed in the next one
    for mesh in dict.fromkeys(each.device_mesh for each in names if isinstance(each, DTensor)):
        lines = [
            f"'{what}' {list(value.shape)} {value.dtype} of '{name}'"
            for name, entry in state.items()
            if isinstance(entry, dict)
            for what, value in entry.items()
            if isinstance(value, DTensor) and value.device_mesh == mesh
        ]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()  # the lines of all ranks would be much
        if len(set(_of_all(digest, mesh).values())) == 1:
            continue
        (first, mine), *others = sorted(_of_all(lines, mesh).items())
        other, theirs = next((rank, each) for rank, each in others if each != mine)
        lacks, more = ([line for line in one if line not in two][:3] for one, two in ((mine, theirs), (theirs, mine)))
        difference = f"rank {other} lacks {lacks} of rank {first}, which lacks {more} of it"
    if difference:
        raise fsdp2.FSDPRuntimeError(
            "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but "
            f"some ranks are missing some of those states: {difference}. Build it on the same parameters on all ranks."
        )


def _of_all(value: Any, mesh: DeviceMesh) -> dict[int, Any]:
    """The ``value`` of every rank of ``mesh``. Collective."""
    found = {dist.get_rank(): value}
    for dim in range(mesh.ndim):
        every: list[Any] = [None] * mesh.size(dim)
        dist.all_gather_object(every, found, group=mesh.get_group(dim))
        found = {rank: each for part in every for rank, each in part.items()}
    return found


def _copied(entry: Any) -> Any:
    """A mapping of its own; what is none, as only a state that is of no parameter can be, is copied too."""
    if isinstance(entry, Mapping) and not isinstance(entry, dict):
        return dict(entry)
    return entry if isinstance(entry, torch.Tensor) else copy.copy(entry)


def _indices(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _keys(given: StateDict, indices: list[nn.Parameter], names: dict[nn.Parameter, str]) -> dict[Any, nn.Parameter]:
    """Whose each key of ``given`` is: an index, or (of a named optimizer) a name."""
    groups = given.get("param_groups")
    keys = list(given["state"]) if groups is None else [key for group in groups for key in group["params"]]
    if all(isinstance(key, int) for key in keys):
        return dict(enumerate(indices)) if groups is None else dict(zip(keys, indices, strict=True))
    by_name = {name: parameter for parameter, name in names.items()}
    return {key: by_name[_plain(key)] for key in keys if _plain(key) in by_name}


def _plain(key: Any) -> Any:
    """A name without prefixes: those of torch's `set_state_dict` have `_orig_mod.` in them. Else the key."""
    return clean(key) if isinstance(key, str) else key


def _name(names: dict[nn.Parameter, str], parameter: nn.Parameter) -> str:
    if parameter not in names:
        raise fsdp2.FSDPValueError(
            f"the optimizer has a parameter of shape {list(parameter.shape)} that the model does not have: build the "
            "optimizer on the parameters of the wrapped model, after wrapping."
        )
    return names[parameter]


def _sharded(value: torch.Tensor, offload: bool) -> torch.Tensor:
    if value.dim() == 0:  # a step is on the CPU already, and would count on in what was saved
        return value.clone()
    return value.cpu() if offload else value


def state_to_load(
    model: nn.Module,
    optimizer: Optimizer,
    given: StateDict,
    settings: Any,
    ranks: whole.Ranks,
    *,
    is_named_optimizer: bool = False,
) -> StateDict:
    """What ``optimizer.load_state_dict`` takes: the state placed as the parameters are. Collective, if on rank 0 only.

    A state that is of no parameter, which the program has put there, is left as it is.

    Raises:
        FSDPRuntimeError: a parameter's name that the model does not have.
    """
    if isinstance(optimizer, Optimizer):
        fsdp2.optim.guard.rekey(optimizer)
    names = names_of(model)
    by_name: dict[str, nn.Parameter] = {name: parameter for name, parameter in named_parameters(model)}
    is_full, config = settings.state_dict_type is StateDictType.FULL_STATE_DICT, settings.optim_state_dict_config
    if is_full and config.rank0_only:
        given = _from_first_rank(given, by_name, ranks)
    mine = {names[parameter] for parameter in _indices(optimizer) if parameter in names}
    saved_groups = list(given.get("param_groups", ()))
    state: StateDict = {}
    others: StateDict = {}
    for name, entry in given["state"].items():
        parameter = by_name.get(_plain(name))
        if parameter is None:
            if _is_of_a_parameter(name, entry, saved_groups):
                raise fsdp2.FSDPRuntimeError(f"the optimizer's state has '{name}', which the model does not have.")
            others[name] = _copied(entry)
            continue
        if names[parameter] not in mine:
            continue  # of a part of the model that this optimizer does not step on
        state[names[parameter]] = {what: _loaded(value, parameter, name) for what, value in entry.items()}
    saved = {
        names[by_name[name]]: index
        for index, group in enumerate(saved_groups)
        for name in map(_plain, group["params"])
        if name in by_name
    }
    groups = [
        _group(group, saved_groups, saved, names, position) for position, group in enumerate(optimizer.param_groups)
    ]
    if is_named_optimizer:
        return {"state": state | others, "param_groups": groups}
    numbers = {names[parameter]: index for index, parameter in enumerate(_indices(optimizer))}
    for group in groups:
        group["params"] = [numbers[name] for name in group["params"]]
    return {"state": {numbers[name]: entry for name, entry in state.items()} | others, "param_groups": groups}


def _is_of_a_parameter(key: Any, entry: Any, groups: list[dict[str, Any]]) -> bool:
    """Whether ``key`` is among the parameters of ``groups``; without any, whether there are tensors under it."""
    if groups:
        return any(key in group["params"] for group in groups)
    return isinstance(entry, Mapping) and any(isinstance(value, torch.Tensor) for value in entry.values())


def _group(
    group: dict[str, Any],
    saved_groups: list[dict[str, Any]],
    saved: dict[str, int],
    names: dict[nn.Parameter, str],
    position: int,
) -> dict[str, Any]:
    own = [_name(names, parameter) for parameter in group["params"]]
    at = next((saved[name] for name in own if name in saved), position)
    found = saved_groups[at] if at < len(saved_groups) else {}
    settings = {**group, **found}  # saved ones that the optimizer does not know yet too, as a scheduler's
    return {**{what: value for what, value in settings.items() if what != "param_names"}, "params": own}


def _loaded(value: Any, parameter: nn.Parameter, name: str) -> Any:
    if whole.is_sharded_tensor(value):
        return whole.from_sharded_tensor(value, parameter, name)
    if isinstance(value, torch.Tensor):
        found = whole.like(value, parameter)
        # All parameters of a flat one have the same tensor as their step in torch's FULL state: steps would add up.
        return found.clone() if found is value else found
    return value


def _from_first_rank(given: StateDict, by_name: dict[str, nn.Parameter], ranks: whole.Ranks) -> StateDict:
    """What the first rank has, on all: tensors one by one. Collective."""
    outline: Any = None
    if ranks.is_first:
        is_known = {name: _plain(name) in by_name for name in given["state"]}
        outline = {
            "state": {
                name: {what: _outline(value) for what, value in entry.items()}
                for name, entry in given["state"].items()
                if is_known[name]
            },
            # Of no parameter, and small; or to be refused.
            "others": {name: _on_cpu(entry) for name, entry in given["state"].items() if not is_known[name]},
            "param_groups": list(given.get("param_groups", ())),
        }
    outline = ranks.objects(outline)
    state: StateDict = outline["others"]
    for name, entry in outline["state"].items():
        state[name] = {}
        for what, form in entry.items():
            if not isinstance(form, _Form):
                state[name][what] = form
                continue
            parameter = by_name[_plain(name)]
            sent = given["state"][name][what] if ranks.is_first else None
            received = ranks.tensor(sent, torch.empty(form.shape, dtype=form.dtype, device=parameter.device))
            state[name][what] = whole.like(received, parameter)
    return {"state": state, "param_groups": outline["param_groups"]}


def _on_cpu(value: Any) -> Any:
    """Where every rank can read it, whatever device is its own."""
    if isinstance(value, dict):
        moved = copy.copy(value)  # of its own class, which may not be made of pairs: a Counter, a defaultdict
        for key, each in value.items():
            moved[key] = _on_cpu(each)
        return moved
    if type(value) in (list, tuple):
        return type(value)(map(_on_cpu, value))
    return value.cpu() if isinstance(value, torch.Tensor) else value


def full_settings(rank0_only: bool) -> Any:
    """Of whole tensors on the CPU."""
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config)


def sharded_settings() -> Any:
    """Of sharded tensors where they are."""
    config = ShardedOptimStateDictConfig(offload_to_cpu=False)
    return StateDictSettings(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), config)


def warn_of(optim_input: Any) -> None:
    """Say, as torch does, that nobody needs it."""
    if optim_input is not None:
        warnings.warn("The `optim_input` argument is deprecated: leave it out, or pass `optim`.", stacklevel=3)


def parameters_of(model: nn.Module, optim_input: Any, optimizer: Optimizer | None) -> list[nn.Parameter]:
    """In the order of the optimizer, of what it is built on, or of the model."""
    groups = optimizer_like(model, optim_input, optimizer).param_groups
    return [_at_rest(each) for group in groups for each in group["params"]]


def _at_rest(parameter: nn.Parameter) -> nn.Parameter:
    return fsdp2.optim.model_parameters.at_rest(parameter)


class _Like(NamedTuple):
    """What is asked of an optimizer that a program does not have at hand."""

    param_groups: list[dict[str, Any]]


def optimizer_like(model: nn.Module, optim_input: Any, optimizer: Optimizer | None) -> Any:
    """The optimizer, or its parameter groups as ``optim_input`` (what it is built on) tells them."""
    warn_of(optim_input)
    if optimizer is not None:
        return optimizer
    given = list(model.parameters() if optim_input is None else optim_input)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return _Like([{**each, "params": [_at_rest(p) for p in each["params"]]} for each in groups])


class _Form:
    """The shape and dtype of a tensor that is sent by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _outline(value: Any) -> Any:
    return _Form(value) if isinstance(value, torch.Tensor) and value.dim() else _on_cpu(value)


def rekeyed(given: StateDict, key_type: Any, model: nn.Module, parameters: Iterable[nn.Parameter]) -> StateDict:
    """``given`` with numbers in the place of names, or names in the place of numbers, as ``key_type`` says."""
    names = names_of(model)
    ordered = [_name(names, parameter) for parameter in parameters]
    to: dict[Any, Any] = dict(enumerate(ordered))
    if key_type is OptimStateKeyType.PARAM_ID:
        to = {name: number for number, name in to.items()}
        aliases = {name: names[parameter] for name, parameter in named_parameters(model)}
        to |= {alias: to[name] for alias, name in aliases.items() if name in to}
    found: StateDict = {"state": {to.get(_plain(key), key): entry for key, entry in given["state"].items()}}
    if "param_groups" in given:
        found["param_groups"] = [
            {**group, "params": [to.get(_plain(key), key) for key in group["params"]]}
            for group in given["param_groups"]
        ]
    return found
