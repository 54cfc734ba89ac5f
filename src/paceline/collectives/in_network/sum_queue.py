"""Integers added up by aggregators for one queue of a communicator, in a thread of its own.

Theory of operation
-------------------
One `End` at a time carries out the sums in the order of issue. Where an aggregator is lost, all
ranks go on around the plain ring, over the connections that they have, until it is back:

1. Who notices says so in the job's store, under the *epoch* (how often this queue has lost an
   aggregator). Who waits, or idles, looks there ten times a second (`Lookout`).
2. All meet, and say how many sums they have. Nobody has one that not all have contributed to, so
   these numbers differ by one at most; and each rank keeps what it brought to its last one.
   So all form that one again, if some do not have it. Integers add up to the same bits in any
   order.
3. Each rank says before each sum where it stands (`standing`), and learns the maximum of all: twice
   the epoch, and one more while rank 0 finds that somebody is still missing. An even number of
   this epoch sends all to the aggregators at the same sum. Who does not find them there says so to
   all, and they stay on the ring.

At its end a rank meets the others once more: what it has acknowledged may have been lost.
Everything that is waited for is either watched, or is of gloo, which learns of dead peers, as
`runtimes.real.peer_monitor` does.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import torch

from paceline.collectives.in_network.job_end import Address, Exchange
from paceline.collectives.in_network.lookout import Lookout
from paceline.collectives.in_network.packets import Array
from paceline.collectives.pending import Job
from paceline.collectives.schedules import Ring
from paceline.errors import PeerLostError
from paceline.timeouts import timeouts

if TYPE_CHECKING:
    from paceline.collectives.communicator import TorchComm

Served = TypeVar("Served")


@dataclass(frozen=True)
class Terms:
    """What all queues of a job have in common. *where*: each rack's aggregator. *job*: what their
    jobs are named after. *ends*: a lost aggregator ends the job."""

    where: Mapping[int, Address]
    store: Any
    job: str
    token: str
    mtu: int
    slots: int
    ends: bool


class _Met(msgspec.Struct):
    """What ranks say when they meet."""

    completed: int
    leaving: bool = False


class End(Protocol):
    """One rank's end of what adds up: see `RingEnd`."""

    def sum_integers(self, values: Array) -> None: ...

    def idle(self, seconds: float, wake: int) -> None: ...

    def serve_while(self, work: Callable[[], Served]) -> Served: ...

    def close(self, *, well: bool = True) -> None: ...


class MakeEnd(Protocol):
    """Collective; raises as `RingEnd` does."""

    def __call__(
        self,
        rank: int,
        aggregators: Mapping[int, Address],
        exchange: Exchange,
        *,
        job: str,
        token: str,
        slots: int,
        mtu: int,
        watch: Callable[[], None],
    ) -> End: ...


class Line:
    """The queue of *comm*'s sums that works of the chain *path* issue. *make*: this rank's end of
    what adds up."""

    def __init__(self, comm: TorchComm, path: str, make: MakeEnd, terms: Terms) -> None:
        self._comm, self._terms = comm, terms
        self._path = f"{comm.name}|{path}"
        self._make = make
        self._end: End | None = None
        self._epoch = self._exchanges = self._completed = 0
        self._around_ring = 0
        self._joined = self._missing = False
        self._kept: Array | None = None
        self._lookout = Lookout(terms.store, lambda: self._key)
        self._broken: BaseException | None = None
        self._left = False
        self._jobs: deque[Job | None] = deque()
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(
            target=self._serve, name=f"paceline sums of {path}", daemon=True
        )
        self._thread.start()

    # ---- from other threads ----

    @property
    def standing(self) -> int:
        """See step 3 above."""
        return 2 * self._epoch + self._missing

    def start(self) -> Job:
        """Find the aggregators now, so that what is wrong with them is an error at the start."""
        return self._put_job(Job(self._join))

    def add_up(self, values: torch.Tensor, standing: int) -> Job:
        return self._put_job(Job(partial(self._sum, values.numpy(), standing)))

    def close(self) -> None:
        """All sums that were asked for are in: leave, when all others do."""
        self._put(None)
        self._thread.join(timeouts.sum_queue_close)
        if self._epoch:
            self._say(
                f"aggregators were lost {self._epoch} times, and {self._around_ring} of "
                f"{self._completed} sums went around the ring"
            )

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
        with contextlib.suppress(Exception):  # nobody is left to be told
            self._leave()
        self._lookout.close()
        if self._end is not None:
            self._end.close(well=self._left)
        self._close_pipe()

    def _close_pipe(self) -> None:
        """The last job was put and read, so nobody uses the pipe any more."""
        ends = self._woken, self._wake
        # A job that is put after the end fails, and wakes no later owner of the number.
        self._woken = self._wake = -1
        for end in ends:
            os.close(end)

    def _next(self) -> Job | None:
        """The next job, once there is one; until then others are served."""
        while not self._jobs:
            try:
                if self._end is not None and self._broken is None:
                    self._end.idle(timeouts.sum_queue_idle, self._woken)
                    self._lookout.check()
                else:
                    _readable(self._woken)
            except PeerLostError as error:
                with contextlib.suppress(BaseException):  # the next sum is told
                    self._lose(error)
            except BaseException as error:
                # Nobody waits for this thread now: the next sum raises the error.
                self._broken = error
        os.read(self._woken, 1)
        return self._jobs.popleft()

    def _sum(self, values: Array, standing: int) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            self._sum_somewhere(values, standing)
        except BaseException as error:
            self._broken = error
            raise
        self._completed += 1

    def _sum_somewhere(self, values: Array, standing: int) -> None:
        """All ranks decide alike, whoever learns of a loss before this sum and who in it."""
        while True:
            if self._end is None and (not self._joined or standing == 2 * self._epoch):
                self._return()
            if self._end is None:
                self._around(values, self._completed)
                return
            kept = values.copy()
            try:
                self._end.sum_integers(values)
                self._kept = kept
                return
            except PeerLostError as error:
                self._lose(error)

    # ---- at the aggregators ----

    def _join(self) -> None:
        """Collective. Raises `UsageError` and `PeerLostError`, on all ranks."""
        self._end = self._make(
            self._comm.rank,
            self._terms.where,
            self._exchange,
            job=f"{self._terms.job} {self._path} {self._epoch}",
            token=self._terms.token,
            slots=self._terms.slots,
            mtu=self._terms.mtu,
            watch=self._lookout.check,
        )
        self._joined = True

    def _return(self) -> None:
        """Be at the aggregators, if all of them are there."""
        again, self._joined = self._joined, True
        try:
            self._join()
        except PeerLostError as error:
            self._check_may_go_on(error)
            if not again:
                self._epoch += 1
                self._say(f"{error}; its sums go around the ring")
            self._await_return()
        else:
            if again:
                self._say("aggregators are back, and are used again")

    @property
    def _key(self) -> str:
        return f"paceline/aggregation/{self._terms.job}/{self._path}/{self._epoch}"

    # ---- when one is lost ----

    def _lose(self, error: PeerLostError) -> None:
        """All go on around the ring from the same sum on."""
        try:
            self._terms.store.set(self._key, str(error))
            assert self._end is not None
            self._end.close(well=False)
            self._end = None
            self._check_may_go_on(error)
            self._epoch += 1
            self._form_again(self._meet())
            self._say(f"{error}; sums go around the ring until it is back")
            self._await_return()
        except BaseException as fault:
            self._broken = fault
            raise

    def _form_again(self, all_met: Sequence[_Met]) -> None:
        fewest = min(met.completed for met in all_met)
        if fewest < self._completed:
            assert self._kept is not None
            self._around(self._kept, fewest)

    def _check_may_go_on(self, error: PeerLostError) -> None:
        if self._terms.ends:
            raise PeerLostError(
                f"{error}. PACELINE_AGGREGATOR_LOSS=end says that the job ends with it; "
                "without that it goes on around the ring of all workers"
            ) from None

    def _await_return(self) -> None:
        """Rank 0 looks out for all aggregators."""
        if self._comm.rank == 0:
            self._missing = True
            threading.Thread(target=self._look_out, daemon=True).start()

    def _look_out(self) -> None:
        while not self._left:
            time.sleep(timeouts.sum_queue_retry)
            if all(_is_reached(at) for at in self._terms.where.values()):
                self._missing = False
                return

    # ---- the others ----

    def _around(self, values: Array, number: int) -> None:
        """Sum number *number*, around the ring of all ranks."""
        self._around_ring += 1
        self._comm.perform_here(
            Ring(self._comm.size, len(values)),
            torch.from_numpy(values),
            f"{self._path} sum {number}",
        )

    def _exchange(self, words: bytes) -> list[bytes]:
        """Collective: what all ranks say, however long it is."""
        own = torch.tensor([len(words)], dtype=torch.int64)
        lengths = [int(length) for length in self._gather(own)]
        longest = torch.zeros(max(lengths), dtype=torch.uint8)
        if words:
            longest[: len(words)] = torch.frombuffer(
                bytearray(words), dtype=torch.uint8
            )
        rows = self._gather(longest)
        return [
            bytes(row[:length].numpy())
            for row, length in zip(rows, lengths, strict=True)
        ]

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """Collective: every rank's *own*, equally long on all, as rows."""
        size, number = self._comm.size, self._exchanges
        self._exchanges += 1
        said = own.new_zeros(size, len(own))
        said[self._comm.rank] = own
        if said.numel():
            ring = Ring(size, said.numel(), rounds=1, gather=True)
            self._comm.perform_here(ring, said.view(-1), f"{self._path} words {number}")
        return said

    def _meet(self, *, leaving: bool = False) -> list[_Met]:
        words = msgspec.json.encode(_Met(self._completed, leaving))
        return [msgspec.json.decode(one, type=_Met) for one in self._exchange(words)]

    def _leave(self) -> None:
        """Until all others have all sums, and say so."""
        while self._broken is None and not self._left:
            meet = partial(self._meet, leaving=True)
            all_met = meet() if self._end is None else self._end.serve_while(meet)
            self._left = all(met.leaving for met in all_met)
            if not self._left:  # somebody has lost an aggregator
                if self._end is not None:
                    self._end.close(well=False)
                    self._end = None
                self._form_again(all_met)

    def _say(self, text: str) -> None:
        if self._comm.rank == 0:
            self._comm.tell(text)


def _readable(descriptor: int) -> None:
    """Wait until it is, but not for ever."""
    select.select([descriptor], [], [], timeouts.sum_queue_idle)


def _is_reached(address: Address) -> bool:
    try:
        socket.create_connection(address, timeouts.sum_queue_connect).close()
    except OSError:
        return False
    return True
