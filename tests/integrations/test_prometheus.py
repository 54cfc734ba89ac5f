"""``paceline serve --metrics``: what Prometheus reads is what the server counts."""

import contextlib
import sys
import urllib.error
import urllib.request

import pytest
import torch

from paceline.errors import UsageError
from paceline.interfaces.server_messages import DTYPES, Describe, Done, Load, Pull
from paceline.parameter_server.process.host import ServerHost
from paceline.parameter_server.process.metrics import (
    Figures,
    figures_of,
    serve_metrics,
)
from paceline.parameter_server.process.services import make_service
from paceline.parameter_server.process.surviving import SurvivingJob
from paceline.transport.listener import ServerListener
from paceline.transport.protocol import HEADER_BYTES
from tests.support.server_jobs import TOKEN, Adder, connect, running, time_limit


@pytest.fixture(autouse=True)
def _limit():
    with time_limit():
        yield


def read(place):
    """Name and labels, and the value, of each sample, by Prometheus' own parser."""
    parser = pytest.importorskip("prometheus_client.parser")
    url = "http://{}:{}/metrics".format(*place)
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
    ("paceline_duplicates_refused_total",): 2,
    ("paceline_workers_lost_total",): 4,
    ("paceline_worker_steps", "0"): 12,
    ("paceline_worker_steps", "2"): 9,
    ("paceline_steps",): 9,
    ("paceline_staleness_steps",): 3,
    ("paceline_snapshot_age_seconds",): 1.5,
}


@pytest.fixture
def tell():
    """Serves figures until the test ends; returns where."""
    pytest.importorskip("prometheus_client")
    with contextlib.ExitStack() as opened:
        yield lambda figures: opened.enter_context(serve_metrics("0", figures))


def test_every_figure_is_told_and_parses(tell):
    assert read(tell(lambda: FIGURES)) == SAMPLES


def test_before_it_listens_there_is_nothing_to_tell(tell):
    assert read(tell(lambda: None)) == {}


def test_a_server_counts_what_comes_and_goes(tell):
    machine = Adder(2)
    with running(machine, 2) as host:
        endpoint = tell(lambda: figures_of(host.host))
        worker = connect(host)
        sent = torch.ones(10, dtype=DTYPES["float32"])
        assert worker.request(Load(bucket=0), sent).wait() == Done()
        worker.request(Pull(bucket=0), into=torch.ones(10)).wait()
        with pytest.raises(UsageError):
            connect(host, token="of another job")
        found = read(endpoint)
        worker.close()
    assert found["paceline_workers",] == 2
    assert found["paceline_workers_connected",] == 1
    assert found["paceline_received_bytes_total",] == 40 + 2 * HEADER_BYTES
    assert found["paceline_sent_bytes_total",] == 40 + 2 * HEADER_BYTES
    assert found["paceline_requests_total", "load"] == 1
    assert found["paceline_refused_total", "token"] == 1
    assert ("paceline_steps",) not in found, "this one holds no parameters"


def test_figures_are_those_of_the_service_that_holds_parameters_now():
    host = ServerHost(ServerListener(workers=1, token=TOKEN))
    try:
        assert figures_of(host).counts == {}
        for kind in ("server", "group-server"):
            words = Describe(kind=kind, services=["server 0"])
            service = make_service(words, 1)
            hosted = host.add(service)
            holder = service if kind == "server" else service.local
            holder.counts["gradients applied"] += 7
            assert figures_of(host).counts == {"gradients applied": 7}
            host.services.pop(hosted.key).peers.close(well=True)
            assert figures_of(host).counts == {}
    finally:
        host.close()


def test_a_snapshot_has_an_age(tell, tmp_path):
    path = tmp_path / "snapshot"
    job = SurvivingJob(
        ServerListener(workers=1, token=TOKEN, numbers=True), snapshot=path
    )
    try:
        endpoint = tell(lambda: figures_of(job.host, path))
        assert ("paceline_snapshot_age_seconds",) not in read(endpoint)
        path.touch()
        assert read(endpoint)["paceline_snapshot_age_seconds",] >= 0
    finally:
        job.host.close()


def test_it_listens_where_it_was_told_and_ends_with_its_server(tell):
    host, port = tell(lambda: FIGURES)
    assert host == "127.0.0.1", "a port alone is one of loopback"
    with (
        pytest.raises(UsageError, match="cannot listen there"),
        serve_metrics(f"{host}:{port}", lambda: FIGURES),
    ):
        raise AssertionError("the port is taken")
    with pytest.raises(urllib.error.URLError):
        read(("127.0.0.2", port))
    with serve_metrics("[::1]:0", lambda: FIGURES) as (host, port):
        assert read((f"[{host}]", port)) == SAMPLES
    with pytest.raises(urllib.error.URLError):
        read((f"[{host}]", port))


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "a:99999", "99999"])
def test_what_is_no_address(address):
    with (
        pytest.raises(UsageError, match="--metrics: expected HOST:PORT or PORT"),
        serve_metrics(address, lambda: None),
    ):
        raise AssertionError("it is none")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with (
        pytest.raises(UsageError, match=r"pip install prometheus-client"),
        serve_metrics("127.0.0.1:0", lambda: None),
    ):
        raise AssertionError("it is not installed")
