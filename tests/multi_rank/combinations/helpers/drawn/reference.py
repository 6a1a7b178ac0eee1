"""What a drawn program stands for: the plain model, trained as all data-parallel ranks together would train it.

Owns the arithmetic; knows nothing of sharding but which parameters are reduced by which unit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp2
from tests.multi_rank.combinations.helpers.drawn.model import OWN, build, inputs
from tests.multi_rank.combinations.helpers.drawn.programs import Program

MAX_NORM = 0.5

Gradients = dict[str, Tensor | None]


class Plain:
    """The plain model.

    Args:
        program: What to train.
        size, rank: How many data-parallel ranks there are, and which is this one.
        unit_of: The unit that reduces each parameter.
        modules_of: The names of that unit's modules; none for the root.
    """

    def __init__(
        self,
        program: Program,
        *,
        size: int,
        rank: int,
        unit_of: Mapping[str, int],
        modules_of: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.program = program
        self.size, self.rank = size, rank
        self.unit_of, self.modules_of = unit_of, modules_of
        self.model = build(program)
        self.worker = copy.deepcopy(self.model)
        for name, parameter in self.worker.named_parameters():
            dtype, _ = program.dtypes_of(name)
            if dtype and name != OWN and parameter.is_floating_point():
                parameter.data = parameter.data.to(getattr(torch, dtype))
        if program.buffer_dtype:
            self.worker.turn = self.worker.turn.to(getattr(torch, program.buffer_dtype))
        self.optimizer = make_optimizer(program, list(self.model.parameters()))
        self.factors: dict[int, float] = {}
        self.hooked: set[int] = set()
        self.zeros_for_unused = False

    def change_settings(self, step: int) -> None:
        for name, value, when, _ in self.program.settings:
            if when != step:
                continue
            if name == "divide_factor":
                self.factors[value[0]] = value[1]
            elif name == "reduction":
                number = {"mean": self.size, "sum": 1.0}.get(value, value[1] if isinstance(value, tuple) else value)
                self.factors = dict.fromkeys(range(len(self.program.units)), number)
            elif name == "all_reduce_hook":
                self.hooked.add(value)
            elif name == "unused_params":
                self.zeros_for_unused = True
            elif name == "refreeze":
                for model in (self.model, self.worker):
                    model.blocks[0].feed.requires_grad_(value)

    def passes(self, step: int) -> list[Tensor]:
        """Adds the gradients of a step; returns this rank's losses."""
        program = self.program
        with torch.no_grad():
            for mine, theirs in zip(self.worker.parameters(), self.model.parameters(), strict=True):
                mine.copy_(theirs)
        losses, per_pass = [], []
        for number in range(len(program.forwards)):
            per_rank = []
            for rank in range(self.size):
                self.worker.zero_grad()
                loss = self._loss(step, number, rank)
                loss.backward()
                per_rank.append({name: parameter.grad for name, parameter in self.worker.named_parameters()})
                if rank == self.rank:
                    losses.append(loss.detach())
            per_pass.append(per_rank)
        together = program.accumulation in ("no_sync", "manual_no_sync", "synchronized", "partial", "mixed")
        for passes in [per_pass] if together else [[each] for each in per_pass]:
            self._reduce([_sum(list(of_rank), self._sum_dtypes()) for of_rank in zip(*passes, strict=True)])
        if self.zeros_for_unused:
            self._fill(step)
        return losses

    def _sum_dtypes(self) -> dict[str, torch.dtype]:
        names = dict(self.model.named_parameters())
        return {name: getattr(torch, self.program.dtypes_of(name)[1] or "float32") for name in names}

    def _loss(self, step: int, number: int, rank: int) -> Tensor:
        total: Any = 0.0
        for forward in range(self.program.forwards[number]):
            x, y, use = inputs(self.program, step, number, forward, rank)
            if self.program.param_dtype:
                x = x.to(getattr(torch, self.program.param_dtype))
            output = self.worker(x, use, self.program.model.skipped[step])
            total = total + F.mse_loss(output.float(), y)
        return total  # type: ignore[no-any-return]

    def _reduce(self, per_rank: list[Gradients]) -> None:
        total = _sum(per_rank, dict.fromkeys(per_rank[0], torch.float32))
        for name, parameter in self.model.named_parameters():
            gradient = total[name]
            if gradient is not None:
                unit = self.unit_of.get(name, -1)
                mean = gradient / self.factors.get(unit, self.size) * (2 if unit in self.hooked else 1)
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean

    def _fill(self, step: int) -> None:
        """Zeros for trainable parameters without gradient, of the units that took part, or may have on some rank."""
        skipped = self.program.model.skipped[step] if self.program.accumulation != "synchronized" else None
        for name, parameter in self.model.named_parameters():
            modules = self.modules_of.get(name, ())
            inactive = bool(modules) and all(module.startswith(f"blocks.{skipped}") for module in modules)
            if parameter.requires_grad and parameter.grad is None and name != OWN and not inactive:
                parameter.grad = torch.zeros_like(parameter)

    def optimize(self) -> Tensor | None:
        """Clip, step, clear. Returns the norm of the gradients before, where they are clipped."""
        norm = None
        if self.program.clip != "no":
            with_own = self.program.clip == "fsdp2"
            clipped = [p for n, p in self.model.named_parameters() if n != OWN or with_own]
            norm = nn.utils.clip_grad_norm_(clipped, MAX_NORM)
        self.optimizer.step()
        if self.program.zero in ("zeros", "module_zeros"):
            self.optimizer.zero_grad(set_to_none=False)
        elif self.program.zero != "keep":
            self.optimizer.zero_grad()
        return norm

    def parameters(self) -> Gradients:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def gradients(self) -> Gradients:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


def _sum(terms: list[Gradients], dtypes: Mapping[str, torch.dtype]) -> Gradients:
    total: Gradients = dict.fromkeys(terms[0])
    for term in terms:
        for name, gradient in term.items():
            before = total[name]
            if gradient is not None:
                gradient = gradient.to(dtypes[name])
                total[name] = gradient if before is None else before + gradient
    return total


def make_optimizer(program: Program, parameters: list[nn.Parameter], kind: str = "plain") -> torch.optim.Optimizer:
    """Momentum makes every earlier gradient count. ``kind``: as `Program.optimizer`."""
    arguments: dict[str, Any] = {"lr": learning_rate(program), "momentum": 0.5}
    if kind == "plain":
        # Parameters of several meshes do not meet in one foreach call.
        return torch.optim.SGD(parameters, foreach=False, **arguments)
    return fsdp2.optim.local(torch.optim.SGD, parameters, flat=kind == "flat", foreach=True, **arguments)


def learning_rate(program: Program) -> float:
    """Small in bf16, where large steps would amplify differences in rounding from step to step."""
    return 0.005 if program.param_dtype else 0.05
