"""The table of torch's private names is complete, and each name that is hidden ends in its message or its fallback."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp2 import _torch, _torch_compiler, _torch_names
from fsdp2._torch_names import NAMES, WRITTEN, TorchName
from fsdp2.errors import FSDPNotImplementedError
from tests.harness.documents import ROOT
from tests.harness.hiding import without

PACKAGE = ROOT / "fsdp2"
FILES = sorted(each for each in PACKAGE.rglob("*.py") if each.name != "_torch_names.py")
USES = ("_torch.py", "_torch_compiler.py")

NOT_TORCHS = {
    "sys": ("_getframe", "_current_frames"),
    "argparse": ("_actions", "_SubParsersAction"),
    "named tuples": ("_fields", "_make"),
    "what fsdp2 writes on objects of others": (
        "_fsdp2_registry",
        "_fsdp_delivered",
        "_fsdp_flattened",
        "_fsdp_class",
        "_fsdp_former",
        "_fsdp_lent",
        "_fsdp_param",
        "_fsdp_successor",
        "_fsdp_use_orig_params",
        "_fsdp1_came_in",
        "_is_fsdp_managed_module",
    ),
    "what programs set": ("_wrap_overrides", "_no_split_modules", "_is_deferred"),
    "what it offers to programs that read torch's private state": ("_fsdp_param_groups",),
}
"""Private names that the source reads, and whose they are."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def aliases_in(nodes: list[ast.AST]) -> dict[str, str]:
    """Names of a file that stand for something of torch, and for what."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or alias.name] = alias.name
                    found.setdefault("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The path in torch that a chain of attributes stands for; None if it begins with something else."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, aliases)
        return None if before is None else f"{before}.{node.attr}"
    return None


def looked_up(node: ast.Call) -> Iterator[str]:
    """Names in strings: of `getattr` and its like, of `operator.attrgetter`."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("getattr", "hasattr", "setattr", "delattr", "attrgetter"):
        for each in node.args:
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value


def defined_names(nodes: list[ast.AST]) -> set[str]:
    """Every name that the code gives to something."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if getattr(node.value, "id", "") in ("self", "cls") else set()
    return found


KINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Name, ast.Attribute, ast.Call)


@functools.cache
def uses() -> dict[str, set[str]]:
    """Private names of torch in the source: paths, or single attributes where it cannot be seen of what; and where."""
    files = {
        path: [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, KINDS)] for path in FILES
    }
    others = {each for names in NOT_TORCHS.values() for each in names}
    of_file = {path: defined_names(nodes) for path, nodes in files.items()}
    ours = others.union(*of_file.values())
    found: dict[str, set[str]] = {}
    for path, nodes in files.items():
        known = others | of_file[path] if path.name in USES else ours
        for name in uses_in(nodes, known):
            found.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    return found


def uses_in(nodes: list[ast.AST], ours: set[str]) -> Iterator[str]:
    """Those of one file; ``ours``: what other private names may be."""
    aliases = aliases_in(nodes)
    yield from [each for each in aliases.values() if any(map(is_private, each.split(".")))]
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Call):
            yield from [each for each in looked_up(node) if is_private(each) and each.split(".")[0] not in ours]
        elif isinstance(node, ast.Attribute):
            whole = dotted(node, aliases)
            if whole is not None:
                if id(node) not in inner and any(map(is_private, whole.split("."))):
                    yield whole
            elif is_private(node.attr) and node.attr not in ours:
                yield node.attr


def is_in_table(use: str) -> bool:
    paths = [name.shown for name in NAMES]
    if "." not in use:
        return use in WRITTEN or any(use in path.split(".") for path in paths)
    return any(f"{use}.".startswith(f"{path}.") or f"{path}.".startswith(f"{use}.") for path in paths)


def test_every_private_name_of_torch_in_the_source_is_in_the_table() -> None:
    found = uses()
    assert len(found) > 80
    assert {use: where for use, where in found.items() if not is_in_table(use)} == {}


def test_the_walk_sees_each_way_of_using_a_name() -> None:
    assert is_in_table("torch._C._has_storage") and not is_in_table("torch._C._has_storages")
    found = uses()
    for use in (
        "torch.distributed.distributed_c10d._coalescing_manager",  # by an alias
        "_spec",  # operator.attrgetter
        "_get_backend",  # of an instance
        "torch._inductor.custom_graph_pass.CustomGraphPass",  # imported in a function
        "torch.nn.modules.batchnorm._BatchNorm",  # not in the two files
    ):
        assert use in found, use


def test_every_name_of_the_table_is_used() -> None:
    source = "\n".join(path.read_text() for path in FILES)
    words = set(re.findall(r"\w+", source))
    assert [name.shown for name in NAMES if name.shown.split(".")[-1] not in words] == []


def test_the_table_says_one_thing_of_each_name() -> None:
    assert len({name.path for name in NAMES}) == len(NAMES)
    for name in NAMES:
        assert name.needed_for and not (name.feature and name.otherwise), name
        assert not name.unless or any(other.path == name.unless and other.otherwise for other in NAMES), name


def test_what_no_probe_can_find_has_a_test() -> None:
    tests = (ROOT / "tests" / "unit" / "test_torch_names.py").read_text()
    assert all(f"def {test}(" in tests for test in WRITTEN.values())


def test_a_hidden_name_is_named_where_it_is_needed() -> None:
    for name in NAMES:
        with pytest.MonkeyPatch.context() as patch:
            if name.feature:  # what is hidden is asked for alone: its module is not imported
                patch.setattr(_torch_names, "NAMES", (name,))
            patch.setattr(_torch_names, "_look_up", without(*filter(None, (name.path, name.unless))))
            _torch_names.missing_for.cache_clear()
            try:
                _assert_it_is_named(name)
            finally:
                _torch_names.missing_for.cache_clear()


def _assert_it_is_named(name: TorchName) -> None:
    if name.is_required:
        with pytest.raises(ImportError) as caught:
            _torch_names.require("2.16.0", "torch 2.11 to 2.15", "Install another.")
        first, line, last = str(caught.value).splitlines()
        assert "torch 2.16.0" in first and "torch 2.11 to 2.15" in first and "open an issue" in last
        assert name.shown in line and name.needed_for in line
    else:
        _torch_names.require("2.16.0", "torch 2.11 to 2.15", "Install another.")
    if name.feature:
        with pytest.raises(FSDPNotImplementedError, match=re.escape(name.shown)) as refused:
            _torch_names.need(name.feature)
        assert name.feature in str(refused.value) and torch.__version__ in str(refused.value)


def test_an_argument_that_is_gone_is_named() -> None:
    name = TorchName("torch:ops.aten._chunk_cat.out", "copies", ("tensors", "chunks"))
    assert _torch_names.lacking(name) == "the argument chunks of torch.ops.aten._chunk_cat.out"


def _use_compiler() -> None:
    _torch_compiler.need_compiler()


def _use_symmetric_memory() -> None:
    _torch.use_symmetric_memory("CUDA", None)  # type: ignore[arg-type]


def _use_transforms() -> None:
    with _torch.without_functorch():
        pass


def _show() -> None:
    _torch.silent_group_like(None)  # type: ignore[arg-type]


def _simulate() -> None:
    _torch.begin_simulated_world(0, 2)


REFUSING = {
    _torch_names.COMPILING: _use_compiler,
    _torch_names.SYMMETRIC: _use_symmetric_memory,
    _torch_names.TRANSFORMS: _use_transforms,
    _torch_names.SHOWING: _show,
    _torch_names.SIMULATING: _simulate,
}


@pytest.fixture
def lacking_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """No feature has its names."""
    monkeypatch.setattr(_torch_names, "missing_for", lambda feature: (f"what {feature} needs",))


@pytest.mark.parametrize("feature", REFUSING)
def test_a_feature_refuses_when_it_is_used(feature: str, lacking_features: None) -> None:
    with pytest.raises(FSDPNotImplementedError, match=re.escape(f"lacks what {feature} needs")):
        REFUSING[feature]()


def test_graphs_are_not_reordered_and_it_says_so(lacking_features: None) -> None:
    with pytest.warns(UserWarning, match="overlap of communication in graphs of inductor cannot work"):
        _torch_compiler.reorder_graphs.__wrapped__(lambda graph: {}, "version")


def test_frames_are_not_skipped_without_the_names(lacking_features: None) -> None:
    _torch_compiler.skip_frames([test_frames_are_not_skipped_without_the_names.__code__])


def test_every_feature_of_the_table_is_tried() -> None:
    others = {_torch_names.OVERLAP, _torch_names.COMPAT_FSDP1}  # the last one below
    assert {name.feature for name in NAMES if name.feature} == others | set(REFUSING)


PROGRAM = "tests/programs/hidden_names.py"


def run_hidden(*arguments: str) -> dict[str, dict[str, Any]]:
    """What became of each name, by its path."""
    command = [sys.executable, "-W", "ignore", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {each["path"]: each for each in map(json.loads, done.stdout.splitlines())}


def judge(name: TorchName, found: dict[str, Any]) -> None:
    """In a process of its own, from which the name was taken."""
    if name.is_required and not (name.unless and _torch_names.has(name.unless)):
        assert found["error"] == "ImportError" and name.shown in found["text"], found
        assert name.needed_for in found["text"] and "open an issue" in found["text"]
    elif name.feature == _torch_names.COMPAT_FSDP1:
        assert found["error"] == "FSDPNotImplementedError" and name.shown in found["text"], found
    else:
        assert found["error"] == "" and found["ranks"] == [0, 0], found


@pytest.mark.full  # a hundred names, each in a process of its own; a quarter of them train: two minutes
def test_names_that_are_taken_from_torch() -> None:
    """Every required one and every one with something in its place; of each feature the first."""
    found = run_hidden()
    firsts = {name.feature: name.path for name in reversed(NAMES) if name.feature}
    assert set(found) == {name.path for name in NAMES if not name.feature or firsts[name.feature] == name.path}
    for name in NAMES:
        if name.path in found:
            judge(name, found[name.path])
    assert sum(each["is_gone"] for each in found.values()) > len(found) // 2
