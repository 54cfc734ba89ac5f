"""A model that stands for another: the same tensors, in the same order, at the same times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import paceline
from paceline.cluster import Workload
from paceline.cluster.workload import builtin_names
from paceline.collectives.schedules import Ring
from paceline.errors import UsageError, WorkerFailedError
from paceline.interfaces.buckets import wire_bytes, wire_shape
from paceline.runtimes.simulated import ComputeModel
from paceline.testing import inspect
from tests.support.simulations import run, run_on, simulation

SMALL = Workload(
    names=("a", "deep.d", "deep.er.b", "deep.er.c"),
    sizes=(40, 8, 400_000, 4_002),
    forward=(1e-3, 2e-3, 3e-3, 4e-3),
    backward=(5e-3, 6e-3, 7e-3, 8e-3),
    order=(2, 0, 3, 1),
    update=9e-3,
    batch=16,
)


def distributed(model: torch.nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return paceline.distribute(model, inner, **options)


def watched_step(workload: Workload | str) -> tuple[list[tuple[str, int]], list[Any]]:
    """Names and bytes of the model's tensors; who was ready when, in one step."""
    model = paceline.stand_in(workload)
    optimizer = distributed(model, buckets="single")
    tensors = [(name, wire_bytes(p)) for name, p in model.named_parameters()]
    ready: list[tuple[str, float]] = []
    start = paceline.now()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: ready.append((name, paceline.now() - start))
        )
    batch = model.workload.batch or 1
    model(torch.ones(int(batch))).backward()
    optimizer.step()
    ready.append(("step", paceline.now() - start))
    return tensors, ready


@pytest.mark.parametrize("name", [*builtin_names(), "small"])
def test_tensors_and_ready_times_are_the_workloads(name):
    given = SMALL if name == "small" else name
    workload = SMALL if name == "small" else Workload.load(name)
    ((tensors, ready),) = run(1, lambda rank: watched_step(given))
    assert tensors == list(zip(workload.names, workload.sizes, strict=True))
    *gradients, (_, end) = ready
    assert [name for name, _ in gradients] == [
        workload.names[i] for i in workload.order
    ]
    assert [at for _, at in gradients] == pytest.approx(workload.ready_seconds)
    assert end == pytest.approx(workload.ready_seconds[-1] + workload.update)


def test_half_the_batch_takes_half_the_time_but_for_the_update():
    def body(rank: int) -> float:
        model = paceline.stand_in(SMALL)
        optimizer = distributed(model)
        start = paceline.now()
        model(torch.ones(8)).backward()
        optimizer.step()
        return paceline.now() - start

    seconds = SMALL.forward_seconds + SMALL.backward_seconds
    assert run(1, body) == [pytest.approx(seconds / 2 + SMALL.update)]


def sent(workload: Workload, buckets: str) -> Sequence[int]:
    model = paceline.stand_in(workload)
    optimizer = distributed(model, buckets=buckets)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(16)).backward()
        optimizer.step()
    optimizer.finish()
    return [step.bytes_sent for step in inspect(optimizer).recorder.steps]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ["resnet50", "small"])
def test_a_step_sends_what_the_ring_sends_of_the_workloads_bytes(name, workers):
    workload = SMALL if name == "small" else Workload.load(name)
    for rule, groups in (("wfbp", workload.sizes), ("single", [sum(workload.sizes)])):
        for rank, steps in enumerate(run(workers, lambda r: sent(workload, rule))):  # noqa: B023
            ring = [Ring(workers, size).bytes_sent(rank) for size in groups]
            assert steps[1:] == 3 * [sum(ring)]


def test_it_learns_and_all_workers_hold_the_same():
    def body(rank: int) -> tuple[float, list[float]]:
        model = paceline.stand_in(SMALL)
        optimizer = distributed(model)
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.full((4,), float(rank))).backward()
            optimizer.step()
        optimizer.finish()
        with torch.no_grad():
            return [p.flatten()[0].item() for p in model.parameters()]

    for values in run(3, body):  # the mean of the ranks' batches is 1
        assert values == pytest.approx(4 * [1.0], abs=0.1)


def test_compute_time_is_its_own_unless_a_workload_is_given():
    runtime = simulation(1)
    run_on(runtime, lambda rank: watched_step(SMALL))
    assert runtime.result.stand_in
    other = Workload.spread(SMALL.names, SMALL.sizes, 1.0, 2.0)
    runtime = simulation(1, compute=ComputeModel(workload=other))
    _, ready = run_on(runtime, lambda rank: watched_step(SMALL))[0]
    assert not runtime.result.stand_in
    assert ready[-1][1] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.b", "c"), "'a.b'.*'c'"),
        (("a", "a.b"), "tensor 'a.b'"),
        (("", "c"), "tensor ''"),
        (("c", "forward"), "tensor 'forward'"),
    ],
)
def test_tensors_that_no_model_can_have_are_named(names, message):
    workload = Workload(names=names, sizes=(4, 4), forward=(0, 0), backward=(0, 0))
    with pytest.raises(WorkerFailedError, match=message):
        run(1, lambda rank: paceline.stand_in(workload))


def test_it_needs_a_runtime_and_a_workload_that_is_there():
    with pytest.raises(UsageError, match=r"call paceline.init\(\) before"):
        paceline.stand_in(SMALL)
    with pytest.raises(WorkerFailedError, match="Did you mean 'resnet50'"):
        run(1, lambda rank: paceline.stand_in("resnet5"))


def test_sizes_in_the_simulated_runtime_need_no_memory():
    huge = Workload(names=("a",), sizes=(1 << 40,), forward=(0,), backward=(0,))
    (steps,) = run(1, lambda rank: sent(huge, "ddp"))
    assert steps == 4 * [0]
    model_elements = run(
        1, lambda rank: sum(p.numel() for p in paceline.stand_in(huge).parameters())
    )
    assert model_elements[0] <= 1024
    assert math.isfinite(huge.forward_seconds)


def test_tensors_of_unknown_shape_are_matrices():
    """As those of real processes are (`tests/runtimes/real/scripts/stand_in.py`)."""
    (shapes,) = run(1, lambda rank: shapes_of(SMALL))
    assert shapes == [(2, 5), (1, 2), (250, 400), (25, 40)]  # of 4,002 bytes: 1,000
    prime = Workload(names=("a",), sizes=(4 * 1009,), forward=(0,), backward=(0,))
    assert run(1, lambda rank: shapes_of(prime)) == [[(1, 1009)]]


def shapes_of(workload: Workload) -> list[tuple[int, ...]]:
    return [wire_shape(p) for p in paceline.stand_in(workload).parameters()]
