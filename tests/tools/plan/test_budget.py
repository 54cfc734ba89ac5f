"""Equal questions, equal plans, wherever they are asked; and what a small budget goes to."""

import os
import subprocess
import sys

import msgspec
import pytest

from paceline.cluster import Cluster, Rack
from paceline.collectives.algorithms import Scheduled
from paceline.collectives.registry import COLLECTIVES
from paceline.errors import UsageError
from paceline.tools.plan import Plan, plan
from paceline.tools.plan.candidate_order import fewer, rough
from paceline.tools.plan.candidates import candidate, first
from paceline.tools.plan.estimates import Infeasible
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.prediction_cost import Budget, cost, messages, usual_seconds
from paceline.tools.plan.predictor import in_this_process
from paceline.tools.plan.search import HOPELESS, _by_promise, _Search
from paceline.tools.plan.suggestions import helps
from paceline.tools.plan.traced_step import steps_of
from tests.tools.plan.helpers import cluster, layers
from tests.tools.plan.test_more import made, row

ELSEWHERE = """
import sys
import msgspec
from paceline.tools.plan import plan
from tests.tools.plan.helpers import cluster, layers

if __name__ == "__main__":
    made = plan(
        cluster(3), layers(2), allowed=("delayed",), budget_seconds=0.4,
        processes=2,
    )
    sys.stdout.buffer.write(msgspec.json.encode(made))
"""


@pytest.mark.slow
def test_a_plan_is_equal_to_the_bit_in_other_processes(tmp_path):
    """Another hash seed, and two predictions at a time; the budget ends within it."""
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    here = plan(cluster(3), layers(2), allowed=("delayed",), budget_seconds=0.4)
    assert here.skipped
    path = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    said = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONHASHSEED": "2", "PYTHONPATH": path},
        capture_output=True,
        check=True,
    )
    assert msgspec.json.decode(said.stdout, type=Plan) == here


@pytest.mark.slow
def test_a_small_budget_goes_to_what_is_promising():
    """The best of a class is near what all of a plan finds, and what is first in the registry is not."""
    job = cluster(16, "100mbit"), layers(2, megabytes=8.0)
    small = plan(*job, allowed=("lossy",), budget_seconds=2.5)
    assert small.skipped
    best = small.fastest["lossy"].step_seconds
    whole = plan(*job, allowed=("lossy",), budget_seconds=1000.0)
    assert best <= 1.1 * whole.fastest["lossy"].step_seconds
    earliest = whole.estimate("bsp:compression=bf16")
    assert earliest is not None
    assert best < 0.5 * earliest.step_seconds


def test_a_budget_bounds_what_predictions_are_said_to_cost(monkeypatch):
    asked = []
    job = TrainingJob(cluster=cluster(16), workload=layers(8))

    def priced(job, specs, *, short):
        asked.extend(cost(job, spec, short=short) for spec in specs)
        return iter(())

    class Priced:
        __call__ = staticmethod(priced)

    search = _Search(job, frozenset(("exact",)), Budget(2.0), Priced(), lambda *_: None)
    among, _ = first(job.cluster)
    with pytest.raises(ValueError, match="zip"):  # nothing was answered
        _by_promise(search, among)
    assert 0 < sum(asked) <= 1.0
    assert search.budget.left == pytest.approx(2.0 - sum(asked))
    with pytest.raises(UsageError, match="--budget"):
        plan(job.cluster, job.workload, budget_seconds=1e-6)


def test_a_few_hosts_are_the_slowest_of_two_racks():
    rates = (4.0, 3.0, 2.0, 1.0)
    one = Rack(workers=4, link=rates, latency=1e-4, uplink=8.0)
    other = Rack(workers=2, link=5.0, latency=1e-4, speed=(1.0, 0.5), uplink=6.0)
    few = fewer(Cluster((one, other, one)), 4)
    assert [rack.links for rack in few.racks] == [(2.0, 1.0), (5.0, 5.0)]
    assert [rack.uplink for rack in few.racks] == [4.0, 6.0]
    assert few.speeds == (1, 1, 1.0, 0.5)
    assert fewer(Cluster((one,)), 4) == Cluster((one,))
    assert (
        rough(TrainingJob(cluster=cluster(64), workload=layers(20))).cluster.workers
        == 4
    )


def test_a_prediction_costs_what_its_messages_do():
    """A ring is one activity, and a tree among 64 workers is 126 messages."""
    assert messages(cluster(64), "native", 1000) == 0
    assert messages(cluster(64), "hierarchical", 1000) == 0  # a rack of its own: a ring
    assert messages(cluster(64), "tree", 1000) == 2 * 63
    assert messages(cluster(64), "halving-doubling", 1000) == 2 * 6 * 64
    job = TrainingJob(cluster=cluster(64), workload=layers(16))

    def times(collective):
        priced = (f"osp:collective={name}" for name in (collective, "native"))
        dear, cheap = (cost(job, spec, short=False) for spec in priced)
        return dear / cheap

    assert times("hierarchical") == 1
    assert times("halving-doubling") > 2


@pytest.mark.parametrize("name", sorted(set(COLLECTIVES) - {"parameter-server"}))
@pytest.mark.parametrize("workers", [2, 5, 8])
@pytest.mark.parametrize("aggregates", [False, True])
def test_every_collective_tells_its_messages_without_a_training(
    name, workers, aggregates
):
    where = Cluster(
        tuple(
            Rack(workers=workers, link=1e7, latency=1e-4, aggregates=aggregates)
            for _ in range(2)
        )
    )
    assert messages(where, name, 1 << 20) >= 0


def test_a_collective_that_fails_is_no_collective_without_messages(monkeypatch):
    """Who prices it learns of the error, and not that it costs nothing."""

    class Broken(Scheduled):
        name = "broken"

        def schedule(self, size, at):
            raise ZeroDivisionError("in its schedule")

    monkeypatch.setitem(COLLECTIVES, "broken", Broken)
    with pytest.raises(ZeroDivisionError):
        messages(cluster(4), "broken", 1000)


@pytest.mark.parametrize(
    "spec",
    [
        "gssp:number_of_groups=9",
        "grouping-sgd:members=0-3+4-7",
        "bsp:compression=nobody",
    ],
)
def test_a_spec_that_four_workers_refuse_is_priced_and_refused(spec):
    job = TrainingJob(cluster=cluster(4), workload=layers(2))
    (said,) = in_this_process(job, [spec], short=True)
    assert isinstance(said, Infeasible)
    assert cost(job, spec, short=True) < cost(job, "bsp", short=True)


def test_the_usual_budget_grows_with_the_workers():
    assert usual_seconds(cluster(2)) == usual_seconds(cluster(16)) == 60.0
    assert usual_seconds(cluster(32)) < usual_seconds(cluster(64))


@pytest.mark.slow
def test_the_best_of_a_class_is_its_fastest_whatever_the_budget_had_time_for():
    """And not what was cheap enough to be run in full."""

    whole = TrainingJob(cluster=cluster(8), workload=layers(50))

    def said(job, specs, *, short):
        prices = [cost(whole, spec, short=False) for spec in specs]
        seconds = [2 - price / (1 + price) for price in prices]  # the dear are fast
        return iter(
            [
                row(spec, candidate(spec).consistency, seconds)
                for spec, seconds in zip(specs, seconds, strict=True)
            ]
        )

    made = plan(whole.cluster, whole.workload, budget_seconds=7.0, predict=said)
    assert any(one.fidelity == "short" and not one.rejected for one in made.estimates)
    for consistency, best in made.fastest.items():
        mine = [one for one in made.estimates if one.consistency == consistency]
        assert best.step_seconds == min(one.step_seconds for one in mine)
        for one in mine:
            slow = one.step_seconds > HOPELESS * best.step_seconds
            assert one.rejected == (one.fidelity == "short" and slow)
    enough = plan(whole.cluster, whole.workload, budget_seconds=1e3, predict=said)
    assert all(one.rejected for one in enough.estimates if one.fidelity == "short")


NOT_RUN = Infeasible(spec="", consistency="exact", reason="not run")


class Counts:
    """Instead of predictions: what was asked for."""

    def __init__(self):
        self.asked = []

    def each(self, asked, *, short=False):
        self.asked += [(job, spec) for job, spec in asked]
        return iter([NOT_RUN] * len(asked))

    def map(self, function, asked, prices):
        self.asked += asked
        return iter([None] * len(asked))


def test_what_follows_the_candidates_keeps_to_what_they_have_left():
    job = TrainingJob(cluster=cluster(8), workload=layers(4))
    plan_ = made(row("bsp"), row("bsp:buckets=ddp", seconds=0.2), row("osp", "delayed"))
    nothing, counts = Budget(0.0), Counts()
    found = helps(plan_, job, counts, nothing)
    assert (found.break_even, found.helps) == ((), ())
    assert found.untried == 6  # the links, four kinds of batches, four workers
    assert steps_of(plan_, job, predict=counts, budget=nothing) == []
    assert counts.asked == []
    price = cost(job, "bsp", short=False) + cost(job, "bsp:buckets=ddp", short=False)
    some = Budget(price)
    steps_of(plan_, job, predict=counts, budget=some)
    assert [spec for _, spec in counts.asked] == ["bsp", "bsp:buckets=ddp"]
    assert some.left == pytest.approx(0.0)
    assert helps(plan_, job, counts).untried == 0
