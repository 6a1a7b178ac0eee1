"""`facts_of`: everything that is known of a sharded model, as frozen data: groups, parameters, memory, exchanges.

`fsdp2.explain` shows these facts, and `fsdp2.estimate` calculates with them. Reading changes and communicates nothing.
"""

from fsdp2.tools.facts.data import (
    BufferFacts,
    ExchangeFacts,
    GradientFacts,
    GroupFacts,
    MeshAxis,
    ModelFacts,
    OrderFacts,
    ParamFacts,
    PlainParamFacts,
    RestFacts,
)
from fsdp2.tools.facts.reading import facts_of

__all__ = [
    "BufferFacts",
    "ExchangeFacts",
    "GradientFacts",
    "GroupFacts",
    "MeshAxis",
    "ModelFacts",
    "OrderFacts",
    "ParamFacts",
    "PlainParamFacts",
    "RestFacts",
    "facts_of",
]
