"""Laws of a `Comm` that hold in every runtime: each case runs on three workers, with a communicator of its
own.

- What follows results (`Pending.then`).
- What ranks send each other, and groups of some of them.
- How averages are formed, as a whole and in two halves.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

import paceline
from paceline.collectives.autotune import CANDIDATES
from paceline.collectives.communicator import Communicator, ConnectionlessGroup
from paceline.collectives.reduce_scatter import NativeReduceScatter, reduce_scatter
from paceline.collectives.registry import COLLECTIVES, attach, make
from paceline.collectives.torch_group import MOST_GROUPS
from paceline.errors import UsageError
from paceline.interfaces.buckets import wire_bytes
from paceline.runtimes.join import join_runtime
from paceline.testing import inspect

BUCKETS = 6


def buffers(rank: int) -> list[torch.Tensor]:
    """Large ones first: gloo moves two at a time, so that small ones overtake them."""
    sizes = [200_000, 10, 50_000, 3, 100_000, 1]
    return [torch.full((size,), float(rank + i)) for i, size in enumerate(sizes)]


def skew(rank: int, step: int) -> None:
    """Workers come in another order each time."""
    paceline.pace(0.002 * ((rank + step) % 3))


def three_rounds_nested_and_in_a_row(comm: Communicator) -> None:
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


def many_chains_begin_to_issue_at_once(comm: Communicator) -> None:
    """Each makes its own queue, in a thread of its own: in another order on each rank."""
    channels = [comm.channel(f"at once {number}") for number in range(BUCKETS)]
    ends, own = [], []
    for channel in channels:
        value = torch.tensor([float(comm.rank)])
        own.append(value)
        first = channel.all_reduce(value, "sum")
        ends.append(first.then(lambda c=channel, v=value: c.all_reduce(v, "sum")))
    for end in ends:
        end.wait()
    assert [value.item() for value in own] == [9.0] * len(own)


def a_group_s_result_goes_on_among_all(comm: Communicator) -> None:
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


def every_collective_can_be_followed(comm: Communicator) -> None:
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


def an_error_of_a_work_reaches_wait(comm: Communicator) -> None:
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


def a_work_waits_for_nothing_and_makes_nothing(comm: Communicator) -> None:
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

        def forbidden(
            name: str = name, channel: Communicator = channel, outside=outside
        ):
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


def closing_drops_what_has_not_run(comm: Communicator) -> None:
    """What is left at a good end is dropped, and whoever still waits is told."""
    runtime = join_runtime()
    other = Communicator(runtime, f"{comm.name} to be closed")
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
    other.close()
    value = torch.ones(2)
    for late in (
        lambda: other.all_reduce(value),
        lambda: channel.send(value, (comm.rank + 1) % comm.size),
        lambda: channel.broadcast(value),
    ):
        with pytest.raises(UsageError, match="which is closed"):
            late()
    again = Communicator(runtime, f"{comm.name} to be closed")
    again.channel("closed").all_reduce(values[0], "sum").wait()  # made anew
    again.close()


def averages_over_servers_can_be_followed(comm: Communicator) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = paceline.distribute(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        buckets="single",
        collective="parameter-server",
    )
    over_servers = inspect(optimizer).comm
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


WORKS = (
    three_rounds_nested_and_in_a_row,
    many_chains_begin_to_issue_at_once,
    a_group_s_result_goes_on_among_all,
    every_collective_can_be_followed,
    an_error_of_a_work_reaches_wait,
    a_work_waits_for_nothing_and_makes_nothing,
    closing_drops_what_has_not_run,
    averages_over_servers_can_be_followed,
)


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
        assert not group.has_own_group
        again = channel.group(members)  # made anew, by both
        assert again is not group
        again.all_reduce(value, "sum").wait()
        assert value.item() == 2 * sum(members)
    if rank == 0:
        channel._groups = {}
    with pytest.raises(UsageError, match="this one among them"):
        channel.group([(rank + 1) % 3])


MESSAGES = (
    messages_and_all_to_all,
    an_all_reduce_made_of_sends_and_receives,
    only_some_send_in_a_work,
    groups_over_the_same_connections,
    streams_whose_names_have_one_checksum,
    groups_that_are_kept_are_bounded,
)


def every_collective_forms_the_same_mean(comm: Communicator) -> None:
    runtime = join_runtime()
    rank = comm.rank
    for name in COLLECTIVES:
        collective = make(name)
        if collective.needs == "servers":
            continue
        other = attach(collective, runtime, comm.channel(name))
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
        before = runtime.recorder.bytes_sent
        sent_in_bytes = 4 * 12 * 1024
        other.all_reduce(torch.zeros(sent_in_bytes // 4), "sum").wait()
        schedule = collective.schedule(sent_in_bytes, other.placement)
        assert runtime.recorder.bytes_sent - before == schedule.bytes_sent(rank)
        other.close()


def auto_takes_the_same_row_on_all_ranks(comm: Communicator) -> None:
    """In the whole and in groups, in the training's order and in works."""
    runtime, rank = join_runtime(), comm.rank
    auto = make("auto")
    other = attach(auto, runtime, comm.channel("auto"))
    if (
        comm.placement.cluster is None
    ):  # it was measured: all have the slowest one's times
        times = [auto._measured[name].seconds for name in sorted(auto._measured)]
        own = torch.tensor(times, dtype=torch.float64)
        most = own.clone()
        comm.all_reduce(most, "max").wait()
        assert torch.equal(own, most)
    others = [other, other.group((0, 1) if rank < 2 else (2,))]
    others.append(ConnectionlessGroup(other, range(3), f"{other.name}, everybody"))
    for one in others:
        names = list(CANDIDATES)
        for size in (1, 1000, 300_000):
            chosen = torch.tensor([names.index(auto.choice(4 * size, one.placement))])
            least, total = -chosen, torch.full((size,), float(one.rank + 1))
            pending = one.all_reduce(total, "sum").then(
                lambda one=one, total=total: one.all_reduce(total, "max")
            )
            one.all_reduce_natively(chosen, "max").wait()
            one.all_reduce_natively(least, "max").wait()
            assert torch.equal(chosen, -least)
            pending.wait()
            expected = one.size * (one.size + 1) / 2
            assert torch.equal(total, torch.full_like(total, expected))
    other.close()


AVERAGES = (
    every_collective_forms_the_same_mean,
    auto_takes_the_same_row_on_all_ranks,
)


SCHEDULES = ("ring", "hierarchical", "halving-doubling", "tree")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float64)
SIZES = (1, 2, 7, 1001)


def random(size: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Of different magnitudes: each order of additions rounds in its own way."""
    draw = torch.Generator().manual_seed(1000 * rank + size)
    values = torch.randn(size, dtype=torch.complex64, generator=draw)
    values *= torch.pow(10.0, 2 * torch.rand(size, generator=draw))
    return (values if dtype.is_complex else values.real.contiguous()).to(dtype)


def two_halves_are_the_whole(comm: Communicator) -> None:
    """To the bit, in whatever order they are gathered; native's are the ring's."""
    runtime, rank = join_runtime(), comm.rank
    wholes = {
        name: attach(make(name), runtime, comm.channel(f"{name}, whole"))
        for name in SCHEDULES
    }
    for row in ("native", "auto", *SCHEDULES):
        halves = attach(make(row), runtime, comm.channel(f"{row}, halves"))
        held, expected, scattered = [], [], []
        for number, (size, dtype) in enumerate(product(SIZES, DTYPES)):
            buffer, operation = random(size, dtype, rank), ("sum", "mean")[number % 2]
            name = row
            if row == "auto":
                name = halves.collective.choice(wire_bytes(buffer), halves.placement)
            whole = wholes["ring" if name == "native" else name]
            expected.append(buffer.clone())
            pending = whole.all_reduce(expected[-1], operation)
            held.append(buffer)
            scattered.append(reduce_scatter(halves, buffer, operation))
            pending.wait()
            skew(rank, number)
        draw = torch.Generator().manual_seed(5)
        order = torch.randperm(len(held), generator=draw).tolist()
        pendings = [(number, scattered[number].gather()) for number in order]
        for number, pending in reversed(pendings):
            pending.wait()
            pending.wait()
            assert torch.equal(held[number], expected[number]), (row, number)
        halves.close()
    for whole in wholes.values():
        whole.close()


def halves_send_as_much_as_the_whole(comm: Communicator) -> None:
    runtime, n = join_runtime(), comm.size
    recorder = runtime.recorder
    for row in ("native", *SCHEDULES):
        collective = make(row)
        other = attach(collective, runtime, comm.channel(f"{row}, counted"))
        for size in (1, 5, 1200):
            buffer = torch.zeros(size)
            start = recorder.bytes_sent
            under_way = reduce_scatter(other, buffer, "sum")
            first = recorder.bytes_sent - start
            under_way.gather().wait()
            both = recorder.bytes_sent - start
            schedule = collective.schedule(size, other.placement)
            assert both == 4 * schedule.bytes_sent(comm.rank)
            if row in ("native", "ring") and size % n == 0:
                assert 2 * first == both
        other.close()


def gathers_start_in_the_order_of_asking(comm: Communicator) -> None:
    """Asked for before, between and after the scatters, while others are issued; what follows
    a gather sees the whole result."""
    channel = comm.channel("orders")
    rank, n = comm.rank, comm.size
    held = [torch.full((size,), float(rank + 1)) for size in (50_000, 3, 1, 20_000, 9)]
    order: list[int] = []
    ends = []
    under_way = {}

    def gather(number: int) -> None:
        def note() -> None:
            assert torch.equal(held[number], torch.full_like(held[number], total))
            order.append(number)

        total = n * (n + 1) / 2
        ends.append(under_way.pop(number).gather().then(note))

    for number, buffer in enumerate(held):
        skew(rank, number)
        under_way[number] = reduce_scatter(channel, buffer, "sum")
        if number % 2:
            gather(number)
    for number in (4, 0, 2):
        gather(number)
    for pending in ends[::-1]:
        pending.wait()
    assert order == [1, 3, 4, 0, 2]
    channel.close()


def own_halves_are_the_mean(comm: Communicator) -> None:
    """As under NCCL, where no schedule is performed; in the whole numbers that have one sum."""
    n, rank = comm.size, comm.rank
    channel = comm.channel("own halves")
    for size in (1, n, 3 * n, 1001):
        held = (torch.arange(size) + rank).to(torch.float64)
        number = torch.full((size,), complex(rank, 1.0))
        pendings = [
            NativeReduceScatter(channel, buffer, "sum").gather()
            for buffer in (held, number)
        ]
        for pending in pendings:
            pending.wait()
            pending.wait()
        ranks = n * (n - 1) // 2
        assert torch.equal(held, (n * torch.arange(size) + ranks).to(torch.float64))
        assert number.tolist() == [pytest.approx(complex(ranks, n))] * size
    channel.close()


HALVES = (
    two_halves_are_the_whole,
    halves_send_as_much_as_the_whole,
    gathers_start_in_the_order_of_asking,
    own_halves_are_the_mean,
)


CASES = {case.__name__: case for case in (*WORKS, *MESSAGES, *AVERAGES, *HALVES)}


def run_case(name: str) -> None:
    """Run a case on this worker."""
    runtime = join_runtime()
    comm = Communicator(runtime, f"case {name}")
    CASES[name](comm)
    comm.close()
