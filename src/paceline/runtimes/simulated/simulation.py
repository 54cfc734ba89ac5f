"""A simulation: a script run once per worker, in one process, on a virtual clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from paceline.cluster.cluster import Cluster
from paceline.cluster.links import Links
from paceline.cluster.profiling import KeptGradients, Profiler
from paceline.cluster.profiling.timers import HostStopwatch
from paceline.cluster.workload import Workload
from paceline.errors import UsageError
from paceline.interfaces import (
    ServiceJob,
    current_runtime,
    enter_runtime_in_this_thread,
)
from paceline.interfaces.buckets import stand_in_for, wire_bytes
from paceline.interfaces.trainings import Place, TrainingRegistry
from paceline.records import Kept, Span, StepRecorder
from paceline.run_options import RunOptions
from paceline.runtimes.simulated.clock import Actor, Clock, Worker
from paceline.runtimes.simulated.collective_group import Communicator
from paceline.runtimes.simulated.compute import (
    ComputeModel,
    ModelCompute,
    SimulatedCompute,
)
from paceline.runtimes.simulated.continuations import EventRunner
from paceline.runtimes.simulated.inputs import SeenInputs
from paceline.runtimes.simulated.isolation import (
    EnvironmentOverlay,
    MainModules,
    RandomStates,
    UndrawnRandomStates,
    thread_count_kept,
)
from paceline.runtimes.simulated.mailbox import Mailbox
from paceline.runtimes.simulated.output import Shown, speak_as, workers_output
from paceline.runtimes.simulated.process_group import BACKEND, SimulatedProcessGroup
from paceline.runtimes.simulated.rule_schedule import Conditions
from paceline.runtimes.simulated.services import (
    SimulatedEndpoint,
    SimulatedServer,
    make_services,
    rates_of,
)
from paceline.runtimes.simulated.torch_patches import patched_process
from paceline.runtimes.simulated.watchdog import Watchdog
from paceline.torch_internals import (
    GLOO_LANES,
    group_id_of,
    load_lazy_modules,
    local_store,
    process_groups_per_thread,
    register_python_backend,
)

ACTORS = -1
"""Whose random states those of works are that follow results (`Pending.then`)."""


@dataclass
class SimulationResult:
    """What a simulation gives back: each worker's recorder, and how many times the baton
    changed hands. *kept*: each worker's records, and *spans*: those of collectives, where a
    trace was asked for. *profilers*: worker 0's, one per model, where asked for, and of
    each what *inputs* it was given. *guessed*: sentences on compressors that nobody has
    measured."""

    recorders: list[StepRecorder] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    virtual_seconds: float = 0.0
    switches: int = 0
    paced_by_script: bool = False
    stand_in: bool = False
    profilers: list[Profiler] = field(default_factory=list)
    inputs: list[SeenInputs] = field(default_factory=list)
    guessed: set[str] = field(default_factory=set)


class Simulation:
    """Runs one body per worker of *cluster*, in virtual time.

    *play*: play ring collectives message by message too, instead of pricing them.
    *lanes*: collectives that a communicator moves at a time. *trace*: keep spans.
    *profile*: measure what worker 0 really computes, and charge nothing; *paced*: or what its script
    says that it computes (`paceline.pace`). Its first gradients go into *keep*.
    *patience*: real seconds without any progress after which the process is given up.
    *look*: called now and then, on the calling thread, with the virtual time. *output*:
    whose prints are shown, see `output`; None: everybody's, as they are. *draws*: whether bodies
    may draw random numbers; without, `drawn` says after the run whether one did all the same.
    *repeats*: what is measured to plan buckets is measured once, since here all times repeat.
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
        keep: KeptGradients | None = None,
        patience: float = 20.0,
        look: Callable[[float], None] = lambda seconds: None,
        output: Shown | None = None,
        draws: bool = True,
        repeats: bool = False,
    ) -> None:
        self.cluster = cluster
        self.options = options or RunOptions()
        self.compute_model = compute or ComputeModel(seed=self.options.seed or 0)
        self.result = SimulationResult()
        self._play = play
        self._output = output
        self._lanes = lanes
        self.trace = trace
        self.profile, self.paced, self.keep = profile, paced, keep
        self._watchdog = partial(Watchdog, patience=patience, look=look)
        self.repeats = repeats
        self._random: RandomStates | UndrawnRandomStates = UndrawnRandomStates()
        if draws:
            self._random = RandomStates(self.options.seed or 0)
        self.mains = MainModules()
        self.speeds = cluster.speeds
        workers = range(cluster.workers)
        self.racks = [cluster.rack_of(worker) for worker in workers]
        self._hosts = [cluster.host_of(worker) for worker in workers]
        self.clock = Clock(cluster.workers, self._resumed, self._acting)
        self.links = Links(self.clock, cluster)
        self.conditions = Conditions(
            cluster.rules, self.clock, self.links, self.observe
        )
        self._runtimes = [
            SimulatedRuntime(self, rank) for rank in range(cluster.workers)
        ]
        self._communicators: dict[tuple[str, tuple[int, ...], int], Any] = {}
        self._made: dict[tuple[int, str, tuple[int, ...]], int] = {}
        self._names: set[str] = set()
        self._store = local_store()
        self._services: list[list[SimulatedServer]] = []
        self.server_rates = rates_of(
            self.compute_model.workload, self.compute_model.memory
        )

    def services_of(self, number: int, job: ServiceJob) -> list[SimulatedServer]:
        """The services of job *number*: made when its first worker asks."""
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
        """Whether a body drew random numbers that had none of its own (*draws*)."""
        return isinstance(self._random, UndrawnRandomStates) and self._random.drawn

    def registry_of(self, rank: int) -> TrainingRegistry:
        """What a worker's script does: its trainings, after the run."""
        return self._runtimes[rank].registry

    def runtime_of(self, rank: int) -> SimulatedRuntime:
        """Where a worker lives."""
        return self._runtimes[rank]

    def tell_place(self, rank: int, place: Place) -> None:
        """All other workers hear where worker *rank* is, at no cost."""
        for runtime in self._runtimes:
            runtime.registry.places.hear(rank, place, len(self._runtimes))

    def observe(self, span: Span) -> None:
        """Keep a span for the trace."""
        if self.trace:
            self.result.spans.append(span)

    def run(self, body: Callable[[int], object]) -> SimulationResult:
        """Run ``body(rank)`` on every worker; raises the first failure.

        `WorkerFailedError` names the worker whose body raised; `DeadlockError` says who
        waits for what; `CollectiveMismatchError` names the two calls that differ.
        """
        if self.clock.switches:
            raise UsageError("a Simulation runs once: make another one")
        register_python_backend(BACKEND, _create_group)
        load_lazy_modules()
        bodies = [
            partial(self._worker_main, rank, body)
            for rank in range(len(self._runtimes))
        ]
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
        self.result.recorders = [runtime.recorder for runtime in self._runtimes]
        self.result.virtual_seconds = max(w.time for w in self.clock.workers)
        self.result.switches = self.clock.switches
        self.result.paced_by_script = any(
            runtime.paced_by_script for runtime in self._runtimes
        )
        self.result.stand_in = self._runtimes[0].stand_in
        self.result.guessed = self._runtimes[0].guessed
        return self.result

    def init_process_group(self, init: Callable[..., None], **arguments: Any) -> None:
        """torch's own, for the calling worker, over the simulated backend."""
        rank = self.clock.current.rank
        for key, ours in (("rank", rank), ("world_size", len(self._runtimes))):
            theirs = arguments.pop(key, -1)
            if theirs not in (-1, None, ours):
                raise UsageError(
                    f"init_process_group({key}={theirs}): this is worker {rank} of "
                    f"{len(self._runtimes)} in the simulated runtime"
                )
        keep = {k: arguments[k] for k in ("timeout",) if k in arguments}
        init(
            BACKEND,
            store=self._store,
            rank=rank,
            world_size=len(self._runtimes),
            **keep,
        )

    def process_group(
        self, group_id: str, ranks: Sequence[int], shared: bool = False
    ) -> SimulatedProcessGroup:
        """The calling worker's end of the group with this name and these members: a new
        one, unless it is to be *shared* with those that it had before."""
        rank = self.clock.current.rank
        members = tuple(ranks) or tuple(range(len(self._runtimes)))
        # A name can return after its group was destroyed: the n-th time that a worker
        # makes a group is the n-th time for every other member.
        times = self._made.get((rank, group_id, members), 0)
        if not shared:
            self._made[rank, group_id, members] = times + 1
        key = (group_id, members, times)
        if key not in self._communicators:
            # paceline's own groups have names that tell more than "all workers".
            ours = any(w in group_id for w in ("channel", "after", "among"))
            whole = len(members) == len(self._runtimes) and not ours
            name = "world" if whole else group_id
            if name in self._names:
                name = f"{name} {len(self._communicators)}"
            self._names.add(name)
            communicator = Communicator(
                name,
                members,
                self.clock,
                self.links,
                lanes=self._lanes,
                play=self._play,
                observe=self.observe if self.trace else None,
            )
            self._communicators[key] = communicator, Mailbox(communicator)
        communicator, mailbox = self._communicators[key]
        return SimulatedProcessGroup(
            members.index(rank), communicator, mailbox, self.process_group
        )

    def _worker_main(self, rank: int, body: Callable[[int], object]) -> None:
        runtime = self._runtimes[rank]
        enter_runtime_in_this_thread(runtime)
        _of_thread.simulation = self
        speak_as(rank)
        EnvironmentOverlay.set_for_this_thread(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(runtime.size),
                **place_of(rank, self._hosts, torch.cuda.device_count()),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                "TORCH_DIST_INIT_BARRIER": "0",  # would wait in a store, outside the clock
                "TORCHELASTIC_RUN_ID": "simulated",
            }
        )
        torch.set_num_threads(1)
        # CPU and CUDA backward passes run on the calling thread, hooks included: the
        # engine's own threads would not hold the baton.
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
    def _acting(self, actor: Actor) -> Iterator[None]:
        """What runs is worker *actor*'s, whosever thread this is.

        Random states are those of all works together: what a worker draws does not depend
        on when its messages come.
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

    def _resumed(self, worker: Worker) -> None:
        self._random.hand_to(worker.rank)
        self.mains.hand_to(worker.rank)


_of_thread = threading.local()


def _create_group(options: Any, _: Any) -> dist.ProcessGroup:
    simulation: Simulation = _of_thread.simulation
    ranks = list(options.global_ranks_in_group)
    return simulation.process_group(group_id_of(options), ranks)


FEW_ELEMENTS = 2
BYTES_AN_ELEMENT = 1024 * 1024
"""Of a tensor that stands for a large one: methods that cut tensors can cut it too."""
MOST_ELEMENTS = 1024
"""However large the one is that it stands for."""


class SimulatedRuntime:
    """One simulated worker's `Runtime`."""

    name: ClassVar[str] = "simulated"

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self._simulation = simulation
        self._service_jobs = 0
        """How many jobs of services this worker has asked for."""
        self.alone = False
        self.registry = TrainingRegistry(simulation.options, self._training_broke)
        self.registry.keeps_ended = (
            True  # a plan looks at them when the script has ended
        )
        self.registry.places.connect(
            rank, partial(simulation.tell_place, rank), waits=False
        )
        self.rank = rank
        self.size = simulation.cluster.workers
        self.speeds = simulation.speeds
        self.cluster, self.racks = simulation.cluster, simulation.racks
        self.aggregators = None
        kept = None
        if simulation.trace:
            kept = Kept([], [])
            simulation.result.kept.append(kept)
        self.recorder = StepRecorder(rank, self.now, kept)
        if rank == 0:
            self.recorder.observers.append(simulation.conditions.reached)
        processor = self.cluster.processor
        self._compute = SimulatedCompute(
            simulation.compute_model,
            rank,
            simulation.speeds[rank],
            self._spend,
            1.0 if processor is None else processor.crowd(self.size),
        )

    def connect(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")

    def services(self, job: ServiceJob) -> list[SimulatedEndpoint]:
        number = self._service_jobs
        self._service_jobs += 1
        return [
            SimulatedEndpoint(self.rank, server, self.recorder)
            for server in self._simulation.services_of(number, job)
        ]

    def runner(self, name: str, *, thread: bool) -> EventRunner:
        return EventRunner(self._simulation.clock, self.rank)

    def now(self) -> float:
        if not self._acts:
            self._compute.settle()
        return self._worker.time

    def pace(self, seconds: float) -> None:
        self._compute.pace(seconds)

    def spend(self, seconds: float, what: str) -> None:
        if not self._acts:
            self._compute.settle()
        self._compute.spend(seconds, what)

    def outside(self, wait: Callable[[], None]) -> None:
        clock = self._simulation.clock
        clock.waits_outside = True
        try:
            wait()
        finally:
            clock.waits_outside = False

    def compute(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        samples: float | None,
    ) -> ModelCompute | Profiler | None:
        own = getattr(model, "workload", None)
        if not isinstance(own, Workload):
            own = None
        if self._simulation.profile and own is None:
            if self.rank:
                return None
            # Only one worker runs at a time, so the host's clock tells what it computes.
            clock = self.now if self._simulation.paced else time.perf_counter
            profiler = Profiler(
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

    def stopwatch(self, device: torch.device) -> HostStopwatch:
        return HostStopwatch(self.now, repeats=self._simulation.repeats)

    def blank(self, size: int, device: torch.device) -> torch.Tensor:
        elements = max(FEW_ELEMENTS, min(size // BYTES_AN_ELEMENT, MOST_ELEMENTS))
        return stand_in_for(size, torch.zeros(elements, device=device))

    @property
    def paced_by_script(self) -> bool:
        """Whether the script has called `paceline.pace`."""
        return self._compute.paced_by_script

    @property
    def guessed(self) -> set[str]:
        """What was charged for compressors that nobody has measured, in words."""
        return self._compute.guessed

    @property
    def stand_in(self) -> bool:
        """Whether the model's own workload was charged."""
        return self._compute.stand_in

    def _training_broke(self, number: int, cause: str) -> None:
        """Whoever waits for it waits for ever: the deadlock's words tell why."""
        self._worker.fault = f"it broke off its training: {cause}"

    @property
    def _acts(self) -> bool:
        """Whether what runs now is a work that follows a result, and not the script."""
        current = self._simulation.clock.current
        return isinstance(current, Actor) and current.rank == self.rank

    @property
    def _worker(self) -> Worker:
        clock = self._simulation.clock
        return clock.current if self._acts else clock.workers[self.rank]

    def _spend(self, seconds: float, name: str) -> None:
        self._simulation.clock.stop_if_interrupted()
        worker = self._worker
        start = worker.time
        worker.time += seconds
        self.recorder.observe(Span(self.rank, "compute", name, start, worker.time))


def place_of(rank: int, hosts: Sequence[int], devices: int) -> dict[str, str]:
    """On which machine a worker is, and its number there; *hosts* are all workers'.

    A cluster whose hosts have a worker each is taken for one machine, which it really is:
    "once per machine" then means once, for files that are loaded or written. With GPUs a
    number is also that of a device, and of these there are *devices*.
    """
    if len(set(hosts)) == len(hosts):
        hosts = [0] * len(hosts)
    mine = hosts[rank]
    number = hosts[:rank].count(mine)
    return {
        "LOCAL_RANK": str(number % devices if devices else number),
        "LOCAL_WORLD_SIZE": str(hosts.count(mine)),
        "GROUP_RANK": str(mine),
    }
