"""One training step, cut into phases that the measurements run one at a time."""

from __future__ import annotations

from enum import Enum

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from benchmarks.implementations import ShardingOptions, build_contender, clipping_of
from benchmarks.models import ModelSpec

# So small that the parameters stay where they started, however many steps are measured.
LEARNING_RATE = 1e-6
# Between steps, in place of the arbitrary values that the fake process group's reductions deliver.
GRADIENT_VALUE = 1e-3


class Phase(Enum):
    """The parts of a training step, in their order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CLIP = "clip"
    ADAMW_FOREACH = "AdamW foreach"
    ADAMW_FUSED = "AdamW fused"
    ZERO_GRAD = "zero_grad"


WHOLE_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.CLIP, Phase.ADAMW_FOREACH, Phase.ZERO_GRAD)
"""What an ordinary program runs, with one of the optimizers."""


class Trainer:
    """A model under one implementation, its optimizers, and the loss handed from forward to backward.

    Both optimizers step in every iteration, each with its own state.
    """

    def __init__(self, name: str, spec: ModelSpec, *, mesh: DeviceMesh, options: ShardingOptions) -> None:
        self.name = name
        self.spec = spec
        self.model, self.inputs = build_contender(name, spec, mesh=mesh, options=options)
        self.parameters = tuple(self.model.parameters())
        self._foreach = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0, foreach=True)
        self._fused = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self._clip = clipping_of(name)
        self._loss: torch.Tensor | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one of the phase AdamW foreach."""
        return self._foreach

    def kept_storages(self) -> list[torch.UntypedStorage]:
        """Memory that a pool of fsdp2 keeps for later uses; it is live, though no tensor lies on it."""
        state = getattr(self.model, "_get_fsdp_state", None)
        root = getattr(state(), "root", None) if state is not None else None
        return root.comm.pooled_storages() if root is not None else []

    def run(self, phase: Phase) -> None:
        """Runs one phase. Phases of a step come in the order of `Phase`; optimizer phases may be left out."""
        if phase is Phase.FORWARD:
            self._loss = self.model(self.inputs)
        elif phase is Phase.BACKWARD:
            assert self._loss is not None, "backward without forward"
            self._loss.backward()
            self._loss = None
        elif phase is Phase.CLIP:
            own = getattr(self.model, "clip_grad_norm_", None)  # FSDP1's, which knows that gradients are flat
            if own is None:
                self._clip(self.parameters, max_norm=1.0)
            else:
                own(1.0)
        elif phase is Phase.ADAMW_FOREACH:
            self._foreach.step()
        elif phase is Phase.ADAMW_FUSED:
            self._fused.step()
        else:
            self._foreach.zero_grad(set_to_none=True)

    def warm_up(self, steps: int) -> None:
        """Runs whole steps: lazy initialization, the learned order of groups, DTensor's sharding caches."""
        for _ in range(steps):
            self.run(Phase.FORWARD)
            self.run(Phase.BACKWARD)
            self.tame_gradients()
            self.run(Phase.CLIP)
            self.run(Phase.ADAMW_FOREACH)
            self.run(Phase.ADAMW_FUSED)
            self.run(Phase.ZERO_GRAD)

    @torch.no_grad()
    def tame_gradients(self) -> None:
        """Overwrites the gradients: arithmetic on the NaNs or denormals of the fake group may be slow."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None and not parameter.numel():
                continue  # under FSDP1, of a parameter of which this rank holds nothing
            if gradient is None:
                raise RuntimeError(
                    f"implementation '{self.name}' left a parameter of shape {tuple(parameter.shape)} "
                    "without gradient after backward: what follows would not be comparable"
                )
            local_tensor(gradient).fill_(GRADIENT_VALUE)

    @torch.no_grad()
    def check_finite(self) -> None:
        """Raises RuntimeError when a parameter holds a NaN or an infinity, which distorts timings."""
        for parameter in self.parameters:
            if not local_tensor(parameter).isfinite().all():
                raise RuntimeError(f"implementation '{self.name}': NaN or infinity in a parameter distorts timings")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`: the local tensor of a DTensor, otherwise the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
