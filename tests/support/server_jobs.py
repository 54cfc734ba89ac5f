"""What the tests of server processes share: a tiny server, a job in a thread, a rude peer."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import torch
import zmq

from paceline.interfaces import Reply, Service, Work
from paceline.interfaces.server_messages import (
    PROTOCOL,
    Describe,
    Done,
    Leave,
    Load,
    Parameters,
    Pull,
    PullState,
    Reduce,
    Reduced,
    Rejected,
)
from paceline.parameter_server.process.host import ServerHost
from paceline.transport import protocol
from paceline.transport.connection import ServerConnection
from paceline.transport.listener import ServerListener
from paceline.transport.peers import Route
from paceline.transport.protocol import ONLY_SERVICE
from paceline.transport.security import PLAIN
from tests.support.hanging import SECONDS

TOKEN = "the token of this job"
ROOT = Path(__file__).parent.parent.parent


@contextlib.contextmanager
def time_limit(seconds=SECONDS):
    """Whatever hangs in the main thread raises TimeoutError."""

    def ring(*_):
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Adder(Service):
    """Adds the payloads of the first *workers* in rank order, and answers with the sum;
    echoes loads into pulls; never answers `PullState`; dies of `Leave` if *mortal*."""

    def __init__(self, workers, mortal=False):
        self.workers = workers
        self.mortal = mortal
        self.parts = {}
        self.buckets = {}
        self.lost = []
        self.news = threading.Event()
        self.silent = threading.Event()
        self.deadline = None
        self.timers = []
        self.taken = []

    def on_request(self, sender, message, payload, now):
        self.taken.append(sender)
        if isinstance(message, Reduce) and sender.worker < self.workers:
            parts = self.parts.setdefault((sender.channel, message.number), {})
            parts[sender.worker] = sender, payload
            if len(parts) < self.workers:
                return []
            del self.parts[sender.channel, message.number]
            total = sum(parts[rank][1] for rank in range(self.workers))
            return [Reply(to, Reduced(), total) for to, _ in parts.values()]
        if isinstance(message, Load) and sender.worker < self.workers:
            self.buckets[message.bucket] = payload
            return [Reply(sender, Done())]
        if isinstance(message, Pull) and message.bucket in self.buckets:
            payload = self.buckets[message.bucket]
            return [Reply(sender, Parameters(bucket=0, version=0), payload)]
        if isinstance(message, Leave) and self.mortal:
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(message, PullState) and sender.worker < self.workers:
            self.silent.set()
            return []
        return [Reply(sender, Rejected(reason="this server only adds"))]

    def on_worker_lost(self, worker, incarnation, now):
        self.lost.append((worker, incarnation))
        self.news.set()
        return []

    def next_deadline(self):
        return self.deadline

    def on_timer(self, now):
        assert now >= self.deadline
        self.deadline = None
        self.timers.append(now)
        self.news.set()
        return []

    def take_work(self):
        return Work()


class Busy(Adder):
    """Does nothing, and reads nothing, until it *may_go_on*."""

    def __init__(self, workers):
        super().__init__(workers)
        self.may_go_on = threading.Event()

    def on_request(self, *arguments):
        assert self.may_go_on.wait(SECONDS)
        return super().on_request(*arguments)


class RunningHost:
    """A server process of one *service*, to be run in a thread. *peers*: whom it may ask."""

    def __init__(self, service, workers, until="departed", peers=(), **options):
        options = {"security": PLAIN, "token": TOKEN} | options
        self.listener = ServerListener(workers=workers, **options)
        self.host = ServerHost(self.listener)
        words = Describe(kind="", services=["this one", *peers])
        self.hosted = self.host.add(service, until=until, description=words)
        self.service_sessions = self.hosted.service_sessions
        self.port, self.refused = self.listener.port, self.listener.refused
        self.thread = None

    def run(self, control=None):
        for _ in self.host.serve(control):
            pass
        self.host.close()

    def start(self):
        """In a thread, until its training is over."""
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    @property
    def present(self):
        return self.service_sessions.workers_present

    def meet(self, sender, peers, incarnation=0):
        routes = {name: Route(ONLY_SERVICE, address) for name, address in peers.items()}
        self.hosted.peers.meet(sender, routes, incarnation)


@contextlib.contextmanager
def running(service, workers, **options):
    """A `RunningHost` in a thread of its own, and its end."""
    host = RunningHost(service, workers, **options)
    read, write = os.pipe()
    failures = []

    def run():
        try:
            host.run(read)
        except BaseException as failure:
            failures.append(failure)
            host.host.close()

    thread = host.thread = threading.Thread(target=run)
    thread.start()
    try:
        yield host
    finally:
        os.close(write)
        thread.join(SECONDS)
        assert not thread.is_alive()
        os.close(read)
    assert not failures, failures


def connect(host, worker=0, incarnation=0, port=None, **options):
    return ServerConnection(
        "server 0",
        "127.0.0.1",
        port or host.port,
        worker=worker,
        incarnation=incarnation,
        **({"token": TOKEN, "security": PLAIN} | options),
    )


class Peer:
    """A DEALER socket that says what it likes. *known*: it has said hello properly, and has offered
    its *memory* for requests."""

    def __init__(self, port, worker=0, incarnation=0, known=True, queue=0, memory=None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, queue)
        PLAIN.protect_worker(self.socket, TOKEN)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.liveness = None
        if known:
            hello = protocol.Hello(PROTOCOL, TOKEN, worker, incarnation, "")
            hello.memory = memory
            self.send(hello)
            self.welcome = welcome = self.receive()
            address = "127.0.0.1", welcome.port
            self.liveness = socket.create_connection(address, SECONDS)
            self.liveness.sendall(welcome.ticket.encode() + b"\n")
            assert self.liveness.recv(1) == b"\n"

    def send(self, message, *frames):
        self.socket.send_multipart([protocol.encode(message), *frames])

    def receive(self):
        return protocol.decode_from_server(self.socket.recv_multipart()[0])

    def close(self):
        if self.liveness is not None:
            self.liveness.close()
        self.context.destroy(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Line:
    """A network to what listens at *port* here, which can be cut: connections end there, at both
    ends, and the next ones are made."""

    def __init__(self, port):
        self.there = port
        self.made = 0
        self.again = threading.Event()
        """Somebody has connected after the cut."""
        self._is_cut = False
        self._ends = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self):
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self.there))
            self.made += 1
            if self._is_cut:
                self.again.set()
            self._ends += [here, there]
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def cut(self):
        self._is_cut = True
        while self._ends:
            end = self._ends.pop()
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.cut()


def child(code, *arguments):
    """A process that runs a function of this file; its output is read by lines."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import tests.support.server_jobs as s; s.{code}",
            *arguments,
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@contextlib.contextmanager
def ended(process):
    """The process does not outlive the test."""
    try:
        yield process
    finally:
        process.kill()
        process.wait(SECONDS)
        process.stdin.close()
        process.stdout.close()


def serve_as_a_child():
    host = RunningHost(Adder(2, mortal=True), 2, security=None)
    print(host.port, flush=True)
    host.run(sys.stdin.fileno())


def work_as_a_child():
    server = ServerConnection(
        "server 0", "127.0.0.1", int(sys.argv[1]), worker=1, token=TOKEN
    )
    server.request(Load(bucket=0), torch.ones(1 << 16)).wait()
    if os.fork() == 0:  # as a data loader's worker, which outlives it here
        sys.stdin.read()
        os._exit(0)
    print("ready", flush=True)
    server.request(PullState(bucket=0)).wait()
