"""Tracks the workers of a training: which are active, in which incarnation, and at which step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.transport.protocol import TAKEN_FOR_LOST

MOST_STEPS_AHEAD = 100_000
"""A step further ahead of all workers is an error, and refused."""
WHOLE_STEPS_KEPT = 2
"""Steps with complete main pushes whose late pushes may still arrive. Example: late pushes of step
4 have a channel of their own, so they may arrive after all main pushes of step 5. A main push of
step 6 is refused before they have arrived."""


STATES = {
    "awaited": "has not joined yet; the others wait for it at the first step",
    "training": "pulls, pushes gradients, and is waited for",
    "at a barrier": "waits until all others that train are there; sends nothing",
    "left": "has done all of its steps; is not waited for",
    "gone": "is lost, or ended before it came; another incarnation may join",
}
"""State of a worker at its server: see `Members.state`."""
STATE_CHANGES = (
    ("awaited", "join", "training"),
    ("awaited", "worker finished", "gone"),
    ("training", "enter barrier", "at a barrier"),
    ("at a barrier", "all are there", "training"),
    ("training", "leave", "left"),
    ("training", "worker lost", "gone"),
    ("at a barrier", "worker lost", "gone"),
    ("left", "worker lost", "gone"),
    ("gone", "join", "training"),
    ("gone", "join after it has left", "left"),
)
"""Transitions: state before, event, state after."""


@dataclass
class WholeStep:
    """A step of a worker whose main pushes have all arrived."""

    left: dict[int, list[int]]
    """By bucket: the units that its main push left out, until they arrive late."""
    late: set[int] = field(default_factory=set)
    """Buckets whose late push has arrived."""


@dataclass
class Member:
    """A worker, as the server knows it."""

    incarnation: int
    joined: bool = False
    late_joiner: bool = False
    """Whether it joined a running training."""
    has_parameters: bool = False
    """Whether it got parameters."""
    has_buffers: bool = False
    """Whether the buffers that it sends are derived from the server's."""
    lost: bool = False
    leaving: bool = False
    first_step: int = 0
    clock: int = 0
    """The number of its next step: the main pushes of all earlier steps have arrived."""
    begun: dict[int, list[int]] = field(default_factory=dict)
    """By bucket whose main push of the next step has arrived: the units that it leaves out."""
    whole: dict[int, WholeStep] = field(default_factory=dict)
    """The last steps before that, by number: their late pushes may still arrive."""

    def begins_with(self, step: int) -> None:
        """Begin with *step* as the next one, after any former steps."""
        self.first_step = self.clock = step
        self.whole.clear()

    def step_is_whole(self) -> None:
        """End the present step: the pushes of all buckets have arrived."""
        left = {bucket: units for bucket, units in self.begun.items() if units}
        self.whole[self.clock] = WholeStep(left)
        self.begun = {}
        self.clock += 1
        for step in [s for s in self.whole if s < self.clock - WHOLE_STEPS_KEPT]:
            del self.whole[step]


class Members:
    """The workers of a job: awaited, active, left, or lost.

    A worker that was restarted has another *incarnation*; the one before it is lost.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._known: dict[int, Member] = {}
        self.return_from_loss = False
        """Whether lost workers come back, each as a new incarnation."""
        self._returning: set[int] = set()
        self._left: set[int] = set()
        """Workers that have left without an error, in any incarnation."""
        self._awaited = set(range(workers))
        """Workers that must join before the first step, and have not joined yet."""
        self.left_out: set[int] = set()
        """The awaited or active workers without which steps end."""
        self.at_barrier: Collection[int] = ()
        """Workers that wait for all others."""
        self.begin = 0
        """The first step of the training: later than 0 after a restored snapshot."""
        self._begins: dict[int, int] = {}
        """The first steps of workers that begin later."""
        self.furthest = 0
        """No worker has begun this step, or a later one."""
        self.most_steps_ahead = MOST_STEPS_AHEAD

    def __getitem__(self, worker: int) -> Member:
        return self._known[worker]

    # ---- active workers ----

    def is_one(self, worker: int) -> bool:
        """Return whether the job has such a worker."""
        return 0 <= worker < self._workers

    def is_alive(self, worker: int, incarnation: int) -> bool:
        member = self._known.get(worker)
        return (
            member is not None and member.incarnation == incarnation and not member.lost
        )

    def has_older(self, worker: int, incarnation: int) -> bool:
        """Return whether an earlier incarnation is here, and not lost."""
        member = self._known.get(worker)
        return (
            member is not None and member.incarnation < incarnation and not member.lost
        )

    def note_incarnation(self, worker: int, incarnation: int) -> None:
        """Make this incarnation the current one of *worker*, unless a later one is known."""
        member = self._known.get(worker)
        if member is None or incarnation > member.incarnation:
            self._known[worker] = Member(incarnation)

    def why_unknown(self, sender: Sender, joins: bool) -> str:
        """Return why a request of this sender is refused; empty if its worker is here.

        *joins*: it is a request to join.
        """
        if not 0 <= sender.worker < self._workers:
            return f"worker {sender.worker}: there are only {self._workers} workers"
        member = self._known.get(sender.worker)
        if member is None or sender.incarnation > member.incarnation:
            return "join first"
        if member.lost or sender.incarnation < member.incarnation:
            return TAKEN_FOR_LOST
        return "" if joins or member.joined else "join first"

    def state(self, worker: int) -> str:
        """Return the worker's state, one of `STATES`."""
        if worker in self._awaited:
            return "awaited"
        if not self.has_joined(worker):
            return "gone"
        if self._known[worker].leaving:
            return "left"
        return "at a barrier" if worker in self.at_barrier else "training"

    def missing(self) -> list[int]:
        """Return workers that must still come, or come back."""
        return sorted(self._awaited | self._returning)

    def is_awaited(self, worker: int) -> bool:
        """Return whether all workers wait for this one, at the first step."""
        return worker in self._awaited

    def join(self, worker: int, step: int, late_joiner: bool) -> None:
        """Let a worker take part from *step* on."""
        self._awaited.discard(worker)
        self._returning.discard(worker)
        self._known[worker].joined = True
        self._known[worker].late_joiner = late_joiner
        self._known[worker].leaving = self.has_left(worker)
        self._known[worker].begins_with(step)

    def leave(self, worker: int) -> None:
        """Note that a worker has done all of its steps: no worker waits for it any more."""
        self._known[worker].leaving = True
        self._left.add(worker)

    def has_left(self, worker: int) -> bool:
        """Return whether any incarnation of a worker up to this one has done all of its steps."""
        return worker in self._left

    def lose(self, worker: int) -> None:
        if self.return_from_loss and not self._known[worker].leaving:
            self._returning.add(worker)
        self._known[worker].lost = True
        self._awaited.discard(worker)

    def is_done(self, worker: int) -> None:
        """Note that this worker will not come, nor come back."""
        self._awaited.discard(worker)
        self._returning.discard(worker)

    def everybody(self) -> list[int]:
        """Return the workers that take part in a reduction: also those that are out of data."""
        return sorted(self._present().keys() | self._awaited)

    def none_trains(self) -> bool:
        """Return whether no worker is active, and none must still come, or come back."""
        return not (self._training() or self._awaited or self._returning)

    def is_over(self) -> bool:
        """Return whether workers were here, and none is active any more."""
        return bool(self._known) and self.none_trains()

    def clocks(self) -> dict[int, int]:
        """Return, by worker that trains, the number of its next step. Any thread may call this."""
        known = list(self._known.items())
        return {
            worker: member.clock
            for worker, member in known
            if member.joined and not member.lost and not member.leaving
        }

    def is_between_steps(self) -> bool:
        """Return whether no worker is in the middle of its pushes."""
        return not any(member.begun for _, member in self._training())

    def trains(self) -> list[int]:
        """Return the workers that a barrier waits for: active ones, and awaited ones."""
        return sorted({w for w, _ in self._training()} | self._awaited)

    def has_joined(self, worker: int) -> bool:
        member = self._known.get(worker)
        return member is not None and member.joined and not member.lost

    def has_begun_training(self) -> bool:
        """Return whether any worker has sent a gradient."""
        return self.furthest > max([self.begin, *self._begins.values()])

    def _present(self) -> dict[int, Member]:
        return {w: m for w, m in self._known.items() if m.joined and not m.lost}

    def _training(self) -> list[tuple[int, Member]]:
        return [(w, m) for w, m in self._present().items() if not m.leaving]

    # ---- progress of workers ----

    def begin_with(self, step: int, own: Mapping[int, int]) -> None:
        """Begin with *step*, before any worker has joined.

        Workers with later gradients in the parameters begin each with its *own* step.
        """
        self.begin = self.furthest = step
        self.begin_later(own)

    def begin_later(self, own: Mapping[int, int]) -> None:
        """Let workers that have yet to join begin with their *own* steps, if these are later."""
        self._begins = {worker: its for worker, its in own.items() if its > self.begin}
        self.furthest = max([self.furthest, *self._begins.values()])

    def begin_of(self, worker: int) -> int:
        """Return the first step of a worker that joins before training begins."""
        return self._begins.get(worker, self.begin)

    def active_workers(self, step: int) -> list[int]:
        mine = {w for w, m in self._training() if m.first_step <= step}
        mine |= {w for w in self._awaited if self.begin_of(w) <= step}
        return sorted(mine - self.left_out)

    def clock(self, worker: int) -> int:
        """Return the number of a worker's next step; before it has joined, of its first."""
        member = self._known.get(worker)
        if member is not None and member.joined:
            return member.clock
        return self.begin_of(worker)

    def first_step(self, worker: int) -> int:
        """Return the step that a worker has joined with, or will."""
        member = self._known.get(worker)
        if member is not None and member.joined:
            return member.first_step
        return self.begin_of(worker)

    def slowest_step(self) -> int:
        clocks = [member.clock for _, member in self._training()]
        return min([*clocks, *map(self.begin_of, self._awaited)], default=self.furthest)

    def goes_on_with(self, worker: int, step: int) -> None:
        """Let a worker leave out its steps before this one, which it has not begun yet."""
        self._known[worker].begins_with(step)
        self.furthest = max(self.furthest, step)

    def check_step(self, what: str, step: int) -> None:
        """Raise `UsageError` for a step that is too far from those of all workers."""
        if step > self.furthest + self.most_steps_ahead:
            raise UsageError(
                f"{what}: step {step}, where nobody is beyond step {self.furthest}"
            )
