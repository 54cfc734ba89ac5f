"""Which parts of which buckets each server holds, and the units in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import compression
from paceline.errors import UsageError
from paceline.interfaces import Discipline, PushedGradient, ServerJob, Shard, UnitNotice
from paceline.interfaces.buckets import Bucket, make_buckets, stand_in_for
from paceline.optim.partitioned import cut_every
from paceline.parameter_server.client.partition import BucketPart, split_buckets
from paceline.parameter_server.client.remote_model import RemoteModel, ServedModel
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.transport.protocol import SMALL_BYTES
from tests.parameter_server.state_machine.test_server import Case, pushed, zeros
from tests.support.profiles import examples
from tests.support.server_talk import Direct


def make(
    shapes: list[list[tuple[int, ...]]], kind: type[torch.optim.Optimizer]
) -> tuple[list[Bucket], torch.optim.Optimizer]:
    """A bucket per list of shapes; parameters are in two groups, turn by turn."""
    flat = [shape for bucket in shapes for shape in bucket]
    parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in flat]
    groups = [parameters[::2], parameters[1::2]]
    optimizer = kind([{"params": group} for group in groups if group], lr=0.1)  # type: ignore[call-arg]
    named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
    numbers = iter(range(len(flat)))
    groups_of = [[next(numbers) for _ in bucket] for bucket in shapes]
    return make_buckets(named, groups_of), optimizer


def places(plan: list[list[BucketPart]]) -> list[list[tuple[object, ...]]]:
    return [[(p.shard, p.start, p.stop, p.units) for p in parts] for parts in plan]


def held(buckets: list[Bucket], plan: list[list[BucketPart]], shards: int) -> list[int]:
    """Bytes by shard."""
    total = [0] * shards
    for bucket, parts in zip(buckets, plan, strict=True):
        for part in parts:
            total[part.shard] += (part.stop - part.start) * bucket.buffer.element_size()
    return total


def check_all_once(
    buckets: list[Bucket],
    optimizer: torch.optim.Optimizer,
    plan: list[list[BucketPart]],
) -> None:
    numbered = [p for group in optimizer.param_groups for p in group["params"]]
    for bucket, parts in zip(buckets, plan, strict=True):
        position = 0
        reached = dict.fromkeys(map(id, bucket.parameters), 0)
        for part in parts:
            assert part.start == position < part.stop
            position = part.stop
            assert sum(unit.elements for unit in part.units) == part.stop - part.start
            for unit in part.units:
                parameter = numbered[unit.parameter]
                every, _ = cut_every(optimizer, parameter, unit.group)
                assert unit.start == reached[id(parameter)]
                assert unit.start % every == 0
                assert unit.stop % every == 0 or unit.stop == parameter.numel()
                whole = unit.elements == parameter.numel()
                assert unit.shape == (tuple(parameter.shape) if whole else None)
                assert parameter in set(optimizer.param_groups[unit.group]["params"])
                reached[id(parameter)] = unit.stop
        assert position == bucket.buffer.numel()
        for parameter in bucket.parameters:
            assert reached[id(parameter)] == parameter.numel()
        assert len({part.shard for part in parts}) == len(parts)


shapes = st.lists(
    st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from([1, 7, 64, 500])),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(60))
@given(shapes, st.integers(1, 5))
def test_elementwise_optimizers_share_evenly(
    many: list[list[tuple[int, int]]], shards: int
) -> None:
    buckets, optimizer = make(many, torch.optim.AdamW)  # type: ignore[arg-type]
    plan = split_buckets(buckets, optimizer, shards)
    check_all_once(buckets, optimizer, plan)
    bytes_held = held(buckets, plan, shards)
    fair = sum(bytes_held) / shards
    # All is cut, but for buckets that are too small.
    assert max(bytes_held) <= 1.1 * fair + SMALL_BYTES * shards
    assert places(split_buckets(buckets, optimizer, shards)) == places(plan)


@settings(max_examples=examples(60))
@given(shapes, st.integers(1, 5))
def test_whole_tensors_stay_whole(
    many: list[list[tuple[int, int]]], shards: int
) -> None:
    buckets, optimizer = make(many, torch.optim.Muon)  # type: ignore[arg-type]
    plan = split_buckets(buckets, optimizer, shards)
    check_all_once(buckets, optimizer, plan)
    assert all(u.shape for parts in plan for part in parts for u in part.units)
    assert places(split_buckets(buckets, optimizer, shards)) == places(plan)


def test_buckets_of_one_whole_tensor_go_round() -> None:
    buckets, optimizer = make([[(500, 500)]] * 12, torch.optim.Muon)
    for shards in (2, 3, 4):
        plan = split_buckets(buckets, optimizer, shards)
        assert held(buckets, plan, shards) == [12 * 10**6 // shards] * shards


@pytest.mark.parametrize("shards", [2, 3, 4, 7])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Muon])
def test_a_resnet_like_model_is_balanced(
    kind: type[torch.optim.Optimizer], shards: int
) -> None:
    model: list[tuple[int, ...]] = [(64, 147), *[(64, 576)] * 4, *[(128, 1152)] * 4]
    model += [*[(256, 2304)] * 4, *[(512, 4608)] * 4, (1000, 512)]
    buckets, optimizer = make([model[i : i + 3] for i in range(0, 18, 3)], kind)
    plan = split_buckets(buckets, optimizer, shards)
    bytes_held = held(buckets, plan, shards)
    largest = max(p.numel() * 4 for b in buckets for p in b.parameters)
    fair = sum(bytes_held) / shards
    if kind is torch.optim.SGD:
        assert max(bytes_held) <= 1.1 * fair
    assert max(bytes_held) <= fair + largest


def test_a_small_bucket_is_not_cut() -> None:
    buckets, optimizer = make([[(100, 100)], [(99, 100)], [(10, 10)]], torch.optim.SGD)
    plan = split_buckets(buckets, optimizer, 2)
    assert [[part.shard for part in parts] for parts in plan] == [[0], [1], [1]]


def test_stand_ins_share_what_they_stand_for() -> None:
    buckets, optimizer = make([[(6, 1)], [(6, 1)]], torch.optim.SGD)
    stand_in_for(30_000, buckets[0].buffer)
    stand_in_for(6_000_000, buckets[1].buffer)
    plan = split_buckets(buckets, optimizer, 3)
    assert [len(parts) for parts in plan] == [1, 3]
    check_all_once(buckets, optimizer, plan)


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
