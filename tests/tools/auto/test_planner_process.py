"""The planner's process: what it is asked, and what it answers."""

import os
import re

import msgspec
import pytest
import torch

from paceline.cluster import cluster_toml
from paceline.tools.auto import planner_process
from paceline.tools.auto.planner_process import (
    Answer,
    PlannerProcess,
    Predicted,
    Question,
    answer,
    optimizer_like,
    worth_trying,
)
from tests.support import forked
from tests.support.processes import python_path
from tests.tools.plan import helpers
from tests.tools.plan.helpers import cluster, layers

MORE_THAN_A_PIPE_HOLDS = 2**16


def question(**changes):
    known = {
        "cluster": cluster_toml(cluster(2), exact=True),
        "workload": msgspec.to_builtins(layers(2)),
        "consistency": "exact",
        "present": "bsp",
        "max_events": 4000,
    }
    return Question(**(known | changes))


def row(spec, seconds, consistency="exact", **others):
    return helpers.row(spec, consistency, seconds, **others)


@pytest.mark.slow
def test_what_a_slow_network_wants():
    found = answer(question(consistency="delayed"))
    assert not found.fault
    assert found.present.spec == "bsp"
    assert found.best
    assert {one.consistency for one in found.best} <= {"exact", "delayed"}
    assert all(one.seconds < 0.97 * found.present.seconds for one in found.best)
    assert found.next.consistency == "lossy"
    assert found.lower_bound > 0


@pytest.mark.slow
def test_a_refused_method_is_not_proposed():
    refused = {"priority": "not here", "dear": "nor this"}
    found = answer(question(refused=refused, max_events=2000))
    assert found.candidates
    assert not {one.spec.partition(":")[0] for one in found.best} & set(refused)


PRESENT = Predicted(spec="bsp", consistency="exact", seconds=1.0)


def chosen(rows, allowed=("exact", "delayed", "lossy")):
    plan = helpers.made(*sorted(rows, key=lambda row: row.step_seconds))
    return [row.spec for row in worth_trying(plan, allowed, PRESENT)]


def test_only_what_is_clearly_faster_is_tried_the_fastest_first():
    rows = [row("dear", 0.8), row("priority", 0.7), row("hierarchical", 0.99)]
    assert chosen(rows) == ["priority", "dear"]
    assert chosen([row("dear", 0.98)]) == []


def test_of_two_alike_the_stronger_promise_comes_first():
    rows = [row("osp", 0.7, "delayed"), row("dear", 0.71)]
    assert chosen(rows) == ["dear", "osp"]
    assert chosen([row("osp", 0.7, "delayed"), row("dear", 0.75)]) == ["osp", "dear"]


def test_two_of_one_kind_are_one():
    rows = [row("dear", 0.7), row("dear:buckets=wfbp", 0.72), row("priority", 0.8)]
    assert chosen(rows) == ["dear", "priority"]


def test_what_was_cut_or_not_allowed_or_not_advised_is_not_tried():
    rows = [
        row("dear", 0.5, rejected=True),
        row("priority", 0.99),
        row("bsp:compression=top-k", 0.40, "lossy", bytes_sent=1.0),
        row("bsp:compression=int8", 0.45, "lossy", bytes_sent=9.0),
        row("diloco", 0.1, "local"),
    ]
    assert chosen(rows) == ["bsp:compression=int8"]


def test_where_the_limit_cuts_a_class_its_short_runs_count():
    rows = [row("bsp:compression=int8", 0.4, "lossy", rejected=True), row("dear", 0.99)]
    assert chosen(rows) == ["bsp:compression=int8"]
    hopeful = row("osp", 0.5, "lossy", fidelity="short")
    rows = [hopeful, row("bsp:compression=int8", 0.6, "lossy"), row("dear", 0.99)]
    assert chosen(rows) == ["osp"]


def test_the_optimizer_is_like_the_trainings():
    asked = question(optimizer="Adam", hyperparameters={"lr": 0.1, "betas": [0.5, 0.9]})
    made = optimizer_like(asked)([torch.nn.Parameter(torch.zeros(1))])
    assert isinstance(made, torch.optim.Adam)
    assert made.defaults["betas"] == (0.5, 0.9)
    for asked in (
        question(),
        question(optimizer="Nothing"),
        question(optimizer="SGD", hyperparameters={"lr": "much", "x": 1}),
    ):
        made = optimizer_like(asked)([torch.nn.Parameter(torch.zeros(1))])
        assert isinstance(made, torch.optim.SGD)


ASKED = """
import os, sys
from paceline.tools.auto import planner_process

reading, _ = os.pipe()  # the worker lives: nobody closes its end
os.dup2(reading, 0)
sys.argv[1] = str(os.open(sys.argv[1], os.O_RDONLY))
planner_process.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (question(cluster="[[rack]]"), "is missing"),
        (question(workload={"names": 1}), "ValidationError"),
    ],
)
def test_its_failures_are_answers(asked, words, tmp_path):
    (tmp_path / "asks.py").write_text(ASKED)
    (tmp_path / "question").write_bytes(msgspec.json.encode(asked))
    done = forked.run(["asks.py", "question"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout, type=Answer)
    assert not found.best
    assert re.search(words, found.fault)


def test_a_process_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(planner_process.sys, "executable", "/nowhere/python")
    process = PlannerProcess(question())
    assert process.is_over
    assert "cannot be started" in process.answer().fault


DEAF = """
import os, signal
os.close(0)  # a writer would learn of it, instead of waiting for ever
signal.pause()
"""


def test_asking_does_not_wait_for_who_never_reads(monkeypatch, tmp_path):
    """Worker 0 asks between two steps: more than a pipe holds must not wait for torch's import."""
    (tmp_path / "deaf.py").write_text(DEAF)
    monkeypatch.setattr(planner_process, "MODULE", "deaf")
    work = msgspec.to_builtins(layers(2000, megabytes=100.0))
    asked = question(workload=work)
    assert len(msgspec.json.encode(asked)) > MORE_THAN_A_PIPE_HOLDS
    process = PlannerProcess(asked, {**os.environ, "PYTHONPATH": python_path(tmp_path)})
    try:
        assert not process.is_over
    finally:
        process.end()


@pytest.mark.slow
def test_the_process_answers_a_large_question_however_long_it_takes(monkeypatch):
    """In virtual time, where `wait` is: what runs later must not depend on this machine's load."""
    monkeypatch.setattr(planner_process, "LEAST_PATIENCE", 0.0)
    monkeypatch.setattr(planner_process, "PATIENCE", 0.0)
    work = msgspec.to_builtins(layers(1000, megabytes=4.0))
    asked = question(workload=work, max_events=2000)
    assert len(msgspec.json.encode(asked)) > MORE_THAN_A_PIPE_HOLDS
    process = PlannerProcess(asked)
    process.wait()
    assert process.is_over
    found = process.answer()
    assert not found.fault
    assert found.present.spec == "bsp"
    assert found.candidates


@pytest.mark.slow
def test_it_ends_with_its_worker():
    process = PlannerProcess(question(max_events=10**9))
    assert not process.is_over
    process._process.stdin.close()  # which the kernel does when the worker dies
    process.wait()
    assert process.answer().fault
