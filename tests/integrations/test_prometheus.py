"""``paceline serve --metrics``: what Prometheus reads is what the server counts."""

import socket
import sys
import urllib.error
import urllib.request

import pytest
import torch

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.interfaces.server_messages import DTYPES, Done, Introduce, Load, Pull
from paceline.parameter_server.process import metrics
from paceline.parameter_server.process.dedicated_server import make_shell
from paceline.parameter_server.process.metrics import Endpoint, Figures, figures_of
from paceline.parameter_server.process.surviving import SurvivingJob
from paceline.transport.listener import Listener
from paceline.transport.protocol import HEADER_BYTES
from tests.support.hanging import SECONDS, eventually
from tests.support.server_jobs import TOKEN, Adder, connect, running, time_limit


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


def read(endpoint):
    """Name and labels, and the value, of each sample, by Prometheus' own parser."""
    parser = pytest.importorskip("prometheus_client.parser")
    url = f"http://127.0.0.1:{endpoint.port}/metrics"
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    found = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            found[(sample.name, *sample.labels.values())] = sample.value
    return {name: v for name, v in found.items() if not name[0].endswith("_created")}


FIGURES = Figures(
    workers=3,
    connected=2,
    received_bytes=7,
    sent_bytes=9,
    steps={0: 12, 2: 9},
    counts={
        "gradients applied": 5,
        "gradients dropped": 1,
        "workers lost": 4,
        "pushes that came again": 2,
        "requests that came again": 1,
    },
    requests={"push": 6},
    refused={"token": 8},
    snapshot_age=1.5,
)
SAMPLES = {
    ("paceline_workers",): 3,
    ("paceline_workers_connected",): 2,
    ("paceline_received_bytes_total",): 7,
    ("paceline_sent_bytes_total",): 9,
    ("paceline_requests_total", "push"): 6,
    ("paceline_refused_total", "token"): 8,
    ("paceline_gradients_applied_total",): 5,
    ("paceline_gradients_dropped_total",): 1,
    ("paceline_duplicates_refused_total",): 3,
    ("paceline_workers_lost_total",): 4,
    ("paceline_worker_steps", "0"): 12,
    ("paceline_worker_steps", "2"): 9,
    ("paceline_steps",): 9,
    ("paceline_staleness_steps",): 3,
    ("paceline_snapshot_age_seconds",): 1.5,
}


@pytest.fixture
def tell():
    """Endpoints, which end with the test."""
    pytest.importorskip("prometheus_client")
    opened = []

    def one(figures):
        opened.append(Endpoint("127.0.0.1:0", figures))
        return opened[-1]

    yield one
    for endpoint in opened:
        endpoint.close()


def test_every_figure_is_told_and_parses(tell):
    assert read(tell(lambda: FIGURES)) == SAMPLES


def test_between_two_trainings_there_is_nothing_to_tell(tell):
    assert read(tell(lambda: None)) == {}


def test_a_server_counts_what_comes_and_goes(tell):
    machine = Adder(2)
    with running(machine, 2) as shell:
        endpoint = tell(lambda: figures_of(shell, machine))
        worker = connect(shell)
        sent = torch.ones(10, dtype=DTYPES["float32"])
        assert worker.request(Load(bucket=0), sent).wait() == Done()
        worker.request(Pull(bucket=0), into=torch.ones(10)).wait()
        with pytest.raises(UsageError):
            connect(shell, token="of another job")
        found = read(endpoint)
        worker.close()
    assert found["paceline_workers",] == 2
    assert found["paceline_workers_connected",] == 1
    assert found["paceline_received_bytes_total",] == 40 + 2 * HEADER_BYTES
    assert found["paceline_sent_bytes_total",] == 40 + 2 * HEADER_BYTES
    assert found["paceline_requests_total", "load"] == 1
    assert found["paceline_refused_total", "token"] == 1
    assert ("paceline_steps",) not in found, "this one holds no parameters"


def test_a_server_of_one_training_after_the_other_tells_of_the_one_it_serves():
    listener = Listener("127.0.0.1", 0, workers=1)
    shell = make_shell(1, listener, TOKEN)
    dedicated = shell.server
    try:
        dedicated.machine.counts["gradients applied"] += 5
        assert figures_of(shell, dedicated).counts == {"gradients applied": 5}
        words = Introduce(kind="group-server", services=["server 0"], number=0)
        [answer] = dedicated.on_message(Sender(0, 0, "", 0, 0), words, None, 0.0)
        assert answer.message == Done(), "it is of another kind now"
        dedicated.machine.counts["gradients applied"] += 7
        assert figures_of(shell, dedicated).counts == {"gradients applied": 7}
    finally:
        shell.close()
        listener.close()


def test_a_snapshot_has_an_age(tell, tmp_path):
    path = tmp_path / "snapshot"
    job = SurvivingJob(1, "127.0.0.1", 0, TOKEN, snapshot=path)
    try:
        endpoint = tell(job.figures)
        assert ("paceline_snapshot_age_seconds",) not in read(endpoint)
        path.touch()
        assert read(endpoint)["paceline_snapshot_age_seconds",] >= 0
    finally:
        job.close()


def test_it_listens_where_it_was_told_and_ends_with_its_server(tell):
    endpoint = tell(lambda: FIGURES)
    with pytest.raises(UsageError, match="cannot listen there"):
        Endpoint(f"127.0.0.1:{endpoint.port}", lambda: FIGURES)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.2:{endpoint.port}/metrics")


@pytest.mark.parametrize("silent", [0.05, float(SECONDS)])
def test_who_opens_connections_and_says_nothing_uses_up_nothing(
    tell, monkeypatch, silent
):
    monkeypatch.setattr(metrics._Handler, "timeout", silent)
    endpoint = tell(lambda: FIGURES)
    address = ("127.0.0.1", endpoint.port)
    callers = [
        socket.create_connection(address, SECONDS)
        for _ in range(metrics.MOST_AT_ONCE + 1)
    ]
    assert callers[-1].recv(1) == b"", "there are few places, or none for the silent"
    for caller in callers:
        caller.close()
    assert eventually(lambda: _samples(endpoint), bool, 1000) == SAMPLES


def test_who_sends_a_byte_now_and_then_is_shown_out(tell, monkeypatch):
    monkeypatch.setattr(metrics._Handler, "timeout", 0.5)
    address = ("127.0.0.1", tell(lambda: FIGURES).port)
    with socket.create_connection(address, SECONDS) as caller:
        caller.settimeout(0.05)
        for _ in range(400):
            try:
                caller.send(b"G")
                assert caller.recv(1) == b""
                break
            except TimeoutError:
                pass
            except OSError:
                break
        else:
            raise AssertionError("it may stay for ever")


def _samples(endpoint):
    """Nothing while all places are taken."""
    try:
        return read(endpoint)
    except OSError:
        return {}


@pytest.mark.parametrize("address", ["", "9100", "host", "host:", ":1", "a:99999"])
def test_what_is_no_address(address):
    with pytest.raises(UsageError, match="--metrics: expected HOST:PORT"):
        Endpoint(address, lambda: None)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[prometheus\]'"):
        Endpoint("127.0.0.1:0", lambda: None)
