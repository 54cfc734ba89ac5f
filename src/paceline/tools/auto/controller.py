"""Decides after each step which method a training uses next, without network or clock.

A training begins with one method. Its steps are measured once its buckets are planned. If they hardly wait
for the network, there is nothing to gain. Otherwise links are measured, and candidates are predicted while
the training continues. The best candidates alternate with the present method: each trains for some steps, as
`paceline.bucketing.tuner` compares bucket plans. The faster one stays. From then on steps are measured ever
more rarely. When their time has changed for good, all of this starts again.

`Controller.run` is a generator, and each yield is the end of one step. It yields None, or the spec of the next
method, and receives the reason if that method cannot be used. All ranks are at the same point of it after
the same step. They decide by means over ranks and by rank 0's broadcasts, so all decide alike. Messages are
posted after one step and read after the next one, when they have arrived. All ranks wait for all only before
a change of methods.

Its cost is bounded: `SHARE` of a thousand steps, or of all steps so far. Actions that cost more are postponed.
For example, a probe costs too much if steps take milliseconds.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Generator, Sequence
from typing import ClassVar, Protocol, TypeVar

import msgspec

from paceline.bucketing.tuner import Verdict, decide
from paceline.units import show_seconds

LOOK_EVERY = 8
"""Steps between two messages while the controller waits for something."""
FIRST_LOOK = 3
"""Steps until the first message about a candidate."""
MEASURED_STEPS = 8
SHARE, HORIZON = 0.015, 1000
"""Budget: this share of so many steps, or of all steps so far."""
NOTHING_TO_GAIN = 0.03
"""Share of a step: if exposed communication is less, no method is worth a change."""
LEAST_PROBE, MOST_PROBE = 0.5, 5.0
CHANGE_SECONDS = 0.3
"""Assumed cost of a change of methods before one was measured."""
MOST_SETTLING = 160
"""Steps after which a method is measured even if its buckets are not planned yet."""
AT_ONCE, HOPELESS = 2.0, 1.3
"""A trial ends early if a candidate's second and third step take `AT_ONCE` times the present step, or if a
later step before its steady state takes `HOPELESS` times as long."""
WATCH_EVERY, RAREST = 50, 800
"""Steps between two measurements of a steady training, first and at most."""
AGAIN = 25
"""Steps until an unusual measurement is repeated."""
CHANGED = 1.25
"""A step is unusual if its time differs by this factor, either way..."""
CHANGED_LOOKS = 3
"""...and has changed for good after so many unusual measurements in a row."""
DECISIONS = 4
"""Decisions of one training at most, so that auto does not follow a network that keeps changing."""

T = TypeVar("T")
Steps = Generator[str | None, str | None, T]
"""A generator with one yield for each step of training, and a result."""


class TrialResult(msgspec.Struct, kw_only=True):
    """Outcome of a trial: a candidate that alternated with the method *before*.

    Attributes:
        spec: The candidate.
        before: The method that it would replace.
        predicted: Predicted seconds of a step.
        seconds: Measured seconds of a step; 0: it never ran.
        before_seconds: Measured seconds of a step of the method before.
        better: Whether it is used.
        why: The reason, as a sentence.
    """

    spec: str
    before: str
    predicted: float
    seconds: float
    before_seconds: float
    better: bool
    why: str


class Decision(msgspec.Struct, kw_only=True):
    """A decision, and the measurements behind it.

    Attributes:
        before: The method of the steps before.
        chosen: The method to go on with.
        step_seconds: Seconds of a step with the chosen method.
        exposed: Exposed communication as a share of a step, before the decision; below 0: unknown.
        recalled: Whether it comes from an earlier run of the same training.
        planned: Whether candidates were predicted for it.
        trials: The candidates that were tried.
        postponed: Specs with predicted seconds whose trials cost too much so far.
    """

    before: str = ""
    chosen: str = ""
    step_seconds: float = 0.0
    exposed: float = -1.0
    recalled: bool = False
    planned: bool = False
    trials: list[TrialResult] = []
    postponed: list[tuple[str, float]] = []


class WorkerFinishedError(Exception):
    """A worker is out of data, so no rank changes anything any more."""


class Measurements(Protocol):
    """Measurements of one rank's training."""

    @property
    def steady(self) -> bool:
        """Whether the present method has reached its steady state."""
        ...

    @property
    def period(self) -> int:
        """After how many steps their times repeat."""
        ...

    def last(self, steps: int) -> list[float]:
        """Return the seconds of each of the last *steps* steps."""
        ...

    def exposed(self) -> float:
        """Exposed communication as a share of the last steps; below 0: unknown."""
        ...

    def recall(self) -> tuple[str, float]:
        """On rank 0: an earlier run's decision and its step in seconds; else ``("", 0.0)``."""
        ...

    def network_is_as_recalled(self) -> bool:
        """Measure briefly whether links are as in that run; equal on all ranks. Collective."""
        ...

    @property
    def needs_probe(self) -> bool:
        """Whether links must still be measured, which takes time."""
        ...

    def begin_plan(self, present: str, probe_seconds: float) -> None:
        """Measure links for at most *probe_seconds*, and begin to predict. Collective."""
        ...

    def plan_is_there(self) -> bool:
        """On rank 0: whether predictions have succeeded or failed; other ranks: False."""
        ...

    def candidates(self) -> list[tuple[str, float]]:
        """On rank 0: specs to try, the best first, with predicted seconds of a step."""
        ...


class RankMessages(Protocol):
    """Exchanges messages among all ranks; they are posted after one step, and read after a later one."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def post(self, values: Sequence[float]) -> None:
        """Post numbers, equally many on all ranks."""
        ...

    def take(self) -> list[float]:
        """Return the sums over ranks of the oldest post. Raises `WorkerFinishedError`."""
        ...

    def post_text(self, text: str) -> None:
        """Post rank 0's text; other ranks' texts do not matter."""
        ...

    def take_text(self) -> str:
        """Return rank 0's text. Raises `WorkerFinishedError`."""
        ...


class Log(Protocol):
    """Receives decisions."""

    def decided(self, decision: Decision) -> None:
        """Print a decision, and save it."""
        ...

    def report(self, sentence: str) -> None:
        """Print a sentence."""
        ...


class Controller:
    """One rank's controller.

    Attributes:
        present: The method in use; during a trial the one that the candidate would replace.
        steady: Whether a decision is made, and no trial runs.
        meets_before_change: Whether all workers have met in the step before a change.
    """

    meets_before_change: ClassVar[bool] = True

    def __init__(
        self,
        measurements: Measurements,
        messages: RankMessages,
        initial_spec: str,
        log: Log,
    ) -> None:
        self._measurements, self._messages = measurements, messages
        self._log = log
        self.present = initial_spec
        self.steady = False
        self._usual = 0.0
        """Seconds of a step with the present method."""
        self._steps, self._spent = 0, 0.0
        self._change_seconds = CHANGE_SECONDS
        self._refusal = ""

    def run(self) -> Steps[None]:
        """Run for ever; each yield is the end of a step."""
        with contextlib.suppress(WorkerFinishedError):
            yield from self._train()
        self.steady = True
        while True:
            yield None

    def _train(self) -> Steps[None]:
        recalled = yield from self._recall()
        yield from self._reach_steady_state(None)
        self._usual, _ = yield from self._measure()
        if not (recalled and self._is_usual(recalled)):
            yield from self._decide()
        for left in reversed(range(DECISIONS)):
            self.steady = True
            before = self._usual
            yield from self._watch()
            changed = f"auto: a step takes {show_seconds(self._usual)}, and took {show_seconds(before)}: "
            if left:
                self._log.report(changed + "deciding again")
                self.steady = False
                yield from self._decide()
            else:
                self._log.report(
                    changed + f"that happens often, and {self.present} stays"
                )

    # ---- the decision of an earlier run ----

    def _recall(self) -> Steps[float]:
        """Use the method of an earlier run.

        Returns:
            The seconds of its step; 0 if there is no earlier run, or if the network has changed.
        """
        yield from self._wait_steps(1)
        spec, seconds = self._measurements.recall()
        text = yield from self._broadcast(f"{seconds!r} {spec}" if spec else "")
        if not text:
            return 0.0
        number, spec = text.split(" ", 1)
        self._barrier()
        if not self._measurements.network_is_as_recalled():
            return 0.0
        if spec != self.present:
            if not (yield from self._change(spec)):
                return 0.0
            self.present = spec
        return float(number)

    def _is_usual(self, seconds: float) -> bool:
        if 1 / CHANGED < self._usual / seconds < CHANGED:
            self._log.decided(
                Decision(chosen=self.present, step_seconds=self._usual, recalled=True)
            )
            return True
        self._log.report(
            f"auto: a step with {self.present} takes {show_seconds(self._usual)}, and took "
            f"{show_seconds(seconds)} in the earlier run: deciding again"
        )
        return False

    # ---- a decision ----

    def _decide(self) -> Steps[None]:
        decision = Decision(before=self.present, step_seconds=self._usual)
        mine = self._measurements.exposed()
        share, unknown = yield from self._mean_over_ranks(mine, float(mine < 0))
        decision.exposed = -1.0 if unknown else share
        if unknown or share >= NOTHING_TO_GAIN:
            yield from self._plan()
            decision.planned = True
            decision.postponed = yield from self._candidates()
            while decision.postponed:
                if self._affordable < self._trial_seconds:
                    self._report(decision)
                    yield from self._afford(self._trial_seconds)
                spec, predicted = decision.postponed.pop(0)
                decision.trials.append((yield from self._try(spec, predicted)))
        self._report(decision)

    def _report(self, decision: Decision) -> None:
        decision.chosen, decision.step_seconds = self.present, self._usual
        self._log.decided(decision)

    def _plan(self) -> Steps[None]:
        """Wait until predictions have succeeded or failed."""
        seconds = 0.0
        if self._measurements.needs_probe:
            yield from self._afford(2 * LEAST_PROBE)
            seconds = min(MOST_PROBE, self._affordable / 2)
        self._barrier()
        self._measurements.begin_plan(self.present, seconds)
        yield from self._wait_steps(1)
        (took,) = yield from self._mean_over_ranks(self._measurements.last(1)[0])
        self._spent += max(0.0, took - self._usual)
        ready = 0.0
        while not ready:
            yield from self._wait_steps(LOOK_EVERY)
            (ready,) = yield from self._mean_over_ranks(
                float(self._measurements.plan_is_there())
            )

    def _candidates(self) -> Steps[list[tuple[str, float]]]:
        mine = self._measurements.candidates()
        lines = [f"{seconds!r} {spec}" for spec, seconds in mine]
        text = yield from self._broadcast("\n".join(lines))
        pairs = [line.split(" ", 1) for line in text.splitlines()]
        return [(spec, float(seconds)) for seconds, spec in pairs]

    # ---- a trial ----

    def _try(self, spec: str, predicted: float) -> Steps[TrialResult]:
        """Alternate between the present method and the candidate. At the end the better one runs."""
        first, rounds = self._steps, list[tuple[float, float]]()
        verdict: Verdict | None = None
        while verdict is None:
            old, spread = yield from self._measure()
            self._usual = old
            if not (yield from self._change(spec)):
                verdict = Verdict(False, f"it cannot be used: {self._refusal}")
                break
            begun = self._steps
            if (yield from self._reach_steady_state(first)):
                new, more = yield from self._measure()
                rounds.append((new, old))
                ratios = [new / old for new, old in rounds]
                kept = f"{self.present} is kept"
                verdict = decide(ratios, max(spread, more), kept, "it")
                if verdict is not None and verdict.better:
                    self._usual, before = new, self.present
                    self.present = spec
                    return self._result(spec, before, predicted, rounds, verdict)
                if verdict is None and (yield from self._lost(first)):
                    verdict = Verdict(False, f"no clear gain soon enough, and {kept}")
            else:
                # The mean over all its steps, since the trial ended because of their sum.
                recent = self._measurements.last(self._steps - begun)
                (new,) = yield from self._mean_over_ranks(statistics.fmean(recent))
                rounds.append((new, old))
                verdict = Verdict(
                    False, f"slower until it was given up, and {self.present} is kept"
                )
            if not (yield from self._change(self.present)):
                before, self.present = self.present, spec
                why = f"{before} cannot be gone back to: {self._refusal}"
                return self._result(spec, before, predicted, rounds, Verdict(True, why))
            yield from self._reach_steady_state(None)
        (total,) = yield from self._mean_over_ranks(self._since(first))
        self._spent += max(0.0, total - (self._steps - first - 1) * self._usual)
        return self._result(spec, self.present, predicted, rounds, verdict)

    def _result(
        self,
        spec: str,
        before: str,
        predicted: float,
        rounds: Sequence[tuple[float, float]],
        verdict: Verdict,
    ) -> TrialResult:
        new, old = (
            [statistics.median(side) for side in zip(*rounds, strict=True)]
            if rounds
            else (0.0, self._usual)
        )
        return TrialResult(
            spec=spec,
            before=before,
            predicted=predicted,
            seconds=new,
            before_seconds=old,
            better=verdict.better,
            why=verdict.why,
        )

    def _change(self, spec: str) -> Steps[bool]:
        """Change to *spec*. Returns after the first step with it, with whether it is used."""
        self._barrier()
        self._steps += 1
        self._refusal = (yield spec) or ""
        if self._refusal:
            return False
        (took,) = yield from self._mean_over_ranks(self._measurements.last(1)[0])
        if self._usual:
            self._change_seconds = max(CHANGE_SECONDS, took - self._usual)
        return True

    def _reach_steady_state(self, first: int | None) -> Steps[bool]:
        """Wait until the present method is in steady state.

        Returns:
            False as soon as a candidate, whose trial began at step *first*, has clearly lost.
        """
        pauses = [LOOK_EVERY] * (MOST_SETTLING // LOOK_EVERY)
        factor = HOPELESS
        if first is not None:
            pauses, factor = [1, FIRST_LOOK, *pauses], AT_ONCE
        for pause in pauses:
            yield from self._wait_steps(pause)
            recent = self._measurements.last(max(2, pause))
            middle = min(recent) if pause == 1 else statistics.median(recent)
            cost = 0.0 if first is None else self._since(first)
            ready, middle, total = yield from self._mean_over_ranks(
                float(self._measurements.steady), middle, cost
            )
            if first is not None:
                slow = middle / self._usual
                if slow > factor or (slow > 1 and self._has_lost(first, total)):
                    return False  # A faster one makes up for its cost.
                factor = HOPELESS
            if ready == 1.0:
                return True
        return True

    def _lost(self, first: int) -> Steps[bool]:
        """Return whether the trial that began at step *first* has cost more than its budget."""
        (total,) = yield from self._mean_over_ranks(self._since(first))
        return self._has_lost(first, total)

    def _has_lost(self, first: int, total: float) -> bool:
        """Decide the same from *total* seconds that ranks have agreed on."""
        steps = self._steps - first - 1  # The message was sent a step later.
        cost = total - steps * self._usual + self._change_seconds  # to go back
        return cost > self._affordable

    def _since(self, first: int) -> float:
        return sum(self._measurements.last(self._steps - first))

    def _afford(self, seconds: float) -> Steps[None]:
        """Wait until the budget allows an action of *seconds*."""
        while self._affordable < seconds:
            self.steady = True
            yield from self._wait_steps(LOOK_EVERY)
        self.steady = False

    @property
    def _trial_seconds(self) -> float:
        """Cost of a trial that ends early."""
        return 2 * self._change_seconds + FIRST_LOOK * self._usual

    @property
    def _affordable(self) -> float:
        return SHARE * max(HORIZON, self._steps) * self._usual - self._spent

    # ---- in steady state ----

    def _watch(self) -> Steps[None]:
        """Wait until the time of a step has changed for good."""
        strange, pause = 0, WATCH_EVERY
        usual = self._usual
        while strange < CHANGED_LOOKS:
            yield from self._wait_steps(AGAIN if strange else pause)
            now, _ = yield from self._measure()
            if 1 / CHANGED < now / usual < CHANGED:
                strange, pause = 0, min(2 * pause, RAREST)
            else:
                strange += 1
        self._usual = now

    # ---- measurements and messages ----

    def _wait_steps(self, steps: int) -> Steps[None]:
        for _ in range(steps):
            self._steps += 1
            yield None

    def _measure(self) -> Steps[tuple[float, float]]:
        """Return the seconds of a step, and their relative spread, as means over ranks."""
        period = self._measurements.period
        steps = -(-MEASURED_STEPS // period) * period
        yield from self._wait_steps(steps)
        middle, spread = typical(self._measurements.last(steps), period)
        seconds, spread = yield from self._mean_over_ranks(middle, spread)
        return seconds, spread

    def _mean_over_ranks(self, *values: float) -> Steps[list[float]]:
        """Means over ranks, available one step later."""
        self._messages.post(values)
        yield from self._wait_steps(1)
        size = self._messages.size
        return [value / size for value in self._messages.take()[: len(values)]]

    def _broadcast(self, text: str) -> Steps[str]:
        """Rank 0's text, available one step later."""
        self._messages.post_text(text)
        yield from self._wait_steps(1)
        return self._messages.take_text()

    def _barrier(self) -> None:
        """Wait for all ranks; if a worker is out of data, all learn it here."""
        self._messages.post(())
        self._messages.take()


def typical(times: Sequence[float], period: int) -> tuple[float, float]:
    """Return the seconds of a step, and the relative spread of the middle half of the steps.

    If the steps of a period differ, both are of whole periods. The middle half excludes pauses that other
    processes cause. A single period has no spread, and counts as noisy.
    """
    means = [
        statistics.fmean(times[start : start + period])
        for start in range(0, len(times), period)
    ]
    middle = statistics.median(means)
    if len(means) == 1:
        return middle, 0.05
    quarter = len(means) // 4
    half = sorted(means)[quarter : len(means) - quarter]
    return middle, (half[-1] - half[0]) / middle if middle else 0.0
