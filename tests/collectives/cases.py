"""Laws of a `Comm` that hold in every world: each case runs on three workers.

*comm* is a communicator of the case's own.
"""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.collectives import COLLECTIVES, make, over
from paceline.collectives.comm import MOST_GROUPS, TorchComm
from paceline.errors import UsageError
from paceline.worlds.join import join_world

BUCKETS = 6


def buffers(rank: int) -> list[torch.Tensor]:
    """Large ones first: gloo moves two at a time, so that small ones overtake them."""
    sizes = [200_000, 10, 50_000, 3, 100_000, 1]
    return [torch.full((size,), float(rank + i)) for i, size in enumerate(sizes)]


def skew(rank: int, step: int) -> None:
    """Workers come in another order each time."""
    paceline.pace(0.002 * ((rank + step) % 3))


def two_rounds_run_in_the_order_of_issue(comm: TorchComm) -> None:
    order: list[int] = []
    pendings = []
    rank = comm.rank
    own = buffers(rank)
    for index, buffer in enumerate(own):

        def second(index: int = index, buffer: torch.Tensor = buffer):
            order.append(index)
            buffer.mul_(comm.rank + 1)
            return comm.all_reduce(buffer, "sum")

        pendings.append(comm.all_reduce(buffer, "sum").then(second))
        skew(rank, index)
    other = torch.ones(5)
    beside = comm.all_reduce(other, "sum")  # the first round's queue goes on
    for pending in reversed(pendings):  # a later one before an earlier one
        pending.wait()
        pending.wait()
    beside.wait()
    assert other.tolist() == [3.0] * 5
    assert order == list(range(BUCKETS))
    for index, buffer in enumerate(own):
        first = sum(r + index for r in range(3))
        assert torch.equal(buffer, torch.full_like(buffer, 6.0 * first)), index


def three_rounds_nested_and_in_a_row(comm: TorchComm) -> None:
    rank = comm.rank
    nested, in_a_row = buffers(rank), buffers(rank)
    ends, order = [], []
    for index in range(BUCKETS):
        a, b = nested[index], in_a_row[index]

        def third(a: torch.Tensor = a) -> None:
            a.add_(1)

        def second(a: torch.Tensor = a, third=third):
            return comm.all_reduce(a, "sum").then(third)

        ends.append(
            comm.all_reduce(a, "sum").then(
                lambda a=a, second=second: comm.all_reduce(a, "max").then(second)
            )
        )
        skew(rank, index)
        ends.append(
            comm.all_reduce(b, "sum")
            .then(lambda b=b: comm.all_reduce(b, "max"))
            .then(lambda b=b: comm.all_reduce(b, "sum"))
            .then(lambda b=b, index=index: order.append(index + int(b.add_(1)[0] * 0)))
        )
    for end in ends[::2] + ends[::-2]:
        end.wait()
    assert order == list(range(BUCKETS))
    for index in range(BUCKETS):
        value = 3.0 * sum(r + index for r in range(3)) + 1
        assert torch.equal(nested[index], torch.full_like(nested[index], value))
        assert torch.equal(in_a_row[index], torch.full_like(nested[index], value))


def a_group_s_result_goes_on_among_all(comm: TorchComm) -> None:
    """Works on a group, one of them of a single worker, issue on the whole."""
    members = (0, 1) if comm.rank < 2 else (2,)
    group = comm.group(members)
    values = [torch.tensor([float(comm.rank + i)]) for i in range(BUCKETS)]
    whole = [torch.tensor([float(i)]) for i in range(BUCKETS)]
    pendings = []
    for index, value in enumerate(values):
        skew(comm.rank, index)
        pendings.append(
            group.all_reduce(value, "sum").then(
                lambda value=value: comm.all_reduce(value, "max")
            )
        )
        one = whole[index]
        pendings.append(
            comm.all_reduce(one, "sum").then(
                lambda one=one: comm.all_reduce(one, "sum")
            )
        )
    for pending in pendings:
        pending.wait()
    for index in range(BUCKETS):
        assert values[index].item() == max(1 + 2 * index, 2 + index)
        assert whole[index].item() == 9.0 * index


def every_collective_can_be_followed(comm: TorchComm) -> None:
    n, rank = comm.size, comm.rank
    sent, parts = torch.tensor([float(rank)]), torch.empty(n)
    spread, total = torch.arange(float(n)) * (rank + 1), torch.empty(1)
    told = torch.tensor([float(rank)])
    found: list[list[float]] = []
    pendings = [
        comm.all_gather(parts, sent).then(lambda: found.append(parts.tolist())),
        comm.reduce_scatter(total, spread).then(lambda: found.append(total.tolist())),
        comm.broadcast(told, 1).then(lambda: found.append(told.tolist())),
    ]
    for pending in pendings:
        pending.wait()
    assert found == [[0.0, 1.0, 2.0], [2.0 * rank], [1.0]]
    gathered = torch.empty(n)

    def second() -> object:
        return comm.all_gather(gathered, sent + 1)

    comm.all_reduce(told, "sum").then(second).wait()
    assert gathered.tolist() == [1.0, 2.0, 3.0]


class Stop(BaseException):
    """What no ``except Exception`` catches."""


def an_error_of_a_work_reaches_wait(comm: TorchComm) -> None:
    for kind in (ValueError, Stop):
        channel = comm.channel(kind.__name__)
        run: list[str] = []

        def fail(kind: type[BaseException] = kind) -> None:
            raise kind("the second of them")

        def note(run: list[str] = run) -> None:
            run.append("ran")

        values = [torch.ones(3) for _ in range(4)]
        works = [note, fail, note]
        pendings = [
            channel.all_reduce(value, "sum").then(work)
            for value, work in zip(values, works, strict=False)
        ]
        after = pendings[1].then(note)
        pendings[0].wait()
        for failed in (pendings[2], pendings[1], pendings[1], after):
            with pytest.raises(kind, match="the second of them"):
                failed.wait()
        late = channel.all_reduce(values[3], "sum").then(note)
        with pytest.raises(kind, match="the second of them"):
            late.wait()
        assert run == ["ran"]  # what comes after it is not run


def a_work_waits_for_nothing_and_makes_nothing(comm: TorchComm) -> None:
    first, second = torch.ones(2), torch.ones(2)
    known = comm.all_reduce(second, "sum")
    known.wait()

    def may() -> None:
        pending.wait()  # it is in
        known.wait()
        assert not torch.is_grad_enabled()

    pending = comm.all_reduce(first, "sum")
    pending.then(may).wait()
    for name, words in {
        "waits": "wait",
        "makes a group": "group",
        "makes a channel": "channel",
        "follows another's": "issued elsewhere",
        "returns": "expected None or a Pending",
    }.items():
        channel = comm.channel(name)
        outside = channel.all_reduce(torch.ones(1), "sum")

        def forbidden(name: str = name, channel: TorchComm = channel, outside=outside):
            if name == "waits":
                channel.all_reduce(torch.ones(1), "sum").wait()
            elif name == "makes a group":
                channel.group((0, 1, 2))
            elif name == "makes a channel":
                channel.channel("inner")
            elif name == "follows another's":
                outside.then(lambda: None)
            else:
                return 3
            return None

        chained = channel.all_reduce(torch.ones(1), "sum").then(forbidden)
        with pytest.raises(UsageError, match=words):
            chained.wait()
        outside.wait()


def closing_drops_what_has_not_run(comm: TorchComm) -> None:
    """What is left at a good end is dropped, and whoever still waits is told."""
    world = join_world()
    other = TorchComm(world, f"{comm.name} to be closed", comm.process_group)
    channel = other.channel("closed")
    values = [torch.ones(2) for _ in range(3)]
    done = [channel.all_reduce(value, "sum").then(lambda: None) for value in values]
    for pending in done:
        pending.wait()
    channel.all_reduce(values[0], "sum").wait()
    channel.chain.close()
    late = channel.all_reduce(values[1], "sum").then(lambda: None)
    with pytest.raises(UsageError, match="closed"):
        late.wait()
    other.close()
    again = TorchComm(world, f"{comm.name} to be closed", comm.process_group)
    again.channel("closed").all_reduce(values[0], "sum").wait()  # made anew
    again.close()


def tensors_that_need_gradients_are_sent(comm: TorchComm) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    code = torch.empty(4)

    def decode() -> None:
        weight.data.copy_(code)
        made.append((weight * 2).requires_grad)

    made: list[bool] = []
    code.copy_(weight.detach())
    comm.all_reduce(code, "sum").then(decode).wait()
    assert made == [False]
    assert weight.tolist() == [3.0] * 4


def averages_over_servers_can_be_followed(comm: TorchComm) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = paceline.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        fusion="single",
        collective="parameter-server",
    )
    over_servers = optimizer._training.comm
    rank = comm.rank
    order: list[int] = []
    pendings = []
    own = [torch.full((3,), float(rank + index)) for index in range(BUCKETS)]
    for index, buffer in enumerate(own):

        def second(index: int = index, buffer: torch.Tensor = buffer):
            order.append(index)
            return over_servers.all_reduce(buffer, "sum").then(lambda: None)

        pendings.append(over_servers.all_reduce(buffer, "sum").then(second))
        skew(rank, index)
    wait_in = pendings if rank else pendings[::-1]
    for pending in wait_in:
        pending.wait()
    assert order == list(range(BUCKETS))
    for index, buffer in enumerate(own):
        assert buffer.tolist() == [3.0 * (3 + 3 * index)] * 3
    optimizer.finish()


def messages_and_all_to_all(comm: TorchComm) -> None:
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


def an_all_reduce_made_of_sends_and_receives(comm: TorchComm) -> None:
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


def only_some_send_in_a_work(comm: TorchComm) -> None:
    """A work may send to one neighbour, while others issue nothing."""
    value = torch.tensor([1.0])

    def pass_on():
        if comm.rank == 0:
            return comm.send(value, 1)
        return comm.receive(value, 0) if comm.rank == 1 else None

    comm.all_reduce(value, "sum").then(pass_on).wait()
    assert value.item() == 3.0


def every_collective_forms_the_same_mean(comm: TorchComm) -> None:
    world = join_world()
    rank = comm.rank
    for name in COLLECTIVES:
        collective = make(name)
        if collective.needs_servers:
            continue
        other = over(collective, world, comm.channel(name))
        order: list[int] = []
        sums = [buffer.to(torch.int64) for buffer in buffers(rank)]
        pendings = []
        for index, buffer in enumerate(sums):

            def second(
                index: int = index,
                buffer: torch.Tensor = buffer,
                other=other,
                order=order,
            ):
                order.append(index)
                return other.all_reduce(buffer, "max")

            pendings.append(other.all_reduce(buffer, "sum").then(second))
            skew(rank, index)
        for pending in reversed(pendings):
            pending.wait()
        assert order == list(range(BUCKETS))
        for index, buffer in enumerate(sums):
            assert torch.equal(buffer, torch.full_like(buffer, 3 + 3 * index)), name
        mean = torch.tensor([[1.0 + rank, 3.0], [rank * rank, -1.0]])
        other.all_reduce(mean).wait()
        assert mean.tolist() == [[2.0, 3.0], [pytest.approx(5 / 3), -1.0]], name
        number = torch.tensor([complex(rank, 1)])
        other.all_reduce(number, "sum").wait()
        assert number.tolist() == [3 + 3j], name
        if rank < 2:
            pair = other.group((1, 0)).channel("inner")
            assert pair.collective is other.collective
            value = torch.tensor([5.0 + rank])
            pair.all_reduce(value, "sum").wait()
            assert value.item() == 11.0
        before = world.journal.bytes_sent
        count = 12 * 1024
        other.all_reduce(torch.zeros(count), "sum").wait()
        schedule = collective.schedule(count, other, other.racks)
        assert world.journal.bytes_sent - before == 4 * schedule.bytes_sent(rank)
        other.close()


def groups_that_are_made_once(comm: TorchComm) -> None:
    """Another pair in each step, all steps under way together."""
    n, rank = comm.size, comm.rank
    pendings, values, expected = [], [], []
    for step in range(12):
        alone = step % n
        pair = tuple(r for r in range(n) if r != alone)
        skew(rank, step)
        if rank == alone:
            continue
        group = comm.group(pair, once=True)
        assert (group.size, group.rank) == (2, pair.index(rank))
        assert group is not comm.group(pair, once=True)
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
    group = comm.group(range(n), once=True)
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
        with pytest.raises(UsageError, match="without connections of its own"):
            forbidden()


def groups_that_are_kept_are_bounded(comm: TorchComm) -> None:
    """Members agree on who sends how, whatever else each of them keeps."""
    world, rank = join_world(), comm.rank
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
        if world.name != "virtual":
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


def training_under_every_collective_is_bsp(comm: TorchComm) -> None:
    """All ranks hold the same bits, and native's up to rounding; one ends early."""
    rank = comm.rank
    found = {}
    for name in COLLECTIVES:
        if make(name).needs_servers:
            continue
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
        )
        optimizer = paceline.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            fusion="wfbp",
            collective=name,
        )
        data = torch.Generator().manual_seed(rank)
        for _ in range(3 if rank == 1 else 5):
            x = torch.randn(4, 5, generator=data)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        optimizer.finish()
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        most, least = flat.clone(), -flat
        comm.all_reduce(most, "max").wait()
        comm.all_reduce(least, "max").wait()
        assert torch.equal(most, -least), name
        found[name] = flat
    for name, flat in found.items():
        assert torch.allclose(flat, found["native"], rtol=1e-5, atol=1e-6), name
    model = torch.nn.Linear(1, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"unknown value for collective.*'rin'.*ring"):
        paceline.distribute(model, optim, collective="rin")


CASES = {
    case.__name__: case
    for case in (
        two_rounds_run_in_the_order_of_issue,
        three_rounds_nested_and_in_a_row,
        a_group_s_result_goes_on_among_all,
        every_collective_can_be_followed,
        an_error_of_a_work_reaches_wait,
        a_work_waits_for_nothing_and_makes_nothing,
        closing_drops_what_has_not_run,
        tensors_that_need_gradients_are_sent,
        averages_over_servers_can_be_followed,
        messages_and_all_to_all,
        an_all_reduce_made_of_sends_and_receives,
        only_some_send_in_a_work,
        every_collective_forms_the_same_mean,
        groups_that_are_made_once,
        groups_that_are_kept_are_bounded,
        training_under_every_collective_is_bsp,
    )
}


def run_case(name: str) -> None:
    """Run a case on this worker."""
    world = join_world()
    comm = TorchComm(world, f"case {name}")
    CASES[name](comm)
    comm.close()
