"""Two emulated jobs at one aggregator, of which one may be killed; and an aggregator that dies."""

import contextlib
import os
import re
import sys
from pathlib import Path

import pytest

from paceline.cluster import Cluster, Rack, cluster_toml
from paceline.collectives.in_network.aggregator_addresses import AGGREGATORS_VARIABLE
from paceline.run_options import CLUSTER_VARIABLE
from paceline.runtimes.emulated.control_messages import INTERFACE
from paceline.runtimes.emulated.network import EmulatedNetwork
from paceline.runtimes.emulated.runtime import RUNTIME_VARIABLE, EmulatedRuntime
from paceline.transport.security import TOKEN, TRUSTED
from tests.support.hanging import SECONDS
from tests.support.processes import python_path, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("namespaces")]

ROOT = Path(__file__).parent.parent.parent.parent
JOB = ROOT / "tests" / "collectives" / "in_network" / "job.py"
WORKERS = 4
PORT = 29700
STEPS = 12


class Shared:
    """Hosts in two racks, of which the first has an aggregator, for jobs that a test starts."""

    def __init__(self, folder):
        rack = {"workers": WORKERS // 2, "link": 50e6 / 8, "latency": 0.0}
        self.cluster = Cluster((Rack(**rack, aggregates=True), Rack(**rack)))
        self.network, self.folder = (
            EmulatedNetwork(self.cluster, process_bytes=0),
            folder,
        )
        file = folder / "cluster.toml"
        file.write_text(cluster_toml(self.cluster, exact=True))
        (self.host,) = self.network.aggregators
        self.base = os.environ | {
            "PYTHONPATH": python_path(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            RUNTIME_VARIABLE: EmulatedRuntime.name,
            CLUSTER_VARIABLE: str(file),
            TOKEN: "a token of these tests",
            TRUSTED: "1",
            AGGREGATORS_VARIABLE: f"0={self.host.address}:{PORT}",
        }

    def aggregator(self):
        """One that listens."""
        words = ["--listen", f"{self.host.address}:{PORT}"]
        command = [sys.executable, "-m", "paceline", "aggregate", *words]
        one = Output(self, self.host.number, command, "aggregator", {})
        wait_until(lambda: "aggregating at" in one.stderr, SECONDS, "the aggregator")
        return one

    def job(self, number, *words, steps=STEPS):
        """All workers of a job, each in a host of its own."""
        shared = {
            "WORLD_SIZE": str(WORKERS),
            "MASTER_ADDR": self.network.hosts[0].address,
            "MASTER_PORT": str(29500 + number),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": f"job {number}",
        }
        command = [sys.executable, str(JOB), "rina", str(steps), *map(str, words)]
        return [
            Output(
                *(self, rank, command, f"{number}-{rank}"),
                shared | {"RANK": str(rank), "GROUP_RANK": str(rank)},
            )
            for rank in range(WORKERS)
        ]


class Output:
    """A process in a host, and what it has said."""

    def __init__(self, shared, host, command, name, environment):
        paths = [shared.folder / f"{name}.{stream}" for stream in ("out", "err")]
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(path.open("wb")) for path in paths)
            self.process = shared.network.popen(
                *(host, command),
                env=shared.base | environment,
                cwd=str(ROOT),
                stdout=out,
                stderr=err,
            )
        self._paths = paths

    @property
    def stdout(self):
        return self._paths[0].read_text()

    @property
    def stderr(self):
        return self._paths[1].read_text()

    def ends(self):
        """Its exit status."""
        return self.process.wait(SECONDS)


def learnt(ranks):
    """What all ranks have learnt, who have come to their good end."""
    ends = [rank.ends() for rank in ranks]
    assert ends == [0] * len(ranks), "\n".join(rank.stderr[-800:] for rank in ranks)
    (one,) = {re.findall(r"digest (\w+)", rank.stdout)[0] for rank in ranks}
    return one


def until(ranks, step):
    wait_until(lambda: f"step {step}\n" in ranks[0].stdout, SECONDS, "the job")


@pytest.fixture
def shared(tmp_path):
    made = Shared(tmp_path)
    with made.network:
        yield made


def test_two_jobs_share_an_aggregator_and_one_may_be_killed(shared, tmp_path):
    aggregator, go = shared.aggregator(), tmp_path / "go"
    one, other = shared.job(1), shared.job(2)
    undisturbed = learnt(one)
    assert "1 of 3 groups" in one[0].stderr
    assert learnt(other) == undisturbed

    stays, dies = shared.job(3, 4, go), shared.job(4, 4, go)
    until(stays, 4)
    until(dies, 4)  # both are in mid-run
    dies[1].process.kill()
    for rank in (dies[0], *dies[2:]):
        assert rank.ends() != 0
    go.touch()
    assert learnt(stays) == undisturbed
    assert "around the ring" not in stays[0].stderr
    assert aggregator.process.poll() is None
    assert len(set(re.findall(r"job '(\w+) .* is over", aggregator.stderr))) == 1


def test_a_job_goes_on_around_the_ring_when_its_aggregator_dies(shared, tmp_path):
    aggregator, go = shared.aggregator(), tmp_path / "go"
    undisturbed = learnt(shared.job(1))
    ranks = shared.job(2, 4, go)
    until(ranks, 4)
    aggregator.process.kill()
    aggregator.ends()
    go.touch()
    assert learnt(ranks) == undisturbed
    assert ranks[0].stderr.count("sums go around the ring") == 1
