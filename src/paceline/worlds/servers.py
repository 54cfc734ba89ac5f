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

from paceline import lifelines
from paceline.errors import UsageError

ADDRESSES_VARIABLE = "PACELINE_SERVERS"
"""Where dedicated servers are, HOST:PORT joined by "+"."""
SURVIVE_VARIABLE = "PACELINE_SURVIVE"
"""Set where a supervisor keeps the job alive: workers meet only at their servers."""
INCARNATION_VARIABLE = "PACELINE_INCARNATION"
START_SECONDS = 60.0
END_SECONDS = 10.0
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
    """A server as a child of this process; it ends when this process does. *step*: where it
    goes on, if it has read a snapshot."""

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
        ``python -m paceline.server``. Raises `UsageError` if it does not start."""
        self.token = token or secrets.token_hex(16)
        command = [
            *(sys.executable, "-m", "paceline.server", "--workers", str(workers)),
            *("--name", name, "--bind", host, "--port", str(port), *extra),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | SERVER_ENVIRONMENT,
        )
        assert isinstance(self.process.stdin, io.BufferedWriter)
        assert self.process.stdout is not None
        lifelines.close_in_children(self.process.stdin)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(self.token.encode() + b"\n")
            self.process.stdin.flush()
        line = line_within(self.process.stdout, START_SECONDS)
        try:
            words = msgspec.json.decode(line)
            self.port, self.step = int(words["port"]), int(words["step"])
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
            self.close()
            raise UsageError(
                f"{name} did not start at {host}: it ended with status "
                f"{self.process.returncode}; see above for what it said"
            ) from None

    def say_done(self, worker: int) -> None:
        """Tell it that a worker's script has ended well, and is not started again."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self.process.stdin.write(f"{worker}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """End it, if its workers' goodbyes have not."""
        end(self.process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that ends with its input."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def line_within(stream: IO[bytes], seconds: float) -> bytes:
    """What a process says next; nothing if that takes longer, or it has ended."""
    ready, _, _ = select.select([stream], [], [], seconds)
    return stream.readline() if ready else b""
