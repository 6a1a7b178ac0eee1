"""Programs written for torch's ``fully_shard`` or ``FullyShardedDataParallel``, run on fsdp2, unchanged.

``install()`` puts fsdp2's names in the place of torch's; ``python -m fsdp2.compat script.py`` does it for a whole
program, also under a launcher: ``torchrun --nproc-per-node 8 -m fsdp2.compat train.py``. Processes that the program
does not start itself (Ray's workers, ``mp.spawn``) have it by what they inherit of that command's environment: see
`switch`.

Libraries (Accelerate, Lightning, torchtitan, transformers, `torch.distributed.pipelining`) take ``fully_shard`` and
``FSDPModule`` from ``torch.distributed.fsdp`` by name, and decide by ``isinstance`` what a module can do. Importing
from ``fsdp2`` in one's own code is therefore not enough for them. What else they share with a sharded model is
`DTensor`, which needs no help.

Owns: which names are replaced where, and the few private names of torch that its own libraries read. This is the only
part of fsdp2 that knows of ``torch.distributed.fsdp``; it stands on the public face of fsdp2 alone.
"""

from fsdp2.compat.swap import Replacement, Swap, install

__all__ = ["Replacement", "Swap", "install"]
