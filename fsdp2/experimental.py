"""Under the names of ``torch.distributed.fsdp.experimental``, which torch adds after 2.15: here on every version."""

from __future__ import annotations

from fsdp2.features.tensor_extensions import AllGatherInput

__all__ = ["AllGatherInput"]
