"""Runs a simulation: a body once per worker, in one process, on a virtual clock.

If a method treats all workers alike, a few represent all: `paceline.cluster.worker_classes`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist

from paceline.cluster.cluster import Cluster
from paceline.cluster.links import Links
from paceline.cluster.profiling import GradientDump, StepProfiler
from paceline.cluster.profiling.timers import HostStopwatch
from paceline.cluster.worker_classes import WorkerClasses
from paceline.cluster.workload import Workload
from paceline.errors import UsageError
from paceline.interfaces import (
    ServiceJob,
    current_runtime,
    enter_runtime_in_this_thread,
)
from paceline.interfaces.buckets import stand_in_for, wire_bytes
from paceline.interfaces.consolidated_entry import ConsolidatedEntry
from paceline.interfaces.trainings import TrainingRegistry
from paceline.records import RecordsInMemory, Span, StepRecorder
from paceline.run_options import RunOptions
from paceline.runtimes.simulated.clock import (
    Completion,
    EventContext,
    EventRunner,
    RuleSchedule,
    VirtualClock,
    Watchdog,
    Worker,
)
from paceline.runtimes.simulated.compute import (
    ComputeModel,
    ModelCompute,
    SeenInputs,
    SimulatedCompute,
)
from paceline.runtimes.simulated.isolation import (
    EnvironmentOverlay,
    MainModules,
    RandomStates,
    Shown,
    UndrawnRandomStates,
    locations_of,
    patched_process,
    speak_as,
    thread_count_kept,
    workers_output,
)
from paceline.runtimes.simulated.process_group import BACKEND, SimulatedProcessGroup
from paceline.runtimes.simulated.services import (
    SimulatedEndpoint,
    SimulatedServer,
    make_services,
    rates_of,
)
from paceline.runtimes.simulated.worker_group import CollectiveGroups, SimulatedGroup
from paceline.torch_internals import (
    GLOO_LANES,
    group_id_of,
    load_lazy_modules,
    local_store,
    process_groups_per_thread,
    register_python_backend,
    share_group_ranks,
)
from paceline.units import show_seconds

_T = TypeVar("_T")

ACTORS = -1
"""Owner of the random states of callbacks that follow results (`Pending.then`)."""


@dataclass
class SimulationResult:
    """The result of a simulation.

    Attributes:
        recorders: Each worker's recorder.
        kept: Each worker's records, if a trace was requested.
        spans: The spans of collectives, if a trace was requested.
        virtual_seconds: Its duration in virtual time.
        switches: Number of hand-overs of the turn.
        events: Number of events of the clock.
        profilers: Worker 0's, one for each model, if requested.
        inputs: The shapes of the inputs of each of these models.
        estimated_compressors: Sentences on compressors whose times no workload has measured.
        weights: By worker that ran, how many workers it represents (None: all workers ran).
        representatives: The same as a sentence.
    """

    recorders: list[StepRecorder] = field(default_factory=list)
    kept: list[RecordsInMemory] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    virtual_seconds: float = 0.0
    switches: int = 0
    events: int = 0
    paced_by_script: bool = False
    stand_in: bool = False
    profilers: list[StepProfiler] = field(default_factory=list)
    inputs: list[SeenInputs] = field(default_factory=list)
    estimated_compressors: set[str] = field(default_factory=set)
    weights: Mapping[int, int] | None = None
    representatives: str = ""

    def by_worker(self, values: Sequence[_T]) -> list[_T]:
        """Return *values*, one per recorder, each as often as its worker represents workers."""
        weights = [1] * len(values) if self.weights is None else self.weights.values()
        return [
            value
            for value, weight in zip(values, weights, strict=True)
            for _ in range(weight)
        ]


class Simulation:
    """Runs one body per worker of *cluster*, in virtual time.

    Args:
        cluster: The network and its workers.
        play: Execute ring collectives message by message, too, instead of estimating them.
        lanes: Collectives that a communicator moves at a time.
        trace: Keep spans.
        profile: Measure the real computing of worker 0, and charge nothing.
        paced: As *profile*, but for the times that its script paces (`paceline.pace`).
        keep: Takes worker 0's first gradients, while it is profiled.
        patience: Real seconds without any progress after which the process is ended.
        look: Called now and then, on the calling thread, with the virtual time.
        output: The workers whose prints are shown: see `output` (None: all, unchanged).
        draws: Whether bodies may draw random numbers. Without, `drawn` says after the run whether
            one did all the same.
        repeats: Measure once for a plan of buckets, since in virtual time all repetitions are
            equal.
        workers: "classes" runs representatives: see `WorkerClasses`.

    Raises:
        UsageError: Representatives are impossible because workers differ: jitter, rules that kill;
            and, when it runs, methods that are not symmetric, servers and messages between two
            workers.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        options: RunOptions | None = None,
        compute: ComputeModel | None = None,
        play: bool = False,
        lanes: int = GLOO_LANES,
        trace: bool = False,
        profile: bool = False,
        paced: bool = False,
        keep: GradientDump | None = None,
        patience: float = 20.0,
        look: Callable[[float], None] = lambda seconds: None,
        output: Shown | None = None,
        draws: bool = True,
        repeats: bool = False,
        workers: Literal["all", "classes"] = "all",
    ) -> None:
        self.cluster = cluster
        self.options = options or RunOptions()
        self.compute_model = compute or ComputeModel(seed=self.options.seed or 0)
        self.classes: WorkerClasses | None = None
        if workers == "classes":
            check_represented(cluster, self.compute_model)
            self.classes = WorkerClasses.of(cluster)
        self.result = SimulationResult()
        self._output = output
        self.trace = trace
        self.profile, self.paced, self.keep = profile, paced, keep
        self._watchdog = partial(Watchdog, patience=patience, look=look)
        self.repeats = repeats
        self._random: RandomStates | UndrawnRandomStates = UndrawnRandomStates()
        if draws:
            self._random = RandomStates(self.options.seed or 0)
        self.mains = MainModules()
        everyone = range(cluster.workers)
        running = list(everyone if self.classes is None else self.classes.weights)
        # All workers share it: 10,000 workers with 10,000 entries each would need gigabytes.
        self._locations = locations_of(
            [cluster.host_of(worker) for worker in everyone], torch.cuda.device_count()
        )
        self._group_ranks = {worker: worker for worker in everyone}
        self.clock = VirtualClock(len(running), self._on_turn, self._as_worker, running)
        self.links = Links(self.clock, cluster)
        self.rule_schedule = RuleSchedule(
            cluster.rules, self.clock, self.links, self.observe
        )
        self._runtimes = {rank: SimulatedRuntime(self, rank) for rank in running}
        self.workers = dict(zip(running, self.clock.workers, strict=True))
        self.groups = CollectiveGroups(
            self.clock,
            self.links,
            lanes=lanes,
            play=play,
            observe=self.observe if trace else None,
            classes=self.classes,
        )
        self._store = local_store()
        self._services: list[list[SimulatedServer]] = []
        self.server_rates = rates_of(
            self.compute_model.workload, self.compute_model.memory
        )

    def services_of(self, number: int, job: ServiceJob) -> list[SimulatedServer]:
        """Return the services of job *number*, which are made when its first worker asks."""
        if number == len(self._services):
            self._services.append(
                make_services(
                    job,
                    self.cluster,
                    self.clock,
                    self.links,
                    self.server_rates,
                    self.observe if self.trace else None,
                )
            )
        return self._services[number]

    @property
    def drawn(self) -> bool:
        """Whether a body without random states of its own drew a random number (*draws*)."""
        return isinstance(self._random, UndrawnRandomStates) and self._random.drawn

    def registry_of(self, rank: int) -> TrainingRegistry:
        """Return the trainings of a worker's script, after the run."""
        return self._runtimes[rank].registry

    def runtime_of(self, rank: int) -> SimulatedRuntime:
        """Return a worker's runtime."""
        return self._runtimes[rank]

    def send_entry(self, rank: int, entry: ConsolidatedEntry) -> None:
        """Send worker *rank*'s entry of `consolidated` to all other workers, at no cost."""
        for runtime in self._runtimes.values():
            runtime.registry.consolidated_entries.receive(
                rank, entry, len(self._runtimes)
            )

    def observe(self, span: Span) -> None:
        """Keep a span for the trace."""
        if self.trace:
            self.result.spans.append(span)

    def run(self, body: Callable[[int], object]) -> SimulationResult:
        """Run ``body(rank)`` on every worker; raises the first failure.

        `WorkerFailedError` names the worker whose body raised; `DeadlockError` names each worker's
        wait; `CollectiveMismatchError` names the two calls that differ.
        """
        if self.clock.switches:
            raise UsageError("a Simulation runs once: make another one")
        register_python_backend(BACKEND, _create_group)
        load_lazy_modules()
        bodies = [partial(self._worker_main, rank, body) for rank in self._runtimes]
        watchdog = self._watchdog(self.clock)
        with (
            process_groups_per_thread(),
            thread_count_kept(),
            EnvironmentOverlay(),
            self._random,
            self.mains,
            patched_process(self.init_process_group),
            workers_output(self._output),
        ):
            self.clock.run(bodies, watchdog.watch)
        self.result.recorders = [
            runtime.recorder for runtime in self._runtimes.values()
        ]
        self.result.virtual_seconds = max(w.time for w in self.clock.workers)
        self.result.switches = self.clock.switches
        self.result.events = self.clock.events
        self.result.paced_by_script = any(
            runtime.paced_by_script for runtime in self._runtimes.values()
        )
        self.result.stand_in = self._runtimes[0].stand_in
        self.result.estimated_compressors = self._runtimes[0].estimated_compressors
        if self.classes is not None:
            self.result.weights = self.classes.weights
            self.result.representatives = self.classes.describe()
        return self.result

    def init_process_group(self, init: Callable[..., None], **arguments: Any) -> None:
        """Replace torch's function for the calling worker, over the simulated backend."""
        rank = self.clock.current.rank
        for key, ours in (("rank", rank), ("world_size", self.cluster.workers)):
            theirs = arguments.pop(key, -1)
            if theirs not in (-1, None, ours):
                raise UsageError(
                    f"init_process_group({key}={theirs}): this is worker {rank} of "
                    f"{self.cluster.workers} in the simulated runtime"
                )
        keep = {k: arguments[k] for k in ("timeout",) if k in arguments}
        init(
            BACKEND,
            store=self._store,
            rank=rank,
            world_size=self.cluster.workers,
            **keep,
        )
        share_group_ranks(self._group_ranks)

    def _worker_main(self, rank: int, body: Callable[[int], object]) -> None:
        runtime = self._runtimes[rank]
        enter_runtime_in_this_thread(runtime)
        _of_thread.simulation = self
        speak_as(rank)
        EnvironmentOverlay.set_for_this_thread(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(runtime.size),
                **self._locations[rank],
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                # It would wait in a store, outside the clock.
                "TORCH_DIST_INIT_BARRIER": "0",
                "TORCHELASTIC_RUN_ID": "simulated",
            }
        )
        torch.set_num_threads(1)
        # Backward passes and hooks must run on the calling thread: the engine's own threads would
        # run out of turn.
        with torch.autograd.set_multithreading_enabled(False):
            try:
                body(rank)
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise UsageError(
                        f"the script ended with exit status {error.code!r}"
                    ) from error
            runtime.registry.end()
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _as_worker(self, actor: EventContext) -> Iterator[None]:
        """Run this block as worker *actor*, on any thread.

        All continuations share random states of their own. So a worker's numbers do not depend on
        when its messages arrive.
        """
        owner = current_runtime()
        self._random.hand_to(ACTORS)
        self.mains.hand_to(actor.rank)
        enter_runtime_in_this_thread(self._runtimes[actor.rank])
        speak_as(actor.rank)
        try:
            yield
        finally:
            enter_runtime_in_this_thread(owner)
            if owner is not None:
                speak_as(owner.rank)

    def _on_turn(self, worker: Worker) -> None:
        self._random.hand_to(worker.rank)
        self.mains.hand_to(worker.rank)


_of_thread = threading.local()


def _create_group(options: Any, _: Any) -> dist.ProcessGroup:
    simulation: Simulation = _of_thread.simulation
    ranks = tuple(options.global_ranks_in_group) or range(simulation.cluster.workers)
    return SimulatedProcessGroup(
        simulation.groups.of_script(group_id_of(options), ranks)
    )


def check_represented(cluster: Cluster, compute: ComputeModel) -> None:
    """Raise `UsageError` if workers of a class may behave differently."""
    if compute.jitter:
        raise UsageError(
            f"representatives with jitter {compute.jitter:g}: with jitter, every worker's step "
            "times differ, so expected 0; simulate all workers, or leave jitter out"
        )
    killed = [rule.target for rule in cluster.rules if isinstance(rule.target, int)]
    if killed:
        raise UsageError(
            f"representatives where a rule kills worker {killed[0]}: expected rules of links alone, "
            "as a worker that dies is like no other; simulate all workers"
        )


FEW_ELEMENTS = 2
BYTES_AN_ELEMENT = 1024 * 1024
"""Bytes per element of a tensor that represents a large one, so that methods can still cut it."""
MOST_ELEMENTS = 1024
"""The most elements of such a tensor, however large the represented one is."""


class SimulatedRuntime:
    """One simulated worker's `Runtime`."""

    name: ClassVar[str] = "simulated"

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self._simulation = simulation
        self._service_jobs = 0
        """How many jobs of services this worker has requested."""
        self.server_only = False
        self.registry = TrainingRegistry(simulation.options, self._training_broke)
        # A plan inspects them after the script.
        self.registry.keeps_ended = True
        self.registry.consolidated_entries.connect(
            rank, partial(simulation.send_entry, rank), waits=False
        )
        self.rank = rank
        self.size = simulation.cluster.workers
        classes = simulation.classes
        self.weights = None if classes is None else classes.weights
        self.cluster = simulation.cluster
        kept = None
        if simulation.trace:
            kept = RecordsInMemory([], [])
            simulation.result.kept.append(kept)
        self.clock = WorkerClock(simulation, rank, kept)
        self.recorder, self._compute = self.clock.recorder, self.clock.compute
        if rank == 0:
            self.recorder.observers.append(simulation.rule_schedule.reached)

    def connect(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")

    def workers(self, name: str) -> SimulatedGroup:
        world: Any = dist.group.WORLD
        workers: SimulatedGroup = world.workers
        return workers.renamed(name)

    def services(self, job: ServiceJob) -> list[SimulatedEndpoint]:
        if self._simulation.classes is not None:
            raise UsageError(
                "representatives with parameter servers: each worker's requests take a server's "
                "time, so all workers have to run; simulate all workers, or choose an "
                "all-reduce collective"
            )
        number = self._service_jobs
        self._service_jobs += 1
        return [
            SimulatedEndpoint(self.rank, server, self.recorder)
            for server in self._simulation.services_of(number, job)
        ]

    def runner(self, name: str, *, thread: bool) -> EventRunner:
        return EventRunner(self._simulation.clock, self.rank)

    def compute(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        samples: float | None,
    ) -> ModelCompute | StepProfiler | None:
        own = getattr(model, "workload", None)
        if not isinstance(own, Workload):
            own = None
        if self._simulation.profile and own is None:
            if self.rank:
                return None
            # Only one worker runs at a time, so the host's clock measures its computation.
            clock = self.clock.now if self._simulation.paced else time.perf_counter
            profiler = StepProfiler(
                model,
                parameters,
                HostStopwatch(clock),
                self._simulation.keep,
            )
            self._simulation.result.profilers.append(profiler)
            self._simulation.result.inputs.append(SeenInputs(model))
            return profiler
        names = [name for name, _ in parameters]
        sizes = [wire_bytes(parameter) for _, parameter in parameters]
        return self._compute.of_model(names, sizes, samples, own, model)

    @property
    def workload(self) -> Workload | None:
        return None if self.paced_by_script else self._compute.workload

    def blank(self, size: int, device: torch.device) -> torch.Tensor:
        elements = max(FEW_ELEMENTS, min(size // BYTES_AN_ELEMENT, MOST_ELEMENTS))
        return stand_in_for(size, torch.zeros(elements, device=device))

    @property
    def paced_by_script(self) -> bool:
        """Whether the script has called `paceline.pace`."""
        return self._compute.paced_by_script

    @property
    def estimated_compressors(self) -> set[str]:
        """Sentences on compressors whose times no workload has measured."""
        return self._compute.estimated_compressors

    @property
    def stand_in(self) -> bool:
        """Whether the model's own workload was charged."""
        return self._compute.stand_in

    def _training_broke(self, number: int, cause: str) -> None:
        """Note why a training broke: the error of a later deadlock names this cause."""
        self.clock.worker.fault = f"it broke off its training: {cause}"


class WorkerClock:
    """A simulated worker's `RuntimeClock`: computing takes virtual time, and is recorded."""

    is_virtual: ClassVar[bool] = True

    def __init__(
        self, simulation: Simulation, rank: int, kept: RecordsInMemory | None
    ) -> None:
        self._simulation, self._rank = simulation, rank
        self.recorder = StepRecorder(rank, self.now, kept)
        cluster, classes = simulation.cluster, simulation.classes
        self._host = cluster.host_of(rank)
        self._weight = 1 if classes is None else classes.weights[rank]
        """Number of workers that compute when this one does."""
        processor = cluster.processor
        self._shared_cores = None if processor is None else processor.cores
        self.compute = SimulatedCompute(
            simulation.compute_model,
            rank,
            cluster.speeds[rank],
            self._pass_time,
        )

    def now(self) -> float:
        if not self._follows:
            self.compute.flush()
        return self.worker.time

    def pace(self, seconds: float) -> None:
        self.compute.pace(seconds)

    def charge(self, seconds: float, what: str) -> None:
        if not self._follows:
            self.compute.flush()
        self.compute.spend(seconds, what, 0)

    def external(self, wait: Callable[[], None]) -> None:
        clock = self._simulation.clock
        clock.waits_outside = True
        try:
            wait()
        finally:
            clock.waits_outside = False

    def stopwatch(self, device: torch.device) -> HostStopwatch:
        return HostStopwatch(self.now, repeats=self._simulation.repeats)

    @property
    def worker(self) -> Worker:
        """The worker whose time passes now: the script's, or that of a continuation."""
        clock = self._simulation.clock
        return clock.current if self._follows else self._simulation.workers[self._rank]

    @property
    def _follows(self) -> bool:
        """Whether a continuation of a result runs now, and not the script."""
        current = self._simulation.clock.current
        return isinstance(current, EventContext) and current.rank == self._rank

    def _pass_time(self, seconds: float, name: str, cores: int) -> None:
        self._simulation.clock.stop_if_interrupted()
        worker = self.worker
        start = worker.time
        if cores and self._shared_cores:
            self._compute_on_shared_cores(seconds, name, cores, worker)
        else:
            worker.time += seconds
        self.recorder.observe(Span(self._rank, "compute", name, start, worker.time))

    def _compute_on_shared_cores(
        self, seconds: float, name: str, cores: int, worker: Worker
    ) -> None:
        """Compute on the cores that all hosts share, for as long as that takes.

        A continuation cannot wait. It takes as long as if all workers ran the same one.
        """
        clock, links = self._simulation.clock, self._simulation.links
        over = Completion(lambda: f"{name}, {show_seconds(seconds)} of computing")
        clock.at(
            worker.time,
            lambda: links.compute(
                self._host, seconds, cores * self._weight, lambda: clock.complete(over)
            ),
        )
        if isinstance(worker, EventContext):
            wanted = cores * self._simulation.cluster.workers
            worker.time += seconds * max(1.0, wanted / (self._shared_cores or wanted))
        else:
            clock.wait(over)
