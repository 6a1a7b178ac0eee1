"""The names of torch's ``_flat_param`` that programs import: records as of `layout`, and two classes of nothing.

Parameters are never flat here, so nothing is an instance of `FlatParameter` or `FlatParamHandle`. What programs read of
them is in `fsdp2.compat.fsdp1.inspection`.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

import fsdp2
from fsdp2.compat.fsdp1.config import HandleShardingStrategy
from fsdp2.compat.fsdp1.layout import FlatParamShardMetadata, ParamInfo, SharedParamInfo

__all__ = [
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "HandleShardingStrategy",
    "ParamInfo",
    "SharedParamInfo",
]


class _Nothing(type):
    """Of classes without instances."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise fsdp2.FSDPTypeError(
            f"{cls.__name__} cannot be made: fsdp2 does not flatten parameters, which are DTensors under their own "
            "names. 'Programs written for FSDP1' in the documentation says what takes its place."
        )

    def __instancecheck__(cls, instance: object) -> bool:
        return False


class _NoParameter(_Nothing, type(nn.Parameter)):  # type: ignore[misc]
    """Of parameters that there are none of."""


class FlatParameter(nn.Parameter, metaclass=_NoParameter):  # type: ignore[metaclass]
    """No parameter is one; ``parameter._fsdp_flattened`` says which are sharded, and `wrapper._flat_param` shows them.

    Raises:
        FSDPTypeError: when it is called.
    """


class FlatParamHandle(metaclass=_Nothing):
    """No unit has one; ``wrapper._handle`` shows what programs read of it.

    Raises:
        FSDPTypeError: when it is called.
    """
