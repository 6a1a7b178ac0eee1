"""`fsdp2.compat`: what the swap replaces and puts back. That programs then run is in `tests/clients`."""

from __future__ import annotations

import abc
import importlib
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.compat import Swap, bridges, fsdp1, install
from fsdp2.compat.__main__ import Program, UsageError, main, parse
from fsdp2.compat.names import HOME, counterparts, counterparts_of_fsdp1, torchs_own
from fsdp2.compat.switch import CHILDREN, AfterImport, reach_children, reaches_children, switched_on
from tests.harness import FakeWorlds
from tests.unit.helpers import for_each

# Other tests of this process may have imported torch's names, or sharded with them.
pytestmark = pytest.mark.filterwarnings("ignore:fsdp2.compat.install:UserWarning")

PUBLIC_MODULES = [
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
]
PIPELINING = ["torch.distributed.pipelining.stage", "torch.distributed.pipelining.schedules"]
NAMES = [pair.name for pair in counterparts()]
FSDP1_NAMES = [pair.name for pair in counterparts_of_fsdp1() if not pair.name.startswith("_")]


def module(name: str) -> ModuleType:
    """By its full name (``import a.b as c`` would find the function ``fully_shard`` for the module of that name)."""
    return importlib.import_module(name)


def bindings(names: list[str]) -> dict[str, object]:
    """Everything that is bound in modules."""
    return {f"{name}.{key}": value for name in names for key, value in vars(module(name)).items()}


@pytest.mark.full
def test_everything_public_in_torch_has_a_counterpart() -> None:
    with install() as swap:
        assert swap.lacking == ()
    assert set(torch.distributed.fsdp._fully_shard.__all__) <= set(NAMES)


@pytest.mark.full
@for_each("name", PUBLIC_MODULES)
def test_names_are_replaced_and_put_back(name: str) -> None:
    before = bindings([name])
    held = [key for key in NAMES if key in vars(module(name))]
    assert "fully_shard" in held
    with install():
        for key in held:
            found, ours = vars(module(name))[key], getattr(fsdp2, key)
            assert found is ours or ours in (getattr(found, "__wrapped__", None), *getattr(found, "__bases__", ())), key
        for key in set(FSDP1_NAMES) & set(vars(module(name))):
            assert vars(module(name))[key] is getattr(fsdp1, key), key
        known = {*NAMES, *FSDP1_NAMES}
        others = {key: value for key, value in bindings([name]).items() if key.rpartition(".")[2] not in known}
        assert others == {key: value for key, value in before.items() if key.rpartition(".")[2] not in known}
    assert bindings([name]) == before


@pytest.mark.full
def test_what_imports_later_gets_ours() -> None:
    with install():
        scope: dict[str, object] = {}
        exec("from torch.distributed.fsdp import fully_shard, FSDPModule", scope)
        exec("from torch.distributed._composable.fsdp.fully_shard import fully_shard as old", scope)
    assert scope["fully_shard"] is scope["old"] is fsdp2.fully_shard
    assert scope["FSDPModule"] is bridges.either(torchs_own("FSDPModule"), fsdp2.FSDPModule)  # type: ignore[arg-type]


def test_what_programs_import_from_where_it_is_defined_is_ours() -> None:
    names = "fully_shard, FSDPModule, UnshardHandle, nn"
    scope: dict[str, object] = {"__name__": "client_of_torch"}
    inside: dict[str, object] = {"__name__": "torch.distributed.something"}
    with install():
        for each in (scope, inside):
            exec(f"from {HOME} import {names}", each)
        exec("from torch.distributed.fsdp import FSDPModule as public", scope)
        assert module(HOME).register_fsdp_forward_method is not torchs_own("register_fsdp_forward_method")
    assert scope["fully_shard"] is fsdp2.fully_shard and scope["FSDPModule"] is scope["public"]
    assert scope["UnshardHandle"] is fsdp2.UnshardHandle and scope["nn"] is nn
    for name in ("fully_shard", "FSDPModule", "UnshardHandle"):
        assert inside[name] is torchs_own(name) is getattr(module(HOME), name)
    assert type(module(HOME)) is ModuleType
    with install(fsdp1=True) as outer, install():
        outer.uninstall()
    assert type(module(HOME)) is ModuleType


@pytest.mark.full
def test_torchs_implementation_stays_intact() -> None:
    private = [f"torch.distributed.fsdp._fully_shard.{name}" for name in ("_fsdp_api", "_fsdp_common")]
    private.append("torch.distributed._composable.replicate_with_fsdp")
    before = bindings(private)
    with install() as swap:
        assert bindings(private) == before
        own = vars(module(HOME))
        assert own["fully_shard"] is torchs_own("fully_shard") is not fsdp2.fully_shard
        assert own["FSDPModule"] is torchs_own("FSDPModule") is not fsdp2.FSDPModule
        # But for what torch._dynamo reads there.
        changed = {each.name for each in swap.replacements if each.module == HOME}
        assert changed == {"get_cls_to_fsdp_cls", "disable_fsdp_module_new_init"}
    assert torchs_own("get_cls_to_fsdp_cls") is own["get_cls_to_fsdp_cls"]


def test_installing_twice_changes_nothing_more() -> None:
    """Nor does uninstalling twice, or an exception."""
    before = bindings(PUBLIC_MODULES)
    with pytest.raises(KeyboardInterrupt), install() as swap:
        assert isinstance(swap, Swap)
        with install() as inner:
            assert inner.replacements == []
        assert torch.distributed.fsdp.fully_shard is fsdp2.fully_shard
        raise KeyboardInterrupt
    assert bindings(PUBLIC_MODULES) == before
    swap.uninstall()
    assert bindings(PUBLIC_MODULES) == before
    with install():
        swap.uninstall()
        assert torch.distributed.fsdp.fully_shard is fsdp2.fully_shard


@pytest.mark.full
def test_a_name_that_fsdp2_lacks_stays_torchs_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = torch.distributed.fsdp.share_comm_ctx
    monkeypatch.setattr(fsdp2, "__all__", [name for name in fsdp2.__all__ if name != "share_comm_ctx"])
    with install() as swap:
        assert torch.distributed.fsdp.share_comm_ctx is torchs
        assert swap.lacking == ("share_comm_ctx",)
        assert "torch.distributed.fsdp.share_comm_ctx stays torch's: fsdp2 has no such name" in str(swap)


@pytest.mark.filterwarnings("default::UserWarning")
def test_what_was_imported_before_is_left_alone_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ModuleType("client_of_torch")
    client.shard = torch.distributed.fsdp.fully_shard  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "client_of_torch", client)
    with pytest.warns(UserWarning, match=r"comes too late for .*client_of_torch\.shard") as warned, install() as swap:
        assert client.shard is torchs_own("fully_shard")
        assert "client_of_torch.shard" in swap.too_early
        assert "client_of_torch.shard stays torch's: it was imported before install()" in str(swap)
    assert warned[0].filename == __file__


def test_where_warnings_are_errors_nothing_stays_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ModuleType("client_of_torch")
    client.shard = torch.distributed.fsdp.fully_shard  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "client_of_torch", client)
    before = bindings(PUBLIC_MODULES)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="comes too late"):
        warnings.simplefilter("error")
        install()
    assert bindings(PUBLIC_MODULES) == before
    assert torch.nn.utils.clip_grad_norm_.__module__.startswith("torch.")


NAMES_OF_PARAMETERS = """
def get_parameter_names(model, forbidden):
    found = []
    for name, child in model.named_children():
        below = get_parameter_names(child, forbidden)
        found += [f"{name}.{each}" for each in below if not isinstance(child, tuple(forbidden))]
    return found + list(model._parameters)
"""


def test_transformers_finds_the_parameters_that_decay(monkeypatch: pytest.MonkeyPatch, simulate: FakeWorlds) -> None:
    """It goes down by ``named_children()``, and looks for what it finds in ``named_parameters()``."""
    client = ModuleType(bridges.TRANSFORMERS[0])
    exec(NAMES_OF_PARAMETERS, vars(client))
    theirs = client.get_parameter_names
    monkeypatch.setitem(sys.modules, bridges.TRANSFORMERS[0], client)
    simulate(2)
    with install():
        wrap = torch.distributed.fsdp.FullyShardedDataParallel
        model = wrap(nn.Sequential(wrap(nn.Linear(2, 2)), nn.LayerNorm(2)))
        decays = client.get_parameter_names(model, [nn.LayerNorm])
        assert decays == ["0.weight", "0.bias"]
        assert set(decays) < {name for name, _ in model.named_parameters()}
    assert client.get_parameter_names is theirs


def test_wrappers_take_false_for_no_offloading(simulate: FakeWorlds) -> None:
    simulate(2)
    model = fsdp1.FullyShardedDataParallel(nn.Linear(2, 2), cpu_offload=False)  # type: ignore[arg-type]
    assert not model.cpu_offload.offload_params


# Pipelining and torch._dynamo, which deal with modules of both implementations


def test_replicated_modules_are_data_parallel_ones_too(simulate: FakeWorlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch: programs ask of all modules whether they reduce gradients, and set by what."""
    simulate(2)
    replicate = module("torch.distributed._composable.replicate_with_fsdp").replicate
    with install():
        public = torch.distributed.fsdp
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        replicated = replicate(model[0], mesh=init_device_mesh("cpu", (2,)))
        public.fully_shard(model[1], mesh=init_device_mesh("cpu", (2,)))
        found = [each for each in model.modules() if isinstance(each, public.FSDPModule)]
        assert found == [*model] and issubclass(type(replicated), public.FSDPModule)
        for each in found:
            each.set_gradient_divide_factor(1.0)
            each.set_requires_gradient_sync(False)
        for group in (each._get_fsdp_state()._fsdp_param_group for each in found):
            assert group.gradient_divide_factor == 1.0 and not group.reduce_grads
        hooked = []
        for each in found:
            each.encode = each.forward
            public.register_fsdp_forward_method(each, "encode")
            hooked.append("encode" in vars(each) and each.encode != each.forward)
        assert hooked == [True, True]
        public.share_comm_ctx([replicated])
        with pytest.raises(ValueError, match=r"FSDPModule"):
            public.share_comm_ctx(found)
        assert pickle.loads(pickle.dumps(public.FSDPModule)) is fsdp2.FSDPModule
        monkeypatch.setattr(public.FSDPModule, "of_a_program", 3, raising=False)
        assert model[1].of_a_program == 3
        monkeypatch.undo()
        assert not hasattr(fsdp2.FSDPModule, "of_a_program")
        unshard = fsdp2.FSDPModule.unshard
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(public.FSDPModule, "unshard", None)
            assert fsdp2.FSDPModule.unshard is None
        assert fsdp2.FSDPModule.unshard is unshard
        own = type("Own", (public.FSDPModule, nn.Module, abc.ABC), {"__module__": __name__})
        own.tag = 1  # type: ignore[attr-defined]
        assert not hasattr(fsdp2.FSDPModule, "tag")
        assert not isinstance(model[0], own) and issubclass(own, public.FSDPModule)


@pytest.mark.full
def test_pipelining_knows_modules_of_both(pipelining: list[ModuleType]) -> None:
    torchs, ours = torchs_own("FSDPModule"), fsdp2.FSDPModule
    assert isinstance(torchs, type)
    originals = [each.FSDPModule for each in pipelining]
    with install():
        for each in pipelining:
            for kind in (torchs, ours):
                assert isinstance(object.__new__(type("Sharded", (kind, nn.Module), {})), each.FSDPModule)
            assert not isinstance(nn.Linear(1, 1), each.FSDPModule)
            assert issubclass(ours, each.FSDPModule)
            assert issubclass(torchs, each.FSDPModule)
    assert [each.FSDPModule for each in pipelining] == originals == [torchs, torchs]


@pytest.fixture
def pipelining() -> list[ModuleType]:
    """Its modules that deal with FSDP, imported."""
    return [module(name) for name in PIPELINING]


def test_pipelining_up_to_2_14_asks_for_the_state_of_either() -> None:
    """What that state offers: tests/multi_rank/wrapping/test_torch_view.py."""

    class Stage:
        """A module of ours."""

    def ours(module: object) -> str:
        return f"sharded {module}"

    def torchs() -> None:
        raise AssertionError("not called")

    ours.state = lambda module: "our state"  # type: ignore[attr-defined]
    torchs.state = lambda module: f"torch's state of {module}"  # type: ignore[attr-defined]
    fully_shard = bridges.pipelined(ours, torchs, Stage)
    assert fully_shard("it") == "sharded it"
    assert fully_shard.state(Stage()) == "our state"  # type: ignore[attr-defined]
    assert fully_shard.state("another") == "torch's state of another"  # type: ignore[attr-defined]


def test_guards_find_the_classes_of_both() -> None:
    mapping = bridges.both_mappings(lambda: {int: bool}, lambda: {str: bytes})()
    assert (mapping[int], mapping[str], float in mapping) == (bool, bytes, False)
    entered = []

    @contextmanager
    def enter(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        entered.append(f"end of {name}")

    with bridges.both_contexts(lambda: enter("ours"), lambda: enter("torch's"))():
        assert entered == ["ours", "torch's"]
    assert entered[2:] == ["end of torch's", "end of ours"]


# Imports


def test_a_watched_module_is_seen_once_it_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watched_module.py").write_text("value = 1\ndef function():\n    return value\n")
    (tmp_path / "other_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    watch = AfterImport(["watched_module"], lambda module: seen.append((module.__name__, module.value)))
    watch.start()
    try:
        importlib.import_module("other_module")
        assert seen == []
        watched = importlib.import_module("watched_module")
        assert seen == [("watched_module", 1)]
        assert "return value" in inspect.getsource(watched.function)
    finally:
        watch.stop()
        for name in ("watched_module", "other_module"):
            sys.modules.pop(name, None)
    watch.stop()
    importlib.import_module("watched_module")
    assert len(seen) == 1


def test_two_may_watch_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkouts of fsdp2 in one process, as one that a program is run by and one that is installed."""
    (tmp_path / "watched_twice.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    watches = [AfterImport(["watched_twice"], lambda module, each=each: seen.append(each)) for each in ("a", "b")]
    for watch in watches:
        watch.start()
    try:
        importlib.import_module("watched_twice")
    finally:
        for watch in watches:
            watch.stop()
        sys.modules.pop("watched_twice", None)
    assert sorted(seen) == ["a", "b"]


LATER = """
import sys, fsdp2, fsdp2.compat
with fsdp2.compat.install() as swap:
    assert "torch.distributed.pipelining.stage" not in sys.modules
    import torch.distributed.pipelining as pipelining
    from torch.distributed.pipelining import schedules, stage
    assert issubclass(stage.FSDPModule, fsdp2.FSDPModule) and stage.FSDPModule is schedules.FSDPModule
    assert schedules.UnshardHandle is fsdp2.UnshardHandle
from torch.distributed.fsdp import FSDPModule, UnshardHandle
assert FSDPModule.__module__ == "torch.distributed.fsdp"
assert stage.FSDPModule is schedules.FSDPModule is FSDPModule and schedules.UnshardHandle is UnshardHandle
print("passed")
"""


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, in ``folder``. 3 to 4 s."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, **variables},
    )


@pytest.mark.full  # 7 s
def test_pipelining_imported_later(tmp_path: Path) -> None:
    done = run("-c", LATER, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr


# Other processes


SPAWNING = """
import sys
import torch.multiprocessing
from torch import nn

def child(rank):
    if "--shard" in sys.argv:
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from torch.distributed.fsdp import FSDPModule, fully_shard
    shard(fully_shard)
    print(fully_shard.__module__, FSDPModule.__module__, flush=True)

def shard(fully_shard):
    if "--shard" in sys.argv:
        fully_shard(type("Local", (nn.Linear,), {})(2, 2))

if __name__ == "__main__":
    if "--here" in sys.argv:
        child(0)
    else:
        torch.multiprocessing.spawn(child, nprocs=1)
"""
OURS, TORCHS = "fsdp2.api.fully_shard fsdp2.api.module\n", "torch.distributed.fsdp torch.distributed.fsdp\n"
ROOT = Path(fsdp2.__file__).parents[1]
UNUSED = "fsdp2 sharded no module in this process"


@pytest.fixture
def spawning(tmp_path: Path) -> Path:
    """A folder with a program that starts a process."""
    (tmp_path / "program.py").write_text(SPAWNING)
    return tmp_path


@pytest.mark.full  # 6 to 9 s
def test_processes_that_the_program_starts_have_the_swap(spawning: Path) -> None:
    done = run("-m", "fsdp2.compat", "program.py", folder=spawning, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, OURS), done.stderr
    assert UNUSED in done.stderr


@pytest.mark.parametrize(("switch", "printed"), [("1", OURS), ("0", TORCHS)])
def test_a_process_that_inherits_the_switch(switch: str, printed: str, spawning: Path) -> None:
    """And runs what the environment has as its `sitecustomize`."""
    (spawning / "sitecustomize.py").write_text("print('its own')")
    path = os.pathsep.join([CHILDREN, str(spawning), str(ROOT)])
    done = run("program.py", "--here", folder=spawning, PYTHONPATH=path, FSDP2_COMPAT=switch)
    assert (done.returncode, done.stdout) == (0, "its own\n" + printed), done.stderr
    assert UNUSED not in done.stderr  # only the command is asked to shard here


def test_the_variable_alone_changes_nothing(spawning: Path) -> None:
    done = run("program.py", "--here", folder=spawning, PYTHONPATH=str(ROOT), FSDP2_COMPAT="1")
    assert (done.returncode, done.stdout) == (0, TORCHS), done.stderr


def test_the_path_of_processes_is_added_to_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP2_COMPAT", "0")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for before in ("", "here"):
        monkeypatch.setenv("PYTHONPATH", before)
        assert not reaches_children()
        for both, value in ((True, "1"), (False, "keep-fsdp1")):
            reach_children(fsdp1=both)
            assert os.environ["PYTHONPATH"] == os.pathsep.join(filter(None, [CHILDREN, before]))
            assert os.environ["FSDP2_COMPAT"] == value and reaches_children()


def test_a_switch_that_is_neither_on_nor_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, on in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("FSDP2_COMPAT", value)
        assert switched_on() is on
    monkeypatch.setenv("FSDP2_COMPAT", "yes")
    with pytest.raises(ValueError, match=r"FSDP2_COMPAT must be 1 .* or 0, got 'yes'"):
        switched_on()


@pytest.mark.full  # 6 s
def test_a_program_that_sharded_is_not_told_otherwise(spawning: Path) -> None:
    done = run("-m", "fsdp2.compat", "program.py", "--here", "--shard", folder=spawning, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, OURS), done.stderr
    assert UNUSED not in done.stderr


# The command


PROGRAM = """
import sys
from torch.distributed.fsdp import fully_shard
import beside
print(__name__, __file__, sys.argv, fully_shard.__module__, beside.value, sep="|")
sys.exit(3)
"""


def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    (folder / "beside.py").write_text("value = 7")
    done = run("-m", "fsdp2.compat", "-v", "folder/program.py", "--flag", "-m", folder=tmp_path)
    expected = ["__main__", "folder/program.py", "['folder/program.py', '--flag', '-m']", "fsdp2.api.fully_shard", "7"]
    assert (done.returncode, done.stdout) == (3, "|".join(expected) + "\n"), done.stderr
    assert "torch.distributed.fsdp.fully_shard -> fsdp2.api.fully_shard.fully_shard" in done.stderr


@pytest.mark.full  # 8 s
def test_a_module_runs_as_python_would_run_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("value = 8")
    done = run("-m", "fsdp2.compat", "-m", "package.program", "x", folder=tmp_path)
    path = str(tmp_path / "package" / "program.py")
    expected = ["__main__", path, f"['{path}', 'x']", "fsdp2.api.fully_shard", "8"]
    assert (done.returncode, done.stdout) == (3, "|".join(expected) + "\n"), done.stderr


def test_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.touch()
    assert parse([str(script), "-m", "--help"]) == Program(str(script), False, ("-m", "--help"), verbose=False)
    assert parse(["-v", "-m", "json.tool", "-v"]) == Program("json.tool", True, ("-v",), verbose=True)
    assert parse(["--help"]) is None


@for_each(
    ("arguments", "message"),
    [
        ([], "no program named"),
        (["-m"], "no module named after -m"),
        (["--nproc", "2", "train.py"], "unknown option --nproc; options of the program come after its name"),
        (["missing.py"], "no such file: missing.py"),
        (["json.tool"], "no such file: json.tool; for a module, write -m json.tool"),
        (["-m", "no_such_module"], "no module named no_such_module"),
        (["-m", __file__], "leave out -m"),
        (["-m", "torch.distributed.run", "train.py"], r"starts other processes.*torchrun \[options\] -m fsdp2.compat"),
        (["/usr/bin/torchrun", "train.py"], "starts other processes"),
        (["-m", "accelerate.commands.launch", "train.py"], "starts other processes"),
    ],
)
def test_wrong_use_says_what_is_right(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(arguments)


def test_wrong_use_ends_with_the_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fsdp2.compat", "missing.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value).startswith("fsdp2.compat: no such file: missing.py\n\nusage: python -m fsdp2.compat")


# The state of a module


def test_the_state_is_looked_up_of_either(simulate: FakeWorlds) -> None:
    simulate(2)
    states = module("torch.distributed.fsdp._fully_shard._fsdp_state")
    before = states._get_module_fsdp_state
    theirs, ours = nn.Linear(4, 4), fsdp2.fully_shard(nn.Linear(4, 4))
    torchs_own("fully_shard")(theirs, mesh=init_device_mesh("cpu", (2,)))  # type: ignore[operator]
    assert before(ours) is None
    with install():
        look_up = states._get_module_fsdp_state
        assert look_up(ours) is fsdp2.fully_shard.state(ours)  # type: ignore[attr-defined]
        assert look_up(theirs) is before(theirs) is not None and look_up(nn.Linear(4, 4)) is None
        # As torch's own `_lazy_init` asks, of a root of its own above modules of ours.
        assert eval("look_up(ours)", {"__name__": states.__name__, "look_up": look_up, "ours": ours}) is None
    assert states._get_module_fsdp_state is before
