"""What a recorder keeps of a training that goes on for ever, and what its figures say then."""

from __future__ import annotations

import tracemalloc

import pytest

from paceline.records import STEPS_KEPT, RecordsInMemory, StepRecorder, steady_steps
from paceline.runtimes.results import RunResult


class Training:
    """A recorder and its clock: a training of steps that take what they are told."""

    def __init__(self, recorder: RecordsInMemory | None = None) -> None:
        self.now = 0.0
        self.recorder = StepRecorder(0, lambda: self.now, recorder)
        self.recorder.begin("bsp")

    def steps(self, count: int, seconds: float, before: int = 0) -> None:
        for _ in range(count):
            self.recorder.count_bytes(1000)
            self.recorder.log({"loss": self.now})
            self.now += seconds
            self.recorder.step(before)


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
    assert len(training.recorder.steps) == STEPS_KEPT
    assert training.recorder.step_count == 12 * STEPS_KEPT
    assert training.recorder.steps[-1].step == 12 * STEPS_KEPT


def test_figures_are_of_the_last_steps_and_counts_of_all() -> None:
    training = Training()
    training.steps(STEPS_KEPT, 1.0)
    training.steps(STEPS_KEPT, 2.0)
    summary = training.recorder.stats()
    assert summary.steps == 2 * STEPS_KEPT
    assert summary.step_seconds == 2.0
    result = RunResult.of("real", 1, training.recorder, [summary])
    assert result.steps == 2 * STEPS_KEPT


def test_steps_that_measured_are_left_out_also_of_a_window_that_has_moved() -> None:
    training = Training()
    training.recorder.planned(1, final=True)
    training.steps(2 * STEPS_KEPT, 1.0)
    training.recorder.planned(2, final=False)
    training.steps(STEPS_KEPT - 10, 5.0)
    training.recorder.planned(2, final=True)
    training.steps(1, 5.0)
    training.steps(9, 3.0)
    kept = steady_steps(list(training.recorder.steps))
    assert [record.step_seconds for record in kept] == [3.0] * 9
    assert training.recorder.stats().step_seconds == 3.0


def test_without_steady_steps_all_but_the_first_count() -> None:
    training = Training()
    training.steps(1, 9.0)
    assert training.recorder.stats().step_seconds == 9.0
    training.steps(2, 1.0)
    assert [record.step for record in steady_steps(list(training.recorder.steps))] == [
        2,
        3,
    ]


def test_where_steps_repeat_after_several_figures_are_means_over_so_many() -> None:
    """Wherever the window begins, a mean over a period has all of it; a step that took long
    for once is of one mean, and the median leaves that out."""
    pattern = [1.0, 1.0, 1.0, 5.0]
    for before in range(4):
        training = Training()
        training.recorder.planned(1, final=True)
        training.recorder.set_period(4)
        for number in range(before + 41):
            training.steps(1, 900.0 if number == 17 else pattern[number % 4])
        summary = training.recorder.stats()
        assert (summary.step_seconds, summary.bytes_sent) == (2.0, 1000.0)
        result = RunResult.of("real", 1, training.recorder, [summary])
        assert result.notes == [
            "steps repeat after 4: figures are medians of means over so many"
        ]


def test_figures_of_less_than_a_period_say_so() -> None:
    training = Training()
    training.recorder.planned(1, final=True)
    training.recorder.set_period(8)
    training.steps(2, 1.0)
    training.steps(2, 4.0)
    summary = training.recorder.stats()
    assert summary.step_seconds == 3.0  # without the first, which carries start-up
    result = RunResult.of("real", 1, training.recorder, [summary])
    assert result.notes == result.cautions
    assert result.cautions == [
        "figures are of 3 steps, from step 2 on, and steps repeat after 8: train for 33 or more"
    ]


# What happens to a recorder, in turn: steps, plans, decisions; then how many steps there are in
# all, from which on they are steady (0: none), and what is said of that.
STEADY: dict[str, tuple[list[tuple[str, object]], int, int, str]] = {
    "nothing is known": (
        [("steps", 5)],
        *(5, 0, "5 steps did not reach steady state: buckets were"),
    ),
    "a fixed plan": ([("plan", True), ("steps", 11)], 11, 2, ""),
    "few": (
        [("plan", True), ("steps", 10)],
        *(10, 2, "figures are of 9 steps, from step 2 on: train for 11 or more"),
    ),
    "one": (
        [("plan", True), ("steps", 1)],
        *(1, 0, "one step only: its figures include the start-up"),
    ),
    "a plan that was tried": (
        [("plan", False), ("steps", 20), ("plan", True), ("steps", 20)],
        *(40, 22, ""),
    ),
    "a plan that is made anew": (
        [("plan", True), ("steps", 20), ("plan", False), ("steps", 20)],
        *(40, 0, "40 steps did not reach steady state: buckets were"),
    ),
    "a budget": ([("plan", True), ("learns", 40), ("steps", 60)], 60, 42, ""),
    "a budget that has not come to its end": (
        [("plan", True), ("learns", 40), ("steps", 30)],
        *(
            30,
            0,
            "30 steps did not reach steady state: the method needs 41",
        ),
    ),
    "methods were tried": (
        [
            ("plan", True),
            ("decides", True),
            ("steps", 20),
            ("decides", False),
            ("steps", 12),
        ],
        *(32, 21, ""),
    ),
    "they still are": (
        [("plan", True), ("decides", True), ("steps", 20)],
        *(
            20,
            0,
            "20 steps did not reach steady state: methods were still being tried",
        ),
    ),
    "another method": (
        [
            ("plan", True),
            ("steps", 20),
            ("change", "asp"),
            ("plan", True),
            ("steps", 12),
        ],
        *(32, 22, ""),
    ),
    "another method, and nothing else": (
        [
            ("plan", True),
            ("learns", 4),
            ("steps", 20),
            ("change", "asp"),
            ("steps", 12),
        ],
        *(32, 0, "32 steps did not reach steady state: buckets were"),
    ),
}


@pytest.mark.parametrize("name", STEADY)
def test_steady_is_what_comes_after_tuning_warm_ups_and_changes(name: str) -> None:
    events, steps, steady_from, said = STEADY[name]
    training = Training()
    recorder = training.recorder
    for event, value in events:
        match event, value:
            case "steps", int(count):
                training.steps(count, 1.0)
            case "plan", bool(final):
                recorder.planned(2, final=final)
            case "learns", int(count):
                recorder.warmup_steps = count
            case "decides", bool(active):
                recorder.selecting = active
            case "change", str(spec):
                recorder.change(spec, spec)
    assert (recorder.step_count, recorder.steady_from) == (steps, steady_from)
    result = RunResult.of("real", 1, recorder, [recorder.stats()])
    assert result.steady is (steady_from > 0)
    assert result.steady_from == (steady_from or None)
    assert result.steady_steps == (steps + 1 - steady_from if steady_from else 0)
    if steady_from:
        numbers = [record.step for record in steady_steps(list(recorder.steps))]
        assert numbers == [*range(steady_from, steps + 1)]
    assert [text.startswith(said) for text in result.cautions] == [True] * bool(said)


@pytest.mark.parametrize(
    ("asked", "before", "said"),
    [
        (None, 0, []),
        (40, 0, []),
        (50, 10, []),
        (
            120,
            0,
            ["asked for 120 steps, and the script ended by itself after 40 steps"],
        ),
        (60, 10, ["asked for 60 steps, and the script ended by itself after 50 steps"]),
    ],
)
def test_a_script_that_ends_before_it_was_asked_to(
    asked: int | None, before: int, said: list[str]
) -> None:
    training = Training()
    training.recorder.planned(1, final=True)
    training.steps(40, 1.0, before)
    summaries = [training.recorder.stats()]
    result = RunResult.of("real", 1, training.recorder, summaries, asked, before)
    assert (result.asked, result.cautions) == (asked, said)


def test_a_recorder_is_told_all_and_in_the_jobs_numbers() -> None:
    kept = RecordsInMemory([], [])
    training = Training(kept)
    training.recorder.waited("grads", 0.0, 0.5)
    training.steps(STEPS_KEPT + 5, 1.0, before=100)
    assert [record.step for record in kept.steps] == [*range(101, STEPS_KEPT + 106)]
    steps = [f"step {number}" for number in range(101, STEPS_KEPT + 106)]
    assert [span.name for span in kept.spans] == ["grads", *steps]


def test_a_record_has_the_phase_that_the_recorder_set() -> None:
    training = Training()
    recorder = training.recorder
    training.steps(2, 1.0)
    recorder.planned(2, final=True)
    recorder.warmup_steps = 2
    recorder.selecting = True
    training.steps(4, 1.0)
    assert (recorder.steady_after, recorder.steady_from) == (5, 0)
    recorder.selecting = False
    training.steps(2, 1.0)
    assert [record.phase for record in recorder.steps] == [
        "warm-up",
        *("tuning", "tuning"),
        *("warm-up", "warm-up"),
        "selecting",
        *("steady", "steady"),
    ]
    assert recorder.steady_from == 7
    # Without steady steps, those in which methods were tried tell most.
    assert len(steady_steps(list(recorder.steps)[:6])) == 1
    assert len(steady_steps(list(recorder.steps)[:5])) == 4
