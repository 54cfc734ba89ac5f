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
from paceline.tools.plan.switch_upgrades import (
    Upgrade,
    advice,
    collective_options,
    plan_upgrades,
    upgrade_report,
    upgrade_step,
)
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
    return {option.name: option for option in collective_options(cluster)}


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
            upgrade_step(known[way], cluster, workload, order[:count]).step_seconds
            for count in range(len(order) + 1)
        )

    found = plan_upgrades(cluster, workload).options[way]
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
    found = plan_upgrades(cluster, workload).options
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
    found = plan_upgrades(done, layers())
    assert found.ready == 1
    assert [one.racks for one in found.options["rina"]] == [(1,), (1, 0)]


def test_a_rack_of_one_worker_is_bought_last():
    found = plan_upgrades(racks(1, 4, 4), layers()).options["rina"]
    assert found[-1].racks[-1] == 0
    assert found[-1].step_seconds == pytest.approx(found[-2].step_seconds)


def test_what_a_switch_takes_in_counts():
    fast = plan_upgrades(racks(4, 4), layers()).options["rina"]
    slow = plan_upgrades(racks(4, 4), layers(), Upgrade(GBIT / 2)).options["rina"]
    few = plan_upgrades(racks(4, 4), layers(), Upgrade(slots=1)).options["rina"]
    assert slow[0] == few[0] == fast[0]
    assert slow[-1].gradient_seconds > 4 * fast[-1].gradient_seconds
    assert few[-1].gradient_seconds > 1.1 * fast[-1].gradient_seconds


def test_one_worker_has_nothing_to_add_up():
    with pytest.raises(UsageError, match="two workers or more"):
        plan_upgrades(racks(1), layers())


def test_advice_tells_from_which_number_of_switches_on_a_collective_gains():
    fast = advice(plan_upgrades(racks(8, 8), layers(megabytes=40)))
    assert "hierarchical" in fast[0]
    (rina,) = (line for line in fast if line.startswith("rina"))
    assert "faster than hierarchical from" in rina
    slow = advice(plan_upgrades(racks(4, 4), layers(), Upgrade(GBIT / 100)))
    (rina,) = (line for line in slow if line.startswith("rina"))
    assert "not faster" in rina


def test_the_table_has_a_row_for_each_number_of_switches():
    cluster = racks(4, 4)
    found = plan_upgrades(cluster, layers())
    table, chart = upgrade_report(found, cluster, title="x").sections
    assert [row[0].value for row in table.rows] == [0, 1, 2]
    assert table.headings == ("switches", *found.options)
    rates = [row[table.headings.index("rina")].value for row in table.rows]
    assert rates == [one.throughput for one in found.options["rina"]]
    (panel,) = chart.panels
    by_name = {series.name: list(series.ys) for series in panel.series}
    assert by_name["rina"] == rates
    assert len(set(by_name["ring"])) == 1


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


def test_command_prints_a_table_and_writes_a_page(file, tmp_path):
    folder = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["plan-switches", file, "--output", str(folder)], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "8 workers in 2 racks" in done.stdout
    assert "rina" in (folder / "index.html").read_text()


def test_command_prints_json_and_nothing_else(file):
    words = ["plan-switches", file, "--no-html", "--json", "--workload=vgg16"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    options = json.loads(done.stdout)["options"]
    assert [one["switches"] for one in options["rina"]] == [0, 1, 2]


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
            app, ["plan-switches", file, "--no-html", *words], catch_exceptions=False
        )
