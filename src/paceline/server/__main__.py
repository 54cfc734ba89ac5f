"""``python -m paceline.server``: one server process, started by a worker.

Its first line of input is the job's token (so that no process list shows it); it prints one
line of JSON, the port that it listens on, and serves until all workers have said goodbye,
or its input ends because the worker that started it did.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

import torch

from paceline.server.process import make_shell


def main() -> int:
    """Serve one training."""
    parser = argparse.ArgumentParser(prog="python -m paceline.server")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--name", default="server")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    # Ctrl-C reaches every process of the terminal; the end of the job reaches this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    token = _first_line(sys.stdin.fileno())
    shell = make_shell(
        arguments.workers, arguments.name, arguments.bind, arguments.port, token
    )
    try:
        print(json.dumps({"port": shell.port, "step": 0}), flush=True)
        shell.run(sys.stdin.fileno())
    finally:
        shell.close()
    return 0


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
