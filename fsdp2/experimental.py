"""Under the names of ``torch.distributed.fsdp.experimental``, which torch adds after 2.15: here on every version."""

from __future__ import annotations

from fsdp2.features.gather_layouts import DefaultAllGatherLayout, all_gather_output_fn_with_native_copy
from fsdp2.features.reduce_inputs import reduce_scatter_input_fn_with_native_copy
from fsdp2.features.tensor_extensions import AllGatherInput

__all__ = [
    "AllGatherInput",
    "DefaultAllGatherLayout",
    "all_gather_output_fn_with_native_copy",
    "reduce_scatter_input_fn_with_native_copy",
]
