"""A stand-in on real processes: tensors of true size, and steps of the workload's time."""

import sys
import time

import torch

import paceline

WORKLOAD = paceline.Workload(
    names=("a", "deep.d", "deep.er.b", "deep.er.c"),
    sizes=(40, 8, 400_000, 4_002),
    forward=(5e-3, 2e-3, 3e-3, 10e-3),
    backward=(5e-3, 10e-3, 20e-3, 5e-3),
    order=(2, 0, 3, 1),
    update=20e-3,
    batch=8,
)
STEPS = 6

paceline.init()
model = paceline.stand_in(WORKLOAD)
sizes = [(name, 4 * p.numel()) for name, p in model.named_parameters()]
assert sizes == [
    ("a", 40),
    ("deep.d", 8),
    ("deep.er.b", 400_000),
    ("deep.er.c", 4_004),  # in whole elements
], sizes
shapes = [tuple(p.shape) for p in model.parameters()]
# What the simulated runtime tells codes where a workload has no shapes: a row is never coded.
assert shapes == [(2, 5), (1, 2), (250, 400), (13, 77)], shapes
prime = paceline.Workload(
    names=("a",), sizes=(4 * 1009,), forward=(0.0,), backward=(0.0,)
)
(row,) = paceline.stand_in(prime).parameters()
assert row.shape == (1, 1009), row.shape
optimizer = paceline.distribute(
    model, torch.optim.SGD(model.parameters(), lr=0.1), method="bsp:buckets=wfbp"
)
ready: list[str] = []
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(
        lambda _, name=name: ready.append(name)
    )


def take_step(samples):
    start = time.perf_counter()
    optimizer.zero_grad()
    model(torch.full((samples,), float(paceline.rank()))).backward()
    after_backward = time.perf_counter()
    optimizer.step()
    return after_backward - start, time.perf_counter() - start


passes = WORKLOAD.forward_seconds + WORKLOAD.backward_seconds
for _ in range(STEPS):
    ready.clear()
    backward_end, step_end = take_step(8)
    assert ready == [WORKLOAD.names[i] for i in WORKLOAD.order]
    assert backward_end >= passes
    assert step_end >= passes + WORKLOAD.update
_, half = take_step(4)
assert half >= passes / 2 + WORKLOAD.update
with torch.no_grad():
    value = model.a[0, 0].item()
optimizer.finish()
assert abs(value - 0.5) < 0.5
paceline.log(value=value)
sys.stdout.write(f"checked {paceline.rank()}\n")  # in one piece
