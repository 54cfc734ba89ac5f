"""Runs one worker of an emulated cluster: a real process, in a host of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from paceline.cluster.cluster import Cluster
from paceline.cluster.workload import Workload
from paceline.interfaces import Compute
from paceline.interfaces.buckets import wire_bytes
from paceline.run_options import RunOptions
from paceline.runtimes import progress
from paceline.runtimes.real.cluster_check import load_of
from paceline.runtimes.real.compute import PacedCompute
from paceline.runtimes.real.runtime import HostClock, RealRuntime
from paceline.units import show_seconds

BEHIND = 1.25
"""The machine is too slow if a pass takes longer than its paced time by this factor."""
USE = (
    "Use the stand-in, which computes nothing: paceline emulate examples/workload.py with the "
    "same network -- "
)


def _short(seconds: float) -> str:
    return show_seconds(float(f"{seconds:.3g}"))


RUNTIME_VARIABLE = "PACELINE_WORLD"


class EmulatedRuntime(RealRuntime):
    """A `RealRuntime` whose network is shaped, and whose compute time may be paced."""

    name = "emulated"

    def __init__(self, options: RunOptions) -> None:
        super().__init__(options)
        # Set the cluster now: the network is this job's own, and scripts may pace before they
        # connect.
        self._learn_cluster()
        tell = progress.step_reporter()
        if tell is not None:
            self.recorder.observers.append(tell)
        self._pace: Workload | None = None
        if options.pace is not None:
            self._pace = Workload.load(options.pace)
        self.clock = PacedClock(self)
        self.paced_by_script = False

    @property
    def speed(self) -> float:
        """This worker's relative compute speed."""
        return 1.0 if self.cluster is None else self.cluster.speeds[self.rank]

    def _find_cluster(self, file: str | None) -> Cluster | None:
        return None if file is None else load_of(file, self.size)

    @property
    def compute_from(self) -> str:
        if self.paced_by_script:
            return "paced by the script"
        if self._paced:
            workload = self.options.pace or "the workload that the model stands for"
            return f"paced: {workload}"
        return "what it takes, on this machine's cores"

    def _cautions(self) -> tuple[str, ...]:
        """Return warnings if the machine has too few cores for the cluster's workers.

        Then the figures measure this machine's computing, not the cluster's.
        """
        cores = len(os.sched_getaffinity(0))
        who = f"{self.size} workers compute on {cores} core{'s' * (cores > 1)}"
        if self.paced_by_script:
            return ()
        if not self._paced:
            if self.size <= cores:
                return ()
            return (
                f"{who}, each more slowly than on a machine of its own: these figures tell of "
                f"this machine, and not of the cluster. {USE}FILE, after paceline profile SCRIPT",
            )
        asked, taken = self._paced[0].asked_and_taken
        if taken <= BEHIND * asked:
            return ()
        text = (
            f"{who}: a pass takes {_short(taken)} where {_short(asked)} were asked for, so these figures "
            "tell of this machine, and not of the cluster. "
        )
        if self.options.pace is None:
            return (f"{text}Emulate fewer workers, or use more cores",)
        return (f"{text}{USE}{self.options.pace}",)

    @property
    def workload(self) -> Workload | None:
        return None if self.paced_by_script else super().workload

    def pace_by_script(self) -> None:
        """Let the script itself say from now on how long it computes."""
        self.paced_by_script = True
        for compute in self._paced:
            compute.give_up()

    def compute(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        samples: float | None,
    ) -> Compute | None:
        own = getattr(model, "workload", None)
        workload = self._pace or (own if isinstance(own, Workload) else None)
        if workload is None:
            return super().compute(model, parameters, samples)
        workload.check_matches(
            [name for name, _ in parameters],
            [wire_bytes(parameter) for _, parameter in parameters],
            self.options.pace or "the model's workload",
        )
        self._paced.append(PacedCompute(workload, samples, self.speed))
        return self._paced[-1]


class PacedClock(HostClock):
    """The host's clock, on which a worker of speed 0.5 takes twice as long."""

    def __init__(self, runtime: EmulatedRuntime) -> None:
        self._runtime = runtime

    def pace(self, seconds: float) -> None:
        self._runtime.pace_by_script()
        super().pace(seconds / self._runtime.speed)
