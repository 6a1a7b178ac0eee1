"""`Checkpoints`: the checkpoints of one run, saved while it trains, and found again when it is started anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.arguments import Rule, checked, checked_class
from fsdp2.checkpoint import errors
from fsdp2.checkpoint.contents import Contents, Values
from fsdp2.checkpoint.errors import CheckpointDamaged, CheckpointError, SaveFailed
from fsdp2.checkpoint.folders import LOG, clean, name_of, old_in, remove, steps_in
from fsdp2.checkpoint.loading import Load, Options, Verify
from fsdp2.checkpoint.optimizers import Optimizers
from fsdp2.checkpoint.ranks import InBackground, Ranks, Watched, ranks_of
from fsdp2.checkpoint.report import LoadReport
from fsdp2.checkpoint.rules import COUNT_RULE, OPTIMIZER_RULE, PATH_RULE, VALUES_RULE, is_int
from fsdp2.checkpoint.saving import Save
from fsdp2.checkpoint.staging import Staging
from fsdp2.model.broadcast_parameters import GROUP

_STEP = Rule("an int >= 0", lambda value: is_int(value) and value >= 0, is_int)


@checked_class(
    run=PATH_RULE,
    optimizer=OPTIMIZER_RULE,
    shared=VALUES_RULE,
    per_rank=VALUES_RULE,
    keep_last=COUNT_RULE,
    keep_every=COUNT_RULE,
    process_group=GROUP,
)
class Checkpoints:
    """The checkpoints of the run in the folder ``run``: ``step-00000500`` and so on, each complete or not there.

        >>> checkpoints = Checkpoints("runs/7", model, optimizer, shared={"schedule": scheduler}, keep_last=3)
        >>> start = checkpoints.restore()
        >>> for step in range(start, steps):
        ...     train(step)
        ...     if (step + 1) % 500 == 0:
        ...         checkpoints.save(step + 1)
        >>> checkpoints.close()

    A context manager, which closes. All ranks make it, and call its methods, together, outside of forward and backward.

    Args:
        run: a folder that all ranks see; made by the first save.
        model: as of `save`.
        optimizer: one, several, or none.
        shared: by names, what is the same on all ranks; `restore` replaces plain values in the mapping.
        per_rank: by names, what each rank has for itself.
        keep_last: so many of the newest stay; None: all.
        keep_every: those of steps that are multiples of it stay, too.
        process_group: by default that of all ranks.

    Raises:
        FSDPTypeError, FSDPValueError: an argument of another kind.

    Attributes:
        report: of the last `restore`; None before, and where there was nothing to restore.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        shared: Values | None = None,
        per_rank: Values | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._run = Path(run).absolute()  # wherever the program goes
        self._model = model
        self._collect = lambda: Contents(model, optimizer, shared, per_rank)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._ranks = ranks_of(process_group)
        self._group = process_group
        self._background: _Background | None = None
        self.report: LoadReport | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        try:  # what the program raised is more important
            self.close()
        except Exception as failure:
            LOG.error("%s", failure)

    def steps(self) -> list[int]:
        """Those that there are complete checkpoints of, the one that was written last at the end.

        Not collective: while a save comes to its end, ranks may find others.
        """
        return steps_in(self._run)

    @checked()
    def restore(
        self,
        step: int | None = None,
        *,
        on_damage: Literal["raise", "previous"] = "raise",
        verify: Verify = "reading",
        per_rank_missing: Literal["raise", "keep"] = "raise",
    ) -> int:
        """Load the newest complete checkpoint, and return its step; 0 if there is none, and nothing is changed then.

        Args:
            step: that one instead.
            on_damage: ``"previous"``: go on to the one before a damaged one, which the log says.
            verify: as of `load`.
            per_rank_missing: as of `load`.

        Raises:
            CheckpointError: as of `load`.
        """
        self.wait()
        failure, steps = "", []
        if self._ranks.rank == 0:
            try:
                clean(self._run)
                steps = steps_in(self._run)
            except OSError as error:
                failure = f"the run {self._run} cannot be read: {error}"
        failure, steps = self._ranks.all_gather((failure, steps), f"the checkpoints of {self._run.name}")[0]
        if failure:
            raise CheckpointError(failure)
        if step is not None and step not in steps:
            raise errors.CheckpointIncomplete(f"{self._run} has no checkpoint of step {step}; it has {steps}.")
        chosen = [step] if step is not None else steps[::-1]
        options = Options(verify=verify, per_rank_missing=per_rank_missing)
        for index, each in enumerate(chosen):
            load = Load(self._run / name_of(each), self._ranks, options)
            try:
                self.report = load.run(self._collect, self._model)
                return each
            except CheckpointDamaged as error:
                if on_damage == "raise" or index + 1 == len(chosen):
                    raise
                LOG.warning("skipped: %s", error)
        return 0

    @checked(step=_STEP)
    def save(self, step: int, *, asynchronous: bool = False) -> None:
        """Save what there is now as of ``step``: whole, or not at all. Then remove what is too old.

        A checkpoint of the same step is replaced, once the new one is complete.

        Args:
            step: of training, as `restore` is to return it.
            asynchronous: return when this rank's shards are copied to memory that is kept for that, and let a thread
                write. (The first such save starts the thread, and makes a process group, which is kept.) Errors are
                raised by the next `save`, `wait` or `close`.

        Raises:
            SaveFailed: on every rank, as of `fsdp2.checkpoint.save`; or of the asynchronous save before.
        """
        self.wait()
        step = int(step)
        if asynchronous:
            background = self._background = self._background or _Background(self._ranks, self._group)
            background.start(lambda ranks: self._job(step, ranks, background.staging))
            return
        self._job(step, self._ranks, None)()

    def _job(self, step: int, ranks: Ranks, staging: Staging | None) -> Callable[[], None]:
        """Collect what there is; what is left to do."""
        save = Save(self._run / name_of(step), ranks, replaces=True)
        copy = None if staging is None else staging.copy
        with torch.inference_mode(False):
            error = save.attempt(lambda: save.collect(self._collect(), step, copy))

        def go_on() -> None:
            save.write(error or (save.attempt(lambda: clean(self._run)) if ranks.rank == 0 else None))
            if ranks.rank == 0:
                self._remove_old(step)

        return go_on

    def _remove_old(self, saved: int) -> None:
        try:
            old = old_in(self._run, self._keep_last, self._keep_every)
            failures = remove(self._run, [step for step in old if step != saved])
        except OSError as error:  # what was saved is complete
            failures = [f"{type(error).__name__}: {error}"]
        for each in failures:
            LOG.warning("an old checkpoint could not be removed: %s", each)

    def wait(self) -> None:
        """Wait until an asynchronous save has come to its end.

        Raises:
            SaveFailed: it failed, on every rank.
        """
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Wait, and end the thread. Saves may follow; they start a new one.

        Raises:
            SaveFailed: the last asynchronous save failed, on every rank.
        """
        background, self._background = self._background, None
        if background is not None:
            background.close()


class _Background:
    """The thread that writes, its process group, and the memory that is written from."""

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None) -> None:
        self.staging = Staging()
        self._ranks: Ranks = ranks
        if isinstance(ranks, Watched):
            whole = dist.group.WORLD if group is None else group
            assert whole is not None, "there are several ranks"
            self._ranks = InBackground(whole)
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="fsdp2-checkpoint", initializer=_set_device, initargs=(_current_device(),)
        )
        self._pending: Future[None] | None = None

    def start(self, job: Callable[[Ranks], Callable[[], None]]) -> None:
        """Collect now, and write later."""
        self._pending = self._thread.submit(_logged, job(self._ranks))

    def wait(self) -> None:
        """Until it is written. What interrupts the wait, as a signal may, leaves it to be waited for again."""
        pending = self._pending
        if pending is None:
            return
        error = pending.exception()
        self._pending = None
        if isinstance(error, Exception) and not isinstance(error, SaveFailed):
            raise SaveFailed(f"an asynchronous save failed: {type(error).__name__}: {error}") from error
        if error is not None:
            raise error

    def close(self) -> None:
        """The end of it."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _current_device() -> int | None:
    """The rank's accelerator, by its index; None where there is none, or none in use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    is_in_use = getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)
    return torch.accelerator.current_device_index() if is_in_use() else None


def _set_device(index: int | None) -> None:
    """Make the rank's accelerator this thread's, whose own is the first, as every new thread's; None: it stays."""
    if index is not None:
        torch.accelerator.set_device_index(index)


def _logged(job: Callable[[], None]) -> None:
    """The log has what goes wrong at once, as a program may end, or forget the object, without asking."""
    try:
        job()
    except Exception as error:
        LOG.error("an asynchronous save failed: %s", error)
        raise
