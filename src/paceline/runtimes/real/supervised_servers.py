"""The servers of a job that survives deaths: one, or one for each group of workers.

Group servers hold the whole model each. One that dies is started again where it listened, as
another life, and *enters*: it takes over what the others hold, which connect to it again by
themselves. Where none is left that holds anything, all are started again: server 0 from its
snapshot, and the others enter from there. So it is always known who holds what, and no two
servers that hold nothing wait for each other.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.interfaces.server_messages import Describe, PeerAddress
from paceline.parameter_server.process import snapshot as snapshots
from paceline.parameter_server.process.control import (
    HoldsModel,
    TrainingOver,
    WorkerEvicted,
    WorkerFinished,
    WorkerLost,
)
from paceline.parameter_server.process.surviving import checked
from paceline.runtimes.processes import how_it_ended
from paceline.runtimes.real.server_process import ServerProcess

SNAPSHOT_VARIABLE = "PACELINE_SNAPSHOT_SECONDS"
SILENT_VARIABLE = "PACELINE_SILENT_SECONDS"
"""How long a worker may be silent; without it, what `parameter_server.process.monitors` says."""
_HOST = "127.0.0.1"


@dataclass
class SurvivingServer:
    """Server *number*: its processes, one after the other. *lives*: how often it was started.
    *holds*: whether it has all that is trained: not before it has entered, nor when it has gone
    because its group has no workers. *over*: all workers have said goodbye to this life."""

    number: int
    process: ServerProcess | None = None
    lives: int = 0
    holds: bool = False
    over: bool = False

    @property
    def name(self) -> str:
        return f"server {self.number}"

    @property
    def port(self) -> int:
        """Where it listens; 0: not yet known."""
        return 0 if self.process is None else self.process.port

    @property
    def status(self) -> int | None:
        """The exit status of this life, if it has ended."""
        return None if self.process is None else self.process.process.poll()

    def close(self) -> None:
        """End this life."""
        if self.process is not None:
            self.process.close()


class SurvivingServers:
    """Of so many *workers*; *groups*: how many group servers there are, 0 for one server that
    is alone. *snapshot*: where server 0 keeps what it holds, as often as `SNAPSHOT_VARIABLE`
    says (the others hold the same).

    Raises `UsageError` for a snapshot that is there already, unless it *resumes*.
    """

    def __init__(
        self,
        workers: int,
        groups: int = 0,
        snapshot: Path | None = None,
        resumes: bool = False,
    ) -> None:
        self.token = secrets.token_hex(16)
        self.snapshot = None if snapshot is None else _checked(snapshot, resumes)
        self._workers, self._groups = workers, groups
        self.each = [SurvivingServer(number) for number in range(max(1, groups))]

    # ---- processes ----

    def start(self, without: Sequence[int] = ()) -> int:
        """Start all anew, from the snapshot if there is one, *without* workers that are done.
        Returns the step that they go on with. Raises `UsageError` where one does not start."""
        for server in self.each:
            server.close()
            server.holds = server.number == 0 or not self.has_snapshot
        return self._start(self.each, without)

    def start_again(
        self, dead: Sequence[SurvivingServer], without: Sequence[int]
    ) -> None:
        """Start these, which enter from the others. Raises `UsageError` where one does not
        start."""
        for server in dead:
            server.close()
            server.holds = False
        self._start(dead, without)

    def _start(self, servers: Sequence[SurvivingServer], without: Sequence[int]) -> int:
        """Side by side; returns the step that they go on with."""
        started = []
        for server in servers:
            process = server.process = self._process_of(server, without)
            started.append((server, process))
        step = max(process.listens() for _, process in started)
        if len(self.each) > 1:
            for server, process in started:
                process.tell(self._description(server))
        return step

    def _process_of(
        self, server: SurvivingServer, without: Sequence[int]
    ) -> ServerProcess:
        silent = os.environ.get(SILENT_VARIABLE)
        extra = [] if silent is None else [f"--evict-silent={silent}"]
        if self._groups:
            extra += [f"--groups={self._groups}", f"--number={server.number}"]
            extra += [f"--incarnation={server.lives}"]
        if not server.holds:
            extra += ["--enter"]
        if self.snapshot is not None and server.number == 0:
            seconds = float(os.environ.get(SNAPSHOT_VARIABLE, snapshots.SECONDS))
            extra += [f"--snapshot={self.snapshot}", f"--snapshot-seconds={seconds}"]
        if without:
            extra += ["--without", *map(str, without)]
        server.lives, server.over = server.lives + 1, False
        return ServerProcess(
            server.name,
            self._workers,
            _HOST,
            port=server.port,
            token=self.token,
            extra=extra,
        )

    def _description(self, server: SurvivingServer) -> Describe:
        peers = {
            peer.name: PeerAddress(host=_HOST, port=peer.port, token=self.token)
            for peer in self.each
            if peer is not server
        }
        return Describe(
            kind="group-server",
            services=[one.name for one in self.each],
            number=server.number,
            peers=peers,
        )

    def close(self) -> None:
        """End all, and leave nothing half written."""
        for server in self.each:
            server.close()
        if self.snapshot is not None:
            snapshots.unfinished(self.snapshot).unlink(missing_ok=True)

    # ---- what they say, and are told ----

    @property
    def addresses(self) -> str:
        """As workers are told them, in order of their numbers."""
        return "+".join(f"{_HOST}:{server.port}" for server in self.each)

    @property
    def processes(self) -> Iterator[ServerProcess]:
        """Of all that were started."""
        return (s.process for s in self.each if s.process is not None)

    def say_done(self, worker: int) -> None:
        """A worker's script has ended well, and is not started again."""
        for process in self.processes:
            process.tell(WorkerFinished(worker=worker))

    def evicted(self) -> list[WorkerEvicted]:
        """Lives of workers that one of them has taken for lost since this was last called: now
        the others do so, too."""
        found = []
        for server in self.each:
            assert server.process is not None
            for words in server.process.news():
                if isinstance(words, HoldsModel):
                    server.holds = words.holds
                    continue
                if isinstance(words, TrainingOver):
                    server.over = True
                    continue
                found.append(words)
                lost = WorkerLost(worker=words.worker, incarnation=words.incarnation)
                for process in self.processes:
                    if process is not server.process:
                        process.tell(lost)
        return found

    # ---- who is here ----

    @property
    def some_are_over(self) -> bool:
        """Whether all workers have said goodbye to one."""
        return any(server.over for server in self.each)

    @property
    def are_gone(self) -> bool:
        """Whether nobody can find what was trained any more: it was complete, and a server has ended, for its
        workers have begun another training, or was killed."""
        return self.some_are_over and any(s is not None for s in self._statuses())

    @property
    def all_have_ended(self) -> bool:
        return None not in self._statuses()

    def _statuses(self) -> list[int | None]:
        """Of all: an end is news until somebody has asked after it."""
        return [server.status for server in self.each]

    def dead(self) -> list[SurvivingServer]:
        """Those that have not ended well."""
        return [server for server in self.each if server.status]

    def some_hold(self) -> bool:
        """Whether one is left that holds what is trained."""
        return any(server.holds and server.status is None for server in self.each)

    def how_they_ended(self, dead: Iterable[SurvivingServer]) -> str:
        """In words, with their names where there are several."""
        if len(self.each) == 1:
            return f"the parameter server {how_it_ended(self.each[0].status or 0)}"
        return " and ".join(f"{s.name} {how_it_ended(s.status or 0)}" for s in dead)

    # ---- the snapshot ----

    def keep_snapshot_in(self, folder: Path) -> None:
        """In a file that no other job has. Raises `UsageError` where there can be none."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"server-{secrets.token_hex(8)}.snapshot"
        self.snapshot = _checked(folder / name, resumes=False)

    @property
    def has_snapshot(self) -> bool:
        """Whether there is one to go on from."""
        return self.snapshot is not None and self.snapshot.exists()

    def remove_snapshot(self) -> None:
        """The training is over: nobody is to go on from where it was."""
        if self.snapshot is not None:
            self.snapshot.unlink(missing_ok=True)


def _checked(snapshot: Path, resumes: bool) -> Path:
    """Raise `UsageError` unless a server can keep its snapshot there."""
    snapshot = checked(snapshot)
    if snapshot.exists() and not resumes:
        raise UsageError(
            f"--snapshot {snapshot}: the file exists, and may be what another job left; "
            f"remove it to begin anew, or pass --resume to go on from it"
        )
    return snapshot
