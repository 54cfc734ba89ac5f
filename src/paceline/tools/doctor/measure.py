"""One worker's side of an examination: watches what its script trains, then measures network and
machine together with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch

from paceline.cluster import Workload, cluster_toml
from paceline.cluster.probe import infer_cluster
from paceline.cluster.profiling import StepProfiler
from paceline.core.broadcast import gather_bytes
from paceline.errors import UsageError
from paceline.interfaces import Runtime
from paceline.runtimes.results import unsettled
from paceline.tools.doctor import host_measurement
from paceline.tools.doctor.evidence import Evidence, WorkerEvidence
from paceline.tools.doctor.measure_network import NetworkFound, examine_network
from paceline.tools.doctor.step_phases import StepWatch

IDLE_SECONDS = 0.5
CPU = torch.device("cpu")


class _Said(msgspec.Struct):
    """What a worker tells rank 0: *busy* cores of its machine, while no worker does anything."""

    worker: WorkerEvidence
    busy: float
    workload: Workload | None
    spec: str


class Examination:
    """Begins with the runtime, before the script; *deliver* is given the evidence, on rank 0, once the script
    has ended well. *seconds*: for each pair of hosts, each way. *say*: is told what begins, on rank 0.
    """

    def __init__(
        self,
        runtime: Runtime,
        deliver: Callable[[Evidence], None],
        *,
        seconds: float = 0.1,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._runtime, self._deliver, self._seconds = runtime, deliver, seconds
        self._say = say
        self._model: torch.nn.Module | None = None
        self._watch: StepWatch | None = None
        self._profiler: StepProfiler | None = None
        self.is_over = False
        runtime.registry.watchers.append(self._training_begins)
        runtime.registry.at_exit(self._examine, last=True)

    def _training_begins(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
    ) -> Sequence[object]:
        if self._model is None:
            self._model = model
            stopwatch = self._runtime.clock.stopwatch(parameters[0][1].device)
            self._profiler = StepProfiler(model, parameters, stopwatch)
            self._watch = StepWatch(self._runtime, model, parameters)
        if self._model is not model:
            return ()  # the first model tells enough
        return [one for one in (self._profiler, self._watch) if one is not None]

    def _examine(self) -> None:
        """Collective: the script has ended on all workers."""
        runtime, say = self._runtime, self._say
        threads = torch.get_num_threads()
        runtime.connect()
        found = examine_network(
            runtime,
            self._seconds,
            lambda text: say(text) if runtime.rank == 0 else None,
        )
        said = [
            msgspec.json.decode(text, type=_Said)
            for text in gather_bytes(msgspec.json.encode(self._say_own(threads)), CPU)
        ]
        if runtime.rank == 0:
            self._deliver(_evidence(runtime, found, said))
        self.is_over = True

    def _say_own(self, threads: int) -> _Said:
        runtime = self._runtime
        simulated = runtime.clock.is_virtual
        step = None if self._watch is None else self._watch.evidence()
        used, others = (None, ()) if simulated else host_measurement.interfaces()
        cores = host_measurement.cores()
        if simulated and runtime.cluster is not None:
            rack = runtime.cluster.racks[runtime.cluster.rack_of(runtime.rank)]
            cores = max(rack.cores, rack.workers_per_host)
        return _Said(
            worker=WorkerEvidence(
                rank=runtime.rank,
                host=0,
                threads=threads,
                cores=cores,
                interface=used,
                others=others,
                step=step,
            ),
            busy=0.0 if simulated else host_measurement.busy_cores(IDLE_SECONDS),
            workload=self._workload() if step is not None else None,
            spec=runtime.recorder.method or "bsp",
        )

    def _workload(self) -> Workload | None:
        paced = self._runtime.workload
        if paced is not None:
            # Processes sleep so long, and keep no core busy.
            return paced if self._runtime.clock.is_virtual else replace(paced, cores=0)
        if self._profiler is None:
            return None
        try:
            return self._profiler.workload("measured by paceline doctor")
        except UsageError:
            return None  # the model itself was never called


def _evidence(runtime: Runtime, found: NetworkFound, said: Sequence[_Said]) -> Evidence:
    findings = found.findings
    names = findings.names or [""] * runtime.size
    workers = tuple(
        msgspec.structs.replace(
            one.worker,
            rank=rank,
            host=findings.hosts[rank],
            name=names[rank],
            speed=findings.speeds[rank],
            other_load=one.busy,
        )
        for rank, one in enumerate(said)
    )
    return Evidence(
        runtime=runtime.name,
        workers=workers,
        paths=found.paths,
        together=found.together,
        cluster=cluster_toml(infer_cluster(findings)),
        workload=_of_the_usual(said),
        spec=said[0].spec,
        shared_cores=findings.shared_cores,
        notes=_cautions(runtime, said),
    )


def _cautions(runtime: Runtime, said: Sequence[_Said]) -> tuple[str, ...]:
    """Why the steps that were watched tell little about later ones, if they do."""
    step = said[0].worker.step
    if step is None or step.steady:
        return ()
    return (unsettled(runtime.recorder.step_count, runtime.recorder),)


def _of_the_usual(said: Sequence[_Said]) -> Workload | None:
    """The workload of the worker that has the median time."""
    known = [one.workload for one in said if one.workload is not None]
    known.sort(key=lambda one: one.forward_seconds + one.backward_seconds + one.update)
    return known[len(known) // 2] if known else None
