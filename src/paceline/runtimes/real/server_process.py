"""Starts and controls a server process, and finds servers that run already.

A worker starts one for the services beside it (see `services`), a supervisor for a job that
survives deaths.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

import msgspec

from paceline.errors import UsageError
from paceline.parameter_server.process.control import (
    LineFromServer,
    LineToServer,
    Listening,
)
from paceline.runtimes.real.job_store import Address
from paceline.timeouts import timeouts
from paceline.transport import liveness
from paceline.transport.security import SECRET, TOKEN, dedicated_token

ADDRESSES_VARIABLE = "PACELINE_SERVERS"
"""Addresses of dedicated servers, HOST:PORT joined by "+"."""
SURVIVE_VARIABLE = "PACELINE_SURVIVE"
"""Set if a supervisor keeps the job alive: workers then communicate through servers only."""
INCARNATION_VARIABLE = "PACELINE_INCARNATION"
SILENT_VARIABLE = "PACELINE_SILENT_SECONDS"
"""Seconds for which a worker may be silent under ``--survive``."""
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Keep the memory of received chunks. Otherwise the kernel zeroes it again for the next chunk,
    # which costs a tenth of the processor time of moving a gradient.
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    # Under Ray a server runs on a thread, whose own heap would be too small to keep it.
    "MALLOC_ARENA_MAX": "1",
}


class KilledAtStartError(UsageError):
    """A signal ended a server before it listened: another attempt may succeed."""


class ServerProcess:
    """A server as a child of this process; it ends when this process does."""

    def __init__(
        self,
        name: str,
        workers: int,
        host: str,
        *,
        port: int = 0,
        token: str = "",
        extra: Sequence[str] = (),
    ) -> None:
        """Start the server, and return at once: see `listens`.

        *port* 0: a free port. *token* empty: a new one. *extra*: more options of ``python -m
        paceline.parameter_server.process``.
        """
        self.name, self._host = name, host
        self.port = port
        self.token = token or secrets.token_hex(16)
        command = [
            *(
                sys.executable,
                "-m",
                "paceline.parameter_server.process",
                "--workers",
                str(workers),
            ),
            *("--name", name, "--bind", host, "--port", str(port), *extra),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | SERVER_ENVIRONMENT,
        )
        assert isinstance(self.process.stdin, io.BufferedWriter)
        liveness.close_in_children(self.process.stdin)
        self._write(self.token.encode())
        self._partial_line = b""
        """Output after its last complete line."""

    def listens(self) -> int:
        """Wait until its `port` is known.

        Returns the step from which it continues, 0 without a snapshot. Raises `UsageError` if it
        does not start: `KilledAtStartError` if a signal has ended it.
        """
        assert self.process.stdout is not None
        line = line_within(self.process.stdout, timeouts.server_start)
        try:
            listening = msgspec.json.decode(line or b"", type=Listening)
        except msgspec.MsgspecError:
            self.close()
            fault = f"it ended with status {self.process.returncode}; see above for what it said"
            if line is not None and self.process.returncode < 0:
                raise KilledAtStartError(
                    f"{self.name} did not start at {self._host}: {fault}"
                ) from None
            if line is None:
                fault = (
                    f"it said nothing within {timeouts.server_start:g} s, and was ended. On a busy "
                    "machine wait longer: PACELINE_TIMEOUTS=server_start=300"
                )
            listening = Listening(fault=fault)
        if listening.fault:
            self.close()
            raise UsageError(
                f"{self.name} did not start at {self._host}: {listening.fault}"
            )
        self.port = listening.port
        return listening.step

    def send(self, message: LineToServer) -> None:
        """Send it a message, unless it has ended."""
        self._write(msgspec.json.encode(message))

    @property
    def news_descriptor(self) -> int:
        """Return a descriptor that is readable if it has sent messages, or has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def news(self) -> list[LineFromServer]:
        """Return the messages since the last call. Does not wait."""
        ready, _, _ = select.select([self.news_descriptor], [], [], 0)
        if ready:
            self._partial_line += os.read(self.news_descriptor, 65536)
        *lines, self._partial_line = self._partial_line.split(b"\n")
        return [msgspec.json.decode(line, type=LineFromServer) for line in lines]

    def close(self) -> None:
        """End it, if its workers' goodbyes have not."""
        end(self.process)

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        # The process may have ended.
        with contextlib.suppress(OSError):
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that ends when its input is closed."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(timeouts.server_end)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def line_within(stream: IO[bytes], seconds: float) -> bytes | None:
    """Return the next line of a process: empty if it has ended, None if it takes longer."""
    ready, _, _ = select.select([stream], [], [], seconds)
    return stream.readline() if ready else None


def addresses_at(place: str, environment: Mapping[str, str]) -> list[Address]:
    """Return the addresses of the servers that run at a place already. Raises `UsageError`."""
    text = environment.get(ADDRESSES_VARIABLE, "") if place == "dedicated" else place
    if not text:
        raise UsageError(
            "servers=dedicated: no server has been started for this job; start each with "
            "`paceline serve --workers N --bind HOST --port PORT`, and name them with "
            "servers=HOST:PORT+HOST:PORT"
        )
    token = dedicated_token(environment)
    if token is None:
        raise UsageError(
            f"servers={text}: this worker does not know the servers' token. `paceline serve` has "
            f"printed a line that exports it ({TOKEN}=...): run that line where the job is "
            f"started, for every worker; or set the same {SECRET} for servers and workers"
        )
    addresses = []
    for one in text.split("+"):
        host, _, port = one.rpartition(":")
        # IPv6 addresses have brackets before a port: [::1]:29600.
        host = host.removeprefix("[").removesuffix("]")
        addresses.append(Address(host=host, port=int(port), token=token))
    return addresses
