"""Runs a drawn program, sharded on all ranks and plain on each, and compares losses, gradients and parameters.

Owns the training of both; what fsdp2 must compute is `reference`'s.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import FSDPModule
from tests.harness.compare import EXACT, Tolerance, assert_sharded_same
from tests.harness.parity.custom_collectives import custom_all_gather, custom_reduce_scatter
from tests.multi_rank.combinations.helpers.drawn.building import Builder, dtype_of
from tests.multi_rank.combinations.helpers.drawn.events import Left, happen
from tests.multi_rank.combinations.helpers.drawn.model import OWN, Drawn, build, inputs
from tests.multi_rank.combinations.helpers.drawn.programs import STEPS, Program
from tests.multi_rank.combinations.helpers.drawn.reference import MAX_NORM, Gradients, Plain, make_optimizer


def run(program: Program) -> None:
    """Train and compare.

    Raises:
        AssertionError: it computes something else than the plain model.
    """
    sharded = Sharded(program)
    plain = sharded.plain
    for step in range(STEPS):
        _step(program, sharded, plain, step)
    sharded.rest()
    sharded.refresh()
    _compare(program, "parameters at the end", sharded.parameters(), plain.parameters())
    for left in sharded.left:
        left.check()
    if program.mesh != "dims":  # `distribute_module` keeps no strides
        strides = {name: parameter.stride() for name, parameter in sharded.handles.items()}
        assert strides == {name: parameter.stride() for name, parameter in plain.model.named_parameters()}


def _step(program: Program, sharded: Sharded, plain: Plain, step: int) -> None:
    sharded.change_settings(step, "start")
    plain.change_settings(step)
    losses = sharded.passes(step)
    expected = plain.passes(step)
    at = f"in step {step}"
    sharded.at(step, -1, "before step")
    if not program.in_backward:
        _compare(program, f"gradients {at}", sharded.gradients(), plain.gradients())
    for number, (mine, theirs) in enumerate(zip(losses, expected, strict=True)):
        _compare(program, f"losses {at}, pass {number}", {"loss": mine}, {"loss": theirs})
    norms = sharded.optimize(), plain.optimize()
    if program.clip == "fsdp2":
        _compare(program, f"norm {at}", {"norm": norms[0]}, {"norm": norms[1]})
    _compare(program, f"parameters after step {step}", sharded.parameters(), plain.parameters())
    sharded.at(step, -1, "after step")
    sharded.refresh()


def _compare(program: Program, what: str, actual: Gradients, expected: Gradients) -> None:
    for name, wanted in expected.items():
        assert_sharded_same(what, {name: actual[name]}, {name: wanted}, tolerance=_tolerance(program, name, wanted))
    assert actual.keys() == expected.keys(), (what, actual.keys() ^ expected.keys())


def _tolerance(program: Program, name: str, wanted: Tensor | None) -> Tolerance | None:
    if (program.is_exact and name != OWN) or wanted is None or not wanted.is_floating_point():
        return EXACT
    scale = wanted.abs().max().item() if wanted.numel() else 1.0
    if program.param_dtype:
        scale = max(scale, 0.3) if not wanted.dim() else scale  # a sum over all elements, which may cancel
        return Tolerance(0.05, 0.05 * scale + 4e-3, "bf16, whose rounding differs with the order")
    return Tolerance(1e-4, 1e-5 * scale + 1e-6, "sums in another order")


# ---- the sharded model ---------------------------------------------------------------------------


class Sharded:
    """The model on fsdp2, and what the program does to it.

    Attributes:
        plain: What it must compute.
        units: The modules of each `fully_shard` call.
        handles: The sharded parameters by name.
        left: Models that training has left.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.model = build(program)
        self.names = list(dict(self.model.named_parameters()))
        self.builder = builder = Builder(program, self.model)
        self.builder.wrap(self.model)
        self.units: list[list[Any]] = []
        self.handles: dict[str, nn.Parameter] = {}
        self.left: list[Left] = []
        self.take(self.model)
        self.optimizer = make_optimizer(program, list(self.handles.values()), program.optimizer)
        if program.in_backward:
            self._optimize_in_backward()
        self.prepare()
        self.plain = Plain(
            program,
            size=builder.data_size,
            rank=builder.data_rank,
            unit_of=builder.unit_of,
            modules_of=builder.modules_of,
        )

    @property
    def root(self) -> Any:
        return self.model

    def take(self, model: Drawn) -> None:
        """Go on with this model, which is sharded and at rest."""
        self.model = model
        self.units = self.builder.modules(model)
        self.handles = {}
        self.refresh()
        if self.program.cast in ("none", "named"):
            for block in model.blocks:
                block.expected = dtype_of(self.program.buffer_dtype) or torch.float32

    def prepare(self) -> None:
        """What is set once."""
        self._set_prefetch()
        if self.program.accumulation.startswith("manual"):
            self.root.set_manual_backward_finalization(True)

    def _optimize_in_backward(self) -> None:
        """Also with those that are frozen until a setting thaws them."""
        for parameter in self.handles.values():
            if not parameter.is_floating_point():
                continue
            optimizer = make_optimizer(self.program, [parameter], self.program.optimizer)

            def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            requires_grad = parameter.requires_grad
            parameter.requires_grad_().register_post_accumulate_grad_hook(step)
            parameter.requires_grad_(requires_grad)

    def _set_prefetch(self) -> None:
        for direction, unit, upcoming in self.program.prefetch:
            modules = [self.units[index][0] for index in upcoming]
            for module in self.units[unit]:
                getattr(module, f"set_modules_to_{direction}_prefetch")(modules)

    # -- settings

    def change_settings(self, step: int, point: str) -> None:
        for name, value, when, where in self.program.settings:
            if (when, where) == (step, point):
                self._set(name, value)

    def repeat_settings(self, step: int) -> None:
        """All that were made up to the end of this step, on a model that has just been sharded again."""
        for name, value, when, _ in sorted(self.program.settings, key=lambda setting: setting[2]):
            if when <= step:
                self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        root = self.root
        if name == "divide_factor":
            self.units[value[0]][0].set_gradient_divide_factor(value[1])
        elif name == "reduction":
            root.set_gradient_reduction(torch.tensor(value[1]) if isinstance(value, tuple) else value)
        elif name == "force_sum":
            self.units[value][0].set_force_sum_reduction_for_comms(True)
        elif name == "unused_params":
            root.set_reduce_scatter_unused_params(True)
        elif name == "max_input_buffers":
            root.set_reduce_scatter_max_input_buffers(value)
        elif name == "separate_group":
            root.set_separate_reduce_scatter_group()
        elif name == "custom_all_gather":
            self.units[value][0].set_custom_all_gather(custom_all_gather([]))
        elif name == "custom_reduce_scatter":
            self.units[value][0].set_custom_reduce_scatter(custom_reduce_scatter([]))
        elif name == "group_memory":
            self.units[value][0].set_allocate_memory_from_process_group_for_comm(True)
        elif name == "all_reduce_hook":
            self.units[value][0].set_all_reduce_hook(lambda flat: flat.mul_(2))
        elif name == "keep_storage":
            root.set_keep_unsharded_storage(True)
        elif name == "reshard_after_backward":
            root.set_reshard_after_backward(value)
        elif name == "reshard_after_forward":
            root.set_reshard_after_forward(value)
        elif name == "prefetch_budget":
            root.set_prefetch_budget(value)
        elif name == "strategy" and value[0] is None:
            root.set_strategy(value[1])
        elif name == "strategy":
            for module in self.units[value[0]]:
                module.set_strategy(value[1], recurse=False)
        elif name == "async_unshard":
            root._set_unshard_async_op(True)
        elif name == "no_unshard_of_shift":
            if isinstance(self.model.shift, FSDPModule):
                self.model.shift.set_unshard_in_backward(False)
        elif name == "refreeze":
            self.model.blocks[0].feed.requires_grad_(value)

    # -- training

    def passes(self, step: int) -> list[Tensor]:
        """All passes of a step; returns their losses."""
        losses = []
        count = len(self.program.forwards)
        for number in range(count):
            self._accumulate(number, is_last=number == count - 1)
            self.at(step, number, "before forward")
            loss = self._loss(step, number)
            self.at(step, number, "before backward")
            if number == 0:
                self.change_settings(step, "middle")
            loss.backward()
            self.at(step, number, "after backward")
            losses.append(loss.detach())
        if self.program.accumulation.startswith("manual"):
            self.root.set_requires_gradient_sync(True)
            self.root.finalize_backward()
        elif self.program.accumulation == "synchronized":
            fsdp2.synchronize_gradients(self.root)
        if self.model.own is not None and self.model.own.grad is not None:
            dist.all_reduce(self.model.own.grad)
            self.model.own.grad.div_(dist.get_world_size())
        return losses

    def _accumulate(self, number: int, *, is_last: bool) -> None:
        root, kind = self.root, self.program.accumulation
        if kind == "no_sync":
            root.set_requires_gradient_sync(is_last)
        elif kind in ("manual_no_sync", "synchronized"):
            root.set_requires_gradient_sync(False)
        elif kind == "not_last":
            root.set_is_last_backward(is_last)
        elif kind == "partial":
            root.set_requires_all_reduce(is_last)
        elif kind == "mixed":
            root.set_requires_gradient_sync(is_last or number > 0)
            root.set_requires_all_reduce(is_last)

    def _loss(self, step: int, number: int) -> Tensor:
        total: Any = 0.0
        for forward in range(self.program.forwards[number]):
            x, y, use = inputs(self.program, step, number, forward, self.builder.data_rank)
            output = self.forward(x, use, step)
            total = total + F.mse_loss(output.float(), y)
        return total  # type: ignore[no-any-return]

    def forward(self, x: Tensor, use: bool, step: int) -> Tensor:
        """The output for this rank's part of the batch."""
        if self.program.param_dtype and self.program.cast == "none":
            x = x.to(getattr(torch, self.program.param_dtype))
        skipped = self.program.model.skipped[step]
        if self.program.mesh != "dims":
            return self.model(x, use, skipped)  # type: ignore[no-any-return]
        mesh = self.builder.mesh
        assert mesh is not None
        placements = [Replicate() if name == self.program.dims.get("tp") else Shard(0) for name in ("a", "b")]
        output = self.model(DTensor.from_local(x, mesh, placements, run_check=False), use, skipped)
        return output.redistribute(placements=placements).to_local()  # type: ignore[no-any-return]

    def optimize(self) -> Tensor | None:
        """Clip, step, clear. Returns the norm of the gradients before, where they are clipped."""
        program, norm = self.program, None
        if program.clip == "torch":
            norm = nn.utils.clip_grad_norm_([p for name, p in self.handles.items() if name != OWN], MAX_NORM)
        elif program.clip == "fsdp2":
            norm = fsdp2.clip_grad_norm_(self.handles.values(), MAX_NORM)
        if not program.in_backward:
            self.optimizer.step()
        if program.zero in ("module", "module_zeros"):
            self.root.zero_grad(set_to_none=program.zero == "module")
        elif program.zero != "keep":
            self.optimizer.zero_grad(set_to_none=program.zero == "none")
        return norm

    def compare_whole(self, parameters: Gradients) -> None:
        """Parameters of the unwrapped model with the reference's."""
        _compare(self.program, "unwrapped parameters", parameters, self.plain.parameters())

    def parameters(self) -> Gradients:
        return {name: parameter.detach() for name, parameter in self.handles.items()}

    def gradients(self) -> Gradients:
        return {name: parameter.grad for name, parameter in self.handles.items()}

    # -- events

    def at(self, step: int, number: int, point: str) -> None:
        """Whatever the program wants here."""
        for event in self.program.events:
            if (event.step, event.number, event.point) == (step, number, point):
                happen(self, event)

    def rest(self) -> None:
        """Reshard everything."""
        for modules in self.units:
            for module in modules:
                module.reshard()

    def refresh(self) -> None:
        """Take the sharded parameters as they are registered, where they are."""
        current = dict(self.model.named_parameters())
        for name in self.names:
            found = current[name]
            if name not in self.handles or getattr(found, "_fsdp_param", None) is not None:
                self.handles[name] = found
