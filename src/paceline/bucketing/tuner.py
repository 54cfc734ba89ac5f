"""In which buckets one training sends its gradients: found out while it trains.

The first backward pass shows the order in which gradients become ready; rank 0's counts
for all. Rules that know only sizes are then settled. ``mg-wfbp`` and ``optimal`` measure:
a few steps with DDP's buckets tell when each gradient is ready (medians over steps, then
the maximum over ranks), a few all-reduces what a message costs, and rank 0 plans. For
``optimal`` the plan and DDP's are then tried in turn, and the faster stays. Where a method
goes past backward, the same steps tell when each tensor is used, rank 0 plans messages for
that, and these and what was settled are tried in turn, too. Now and then
ranks compare notes: where the order, or the time of a step, has changed for good, all of
this happens again.

All ranks are at the same point of this program after the same backward pass, and all that
they decide by is either the same on all of them or rank 0's.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Literal

import torch

from paceline.bucketing import message_plan, rules
from paceline.bucketing.bucket_plan import (
    Agreed,
    Groups,
    Side,
    Trial,
    from_numbers,
    to_numbers,
)
from paceline.bucketing.measure import measure_mean
from paceline.bucketing.rank_agreement import Ranks
from paceline.bucketing.step_timer import Passes
from paceline.bucketing.trial import REPEATABLE
from paceline.interfaces import Comm, Message, Pending, Stopwatch

PROFILED_STEPS = 4
TRIAL_STEPS = 4
"""Steps with one side of a trial, the first of which does not count."""
REPEATED_STEPS, PAST_BACKWARD_STEPS = 2, 3
"""`TRIAL_STEPS` where times repeat exactly; the latter if the next step waits for what is under
way. One profiled step is enough there."""


@dataclasses.dataclass
class Watch:
    """Plans are looked at anew every so many steps, by the last ones of them."""

    every: int = 50
    steps: int = 8


watch = Watch()
"""That of all trainings of this process."""
CHANGED = 1.25
"""A step that takes longer, or is shorter, by this factor..."""

CHANGED_WINDOWS = 2
"""...in so many windows in a row has changed for good."""

GoesPast = Literal["no", "whole", "halves"]
"""Whether a method goes past the end of backward, and in which messages: parts of means, or
both halves of whole ones."""


class Planner:
    """Decides the buckets of one training, in step on all ranks.

    *sizes* (bytes) and *kinds* are those of the parameters, by index; *rule* is one of
    `bucketing.RULES` or lengths. *blank* makes buffers to measure with; *planned* is told the
    number of buckets and whether measuring is over, *say* what people should know. *mean*
    forms one as training does, to be timed. *goes_past*: what the method makes of the time
    after backward. It measures when *starts_after* steps have passed that are unlike those that follow.
    Without *lock_step* ranks never meet:
    buckets are those of the rule, or of DDP's where *rule* measures, for parameters in the
    reverse of their order, and stay so.
    """

    def __init__(
        self,
        comm: Comm,
        rule: str,
        sizes: Sequence[int],
        kinds: Sequence[Hashable],
        device: torch.device,
        stopwatch: Stopwatch,
        blank: Callable[[int, torch.device], torch.Tensor],
        planned: Callable[[int, bool], None],
        say: Callable[[str], None],
        mean: Callable[[torch.Tensor], Pending],
        lock_step: bool = True,
        goes_past: GoesPast = "no",
        starts_after: int = 0,
    ) -> None:
        self._comm, self._starts_after = comm, starts_after
        self._rule = rules.check_rule(rule)
        self._lock_step = lock_step
        together = comm.size > 1 and lock_step
        self._measures = rule in rules.MEASURED and together
        self._fixed_rule = "ddp" if rule in rules.MEASURED else rule
        self._goes_past: GoesPast = goes_past if together else "no"
        self._sizes, self._kinds = list(sizes), list(kinds)
        self._device, self._stopwatch, self._blank = device, stopwatch, blank
        self._planned, self._say, self._mean = planned, say, mean
        self._ranks = Ranks(comm, device)
        self._passes = Passes(stopwatch, range(len(sizes))[::-1])
        self.groups: Groups = []
        """Each bucket's parameters, as indices, in the order of delivery."""
        self.sending: tuple[Message, ...] | None = None
        """In which messages buckets travel past backward; None: they are waited for where
        backward ends."""
        self.kept: Side | None = None
        """What was measured and settled on last, if anything was: for `reuse`."""
        self._reused: Side | None = None
        self._use(Side(self._by_rule(self._fixed_rule)))
        self._program = self._run() if lock_step else itertools.repeat(False)
        if not lock_step:
            self._passes.listening = False
            planned(len(self.groups), True)

    def reuse(self, kept: Side | None) -> None:
        """Begin with what another training of the same model, by the same spec, has settled on, and
        measure again only when that has changed. Before the first pass, on all ranks."""
        self._reused = kept

    # ---- what training tells ----

    @property
    def listening(self) -> bool:
        """Whether the next backward pass is timed."""
        return self._passes.listening

    def step_begins(self) -> None:
        """A forward pass begins that belongs to the next backward pass."""
        self._passes.step_begins()

    def used(self, index: int) -> None:
        """A parameter is used for the first time in this step."""
        self._passes.used(index)

    def gradient_ready(self, index: int) -> None:
        """The gradient of a parameter is there."""
        self._passes.gradient_ready(index)

    def backward_ended(self) -> bool:
        """Every rank is through with a backward pass. Returns whether `groups` or `sending`
        has changed. Collective."""
        self._passes.ended()
        changed = next(self._program)
        self._passes.forget()
        return changed

    # ---- the program: each yield is the end of one backward pass ----

    def _run(self) -> Iterator[bool]:
        changed = self._learn_order()
        for _ in range(self._starts_after if self._measures else 0):
            yield changed
            changed = False
        while self._measures:
            yield changed
            reused, self._reused = self._reused, None
            changed = self._use(reused) if reused else (yield from self._plan())
            self.kept = Side(self.groups, self.sending)
            self._planned(len(self.groups), True)
            yield changed
            yield from self._watch()
            changed = self._learn_order()
        self._planned(len(self.groups), True)
        self._passes.listening = False
        while True:
            yield changed
            changed = False

    def _learn_order(self) -> bool:
        """Take rank 0's ready order. Returns whether anything has changed."""
        self._planned(len(self.groups), False)
        passes = self._passes
        mine = passes.seen_order()
        theirs = self._ranks.from_rank_0(mine or passes.order)
        if self._measures and self._sum(float(bool(mine) and mine != theirs)):
            self._say(
                "bucketing: gradients become ready in another order on some ranks than on "
                "rank 0, so nothing can be planned for all: DDP's rule is used"
            )
            self._measures = False
        passes.order = theirs
        groups = self._by_rule(self._fixed_rule)
        if self._goes_past == "no" or self._rule in rules.MEASURED:
            return self._use(Side(groups))
        uses: Sequence[float] = ()
        if self._goes_past == "halves":
            uses = self._ranks.from_rank_0(passes.use_order())
        return self._use(self._fixed(groups, uses))

    def _plan(self) -> Generator[bool, None, bool]:
        """Measure, plan, and try. Returns whether anything has changed."""
        ready: list[list[float]] = []
        uses: list[list[float]] = []
        steps = 1 if self._stopwatch.repeats else PROFILED_STEPS
        for step in range(steps):
            times = self._passes.ready_times()
            if times is not None:
                ready.append(times)
                uses.append(self._passes.use_times())
            if step + 1 < steps:
                yield False
        agreed = self._agreed_times(ready, uses)
        if agreed is None:
            return False
        cost = measure_mean(
            self._comm,
            sum(self._sizes),
            self._device,
            self._stopwatch,
            self._blank,
            self._mean,
        )
        settled = Side(self._by_rule(self._rule, agreed.ready, cost))
        if self._rule == "optimal":
            settled = yield from self._try_against_ddp(settled)
            if self._goes_past != "no":
                settled = yield from self._try_past_backward(settled, agreed, cost)
        elif self._goes_past != "no":
            by_index = dict(zip(self._passes.order, agreed.uses, strict=True))
            uses_of = [by_index[index] for index in range(len(by_index))]
            settled = self._fixed(settled.groups, uses_of)
        return self._use(settled)

    def _try_against_ddp(self, planned: Side) -> Generator[bool, None, Side]:
        plain = Side(self._by_rule("ddp"))
        if planned == plain:
            return plain
        trial = yield from self._try(
            planned, plain, self._passes.duration, "DDP's rule is kept"
        )
        self._say(
            f"bucketing: {planned} planned from measured times, {trial.new} a pass in a trial "
            f"(one forward, one backward, and waiting for its means); DDP's rule, {plain}, "
            f"{trial.old}: {trial.verdict.why}"
        )
        return planned if trial.verdict.better else plain

    def _try_past_backward(
        self, settled: Side, agreed: Agreed, cost: rules.Cost
    ) -> Generator[bool, None, Side]:
        """A plan of messages for the time after backward, too, against what is *settled*
        for the time before its end."""
        planned = self._by_search(settled, agreed, cost)
        if planned is None:
            return settled
        # Updates and waits move from before a forward pass into it: whole periods count.
        trial = yield from self._try(
            planned,
            settled,
            self._passes.period,
            "means are waited for where backward ends",
        )
        self._say(
            f"bucketing: {planned}, waited for where the next forward pass uses them, "
            f"{trial.new} a step in a trial (from one backward pass's end to the next "
            f"one's); waited for where backward ends, {settled}, {trial.old}: "
            f"{trial.verdict.why}"
        )
        return planned if trial.verdict.better else settled

    def _try(
        self,
        new: Side,
        old: Side,
        seconds: Callable[[], list[float]],
        otherwise: str,
    ) -> Generator[bool, None, Trial]:
        """Steps with each side in turn."""
        trial = Trial(otherwise)
        while not trial.is_over:
            means, spread = [], 0.0
            for side in (new, old):
                yield self._use(side)  # the step that follows does not count
                times = []
                for _ in range(self._trial_steps - 1):
                    yield False
                    times += seconds()
                middle = statistics.median(times) if times else 0.0
                wide = (max(times) - min(times)) / middle if middle else 0.0
                total, spreads, ranks = self._ranks.sums(
                    middle, wide, float(bool(times))
                )
                means.append(total / ranks if ranks else 0.0)
                spread = max(spread, spreads / ranks if ranks else 0.0)
            trial.add_round(means[0], means[1], spread)
        return trial

    @property
    def _trial_steps(self) -> int:
        if not self._stopwatch.repeats:
            return TRIAL_STEPS
        return REPEATED_STEPS if self._goes_past == "no" else PAST_BACKWARD_STEPS

    def _watch(self) -> Iterator[bool]:
        """Returns when the order, or the time of a step, has changed for good."""
        passes = self._passes
        usual: float | None = None
        strange = 0
        while strange < CHANGED_WINDOWS:
            passes.listening = False
            for _ in range(watch.every - watch.steps):
                yield False
            passes.listening = True
            times: list[float] = []
            orders: Counter[tuple[int, ...]] = Counter()
            for _ in range(watch.steps):
                yield False
                times += passes.duration() if self.sending is None else passes.period()
                orders[tuple(passes.seen_order())] += 1
            middle = statistics.median(times) if times else 0.0
            # A model whose order varies has not changed it for good: most passes must
            # agree on another one.
            order, count = orders.most_common(1)[0]
            other = count > watch.steps / 2 and list(order) not in ([], passes.order)
            total, disordered, ranks = self._ranks.sums(
                middle, float(other), float(bool(times))
            )
            if not ranks:
                continue
            time = total / ranks
            if usual is None:
                usual = time
            longer = max(time, usual) / max(min(time, usual), 1e-9)
            strange = strange + 1 if longer > CHANGED or disordered else 0
        self._say(
            "bucketing: the order of gradients or the time of a step has changed: measuring "
            "again"
        )

    # ---- what ranks agree on ----

    def _agreed_times(
        self, ready: Sequence[Sequence[float]], uses: Sequence[Sequence[float]]
    ) -> Agreed | None:
        """Medians over steps, then the maximum over ranks: all go at the slowest one's
        pace."""
        count = len(self._passes.order)
        mine = [statistics.median(times) for times in zip(*ready, strict=True)]
        if self._goes_past != "no":
            mine += [statistics.median(times) for times in zip(*uses, strict=True)]
        both = count if self._goes_past == "no" else 2 * count
        times = self._ranks.largest(mine or [-1.0] * both)
        if times[0] < 0:
            return None
        return Agreed(list(itertools.accumulate(times[:count], max)), times[count:])

    def _by_rule(
        self, rule: str, times: Sequence[float] = (), cost: rules.Cost | None = None
    ) -> Groups:
        order = self._passes.order
        groups = rules.group(
            rule, *self._in_order, times, cost, lanes=self._lanes if cost else 1
        )
        groups = [[order[position] for position in group] for group in groups]
        if cost is None:
            return groups  # from what is equal on all ranks
        bucket_of = [0] * len(order)
        for number, group in enumerate(groups):
            for index in group:
                bucket_of[index] = number
        bucket_of = self._ranks.from_rank_0(bucket_of)
        agreed: Groups = [[] for _ in range(max(bucket_of) + 1)]
        for index in order:
            agreed[bucket_of[index]].append(index)
        return agreed

    def _by_search(
        self, settled: Side, agreed: Agreed, cost: rules.Cost
    ) -> Side | None:
        """Rank 0's plan of messages; None where it predicts nothing better than what is
        *settled*."""
        order, (sizes, kinds) = self._passes.order, self._in_order
        ready, uses, lanes = agreed.ready, agreed.uses, self._lanes
        numbers: list[int] = []
        if self._comm.rank == 0:
            halves = self._goes_past == "halves"
            plan = message_plan.plan(
                sizes, kinds, ready, uses, cost, lanes=lanes, halves=halves
            )
            ours = message_plan.period(plan, sizes, ready, uses, cost, lanes=lanes)
            place = {index: position for position, index in enumerate(order)}
            groups = [[place[index] for index in group] for group in settled.groups]
            theirs = rules.finish_groups(groups, sizes, ready, cost, lanes=lanes)
            if ours < theirs * (1 - REPEATABLE):
                numbers = to_numbers(plan)
        numbers = self._ranks.told_by_rank_0(numbers)
        if not numbers:
            return None
        plan = from_numbers(numbers, len(order))
        groups = [[order[position] for position in group] for group in plan.groups]
        return Side(groups, plan.messages)

    def _fixed(self, groups: Groups, uses: Sequence[float]) -> Side:
        """Each bucket as one message, or in halves; *uses* by index."""
        halves = self._goes_past == "halves"
        return Side(groups, message_plan.fixed(groups, uses, halves=halves).messages)

    def _use(self, side: Side) -> bool:
        """Returns whether that changes anything."""
        if side == Side(self.groups, self.sending):
            return False
        self.groups, self.sending = side.groups, side.sending
        self._planned(len(side.groups), False)
        return True

    @property
    def _in_order(self) -> tuple[list[int], list[Hashable]]:
        """Sizes and kinds in ready order."""
        order = self._passes.order
        return [self._sizes[i] for i in order], [self._kinds[i] for i in order]

    @property
    def _lanes(self) -> int:
        return self._comm.lanes(self._device)

    def _sum(self, value: float) -> float:
        return self._ranks.sums(value)[0]
