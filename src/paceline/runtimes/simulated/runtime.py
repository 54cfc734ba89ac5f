"""One worker of a simulation, and what its script sees of the virtual world."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

from paceline.buckets import stand_in_for, wire_bytes
from paceline.cluster.profiling import Profiler
from paceline.cluster.profiling.timers import HostStopwatch
from paceline.cluster.workload import Workload
from paceline.interfaces import ServiceJob
from paceline.interfaces.trainings import Job
from paceline.records import Journal, Kept, Span
from paceline.runtimes.simulated.clock import Actor, Worker
from paceline.runtimes.simulated.compute import ModelCompute, VirtualCompute
from paceline.runtimes.simulated.continuations import EventRunner
from paceline.runtimes.simulated.inputs import SeenInputs
from paceline.runtimes.simulated.services import VirtualEndpoint

if TYPE_CHECKING:
    from paceline.runtimes.simulated.simulation import Simulation

FEW_ELEMENTS = 2
BYTES_AN_ELEMENT = 1024 * 1024
"""Of a tensor that stands for a large one: methods that cut tensors can cut it too."""
MOST_ELEMENTS = 1024
"""However large the one is that it stands for."""


class VirtualWorld:
    """One virtual worker's `World`."""

    name: ClassVar[str] = "virtual"

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self._simulation = simulation
        self._service_jobs = 0
        """How many jobs of services this worker has asked for."""
        self.alone = False
        self.job = Job(simulation.options, self._training_broke)
        self.job.keeps_ended = True  # a plan looks at them when the script has ended
        self.job.places.connect(rank, partial(simulation.tell_place, rank), waits=False)
        self.rank = rank
        self.size = simulation.cluster.workers
        self.speeds = simulation.speeds
        self.cluster, self.racks = simulation.cluster, simulation.racks
        self.aggregators = None
        kept = None
        if simulation.trace:
            kept = Kept([], [])
            simulation.result.kept.append(kept)
        self.journal = Journal(rank, self.now, kept)
        if rank == 0:
            self.journal.observers.append(simulation.conditions.reached)
        processor = self.cluster.processor
        self._compute = VirtualCompute(
            simulation.compute_model,
            rank,
            simulation.speeds[rank],
            self._spend,
            1.0 if processor is None else processor.crowd(self.size),
        )

    def connect(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")

    def services(self, job: ServiceJob) -> list[VirtualEndpoint]:
        number = self._service_jobs
        self._service_jobs += 1
        return [
            VirtualEndpoint(self.rank, server, self.journal)
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
        self.journal.observe(Span(self.rank, "compute", name, start, worker.time))


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
