"""What is done to the process, beside the model, when something is sharded."""

from __future__ import annotations

from fsdp2.api.logger import prepare_logger
from fsdp2.api.misuse import explain_errors
from fsdp2.compiled.frames import begin_graphs_at_calls_only
from fsdp2.features import asked_gradients, uninitialized, whole_operators, written_views
from fsdp2.features.watchdog import public as watchdog
from fsdp2.optim import zeroing
from fsdp2.optim.guard import GUARD


def install_once() -> None:
    """Whenever a module was sharded, or a sharded one copied. What is there is left as it is."""
    begin_graphs_at_calls_only()
    asked_gradients.serve()
    explain_errors()
    uninitialized.serve()
    watchdog.start()
    whole_operators.serve()
    written_views.serve()
    GUARD.install()
    zeroing.install()
    prepare_logger()
