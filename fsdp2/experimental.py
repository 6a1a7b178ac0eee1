"""Under the names of ``torch.distributed.fsdp.experimental``, which torch adds after 2.15: here on every version."""

from __future__ import annotations

from fsdp2.plugs.parameters.tensor_extensions import AllGatherInput

__all__ = ["AllGatherInput"]
