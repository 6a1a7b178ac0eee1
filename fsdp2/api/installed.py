"""All that sharding a module changes in the process beside the module, and how it is undone.

`import fsdp2` changes none of it. Each line says what it touches, and why. (A first compiled call changes Dynamo's
configuration, for the whole process and for good: see `compiled.entry`.)
"""

from __future__ import annotations

import threading

from fsdp2 import _torch
from fsdp2.api.logger import forget_logger, prepare_logger
from fsdp2.api.misuse import explain_errors
from fsdp2.compiled.frames import begin_graphs_anywhere, begin_graphs_at_calls_only
from fsdp2.optim import zeroing
from fsdp2.optim.guard import GUARD
from fsdp2.plugs.parameters import uninitialized, whole_operators, written_views
from fsdp2.plugs.schedules import asked_gradients
from fsdp2.plugs.watchdog import public as watchdog

_LOCK = threading.Lock()  # ranks may be threads of one process
_UNDO: list[_torch.Undo] = []


def install_once() -> None:
    """Install all of it, unless it is there. Called whenever a module was sharded, or a sharded module was copied.

    Raises:
        FSDPValueError: `FSDP2_LOG` has an unknown word.
    """
    with _LOCK:
        if not _UNDO:
            # Patches the entry to autograd, and DTensor's expand: backward(inputs=) takes sharded parameters as inputs.
            _UNDO.extend(asked_gradients.serve())
            # Patches sys.excepthook, and DTensor's collectives: errors that sharded parameters cause are explained.
            _UNDO.extend(explain_errors())
            # Patches DTensor's empty_like: parameters are NaN from `to_empty` until they are initialized.
            _UNDO.extend(uninitialized.serve())
            # Patches DTensor's random operators, and `nn.init.trunc_normal_`: shards get the values of a full tensor.
            _UNDO.extend(whole_operators.serve())
            # Patches DTensor's views, extremes and norms: writes to views reach the tensor, results cover all of it.
            _UNDO.extend(written_views.serve())
            # Patches `Optimizer.zero_grad` and `nn.Module.zero_grad`: they also drop gradients in no `.grad` yet.
            _UNDO.extend(zeroing.install())
        # Changes Dynamo's settings for our code, also for modules imported since: graphs begin at calls of sharded
        # modules only.
        begin_graphs_at_calls_only()
        # Adds hooks to all optimizers: those built too early get the sharded parameters, and their writes are noted.
        GUARD.install()
        # Starts a thread, and uses the store of the process group: ranks that wait for each other find out why.
        watchdog.start()
        # Sets levels of the loggers ``fsdp2.*``, as `FSDP2_LOG` asks.
        prepare_logger()


def uninstall() -> None:
    """Undo all of it, until something is sharded again. A patch that another program has put over ours since stays.

    Sharded models go on without these changes.
    """
    with _LOCK:
        forget_logger()
        watchdog.stop()
        GUARD.remove()
        begin_graphs_anywhere()
        while _UNDO:
            _UNDO.pop()()
