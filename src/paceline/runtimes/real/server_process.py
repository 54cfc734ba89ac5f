"""A parameter server as a process of its own, and what servers and workers are told.

A supervisor starts one for a job that survives deaths; services beside workers are in
`services`.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import msgspec

from paceline.errors import UsageError
from paceline.parameter_server.process.control import (
    Entered,
    Evicted,
    Gone,
    Introduction,
    IsDone,
    IsLost,
    Listens,
    Over,
)
from paceline.timeouts import timeouts
from paceline.transport import liveness

ADDRESSES_VARIABLE = "PACELINE_SERVERS"
"""Where dedicated servers are, HOST:PORT joined by "+"."""
SURVIVE_VARIABLE = "PACELINE_SURVIVE"
"""Set where a supervisor keeps the job alive: workers meet only at their servers."""
INCARNATION_VARIABLE = "PACELINE_INCARNATION"
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Keep the memory of received chunks, instead of giving it back to the kernel and having
    # it zeroed again for the next: a tenth of the processor time of moving a gradient.
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    # Servers run on threads, whose own heaps would be too small to keep it.
    "MALLOC_ARENA_MAX": "1",
}


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
        """*port* 0 and no *token*: one of its own. *extra*: more options of
        ``python -m paceline.parameter_server.process``. Returns at once: see `listens`."""
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
        self._heard = b""
        """What it said, beyond its last whole line."""

    def listens(self) -> int:
        """Wait until its `port` is known; returns the step that it goes on from, 0 without a
        snapshot. Raises `UsageError` if it does not start."""
        assert self.process.stdout is not None
        line = line_within(self.process.stdout, timeouts.server_start)
        try:
            words = msgspec.json.decode(line, type=Listens)
        except msgspec.MsgspecError:
            self.close()
            raise UsageError(
                f"{self.name} did not start at {self._host}: it ended with status "
                f"{self.process.returncode}; see above for what it said"
            ) from None
        self.port = words.port
        return words.step

    def tell(self, words: IsDone | IsLost | Introduction) -> None:
        """Say this to it, if it has not ended."""
        self._write(msgspec.json.encode(words))

    def news(self) -> list[Evicted | Entered | Gone | Over]:
        """What it has said since this was last called. Does not wait."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 0)
        if ready:
            self._heard += os.read(self.process.stdout.fileno(), 65536)
        *lines, self._heard = self._heard.split(b"\n")
        return [
            msgspec.json.decode(line, type=Evicted | Entered | Gone | Over)
            for line in lines
        ]

    def close(self) -> None:
        """End it, if its workers' goodbyes have not."""
        end(self.process)

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that ends with its input."""
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


def line_within(stream: IO[bytes], seconds: float) -> bytes:
    """What a process says next; nothing if that takes longer, or it has ended."""
    ready, _, _ = select.select([stream], [], [], seconds)
    return stream.readline() if ready else b""
