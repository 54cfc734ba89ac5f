"""Handles of operations under way, and continuations: work that runs after a result has arrived.

`WorkPending` is the handle of one operation, `AllOf` of several. A `ContinuationChain` runs
continuations in the order of issue.

`Pending.then` appends a continuation (a *work*) to a `ContinuationChain`. The training issues
operations on a channel; all of them share the channel's first chain, whichever group they belong
to. A chain runs its works first in, first out, each after the result that it follows has arrived.
So ranks whose results arrive in different orders still run the same works in the same order.

Operations that a work issues must not share a queue with operations that the training issues
meanwhile. Their order would differ between ranks, and collectives are matched by order. So a `Comm`
asks `current` for the issuing chain, and keeps a queue (a process group) for each chain.
Continuations of *those* operations run on a chain of their own, the ``nested`` one. Continuations
of the Pending that ``then`` returned run on the ``next`` one. Paths name chains, and are equal on
all ranks.

The runtime decides where works run, with a `ContinuationRunner`. It is a thread per chain (`ThreadRunner`), or
an event at a virtual instant. Where only the requesting thread can take results, works run in the
thread that waits (`WaitingRunner`).

After an error a chain runs nothing more. This rank has skipped operations that other ranks have
issued, and its later operations would be matched with those.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from paceline.errors import UsageError
from paceline.interfaces import (
    AwaitedOperation,
    CompletionEvent,
    ContinuationRunner,
    Pending,
    Runtime,
)
from paceline.timeouts import timeouts

Callback = Callable[[], Pending | None]

_here = threading.local()


def current() -> ContinuationChain | None:
    """The chain whose work runs on this thread; None outside of works."""
    chain: ContinuationChain | None = getattr(_here, "chain", None)
    return chain


def check_may_wait() -> None:
    """Raise `UsageError` if a continuation runs on this thread: it may not wait."""
    if getattr(_here, "working", False):
        raise UsageError(
            "wait() inside a function given to Pending.then: it would block all later ones. "
            "Return the Pending, or chain the work that needs its result: return "
            "pending.then(...)"
        )


def check_may_make(what: str) -> None:
    """Raise `UsageError` if a continuation runs on this thread: it may not make groups or channels."""
    if getattr(_here, "working", False):
        raise UsageError(
            f"{what} inside a function given to Pending.then: all members must make groups "
            "and channels together. Ask for it before, for example in start(run)"
        )


@contextmanager
def _working(chain: ContinuationChain | None) -> Iterator[None]:
    before = current(), getattr(_here, "working", False)
    _here.chain, _here.working = chain, True
    try:
        with torch.no_grad():
            yield
    finally:
        _here.chain, _here.working = before


class ContinuationChain:
    """Runs continuations in the order of issue.

    *name* is the communicator whose operations they follow, *steps* the path from there to this
    chain. Together they are the same on all ranks. *thread*: see `Runtime.runner`.
    """

    def __init__(
        self, runtime: Runtime, name: str, steps: str = "", *, thread: bool = True
    ) -> None:
        self.runtime = runtime
        self.steps = steps
        self._name = name
        self._thread = thread
        self._runner: ContinuationRunner | None = None
        self._others: dict[str, ContinuationChain] = {}
        self._broken: BaseException | None = None

    @property
    def path(self) -> str:
        """The chain's name: the same on all ranks."""
        return self._name + self.steps

    @property
    def nested(self) -> ContinuationChain:
        """The chain for continuations of operations that this chain's works issue."""
        return self._other(">")

    @property
    def next(self) -> ContinuationChain:
        """The chain for continuations of the Pendings that this chain's `append` returns."""
        return self._other("+")

    def _other(self, step: str) -> ContinuationChain:
        if step not in self._others:
            self._others[step] = ContinuationChain(
                self.runtime, self._name, self.steps + step, thread=self._thread
            )
        return self._others[step]

    def append(self, awaited: AwaitedOperation | None, work: Callback) -> Continuation:
        """Run *work* when *awaited* has arrived, after all works appended before."""
        if self._runner is None:
            self._runner = self.runtime.runner(self.path, thread=self._thread)
        chained = Continuation(
            self, work, self._runner.completion_event(f"what follows {self.path}")
        )
        self._runner.put(awaited, chained.run)
        return chained

    def perform(
        self, work: Callback, error: BaseException | None
    ) -> AwaitedOperation | None:
        """Run *work*, unless this result or an earlier one of the chain failed."""
        if self._broken is None:
            self._broken = error
        if self._broken is not None:
            raise self._broken
        try:
            with _working(self):
                issued = work()
            return None if issued is None else awaited(issued)
        except BaseException as fault:
            self._broken = fault
            raise

    def close(self) -> None:
        """Drop works that have not run; waiting for one of them raises `UsageError`."""
        if self._broken is None:
            self._broken = UsageError(
                "the communicator was closed before this result had arrived: wait for it first"
            )
        for other in self._others.values():
            other.close()
        if self._runner is not None:
            self._runner.close()


class Continuation:
    """The `Pending` of a continuation: complete when it has run, and the operation it returned is complete."""

    def __init__(
        self, chain: ContinuationChain, work: Callback, ran: CompletionEvent
    ) -> None:
        self._chain = chain
        self._work: Callback | None = work
        self._ran = ran
        self._issued_in = current()
        self._next: AwaitedOperation | None = None
        self._error: BaseException | None = None
        self._has_result = False

    def run(self, error: BaseException | None) -> None:
        """Run the work; the chain's runner calls this once."""
        work, self._work = self._work, None
        assert work is not None
        try:
            self._next = self._chain.perform(work, error)
        except BaseException as fault:
            self._error = fault
        self._ran.set()

    def wait(self) -> None:
        if self._has_result:
            return
        check_may_wait()
        runtime = self._chain.runtime
        start = runtime.clock.now()
        runtime.recorder.block("chained", self.wait_for_result)
        runtime.recorder.waited("chained", start, runtime.clock.now())

    def wait_for_result(self) -> None:
        self._ran.wait()
        if self._error is not None:
            raise self._error
        if self._next is not None:
            self._next.wait_for_result()
        self._has_result = True

    def on_completion(self, action: Callable[[], None]) -> None:
        def ran() -> None:
            if self._next is None:
                action()
            else:
                self._next.on_completion(action)

        self._ran.on_completion(ran)

    def then(self, work: Callback) -> Pending:
        check_issued_here(self._issued_in)
        return self._chain.next.append(self, work)


def check_issued_here(issued_in: ContinuationChain | None) -> None:
    """Raise `UsageError` if another chain has issued the operation."""
    if current() is not issued_in:
        raise UsageError(
            "Pending.then: this operation was issued elsewhere (by another continuation, or "
            "outside of this one), so the order of its continuations would differ between "
            "ranks. Call then() where the operation is issued"
        )


class ImmediateContinuation:
    """The `Pending` of a continuation that runs at once: in a job of one worker, or on a CUDA stream."""

    def __init__(self, awaited: AwaitedOperation | None, work: Callback) -> None:
        self._next: Pending | None = None
        self._error: BaseException | None = None
        try:
            if awaited is not None:
                awaited.wait_for_result()
            with _working(current()):
                self._next = work()
        except BaseException as fault:
            self._error = fault

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        if self._next is not None:
            self._next.wait()

    def wait_for_result(self) -> None:
        if self._error is not None:
            raise self._error
        if self._next is not None:
            awaited(self._next).wait_for_result()

    def on_completion(self, action: Callable[[], None]) -> None:
        if self._next is None:
            action()
        else:
            awaited(self._next).on_completion(action)

    def then(self, work: Callback) -> Pending:
        return ImmediateContinuation(self, work)


def awaited(pending: Pending) -> AwaitedOperation:
    """Return *pending* as an `AwaitedOperation`; raise `UsageError` if paceline did not create it."""
    if not isinstance(pending, AwaitedOperation):
        raise UsageError(
            "the function given to Pending.then returned a "
            f"{type(pending).__name__}: expected None or a Pending of a Comm"
        )
    return pending


class _Flag:
    """A `CompletionEvent` between threads."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def wait(self) -> None:
        self._event.wait()

    def on_completion(self, action: Callable[[], None]) -> None:
        raise NotImplementedError("only virtual time calls back")


_Item = tuple[AwaitedOperation | None, Callable[[BaseException | None], None]]


class ThreadRunner:
    """A `ContinuationRunner` with its own thread, which starts with the first continuation.

    The thread waits for results one after the other, until `close`. It is a daemon thread: a wait for
    an operation without partners does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._queue.put, None)

    def put(
        self,
        awaited: AwaitedOperation | None,
        run: Callable[[BaseException | None], None],
    ) -> None:
        self._queue.put((awaited, run))
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._queue,), name=self._name, daemon=True
            )
            self._thread.start()

    def completion_event(self, what: str) -> CompletionEvent:
        return _Flag()

    def close(self) -> None:
        # The thread may take the remaining items at the same time; neither side may wait for an
        # item that the other took.
        with suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    # The chain is closed, so the continuation ends with an error.
                    item[1](None)
        self._queue.put(None)
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeouts.chain_close)


def _serve(queue: SimpleQueue[_Item | None]) -> None:
    # This is a function of the queue alone, so that a communicator can be collected without
    # `close`.
    while (item := queue.get()) is not None:
        error: BaseException | None = None
        try:
            if item[0] is not None:
                item[0].wait_for_result()
        except BaseException as fault:
            error = fault
        item[1](error)
        del item, error  # release buffers before waiting for the next item


class WaitingRunner:
    """A `ContinuationRunner` for results that only the requesting thread can receive.

    A continuation runs when that thread waits for it. Earlier continuations run first.
    """

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()

    def put(
        self,
        awaited: AwaitedOperation | None,
        run: Callable[[BaseException | None], None],
    ) -> None:
        self._items.append((awaited, run))

    def completion_event(self, what: str) -> CompletionEvent:
        return _Turn(self)

    def run_next(self) -> None:
        """Run the first continuation of the queue."""
        awaited, run = self._items.popleft()
        error: BaseException | None = None
        try:
            if awaited is not None:
                awaited.wait_for_result()
        except BaseException as fault:
            error = fault
        run(error)

    def close(self) -> None:
        while self._items:
            self._items.popleft()[1](None)


class _Turn:
    """The `CompletionEvent` of a continuation of a `WaitingRunner`."""

    def __init__(self, runner: WaitingRunner) -> None:
        self._runner = runner
        self._happened = False

    def set(self) -> None:
        self._happened = True

    def wait(self) -> None:
        while not self._happened:
            self._runner.run_next()

    def on_completion(self, action: Callable[[], None]) -> None:
        raise NotImplementedError("only virtual time calls back")


# ---- handles of operations ----


class IssuingCommunicator(Protocol):
    """The communicator that an operation was issued on."""

    @property
    def is_alone(self) -> bool:
        """Whether this is the only worker of the whole job."""
        ...

    @property
    def follows_streams(self) -> bool:
        """Whether results on CUDA are in the order of the device's streams."""
        ...

    def chain_of(self, issuer: ContinuationChain | None) -> ContinuationChain:
        """The chain for continuations of operations that *issuer* issues here."""
        ...

    def wait_for(self, work: Any, name: str) -> None:
        """Wait for *work*, and record the waiting time."""
        ...


class WorkPending:
    """A `Pending` over a handle of torch.distributed; None: the result has arrived."""

    __slots__ = ("_comm", "_issuer", "_name", "_on_cuda", "_work")

    def __init__(
        self,
        comm: IssuingCommunicator,
        issuer: ContinuationChain | None,
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
            check_may_wait()
            try:
                self._comm.wait_for(work, self._name)
            finally:
                self._work = None

    def then(self, work: Callback) -> Pending:
        check_issued_here(self._issuer)
        issued = None if self._work is None else _Issued(self, self._work)
        if self._comm.is_alone or (self._on_cuda and self._comm.follows_streams):
            return ImmediateContinuation(issued, work)
        return self._comm.chain_of(self._issuer).append(issued, work)

    def wait_for_result(self) -> None:
        if self._work is not None:
            _Issued(self, self._work).wait_for_result()

    def on_completion(self, action: Callable[[], None]) -> None:
        if self._work is None:
            action()
        else:
            self._work.on_completion(action)

    def note_result(self) -> None:
        """Record that the result has arrived, so that later waits return at once."""
        self._work = None


class _Issued:
    """The handle that a chain waits for; the training may wait for the same result in another thread."""

    __slots__ = ("_pending", "_work")

    def __init__(self, pending: WorkPending, work: Any) -> None:
        self._pending, self._work = pending, work

    def wait_for_result(self) -> None:
        self._work.wait()
        self._pending.note_result()

    def on_completion(self, action: Callable[[], None]) -> None:
        self._work.on_completion(action)


class AllOf:
    """A `Pending` over several operations, all issued by the same chain."""

    def __init__(self, comm: IssuingCommunicator, pendings: Sequence[Pending]) -> None:
        self._comm = comm
        self._issuer = current()
        self._pendings = pendings

    def wait(self) -> None:
        if self._pendings:
            check_may_wait()
        for pending in self._pendings:
            pending.wait()
        self._pendings = ()

    def wait_for_result(self) -> None:
        for pending in self._pendings:
            awaited(pending).wait_for_result()
        self._pendings = ()

    def then(self, work: Callback) -> Pending:
        check_issued_here(self._issuer)
        return self._comm.chain_of(self._issuer).append(self, work)

    def on_completion(self, action: Callable[[], None]) -> None:
        call_when_all_complete([awaited(pending) for pending in self._pendings], action)


class CallsBack(Protocol):
    """An operation that calls a function when it is complete."""

    def on_completion(self, action: Callable[[], None]) -> None: ...


def call_when_all_complete(
    several: Sequence[CallsBack], action: Callable[[], None]
) -> None:
    """In simulated runtimes: call *action* at the instant when the last operation completes."""
    missing = len(several)

    def one_is_complete() -> None:
        nonlocal missing
        missing -= 1
        if not missing:
            action()

    if not several:
        action()
    for one in several:
        one.on_completion(one_is_complete)


class Job:
    """A task for a runner's thread, with a `wait` that raises the task's error."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: Callable[[], None] | None = do
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self, error: BaseException | None) -> None:
        """Run the task; the runner calls this once."""
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
    """The `Pending` of data that arrives in *row*, and is then copied *into* its place."""

    __slots__ = ("_into", "_pending", "_row")

    def __init__(self, pending: Pending, row: torch.Tensor, into: torch.Tensor) -> None:
        self._pending, self._row, self._into = pending, row, into

    def wait(self) -> None:
        self._pending.wait()
        self._put()

    def then(self, work: Callback) -> Pending:
        def put_and_work() -> Pending | None:
            self._put()
            return work()

        return self._pending.then(put_and_work)

    def _put(self) -> None:
        row, self._row = self._row, self._row.new_empty(0)
        if row.numel():
            self._into.copy_(row)
