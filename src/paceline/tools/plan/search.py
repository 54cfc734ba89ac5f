"""The search: predict every candidate, cheap predictions first.

1. The candidates of `first`, in short runs of few tensors.
2. The best of each consistency with one more change (`crossed`), in short runs.
3. Full runs of candidates that a short run cannot show completely: a method needs more steps or other buckets, or
   the model has more tensors. Candidates that their short run shows as `HOPELESS` for their consistency are left
   out.

In each round consistencies take turns, so that the limit on simulated events affects all alike.
Candidates beyond the limit are judged by their short run, or counted as skipped. The limit counts
events instead of time: equal questions have equal answers on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from paceline.cluster import Cluster, Workload
from paceline.cluster.workload import CompressorTimes
from paceline.compression import COMPRESSORS, full_spec
from paceline.core.settings import parse_method
from paceline.errors import UsageError
from paceline.interfaces import CONSISTENCIES, Consistency
from paceline.spec import parse
from paceline.tools.plan.candidates import Candidate, crossed, first
from paceline.tools.plan.estimates import (
    DDP,
    Baseline,
    Estimate,
    Fidelity,
    Infeasible,
    Plan,
    lower_bound_seconds,
)
from paceline.tools.plan.predict import (
    FEW,
    MakeOptimizer,
    TrainingJob,
    plain_sgd,
    predict_single,
    says_more_in_full,
    trace_step,
)
from paceline.tools.plan.predictor import Predictor, usual_events
from paceline.tools.report.timeline import Step

HOPELESS = 1.5
"""Factor over the best step of its consistency in a short run: planned buckets do not make up for more."""
NEGLIGIBLE = 0.01
"""Share of a step: less exposed communication counts as none."""
FIRST, CROSSED = 0.5, 0.6
"""Shares of the simulated events after which the first and the second round stop."""
IN_FRONT = 1.2
"""Factor over the best step of its consistency: compressors of such methods are measured."""
MOST_COMPRESSORS = 4
"""Compressors that are measured at a time: each takes up to about a second."""

OnProgress = Callable[[str, int, int], None]
"""Receives the name of the next prediction, its number, and the number of all."""


def _quiet(what: str, number: int, count: int) -> None:
    pass


def plan(
    cluster: Cluster,
    workload: Workload,
    *,
    allowed: Collection[Consistency] = CONSISTENCIES,
    max_events: float | None = None,
    optimizer: MakeOptimizer = plain_sgd,
    jitter: float = 0.0,
    refused: Mapping[str, str] | None = None,
    epoch_steps: int = 0,
    predictor: Predictor | None = None,
    on_progress: OnProgress = _quiet,
) -> Plan:
    """Predict every candidate for a model on a network.

    It occupies the process with simulations: beside a training, call it in another process.

    Args:
        cluster: The network and its workers.
        workload: The model's tensors and compute times.
        allowed: Consistencies whose candidates are predicted.
        max_events: Simulated events after which it stops [default: `usual_events`].
        optimizer: Makes an optimizer like the training's. Some candidates forbid some.
        jitter: Relative spread of compute times.
        refused: Names of methods that cannot train the script, and why.
        epoch_steps: Steps of an epoch of its sampler (0: not known). Some compressors count epochs.
        predictor: Makes the predictions [default: this process].
        on_progress: Called before each prediction.

    Returns:
        The plan. Equal arguments give bit-equal plans.

    Raises:
        UsageError: No allowed candidate can run.

    Example:
        ::

            cluster = uniform_cluster(8, "1 Gbit/s", "50 us")
            made = plan(cluster, Workload.load("resnet50"), allowed=["exact"])
            print(made.estimates[0].spec, made.estimates[0].step_seconds)
    """
    job = TrainingJob(
        cluster=cluster,
        workload=workload,
        optimizer=optimizer,
        jitter=jitter,
        epoch_steps=epoch_steps,
    )
    search = _Search(job, frozenset(allowed), predictor or Predictor(), on_progress)
    before = search.predictor.events
    if cluster.workers > 1:
        most = usual_events(cluster) if max_events is None else max_events
        search.run(refused or {}, min(most, search.predictor.events_left))
        if not search.found:
            raise UsageError(search.nothing_found())
    made = search.plan()
    return msgspec.structs.replace(made, events=search.predictor.events - before)


@dataclass
class _Search:
    """Candidates and their predictions so far, by spec.

    Attributes:
        whole: Specs whose figures equal those of a full run.
        rejected: Specs that the short run shows as hopeless.
        skipped: Specs without a prediction, since the limit was reached.
    """

    job: TrainingJob
    allowed: Collection[Consistency]
    predictor: Predictor
    on_progress: OnProgress
    candidates: dict[str, Candidate] = field(default_factory=dict)
    found: dict[str, Estimate] = field(default_factory=dict)
    infeasible: dict[str, Infeasible] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)

    def run(self, refused: Mapping[str, str], most: float) -> None:
        """Run all rounds, with *most* simulated events."""
        usable = partial(self._usable, refused)
        begin, cluster = self.predictor.events, self.job.cluster
        among, infeasible = first(cluster)
        self._keep_infeasible(infeasible)
        self._predict(usable(among), "short", begin + FIRST * most)
        compressors = sorted(
            (name for name in COMPRESSORS if f"bsp:compression={name}" in self.found),
            key=lambda name: self.seconds(f"bsp:compression={name}"),
        )
        among, infeasible = crossed(self._waiting(), compressors, cluster)
        self._keep_infeasible(infeasible)
        self._predict(usable(among), "short", begin + CROSSED * most)
        hopeful = self._for_a_full_run()
        self._predict(hopeful, "full", begin + most)
        # The limit has cut the specs that are neither rejected nor whole.
        names = {one.spec for one in hopeful}
        self.rejected = self.found.keys() - self.whole - names

    def _usable(
        self, refused: Mapping[str, str], among: Iterable[Candidate]
    ) -> list[Candidate]:
        """Allowed candidates whose method can train the script."""
        usable = []
        for one in among:
            reason = refused.get(parse(one.spec).name)
            if one.consistency not in self.allowed:
                continue
            if reason is None:
                usable.append(one)
            else:
                self.infeasible[one.spec] = Infeasible(
                    spec=one.spec, consistency=one.consistency, reason=reason
                )
        return usable

    def _keep_infeasible(self, infeasible: Iterable[Infeasible]) -> None:
        for one in infeasible:
            if one.consistency in self.allowed:
                self.infeasible[one.spec] = one

    def _predict(
        self, among: Sequence[Candidate], fidelity: Fidelity, until: float
    ) -> None:
        """Predict candidates, with consistencies in turn; in short runs only those without figures."""
        short = fidelity == "short"
        wanted = _in_turns([c for c in among if not (short and c.spec in self.found)])
        if short:
            self.skipped |= {one.spec for one in wanted}
        asked = [(self.job, one.spec) for one in wanted]
        answers = self.predictor.predict(asked, fidelity, until=until)
        for number, one in enumerate(wanted):
            self.on_progress(one.spec, number, len(wanted))
            answer = next(answers, None)
            if answer is None:
                break
            self._keep(one, answer, short)

    def _keep(self, one: Candidate, answer: Estimate | Infeasible, short: bool) -> None:
        self.skipped.discard(one.spec)
        if isinstance(answer, Infeasible):
            self.infeasible[one.spec] = answer
            self.found.pop(one.spec, None)
            return
        self.candidates[one.spec] = one
        self.found[one.spec] = answer
        few = len(self.job.workload.names) <= FEW
        if not short or (few and not says_more_in_full(one.spec)):
            self.whole.add(one.spec)

    def seconds(self, spec: str) -> float:
        """Return the step time of a spec, as far as it is known."""
        return self.found[spec].step_seconds

    def _best(self) -> dict[Consistency, str]:
        """Return the fastest spec of each consistency so far; of equal ones the first."""
        best: dict[Consistency, str] = {}
        for consistency in CONSISTENCIES:
            mine = [
                s for s in self.found if self.candidates[s].consistency == consistency
            ]
            if mine:
                best[consistency] = min(mine, key=self.seconds)
        return best

    def _waiting(self) -> dict[Consistency, str]:
        """Return the best spec of each consistency if it waits for the network: others cannot gain."""
        return {
            consistency: spec
            for consistency, spec in self._best().items()
            if self.found[spec].exposed_seconds > NEGLIGIBLE * self.seconds(spec)
        }

    def _for_a_full_run(self) -> list[Candidate]:
        """Candidates that are not hopeless and need a full run, the fastest first.

        Two candidates that are bit-equal in a short run can differ in full, as it has fewer tensors and no planned
        buckets. So each runs. The first of equal ones runs before the others, in case the limit is reached.
        """
        best = {
            consistency: self.seconds(spec)
            for consistency, spec in self._best().items()
        }
        seen: Counter[tuple[object, ...]] = Counter()
        ranked = []
        for spec in sorted(self.found, key=self.seconds):
            slowest = HOPELESS * best[self.candidates[spec].consistency]
            # DDP always runs, since others are compared with it.
            if spec in self.whole or (self.seconds(spec) > slowest and spec != DDP):
                continue
            key = parse(spec).name, says_more_in_full(spec), _figures(self.found[spec])
            ranked.append((seen[key], self.candidates[spec]))
            seen[key] += 1
        return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]

    def nothing_found(self) -> str:
        """Why there is no estimate."""
        classes = ", ".join(c for c in CONSISTENCIES if c in self.allowed)
        if self.skipped:
            return (
                f"no simulated event is left for a prediction of {classes}: expected more than "
                "zero; allow more of them (paceline plan --max-work)"
            )
        reasons = "; ".join(f"{s}: {one.reason}" for s, one in self.infeasible.items())
        return (
            f"no candidate of the allowed consistency levels ({classes}) can run here; allow more of them. "
            f"{reasons}"
        )

    def plan(self) -> Plan:
        """Return the figures as a plan."""
        job = self.job
        batch = job.workload.batch
        if batch is not None:
            batch *= job.cluster.workers * job.passes
        estimates = [
            msgspec.structs.replace(
                self.found[spec],
                fidelity="full" if spec in self.whole else "short",
                rejected=spec in self.rejected,
            )
            for spec in sorted(self.found, key=self.seconds)
        ]
        return Plan(
            cluster=job.cluster.describe(),
            workload=job.workload.source,
            baseline=Baseline(
                workers=job.cluster.workers,
                batch=batch,
                single=predict_single(job),
                lower_bound_seconds=lower_bound_seconds(job.cluster, job.workload),
            ),
            estimates=tuple(estimates),
            infeasible=tuple(self.infeasible.values()),
            skipped=len(self.skipped),
        )


def _figures(one: Estimate) -> tuple[object, ...]:
    return (
        *(one.step_seconds, one.compute_seconds, one.exposed_seconds),
        *(one.bytes_sent, one.buckets, one.estimated_compression),
    )


def _in_turns(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the first of each consistency, then the second of each, and so on."""
    seen: Counter[Consistency] = Counter()
    ranked = []
    for one in candidates:
        ranked.append((seen[one.consistency], one))
        seen[one.consistency] += 1
    return [one for _, one in sorted(ranked, key=lambda pair: pair[0])]


# ---- measured compression times ----


def compressor_of(spec: str) -> str:
    """Return a method's compressor, by its name in workloads."""
    _, settings = parse_method(spec)
    return full_spec(settings.compression.steady_state())


def leading_compressors(plan: Plan) -> list[str]:
    """Compressors of the fastest methods of each consistency whose times are estimated."""
    best = plan.fastest
    names = [
        compressor_of(one.spec)
        for one in plan.estimates
        if one.estimated_compression
        and one.step_seconds <= IN_FRONT * best[one.consistency].step_seconds
    ]
    return list(dict.fromkeys(names))[:MOST_COMPRESSORS]


def refine_compression_times(
    plan: Plan,
    job: TrainingJob,
    times: Mapping[str, CompressorTimes],
    predictor: Predictor | None = None,
) -> tuple[Plan, TrainingJob]:
    """Predict methods again after their compressors were measured.

    Args:
        plan: The plan with estimated times.
        job: The job that it was made from.
        times: Measured times, by compressor (`compressor_of`).
        predictor: Makes the predictions [default: this process]. If it has no simulated events left,
            an estimate stays unchanged.

    Returns:
        The plan with these estimates, each in a short or a full run as before; and the job with the
        measured times in its workload.
    """
    predictor = predictor or Predictor()
    before = predictor.events
    known = {**job.workload.coding, **times}
    job = replace(job, workload=replace(job.workload, coding=known))
    new: dict[str, Estimate] = {}
    fidelities: tuple[Fidelity, ...] = ("short", "full")
    for fidelity in fidelities:
        mine = [
            one
            for one in plan.estimates
            if one.fidelity == fidelity
            and one.estimated_compression
            and compressor_of(one.spec) in times
        ]
        answers = predictor.predict([(job, one.spec) for one in mine], fidelity)
        for one, answer in zip(mine, answers, strict=False):
            if isinstance(answer, Estimate):
                new[one.spec] = msgspec.structs.replace(
                    answer, fidelity=fidelity, rejected=one.rejected
                )
    estimates = [new.get(one.spec, one) for one in plan.estimates]
    estimates.sort(key=lambda one: one.step_seconds)
    events = plan.events + predictor.events - before
    plan = msgspec.structs.replace(plan, estimates=tuple(estimates), events=events)
    return plan, job


# ---- traced steps ----


def trace_steps(
    plan: Plan,
    job: TrainingJob,
    predictor: Predictor | None = None,
    on_progress: OnProgress = _quiet,
) -> list[Step]:
    """Trace a step of the recommended method of each consistency and of DDP.

    Args:
        plan: The plan.
        job: The job that it was made from.
        predictor: Makes the runs [default: this process].
        on_progress: Called before each run.

    Returns:
        The steps, as many as `predictor` has simulated events for. The recommended method of the
        strongest consistency comes first, then DDP.
    """
    predictor = predictor or Predictor()
    first_spec, *rest = dict.fromkeys(
        [*(o.spec for o in plan.recommended.values()), DDP]
    )
    specs = list(dict.fromkeys([first_spec, DDP, *rest]))
    if plan.estimate(DDP) is None:  # DDP was not allowed, or cannot run
        specs.remove(DDP)
    steps = predictor.map(trace_step, [(job, spec) for spec in specs])
    found = []
    for number, spec in enumerate(specs):
        on_progress(f"a step of {spec}", number, len(specs))
        found.append(next(steps, None))
    return [step for step in found if step is not None]
