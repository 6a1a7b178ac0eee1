"""Folders of safetensors files: written by some ranks, and read by others, by the package itself, by `transformers`."""

from __future__ import annotations

import builtins
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPRuntimeError, FSDPValueError, fully_shard
from fsdp2.checkpoint import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointIncomplete,
    CheckpointMismatch,
    SaveFailed,
    load_safetensors,
    save_safetensors,
)
from tests.harness import multi_rank
from tests.harness.compare import assert_same, gather
from tests.harness.multi_rank import others_full
from tests.harness.pool import WorkerPools
from tests.harness.shared.odd_parameters import ODD
from tests.harness.shared.state_dicts import run_on
from tests.harness.shared.training import shard as shard_case
from tests.harness.shared.whole_weights import LAYOUTS, QUICK, TENSOR_PARALLEL, Net, build, peak_bytes, shard

safetensors = pytest.importorskip("safetensors")

MIB = 1 << 20


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and persistent buffers, all names."""
    return {name: gather(each.detach()) for name, each in model.state_dict().items()}


def read(folder: Path) -> dict[str, Tensor]:
    """What is in all files, by the package's own reader."""
    import safetensors.torch

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def in_files(model: nn.Module) -> dict[str, Tensor]:
    """What is to be in them: tied ones once."""
    first = {name: each.detach() for name, each in [*model.named_parameters(), *model.named_buffers()]}
    kept = model.state_dict().keys()
    return {name: each.contiguous() for name, each in first.items() if name in kept}


def on_meta(layout: str = "zero3") -> Net:
    """Sharded; what no file has is there already."""
    with torch.device("meta"):
        model = build()
    for block, source in zip(model.blocks, build().blocks, strict=True):
        block.frequencies = source.frequencies
    return shard(model, layout)


def damaged(path: Path, way: str) -> Path:
    """A file of the folder, which is not what it was any more."""
    file = sorted(path.glob("*.safetensors"))[-1]
    if way == "missing":
        file.unlink()
    elif way == "cut short":
        os.truncate(file, file.stat().st_size - 8)
    elif way == "garbage":
        file.write_bytes(b"\xff" * 100)
    elif way == "empty":
        file.write_bytes(b"")
    return file


# ---- there and back ------------------------------------------------------------------------------


def write(folder: Path, store: Path, layout: str, limit: int) -> None:
    save_safetensors(shard(build(seed=1), layout), folder, max_file_bytes=limit)


def load(folder: Path, store: Path, layout: str) -> None:
    model, plain = on_meta(layout), build(seed=1)
    report = load_safetensors(model, folder)
    whole = whole_state(model)
    assert_same("state", whole, plain.state_dict())
    assert model.head.weight is model.embedding.weight
    needed = sum(each.nbytes for each in in_files(plain).values())
    assert report.path == str(folder) and set(report.loaded) == set(in_files(plain))
    local = sum(_local(each).nbytes for each in [*dict(model.named_parameters()).values(), *persistent(model)])
    assert report.bytes_read == sum_of(local) >= needed


def persistent(model: nn.Module) -> list[Tensor]:
    return [each for name, each in model.named_buffers() if "frequencies" not in name]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sum_of(number: int) -> int:
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, number)
    return sum(found)


@pytest.mark.full
@pytest.mark.parametrize(
    ("saving", "loading"),
    [(2, 4), (4, 1), *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, 2), (4, 2)))],
)
@pytest.mark.parametrize("limit", [1 << 30, 1500], ids=["one", "several"])
def test_files_move_between_worlds(saving: int, loading: int, limit: int, pools: WorkerPools, tmp_path: Path) -> None:
    folder, stores = tmp_path / "model", tmp_path / "a"
    stores.mkdir()
    run_on(pools, saving, write, folder, stores, "zero3", limit)
    plain = build(seed=1)
    assert_same("files", read(folder), in_files(plain))
    names = sorted(each.name for each in folder.iterdir())
    if limit > 1500:
        assert names == ["model.safetensors"]
    else:
        count = len(names) - 1
        assert names[:-1] == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(each.nbytes for each in in_files(plain).values())}
        assert index["weight_map"].keys() == in_files(plain).keys()
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(str(file), framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        assert len(found) == 1 or sum(each.nbytes for each in found.values()) <= limit
    stores = tmp_path / "b"
    stores.mkdir()
    run_on(pools, loading, load, folder, stores, "zero3")


@multi_rank(2, full=(4,))
@pytest.mark.full
@pytest.mark.parametrize("layout", others_full([*LAYOUTS, TENSOR_PARALLEL], QUICK))
def test_all_layouts(layout: str, world_size: int, tmp_path: Path) -> None:
    plain = build(seed=1)
    save_safetensors(shard(build(seed=1), layout), tmp_path / "model", max_file_bytes=3000)
    assert_same("files", read(tmp_path / "model"), in_files(plain))
    model = on_meta(layout)
    load_safetensors(model, tmp_path / "model")
    assert_same("state", whole_state(model), plain.state_dict())


@multi_rank(2)
def test_odd_parameters(tmp_path: Path) -> None:
    plain = ODD.build(seed=1)
    save_safetensors(shard_case(ODD, model=ODD.build(seed=1)), tmp_path / "model")
    assert_same("files", read(tmp_path / "model"), in_files(plain))
    model = shard_case(ODD)
    load_safetensors(model, tmp_path / "model" / "model.safetensors")
    assert_same("state", whole_state(model), plain.state_dict())


@multi_rank(2)
def test_dtypes_and_names(tmp_path: Path) -> None:
    plain = build(seed=1)
    save_safetensors(
        shard(build(seed=1), "zero3"), tmp_path / "model", dtype=torch.bfloat16, rename=lambda name: f"m.{name}"
    )
    expected = {
        f"m.{name}": each.bfloat16() if each.is_floating_point() else each for name, each in in_files(plain).items()
    }
    assert_same("files", read(tmp_path / "model"), expected)
    model = shard(build(), "zero3")
    with pytest.raises(CheckpointMismatch, match=r"missing \("):
        load_safetensors(model, tmp_path / "model")
    with pytest.raises(CheckpointMismatch, match=r"dtype \("):
        load_safetensors(model, tmp_path / "model", rename=lambda name: name[2:])
    with pytest.raises(FSDPValueError, match="rename calls both"):
        load_safetensors(model, tmp_path / "model", rename=lambda name: "one")
    with pytest.raises(KeyError, match=r"rank 1: 'm\."):
        known = {} if dist.get_rank() else {f"m.{name}": name for name in in_files(plain)}
        load_safetensors(model, tmp_path / "model", rename=lambda name: known[name], cast=True)
    with pytest.raises(FSDPValueError, match="rename calls two tensors 'one'"):
        save_safetensors(model, tmp_path / "other", rename=lambda name: "one")
    report = load_safetensors(model, tmp_path / "model", rename=lambda name: name[2:], cast=True)
    assert "blocks.0.up.weight" in report.cast
    assert_same("state", whole_state(model), {n: each.to(each.dtype) for n, each in half_of(plain).items()})


def half_of(plain: nn.Module) -> dict[str, Tensor]:
    """As after a trip through bfloat16."""
    return {
        name: each.bfloat16().to(each.dtype) if each.is_floating_point() else each
        for name, each in plain.state_dict().items()
    }


@multi_rank(2)
@pytest.mark.full
def test_what_a_file_has_under_the_other_name_of_a_tie(tmp_path: Path) -> None:
    """And buffers that no file has are named."""
    import safetensors.torch

    state = {name: each.contiguous() for name, each in in_files(build(seed=1)).items()}
    state["head.weight"] = state.pop("embedding.weight")
    if dist.get_rank() == 0:
        safetensors.torch.save_file(state, tmp_path / "weights.safetensors")
    dist.barrier()
    model = on_meta()
    load_safetensors(model, tmp_path)
    assert_same("state", whole_state(model), build(seed=1).state_dict())
    with torch.device("meta"):
        model = build()
    shard(model, "zero3")
    with pytest.raises(CheckpointMismatch, match=r"unwritten \(2\)(.|\n)*blocks\.1\.frequencies"):
        load_safetensors(model, tmp_path)
    assert all(each.is_meta for each in model.parameters())


# ---- memory --------------------------------------------------------------------------------------


@multi_rank(2, full=(4,))
@pytest.mark.full
def test_peaks(tmp_path: Path) -> None:
    """Saving: one file and one parameter. Loading: what is read is mapped, and goes straight into the shards."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512 + 8 * index) for index in range(16)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    sizes = [each.numel() * 4 for each in model.parameters()]
    limit = sum(sizes) // 8
    peak = peak_bytes(lambda: save_safetensors(model, tmp_path / "model", max_file_bytes=limit))
    assert peak <= limit + 2.5 * max(sizes), f"{peak / MIB} MiB"
    again = nn.Sequential(*(nn.Linear(512, 512 + 8 * index) for index in range(16)))
    for layer in again:
        fully_shard(layer)
    fully_shard(again)
    load_safetensors(again, tmp_path / "model")
    assert_same("state", whole_state(again), whole_state(model))


# ---- what goes wrong -----------------------------------------------------------------------------


@multi_rank(2, full=(4,))
@pytest.mark.parametrize("way", ["missing", "cut short", "garbage", "empty"])
def test_damaged_files(way: str, tmp_path: Path) -> None:
    save_safetensors(shard(build(seed=1), "zero3"), tmp_path / "model", max_file_bytes=2000)
    files = [None]
    if dist.get_rank() == 0:
        files = [damaged(tmp_path / "model", way)]
    dist.broadcast_object_list(files)
    model = shard(build(), "zero3")
    with pytest.raises(CheckpointDamaged) as caught:
        load_safetensors(model, tmp_path / "model")
    assert str(files[0]) in str(caught.value)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    assert_same("state", whole_state(model), build().state_dict())


@multi_rank(2)
def test_nothing_to_read(tmp_path: Path) -> None:
    model = shard(build(), "zero3")
    with pytest.raises(CheckpointIncomplete, match="there is no file or folder"):
        load_safetensors(model, tmp_path / "none")
    with pytest.raises(CheckpointIncomplete, match="there is no"):
        load_safetensors(model, tmp_path)
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "model.safetensors.index.json").write_text("{}")
    dist.barrier()
    with pytest.raises(CheckpointDamaged, match="is no index"):
        load_safetensors(model, tmp_path)


@multi_rank(2)
def test_a_file_that_one_rank_does_not_see(tmp_path: Path) -> None:
    """As on nodes that share no file system."""
    save_safetensors(shard(build(seed=1), "zero3"), tmp_path / "model")
    if dist.get_rank() == 0:
        shutil.copytree(tmp_path / "model", tmp_path / "0" / "model")
    dist.barrier()
    model = shard(build(), "zero3")
    with pytest.raises(CheckpointIncomplete, match="rank 1: there is no file or folder"):
        load_safetensors(model, tmp_path / str(dist.get_rank()) / "model")
    assert_same("state", whole_state(model), build().state_dict())


@multi_rank(2)
def test_nothing_is_written_over_and_leftovers_are_removed(tmp_path: Path) -> None:
    model = shard(build(), "zero3")
    folder, left = tmp_path / "model", tmp_path / ".model.writing"
    left.mkdir(exist_ok=True)
    (left / "model-00007-of-00009.safetensors").write_text("of a killed save")
    dist.barrier()
    save_safetensors(model, folder, max_file_bytes=2000)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
    assert_same("files", read(folder), in_files(build()))
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError, match="exists, and nothing is written over"):
        save_safetensors(model, folder)
    assert sorted(folder.iterdir()) == before and not left.exists()


@multi_rank(2, full=(4,))
@pytest.mark.full
def test_a_rank_that_cannot_write(tmp_path: Path) -> None:
    """A full disk on the last: all raise the same, nothing is left, and the model is as it was."""
    model, last = shard(build(), "zero3"), dist.get_world_size() - 1
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == last:
            import fsdp2.checkpoint.safetensors_files as file

            def full(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(file, "flush", full)
        with pytest.raises(SaveFailed, match=rf"rank {last}: .* failed \(OSError: .*No space left") as caught:
            save_safetensors(model, tmp_path / "model", max_file_bytes=1500)
    dist.barrier()
    assert "removed" in str(caught.value) and list(tmp_path.iterdir()) == []
    dist.barrier()
    save_safetensors(model, tmp_path / "model", max_file_bytes=1500)
    assert_same("files", read(tmp_path / "model"), in_files(build()))


@multi_rank(2)
def test_a_rank_without_memory_is_told_of_by_all(tmp_path: Path) -> None:
    """The others go on to send it what it asked for, and wait for nothing after that."""
    model, original = shard(build(), "zero3"), Tensor.cpu
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def full(tensor: Tensor) -> Tensor:
                if tensor.is_floating_point():
                    raise MemoryError("no memory")
                return original(tensor)

            patch.setattr(Tensor, "cpu", full)
        with pytest.raises(SaveFailed, match=r"rank 1: .* failed \(MemoryError: no memory\)"):
            save_safetensors(model, tmp_path / "model", max_file_bytes=1500)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    dist.barrier()
    save_safetensors(model, tmp_path / "model", max_file_bytes=1500)
    assert_same("files", read(tmp_path / "model"), in_files(build()))


@multi_rank(2)
def test_an_unwritable_place_and_ranks_that_differ(tmp_path: Path) -> None:
    model = shard(build(), "zero3")
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveFailed, match=r"rank 0: save_safetensors.* failed"):
        save_safetensors(model, tmp_path / "file" / "model")
    with pytest.raises(FSDPRuntimeError, match="the ranks differ"):
        save_safetensors(model, tmp_path / "model", max_file_bytes=1000 + dist.get_rank())
    dist.barrier()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return original(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    (tmp_path / "model.safetensors").write_bytes(b"")
    for act in (
        lambda: save_safetensors(nn.Linear(2, 2), tmp_path / "new"),
        lambda: load_safetensors(build(), tmp_path),
    ):
        with pytest.raises(FSDPRuntimeError, match=r'pip install "fsdp2\[safetensors\]"'):
            act()


def test_one_process_without_a_group(tmp_path: Path) -> None:
    save_safetensors(build(seed=1), tmp_path / "model", max_file_bytes=2000)
    model = build()
    load_safetensors(model, tmp_path / "model")
    assert_same("state", whole_state(model), build(seed=1).state_dict())


# ---- transformers --------------------------------------------------------------------------------


def llama(tied: bool) -> Any:
    """A small one, on the device of now."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@multi_rank(2)
@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_and_back(tied: bool, tmp_path: Path) -> None:
    plain, tokens = llama(tied).eval(), torch.arange(10).view(1, 10)
    model = llama(tied).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    save_safetensors(model, tmp_path / "ours", max_file_bytes=20_000)
    if dist.get_rank() == 0:
        model.config.save_pretrained(tmp_path / "ours")
        plain.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    dist.barrier()
    read = type(plain).from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(read(tokens).logits, plain(tokens).logits)
    with torch.device("meta"):
        empty = llama(tied).eval()
    empty.model.rotary_emb = plain.model.rotary_emb
    for layer in empty.model.layers:
        fully_shard(layer)
    fully_shard(empty)
    load_safetensors(empty, tmp_path / "theirs")
    assert torch.equal(empty(tokens).logits, plain(tokens).logits)
