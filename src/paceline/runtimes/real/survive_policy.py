"""Decides how a job that survives deaths continues after the end of a process.

Pure functions, without processes, files or clocks. `supervisor` reports exits, and acts on the
decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.runtimes.processes import WorkerExit, how_it_ended

MAX_RESTARTS = 100
"""The most restarts of one worker: a script that cannot run must not be restarted forever."""
MAX_RESTARTS_WITHOUT_PROGRESS = 3
"""Deaths in a row of one worker, or of the servers, without a completed step. The last one ends the
job."""
WRONG_USE = 2
"""The exit status of a command with unknown arguments."""


class WorkerAction(enum.Enum):
    """The reaction to the exit of a worker."""

    IGNORE = enum.auto()
    """Do nothing: its script is done, or a lost server is the cause."""
    RESTART = enum.auto()
    """Restart it as its next incarnation."""


class ServersAction(enum.Enum):
    """The reaction to exits of servers.

    After a restart, all workers that are not done are restarted.
    """

    IGNORE = enum.auto()
    RESTART_LOST = enum.auto()
    """Restart the lost servers, which take over the model of the others."""
    RESTART_ALL = enum.auto()
    """Restart all servers from the snapshot."""
    RESTART_TRAINING = enum.auto()
    """Restart all servers and the training: there is no snapshot yet."""
    NEXT_TRAINING = enum.auto()
    """Start all servers for the next training, which the running workers have begun."""
    STOP_ALL = enum.auto()
    """Fail the job: the model is lost, and a restarted script would begin with its first training."""


@dataclass(frozen=True, kw_only=True)
class ServersStatus:
    """The servers of a job, at one instant.

    Attributes:
        loss: Which servers have failed, and how, as the beginning of a sentence; empty: none.
        some_ended: Whether a server has ended, well or not.
        all_ended: Whether all servers have ended.
        training_over: Whether all workers have said goodbye to one of them.
        model_held: Whether a running server has the whole model.
        has_snapshot: Whether there is a snapshot to continue from.
    """

    loss: str = ""
    some_ended: bool = False
    all_ended: bool = False
    training_over: bool = False
    model_held: bool = True
    has_snapshot: bool = False


@dataclass
class WorkerRecord:
    """The history of one worker, over all its incarnations.

    Attributes:
        incarnation: The number of its current one, from 0.
        done: Whether its script has ended well.
        last_step: The last step of the job that its earlier incarnations have completed.
        restarts: Its deaths.
        restarts_without_progress: Its deaths in a row without a completed step.
    """

    incarnation: int = 0
    done: bool = False
    last_step: int = 0
    restarts: int = 0
    restarts_without_progress: int = 0


class SurvivePolicy:
    """Decides how a job of *workers* workers continues after an exit.

    A *step* is the last step of the job that a worker's current incarnation has completed; 0: none.
    """

    def __init__(self, workers: int) -> None:
        self.workers = [WorkerRecord() for _ in range(workers)]
        self._trained = False
        """Whether the script's first training is over, and another one has begun."""
        self._restarts_without_progress = 0
        """Restarts of servers in a row without a completed step."""

    @property
    def done(self) -> list[int]:
        """The ranks whose scripts have ended well."""
        return [rank for rank, worker in enumerate(self.workers) if worker.done]

    @property
    def unfinished(self) -> list[int]:
        """The ranks whose scripts have not ended well."""
        return [rank for rank, worker in enumerate(self.workers) if not worker.done]

    @property
    def last_step(self) -> int:
        """The step of the foremost worker when a server was lost."""
        return max(worker.last_step for worker in self.workers)

    def worker_exited(
        self, ended: WorkerExit, step: int, servers: ServersStatus
    ) -> WorkerAction:
        """Decide what follows a worker's exit.

        Raises:
            UsageError: The job cannot continue, or another incarnation would fail in the same way.
        """
        worker = self.workers[ended.rank]
        if ended.status == 0:
            worker.done = True
            return WorkerAction.IGNORE
        how = f"worker {ended.rank} {how_it_ended(ended.status)}"
        if self._trained or (servers.training_over and servers.some_ended):
            raise UsageError(
                f"{how} after its training was over: only the training itself survives that"
            )
        if servers.loss:
            return WorkerAction.IGNORE
        if ended.final:
            raise UsageError(
                f"worker {ended.rank} failed, and would fail again: {ended.message}"
            )
        if ended.status == WRONG_USE and not step:
            raise UsageError(
                f"{how}, as commands do that do not know their arguments: see above "
                "for what it said; those of the script stand behind it"
            )
        worker.last_step = max(worker.last_step, step)
        worker.restarts += 1
        worker.restarts_without_progress += 1
        if step:
            worker.restarts_without_progress = 0
        if worker.restarts_without_progress == MAX_RESTARTS_WITHOUT_PROGRESS:
            raise UsageError(
                f"{how}, for the {MAX_RESTARTS_WITHOUT_PROGRESS}rd time in a row "
                "without completing a step: see above for what it said, and run the "
                "script without --survive to see it alone"
            )
        if worker.restarts > MAX_RESTARTS:
            raise UsageError(f"{how}, {MAX_RESTARTS} times")
        worker.incarnation += 1
        return WorkerAction.RESTART

    def servers_exited(
        self, servers: ServersStatus, steps: Sequence[int]
    ) -> ServersAction:
        """Decide what follows the exits of servers, if any has ended.

        *steps* has the last step of each worker.

        Raises:
            UsageError: Servers are lost again and again, and no worker completes a step.
        """
        if not self.unfinished:
            return ServersAction.IGNORE
        if servers.training_over:
            if not servers.all_ended:
                return ServersAction.IGNORE
            self._trained = True
            return ServersAction.NEXT_TRAINING
        if not servers.loss:
            return ServersAction.IGNORE
        for worker, step in zip(self.workers, steps, strict=True):
            worker.last_step = max(worker.last_step, step)
        model_lost = not servers.model_held and not servers.has_snapshot
        if self._trained and model_lost:
            return ServersAction.STOP_ALL
        self._restarts_without_progress += 1
        if any(steps[rank] for rank in self.unfinished):
            self._restarts_without_progress = 0
        if self._restarts_without_progress == MAX_RESTARTS_WITHOUT_PROGRESS:
            raise UsageError(
                f"{servers.loss}, for the {MAX_RESTARTS_WITHOUT_PROGRESS}rd time in a row "
                "without a completed step: see above for what it said"
            )
        for worker in self.workers:
            worker.done = worker.done and not model_lost
            worker.incarnation += not worker.done
        if model_lost:
            return ServersAction.RESTART_TRAINING
        if servers.model_held:
            return ServersAction.RESTART_LOST
        return ServersAction.RESTART_ALL

    def went_back(self, step: int) -> int:
        """Note that all servers continue from *step*. Returns the number of lost steps."""
        lost = max(0, self.last_step - step)
        for worker in self.workers:
            worker.last_step = min(worker.last_step, step)
        return lost
