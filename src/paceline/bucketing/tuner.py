"""Tunes the buckets of a training by measurements, while it trains.

The first backward pass shows the order in which gradients become ready, and all ranks use rank 0's
order. Rules that need only sizes are then final. The rules ``mg-wfbp`` and ``optimal`` measure:

1. The tuner times a few steps with DDP's buckets. The ready time of a gradient is the median over
   steps, then the maximum over ranks.
2. It measures the cost of a message with a few all-reduces.
3. Rank 0 plans buckets.
4. For ``optimal``, the tuner tries the plan and DDP's buckets in turn, and keeps the faster one.
5. If the method waits in the next forward pass, rank 0 also plans messages, by the time at which
   each tensor is used. The tuner tries this plan and the buckets of step 4 in turn.
6. Ranks compare step times at intervals. If the order of gradients or the step time has changed
   for long, the tuner starts again.

`BucketTuner._run` is a generator: each ``yield`` is the end of one backward pass. All ranks are at
the same line of it after the same backward pass. Every decision comes from numbers that are equal
on all ranks, or from rank 0.

- `BucketTuner`: the tuner of one training; start here.
- `Trial`, `decide`: compare two plans.
- `RankAgreement`: numbers that are equal on all ranks.
- `to_numbers`, `from_numbers`: a message plan as whole numbers, to send it to other ranks.
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
"""Text that only the reports about trials of two plans contain."""
PROFILED_STEPS = 4
"""Steps whose ready times are measured before planning."""
TRIAL_STEPS = 4
"""Steps with one plan of a trial, of which the first does not count."""
REPEATED_STEPS, FORWARD_WAIT_STEPS = 2, 3
"""The values of `TRIAL_STEPS` if times repeat exactly.

One measured step is then enough. The second value is for methods that wait in the next forward pass.
"""


@dataclass
class Watch:
    """How often ranks compare step times: once in *every* steps, over the last *steps* of them."""

    every: int = 50
    steps: int = 8


watch = Watch()
"""The interval of step-time comparisons for all trainings of this process."""
CHANGED = 1.25
"""The factor of a longer or shorter step time from which it counts as changed."""

CHANGED_WINDOWS = 2
"""The number of changed windows in a row after which the tuner starts again."""

ROUNDS = 4
"""The most rounds of a trial."""
REPEATABLE = 1e-6
"""The relative spread below which times count as exact, as in a simulated runtime without jitter."""

CLEAR = 3.0
NOISE = 0.05
"""The difference that ends a trial after its first round.

It exceeds both `CLEAR` spreads and a share of `NOISE` of the time.
"""

WORTH_IT = 0.97
"""A new plan must take less than this share of the old plan's time, unless times are exact."""

Mode = Literal["barrier", "whole", "halves"]
"""Where a method waits for averages.

- ``barrier``: at the end of backward.
- ``whole``: in the next forward pass, with averages sent in parts.
- ``halves``: in the next forward pass, for both halves of each all-reduce.
"""

HALVES: tuple[Half, ...] = ("all", "scatter", "gather")
"""The values of a message's `half`, numbered for `to_numbers`."""


@dataclass(frozen=True)
class Gradients:
    """Describes the gradients of a model, by the index of their parameter.

    Attributes:
        sizes: Bytes of each gradient.
        kinds: Dtype and device of each gradient, as any hashable value: a bucket has one kind.
        device: The device of the tensors by which ranks agree on numbers.
    """

    sizes: Sequence[int]
    kinds: Sequence[Hashable]
    device: torch.device


@dataclass(frozen=True)
class BucketPlan:
    """The buckets that a training uses, and their messages.

    Attributes:
        buckets: Each bucket's parameters, as indices, in the order of delivery.
        messages: The messages that overlap the next forward pass. None: the method waits for
            buckets at the end of backward.
    """

    buckets: list[list[int]]
    messages: tuple[Message, ...] | None = None

    def __str__(self) -> str:
        buckets = _counted(len(self.buckets), "bucket")
        if self.messages is None:
            return buckets
        return f"{buckets} in {_counted(len(self.messages), 'message')}"


class BucketTuner:
    """Chooses the buckets of one training, at the same steps on all ranks.

    Args:
        comm: The communicator that training uses.
        gradients: The model's gradients.
        rule: One of `rules.RULES`, or lengths such as ``"3+5+2"``.
        runtime: The runtime, whose recorder counts buckets and whose stopwatch takes times.
        all_reduce: Starts an all-reduce as training does, with its compression. The tuner times it.
        report: Prints a sentence for the user.
        mode: Where the method waits for averages.
        every_step: Whether ranks communicate in every step. If not, the tuner measures nothing. Buckets
            are then the rule's, or DDP's if the rule measures, for parameters in reverse order.
        warmup: Steps before measuring begins, because the first steps take other times.

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
        """The last plan that was measured and adopted, as an argument of `reuse`."""
        self._reused: BucketPlan | None = None
        self._use(BucketPlan(self._by_rule(self._fixed_rule)))
        self._program = self._run() if every_step else itertools.repeat(False)
        if not every_step:
            self.timer.listening = False
            self._record(final=True)

    def reuse(self, plan: BucketPlan | None) -> None:
        """Begin with the plan that another training of the same model and spec has adopted.

        The tuner measures again only if the training has changed. Call this on all ranks, before
        the first pass.

        Args:
            plan: The `adopted` plan of that training; None: begin without a plan.
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
        """Return the measured cost of an all-reduce as training performs it. Collective."""
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
            self._record(final=True)
            yield changed
            yield from self._watch()
            changed = self._learn_order()
        self._record(final=True)
        self.timer.listening = False
        while True:
            yield changed
            changed = False

    def _learn_order(self) -> bool:
        """Adopt rank 0's ready order, and return whether the plan has changed."""
        self._record(final=False)
        timer = self.timer
        mine = timer.seen_order()
        theirs = self._ranks.from_rank_0(mine or timer.order)
        if self._measures and self._sum(float(bool(mine) and mine != theirs)):
            self._report(
                "bucketing: gradients become ready in another order on some ranks than on "
                "rank 0, so no plan fits all ranks: DDP's rule is used"
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
        """Measure, plan and try plans, and return whether the plan has changed."""
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
        chosen = BucketPlan(self._by_rule(self._rule, agreed.ready, cost))
        if self._rule == "optimal":
            chosen = yield from self._try_against_ddp(chosen)
            if self._mode != "barrier":
                chosen = yield from self._try_forward_waits(chosen, agreed, cost)
        elif self._mode != "barrier":
            by_index = dict(zip(self.timer.order, agreed.uses, strict=True))
            uses_of = [by_index[index] for index in range(len(by_index))]
            chosen = self._fixed(chosen.buckets, uses_of)
        return self._use(chosen)

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
        self, chosen: BucketPlan, agreed: AgreedTimes, cost: Cost
    ) -> Generator[bool, None, BucketPlan]:
        """Try a message plan with waits in the next forward pass against the *chosen* plan."""
        planned = self._by_search(chosen, agreed, cost)
        if planned is None:
            return chosen
        # A message plan moves updates and waits into the forward pass, so the trial compares
        # whole steps.
        trial = yield from self._try(
            planned,
            chosen,
            self.timer.period,
            "the method waits for averages at the end of backward",
        )
        self._report(
            f"bucketing: {planned}, with waits in the next forward pass, "
            f"{trial.new} a step {IN_A_TRIAL}(from one backward pass's end to the next "
            f"one's); {chosen}, with waits at the end of backward, {trial.old}: "
            f"{trial.verdict.why}"
        )
        return planned if trial.verdict.better else chosen

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
                # The first step with another plan does not count.
                yield self._use(plan)
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
        """Compare step times, and return when they or the order of gradients have changed for long."""
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
            # The order of some models varies from pass to pass. It counts as changed only if most
            # passes agree on another order.
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
        """Return medians over steps, then the maximum over ranks, since the slowest rank sets the pace."""
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
        # Without a cost, buckets depend only on numbers that are equal on all ranks.
        if cost is None:
            return buckets
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
        self, chosen: BucketPlan, agreed: AgreedTimes, cost: Cost
    ) -> BucketPlan | None:
        """Return rank 0's message plan; None unless its predicted step is shorter than *chosen*'s."""
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
            buckets = [[place[index] for index in bucket] for bucket in chosen.buckets]
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
        """Plan each bucket as one message or as two halves; *uses* is by parameter index."""
        halves = self._mode == "halves"
        return BucketPlan(buckets, messages_of(buckets, uses, halves=halves).messages)

    def _use(self, plan: BucketPlan) -> bool:
        """Use *plan*, and return whether it differs from the plan in use."""
        if plan == self.plan:
            return False
        self.plan = plan
        self._record(final=False)
        return True

    def _record(self, *, final: bool) -> None:
        self._runtime.recorder.planned(len(self.plan.buckets), final)

    @property
    def _in_order(self) -> tuple[list[int], list[Hashable]]:
        """Sizes and kinds of gradients in ready order."""
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
        ready: Times at which gradients are ready.
        uses: Times at which tensors are first used; empty if the method waits at the end of backward.
    """

    ready: list[float]
    uses: list[float]


class Trial:
    """Collects the times of a new plan and the plan in use, round by round, and decides between them.

    Args:
        otherwise: A clause for the report that names the plan that stays if the new plan loses.
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
        """The decision; available once the trial is over."""
        assert self._verdict is not None
        return self._verdict

    def add_round(self, new: float, old: float, spread: float) -> None:
        """Add a round.

        Args:
            new: Seconds of the new plan.
            old: Seconds of the plan in use.
            spread: The relative spread of the times of the round.
        """
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
    """The decision of a trial.

    Attributes:
        better: Whether the new plan replaces the plan in use.
        why: A clause that names the reason and the plan that is used.
    """

    better: bool
    why: str


def decide(
    ratios: Sequence[float],
    spread: float,
    otherwise: str = "DDP's rule is kept",
    what: str = "the plan",
) -> Verdict | None:
    """Decide a trial of a new plan against the one in use.

    A round uses each plan for some steps. If times repeat exactly, one round decides. Otherwise, the
    new plan must win every round, and clearly, since small gains in a noisy trial are often chance.

    Args:
        ratios: The new plan's time divided by the other plan's, for each round.
        spread: The relative spread of times in the last round.
        otherwise: A clause that names the plan that stays if the new plan is not used.
        what: The new plan's name.

    Returns:
        The decision; None if another round is needed.
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
    """Makes numbers equal on all ranks of *comm*. Every method is collective."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device

    def from_rank_0(self, values: Sequence[int]) -> list[int]:
        """Return rank 0's *values*; every rank must pass the same number of values.

        This is a sum with zeros instead of a broadcast. All ranks leave a sum together. Their places
        in a broadcast's tree would skew the next steps.
        """
        numbers = torch.tensor(values, dtype=torch.int64, device=self._device)
        if self._comm.rank != 0:
            numbers.zero_()
        self._comm.all_reduce(numbers, "sum").wait()
        agreed: list[int] = numbers.tolist()
        return agreed

    def list_from_rank_0(self, values: Sequence[int]) -> list[int]:
        """Return rank 0's *values* if other ranks do not know their number."""
        (count,) = self.from_rank_0([len(values)])
        mine = values if self._comm.rank == 0 else [0] * count
        return self.from_rank_0(mine) if count else []

    def sums(self, *values: float) -> list[float]:
        """Return each value's sum over ranks."""
        return self._all(values, "sum")

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over ranks."""
        return self._all(values, "max")

    def _all(self, values: Sequence[float], operation: ReduceOperation) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._comm.all_reduce(numbers, operation).wait()
        agreed: list[float] = numbers.tolist()
        return agreed


def to_numbers(plan: MessagePlan) -> list[int]:
    """Encode a plan as whole numbers: the bucket of each position, then four numbers for each message."""
    bucket_of = {
        p: number for number, bucket in enumerate(plan.buckets) for p in bucket
    }
    numbers = [bucket_of[position] for position in range(len(bucket_of))]
    for message in plan.messages:
        parts = round(message.start * UNITS), round(message.stop * UNITS)
        numbers += [message.bucket, *parts, HALVES.index(message.half)]
    return numbers


def from_numbers(numbers: Sequence[int], count: int) -> MessagePlan:
    """Decode a plan of *count* tensors from the numbers of `to_numbers`."""
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
