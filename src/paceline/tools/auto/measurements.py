"""What one worker's training shows `Program`, and what it does for it."""

from __future__ import annotations

import inspect
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import torch

from paceline.cluster import Cluster, cluster_toml, parse_cluster
from paceline.core.settings import Settings
from paceline.core.training import Training
from paceline.core.training_setup import TrainingInputs
from paceline.errors import PacelineError, UsageError
from paceline.interfaces import Comm, Method
from paceline.interfaces.buckets import wire_bytes
from paceline.methods import METHODS
from paceline.tools.auto.config import FIRST, Auto
from paceline.tools.auto.controller import MEASURED_STEPS
from paceline.tools.auto.decision import Answer, Found, Question
from paceline.tools.auto.decision_cache import (
    About,
    Decision,
    digest,
    file_of,
    read,
    write,
)
from paceline.tools.auto.planner_process import PlannerProcess
from paceline.tools.auto.quick_probe import find_links, host_rates
from paceline.tools.auto.step_watch import Watch, as_one_pass, with_all

Forbid = Callable[[Method, Settings], str]
STEPS_KEPT = 4096
PLAN_STEPS = 24
"""In virtual time predictions take so many steps, and no time."""
LOOK_SECONDS = 0.5
"""For a look whether the network is as it was."""
SAME_NETWORK = 1.3
"""Links may have become faster, or slower, by this factor."""
SAME_SPEED = 1.1
"""Differences of less are a machine's moods."""


@dataclass
class Planned:
    """The last question and what came of it."""

    cluster: Cluster | None = None
    process: PlannerProcess | None = None
    answer: Answer | None = None
    fault: str = ""
    begun_at: int = 0


class TrainingSenses:
    """The `Senses` of a training. *comm*: for what few numbers ranks must have of each other; *say*
    tells people."""

    def __init__(
        self,
        inputs: TrainingInputs,
        wish: Auto,
        settings: Settings,
        comm: Comm,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self._inputs, self._wish, self._settings = inputs, wish, settings
        self._runtime, self._recorder = inputs.runtime, inputs.runtime.recorder
        self._comm, self._device, self._say = comm, device, say
        parameters = inputs.parameters
        self._on_host = parameters[0][1].device.type == "cpu"
        self._stopwatch = self._runtime.clock.stopwatch(parameters[0][1].device)
        self._marks: deque[Any] = deque([self._stopwatch.mark()], STEPS_KEPT + 1)
        self._watch = Watch(inputs.model, parameters, self._stopwatch)
        self._steps = 0
        self._named = wish.load_cluster(self._runtime.size)
        names = [name for name, _ in parameters]
        sizes = [wire_bytes(parameter) for _, parameter in parameters]
        self._about = About(
            model=digest(names, sizes),
            optimizer=type(inputs.optimizer).__name__,
            workers=self._runtime.size,
            consistency=wish.consistency,
            runtime=self._runtime.name,
        )
        self._file = file_of(wish, self._runtime.name, self._runtime.registry.options)
        self._recalled: Decision | None = None
        self.planned = Planned()
        self.present = FIRST
        self.refused = ""
        self._forbid: Forbid = lambda method, settings: ""

    # ---- what the course tells ----

    def begin(self, training: Training, forbid: Forbid) -> None:
        """Its first training has begun."""
        self._forbid = forbid
        training.context.listeners.add(self._watch)

    def step_ended(self) -> None:
        self._steps += 1
        self._marks.append(self._stopwatch.mark())

    def close(self) -> None:
        """The training is over, or broken."""
        self._watch.end()
        if self.planned.process is not None:
            self.planned.process.end()

    # ---- a step's times ----

    def last(self, steps: int) -> list[float]:
        marks = list(self._marks)[-steps - 1 :]
        ends = self._stopwatch.seconds(marks[0], marks[1:])
        return [end - start for start, end in pairwise([0.0, *ends])]

    @property
    def period(self) -> int:
        return self._recorder.period

    @property
    def settled(self) -> bool:
        after = self._recorder.method_settled_after
        return 0 < after <= self._recorder.step_count

    def waited(self) -> float:
        if not self._on_host:
            return -1.0
        steps = list(self._recorder.steps)[-MEASURED_STEPS * self.period :]
        waits = sum(step.exposed_communication_seconds for step in steps)
        return waits / sum(step.step_seconds for step in steps)

    # ---- what was decided before ----

    def recall(self) -> tuple[str, float]:
        if self._runtime.rank or self._file is None:
            return "", 0.0
        try:
            self._recalled = read(self._file, self._about)
        except UsageError as error:
            self._say(f"auto: it is decided anew: {error}")
        if self._recalled is None:
            return "", 0.0
        return self._recalled.spec, self._recalled.seconds

    def network_is_as_recalled(self) -> bool:
        known = self._known_cluster()
        rates = [] if known is not None else self._host_rates()
        same = True
        if self._recalled is not None:
            before = parse_cluster(self._recalled.cluster)
            same = known == before if known is not None else _alike(rates, before)
            if not same:
                self._say(
                    "auto: the network is another one than when it was decided: it is decided anew"
                )
        return not self._sums([float(not same)])[0]

    # ---- a plan ----

    def _known_cluster(self) -> Cluster | None:
        """The network that somebody has described: it is not measured. In an emulated runtime it is all the
        same, as on real links, unless there is in it what no probe sees."""
        if self._named is not None:
            return self._named
        described = self._runtime.cluster
        if described is None or self._runtime.name != "emulated":
            return described
        helped = described.servers or any(rack.aggregates for rack in described.racks)
        return described if helped else None

    def _host_rates(self) -> list[float]:
        return host_rates(self._runtime, LOOK_SECONDS, self._device)

    @property
    def needs_probe(self) -> bool:
        return self._known_cluster() is None

    def begin_plan(self, probe_seconds: float) -> None:
        self.planned = Planned(begun_at=self._steps)
        cluster = self._known_cluster()
        if cluster is None:
            cluster = find_links(self._runtime, probe_seconds, self._device)
        compute = self._compute_seconds()
        speeds = [min(compute) / one if one else 1.0 for one in compute]
        if self._runtime.rank:
            return
        try:
            if set(cluster.speeds) == {1.0} and self._on_host:
                cluster = with_speeds(cluster, speeds)
            self.planned.cluster = cluster
            question = self._question(cluster, compute[0], cluster.speeds[0])
            self.planned.process = PlannerProcess(question)
        except PacelineError as error:
            self.planned.fault = str(error)

    def _question(self, cluster: Cluster, compute: float, speed: float) -> Question:
        workload = self._watch.workload("measured in the first steps")
        if workload is None:
            raise UsageError(
                "the script never calls the model itself, so nobody knows how long a step of it "
                "takes"
            )
        if self._runtime.clock.is_virtual:
            workload = as_one_pass(workload)
        workload = with_all(workload, compute if self._on_host else 0.0, speed)
        if self._settings.use_gradients:
            workload = replace(workload, uses_gradients=True)
        optimizer = self._inputs.optimizer
        cls: Any = type(optimizer)
        known = inspect.signature(cls).parameters
        values = {
            key: value for key, value in optimizer.defaults.items() if key in known
        }
        own = getattr(torch.optim, cls.__name__, None) is cls
        sampler = self._inputs.sampler
        # The planner's: a worker that asks nothing does not import it.
        from paceline.tools.plan.prediction_cost import usual_seconds

        return Question(
            cluster=cluster_toml(cluster, exact=True),
            workload=msgspec.to_builtins(workload),
            consistency=self._wish.consistency,
            present=self.present,
            optimizer=cls.__name__ if own else "",
            hyperparameters={k: v for k, v in values.items() if _is_plain(v)},
            refused=self._refused_methods(),
            epoch_steps=0 if sampler is None else len(sampler),
            budget_seconds=usual_seconds(cluster),
        )

    def _refused_methods(self) -> dict[str, str]:
        """What this training cannot be trained with, and why: as far as it can be told before."""
        refused: dict[str, str] = {}
        for name, cls in METHODS.items():
            method = cls()
            why = self._forbid(method, self._settings)
            if method.clips == "own" and self._settings.clip_norm < math.inf:
                why = "clip_norm: it would limit each worker's own gradient, and not the mean"
            if why:
                refused[name] = why
        return refused

    def plan_is_there(self) -> bool:
        planned = self.planned
        if self._runtime.rank:
            return False
        if planned.process is None:
            return True
        if not self._runtime.clock.is_virtual:
            return planned.process.is_over
        if self._steps < planned.begun_at + PLAN_STEPS:
            return False
        self._runtime.clock.external(planned.process.wait)
        return True

    def candidates(self) -> list[tuple[str, float]]:
        planned = self.planned
        if self._runtime.rank:
            return []
        if planned.process is None:
            planned.answer = Answer(fault=planned.fault)
        else:
            planned.answer = planned.process.answer()
            planned.process = None
        allowed = self._wish.allowed
        best = planned.answer.best
        return [(one.spec, one.seconds) for one in best if one.consistency in allowed]

    def keep(self, found: Found, sentence: str) -> None:
        """Write the decision down, on rank 0."""
        cluster = self.planned.cluster
        if self._runtime.rank or self._file is None or cluster is None:
            return
        decision = Decision(
            about=self._about,
            spec=found.chosen,
            seconds=found.usual,
            cluster=cluster_toml(cluster, exact=True),
            found=found,
            sentence=sentence,
        )
        try:
            write(self._file, decision)
        except UsageError as error:
            self._say(f"auto: the decision is not kept: {error}")

    @property
    def file(self) -> str:
        """Where the decision is kept; empty where it is not."""
        known = self._file is not None and (
            self.planned.cluster is not None or self._recalled is not None
        )
        return str(self._file) if known else ""

    # ---- what ranks have of each other ----

    def _compute_seconds(self) -> list[float]:
        """Of each worker: what it computes in a usual step."""
        steps = list(self._recorder.steps)[-MEASURED_STEPS * self.period :]
        mine = statistics.median(step.compute_seconds for step in steps)
        row = [0.0] * self._runtime.size
        row[self._runtime.rank] = mine
        return self._sums(row)

    def _sums(self, values: Sequence[float]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._comm.all_reduce(numbers, "sum").wait()
        sums: list[float] = numbers.tolist()
        return sums


def with_speeds(cluster: Cluster, speeds: Sequence[float]) -> Cluster:
    """*cluster* with workers that are so fast, of which the fastest has 1."""
    near = [1.0 if SAME_SPEED * one > 1 else round(one, 2) for one in speeds]
    racks, first = [], 0
    for rack in cluster.racks:
        mine = tuple(near[first : first + rack.workers])
        racks.append(replace(rack, speed=mine))
        first += rack.workers
    return replace(cluster, racks=tuple(racks))


def _alike(rates: Sequence[float], before: Cluster) -> bool:
    """Whether hosts send as fast to their neighbours as the network of before lets them."""
    links = [rate for rack in before.racks for rate in rack.links]
    if len(rates) != len(links):
        return not rates  # one host: its loopback
    now, then = statistics.median(rates), statistics.median(links)
    slowest = min(rates) / min(links)
    ratios = (now / then, slowest)
    return all(1 / SAME_NETWORK < ratio < SAME_NETWORK for ratio in ratios)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
