"""Messages between a keeper and its client: one question, one answer.

A message is four bytes of length and a line of JSON; open descriptors travel beside the length. Both
ends are one program on one machine, so nothing here is versioned.
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
"""Range of the hosts' addresses; they are not visible outside an emulated cluster."""
Mode = Literal["root", "user namespace"]
"""The privilege with which the namespaces were made."""

_LENGTH = struct.Struct("!I")
_MAX_DESCRIPTORS = 8


class LinkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One directed link: the device whose egress it is, and how that is shaped.

    *host* is the host whose namespace holds *device*, or None for the switchboard.
    *rate* is bytes per second on the wire, headers included; *delay* is in seconds.
    """

    name: str
    host: int | None
    device: str
    rate: float
    delay: float


class HostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One host: the rack whose bridge it is wired to, and its addresses."""

    rack: int
    address: str
    hardware_address: str


class Build(msgspec.Struct, tag=True, kw_only=True):
    """Make the whole network. Answered by `Built`."""

    racks: int
    hosts: list[HostPlan]
    links: list[LinkPlan]


class Built(msgspec.Struct, tag=True, kw_only=True):
    """The network is there; *delayed* is false if the kernel has no netem."""

    delayed: bool


class SetRate(msgspec.Struct, tag=True, kw_only=True):
    """Shape a link to another *rate*, bytes per second on the wire."""

    link: int
    rate: float


class Cut(msgspec.Struct, tag=True, kw_only=True):
    """Lose every packet on a link from now on, and those in its queue."""

    link: int


class Repair(msgspec.Struct, tag=True, kw_only=True):
    """Let packets flow again."""

    link: int


class OpenSocket(msgspec.Struct, tag=True, kw_only=True):
    """A TCP socket that lives in a host; it comes beside the answer `Done`."""

    host: int


class Spawn(msgspec.Struct, tag=True, kw_only=True):
    """Start a process in a host; its standard descriptors come beside the message.

    Bytes, because arguments and variables need not be text. Answered by `Spawned`.
    """

    host: int
    arguments: list[bytes]
    environment: list[tuple[bytes, bytes]]
    directory: bytes


class Spawned(msgspec.Struct, tag=True, kw_only=True):
    """It runs: *process* names it from now on, *pid* is its number on the machine; a
    descriptor of the process (pidfd) comes beside the message."""

    process: int
    pid: int


class AskStatus(msgspec.Struct, tag=True, kw_only=True):
    """How did a process end? Answered by `Status`."""

    process: int


class Status(msgspec.Struct, tag=True, kw_only=True):
    """As `subprocess` counts: minus the signal that killed it; None while it runs."""

    code: int | None


class Probe(msgspec.Struct, tag=True, kw_only=True):
    """Try in a scratch namespace what the kernel has. Answered by `Probed`."""


class Probed(msgspec.Struct, tag=True, kw_only=True):
    """The features that are missing, each with the kernel's words."""

    missing: dict[str, str]


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """The keeper's first words: how it got its namespaces, and whether processes see a
    /proc that knows them by their own numbers."""

    mode: Mode
    own_proc: bool


class Done(msgspec.Struct, tag=True, kw_only=True):
    """It was done."""


class Failed(msgspec.Struct, tag=True, kw_only=True):
    """It was not done, and nothing was changed.

    *kind* says which exception the client raises; *number* and *filename* are those of
    an `OSError` of the process that could not start.
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
        """For selectors."""
        return self._connection.fileno()

    def send(self, message: Request | Answer, descriptors: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay open here. Raises `OSError`."""
        body = msgspec.json.encode(message)
        socket.send_fds(self._connection, [_LENGTH.pack(len(body))], descriptors)
        self._connection.sendall(body)

    def receive_request(self) -> tuple[Request, list[int]]:
        """The next question and its descriptors; raises `EOFError` at the end."""
        body, descriptors = self._receive()
        return _decode_request(body), descriptors

    def receive_answer(self) -> tuple[Answer, list[int]]:
        """The next answer and its descriptors; raises `EOFError` at the end."""
        body, descriptors = self._receive()
        return _decode_answer(body), descriptors

    def _receive(self) -> tuple[bytes, list[int]]:
        # Not socket.recv_fds: descriptors must be close-on-exec from the start. Otherwise they leak into processes
        # that other threads start.
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
        """End the connection for both, also where a forked child still holds a copy."""
        with contextlib.suppress(OSError):  # the other end is already closed
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
