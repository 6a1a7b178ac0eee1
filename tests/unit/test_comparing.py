"""What is said of checkpoints that do not fit: hints about names, and whose failure it is."""

from __future__ import annotations

import doctest

import fsdp2.checkpoint.comparing
import fsdp2.checkpoint.optimizers
import fsdp2.checkpoint.ranks
from fsdp2.checkpoint.comparing import Difference, hint_of_names, table
from fsdp2.checkpoint.ranks import who_has
from tests.unit.helpers import for_each

MODEL = [f"blocks.{index}.{name}" for index in range(3) for name in ("up.weight", "up.bias")]


@for_each("module", [fsdp2.checkpoint.comparing, fsdp2.checkpoint.optimizers, fsdp2.checkpoint.ranks])
def test_examples(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@for_each("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "state.net."])
def test_a_prefix_is_found_and_its_remedy_works(prefix: str) -> None:
    hint = hint_of_names(MODEL, [prefix + name for name in MODEL])
    assert hint.startswith(f"6 names fit without their '{prefix}'")
    rename = eval(hint.partition("rename=")[2])
    assert [rename(prefix + name) for name in MODEL] == MODEL
    hint = hint_of_names([prefix + name for name in MODEL], MODEL)
    assert hint.startswith(f"6 names fit with '{prefix}' before them")
    rename = eval(hint.partition("rename=")[2])
    assert [rename(name) for name in MODEL] == [prefix + name for name in MODEL]


def test_what_wraps_blocks_is_found() -> None:
    saved = [name.replace(".up", "._orig_mod.up") for name in MODEL]
    hint = hint_of_names(MODEL, saved)
    rename = eval(hint.partition("rename=")[2])
    assert [rename(name) for name in saved] == MODEL


@for_each(
    ("missing", "unexpected"),
    [([], []), (MODEL, []), ([], MODEL), (MODEL, ["a.weight", "b.bias"]), (MODEL, [f"ema.{MODEL[0]}", "a.b", "c.d"])],
)
def test_nothing_is_said_of_names_that_no_prefix_mends(missing: list[str], unexpected: list[str]) -> None:
    assert hint_of_names(missing, unexpected) == ""


def test_the_hint_is_the_last_line_of_the_table() -> None:
    differences = [Difference("missing", name, "") for name in MODEL]
    differences += [Difference("unexpected", f"module.{name}", "") for name in MODEL]
    assert table("the file", differences).splitlines()[-2:] == [
        "    rename= finds what has another name",
        "    6 names fit without their 'module.': rename=lambda name: name.removeprefix('module.')",
    ]


def test_whose_failure_it_is() -> None:
    assert who_has("full", ["full"] * 4, [0, 1, 2, 3]) == ""
    assert who_has("full", ["", "full", "torn"], [4, 5, 6]) == "rank 5"
    assert who_has("full", ["full"] * 11 + [""], list(range(12))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"
