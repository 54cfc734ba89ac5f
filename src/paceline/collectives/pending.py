"""`Pending`s over what is under way: one operation, or several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from paceline.collectives import continuations
from paceline.collectives.continuations import AtOnce, Chain, Work
from paceline.interfaces import Pending


class Issuing(Protocol):
    """The communicator that an operation was issued on."""

    @property
    def is_alone(self) -> bool:
        """Whether there is no other worker in the whole job."""
        ...

    @property
    def follows_streams(self) -> bool:
        """Whether results on CUDA are in the order of the device's streams."""
        ...

    def chain_of(self, issuer: Chain | None) -> Chain:
        """What follows the operations that *issuer* issues here."""
        ...

    def wait_for(self, work: Any, name: str) -> None:
        """Wait, and count it."""
        ...


class WorkPending:
    """A `Pending` over a handle as torch.distributed gives it; None: the result is in."""

    __slots__ = ("_comm", "_issuer", "_name", "_on_cuda", "_work")

    def __init__(
        self,
        comm: Issuing,
        issuer: Chain | None,
        work: Any,
        name: str,
        on_cuda: bool = False,
    ) -> None:
        self._comm = comm
        self._issuer = issuer
        self._work = work
        self._name = name
        self._on_cuda = on_cuda

    def wait(self) -> None:
        work = self._work
        if work is not None:
            continuations.check_may_wait()
            try:
                self._comm.wait_for(work, self._name)
            finally:
                self._work = None

    def then(self, work: Work) -> Pending:
        continuations.check_issued_here(self._issuer)
        issued = None if self._work is None else _Issued(self, self._work)
        if self._comm.is_alone or (self._on_cuda and self._comm.follows_streams):
            return AtOnce(issued, work)
        return self._comm.chain_of(self._issuer).follow(issued, work)

    def settle(self) -> None:
        if self._work is not None:
            _Issued(self, self._work).settle()

    def when_in(self, action: Callable[[], None]) -> None:
        if self._work is None:
            action()
        else:
            self._work.when_in(action)

    def is_in(self) -> None:
        """Whoever waits from now on need not."""
        self._work = None


class _Issued:
    """What a chain waits for: also when the training waits for it, too, in another
    thread."""

    __slots__ = ("_pending", "_work")

    def __init__(self, pending: WorkPending, work: Any) -> None:
        self._pending, self._work = pending, work

    def settle(self) -> None:
        self._work.wait()
        self._pending.is_in()

    def when_in(self, action: Callable[[], None]) -> None:
        self._work.when_in(action)


class AllOf:
    """A `Pending` over several, all issued at one place."""

    def __init__(self, comm: Issuing, pendings: Sequence[Pending]) -> None:
        self._comm = comm
        self._issuer = continuations.current()
        self._pendings = pendings

    def wait(self) -> None:
        if self._pendings:
            continuations.check_may_wait()
        for pending in self._pendings:
            pending.wait()
        self._pendings = ()

    def settle(self) -> None:
        for pending in self._pendings:
            continuations.awaited(pending).settle()
        self._pendings = ()

    def then(self, work: Work) -> Pending:
        continuations.check_issued_here(self._issuer)
        return self._comm.chain_of(self._issuer).follow(self, work)

    def when_in(self, action: Callable[[], None]) -> None:
        call_when_all_in(
            [continuations.awaited(pending) for pending in self._pendings], action
        )


class CallsBack(Protocol):
    """What tells when it is in."""

    def when_in(self, action: Callable[[], None]) -> None: ...


def call_when_all_in(several: Sequence[CallsBack], action: Callable[[], None]) -> None:
    """Simulated runtimes: call *action* at the instant at which the last of them is in."""
    missing = len(several)

    def one_is_in() -> None:
        nonlocal missing
        missing -= 1
        if not missing:
            action()

    if not several:
        action()
    for one in several:
        one.when_in(one_is_in)


class OneWait:
    """torch's handle of a send or a receive, which can be waited for once only: a second
    wait of gloo's would be for another message, and hang.

    It stays in *under_way* until then: gloo drops a message whose handle nobody holds.
    """

    def __init__(self, work: Any, under_way: set[OneWait]) -> None:
        self._work = work
        self._under_way = under_way
        under_way.add(self)
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def wait(self) -> None:
        with self._lock:
            work, self._work = self._work, None
            if work is not None:
                try:
                    work.wait()
                except BaseException as error:
                    self._error = error
                self._under_way.discard(self)
        if self._error is not None:
            raise self._error


class Job:
    """Something that a lane does; what waits for it is told how it went."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self, error: BaseException | None) -> None:
        """Called by the lane's runner, once."""
        do, self._do = self._do, None
        assert do is not None
        try:
            with torch.no_grad():
                do()
        except BaseException as fault:
            self._error = fault
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class PutBack:
    """The `Pending` of what arrives in *row*, which then goes *into* where it belongs."""

    __slots__ = ("_into", "_pending", "_row")

    def __init__(self, pending: Pending, row: torch.Tensor, into: torch.Tensor) -> None:
        self._pending, self._row, self._into = pending, row, into

    def wait(self) -> None:
        self._pending.wait()
        self._put()

    def then(self, work: Work) -> Pending:
        def put_and_work() -> Pending | None:
            self._put()
            return work()

        return self._pending.then(put_and_work)

    def _put(self) -> None:
        row, self._row = self._row, self._row.new_empty(0)
        if row.numel():
            self._into.copy_(row)
