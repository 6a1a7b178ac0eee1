"""The core's behaviour on one and two ranks, in under two minutes on two cores: for the minute after an edit.

`make quick` runs it: `python -m tests.quick`, with arguments for pytest. What it leaves out (four ranks, other meshes,
drawn programs, graphs, optimizers, memory that runs out, every feature beside the core) is for `make test`.
"""

from __future__ import annotations

import sys

from tests.__main__ import side_by_side

BESIDE = (
    "tests/fake_pg/test_batching.py",
    "tests/fake_pg/test_gathers_of_checkpointed_blocks.py",
    "tests/fake_pg/test_stream_races.py",
    "tests/parity/test_communication_control.py",
    "tests/unit/core/test_gather.py",
    "tests/unit/core/test_gradients.py",
    "tests/unit/core/test_hooks.py",
    "tests/unit/core/test_layout.py",
    "tests/unit/core/test_param.py",
    "tests/unit/core/test_reduce.py",
    "tests/unit/core/test_root.py",
    "tests/unit/core/test_sharding.py",
    "tests/unit/core/test_state.py",
    "tests/unit/core/test_structure.py",
    "tests/unit/core/test_transport.py",
    "tests/unit/test_architecture.py",
    "tests/unit/test_errors.py",
)
"""Arithmetic, what is refused, the order of collectives, streams, calls: as long as what comes first."""

FIRST = (
    "tests/multi_rank/failures/test_recovery.py",
    "tests/multi_rank/parameters/test_replaced_parameters.py",
    "tests/multi_rank/reduction/test_gradient_reduction.py",
    "tests/multi_rank/state_dicts/test_state_dict.py",
    "tests/multi_rank/training/test_activation_checkpointing.py",
    "tests/multi_rank/training/test_matches_reference.py",
    "tests/multi_rank/training/test_several_roots.py",
    "tests/multi_rank/training/test_unusual_outputs.py",
    "tests/multi_rank/transports/test_peers.py",
    "tests/parity/test_mixed_precision.py",
    "tests/parity/test_prefetch.py",
    "tests/parity/test_reduction.py",
    "tests/parity/test_reshard.py",
    "tests/parity/test_structures.py",
    "tests/parity/test_unshard.py",
)
"""Training against the unsharded model, settings, failures, what users replace and save."""

LEFT_IN = "not (3ranks or 4ranks or 8ranks or 4threads)"


def main(arguments: list[str]) -> int:
    """The exit status of the first part that failed, else 0."""
    command = [sys.executable, "-m", "pytest", "-m", "not full", "-k", LEFT_IN, *arguments]
    return side_by_side([*command, *FIRST], [*command, *BESIDE])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
