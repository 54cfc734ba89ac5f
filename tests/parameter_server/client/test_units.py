"""A method that takes buckets in parts, and that talks to its workers: any method's, not osp's."""

from __future__ import annotations

import pytest
import torch

from paceline import compression
from paceline.errors import UsageError
from paceline.interfaces import Discipline, PushedGradient, ServerJob, Shard, UnitNotice
from paceline.interfaces.buckets import Bucket, make_buckets
from paceline.parameter_server.client.remote_model import RemoteModel, ServedModel
from paceline.parameter_server.state_machine.server import ParameterServer
from tests.parameter_server.state_machine.test_server import Case, pushed, zeros
from tests.support.direct_endpoint import Direct

SIZES = [[30_000, 20_000], [10, 20]]
"""Elements of each parameter, bucket by bucket."""


class InHalves(Discipline):
    """Applies what comes when it comes; counts what workers report, and tells them."""

    accepts_partial_pushes = True

    def __init__(self) -> None:
        self.reported = 0

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        self.reported += push.report or 0
        shard.apply(push)
        shard.reply(push)

    def decode_report(self, shard: Shard, report: bytes) -> int:
        if not report.isdigit():
            raise UsageError(f"push: expected a number, got {report!r}")
        return int(report)

    def notice(self, bucket: int) -> bytes:
        return f"{bucket}: {self.reported}".encode()


class Worker:
    """One worker, its model, and two servers that hold parts of it."""

    def __init__(self) -> None:
        self.parameters = [
            torch.nn.Parameter(torch.ones(n)) for group in SIZES for n in group
        ]
        self.sgd = torch.optim.SGD(self.parameters, lr=0.5, momentum=0.5)
        named = [(str(n), parameter) for n, parameter in enumerate(self.parameters)]
        self.buckets = make_buckets(named, [[0, 1], [2, 3]])
        self.disciplines = [InHalves() for _ in range(2)]
        endpoints = [
            Direct(ParameterServer(1, lambda _, d=each: d), 0)
            for each in self.disciplines
        ]
        job = ServerJob(None, "halves", "auto")
        served = ServedModel(0, self.sgd, endpoints, job, most_bytes=40_000)
        self.remote = RemoteModel(served, self.buckets, compression.make("none"))
        self.remote.join()

    def gradient(self, bucket: Bucket, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + bucket.index)
        bucket.buffer.copy_(torch.randn(bucket.buffer.shape, generator=generator))
        bucket.used[:] = [True] * len(bucket.used)

    def put(self, late: bool) -> set[tuple[int, int]]:
        """Take the answers that there are; returns the units in them."""
        arrived = self.remote.wait_for_units(late)
        for bucket, unit, values in arrived:
            place = self.remote.units[bucket][unit]
            flat = torch.cat([p.view(-1) for p in self.buckets[bucket].parameters])
            flat[place.start : place.stop] = values
            sizes = SIZES[bucket]
            with torch.no_grad():
                for parameter, part in zip(
                    self.buckets[bucket].parameters, flat.split(sizes), strict=True
                ):
                    parameter.copy_(part)
        self.remote.note_write()
        return {(bucket, unit) for bucket, unit, _ in arrived}


def test_buckets_in_two_halves_are_the_steps_of_one_optimizer() -> None:
    worker, twin = Worker(), Worker()
    sgd = torch.optim.SGD(twin.parameters, lr=0.5, momentum=0.5)
    every = {(b, u) for b, units in enumerate(worker.remote.units) for u in range(len(units))}  # fmt: skip
    assert len(every) > len(worker.parameters)  # they are cut
    for step in range(4):
        late = {(b, u) for b, u in every if (u + step) % 2}
        for bucket in worker.buckets:
            worker.gradient(bucket, step)
            mine = {u for b, u in every - late if b == bucket.index}
            worker.remote.push(bucket, step, 1.0, mine)
        assert worker.put(late=False) == every - late
        for bucket in worker.buckets:
            rest = {u for b, u in late if b == bucket.index}
            worker.remote.push(bucket, step, 1.0, rest, late=True)
        assert worker.put(late=True) == late
        for bucket in twin.buckets:
            twin.gradient(bucket, step)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        sgd.step()
        for mine_, theirs in zip(worker.parameters, twin.parameters, strict=True):
            assert torch.equal(mine_, theirs)


def test_workers_report_and_are_told() -> None:
    worker = Worker()
    (first, second), (small,) = worker.remote.notices(0), worker.remote.notices(1)
    assert (first.units.stop, first.notice) == (second.units.start, b"0: 0")
    assert small == UnitNotice(range(2), b"1: 0")
    for bucket in worker.buckets:
        worker.gradient(bucket, 0)
        worker.remote.push(bucket, 0, 1.0, report=b"21")
    worker.put(late=False)
    told = [part.notice for part in worker.remote.notices(0)]
    assert told == [b"0: 21", b"0: 21"]
    # One of the servers has the small bucket as well.
    assert worker.remote.notices(1)[0].notice == b"1: 42"
    assert sorted(each.reported for each in worker.disciplines) == [21, 42]


@pytest.mark.parametrize("report", [b"x", b"-1", b"\xff"])
def test_a_report_that_makes_no_sense_changes_nothing(report: bytes) -> None:
    case = Case()
    case.server = ParameterServer(2, lambda _: InHalves())
    case.begin(0, 1)
    words = f"push: expected a number, got {report!r}"
    assert case.refusal(0, pushed(0, 0, report=report), zeros(2)) == words
    assert case.server.shard.version(0) == 0
    assert case.server.shard.next_unstarted_step() == 0
    assert len(case.push(0, 0, 0, report=b"3")) == 1
