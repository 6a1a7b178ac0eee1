"""The programs that show one feature each: they assert what they claim, so it is enough to run them.

All of it belongs to `make test-full`: about 10 s each, most of it importing torch in five processes on two cores.
"""

from __future__ import annotations

import pytest

from tests.harness.launching import EXAMPLES, output_of

PRINTED = {
    "hsdp.py": "both copies of every shard are equal",
    "tensor_parallel.py": "step 9: loss",
    "mixed_precision.py": "a block computes in {torch.bfloat16}",
    "offload.py": "its shards are on cpu",
    "pipeline.py": "step 9: loss",
    "muon.py": "step 9: loss",
    "skip_bad_batches.py": "the steps [2, 7, 12, 17, 22, 27] were left",
    "beyond.py": "a plain Model with a weight of shape (64, 32)",
}


@pytest.mark.full
@pytest.mark.parametrize("program", PRINTED)
def test_the_program_runs_on_four_ranks(program: str) -> None:
    """About 10 s each."""
    assert PRINTED[program] in output_of(program, ranks=4)


def test_no_program_is_left_out_and_each_is_short() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.py")} - {"train_lm.py", "train_check.py", "fsdp1_program.py"}
    assert programs == set(PRINTED)
    for name in programs:
        text = (EXAMPLES / name).read_text()
        assert len(text.splitlines()) < 80
        assert f"--nproc-per-node 4 examples/{name}\n" in text
