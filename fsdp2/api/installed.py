"""All that is done to the process, beside the model, when something is sharded; and how it is taken back.

`import fsdp2` does none of it. Each line says what it touches, and why. (What a first compiled call sets in Dynamo's
configuration, for the whole process and to stay, is in `compiled.entry`.)
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
    """Called whenever a module was sharded, or a sharded one copied. What is there is left as it is.

    Raises:
        FSDPValueError: `FSDP2_LOG` has a word that there is not.
    """
    with _LOCK:
        if not _UNDO:
            # How autograd is begun, and DTensor's expand: gradients that are asked for by sharded parameters.
            _UNDO.extend(asked_gradients.serve())
            # sys.excepthook, and DTensor's collectives: errors that sharded parameters meet are explained.
            _UNDO.extend(explain_errors())
            # DTensor's empty_like: what `to_empty` gives memory is NaN until it is initialized.
            _UNDO.extend(uninitialized.serve())
            # DTensor's random operators, and `nn.init.trunc_normal_`: shards hold what an unsharded tensor would get.
            _UNDO.extend(whole_operators.serve())
            # DTensor's views, extremes and norms: what is written to a view of a sharded tensor is written to it.
            _UNDO.extend(written_views.serve())
            # `Optimizer.zero_grad` and `nn.Module.zero_grad`: they drop gradients that wait elsewhere, too.
            _UNDO.extend(zeroing.install())
        # Dynamo's notes on our own code, of modules imported since too: graphs begin at calls of sharded modules only.
        begin_graphs_at_calls_only()
        # torch's hooks of all optimizers: those built too early get the sharded parameters, and writes are noted.
        GUARD.install()
        # A thread, and keys in the store of the process group: ranks that wait for each other find out why.
        watchdog.start()
        # The loggers ``fsdp2.*``: what `FSDP2_LOG` asks for is shown.
        prepare_logger()


def uninstall() -> None:
    """Take all of it back, until something is sharded again; what others have put over a part of it since stays.

    Models that are sharded go on, without what these lines do.
    """
    with _LOCK:
        forget_logger()
        watchdog.stop()
        GUARD.remove()
        begin_graphs_anywhere()
        while _UNDO:
            _UNDO.pop()()
