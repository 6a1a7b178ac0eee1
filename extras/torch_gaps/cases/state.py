"""State dicts."""

from __future__ import annotations

import copy

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from extras.torch_gaps.checks import WIDTH, expect_same_parameters, expect_trains_alike
from extras.torch_gaps.registry import Trial, case

AREA = "State dicts"


def _models(trial: Trial) -> tuple[nn.Sequential, nn.Sequential]:
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, WIDTH))
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        nn.init.uniform_(parameter)
    trial.api.fully_shard(model[0])
    trial.api.fully_shard(model)
    return model, plain


@case(AREA, "`load_state_dict` of a full (plain) state dict", asked="verl#1667 pytorch#149640 accelerate#3482")
def full_state_dict(trial: Trial) -> None:
    model, plain = _models(trial)
    model.load_state_dict(plain.state_dict())
    expect_trains_alike(trial, model, plain)


@case(AREA, "the same with `set_model_state_dict(options=StateDictOptions(full_state_dict=True))`")
def full_state_dict_by_options(trial: Trial) -> None:
    model, plain = _models(trial)
    set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    expect_trains_alike(trial, model, plain)


@case(AREA, "a full state dict on every rank, by `get_model_state_dict`", asked="pytorch#136336 NeMo-RL#279")
def full_state_dict_out(trial: Trial) -> None:
    model, _ = _models(trial)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    loaded = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, WIDTH))
    loaded.load_state_dict(state)
    expect_same_parameters(model, loaded)
