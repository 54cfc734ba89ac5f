"""Starts a cluster with processes in it, says so, and ends as its argument tells."""

import multiprocessing
import subprocess
import sys
import threading

from paceline.cluster import uniform_cluster
from paceline.runtimes.emulated.network import EmulatedNetwork

# A process, its child, and an orphan in a session of its own that ignores signals.
SCRIPT = """
trap '' TERM INT HUP
setsid sh -c 'trap "" TERM INT HUP; (sleep 1000; sleep 1000) & echo up; exec sleep 1000' &
wait
"""


def wait_for_ever():
    threading.Event().wait()


def main(how):
    with EmulatedNetwork(
        uniform_cluster(2, "100 Mbit/s", "0 s"), process_bytes=0
    ) as network:
        for host in (0, 1):
            process = network.popen(host, ["sh", "-c", SCRIPT], stdout=subprocess.PIPE)
            assert process.stdout.readline() == b"up\n"
        if how == "forked":
            # A copy of every descriptor outlives the launcher, the connection included.
            multiprocessing.get_context("fork").Process(target=wait_for_ever).start()
        print("ready", flush=True)
        if how == "exception":
            sys.stdin.read()
            raise RuntimeError("on purpose")
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
