"""How long paceline waits, and for what: one record for all of it.

Each is in seconds. `PACELINE_TIMEOUTS` overrides any of them, as in
``PACELINE_TIMEOUTS=server_start=120,worker_arrive=60``, in every process of a job.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping

from paceline.errors import UsageError, unknown

VARIABLE = "PACELINE_TIMEOUTS"


@dataclasses.dataclass
class Timeouts:
    """Seconds that each of these may take, or waits for."""

    # Connections
    unreachable: float = 300.0
    """A peer may answer no probe of the kernel's. `PACELINE_UNREACHABLE_SECONDS` overrides it."""
    liveness_connect: float = 30.0
    """A rank may take to reach rank 0's liveness port."""
    collective_grace: float = 3.0
    """A survivor may stay in a collective after another rank was lost."""
    exit_grace: float = 30.0
    """A survivor that is in no collective may take to end by itself. `PACELINE_EXIT_GRACE_SECONDS` overrides it."""

    rank_hang: float = 30.0
    """Ranks may wait for another one until it is named. Nothing is ended."""
    hang_answer: float = 5.0
    """A rank may take to say where it is. Later it counts as stopped."""

    # Parameter servers
    connect_retry: float = 0.05
    """Before a worker tries again to reach a server that does not listen yet."""
    server_connect: float = 30.0
    """A server may take to answer the first time."""
    server_goodbye: float = 5.0
    """A goodbye to a server may take."""
    last_replies: float = 2.0
    """The last replies of a server may take to leave, once its loop has ended."""
    last_requests: float = 5.0
    """A server in this process may take to end after its training."""
    worker_acknowledge: float = 8.0
    """The machine of a worker that is asked after may take to acknowledge a byte."""
    worker_arrive: float = 30.0
    """A worker may be on its way to a server that has no other one."""
    worker_silent: float = 60.0
    """A worker may be silent until the others go on without it. `PACELINE_SILENT_SECONDS` overrides it."""
    progress_note: float = 1.0
    """Between two notes of a worker's progress."""
    workers_missing: float = 60.0
    """Workers may be missing until a server names them."""
    peer_retry: float = 0.05
    """After a connection between servers was lost, until the first attempt to restore it. Each further one waits twice as long."""
    peer_retry_at_most: float = 1.0
    """The longest wait between two such attempts."""
    peer_return: float = 10.0
    """A lost group server may take to answer again in a job without `--survive`: nothing restarts it there."""

    # Collectives
    chain_close: float = 5.0
    """An operation that is under way may take when its communicator is closed."""
    sum_queue_idle: float = 1.0
    """A sum queue without sums sleeps at most."""
    sum_queue_close: float = 5.0
    """The other ranks' sum queues may take to close."""

    # Aggregators
    aggregator_probe: float = 5.0
    """The trial whether a first sum gets through may take."""
    aggregator_connect: float = 30.0
    """An aggregator may take to answer the first time."""

    # Launching
    server_start: float = 60.0
    """A server's process may take to start."""
    server_end: float = 10.0
    """A server's process may take to end."""
    aggregator_start: float = 60.0
    """An aggregator's process may take to start."""
    workers_shutdown: float = 10.0
    """Workers may take to end after Ctrl-C, before they are killed."""
    terminate: float = 5.0
    """A process may take to end after SIGTERM."""
    job_grace: float = 12.0
    """Emulated workers may take to end by themselves after one has failed."""
    last_output: float = 2.0
    """The last output of an ended worker may take: a process that it started may hold it open."""

    # Jobs that survive
    workers_end: float = 30.0
    """Workers may take to end after their server has, or after they were evicted."""
    server_listen: float = 300.0
    """A worker without a launcher waits for a server to listen."""
    rank_taken: float = 15.0
    """Another process may have this worker's rank."""
    server_close: float = 60.0
    """A server whose training is over may take to close."""
    server_retry: float = 1.0
    """Between two attempts to reach a server."""
    rank_retry: float = 3.0
    """Between two attempts to get a rank that is taken."""
    hello: float = 5.0
    """One attempt to reach a server may take."""

    # Results and tools
    last_figures: float = 5.0
    """Ranks that are not at their end may take to send their figures."""
    busy_processes: float = 60.0
    """Processes that measure at the same time may take to be there."""

    # Integrations
    ray_room: float = 300.0
    """A Ray job waits for resources that others use, or that have gone with a node."""
    ray_room_notice: float = 20.0
    """A Ray job that waits for resources reports this after so long."""
    ray_end: float = 60.0
    """A Ray job's server actor may take to end."""
    ray_server_end: float = 30.0
    """A Ray job's server may take to end after its last worker."""


def from_environment(environment: Mapping[str, str]) -> Timeouts:
    """The defaults, with what `PACELINE_TIMEOUTS` overrides.

    Raises:
        UsageError: A name is unknown, or a value is no number of seconds above zero.
    """
    found = Timeouts()
    known = [field.name for field in dataclasses.fields(Timeouts)]
    for assignment in environment.get(VARIABLE, "").split(","):
        if not assignment.strip():
            continue
        name, _, text = (part.strip() for part in assignment.partition("="))
        if name not in known:
            raise UsageError(f"{VARIABLE}: {unknown('time', name, known)}")
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise UsageError(f"{VARIABLE}: {name}={text}: expected seconds above 0")
        setattr(found, name, seconds)
    return found


try:
    timeouts = from_environment(os.environ)
    """Those of this process."""
except UsageError as error:
    # While modules are imported nobody could catch it: commands and scripts end with one line.
    raise SystemExit(f"paceline: {error}") from None
