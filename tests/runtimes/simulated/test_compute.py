"""Compute time: paced by the script, scaled by speed, spread by seeded jitter."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Workload
from paceline.cluster.cluster import Processor
from paceline.cluster.workload import CompressorTimes
from paceline.collectives.communicator import Communicator
from paceline.compression import COMPRESSORS, full_spec, make
from paceline.errors import UsageError, WorkerFailedError
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import ComputeModel
from paceline.runtimes.simulated.compute import (
    ModelCompute,
    SimulatedCompute,
    UnmeasuredCodeError,
)
from paceline.testing import inspect
from tests.support.simulations import cluster, rack, run, run_on, simulation
from tests.support.tables import crossed


def paced(rank: int) -> float:
    start = paceline.now()
    paceline.pace(1.0)
    return paceline.now() - start


def test_speed_scales_compute_time_per_worker() -> None:
    where = cluster(rack(3, speed=(1.0, 0.5, 4.0)), rack(1))
    assert run(where, paced) == [1.0, 2.0, 0.25, 1.0]


def test_jitter_is_seeded_and_of_each_worker() -> None:
    first = run(4, paced, compute=ComputeModel(jitter=0.1, seed=3))
    assert run(4, paced, compute=ComputeModel(jitter=0.1, seed=3)) == first
    assert len(set(first)) == 4
    other = run(4, paced, compute=ComputeModel(jitter=0.1, seed=4))
    assert not set(first) & set(other)


def test_a_workers_jitter_does_not_depend_on_how_many_there_are() -> None:
    model = ComputeModel(jitter=0.1, seed=3)
    assert run(8, paced, compute=model)[:2] == run(2, paced, compute=model)


def test_without_jitter_the_seed_does_not_matter() -> None:
    for seed in (0, 1):
        assert run(2, paced, compute=ComputeModel(seed=seed)) == [1.0, 1.0]


def drawn(jitter: float, steps: int) -> list[float]:
    """One worker's time for a second of work, step by step."""
    spent: list[float] = []
    compute = SimulatedCompute(
        ComputeModel(jitter=jitter, seed=1),
        0,
        1.0,
        lambda seconds, name, cores: spent.append(seconds),
    )
    for _ in range(steps):
        compute.pace(1.0)
        compute.step_ended()
    return spent


def test_every_step_draws_its_own_jitter() -> None:
    times = drawn(0.1, 2000)
    # Bounds: five standard errors of 2000 draws.
    assert statistics.mean(times) == pytest.approx(1.0, abs=5 * 0.1 / 2000**0.5)
    assert statistics.stdev(times) == pytest.approx(0.1, rel=5 / 4000**0.5)


def test_jitter_never_makes_time_negative() -> None:
    times = drawn(5.0, 500)
    assert all(time >= 0 for time in times)
    assert 0 in times  # draws below zero are cut off
    assert max(times) > 5


def test_forward_and_backward_are_spread_by_bytes() -> None:
    spent: list[tuple[str, float]] = []
    model = ComputeModel(forward=0.3, backward=0.6)
    worker = SimulatedCompute(
        model, 0, 0.5, lambda s, name, cores: spent.append((name, s))
    )
    compute = worker.of_model(["small", "large"], [100, 200], None)
    compute.forward(32, training=True)
    assert spent == []  # shows only with the first gradient, or a wait
    compute.gradient(1)
    compute.gradient(0)
    # Half the speed: twice the time. 200 of 300 bytes: 0.4 s of 0.6.
    expected = [("forward", 0.6), ("backward", 0.8), ("backward", 0.4)]
    assert spent == [(name, pytest.approx(seconds)) for name, seconds in expected]

    spent.clear()
    compute.forward(8, training=False)  # a quarter of the first training batch
    worker.flush()
    worker.flush()
    assert spent == [("forward", pytest.approx(0.15))]

    # A tensor that is used is waited for after what ran before it.
    spent.clear()
    compute.forward(32, training=True)
    for index in (0, 1):
        compute.used(index)
        compute.usable()
    assert spent == [("forward", pytest.approx(0.2))]
    worker.flush()
    assert spent[1:] == [("forward", pytest.approx(0.4))]


def test_a_script_that_paces_itself_is_charged_nothing_else() -> None:
    spent: list[str] = []
    worker = SimulatedCompute(
        ComputeModel(), 0, 1.0, lambda s, name, cores: spent.append(name)
    )
    compute = worker.of_model(["w"], [4], None)
    compute.forward(1, training=True)
    worker.pace(0.5)
    compute.gradient(0)
    compute.forward(1, training=True)
    worker.flush()
    assert spent == ["paced"]
    assert worker.paced_by_script


def test_pacing_shows_in_the_trace_and_in_the_result() -> None:
    runtime = simulation(cluster(rack(2, speed=(1.0, 0.5))), trace=True)
    run_on(runtime, paced)
    spans = [
        (s.worker, s.row, s.name, s.start, s.end)
        for kept in runtime.result.kept
        for s in kept.spans
    ]
    assert spans == [
        (0, "compute", "paced", 0.0, 1.0),
        (1, "compute", "paced", 0.0, 2.0),
    ]
    assert runtime.result.virtual_seconds == 2.0
    assert runtime.result.paced_by_script


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_pace_refuses_negative_time(seconds: float) -> None:
    with pytest.raises(WorkerFailedError, match=f"zero or more seconds, got {seconds}"):
        run(1, lambda rank: paceline.pace(seconds))


@pytest.mark.parametrize("key", ["forward", "backward", "jitter"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_compute_model_names_the_bad_option(key: str, value: float) -> None:
    with pytest.raises(
        UsageError, match=f"--{key}: expected zero or more, got {value}"
    ):
        ComputeModel(**{key: value})


@pytest.mark.parametrize(
    ("cores", "shared", "seconds"),
    [(1, 1, 3.0), (1, 2, 1.5), (1, None, 1.0), (0, 1, 1.0), (2, 4, 1.5)],
)
def test_computing_takes_longer_where_workers_outnumber_the_cores_they_share(
    cores: int, shared: int | None, seconds: float
) -> None:
    """Three workers that compute for one second a step, in one pass and an update."""
    where = replace(cluster(rack(3)), processor=Processor(cores=shared))
    workload = Workload(
        names=("weight", "bias"),
        sizes=(4, 4),
        forward=(0.25, 0.0),
        backward=(0.25, 0.25),
        update=0.25,
        cores=cores,
    )

    def train(rank: int) -> float:
        model = torch.nn.Linear(1, 1)
        optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters()))
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        taken = inspect(optimizer).recorder.steps[0].compute_seconds
        optimizer.finish()
        return taken

    spent = run(where, train, compute=ComputeModel(workload=workload))
    assert spent == [pytest.approx(seconds)] * 3


@pytest.mark.parametrize(
    ("cores", "shared", "seconds"),
    [(1, 1, 3.0), (1, 2, 1.5), (2, 2, 3.0), (1, 4, 1.0), (1, None, 1.0), (0, 1, 1.0)],
)
def test_what_follows_a_result_takes_as_long_as_if_all_workers_did_the_same(
    cores: int, shared: int | None, seconds: float
) -> None:
    where = replace(cluster(rack(3, 1e9, 0.0)), processor=Processor(cores=shared))

    def body(rank: int) -> float:
        runtime = join_runtime()
        comm = Communicator(runtime, "here", runtime.workers("here"))

        def decode() -> None:
            runtime.clock.compute.spend(1.0, "coding", cores)

        comm.all_reduce(torch.ones(1), "sum").then(decode).wait()
        return paceline.now()

    assert run(where, body) == [pytest.approx(seconds, abs=1e-3)] * 3


def test_waiting_for_a_batch_keeps_no_core_busy() -> None:
    where = replace(cluster(rack(3)), processor=Processor(cores=1))

    def body(rank: int) -> float:
        join_runtime().clock.charge(1.0, "input")
        return paceline.now()

    assert run(where, body) == [1.0] * 3


def test_a_stand_in_sleeps_its_times_out() -> None:
    workload = Workload(
        names=("w",), sizes=(4,), forward=(1.0,), backward=(1.0,), cores=1
    )
    where = replace(cluster(rack(3)), processor=Processor(cores=1))

    def train(rank: int) -> float:
        model = paceline.stand_in(workload)
        optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters()))
        model(torch.ones(1)).backward()
        optimizer.step()
        taken = inspect(optimizer).recorder.steps[0].compute_seconds
        optimizer.finish()
        return taken

    assert run(where, train) == [2.0] * 3


def test_input_is_the_work_of_one_thread() -> None:
    spent: list[tuple[float, str, int]] = []
    worker = SimulatedCompute(
        ComputeModel(), 0, 0.5, lambda *taken: spent.append(taken)
    )
    workload = Workload(
        names=("w",), sizes=(4,), forward=(0.0,), backward=(0.0,), input=2.0
    )
    for cores in (0, 4):
        worker.workload = replace(workload, cores=cores)
        ModelCompute(worker, workload, None).step_begins()
    worker.pace(1.0)
    ModelCompute(worker, workload, None).step_begins()
    assert spent == [(4.0, "input", 0), (4.0, "input", 1), (2.0, "paced", 0)]


@pytest.mark.parametrize("passes", [1, 2])
def test_overhead_is_charged_with_the_gradients_of_a_step(passes: int) -> None:
    spent: list[tuple[float, str, int]] = []
    worker = SimulatedCompute(
        ComputeModel(), 0, 0.5, lambda *taken: spent.append(taken)
    )
    workload = Workload(
        names=("v", "w"),
        sizes=(4, 4),
        forward=(0.0, 0.0),
        backward=(0.0, 0.0),
        passes=passes,
        overhead=2.0,
    )
    worker.workload = replace(workload, cores=4)
    compute = ModelCompute(worker, workload, None)
    for _ in range(passes):
        compute.gradient(1)
        compute.gradient(0)
    assert spent == [(2.0 / passes, "hooks", 1)] * 2 * passes


@pytest.mark.parametrize("passes", [1, 2])
def test_input_is_charged_once_a_step_before_its_first_pass(passes: int) -> None:
    workload = Workload(
        names=("w",), sizes=(4,), forward=(1.0,), backward=(2.0,), input=0.25
    )

    def train(rank: int) -> list[float]:
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters()))
        for _ in range(3):
            for _ in range(passes - 1):
                with optimizer.no_sync():
                    model(torch.ones(1, 1)).sum().backward()
            with torch.no_grad():
                model(torch.ones(1, 1))
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        taken = [step.compute_seconds for step in inspect(optimizer).recorder.steps]
        optimizer.finish()
        return taken

    named = replace(workload, names=("weight",))
    taken = run(2, train, compute=ComputeModel(workload=named))
    # The evaluation is a forward pass, too.
    assert taken == [[pytest.approx(0.25 + 3.0 * passes + 1.0)] * 3] * 2


# ---- coding, and what codes of stand-ins weigh ----

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
    if name != "none" and "warmup_steps" not in compression:
        compression += f"{',' if ':' in compression else ':'}warmup_steps=0"
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
