"""`fsdp2.explain`: how a model is sharded, what a step exchanges, and what is slow about it, as text and JSON."""

from fsdp2.tools.explaining.advice import Advice
from fsdp2.tools.explaining.explanation import Explanation, explain

__all__ = ["Advice", "Explanation", "explain"]
