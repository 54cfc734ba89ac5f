"""A job of real processes whose sums servers form behind switches: the same bits as all else that
adds up integers, whoever dies."""

import contextlib
import re

import pytest

from paceline.runtimes.real.server_process import ADDRESSES_VARIABLE
from tests.collectives.in_network.test_real import (
    ENVIRONMENT,
    aggregators,
    learnt,
    racks,
    ranks_of,
)
from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until

WORKERS, STEPS = 4, "30"


@contextlib.contextmanager
def dedicated():
    """``paceline serve``, and the variables by which workers find it."""
    words = ["-m", "paceline", "serve", "--workers", str(WORKERS), "--port", "0"]
    process = forked.Forked(words, None, ENVIRONMENT)
    try:
        wait_until(lambda: "serving at" in process.stderr, SECONDS, "the server")
        (address,) = re.findall(r"serving at (\S+)", process.stderr)
        yield {ADDRESSES_VARIABLE: address}
    finally:
        process.kill()


@pytest.mark.slow
def test_shards_and_a_server_of_its_own_have_the_same_bits_whoever_dies(tmp_path):
    go = tmp_path / "go"
    with aggregators(2) as them:
        described = racks(tmp_path, 2)
        variables = them.variables | described
        with ranks_of(WORKERS, ["atp", STEPS, "10", go], variables) as ranks:
            wait_until(lambda: "step 3\n" in ranks[0].stdout, SECONDS, "the job")
            them.kill(1)
            wait_until(lambda: "step 10\n" in ranks[0].stdout, SECONDS, "the job")
            wait_until(lambda: "go around" in ranks[0].stderr, SECONDS, "the job")
            go.touch()
            disturbed, said = learnt(ranks)
        assert "4 servers beside workers: sums of 2 streams" in said
    with aggregators(2) as them, dedicated() as served:
        variables = them.variables | described
        with (tmp_path / "cluster.toml").open("a") as file:
            file.write("[[server]]\n")
        with ranks_of(WORKERS, ["atp", STEPS], variables | served) as ranks:
            undisturbed, said = learnt(ranks)
        assert "1 server on hosts of their own" in said
    assert disturbed == undisturbed


@pytest.mark.slow
def test_a_job_whose_server_s_thread_fails_goes_on_around_the_ring(tmp_path):
    with aggregators(2) as them:
        variables = them.variables | racks(tmp_path, 2)
        words = ["atp", "10", "0", tmp_path / "none"]
        with ranks_of(WORKERS, [*words, "server fails"], variables) as ranks:
            disturbed, said = learnt(ranks)
            assert "RuntimeError: no room for sums" in ranks[1].stderr
        with ranks_of(WORKERS, ["atp", "10"], variables) as ranks:
            undisturbed, _ = learnt(ranks)
    assert said.count("sums go around the ring") == 1
    assert disturbed == undisturbed
