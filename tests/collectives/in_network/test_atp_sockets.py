"""ATP's sums over real sockets: several aggregators, servers beside workers and on their own."""

import pytest

from paceline.collectives.in_network.atp_tree import Server, Ways, beside_workers
from paceline.collectives.in_network.packets import mtu_for
from paceline.errors import UsageError
from paceline.timeouts import timeouts
from tests.collectives.in_network.atp_real_net import ELEMENTS, jobs, sums
from tests.support.hanging import SECONDS
from tests.support.processes import wait_until

RACKS = (0, 0, 1, 1, 2)
DEDICATED = (Server(0, None, 0),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregating", "servers"),
    [
        ((0, 1, 2), beside_workers(RACKS)),
        *(
            pytest.param(*others, marks=pytest.mark.slow)
            for others in (
                ((1,), DEDICATED),
                ((), DEDICATED),
                ((0, 1, 2), DEDICATED),
                ((1,), beside_workers(RACKS)),
            )
        ),
    ],
)
def test_sums_are_exact_though_datagrams_are_lost(aggregating, servers):
    """Two in a hundred, at workers and at servers, each way."""
    ways = Ways(RACKS, aggregating, servers)
    with jobs({"one": ways}, 3, loss=0.02) as (made, aggregators):
        assert sums(made, 20_001)
        merged = [bool(one.summary().get("sums out")) for one in aggregators]
    assert merged == [rack in ways.merging for rack in range(3)]
    wait_until(
        lambda: not any(list(one.jobs) for one in aggregators), SECONDS, "goodbyes"
    )


@pytest.mark.slow
def test_two_jobs_of_different_layouts_compete_for_few_places():
    layouts = {
        "one": Ways(RACKS, (0, 1), beside_workers(RACKS)),
        "two": Ways((0, 0, 1), (0, 1), DEDICATED),
    }
    with jobs(layouts, 2, places=3, loss=0.01) as (made, aggregators):
        assert sums(made, 10_000)
        assert any(one.jobs.best_effort.collisions for one in aggregators)
        for job in made:
            for client in job.clients:
                client.close()
        wait_until(
            lambda: not any(list(one.jobs) for one in aggregators), SECONDS, "both ends"
        )
        assert all(one.jobs.best_effort.taken == 0 for one in aggregators)


def test_without_faults_servers_are_sent_what_the_model_says():
    ways = Ways((0, 0, 1, 1), (1,), DEDICATED)
    with jobs({"one": ways}, 2) as (made, _):
        assert sums(made, 10 * ELEMENTS, rounds=1)
        [server] = made[0].servers
        repeats = sum(client.counts["repeats"] for client in made[0].clients)
        # One sum of the rack that aggregates, two contributions of the other.
        assert 30 <= server.taken <= 30 + repeats


def test_a_server_that_does_not_answer_is_said(monkeypatch):
    monkeypatch.setattr(timeouts, "aggregator_probe", 0.2)
    ways = Ways((0, 0), (), DEDICATED)
    with jobs({"one": ways}, 1) as (made, _):
        made[0].servers[0].lead([(0b11, "127.0.0.1", 9)])
        with pytest.raises(
            UsageError, match=f"{mtu_for(ELEMENTS)} bytes do not come back"
        ):
            made[0].clients[0].probe()
