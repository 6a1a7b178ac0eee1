"""Process groups made in one of the ways that users make them, with and without asynchronous all-gathers."""

from __future__ import annotations

from extras.gpu_check.programs.stacks import differing, plainly_trained, sharded, stack, train
from extras.gpu_check.says import COMPLAINTS, Found
from extras.gpu_check.setting import Setting

STEPS = 4
IN_REHEARSAL = {"nccl": "gloo", "cpu:gloo,cuda:nccl": "cpu:gloo"}


def run(setting: Setting) -> Found:
    """Options: ``backend`` (the default if none), ``binds`` its device, ``async``."""
    options = setting.options
    backend = options.get("backend")
    if setting.is_rehearsal and backend is not None:
        backend = IN_REHEARSAL[backend]
    complaints = []
    with setting.group(backend, binds_device="binds" in options):
        for width in setting.pick((64, 1024), (16, 512)):
            model = sharded(stack(setting, width))
            if "async" in options:
                model._set_unshard_async_op(True)
            losses = train(setting, model, width, STEPS)
            if said := differing(losses, plainly_trained(setting, width, STEPS), tolerance=1e-4):
                complaints.append(f"width {width}: {said}")
    return {COMPLAINTS: complaints}
