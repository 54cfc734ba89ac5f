"""What follows results (`Pending.then`): laws that hold in every runtime, on three workers."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.collectives.communicator import Communicator
from paceline.errors import UsageError
from paceline.runtimes.join import join_runtime
from paceline.testing import inspect
from tests.collectives.helpers import BUCKETS, buffers, skew


def two_rounds_run_in_the_order_of_issue(comm: Communicator) -> None:
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


def tensors_that_need_gradients_are_sent(comm: Communicator) -> None:
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


CASES = (
    two_rounds_run_in_the_order_of_issue,
    three_rounds_nested_and_in_a_row,
    many_chains_begin_to_issue_at_once,
    a_group_s_result_goes_on_among_all,
    every_collective_can_be_followed,
    an_error_of_a_work_reaches_wait,
    a_work_waits_for_nothing_and_makes_nothing,
    closing_drops_what_has_not_run,
    tensors_that_need_gradients_are_sent,
    averages_over_servers_can_be_followed,
)
