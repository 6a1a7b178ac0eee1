"""The oracle of every multi-rank test: the plain model, trained in one process as if on W ranks.

Owns the arithmetic that data parallelism stands for, in its most obvious form; knows nothing of sharding, of
collectives or of the engine. Every rank of a test trains its own reference (no communication).

[Note: bitwise]
    Gradients are averaged as `(g_0 + g_1 + ... + g_{W-1}) / W`, in rank order. On 2 ranks a sum has one
    rounding whatever its order, and a division by a power of two none (short of underflow): an engine that
    computes in the same dtype must agree bit for bit. On 4 ranks the order of the sum is the collective's own
    affair, so comparisons there need a tolerance.

    A shard is a piece of a parameter: its elements lie elsewhere in the processor's vectors, and more or fewer of them
    in the tail that scalar code computes. Sums, products, quotients and roots in fp32 are rounded each for itself, so
    the for-loop and foreach optimizers of torch give the same bits wherever an element lies. That cannot be promised
    of fused optimizers (products and sums contracted in one of the two codes), of transcendental functions (other
    polynomials in vectors), of bf16 arithmetic with a factor (`add` with `alpha`), and of sums over all elements of a
    shard (norms): comparisons of these need a tolerance, `FUSED` or a wider one. Forwards and backwards compute on
    whole parameters, like the reference, and so are exact. `tests/unit/test_bits.py` shows all this for the
    processor at hand; `python -m tests.arithmetic` runs on each vector width that it has.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.harness.device import DEVICE
from tests.harness.models import ModelCase

Gradients = dict[str, Tensor | None]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Accumulation(enum.Enum):
    """Where several microbatches of a step add up; the two differ in rounding."""

    REDUCE_EACH = "average over ranks after each microbatch, add up the averages"
    REDUCE_LAST = "add up on each rank, average once (`set_requires_gradient_sync`)"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step of the reference did.

    Attributes:
        step: Number of the step, from 0.
        losses: `losses[rank][micro]`, fp32 scalars.
        gradients: Average over ranks by FQN, before clipping; None where no rank had one.
        gradient_norm: Total norm before clipping, where `max_norm` was given.
        parameters: By FQN, after the optimizer's step.
    """

    step: int
    losses: tuple[tuple[Tensor, ...], ...]
    gradients: Gradients
    gradient_norm: Tensor | None
    parameters: dict[str, Tensor]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of most tests: its state depends on every gradient so far.

    The large `eps` keeps `m / (sqrt(v) + eps)` well-conditioned: with the default, a gradient of rounding
    errors alone moves a parameter as far as any other, and no tolerance above 2 ranks could be small.
    """
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


class Reference:
    """Trains `case`'s model without sharding, as `world_size` ranks would together.

    Args:
        case: Model and data.
        world_size: Simulated ranks.
        make_optimizer: Makes the optimizer from the trainable parameters.
        microbatches: Backward passes per step.
        accumulation: Where these add up.
        max_norm: Clips the total gradient norm before the optimizer's step.
        param_dtype: Dtype of parameters and floating inputs in forward and backward; the optimizer's
            parameters keep their own.
        grad_dtype: Dtype of the gradient that autograd hands out and accumulates on each rank; that of the
            parameter (`param_dtype`) if None. torch's `fully_shard` sets it to the reduce dtype from 2.15
            on, before it left the gradient in `param_dtype`.
        reduce_dtype: Dtype in which gradients are summed over ranks; that of the gradients if None. (torch's
            `reduce_dtype=None` means `param_dtype` up to 2.14, the optimizer's dtype from 2.15 on.)
        seed: Of the model and of the data.
        device: Of the model and of the data, which are made on CPU.
        model: Trained in place of `case.build(seed)`.

    Example:
        >>> reference = Reference(MLP, world_size=2)
        >>> reference.step().gradients["0.weight"]
    """

    def __init__(
        self,
        case: ModelCase,
        *,
        world_size: int,
        make_optimizer: MakeOptimizer = adamw,
        microbatches: int = 1,
        accumulation: Accumulation = Accumulation.REDUCE_EACH,
        max_norm: float | None = None,
        param_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        seed: int = 0,
        device: torch.device | str = DEVICE,
        model: nn.Module | None = None,
    ) -> None:
        self.case = case
        self.world_size = world_size
        self.microbatches = microbatches
        self.accumulation = accumulation
        self.max_norm = max_norm
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.seed = seed
        self.device = torch.device(device)
        self.model = (model if model is not None else case.build(seed)).to(self.device)
        self.optimizer = make_optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.steps_done = 0
        # Runs forward and backward, with the optimizer's parameters in `param_dtype`.
        self._worker = copy.deepcopy(self.model)
        if param_dtype is not None:
            self._worker.to(param_dtype)
        if grad_dtype is not None:
            for parameter in self._worker.parameters():
                parameter.grad_dtype = grad_dtype

    def step(self) -> StepRecord:
        """One training step of all simulated ranks."""
        self._refresh_worker()
        losses: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        per_micro: list[list[Gradients]] = []
        for micro in range(self.microbatches):
            per_rank = []
            for rank in range(self.world_size):
                loss, gradients = self._forward_backward(rank, micro)
                losses[rank].append(loss)
                per_rank.append(gradients)
            per_micro.append(per_rank)
        averaged = self._accumulate(per_micro)
        norm = self._optimize(averaged)
        self.steps_done += 1
        return StepRecord(
            step=self.steps_done - 1,
            losses=tuple(map(tuple, losses)),
            gradients=averaged,
            gradient_norm=norm,
            parameters={name: p.detach().clone() for name, p in self.model.named_parameters()},
        )

    def run(self, steps: int) -> list[StepRecord]:
        """`steps` training steps."""
        return [self.step() for _ in range(steps)]

    def _refresh_worker(self) -> None:
        """Copies the optimizer's parameters to the model that computes."""
        with torch.no_grad():
            for mine, theirs in zip(self._worker.parameters(), self.model.parameters(), strict=True):
                mine.copy_(theirs)

    def _forward_backward(self, rank: int, micro: int) -> tuple[Tensor, Gradients]:
        """Loss and gradients of one rank on its own batch."""
        self._worker.zero_grad(set_to_none=True)
        batch = self.case.batch(self.seed, self.steps_done, rank, micro).to(self.param_dtype, self.device)
        loss = self.case.loss(self._worker, batch)
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in self._worker.named_parameters()}

    def _accumulate(self, per_micro: list[list[Gradients]]) -> Gradients:
        """Gradients of the step in the parameters' dtype, from `per_micro[micro][rank]`."""
        if self.accumulation is Accumulation.REDUCE_LAST:
            per_rank = [add_gradients(list(of_rank)) for of_rank in zip(*per_micro, strict=True)]
            return self._average(per_rank)
        return add_gradients([self._average(per_rank) for per_rank in per_micro])

    def _average(self, per_rank: list[Gradients]) -> Gradients:
        """See [Note: bitwise]. A rank without a gradient counts as zero, if another rank has one."""
        if self.reduce_dtype is not None:
            per_rank = [
                {name: g if g is None else g.to(self.reduce_dtype) for name, g in of_rank.items()}
                for of_rank in per_rank
            ]
        dtypes = {name: p.dtype for name, p in self.model.named_parameters()}
        return {
            name: total if total is None else (total / self.world_size).to(dtypes[name])
            for name, total in add_gradients(per_rank).items()
        }

    def _optimize(self, gradients: Mapping[str, Tensor | None]) -> Tensor | None:
        """Clips, steps the optimizer, drops the gradients; returns the total norm if clipping."""
        for name, parameter in self.model.named_parameters():
            gradient = gradients[name]
            parameter.grad = None if gradient is None else gradient.clone()
        norm = None
        if self.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def add_gradients(terms: list[Gradients]) -> Gradients:
    """Sum by FQN, first term first; None only where every term is None."""
    total: Gradients = dict.fromkeys(terms[0])
    for term in terms:
        for name, gradient in term.items():
            before = total[name]
            if gradient is not None:
                total[name] = gradient if before is None else before + gradient
    return total
