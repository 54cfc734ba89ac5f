"""The bucket tuner: chooses the buckets of a training by measurements, while it trains.

The first backward pass shows the order in which gradients become ready; rank 0's order counts for
all. Rules that need sizes alone are then final. ``mg-wfbp`` and ``optimal`` measure:

1. A few steps with DDP's buckets show when each gradient is ready: medians over steps, then the
   maximum over ranks.
2. A few all-reduces show the cost of a message.
3. Rank 0 plans.
4. For ``optimal``, the plan and DDP's buckets are tried in turn, and the faster one stays.
5. If the method waits in the next forward pass, rank 0 also plans messages, by when each tensor is
   used. This plan and the buckets of step 4 are tried in turn, too.
6. From time to time, ranks compare step times. If the order of gradients or the step time has
   changed lastingly, the tuner starts again.

`BucketTuner._run` is a generator: each ``yield`` is the end of one backward pass. After the same
backward pass, all ranks are at the same line of it. Every decision comes from numbers that are
equal on all ranks, or from rank 0.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.bucketing.cost_models import Cost, MeasuredCost
from paceline.bucketing.measure import StepTimer, measure_all_reduce
from paceline.bucketing.message_plan import UNITS, MessagePlan, messages_of, period
from paceline.bucketing.message_search import plan_messages
from paceline.bucketing.rules import MEASURED, check_rule, plan_buckets
from paceline.bucketing.timeline import finish_time
from paceline.interfaces import Comm, Half, Message, Pending, ReduceOperation, Runtime

IN_A_TRIAL = "in a trial "
"""Text that marks the notes about trials of two plans, and no others."""
PROFILED_STEPS = 4
TRIAL_STEPS = 4
"""Steps with one plan of a trial, the first of which does not count."""
REPEATED_STEPS, FORWARD_WAIT_STEPS = 2, 3
"""`TRIAL_STEPS` if times repeat exactly, as one profiled step is then enough. The second value is
for methods that wait in the next forward pass."""


@dataclass
class Watch:
    """Step times are compared once in *every* steps, over the last *steps* of them."""

    every: int = 50
    steps: int = 8


watch = Watch()
"""The watch of all trainings of this process."""
CHANGED = 1.25
"""A step time counts as changed if it is longer or shorter by this factor."""

CHANGED_WINDOWS = 2
"""The number of changed windows in a row after which the tuner starts again."""

ROUNDS = 4
REPEATABLE = 1e-6
"""The relative spread below which times count as exact: a simulated runtime without jitter."""

CLEAR = 3.0
NOISE = 0.05
"""A difference of more than `CLEAR` spreads, and more than `NOISE` of the time, ends a trial after
its first round."""

WORTH_IT = 0.97
"""A new plan must take less than this part of the old plan's time, unless times are exact."""

Mode = Literal["barrier", "whole", "halves"]
"""Where averages are waited for.

``barrier``: where backward ends. ``whole``: in the next forward pass, with averages sent in parts.
``halves``: in the next forward pass, for both halves of each all-reduce.
"""

HALVES: tuple[Half, ...] = ("all", "scatter", "gather")


@dataclass(frozen=True)
class Gradients:
    """The gradients of a model, by the index of their parameter.

    Attributes:
        sizes: Bytes of each.
        kinds: Dtype and device of each, in any form: a bucket has one kind.
        device: Where ranks agree on numbers.
    """

    sizes: Sequence[int]
    kinds: Sequence[Hashable]
    device: torch.device


@dataclass(frozen=True)
class BucketPlan:
    """A plan that can be used.

    Attributes:
        buckets: Each bucket's parameters, as indices, in the order of delivery.
        messages: In which messages buckets travel past backward; None: they are waited for where
            backward ends.
    """

    buckets: list[list[int]]
    messages: tuple[Message, ...] | None = None

    def __str__(self) -> str:
        buckets = _counted(len(self.buckets), "bucket")
        if self.messages is None:
            return buckets
        return f"{buckets} in {_counted(len(self.messages), 'message')}"


class BucketTuner:
    """Decides the buckets of one training, in step on all ranks.

    Args:
        comm: The communicator that training uses.
        gradients: The model's gradients.
        rule: One of `rules.RULES`, or lengths such as ``"3+5+2"``.
        runtime: Its recorder counts buckets; its stopwatch and its buffers measure.
        all_reduce: Starts an all-reduce as training does, with its compression. It is timed.
        report: Prints a sentence for the user.
        mode: Where the method waits for averages.
        every_step: Whether ranks communicate in every step. If not, nothing is measured. Buckets are then
            the rule's, or DDP's if the rule measures, for parameters in reverse order.
        warmup: Steps before measuring begins, because they differ from later ones.

    Raises:
        UsageError: The rule is unknown, or its lengths do not fit the model.
    """

    def __init__(
        self,
        comm: Comm,
        gradients: Gradients,
        rule: str,
        runtime: Runtime,
        all_reduce: Callable[[torch.Tensor], Pending],
        report: Callable[[str], None],
        *,
        mode: Mode = "barrier",
        every_step: bool = True,
        warmup: int = 0,
    ) -> None:
        self._comm, self._gradients, self._rule = comm, gradients, check_rule(rule)
        self._runtime, self._all_reduce, self._report = runtime, all_reduce, report
        self._warmup = warmup
        together = comm.size > 1 and every_step
        self._measures = rule in MEASURED and together
        self._fixed_rule = "ddp" if rule in MEASURED else rule
        self._mode: Mode = mode if together else "barrier"
        self._ranks = RankAgreement(comm, gradients.device)
        stopwatch = runtime.clock.stopwatch(gradients.device)
        self._repeats = stopwatch.repeats
        self.timer = StepTimer(stopwatch, range(len(gradients.sizes))[::-1])
        """Listens to the training's events."""
        self.plan = BucketPlan([])
        """The plan in use."""
        self.adopted: BucketPlan | None = None
        """The last plan that was measured and adopted: for `reuse`."""
        self._reused: BucketPlan | None = None
        self._use(BucketPlan(self._by_rule(self._fixed_rule)))
        self._program = self._run() if every_step else itertools.repeat(False)
        if not every_step:
            self.timer.listening = False
            self._record(settled=True)

    def reuse(self, plan: BucketPlan | None) -> None:
        """Begin with the plan that another training of the same model and spec has adopted.

        It is measured again only when the training has changed. Call it before the first pass, on
        all ranks.
        """
        self._reused = plan

    def backward_ended(self) -> bool:
        """End a backward pass, on all ranks. Collective.

        Returns:
            Whether `plan` has changed.
        """
        self.timer.ended()
        changed = next(self._program)
        self.timer.forget()
        return changed

    def measure_cost(self) -> MeasuredCost:
        """Measure the cost of an all-reduce as training performs it. Collective."""
        gradients = self._gradients
        return measure_all_reduce(
            self._comm,
            self._runtime,
            gradients.device,
            sum(gradients.sizes),
            self._all_reduce,
        )

    # ---- the state machine: each yield is the end of one backward pass ----

    def _run(self) -> Iterator[bool]:
        changed = self._learn_order()
        for _ in range(self._warmup if self._measures else 0):
            yield changed
            changed = False
        while self._measures:
            yield changed
            reused, self._reused = self._reused, None
            changed = self._use(reused) if reused else (yield from self._plan())
            self.adopted = self.plan
            self._record(settled=True)
            yield changed
            yield from self._watch()
            changed = self._learn_order()
        self._record(settled=True)
        self.timer.listening = False
        while True:
            yield changed
            changed = False

    def _learn_order(self) -> bool:
        """Use rank 0's ready order. Return whether the plan has changed."""
        self._record(settled=False)
        timer = self.timer
        mine = timer.seen_order()
        theirs = self._ranks.from_rank_0(mine or timer.order)
        if self._measures and self._sum(float(bool(mine) and mine != theirs)):
            self._report(
                "bucketing: gradients become ready in another order on some ranks than on "
                "rank 0, so nothing can be planned for all: DDP's rule is used"
            )
            self._measures = False
        timer.order = theirs
        buckets = self._by_rule(self._fixed_rule)
        if self._mode == "barrier" or self._rule in MEASURED:
            return self._use(BucketPlan(buckets))
        uses: Sequence[float] = ()
        if self._mode == "halves":
            uses = self._ranks.from_rank_0(timer.use_order())
        return self._use(self._fixed(buckets, uses))

    def _plan(self) -> Generator[bool, None, bool]:
        """Measure, plan, and try. Return whether the plan has changed."""
        ready: list[list[float]] = []
        uses: list[list[float]] = []
        steps = 1 if self._repeats else PROFILED_STEPS
        for step in range(steps):
            times = self.timer.ready_times()
            if times is not None:
                ready.append(times)
                uses.append(self.timer.use_times())
            if step + 1 < steps:
                yield False
        agreed = self._agreed_times(ready, uses)
        if agreed is None:
            return False
        cost = self.measure_cost()
        settled = BucketPlan(self._by_rule(self._rule, agreed.ready, cost))
        if self._rule == "optimal":
            settled = yield from self._try_against_ddp(settled)
            if self._mode != "barrier":
                settled = yield from self._try_forward_waits(settled, agreed, cost)
        elif self._mode != "barrier":
            by_index = dict(zip(self.timer.order, agreed.uses, strict=True))
            uses_of = [by_index[index] for index in range(len(by_index))]
            settled = self._fixed(settled.buckets, uses_of)
        return self._use(settled)

    def _try_against_ddp(
        self, planned: BucketPlan
    ) -> Generator[bool, None, BucketPlan]:
        plain = BucketPlan(self._by_rule("ddp"))
        if planned == plain:
            return plain
        trial = yield from self._try(
            planned, plain, self.timer.duration, "DDP's rule is kept"
        )
        self._report(
            f"bucketing: {planned} planned from measured times, {trial.new} a pass {IN_A_TRIAL}"
            f"(one forward, one backward, and waiting for its averages); DDP's rule, {plain}, "
            f"{trial.old}: {trial.verdict.why}"
        )
        return planned if trial.verdict.better else plain

    def _try_forward_waits(
        self, settled: BucketPlan, agreed: AgreedTimes, cost: Cost
    ) -> Generator[bool, None, BucketPlan]:
        """Try a message plan for waits in the next forward pass against the plan *settled*."""
        planned = self._by_search(settled, agreed, cost)
        if planned is None:
            return settled
        # A message plan moves updates and waits into the forward pass, so whole steps are
        # compared.
        trial = yield from self._try(
            planned,
            settled,
            self.timer.period,
            "means are waited for where backward ends",
        )
        self._report(
            f"bucketing: {planned}, waited for where the next forward pass uses them, "
            f"{trial.new} a step {IN_A_TRIAL}(from one backward pass's end to the next "
            f"one's); waited for where backward ends, {settled}, {trial.old}: "
            f"{trial.verdict.why}"
        )
        return planned if trial.verdict.better else settled

    def _try(
        self,
        new: BucketPlan,
        old: BucketPlan,
        seconds: Callable[[], list[float]],
        otherwise: str,
    ) -> Generator[bool, None, Trial]:
        """Use each plan for some steps in turn, until the trial is decided."""
        trial = Trial(otherwise)
        while not trial.is_over:
            means, spread = [], 0.0
            for plan in (new, old):
                yield self._use(plan)  # the step that follows does not count
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
        if not self._repeats:
            return TRIAL_STEPS
        return REPEATED_STEPS if self._mode == "barrier" else FORWARD_WAIT_STEPS

    def _watch(self) -> Iterator[bool]:
        """Return when the order of gradients or the step time has changed lastingly."""
        timer = self.timer
        usual: float | None = None
        strange = 0
        while strange < CHANGED_WINDOWS:
            timer.listening = False
            for _ in range(watch.every - watch.steps):
                yield False
            timer.listening = True
            times: list[float] = []
            orders: Counter[tuple[int, ...]] = Counter()
            for _ in range(watch.steps):
                yield False
                times += (
                    timer.duration() if self.plan.messages is None else timer.period()
                )
                orders[tuple(timer.seen_order())] += 1
            middle = statistics.median(times) if times else 0.0
            # In a model whose order always varies, that is no change: most passes must agree on
            # another order.
            order, count = orders.most_common(1)[0]
            other = count > watch.steps / 2 and list(order) not in ([], timer.order)
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
        self._report(
            "bucketing: the order of gradients or the time of a step has changed: measuring "
            "again"
        )

    # ---- agreement between ranks ----

    def _agreed_times(
        self, ready: Sequence[Sequence[float]], uses: Sequence[Sequence[float]]
    ) -> AgreedTimes | None:
        """Medians over steps, then the maximum over ranks: the slowest rank sets the pace."""
        count = len(self.timer.order)
        mine = [statistics.median(times) for times in zip(*ready, strict=True)]
        if self._mode != "barrier":
            mine += [statistics.median(times) for times in zip(*uses, strict=True)]
        both = count if self._mode == "barrier" else 2 * count
        times = self._ranks.maxima(mine or [-1.0] * both)
        if times[0] < 0:
            return None
        return AgreedTimes(
            list(itertools.accumulate(times[:count], max)), times[count:]
        )

    def _by_rule(
        self, rule: str, times: Sequence[float] = (), cost: Cost | None = None
    ) -> list[list[int]]:
        order = self.timer.order
        buckets = plan_buckets(
            rule,
            *self._in_order,
            times,
            cost,
            max_in_flight=self._max_in_flight if cost else 1,
        )
        buckets = [[order[position] for position in bucket] for bucket in buckets]
        if cost is None:
            return buckets  # computed from numbers that are equal on all ranks
        bucket_of = [0] * len(order)
        for number, bucket in enumerate(buckets):
            for index in bucket:
                bucket_of[index] = number
        bucket_of = self._ranks.from_rank_0(bucket_of)
        agreed: list[list[int]] = [[] for _ in range(max(bucket_of) + 1)]
        for index in order:
            agreed[bucket_of[index]].append(index)
        return agreed

    def _by_search(
        self, settled: BucketPlan, agreed: AgreedTimes, cost: Cost
    ) -> BucketPlan | None:
        """Rank 0's message plan; None unless its predicted step is shorter than that of the plan
        *settled*."""
        order, (sizes, kinds) = self.timer.order, self._in_order
        ready, uses, max_in_flight = agreed.ready, agreed.uses, self._max_in_flight
        numbers: list[int] = []
        if self._comm.rank == 0:
            halves = self._mode == "halves"
            plan = plan_messages(
                sizes,
                kinds,
                ready,
                uses,
                cost,
                max_in_flight=max_in_flight,
                halves=halves,
            )
            ours = period(plan, sizes, ready, uses, cost, max_in_flight=max_in_flight)
            place = {index: position for position, index in enumerate(order)}
            buckets = [[place[index] for index in bucket] for bucket in settled.buckets]
            theirs = finish_time(
                buckets, sizes, ready, cost, max_in_flight=max_in_flight
            )
            if ours < theirs * (1 - REPEATABLE):
                numbers = to_numbers(plan)
        numbers = self._ranks.list_from_rank_0(numbers)
        if not numbers:
            return None
        plan = from_numbers(numbers, len(order))
        buckets = [[order[position] for position in bucket] for bucket in plan.buckets]
        return BucketPlan(buckets, plan.messages)

    def _fixed(self, buckets: list[list[int]], uses: Sequence[float]) -> BucketPlan:
        """Each bucket as one message, or in halves; *uses* is by index."""
        halves = self._mode == "halves"
        return BucketPlan(buckets, messages_of(buckets, uses, halves=halves).messages)

    def _use(self, plan: BucketPlan) -> bool:
        """Use *plan*. Return whether it differs from the one in use."""
        if plan == self.plan:
            return False
        self.plan = plan
        self._record(settled=False)
        return True

    def _record(self, *, settled: bool) -> None:
        self._runtime.recorder.planned(len(self.plan.buckets), settled)

    @property
    def _in_order(self) -> tuple[list[int], list[Hashable]]:
        """Sizes and kinds in ready order."""
        order, sizes, kinds = (
            self.timer.order,
            self._gradients.sizes,
            self._gradients.kinds,
        )
        return [sizes[i] for i in order], [kinds[i] for i in order]

    @property
    def _max_in_flight(self) -> int:
        return self._comm.max_in_flight(self._gradients.device)

    def _sum(self, value: float) -> float:
        return self._ranks.sums(value)[0]


@dataclass(frozen=True)
class AgreedTimes:
    """Seconds that ranks have agreed on, in ready order.

    Attributes:
        ready: When gradients are ready.
        uses: When tensors are first used; empty if the method waits for averages where backward ends.
    """

    ready: list[float]
    uses: list[float]


class Trial:
    """Rounds in which a new plan and the one in use take turns.

    Args:
        otherwise: Text for the report: the plan that stays if the new one is not used.
    """

    def __init__(self, otherwise: str) -> None:
        self._otherwise = otherwise
        self._rounds: list[tuple[float, float]] = []
        self._verdict: Verdict | None = None

    @property
    def is_over(self) -> bool:
        """Whether the trial is decided."""
        return self._verdict is not None

    @property
    def verdict(self) -> Verdict:
        """The decision, once it is over."""
        assert self._verdict is not None
        return self._verdict

    def add_round(self, new: float, old: float, spread: float) -> None:
        """Add the seconds of both plans, and the relative *spread* of the times behind them."""
        self._rounds.append((new, old))
        ratios = [new / old if old else 1.0 for new, old in self._rounds]
        self._verdict = decide(ratios, spread, self._otherwise)

    @property
    def new(self) -> str:
        """The time of the new plan, as text."""
        return _milliseconds([new for new, _ in self._rounds])

    @property
    def old(self) -> str:
        """The time of the plan in use, as text."""
        return _milliseconds([old for _, old in self._rounds])


@dataclass(frozen=True)
class Verdict:
    """Whether the new plan is *better*, and *why*: a sentence that names the plan in use."""

    better: bool
    why: str


def decide(
    ratios: Sequence[float],
    spread: float,
    otherwise: str = "DDP's rule is kept",
    what: str = "the plan",
) -> Verdict | None:
    """Decide a trial of a new plan against the one in use.

    Both are used for some steps in turn, round after round. Where times repeat exactly, one
    round decides. Where they do not, a plan must win every round, and clearly: small gains in
    a noisy trial are luck as often as not.

    Args:
        ratios: The new plan's time over the other one's, a round each.
        spread: The relative spread of times in the last round.
        otherwise: What stays if the new plan is not used.
        what: The new plan's name.

    Returns:
        None: another round is needed.
    """
    won = sum(ratio < 1 for ratio in ratios)
    if spread < REPEATABLE:
        if ratios[-1] < 1 - REPEATABLE:
            return Verdict(True, f"{what} is used")
        return Verdict(False, f"{what} is no faster, and {otherwise}")
    if len(ratios) == 1 and abs(ratios[0] - 1) > max(CLEAR * spread, NOISE):
        if won:
            return Verdict(True, f"{what} is clearly faster, and is used")
        return Verdict(False, f"{what} is clearly slower, and {otherwise}")
    if len(ratios) < ROUNDS:
        return None
    if won < ROUNDS:
        return Verdict(
            False,
            f"{what} was faster in {won} of {ROUNDS} rounds and must be in all of "
            f"them, so {otherwise}",
        )
    gain = 100 * (1 - statistics.median(ratios))
    if statistics.median(ratios) < WORTH_IT:
        return Verdict(True, f"{what} was faster in all {ROUNDS} rounds, and is used")
    return Verdict(
        False,
        f"{what} was faster in all {ROUNDS} rounds, but by {gain:.1f} %, and must be "
        f"by {100 * (1 - WORTH_IT):.0f} %, so {otherwise}",
    )


class RankAgreement:
    """Numbers that all ranks of *comm* agree on. Every method is collective."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device

    def from_rank_0(self, values: Sequence[int]) -> list[int]:
        """Return rank 0's *values*; every rank passes equally many.

        This is a sum with zeros instead of a broadcast. All ranks leave a sum together, while their
        places in a broadcast's tree would skew the next steps.
        """
        numbers = torch.tensor(values, dtype=torch.int64, device=self._device)
        if self._comm.rank != 0:
            numbers.zero_()
        self._comm.all_reduce(numbers, "sum").wait()
        agreed: list[int] = numbers.tolist()
        return agreed

    def list_from_rank_0(self, values: Sequence[int]) -> list[int]:
        """Rank 0's *values*, where only rank 0 knows how many."""
        (count,) = self.from_rank_0([len(values)])
        mine = values if self._comm.rank == 0 else [0] * count
        return self.from_rank_0(mine) if count else []

    def sums(self, *values: float) -> list[float]:
        """Each value's sum over ranks."""
        return self._all(values, "sum")

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over ranks."""
        return self._all(values, "max")

    def _all(self, values: Sequence[float], operation: ReduceOperation) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._comm.all_reduce(numbers, operation).wait()
        agreed: list[float] = numbers.tolist()
        return agreed


def to_numbers(plan: MessagePlan) -> list[int]:
    """A plan as whole numbers: the bucket of each position, then four of each message."""
    bucket_of = {
        p: number for number, bucket in enumerate(plan.buckets) for p in bucket
    }
    numbers = [bucket_of[position] for position in range(len(bucket_of))]
    for message in plan.messages:
        parts = round(message.start * UNITS), round(message.stop * UNITS)
        numbers += [message.bucket, *parts, HALVES.index(message.half)]
    return numbers


def from_numbers(numbers: Sequence[int], count: int) -> MessagePlan:
    """The plan of *count* tensors that `to_numbers` wrote."""
    buckets: list[list[int]] = [[] for _ in range(max(numbers[:count]) + 1)]
    for position, number in enumerate(numbers[:count]):
        buckets[number].append(position)
    messages = []
    for at in range(count, len(numbers), 4):
        bucket, start, stop, half = numbers[at : at + 4]
        messages.append(Message(bucket, start / UNITS, stop / UNITS, HALVES[half]))
    return MessagePlan(buckets, tuple(messages))


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.4g} ms"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")
