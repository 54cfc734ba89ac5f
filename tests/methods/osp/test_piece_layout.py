"""Where each piece of a model lies in its buckets, and in the messages of both stages."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.interfaces.buckets import make_buckets
from paceline.methods.osp.worker import PieceLayout
from paceline.optim.partitioned import PartitionedOptimizer, split_pieces


@st.composite
def layouts(draw):
    """Parameters of some kinds in buckets, cut into pieces, some deferred. Some
    parameters may be unknown to the optimizer."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=7))
    kinds = [draw(st.sampled_from([torch.float32, torch.float64])) for _ in sizes]
    parameters = [
        (f"p{i}", torch.nn.Parameter(torch.zeros(size, dtype=kind)))
        for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]
    order = draw(st.permutations(range(len(sizes))))
    groups: list[list[int]] = []
    for index in order:
        last = groups[-1] if groups else None
        if last and kinds[last[0]] == kinds[index] and draw(st.booleans()):
            last.append(index)
        else:
            groups.append([index])
    known = [p for _, p in parameters if draw(st.integers(0, 4))]
    known = known or [parameters[0][1]]
    optimizer = torch.optim.SGD(known[::-1], lr=0.1)
    pieces = split_pieces(optimizer, draw(st.integers(8, 200)))
    deferred = [n for n in range(len(pieces)) if draw(st.booleans())]
    return parameters, groups, PartitionedOptimizer(optimizer, pieces), pieces, deferred


@given(layouts())
def test_each_gradient_is_in_one_message_once(case):
    parameters, groups, updater, pieces, deferred = case
    buckets = make_buckets(parameters, groups)
    layout = PieceLayout(buckets, updater)
    layout.defer(deferred)
    assert layout.pieces == sorted(pieces)
    number = 1.0
    for bucket in buckets:
        bucket.buffer.copy_(torch.arange(number, number + bucket.buffer.numel()))
        number += bucket.buffer.numel()

    messages = [layout.message(bucket) for bucket in buckets]
    for bucket, message in zip(buckets, messages, strict=True):
        assert message.flat.dtype == bucket.buffer.dtype
        assert not set(message.parts) & set(deferred)
    late = layout.late_messages()
    assert sorted(n for message in late for n in message.parts) == deferred

    found = {}
    for message in [*messages, *late]:
        assert message.flat.numel() == sum(
            part.numel() for part in message.parts.values()
        )
        for piece, part in message.parts.items():
            assert piece not in found
            assert part.dtype == message.flat.dtype
            found[piece] = part
    assert sorted(found) == list(range(len(pieces)))
    views = {
        id(p): view.reshape(-1)
        for bucket in buckets
        for p, view in zip(bucket.parameters, bucket.views, strict=True)
    }
    owners = [p for group in updater._optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in parameters}
    for index, piece in enumerate(layout.pieces):
        owner = owners[piece.parameter]
        expected = views[id(owner)][piece.start : piece.stop]
        assert torch.equal(found[index], expected)
        assert torch.equal(layout.gradient(index), expected)
        assert layout.name_of(index) == names[id(owner)]
    for bucket in buckets:
        bucket.used[:] = [name != "p0" for name in bucket.names]
    gone = {n for n in range(len(pieces)) if layout.name_of(n) == "p0"}
    assert layout.unused() == gone


@given(layouts())
def test_parts_are_the_bytes_of_each_bucket(case):
    parameters, groups, updater, _, deferred = case
    buckets = make_buckets(parameters, groups)
    layout = PieceLayout(buckets, updater)
    parts = layout.parts()
    owned = {
        id(p): p for group in updater._optimizer.param_groups for p in group["params"]
    }
    for bucket, left in zip(buckets, parts.left(()), strict=True):
        mine = [p for p in bucket.parameters if id(p) in owned]
        assert left == sum(p.numel() * p.element_size() for p in mine)
    assert parts.total(deferred) + sum(parts.left(deferred)) == sum(parts.sizes)


def test_a_layout_follows_new_buckets():
    parameters = [(f"p{i}", torch.nn.Parameter(torch.zeros(3))) for i in range(3)]
    optimizer = torch.optim.SGD([p for _, p in parameters], lr=0.1)
    updater = PartitionedOptimizer(optimizer, split_pieces(optimizer, 100))
    buckets = make_buckets(parameters, [[0], [1, 2]])
    layout = PieceLayout(buckets, updater)
    layout.defer([1])
    changes = layout.changes
    layout.defer([1])
    assert layout.changes == changes
    buckets = make_buckets(parameters, [[2, 1, 0]])
    layout.follow(buckets)
    assert layout.changes == changes + 1
    buckets[0].buffer.copy_(torch.arange(9.0))
    message = layout.message(buckets[0])
    assert list(message.parts) == [2, 0]
    assert message.flat.tolist() == [0, 1, 2, 6, 7, 8]
    assert layout.gradient(1).tolist() == [3, 4, 5]
