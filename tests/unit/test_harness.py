"""The harness itself: workers are reused, failures and hangs are reported and do not reach the next test."""

from __future__ import annotations

import doctest
import itertools
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.harness import RanksFailed, covering, device, fake_world, multi_rank, parts
from tests.harness.multi_rank import run_for_pytest
from tests.harness.pool import WorkerPools
from tests.harness.threads import Threads


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def fail_on_rank_1() -> None:
    print("said before the failure")
    found = [dist.get_rank()]
    if dist.get_rank() == 1:
        assert found == [7]
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def exit_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os._exit(3)


def skip() -> None:
    pytest.skip("skipped by every rank")


def warn() -> None:
    print("about to warn")
    warnings.warn("a test warning", UserWarning, stacklevel=1)


def change_global_state() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"


def global_state() -> tuple[object, ...]:
    state = torch.get_default_dtype(), torch.is_grad_enabled(), "LEFT_BEHIND" in os.environ
    return (*state, torch.get_num_threads(), torch.rand(()).item())


def lose_an_exception() -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("lost in __del__")

    Broken()


@multi_rank(2, 4)
@pytest.mark.full
def test_body_runs_on_every_rank(world_size: int) -> None:
    assert dist.get_world_size() == world_size
    assert sum_of_ranks() == world_size * (world_size - 1) / 2


@multi_rank(2)
@pytest.mark.parametrize("rows", [3, 5])
def test_parameters_and_fixtures_reach_the_ranks(rows: int, tmp_path: Path) -> None:
    (tmp_path / f"rank{dist.get_rank()}").write_text(str(rows))
    dist.barrier()
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [str(rows)] * 2


@pytest.mark.parametrize("message", ["inside"])
@multi_rank(2)
def test_raises_works_inside_a_body(message: str) -> None:
    with pytest.raises(ValueError, match="inside"):
        raise ValueError(message)


@pytest.mark.full
def test_skip_and_failure_become_those_of_pytest(pools: WorkerPools, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pytest.skip.Exception, match="skipped by every rank"):
        run_for_pytest(pools[2], skip, {}, timeout=60)
    with pytest.raises(pytest.fail.Exception, match="UserWarning: a test warning"):
        run_for_pytest(pools[2], warn, {}, timeout=60)
    assert capsys.readouterr().out == "".join(f"----- output of rank {r} -----\nabout to warn\n" for r in (0, 1))


@pytest.mark.full
def test_results_come_back_by_rank(pools: WorkerPools) -> None:
    assert pools[2].run(dist.get_rank) == [0, 1]


def test_workers_are_reused(pools: WorkerPools) -> None:
    first = pools[2].run(os.getpid)
    assert pools[2].run(os.getpid) == first == pools[2].pids
    assert os.getpid() not in first


@pytest.mark.full
def test_failure_names_the_rank_and_the_next_test_passes(pools: WorkerPools) -> None:
    pool = pools[2]
    pool.run(sum_of_ranks)
    with pytest.raises(RanksFailed) as failure:
        pool.run(fail_on_rank_1, grace=0.5)
    message = str(failure.value)
    assert message.startswith("AssertionError: assert [1] == [7] [rank 1 of 2, in fail_on_rank_1]\n")
    assert "rank 1 failed first: AssertionError: assert [1] == [7]" in message
    assert "assert found == [7]" in message
    assert "rank 0 blocked: still running 0.5 s after the first failure" in message
    assert message.index("=== rank 1") < message.index("=== rank 0")
    assert pool.output == ["said before the failure\n"] * 2
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


@pytest.mark.full
def test_hang_is_killed_with_all_stacks(pools: WorkerPools) -> None:
    pool = pools[2]
    pool.run(sum_of_ranks)  # the time below is then not spent on imports
    pids, start = pool.pids, time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        pool.run(hang_on_rank_1, timeout=1.0)
    assert time.monotonic() - start < 20  # far from the 60 s that the rank sleeps
    message = str(failure.value)
    for rank in (0, 1):
        assert f"rank {rank} blocked: still running after the test's timeout of 1 s" in message
    assert len(re.findall(r"line \d+ in hang_on_rank_1", message)) == 2
    assert "in barrier" in message and "in worker_main" not in message
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert pool.run(sum_of_ranks) == [1.0, 1.0]


@pytest.mark.full
def test_death_is_reported(pools: WorkerPools) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 died.*: exit code 3"):
        pools[2].run(exit_on_rank_0, grace=0.3)
    pools[2].run(sum_of_ranks)
    with pytest.raises(RanksFailed, match=r"its process has run before: [\w.]*\.sum_of_ranks\]"):
        pools[2].run(exit_on_rank_0, grace=0.3)


@pytest.mark.full
def test_warnings_are_errors_on_the_ranks(pools: WorkerPools) -> None:
    with pytest.raises(RanksFailed, match="UserWarning: a test warning"):
        pools[2].run(warn)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:a test warning")
def test_warning_filters_reach_the_ranks(pools: WorkerPools) -> None:
    pools[2].run(warn)


def test_lost_exceptions_are_errors(pools: WorkerPools) -> None:
    with pytest.raises(RanksFailed, match="lost in __del__"):
        pools[2].run(lose_an_exception)


@pytest.mark.full
def test_global_state_is_put_back(pools: WorkerPools) -> None:
    before = pools[2].run(global_state)
    pids = pools[2].pids
    pools[2].run(change_global_state)
    assert pools[2].run(global_state) == before
    assert pools[2].pids == pids


def test_local_functions_are_refused(pools: WorkerPools) -> None:
    with pytest.raises(TypeError, match="top level of its module"):
        pools[2].run(lambda: None)


def test_monkeypatch_is_refused() -> None:
    with pytest.raises(TypeError, match=r"MonkeyPatch\.context"):

        @multi_rank(2)
        def patched(monkeypatch: pytest.MonkeyPatch) -> None: ...


def test_arguments_must_be_picklable(pools: WorkerPools) -> None:
    with pytest.raises(TypeError, match="cannot be pickled for the ranks"):
        pools[2].run(sum_of_ranks, lambda: None)


@pytest.mark.full
def test_fake_worlds_follow_each_other() -> None:
    for world_size, rank in [(8, 3), (2, 1)]:
        with fake_world(world_size, rank):
            assert (dist.get_world_size(), dist.get_rank()) == (world_size, rank)
            assert init_device_mesh("cpu", (2, world_size // 2)).size() == world_size
    assert not dist.is_initialized()


@fake_world(4, rank=2)
def test_fake_world_as_decorator(tmp_path: Path) -> None:
    assert dist.get_rank() == 2


def test_simulate_fixture(simulate) -> None:  # type: ignore[no-untyped-def]
    for rank in range(4):
        simulate(4, rank)
        assert dist.get_rank() == rank


def test_meshes_are_moved_to_the_device_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)  # put back afterwards
    device.move_meshes("meta")
    with fake_world(4):
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        assert whole.device_type == whole["shard"].device_type == "meta"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_a_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "DEVICE", "cuda")
    with pytest.raises(RuntimeError, match="FSDP2_TEST_DEVICE=cuda needs such a device"):
        device.use_device_if_asked()


def test_fake_world_refuses_a_second_world() -> None:
    with fake_world(2), pytest.raises(RuntimeError, match="already rank 0 of 2"), fake_world(2):
        pass


def test_the_short_suite_shows_every_value() -> None:
    assert doctest.testmod(covering).failed == 0
    combinations = [{"x": x, "y": y, "z": z} for x in range(5) for y in range(3) for z in range(2)]
    chosen = [combinations[index] for index in covering.covering(combinations)]
    assert len(chosen) == 5
    assert set().union(*(each.items() for each in chosen)) == set().union(*(each.items() for each in combinations))


def pairs_of(combinations: Iterable[dict[str, Any]]) -> set[Any]:
    return {pair for each in combinations for pair in itertools.combinations(sorted(each.items()), 2)}


def test_the_full_suite_shows_every_pair() -> None:
    combinations = [{"x": x, "y": y, "z": z} for x in range(5) for y in range(3) for z in range(2)]
    chosen = [combinations[index] for index in covering.covering(combinations, together=2)]
    assert len(chosen) == 15 and pairs_of(chosen) == pairs_of(combinations)
    assert covering.covering([]) == covering.covering([], together=2) == []


class Item:
    """What `covering` reads of pytest's items."""

    def __init__(self, marks: Collection[str] = (), **params: Any) -> None:
        self.nodeid = f"test_file.py::test_it[{params}]"
        self.callspec = SimpleNamespace(params=params, indices={"seed": params.get("seed", 0)})
        self.marks = set(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: Any) -> None:
        self.marks.add(mark.name)


def short_and_dropped(items: list[Item]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    dropped: Any = covering.thin_out(items)  # type: ignore[arg-type]
    short = [item.callspec.params for item in items if "full" not in item.marks]
    return short, [item.callspec.params for item in dropped]


RANKS = (2, 4, Threads(2))


def test_what_is_short_has_every_value_on_the_fewest_ranks() -> None:
    items = [Item(world_size=ranks, x=x, kind=kind) for ranks in RANKS for x in "abc" for kind in ("torch", "ours")]
    short, dropped = short_and_dropped(items)
    assert {each["x"] for each in short} == set("abc") and {each["kind"] for each in short} == {"ours"}
    assert {type(each["world_size"]) for each in short} == {int, Threads}
    assert all(each["world_size"] == 2 for each in short)
    kept = [item.callspec.params for item in items if not any(item.callspec.params is each for each in dropped)]
    assert pairs_of(kept) == pairs_of(item.callspec.params for item in items) and dropped


def test_the_fewest_ranks_are_those_of_tests_that_may_be_short() -> None:
    items = [Item(["full"] if ranks == 2 else [], world_size=ranks, x=x) for ranks in (2, 4) for x in "ab"]
    assert [each["world_size"] for each in short_and_dropped(items)[0]] == [4, 4]


def test_of_seeds_the_first_are_short() -> None:
    short, dropped = short_and_dropped([Item(seed=seed) for seed in range(30)])
    assert [each["seed"] for each in short] == list(range(8)) and not dropped


@pytest.mark.parametrize("mark", ["gpu", "every_combination"])
def test_what_is_run_whole_is_not_thinned_out(mark: str) -> None:
    items = [Item([mark], x=x, y=y, z=z) for x in range(3) for y in range(3) for z in range(3)]
    short, dropped = short_and_dropped(items)
    assert len(short) == 27 and not dropped


def test_parts_are_all_of_it_once_and_of_like_size() -> None:
    sizes = Counter(parts.part_of(f"tests/test_file.py::test_it[{number}]") for number in range(1000))
    assert sorted(sizes) == list(range(1, 11)) and min(sizes.values()) > 70
    assert [parts.asked_part(f"{number}/10") for number in range(1, 11)] == list(range(1, 11))
    for wrong in ("0/10", "11/10", "3/9", "3", "three"):
        with pytest.raises(pytest.UsageError, match=re.escape(f"no part '{wrong}' of the suite; there are 1/10, 2/10")):
            parts.asked_part(wrong)
