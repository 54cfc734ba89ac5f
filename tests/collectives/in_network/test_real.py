"""Jobs of real processes whose sums aggregators or servers form: what they learn, and what becomes of
them when somebody dies.
"""

import contextlib
import re
from pathlib import Path

import pytest

from paceline.collectives.in_network.aggregator_addresses import AGGREGATORS_VARIABLE
from paceline.run_options import CLUSTER_VARIABLE
from paceline.runtimes.real.server_process import ADDRESSES_VARIABLE
from paceline.transport.security import SECRET, TOKEN
from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until

JOB = Path(__file__).parent / "job.py"
ENVIRONMENT = {SECRET: "", TOKEN: "a token of these tests"}
RACK = '[[rack]]\nworkers = 2\nlink = "1 Gbit/s"\nlatency = "10 us"\n'


class Aggregators:
    """``paceline aggregate``, as often as wanted; they can be killed."""

    def __init__(self, count, memory):
        self.ports, self._memory = [0] * count, memory
        self.processes = [self.start(number) for number in range(count)]

    def start(self, number):
        words = ["-m", "paceline", "aggregate", "--listen", "127.0.0.1:0"]
        words += ["--memory", self._memory]
        process = forked.Forked(words, None, ENVIRONMENT)
        wait_until(
            lambda: "aggregating at" in process.stderr, SECONDS, "the aggregator"
        )
        (port,) = re.findall(r"aggregating at 127.0.0.1:(\d+)", process.stderr)
        self.ports[number] = int(port)
        return process

    def kill(self, number):
        self.processes[number].kill()

    @property
    def variables(self):
        named = (f"{rack}=127.0.0.1:{port}" for rack, port in enumerate(self.ports))
        return ENVIRONMENT | {AGGREGATORS_VARIABLE: ",".join(named)}


@contextlib.contextmanager
def aggregators(count, memory="256 MB"):
    them = Aggregators(count, memory)
    try:
        yield them
    finally:
        for process in them.processes:
            process.kill()


@contextlib.contextmanager
def ranks_of(workers, words, variables):
    ranks = forked.together(workers, [JOB, *words], environment=variables)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def digests(ends):
    return {re.findall(r"digest (\w+)", end.stdout)[0] for end in ends}


def racks(folder, count):
    file = folder / "cluster.toml"
    file.write_text(RACK * count)
    return {CLUSTER_VARIABLE: str(file)}


def learnt(ranks):
    """What all ranks have learnt, who have come to their good end."""
    ends = [rank.done() for rank in ranks]
    said = "\n".join(end.stdout[-500:] + end.stderr for end in ends)
    assert [end.returncode for end in ends] == [0] * len(ends), said
    (one,) = digests(ends)
    return one, ends[0].stderr


@pytest.mark.slow
def test_a_job_of_two_racks_learns_the_same_when_an_aggregator_dies(tmp_path):
    go = tmp_path / "go"
    with aggregators(2) as them:
        variables = them.variables | racks(tmp_path, 2)
        with ranks_of(4, ["rina", "30"], variables) as ranks:
            undisturbed, said = learnt(ranks)
        assert "2 of 2 groups" in said
        with ranks_of(4, ["rina", "30", "10", go], variables) as ranks:
            wait_until(lambda: "step 3\n" in ranks[0].stdout, SECONDS, "the job")
            them.kill(1)
            wait_until(lambda: "step 10\n" in ranks[0].stdout, SECONDS, "the job")
            wait_until(lambda: "go around" in ranks[0].stderr, SECONDS, "the job")
            go.touch()
            disturbed, said = learnt(ranks)
        assert said.count("sums go around the ring") == 1
    assert disturbed == undisturbed


@pytest.mark.slow
def test_groups_channels_and_works_have_queues_of_their_own(tmp_path):
    queues = JOB.with_name("queues.py")
    with aggregators(2) as them:
        variables = them.variables | racks(tmp_path, 2)
        ends = forked.run_together(4, [queues], environment=variables)
    assert all("all as they should be" in end.stdout for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["infinity", "scaled infinity"])
def test_an_infinity_reaches_all_ranks_or_is_skipped_by_a_scaler(wrong, tmp_path):
    with aggregators(1) as them:
        words = ["switchml", "5", "0", tmp_path / "none", wrong]
        with ranks_of(2, words, them.variables) as ranks:
            ends = [rank.done() for rank in ranks]
    assert [end.returncode for end in ends] == [0, 0], ends[0].stderr
    assert len(digests(ends)) == 1
    assert f"finite {wrong == 'scaled infinity'}" in ends[0].stdout


@pytest.mark.slow
def test_who_dies_ends_its_job_and_no_other(tmp_path):
    go = tmp_path / "go"
    with aggregators(1) as them:
        variables = them.variables
        with (
            ranks_of(2, ["switchml", "8", "4", go], variables) as others,
            ranks_of(3, ["switchml", "9", "0", go, "dies"], variables) as ranks,
        ):
            for rank in (ranks[0], ranks[2]):
                end = rank.done()
                assert end.returncode not in (0, None)
                assert "rank 1" in end.stderr
            go.touch()
            learnt(others)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        pytest.param(
            {AGGREGATORS_VARIABLE: "0=127.0.0.1:1"},
            "cannot be reached",
            marks=pytest.mark.slow,  # it is tried for seconds
        ),
        ({AGGREGATORS_VARIABLE: "here"}, "expected RACK=HOST:PORT"),
        ({AGGREGATORS_VARIABLE: "0=127.0.0.1:1", TOKEN: ""}, f"neither {TOKEN}"),
    ],
)
def test_what_cannot_work_is_an_error_at_the_start(variables, said, tmp_path):
    with ranks_of(2, ["switchml", "2"], ENVIRONMENT | variables) as ranks:
        ends = [rank.done() for rank in ranks]
    for end in ends:
        assert end.returncode == 1
        assert said in end.stderr


def test_memory_for_sums_and_none_for_their_exponents_is_an_error_at_the_start():
    with (
        aggregators(1, memory="3 kB") as them,
        ranks_of(2, ["switchml", "2"], them.variables) as ranks,
    ):
        ends = [rank.done() for rank in ranks]
    for end in ends:
        assert end.returncode == 1
        assert "with more --memory" in end.stderr
        assert "step" not in end.stdout


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
    """Beside two racks' aggregators: one dies, a server's thread fails, and nothing happens."""
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
        words = ["atp", STEPS, "0", tmp_path / "none", "server fails"]
        with ranks_of(WORKERS, words, variables) as ranks:
            goes_around, said = learnt(ranks)
            assert "RuntimeError: no room for sums" in ranks[1].stderr
        assert said.count("sums go around the ring") == 1
        with (tmp_path / "cluster.toml").open("a") as file:
            file.write("[[server]]\n")
        with ranks_of(WORKERS, ["atp", STEPS], variables | served) as ranks:
            undisturbed, said = learnt(ranks)
        assert "1 server on dedicated hosts" in said
    assert disturbed == goes_around == undisturbed
