"""Runs a drawn program, sharded on all ranks and plain on each, and compares losses, gradients and parameters.

Owns the calls of fsdp2 that a program means; what they must compute is `drawn_reference`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    FSDPNotImplementedError,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from tests.harness.compare import EXACT, Tolerance, assert_sharded_same
from tests.multi_rank.drawing import REFUSALS, STEPS, Event, Program
from tests.multi_rank.drawn_model import OWN, build, inputs
from tests.multi_rank.drawn_reference import LEARNING_RATE, MAX_NORM, Gradients, Plain, make_optimizer
from tests.parity.custom_collectives import custom_all_gather, custom_reduce_scatter


class Mishap(Exception):
    """Raised on purpose."""


def run(program: Program) -> str | None:
    """Train and compare. Returns the reason if the program was refused as `REFUSALS` allow.

    Raises:
        AssertionError: it computes something else than the plain model, or was refused without need.
    """
    try:
        sharded = _Sharded(program)
    except FSDPNotImplementedError as error:
        assert program.refusal is not None, f"refused: {error}"
        assert REFUSALS[program.refusal] in str(error), f"refused for another reason than {program.refusal}: {error}"
        return program.refusal
    assert program.refusal is None, f"not refused, but {program.refusal}"
    plain = Plain(
        program,
        size=sharded.data_size,
        rank=sharded.data_rank,
        unit_of=sharded.unit_of,
        modules_of=sharded.modules_of,
    )
    for step in range(STEPS):
        _step(program, sharded, plain, step)
    sharded.rest()
    sharded.refresh()
    _compare(program, "parameters at the end", sharded.parameters(), plain.parameters())
    return None


def _step(program: Program, sharded: _Sharded, plain: Plain, step: int) -> None:
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
    sharded.optimize()
    plain.optimize()
    _compare(program, f"parameters after step {step}", sharded.parameters(), plain.parameters())
    sharded.at(step, -1, "after step")
    sharded.refresh()


def _compare(program: Program, what: str, actual: Gradients, expected: Gradients) -> None:
    tolerance = EXACT
    for name, wanted in expected.items():
        if not program.is_exact or name == OWN:
            scale = 1.0 if wanted is None or not wanted.numel() else wanted.abs().max().item()
            if program.param_dtype:
                tolerance = Tolerance(0.05, 0.05 * scale + 1e-3, "bf16, whose rounding differs with the order")
            else:
                tolerance = Tolerance(1e-4, 1e-5 * scale + 1e-6, "sums in another order")
        assert_sharded_same(what, {name: actual[name]}, {name: wanted}, tolerance=tolerance)
    assert actual.keys() == expected.keys(), (what, actual.keys() ^ expected.keys())


# ---- the sharded model ---------------------------------------------------------------------------


class _Sharded:
    """The model on fsdp2, and what the program does to it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.model = build(program)
        self.names = list(dict(self.model.named_parameters()))
        self.mesh, data_mesh, dims, self.tensor_size = self._meshes()
        self.data_size = dist.get_world_size() // self.tensor_size
        self.data_rank = dist.get_rank() // self.tensor_size
        self.unit_of: dict[str, int] = {}
        self.modules_of: dict[str, tuple[str, ...]] = {}
        self.units: list[list[Any]] = []
        self._shard(data_mesh, dims)
        self.handles: dict[str, nn.Parameter] = {}
        self.refresh()
        self.optimizer = make_optimizer(list(self.handles.values()))
        if program.in_backward:
            self._optimize_in_backward()
        self._set_prefetch()
        if program.accumulation.startswith("manual"):
            self.root.set_manual_backward_finalization(True)

    @property
    def root(self) -> Any:
        return self.model

    # -- building

    def _meshes(self) -> tuple[DeviceMesh | None, DeviceMesh | None, DataParallelMeshDims | None, int]:
        """The whole mesh, the one to shard over, its dims, and the tensor parallel size."""
        program = self.program
        if program.mesh == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            return mesh, mesh, None, 1
        if program.mesh == "tp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            plan: dict[str, Any] = {"feed.up": ColwiseParallel(), "feed.down": RowwiseParallel()}
            for block in self.model.blocks:
                parallelize_module(block, mesh["tp"], plan)
            return mesh, mesh["dp"], None, 2
        if program.mesh == "dims":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            tensor = program.dims.get("tp")
            distribute_module(self.model, mesh, partition_fn=_partition(tensor))
            dims = {key: value for key, value in program.dims.items() if key != "tp"}
            return mesh, mesh, DataParallelMeshDims(**dims), 2 if tensor else 1
        return None, None, None, 1

    def _shard(self, mesh: DeviceMesh | None, dims: DataParallelMeshDims | None) -> None:
        program = self.program
        options: dict[str, Any] = {
            "mesh": mesh,
            "dp_mesh_dims": dims,
            "offload_policy": CPUOffloadPolicy() if program.offload else OffloadPolicy(),
            "ignored_params": {self.model.own} if self.model.own is not None else None,
            "shard_placement_fn": None if program.placement == "default" else self._placement,
        }
        param_dtype, reduce_dtype, output_dtype = (
            getattr(torch, name) if name else None
            for name in (program.param_dtype, program.reduce_dtype, program.output_dtype)
        )
        for index, unit in enumerate(program.units):
            modules = [self.model.get_submodule(name) for name in unit.names]
            before = {parameter for group in self.units for each in group for parameter in each.parameters()}
            for name, parameter in self.model.named_parameters():
                is_inside = any(parameter is each for module in modules for each in module.parameters())
                if is_inside and parameter not in before and name != OWN:
                    self.unit_of[name] = index
                    self.modules_of[name] = unit.names if unit.names != ("",) else ()
            fully_shard(
                modules if len(modules) > 1 else modules[0],  # type: ignore[arg-type]
                reshard_after_forward=unit.reshard,
                mp_policy=MixedPrecisionPolicy(
                    param_dtype,
                    reduce_dtype,
                    output_dtype if unit.names == ("",) else None,
                    cast_forward_inputs=program.cast_inputs,
                ),
                **options,
            )
            self.units.append(modules)

    def _placement(self, parameter: nn.Parameter) -> Shard | None:
        kind = self.program.placement
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if kind == "zero" or parameter.dim() < 2:
            return Shard(0)
        if kind == "uneven":
            return Shard(parameter.dim() - 1)
        if local.shape[1] % dist.get_world_size() or (kind == "mixed" and local.shape[0] <= local.shape[1]):
            return None
        return Shard(-1)

    def _optimize_in_backward(self) -> None:
        for parameter in self.handles.values():
            if not parameter.requires_grad:
                continue
            optimizer = torch.optim.SGD([parameter], lr=LEARNING_RATE, momentum=0.5, foreach=False)

            def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)

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

    def _set(self, name: str, value: Any) -> None:
        root = self.root
        if name == "divide_factor":
            self.units[value[0]][0].set_gradient_divide_factor(value[1])
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
        if self.model.own is not None and self.model.own.grad is not None:
            dist.all_reduce(self.model.own.grad)
            self.model.own.grad.div_(dist.get_world_size())
        return losses

    def _accumulate(self, number: int, *, is_last: bool) -> None:
        root, kind = self.root, self.program.accumulation
        if kind == "no_sync":
            root.set_requires_gradient_sync(is_last)
        elif kind == "manual_no_sync":
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
            x, y, use = inputs(self.program, step, number, forward, self.data_rank)
            output = self._forward(x, use, step)
            total = total + F.mse_loss(output.float(), y)
        return total  # type: ignore[no-any-return]

    def _forward(self, x: Tensor, use: bool, step: int) -> Tensor:
        if self.program.param_dtype and not self.program.cast_inputs:
            x = x.to(getattr(torch, self.program.param_dtype))
        skipped = self.program.model.skipped[step]
        if self.program.mesh != "dims":
            return self.model(x, use, skipped)  # type: ignore[no-any-return]
        assert self.mesh is not None
        placements = [Replicate() if name == self.program.dims.get("tp") else Shard(0) for name in ("a", "b")]
        output = self.model(DTensor.from_local(x, self.mesh, placements, run_check=False), use, skipped)
        return output.redistribute(placements=placements).to_local()  # type: ignore[no-any-return]

    def optimize(self) -> None:
        program = self.program
        if program.clip:
            nn.utils.clip_grad_norm_([p for name, p in self.handles.items() if name != OWN], MAX_NORM)
        if not program.in_backward:
            self.optimizer.step()
        if program.zero in ("module", "module_zeros"):
            self.root.zero_grad(set_to_none=program.zero == "module")
        elif program.zero != "keep":
            self.optimizer.zero_grad(set_to_none=program.zero == "none")

    def parameters(self) -> Gradients:
        return {name: parameter.detach() for name, parameter in self.handles.items()}

    def gradients(self) -> Gradients:
        return {name: parameter.grad for name, parameter in self.handles.items()}

    # -- events

    def at(self, step: int, number: int, point: str) -> None:
        """Whatever the program wants here."""
        for event in self.program.events:
            if (event.step, event.number, event.point) == (step, number, point):
                self._happen(event)

    def _happen(self, event: Event) -> None:
        if event.action.startswith("load"):
            self._load(event.action)
        elif event.action == "save":
            saved = self.model.state_dict()
            assert all(not isinstance(value, nn.Parameter) for value in saved.values())
        elif event.action == "reshard":
            for module in self.units[event.target]:
                module.reshard()
        elif event.action.startswith("unshard"):
            handle = self.units[event.target][0].unshard(async_op=event.action != "unshard")
            if event.action == "unshard_wait":
                handle.wait()
        elif event.action in ("eval", "inference"):
            self._evaluate(event)
        else:
            self._fail(event)

    def _evaluate(self, event: Event) -> None:
        x, _, use = inputs(self.program, event.step, 9, 0, self.data_rank)
        with torch.inference_mode() if event.action == "inference" else torch.no_grad():
            self._forward(x, use, event.step)

    def _fail(self, event: Event) -> None:
        """An exception on all ranks, in the forward or the backward of a block."""
        block = self.model.blocks[event.target]

        def fail(*args: object) -> None:
            raise Mishap

        x, y, use = inputs(self.program, event.step, 8, 0, self.data_rank)
        skipped = self.program.model.skipped[event.step] == event.target
        with _hooked(block.feed, event.action, fail):
            try:
                F.mse_loss(self._forward(x, use, event.step).float(), y).backward()
            except Mishap:
                pass
            else:
                assert skipped or event.action == "fail_backward", "the mishap was lost"
        self.root.reset_iter_state()
        self.optimizer.zero_grad()

    def _load(self, action: str) -> None:
        """Through a state dict, while the parameters hold something else."""
        if action == "load_full":
            options = StateDictOptions(full_state_dict=True)
            state = get_model_state_dict(self.model, options=options)
        else:
            state = self.model.state_dict()
        state = {name: value.clone() for name, value in state.items()}
        with torch.no_grad():
            for parameter in self.handles.values():
                parameter.mul_(0)
        if action == "load_full":
            set_model_state_dict(self.model, state, options=options)
        else:
            self.model.load_state_dict(state, assign=action == "load_assign" and self._may_replace())
        self.refresh()

    def _may_replace(self) -> bool:
        """Optimizers lose an ignored parameter that is replaced, and every replaced one loses its hooks."""
        return self.model.own is None and not self.program.in_backward

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


@contextlib.contextmanager
def _hooked(module: nn.Module, action: str, fail: Callable[..., None]) -> Iterator[None]:
    def forward_hook(module: nn.Module, args: Any, output: Any) -> None:
        if action == "fail_forward":
            fail()
        elif output.requires_grad:
            output.register_hook(fail)

    handle = module.register_forward_hook(forward_hook)
    try:
        yield
    finally:
        handle.remove()


def _partition(tensor: str | None) -> Callable[[str, nn.Module, DeviceMesh], None]:
    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            cut: Any = Replicate()
            if name.endswith("feed.up"):
                cut = Shard(0)
            elif name.endswith("feed.down") and key == "weight":
                cut = Shard(1)
            placements = [cut if axis == tensor else Replicate() for axis in mesh.mesh_dim_names or ()]
            distributed = distribute_tensor(parameter.detach(), mesh, placements)
            module.register_parameter(key, nn.Parameter(distributed, requires_grad=parameter.requires_grad))

    return partition
