"""``paceline aggregate`` as a process."""

import json
import re
import signal
import socket

import numpy as np
import pytest

from paceline.collectives.in_network.joining import JobConfig, JoinRing
from paceline.collectives.in_network.topology import Group
from paceline.transport.security import SECRET, TOKEN, TRUSTED
from tests.packaging.test_import import loaded
from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until

PLAIN = {SECRET: "", TOKEN: "", TRUSTED: ""}


def start(*words, environment=PLAIN):
    return forked.Forked(["-m", "paceline", "aggregate", *words], None, environment)


def test_it_makes_a_token_sums_and_says_what_it_has_counted():
    process = start("--listen", "127.0.0.1:0", "--json")
    try:
        wait_until(lambda: "export" in process.stderr, SECONDS, "the aggregator")
        (port,) = re.findall(r"aggregating at 127.0.0.1:(\d+)", process.stderr)
        (token,) = re.findall(rf"export {TOKEN}=(\w+)", process.stderr)
        job = JobConfig(0, {0: ("127.0.0.1", int(port))}, "one", token)
        session = JoinRing([Group((0,), 0)], job).join(lambda words: [words])
        values = np.arange(1000, dtype=np.int32)
        session.all_reduce(values)
        assert (values == np.arange(1000)).all()
        session.close(well=True)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        process.kill()
    counts = json.loads(process.stdout)
    assert counts["jobs"] == counts["jobs ended"] == 1
    assert counts["contributions"] >= 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--listen", "29700"], "expected HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--memory", "much"], "such as '256 MB'"),
        (["--listen", "127.0.0.1:0", "--memory", "0 B"], "memory: expected"),
        (["--listen", "0.0.0.0:0"], "export PACELINE_TRUSTED_NETWORK=1"),
    ],
)
def test_what_cannot_work_is_said(words, said):
    done = start(*words).done()
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        done = start("--listen", f"127.0.0.1:{port}").done()
    assert done.returncode == 1
    assert "a port that is free" in done.stderr


def test_an_aggregator_needs_no_torch():
    assert (
        "torch" not in loaded("import paceline.collectives.in_network.server").split()
    )
