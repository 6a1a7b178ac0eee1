"""docs/beyond.md shows what extras/torch_gaps has recorded of every case; outcomes are told apart. Runs no case."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from extras.torch_gaps import record, run
from extras.torch_gaps.api import IMPLEMENTATIONS, Api, NoSuchOption
from extras.torch_gaps.registry import Case, Trial, all_cases
from extras.torch_gaps.run import Outcome

VERSIONS = {"2.13.0", "2.15.0", record.key_of("fsdp2", "2.13.0"), record.key_of("fsdp2", "2.15.0")}
KINDS = {"works", "raises", "hangs", "wrong", "crashes", "no such option"}


# ---- what is recorded ----------------------------------------------------------------------------


def test_the_document_shows_the_record() -> None:
    assert record.shown() == record.render(record.read(), all_cases()), "run `make torch-gaps`"


def test_every_case_is_recorded_for_every_version_and_nothing_else_is() -> None:
    found = record.read()
    assert list(found) == list(all_cases())
    assert {name: outcomes for name, outcomes in found.items() if set(outcomes) != VERSIONS} == {}


def test_every_case_has_a_row() -> None:
    rows = [line.strip("|").split("|")[0].strip() for line in record.shown().splitlines() if line.startswith("|")]
    assert [case.title for case in all_cases().values() if case.title not in rows] == []


def test_outcomes_are_of_the_known_kinds_and_say_why() -> None:
    outcomes = [each for found in record.read().values() for each in found.values()]
    assert {each.kind for each in outcomes} <= KINDS
    assert [each for each in outcomes if not each.detail and each.kind not in ("works", "hangs")] == []


def test_a_run_of_one_version_keeps_the_other() -> None:
    case = Case("first", "Area", "a title", (), 2, lambda trial: None)
    before = {"first": {"2.13.0": Outcome("works")}, "gone": {"2.13.0": Outcome("works")}}
    after = record.merged(before, {"first": case}, "2.15.0", {"first": Outcome("raises", "KeyError: a|b_c `d_e`")})
    assert list(after) == ["first"] and list(after["first"]) == ["2.13.0", "2.15.0"]
    table = record.render(after, {"first": case}).splitlines()
    assert table[-1] == "| a title | works | **raises** KeyError: a\\|b\\_c `d_e` |  |"


# ---- how outcomes are told apart -----------------------------------------------------------------


def _verdict(tmp_path: Path, *kinds: str | None, crashed: list[int] | None = None) -> Outcome:
    reports = [
        run.Report(rank, time.monotonic(), Outcome(kind, "x" if kind == "raises" else ""))
        for rank, kind in enumerate(kinds)
        if kind is not None
    ]
    return run._verdict(reports, crashed or [], len(kinds), tmp_path)


def test_the_verdict_on_all_ranks(tmp_path: Path) -> None:
    assert _verdict(tmp_path, "works", "works") == Outcome("works")
    assert _verdict(tmp_path, None, None) == Outcome("hangs")
    assert _verdict(tmp_path, "works", None) == Outcome("hangs", "(1 of 2 ranks)")
    assert _verdict(tmp_path, "raises", "raises") == Outcome("raises", "x")
    assert _verdict(tmp_path, None, "raises") == Outcome("raises", "x")
    (tmp_path / "0.stderr").write_text("terminate called\n  what():  [enforce fail at pair.cc:456] too long\n")
    assert _verdict(tmp_path, None, "raises", crashed=[-6]) == Outcome("crashes", "(SIGABRT): too long")


def test_what_is_missing_is_no_such_option() -> None:
    for name in IMPLEMENTATIONS:
        api = Api(name)
        assert callable(api.fully_shard)
        for ask in (
            lambda api=api: api.no_such_name,
            lambda api=api: api.options("MixedPrecisionPolicy", no_such_argument=1),
            lambda api=api: api.method(torch.nn.Linear(1, 1), "no_such_method"),
            lambda api=api: api.method(torch.nn.Linear(1, 1), "reshard", "no_such_argument"),
        ):
            with pytest.raises(NoSuchOption):
                ask()
    with pytest.raises(ValueError, match="unknown implementation"):
        Api("deepspeed")


def test_cases_are_registered_once() -> None:
    cases = all_cases()
    assert len({case.title for case in cases.values() if not case.title.startswith("the same")}) == len(
        [case for case in cases.values() if not case.title.startswith("the same")]
    )
    assert all(callable(case.program) and case.world_size in (2, 4, 8) for case in cases.values())
    assert Trial(Api("torch"), 0, 2).world_size == 2
