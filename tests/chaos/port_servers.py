"""The processes whose ports are attacked: ``python -m tests.chaos.port_servers PORT [DEFECT]``.

Each serves one kind of port, prints where it listens as a line of JSON, and serves until it is killed.
`ports` has the clients, `port_attacks` the attackers.
"""

import json
import os
import socket
import sys
import threading

import numpy as np

from paceline.collectives.in_network.joining import JobConfig, JoinRing
from paceline.collectives.in_network.server import AggregatorServer
from paceline.collectives.in_network.topology import Group
from paceline.interfaces.server_messages import Describe
from paceline.methods.backup import Backup
from paceline.parameter_server.process.metrics import Figures, serve_metrics
from paceline.parameter_server.process.services import make_group_server
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.runtimes.real.job_store import JobStore, ListenAddress
from paceline.runtimes.real.peer_monitor import KEY, FailureHub
from tests.collectives.in_network.sums import HOST
from tests.support.processes import DictStore
from tests.support.server_jobs import TOKEN, RunningHost

HONEST = 2
"""Workers of the job. The next number is that of workers that break the protocol."""


def tell(*ports: int, **more: object) -> None:
    """Print where this process listens."""
    print(json.dumps({"ports": ports} | more), flush=True)


def forever() -> None:
    threading.Event().wait()


def parameter_server() -> None:
    _serve(ParameterServer(HONEST, lambda _: Backup().server(HONEST)))


def group_server() -> None:
    words = Describe(kind="group-server", services=["server 0"])
    _serve(make_group_server(words, HONEST))


def _serve(service) -> None:
    host = RunningHost(service, HONEST + 1, welcomes_any=True)
    tell(host.port, host.listener._liveness.getsockname()[1])
    read, _write = os.pipe()
    host.run(read)


def failure_hub() -> None:
    store = JobStore(DictStore(), HONEST + 1, {})
    hub = FailureHub(HONEST + 1, ListenAddress(HOST, HOST), store)
    address = store.address(KEY)
    tell(address.port, token=address.token)
    hub._thread.join()
    sys.exit("the hub's thread has ended")


def aggregator() -> None:
    server = AggregatorServer(HOST, 0, token=TOKEN, memory=16 << 20)
    tell(server.address[1])
    read, _write = os.pipe()
    server.run(read)


def metrics() -> None:
    figures = Figures(workers=3, connected=2, received_bytes=7, sent_bytes=9)
    with serve_metrics("0", lambda: figures) as (_, port):
        tell(port)
        forever()


def ring() -> None:
    """Rank 0 of a ring of two workers without aggregators, which joins again and again."""
    with socket.create_server((HOST, 0)) as listener:
        tell(listener.getsockname()[1])
        other, _ = listener.accept()
    for number in range(sys.maxsize):
        join_and_add(0, number, lambda words: exchange(0, other, words))


def join_and_add(rank: int, number: int, exchanged) -> None:
    """Join ring *number* as *rank*, and check a sum. *exchanged*: see `joining.Exchange`."""
    groups = [Group((0,), None), Group((1,), None)]
    # Nothing listens at the aggregator's address: it only tells which network the ring uses.
    job = JobConfig(rank, {0: (HOST, 1)}, f"ring {number}", TOKEN)
    session = JoinRing(groups, job).join(exchanged)
    values = np.full(1000, rank + number, np.int32)
    session.all_reduce(values)
    assert (values == 2 * number + 1).all()
    exchanged(b"")
    session.close(well=True)


def exchange(rank: int, other: socket.socket, words: bytes) -> list[bytes]:
    """Send this rank's words to the *other* one, and return both."""
    other.sendall(len(words).to_bytes(4, "big") + words)
    size = int.from_bytes(exactly(other, 4), "big")
    received = exactly(other, size)
    return [words, received] if rank == 0 else [received, words]


def exactly(peer: socket.socket, size: int) -> bytes:
    """The next *size* bytes. Raises `EOFError`."""
    data = bytearray()
    while len(data) < size:
        got = peer.recv(size - len(data))
        if not got:
            raise EOFError("the connection was closed")
        data += got
    return bytes(data)


def echo(defect: str = "") -> None:
    """The controls' port: one thread for each connection echoes its lines. *defect*: what is wrong."""
    kept: list[object] = []
    with socket.create_server((HOST, 0), backlog=1024) as listener:
        tell(listener.getsockname()[1])
        while True:
            peer, _ = listener.accept()
            if defect == "waits for each connection":
                _echo(peer, kept, defect)
            else:
                threading.Thread(target=_echo, args=(peer, kept, defect)).start()


def _echo(peer: socket.socket, kept: list[object], defect: str) -> None:
    if defect == "leaks descriptors":
        kept.append(peer.dup())
    data = b""
    try:
        while got := peer.recv(4096):
            if defect == "logs what it receives":
                print(got * 10, file=sys.stderr)
            if defect == "keeps what it receives":
                kept.append(got * 100)
            if defect == "dies of a byte" and b"\xff" in got:
                os._exit(1)
            if defect == "a thread fails" and b"\xff" in got:
                raise ValueError("a byte")
            *lines, data = (data + got).split(b"\n")
            for line in lines:
                wrong = defect == "answers wrong" and b"\xff" in line
                kept += [line] * wrong
                if defect == "answers wrong" and kept:
                    line = b"?" * len(line)
                peer.sendall(line + b"\n")
    except OSError:
        pass
    finally:
        peer.close()


SERVERS = {
    "parameter server": parameter_server,
    "liveness": parameter_server,
    "group server": group_server,
    "failure hub": failure_hub,
    "aggregator": aggregator,
    "ring": ring,
    "metrics": metrics,
    "echo": echo,
}

if __name__ == "__main__":
    SERVERS[sys.argv[1]](*sys.argv[2:])
