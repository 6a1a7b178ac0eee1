"""`facts_of`: all that is to be known of a sharded model, as frozen data: groups, parameters, memory, exchanges.

What `fsdp2.explain` shows and `fsdp2.estimate` calculates with. Reading changes nothing and communicates nothing.
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
