"""Which server holds what: everything once, evenly, where it may be cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.interfaces.buckets import Bucket, make_buckets, stand_in_for
from paceline.optim.partitioned import cut_every
from paceline.parameter_server.client.partition import BucketPart, split_buckets
from paceline.transport.protocol import SMALL_BYTES
from tests.support.profiles import examples


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
