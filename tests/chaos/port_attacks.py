"""Attacks on each listening socket of paceline: ``python -m tests.chaos --ports``.

Attackers send random and mutated messages, as strangers and as peers that have the token. Some stay connected: silent,
in the middle of a message, or one byte at a time. Others vanish without a FIN. After each batch `attack_port` checks the
server process and the job. `ports` has the ports.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec

from tests.chaos.ports import (
    BATCH,
    HELD,
    MEMORY_BYTES,
    SECONDS,
    Peer,
    Port,
    dial,
    leave,
    mutated,
    random_bytes,
)
from tests.support.forked import Forked
from tests.support.server_jobs import time_limit


@dataclass
class Outcome:
    """What an attack on a port has found."""

    port: str
    seed: int
    messages: collections.Counter[str] = field(default_factory=collections.Counter)
    """By kind, how many were sent."""
    of_peers: int = 0
    """How many of them came from peers that have the token, and were let in."""
    violations: list[str] = field(default_factory=list)
    memory: int = 0
    """Bytes by which the server's resident memory grew after the first messages."""
    connections: int = 0
    """The most descriptors that the server had open beside those at the start."""
    printed: int = 0
    """Characters that the server has logged."""
    seconds: float = 0.0


class Attackers:
    """Connections that send bad messages, in random ways; all decisions come from *rng*."""

    def __init__(self, port: Port, rng: random.Random, outcome: Outcome):
        self._port, self._rng, self._outcome = port, rng, outcome
        self._peer: Peer | None = None
        self._held: list[tuple[socket.socket, bytes]] = []
        """Connections that stay, and what they still have to send, a byte at a time."""

    def batch(self, port: int, kind: str, count: int) -> None:
        """Send *count* messages of a *kind*, "random" or "mutated", to *port*."""
        self._drip()
        for _ in range(count):
            known = self._port.has_token and self._rng.random() < 0.6
            if known and self._send(kind):
                self._outcome.of_peers += 1
            else:
                self._strike(port, kind)
            self._outcome.messages[kind] += 1

    def _send(self, kind: str) -> bool:
        """Send a message as a peer with the token; return whether it was sent."""
        rng = self._rng
        if self._peer is not None:
            left = rng.random() < self._port.leaves
            if left or any(map(_has_ended, self._peer.sockets)):
                self._let_peer_go()
        try:
            if self._peer is None:
                self._peer = self._port.enter(rng)
                self._peer.way = rng.choice(("FIN", "RST"))
            if kind == "random":
                self._peer.send(rng, lambda _: random_bytes(rng))
            else:
                self._peer.send(rng, lambda words: mutated(rng, words))
        except (OSError, EOFError, msgspec.MsgspecError):
            self._let_peer_go()  # the server has closed it
            return False
        return True

    def _strike(self, port: int, kind: str) -> None:
        """Send a message as a stranger, on a connection of its own."""
        rng = self._rng
        peer = dial(port)
        opening = self._port.opening(rng)
        words = random_bytes(rng) if kind == "random" else mutated(rng, opening)
        way = rng.choice(("FIN", "FIN", "RST", "vanish", "stay", "drip", "half"))
        if way in ("drip", "half"):
            part = rng.randrange(len(opening)) * (way == "half")
            self._hold(peer, opening[part:] * (way == "drip"))
            words = opening[:part]
        with contextlib.suppress(OSError):
            peer.sendall(words)
        if way == "stay":
            self._hold(peer, b"")
        elif way not in ("drip", "half"):
            leave(peer, way)

    def _hold(self, peer: socket.socket, rest: bytes) -> None:
        if len(self._held) >= HELD:
            oldest, _ = self._held.pop(0)
            leave(oldest, self._rng.choice(("FIN", "RST", "vanish")))
        self._held.append((peer, rest))

    def _drip(self) -> None:
        """Send the next byte of each slow connection."""
        for i, (peer, rest) in enumerate(self._held):
            with contextlib.suppress(OSError):
                peer.send(rest[:1])
            self._held[i] = peer, rest[1:]

    def _let_peer_go(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def close(self) -> None:
        """Close all connections."""
        self._let_peer_go()
        for peer, _ in self._held:
            leave(peer, "FIN")
        self._held.clear()


def _has_ended(peer: socket.socket) -> bool:
    """Whether the server has closed this connection. Reads, and discards, what it has sent."""
    peer.setblocking(False)
    try:
        while peer.recv(1 << 16):
            pass
    except BlockingIOError:
        peer.settimeout(SECONDS)
        return False
    except OSError:
        pass
    return True


class ServerProcess:
    """The process of `port_servers` that serves *name*, with a *defect* if it is a control's."""

    ENVIRONMENT: ClassVar[dict[str, str]] = {
        # Vanished peers are found, and silent ones are closed, within a few seconds.
        "PACELINE_UNREACHABLE_SECONDS": "10",
        "PACELINE_TIMEOUTS": "worker_arrive=5",
        "OMP_NUM_THREADS": "1",
    }

    def __init__(self, name: str, *defect: str) -> None:
        words = ["-m", "tests.chaos.port_servers", name, *defect]
        self._process = Forked(words, environment=self.ENVIRONMENT)

    def place(self) -> dict[str, object]:
        """Where it listens."""
        wait_for(
            lambda: "\n" in self._process.stdout or self._process.poll() is not None,
            "the server",
        )
        assert self._process.stdout, self._process.stderr
        found: dict[str, object] = json.loads(self._process.stdout)
        return found

    def resident_bytes(self) -> int:
        words = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def faults(self) -> Iterator[str]:
        """How it has crashed, and which of its threads or services have."""
        if self._process.poll() is not None:
            yield f"the process has ended with status {self._process.returncode}"
        if "Traceback" in self._process.stderr:
            yield f"a fault: {self._process.stderr[-3000:]}"

    def printed(self) -> int:
        return len(self._process.stderr)

    def kill(self) -> None:
        self._process.kill()


def wait_for(
    condition: Callable[[], bool], what: str, seconds: float = SECONDS
) -> None:
    """Wait until *condition* holds. Raises `TimeoutError`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        select.select([], [], [], 0.02)


def attack_port(
    kind: type[Port],
    messages: int,
    seed: int,
    *defect: str,
    seconds: float = SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> Outcome:
    """Send as many random *messages*, and as many mutated ones; check the port during and after that.

    *defect*: of a control. *seconds*: the time for one check. *memory_bytes*: see `MEMORY_BYTES`.
    """
    outcome = Outcome(kind.name, seed)
    began = time.monotonic()
    rng = random.Random(f"{kind.name} {seed}")
    server = ServerProcess(kind.name, *defect)
    port: Port | None = None
    attackers: Attackers | None = None
    try:
        port = kind(server.place())
        port.round(lambda _: None)
        at_rest = server.descriptors() + kind.varying
        attackers = Attackers(port, rng, outcome)
        memory_before = 0
        kinds = ["random", "mutated"] * -(-messages // BATCH)
        for number, words in enumerate(kinds):
            count = min(BATCH, messages - outcome.messages[words])
            with time_limit(seconds):
                port.round(lambda to, w=words, n=count: attackers.batch(to, w, n))
                if number % 4 == 3:
                    port.arrive()
            if number == len(kinds) // 10:
                memory_before = server.resident_bytes()
            if memory_before:
                grown = server.resident_bytes() - memory_before
                outcome.memory = max(outcome.memory, grown)
            opened = server.descriptors() - at_rest
            outcome.connections = max(outcome.connections, opened)
            outcome.printed = server.printed()
            outcome.violations += server.faults()
            if outcome.memory > memory_bytes:
                outcome.violations.append(f"memory grew by {outcome.memory} bytes")
            if outcome.printed > kind.most_logged:
                outcome.violations.append(f"it logged {outcome.printed} characters")
            if opened > kind.most_connections:
                outcome.violations.append(f"{opened} descriptors are open")
            if outcome.violations:
                return outcome
        if kind.has_token and outcome.of_peers < messages // 4:
            outcome.violations.append(f"only {outcome.of_peers} came from peers")
        attackers.close()
        with time_limit(seconds):
            wait_for(
                lambda: server.descriptors() <= at_rest,
                f"{server.descriptors()} descriptors are left; {at_rest} at the start",
                seconds / 2,
            )
            port.work()
            port.arrive()
    except Exception as error:
        # A process that ends has closed its connections before its status is known.
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: any(server.faults()), "a fault", 2)
        outcome.violations += [*server.faults(), f"the job: {error!r}"]
    finally:
        if attackers is not None:
            attackers.close()
        if port is not None:
            port.close()
        server.kill()
        outcome.seconds = time.monotonic() - began
    return outcome
