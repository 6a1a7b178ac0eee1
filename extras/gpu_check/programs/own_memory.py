"""Collectives in memory that the process group allocates, or that all ranks can see."""

from __future__ import annotations

from extras.gpu_check.programs.stacks import differing, plainly_trained, sharded, stack, train
from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting

STEPS = 4


def run(setting: Setting) -> Found:
    """Options: ``of``: the group, or symmetric."""
    width = setting.pick(1024, 32)
    with setting.group(binds_device=True):
        model = sharded(stack(setting, width))
        for each in (*model, model):
            if setting.is_rehearsal:
                continue  # gloo has neither
            if setting.options["of"] == "group":
                each.set_allocate_memory_from_process_group_for_comm(True)
            else:
                each.set_symm_mem_for_comm()
        losses = train(setting, model, width, STEPS)
        said = differing(losses, plainly_trained(setting, width, STEPS), tolerance=1e-4)
    return {"losses": losses, COMPLAINTS: [said] if said else []}
