"""The structure of the package, read with `ast`: layers, sizes, docstrings, annotations, forbidden imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fsdp2"
FILES = sorted(PACKAGE.rglob("*.py"))

# Folders stand on each other in this order, and so do the files of a folder.
LAYERS = {
    "": ("common", "arguments", "_torch", "_torch_compiler"),
    "plan": (
        "other_words",
        "policies",
        "ownership",
        "layout",
        "mesh_records",
        "mesh",
        "strategies",
        "reduction_groups",
        "owners",
        "whole_operators",
        "dtensors",
        "placement",
        "group_plan",
        "structure",
    ),
    "ragged": ("placement", "operators", "dtensor"),
    "params": (
        "write_counter",
        "replaced",
        "param",
        "registrations",
        "memory",
        "buffers",
        "custom_comm",
        "wider_dtype",
        "gather",
        "post_forward",
        "extensions",
        "storage",
        "host_sums",
        "gradient_buffer",
        "packing",
        "gradients",
        "shard_arguments",
    ),
    "comm": ("comm_context", "scaling", "agreement", "announce", "transport", "peers", "whole"),
    "runtime": (
        "settings",
        "reducer",
        "param_group",
        "schedule",
        "trees",
        "hooks",
        "module_hooks",
        "misuse",
        "half_backward",
        "root",
        "root_checks",
        "claiming",
        "copying",
        "torch_view",
        "untraced",
        "state",
    ),
    "compiled": (
        "specs",
        "unsharding",
        "overlap",
        "grad_sinks",
        "tracing",
        "support",
        "entry",
        "report",
        "frames",
    ),
    "optim": (
        "offload",
        "guard",
        "zeroing",
        "owner_step",
        "runs",
        "step_targets",
        "state_cache",
        "adapter",
        "clip_grad",
    ),
    "modules": (
        "handles",
        "forward_methods",
        "module_copies",
        "new_modules",
        "module",
        "functions",
        "unwrapping",
        "tying",
        "replicated",
        "torch_patches",
    ),
}
TOP = (
    "_moved",
    "api",
    "grouping.module_tree",
    "grouping.blocks",
    "grouping.group_choice",
    "grouping.sharding",
    "__init__",
)
NAMES = [*(f"{folder}.{name}".strip(".") for folder, names in LAYERS.items() for name in names), *TOP]
RANK = {name: index for index, name in enumerate(NAMES)}
# Of a folder, its docstring, and of `optim` its public names.
FACES = {
    f"{folder}.__init__"
    for folder in ("plan", "ragged", "params", "comm", "runtime", "compiled", "optim", "modules", "grouping")
}


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")


def imports(tree: ast.AST) -> list[str]:
    """Every imported module, ``from a import b`` as ``a.b``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def imported_module(name: str) -> str | None:
    """Of an imported name of fsdp2, the module it is of or is; None for a name of a folder's face."""
    parts = name.split(".")[1:]
    known = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    found = next((each for each in known if each in RANK), None)
    assert found or f"{parts[0]}.__init__" in FACES, f"{name} is in no layer"
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def functions(tree: ast.AST) -> list[tuple[str, ast.FunctionDef]]:
    """Functions and methods at module and class level, by qualified name."""
    found: list[tuple[str, ast.FunctionDef]] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            found += [(f"{node.name}.{name}", each) for name, each in functions(node)]
    return found


def test_every_module_has_a_layer() -> None:
    assert {module_name(path) for path in FILES if path.parent.name != "compat"} == set(RANK) | FACES


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    if path.parent.name == "compat" or module_name(path) in FACES:
        return
    own = RANK[module_name(path)]
    for name in imports(parse(path)):
        if name.startswith("fsdp2."):
            target = imported_module(name)
            assert target is None or RANK[target] < own, f"{module_name(path)} imports {target}, which is not below it"


@pytest.mark.parametrize("path", sorted((PACKAGE / "compat").glob("*.py")), ids=module_name)
def test_compat_stands_on_the_public_surface(path: Path) -> None:
    for name in imports(parse(path)):
        assert not name.startswith("fsdp2.") or name.split(".")[1] == "compat", name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_torchs_own_implementation_is_not_imported(path: Path) -> None:
    if path.parent.name != "compat":
        # The registries of all composable functions, replicate's too.
        shared = ("torch.distributed._composable.contract.", "torch.distributed._composable_state.")
        for name in imports(parse(path)):
            if path.name == "_torch.py" and name.startswith(shared):
                continue
            assert not name.startswith(("torch.distributed.fsdp", "torch.distributed._composable")), name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_private_names_of_torch_stay_in_two_files(path: Path) -> None:
    if path.name in ("_torch.py", "_torch_compiler.py"):
        return
    # Methods and mappings of nn.Module that every subclass may override or read, and the pytree-free dispatch check.
    allowed = {"torch.utils._python_dispatch.is_traceable_wrapper_subclass"}
    for name in imports(parse(path)):
        if name.startswith("torch") and name not in allowed:
            assert not any(part.startswith("_") for part in name.split(".")), name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_say_what_they_are(path: Path) -> None:
    assert ast.get_docstring(parse(path)), "a module begins with a docstring"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_functions_are_annotated_short_and_documented(path: Path) -> None:
    for name, node in functions(parse(path)):
        assert node.returns is not None, f"{name} has no return annotation"
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        missing = [arg.arg for arg in every if arg.annotation is None and arg.arg not in ("self", "cls")]
        assert not missing, f"{name}: no annotation on {missing}"
        body = [statement for statement in node.body if not _is_docstring(statement)]
        if body:
            length = (body[-1].end_lineno or 0) - body[0].lineno + 1
            assert length <= 60, f"{name} has {length} lines"
        public = not any(part.startswith("_") for part in name.split("."))
        overload = any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)
        if public and not overload:
            assert ast.get_docstring(node), f"{name} has no docstring"


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_public_surface_is_documented() -> None:
    import fsdp2

    for name in fsdp2.__all__:
        assert getattr(fsdp2, name).__doc__, name


def test_contributing_fits_a_page() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 70
