"""Codes whose size depends on how fast a worker's group is, on their way to a server and back."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.compression import make
from paceline.compression.gd_top_k import RATIOS
from paceline.interfaces import SpeedClass
from paceline.parameter_server.client.compression import ClientCompression
from paceline.parameter_server.state_machine.compression import (
    check_brings_nearer,
)
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.testing import inspect
from tests.parameter_server.state_machine.test_compressed_training import (
    LR,
    SHAPES,
    Given,
    gradients_of,
    machines,
    simulation,
    train,
)

CHANGES: list[SpeedClass] = ["middle", "fastest", "slowest", "slowest", "middle"]
SETTLED = make("gd-top-k").steady_state()
LARGE = [shape for shape in SHAPES if len(shape) == 2]
PLAIN = 8 * (50 + 1)


def kept_of(speed: SpeedClass, elements: int) -> int:
    return max(1, round(RATIOS[speed][-1] * elements))


def pushed_bytes(speed: SpeedClass) -> int:
    """Of the model of `train`, in float64 with places of 2 bytes: ratio numbers, values, places."""
    kept = sum(kept_of(speed, rows * columns) for rows, columns in LARGE)
    return PLAIN + len(LARGE) + 10 * kept


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """By rank: bytes of what was pushed."""
    sizes: dict[int, list[int]] = defaultdict(list)
    plain = ClientCompression.encode

    def note(self: ClientCompression, *given: Any) -> torch.Tensor:
        code = plain(self, *given)
        sizes[self._rank].append(code.numel())
        return code

    monkeypatch.setattr(ClientCompression, "encode", note)
    return sizes


@pytest.mark.parametrize("answers", ["full", "deltas"])
def test_classes_change_within_a_training(
    answers: str, noted: dict[int, list[int]]
) -> None:
    """The server need not know the class: what it has applied and what workers still keep is all
    that there was."""
    runtime, answered = simulation(2), []

    def change(rank: int, step: int, model: Any, optimizer: Any) -> None:
        remote = inspect(optimizer).remote
        if rank == 0 and step + 1 < len(CHANGES):
            remote.set_speed_class(CHANGES[step + 1])
        for part in remote.partition.parts[0]:
            answered.append(remote.compression.room(part).numel())
            if answers == "deltas":
                shadows = machines(runtime)[0].shard.compression.replicas
                held = shadows[rank, part.bucket].values
                assert torch.equal(held, remote.partition.received_part(part))

    ends = train(
        runtime,
        "ssp:staleness=1",
        steps=len(CHANGES),
        after=change,
        buckets="single",
        compression=SETTLED,
        replies=answers,
    )
    assert noted[0] == [pushed_bytes(speed) for speed in CHANGES]
    assert noted[1] == [pushed_bytes("middle")] * len(CHANGES)
    assert len({pushed_bytes(speed) for speed in CHANGES}) == 3
    assert len(set(answered)) == 1
    dense = 1 + 50 + sum(rows * columns for rows, columns in LARGE)
    assert (answered[0] == dense) == (answers == "full")
    for number in range(len(SHAPES)):
        applied = -ends[0][0][number] / LR
        made = sum(total[number] for _, _, total in ends)
        kept = [left[f"p{number}"] for _, left, _ in ends if f"p{number}" in left]
        torch.testing.assert_close(applied + sum(kept), made, rtol=1e-9, atol=1e-9)


def test_answers_have_no_epochs() -> None:
    """They are the same to workers of all classes."""
    code = make("gd-top-k:speed=slowest")
    check_brings_nearer(code)
    assert code.for_replies() == make("top-k:density=0.015,error_feedback=false")
    assert code.for_speed("fastest").for_speed("slowest") == code


def test_other_codes_have_no_class() -> None:
    for name in ("top-k", "qsgd", "int8", "bf16"):
        code = make(name)
        assert code.for_speed("fastest") == code


def test_groups_push_by_their_measured_class(noted: dict[int, list[int]]) -> None:
    """ "middle" until all were measured; then fast groups send least, and the model is one."""
    speeds = (1.0, 1.0, 0.6, 0.6, 0.3, 0.3)
    rack = Rack(workers=6, link=1e9, latency=1e-4, speed=speeds)
    cluster = Cluster((rack,), servers=(ServerHost(),) * 3)
    ends = {}

    def body(rank: int) -> None:
        model: Any = Given(torch.float64)
        plain = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = paceline.distribute(
            model,
            plain,
            method="gssp:members=0-1+2-3+4-5,measure_steps=2",
            buckets="single",
            compression=SETTLED,
            replies="deltas",
        )
        for step in range(round(20 * speeds[rank])):
            optimizer.zero_grad()
            model(gradients_of(rank, step)).backward()
            optimizer.step()
        optimizer.finish()
        ends[rank] = [p.detach().clone() for p in model.parameters()]

    Simulation(cluster, compute=ComputeModel(forward=0.1, backward=0.2)).run(body)
    classes: list[SpeedClass] = ["fastest", "middle", "slowest"]
    for rank, sizes in noted.items():
        assert sizes[0] == pushed_bytes("middle")
        assert sizes[-1] == pushed_bytes(classes[rank // 2])
        assert all(map(torch.equal, ends[rank], ends[0]))
