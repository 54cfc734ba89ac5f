"""Group servers in processes: beside workers, on hosts of their own, and on emulated links."""

import re

import pytest

from paceline.transport.security import TOKEN
from tests.runtimes.emulated.conftest import refusal
from tests.support import forked
from tests.support.hanging import free_port
from tests.support.processes import PACELINE, Job
from tests.support.server_jobs import ROOT

WORKERS, STEPS = 3, 8
EXPECTED = sum(STEPS - 2 * rank for rank in range(WORKERS)) / WORKERS
SCRIPT = ROOT / "tests" / "parameter_server" / "groups" / "counting_script.py"
BY_HAND = "gssp:members=0.2+1"
FOUND = "gssp:measure_steps=1,ratio=1,most_groups=3"


def check(output, methods):
    """Whether every gradient is in every worker's model."""
    lines = re.findall(r"rank (\d): (\S+): (\S+)$", output, re.MULTILINE)
    expected = [(str(r), m, f"{EXPECTED:.3f}") for m in methods for r in range(WORKERS)]
    assert sorted(lines) == sorted(expected), output


@pytest.mark.slow
def test_beside_workers_and_dedicated_from_one_training_to_the_next():
    ports = [free_port() for _ in range(2)]
    environment = {TOKEN: "a token that nobody guesses", "OMP_NUM_THREADS": "1"}
    there = "+".join(f"127.0.0.1:{port}" for port in ports)
    methods = [
        f"{BY_HAND},compression=int8,replies=deltas,servers={there}",
        f"asp:servers={there}",
        f"{BY_HAND},servers={there}",
        FOUND,
    ]
    command = ["-m", "paceline", "serve", f"--workers={WORKERS}", "--port"]
    servers = [
        forked.Forked([*command, port], environment=environment) for port in ports
    ]
    try:
        ends = forked.run_together(WORKERS, [SCRIPT, *methods], environment=environment)
    finally:
        for server in servers:
            server.kill()
    check("".join(end.stdout for end in ends), methods)


@pytest.mark.slow
@pytest.mark.skipif(bool(refusal()), reason=refusal() or "namespaces are permitted")
def test_on_emulated_links(tmp_path):
    """On hosts of their own, from one training to the next; and beside workers."""
    methods = [BY_HAND, "asp", f"{FOUND},servers=embedded"]
    command = [*PACELINE, "emulate", "--link=200mbit", "--output=all"]
    command += ["--dedicated-servers=2", f"--workers={WORKERS}", str(SCRIPT)]
    job = Job([*command, "--", *methods], tmp_path / "job", forked="all")
    job.wait().check_ended_well()
    check(job.stdout, methods)
