"""A diagnosis: faults that cost something, what fixing them saves, and its report."""

import json
import re
from dataclasses import replace
from functools import cache

import msgspec
import pytest
from msgspec.structs import replace as replace_all

from paceline.cluster import Cluster, Rack
from paceline.errors import UsageError
from paceline.tools.doctor import Diagnosis, faults
from paceline.tools.doctor import diagnose as diagnosed
from paceline.tools.doctor.diagnosis import GainEstimator, detect_faults
from paceline.tools.doctor.faults import FAULTS
from paceline.tools.doctor.network_model import NetworkModel
from paceline.tools.doctor.report import doctor_report, to_json
from paceline.tools.doctor.training_model import TrainingModel
from paceline.tools.plan import plan
from paceline.tools.plan.predict import TrainingJob, predict
from paceline.tools.report.charts import HATCHED
from paceline.tools.report.model import BarChart, Matrix, Table, Text
from tests.tools.doctor.synthetic import BRIDGE, ETHERNET, Site
from tests.tools.doctor.test_faults import MAKERS
from tests.tools.plan import helpers
from tests.tools.plan.helpers import layers

WORK = layers(2, 4.0, 0.03, 0.06)
"""Of 4 MB: at a gigabit backward hides half of the network's time, so that no method is slow and none is planned."""

LARGE = layers(4, 8.0, 0.03, 0.06)
"""Of 8 MB: at a gigabit the network takes as long as backward."""


def site(hosts=4, **more):
    return Site(**{"hosts": hosts, "workload": WORK, "noise": 0.0} | more)


def diagnose(evidence):
    """Where a step takes what its parts say."""
    if any(one.step is None for one in evidence.workers):
        return diagnosed(evidence)
    seconds = TrainingModel.of(NetworkModel(evidence)).step_seconds()
    workers = tuple(_with_step(one, seconds) for one in evidence.workers)
    return diagnosed(replace_all(evidence, workers=workers))


def named(made):
    return {one.name: one for one in diagnose(made.evidence()).faults}


@cache
def with_fault(name):
    """Evidence of that fault, and its diagnosis, which takes seconds."""
    made = site(noise=0.03)
    if name == "no-overlap":
        late = (0.0, 0.06)  # what is registered last is ready first
        made.workload = replace(WORK, backward=late)
    MAKERS[name](made, 1)
    evidence = made.evidence()
    return evidence, diagnose(evidence)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "slow-link" else pytest.mark.slow)
        for name in MAKERS
    ],
)
def test_each_fault_is_the_only_one_and_gains_something(name):
    _, found = with_fault(name)
    assert [one.name for one in found.faults] == [name]
    assert not found.healthy
    fault = found.faults[0]
    assert fault.gain_seconds > 0.05 * found.predicted_seconds
    assert found.fixed_seconds < found.predicted_seconds
    assert found.harmless == ()


EXPLAINED = [(row.name, symptom) for row in FAULTS for symptom in row.symptoms]


@pytest.mark.parametrize(("cause", "symptom"), EXPLAINED)
def test_with_a_cause_its_symptoms_are_fixed(cause, symptom):
    """Only the cause is named, and fixing it leaves the training of the healthy network: its gain is what all
    of them cost. A fixed input takes a little less than a healthy one."""
    healthy, made = site(hosts=6), site(hosts=6)
    MAKERS[symptom](made, 1)
    MAKERS[cause](made, 1)
    network = NetworkModel(made.evidence())
    training = TrainingModel.of(network)
    found = detect_faults(network, training)
    assert list(found) == [cause]
    fixed = GainEstimator(training, found).fixed(found)
    expected = TrainingModel.of(NetworkModel(healthy.evidence()))
    assert fixed.inputs == pytest.approx(expected.inputs, abs=2e-3)
    assert fixed == replace(expected, inputs=fixed.inputs)


@pytest.mark.slow
def test_a_wrong_interface_of_all_hosts_is_named_where_two_have_a_slow_path():
    fast = ETHERNET.rate * 10
    made = site(link=ETHERNET.rate / 10, paths={(1, 2): 0.4, (2, 1): 0.4})
    used = (BRIDGE, replace_all(ETHERNET, rate=fast))
    made.interfaces = dict.fromkeys(range(made.hosts), used)
    found = diagnose(made.evidence())
    assert [one.name for one in found.faults] == ["wrong-interface"]
    fixed = TrainingModel.of(NetworkModel(site(link=fast).evidence())).step_seconds()
    assert found.fixed_seconds == pytest.approx(fixed, rel=0.05)


@pytest.mark.slow
def test_what_a_cause_explains_on_its_host_is_not_fixed_on_others():
    made, alone = site(hosts=6), site(hosts=6)
    for one in (made, alone):
        MAKERS["contention"](one, 4)
    MAKERS["cpu-oversubscription"](made, 1)
    MAKERS["contention"](made, 1)
    found = named(made)
    assert set(found) == {"cpu-oversubscription", "contention"}
    assert found["contention"].location == named(alone)["contention"].location
    assert found["contention"].gain_seconds > 0.05 * made.workload.forward_seconds


@pytest.mark.slow
def test_what_is_gained_is_the_step_without_it():
    made = site()
    healthy = diagnose(made.evidence())
    assert healthy.healthy
    made.factors = {1: 2.0}
    found = diagnose(made.evidence())
    assert found.fixed_seconds == pytest.approx(healthy.predicted_seconds)
    rack = Rack(workers=4, link=125e6, latency=50e-6, speed=(1, 0.5, 1, 1))
    true = predict(
        TrainingJob(cluster=Cluster((rack,)), workload=WORK, inputs=(2e-3,) * 4),
        made.spec,
    )
    assert found.predicted_seconds == pytest.approx(true.step_seconds)
    gains = true.step_seconds - healthy.predicted_seconds
    assert found.faults[0].gain_seconds == pytest.approx(gains)


def test_where_a_script_uses_gradients_a_late_method_gains_nothing():
    dear, uses_gradients, bsp = (
        TrainingModel.of(
            NetworkModel(site(workload=work, spec=spec).evidence())
        ).step_seconds()
        for spec, work in (
            ("dear", LARGE),
            ("dear", replace(LARGE, uses_gradients=True)),
            ("bsp", LARGE),
        )
    )
    assert dear < 0.97 * bsp
    assert uses_gradients == pytest.approx(bsp, rel=0.02)


@pytest.mark.slow
def test_one_direction_of_a_link_is_that_fast_in_virtual_time():
    both, out, less = site(), site(), site()
    both.slow = {(1, "out"): 0.2, (1, "in"): 0.2}
    out.slow = {(1, "out"): 0.2}
    less.slow = {(1, "out"): 0.5}
    steps = [diagnose(one.evidence()).predicted_seconds for one in (both, out, less)]
    assert steps[0] == pytest.approx(steps[1], rel=0.02)  # a ring is as its slowest
    assert steps[2] < 0.7 * steps[1]


@pytest.mark.slow
def test_what_a_small_model_does_not_wait_for_is_no_fault():
    made = site(hosts=6, workload=layers(4, 0.01, 0.03, 0.06))
    MAKERS["slow-link"](made, 1)
    made.racks, made.uplink = 2, 0.4 * made.link
    assert not named(made)
    made.workload = WORK
    assert set(named(made)) == {"slow-link", "scarce-uplink"}


@pytest.mark.slow
def test_a_fault_that_another_hides_is_named_and_gains_add_up():
    made = site()
    made.slow = {(1, "out"): 0.1}
    made.factors = {2: 2.0}
    found = diagnose(made.evidence())
    assert [one.name for one in found.faults] == ["slow-link", "slow-host"]
    gains = sum(one.gain_seconds for one in found.faults)
    assert gains == pytest.approx(found.predicted_seconds - found.fixed_seconds)


def test_bars_hatch_exposed_communication():
    evidence, found = with_fault("slow-link")
    report = doctor_report(found, evidence, "")
    charts = [one for one in report.sections if isinstance(one, BarChart)]
    assert any(HATCHED in chart.parts for chart in charts)


def test_input_and_hooks_are_those_that_were_measured_of_each_worker():
    named = replace(WORK, input=1.0, overhead=1.0)
    evidence = replace_all(site().evidence(), workload=named)
    workload = TrainingModel.of(NetworkModel(evidence)).workload
    assert (workload.input, workload.overhead) == (0.0, 0.0)


@pytest.mark.slow
def test_what_retransmissions_cost_is_what_nothing_else_explains():
    made = site()
    made.losing = {1: 0.02}  # links as fast as ever
    evidence = made.evidence()
    predicted = diagnose(evidence).predicted_seconds
    later = msgspec.structs.replace(
        evidence, workers=tuple(_with_step(one, 0.5) for one in evidence.workers)
    )
    gains = diagnosed(later).faults[0].gain_seconds
    assert gains == pytest.approx(0.5 - predicted)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.8, 0.9, 1.1, 1.2])
def test_a_step_that_is_predicted_wrongly_is_promised_no_gain(part):
    made = site(factors={1: 2.0})
    evidence = made.evidence()
    seconds = part * diagnose(evidence).predicted_seconds
    workers = tuple(_with_step(one, seconds) for one in evidence.workers)
    found = diagnosed(replace_all(evidence, workers=workers))
    assert [one.name for one in found.faults] == ["slow-host"]
    promised = abs(part - 1) < 0.15
    assert (found.faults[0].gain_seconds is not None) == promised
    assert (found.fixed_seconds is not None) == promised
    assert len(found.notes) == (not promised)
    assert (" %)" in faults_of(found, evidence)[0]) == promised


@pytest.fixture
def asked(monkeypatch):
    """What ``paceline plan`` was asked, and answered by these two."""
    asked = []

    def canned(cluster, workload, *, allowed, **_):
        asked.append((cluster, workload, allowed))
        return helpers.made(
            helpers.row("priority", "exact", 0.12),
            helpers.row("ssp", "asynchronous", 0.01),
        )

    faults._estimates.cache_clear()
    monkeypatch.setattr(faults, "plan", canned)
    yield asked
    faults._estimates.cache_clear()


@pytest.mark.slow
def test_a_method_is_compared_with_those_that_promise_as_much(asked):
    """All gradients of osp go over the link of worker 0."""
    evidence = site(spec="osp", workload=LARGE).evidence()
    found = diagnose(evidence)
    (fault,) = found.faults
    assert fault.name == "slow-method"
    assert "--method priority" in fault.command
    assert "osp:servers=per-node" in fault.advice
    assert found.fixed_seconds < found.predicted_seconds / faults.SLOW_METHOD
    training = TrainingModel.of(NetworkModel(evidence))
    assert asked == [(training.cluster, training.workload, ("exact", "delayed"))]
    coarse = layers(2, 8.0, 0.03, 0.06)  # of which backward hides little
    assert not named(site(spec="bsp", workload=coarse))
    assert [allowed for _, _, allowed in asked[1:]] == [("exact",)]
    assert not named(site(spec="local-sgd", workload=LARGE))


@pytest.mark.slow
def test_doctor_advises_what_plan_recommends():
    evidence = site(workload=LARGE, hosts=2, spec="bsp", link=2.5e6).evidence()
    (fault,) = diagnose(evidence).faults
    training = TrainingModel.of(NetworkModel(evidence))
    said = plan(training.cluster, training.workload).recommended
    classes = [one for one in ("delayed", "lossy", "local") if one in said]
    known = [said[one].spec for one in classes]
    assert fault.command.split("--method ")[1] in known
    assert all(one in fault.advice for one in known)


@pytest.mark.slow
def test_nothing_is_named_slow_where_there_is_nothing_to_wait_for():
    small = layers(2, 0.01, 0.03, 0.06)
    assert not named(site(hosts=2, spec="osp", workload=small))


@pytest.mark.slow
def test_a_page_marks_what_is_a_fault_and_nothing_else():
    """A link for which nobody waits is none; and what is to be run is written as it is typed."""
    made = site(workload=layers(4, 0.01, 0.03, 0.06))
    MAKERS["slow-link"](made, 1)
    evidence = made.evidence()
    found = diagnose(evidence)
    assert found.healthy
    assert [one.name for one in found.harmless] == ["slow-link"]
    report = doctor_report(found, evidence, "", "paceline plan train.py")
    assert not _marked(report)
    lines = faults_of(found, evidence)
    assert any(line.endswith("paceline plan train.py") for line in lines)
    assert all(row.checks in lines[0] for row in FAULTS)
    evidence, found = with_fault("slow-link")
    assert _marked(doctor_report(found, evidence, ""))


def faults_of(found, evidence):
    """Lines of the section of faults."""
    report = doctor_report(found, evidence, "", "paceline plan train.py")
    (text,) = [
        one
        for one in report.sections
        if isinstance(one, Text) and one.level == "summary" and one.title != "Run"
    ]
    return text.lines


def test_the_terminal_and_json_show_each_worker_s_phases_and_what_is_unexplained():
    evidence, found = with_fault("slow-link")
    found = replace_all(found, step_seconds=1.5 * found.predicted_seconds)
    report = doctor_report(found, evidence, "")
    (table,) = [
        one
        for one in report.sections
        if isinstance(one, Table) and one.level == "summary"
    ]
    assert table.headings == (
        *("worker", "input", "forward", "backward"),
        *("exposed", "update", "step"),
    )
    assert "33 %" in table.caption
    content = json.loads(to_json(found, evidence))
    assert content["speedup"] == found.single_seconds / found.step_seconds
    assert f"{content['speedup']:.2f}x" in content["headline"]
    assert content["unexplained_seconds"] == found.unexplained_seconds
    for row, worker in zip(table.rows, content["evidence"]["workers"], strict=True):
        for heading, cell in zip(table.headings[1:], row[1:], strict=True):
            assert worker["step"][heading]["median"] == cell.value
    many = doctor_report(found, site(hosts=12).evidence(), "")
    assert len(next(one for one in many.sections if isinstance(one, Table)).rows) < 12


def _marked(page):
    """Cells of matrices that are marked."""
    return [
        cell
        for one in page.sections
        if isinstance(one, Matrix)
        for row in one.cells
        for cell in row
        if cell is not None and cell.bad
    ]


@pytest.mark.slow
def test_a_bound_is_never_above_what_is_measured(monkeypatch):
    """And where no other method helps, faster links are advised."""
    monkeypatch.setattr(faults, "plan", no_candidate)
    made = site(hosts=2, link=2.5e6 * 0.9631)
    (fault,) = diagnose(made.evidence()).faults
    said = re.search(r"less than ([\d.]+) s", fault.cause)
    limit = TrainingModel.of(NetworkModel(made.evidence())).lower_bound_seconds
    assert limit * 0.99 < float(said[1]) <= limit
    assert fault.advice.startswith("Use links of")
    assert fault.command == ""
    assert fault.gain_seconds > 0.4 * limit


def no_candidate(*_, **__):
    raise UsageError("no candidate can run")


def _with_step(worker, seconds):
    took = replace_all(worker.step.step, median=seconds)
    return replace_all(worker, step=replace_all(worker.step, step=took))


@pytest.mark.slow
def test_many_small_messages_over_a_latency():
    many = layers(12, 1.0, 0.03, 0.06)
    made = site(
        hosts=3, workload=many, latency=6e-3, spec="bsp:buckets=wfbp", messages=12.0
    )
    found = named(made)
    assert set(found) == {"message-overhead"}
    assert "12 messages" in found["message-overhead"].cause
    assert "--method" in found["message-overhead"].command
    made.spec = found["message-overhead"].command.split("--method ")[1]
    assert not named(made)
    made.spec, made.latency = "bsp:buckets=wfbp", 10e-6
    assert not named(made)


@pytest.mark.slow
def test_a_network_too_slow_for_exact_methods_names_classes_that_help():
    made = site(workload=LARGE, hosts=2, link=2.5e6)
    found = named(made)
    assert set(found) == {"network-too-slow"}
    fault = found["network-too-slow"]
    assert "links of" in fault.advice
    assert fault.command.startswith("paceline run train.py --method ")
    made.spec = fault.command.split("--method ")[1]
    assert not named(made)
    assert not named(site(workload=LARGE, hosts=2, link=62e6))


def test_every_fault_is_tested_here():
    tested = {*MAKERS, "message-overhead", "slow-method", "network-too-slow"}
    assert tested == {row.name for row in FAULTS}


@pytest.mark.slow
def test_equal_evidence_has_equal_diagnoses_to_the_bit():
    made = site(noise=0.05)
    MAKERS["contention"](made, 1)
    one, two = (diagnose(made.evidence()).to_json() for _ in range(2))
    assert one == two
    assert msgspec.json.decode(one, type=Diagnosis).to_json() == one


@pytest.mark.slow
def test_without_a_script_links_and_machines_are_judged():
    made = site()
    MAKERS["slow-link"](made, 2)
    evidence = made.evidence()
    bare = replace_all(
        evidence,
        workload=None,
        workers=tuple(replace_all(one, step=None) for one in evidence.workers),
    )
    found = diagnose(bare)
    assert [one.name for one in found.faults] == ["slow-link"]
    assert found.step_seconds is None
    assert "64 MiB" in doctor_report(found, bare, "").answer
    assert "input" not in found.checked
    half = replace_all(bare, workers=_half_as_fast(bare, 1))
    found = diagnose(half)
    assert {one.name for one in found.faults} == {"slow-link", "slow-host"}
    # Processes of one machine do not differ by what it is.
    found = diagnose(replace_all(half, shared_cores=2))
    assert {one.name for one in found.faults} == {"slow-link"}


def test_of_two_workers_that_were_measured_once_nobody_knows_which_is_usual():
    evidence = site(hosts=2).evidence()
    bare = [replace_all(one, step=None) for one in evidence.workers]
    bare = replace_all(evidence, workload=None, workers=tuple(bare))
    assert diagnose(replace_all(bare, workers=_half_as_fast(bare, 1))).healthy


def _half_as_fast(evidence, rank):
    return tuple(
        replace_all(one, speed=0.5 if one.rank == rank else 1.0)
        for one in evidence.workers
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda e: replace_all(e, paths=e.paths[1:]), "every path"),
        (lambda e: replace_all(e, workers=e.workers[1:]), "ranks"),
        (lambda e: replace_all(e, workers=e.workers[:-1]), "equally many"),
        (lambda e: replace_all(e, paths=(), workers=e.workers[:1]), "two or more"),
    ],
)
def test_evidence_that_cannot_be_is_refused(spoil, words):
    with pytest.raises(UsageError, match=words):
        diagnose(spoil(site().evidence()))
