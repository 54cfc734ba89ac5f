"""``python -m paceline.server``: one server process, started by a worker or a supervisor.

Its first line of input is the job's token (so that no process list shows it); it prints one
line of JSON, the port that it listens on and the step that it goes on from, and serves until
all workers have said goodbye, or its input ends because who started it did. With
``--evict-silent`` it prints a further line for each worker that it takes for lost.

In ``PACELINE_SERVER_COUNTS`` stands a file, if any, into which it writes at its end what it
has counted, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import Server
from paceline.server import snapshot
from paceline.server.process import (
    SILENT_SECONDS,
    SilenceWatch,
    make_machine,
    make_shell,
)
from paceline.server.protocol import ParameterServer

COUNTS_VARIABLE = "PACELINE_SERVER_COUNTS"
_MISFITS = (
    *(AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError),
    msgspec.MsgspecError,
)


def main() -> int:
    """Serve one training."""
    arguments = _parse()
    # Ctrl-C reaches every process of the terminal; the end of the job reaches this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    token = _first_line(sys.stdin.fileno())
    machine = make_machine(arguments.workers, arguments.name)
    try:
        step = _restore(machine, arguments.snapshot)
        for worker in arguments.without:
            machine.on_lost(worker, 0, 0.0)
        if arguments.lost_return:
            machine.wait_for_the_lost()
        server: Server = machine
        if arguments.snapshot is not None:
            seconds = arguments.snapshot_seconds
            server = snapshot.Snapshots(machine, arguments.snapshot, seconds)
        if arguments.evict_silent is not None:
            server = SilenceWatch(server, arguments.evict_silent, _report)
        shell = make_shell(
            arguments.workers,
            arguments.name,
            arguments.bind,
            arguments.port,
            token,
            server,
        )
    except UsageError as error:
        print(f"paceline: {arguments.name}: {error}", file=sys.stderr)
        return 1
    try:
        print(json.dumps({"port": shell.port, "step": step}), flush=True)
        shell.run(sys.stdin.fileno(), machine.on_done)
    finally:
        shell.close()
        counts = os.environ.get(COUNTS_VARIABLE)
        if counts and machine.counts:  # one that nobody came to says nothing
            Path(counts).write_text(json.dumps(machine.counts))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m paceline.server")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--name", default="server")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--snapshot",
        type=Path,
        metavar="FILE",
        help="keep parameters there, and go on from it if it exists",
    )
    parser.add_argument("--snapshot-seconds", type=float, default=10.0)
    parser.add_argument(
        "--without",
        type=int,
        nargs="*",
        default=[],
        metavar="WORKER",
        help="workers that are done, and will not join",
    )
    parser.add_argument(
        "--lost-return",
        action="store_true",
        help="workers that are lost are started again: wait for them before the end",
    )
    parser.add_argument(
        "--evict-silent",
        type=float,
        nargs="?",
        const=SILENT_SECONDS,
        metavar="SECONDS",
        help="take a worker for lost of which nothing is heard for so long",
    )
    return parser.parse_args()


def _restore(machine: ParameterServer, path: Path | None) -> int:
    """The step from which the server goes on: its snapshot's, if there is one."""
    if path is None or not path.exists():
        return 0
    saved = snapshot.read(path)
    try:
        return machine.restore(saved)
    except _MISFITS as error:
        raise UsageError(
            f"snapshot {path} does not fit together ({error!r}): remove it, and begin anew"
        ) from None


def _report(worker: int, incarnation: int, seconds: float) -> None:
    print(
        f"paceline: nothing was heard of worker {worker} for {seconds:.0f} s, though its "
        "connection stands: it is taken for lost",
        file=sys.stderr,
        flush=True,
    )
    print(json.dumps({"evicted": worker, "incarnation": incarnation}), flush=True)


def _first_line(descriptor: int) -> str:
    """Read no further: the rest is watched by its descriptor."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line.decode().strip()


if __name__ == "__main__":
    sys.exit(main())
