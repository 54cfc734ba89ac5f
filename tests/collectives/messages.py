"""What ranks send each other, and groups of some of them: laws that hold in every runtime, on
three workers."""

from __future__ import annotations

import pytest
import torch

from paceline.collectives.communicator import Communicator, ConnectionlessGroup
from paceline.collectives.torch_group import MOST_GROUPS
from paceline.errors import UsageError
from paceline.runtimes.join import join_runtime
from tests.collectives.helpers import buffers, skew


def messages_and_all_to_all(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    coming = [torch.empty(2, 3, dtype=torch.int64) for _ in range(4)]
    received = [comm.receive(buffer, before) for buffer in coming]
    sent = [
        comm.send(torch.full((2, 3), 10 * rank + index), after) for index in range(4)
    ]
    for pending in (*sent, *received[::-1], *received):
        pending.wait()
    assert [int(buffer[1, 2]) for buffer in coming] == [
        10 * before + index for index in range(4)
    ]
    output = torch.empty(2 * n)
    comm.all_to_all(output, torch.arange(2.0 * n) + 100 * rank).wait()
    assert output.view(n, 2).tolist() == [
        [100.0 * r + 2 * rank, 100.0 * r + 2 * rank + 1] for r in range(n)
    ]
    for wrong in (n, -1, rank):
        with pytest.raises(UsageError, match="expected another rank"):
            comm.send(output, wrong)
    with pytest.raises(UsageError, match="a multiple of 3"):
        comm.all_to_all(torch.empty(4), torch.empty(4))


def an_all_reduce_made_of_sends_and_receives(comm: Communicator) -> None:
    """What a newcomer writes: step by step round a ring, each after the one before."""
    n, rank = comm.size, comm.rank

    def all_reduce(buffer: torch.Tensor):
        coming = [torch.empty_like(buffer) for _ in range(n - 1)]

        def step(number: int, leaving: torch.Tensor):
            sent = comm.send(leaving, (rank + 1) % n)
            received = comm.receive(coming[number], (rank - 1) % n)

            def add():
                buffer.add_(coming[number])
                if number + 2 < n:
                    return step(number + 1, coming[number])
                return None

            added = received.then(add)
            return sent.then(lambda: added)

        return step(0, buffer.clone())

    own = buffers(rank)
    pendings = []
    for index, buffer in enumerate(own):
        pendings.append(all_reduce(buffer))
        skew(rank, index)
    for pending in reversed(pendings):
        pending.wait()
    for index, buffer in enumerate(own):
        assert torch.equal(buffer, torch.full_like(buffer, 3.0 + 3 * index))


def only_some_send_in_a_work(comm: Communicator) -> None:
    """A work may send to one neighbour, while others issue nothing."""
    value = torch.tensor([1.0])

    def pass_on():
        if comm.rank == 0:
            return comm.send(value, 1)
        return comm.receive(value, 0) if comm.rank == 1 else None

    comm.all_reduce(value, "sum").then(pass_on).wait()
    assert value.item() == 3.0


def groups_over_the_same_connections(comm: Communicator) -> None:
    """Another pair in each step, all steps under way together."""
    n, rank = comm.size, comm.rank
    pendings, values, expected = [], [], []
    for step in range(12):
        alone = step % n
        pair = tuple(r for r in range(n) if r != alone)
        skew(rank, step)
        if rank == alone:
            continue
        group = ConnectionlessGroup(comm, pair, f"{comm.name}, pair {step}")
        assert (group.size, group.rank) == (2, pair.index(rank))
        value = torch.full((step + 1,), float(10 * rank + step))
        values.append(value)
        expected.append(10.0 * sum(pair) + 2 * step)
        pendings.append(
            group.all_reduce(value, "mean").then(
                lambda group=group, value=value: group.all_reduce(value, "sum")
            )
        )
    for pending in pendings:
        pending.wait()
    for value, total in zip(values, expected, strict=True):
        assert torch.equal(value, torch.full_like(value, total))
    group = ConnectionlessGroup(comm, range(n), f"{comm.name}, everybody")
    told, parts = torch.tensor([float(rank)]), torch.empty(n)
    group.broadcast(told, 2).wait()
    group.all_gather(parts, torch.tensor([rank + 1.0])).wait()
    assert (told.item(), parts.tolist()) == (2.0, [1.0, 2.0, 3.0])
    part, output = torch.empty(1), torch.empty(n)
    group.reduce_scatter(part, torch.arange(float(n)) * (rank + 1)).wait()
    group.all_to_all(output, torch.arange(float(n)) + 10 * rank).wait()
    assert part.item() == pytest.approx(2.0 * rank)
    assert output.tolist() == [10.0 * r + rank for r in range(n)]
    for forbidden in (lambda: group.channel("inner"), lambda: group.group((0, 1))):
        with pytest.raises(UsageError, match="connections"):
            forbidden()


def streams_whose_names_have_one_checksum(comm: Communicator) -> None:
    """Two groups over the same connections, whose streams a CRC of 31 bits takes for one."""
    n, rank = comm.size, comm.rank
    first, second = (
        ConnectionlessGroup(comm, range(n), f"{comm.name}, pair {number}")
        for number in (29685295, 32060020)
    )
    one, other = torch.full((1,), 1.0 + rank), torch.full((1,), 11.0 + rank)
    after, before = (rank + 1) % n, (rank - 1) % n
    sent = [first.send(one, after), second.send(other, after)]
    coming, next_one = torch.empty(1), torch.empty(1)
    received = [second.receive(coming, before), first.receive(next_one, before)]
    for pending in (*sent, *received):
        pending.wait()
    assert (coming.item(), next_one.item()) == (11.0 + before, 1.0 + before)


def groups_that_are_kept_are_bounded(comm: Communicator) -> None:
    """Members agree on who sends how, whatever else each of them keeps."""
    runtime, rank = join_runtime(), comm.rank
    channel = comm.channel("bounded")
    kept = [channel.channel(str(number)) for number in range(2)]
    if rank == 0:  # it alone keeps many, without the others
        channel._groups = {(0, -1 - number): kept[0] for number in range(MOST_GROUPS)}
    for members in ((0, 1), (1, 2)):
        if rank not in members:
            continue
        group = channel.group(members)
        assert channel.group(members) is group
        value = torch.tensor([float(rank)])
        group.all_reduce(value, "sum").wait()
        assert value.item() == sum(members)
        if not runtime.clock.is_virtual:
            assert group.has_own_group == (members == (1, 2))
        group.close()
        again = channel.group(members)  # made anew, by both
        assert again is not group
        again.all_reduce(value, "sum").wait()
        assert value.item() == 2 * sum(members)
    if rank == 0:
        channel._groups = {}
    with pytest.raises(UsageError, match="this one among them"):
        channel.group([(rank + 1) % 3])


CASES = (
    messages_and_all_to_all,
    an_all_reduce_made_of_sends_and_receives,
    only_some_send_in_a_work,
    groups_over_the_same_connections,
    streams_whose_names_have_one_checksum,
    groups_that_are_kept_are_bounded,
)
