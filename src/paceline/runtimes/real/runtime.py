"""The real runtime: one process per worker, on the wall clock.

torchrun, srun, mpirun or any program that sets torchrun's variables launches the workers.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from paceline.cluster import Cluster, Workload
from paceline.cluster.profiling import GradientDump, StepProfiler, times_of, with_times
from paceline.cluster.profiling.timers import stopwatch_for
from paceline.collectives.pending import ThreadRunner, WaitingRunner
from paceline.collectives.process_groups import default_store
from paceline.collectives.torch_group import TorchGroup
from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import (
    Compute,
    ContinuationRunner,
    Endpoint,
    ServiceJob,
    Stopwatch,
)
from paceline.interfaces.trainings import TrainingRegistry
from paceline.records import StepRecorder
from paceline.run_options import RunOptions
from paceline.runtimes import launchers, progress, spawn_check
from paceline.runtimes.launchers import Place
from paceline.runtimes.processes import is_consequence, write_whole_lines
from paceline.runtimes.python_internals import main_thread_is_in
from paceline.runtimes.real import external_worker
from paceline.runtimes.real.cluster_check import agree_on_cluster, load_of
from paceline.runtimes.real.compute import PacedCompute
from paceline.runtimes.real.exit import ExitWatcher, write_torchelastic_error
from paceline.runtimes.real.hang_report import HangWatch
from paceline.runtimes.real.job_store import JobStore
from paceline.runtimes.real.peer_monitor import PeerMonitor, end_after_grace, exit_grace
from paceline.runtimes.real.server_process import SURVIVE_VARIABLE
from paceline.runtimes.real.services import RealServices
from paceline.runtimes.results import RunResult, gather_stats
from paceline.timeouts import timeouts
from paceline.tools.report.run_files import WorkerRecords
from paceline.torch_internals import COLLECTIVES, local_store
from paceline.units import show_count


class HostClock:
    """The host's clock, as a `RuntimeClock`: all work takes its real time."""

    is_virtual: ClassVar[bool] = False

    def now(self) -> float:
        return time.perf_counter()

    def pace(self, seconds: float) -> None:
        if seconds:
            time.sleep(seconds)

    def charge(self, seconds: float, what: str) -> None:
        """Do nothing: work takes its real time."""

    def external(self, wait: Callable[[], None]) -> None:
        wait()

    def stopwatch(self, device: torch.device) -> Stopwatch:
        return stopwatch_for(device)


class RealRuntime:
    """This process as one worker of a job.

    The launcher's variables give its rank (see `launchers`). Without them the process is a job of
    one worker.
    """

    name: ClassVar[str] = "real"
    weights: Mapping[int, int] | None = None

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.clock = HostClock()
        place = _find_place()
        self.rank, self.size = (0, 1) if place is None else (place.rank, place.size)
        if self.size > 1:
            write_whole_lines()
        self.cluster: Cluster | None = None
        self._records: WorkerRecords | None = None
        if options.records is not None:
            # Other tools' traces, and other machines' records, use this clock.
            clock = time.time() - self.clock.now()
            self._records = WorkerRecords(options.records, clock)
        self.recorder = StepRecorder(self.rank, self.clock.now, self._records)
        self.registry = TrainingRegistry(options, self._training_broke)
        self._profilers: list[StepProfiler] = []
        self._paced: list[PacedCompute] = []
        self._results_written = False
        self._known_store: JobStore | None = None
        self._liveness: PeerMonitor | None = None
        self._services: RealServices | None = None
        self._knows_cluster = False
        self.server_only = os.environ.get(SURVIVE_VARIABLE) == "1"
        if self.server_only:
            spawn_check.warn_of_process_group(self.rank)
        progress.attach_progress_writer(
            self.recorder,
            lambda: self.registry.first_step,
            server_only=self.server_only,
        )
        self._exit_grace = exit_grace()
        self._failure_announced = threading.Event()
        self._failing = threading.Event()
        self._leaving = False
        self._failure_judged = threading.Event()
        self._failure_judged.set()
        self._broke = False
        ExitWatcher(
            *(lambda: self.recorder.step_count, self.close, self._leave),
            matters=place is not None or self.size > 1 or self.server_only,
        )

    def connect(self) -> None:
        if self.server_only:
            self._learn_cluster()
            return
        if not dist.is_initialized():
            self._initialize()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.recorder.worker = self.rank
        if self.size > 1 and self._liveness is None:
            self._liveness = PeerMonitor(
                self.rank,
                self.size,
                self._job_store,
                self._lost_a_peer,
                self._training_of_a_peer_broke,
                self.registry.consolidated_entries,
                HangWatch(self.recorder, self._step_under_way),
            )
        self._learn_cluster()

    @property
    def _job_store(self) -> JobStore:
        """Return the job's store. Workers that communicate through servers only have one each."""
        if self._known_store is None:
            store = local_store() if self.server_only else default_store()
            self._known_store = JobStore(store, self.size)
        return self._known_store

    def _step_under_way(self) -> int:
        return self.registry.first_step + self.recorder.step_count + 1

    def _learn_cluster(self) -> None:
        """Read and check the cluster, once.

        Collective, unless workers communicate through servers only.
        """
        if self._knows_cluster:
            return
        self._knows_cluster = True
        self.cluster = self._find_cluster(self.options.cluster)

    def _find_cluster(self, file: str | None) -> Cluster | None:
        if self.size > 1 and not self.server_only:
            return agree_on_cluster(self.rank, self.size, file, self._job_store)
        return None if file is None else load_of(file, self.size)

    def _initialize(self) -> None:
        backend = "gloo"
        if torch.cuda.is_available():
            devices = torch.cuda.device_count()
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % devices)
            # All ranks of a machine choose alike: NCCL refuses two ranks on one device.
            if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= devices:
                backend = "cpu:gloo,cuda:nccl"
        variables = os.environ.keys()
        if "RANK" in variables and (self.size > 1 or "MASTER_ADDR" in variables):
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=local_store(), rank=0, world_size=1)

    def services(self, job: ServiceJob) -> Sequence[Endpoint]:
        if self._services is None:
            self._services = RealServices(
                self.rank, self.size, self._job_store, self.recorder
            )
        return self._services.find(job)

    def workers(self, name: str) -> TorchGroup:
        return TorchGroup(name)

    def runner(self, name: str, *, thread: bool) -> ContinuationRunner:
        return ThreadRunner(f"paceline {name}") if thread else WaitingRunner()

    def compute(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        samples: float | None,
    ) -> Compute | None:
        if self.options.profile is not None:
            keep = None
            if self.options.gradients is not None and self.rank == 0:
                keep = GradientDump(self.options.gradients, self.options.gradient_steps)
            watch = self.clock.stopwatch(parameters[0][1].device)
            profiler = StepProfiler(model, parameters, watch, keep)
            self._profilers.append(profiler)
            return profiler
        own = getattr(model, "workload", None)
        if isinstance(own, Workload):
            self._paced.append(PacedCompute(own, samples, 1.0))
            return self._paced[-1]
        # Compute takes its real time.
        return None

    @property
    def workload(self) -> Workload | None:
        return self._paced[0].workload if self._paced else None

    def blank(self, size: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(-(-size // 4), device=device)

    @property
    def compute_from(self) -> str:
        """Origin of compute times, as one line for the user."""
        return "what it takes"

    def _training_broke(self, number: int, cause: str) -> None:
        self._broke = True
        if self._liveness is not None and not is_consequence(cause):
            fault = f"broke off its training: {cause}"
            self._liveness.report_training_failure(number, fault)

    def _training_of_a_peer_broke(self, number: int, sentence: str) -> None:
        """End this worker if the script of a peer has caught the error that ended its training.

        This worker would wait for the peer forever. Nothing is done if all ranks get the same
        error, which may reach this one a moment later.
        """
        job = self.registry
        if job.is_over(number) and not is_consequence(job.broken_by(number)):
            return
        self._failure_judged.clear()
        try:
            # This rank's own error comes from gloo, a moment later.
            self._failing.wait(timeouts.collective_grace)
            own = job.broken_by(number)
            if not own or is_consequence(own):
                self._lost_a_peer(sentence)
        finally:
            self._failure_judged.set()

    def _lost_a_peer(self, sentence: str) -> None:
        self.recorder.lost = sentence
        write_torchelastic_error(PeerLostError(sentence))
        end_after_grace(
            *(self.rank, sentence, self._failure_announced),
            *(self._waits_for_others, self._exit_grace),
        )

    def _waits_for_others(self) -> bool:
        """Return whether the training waits for other workers, or the script is over.

        It waits in a collective, its own or the script's, or for a server.
        """
        return (
            bool(self.recorder.blocked)
            or self._leaving
            or main_thread_is_in(COLLECTIVES)
        )

    def _leave(self, fault: str | None) -> None:
        """Prepare the end of the process; a *fault* means a failure."""
        if self._liveness is not None:
            self._part_from_others(self._liveness, fault)
        if fault is not None and self._services is not None:
            # Launchers wait for workers, but not for the servers that they started.
            self._services.close()

    def _part_from_others(self, liveness: PeerMonitor, fault: str | None) -> None:
        if fault is None:
            self._leaving = True
            # These two waits show whether this is a successful end after all.
            self._failure_judged.wait(timeouts.collective_grace + self._exit_grace)
        elif is_consequence(fault):
            # gloo or NCCL was faster than the hub: this rank's end is a consequence, and the hub is
            # about to name the dead rank. Reporting this end would blame this rank.
            self._failing.set()
            self._failure_announced.wait(timeouts.collective_grace)
        liveness.close(fault)

    @property
    def _broken_by(self) -> str:
        """The error that ended the last training on this rank; empty: none."""
        trainings = self.registry.trainings
        return trainings[-1].training.broken_by if trainings else ""

    def close(self) -> None:
        """Do the work of a successful end.

        Raises `PeerLostError` if the script has caught the error that broke its training. Otherwise
        the process that started this worker would count the job as successful.
        """
        if dist.is_initialized() or self.server_only:
            self.registry.end()
        if self._services is not None:
            self._services.close()
        if self._known_store is not None:
            self._known_store.close()
        self._write_results()
        if self.server_only and self._broken_by:
            raise PeerLostError(
                f"the script of worker {self.rank} ends well, though its training broke: "
                f"{self._broken_by}. A job that survives (--survive) takes a good end for a complete "
                "training, so this worker ends badly, and is started again"
            )

    def _write_results(self) -> None:
        if not self.recorder.method or self._results_written:
            return
        self._results_written = True
        if self._records is not None:
            self._records.close()
        if self._broke and dist.is_initialized() and self.size > 1:
            # Other ranks may be elsewhere, and there is no common result.
            return
        if self.options.profile is not None:
            self._write_profile(self.options.profile)
        if self.options.json:
            mine = self.recorder.stats()
            summaries = [mine]
            if dist.is_initialized():
                store = default_store()
                summaries = gather_stats(mine, self.rank, self.size, store)
                if len(summaries) < self.size:
                    self.recorder.add_note(
                        f"figures are of {len(summaries)} of {self.size} workers: the "
                        "others were not at their end yet"
                    )
            if self.rank == 0:
                for caution in self._cautions():
                    self.recorder.add_note(caution)
                result = RunResult.of(
                    *(self.name, self.size, self.recorder, summaries),
                    *(self.options.steps, self.registry.first_step),
                )
                result.compute = self.compute_from
                if self.options.result is not None:
                    Path(self.options.result).write_text(result.to_json() + "\n")
                else:
                    # Write once, since other workers may write to the same stream.
                    sys.stdout.write(result.to_json() + "\n")
                    sys.stdout.flush()

    def _cautions(self) -> tuple[str, ...]:
        """Return why the run's figures are unreliable, in addition to its recorder's reasons."""
        return ()

    def _write_profile(self, path: str) -> None:
        if len(self._profilers) > 1:
            raise UsageError(
                f"the script trains {len(self._profilers)} models, and a workload is one "
                "model's: profile a script that trains one"
            )
        profiler = self._profilers[0]
        workload = profiler.workload_alone(self._source())
        if dist.is_initialized():
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            cores = torch.tensor([workload.cores], device=device)
            dist.all_reduce(cores, dist.ReduceOp.MIN)
            if not cores.item():
                # Ranks that keep a core busy were timed differently from ranks that sleep.
                plain = times_of(profiler.workload(""))
                workload = replace(with_times(workload, plain), cores=0)
            beside = [workload.input, workload.overhead]
            times = [*times_of(workload), *beside]
            own = torch.tensor(times, dtype=torch.float64, device=device)
            dist.all_reduce(own, dist.ReduceOp.MAX)
            *times, between, overhead = own.tolist()
            workload = with_times(workload, times)
            workload = replace(workload, input=between, overhead=overhead)
        if self.rank == 0:
            workload.save(path)
            if self.options.gradients is not None:
                optimizer = self.registry.trainings[0].optimizer
                inner = getattr(optimizer, "unwrapped", optimizer)
                GradientDump(self.options.gradients).keep_optimizer(inner)

    def _source(self) -> str:
        threads = torch.get_num_threads()
        processor = (
            torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else f"CPU, {threads} thread" + ("s" if threads != 1 else "")
        )
        workers = show_count(self.size, "worker")
        return (
            f"measured: medians of {self._profilers[0].profiled_steps} steps, {workers}, "
            f"{processor}"
        )


def _find_place() -> Place | None:
    """Return this process's place in its job; None: it has none, or the script knows better.

    If another launcher than torchrun started it, torchrun's variables are set, too, since other
    code reads them. A script that has made its process group knows better.
    """
    external_worker.add_world_size(os.environ)
    try:
        place = launchers.find(os.environ)
    except UsageError:
        if dist.is_initialized():
            return None
        raise
    if place is not None and dist.is_initialized():
        group = (dist.get_rank(), dist.get_world_size())
        if group != (place.rank, place.size):
            return None
    if place is not None and "RANK" not in os.environ:
        for name, value in place.to_environment().items():
            os.environ.setdefault(name, value)
    return place
