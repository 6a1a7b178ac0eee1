"""Saving and loading a run with `torch.distributed.checkpoint` (DCP).

Each rank writes its own shards and reads whichever parts of the files its shards need, so a checkpoint loads
on another number of ranks than it was saved on.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lm.errors import UserError


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, fingerprint: int
) -> None:
    """Write the weights, the optimizer's state, `step` and the data's `fingerprint`. Every rank calls it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    progress = {"step": step, "fingerprint": fingerprint}
    state = {"model": model_state, "optimizer": optimizer_state, "progress": progress}
    dcp.save(state, checkpoint_id=path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, fingerprint: int) -> int:
    """Fill `model` and `optimizer` from `path`; return the step reached. Every rank calls it.

    Raises:
        UserError: the run was trained on another text than `fingerprint` stands for.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    progress = {"step": 0, "fingerprint": 0}
    state = {"model": model_state, "optimizer": optimizer_state, "progress": progress}
    dcp.load(state, checkpoint_id=path)
    if progress["fingerprint"] != fingerprint:
        raise UserError(
            "--resume: the text is not the one this run was trained on (other files, or another Python); "
            "name the same --data, or start a new run"
        )
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return progress["step"]
