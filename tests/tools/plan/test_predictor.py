"""Processes that predict beside the one that plans: none is left when that one is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from concurrent.futures import Future

import msgspec
import pytest

from paceline.cluster import Workload, uniform_cluster
from paceline.methods import METHODS
from paceline.methods.bsp import BSP
from paceline.tools.plan import predict as predict_module
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.predictor import _Pool
from tests.support.processes import python_path
from tests.tools.plan.helpers import cluster, layers

PLANS = """
import os, sys
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.predictor import in_processes
from tests.tools.plan.helpers import cluster, layers

if __name__ == "__main__":
    job = TrainingJob(cluster=cluster(), workload=layers())
    with in_processes(2) as predict:
        answers = list(predict(job, ["bsp", "bsp:buckets=ddp"] * 4, short=True))
        print(*predict._pool._processes, flush=True)  # idle by now: they wait for more
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
                assert select.select([end], [], [], 60)[0], "a process is left"
        finally:
            for child, end in zip(children, ends, strict=True):
                if not select.select([end], [], [], 0)[0]:
                    os.kill(child, signal.SIGKILL)
                os.close(end)


class Submitted:
    """A pool of processes that notes what it is given, in its order."""

    def __init__(self):
        self.specs = []

    def submit(self, function, asked):
        self.specs.append(asked[1])
        future = Future()
        future.set_result(asked[1])
        return future


def test_the_longest_prediction_begins_first_and_answers_keep_their_order():
    job = TrainingJob(cluster=cluster(8), workload=layers(8))
    pool = Submitted()
    asked = [(job, spec) for spec in ("bsp:buckets=ddp", "asp", "bsp:collective=tree")]
    assert list(_Pool(pool).each(asked)) == [spec for _, spec in asked]
    assert pool.specs == ["asp", "bsp:collective=tree", "bsp:buckets=ddp"]


def test_rows_that_a_script_has_registered_are_predicted_where_they_are_known(
    monkeypatch,
):
    class Own(BSP):
        name = "own"

    monkeypatch.setitem(METHODS, "own", Own)
    pool = Submitted()
    job = TrainingJob(cluster=cluster(2), workload=layers(1))
    (said,) = _Pool(pool)(job, ["own:buckets=ddp"], short=True)
    assert pool.specs == []
    assert said.step_seconds > 0


@pytest.mark.parametrize("spec", ["bsp", "dear", "local-sgd:sync_every=4"])
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
