"""The structure of the package, read with `ast`: folders, docstrings, annotations, forbidden imports."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fsdp2"
FILES = sorted(PACKAGE.rglob("*.py"))

# Files at the top that know nothing of sharding, and then the folders. Each may import those before it; the first
# folder, the core, has none before it.
BASE = ("errors", "_remedies", "arguments", "_torch_names", "_torch", "_torch_compiler", "_versions")
ORDER = ("core", "plugs", "ragged", "compiled", "optim", "api", "model", "grouping", "checkpoint", "tools")
# The package's face, the names of before, and the command line, which may import everything but `compat`.
FACES = ("__init__", "__main__", "_moved", "experimental")
# The commands start all that there is, `compat` too.
COMMANDS = "tools.commands."


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")


def imports(tree: ast.AST, *, for_types: bool = True) -> list[str]:
    """Every imported module, ``from a import b`` as ``a.b``; those ``for_types`` alone too."""
    found = []
    types = {id(each) for node in ast.walk(tree) if is_for_types(node) for each in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in types and not for_types:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def is_for_types(node: ast.AST) -> bool:
    """Whether it is an ``if TYPE_CHECKING:``."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


MODULES = {module_name(path) for path in FILES}


def imported_module(name: str) -> str | None:
    """Of an imported name of fsdp2, the module that it is of, or is; None for the package's face."""
    parts = name.split(".")[1:]
    known = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((each for each in known if each in MODULES), None)


def folder(module: str) -> str:
    return module.partition(".")[0] if "." in module else ""


@functools.cache
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


def imported_modules(path: Path, *, for_types: bool = True) -> set[str]:
    """Those of fsdp2 that the file imports, also inside functions."""
    found = {imported_module(name) for name in imports(parse(path), for_types=for_types) if name.startswith("fsdp2.")}
    return {module for module in found if module is not None}


def test_folders_import_what_they_stand_on() -> None:
    for path in FILES:
        own = module_name(path)
        if own in FACES or folder(own) == "compat":
            continue
        assert folder(own) in ORDER or own in BASE, f"{own} is in no folder of the architecture"
        before = [*BASE, *ORDER]
        rank = before.index(own if own in BASE else folder(own))
        for target in imported_modules(path):
            if own.startswith(COMMANDS) and folder(target) == "compat":
                continue
            name = target if target in BASE else folder(target)
            assert name == folder(own) or name in before[:rank], f"{own} imports {target}"


def test_nothing_imports_in_circles() -> None:
    """But for types: files of one folder may name each other's."""
    targets = {module_name(path): imported_modules(path, for_types=False) for path in FILES}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for target in targets[module]:
                visit(target, (*way, module))
            done.add(module)

    for module in targets:
        visit(module, ())


def test_nothing_is_imported_by_a_name_that_is_made() -> None:
    for path in FILES:
        if folder(module_name(path)) == "core":
            assert not any(name.split(".")[0] == "importlib" for name in imports(parse(path))), path


def test_compat_stands_on_the_public_surface() -> None:
    for path in sorted((PACKAGE / "compat").rglob("*.py")):
        for name in imports(parse(path)):
            # The table of torch's private names is no part of the engine: it has those that compat touches too.
            allowed = ("compat", "_torch_names")
            assert not name.startswith("fsdp2.") or name.split(".")[1] in allowed, f"{path}: {name}"


def test_torchs_own_implementation_is_not_imported() -> None:
    for path in FILES:
        if PACKAGE / "compat" not in path.parents:
            # The registries of all composable functions, replicate's too.
            shared = ("torch.distributed._composable.contract.", "torch.distributed._composable_state.")
            for name in imports(parse(path)):
                if path.name == "_torch.py" and name.startswith(shared):
                    continue
                assert not name.startswith(("torch.distributed.fsdp", "torch.distributed._composable")), (
                    f"{path}: {name}"
                )


def test_private_names_of_torch_stay_in_two_files() -> None:
    for path in FILES:
        if path.name in ("_torch.py", "_torch_compiler.py"):
            continue
        # The check of dispatch that needs no pytree.
        allowed = {"torch.utils._python_dispatch.is_traceable_wrapper_subclass"}
        for name in imports(parse(path)):
            if name.startswith("torch") and name not in allowed:
                assert not any(part.startswith("_") for part in name.split(".")), f"{path}: {name}"


def test_files_say_what_they_are() -> None:
    for path in FILES:
        assert ast.get_docstring(parse(path)), f"{path} begins without a docstring"


def test_functions_are_annotated_short_and_documented() -> None:
    for path in FILES:
        for name, node in functions(parse(path)):
            assert node.returns is not None, f"{path}: {name} has no return annotation"
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            missing = [arg.arg for arg in every if arg.annotation is None and arg.arg not in ("self", "cls")]
            assert not missing, f"{path}: {name}: no annotation on {missing}"
            body = [statement for statement in node.body if not _is_docstring(statement)]
            if body:
                length = (body[-1].end_lineno or 0) - body[0].lineno + 1
                assert length <= 60, f"{path}: {name} has {length} lines"
            public = not any(part.startswith("_") for part in name.split("."))
            overload = any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)
            if public and not overload:
                assert ast.get_docstring(node), f"{path}: {name} has no docstring"


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_tests_import_helpers_and_never_tests() -> None:
    """From the harness or from `helpers` beside them: so a test can be moved, renamed or deleted by itself."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        folder = ".".join(path.relative_to(ROOT).parent.parts)
        for name in imports(parse(path)):
            parts = name.split(".")
            beside = parts[: parts.index("helpers")] if "helpers" in parts else None
            far = beside is not None and not f"{folder}.".startswith(".".join(beside) + ".")
            if parts[0] == "tests" and (far or any(part.startswith("test_") for part in parts)):
                found[str(path.relative_to(ROOT))] = name
    assert found == {}


def test_folders_of_tests_hold_tests_and_their_helpers_alone() -> None:
    """Programs that tests start in a process of their own stand beside them, each named here."""
    programs = {f"tests/programs/{each}.py" for each in ("hidden_names", "ranks_that_fail", "without_features")}
    tests = ROOT / "tests"
    for folder in {path.parent for path in tests.rglob("test_*.py")}:
        files = {path for path in folder.glob("*.py") if not path.name.startswith("test_")}
        others = {path for path in files if path.name not in ("conftest.py", "__init__.py", "helpers.py")}
        assert {path.relative_to(ROOT).as_posix() for path in others} <= programs
    helpers = [path for path in tests.rglob("test_*.py") if {"harness", "helpers"} & {*path.relative_to(tests).parts}]
    assert not helpers


def test_no_two_files_of_tests_share_a_name() -> None:
    """A name says the behaviour: two of one name are one file, or one of them says too little."""
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_public_surface_is_documented() -> None:
    import fsdp2

    for name in fsdp2.__all__:
        assert getattr(fsdp2, name).__doc__, name


def test_contributing_fits_a_page() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 70


def test_the_cores_readme_lists_its_ports() -> None:
    text = (PACKAGE / "core" / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    ports = set()
    for path in sorted((PACKAGE / "core").glob("*.py")):
        for node in parse(path).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                kind = ast.unparse(node.annotation)
                if kind.startswith("Port[") or node.target.id.startswith("ON_"):
                    ports.add(f"{path.stem}.{node.target.id}")
    assert 8 <= len(ports) <= 12
    assert not [port for port in ports if f"`{port}`" not in text]


def test_the_cores_readme_names_files_that_there_are() -> None:
    text = (PACKAGE / "core" / "README.md").read_text()
    beside = {each.name for each in (PACKAGE / "core").iterdir()}
    for name in re.findall(r"`([\w/]+\.(?:py|md))", text):
        places = [PACKAGE / name, ROOT / name, ROOT / "tests" / name]
        assert name in beside or any(each.exists() for each in places), name
