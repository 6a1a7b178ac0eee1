"""The programs, by area; importing this registers them in the order of the table."""

from extras.torch_gaps.cases import (  # noqa: I001  the order of the table
    precision,
    parameters,
    sharing,
    placement,
    divergence,
    reduction,
    autograd,
    clipping,
    optimizers,
    modules,
    state,
    checkpoints,
)

__all__ = [
    "autograd",
    "checkpoints",
    "clipping",
    "divergence",
    "modules",
    "optimizers",
    "parameters",
    "placement",
    "precision",
    "reduction",
    "sharing",
    "state",
]
