"""How the model of `lm/model.py` is split over tensor-parallel ranks: which module holds which part of what.

Megatron's scheme (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022). Between the matrices
each rank has a part of the sequence, inside a pair of them a part of the heads or of the hidden layer:

    residual stream, norms          (batch, length / tp, width)
        all-gather
    query, key, value; gate, up     split by rows: this rank's heads, its part of the hidden layer
    output; down                    split by columns: each rank has a term of the sum
        reduce-scatter
    residual stream                 (batch, length / tp, width)

Every parameter is named here, the norms' too, so all of them are DTensors on the same mesh: gradient clipping
and fused optimizers take only such.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from lm.errors import UserError
from lm.model import VOCABULARY_SIZE, ModelSize

SEQUENCE = Shard(1)
"""Of activations: (batch, length, width)."""


def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """Return how to split each module of a `Transformer`, by name, for `parallelize_module`."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "blocks.*.attention_norm": SequenceParallel(),
        # The second argument, the rotation, is the same on every rank and stays a plain tensor.
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(SEQUENCE, None), desired_input_layouts=(Replicate(), None)
        ),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.output": RowwiseParallel(output_layouts=SEQUENCE),
        "blocks.*.feed_forward_norm": SequenceParallel(),
        "blocks.*.feed_forward": PrepareModuleInput(input_layouts=SEQUENCE, desired_input_layouts=Replicate()),
        "blocks.*.feed_forward.gate": ColwiseParallel(),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=SEQUENCE),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate()),
    }


def check_divides(tp: int, size: ModelSize, *, context: int) -> None:
    """Raise `UserError` unless everything that the plan splits has a multiple of `tp` parts."""
    parts = {
        "attention heads": size.head_count,
        "heads of keys and values": size.kv_head_count,
        "hidden units": size.hidden_width,
        "bytes in the vocabulary": VOCABULARY_SIZE,
        "bytes of --context": context,
    }
    for what, count in parts.items():
        if count % tp:
            raise UserError(f"--tp {tp} does not divide the {count} {what}: use a --tp that does")
