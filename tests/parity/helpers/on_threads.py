"""Which tests of `tests/parity` run on threads as ranks too (see `tests.harness.threads`): all but a few.

The process group of threads is written in Python, and module-level state of ours is then shared by all ranks: any
test may find what does not bear that. All of them take four minutes, hence most have the mark ``full``.
"""

from __future__ import annotations

from tests.harness.threads import OnThreads

OFTEN = {
    "test_managed_modules": ("test_without_new_init_that_leaves_the_new_one_uninitialized",),
    "test_outside_of_training": ("test_the_state_dict_holds_the_sharded_parameters_*",),
    "test_torchs_errors": ("test_a_tensor_parallel_parameter_on_a_mesh_*",),
    "test_finalization": ("test_the_gradients_are_there_after_the_wait",),
    "test_precision_per_parameter": ("test_an_override_that_differs_between_ranks_is_an_error_on_all_of_them",),
    "test_reduction": ("test_unused_parameters_have_zero_gradients_only_where_asked",),
    "test_structures": ("test_packed_sequences",),
}

_LOGS = "the ranks' calls would come into one log"
_HEARD = "collectives of tensor parallelism, which are no operators here, would be heard too"
NEVER = {
    "test_communication_control": {
        "test_the_process_group_is_asked_for_memory_where_it_has_some": "it patches a class across collectives",
        "test_memory_of_the_process_group_which_gloo_does_not_have": "torch's own raises",
        "test_a_backward_that_is_not_the_last_leaves_its_reductions_pending": "works of this group keep their tensors",
    },
    "test_composition": {"test_jvp_through_a_forward": "levels of forward differentiation are one list for all"},
    "test_extensions": {
        "test_under_hsdp_the_mesh_is_the_shard_axis": _LOGS,
        "test_the_extension_is_told_sizes_module_and_policy": _LOGS,
        "test_the_first_gather_makes_the_tensor_and_later_ones_write_into_it": _LOGS,
    },
    "test_hsdp": {
        "test_the_full_state_dict_of_hsdp_goes_to_a_plain_model_and_back": "torch's state dicts leave out its ranks",
    },
    "test_spmd_mesh": {"test_gradients_are_reduced_once_along_the_data_axis": _HEARD},
    "test_tensor_parallel": {
        "test_loss_parallel": "torch patches its operators for the whole process",
        "test_fsdp_communicates_along_the_data_axis_only": _HEARD,
    },
}
ON_THREADS = OnThreads(OFTEN, {file: tuple(tests) for file, tests in NEVER.items()})
