"""Sums of integers by aggregators (`paceline aggregate`), in real and emulated jobs.

`AggregatorSums` has a `SumQueue` for each communicator, each issuing chain of continuations
(`collectives.pending`), and each operation. A queue forms its sums one after the other, in a thread
of its own. After an aggregator is lost, its sums go around a ring of all workers.

*When an aggregator is lost*, all its connections end. So all workers of the job learn of it, during
a sum or between sums. All then exchange how many sums they have, over the communicator's own
connections. No rank has a sum that another rank has not contributed to, so these numbers differ by
one at most. Each rank keeps its contribution to its last sum. If some ranks lack that sum, all form
it again around a plain ring; all stay on the ring from then on. Integers give the same bits in any
order.

At its end a rank exchanges this state once more, because another rank may have lost an aggregator
in the last sum. No wait can hang for a dead peer: aggregators' connections are polled, and gloo
learns of dead peers through `runtimes.real.peer_monitor`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from paceline.collectives.in_network.aggregator_addresses import aggregators_of
from paceline.collectives.in_network.joining import JobConfig, Joining
from paceline.collectives.in_network.session import Session
from paceline.collectives.in_network.wire import Address, IntegerOperation, Integers
from paceline.collectives.pending import Job, WorkPending, current
from paceline.collectives.schedules import Ring
from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import Pending, Placement, Runtime, Schedule
from paceline.interfaces.buckets import wire_bytes
from paceline.timeouts import timeouts
from paceline.transport.security import SECRET, TOKEN, dedicated_token

if TYPE_CHECKING:
    from paceline.collectives.communicator import Communicator


class InNetworkAlgorithm(Protocol):
    """A collective algorithm: how a rank joins its sums, and the schedule of their messages."""

    def joining(self, comm: Communicator, job: JobConfig) -> Joining: ...

    def schedule(self, size: int, at: Placement) -> Schedule: ...


class AggregatorSums:
    """Sums by aggregators, with a queue for each communicator, issuing chain and operation.

    *algorithm*: the collective algorithm. *where*: the address of each rack's aggregator.
    """

    def __init__(
        self,
        algorithm: InNetworkAlgorithm,
        where: Mapping[int, Address],
        name: str,
        token: str,
    ) -> None:
        self._algorithm, self._where = algorithm, where
        self._name, self._token = name, token
        self._queues: dict[tuple[str, str, str], SumQueue] = {}
        self._losses = LossNotice()

    def start(self, comm: Communicator, operation: IntegerOperation) -> None:
        """Connect to the aggregators now, for sums that the training itself issues on *comm*.
        Collective.

        Raises `UsageError` or `PeerLostError`, on all ranks.
        """
        self._queue(comm, comm.chain.path, operation).start().wait()

    def all_reduce(
        self, comm: Communicator, values: torch.Tensor, operation: IntegerOperation
    ) -> Pending:
        """Replace *values* by their sums or maxima over all ranks. Collective."""
        issuer = current()
        path = comm.chain.path if issuer is None else issuer.path
        schedule = self._algorithm.schedule(wire_bytes(values), comm.placement)
        comm.count_sent(schedule.bytes_sent(comm.rank))
        job = self._queue(comm, path, operation).all_reduce(values, operation)
        return WorkPending(comm, issuer, job, "add_up")

    def close(self) -> None:
        """Close all queues, after their last sums. Collective."""
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()

    def _queue(
        self, comm: Communicator, path: str, operation: IntegerOperation
    ) -> SumQueue:
        """The queue of a communicator, chain and *operation*.

        Operations have separate queues. A buffer's sum follows the agreement on its exponents (a
        maximum), and the next buffer's agreement may be under way before that sum.
        """
        key = comm.name, path, operation
        if key not in self._queues:
            job = JobConfig(
                rank=comm.rank,
                aggregators=self._where,
                name=f"{self._name} {comm.name}|{path}|{operation}",
                token=self._token,
            )
            self._queues[key] = SumQueue(
                comm,
                f"{path}|{operation}",
                self._algorithm.joining(comm, job),
                self._losses,
            )
        return self._queues[key]


def sums_by_aggregators(
    algorithm: InNetworkAlgorithm,
    comm: Communicator,
    runtime: Runtime,
    environment: Mapping[str, str] = os.environ,
) -> AggregatorSums:
    """The `AggregatorSums` that a job's environment describes. Collective. Raises `UsageError`."""
    found = aggregators_of(runtime) or {}
    token = dedicated_token(environment)
    if token is None and found:
        raise UsageError(
            f"there are aggregators, but neither {TOKEN} nor {SECRET} is set: export what "
            "`paceline aggregate` has printed, where workers are started"
        )
    name = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    comm.broadcast(name).wait()  # a name that no other job has
    job = bytes(name.numpy()).hex()
    return AggregatorSums(algorithm, found, job, token or job)


class _Met(msgspec.Struct):
    """A rank's state in an exchange after a loss or at the end."""

    completed: int
    leaving: bool = False


class LossNotice:
    """Reports a lost aggregator once, although several queues notice it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_reported = False

    def report(self, comm: Communicator, text: str) -> None:
        """Log *text* on rank 0 of *comm*, unless a loss was reported before."""
        if comm.rank != 0:
            return
        with self._lock:
            was_reported, self._is_reported = self._is_reported, True
        if not was_reported:
            comm.log(text)


class SumQueue:
    """The sums that continuations of the chain *path* issue on *comm*, in order.

    *joining* connects this rank to the aggregators. *losses* is shared by all queues of the job.
    """

    def __init__(
        self, comm: Communicator, path: str, joining: Joining, losses: LossNotice
    ) -> None:
        self._comm, self._joining, self._losses = comm, joining, losses
        self._path = f"{comm.name}|{path}"
        self._session: Session | None = None
        self._is_on_ring = False
        self._completed = 0
        self._kept: tuple[Integers, IntegerOperation] | None = None
        self._broken: BaseException | None = None
        self._left = False
        self._jobs: deque[Job | None] = deque()
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(
            target=self._serve, name=f"paceline sums of {path}", daemon=True
        )
        self._thread.start()

    # ---- from other threads ----

    def start(self) -> Job:
        """Connect to the aggregators now, so that a wrong address is an error at the start."""
        return self._put_job(Job(self._join))

    def all_reduce(self, values: torch.Tensor, operation: IntegerOperation) -> Job:
        """Replace *values* by their sums or maxima over all ranks. Collective."""
        return self._put_job(Job(partial(self._all_reduce, values.numpy(), operation)))

    def close(self) -> None:
        """Leave together with all other ranks, after the last sum."""
        self._put(None)
        self._thread.join(timeouts.sum_queue_close)

    def _put_job(self, job: Job) -> Job:
        self._put(job)
        return job

    def _put(self, job: Job | None) -> None:
        self._jobs.append(job)
        os.write(self._wake, b".")

    # ---- the thread ----

    def _serve(self) -> None:
        while True:
            job = self._next()
            if job is None:
                break
            job.run(None)
        with contextlib.suppress(Exception):  # no caller is left to raise it to
            self._leave()
        self._end_session(well=self._left)
        self._close_pipe()

    def _close_pipe(self) -> None:
        """Close the wake-up pipe: the last job was put and read, so the pipe has no other user."""
        ends = self._woken, self._wake
        # A job that is put after the end fails, and wakes no later owner of the number.
        self._woken = self._wake = -1
        for end in ends:
            os.close(end)

    def _next(self) -> Job | None:
        """The next job. Until one comes, watch the session's connections."""
        while not self._jobs:
            try:
                if self._session is not None and self._broken is None:
                    self._session.idle(timeouts.sum_queue_idle, self._woken)
                else:
                    _readable(self._woken)
            except PeerLostError as error:
                with contextlib.suppress(BaseException):  # the next sum raises it
                    self._lose(error)
            except BaseException as error:
                # No caller waits for this thread now: the next sum raises the error.
                self._broken = error
        os.read(self._woken, 1)
        return self._jobs.popleft()

    def _all_reduce(self, values: Integers, operation: IntegerOperation) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            self._all_reduce_somewhere(values, operation)
        except BaseException as error:
            self._broken = error
            raise
        self._completed += 1

    def _all_reduce_somewhere(
        self, values: Integers, operation: IntegerOperation
    ) -> None:
        """Form a sum by aggregators or around the ring.

        All ranks decide alike, whether they learn of a loss before this sum or in it.
        """
        if self._session is None and not self._is_on_ring:
            try:
                self._join()
            except PeerLostError as error:
                self._is_on_ring = True
                text = f"{error}; its sums go around the ring of all workers"
                self._losses.report(self._comm, text)
        if self._session is not None:
            kept = values.copy()
            try:
                self._session.all_reduce(values, operation)
                self._kept = kept, operation
                return
            except PeerLostError as error:
                values[:] = kept
                self._lose(error)
        self._around(values, operation)

    def _join(self) -> None:
        """Connect to the aggregators. Collective. Raises `UsageError` or `PeerLostError`, on all
        ranks."""
        self._session = self._joining.join(self._exchange)

    def _end_session(self, *, well: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close(well=well)

    # ---- after the loss of an aggregator ----

    def _lose(self, error: PeerLostError) -> None:
        """Continue around the ring, from the same sum on all ranks."""
        try:
            self._end_session(well=False)
            self._is_on_ring = True
            self._form_again(self._meet())
            text = f"{error}; sums go around the ring of all workers from now on"
            self._losses.report(self._comm, text)
        except BaseException as fault:
            self._broken = fault
            raise

    def _form_again(self, all_met: Sequence[_Met]) -> None:
        fewest = min(met.completed for met in all_met)
        if fewest < self._completed:
            assert self._kept is not None
            self._around(*self._kept)

    # ---- exchanges with other ranks ----

    def _around(self, values: Integers, operation: IntegerOperation) -> None:
        """Form one sum around the ring of all ranks."""
        self._comm.perform_here(
            Ring(self._comm.size, len(values)),
            torch.from_numpy(values),
            f"{self._path} sums",
            operation,
        )

    def _exchange(self, message: bytes) -> list[bytes]:
        """Return all ranks' messages, of any length. Collective."""
        own = torch.tensor([len(message)], dtype=torch.int64)
        lengths = [int(length) for length in self._gather(own)]
        longest = torch.zeros(max(lengths), dtype=torch.uint8)
        if message:
            longest[: len(message)] = torch.frombuffer(
                bytearray(message), dtype=torch.uint8
            )
        rows = self._gather(longest)
        return [
            bytes(row[:length].numpy())
            for row, length in zip(rows, lengths, strict=True)
        ]

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return every rank's *own* as a row; all have the same length. Collective."""
        size = self._comm.size
        rows = own.new_zeros(size, len(own))
        rows[self._comm.rank] = own
        if rows.numel():
            ring = Ring(size, rows.numel(), rounds=1, gather=True)
            self._comm.perform_here(ring, rows.view(-1), f"{self._path} messages")
        return rows

    def _meet(self, *, leaving: bool = False) -> list[_Met]:
        message = msgspec.json.encode(_Met(self._completed, leaving))
        return [msgspec.json.decode(one, type=_Met) for one in self._exchange(message)]

    def _leave(self) -> None:
        """Return when all ranks have all sums and want to leave."""
        while self._broken is None and not self._left:
            all_met = self._meet(leaving=True)
            self._left = all(met.leaving for met in all_met)
            if not self._left:  # another rank has lost an aggregator
                self._end_session(well=False)
                self._is_on_ring = True
                self._form_again(all_met)


def _readable(descriptor: int) -> None:
    """Wait until *descriptor* can be read, for a limited time."""
    select.select([descriptor], [], [], timeouts.sum_queue_idle)
