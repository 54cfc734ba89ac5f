"""What a journal keeps of a training that goes on for ever, and what its figures say then."""

from __future__ import annotations

import tracemalloc

from paceline.instruments import STEPS_KEPT, Journal, Kept
from paceline.report.result import Result, Summary


class Training:
    """A journal and its clock: a training of steps that take what they are told."""

    def __init__(self, recorder: Kept | None = None) -> None:
        self.now = 0.0
        self.journal = Journal(0, lambda: self.now, recorder)
        self.journal.begin("bsp")

    def steps(self, count: int, seconds: float, before: int = 0) -> None:
        for _ in range(count):
            self.journal.sent(1000)
            self.journal.log({"loss": self.now})
            self.now += seconds
            self.journal.step(before)


def test_it_takes_no_more_memory_however_long_it_goes_on() -> None:
    training = Training()
    training.steps(2 * STEPS_KEPT, 0.01)
    tracemalloc.start()
    training.steps(STEPS_KEPT, 0.01)  # all that is kept is traced now
    before, _ = tracemalloc.get_traced_memory()
    training.steps(9 * STEPS_KEPT, 0.01)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 10_000  # a byte a step, where a record takes hundreds
    assert len(training.journal.steps) == STEPS_KEPT
    assert training.journal.step_count == 12 * STEPS_KEPT
    assert training.journal.steps[-1].step == 12 * STEPS_KEPT


def test_figures_are_of_the_last_steps_and_counts_of_all() -> None:
    training = Training()
    training.steps(STEPS_KEPT, 1.0)
    training.steps(STEPS_KEPT, 2.0)
    summary = Summary.of(training.journal)
    assert summary.steps == 2 * STEPS_KEPT
    assert summary.step_seconds == 2.0
    result = Result.of("real", 1, training.journal, [summary])
    assert result.steps == 2 * STEPS_KEPT


def test_steps_that_measured_are_left_out_also_of_a_window_that_has_moved() -> None:
    training = Training()
    training.journal.planned(1, settled=True)
    training.steps(2 * STEPS_KEPT, 1.0)
    training.journal.planned(2, settled=False)
    training.steps(STEPS_KEPT - 10, 5.0)
    training.journal.planned(2, settled=True)
    training.steps(1, 5.0)
    training.steps(9, 3.0)
    kept = training.journal.settled_steps()
    assert [record.step_seconds for record in kept] == [3.0] * 9
    assert Summary.of(training.journal).step_seconds == 3.0


def test_without_settled_steps_all_but_the_first_count() -> None:
    training = Training()
    training.steps(1, 9.0)
    assert Summary.of(training.journal).step_seconds == 9.0
    training.steps(2, 1.0)
    assert [record.step for record in training.journal.settled_steps()] == [2, 3]


def test_where_steps_repeat_after_several_figures_are_means_over_so_many() -> None:
    """Wherever the window begins, a mean over a period has all of it; a step that took long
    for once is of one mean, and the median leaves that out."""
    pattern = [1.0, 1.0, 1.0, 5.0]
    for before in range(4):
        training = Training()
        training.journal.planned(1, settled=True)
        training.journal.repeats_after(4)
        for number in range(before + 41):
            training.steps(1, 900.0 if number == 17 else pattern[number % 4])
        summary = Summary.of(training.journal)
        assert (summary.step_seconds, summary.bytes_sent) == (2.0, 1000.0)
        result = Result.of("real", 1, training.journal, [summary])
        assert result.notes == [
            "steps repeat after 4: figures are medians of means over so many"
        ]


def test_figures_of_less_than_a_period_say_so() -> None:
    training = Training()
    training.journal.planned(1, settled=True)
    training.journal.repeats_after(8)
    training.steps(2, 1.0)
    training.steps(2, 4.0)
    summary = Summary.of(training.journal)
    assert summary.step_seconds == 3.0  # without the first, which carries start-up
    result = Result.of("real", 1, training.journal, [summary])
    assert result.notes == [
        "figures are means over 3 steps, and steps repeat after 8: say --steps 32 or more"
    ]


def test_a_recorder_is_told_all_and_in_the_jobs_numbers() -> None:
    kept = Kept([], [])
    training = Training(kept)
    training.journal.waited("grads", 0.0, 0.5)
    training.steps(STEPS_KEPT + 5, 1.0, before=100)
    assert [record.step for record in kept.steps] == [*range(101, STEPS_KEPT + 106)]
    steps = [f"step {number}" for number in range(101, STEPS_KEPT + 106)]
    assert [span.name for span in kept.spans] == ["grads", *steps]
