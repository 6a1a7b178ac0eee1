"""Runs a program of a page of docs/ as it stands, and then says whose its model is: see tests/clients/test_recipes.py.

Usage:
    torchrun --nproc-per-node 2 [-m fsdp2.compat] recipe.py PROGRAM [arguments]
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch import nn
from trial import implementation


def let_accelerate_shard_on_cpu() -> None:
    """Accelerate shards on accelerators only: call what it finds here one of several GPUs."""
    from accelerate import state

    make: Any = state.PartialState.__init__

    def made(self: Any, cpu: bool = False, **options: Any) -> None:
        make(self, True, **options)  # it takes gloo for several processes only where it is told of the CPU
        if self._shared_state["distributed_type"] == state.DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = state.DistributedType.MULTI_GPU

    state.PartialState.__init__ = made


def main() -> None:
    """Run it; rank 0 prints a line."""
    program = sys.argv[1]
    text = Path(program).read_text()
    if importlib.util.find_spec("accelerate") and ("accelerate" in text or "transformers" in text):
        let_accelerate_shard_on_cpu()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
    found = runpy.run_path(program, run_name="__main__")
    model = found.get("model")
    if int(os.environ.get("RANK", "0")) == 0:
        trained = getattr(found.get("trainer"), "model_wrapped", model)
        print("the model is sharded by", implementation(trained) if isinstance(trained, nn.Module) else "nobody")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # see `trial.finish`


if __name__ == "__main__":
    main()
