"""A worker whose machine vanishes, while a new one of its rank comes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest

from paceline.errors import UsageError
from paceline.timeouts import timeouts
from tests.support.server_jobs import (
    SECONDS,
    TOKEN,
    Adder,
    connect,
    ended,
    running,
    time_limit,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip"
    ),
]
WORKER = """
import sys
from paceline.transport.connection import ServerConnection
from paceline.transport.security import PLAIN
address, port, token = sys.argv[1:]
end = ServerConnection("server 0", address, int(port), worker=0, incarnation=None,
                   token=token, security=PLAIN)
print("here", flush=True)
sys.stdin.read()
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def machine():
    """A namespace behind a link, and the link's near end."""
    name = f"t{uuid.uuid4().hex[:8]}"
    link = f"{name}a"
    ip("netns", "add", name)
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", "far", "netns", name)
        ip("addr", "add", "10.213.7.1/30", "dev", link)
        ip("link", "set", link, "up")
        ip("-n", name, "addr", "add", "10.213.7.2/30", "dev", "far")
        ip("-n", name, "link", "set", "far", "up")
        yield name, link
    finally:
        ip("netns", "del", name)


def test_a_rank_whose_machine_is_gone_is_free_soon_and_not_while_it_is_there(
    machine, monkeypatch
):
    monkeypatch.setattr(timeouts, "worker_acknowledge", 2.0)
    name, link = machine
    adder = Adder(1)
    with (
        time_limit(3 * SECONDS),
        running(adder, 1, address="0.0.0.0", numbers=True) as host,
    ):
        words = [sys.executable, "-c", WORKER, "10.213.7.1", str(host.port), TOKEN]
        there = subprocess.Popen(
            ["ip", "netns", "exec", name, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with ended(there):
            assert there.stdout.readline() == "here\n"
            there.send_signal(
                signal.SIGSTOP
            )  # its process says nothing, its kernel does
            began = time.monotonic()
            while time.monotonic() < began + 4:
                with pytest.raises(UsageError, match=r"already, from 10\.213\.7\.2"):
                    connect(host, incarnation=None)
                time.sleep(0.2)
            ip("link", "set", link, "down")
            while not adder.lost:
                with contextlib.suppress(UsageError):  # not yet
                    connect(host, incarnation=None).close()
                time.sleep(0.2)
        assert adder.lost == [(0, 0)]
