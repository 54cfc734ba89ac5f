"""What coding takes in virtual time, and what codes of stand-ins weigh there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Workload
from paceline.cluster.cluster import Processor
from paceline.cluster.workload import CompressorTimes
from paceline.compression import COMPRESSORS, full_spec, make
from paceline.errors import WorkerFailedError
from paceline.runtimes.simulated import ComputeModel
from paceline.runtimes.simulated.compute import UnmeasuredCodeError
from paceline.testing import inspect
from tests.support.simulations import cluster, rack, run, run_on, simulation
from tests.support.tables import crossed

TIMES = CompressorTimes(encode=3.0, decode=1.0, decode_per_worker=0.25)
STEPS = 3
MEANS = STEPS + 1
"""One more where all find out, in `finish`, that nobody trains any longer."""


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(48, 64), torch.nn.Tanh(), torch.nn.Linear(64, 40)
    )


def workload(**coding: CompressorTimes) -> Workload:
    named = list(model().named_parameters())
    return Workload(
        names=tuple(name for name, _ in named),
        sizes=tuple(4 * p.numel() for _, p in named),
        forward=(0.0,) * len(named),
        backward=(0.0,) * len(named),
        shapes=tuple(tuple(p.shape) for _, p in named),
        coding=coding,
    )


def train(trained: torch.nn.Module, steps: int = STEPS, **options: Any) -> Any:
    optimizer = paceline.distribute(
        trained, torch.optim.SGD(trained.parameters(), lr=0.01), **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        if hasattr(trained, "workload"):
            trained(torch.ones(8)).backward()
        else:
            torch.manual_seed(step)
            trained(torch.randn(8, 48)).square().mean().backward()
        optimizer.step()
    optimizer.finish()
    return inspect(optimizer).recorder


def coding_seconds(
    given: ComputeModel, workers: int | Cluster, **options: Any
) -> float:
    """Of worker 0, in all steps."""
    runtime = simulation(workers, compute=given, trace=True)
    run_on(runtime, lambda rank: train(model(), **options) and None)
    spans = [span for kept in runtime.result.kept for span in kept.spans]
    return sum(
        span.end - span.start
        for span in spans
        if span.name == "coding" and span.worker == 0
    )


@pytest.mark.parametrize("buckets", ["wfbp", "single"])
@pytest.mark.parametrize("workers", [2, 4])
def test_a_step_is_charged_what_the_workload_says(workers, buckets):
    compute = ComputeModel(workload=workload(**{full_spec(make("bf16")): TIMES}))
    seconds = coding_seconds(compute, workers, compression="bf16", buckets=buckets)
    assert seconds == pytest.approx(MEANS * (3.0 + 1.0 + workers * 0.25))


@pytest.mark.parametrize(
    ("cores", "oversubscription"), [(None, 1.0), (8, 1.0), (2, 2.0), (1, 4.0)]
)
def test_workers_that_share_cores_code_in_turn(cores, oversubscription):
    compute = ComputeModel(workload=workload(**{full_spec(make("bf16")): TIMES}))
    shared = replace(cluster(rack(4)), processor=Processor(cores=cores))
    seconds = coding_seconds(compute, shared, compression="bf16", buckets="single")
    assert seconds == pytest.approx(oversubscription * MEANS * (3.0 + 1.0 + 4 * 0.25))


def test_dense_first_steps_are_no_other_compressor():
    compute = ComputeModel(workload=workload(**{full_spec(make("bf16")): TIMES}))
    options = {"compression": "bf16:warmup_steps=9", "buckets": "single"}
    assert coding_seconds(compute, 2, **options) == pytest.approx(MEANS * 4.5)


def test_bytes_are_charged_where_nobody_has_measured():
    compute = ComputeModel(workload=workload(), memory=1e6)
    runtime = simulation(2, compute=compute)
    run_on(runtime, lambda rank: train(model(), compression="bf16") and None)
    (sentence,) = runtime.result.estimated_compressors
    assert "paceline profile SCRIPT --compression bf16:error_feedback=false" in sentence
    before, after = make("bf16").memory_passes(2)
    seconds = coding_seconds(compute, 2, compression="bf16", buckets="single")
    whole = sum(workload().sizes)
    assert seconds == pytest.approx(MEANS * (before + after) * whole / 1e6)


def test_a_kept_profile_that_does_not_say_it_is_stale():
    compute = ComputeModel(workload=workload(), cached=True)
    with pytest.raises(WorkerFailedError) as caught:
        coding_seconds(compute, 2, compression="bf16")
    assert isinstance(caught.value.__cause__, UnmeasuredCodeError)
    assert coding_seconds(compute, 2) == 0  # nothing is coded
    assert coding_seconds(compute, 1, compression="bf16") == 0


def test_coding_takes_time_also_beside_a_script_that_paces_itself():
    compute = ComputeModel(workload=workload(**{full_spec(make("bf16")): TIMES}))

    def body(rank: int) -> float:
        paceline.pace(10.0)
        start = paceline.now()
        train(model(), compression="bf16", buckets="single")
        return paceline.now() - start

    compute = replace(compute, instead_of_pace=False)
    for seconds in run(2, body, compute=compute):
        assert seconds == pytest.approx(MEANS * 4.5, rel=0.01)


def bytes_of_steps(stands_in: bool, compression: str, buckets: str) -> list[int]:
    """Of the last two steps, of worker 0."""

    def body(rank: int) -> list[int]:
        trained = paceline.stand_in(workload()) if stands_in else model()
        recorder = train(trained, 6, compression=compression, buckets=buckets)
        return [step.bytes_sent for step in recorder.steps]

    return run(3, body)[0][-2:]


@pytest.mark.parametrize(
    ("name", "buckets"),
    [*crossed(2, COMPRESSORS, ["single"]), ("powersgd", "wfbp")],
)
def test_a_stand_in_sends_what_the_model_sends(name, buckets):
    compression = full_spec(make(name))
    if name != "none":
        compression += "," if ":" in compression else ":"
        compression += "warmup_steps=0"
    # A step of gd-top-k that ends an epoch sends all: the last two are one.
    compression = compression.replace("epoch_steps=0", "epoch_steps=2")
    real = bytes_of_steps(False, compression, buckets)
    stand_in = bytes_of_steps(True, compression, buckets)
    # Codes that take turns are stood for by their mean, in whole bytes.
    assert sum(stand_in) == pytest.approx(sum(real), rel=1e-3, abs=16)


def test_without_shapes_a_stand_in_is_another_matrix():
    """So that the test above can fail: a row is no matrix."""
    row = Workload(
        names=("a",), sizes=(4 * 4096,), forward=(0,), backward=(0,), shapes=((4096,),)
    )

    def shape(rank: int, given: Workload) -> Any:
        from paceline.interfaces.buckets import wire_shape

        return wire_shape(next(paceline.stand_in(given).parameters()))

    assert run(1, lambda rank: shape(rank, row)) == [(4096,)]
    unknown = replace(row, shapes=())
    assert run(1, lambda rank: shape(rank, unknown)) == [(64, 64)]
