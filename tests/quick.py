"""What a change of the core breaks first, within a minute on two cores: for the minute after an edit.

`make quick` runs it: `python -m tests.quick`, with arguments for pytest. It has ruff look at the files that are not
committed, and runs the core's unit tests, what is counted (calls, collectives), and one drawn program of each kind and
some models on two ranks. All else is for `make test`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.__main__ import side_by_side

COMBINATIONS, TRAINING = "tests/multi_rank/combinations", "tests/multi_rank/training"
FIRST = (
    f"{COMBINATIONS}/test_drawn_programs.py::test_drawn_programs_train_like_the_plain_model_on_two_ranks[1d_2-7-2ranks]",
    f"{COMBINATIONS}/test_mixed_programs.py::test_mixed_programs_on_two_ranks[0-2ranks]",
    f"{TRAINING}/test_drawn_changes.py::test_drawn_programs_are_right_or_raise[default-0-2ranks]",
    f"{TRAINING}/test_matches_reference.py::test_training_equals_the_reference",
    f"{TRAINING}/test_several_roots.py",
    "tests/multi_rank/failures/test_recovery.py::test_the_next_iteration_is_clean",
    "tests/multi_rank/reduction/test_gradient_reduction.py",
)
"""Training beside the unsharded model on ranks."""
BESIDE = (
    "tests/unit/core",
    "tests/unit/test_architecture.py",
    "tests/unit/test_errors.py",
    "tests/fake_pg/test_batching.py",
    "tests/fake_pg/test_host_calls.py",
)
"""What one process shows, in as much time."""
LEFT_IN = "not (3ranks or 4ranks or 8ranks or 4threads)"


def changed() -> list[str]:
    """The Python files of this checkout that are not committed as they are."""
    if not Path(".git").exists():
        return []
    asked = (["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"])
    found = {line for command in asked for line in subprocess.check_output(command, text=True).splitlines()}
    return sorted(name for name in found if name.endswith(".py") and Path(name).exists())


def main(arguments: list[str]) -> int:
    """The exit status of the first part that failed, else 0."""
    files = changed()
    if files and (status := subprocess.call([sys.executable, "-m", "ruff", "check", *files])):
        return status
    command = [sys.executable, "-m", "pytest", "-m", "not full", "-k", LEFT_IN, *arguments]
    return side_by_side([*command, *FIRST], [*command, *BESIDE])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
