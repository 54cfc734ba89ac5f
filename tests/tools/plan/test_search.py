"""The search: candidates from the registries, the best of each class, what was left out and why."""

import os
import subprocess
import sys
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
from paceline.tools.plan.estimates import Estimate
from paceline.tools.plan.predict import TrainingJob, predict
from paceline.tools.plan.predictor import Predictor, usual_events
from paceline.tools.plan.report import MANY_STEPS
from paceline.tools.plan.search import HOPELESS, trace_steps
from paceline.tools.plan.what_if import shortlist, suggestions
from tests.tools.plan.helpers import FakePredictor, cluster, layers, made, row

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
            {one.spec for one in left_out if "aggregator" in one.reason},
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


@pytest.mark.slow
def test_the_best_of_each_class_is_the_fastest_of_it(whole):
    assert list(whole.fastest) == list(CONSISTENCIES)
    seconds = [row.step_seconds for row in whole.estimates]
    assert seconds == sorted(seconds)
    for consistency, best in whole.fastest.items():
        mine = [row for row in whole.estimates if row.consistency == consistency]
        assert best.step_seconds == min(row.step_seconds for row in mine)
        assert best.fidelity == "full"
    exact = whole.fastest["exact"]
    baseline = whole.baseline
    assert baseline.bound_ratio(exact) >= 1 - 1e-9
    one = baseline.single
    assert one.step_seconds == pytest.approx(2 * 0.09)  # the global batch
    assert baseline.speedup(exact) == pytest.approx(
        one.step_seconds / exact.step_seconds
    )
    assert baseline.samples_per_second(exact) == pytest.approx(16 / exact.step_seconds)


@pytest.mark.slow
def test_only_allowed_classes_are_looked_at():
    found = plan(cluster(2), layers(2), allowed=("delayed",))
    assert {row.consistency for row in found.estimates} == {"delayed"}
    assert {one.consistency for one in found.infeasible} <= {"delayed"}


@pytest.mark.slow
def test_methods_that_the_script_forbids_are_left_out_with_the_reason():
    found = plan(
        cluster(2),
        layers(2),
        allowed=("delayed", "exact"),
        refused={"osp": "the script clips"},
    )
    assert "delayed" not in found.fastest
    assert {one.reason for one in found.infeasible if one.consistency == "delayed"} == {
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


# ---- the limit on simulated events ----


def fake(spec, fidelity):
    return row(spec, candidate(spec).consistency)


@pytest.mark.slow
def test_a_small_limit_looks_at_less_and_says_so(whole):
    small = plan(cluster(2), layers(2), max_events=whole.events / 20)
    assert small.skipped
    assert 0 < len(small.estimates) < len(whole.estimates)
    assert small.events < whole.events / 10
    with pytest.raises(UsageError, match="--max-work"):
        plan(cluster(2), layers(2), max_events=0)


def test_each_class_is_looked_at_before_a_second_method_of_any():
    predictor = FakePredictor(fake)
    found = plan(cluster(2), layers(2), max_events=20, predictor=predictor)
    first_round = [candidate(spec).consistency for _, spec, _ in predictor.asked][:10]
    assert set(first_round[: len(CONSISTENCIES)]) == set(CONSISTENCIES)
    assert found.events == predictor.events <= 20
    assert found.skipped > 20


def test_compressors_are_tried_only_with_methods_that_wait_for_the_network():
    def specs(seconds):
        def answer(spec, fidelity):
            return row(spec, candidate(spec).consistency, seconds)

        predictor = FakePredictor(answer)
        plan(cluster(2), layers(2), predictor=predictor)
        return {spec for _, spec, _ in predictor.asked}

    # All but 0.09 s is waiting: too little of it to gain anything, and half of the step.
    assert specs(0.0905) < specs(0.18)


def test_the_predictors_own_limit_ends_a_plan_too():
    predictor = FakePredictor(fake, max_events=30)
    assert list(predictor.predict([(None, "bsp")])) == [row("bsp")]
    found = plan(cluster(2), layers(17), predictor=predictor)
    assert found.events == 29
    assert predictor.events == 30


ELSEWHERE = """
import sys
import msgspec
from paceline.tools.plan import plan
from paceline.tools.plan.predictor import Predictor
from tests.tools.plan.helpers import cluster, layers

if __name__ == "__main__":
    with Predictor(2) as predictor:
        made = plan(
            cluster(3), layers(2), allowed=("delayed",), max_events=float(sys.argv[1]),
            predictor=predictor,
        )
    sys.stdout.buffer.write(msgspec.json.encode(made))
"""


@pytest.mark.slow
def test_a_plan_is_equal_to_the_bit_in_other_processes(tmp_path):
    """Another hash seed, and two predictions at a time; the limit ends it."""
    script = tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    here = plan(cluster(3), layers(2), allowed=("delayed",), max_events=2000)
    assert here.estimates
    assert here.skipped
    path = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    said = subprocess.run(
        [sys.executable, str(script), "2000"],
        env=os.environ | {"PYTHONHASHSEED": "2", "PYTHONPATH": path},
        capture_output=True,
        check=True,
    )
    assert msgspec.json.decode(said.stdout, type=Plan) == here


def test_the_usual_limit_grows_with_the_workers():
    assert 0 < usual_events(cluster(2)) == usual_events(cluster(16))
    assert usual_events(cluster(32)) < usual_events(cluster(64))


def test_the_best_of_a_class_is_its_fastest_wherever_the_limit_comes():
    """Also by its short run: neither the first in the registry nor the first that ran in full."""
    seconds = {}

    def answer(spec, fidelity):
        # The later, the faster.
        taken = seconds.setdefault(spec, 1 / (1 + 0.01 * len(seconds)))
        return row(spec, candidate(spec).consistency, taken)

    where, model = cluster(8), layers(50)
    predictor = FakePredictor(answer)
    found = plan(where, model, predictor=predictor)
    assert all(one.rejected for one in found.estimates if one.fidelity == "short")
    short = sum(fidelity == "short" for _, _, fidelity in predictor.asked)
    seconds.clear()
    cut = plan(where, model, max_events=1.2 * short, predictor=FakePredictor(answer))
    assert any(one.fidelity == "short" and not one.rejected for one in cut.estimates)
    for consistency, best in cut.fastest.items():
        mine = [one for one in cut.estimates if one.consistency == consistency]
        assert best.step_seconds == min(one.step_seconds for one in mine)
        for one in mine:
            slow = one.step_seconds > HOPELESS * best.step_seconds
            assert one.rejected == (one.fidelity == "short" and slow)


def test_what_follows_the_candidates_keeps_to_what_they_leave():
    job = TrainingJob(cluster=cluster(4), workload=layers(1))
    plan_ = made(row("bsp"), row("bsp:buckets=ddp", seconds=0.2), row("osp", "delayed"))
    spent = Predictor(max_events=0)
    found = suggestions(plan_, job, spent)
    assert (found.break_even, found.helps, found.tried) == ((), (), 0)
    assert found.untried == 6  # the links, four kinds of batches, two workers
    assert trace_steps(plan_, job, spent) == []
    assert spent.events == 0
    one = Predictor(max_events=1)
    assert [step.name for step in trace_steps(plan_, job, one)] == ["bsp"]
    assert one.events > 1


def test_a_rejected_method_is_the_fastest_only_where_no_other_is():
    rejected = row("dear", seconds=0.1, fidelity="short", rejected=True)
    assert made(rejected, row("bsp", seconds=0.2)).fastest["exact"].spec == "bsp"
    assert made(rejected).fastest["exact"].spec == "dear"
    short = row("dear", seconds=0.1, fidelity="short")
    plan = made(short, row("bsp", seconds=0.2))
    assert plan.fastest["exact"].spec == plan.recommended["exact"].spec == "dear"
    assert shortlist(plan) == {"exact": ["dear", "bsp"]}


def test_one_worker_has_nothing_to_compare():
    found = plan(cluster(1), layers(2))
    assert not found.estimates
    assert found.baseline.speedup(found.baseline.single) == 1
    assert not found.recommended


def require_full_runs(plan_, job):
    """That each estimate of full fidelity is what a full run of its own comes to."""
    checked = [one for one in plan_.estimates if one.fidelity == "full"]
    for one in checked:
        said = predict(job, one.spec)
        assert isinstance(said, Estimate), one.spec
        for field in msgspec.structs.fields(Estimate):
            found, expected = getattr(one, field.name), getattr(said, field.name)
            if field.name == "steady_after" and max(found, expected) < MANY_STEPS:
                continue  # a plan tells of many steps alone
            if field.name == "events":
                continue  # a short run that shows as much takes fewer
            assert found == expected, (one.spec, field.name)
    return {one.spec for one in checked}


@pytest.mark.slow
def test_each_row_is_its_own_full_run_and_ddps_too_where_it_is_slow():
    """Of more than 16 tensors, so that short runs merge some and plan no buckets: there planned bsp is
    equal to DDP's rule, and in full it is not."""
    job = TrainingJob(cluster=cluster(2), workload=layers(17))
    found = plan(job.cluster, job.workload, allowed=("exact",))
    full = require_full_runs(found, job)
    assert {"bsp", "bsp:buckets=ddp", "bsp:buckets=mg-wfbp", "dear"} <= full
    planned, ddp = found.estimate("bsp"), found.estimate("bsp:buckets=ddp")
    assert planned.step_seconds < ddp.step_seconds
    assert ddp.buckets < planned.buckets


@pytest.mark.slow
@pytest.mark.parametrize("tensors", [4, 17])
def test_rows_of_all_classes_are_full_runs(tensors):
    """Also of few tensors, where a short run is of the same model: but of shorter rounds, and without what
    a method learns."""
    rack = Rack(workers=3, link=12.5e6, latency=5e-5, speed=(1.0, 1.0, 0.6))
    job = TrainingJob(cluster=Cluster((rack,)), workload=layers(tensors))
    found = plan(job.cluster, job.workload, max_events=1e9)
    full = require_full_runs(found, job)
    assert {"bsp:buckets=ddp", "osp:collective=native,buckets=ddp"} <= full


def test_ddps_row_is_a_full_run_where_it_is_hopeless():
    """It stands beside the best of each class, and all of them are held against it."""
    slow = {"bsp:buckets=ddp": 1.0, "bsp:buckets=single": 1.0}

    def answer(spec, fidelity):
        return row(spec, seconds=slow.get(spec, 0.1), buckets=1 + (fidelity == "short"))

    predictor = FakePredictor(answer)
    found = plan(cluster(2), layers(17), allowed=("exact",), predictor=predictor)
    assert not found.estimate("bsp:buckets=ddp").rejected
    assert found.estimate("bsp:buckets=single").rejected
