"""The virtual clock: a heap of events, and worker threads that take turns.

Theory of operation
-------------------
Exactly one worker thread runs at any moment: the one that holds the baton. A worker that
must wait runs the event loop itself until some worker can go on, hands that one the
baton, and sleeps. There is no scheduler thread, so one hand-over costs one switch.

*Local time.* `Clock.now` is the instant of the last event. Computing costs a worker no
switch: it only moves the worker's own `Worker.time` ahead, and what the worker does next
(launch a collective, send) is an event at that later instant. Events are handled in the
order of their instants, ties in the order in which they were scheduled, so nothing that
a worker does can reach another one too early, and two runs are equal bit for bit.

*The end.* When no event is left and nobody can run, that is a deadlock: every worker gets
an error that says who waits for what. When one worker's script raises, all others are
woken with `Abandoned` at the place where they wait.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from paceline.errors import DeadlockError, UsageError, WorkerFailedError
from paceline.units import show_seconds

MAX_NAMED = 8
"""How many workers an error lists before it counts the rest."""


QUESTION = "Do all workers reach the same collectives, in the same order?"


class Abandoned(BaseException):
    """Ends a worker's thread because the job is over; not an `Exception`, so that a
    script's own error handling does not swallow it and go on."""


class Completion:
    """Something that happens once, at a virtual instant; workers wait for it.

    *describe* says what it is, for errors: called only when one is raised.
    """

    __slots__ = ("actions", "describe", "time", "waiters")

    def __init__(self, describe: Callable[[], str]) -> None:
        self.describe = describe
        self.time: float | None = None
        self.waiters: list[Worker] = []
        self.actions: Sequence[Callable[[], None]] = ()


class Worker:
    """One worker's thread and its place in virtual time."""

    __slots__ = ("baton", "fault", "finished", "rank", "thread", "time", "waits_for")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.time = 0.0
        self.waits_for: Completion | None = None
        self.finished = False
        self.fault = ""  # what its script has caught, and the others may wait for
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread: threading.Thread | None = None


class Actor(Worker):
    """Who acts for a worker while an event runs, at that event's instant: the worker itself
    may have computed on from there."""

    __slots__ = ()


class Clock:
    """Virtual time for *size* workers.

    *resumed* is called on a worker's own thread each time it gets the baton: the place
    where process-wide state becomes that worker's. While an `Actor` acts, on whichever
    thread, *acting* is entered.
    """

    def __init__(
        self,
        size: int,
        resumed: Callable[[Worker], None] = lambda worker: None,
        acting: Callable[[Actor], AbstractContextManager[None]] = lambda actor: (
            nullcontext()
        ),
    ) -> None:
        self.now = 0.0
        self.workers = [Worker(rank) for rank in range(size)]
        self.failure: BaseException | None = None
        self._interruption: BaseException | None = None
        self.switches = 0
        self.waits_outside = False
        """Whether who has the baton waits for something of a real process, which may take long."""
        self.explain: Callable[[], str] = lambda: QUESTION
        """The last line of a deadlock's text."""
        self._resumed = resumed
        self._acting = acting
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._runnable: deque[Worker] = deque()
        self._current: Worker | None = None
        self._has_acted = False
        """Whether process-wide state may be an actor's."""
        self._over = threading.Event()
        self._alive = size

    # ---- events ----

    def at(
        self, time: float, action: Callable[[], None], *, last: bool = False
    ) -> None:
        """Call *action* when the clock reaches *time*; *last*: after the other events
        of that instant."""
        assert time >= self.now, "time can't go backwards"
        heapq.heappush(self._heap, (time, int(last), next(self._sequence), action))

    def complete(self, completion: Completion) -> None:
        """*completion* happens now; whoever waits for it can run."""
        completion.time = self.now
        for worker in completion.waiters:
            if worker.waits_for is completion:
                worker.waits_for = None
                self._runnable.append(worker)
        completion.waiters.clear()
        actions, completion.actions = completion.actions, ()
        for action in actions:
            action()

    def when(self, completion: Completion, action: Callable[[], None]) -> None:
        """Call *action* when *completion* happens; at once if it has."""
        if completion.time is None:
            completion.actions = (*completion.actions, action)
        else:
            action()

    @contextmanager
    def acting_for(self, rank: int) -> Iterator[Actor]:
        """Within it, inside an event, worker *rank* is the current one, at this instant.

        What it launches and computes is dated by the actor's own time. It cannot wait for
        what is still to come.
        """
        before, actor = self._current, Actor(rank)
        actor.time = self.now
        self._current, self._has_acted = actor, True
        try:
            with self._acting(actor):
                yield actor
        finally:
            self._current = before

    # ---- called by the worker that runs ----

    @property
    def current(self) -> Worker:
        """The worker that holds the baton."""
        assert self._current is not None, "no worker is running"
        return self._current

    def wait(self, completion: Completion) -> float:
        """Block the current worker until *completion*; return the seconds it waited."""
        worker = self.current
        if self._interruption is not None:
            self.fail(self._interruption)
        if completion.time is None:
            if self.failure is not None:
                raise Abandoned
            if isinstance(worker, Actor):
                raise UsageError(
                    f"worker {worker.rank}: what follows a result (Pending.then) waits for "
                    f"{completion.describe()}; it runs at one instant, and chains what "
                    "comes later: return pending.then(...)"
                )
            completion.waiters.append(worker)
            worker.waits_for = completion
            self._hand_on(worker)
            if completion.time is None:
                raise Abandoned
        before = worker.time
        # Not by adding the wait: rounding could put the worker before the clock.
        worker.time = max(before, completion.time)
        return worker.time - before

    def pause(self, seconds: float) -> None:
        """Let *seconds* pass for the current worker, and the others have their turns."""
        worker = self.current
        pause = Completion(lambda: f"{show_seconds(seconds)} to pass")
        self.at(worker.time + seconds, lambda: self.complete(pause))
        self.wait(pause)

    def fail(self, error: BaseException) -> None:
        """End the job: all who wait are woken with `Abandoned`. The first error counts."""
        if self.failure is None:
            self.failure = error
            for worker in self.workers:
                if worker.waits_for is not None:
                    worker.waits_for = None
                    self._runnable.append(worker)

    def interrupt(self, error: BaseException) -> None:
        """As `fail`, from outside the worker threads: takes effect when the worker that
        runs next waits."""
        self._interruption = error

    def stop_if_interrupted(self) -> None:
        """End the current worker if the job was interrupted."""
        if self._interruption is not None:
            self.fail(self._interruption)
            raise Abandoned

    # ---- the baton ----

    def run(
        self,
        bodies: Sequence[Callable[[], None]],
        watch: Callable[[threading.Event], None],
    ) -> None:
        """Run one body per worker, each in a thread of its own, until all have ended.

        *watch* runs on the calling thread meanwhile and returns when the event it is
        given is set. Raises the first failure.
        """
        for worker, body in zip(self.workers, bodies, strict=True):
            worker.thread = threading.Thread(
                target=self._thread_main,
                args=(worker, body),
                name=f"paceline worker {worker.rank}",
                daemon=True,
            )
            worker.thread.start()
        self._runnable.extend(self.workers)
        first = self._runnable.popleft()
        self._current = first
        first.baton.release()
        watch(self._over)
        for worker in self.workers:
            assert worker.thread is not None
            worker.thread.join()
        if self.failure is not None:
            raise self.failure

    def _thread_main(self, worker: Worker, body: Callable[[], None]) -> None:
        worker.baton.acquire()
        try:
            self._resumed(worker)
            if self.failure is None:
                body()
        except Abandoned:
            pass
        except BaseException as error:
            failure = WorkerFailedError(
                f"worker {worker.rank} raised {type(error).__name__}: {error}",
                worker.rank,
            )
            failure.__cause__ = error
            self.fail(failure)
        finally:
            worker.finished, worker.waits_for = True, None
            self._alive -= 1
            self._hand_on(None)

    def _hand_on(self, worker: Worker | None) -> None:
        """Give the baton to whoever can run; return when *worker* has it again."""
        following = self._next_runnable()
        if following is None:
            self._over.set()
            return
        if following is worker:
            if self._has_acted:
                self._has_acted = False
                self._resumed(following)
            return
        self._has_acted = False
        self.switches += 1
        self._current = following
        following.baton.release()
        if worker is not None:
            worker.baton.acquire()
            self._resumed(worker)

    def _next_runnable(self) -> Worker | None:
        """Who can run next; None when all have ended. It raises nothing: what an event raises ends
        the job, and not the thread of the worker that happens to wait."""
        while self._alive:
            while self._runnable:
                worker = self._runnable.popleft()
                # A failure wakes all who wait, also one whose own wait has raised.
                if not worker.finished:
                    return worker
            try:
                if not self._heap:
                    raise DeadlockError(self.who_waits_for_what())
                self.now, _, _, action = heapq.heappop(self._heap)
                action()
            except Exception as error:
                self.fail(error)
        return None

    def who_waits_for_what(self) -> str:
        """The deadlock's text: each worker, and what it waits for or that it ended."""
        lines = [
            f"deadlock at virtual time {show_seconds(self.now)}: every worker waits, "
            "and no event is left"
        ]
        by_interest = sorted(self.workers, key=lambda worker: worker.waits_for is None)
        for worker in by_interest[:MAX_NAMED]:
            if worker.waits_for is not None:
                lines.append(
                    f"  worker {worker.rank} waits for {worker.waits_for.describe()}"
                )
            else:
                why = f": {worker.fault}" if worker.fault else ""
                lines.append(f"  worker {worker.rank} has ended{why}")
        if len(self.workers) > MAX_NAMED:
            lines.append(f"  and {len(self.workers) - MAX_NAMED} more")
        lines.append(self.explain())
        return "\n".join(lines)
