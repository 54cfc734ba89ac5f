"""A workload in fewer pieces, and specs without planned buckets: for predictions that are to be
quick."""

from __future__ import annotations

from dataclasses import replace

from paceline.bucketing.rules import MEASURED
from paceline.cluster import Workload
from paceline.core.settings import parse_method
from paceline.spec import Spec, parse

FEW = 16
"""Tensors that a short run has, of models with more: what a step costs to simulate grows with
them, and what methods make of it hardly differs."""


def coarse(workload: Workload, most: int = FEW) -> Workload:
    """*workload* as it is, if it has at most so many tensors; else neighbours in ready order as one
    tensor, of about equal bytes each. Sums of bytes and times stay."""
    if len(workload.names) <= most:
        return workload
    share = sum(workload.sizes) / most
    groups: list[list[int]] = [[]]
    done = 0.0
    for index in workload.order:
        if groups[-1] and len(groups) < most and done >= share * len(groups):
            groups.append([])
        groups[-1].append(index)
        done += workload.sizes[index]
    groups.reverse()  # what is registered last is ready first
    return replace(
        workload,
        names=tuple(f"part{number}" for number in range(len(groups))),
        sizes=tuple(sum(workload.sizes[i] for i in group) for group in groups),
        forward=tuple(sum(workload.forward[i] for i in group) for group in groups),
        backward=tuple(sum(workload.backward[i] for i in group) for group in groups),
        order=(),
        shapes=(),
    )


def unplanned(spec: str) -> tuple[str, ...]:
    """What stands in short runs for *spec*: itself, as DDP's rule stands for buckets that are planned, and
    then also with a bucket per tensor. Planned ones are as fast as the faster of these, or a little faster."""
    read = parse(spec)
    method, settings = parse_method(spec)
    if method.updates_on == "server" or settings.buckets not in MEASURED:
        return (spec,)
    return spec, str(Spec(read.name, read.values | {"buckets": "wfbp"}))
