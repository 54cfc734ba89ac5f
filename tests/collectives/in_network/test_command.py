"""``paceline aggregate`` as a process."""

import json
import re
import signal
import socket

import numpy as np
import pytest

from paceline.collectives.in_network.client import AggregatorClient
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
        client = AggregatorClient(
            "127.0.0.1", int(port), job="one", worker=0, workers=1, token=token
        )
        values = np.arange(1000, dtype=np.int32)
        client.sum_integers(values)
        assert (values == np.arange(1000)).all()
        client.close()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        process.kill()
    counts = json.loads(process.stdout)
    assert counts["jobs"] == counts["jobs ended"] == 1
    assert counts["contributions"] >= 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--listen", "29700"], "expected HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--mtu", "100"], "MTU 100: expected"),
        (["--listen", "127.0.0.1:0", "--slots", "0"], "slots: expected 1 to"),
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
