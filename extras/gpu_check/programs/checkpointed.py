"""A checkpoint that is saved, loaded into a fresh model, and trained on; parameters reshard to fewer ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from extras.gpu_check.programs.stacks import batch, sharded, stack
from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting

STEPS = 3


def _train(setting: Setting, model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    width = setting.pick(512, 33)
    for step in range(first, first + STEPS):
        model(batch(setting, width, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(setting: Setting) -> Found:
    """The model that was loaded, and the one that went on, are the same bit by bit."""
    width = setting.pick(512, 33)
    fewer = 2 if setting.ranks > 2 and setting.ranks % 2 == 0 else True
    folder = Path(setting.store).with_name("checkpoint")
    complaints = []
    with setting.group():
        models = [sharded(stack(setting, width), reshard_after_forward=fewer) for _ in range(2)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        _train(setting, models[0], optimizers[0], 0)
        state, of_optimizer = get_state_dict(models[0], optimizers[0])
        dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
        state, of_optimizer = get_state_dict(models[1], optimizers[1])
        loaded = {"model": state, "optimizer": of_optimizer}
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(models[1], optimizers[1], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        for when in ("when it is loaded", "trained on"):
            for (name, found), expected in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
                if not torch.equal(found.to_local(), expected.to_local()):
                    complaints.append(f"{name} differs {when}")
            for model, optimizer in zip(models, optimizers, strict=True):
                _train(setting, model, optimizer, STEPS)
    return {"reshards_to": int(fewer), COMPLAINTS: complaints}
