"""What is observed of a worker: a ledger, a record per step, metrics, spans.

Mechanisms count here; methods contain no logging.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple, Protocol, Self, TypeVar

import msgspec

from paceline.errors import PeerLostError, UsageError

_T = TypeVar("_T")
Phase = Literal["warm-up", "tuning", "selecting", "steady"]
"""What a step is worth: ``"warm-up"`` (the first step, and what a method takes to learn), ``"tuning"``
(buckets are being measured and tried), ``"selecting"`` (the method is), ``"steady"``: as all later ones."""

MOST_NOTES = 8
"""Sentences that stand beside a run's figures; a training may say ever so many."""


STEP_ROW = "step"
"""Where a trace shows steps, each from the end of the one before to its own."""


MOST_METHODS = 64
"""Changes of a method that are remembered."""


class Span(NamedTuple):
    """Something that took time on one worker: *start* and *end* in seconds.

    *row* is where a trace shows it: ``"step"``, ``"compute"``, ``"wait"``, ``"world lane 0"``.
    """

    worker: int
    row: str
    name: str
    start: float
    end: float


class StepRecord(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """One optimizer step of one worker, from the end of the last step to its own end.

    `paceline.on_step` passes one for each step; ``--records`` writes them as JSON.

    Attributes:
        worker: Rank.
        step: Number of the step in the job, from 1.
        end_seconds: End of the step: seconds since the start of training, on the runtime's clock.
        step_seconds: Seconds from the end of the last step.
        exposed_communication_seconds: Seconds of waiting for paceline's own communication.
        compute_seconds: The other seconds of the step, a script's own collectives included.
        bytes_sent: Bytes of paceline's own communication.
        metrics: Values that the script gave to `paceline.log`, by name.
        method: Spec of the step, if the training changes its method; else empty.
        phase: ``"warm-up"``, ``"tuning"`` (bucket sizes), ``"selecting"`` (the method) or ``"steady"``.
        figures: The method's own figures, such as staleness, by name. Filled for `paceline.on_step` and
            `paceline.report_to`.

    Example:
        ::

            def show(record):
                print(record.step, record.step_seconds, record.exposed_communication_seconds)


            paceline.on_step(show)
    """

    worker: int
    step: int
    end_seconds: float
    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    bytes_sent: int
    metrics: dict[str, float | None]
    method: str = ""
    phase: Phase = "steady"
    figures: dict[str, float] = {}


def steady_part(steps: Sequence[_T], phases: Sequence[Phase]) -> list[_T]:
    """Of *steps* with their *phases* the steady ones since the last that was not; without any, those since
    the last that was tuning or a warm-up; without these all but the first, which carries the
    start-up's costs."""
    for accepted in (("steady",), ("steady", "selecting")):
        first = len(steps)
        while first and phases[first - 1] in accepted:
            first -= 1
        if first < len(steps):
            return list(steps[first:])
    return list(steps[1:] or steps)


def steady_steps(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Of one worker's records those whose figures tell of all later ones; see `steady_part`."""
    return steady_part(records, [record.phase for record in records])


class StepStats(msgspec.Struct, array_like=True):
    """One worker's run in numbers: its steps, and medians over them; where workers do not
    communicate in each step alike, medians over means of as many as it takes to repeat."""

    steps: float
    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    bytes_sent: float

    @classmethod
    def of(
        cls,
        records: Sequence[StepRecord],
        period: int = 1,
        steps: int | None = None,
    ) -> Self:
        """Medians over a worker's steady steps.

        Args:
            records: Its last steps.
            period: After so many steps what they take and send repeats.
            steps: How many it has done in all (None: those of *records*).
        """
        steady = steady_steps(records)
        period = max(1, min(period, len(steady)))
        rounds = [
            steady[first : first + period]
            for first in range(len(steady) % period, len(steady), period)
        ]

        def middle(field: str) -> float:
            if not steady:
                return math.nan
            return float(
                median(fmean(getattr(step, field) for step in one) for one in rounds)
            )

        return cls(
            len(records) if steps is None else steps,
            middle("step_seconds"),
            middle("compute_seconds"),
            middle("exposed_communication_seconds"),
            middle("bytes_sent"),
        )


class RecordListener(Protocol):
    """Receives all that a recorder records, as it comes."""

    def step(self, record: StepRecord) -> None:
        """A step has ended."""
        ...

    def span(self, span: Span) -> None:
        """Something that took time has ended."""
        ...


class RecordsInMemory(NamedTuple):
    """A `RecordListener` in memory, for runs that are short."""

    steps: list[StepRecord]
    spans: list[Span]

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def span(self, span: Span) -> None:
        self.spans.append(span)


STEPS_KEPT = 1000
"""A recorder's window: what medians are made of. Half a megabyte."""


class StepRecorder:
    """Records one worker's steps, its waits for the network, and what it logs.

    *now* is its runtime's clock; *listener* is told everything, and so is whoever asks to be
    (`subscribe`). ``step_count`` counts steps,
    and ``steps`` are the last `STEPS_KEPT`: training may go on for ever. What steps take
    and send repeats after ``period`` of them. ``observers`` are
    called with 0 when the first training begins, and with each step's number at its end.
    """

    def __init__(
        self,
        worker: int,
        now: Callable[[], float],
        listener: RecordListener | None = None,
    ) -> None:
        self.worker = worker
        self.method = self.brief = ""
        self.trainings = 0
        self.buckets = 0
        self.tuned_after = 0
        """After which step buckets are as they will be, as a usual step sees it; 0: not yet."""
        self.warmup_steps = 0
        """Steps that the method takes after that, until it does what it will: a budget, first steps
        without compression."""
        self.selecting = False
        """Whether methods are being tried, or are about to be."""
        self.steady_from = 0
        """Since which step (of this worker, from 1 on) all are steady; 0: the last one was not."""
        self.period = 1
        self.methods: deque[tuple[int, str]] = deque(maxlen=MOST_METHODS)
        """Of a training that changes its method: after which step it went by which spec, the last
        few; of others nothing."""
        self.notes: deque[str] = deque(maxlen=MOST_NOTES)
        self.step_count = 0
        self.steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self.metrics: dict[str, float] = {}
        self.observers: list[Callable[[int], None]] = []
        self.messages = 0
        """Collectives and requests so far."""
        self.blocked: dict[int, tuple[str, float]] = {}
        """Which threads wait for other workers or servers now, for what, and since when."""
        self.lost = ""
        """The sentence that names a worker which has ended badly, once one has."""
        self.wants_figures = False
        """Whether somebody has asked for `StepRecord.figures`, which take time."""
        self._now = now
        self._listeners = [] if listener is None else [listener]
        self._fresh_metrics: dict[str, float] = {}
        self._bytes_sent = 0
        self._wait_seconds = 0.0
        self._began = self._last_end = 0.0

    def subscribe(self, listener: RecordListener, *, figures: bool = False) -> None:
        """From now on *listener* is told everything, too; *figures*: also those."""
        self._listeners.append(listener)
        self.wants_figures = self.wants_figures or figures

    def begin(self, method: str, brief: str = "") -> None:
        """Training begins: steps are measured from here. *method*: its full spec; *brief*: what
        of that is not as by default."""
        self.trainings += 1
        self.method, self.brief = method, brief or method
        self._began = self._last_end = self._now()
        self._bytes_sent, self._wait_seconds = 0, 0.0
        if self.trainings == 1:
            for observer in self.observers:
                observer(0)

    def change(self, method: str, brief: str) -> None:
        """From the next step on training goes by another spec: what a usual step takes is found
        out anew."""
        self.method, self.brief = method, brief
        self.tuned_after, self.warmup_steps, self.period = 0, 0, 1
        self.steady_from = 0
        while self.methods and self.methods[-1][0] == self.step_count:
            self.methods.pop()  # no step was done by it
        if not self.methods or self.methods[-1][1] != brief:
            self.methods.append((self.step_count, brief))

    def planned(self, buckets: int, final: bool) -> None:
        """Record that gradients travel in this number of *buckets* from now on.

        Args:
            buckets: Number of buckets.
            final: Whether tuning has ended. Otherwise the next steps still measure, and their times are
                not typical.
        """
        self.buckets = buckets
        if not final:
            self.tuned_after = self.steady_from = 0
        elif not self.tuned_after:
            self.tuned_after = self.step_count + 1

    @property
    def steady_after(self) -> int:
        """The step after which the current method is in steady state; 0 if this is not known yet."""
        return self.tuned_after and self.tuned_after + self.warmup_steps

    def _phase_of(self, step: int) -> Phase:
        if step == 1:
            return "warm-up"
        if not 0 < self.tuned_after < step:
            return "tuning"
        if step <= self.steady_after:
            return "warm-up"
        return "selecting" if self.selecting else "steady"

    def set_period(self, steps: int) -> None:
        """What steps take and send repeats after so many: a mean over fewer says little."""
        self.period = max(1, steps)

    def stats(self) -> StepStats:
        """Figures of its steady steps."""
        return StepStats.of(list(self.steps), self.period, self.step_count)

    def add_note(self, sentence: str) -> None:
        """Keep a sentence that belongs beside the run's figures: the last few."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def count_bytes(self, count: int) -> None:
        """Count bytes that this worker puts on the network, of one message or collective."""
        self._bytes_sent += count
        self.messages += 1

    @property
    def bytes_sent(self) -> int:
        """Bytes since the last step ended."""
        return self._bytes_sent

    def block(self, name: str, wait: Callable[[], object]) -> None:
        """Call *wait*, which returns when others have done their part. Meanwhile the thread
        is in `blocked`: Python cannot interrupt it. `torch.profiler` sees it, too. Raises
        `PeerLostError` where one of them is known to be lost."""
        # Records are also read where torch is not, which takes seconds to import.
        from paceline.torch_internals import profiled

        if self.lost:
            raise PeerLostError(self.lost)
        thread = threading.get_ident()
        self.blocked[thread] = name, self._now()
        try:
            with profiled("paceline::wait", name):
                wait()
        finally:
            self.blocked.pop(thread, None)

    def waited(self, name: str, start: float, end: float) -> None:
        """Count a wait for the network."""
        self._wait_seconds += end - start
        self.observe(Span(self.worker, "wait", name, start, end))

    def observe(self, span: Span) -> None:
        """Record a span, if anybody asked for a trace."""
        for listener in self._listeners:
            listener.span(span)

    def log(self, metrics: dict[str, object]) -> None:
        """Note metrics: they go into the next step's record and into the last values."""
        for name, value in metrics.items():
            try:
                number = float(value.detach() if hasattr(value, "detach") else value)  # type: ignore[arg-type]
            except (TypeError, ValueError):
                raise UsageError(
                    f"log({name}=...): expected a number or a tensor of one element, "
                    f"got {type(value).__name__}"
                ) from None
            self._fresh_metrics[name] = self.metrics[name] = number

    def step(self, before: int = 0, figures: Mapping[str, float] | None = None) -> None:
        """An optimizer step has ended; the job had done so many steps *before* this worker
        joined it. *figures*: see `StepRecord`."""
        end = self._now()
        duration = end - self._last_end
        self.step_count += 1
        phase = self._phase_of(self.step_count)
        self.steady_from = (
            (self.steady_from or self.step_count) if phase == "steady" else 0
        )
        record = StepRecord(
            worker=self.worker,
            step=before + self.step_count,
            end_seconds=end - self._began,
            step_seconds=duration,
            compute_seconds=duration - self._wait_seconds,
            exposed_communication_seconds=self._wait_seconds,
            bytes_sent=self._bytes_sent,
            metrics=dict(self._fresh_metrics),
            method=self.brief if self.methods else "",
            phase=phase,
            figures=dict(figures or {}),
        )
        self.steps.append(record)
        if self._listeners:
            name = f"step {record.step}"
            self.observe(Span(self.worker, STEP_ROW, name, self._last_end, end))
        for listener in self._listeners:
            listener.step(record)
        self._last_end = end
        self._fresh_metrics = {}
        self._bytes_sent, self._wait_seconds = 0, 0.0
        for observer in self.observers:
            observer(self.step_count)
