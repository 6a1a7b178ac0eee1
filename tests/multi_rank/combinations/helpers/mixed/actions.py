"""What mixed programs do around training: hooks, surgery on parameters and gradients, and events between statements."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

import fsdp2
from tests.multi_rank.combinations.helpers.mixed.model import arguments as packed
from tests.multi_rank.combinations.helpers.mixed.model import called, found, given, new_state, taken
from tests.multi_rank.combinations.helpers.mixed.programs import Mix

if TYPE_CHECKING:
    from tests.multi_rank.combinations.helpers.mixed.training import World

MAX_NORM = 0.1

ON_PARAMETERS = ("parameter", "post accumulate")
"""Hooks of parameters, which no transform of `torch.func` calls."""

Evaluate = Callable[[str], None]


class Hooks:
    """Those of a program, on all models of its world: they note what they see, and change it."""

    def __init__(self, mix: Mix, world: World) -> None:
        self.mix, self.world = mix, world
        self.handles: list[RemovableHandle] = []
        kind = mix["hooks"]
        for rank, model in world.models.items():
            if kind in ("pre", "pre with keywords", "forward", "backward", "backward pre", "activation"):
                self._on_module(rank, self._module(model))
        if kind == "global":
            self._on_all_modules()
        elif kind in ON_PARAMETERS:
            self._on_parameters()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _module(self, model: Any) -> nn.Module:
        if self.mix["hooks"] == "activation" and self.mix["place"] == "block":
            return model.blocks[1].feed  # type: ignore[no-any-return]
        places = {"block": model.blocks[1], "root": model, "inner": model.blocks[1].feed.up}
        return places[self.mix["place"]]  # type: ignore[no-any-return]

    @property
    def _kinds(self) -> tuple[str, str]:
        """How the module of the hooks takes and gives."""
        if self.mix["place"] == "inner":
            return "inner", "tensor"
        outputs = self.mix["outputs"] if self.mix["place"] == "block" else self.mix["result"]
        return self.mix["inputs"], "tensor" if outputs == "loss" else outputs

    def _on_module(self, rank: int, module: nn.Module) -> None:
        takes, gives = self._kinds
        note = self.world.note

        def scaled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            x, state = (args[0], None) if takes == "inner" else taken(takes, args, kwargs)
            note(rank, "hook", x)
            return ((x * 1.5,), {}) if takes == "inner" else packed(takes, x * 1.5, state)

        def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
            return scaled(args, {})[0] if args else None

        def before_with_keywords(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return scaled(args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            y = found(gives, output, module)
            note(rank, "hook", y)
            return given(gives, y * 1.5, module)

        def of_activation(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(of_gradient)

        def of_gradient(gradient: Tensor) -> Tensor:
            note(rank, "hook", gradient * self.world.scale)
            return gradient * 0.5

        def backward(module: nn.Module, gradients: Any, of_outputs: tuple[Tensor, ...]) -> Any:
            return tuple(None if each is None else of_gradient(each) for each in gradients)

        def before_backward(module: nn.Module, of_outputs: tuple[Tensor, ...]) -> Any:
            return tuple(of_gradient(each) for each in of_outputs)

        kind = self.mix["hooks"]
        if kind == "pre":
            self.handles.append(module.register_forward_pre_hook(before))
        elif kind == "pre with keywords":
            self.handles.append(module.register_forward_pre_hook(before_with_keywords, with_kwargs=True))
        elif kind == "forward":
            self.handles.append(module.register_forward_hook(after))
        elif kind == "activation":
            self.handles.append(module.register_forward_hook(of_activation))
        elif kind == "backward":
            self.handles.append(module.register_full_backward_hook(backward))
        else:
            self.handles.append(module.register_full_backward_pre_hook(before_backward))

    def _on_all_modules(self) -> None:
        own = {id(each) for model in self.world.models.values() for each in model.blocks}
        mine = {id(each) for each in self.world.mine.blocks}

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in own & mine:
                self.world.note(self.world.rank, "hook", module.index)

        self.handles.append(nn.modules.module.register_module_forward_hook(after))

    def _on_parameters(self) -> None:
        for name, parameter in self.world.parameters().items():
            if self.mix["hooks"] == "parameter":
                parameter.register_hook(self._of_gradient(name))
            else:
                parameter.register_post_accumulate_grad_hook(self._after_accumulation(name))

    def _of_gradient(self, name: str) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            self.world.note_all("hook", {name: gradient})
            return gradient * 0.5

        return hook

    def _after_accumulation(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self.world.note_all("hook", {name: parameter.grad})
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        return hook


class Surgery:
    """What is done to parameters and gradients beside optimizers."""

    def __init__(self, mix: Mix, world: World, evaluate: Evaluate) -> None:
        self.kind, self.world, self.evaluate = mix["surgery"], world, evaluate
        self.average: dict[str, Tensor] = {}

    def before_forward(self, number: int) -> None:
        if self.kind == "gradient given" and number == 0:  # later, gradients of this step may be in flight
            self.world.rest()  # a forward that raised leaves parameters unsharded
            for parameter in self.world.parameters().values():
                if parameter.grad is None:
                    parameter.grad = torch.full_like(parameter, 0.01)

    def before_step(self) -> None:
        parameters = list(self.world.parameters().values())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = None
        if self.kind == "gradient scaled":
            for gradient in gradients:
                gradient.mul_(0.5)
        elif self.kind == "gradients foreach" and gradients:
            torch._foreach_mul_(gradients, 0.5)
        elif self.kind == "gradient replaced":
            for parameter in parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad * 0.5 + 0.01
        elif self.kind == "gradient dropped":
            for parameter in parameters[::3]:
                parameter.grad = None
        elif self.kind == "clipped":
            norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        elif self.kind == "clipped by fsdp2":
            norm = fsdp2.clip_grad_norm_(parameters, MAX_NORM)
        if norm is not None:
            self.world.note(self.world.rank, "norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def after_step(self) -> None:
        parameters = self.world.parameters()
        if self.kind == "data scaled":
            for parameter in parameters.values():
                parameter.data.mul_(0.9)
        elif self.kind == "written":
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.copy_(parameter * 0.9)
        elif self.kind == "foreach":
            with torch.no_grad():
                torch._foreach_mul_(list(parameters.values()), 0.9)
        elif self.kind == "averaged":
            self._swap(parameters)

    def _swap(self, parameters: dict[str, nn.Parameter]) -> None:
        """Evaluates with the moving average."""
        with torch.no_grad():
            if not self.average:
                self.average = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            for name, parameter in parameters.items():
                self.average[name].lerp_(parameter.detach(), 0.5)
            kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            for name, parameter in parameters.items():
                parameter.copy_(self.average[name])
            self.evaluate("of the average")
            self.world.rest()
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])


class Events:
    """What happens once, between two statements.

    Attributes:
        when: Its step and microbatch.
    """

    def __init__(
        self, mix: Mix, world: World, when: tuple[int, int], evaluate: Evaluate, optimizer: torch.optim.Optimizer
    ) -> None:
        self.mix, self.world, self.when = mix, world, when
        self.evaluate, self.optimizer = evaluate, optimizer

    def raises(self, step: int, number: int) -> str | None:
        """What the pass of this microbatch raises."""
        return self.mix["event"] if self.mix["event"].startswith("raise") and (step, number) == self.when else None

    def at(self, point: str, step: int, number: int) -> None:
        if (step, number) != self.when or point != self.mix["point"] or self.mix["event"].startswith("raise"):
            return
        event = self.mix["event"]
        if event == "evaluate":
            for model in self.world.models.values():
                model.eval()
            self.evaluate("in between")
            self._rest()
            for model in self.world.models.values():
                model.train()
        elif event == "inference":
            with torch.inference_mode():
                self.evaluate("in inference mode")
            self._rest()
        elif event == "save":
            self.world.note_all("saved", self.world.mine.state_dict())
            self.optimizer.state_dict()
        elif event == "load":
            self._load()
        elif event == "zero by model":
            self.world.mine.zero_grad()
        elif event == "zero by optimizer":
            self.optimizer.zero_grad()
        elif event == "forward only":
            self._each(lambda function, x: function(x))
            self._rest()
        elif event.startswith("func."):
            self._transform(event)
        elif event == "copy":
            self._copy()

    def _load(self) -> None:
        state = {name: value * 0.9 for name, value in self.world.mine.state_dict().items()}
        self.world.mine.load_state_dict(state)
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def _each(self, body: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> dict[int, Tensor]:
        """``body`` of each model as a function of its input."""
        found = {}
        for rank, model in self.world.models.items():
            x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4) + rank
            found[rank] = body(lambda x, model=model: called(model, self.mix, x, new_state(self.mix["state"])), x)
        return found

    def _transform(self, event: str) -> None:
        bodies: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
            "func.grad": lambda function, x: torch.func.grad(lambda x: function(x).square().sum())(x),
            "func.vmap": lambda function, x: torch.func.vmap(function)(x),
            "func.jvp": lambda function, x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1],
        }
        self.world.is_noting = self.mix["hooks"] in ON_PARAMETERS  # an earlier backward's gradients may arrive in it
        with warnings.catch_warnings():  # torch.func.jvp compiles by torch.jit.script, which torch calls deprecated
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
            found = self._each(bodies[event])
        self.world.is_noting = True
        for rank, each in found.items():
            self.world.note(rank, event, each)
        self._rest()

    def _rest(self) -> None:
        if self.mix["point"] in ("after backward", "after step"):
            self.world.rest()

    def _copy(self) -> None:
        """Evaluates a copy of each model."""
        models = self.world.models
        self.world.models = {rank: copy.deepcopy(model) for rank, model in models.items()}
        self.evaluate("of a copy")
        self.world.models = models
