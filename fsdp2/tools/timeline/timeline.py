"""`timeline`: a context around training steps that shows what every rank computes, gathers, reduces and waits for."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch import nn

from fsdp2.arguments import at_least, checked
from fsdp2.compiled.report import compile_report
from fsdp2.errors import FSDPRuntimeError, FSDPValueError
from fsdp2.tools.observing.observation import Observation, class_name
from fsdp2.tools.timeline.analysis import RankSummary, Slowest
from fsdp2.tools.timeline.chrome_trace import trace
from fsdp2.tools.timeline.collecting import Meeting
from fsdp2.tools.timeline.recorder import Recorder
from fsdp2.tools.timeline.report import GroupSummary, TimelineReport

FORMATS = (".json", ".png")


class Timeline:
    """What `timeline` returns: a context, and afterwards what was seen in it. ``print`` it.

    On the first rank it shows all ranks, on others only the rank itself.
    """

    def __init__(self, models: Sequence[nn.Module], group: dist.ProcessGroup | None, seconds: float) -> None:
        self._models = tuple(models)
        self._group, self._seconds = group, seconds
        self._recorder = Recorder()
        self._observation = Observation(self._models, self._recorder, "timeline()")
        self._recorder.observation = self._observation
        self._meeting: Meeting | None = None
        self._report: TimelineReport | None = None

    # -- the context

    def __enter__(self) -> Timeline:
        """Begin to observe. All ranks must enter.

        Raises:
            FSDPRuntimeError: other ranks have not entered within the timeout; or it was entered before.
        """
        if self._meeting is not None or self._report is not None:
            raise FSDPRuntimeError("a timeline can be entered once: call fsdp2.timeline(model) for each context.")
        meeting = Meeting(self._group, self._seconds)
        meeting.begin()
        self._meeting = meeting
        self._recorder.begin()
        self._observation.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop observing, and bring what was seen to the first rank, unless an exception leaves the context.

        Raises:
            FSDPRuntimeError: raised on the first rank if others do not leave within the timeout.
        """
        assert self._meeting is not None, "it was entered"
        self._observation.end()
        failure = "" if kind is None else f"{kind.__name__}: {error}"
        names = ", ".join(map(class_name, self._models))
        mine = self._recorder.record(rank=self._meeting.rank, failure=failure, model=names, in_graphs=self._in_graphs())
        self._models = ()  # models must not live as long as this object
        del self._observation, self._recorder.observation
        self._report = TimelineReport.of([mine])
        if kind is not None:
            self._meeting.tell(mine)
            return
        self._report = TimelineReport.of(self._meeting.collect(mine))

    def _in_graphs(self) -> tuple[str, ...]:
        found = [each for model in self._models for each in compile_report(model).groups]
        return tuple(each.name for each in found if each.captured)

    # -- what was seen

    @property
    def report(self) -> TimelineReport:
        """Everything that was seen.

        Raises:
            FSDPRuntimeError: the context has not ended.
        """
        if self._report is None:
            raise FSDPRuntimeError(
                "a timeline shows what was seen when its context is over: read it after the with block."
            )
        return self._report

    @property
    def ranks(self) -> tuple[RankSummary, ...]:
        """A summary of each rank: seconds and bytes of a step."""
        return self.report.ranks

    @property
    def groups(self) -> tuple[GroupSummary, ...]:
        """A summary of each group: seconds and bytes of a step, on average over ranks."""
        return self.report.groups

    @property
    def slowest(self) -> Slowest | None:
        """The rank that the others wait for, and where it loses time; None for one rank."""
        return self.report.slowest

    def __str__(self) -> str:
        return "a timeline whose context has not ended" if self._report is None else self._report.table()

    def to_json(self) -> str:
        """Ranks, groups and the slowest rank as JSON; seconds and bytes of a step. (A trace is what `save` writes.)"""
        return json.dumps(self.report.to_dict())

    @checked()
    def save(self, path: str | Path) -> None:
        """Write it to ``path``, on the first rank; the others return at once. Every rank may call it.

        ``.json`` is a trace for ui.perfetto.dev and chrome://tracing, ``.png`` a picture.

        Raises:
            FSDPRuntimeError: the context has not ended; or a picture is asked for without matplotlib.
            FSDPValueError: the path has another ending.
            OSError: the file cannot be written.
        """
        report, target = self.report, Path(path)
        if target.suffix not in FORMATS:
            raise FSDPValueError(
                f"Timeline.save() writes {', '.join(FORMATS)}, by the ending of the path; got '{target.name}'."
            )
        if target.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
            raise FSDPRuntimeError(
                "Timeline.save() draws pictures with matplotlib, which is not installed: pip install 'fsdp2[tools]', "
                "or save a .json trace, which ui.perfetto.dev shows."
            )
        alone = report.records[0].failure != ""
        if self._meeting is not None and not (self._meeting.is_first or alone):
            return
        if target.suffix == ".json":
            target.write_text(json.dumps(trace(report)), encoding="utf-8")
        else:
            # Imported late: importing fsdp2 must stay light.
            from fsdp2.tools.timeline.picture import draw

            draw(report, target)


@checked(timeout=at_least(0))
def timeline(
    model: nn.Module | Sequence[nn.Module],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = 10.0,
) -> Timeline:
    """A context around steps of ``model`` that records what each rank computes, gathers, reduces and waits for.

        >>> with fsdp2.timeline(model) as timeline:
        ...     for batch in itertools.islice(batches, 3):
        ...         train(batch)
        >>> print(timeline)
        >>> timeline.save("timeline.json")

    Outside of the context none of it runs. All ranks must enter and leave it, around the same steps. They meet over the
    store of the process group, and no collective is added. Times are the host's on CPU; on devices with streams they
    are the device's, by events. See 'See where a step's time goes' in the documentation.

    Args:
        model: a sharded model, or several; names of groups then begin with the class of their model.
        group: the ranks that are observed together; None: all ranks.
        timeout: how many seconds ranks wait for each other at the beginning and at the end.

    Raises:
        FSDPTypeError, FSDPValueError: ``model`` is no module, or nothing in it is sharded.
        FSDPRuntimeError: (when it is entered) other ranks have not entered within the time; the message names them.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise FSDPValueError("timeline() takes a module, or several, as 'model', got an empty list.")
    return Timeline(models, group, timeout)
