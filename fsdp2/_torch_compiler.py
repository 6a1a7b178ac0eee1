"""Every private name of torch's compiler that fsdp2 relies on, as `fsdp2._torch` has those of the rest of torch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.checkpoint import CheckpointPolicy

from fsdp2 import _torch_names

F = TypeVar("F", bound=Callable[..., Any])

_NAMESPACE = "fsdp2"
"""The namespace of fsdp2's operators."""


def functional_all_gather(input: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The (n,) of each of the ``size`` ranks of the group of this name, as (size * n,); waited for."""
    output = torch.ops._c10d_functional.all_gather_into_tensor(input, size, group)
    return torch.ops._c10d_functional.wait_tensor(output)  # type: ignore[no-any-return]


def functional_reduce_scatter(input: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    """This rank's (n,) of ``input`` (size * n,), reduced by ``op`` ("sum", "avg"); waited for."""
    output = torch.ops._c10d_functional.reduce_scatter_tensor(input, op, size, group)
    return torch.ops._c10d_functional.wait_tensor(output)  # type: ignore[no-any-return]


def functional_all_reduce(input: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """``input`` reduced over the group of this name; waited for."""
    output = torch.ops._c10d_functional.all_reduce(input, op, group)
    return torch.ops._c10d_functional.wait_tensor(output)  # type: ignore[no-any-return]


_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")


def define_operator(schema: str, run: Callable[..., Any], *, fake: Callable[..., Any]) -> Any:
    """Define an operator that graphs hold as one node. ``fake`` computes what it returns for fake tensors.

    It returns new tensors, writes to none, and has no derivative.
    """
    name = _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


frame_callback = get_eval_frame_callback
"""Returns what looks at Python frames that begin now: Dynamo inside of a compiled function, else None or False."""

_FUNCTIONAL = torch.ops._c10d_functional
WAIT = _FUNCTIONAL.wait_tensor.default
ALL_GATHERS = frozenset({_FUNCTIONAL.all_gather_into_tensor.default})
REDUCE_SCATTERS = frozenset({_FUNCTIONAL.reduce_scatter_tensor.default})
COLLECTIVES = ALL_GATHERS | REDUCE_SCATTERS | {_FUNCTIONAL.all_reduce.default}

_LAST_REGION = 1_000_000
"""The id of a region of activation checkpointing behind all of the user's, so that no node in it is a boundary."""
_NOTE = "fsdp2"


@contextmanager
def tagged(policy: CheckpointPolicy, note: tuple[int, int | None], *, backward: bool = False) -> Iterator[None]:
    """Tag the operators that are traced inside: ``policy`` says whether backward finds or recomputes their results.

    They also carry ``note``, by which later passes over the graph know them.

    ``backward``: it belongs to the backward graph, even if some of it depends on no gradient.
    """
    meta: Any = fx_traceback.current_meta
    tags: dict[str, Any] = {"recompute": policy, "ac_graph_id": _LAST_REGION}
    tags["custom"] = {**meta.get("custom", {}), _NOTE: note}
    if backward:
        tags["partitioner_tag"] = "must_be_in_backward"
    before = {key: meta[key] for key in tags if key in meta}
    meta.update(tags)
    try:
        yield
    finally:
        for key in tags:
            meta.pop(key, None)
        meta.update(before)


def note_of(node: torch.fx.Node) -> tuple[int, int | None] | None:
    """The note that `tagged` has put on ``node``; None without."""
    return node.meta.get("custom", {}).get(_NOTE)  # type: ignore[no-any-return]


@functools.cache
def reorder_graphs(reorder: Callable[[torch.fx.Graph], dict[torch.fx.Node, list[torch.fx.Node]]], version: str) -> None:
    """Let inductor call ``reorder`` with every graph, after a pass of the user's if there is one.

    ``reorder`` returns for each node those that must come before it. If torch lacks the names that this takes, it is
    not called: results are the same, and communication overlaps with less compute.
    """
    missing = _torch_names.missing_for(_torch_names.OVERLAP)
    if missing:
        warnings.warn(_torch_names.says(_torch_names.OVERLAP, missing), stacklevel=2)
        return
    import torch._inductor.config as inductor_config
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    earlier: Any = inductor_config.post_grad_custom_post_pass

    class Reordering(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            if earlier is not None:
                earlier(graph)
            after = reorder(graph)
            preserve_node_ordering(graph, {node: OrderedSet(others) for node, others in after.items()})

        def uuid(self) -> Any:
            if earlier is None:
                return version
            known = getattr(earlier, "uuid", lambda: None)()
            return None if known is None else (version, known)

    inductor_config.post_grad_custom_post_pass = Reordering()


def skip_frames(codes: Iterable[CodeType], *, callees: bool = False) -> None:
    """Let no graph begin at a frame of one of ``codes``, nor at ``callees``. Graphs of callers trace through them.

    If torch lacks the names that this takes, sharded modules refuse calls below ``torch.compile``: `need_compiler`.
    """
    if _torch_names.missing_for(_torch_names.COMPILING):
        return
    from torch._C._dynamo.eval_frame import set_code_exec_strategy  # importing Dynamo takes a second
    from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]

    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP if callees else FrameAction.DEFAULT)
    for code in codes:
        set_code_exec_strategy(code, strategy)


def unskip_frames(codes: Iterable[CodeType]) -> None:
    """Let graphs begin at frames of ``codes`` and their callees again."""
    if _torch_names.missing_for(_torch_names.COMPILING):
        return
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]

    for code in codes:
        set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def need_compiler() -> None:
    """Refuse to be compiled if torch lacks the names that it takes.

    Raises:
        FSDPNotImplementedError: names are missing; the message says which.
    """
    _torch_names.need(_torch_names.COMPILING)


def stays_outside(reason: str) -> Callable[[F], F]:
    """A decorator: graphs break at calls of the function. No graph begins at it, but graphs may begin at its callees.

    It is ``torch.compiler.disable(recursive=False)`` without importing Dynamo and without a call in between. Together
    with `skip_frames` no graph begins at the function.
    """

    def mark(function: F) -> F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return function

    return mark


def call_opaquely(function: Callable[..., Any]) -> None:
    """Let Dynamo put calls of ``function`` into its graphs without looking inside."""
    torch.compiler.allow_in_graph(function)


def trace_through_checkpoints() -> None:
    """Let hooks of sharded modules run inside of activation checkpointing, where they swap parameters.

    They swap them back before the region ends, so backward has nothing to repeat.
    """
    import torch._dynamo.config as dynamo_config

    dynamo_config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def guard_attributes() -> None:
    """Let graphs of sharded modules depend on their attributes, as those of other modules do.

    Without this Dynamo treats what FSDP manages as immutable, and numbers in its lists as sizes. ``1 in self.skip``
    would be no guard then, and a changed list would run the graph of the old one.
    """
    import torch._dynamo.config as dynamo_config

    dynamo_config.skip_fsdp_guards = False


def keep_static(tensors: Iterable[torch.Tensor]) -> None:
    """Let graphs treat the sizes of ``tensors`` as constants, also under ``dynamic=True``, and not as the batch's."""
    import torch._dynamo

    for tensor in tensors:
        torch._dynamo.mark_static(tensor)  # type: ignore[no-untyped-call]


def keep_in_place(tensors: Iterable[torch.Tensor]) -> None:
    """Let inductor's CUDA graphs read ``tensors`` where they lie, instead of copying them before every replay."""
    import torch._dynamo

    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)  # type: ignore[no-untyped-call]


def recompile_from(module: nn.Module) -> None:
    """Let ``module``, compiled before its class changed, call the methods of its new class."""
    compiled = module._compiled_call_impl
    if compiled is None:
        return
    for name, cell in zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True):  # type: ignore[attr-defined]
        if name == "fn":
            cell.cell_contents = module._call_impl
            return
    raise AssertionError("the wrapper that torch.compile makes calls no variable named fn")
