"""The virtual clock: a heap of events, and worker threads that take turns.

The module also has continuations of results (`EventRunner`), a cluster's rules (`RuleSchedule`),
and the `Watchdog`.

*Turns.* Exactly one worker thread runs at any moment: the one that has the turn. A worker that must
wait runs the event loop itself until some worker can continue, gives that one the turn, and sleeps.
There is no scheduler thread, so one hand-over costs one switch.

*Local time.* `VirtualClock.now` is the instant of the last event. Computing costs a worker no
switch: it only moves the worker's own `Worker.time` ahead. The worker's next action (a collective,
a send) is an event at that later instant. Events are handled in the order of their instants, ties
in the order in which they were scheduled. So no action of a worker reaches another one too early,
and two runs are equal bit for bit.

*The end.* If no event is left and no worker can run, that is a deadlock: every worker gets an error
with all waits and their reasons. When one worker's script raises, all others are woken with
`Abandoned` where they wait. A worker that waits outside of the clock would wait forever; the
`Watchdog` detects it, on a clock of real time.
"""

from __future__ import annotations

import faulthandler
import heapq
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from paceline.cluster.cluster import Rule
from paceline.cluster.links import Links
from paceline.cluster.profiling.timers import waited_for_processor
from paceline.errors import DeadlockError, UsageError, WorkerFailedError
from paceline.interfaces import AwaitedOperation
from paceline.records import Span
from paceline.runtimes.real.exit import exit_now
from paceline.runtimes.temporary_folder import LauncherInterrupted
from paceline.timeouts import timeouts
from paceline.units import show_seconds

MAX_NAMED = 8
"""Workers that an error lists; the others are counted."""


QUESTION = "Do all workers reach the same collectives, in the same order?"


class Abandoned(BaseException):
    """Ends a worker's thread because the job is over.

    It is no `Exception`, so a script's own error handling does not swallow it and continue.
    """


class Completion:
    """An event that happens once, at a virtual instant; workers wait for it.

    *describe* returns its description, and is called only for an error.
    """

    __slots__ = ("actions", "describe", "time", "waiters")

    def __init__(self, describe: Callable[[], str]) -> None:
        self.describe = describe
        self.time: float | None = None
        self.waiters: list[Worker] = []
        self.actions: Sequence[Callable[[], None]] = ()


class Worker:
    """One worker's thread and its place in virtual time."""

    __slots__ = ("fault", "finished", "rank", "thread", "time", "turn", "waits_for")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.time = 0.0
        self.waits_for: Completion | None = None
        self.finished = False
        # Error that its script caught; other workers may wait for this one.
        self.fault = ""
        self.turn = threading.Lock()
        self.turn.acquire()
        self.thread: threading.Thread | None = None


class EventContext(Worker):
    """Represents a worker while an event runs, at that event's instant.

    The worker itself may have computed beyond that instant.
    """

    __slots__ = ()


class VirtualClock:
    """Virtual time for *size* workers, or for those of these *ranks*.

    *on_turn* is called on a worker's own thread each time it has the turn again: there process-wide
    state becomes that worker's. While an `EventContext` acts, on any thread, *as_worker* is
    entered.
    """

    def __init__(
        self,
        size: int,
        on_turn: Callable[[Worker], None] = lambda worker: None,
        as_worker: Callable[
            [EventContext], AbstractContextManager[None]
        ] = lambda actor: nullcontext(),
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.now = 0.0
        self.workers = [Worker(rank) for rank in (ranks or range(size))]
        self.failure: BaseException | None = None
        self._interruption: BaseException | None = None
        self.switches = 0
        self.waits_outside = False
        """Whether the running worker waits for a real process, which may take long."""
        self.explain: Callable[[], str] = lambda: QUESTION
        """Returns the last line of a deadlock's message."""
        self._on_turn = on_turn
        self._as_worker = as_worker
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        # This counts all events so far, including pending ones.
        self.events = 0
        self._runnable: deque[Worker] = deque()
        self._current: Worker | None = None
        self._has_acted = False
        """Whether process-wide state may belong to an `EventContext`."""
        self._over = threading.Event()
        self._alive = len(self.workers)

    # ---- events ----

    def at(
        self, time: float, action: Callable[[], None], *, last: bool = False
    ) -> None:
        """Call *action* when the clock reaches *time*.

        *last*: after the other events of that instant.
        """
        assert time >= self.now, "time can't go backwards"
        self.events += 1
        heapq.heappush(self._heap, (time, int(last), self.events, action))

    def complete(self, completion: Completion) -> None:
        """Complete *completion* now; workers that wait for it can run."""
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
    def as_worker(self, rank: int) -> Iterator[EventContext]:
        """Make worker *rank* the current one in this block, inside an event, at this instant.

        Its collectives and computing have the actor's own time. It cannot wait for later events.
        """
        before, actor = self._current, EventContext(rank)
        actor.time = self.now
        self._current, self._has_acted = actor, True
        try:
            with self._as_worker(actor):
                yield actor
        finally:
            self._current = before

    # ---- called by the running worker ----

    @property
    def current(self) -> Worker:
        """The worker that has the turn."""
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
            if isinstance(worker, EventContext):
                raise UsageError(
                    f"worker {worker.rank}: a continuation of a result (Pending.then) waits for "
                    f"{completion.describe()}; it must not wait, but chain its later work: return "
                    "pending.then(...)"
                )
            completion.waiters.append(worker)
            worker.waits_for = completion
            self._yield_turn(worker)
            if completion.time is None:
                raise Abandoned
        before = worker.time
        # Do not add the wait: by rounding, the worker could be earlier than the clock.
        worker.time = max(before, completion.time)
        return worker.time - before

    def pause(self, seconds: float) -> None:
        """Let *seconds* pass for the current worker, and give the others their turns."""
        worker = self.current
        pause = Completion(lambda: f"{show_seconds(seconds)} to pass")
        self.at(worker.time + seconds, lambda: self.complete(pause))
        self.wait(pause)

    def fail(self, error: BaseException) -> None:
        """End the job: all waiting workers are woken with `Abandoned`. The first error counts."""
        if self.failure is None:
            self.failure = error
            for worker in self.workers:
                if worker.waits_for is not None:
                    worker.waits_for = None
                    self._runnable.append(worker)

    def interrupt(self, error: BaseException) -> None:
        """End the job as `fail` does, from outside the worker threads.

        It takes effect when the worker that runs next waits.
        """
        self._interruption = error

    def stop_if_interrupted(self) -> None:
        """End the current worker if the job was interrupted."""
        if self._interruption is not None:
            self.fail(self._interruption)
            raise Abandoned

    # ---- the turn ----

    def run(
        self,
        bodies: Sequence[Callable[[], None]],
        watch: Callable[[threading.Event], None],
    ) -> None:
        """Run one body per worker, each in a thread of its own, until all have ended.

        *watch* runs on the calling thread meanwhile and returns when its event is set. Raises the
        first failure.
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
        first.turn.release()
        watch(self._over)
        for worker in self.workers:
            assert worker.thread is not None
            worker.thread.join()
        if self.failure is not None:
            raise self.failure

    def _thread_main(self, worker: Worker, body: Callable[[], None]) -> None:
        worker.turn.acquire()
        try:
            self._on_turn(worker)
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
            self._yield_turn(None)

    def _yield_turn(self, worker: Worker | None) -> None:
        """Give the turn to a worker that can run; return when *worker* has it again."""
        following = self._next_runnable()
        if following is None:
            self._over.set()
            return
        if following is worker:
            if self._has_acted:
                self._has_acted = False
                self._on_turn(following)
            return
        self._has_acted = False
        self.switches += 1
        self._current = following
        following.turn.release()
        if worker is not None:
            worker.turn.acquire()
            self._on_turn(worker)

    def _next_runnable(self) -> Worker | None:
        """Return the worker that can run next; None when all have ended.

        It raises nothing: an event's error ends the job, not the thread of the worker that happens
        to wait.
        """
        while self._alive:
            while self._runnable:
                worker = self._runnable.popleft()
                # A failure wakes all waiting workers, even one whose own wait raised.
                if not worker.finished:
                    return worker
            try:
                if not self._heap:
                    raise DeadlockError(self.deadlock_message())
                self.now, _, _, action = heapq.heappop(self._heap)
                action()
            except Exception as error:
                self.fail(error)
        return None

    def deadlock_message(self) -> str:
        """Return the deadlock's text: for each worker its wait, or that it has ended."""
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


_Item = tuple[AwaitedOperation | None, Callable[[BaseException | None], None], float]


class EventRunner:
    """A `ContinuationRunner` of worker *rank*.

    A continuation runs at the virtual instant at which its result arrives. It does not run before
    the instant at which it was put, nor while the continuation before it still computes. The time
    that it spends (`VirtualClock.current`) delays later continuations, but not the worker itself.
    """

    def __init__(self, clock: VirtualClock, rank: int) -> None:
        self._clock = clock
        self._rank = rank
        self._items: deque[_Item] = deque()
        self._free_at = 0.0

    def put(
        self,
        awaited: AwaitedOperation | None,
        run: Callable[[BaseException | None], None],
    ) -> None:
        self._items.append((awaited, run, self._clock.current.time))
        if len(self._items) == 1:
            self._expect_first()

    def completion_event(self, what: str) -> SimulatedCompletionEvent:
        return SimulatedCompletionEvent(self._clock, f"{what} on worker {self._rank}")

    def close(self) -> None:
        while self._items:
            _, run, _ = self._items.popleft()
            run(None)

    def _expect_first(self) -> None:
        awaited, _, _ = self._items[0]
        if awaited is None:
            self._ready()
        else:
            awaited.on_completion(self._ready)

    def _ready(self) -> None:
        if self._items:  # not closed
            _, _, earliest = self._items[0]
            time = max(self._clock.now, self._free_at, earliest)
            self._clock.at(time, self._run_first)

    def _run_first(self) -> None:
        if not self._items:
            return
        awaited, run, _ = self._items.popleft()
        error: BaseException | None = None
        with self._clock.as_worker(self._rank) as actor:
            try:
                if awaited is not None:
                    awaited.wait_for_result()
            except BaseException as fault:
                error = fault
            run(error)
        self._free_at = actor.time
        if self._items:
            self._expect_first()


class SimulatedCompletionEvent:
    """A `CompletionEvent` that is set at the virtual time of the worker that sets it."""

    def __init__(self, clock: VirtualClock, what: str) -> None:
        self._clock = clock
        self._completion = Completion(lambda: what)

    def set(self) -> None:
        time = self._clock.current.time
        if time <= self._clock.now:
            self._clock.complete(self._completion)
        else:
            self._clock.at(time, lambda: self._clock.complete(self._completion))

    def wait(self) -> None:
        self._clock.wait(self._completion)

    def on_completion(self, action: Callable[[], None]) -> None:
        self._clock.when(self._completion, action)


class RuleSchedule:
    """Applies each rule once, when worker 0's training has reached it."""

    def __init__(
        self,
        rules: Sequence[Rule],
        clock: VirtualClock,
        links: Links,
        observe: Callable[[Span], None],
    ) -> None:
        self._rules = rules
        self._clock = clock
        self._links = links
        self._observe = observe
        self._cut: set[int] = set()
        clock.explain = self._explain

    def reached(self, step: int) -> None:
        """Note that worker 0 has ended a step (0: training begins), at its own time."""
        now = self._clock.current.time
        for rule in self._rules:
            if rule.at is not None and step == 0:
                self._clock.at(now + rule.at, partial(self._apply, rule))
            elif rule.step == step and step:
                self._clock.at(now, partial(self._apply, rule))

    def _apply(self, rule: Rule) -> None:
        now = self._clock.now
        self._observe(Span(0, "rules", rule.describe(), now, now))
        if isinstance(rule.target, int):
            self._clock.fail(
                WorkerFailedError(
                    f"worker {rule.target} was killed by a rule at virtual time "
                    f"{show_seconds(now)}",
                    rule.target,
                )
            )
            return
        cluster = self._links.cluster
        for link in cluster.links_named(rule.target):
            if rule.action == "cut":
                self._cut.add(link)
                self._links.set_capacity(link, 0.0)
                continue
            rate = cluster.capacities[link] if rule.rate is None else rule.rate
            self._cut.discard(link)
            self._links.set_capacity(link, rate)

    def _explain(self) -> str:
        """Return the message's last line: a link that stays cut may be the deadlock's only cause."""
        if not self._cut:
            return QUESTION
        names = ", ".join(self._links.cluster.link_name(i) for i in sorted(self._cut))
        return f"A rule has cut {names}, and none repairs it."


_LOOK_EVERY = 0.5
_IDLE_SHARE = 0.02
"""A worker with a smaller share of computing, or of waiting for a processor, counts as blocked."""


class Watchdog:
    """Ends the process when no worker makes progress for *patience* real seconds.

    Only one worker runs at a time. If it blocks where the clock cannot see it (on a lock of the
    script's own, on standard input), no other worker can ever run. A blocked thread cannot be
    interrupted, so stacks are printed and the process exits with status 70. A worker that computes,
    or waits for a processor, may take as long as it needs. *look* is called with the virtual time
    at each check, to show progress.
    """

    def __init__(
        self, clock: VirtualClock, patience: float, look: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._look = look

    def watch(self, over: threading.Event) -> None:
        """Watch until *over* is set.

        Ctrl-C, or a signal that raises `SystemExit`, ends all workers. It also ends this process
        if one of them does not end within `Timeouts.terminate`.
        """
        try:
            self._watch(over)
        except (KeyboardInterrupt, SystemExit) as interruption:
            self._clock.interrupt(interruption)
            if not over.wait(min(self._patience, timeouts.terminate)):
                # The worker sleeps or computes, and cannot be interrupted.
                number = (
                    interruption.number
                    if isinstance(interruption, LauncherInterrupted)
                    else signal.SIGINT
                )
                name = signal.Signals(number).name
                rank = self._clock.current.rank
                print(
                    f"paceline: {name}: interrupted; worker {rank} was busy outside the virtual clock",
                    file=sys.stderr,
                )
                exit_now(128 + number)

    def _watch(self, over: threading.Event) -> None:
        idle_since, switches, used = time.monotonic(), -1, 0.0
        while not over.wait(_LOOK_EVERY):
            self._look(self._clock.now)
            now = time.monotonic()
            # On a busy machine a worker may wait for a processor most of the time.
            busy = time.process_time() + self._waited_by_current()
            if (
                busy - used > _IDLE_SHARE * _LOOK_EVERY
                or self._clock.waits_outside
                or self._clock.switches != switches
            ):
                idle_since = now
            switches, used = self._clock.switches, busy
            if now - idle_since > self._patience:
                rank = self._clock.current.rank
                self._give_up(
                    f"worker {rank} has blocked outside the virtual clock for "
                    f"{self._patience:g} s (a lock, an input, a sleep?), so no other "
                    "worker can run; raise the limit with --patience"
                )

    def _waited_by_current(self) -> float:
        thread = self._clock.current.thread
        task = None if thread is None else thread.native_id
        return 0.0 if task is None else waited_for_processor(f"/proc/self/task/{task}")

    @staticmethod
    def _give_up(reason: str) -> None:
        print(f"paceline: {reason}. Stacks of all threads:", file=sys.stderr)
        sys.stderr.flush()
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
        os._exit(70)
