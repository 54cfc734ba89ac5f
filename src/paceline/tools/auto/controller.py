"""What ``method="auto"`` does from step to step, without a network or a clock.

Training begins with one method. Once its buckets have settled, its steps are measured. Where
they hardly wait for the network there is nothing to gain. Else links are measured, candidates are
predicted beside the training, and the best of them are tried in turn with what runs: each is
trained with for some steps, as `paceline.bucketing.tuner` judges plans of buckets. A candidate that has won
stays. Then steps are looked at, ever more rarely, and all of this happens again when they have
changed for good.

`Program.run` is a generator, and each yield is the end of one step: None, or the spec of the
method to go on with. All ranks are at the same point of it after the same step. All that they
decide by are means over ranks, or what rank 0 tells: so they decide alike. Messages are posted
after one step and read after the next one, by when they are there; only before a method is changed
do all wait for all.

What this costs a training is bounded: `SHARE` of a thousand steps, or of all steps until now. What
is not affordable yet (on steps of milliseconds a probe is not) is put off.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence

from paceline.bucketing.tuner import Verdict, decide
from paceline.tools.auto.controller_interfaces import LeftError, Ranks, Senses
from paceline.tools.auto.decision import Found, Tried

Waiting = Generator[str | None, None, None]

LOOK_EVERY = 8
"""Steps between two messages, while something is waited for."""
FIRST_LOOK = 3
"""Steps until the first message about a candidate."""
MEASURED_STEPS = 8
SHARE, HORIZON = 0.015, 1000
"""What may be spent: of so many steps, or of all until now."""
NOTHING = 0.03
"""Of a step: where less of it waits for the network, nothing is worth a change."""
LEAST_PROBE, MOST_PROBE = 0.5, 5.0
CHANGE_SECONDS = 0.3
"""What a change of methods is taken to cost before one was seen."""
MOST_SETTLING = 160
"""Steps after which a method is measured whether its buckets have settled or not."""
AT_ONCE, HOPELESS = 2.0, 1.3
"""Times the present step, in both of a candidate's second and third step, and while it settles: it is given up."""
WATCH_EVERY, RAREST = 50, 800
"""Steps between two looks at a training that is settled, at first and at the end."""
AGAIN = 25
"""Steps until a look that showed something strange is repeated."""
CHANGED = 1.25
"""A step that is longer, or shorter, by this factor..."""
CHANGED_LOOKS = 3
"""...at so many looks in a row has changed for good."""
DECISIONS = 4
"""Times that one training decides: a network that changes all the time is not run after."""


class Program:
    """One rank's. *spec*: what training begins with. *decided* is told what was found, after each
    decision; *say* what people should know."""

    def __init__(
        self,
        senses: Senses,
        ranks: Ranks,
        spec: str,
        decided: Callable[[Found], None],
        say: Callable[[str], None],
    ) -> None:
        self._senses, self._ranks = senses, ranks
        self._decided, self._say = decided, say
        self.present = spec
        """What is trained with; during a trial what the candidate would replace."""
        self.is_settled = False
        """Whether a decision stands, and nothing is tried."""
        self._usual = 0.0
        self._steps, self._spent = 0, 0.0
        self._change_seconds = CHANGE_SECONDS

    def run(self) -> Iterator[str | None]:
        """Each yield is the end of a step. Never ends."""
        with contextlib.suppress(LeftError):
            yield from self._train()
        self.is_settled = True
        while True:
            yield None

    def _train(self) -> Waiting:
        recalled = yield from self._recall()
        yield from self._settle(None)
        self._usual, _ = yield from self._measure()
        if not (recalled and self._is_usual(recalled)):
            yield from self._decide()
        for left in reversed(range(DECISIONS)):
            self.is_settled = True
            before = self._usual
            yield from self._watch()
            self._say(
                f"auto: a step takes {self._usual:.4g} s, and took {before:.4g} s: "
                + (
                    "it is decided anew"
                    if left
                    else f"that happens often, and {self.present} stays"
                )
            )
            if left:
                self.is_settled = False
                yield from self._decide()

    # ---- what was decided before ----

    def _recall(self) -> Generator[str | None, None, float]:
        """Go on with what was decided when the same was trained before; seconds of its step, 0 where
        nothing is known, or the network is another one."""
        yield from self._rest(1)
        spec, seconds = self._senses.recall()
        text = yield from self._hear(f"{seconds!r} {spec}" if spec else "")
        if not text:
            return 0.0
        number, spec = text.split(" ", 1)
        self._meet()
        if not self._senses.network_is_as_recalled():
            return 0.0
        if spec != self.present:
            if not (yield from self._change(spec)):
                return 0.0
            self.present = spec
        return float(number)

    def _is_usual(self, seconds: float) -> bool:
        if 1 / CHANGED < self._usual / seconds < CHANGED:
            self._decided(Found(chosen=self.present, usual=self._usual, recalled=True))
            return True
        self._say(
            f"auto: a step with {self.present} takes {self._usual:.4g} s, and took "
            f"{seconds:.4g} s when that was decided: it is decided anew"
        )
        return False

    # ---- a decision ----

    def _decide(self) -> Waiting:
        found = Found(before=self.present, usual=self._usual)
        mine = self._senses.waited()
        share, unknown = yield from self._agree(mine, float(mine < 0))
        found.waited = -1.0 if unknown else share
        if unknown or share >= NOTHING:
            yield from self._plan()
            found.later = yield from self._ask()
            while found.later:
                if self._affordable < self._trial_seconds:
                    self._tell(found)
                    yield from self._afford(self._trial_seconds)
                spec, predicted = found.later.pop(0)
                found.tried.append((yield from self._try(spec, predicted)))
        self._tell(found)

    def _tell(self, found: Found) -> None:
        found.chosen, found.usual = self.present, self._usual
        self._decided(found)

    def _plan(self) -> Waiting:
        """Until candidates are predicted, or could not be."""
        seconds = 0.0
        if self._senses.needs_probe:
            yield from self._afford(2 * LEAST_PROBE)
            seconds = min(MOST_PROBE, self._affordable / 2)
        self._meet()
        self._senses.begin_plan(seconds)
        yield from self._rest(1)
        (took,) = yield from self._agree(self._senses.last(1)[0])
        self._spent += max(0.0, took - self._usual)
        ready = 0.0
        while not ready:
            yield from self._rest(LOOK_EVERY)
            (ready,) = yield from self._agree(float(self._senses.plan_is_there()))

    def _ask(self) -> Generator[str | None, None, list[tuple[str, float]]]:
        mine = [f"{seconds!r} {spec}" for spec, seconds in self._senses.candidates()]
        text = yield from self._hear("\n".join(mine))
        pairs = [line.split(" ", 1) for line in text.splitlines()]
        return [(spec, float(seconds)) for seconds, spec in pairs]

    # ---- a trial ----

    def _try(self, spec: str, predicted: float) -> Generator[str | None, None, Tried]:
        """Rounds of what runs and of the candidate. At the end the better one runs."""
        first, rounds = self._steps, list[tuple[float, float]]()
        verdict: Verdict | None = None
        while verdict is None:
            old, spread = yield from self._measure()
            self._usual = old
            if not (yield from self._change(spec)):
                verdict = Verdict(False, f"it cannot be used: {self._senses.refused}")
                break
            begun = self._steps
            if (yield from self._settle(first)):
                new, more = yield from self._measure()
                rounds.append((new, old))
                ratios = [new / old for new, old in rounds]
                kept = f"{self.present} is kept"
                verdict = decide(ratios, max(spread, more), kept, spec)
                if verdict is not None and verdict.better:
                    self._usual, before = new, self.present
                    self.present = spec
                    return self._tried(spec, before, predicted, rounds, verdict)
                if verdict is None and (yield from self._lost(first)):
                    verdict = Verdict(False, f"no clear gain soon enough, and {kept}")
            else:
                # Of all its steps, as their sum is what it was given up for.
                recent = self._senses.last(self._steps - begun)
                (new,) = yield from self._agree(statistics.fmean(recent))
                rounds.append((new, old))
                verdict = Verdict(
                    False, f"slower until it was given up, and {self.present} is kept"
                )
            if not (yield from self._change(self.present)):
                before, self.present = self.present, spec
                why = f"{before} cannot be gone back to: {self._senses.refused}"
                return self._tried(spec, before, predicted, rounds, Verdict(True, why))
            yield from self._settle(None)
        (total,) = yield from self._agree(self._since(first))
        self._spent += max(0.0, total - (self._steps - first - 1) * self._usual)
        return self._tried(spec, self.present, predicted, rounds, verdict)

    def _tried(
        self,
        spec: str,
        before: str,
        predicted: float,
        rounds: Sequence[tuple[float, float]],
        verdict: Verdict,
    ) -> Tried:
        new, old = (
            [statistics.median(side) for side in zip(*rounds, strict=True)]
            if rounds
            else (0.0, self._usual)
        )
        return Tried(
            spec=spec,
            before=before,
            predicted=predicted,
            seconds=new,
            before_seconds=old,
            better=verdict.better,
            why=verdict.why,
        )

    def _change(self, spec: str) -> Generator[str | None, None, bool]:
        """Go on with *spec*; returns after the first step with it, whether it is used."""
        self._meet()
        self._steps += 1
        yield spec
        if self._senses.refused:
            return False
        (took,) = yield from self._agree(self._senses.last(1)[0])
        if self._usual:
            self._change_seconds = max(CHANGE_SECONDS, took - self._usual)
        return True

    def _settle(self, first: int | None) -> Generator[str | None, None, bool]:
        """Until steps are as they will be. In a trial that began at step *first* False as soon as
        it is clear that nothing comes of it."""
        pauses = [LOOK_EVERY] * (MOST_SETTLING // LOOK_EVERY)
        factor = HOPELESS
        if first is not None:
            pauses, factor = [1, FIRST_LOOK, *pauses], AT_ONCE
        for pause in pauses:
            yield from self._rest(pause)
            recent = self._senses.last(max(2, pause))
            middle = min(recent) if pause == 1 else statistics.median(recent)
            cost = 0.0 if first is None else self._since(first)
            ready, middle, total = yield from self._agree(
                float(self._senses.settled), middle, cost
            )
            if first is not None:
                slow = middle / self._usual
                if slow > factor or (slow > 1 and self._has_lost(first, total)):
                    return False  # what is faster earns what its change has cost
                factor = HOPELESS
            if ready == 1.0:
                return True
        return True

    def _lost(self, first: int) -> Generator[str | None, None, bool]:
        """Whether the trial that began at step *first* has cost more than it may."""
        (total,) = yield from self._agree(self._since(first))
        return self._has_lost(first, total)

    def _has_lost(self, first: int, total: float) -> bool:
        """The same, once ranks have agreed on its seconds."""
        steps = self._steps - first - 1  # that of the message came later
        cost = total - steps * self._usual + self._change_seconds  # of going back
        return cost > self._affordable

    def _since(self, first: int) -> float:
        return sum(self._senses.last(self._steps - first))

    def _afford(self, seconds: float) -> Waiting:
        """Put off what costs so much until it may."""
        while self._affordable < seconds:
            self.is_settled = True
            yield from self._rest(LOOK_EVERY)
        self.is_settled = False

    @property
    def _trial_seconds(self) -> float:
        """What a trial that is given up soon may cost."""
        return 2 * self._change_seconds + FIRST_LOOK * self._usual

    @property
    def _affordable(self) -> float:
        return SHARE * max(HORIZON, self._steps) * self._usual - self._spent

    # ---- when all is settled ----

    def _watch(self) -> Waiting:
        """Returns when the time of a step has changed for good."""
        strange, pause = 0, WATCH_EVERY
        usual = self._usual
        while strange < CHANGED_LOOKS:
            yield from self._rest(AGAIN if strange else pause)
            now, _ = yield from self._measure()
            if 1 / CHANGED < now / usual < CHANGED:
                strange, pause = 0, min(2 * pause, RAREST)
            else:
                strange += 1
        self._usual = now

    # ---- what a step's end is made of ----

    def _rest(self, steps: int) -> Waiting:
        for _ in range(steps):
            self._steps += 1
            yield None

    def _measure(self) -> Generator[str | None, None, tuple[float, float]]:
        """Seconds of a step, and their relative spread: means over ranks."""
        period = self._senses.period
        steps = -(-MEASURED_STEPS // period) * period
        yield from self._rest(steps)
        middle, spread = typical(self._senses.last(steps), period)
        seconds, spread = yield from self._agree(middle, spread)
        return seconds, spread

    def _agree(self, *values: float) -> Generator[str | None, None, list[float]]:
        """Means over ranks: known one step later."""
        self._ranks.post(values)
        yield from self._rest(1)
        return [value / self._ranks.size for value in self._ranks.take()[: len(values)]]

    def _hear(self, text: str) -> Generator[str | None, None, str]:
        """Rank 0's text: known one step later."""
        self._ranks.tell(text)
        yield from self._rest(1)
        return self._ranks.told()

    def _meet(self) -> None:
        """All are here, and nobody is out of data, or all learn that now."""
        self._ranks.post(())
        self._ranks.take()


def typical(times: Sequence[float], period: int) -> tuple[float, float]:
    """Seconds of a step, and the relative spread of what they are from: of steps, or of whole
    periods, where steps of one differ. The spread is that of their middle half: a pause of somebody
    else's is no noise of a method's. A single period tells nothing about it: it is taken for noisy."""
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
