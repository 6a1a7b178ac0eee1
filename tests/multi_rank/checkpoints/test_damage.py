"""Files that are not what was written, ranks that cannot write: one error on every rank, and nothing lost."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.checkpoint import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointIncomplete,
    Checkpoints,
    SaveFailed,
    load,
)
from tests.harness.checkpoints import anew, assert_equal, begin, processes, saved, snapshot
from tests.harness.multi_rank import others_full
from tests.harness.report import RanksFailed


def make(folder: Path, seed: int = 0) -> None:
    run = begin("1d", seed=seed)
    run.step(0)
    with Checkpoints(folder, run.model, run.optimizer) as checkpoints:
        checkpoints.save(1)
        run.step(1)
        checkpoints.save(2)


def item_of(folder: Path, name: str) -> dict[str, Any]:
    """The first item of an entry of the manifest."""
    entry: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["entries"][name]
    return dict(entry["items"][0])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def flip_tensor(folder: Path, name: str = "model.blocks.0.up.weight") -> None:
    """One bit of the values of a tensor."""
    item = item_of(folder, name)
    path = folder / item["file"]
    data = path.read_bytes()[item["start"] : item["start"] + item["nbytes"]]
    wanted = int(item["crc32"]["data/0"], 16)
    length = {"model.blocks.0.up.weight": 5 * 6 * 4}.get(name, 4)
    start = next(at for at in range(len(data)) if zlib.crc32(data[at : at + length]) == wanted)
    flip(path, item["start"] + start + 1)


def swap(folder: Path) -> None:
    files = [folder / f"__{rank}_0.distcp" for rank in range(2)]
    files[0].rename(folder / "x")
    files[1].rename(files[0])
    (folder / "x").rename(files[1])


def truncate(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


def other_format(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


def of_another_run(folder: Path) -> None:
    """The same model after as many steps: every size is the same."""
    other = folder.parent.parent / "other"
    anew(2, make, other, 5)
    shutil.copy(other / folder.name / "__1_0.distcp", folder / "__1_0.distcp")


ONLY_READING = "only reading shows it"

DAMAGES: dict[str, tuple[Any, type[CheckpointError], str, str]] = {
    "a file is missing": (
        lambda folder: (folder / "__1_0.distcp").unlink(),
        CheckpointDamaged,
        r"is damaged: __1_0\.distcp cannot be read: No such file or directory",
        "",
    ),
    "a file is cut short": (
        lambda folder: truncate(folder / "__0_0.distcp", 1),
        CheckpointDamaged,
        r"is damaged: __0_0\.distcp has \d+ bytes, and had \d+",
        "",
    ),
    "a bit of a tensor": (
        flip_tensor,
        CheckpointDamaged,
        r"is damaged: __0_0\.distcp, 'model\.blocks\.0\.up\.weight': its checksum is another than was written",
        ONLY_READING,
    ),
    "a bit of an optimizer's state": (
        lambda folder: flip_tensor(folder, "optimizer.state.scale.step"),
        CheckpointDamaged,
        r"'optimizer\.state\.scale\.step': its checksum",
        ONLY_READING,
    ),
    "files are swapped": (swap, CheckpointDamaged, r"__[01]_0\.distcp", ""),
    "a file of another run": (of_another_run, CheckpointDamaged, r"is damaged: __1_0\.distcp", ONLY_READING),
    "a bit of the manifest": (
        lambda folder: flip(folder / "manifest.json", 300),
        CheckpointDamaged,
        r"manifest\.json is (not what was written|damaged)",
        "",
    ),
    "a manifest of another version": (
        other_format,
        CheckpointError,
        r"is of format 2, and this fsdp2 reads up to 1",
        "",
    ),
    "a bit of .metadata": (
        lambda folder: flip(folder / ".metadata", 900),
        CheckpointDamaged,
        r"\.metadata is not what was written",
        "",
    ),
    "no .metadata": (
        lambda folder: (folder / ".metadata").unlink(),
        CheckpointDamaged,
        r"is damaged: \.metadata cannot be read|is damaged: \.metadata is missing",
        "",
    ),
    "a folder without anything": (
        lambda folder: [each.unlink() for each in folder.iterdir()],
        CheckpointIncomplete,
        r"there is no complete checkpoint in .*: it has no \.metadata",
        "",
    ),
}


QUICK = (
    "a file is missing",
    "a bit of a tensor",
    "a file of another run",
    "a bit of the manifest",
)


def meets(folder: Path, kind: type[CheckpointError], says: str, when: str) -> str:
    """Loads raise alike; then the checkpoint before still loads."""
    run = begin("1d", seed=3)
    run.step(0)
    before = snapshot(run)
    damaged = folder / "step-00000002"
    with pytest.raises(kind, match=says) as raised:
        load(damaged, run.model, run.optimizer)
    if when == ONLY_READING:
        with pytest.raises(CheckpointDamaged, match="of a load that failed half-way"):
            run.step(1)
        assert load(folder / "step-00000001", run.model, run.optimizer).step == 1
        run.step(1)  # it runs again
        before = snapshot(run)
        with pytest.raises(kind, match=says):
            load(damaged, run.model, run.optimizer, verify="first")
    assert_equal(before, snapshot(run))
    run.step(2)
    if kind is CheckpointDamaged:
        checkpoints = Checkpoints(folder, run.model, run.optimizer)
        with pytest.raises(kind, match=says):
            checkpoints.restore()
        assert checkpoints.restore(on_damage="previous") == 1
        run.step(2)
    return str(raised.value)


@pytest.mark.parametrize("name", others_full(DAMAGES, QUICK))  # 2 s each
def test_one_error_on_every_rank_and_the_checkpoint_before_loads(name: str, tmp_path: Path) -> None:
    damage, kind, says, when = DAMAGES[name]
    folder = tmp_path / "run"
    anew(2, make, folder)
    damage(folder / "step-00000002")
    texts = anew(2, meets, folder, kind, says, when, timeout=20.0)
    assert len(set(texts)) == 1


@pytest.mark.full  # 30 s: every byte of a small checkpoint, one bit at a time, in one process
def test_every_flipped_bit_is_noticed_or_harmless(tmp_path: Path) -> None:
    anew(2, make, tmp_path / "run")
    anew(1, flip_everywhere, tmp_path / "run" / "step-00000002", timeout=600.0)


def flip_everywhere(folder: Path) -> None:
    run = begin("1d")
    load(folder, run.model, run.optimizer)
    right = snapshot(run)
    for path in sorted(folder.glob("__*")):
        whole = path.read_bytes()
        for at in range(0, len(whole), 97):
            flip(path, at)
            try:
                load(folder, run.model, run.optimizer)
            except CheckpointDamaged:
                pass
            else:
                assert_equal(right, snapshot(run))
            path.write_bytes(whole)


# ---- saves that fail -----------------------------------------------------------------------------


def cannot_write(folder: Path, how: str, asynchronous: bool) -> str:
    run = begin("1d")
    run.step(0)
    with Checkpoints(folder, run.model, run.optimizer) as checkpoints:
        checkpoints.save(1)
        before = snapshot(run)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if how == "disk full" and dist.get_rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        began = time.monotonic()
        with pytest.raises(SaveFailed) as raised:
            checkpoints.save(2, asynchronous=asynchronous)
            checkpoints.wait()
        assert time.monotonic() - began < 20
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dist.barrier()  # the first rank removes
        assert saved(folder) == {"step-00000001"}
        assert_equal(before, snapshot(run))
        run.step(1)
        checkpoints.save(2, asynchronous=asynchronous)
    assert saved(folder) == {"step-00000001", "step-00000002"}
    return str(raised.value)


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_on_one_rank(asynchronous: bool, tmp_path: Path) -> None:
    texts = anew(2, cannot_write, tmp_path / "run", "disk full", asynchronous)
    assert len(set(texts)) == 1
    assert re.search(r"the checkpoint .*step-00000002 was not saved: rank 1: ", texts[0]), texts[0]
    assert "training may go on" in texts[0]


def cannot_rename(folder: Path) -> None:
    run = begin("1d")
    run.step(0)
    checkpoints = Checkpoints(folder, run.model, run.optimizer)
    checkpoints.save(1)
    before = snapshot(run)
    run.step(1)
    renamed: list[Path] = []
    rename = Path.rename

    def fails_the_second_time(self: Path, target: Path) -> Path:
        renamed.append(self)
        if len(renamed) == 2:
            raise OSError("no more names")
        return rename(self, target)

    Path.rename = fails_the_second_time  # type: ignore[method-assign]
    try:
        with pytest.raises(SaveFailed, match="no more names"):
            checkpoints.save(1)
    finally:
        Path.rename = rename  # type: ignore[method-assign]
    dist.barrier()
    assert [each.name for each in folder.iterdir()] == ["step-00000001"]
    assert checkpoints.restore() == 1
    assert_equal(snapshot(run), before)


@pytest.mark.full
def test_a_step_that_is_not_replaced_after_all_is_there(tmp_path: Path) -> None:
    anew(2, cannot_rename, tmp_path / "run")


def dies(folder: Path, asynchronous: bool) -> None:
    run = begin("1d")
    run.step(0)
    checkpoints = Checkpoints(folder, run.model, run.optimizer)
    checkpoints.save(1, asynchronous=asynchronous)
    checkpoints.wait()
    if dist.get_rank() == 1:
        import fsdp2.checkpoint.writing as writing

        writing.Writer.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
    began = time.monotonic()
    try:
        checkpoints.save(2, asynchronous=asynchronous)
        checkpoints.wait()
    except SaveFailed as error:
        (folder / f"said by {dist.get_rank()}").write_text(f"{time.monotonic() - began:.0f} {error}")
    os._exit(0)


@pytest.mark.full  # 6 s each
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_dies_while_it_saves(asynchronous: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with processes(4) as pool, pytest.raises(RanksFailed):
        pool.run(dies, folder, asynchronous, timeout=40.0, grace=25.0)
    said = {rank: (folder / f"said by {rank}").read_text() for rank in (0, 2, 3)}
    for text in said.values():
        seconds, _, message = text.partition(" ")
        assert int(seconds) < 20, text
        assert "step-00000002 was not saved" in message
        assert re.search(r"process(es)? of (the )?ranks? [^:]*\b1\b.* (is|are) gone", message), message
        (folder / f"said by {0}").unlink(missing_ok=True)
    assert anew(2, newest, folder) == [1, 1]
    assert not [*folder.glob(".*")]


def dies_of_a_part(folder: Path) -> None:
    parts = [dist.new_group([0, 1, 2]), dist.new_group([3])]
    if dist.get_rank() < 3:
        mesh = DeviceMesh.from_group(parts[0], "cpu")
        model = fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh)
        checkpoints = Checkpoints(folder, model, process_group=parts[0])
        checkpoints.save(1, asynchronous=True)
        checkpoints.wait()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for step in (2, 3):
            began = time.monotonic()
            checkpoints.save(step, asynchronous=True)
            with pytest.raises(SaveFailed, match=r"gone.* and do not come to") as raised:
                checkpoints.wait()
            assert time.monotonic() - began < 15
        assert [each.name for each in folder.glob("step*")] == ["step-00000001"]
        (folder / f"said by {dist.get_rank()}").write_text(str(raised.value))
    os._exit(0)


@pytest.mark.full  # 6 s
def test_a_rank_of_a_part_dies_before_the_others_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with processes(4) as pool, pytest.raises(RanksFailed):
        pool.run(dies_of_a_part, folder, timeout=60.0, grace=45.0)
    assert (folder / "said by 0").exists() and (folder / "said by 2").exists()


def newest(folder: Path) -> int:
    run = begin("1d", seed=4)
    return Checkpoints(folder, run.model, run.optimizer).restore()
