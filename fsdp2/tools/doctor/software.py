"""What is installed: Python, torch and whether it is one that fsdp2 knows, backends, and what the tools use."""

from __future__ import annotations

import importlib.util
import platform
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

import fsdp2
from fsdp2 import _torch
from fsdp2._versions import FIRST, LAST
from fsdp2.tools.doctor.finding import Finding

EXTRAS = {
    "rich": "tables in colours",
    "matplotlib": "pictures of timelines",
    "yaml": "configs in YAML",
    "tqdm": "progress bars",
    "tensorboard": "metrics in TensorBoard",
    "safetensors": "checkpoints in safetensors (fsdp2[safetensors])",
}
"""What the tools use if it is installed, and for what."""


def findings() -> Iterator[Finding]:
    """Look at all of it."""
    yield Finding(
        "fsdp2",
        "ok",
        f"fsdp2 {fsdp2.__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}.",
        values={"fsdp2": fsdp2.__version__, "python": platform.python_version()},
    )
    yield about_torch(str(torch.__version__))
    yield from _backends()
    yield _extras()


def about_torch(version: str) -> Finding:
    """Whether torch of this version is one that fsdp2 is tested on."""
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    tested = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
    values = {"torch": version, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if release < FIRST:
        return Finding(
            "torch", "problem", f"torch {version} is too old: fsdp2 needs {tested}.", "Update torch.", values
        )
    if release > LAST:
        what = f"torch {version} is newer than what fsdp2 is tested on ({tested})."
        return Finding("torch", "warning", what, "Update fsdp2, or use a torch of this range.", values)
    swaps = "" if _torch.can_swap_memory else " It is too old for the communication memory pool (2.13)."
    return Finding("torch", "ok", f"torch {version} is in the tested range ({tested}).{swaps}", values=values)


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("backend", "problem", "This torch was built without torch.distributed.", "Install another build.")
        return
    known = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    there = ", ".join(name for name, is_there in known.items() if is_there)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    values = {"backends": there.split(", "), "accelerator": str(accelerator), "devices": count}
    if accelerator is None:
        what = f"There is no accelerator: ranks compute on the CPU. Backends of this torch: {there}."
        yield Finding("backend", "note", what, values=values)
        return
    what = f"{count} devices of type {accelerator.type}. Backends of this torch: {there}."
    if accelerator.type == "cuda" and not known["nccl"]:
        remedy = "Install a torch with NCCL; gloo moves everything through the host."
        yield Finding("backend", "problem", what + " NCCL is not among them.", remedy, values)
        return
    if accelerator.type == "cuda":
        values["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        what += f" NCCL {values['nccl']}."
    yield Finding("backend", "ok", what, values=values)


def _extras() -> Finding:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    values = {"missing": missing}
    if not missing:
        return Finding("extras", "ok", "All that the tools can use is installed.", values=values)
    lacking = "; ".join(f"{name}: {EXTRAS[name]}" for name in missing)
    what = f"Not installed, and needed for nothing else: {lacking}."
    return Finding("extras", "note", what, "pip install 'fsdp2[tools]'", values)
