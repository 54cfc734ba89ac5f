"""Candidates that code, once it is known what that takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import script_plan
from paceline.cli.script_plan import _busy_cores, _with_codes
from paceline.cluster import Processor
from paceline.cluster.profiling import coding_times_of_busy
from paceline.cluster.workload import CompressorTimes
from paceline.errors import UsageError
from paceline.runtimes.simulated import profile_cache
from paceline.runtimes.simulated.profile_cache import measure_compressors
from paceline.tools.plan import plan
from paceline.tools.plan.compression_times import (
    code_of,
    codes_in_front,
    revised,
    seconds_of,
)
from paceline.tools.plan.estimates import Infeasible
from paceline.tools.plan.merged_tensors import FEW
from paceline.tools.plan.predict import TrainingJob, predict
from paceline.tools.plan.prediction_cost import Budget
from tests.tools.plan.helpers import cluster, layers
from tests.tools.plan.test_more import made, row

SCRIPT = """
import torch
import paceline

paceline.init()
model = torch.nn.Linear(64, 64)
optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
"""


def test_a_slow_code_falls_behind_once_it_is_measured():
    job = TrainingJob(cluster=cluster(2), workload=layers(1))
    made = plan(job.cluster, job.workload, allowed=("lossy",), budget_seconds=2.0)
    codes = codes_in_front(made)
    front = made.fastest["lossy"]
    assert codes[0] == code_of(front.spec)
    assert front.estimated_compression
    slow = {codes[0]: CompressorTimes(encode=1.0, decode=1.0, decode_per_worker=0.0)}
    again, knowing = revised(made, job, slow)
    row = again.estimate(front.spec)
    assert row is not None
    assert not row.estimated_compression
    assert row.step_seconds > 2
    assert again.fastest["lossy"].spec != front.spec
    seconds = [one.step_seconds for one in again.estimates]
    assert seconds == sorted(seconds)
    said = predict(knowing, front.spec, row.fidelity)
    assert said.step_seconds == row.step_seconds
    assert knowing == replace(job, workload=replace(job.workload, coding=slow))


def test_codes_are_measured_on_the_scripts_own_gradient(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = measure_compressors(str(script), [], [code_of("bsp:compression=int8")])
    (times,) = found.values()
    assert times.encode > 0


@pytest.mark.slow
def test_codes_are_measured_on_as_many_cores_as_have_such_work(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code = code_of("bsp:compression=int8")
    ((full, times),) = measure_compressors(str(script), [], [code], 2).items()
    assert full == code
    assert times.encode > 0


@pytest.mark.slow
def test_nobody_waits_for_a_core_that_has_nothing_to_code(tmp_path):
    with pytest.raises(UsageError, match="no gradients were seen"):
        coding_times_of_busy([code_of("bsp:compression=int8")], str(tmp_path), 2)


@pytest.mark.parametrize(
    ("shared", "workers", "busy"),
    [(None, 4, 1), (1, 4, 1), (2, 4, 2), (64, 4, 3), (2, 1, 1)],
)
def test_only_hosts_that_share_cores_code_on_all_of_them_at_once(
    monkeypatch, shared, workers, busy
):
    monkeypatch.setattr(script_plan, "processes", lambda: 3)
    processor = Processor(message=1e-6, cores=shared)
    assert _busy_cores(replace(cluster(workers), processor=processor)) == busy
    assert _busy_cores(cluster(workers)) == 1


def test_codes_are_measured_as_far_as_the_budget_goes(monkeypatch):
    """And what they are predicted again for is counted, in the plan and in the budget."""
    job = TrainingJob(cluster=cluster(2), workload=layers(2))
    first, second, third = (
        row(f"bsp:compression={name}", "lossy", estimated_compression=True)
        for name in ("int8", "int4", "ef-sign")
    )
    plan_ = made(first, second, third)
    codes = [code_of(one.spec) for one in (first, second, third)]
    prices = [seconds_of(plan_, job, [code]) for code in codes]
    measured = []

    def measure(script, arguments, codes, cores):
        measured.extend(codes)
        free = CompressorTimes(encode=0.0, decode=0.0, decode_per_worker=0.0)
        return dict.fromkeys(codes, free)

    def predict_(job, specs, *, short):
        return iter([row(spec, "lossy") for spec in specs])

    monkeypatch.setattr(profile_cache, "measure_compressors", measure)
    budget = Budget(sum(prices[:2]) + 0.5 * min(prices))
    again, _ = _with_codes(
        plan_, job, Path("train.py"), [], budget, lambda *_: None, predict_
    )
    assert measured == codes[:2]
    assert budget.left == pytest.approx(0.5 * min(prices))
    assert again.spent_seconds == pytest.approx(sum(prices[:2]))
    assert [one.estimated_compression for one in again.estimates].count(True) == 1


def test_rows_that_were_cut_stay_those_of_few_tensors():
    job = TrainingJob(cluster=cluster(2), workload=layers(2 * FEW))
    cut = row(
        "bsp:compression=int8", "lossy", fidelity="short", estimated_compression=True
    )
    full = row("bsp:buckets=wfbp,compression=int8", "lossy", estimated_compression=True)
    coding = {
        code_of(cut.spec): CompressorTimes(
            encode=0.0, decode=0.0, decode_per_worker=0.0
        )
    }
    asked = {}

    def predict(job, specs, *, short):
        asked[short] = len(job.workload.names), list(specs)
        return iter(
            [Infeasible(spec="", consistency="lossy", reason="not run")] * len(specs)
        )

    revised(made(cut, full), job, coding, predict)
    assert asked == {True: (FEW, [cut.spec]), False: (2 * FEW, [full.spec])}
    assert seconds_of(made(cut), job, coding) < seconds_of(made(full), job, coding)
