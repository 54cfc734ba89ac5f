"""In which buckets one training sends its gradients: found out while it trains.

The first backward pass shows the order in which gradients become ready; rank 0's counts
for all. Rules that know only sizes are then settled. ``mg-wfbp`` and ``optimal`` measure:
a few steps with DDP's buckets tell when each gradient is ready (medians over steps, then
the maximum over ranks), a few all-reduces what a message costs, and rank 0 plans. For
``optimal`` the plan and DDP's are then tried in turn, and the faster stays. Now and then
ranks compare notes: where the order, or the time of a step, has changed for good, all of
this happens again.

All ranks are at the same point of this program after the same backward pass, and all that
they decide by is either the same on all of them or rank 0's.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline import fusion
from paceline.fusion.measure import measure_mean
from paceline.fusion.trial import Verdict, judge
from paceline.interfaces import Comm, Message, Pending, Stopwatch

PROFILED_STEPS = 4
TRIAL_STEPS = 4
"""Steps with one side of a trial, the first of which does not count."""

WATCH_EVERY = 50
WATCHED_STEPS = 8
CHANGED = 1.25
"""A step that takes longer, or is shorter, by this factor..."""

CHANGED_WINDOWS = 2
"""...in so many windows in a row has changed for good."""

Groups = list[list[int]]


@dataclass
class Pass:
    """What one backward pass showed on this rank; empty where a rank only kept company."""

    start: Any = None
    order: list[int] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    end: Any = None


class Planner:
    """Decides the buckets of one training, in step on all ranks.

    *sizes* (bytes) and *kinds* are those of the parameters, by index; *rule* is one of
    `fusion.RULES` or lengths. *blank* makes buffers to measure with; *planned* is told the
    number of buckets and whether measuring is over, *say* what people should know. *mean*
    forms one as training does, to be timed.
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
        past_backward: bool = False,
    ) -> None:
        self._comm = comm
        self._rule = fusion.check_rule(rule)
        self._lock_step, self._past_backward = lock_step, past_backward
        self._measures = rule in fusion.MEASURED and comm.size > 1 and lock_step
        self._fixed_rule = "ddp" if rule in fusion.MEASURED else rule
        self._sizes, self._kinds = list(sizes), list(kinds)
        self._device, self._stopwatch, self._blank = device, stopwatch, blank
        self._planned, self._say, self._mean = planned, say, mean
        self.listening = True
        """Whether the next backward pass is timed."""
        self.sending: Sequence[Message] | None = None
        """In which messages a method that goes past backward sends; None: it does not."""
        self._pass = Pass()
        self._order = list(range(len(sizes)))[::-1]
        self.groups: Groups = []
        """Each bucket's parameters, as indices, in the order of delivery."""
        self._use(self._by_rule(self._fixed_rule))
        self._program = self._run() if lock_step else itertools.repeat(False)
        if not lock_step:
            self.listening = False
            planned(len(self.groups), True)

    # ---- what training tells ----

    def step_begins(self) -> None:
        """A forward pass begins that belongs to the next backward pass."""
        if self.listening:
            self._pass = Pass(start=self._stopwatch.mark())

    def gradient_ready(self, index: int) -> None:
        """The gradient of a parameter is there."""
        if not self.listening:
            return
        self._pass.order.append(index)
        self._pass.marks.append(self._stopwatch.mark())

    def backward_ended(self) -> bool:
        """Every rank is through with a backward pass. Returns whether `groups` has
        changed. Collective."""
        if self.listening and self._pass.start is not None:
            self._pass.end = self._stopwatch.mark()
        changed = next(self._program)
        self._pass = Pass()
        return changed

    # ---- the program: each yield is the end of one backward pass ----

    def _run(self) -> Iterator[bool]:
        changed = self._learn_order()
        while self._measures:
            yield changed
            changed = yield from self._plan()
            self._planned(len(self.groups), True)
            yield changed
            yield from self._watch()
            changed = self._learn_order()
        self._planned(len(self.groups), True)
        self.listening = False
        if self._past_backward and self._comm.size > 1:
            self.sending = [Message(number) for number in range(len(self.groups))]
        while True:
            yield changed
            changed = False

    def _learn_order(self) -> bool:
        """Take rank 0's ready order. Returns whether groups have changed."""
        self._planned(len(self.groups), False)
        mine = self._seen_order()
        theirs = self._from_rank_0(mine or self._order)
        if self._measures and self._sum(float(bool(mine) and mine != theirs)):
            self._say(
                "fusion: gradients become ready in another order on some ranks than on "
                "rank 0, so nothing can be planned for all: DDP's rule is used"
            )
            self._measures = False
        self._order = theirs
        return self._use(self._by_rule(self._fixed_rule))

    def _plan(self) -> Generator[bool, None, bool]:
        """Measure, plan, and try. Returns whether groups have changed."""
        ready: list[list[float]] = []
        for step in range(PROFILED_STEPS):
            times = self._ready_times()
            if times is not None:
                ready.append(times)
            if step + 1 < PROFILED_STEPS:
                yield False
        times = self._agreed_times(ready)
        if times is None:
            return False
        cost = measure_mean(
            self._comm,
            sum(self._sizes),
            self._device,
            self._stopwatch,
            self._blank,
            self._mean,
        )
        planned = self._by_rule(self._rule, times, cost)
        plain = self._by_rule("ddp")
        if self._rule == "optimal" and planned != plain:
            planned = yield from self._try(planned, plain)
        return self._use(planned)

    def _try(self, planned: Groups, plain: Groups) -> Generator[bool, None, Groups]:
        """Steps with each side in turn; returns the side to keep."""
        ratios: list[float] = []
        sides: list[tuple[float, float]] = []
        verdict: Verdict | None = None
        while verdict is None:
            means, spread = [], 0.0
            for side in (planned, plain):
                yield self._use(side)  # the step that follows does not count
                times = []
                for _ in range(TRIAL_STEPS - 1):
                    yield False
                    times += self._duration()
                middle = statistics.median(times) if times else 0.0
                wide = (max(times) - min(times)) / middle if middle else 0.0
                total, spreads, ranks = self._sums(middle, wide, float(bool(times)))
                means.append(total / ranks if ranks else 0.0)
                spread = max(spread, spreads / ranks if ranks else 0.0)
            sides.append((means[0], means[1]))
            ratios.append(means[0] / means[1] if means[1] else 1.0)
            verdict = judge(ratios, spread)
        ours, theirs = (statistics.median(side) for side in zip(*sides, strict=True))
        self._say(
            f"fusion: {_buckets(planned)} planned from measured times, "
            f"{1e3 * ours:.4g} ms a pass in a trial (one forward, one backward, and "
            f"waiting for its means); DDP's rule, {_buckets(plain)}, "
            f"{1e3 * theirs:.4g} ms: {verdict.why}"
        )
        return planned if verdict.better else plain

    def _watch(self) -> Iterator[bool]:
        """Returns when the order, or the time of a step, has changed for good."""
        usual: float | None = None
        strange = 0
        while strange < CHANGED_WINDOWS:
            self.listening = False
            for _ in range(WATCH_EVERY - WATCHED_STEPS):
                yield False
            self.listening = True
            times: list[float] = []
            orders: Counter[tuple[int, ...]] = Counter()
            for _ in range(WATCHED_STEPS):
                yield False
                times += self._duration()
                orders[tuple(self._seen_order())] += 1
            middle = statistics.median(times) if times else 0.0
            # A model whose order varies has not changed it for good: most passes must
            # agree on another one.
            order, count = orders.most_common(1)[0]
            other = count > WATCHED_STEPS / 2 and list(order) not in ([], self._order)
            total, disordered, ranks = self._sums(
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
            "fusion: the order of gradients or the time of a step has changed: measuring "
            "again"
        )

    # ---- what is measured ----

    def _seen_order(self) -> list[int]:
        """The order of this pass, empty if there was no gradient. Tensors that took no
        part are ready when it ends, in the order that they had so far."""
        seen = set(self._pass.order)
        if not seen:
            return []
        return self._pass.order + [i for i in self._order if i not in seen]

    def _ready_times(self) -> list[float] | None:
        """Seconds from the step's start to each gradient, in ready order; None if this
        pass was not like the planned one."""
        this = self._pass
        if this.start is None or self._seen_order() != self._order:
            return None
        times = self._stopwatch.seconds(this.start, this.marks)
        return times + times[-1:] * (len(self._order) - len(times))

    def _duration(self) -> list[float]:
        """Seconds from the step's start until its gradients were averaged, in a list that
        is empty if this rank only kept company."""
        this = self._pass
        if this.start is None or not this.order:
            return []
        return self._stopwatch.seconds(this.start, [this.end])

    def _agreed_times(self, ready: Sequence[Sequence[float]]) -> list[float] | None:
        """Medians over steps, then the maximum over ranks."""
        count = len(self._order)
        middle = [statistics.median(times) for times in zip(*ready, strict=True)]
        times = torch.tensor(
            middle or [-1.0] * count, dtype=torch.float64, device=self._device
        )
        self._comm.all_reduce(times, "max").wait()
        agreed = list(itertools.accumulate(times.tolist(), max))
        return agreed if agreed[0] >= 0 else None

    # ---- what ranks agree on ----

    def _by_rule(
        self, rule: str, times: Sequence[float] = (), cost: fusion.Cost | None = None
    ) -> Groups:
        order = self._order
        groups = fusion.group(
            rule,
            [self._sizes[i] for i in order],
            [self._kinds[i] for i in order],
            times,
            cost,
            lanes=self._comm.lanes(self._device) if cost else 1,
        )
        groups = [[order[position] for position in group] for group in groups]
        if cost is None:
            return groups  # from what is equal on all ranks
        bucket_of = [0] * len(order)
        for number, group in enumerate(groups):
            for index in group:
                bucket_of[index] = number
        bucket_of = self._from_rank_0(bucket_of)
        agreed: Groups = [[] for _ in range(max(bucket_of) + 1)]
        for index in order:
            agreed[bucket_of[index]].append(index)
        return agreed

    def _use(self, groups: Groups) -> bool:
        """Returns whether that changes anything."""
        if groups == self.groups:
            return False
        self.groups = groups
        self._planned(len(groups), False)
        return True

    def _from_rank_0(self, values: Sequence[int]) -> list[int]:
        """Rank 0's *values* on all ranks. A sum with zeros, not a broadcast: all ranks
        leave it together, and the next steps are not skewed by who sat where in a tree."""
        numbers = torch.tensor(values, dtype=torch.int64, device=self._device)
        if self._comm.rank != 0:
            numbers.zero_()
        self._comm.all_reduce(numbers, "sum").wait()
        agreed: list[int] = numbers.tolist()
        return agreed

    def _sums(self, *values: float) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._comm.all_reduce(numbers, "sum").wait()
        sums: list[float] = numbers.tolist()
        return sums

    def _sum(self, value: float) -> float:
        return self._sums(value)[0]


def _buckets(groups: Groups) -> str:
    return f"{len(groups)} bucket" + ("s" if len(groups) != 1 else "")
