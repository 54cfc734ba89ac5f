"""Each invariant has a control: a job that violates it, and is caught. A seed is the same job everywhere."""

import re
from dataclasses import replace

import pytest

from tests.chaos import trial
from tests.chaos.campaign import run
from tests.chaos.cases import Case, Fault, applies_each_gradient_once, draw, final_model
from tests.chaos.invariants import NAMES_A_PROCESS

DIES = (Fault("KILL", "worker 1", "step 12", 0.0),)
CONTROLS: dict[str, tuple[Case, str]] = {
    "ends early": (Case(0, "bsp", 2), "not every worker has a result"),
    "hangs": (Case(0, "bsp", 2), "^hangs"),
    "leaves a process": (Case(0, "bsp", 2), "^left: process .*sleep"),
    "leaves a file": (Case(0, "bsp", 2), "^left: .*'left'"),
    "counts a gradient twice": (Case(0, "bsp", 2), "each worker did 40 steps"),
    "replicas differ": (Case(0, "bsp", 2), "replicas differ"),
}
SLOW_CONTROLS = {
    "refuses to start again": (
        Case(0, "asp", 2, survive=True, faults=DIES),
        "did not survive",
    ),
    "counts a gradient twice": (Case(0, "asp", 2, survive=True), "counts twice"),
    "loses a gradient": (Case(0, "backup", 2, survive=True), "a gradient is lost"),
    "truncates its checkpoint": (
        Case(0, "bsp", 2, save_every=3, faults=DIES),
        "going on: status 1",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("defect", CONTROLS)
def test_a_job_with_a_defect_is_caught(defect, monkeypatch):
    check_caught(defect, *CONTROLS[defect], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("defect", SLOW_CONTROLS)
def test_a_job_that_restarts_and_has_a_defect_is_caught(defect, monkeypatch):
    check_caught(defect, *SLOW_CONTROLS[defect], monkeypatch)


def check_caught(defect, case, violation, monkeypatch):
    monkeypatch.setattr(trial, "ORPHANS_END_SECONDS", 2.0)
    seconds = 8.0 if defect == "hangs" else 60.0
    outcome = run(replace(case, defect=defect), end_seconds=seconds)
    assert any(re.search(violation, found) for found in outcome.violations), outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(0, "bsp", 2, save_every=3), Case(0, "asp", 2, True)]
)
def test_the_same_job_without_a_defect_keeps_all(case):
    outcome = run(replace(case, faults=DIES))
    assert outcome.violations == [], outcome
    assert outcome.landed == list(DIES)


def test_an_error_must_name_a_process():
    assert NAMES_A_PROCESS.search("Traceback\npaceline: rank 1 died: SIGKILL\n")
    assert not NAMES_A_PROCESS.search("RuntimeError: Connection reset by peer\n")


def test_a_seed_draws_the_same_case_each_time():
    assert [draw(seed) for seed in (1, 2)] == [draw(seed) for seed in (1, 2)]


def test_the_simulator_tells_which_trainings_count():
    assert applies_each_gradient_once(Case(0, "asp", 3))
    assert not applies_each_gradient_once(Case(0, "asp:compression=ef-sign", 3))
    assert applies_each_gradient_once(Case(0, "backup:wait_for=9", 3)) is None


def test_the_simulator_tells_the_final_model_where_it_does_not_depend_on_time():
    assert final_model(Case(0, "bsp", 3)) is not None
    assert final_model(Case(0, "osp", 3)) is None
