"""A worker's end of a server: an `Endpoint` over ZeroMQ. The other end is in `listener`.

Theory of operation
-------------------
One DEALER socket per channel, opened when it is first used; ZeroMQ's own threads move the
bytes while this process computes. `request` hands everything to them at once, from the
tensor's own memory (or, on one machine, puts it into `shared_memory`); what exceeds the credits (see `protocol`) is kept here, and sent as answers
come in. `wait` serves all channels of this endpoint until its own answer is there, and
copies each chunk straight into the tensor that was handed over. What is kept here moves
only inside calls of this endpoint: whoever waits on several servers should wait in the
order in which he asked, as all workers do. A service that asks another has no `wait`: its loop reads
the connections, see `read_in`.

The liveness connection ends when the server's process ends, in any way: then, or when a
channel's connection breaks, everything that waits raises `PeerLostError`. No connection is made
again: what follows a cut would come from a stranger, and whoever has taken the port meanwhile
would see the token. Nothing is sent a second time; a worker that comes back does so as a new
incarnation.

No threads of our own, no time-outs but those of connecting and closing: a server that is
alive may take all the time it needs. `wait` can be interrupted by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces.server_messages import PROTOCOL, Reply, Request
from paceline.records import StepRecorder
from paceline.timeouts import timeouts
from paceline.transport import liveness, payloads, protocol
from paceline.transport.channel import Channel, Reception
from paceline.transport.poll_loop import PollLoop, Source
from paceline.transport.protocol import RefusalError
from paceline.transport.security import SECRET, TOKEN, Security, choose
from paceline.transport.shared_memory import ANSWERS, PUSHES, Region, WorkerEnd

NEVER_MILLISECONDS = 1 << 30
"""Until ZeroMQ makes a connection again. Where it is told not to (-1), it throws away what has
come in and was not read."""


class RemoteServer:
    """An `Endpoint`: the server *name* at *host*, *port*, as *incarnation* of *worker*.

    *incarnation* None: the server numbers this life. *workers*: how many this worker takes the job
    to have, 0: it does not say. Who only *asks* learns that, ``workers``, and is no worker by it; nothing
    can be requested then. *token* is the job's; *security*: as the environment says, see `security`. Bytes and
    waits are counted in *recorder*.

    Raises `PeerLostError` if nobody answers there within `Timeouts.server_connect`, `UsageError`
    if the server does not want this worker, or if nothing protects the address.
    """

    _closed = True
    """Until something is open."""

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        *,
        worker: int,
        incarnation: int | None = 0,
        workers: int = 0,
        asks: bool = False,
        token: str,
        security: Security | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.name = f"{name} at {host}:{port}"
        self._host, self._port = host, port
        self._worker, self._incarnation, self._token = worker, incarnation, token
        self.workers, self._asks = workers, asks
        """How many the job has."""
        self._security = choose(host) if security is None else security
        self._recorder = recorder
        self._failure: UsageError | PeerLostError | None = None
        self.shared: WorkerEnd | None = None
        self._channels: dict[str, Channel] = {}
        self._liveness: socket.socket | None = None
        self._loop = PollLoop()
        self._watched: dict[Source, Callable[[], None]] = {}
        self._context = zmq.Context(io_threads=1)
        self._closed = False
        try:
            self._introduce(time.monotonic() + timeouts.server_connect)
        except BaseException:
            self._let_go(0.0)
            raise

    def __del__(self) -> None:
        """Dropped without a goodbye: ZeroMQ would wait for its sockets, for ever."""
        if not self._closed:
            self._let_go(0.0)

    def request(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
    ) -> Reception:
        """Send a request, and return at once; see `interfaces.Endpoint`.

        Raises `PeerLostError` if the server is known to be gone, `UsageError` for a tensor
        that is not flat and contiguous.
        """
        return self.ask(message, payload, into, channel)

    def ask(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
        replied: Callable[[Reply], None] | None = None,
    ) -> Reception:
        """As `request`; *replied* is called with the answer where it is read."""
        for what, tensor in (("payload", payload), ("into", into)):
            if tensor is not None:
                payloads.check_flat(what, tensor)
        self._check()
        if self._recorder is not None:
            self._recorder.count_bytes(
                protocol.HEADER_BYTES + payloads.size_of(payload)
            )
        there = self._channels.get(channel) or self._open(channel)
        if payload is not None and payload.device.type != "cpu":
            payload = payload.cpu()
        reception = Reception(there, message, payload, into, replied)
        try:
            there.submit(reception)
        except RefusalError as error:
            self._not_an_answer(error)
        return reception

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, as this worker knows them."""
        return self._host, self._port

    def look(self) -> None:
        """Read what has come, without waiting. Raises `PeerLostError` if the server is lost."""
        self._loop.handle(0)
        self._check()

    @property
    def failure(self) -> UsageError | PeerLostError | None:
        """Why nothing more is expected of the server, if so."""
        return self._failure

    def read_in(self, loop: PollLoop) -> None:
        """From now on *loop* reads what comes in, on whichever thread that
        runs. Nobody waits here then: answers are for `ask`'s *replied*."""
        for source in self._watched:
            self._loop.unwatch(source)
        self._loop = loop
        for source, handler in self._watched.items():
            loop.watch(source, handler)

    def part(self, well: bool) -> None:
        """Let the sockets go at once; *well*: this end is not missed. Requests that are
        unanswered, and answers, get lost."""
        if not self._closed:
            if well and self._liveness is not None:
                with contextlib.suppress(OSError):
                    self._liveness.send(b"bye\n")
            self._let_go(0.0)

    def close(self) -> None:
        """Say goodbye on all channels, and let the sockets go. Requests that were not
        waited for may get lost. Returns within `Timeouts.server_goodbye`, twice at the worst."""
        if self._closed:
            return
        linger = 0.0
        try:
            if self._failure is None and self._liveness is not None:
                for channel in self._channels.values():
                    channel.say(protocol.Bye())
                self._poll_until(
                    lambda: all(one.farewell for one in self._channels.values()),
                    time.monotonic() + timeouts.server_goodbye,
                )
                with contextlib.suppress(OSError):
                    self._liveness.send(b"bye\n")
                linger = 0.0 if self._failure else timeouts.server_goodbye
        except zmq.ZMQError:
            pass  # it is gone: nobody is left to say goodbye to
        finally:
            self._let_go(linger)

    # ---- connecting ----

    def _introduce(self, deadline: float) -> None:
        """Get known to the server, open the liveness connection, and share memory."""
        self._wait_for_listener(deadline)
        main = self._open("")
        self._await(lambda: main.welcome is not None, deadline)
        assert main.welcome is not None
        if self._asks:
            self.workers = main.welcome.workers
            return
        port, ticket = main.welcome.port, main.welcome.ticket
        self._incarnation = main.welcome.incarnation
        try:
            left = max(1.0, deadline - time.monotonic())
            self._liveness = socket.create_connection((self._host, port), left)
            liveness.watch(self._liveness)
            self._liveness.sendall(ticket.encode() + b"\n")
            if self._liveness.recv(1) != b"\n":
                raise OSError("it was closed")
        except OSError as error:
            raise PeerLostError(
                f"{self.name}: no liveness connection to its port {port}: {error}; the "
                "network must let both ports through"
            ) from None
        self._liveness.setblocking(False)
        self._watch(self._liveness, self._read_liveness)
        if self._liveness.getsockname()[0] == self._liveness.getpeername()[0]:
            self._share_memory(main, deadline)

    def _share_memory(self, main: Channel, deadline: float) -> None:
        """The server is on this machine: see `shared_memory`."""
        own = Region.make(PUSHES)
        if own is None:
            return
        with contextlib.closing(own):
            main.say(protocol.Share(own.place))
            self._await(lambda: main.shared is not None, deadline)
        assert main.shared is not None
        place = main.shared.memory
        answers = None if place is None else Region.open(place, ANSWERS)
        if answers is not None:
            main.say(protocol.Reads())
            self.shared = WorkerEnd(own, answers)

    def _await(self, done: Callable[[], bool], deadline: float) -> None:
        """Raises `PeerLostError` if the server has not answered by then."""
        if self._poll_until(done, deadline):
            return
        self._check()
        raise self._unanswered()

    def _unanswered(self, how: str = "") -> PeerLostError:
        return PeerLostError(
            f"{self.name} did not answer within {timeouts.server_connect:.0f} s{how}: is it running "
            "there, and does a firewall let this machine through to it?"
        )

    def _wait_for_listener(self, deadline: float) -> None:
        """ZeroMQ connects once: so somebody is to listen. Raises `PeerLostError` if nobody does
        by then."""
        while True:
            left = max(0.01, deadline - time.monotonic())
            try:
                socket.create_connection((self._host, self._port), left).close()
                return
            except OSError as error:
                if time.monotonic() + timeouts.connect_retry >= deadline:
                    raise self._unanswered(f" ({error})") from None
            threading.Event().wait(timeouts.connect_retry)

    def _open(self, name: str) -> Channel:
        if (
            len(name) > protocol.CHANNEL_CHARACTERS
            or len(self._channels) >= protocol.CHANNELS
        ):
            raise UsageError(
                f"channel {name!r}: expected at most {protocol.CHANNELS} channels, with "
                f"names of at most {protocol.CHANNEL_CHARACTERS} characters"
            )
        channel = self._channels[name] = Channel(self, name, self._socket())
        channel.socket.connect(protocol.endpoint(self._host, self._port))
        hello = protocol.Hello(
            PROTOCOL,
            self._token,
            self._worker,
            self._incarnation,
            name,
            self.workers,
            self._asks,
        )
        with contextlib.suppress(zmq.Again):  # refused by now: the monitor says how
            channel.say(hello)
        self._watch(channel.socket, channel.read)
        self._watch(channel.monitor, lambda: self._read_monitor(channel))
        return channel

    def _watch(self, source: Source, handler: Callable[[], None]) -> None:
        def read() -> None:
            try:
                handler()
            except RefusalError as error:
                self._not_an_answer(error)

        self._watched[source] = read
        self._loop.watch(source, read)

    def _socket(self) -> zmq.Socket[Any]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, int(1000 * timeouts.server_goodbye))
        # Credits are the limit, in both directions.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, protocol.FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MILLISECONDS)
        socket.setsockopt(zmq.IPV6, ":" in self._host)
        protocol.keep_alive(socket)
        self._security.protect_worker(socket, self._token)
        return socket

    # ---- waiting ----

    def wait_for(self, reception: Reception) -> None:
        start = time.perf_counter()
        poll = partial(self._poll_until, lambda: reception.reply is not None, None)
        if self._recorder is None:
            poll()
        else:
            self._recorder.block("server", poll)
            self._recorder.waited("server", start, time.perf_counter())
        if reception.reply is None:
            self._check()

    def _poll_until(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Serve all connections until *done*; False if the server is lost before, or at
        the deadline."""
        while not done():
            if self._failure is not None or self._closed:
                return False
            patience = None
            if deadline is not None:
                patience = int(1000 * (deadline - time.monotonic())) + 1
                if patience <= 0:
                    return False
            self._loop.handle(patience)
        return True

    def _read_monitor(self, channel: Channel) -> None:
        event = recv_monitor_message(channel.monitor, zmq.NOBLOCK)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.give_up(
                f"does not know this worker: its token ({TOKEN}, of a server that is "
                f"named with HOST:PORT), or the value of {SECRET}, differs between the two",
                UsageError,
            )
        elif event == zmq.EVENT_DISCONNECTED:
            channel.read()  # what it said last
            self.give_up(f"is lost: channel {channel.name!r} broke")
        else:
            mine = "encrypted" if self._security.encrypted else "plain"
            self.give_up(
                f"closed a connection (here {mine}) {protocol.BEFORE_IT_STOOD}: either it has just "
                f"ended, or {SECRET} differs between the two"
            )

    def _read_liveness(self) -> None:
        assert self._liveness is not None
        try:
            if self._liveness.recv(64):
                return
            how = liveness.how_it_ended(None)
        except BlockingIOError:
            return
        except OSError as error:
            how = liveness.how_it_ended(error)
        for channel in self._channels.values():
            channel.read()  # what it said last
        self.give_up(f"is lost: its process {how}")

    def _not_an_answer(self, error: RefusalError) -> None:
        self.give_up(f"sent what is no answer: {error}")

    def give_up(
        self, sentence: str, kind: type[UsageError | PeerLostError] = PeerLostError
    ) -> None:
        if self._failure is None:
            self._failure = kind(f"{self.name} {sentence}")

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"{self.name}: close() was called on this end")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _let_go(self, linger: float) -> None:
        self._closed = True
        self.shared = None
        for source in self._watched:
            self._loop.unwatch(source)
        self._watched.clear()
        for channel in self._channels.values():
            channel.close(linger)
        if self._liveness is not None:
            self._liveness.close()
        self._context.term()


def check_listens(name: str, host: str, port: int) -> None:
    """Raises `PeerLostError` at once where nobody listens any more: ZeroMQ, which is told
    nothing, would go on trying."""
    try:
        socket.create_connection((host, port), timeouts.server_connect).close()
    except OSError as error:
        raise PeerLostError(f"{name} at {host}:{port} is lost: {error}") from None
