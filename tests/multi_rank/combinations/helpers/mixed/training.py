"""Runs a mixed program twice, on the plain model for all ranks together and sharded, and compares what it notes.

[Note: one program, two worlds]
    The plain world has a copy of the model for every rank, and they share their parameters: each has its rank's inputs,
    hooks and state, and the loss is the mean of theirs. So gradients of parameters, and what hooks on parameters
    see, are autograd's own for the whole batch, in one process. The sharded world has one model, of this rank. All
    statements of a program are loops over the models of its world, and know of no difference but `World.agree`.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from tests.harness.compare import Tolerance, difference, shard_pair
from tests.multi_rank.combinations.helpers.mixed.actions import Events, Hooks, Surgery
from tests.multi_rank.combinations.helpers.mixed.model import WIDTH, Boom, build, called, failing, left, new_state
from tests.multi_rank.combinations.helpers.mixed.programs import Mix

STEPS, ROWS = 2, 3

Log = dict[str, list[Any]]


def run(mix: Mix) -> None:
    """Runs it in both worlds.

    Raises:
        AssertionError: The sharded model does something else than the plain one.
    """
    expected = Training(mix, plain_world(mix)).run()
    _compare(mix, Training(mix, sharded_world(mix)).run(), expected)


def _compare(mix: Mix, actual: Log, expected: Log) -> None:
    problems = []
    for name, wanted in expected.items():
        mine = actual.get(name, [])
        if len(mine) != len(wanted):
            problems.append(f"{name}: noted {len(mine)} times, expected {len(wanted)}")
            continue
        for number, (one, other) in enumerate(zip(mine, wanted, strict=True)):
            problem = _difference(mix, one, other)
            if problem:
                problems.append(f"{name}[{number}]: {problem}")
    problems += [f"{name}: noted, not expected" for name in actual.keys() - expected.keys()]
    assert not problems, "\n".join(problems[:12])


def _difference(mix: Mix, one: Any, other: Any) -> str | None:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return None if (one is None and other is None) or one == other else f"is {one}, expected {other}"
    one, other = (each.double() if each is not None else None for each in shard_pair(one, other))
    scale = other.abs().max().item() if other.numel() else 0.0
    if mix["precision"] == "full":
        tolerance = Tolerance(1e-9, 1e-10 * scale + 1e-12, "sums in another order, in double precision")
        return difference(one, other, tolerance)
    return difference(one, other, Tolerance(1e-3, 2e-4 * scale + 1e-6, "computed in single precision"))


# ---- worlds --------------------------------------------------------------------------------------


class World:
    """Models with the ranks whose batches they have.

    Attributes:
        rank: This one, whose notes are compared.
        size: The number of ranks.
        is_noting: Not within a transform, whose tensors are none outside of it.
        scale: What the gradients of a rank's own tensors are divided by now.
    """

    def __init__(self, models: dict[int, Any]) -> None:
        self.models = models
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.notes: Log = defaultdict(list)
        self.is_noting = True
        self.scale = 1

    @property
    def is_plain(self) -> bool:
        return len(self.models) == self.size

    @property
    def mine(self) -> Any:
        return self.models[self.rank]

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.mine.named_parameters())

    def note(self, rank: int, name: str, value: Any) -> None:
        """Keeps what a program has seen on a rank."""
        if rank == self.rank and self.is_noting:
            self.notes[name].append(value.detach().clone() if isinstance(value, Tensor) else value)

    def note_all(self, name: str, values: dict[str, Tensor | None]) -> None:
        """Keeps what all models share: parameters, gradients."""
        for key, value in values.items():
            self.note(self.rank, f"{name} {key}", value)

    def agree(self, failed: bool) -> bool:
        """Whether any rank has failed. Collective in the sharded world."""
        if self.is_plain:
            return failed
        flag = torch.tensor(float(failed))
        dist.all_reduce(flag)
        return bool(flag.item())

    def total(self, losses: list[Tensor]) -> Tensor:
        """What backward begins with."""
        return torch.stack(losses).sum() / len(losses)

    def rest(self) -> None:
        """Reshards what a forward without a backward has left unsharded, as users must to see sharded parameters."""
        for module in self.mine.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def roots(self) -> list[Any]:
        """Sharded modules that no other contains; none in the plain world."""
        sharded = [(name, each) for name, each in self.mine.named_modules() if isinstance(each, FSDPModule)]
        names = [name for name, _ in sharded]
        return [
            each
            for name, each in sharded
            if not any(name != other and (other == "" or name.startswith(f"{other}.")) for other in names)
        ]


def plain_world(mix: Mix) -> World:
    model = build(mix)
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return World({rank: copy.deepcopy(model, dict(shared)) for rank in range(dist.get_world_size())})


def sharded_world(mix: Mix) -> World:
    model = build(mix)
    mesh = None
    if mix["mesh"] == "replicas":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reshard: dict[str, bool | int | None] = {"default": None, "True": True, "False": False, "2": 2}
    modules: dict[str, list[nn.Module]] = {
        "root": [model],
        "blocks": [*model.blocks, model],
        "several roots": [model.inp, *model.blocks, model.head],
        "nested": [*(each for block in model.blocks for each in (block.feed, block)), model],
    }
    for module in modules[mix["units"]]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard[mix["reshard"]], mp_policy=_policy(mix))
    return World({dist.get_rank(): model})


def _policy(mix: Mix) -> MixedPrecisionPolicy:
    if mix["precision"] == "full":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        torch.float32,
        torch.float64,
        output_dtype=torch.float64 if mix["precision"].endswith("back") else None,
        cast_forward_inputs=not mix["precision"].endswith("as they are"),
    )


# ---- the program ---------------------------------------------------------------------------------


class Training:
    """A program in one of its worlds."""

    def __init__(self, mix: Mix, world: World) -> None:
        self.mix, self.world = mix, world
        self.random = random.Random(mix["seed"])
        self.wants_slopes = mix["order"] in ("penalty", "penalty and loss", "two forwards", "slopes")
        self.wants_slopes |= self.random.random() < 0.3
        self.microbatches = 1 if mix["microbatches"] == "one" else 2
        self.hooks = Hooks(mix, world)
        self.surgery = Surgery(mix, world, self.evaluate)
        self.optimizer = self._optimizer()
        when = (self.random.randrange(STEPS), self.random.randrange(self.microbatches))
        self.events = Events(mix, world, when, self.evaluate, self.optimizer)

    def run(self) -> Log:
        """Trains; returns what it has noted."""
        stop = threading.Event()
        loader = threading.Thread(target=_load, args=(stop,))
        if self.mix["threads"] == "loader":
            loader.start()
        try:
            for step in range(STEPS):
                self._step(step)
            self.evaluate("at the end")
        finally:
            stop.set()
            self.hooks.remove()
            if loader.ident is not None:
                loader.join()
        return self.world.notes

    def evaluate(self, name: str) -> None:
        """Notes this rank's outputs; modes of autograd are the caller's."""
        for rank, model in self.world.models.items():
            with torch.no_grad():
                output = called(model, self.mix, self._inputs(99, 0, 0, rank), new_state(self.mix["state"]))
            self.world.note(rank, f"output {name}", output)

    def _optimizer(self) -> torch.optim.Optimizer:
        kind, parameters = self.mix["optimizer"], list(self.world.parameters().values())
        if kind == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        if kind == "in backward":
            for parameter in parameters:
                _step_in_backward(parameter)
            return torch.optim.SGD(parameters, lr=0.0)
        if kind == "local" and not self.world.is_plain:
            return fsdp2.optim.local(torch.optim.AdamW, parameters, lr=1e-2, eps=1e-3, flat=True)
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)

    def _step(self, step: int) -> None:
        for is_first in (True, False):
            try:
                for number in range(self.microbatches):
                    self._in_thread("step", lambda number=number, fails=is_first: self._pass(step, number, fails))
                break
            except Boom:  # all ranks drop the step and run it again
                self.world.scale = 1
                self.world.note(self.world.rank, "raised", step)
                self.zero()
        if self.mix["optimizer"] != "in backward":
            self.world.note_all("gradient", {name: p.grad for name, p in self.world.parameters().items()})
        self.surgery.before_step()
        if self.mix["steps"] == "all" or step:
            self.optimizer.step()
            if self.mix["zero"] != "kept":
                self.zero()
        self.surgery.after_step()
        self.events.at("after step", step, self.events.when[1])
        self.world.note_all("parameter", {name: p for name, p in self.world.parameters().items()})

    def zero(self) -> None:
        kind = self.mix["zero"]
        if kind.startswith("model"):
            for model in list(self.world.models.values())[:1]:
                model.zero_grad(set_to_none=kind == "model")
        else:
            self.optimizer.zero_grad(set_to_none=kind != "optimizer to zeros")

    # -- one microbatch

    def _pass(self, step: int, number: int, fails: bool) -> None:
        self._say_which(number)
        self.surgery.before_forward(number)
        self.events.at("before forward", step, number)
        raises = self.events.raises(step, number) if fails else None
        losses, inputs = self._forward(step, number, raises)
        self.events.at("after forward", step, number)
        self._in_thread("backward", lambda: self._backward(self.world.total(losses)))
        for rank, each in inputs:
            if each.requires_grad:
                self.world.note(rank, "gradient of inputs", each.grad * len(self.world.models))
        self.events.at("after backward", step, number)

    def _say_which(self, number: int) -> None:
        is_last = number == self.microbatches - 1
        for root in self.world.roots():
            if self.mix["microbatches"] == "two, synchronized once":
                root.set_requires_gradient_sync(is_last)
            elif self.mix["microbatches"] == "two, the last one said":
                root.set_is_last_backward(is_last)

    def _forward(self, step: int, number: int, raises: str | None) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
        losses, inputs, failed = [], [], raises == "raise in loss"
        for rank, model in self.world.models.items():
            calls = 2 if self.mix["order"] in ("two forwards", "two calls") else 1
            each = [self._inputs(step, number, call, rank) for call in range(calls)]
            for x in each:
                x.requires_grad_(self.wants_slopes)
            here = raises == "raise late" or (raises == "raise late on one" and rank == 0)
            try:
                with failing(model, "fails" if here else "fails_in_backward" if raises == "raise in backward" else "_"):
                    losses.append(self._loss(model, each, rank))
            except Boom:
                failed = True
            inputs += [(rank, x) for x in each]
        if self.world.agree(failed):
            raise Boom
        return losses, inputs

    def _loss(self, model: Any, inputs: list[Tensor], rank: int) -> Tensor:
        order, terms = self.mix["order"], []
        for number, x in enumerate(inputs):
            state = new_state(self.mix["state"])
            output = called(model, self.mix, x, state)
            self.world.note(rank, "output", output)
            is_penalty = number == len(inputs) - 1 and order in ("penalty", "penalty and loss", "two forwards")
            if is_penalty:
                (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
                self.world.note(rank, "slope", slope)
                terms.append((slope.norm(dim=1) - 1).square().mean())
            elif order == "slopes":
                (slope,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
                self.world.note(rank, "slope", slope)
            if not is_penalty or order == "penalty and loss":
                terms.append(output.double().square().mean() + output.double().mean())
                terms += [each.double().square().mean() / 4 for each in left(self.mix["state"], state)]
        total = torch.stack(terms).sum()
        self.world.note(rank, "loss", total)
        return total

    def _backward(self, loss: Tensor) -> None:
        self.world.scale = len(self.world.models)
        if self.mix["order"] == "retained":
            loss.backward(retain_graph=True)
        loss.backward()
        self.world.scale = 1

    def _inputs(self, step: int, number: int, call: int, rank: int) -> Tensor:
        seed = (((int(self.mix["seed"]) * 7 + step) * 11 + number) * 5 + call) * 13 + rank
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def _in_thread(self, name: str, body: Callable[[], None]) -> None:
        """Runs ``body``, in a thread of its own if the program says so."""
        if self.mix["threads"] != name:
            return body()
        raised: list[BaseException] = []

        def catching() -> None:
            try:
                body()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=catching)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]


def _load(stop: threading.Event) -> None:
    """A loader: it computes in modes of its own."""
    while not stop.wait(0.001):
        with torch.inference_mode():
            torch.randn(8, 8) @ torch.randn(8, 8)


def _step_in_backward(parameter: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    def step(parameter: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)
