"""Which switches to upgrade: orders, prices and words."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.collectives.schedules import Ring
from paceline.collectives.timing import seconds
from paceline.errors import UsageError
from paceline.tools.plan.switch_upgrades import Upgrade, plan_switches, stage, ways_for
from paceline.tools.plan.switch_upgrades_report import advice
from tests.tools.plan.helpers import layers

GBIT = 1e9 / 8


def racks(*sizes, uplink=None, **more):
    return Cluster(
        tuple(
            Rack(workers=size, link=GBIT, latency=20e-6, uplink=uplink)
            for size in sizes
        ),
        **more,
    )


def by_name(cluster):
    return {way.name: way for way in ways_for(cluster)}


@pytest.mark.parametrize(
    ("cluster", "way"),
    [
        (racks(4, 8, 2), "rina"),
        (racks(2, 3, 5, uplink=2 * GBIT), "rina"),
        (racks(2, 3, 5, uplink=2 * GBIT), "atp beside workers"),
        (racks(4, 4, 3, servers=(ServerHost(rack=2),)), "atp"),
    ],
)
def test_no_order_ends_in_better_steps_along_the_way(cluster, way):
    """Of all orders none has a smaller sum of steps: what one buys early counts longest."""
    known = by_name(cluster)
    workload = layers(megabytes=40.0)

    def total(order):
        return sum(
            stage(known[way], cluster, workload, order[:count]).step_seconds
            for count in range(len(order) + 1)
        )

    found = plan_switches(cluster, workload).ways[way]
    mine = found[-1].racks
    least = min(map(total, itertools.permutations(range(len(cluster.racks)))))
    assert total(mine) == pytest.approx(
        sum(one.step_seconds for one in found), rel=1e-12
    )
    assert total(mine) <= least * 1.001
    assert total(mine) < max(
        map(total, itertools.permutations(range(len(cluster.racks))))
    )


def test_without_any_switch_rina_is_the_ring_and_its_price():
    cluster, workload = racks(4, 4), layers()
    found = plan_switches(cluster, workload).ways
    assert found["rina"][0] == found["ring"][0]
    whole = sum(workload.gradient_bytes)
    assert found["ring"][0].gradient_seconds == pytest.approx(
        seconds(Ring(8, whole), cluster)
    )


def test_racks_that_aggregate_already_are_the_start():
    cluster = racks(4, 4, 4)
    done = Cluster(
        (*cluster.racks[:1], Rack(workers=4, link=GBIT, latency=20e-6, aggregates=True))
    )
    found = plan_switches(done, layers())
    assert found.ready == 1
    assert [one.racks for one in found.ways["rina"]] == [(1,), (1, 0)]


def test_a_rack_of_one_worker_is_bought_last():
    found = plan_switches(racks(1, 4, 4), layers()).ways["rina"]
    assert found[-1].racks[-1] == 0
    assert found[-1].step_seconds == pytest.approx(found[-2].step_seconds)


def test_what_a_switch_takes_in_counts():
    fast = plan_switches(racks(4, 4), layers()).ways["rina"]
    slow = plan_switches(racks(4, 4), layers(), Upgrade(GBIT / 2)).ways["rina"]
    few = plan_switches(racks(4, 4), layers(), Upgrade(slots=1)).ways["rina"]
    assert slow[0] == few[0] == fast[0]
    assert slow[-1].gradient_seconds > 4 * fast[-1].gradient_seconds
    assert few[-1].gradient_seconds > 1.1 * fast[-1].gradient_seconds


def test_one_worker_has_nothing_to_add_up():
    with pytest.raises(UsageError, match="two workers or more"):
        plan_switches(racks(1), layers())


def test_advice_tells_what_pays():
    said = "\n".join(advice(plan_switches(racks(8, 8), layers(megabytes=40))))
    assert "rina: better than that from" in said
    slow = plan_switches(racks(4, 4), layers(), Upgrade(GBIT / 100))
    said = "\n".join(advice(slow))
    assert "no better" in said


FILE = """
[[rack]]
workers = 4
link = "1 Gbit/s"
latency = "20 us"

[[rack]]
workers = 4
link = "1 Gbit/s"
latency = "20 us"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return str(path)


def test_command_prints_a_table_and_draws(file, tmp_path):
    folder = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["plan-switches", file, "--output", str(folder)], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "samples a second by switches that add up: 8 workers in 2 racks" in (
        done.stdout
    )
    assert (folder / "switches.png").exists()


def test_command_prints_json_and_nothing_else(file):
    words = ["plan-switches", file, "--no-plots", "--json", "--workload=vgg16"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    ways = json.loads(done.stdout)["ways"]
    assert [one["switches"] for one in ways["rina"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "fast"], "--rate: expected a rate such"),
        (["--rate", "0 Gbit/s"], "--rate: expected a rate above"),
        (["--slots", "0"], "--slots: expected 1 or more"),
        (["--workload", "no-such"], "no-such"),
    ],
)
def test_wrong_words_are_refused(file, words, said):
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(
            app, ["plan-switches", file, "--no-plots", *words], catch_exceptions=False
        )
