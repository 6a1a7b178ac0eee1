"""A watchdog: ranks that can never meet raise an error that names both, instead of waiting for ever."""

from fsdp2.plugs.watchdog.public import flight_record, set_watchdog

__all__ = ["flight_record", "set_watchdog"]
