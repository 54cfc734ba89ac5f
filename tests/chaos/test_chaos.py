"""Each invariant has a control: a job that violates it, and is caught. A seed is the same job everywhere."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.chaos import trial
from tests.chaos.campaign import run
from tests.chaos.cases import (
    EMULATED,
    HARMLESS,
    SERVED,
    Case,
    Fault,
    applies_each_gradient_once,
    draw,
    final_model,
)
from tests.chaos.invariants import NAMES_A_PROCESS, error_names_the_process

DIES = (Fault("KILL", "worker 1", "step 12", 0.0),)
SURVIVING = Case(0, "asp", 2, survive=True)
SAVING = Case(0, "bsp", 2, save_every=3)
CONTROLS = [
    ("ends early", Case(0, "bsp", 2), "not every worker has a result"),
    ("hangs", Case(0, "bsp", 2), "^hangs"),
    ("leaves a process", Case(0, "bsp", 2), "^left: process .*sleep"),
    ("leaves a file", Case(0, "bsp", 2), "^left: .*'left'"),
    ("counts a gradient twice", Case(0, "bsp", 2), "each worker did 40 steps"),
    ("counts a gradient twice", Case(0, "bsp:compression=ef-sign", 2), "simulator's"),
    ("replicas differ", Case(0, "bsp", 2), "replicas differ"),
    ("refuses to start again", replace(SURVIVING, faults=DIES), "did not survive"),
    ("counts a gradient twice", SURVIVING, "counts twice"),
    ("loses a gradient", Case(0, "backup", 2, survive=True), "a gradient is lost"),
    (
        "truncates its checkpoint",
        replace(SAVING, faults=DIES),
        "going on: status 1",
    ),
]
"""By defect: the case, and the violation."""


@pytest.mark.slow
@pytest.mark.parametrize(("defect", "case", "violation"), CONTROLS)
def test_a_job_with_a_defect_is_caught(defect, case, violation, monkeypatch):
    monkeypatch.setattr(trial, "ORPHANS_END_SECONDS", 2.0)
    seconds = 8.0 if defect == "hangs" else 60.0
    outcome = run(replace(case, defect=defect), end_seconds=seconds)
    assert any(re.search(violation, found) for found in outcome.violations), outcome


EMULATED_CASE = Case(0, "bsp:collective=rina", 2, launcher=EMULATED, racks=1)
SERVES = Case(0, "ssp", 2, survive=True, launcher=SERVED, serves=1)
GROUPS = Case(0, "gssp:measure_steps=5", 3, save_every=3)
"""Equal workers: all are one group, and the other groups' servers are idle."""
BITES = [
    (SAVING, Fault("FULL", "disk", "step 12", 0.0, 20.0), "No space left"),
    (SAVING, Fault("CLOSE", "stdout", "step 12", 0.0), ""),
    (SAVING, Fault("FILES", "worker 1", "step 12", 0.0, 20.0), "Too many open files"),
    (EMULATED_CASE, Fault("CUT", "host 1", "step 0", 0.0, 0.3), "repair host 1"),
    (GROUPS, Fault("KILL", "service 2", "step 6", 0.0), "server"),
    (EMULATED_CASE, Fault("KILL", "service 0", "step 5", 0.0), "emulated cluster"),
    (EMULATED_CASE, Fault("KILL", "service 1", "step 5", 0.0), "around the ring"),
    (SERVES, Fault("KILL", "service 0", "step 12", 0.0), "is lost"),
    (
        replace(SERVES, survive=False),
        Fault("KILL", "service 1", "step 12", 0.0),
        "server 0",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fault", "printed"), BITES)
def test_a_fault_is_felt_and_all_holds(case, fault, printed):
    outcome = run(replace(case, faults=(fault,)), end_seconds=60)
    assert outcome.violations == [], outcome
    assert outcome.landed == [fault]
    assert printed in outcome.output
    completes = fault.kind in HARMLESS or "ring" in printed or case.survive
    assert outcome.status == 0 if completes else outcome.status > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [SAVING, SURVIVING])
def test_the_same_job_without_a_defect_keeps_all(case):
    outcome = run(replace(case, faults=DIES))
    assert outcome.violations == [], outcome
    assert outcome.landed == list(DIES)


def test_an_error_must_name_a_process():
    assert NAMES_A_PROCESS.search("Traceback\npaceline: rank 1 died: SIGKILL\n")
    assert not NAMES_A_PROCESS.search("RuntimeError: Connection reset by peer\n")


@pytest.mark.parametrize(("named", "wrong"), [(0, 1), (1, 0)])
def test_an_error_must_name_the_worker_that_was_killed(named, wrong):
    job = SimpleNamespace(status=1, stderr=f"paceline: rank {named} died: SIGKILL\n")
    ended = SimpleNamespace(
        case=SAVING, job=job, landed=list(DIES), has=lambda *_: False
    )
    assert len(list(error_names_the_process(ended))) == wrong


def test_a_seed_draws_the_same_case_each_time():
    assert [draw(seed) for seed in (1, 2)] == [draw(seed) for seed in (1, 2)]


def test_the_simulator_tells_which_trainings_count():
    assert applies_each_gradient_once(Case(0, "asp", 3))
    assert not applies_each_gradient_once(Case(0, "asp:compression=ef-sign", 3))
    assert applies_each_gradient_once(Case(0, "backup:wait_for=9", 3)) is None


def test_the_simulator_tells_the_final_model_where_it_does_not_depend_on_time():
    assert final_model(Case(0, "bsp", 3)) is not None
    assert final_model(Case(0, "asp:compression=ef-sign", 3)) is None
