"""What is observed of a worker: a ledger, a record per step, metrics, spans.

Mechanisms count here; methods contain no logging.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from paceline.errors import PeerLostError, UsageError

_Step = TypeVar("_Step")

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
    """One optimizer step of one worker: from the end of the one before to its own end.

    *end_seconds* counts from the start of training on this runtime's clock.
    *exposed_communication_seconds* is waiting for paceline's own communication, and
    *bytes_sent* is its traffic; *compute_seconds* is all the rest of the step, a script's
    own collectives included. *method*: by which spec it was done, in a training that changes it.
    *figures*: what the method and what it sends tell of themselves, where somebody has asked
    (`StepRecorder.subscribe`): see `paceline.core.training.Training.figures`.
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
    figures: dict[str, float] = {}


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
        self.settled_after = 0
        """After which step buckets are as they will be, as a usual step sees it; 0: not yet."""
        self.learning = 0
        """Steps that the method takes after that, until it does what it will: a budget, first steps
        without a code."""
        self.deciding = False
        """Whether by which method to train is still being found out."""
        self._decided_after = 0
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
        self.settled_after, self.learning, self.period = 0, 0, 1
        while self.methods and self.methods[-1][0] == self.step_count:
            self.methods.pop()  # no step was done by it
        if not self.methods or self.methods[-1][1] != brief:
            self.methods.append((self.step_count, brief))

    def planned(self, buckets: int, settled: bool) -> None:
        """The gradient now travels in so many *buckets*; not *settled*: what follows is
        still measuring, and tells little about a usual step."""
        self.buckets = buckets
        if not settled:
            self.settled_after = 0
        elif not self.settled_after:
            self.settled_after = self.step_count + 1

    def decides(self, active: bool) -> None:
        """Whether somebody tries methods, or is about to: such steps are not as those that follow."""
        if self.deciding and not active:
            self._decided_after = self.step_count
        self.deciding = active

    @property
    def method_settled_after(self) -> int:
        """After which step the present method does what it will; 0: nobody knows yet."""
        return self.settled_after and self.settled_after + self.learning

    @property
    def settled_from(self) -> int:
        """The first step (of this worker, from 1 on) that is as all later ones will be: after plans and
        their trials, budgets that grow, and changes of the method; 0: nobody knows yet."""
        after = self.method_settled_after
        return 0 if self.deciding or not after else max(after, self._decided_after) + 1

    def set_period(self, steps: int) -> None:
        """What steps take and send repeats after so many: a mean over fewer says little."""
        self.period = max(1, steps)

    def settled_steps(self) -> list[StepRecord]:
        """Of the window those that are as all later ones will be, or else those since the present method
        does what it will; without such steps, all but the first, which carries the
        start-up's costs."""
        first = self.step_count - len(self.steps)  # steps that are no longer kept
        return self.usual_of(list(enumerate(self.steps, first + 1)))

    def usual_of(self, numbered: Sequence[tuple[int, _Step]]) -> list[_Step]:
        """Of steps, each with its number, those that `settled_steps` takes."""
        usual = max(2, self.settled_from or self.method_settled_after + 1)
        settled = [step for number, step in numbered if number >= usual]
        warm = [step for number, step in numbered if number > 1]
        return settled or warm or [step for _, step in numbered]

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
