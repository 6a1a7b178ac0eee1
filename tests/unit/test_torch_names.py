"""The private names of torch that compiled graphs rely on: each test fails by the name of what has changed."""

from __future__ import annotations

import inspect
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo.config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy

from fsdp2 import _torch, _torch_compiler
from fsdp2.compiled.frames import begin_graphs_at_calls_only
from tests.unit.helpers import for_each


@pytest.fixture(autouse=True)
def forgets_graphs() -> Any:
    """Nothing that was compiled before, or is compiled here, is used by another test."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*isinstance.*treespec.*")
        yield
    torch._dynamo.reset()


@pytest.mark.full
def test_frame_callback_says_whether_a_compiled_call_is_under_way() -> None:
    """`torch._C._dynamo.eval_frame.get_eval_frame_callback`: false outside, true below ``torch.compile``."""
    seen: list[bool] = []

    @torch.compiler.disable(recursive=False)
    def look() -> None:
        seen.append(bool(_torch_compiler.frame_callback()))

    def run(x: Tensor) -> Tensor:
        look()
        return x + 1

    look()
    torch.compile(run, backend="eager")(torch.ones(2))
    look()
    assert seen == [False, True, False]


@pytest.mark.full
def test_frame_callback_is_false_below_disabled_functions() -> None:
    seen: list[bool] = []

    @torch.compiler.disable
    def look() -> None:
        seen.append(bool(_torch_compiler.frame_callback()))

    torch.compile(lambda x: look() or x + 1, backend="eager")(torch.ones(2))
    assert seen == [False]


def skipped(x: Tensor) -> Tensor:
    """Called by `caller`; no graph begins here."""
    return begins(x)


def begins(x: Tensor) -> Tensor:
    """The first frame that may."""
    return x + 1


@pytest.mark.full
def test_skip_code_lets_the_next_frame_begin_the_graph() -> None:
    """`set_code_exec_strategy`, of which tracing through from a caller does not take notice."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(" ".join(node.name for node in graph.graph.nodes))
        return graph

    _torch_compiler.skip_frames([skipped.__code__])
    torch.compile(skipped, backend=backend)(torch.ones(2))
    assert len(graphs) == 1
    torch._dynamo.reset()
    torch.compile(lambda x: skipped(x) * 2, backend=backend, fullgraph=True)(torch.ones(2))
    assert len(graphs) == 2 and "mul" in graphs[1]


def hook(x: Tensor) -> Tensor:
    """Skipped with what it calls."""
    return begins(x)


def test_functions_of_modules_that_are_imported_later_are_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `fsdp2.compat` are, which a program may import after its first `fully_shard`."""
    later = ModuleType("fsdp2.later")
    exec(compile("def double(x):\n    return x.mul(2)\n", __file__, "exec"), vars(later))  # in a file, as modules are
    begin_graphs_at_calls_only()
    monkeypatch.setitem(sys.modules, later.__name__, later)
    begin_graphs_at_calls_only()
    graphs = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    assert torch.compile(later.double, backend=counting)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert not graphs


def test_skipped_callees_begin_no_graph() -> None:
    """`FrameExecStrategy(SKIP, SKIP)`."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    _torch_compiler.skip_frames([hook.__code__], callees=True)
    torch.compile(hook, backend=backend)(torch.ones(2))
    assert graphs == []
    torch.compile(lambda x: hook(x) * 2, backend=backend, fullgraph=True)(torch.ones(2))
    assert len(graphs) == 1


class _Doubles(torch.autograd.Function):
    """Its forward is traced as one operation of another, with the policy of the test."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, policy: CheckpointPolicy) -> Tensor:
        with _torch_compiler.tagged(policy, (0, None)):
            return torch.exp(x) * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 3, None


def opaque_must_recompute(x: Tensor) -> Tensor:
    return _Doubles.apply(x, CheckpointPolicy.MUST_RECOMPUTE)


def opaque_must_save(x: Tensor) -> Tensor:
    return _Doubles.apply(x, CheckpointPolicy.MUST_SAVE)


@pytest.mark.full
@pytest.mark.parametrize(("function", "saves"), [(opaque_must_recompute, False), (opaque_must_save, True)])
def test_current_meta_tags_are_obeyed_by_the_partitioner(function: Any, saves: bool) -> None:
    """`torch.fx.traceback.current_meta`: "recompute" and "ac_graph_id", put into nodes while they are traced."""
    backward: list[list[str]] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        backward.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
    )
    _torch_compiler.call_opaquely(function)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return (w * function(x)).sum()

    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    torch.compile(loss, backend=backend, fullgraph=True)(x, w).backward()
    assert w.grad is not None and torch.allclose(w.grad, torch.exp(x.detach()) * 2)
    assert ("aten.exp.default" in backward[0]) == (not saves), backward


def test_tags_leave_the_meta_as_it_was() -> None:
    meta: Any = torch.fx.traceback.current_meta
    meta["recompute"] = CheckpointPolicy.PREFER_SAVE
    try:
        with _torch_compiler.tagged(CheckpointPolicy.MUST_RECOMPUTE, (0, None)):
            assert meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE and "ac_graph_id" in meta
        assert meta == {"recompute": CheckpointPolicy.PREFER_SAVE}
    finally:
        meta.pop("recompute")


def test_a_compiled_method_keeps_what_it_calls_in_a_variable_named_fn() -> None:
    """Of `torch.compile`'s wrapper, in `Module._compiled_call_impl`: replaced when a compiled module is sharded."""
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    compiled = module._compiled_call_impl
    assert "fn" in compiled.__code__.co_freevars
    called: list[str] = []

    class Other(nn.Linear):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            called.append("ours")
            return super()._call_impl(*args, **kwargs)

    module.__class__ = Other
    _torch_compiler.recompile_from(module)
    module(torch.ones(1, 2))
    assert called == ["ours"]


def test_recompiling_what_was_never_compiled_does_nothing() -> None:
    module = nn.Linear(2, 2)
    _torch_compiler.recompile_from(module)
    assert module._compiled_call_impl is None


def test_dynamo_has_the_switch_for_side_effects_in_checkpoints() -> None:
    """`torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint`."""
    assert hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint")
    _torch_compiler.trace_through_checkpoints()
    assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint is True


@for_each(
    ("name", "arguments"),
    [
        ("all_gather_into_tensor", ["input", "group_size", "group_name"]),
        ("reduce_scatter_tensor", ["input", "reduce_op", "group_size", "group_name"]),
        ("all_reduce", ["input", "reduce_op", "group_name"]),
        ("wait_tensor", ["tensor"]),
    ],
)
def test_functional_collectives(name: str, arguments: list[str]) -> None:
    """`torch.ops._c10d_functional`."""
    schema = getattr(torch.ops._c10d_functional, name).default._schema
    assert [argument.name for argument in schema.arguments][: len(arguments)] == arguments


def test_modules_call_through_call_impl() -> None:
    """`nn.Module.__call__` is `_wrapped_call_impl`, which calls what was compiled, or `_call_impl`."""
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert "_compiled_call_impl" in inspect.getsource(nn.Module._wrapped_call_impl)
    assert "_call_impl" in inspect.getsource(nn.Module.compile)


def test_dynamo_begins_graphs_inside_modules_whose_forward_is_not_torchs() -> None:
    """At the frame after `_call_impl`, if it lies outside of torch; else around all of it."""
    outside: list[bool] = []

    class Ours(nn.Module):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            outside.append(not torch.compiler.is_dynamo_compiling())
            return self.next(*args, **kwargs)

        def next(self, *args: Any, **kwargs: Any) -> Any:
            return super()._call_impl(*args, **kwargs)

        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    _torch_compiler.skip_frames([Ours._call_impl.__code__])
    module = Ours()
    called = torch.compile(module, backend="eager", fullgraph=True)
    for _ in range(2):
        called(torch.ones(2))
    assert outside == [True, True]


def test_parameters_of_a_module_are_in_the_dict_that_is_swapped() -> None:
    """`nn.Module._parameters`: a tensor put there is what the module reads, in graphs as well."""
    module = nn.Linear(2, 2, bias=False)
    module._parameters["weight"] = torch.full((2, 2), 3.0)  # type: ignore[assignment]
    found = torch.compile(module, backend="eager", fullgraph=True)(torch.ones(1, 2))
    assert torch.equal(found, torch.full((1, 2), 6.0))


def test_a_hook_that_is_prepended_stands_first_in_the_dict_too() -> None:
    """Dynamo of 2.11 counts hooks by the dict's own order, and found a function where a method was."""
    module = torch.nn.Linear(2, 2)
    calls: list[str] = []
    first = module.register_forward_pre_hook(lambda module, args: calls.append("before"))
    handle = _torch.prepend_forward_hook(module, lambda module, args, kwargs: calls.append("prepended"))
    module(torch.ones(2))
    assert calls == ["prepended", "before"]
    hooks = module._forward_pre_hooks
    assert list(dict.keys(hooks)) == list(hooks) == [handle.id, first.id]
    handle.remove()
    assert list(hooks) == [first.id]
