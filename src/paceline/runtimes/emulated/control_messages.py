"""Defines the messages between a keeper and its client: one request, one response.

A message is four bytes of length and a line of JSON; open descriptors travel beside the length.
Both ends are one program on one machine, so no message has a version.
"""

from __future__ import annotations

import array
import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec

INTERFACE = "eth0"
"""The network interface of every host (``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME``)."""
NETWORK = "10.77.0.0/16"
"""Range of the hosts' addresses; no process outside an emulated cluster sees them."""
Mode = Literal["root", "user namespace"]
"""The privilege with which the namespaces were made."""

_LENGTH = struct.Struct("!I")
_MAX_DESCRIPTORS = 8


class LinkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One directed link: the device whose egress it is, and its shaping.

    *host* is the host whose namespace holds *device*, or None for the switchboard. *rate* is bytes
    per second on the wire, headers included; *delay* is in seconds.
    """

    name: str
    host: int | None
    device: str
    rate: float
    delay: float


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One host: its rack, whose bridge it is wired to, and its addresses."""

    rack: int
    address: str
    hardware_address: str


class Build(msgspec.Struct, tag=True, kw_only=True):
    """Make the whole network. The response is `Built`."""

    racks: int
    hosts: list[HostPlan]
    links: list[LinkPlan]


class Built(msgspec.Struct, tag=True, kw_only=True):
    """The network exists; *delayed* is false if the kernel has no netem."""

    delayed: bool


class SetRate(msgspec.Struct, tag=True, kw_only=True):
    """Shape a link to another *rate*, bytes per second on the wire."""

    link: int
    rate: float


class Cut(msgspec.Struct, tag=True, kw_only=True):
    """Drop every packet on a link from now on, and those in its queue."""

    link: int


class Repair(msgspec.Struct, tag=True, kw_only=True):
    """Let packets flow again."""

    link: int


class OpenSocket(msgspec.Struct, tag=True, kw_only=True):
    """Make a TCP socket that lives in a host. It arrives with the response `Done`."""

    host: int


class Spawn(msgspec.Struct, tag=True, kw_only=True):
    """Start a process in a host; its standard descriptors arrive with the message.

    Arguments and variables are bytes because they need not be text. The response is `Spawned`.
    """

    host: int
    arguments: list[bytes]
    environment: list[tuple[bytes, bytes]]
    directory: bytes


class Spawned(msgspec.Struct, tag=True, kw_only=True):
    """The process runs. Its descriptor (pidfd) arrives with the message.

    *process* is its name in further requests; *pid* is its number on the machine.
    """

    process: int
    pid: int


class AskStatus(msgspec.Struct, tag=True, kw_only=True):
    """Ask for the exit status of a process. The response is `Status`."""

    process: int


class Status(msgspec.Struct, tag=True, kw_only=True):
    """An exit status as `subprocess` counts: minus the signal that killed it; None while it runs."""

    code: int | None


class Probe(msgspec.Struct, tag=True, kw_only=True):
    """Try in a scratch namespace which features the kernel has. The response is `Probed`."""


class Probed(msgspec.Struct, tag=True, kw_only=True):
    """The missing features, each with the kernel's error message."""

    missing: dict[str, str]


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """The keeper's first message: how it got its namespaces.

    *own_proc*: whether processes see a /proc with the process numbers of their namespace.
    """

    mode: Mode
    own_proc: bool


class Done(msgspec.Struct, tag=True, kw_only=True):
    """The request was carried out."""


class Failed(msgspec.Struct, tag=True, kw_only=True):
    """The request failed, and changed nothing.

    *kind* selects the exception that the client raises. *number* and *filename* are those of an
    `OSError` of the process that could not start.
    """

    kind: Literal["permission", "kernel", "spawn", "other"]
    text: str
    number: int = 0
    filename: str | None = None


Request = Build | SetRate | Cut | Repair | OpenSocket | Spawn | AskStatus | Probe
Answer = Built | Spawned | Status | Probed | Ready | Done | Failed

_decode_request = msgspec.json.Decoder(Request).decode
_decode_answer = msgspec.json.Decoder(Answer).decode


class ControlChannel:
    """One end of the connection between client and keeper."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, message: Request | Answer, descriptors: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay open in this process. Raises `OSError`."""
        body = msgspec.json.encode(message)
        socket.send_fds(self._connection, [_LENGTH.pack(len(body))], descriptors)
        self._connection.sendall(body)

    def receive_request(self) -> tuple[Request, list[int]]:
        """Return the next request and its descriptors; raises `EOFError` at the end."""
        body, descriptors = self._receive()
        return _decode_request(body), descriptors

    def receive_answer(self) -> tuple[Answer, list[int]]:
        """Return the next response and its descriptors; raises `EOFError` at the end."""
        body, descriptors = self._receive()
        return _decode_answer(body), descriptors

    def _receive(self) -> tuple[bytes, list[int]]:
        # Not socket.recv_fds: descriptors must be close-on-exec from the start. Otherwise they leak
        # into processes that other threads start.
        item = array.array("i").itemsize
        head, ancillary, _, _ = self._connection.recvmsg(
            _LENGTH.size,
            socket.CMSG_SPACE(_MAX_DESCRIPTORS * item),
            socket.MSG_CMSG_CLOEXEC,
        )
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % item])
        head += self._exactly(_LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        return self._exactly(length), list(descriptors)

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self._connection.recv(min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """End the connection at both ends, even if a forked child still holds a copy."""
        # The other end is already closed.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
