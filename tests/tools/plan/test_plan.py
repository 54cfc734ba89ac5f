"""A plan: candidates from the registries, the best of each class, what was left out and why."""

from dataclasses import replace

import msgspec
import pytest

from paceline.bucketing.rules import RULES
from paceline.cluster import Cluster, Rack
from paceline.collectives.registry import COLLECTIVES
from paceline.compression import COMPRESSORS, CONTRIB
from paceline.errors import UsageError
from paceline.interfaces import CONSISTENCIES
from paceline.methods import METHODS
from paceline.spec import parse
from paceline.tools.plan import Plan, plan
from paceline.tools.plan.candidates import candidate, first
from paceline.tools.plan.headline import MANY_STEPS
from paceline.tools.plan.predict import Prediction, TrainingJob, predict
from tests.tools.plan.helpers import cluster, layers

AT_SWITCHES = {
    f"bsp:collective={name}"
    for name, row in COLLECTIVES.items()
    if row.needs == "aggregators"
}


def test_every_row_of_every_registry_is_a_candidate_but_those_to_compare_with():
    found, left_out = first(cluster())
    specs = [parse(one.spec) for one in [*found, *left_out]]
    assert set(METHODS) == {spec.name for spec in specs}
    for key, names in (
        ("collective", set(COLLECTIVES) - {"native", "ring"}),
        ("compression", set(COMPRESSORS) - CONTRIB - {"none"}),
        ("buckets", set(RULES) - {"optimal"}),
    ):
        assert names <= {spec.values.get(key) for spec in specs if spec.name == "bsp"}
    assert not CONTRIB & {spec.values.get("compression") for spec in specs}
    assert len(specs) == len({str(spec) for spec in specs})


def test_a_compressor_to_compare_with_is_predicted_where_it_is_named():
    job = TrainingJob(cluster=cluster(2), workload=layers(2))
    for name in sorted(CONTRIB):
        spec = f"bsp:compression={name}"
        assert candidate(spec).consistency == "lossy"
        assert predict(job, spec).step_seconds > 0


@pytest.mark.parametrize(
    ("spec", "consistency"),
    [
        ("bsp", "exact"),
        ("bsp:compression=bf16", "lossy"),
        ("osp:collective=native", "delayed"),
        ("osp:collective=native,compression=top-k", "lossy"),
        ("diloco:compression=int8", "local"),
        ("sparse-loco", "local"),
        ("asp:compression=qsgd", "asynchronous"),
    ],
)
def test_the_weaker_promise_is_the_candidates(spec, consistency):
    assert candidate(spec).consistency == consistency


def test_collectives_at_switches_are_candidates_where_racks_aggregate():
    def at_switches(racks):
        found, left_out = first(Cluster(racks))
        return (
            {one.spec for one in found if one.spec in AT_SWITCHES},
            {one.spec for one in left_out if "aggregator" in one.why},
        )

    plain = Rack(workers=2, link=125e6, latency=0.0)
    assert AT_SWITCHES
    assert at_switches((plain, plain)) == (set(), AT_SWITCHES)
    assert at_switches((plain, replace(plain, aggregates=True))) == (AT_SWITCHES, set())


def test_servers_stand_on_all_hosts_or_on_their_own():
    specs = [one.spec for one in first(cluster())[0]]
    assert "asp:servers=per-node" in specs
    specs = [one.spec for one in first(cluster(servers=2))[0]]
    assert "asp" in specs


@pytest.fixture(scope="module")
def whole():
    return plan(cluster(2), layers(2))


@pytest.mark.slow
def test_a_plan_is_equal_wherever_it_is_made(whole):
    one, two = (plan(cluster(3), layers(3), allowed=("delayed",)) for _ in range(2))
    assert msgspec.json.encode(one) == msgspec.json.encode(two)
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Plan) == whole


def test_the_best_of_each_class_is_the_fastest_of_it(whole):
    assert list(whole.best) == list(CONSISTENCIES)
    seconds = [row.step_seconds for row in whole.rows]
    assert seconds == sorted(seconds)
    for consistency, best in whole.best.items():
        mine = [row for row in whole.rows if row.consistency == consistency]
        assert best.step_seconds == min(row.step_seconds for row in mine)
        assert not best.cut
    exact = whole.best["exact"]
    assert exact.bound_ratio >= 1 - 1e-9
    one = whole.one_machine
    assert one.step_seconds == pytest.approx(0.09)
    assert exact.speedup == pytest.approx(2 * one.step_seconds / exact.step_seconds)
    assert exact.samples_per_second == pytest.approx(16 / exact.step_seconds)


@pytest.mark.slow
def test_only_allowed_classes_are_looked_at():
    found = plan(cluster(2), layers(2), allowed=("delayed",))
    assert {row.consistency for row in found.rows} == {"delayed"}
    assert {one.consistency for one in found.left_out} <= {"delayed"}


def test_methods_that_the_script_forbids_are_left_out_with_the_reason():
    found = plan(
        cluster(2),
        layers(2),
        allowed=("delayed", "exact"),
        refused={"osp": "the script clips"},
    )
    assert "delayed" not in found.best
    assert {one.why for one in found.left_out if one.consistency == "delayed"} == {
        "the script clips"
    }


def test_nothing_that_is_allowed_can_run():
    with pytest.raises(UsageError, match=r"\(delayed\).*clips"):
        plan(
            cluster(2),
            layers(2),
            allowed=("delayed",),
            refused={"osp": "the script clips"},
        )


def test_a_small_budget_looks_at_less_and_says_so(whole):
    small = plan(cluster(2), layers(2), budget_seconds=0.2)
    assert small.skipped
    assert len(small.rows) < len(whole.rows)
    with pytest.raises(UsageError, match="--budget"):
        plan(cluster(2), layers(2), budget_seconds=1e-6)


def test_one_worker_has_nothing_to_compare():
    found = plan(cluster(1), layers(2))
    assert not found.rows
    assert found.one_machine.speedup == 1


def require_full_runs(made, job):
    """That each row is what a full run of its own comes to, unless it is marked as a short one."""
    checked = [row for row in made.rows if not row.cut]
    for row in checked:
        said = predict(job, row.spec)
        assert isinstance(said, Prediction), row.spec
        for field in msgspec.structs.fields(Prediction):
            found, expected = getattr(row, field.name), getattr(said, field.name)
            if field.name == "steady_after" and max(found, expected) < MANY_STEPS:
                continue  # a plan tells of many steps alone
            assert found == expected, (row.spec, field.name)
    return {row.spec for row in checked}


@pytest.mark.slow
def test_each_row_is_its_own_full_run_and_ddps_too_where_it_is_slow():
    """Of more than 16 tensors, so that short runs merge some and plan no buckets: there planned bsp is
    equal to DDP's rule, and in full it is not."""
    job = TrainingJob(cluster=cluster(2), workload=layers(17))
    made = plan(job.cluster, job.workload, allowed=("exact",))
    full = require_full_runs(made, job)
    assert {"bsp", "bsp:buckets=ddp", "bsp:buckets=mg-wfbp", "dear"} <= full
    planned, ddp = made.row("bsp"), made.row("bsp:buckets=ddp")
    assert planned.step_seconds < ddp.step_seconds
    assert ddp.buckets < planned.buckets


@pytest.mark.slow
@pytest.mark.parametrize("tensors", [4, 17])
def test_rows_of_all_classes_are_full_runs(tensors):
    """Also of few tensors, where a short run is of the same model: but of shorter rounds, and without what
    a method learns."""
    rack = Rack(workers=3, link=12.5e6, latency=5e-5, speed=(1.0, 1.0, 0.6))
    job = TrainingJob(cluster=Cluster((rack,)), workload=layers(tensors))
    made = plan(job.cluster, job.workload, budget_seconds=1e4)
    full = require_full_runs(made, job)
    assert {"bsp:buckets=ddp", "osp:collective=native,buckets=ddp"} <= full


def test_ddps_row_is_a_full_run_where_it_is_hopeless():
    """It stands beside the best of each class, and all of them are held against it."""

    def said(job, specs, *, short):
        slow = {"bsp:buckets=ddp": 1.0, "bsp:buckets=single": 1.0}
        rest = {"compute_seconds": 0.1, "exposed_seconds": 0.0, "bytes_sent": 1e6}
        return iter(
            [
                Prediction(step_seconds=slow.get(s, 0.1), buckets=1 + short, **rest)
                for s in specs
            ]
        )

    made = plan(cluster(2), layers(17), allowed=("exact",), predict=said)
    assert not made.row("bsp:buckets=ddp").cut
    assert made.row("bsp:buckets=single").cut
