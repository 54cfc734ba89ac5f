"""The clock: order of events, local time, and how a job ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from paceline.errors import DeadlockError, WorkerFailedError
from paceline.runtimes.simulated.clock import (
    Abandoned,
    Completion,
    SimulatedCompletionEvent,
    VirtualClock,
    Worker,
)
from tests.support.simulations import until_over


def run(clock: VirtualClock, *bodies: Callable[[], object]) -> None:
    """However the job ends, so do the threads of all workers."""
    try:
        clock.run(bodies, until_over)
    finally:
        assert not any(worker.thread.is_alive() for worker in clock.workers)


def completion(name: str = "it") -> Completion:
    return Completion(lambda: name)


def completed_at(clock: VirtualClock, time: float) -> Completion:
    awaited = completion()
    clock.at(time, lambda: clock.complete(awaited))
    return awaited


def test_events_come_by_time_then_in_the_order_of_their_making() -> None:
    clock = VirtualClock(1)
    seen: list[tuple[float, str]] = []

    def body() -> None:
        for time, name, last in (
            (2.0, "two", False),
            (1.0, "last", True),
            (1.0, "one", False),
            (1.0, "one again", False),
        ):
            clock.at(time, lambda name=name: seen.append((clock.now, name)), last=last)
        clock.wait(completed_at(clock, 3.0))

    run(clock, body)
    assert seen == [(1.0, "one"), (1.0, "one again"), (1.0, "last"), (2.0, "two")]


def test_an_event_may_make_another_of_its_own_instant() -> None:
    clock = VirtualClock(1)
    seen = []

    def body() -> None:
        clock.at(1.0, lambda: seen.append("last"), last=True)
        clock.at(1.0, lambda: clock.at(1.0, lambda: seen.append("second")))
        clock.wait(completed_at(clock, 2.0))

    run(clock, body)
    assert seen == ["second", "last"]


def test_time_cannot_go_backwards() -> None:
    clock = VirtualClock(1)

    def body() -> None:
        clock.wait(completed_at(clock, 2.0))
        clock.at(1.0, lambda: None)

    with pytest.raises(WorkerFailedError, match="time can't go backwards"):
        run(clock, body)


def test_waiting_returns_the_seconds_waited() -> None:
    clock = VirtualClock(1)
    waited = []

    def body() -> None:
        worker = clock.current
        early, late = completed_at(clock, 1.0), completed_at(clock, 4.0)
        worker.time = 1.5  # it computed meanwhile
        waited.append(clock.wait(early))
        waited.append(clock.wait(late))
        waited.append(clock.wait(late))

    run(clock, body)
    assert waited == [0.0, 2.5, 0.0]
    assert clock.workers[0].time == 4.0


def test_a_signal_is_in_at_once_and_one_of_later_at_its_time() -> None:
    clock = VirtualClock(1)
    waited = []

    def body() -> None:
        for computed in (0.0, 1.5):
            signal, seen = SimulatedCompletionEvent(clock, "it"), list[float]()
            signal.on_completion(lambda seen=seen: seen.append(clock.now))
            clock.current.time += computed
            signal.set()
            waited.append(list(seen))

    run(clock, body)
    assert waited == [[0.0], []]


def test_workers_run_one_at_a_time_and_computing_does_not_switch() -> None:
    clock = VirtualClock(3)
    log: list[str] = []

    def body(name: str) -> Callable[[], None]:
        def main() -> None:
            for step in range(3):
                clock.current.time += 1.0
                log.append(f"{name}{step}")
            clock.wait(completed_at(clock, clock.current.time))
            log.append(f"{name} ends")

        return main

    run(clock, body("a"), body("b"), body("c"))
    firsts = [f"{name}{step}" for name in "abc" for step in range(3)]
    assert log == [*firsts, "a ends", "b ends", "c ends"]
    # a to b to c, which runs the events: a first; a's end to b, b's to c.
    assert clock.switches == 5
    assert [worker.time for worker in clock.workers] == [3.0] * 3


def test_all_who_wait_are_woken_in_the_order_of_waiting() -> None:
    clock = VirtualClock(3)
    log: list[int] = []
    shared = completion()

    def body() -> None:
        rank = clock.current.rank
        if rank == 1:
            clock.at(5.0, lambda: clock.complete(shared))
        clock.wait(shared)
        log.append(rank)
        assert clock.current.time == 5.0

    run(clock, body, body, body)
    assert log == [0, 1, 2]


def test_on_turn_is_called_with_whoever_gets_the_turn() -> None:
    turns: list[int] = []
    clock = VirtualClock(2, lambda worker: turns.append(worker.rank))

    def body() -> None:
        assert turns[-1] == clock.current.rank
        clock.wait(completed_at(clock, 1.0))
        assert turns[-1] == clock.current.rank

    run(clock, body, body)
    assert turns[:2] == [0, 1]


def test_deadlock_says_who_waits_for_what() -> None:
    clock = VirtualClock(3)

    def waits() -> None:
        clock.current.time = 7.0
        clock.wait(completion("godot"))

    def ends_at_two() -> None:
        clock.wait(completed_at(clock, 2.0))

    with pytest.raises(DeadlockError) as caught:
        run(clock, waits, ends_at_two, waits)
    assert str(caught.value).splitlines() == [
        "deadlock at virtual time 2 s: every worker waits, and no event is left",
        "  worker 0 waits for godot",
        "  worker 2 waits for godot",
        "  worker 1 has ended",
        "Do all workers reach the same collectives, in the same order?",
    ]


def test_deadlock_of_many_counts_the_rest() -> None:
    clock = VirtualClock(20)
    with pytest.raises(DeadlockError) as caught:
        run(clock, *[lambda: clock.wait(completion("godot"))] * 20)
    lines = str(caught.value).splitlines()
    assert lines[8] == "  worker 7 waits for godot"
    assert lines[9] == "  and 12 more"


def test_deadlock_names_first_those_that_wait() -> None:
    clock = VirtualClock(20)

    def body() -> None:
        if clock.current.rank == 19:
            clock.wait(completion("godot"))

    with pytest.raises(DeadlockError, match="worker 19 waits for godot"):
        run(clock, *[body] * 20)


def test_a_worker_that_raises_ends_all() -> None:
    clock = VirtualClock(3)
    cleaned: list[int] = []

    def waits() -> None:
        try:
            clock.wait(completion())
        except Exception:  # a script's own handler: must not swallow the end
            cleaned.append(-1)
        finally:
            cleaned.append(clock.current.rank)

    def raises() -> None:
        raise KeyError("boom")

    with pytest.raises(WorkerFailedError, match="worker 1 raised KeyError") as caught:
        run(clock, waits, raises, waits)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    # Worker 2 had not begun: it never does.
    assert cleaned == [0]


def test_waiting_after_the_end_is_abandoned_too() -> None:
    clock = VirtualClock(2)
    ends: list[str] = []

    def stubborn() -> None:
        for _ in range(2):
            try:
                clock.wait(completion())
            except Abandoned:
                ends.append("abandoned")

    def raises() -> None:
        raise ValueError

    with pytest.raises(WorkerFailedError):
        run(clock, stubborn, raises)
    assert ends == ["abandoned"] * 2


def test_the_first_failure_counts() -> None:
    clock = VirtualClock(2)

    def waits_then_raises() -> None:
        try:
            clock.wait(completion())
        finally:
            raise ValueError("second")

    def raises() -> None:
        raise ValueError("first")

    with pytest.raises(WorkerFailedError, match="first"):
        run(clock, waits_then_raises, raises)


def test_an_event_that_raises_ends_the_job() -> None:
    clock = VirtualClock(2)

    def body() -> None:
        clock.at(1.0, lambda: [][0])
        clock.wait(completion())

    with pytest.raises(IndexError):
        run(clock, body, body)


def test_an_interruption_takes_effect_at_the_next_wait() -> None:
    clock = VirtualClock(2)
    steps: list[float] = []

    def body() -> None:
        while True:
            clock.wait(completed_at(clock, clock.current.time + 1.0))
            steps.append(clock.now)
            if clock.now == 3.0:
                clock.interrupt(KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        run(clock, body, body)
    assert max(steps) <= 4.0


def test_no_thread_is_left() -> None:
    before = threading.enumerate()
    run(VirtualClock(50), *[lambda: None] * 50)
    assert threading.enumerate() == before


def no_description() -> str:
    raise LookupError("nobody knows what this waits for")


def test_an_error_in_the_text_of_a_deadlock_ends_the_job() -> None:
    """Not the thread of the worker that happened to wait last, and then nobody runs."""
    clock = VirtualClock(3)

    def waits() -> None:
        clock.wait(Completion(no_description))

    with pytest.raises(LookupError):
        run(clock, waits, waits, lambda: None)


@pytest.mark.parametrize("turn", [1, 2, 3, 4])
def test_a_worker_whose_turn_cannot_begin_ends_the_job(turn: int) -> None:
    """At its first turn, and after each wait."""
    turns = 0

    def on_turn(worker: Worker) -> None:
        nonlocal turns
        turns += 1
        if turns == turn:
            raise LookupError(f"no state for worker {worker.rank}")

    clock = VirtualClock(2, on_turn)

    def body() -> None:
        clock.wait(completed_at(clock, clock.current.time + 1.0))

    with pytest.raises(WorkerFailedError, match="LookupError"):
        run(clock, body, body)
