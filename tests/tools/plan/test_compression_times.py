"""Measured compression times, and candidates that are predicted again with them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import script_plan
from paceline.cli.script_plan import _busy_cores, _with_measured_compression
from paceline.cluster import Processor
from paceline.cluster.profiling import coding_times_of_busy
from paceline.cluster.workload import CompressorTimes
from paceline.errors import UsageError
from paceline.runtimes.simulated import profile_cache
from paceline.runtimes.simulated.profile_cache import measure_compressors
from paceline.tools.plan import plan
from paceline.tools.plan.predict import FEW, TrainingJob, predict
from paceline.tools.plan.predictor import Predictor
from paceline.tools.plan.search import (
    compressor_of,
    leading_compressors,
    refine_compression_times,
)
from tests.tools.plan.helpers import FakePredictor, cluster, layers, made, row

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


@pytest.mark.slow
def test_a_slow_code_falls_behind_once_it_is_measured():
    job = TrainingJob(cluster=cluster(2), workload=layers(1))
    plan_ = plan(job.cluster, job.workload, allowed=("lossy",), max_events=10_000)
    codes = leading_compressors(plan_)
    front = plan_.fastest["lossy"]
    assert codes[0] == compressor_of(front.spec)
    assert front.estimated_compression
    slow = {codes[0]: CompressorTimes(encode=1.0, decode=1.0, decode_per_worker=0.0)}
    again, knowing = refine_compression_times(plan_, job, slow)
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
    found = measure_compressors(
        str(script), [], [compressor_of("bsp:compression=int8")]
    )
    (times,) = found.values()
    assert times.encode > 0


@pytest.mark.slow
def test_codes_are_measured_on_as_many_cores_as_have_such_work(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code = compressor_of("bsp:compression=int8")
    ((full, times),) = measure_compressors(str(script), [], [code], 2).items()
    assert full == code
    assert times.encode > 0


@pytest.mark.slow
def test_nobody_waits_for_a_core_that_has_nothing_to_code(tmp_path):
    with pytest.raises(UsageError, match="no gradients were seen"):
        coding_times_of_busy([compressor_of("bsp:compression=int8")], str(tmp_path), 2)


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


FREE = CompressorTimes(encode=0.0, decode=0.0, decode_per_worker=0.0)


@pytest.mark.parametrize(("most", "again"), [(math.inf, 3), (2, 2), (0, 0)])
def test_compressors_are_measured_where_a_prediction_can_follow(
    monkeypatch, most, again
):
    job = TrainingJob(cluster=cluster(2), workload=layers(2))
    specs = [f"bsp:compression={name}" for name in ("int8", "int4", "ef-sign")]
    plan_ = made(*(row(spec, "lossy", estimated_compression=True) for spec in specs))
    measured = []

    def measure(script, arguments, names, cores):
        measured.extend(names)
        return dict.fromkeys(names, FREE)

    monkeypatch.setattr(profile_cache, "measure_compressors", measure)
    predictor = FakePredictor(lambda spec, fidelity: row(spec, "lossy"), most)
    found, _ = _with_measured_compression(
        plan_, job, Path("train.py"), [], predictor, lambda *_: None
    )
    assert measured == [compressor_of(spec) for spec in specs if most]
    assert found.events == predictor.events == again
    left = [one.estimated_compression for one in found.estimates]
    assert left.count(True) == len(specs) - again


def test_a_short_run_stays_a_short_run():
    job = TrainingJob(cluster=cluster(2), workload=layers(2 * FEW))
    short = row(
        "bsp:compression=int8", "lossy", fidelity="short", estimated_compression=True
    )
    full = row("bsp:buckets=wfbp,compression=int8", "lossy", estimated_compression=True)
    predictor = FakePredictor(lambda spec, fidelity: row(spec, "lossy"))
    found, _ = refine_compression_times(
        made(short, full), job, {compressor_of(short.spec): FREE}, predictor
    )
    asked = [(spec, fidelity) for _, spec, fidelity in predictor.asked]
    assert asked == [(short.spec, "short"), (full.spec, "full")]
    assert [one.fidelity for one in found.estimates] == ["short", "full"]
    cheap, dear = Predictor(), Predictor()
    list(cheap.predict([(job, short.spec)], "short"))
    list(dear.predict([(job, short.spec)], "full"))
    assert cheap.events < dear.events
