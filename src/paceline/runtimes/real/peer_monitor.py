"""Informs every surviving rank which rank died, independently of gloo and NCCL.

Each rank keeps one idle TCP connection to rank 0's hub. *Dead* means a lost connection (see
`transport.liveness`). Silence is never a death: a rank may compute, compile or evaluate for an hour
with the interpreter's lock held. A rank that ends well sends a goodbye first; one that fails sends
its error. The hub informs all ranks. If the hub itself is lost, they know that rank 0 has ended. If
ranks wait for a living rank, rank 0 names it, and it continues (see `hang_report`).

A survivor may be blocked in a collective forever, and Python cannot interrupt it there. So it is
ended after a few seconds in one. Any other survivor may write an emergency checkpoint, and has
PACELINE_EXIT_GRACE_SECONDS to end by itself.

Messages are lines of JSON of bounded length; nothing is unpickled. A connection that does not begin
with the hub's token is closed.

Threat model: ranks learn the token as `job_store` describes, so other users of one machine do not
have it. Several machines need PACELINE_SECRET for that; without it, readers of torch's store have
the token. It travels unencrypted: readers of the network between machines have it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from paceline.errors import UsageError
from paceline.interfaces.consolidated_entry import (
    ConsolidatedEntries,
    ConsolidatedEntry,
)
from paceline.run_options import seconds_from
from paceline.runtimes.real.hang_report import LOOKS, Hangs, HangWatch, Whereabouts
from paceline.runtimes.real.job_store import (
    LOOPBACK,
    Address,
    JobStore,
    ListenAddress,
    family_of,
    host_to_connect,
    on_master,
)
from paceline.timeouts import timeouts
from paceline.transport import liveness
from paceline.transport.poll_loop import PollLoop

LINE_BYTES = 4096
STRANGERS = 16
"""The most connections that have not sent a hello, in addition to one for each rank."""
BACKLOG = 1024
"""Connections that wait to be accepted. With a short queue strangers would keep ranks out."""

KEY = "paceline/liveness"
"""Key of the hub's address in the store."""


class Hello(msgspec.Struct, kw_only=True):
    """The first message of a rank."""

    token: str
    rank: int
    host: str
    process: int


class FailureNotice(msgspec.Struct, kw_only=True):
    """The end of a rank: a success without *fault*, else a failure.

    With *training*, only that training has ended on the rank.
    """

    rank: int
    fault: str | None = None
    training: int | None = None
    entry: ConsolidatedEntry | None = None
    """The rank continues, and reports whether it is inside `consolidated`; *present* ranks are connected."""
    present: int = 0
    where: Whereabouts | None = None
    """The rank continues; it waits for other ranks, or was asked for its position."""
    asks: bool = False
    """The receiving rank is asked for its position."""


class FailureHub:
    """Rank 0's hub: receives messages of all ranks, and forwards the first failure to all.

    It also names the rank that the other ranks wait for.
    """

    def __init__(
        self, size: int, listen_address: ListenAddress, job_store: JobStore
    ) -> None:
        self._size = size
        self._hangs = Hangs()
        self._token = job_store.new_token()
        self._listener = socket.create_server(
            (listen_address.bind, 0),
            family=family_of(listen_address.bind),
            backlog=BACKLOG,
        )
        self._listener.setblocking(False)
        self._idle_connections = liveness.IdleConnections(size + STRANGERS, LINE_BYTES)
        self._ranks: dict[socket.socket, Hello] = {}
        self._loop = PollLoop()
        self._loop.watch(self._listener, self._accept)
        self._wake, self._waker = socket.socketpair()
        self._loop.watch(self._waker, self._begin_to_close)
        self._closing = False
        for end in (self._listener, self._wake, self._waker):
            liveness.close_in_children(end)
        port = self._listener.getsockname()[1]
        job_store.publish_address(
            KEY, Address(host=listen_address.advertise, port=port, token=self._token)
        )
        self._thread = threading.Thread(
            target=self._serve, name="paceline liveness hub", daemon=True
        )
        self._thread.start()

    @property
    def present(self) -> set[int]:
        """The ranks that have said hello, and have not ended."""
        return {hello.rank for hello in list(self._ranks.values())}

    def close(self) -> None:
        """End rank 0's hub, with a goodbye to all ranks that are still connected."""
        self._wake.close()
        self._thread.join(timeout=timeouts.collective_grace)

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._loop.handle(self._hangs.milliseconds(time.monotonic()))
                self._name_hangs()
            # First read all messages that have arrived, so that errors are handled before losses.
            while self._loop.handle(0):
                pass
            self._send_to_all(FailureNotice(rank=0))
        finally:
            self._loop.clear()
            self._idle_connections.close_all()
            self._listener.close()
            self._waker.close()

    def _begin_to_close(self) -> None:
        self._loop.unwatch(self._waker)
        self._closing = True

    def _accept(self) -> None:
        peer = self._idle_connections.accept(self._listener, self._drop)
        if peer is not None:
            self._loop.watch(peer, partial(self._read, peer))

    def _read(self, peer: socket.socket) -> None:
        received = self._idle_connections.read(peer)
        try:
            for line in received.lines:
                self._handle_line(peer, line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            # It is not a rank, or no longer one.
            self._lose(peer)
            return
        if received.over:
            self._lose(peer, received.error)

    def _handle_line(self, peer: socket.socket, line: bytes) -> None:
        if peer not in self._ranks:
            hello = msgspec.json.decode(line, type=Hello)
            known = hmac.compare_digest(hello.token.encode(), self._token.encode())
            if not (known and 0 <= hello.rank < self._size):
                raise msgspec.ValidationError("a wrong token")
            self._ranks[peer] = hello
            self._idle_connections.know(peer)
            return
        news = msgspec.json.decode(line, type=FailureNotice)
        if news.entry is not None:
            notice = FailureNotice(rank=self._ranks[peer].rank, entry=news.entry)
            notice.present = len(self._ranks)
            self._send_to_all(notice)
            return
        if news.where is not None:
            if self._hangs.receive_report(
                self._ranks[peer].rank, news.where, time.monotonic()
            ):
                self._send_to_all(FailureNotice(rank=0, asks=True), but=peer)
            return
        hello = self._ranks.pop(peer)
        if news.fault is not None:
            notice = FailureNotice(
                rank=hello.rank, fault=news.fault, training=news.training
            )
            self._send_to_all(notice)
        if news.training is not None:
            # The rank continues, and may end differently.
            self._ranks[peer] = hello

    def _lose(self, peer: socket.socket, error: OSError | None = None) -> None:
        hello = self._ranks.pop(peer, None)
        self._drop(peer)
        if hello is not None:
            fault = f"{_process_of(hello)} {liveness.how_it_ended(error)}"
            self._send_to_all(FailureNotice(rank=hello.rank, fault=fault))

    def _drop(self, peer: socket.socket) -> None:
        self._loop.unwatch(peer)
        self._idle_connections.close(peer)

    def _name_hangs(self) -> None:
        if not self._hangs.is_due(len(self._ranks), time.monotonic()):
            return
        present = {hello.rank: _process_of(hello) for hello in self._ranks.values()}
        report = self._hangs.conclude(present, time.monotonic())
        if report:
            # Print on a thread, once per hang: a blocked terminal must not block the hub.
            threading.Thread(target=_print, args=(report,), daemon=True).start()

    def _send_to_all(
        self, news: FailureNotice, but: socket.socket | None = None
    ) -> None:
        for peer in list(self._ranks):
            if peer is not but:
                with contextlib.suppress(OSError):
                    # The message fits into an idle connection's buffer.
                    peer.send(line_of(news))


def make_hub(size: int, job_store: JobStore) -> FailureHub | None:
    """Return rank 0's hub, and publish its address in *job_store*.

    If it cannot listen, publish the error and return None.
    """
    try:
        return FailureHub(size, on_master(size), job_store)
    except OSError as error:
        address = os.environ.get("MASTER_ADDR", LOOPBACK)
        fault = f"rank 0 cannot listen on MASTER_ADDR {address}: {error}"
        job_store.publish_address(KEY, Address(fault=fault))
        return None


def _process_of(hello: Hello) -> str:
    return f"(host {hello.host}, process {hello.process})"


def _print(text: str) -> None:
    # The stream may be closed.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def line_of(message: msgspec.Struct) -> bytes:
    """Return a message as a line of JSON."""
    return msgspec.json.encode(message) + b"\n"


EXIT_GRACE_VARIABLE = "PACELINE_EXIT_GRACE_SECONDS"
_LOOK_EVERY = 0.2
FAULT_CHARACTERS = 500


class PeerMonitor:
    """Monitors the other ranks for this rank.

    Args:
        rank: This rank.
        size: Number of ranks.
        job_store: Publishes the hub's address.
        lost: Called once, on a thread of this object, with a sentence that names the failed rank.
        broke: Called for each training of another rank that ended with an error, with its number
            and such a sentence.
        entries: Sends this rank's entry to the other ranks, and receives theirs.
        watch: Measures how long this rank waits for other ranks. Without it, no wait is reported.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        job_store: JobStore,
        lost: Callable[[str], None],
        broke: Callable[[int, str], None] = lambda *_: None,
        entries: ConsolidatedEntries | None = None,
        watch: HangWatch | None = None,
    ) -> None:
        self._rank = rank
        self._lost, self._broke = lost, broke
        self._over = False
        self._entries = entries or ConsolidatedEntries()
        self._watch = watch
        self.hub: FailureHub | None = None
        """The hub, on rank 0 only."""
        if rank == 0:
            self.hub = make_hub(size, job_store)
        try:
            address = job_store.address(KEY)
        except UsageError as error:
            self._continue_unmonitored(f"cannot learn where rank 0 watches: {error}")
            return
        if address.fault:
            self._over = True
            if rank == 0:
                print(
                    f"paceline: {address.fault}; when a rank dies, the others will learn "
                    "it from gloo or NCCL alone",
                    file=sys.stderr,
                )
            return
        host, port = host_to_connect(address.host), address.port
        try:
            self._socket = socket.create_connection(
                (host, port), timeouts.liveness_connect
            )
        except OSError as error:
            self._continue_unmonitored(f"cannot reach rank 0 at {host}:{port}: {error}")
            return
        self._socket.settimeout(None)
        liveness.watch(self._socket)
        self._send(
            Hello(
                token=address.token,
                rank=rank,
                host=socket.gethostname(),
                process=os.getpid(),
            )
        )
        self._entries.connect(rank, self._send_entry, waits=True)
        self._thread = threading.Thread(
            target=self._listen, name="paceline liveness", daemon=True
        )
        self._thread.start()

    def _continue_unmonitored(self, why: str) -> None:
        self._over = True
        print(
            f"paceline: rank {self._rank} {why}; when a rank dies, it will learn it from "
            "gloo or NCCL alone, and the others will learn its own death from them alone",
            file=sys.stderr,
        )

    def report_training_failure(self, number: int, fault: str) -> None:
        """Report that a training has ended on this rank with a *fault*; the rank itself continues."""
        if not self._over:
            with contextlib.suppress(OSError):
                brief = fault[:FAULT_CHARACTERS]
                self._send(FailureNotice(rank=self._rank, fault=brief, training=number))

    def _send_entry(self, entry: ConsolidatedEntry) -> None:
        if not self._over:
            with contextlib.suppress(OSError):
                self._send(FailureNotice(rank=self._rank, entry=entry))

    def close(self, fault: str | None = None) -> None:
        """End this rank: well, or with a *fault*, which the other ranks get."""
        if not self._over:
            self._over = True
            with contextlib.suppress(OSError):
                brief = fault[:FAULT_CHARACTERS] if fault else None
                self._send(FailureNotice(rank=self._rank, fault=brief))
                # The listener thread closes it.
                self._socket.shutdown(socket.SHUT_RDWR)
        # It may follow a failure notice.
        if self.hub is not None:
            self.hub.close()

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.sendall(line_of(message))

    def _listen(self) -> None:
        with self._socket:
            self._read_notices()
        self._entries.disconnect()

    def _read_notices(self) -> None:
        try:
            for line in self._lines():
                news = msgspec.json.decode(line, type=FailureNotice)
                if news.asks:
                    self._report_position(only_long_waits=False)
                    continue
                if news.entry is not None:
                    self._entries.receive(news.rank, news.entry, news.present)
                    continue
                # Rank 0 and its hub end without an error.
                if news.fault is None:
                    return
                sentence = f"rank {news.rank} {news.fault}"
                if news.training is None:
                    self._report_loss(sentence)
                    return
                if not self._over:
                    self._broke(news.training, sentence)
            lost = None
        except OSError as error:
            lost = error
        except msgspec.MsgspecError as error:
            self._report_loss(f"rank 0 sent what is not a line of news: {error}")
            return
        self._report_loss(f"rank 0 {liveness.how_it_ended(lost)}")

    def _lines(self) -> Iterator[bytes]:
        """Yield the hub's messages. Between two of them, this rank checks its own position."""
        begun, poll = b"", select.poll()
        poll.register(self._socket, select.POLLIN)
        every = None if self._watch is None else timeouts.rank_hang / LOOKS
        due = time.monotonic()
        while True:
            pause = None
            if every is not None:
                if time.monotonic() >= due:
                    self._report_position(only_long_waits=True)
                    due = time.monotonic() + every
                pause = 1000 * max(0.0, due - time.monotonic())
            if not poll.poll(pause):
                continue
            data = self._socket.recv(LINE_BYTES)
            if not data:
                return
            *lines, begun = (begun + data).split(b"\n")
            yield from lines

    def _report_position(self, *, only_long_waits: bool) -> None:
        if self._watch is None or self._over:
            return
        where = self._watch.look()
        if only_long_waits and not (where.waits and where.still >= timeouts.rank_hang):
            return
        # The listener reports the loss of the hub.
        with contextlib.suppress(OSError):
            self._send(FailureNotice(rank=self._rank, where=where))

    def _report_loss(self, sentence: str) -> None:
        if not self._over:
            self._over = True
            self._lost(sentence)


def exit_grace() -> float:
    """Return the seconds for which a worker that has lost a peer may continue."""
    return seconds_from(os.environ, EXIT_GRACE_VARIABLE, timeouts.exit_grace)


def end_after_grace(
    rank: int,
    sentence: str,
    printed: threading.Event,
    is_blocked: Callable[[], bool],
    grace: float,
) -> None:
    """Print the failure, and end this worker in time. *printed* is set after the message.

    *is_blocked* returns whether the training waits for other ranks. The process ends when it has
    waited for `Timeouts.collective_grace`, or after *grace* seconds.
    """
    # This worker must end even if its standard error is closed.
    with contextlib.suppress(OSError, ValueError):
        message = f"paceline: {sentence}; rank {rank} ends too"
        print(message, file=sys.stderr, flush=True)
    printed.set()
    blocked_since = now = time.monotonic()
    end = now + grace
    while now < end and now - blocked_since < timeouts.collective_grace:
        time.sleep(_LOOK_EVERY)
        now = time.monotonic()
        if not is_blocked():
            blocked_since = now
    os._exit(1)
