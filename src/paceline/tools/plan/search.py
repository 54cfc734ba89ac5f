"""The plan: every candidate predicted, hopeless ones in a short run only.

1. All candidates of the first round in a short run, of a model with few tensors. Where these may
   not all fit into the budget, those first that are fastest on a few hosts (`promise`).
2. The best of each class with one thing more changed in it, in a short run, too.
3. Those that a short run cannot tell (`says_more_in_full`, or the model has more tensors), and that
   are not `HOPELESS` in their class, in full; what does not fit into the budget is judged by its short
   run.

What it costs is counted (`price`), and not timed, so that all ranks, and all starts, decide alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from paceline.cluster import Cluster, Workload
from paceline.compression import COMPRESSORS
from paceline.errors import UsageError
from paceline.interfaces import CONSISTENCIES, Consistency
from paceline.spec import parse
from paceline.tools.plan.candidate_order import rough
from paceline.tools.plan.candidates import Candidate, crossed, first
from paceline.tools.plan.estimates import (
    DDP,
    Baseline,
    Estimate,
    Infeasible,
    Plan,
    lower_bound_seconds,
)
from paceline.tools.plan.merged_tensors import coarse
from paceline.tools.plan.predict import (
    MakeOptimizer,
    TrainingJob,
    plain_sgd,
    predict_single,
    says_more_in_full,
)
from paceline.tools.plan.prediction_cost import Budget, cost, usual_seconds
from paceline.tools.plan.predictor import Predict, in_processes

HOPELESS = 1.5
"""Times the best step of its class, in a short run: planning its buckets does not mend that."""


NOTHING = 0.01
"""Of a step, so little that it is as if nobody waited."""

FIRST, CROSSED = 0.5, 0.6
"""Parts of the budget that may be gone after the first round, and after the second."""


@dataclass
class _Search:
    """What is known so far."""

    job: TrainingJob
    allowed: Collection[Consistency]
    budget: Budget
    predict: Predict
    told: Callable[[str, int, int], None]
    candidates: dict[str, Candidate] = field(default_factory=dict)
    found: dict[str, Estimate] = field(default_factory=dict)
    left_out: dict[str, Infeasible] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)

    def look(
        self,
        among: Sequence[Candidate],
        left_out: Iterable[Infeasible] = (),
        *,
        short: bool,
        keep: float = 0.0,
    ) -> None:
        """Predict those that are allowed, as far as the budget goes; but *keep* seconds."""
        for out in left_out:
            if out.consistency in self.allowed:
                self.left_out[out.spec] = out
        job = self.quick if short else self.job
        wanted = []
        for one in among:
            if one.consistency not in self.allowed or (
                short and one.spec in self.found
            ):
                continue
            if self.budget.takes(cost(job, one.spec, short=short), keep):
                wanted.append(one)
            elif short:
                self.skipped.add(one.spec)
        said = self.predict(job, [one.spec for one in wanted], short=short)
        for number, one in enumerate(wanted):
            self.told(one.spec, number, len(wanted))
            self._keep(one, next(said), short)

    def _keep(self, one: Candidate, said: Estimate | Infeasible, short: bool) -> None:
        self.skipped.discard(one.spec)
        if isinstance(said, Infeasible):
            self.left_out[one.spec] = said
            self.found.pop(one.spec, None)
            return
        self.candidates[one.spec] = one
        self.found[one.spec] = said
        if not short or (self.quick == self.job and not says_more_in_full(one.spec)):
            self.whole.add(one.spec)

    @property
    def quick(self) -> TrainingJob:
        """What short runs are of."""
        return replace(self.job, workload=coarse(self.job.workload))

    def best(self) -> dict[Consistency, str]:
        """The fastest spec of each class, so far; the first of those that are alike."""
        best: dict[Consistency, str] = {}
        for consistency in CONSISTENCIES:
            mine = [
                s for s in self.found if self.candidates[s].consistency == consistency
            ]
            if mine:
                best[consistency] = min(mine, key=self.seconds)
        return best

    def for_a_full_run(self) -> list[Candidate]:
        """Those that a short run does not tell, unless hopeless in their class; the fastest first.

        A short run can show two as equal to the bit that differ in full, as it has fewer tensors and no
        planned buckets. So each is run; but the first of those that look equal come before the others,
        should the budget end."""
        best = {
            consistency: self.seconds(spec) for consistency, spec in self.best().items()
        }
        seen: Counter[tuple[object, ...]] = Counter()
        ranked = []
        for spec in sorted(self.found, key=self.seconds):
            slowest = HOPELESS * best[self.candidates[spec].consistency]
            # What others are held against is run in any case.
            if spec in self.whole or (self.seconds(spec) > slowest and spec != DDP):
                continue
            key = parse(spec).name, says_more_in_full(spec), _figures(self.found[spec])
            ranked.append((seen[key], self.candidates[spec]))
            seen[key] += 1
        return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]

    def varied(self) -> dict[Consistency, str]:
        """The best of each class that waits for the network: others have nothing to gain."""
        return {
            consistency: spec
            for consistency, spec in self.best().items()
            if self.found[spec].exposed_seconds > NOTHING * self.seconds(spec)
        }

    def seconds(self, spec: str) -> float:
        return self.found[spec].step_seconds


def _figures(one: Estimate) -> tuple[object, ...]:
    return (
        *(one.step_seconds, one.compute_seconds, one.exposed_seconds),
        *(one.bytes_sent, one.buckets, one.estimated_compression),
    )


def plan(
    cluster: Cluster,
    workload: Workload,
    *,
    allowed: Collection[Consistency] = CONSISTENCIES,
    budget_seconds: float | None = None,
    optimizer: MakeOptimizer = plain_sgd,
    jitter: float = 0.0,
    refused: Mapping[str, str] | None = None,
    epoch_steps: int = 0,
    processes: int = 1,
    predict: Predict | None = None,
    told: Callable[[str, int, int], None] = lambda spec, number, count: None,
) -> Plan:
    """Predict every candidate for *workload* on *cluster*.

    *allowed*: classes that count. *budget_seconds*: about what it may take on a core of
    today (None: `usual_seconds`); counted and not timed, so that equal arguments have equal answers. *optimizer* makes one like the
    training's: some candidates forbid some. *refused*: methods by name, and why the script cannot
    be trained with them. *epoch_steps*: steps in an epoch of its sampler, 0 where nobody knows: some codes
    count in epochs. *processes*: predictions that are made at a time; what they say does not
    depend on it; *predict* (`together.in_processes`) makes them where it is there. *told* is called before each prediction. Raises `UsageError` where
    no allowed candidate can run.
    """
    job = TrainingJob(
        cluster=cluster,
        workload=workload,
        optimizer=optimizer,
        jitter=jitter,
        epoch_steps=epoch_steps,
    )
    with ExitStack() as stack:
        if predict is None:
            predict = stack.enter_context(in_processes(processes))
        most = usual_seconds(cluster) if budget_seconds is None else budget_seconds
        search = _Search(job, frozenset(allowed), Budget(most), predict, told)
        if cluster.workers > 1:
            _search(search, refused or {})
    if cluster.workers > 1 and not search.found:
        raise UsageError(_nothing(search))
    made = _plan(search)
    return msgspec.structs.replace(made, spent_seconds=most - search.budget.left)


def _search(search: _Search, refused: Mapping[str, str]) -> None:
    usable = partial(_without, refused, search)
    cluster = search.job.cluster
    among, left_out = first(cluster)
    ranked = _by_promise(search, usable(among))
    budget = search.budget.left
    search.look(ranked, left_out, short=True, keep=(1 - FIRST) * budget)
    codes = sorted(
        (name for name in COMPRESSORS if f"bsp:compression={name}" in search.found),
        key=lambda name: search.seconds(f"bsp:compression={name}"),
    )
    among, left_out = crossed(search.varied(), codes, cluster)
    keep = (1 - CROSSED) * budget
    search.look(_by_turns(usable(among)), left_out, short=True, keep=keep)
    hopeful = search.for_a_full_run()
    search.look(_by_turns(hopeful), short=False)
    # What is neither rejected nor full, the budget had no time for.
    among_hopeful = {one.spec for one in hopeful}
    search.rejected = search.found.keys() - search.whole - among_hopeful


def _by_promise(search: _Search, among: Sequence[Candidate]) -> list[Candidate]:
    """Those that count; the most promising first, if they may not all fit into the budget."""
    among = [one for one in among if one.consistency in search.allowed]
    all_of_them = sum(cost(search.quick, one.spec, short=True) for one in among)
    if all_of_them <= FIRST * search.budget.left:
        return among
    job = rough(search.job)
    price = sum(cost(job, one.spec, short=True) for one in among)
    if price > FIRST * min(search.budget.left, all_of_them):
        return _by_turns(among)
    search.budget.takes(price)
    said = list(search.predict(job, [one.spec for one in among], short=True))
    # What cannot run so may run with more; it comes last.
    seconds = {
        one.spec: math.inf if isinstance(answer, Infeasible) else answer.step_seconds
        for one, answer in zip(among, said, strict=True)
    }
    return _by_turns(sorted(among, key=lambda one: seconds[one.spec]))


def _by_turns(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first of each class, then the second of each, and so on: should the budget end."""
    seen: Counter[Consistency] = Counter()
    ranked = []
    for one in candidates:
        ranked.append((seen[one.consistency], one))
        seen[one.consistency] += 1
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


def _without(
    refused: Mapping[str, str], search: _Search, among: Sequence[Candidate]
) -> list[Candidate]:
    """Those whose method the script can be trained with."""
    usable = []
    for one in among:
        why = refused.get(parse(one.spec).name)
        if why is None:
            usable.append(one)
        elif one.consistency in search.allowed:
            search.left_out[one.spec] = Infeasible(
                spec=one.spec, consistency=one.consistency, reason=why
            )
    return usable


def _nothing(search: _Search) -> str:
    classes = ", ".join(q for q in CONSISTENCIES if q in search.allowed)
    if search.skipped:
        return (
            f"the budget of the plan is too small for one prediction of {classes}: give "
            "it more (--budget)"
        )
    reasons = "; ".join(f"{one.spec}: {one.reason}" for one in search.left_out.values())
    return (
        f"no candidate of the allowed classes ({classes}) can run here; allow more of them. "
        f"{reasons}"
    )


def _plan(search: _Search) -> Plan:
    job = search.job
    cluster, batch = job.cluster, job.workload.batch
    if batch is not None:
        batch *= cluster.workers * job.passes
    baseline = Baseline(
        workers=cluster.workers,
        batch=batch,
        single=predict_single(job),
        lower_bound_seconds=lower_bound_seconds(cluster, job.workload),
    )
    estimates = [
        msgspec.structs.replace(
            search.found[spec],
            fidelity="full" if spec in search.whole else "short",
            rejected=spec in search.rejected,
        )
        for spec in sorted(search.found, key=search.seconds)
    ]
    return Plan(
        cluster=cluster.describe(),
        workload=job.workload.source,
        baseline=baseline,
        estimates=tuple(estimates),
        infeasible=tuple(search.left_out.values()),
        skipped=len(search.skipped),
    )
