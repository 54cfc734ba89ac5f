"""Collects evidence on every worker, in all runtimes.

`Examination` observes a script's training. After the script it measures network and hosts together with the
other workers. `examine_simulation` and `examine_simulated_network` do so in virtual time, `main` in the
process of a real or emulated worker. `ExaminedJob` is the job that `paceline doctor` launches.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import ModuleType

import msgspec
import torch

from paceline.cluster import Cluster, Workload, cluster_toml
from paceline.cluster.probe import ProbeResult, infer_cluster, measure
from paceline.cluster.probe.infer import find_racks
from paceline.cluster.probe.pairs import MOST_BYTES, TRIES, PairProbe
from paceline.cluster.profiling import StepProfiler
from paceline.cluster.profiling.step_phases import StepWatch
from paceline.core.broadcast import gather_bytes
from paceline.errors import UsageError
from paceline.interfaces import Runtime
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.join import join_runtime
from paceline.runtimes.results import not_steady
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.runtimes.simulated.profile_cache import profiled, run_or_profile_anew
from paceline.tools.doctor.evidence import (
    ConcurrentFlows,
    Evidence,
    PathEvidence,
    WorkerEvidence,
)
from paceline.tools.doctor.host import busy_cores, cores, interfaces
from paceline.tools.doctor.network_model import SLOW_LINK

IDLE_SECONDS = 0.5
CPU = torch.device("cpu")


class _WorkerReport(msgspec.Struct):
    """A worker's report to rank 0; *busy*: busy cores of its host while no worker does anything."""

    worker: WorkerEvidence
    busy: float
    workload: Workload | None
    spec: str


class Examination:
    """Measures one worker during ``paceline doctor``. It begins with the runtime, before the script.

    Args:
        runtime: This worker's runtime.
        deliver: Called on rank 0 with the evidence, once the script has ended without an error.
        seconds: Duration for each pair of hosts and direction.
        on_progress: Called on rank 0 with the name of the next measurement.
    """

    def __init__(
        self,
        runtime: Runtime,
        deliver: Callable[[Evidence], None],
        *,
        seconds: float = 0.1,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._runtime, self._deliver, self._seconds = runtime, deliver, seconds
        self._on_progress = on_progress
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
            return ()  # Only the first model is observed.
        return [one for one in (self._profiler, self._watch) if one is not None]

    def _examine(self) -> None:
        """Measure. Collective: the script has ended on all workers."""
        runtime, on_progress = self._runtime, self._on_progress
        threads = torch.get_num_threads()
        runtime.connect()
        found = measure_network(
            runtime,
            self._seconds,
            lambda text: on_progress(text) if runtime.rank == 0 else None,
        )
        reports = [
            msgspec.json.decode(text, type=_WorkerReport)
            for text in gather_bytes(msgspec.json.encode(self._report(threads)), CPU)
        ]
        if runtime.rank == 0:
            self._deliver(_evidence(runtime, found, reports))
        self.is_over = True

    def _report(self, threads: int) -> _WorkerReport:
        runtime = self._runtime
        simulated = runtime.clock.is_virtual
        step = None if self._watch is None else self._watch.phases()
        used, others = (None, ()) if simulated else interfaces()
        own_cores = cores()
        if simulated and runtime.cluster is not None:
            rack = runtime.cluster.racks[runtime.cluster.rack_of(runtime.rank)]
            own_cores = max(rack.cores, rack.workers_per_host)
        return _WorkerReport(
            worker=WorkerEvidence(
                rank=runtime.rank,
                host=0,
                threads=threads,
                cores=own_cores,
                interface=used,
                others=others,
                step=step,
            ),
            busy=0.0 if simulated else busy_cores(IDLE_SECONDS),
            workload=self._workload() if step is not None else None,
            spec=runtime.recorder.method or "bsp",
        )

    def _workload(self) -> Workload | None:
        paced = self._runtime.workload
        if paced is not None:
            # Paced processes sleep, and keep no core busy.
            return paced if self._runtime.clock.is_virtual else replace(paced, cores=0)
        if self._profiler is None:
            return None
        try:
            return self._profiler.workload("measured by paceline doctor")
        except UsageError:
            return None  # The script never called the model itself.


def _evidence(
    runtime: Runtime, found: NetworkEvidence, reports: Sequence[_WorkerReport]
) -> Evidence:
    probe = found.probe
    names = probe.names or [""] * runtime.size
    workers = tuple(
        msgspec.structs.replace(
            one.worker,
            rank=rank,
            host=probe.hosts[rank],
            name=names[rank],
            speed=probe.speeds[rank],
            other_load=one.busy,
        )
        for rank, one in enumerate(reports)
    )
    return Evidence(
        runtime=runtime.name,
        workers=workers,
        paths=found.paths,
        concurrent=found.concurrent,
        cluster=cluster_toml(infer_cluster(probe)),
        workload=_median_workload(reports),
        spec=reports[0].spec,
        shared_cores=probe.shared_cores,
        notes=_cautions(runtime, reports),
    )


def _cautions(runtime: Runtime, reports: Sequence[_WorkerReport]) -> tuple[str, ...]:
    """Reasons why the observed steps may not represent later ones."""
    step = reports[0].worker.step
    if step is None or step.steady:
        return ()
    return (not_steady(runtime.recorder.step_count, runtime.recorder),)


def _median_workload(reports: Sequence[_WorkerReport]) -> Workload | None:
    """Return the workload of the worker with the median time."""
    known = [one.workload for one in reports if one.workload is not None]
    known.sort(key=lambda one: one.forward_seconds + one.backward_seconds + one.update)
    return known[len(known) // 2] if known else None


# ---- network ----
REPEATS = 4
"""Rounds after the first."""
MOST_REPEATED = 64
"""Paths that are measured again. If there are more, those between ranks close to each other."""
MOST_DOUBTFUL = 16
"""Other paths that are measured again because they looked slow."""
MOST_SHIFTS = 8
"""Rounds in which all hosts send at the same time."""


@dataclass(frozen=True)
class NetworkEvidence:
    """The network between hosts.

    Attributes:
        probe: The measurements of ``paceline probe``.
        paths: Every path between two hosts.
        concurrent: Rounds in which all hosts send at the same time.
    """

    probe: ProbeResult
    paths: tuple[PathEvidence, ...]
    concurrent: tuple[ConcurrentFlows, ...]


def measure_network(
    runtime: Runtime, seconds: float, on_progress: Callable[[str], None]
) -> NetworkEvidence:
    """Measure the network between the workers' hosts. Collective; the same on every rank.

    Args:
        runtime: This worker's runtime.
        seconds: Duration for each pair of hosts and direction, in the first round.
        on_progress: Called with the name of the next measurement.

    Raises:
        UsageError: There is only one worker.
    """
    probe = measure(runtime, seconds_per_pair=seconds, on_progress=on_progress)
    hosts = list(dict.fromkeys(probe.hosts))
    leaders = [probe.hosts.index(host) for host in hosts]
    pairs = PairProbe(runtime, seconds)
    rates: dict[tuple[int, int], list[float]] = {
        (a, b): [probe.goodput[a][b]] for a in leaders for b in leaders if a != b
    }
    sent = dict.fromkeys(rates, 0.0)
    lost = dict.fromkeys(rates, 0.0)
    concurrent: list[ConcurrentFlows] = []
    shifts = _shifts(len(leaders))
    repeated = _repeated(leaders)
    flows = [*repeated, *_doubtful(rates, repeated)]
    for number in range(REPEATS):
        on_progress(f"links again, round {number + 2} of {REPEATS + 1}")
        found = pairs.remeasure(flows, [rates[flow][0] for flow in flows])
        for (a, b), one in zip(flows, found, strict=True):
            rates[a, b].append(one.rate)
            sent[a, b] += one.sent
            lost[a, b] += one.lost
            sent[b, a] += one.sent_back
            lost[b, a] += one.lost_back
        for shift in shifts[number::REPEATS]:
            concurrent.append(
                _concurrent_flows(pairs, leaders, hosts, shift, rates, seconds)
            )
    paths = tuple(
        PathEvidence(
            source=probe.hosts[a],
            target=probe.hosts[b],
            rates=tuple(several),
            latency=probe.latency[a][b],
            retransmitted=lost[a, b] / sent[a, b] if sent[a, b] else None,
        )
        for (a, b), several in rates.items()
    )
    return NetworkEvidence(_by_medians(probe, rates), paths, tuple(concurrent))


def _by_medians(
    probe: ProbeResult, rates: dict[tuple[int, int], list[float]]
) -> ProbeResult:
    """Return the probe with the medians of all rounds."""
    hosts = probe.hosts
    first = {host: hosts.index(host) for host in hosts}
    usual = {flow: median(several) for flow, several in rates.items()}
    goodput = [[usual.get((first[a], first[b]), 0.0) for b in hosts] for a in hosts]
    racks = find_racks(goodput, probe.latency, hosts)
    return msgspec.structs.replace(
        probe,
        goodput=goodput,
        racks=racks,
        # Uplinks were measured between the racks of the first round.
        uplinks=probe.uplinks if racks == probe.racks else [],
    )


def _repeated(leaders: Sequence[int]) -> list[tuple[int, int]]:
    count = len(leaders)
    reach = count - 1
    while reach > 1 and count * reach > MOST_REPEATED:
        reach -= 1
    near = [
        (i, (i + sign * distance) % count)
        for distance in range(1, reach // 2 + 1)
        for i in range(count)
        for sign in (1, -1)
    ]
    if reach == count - 1:  # all of them
        near = [(i, j) for i in range(count) for j in range(count) if i != j]
    return [(leaders[i], leaders[j]) for i, j in near]


def _doubtful(
    rates: Mapping[tuple[int, int], Sequence[float]],
    repeated: Collection[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Return the slowest other paths relative to their hosts' best: one measurement may mislead."""
    again = set(repeated)
    best_out: dict[int, float] = {}
    best_into: dict[int, float] = {}
    for (a, b), (rate, *_) in rates.items():
        best_out[a] = max(rate, best_out.get(a, 0.0))
        best_into[b] = max(rate, best_into.get(b, 0.0))
    parts = {
        (a, b): rate / min(best_out[a], best_into[b])
        for (a, b), (rate, *_) in rates.items()
        if (a, b) not in again
    }
    slow = [pair for pair, part in parts.items() if part < SLOW_LINK]
    return sorted(slow, key=lambda pair: (parts[pair], pair))[:MOST_DOUBTFUL]


def _shifts(count: int) -> list[int]:
    """Return the distance in ranks that hosts send over in each round: all, or some spread over all."""
    every = list(range(1, count))
    if len(every) <= MOST_SHIFTS:
        return every
    step = (count - 1) / MOST_SHIFTS
    spread = {round(1 + i * step) for i in range(MOST_SHIFTS - 1)}
    return sorted({1, count // 2, *spread})


def _concurrent_flows(
    pairs: PairProbe,
    leaders: Sequence[int],
    hosts: Sequence[int],
    shift: int,
    rates: dict[tuple[int, int], list[float]],
    seconds: float,
) -> ConcurrentFlows:
    """Let all hosts send *shift* ranks ahead, each as much as it could alone in that time."""
    count = len(leaders)
    flows = [(leaders[i], leaders[(i + shift) % count]) for i in range(count)]
    sizes = [min(MOST_BYTES, int(median(rates[flow]) * seconds)) for flow in flows]
    found = pairs.at_once(flows, sizes, TRIES)
    return ConcurrentFlows(
        sources=tuple(hosts),
        targets=tuple(hosts[(i + shift) % count] for i in range(count)),
        rates=tuple(found),
    )


# ---- jobs that doctor launches ----


@dataclass(frozen=True, kw_only=True)
class ExaminedJob:
    """A job for doctor, in any runtime.

    Attributes:
        script: The training script, with its *arguments*; None: only network and hosts are measured.
        options: The training's options.
        seconds: Duration for each pair of hosts and direction.
    """

    script: str | None
    arguments: Sequence[str]
    options: RunOptions
    seconds: float

    def program(self, file: Path, pace: str | None = None) -> ScriptJob:
        """Return the program of each worker's process: rank 0 writes the evidence to *file*."""
        words = [f"--output={file}", f"--seconds-per-pair={self.seconds}"]
        if self.script is not None:
            words += [self.script, *self.arguments]
        return ScriptJob(_PROGRAM, words, replace(self.options, pace=pace))

    def read(self, file: Path) -> Evidence | None:
        """Return the program's output; None if rank 0 is on another machine."""
        return self._named(Evidence.read(file.read_bytes())) if file.exists() else None

    def simulate(
        self, cluster: Cluster, compute: ComputeModel, scratch: Path
    ) -> Evidence:
        """Run the job on a simulated *cluster*.

        Args:
            cluster: The network.
            compute: Compute times; without a workload they are replaced by the script's profile.
            scratch: Folder of the script's checkpoints.
        """
        if self.script is None:
            return examine_simulated_network(cluster, self.seconds)
        job = ScriptJob(self.script, self.arguments, self.options)
        if compute.workload is None:
            compute = profiled(job, cluster, compute, scratch)
        found: list[Evidence] = []

        def make(compute: ComputeModel) -> Simulation:
            simulation = Simulation(
                cluster, options=self.options, compute=compute, output="first"
            )
            examine_simulation(simulation, found.append, self.seconds)
            return simulation

        run_or_profile_anew(make, job, cluster, compute, scratch)
        return self._named(found[-1])

    def _named(self, evidence: Evidence) -> Evidence:
        return msgspec.structs.replace(
            evidence, script=self.script or "", arguments=tuple(self.arguments)
        )


_PROGRAM = str(Path(__file__).parent / "__main__.py")


# ---- simulated runtime ----


def examine_simulation(
    simulation: Simulation, deliver: Callable[[Evidence], None], seconds: float = 0.1
) -> None:
    """Add doctor's measurements to a simulation that has not run yet.

    Args:
        simulation: Runs afterwards.
        deliver: Called with the evidence.
        seconds: Duration for each pair of hosts and direction.
    """
    for rank in range(simulation.cluster.workers):
        Examination(simulation.runtime_of(rank), deliver, seconds=seconds)


def examine_simulated_network(cluster: Cluster, seconds: float = 0.1) -> Evidence:
    """Measure a simulated network without a training."""
    found: list[Evidence] = []
    simulation = Simulation(cluster)
    examine_simulation(simulation, found.append, seconds)

    def body(rank: int) -> None:
        runtime = join_runtime()
        runtime.connect()
        runtime.recorder.begin(
            "bsp"
        )  # The cluster's rules apply from the start of a training.

    simulation.run(body)
    return found[-1]


# ---- real and emulated runtime ----


def main() -> None:
    """Join the job, run the script if there is one, and let rank 0 write the evidence."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds-per-pair", type=float, required=True)
    parser.add_argument("script", nargs="?")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    runtime = join_runtime()
    runtime.registry.options = replace(runtime.registry.options, tells=False)

    def write(evidence: Evidence) -> None:
        # Renamed when complete, so that readers never find a part of it.
        part = options.output.with_suffix(".part")
        part.write_bytes(evidence.to_json())
        os.replace(part, options.output)

    def on_progress(text: str) -> None:
        print(f"doctor: {text}", file=sys.stderr, flush=True)

    examination = Examination(
        runtime, write, seconds=options.seconds_per_pair, on_progress=on_progress
    )
    if options.script is None:
        runtime.connect()
        # The cluster's rules apply from the start of a training.
        runtime.recorder.begin("bsp")
        return
    try:
        run_as_main(options.script, options.arguments)
    except SystemExit as end:
        if end.code:
            raise
    if not examination.is_over:
        runtime.connect()  # The measurements run at the end of a job, so one must exist.


def run_as_main(script: str, arguments: list[str]) -> None:
    """Do what ``python SCRIPT ARGUMENTS`` does, in this process."""
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"the script {script} cannot be run: {error}") from error
    module = ModuleType("__main__")
    module.__file__ = script
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    exec(code, module.__dict__)
