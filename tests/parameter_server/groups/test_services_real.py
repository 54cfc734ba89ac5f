"""The two-level sum in real and emulated processes: right, or a clear error everywhere."""

import re

import pytest

from tests.runtimes.emulated.conftest import refusal
from tests.support.processes import PACELINE, Job, somebody_listens
from tests.support.server_jobs import ROOT

WORKERS = 4


def check(launcher, folder, hosts):
    """Run the job, and look at what each worker has said, and at what is left."""
    script = ROOT / "tests" / "services" / "job.py"
    words = [*PACELINE, *launcher, f"--workers={WORKERS}", str(script)]
    environment = {
        "PYTHONPATH": str(ROOT),
        "PACELINE_SWITCHES": f"0={hosts[0]}",
        "PYTHONUNBUFFERED": "1",  # and lines of four workers come out whole
    }
    job = Job([*words, "--", *hosts_as_places(hosts)], folder, environment)
    job.wait().check_ended_well()
    lines = re.findall(r"^(?:\[\d\] )?rank (\d): (.*)$", job.stdout, re.MULTILINE)
    for rank in range(WORKERS):
        said = [words for number, words in lines if int(number) == rank]
        said = [words for words in said if not words.startswith("ports")]
        for words, pattern in zip(said, expected(rank, hosts), strict=True):
            assert re.match(pattern, words), (rank, pattern, words)
    ports = [words.split()[1:] for _, words in lines if words.startswith("ports")]
    assert len(ports) == 3
    return [int(port) for of_job in ports for port in of_job]


def hosts_as_places(hosts):
    return [f"host:{host}" for host in hosts]


def expected(rank, hosts):
    """What a worker says, in order."""
    lost = r"PeerLostError: aggregator 0 at \S+ is lost: "
    told = r"UsageError: aggregator 1 at \S+: root: aggregator 0 is lost$"
    return [
        r"UsageError: place 'rack:7': nothing runs in a real switch, .*NUMBER=HOST",
        r"UsageError: place 'host:nowhere': no worker .* expected one of '0'",
        r"UsageError: root did not start at .*MODULE:FACTORY.*No module named 'no'",
        r"UsageError: root: expected peers that are other services",
        "has sums of beside:1 beside:3 beside:0$",
        f"has sums of {' '.join(hosts_as_places(hosts))} rack:0$",
        lost if rank < 2 else told,
    ]


@pytest.mark.slow
def test_two_levels_in_real_processes(tmp_path):
    ports = check(["run"], tmp_path / "job", ("0", "0"))
    assert len(set(ports)) == len(ports)
    assert not any(somebody_listens(port) for port in ports)


@pytest.mark.slow
@pytest.mark.skipif(bool(refusal()), reason=refusal() or "namespaces are permitted")
def test_two_levels_on_emulated_links(tmp_path):
    """Each worker is on a host of its own, and host 2 stands for the rack's switch."""
    launcher = ["emulate", "--link=200mbit", "--no-measure", "--output=all"]
    check(launcher, tmp_path / "job", ("2", "3"))
