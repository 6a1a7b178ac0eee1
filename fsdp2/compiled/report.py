"""`compile_report`: which groups are part of graphs, and whether these keep their unsharded parameters for backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdp2.arguments import checked
from fsdp2.compiled.tracing import RefusedState, TracedState
from fsdp2.core.group import FSDPParamGroup
from fsdp2.core.state import FSDPState, states_below
from fsdp2.errors import FSDPValueError


@dataclass(frozen=True, slots=True)
class CompiledGroup:
    """One group in a `CompileReport`.

    Attributes:
        name: the name of its module, below the root.
        captured: whether its communication is part of a graph.
        why: the reason if it is not.
        gathers_again: whether backward gathers again, so that nothing unsharded is saved for it; None if not captured.
        because: the setting that has decided ``gathers_again``.
    """

    name: str
    captured: bool
    why: str
    gathers_again: bool | None
    because: str

    def __str__(self) -> str:
        if not self.captured:
            return f"{self.name}: not captured: {self.why}"
        kept = "resharded after forward" if self.gathers_again else "kept from forward to backward"
        return f"{self.name}: captured, {kept} ({self.because})"


@dataclass(frozen=True, slots=True)
class CompileReport:
    """The result of `compile_report`, to be printed.

    Attributes:
        groups: one entry for each group, in the order of ``model.modules()``.
    """

    groups: tuple[CompiledGroup, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all groups are captured."""
        return all(group.captured for group in self.groups)

    def __str__(self) -> str:
        return "\n".join(str(group) for group in self.groups)


@checked()
def compile_report(model: nn.Module) -> CompileReport:
    """Say for each group of ``model`` whether graphs of `torch.compile` hold its communication, as of its last call.

        >>> compiled = torch.compile(model, fullgraph=True)
        >>> compiled(batch).sum().backward()
        >>> print(fsdp2.compile_report(model))
        blocks.0: captured, resharded after forward (reshard_after_forward=True)

    Every rank may call it; nothing is communicated.

    Args:
        model: a sharded model that was called once in its compiled form.

    Raises:
        FSDPTypeError: ``model`` is no module.
        FSDPValueError: nothing in it is sharded.
    """
    model = getattr(model, "_orig_mod", model)
    states = states_below(model)
    if not states:
        raise FSDPValueError(
            f"fully_shard was called on no module of {type(model).__name__}: call it before compile_report()."
        )
    groups: dict[FSDPParamGroup, CompiledGroup] = {}
    for state in states:
        for group in state.unit:
            groups.setdefault(group, _described(state, group.name))
    return CompileReport(tuple(groups.values()))


def _described(state: FSDPState, name: str) -> CompiledGroup:
    traced = state.prepared_hooks
    if isinstance(traced, RefusedState):
        return CompiledGroup(name, False, traced.reason, None, "")
    if not isinstance(traced, TracedState):
        return CompiledGroup(name, False, "no compiled call of it, or of a module around it, has begun", None, "")
    if traced.escapes:
        why = (
            f"its hooks ran outside of a graph {traced.escapes} times: there is a graph break in it, or in a module "
            "around it. torch.compile(fullgraph=True) says where"
        )
        return CompiledGroup(name, False, why, None, "")
    asked = state.reshard_after_forward
    because = f"reshard_after_forward={asked}"
    if asked is None:
        because += ", and it is the root" if state.is_root else ", and it is not the root"
    return CompiledGroup(name, True, "", not state.is_root if asked is None else asked, because)
