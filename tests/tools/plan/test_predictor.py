"""Predictions in several processes: the same answers, one limit, and no process that is left."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import Future
from functools import partial

import msgspec
import pytest
import torch

from paceline.cluster import Workload, uniform_cluster
from paceline.methods import METHODS
from paceline.methods.bsp import BSP
from paceline.tools.plan import predict as predict_module
from paceline.tools.plan.estimates import Infeasible
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.predictor import IN_FLIGHT, Predictor
from tests.support.hanging import SECONDS
from tests.support.processes import python_path
from tests.support.tables import sampled
from tests.tools.plan.helpers import FakePredictor, cluster, layers, row

PLANS = """
import os, signal, sys
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.predictor import Predictor
from tests.tools.plan.helpers import cluster, layers

if __name__ == "__main__":
    # Under nohup it would be ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    job = TrainingJob(cluster=cluster(), workload=layers())
    with Predictor(2) as predictor:
        asked = [(job, spec) for spec in ["bsp", "bsp:buckets=ddp"] * 4]
        answers = list(predictor.predict(asked, "short"))
        print(*predictor._pool._processes, flush=True)  # idle by now: they wait for more
        sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_of_the_pool_outlives_the_one_that_plans(how, tmp_path):
    script = tmp_path / "plans.py"
    script.write_text(PLANS)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path(os.getcwd())},
    ) as plans:
        children = [int(word) for word in plans.stdout.readline().split()]
        ends = [os.pidfd_open(child) for child in children]
        plans.send_signal(how)
        try:
            assert len(children) == 2
            for end in ends:
                # One may import torch still: it ends when it comes to its first task.
                assert select.select([end], [], [], SECONDS)[0], "a process is left"
        finally:
            for child, end in zip(children, ends, strict=True):
                if not select.select([end], [], [], 0)[0]:
                    os.kill(child, signal.SIGKILL)
                os.close(end)


@pytest.mark.slow
def test_several_processes_give_the_same_answers_up_to_the_same_limit():
    job = TrainingJob(cluster=cluster(2), workload=layers(1))
    names = ["single", "none of these", "wfbp", "ddp", "single", "wfbp", "ddp"]
    asked = [(job, f"bsp:buckets={name}") for name in names]
    here = Predictor()
    answers = list(here.predict(asked, "short"))
    assert isinstance(answers[1], Infeasible)
    assert here.events == sum(one.events for one in answers if one is not answers[1])
    with Predictor(2) as there:
        assert list(there.predict(asked, "short")) == answers
        assert there.events == here.events
        # What lies beyond the limit is dropped, and does not count.
        middle = there.events + sum(one.events for one in answers[2:4])
        cut = list(there.predict(asked, "short", until=middle))
        assert cut == answers[: len(cut)]
        again = Predictor()
        again.events = here.events
        assert list(again.predict(asked, "short", until=middle)) == cut
        assert 2 < len(cut) < len(asked)
        assert again.events == there.events >= middle


def test_the_limit_ends_predictions_and_the_last_one_may_exceed_it():
    asked = [(None, spec) for spec in "abcdef"]
    predictor = FakePredictor(lambda spec, fidelity: row(spec), 25, each=10)
    assert [one.spec for one in predictor.predict(asked, until=15)] == ["a", "b"]
    assert predictor.events_left == 5
    assert [one.spec for one in predictor.predict(asked)] == ["a"]
    assert predictor.events == 30
    assert predictor.events_left == 0
    assert list(predictor.predict(asked)) == []
    assert len(list(predictor.predict(asked, until=math.inf))) == len(asked)


class Submitted:
    """A pool of processes that notes what it is given, in its order."""

    def __init__(self):
        self.specs = []

    def submit(self, function, job, spec):
        self.specs.append(spec)
        future = Future()
        future.set_result((row(spec), 10))
        return future


def with_pool(pool, processes=2):
    predictor = Predictor(processes)
    predictor._pool = pool  # no process of the real one has begun
    return predictor


def test_few_predictions_are_in_flight():
    pool = Submitted()
    predictor = with_pool(pool)
    asked = [(None, spec) for spec in "abcdefghij"]
    answers = predictor.predict(asked)
    for number, spec in enumerate("abcdefghij", 1):
        assert next(answers).spec == spec
        assert "".join(pool.specs) == "abcdefghij"[: number + 2 * IN_FLIGHT]
    assert next(answers, None) is None
    assert predictor.events == 100


def test_rows_that_a_script_has_registered_are_predicted_where_they_are_known(
    monkeypatch,
):
    class Own(BSP):
        name = "own"

    monkeypatch.setitem(METHODS, "own", Own)
    pool = Submitted()
    job = TrainingJob(cluster=cluster(2), workload=layers(1))
    (said,) = with_pool(pool).predict([(job, "own:buckets=ddp")], "short")
    assert pool.specs == []
    assert said.step_seconds > 0


class OfTheScript(torch.optim.SGD):
    """It can be pickled; but another process may not find its module."""


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        partial(OfTheScript, lr=0.1),
    ],
)
def test_an_optimizer_of_the_scripts_own_is_predicted_here(optimizer):
    pool = Submitted()
    job = TrainingJob(cluster=cluster(2), workload=layers(1), optimizer=optimizer)
    (said,) = with_pool(pool).predict([(job, "bsp:buckets=ddp")], "short")
    assert pool.specs == []
    assert said.step_seconds > 0


@pytest.mark.parametrize("spec", sampled(3, ["dear", "bsp", "local-sgd:sync_every=4"]))
def test_representatives_of_many_workers_have_the_figures_of_all(spec, monkeypatch):
    load = Workload(
        names=("a", "b", "c"),
        sizes=(4_000_000, 1_000_000, 4000),
        forward=(0.01,) * 3,
        backward=(0.02,) * 3,
        update=0.0,
    )
    job = TrainingJob(cluster=uniform_cluster(20, "1gbit", "50us"), workload=load)
    few = predict_module.predict(job, spec)
    monkeypatch.setattr(predict_module, "_few_are_enough", lambda job, run: False)
    full = predict_module.predict(job, spec)
    # Ranks of a ring send a byte more or less where a message has no whole parts.
    assert few.bytes_sent == pytest.approx(full.bytes_sent, rel=1e-6)
    # Few workers take fewer events.
    assert few.events < full.events
    same = {"bytes_sent": full.bytes_sent, "events": full.events}
    assert msgspec.structs.replace(few, **same) == full
