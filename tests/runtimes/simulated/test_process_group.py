"""Every torch.distributed call gives what mathematics says, in virtual time too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.cluster import Cluster
from paceline.errors import UsageError, WorkerFailedError
from tests.support.simulations import cluster, rack, run, run_on, simulation
from tests.support.tables import crossed

N = 5
OPERATIONS = {
    "SUM": lambda values: values.sum(0),
    "AVG": lambda values: values.mean(0),
    "MIN": lambda values: values.amin(0),
    "MAX": lambda values: values.amax(0),
    "PRODUCT": lambda values: values.prod(0),
}

pytestmark = pytest.mark.parametrize("play", [False, True])


def value(rank: int, size: int = 6) -> torch.Tensor:
    """What a rank contributes: small numbers, so that sums are exact; signs differ."""
    return (torch.arange(size, dtype=torch.float32) - 2) * (rank + 1) + rank


def values(size: int = 6) -> torch.Tensor:
    return torch.stack([value(rank, size) for rank in range(N)])


def operation(name: str) -> dist.ReduceOp:
    return getattr(dist.ReduceOp, name)


# Torch deprecates `all_gather_into_tensor` and `reduce_scatter_tensor`; scripts still have them.
older_names_too = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


# ---- reductions ----


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *crossed(3, OPERATIONS, [torch.float32, torch.float64, torch.bfloat16]),
        *((name, torch.long) for name in OPERATIONS if name != "AVG"),
    ],
)
def test_all_reduce(play: bool, name: str, dtype: torch.dtype) -> None:
    def body(rank: int) -> torch.Tensor:
        mine = value(rank).to(dtype)
        assert dist.all_reduce(mine, op=operation(name)) is None
        return mine

    expected = OPERATIONS[name](values()).to(dtype)
    for result in run(N, body, play=play):
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    ("name", "expected"), [("BAND", 0b1000), ("BOR", 0b1111), ("BXOR", 0b1001)]
)
def test_all_reduce_of_bits(play: bool, name: str, expected: int) -> None:
    def body(rank: int) -> int:
        bits = torch.tensor([0b1011, 0b1100, 0b1110][rank])
        dist.all_reduce(bits, op=operation(name))
        return int(bits)

    assert run(3, body, play=play) == [expected] * 3


def test_all_reduce_adds_in_gloos_order(play: bool) -> None:
    # The only chunk starts at the last rank and goes down: (-1e8 + 1e8) + 1 is 1 in single
    # precision; in rank order (1 + 1e8) - 1e8 would be 0. Who comes first is no matter.
    def body(rank: int) -> float:
        paceline.pace(3.0 - rank)
        mine = torch.tensor([1.0, 1e8, -1e8][rank])
        dist.all_reduce(mine)
        return float(mine)

    assert run(3, body, play=play) == [1.0] * 3


def test_all_reduce_into_parameters_and_views(play: bool) -> None:
    def body(rank: int) -> list[torch.Tensor]:
        parameter = torch.nn.Parameter(value(rank))
        dist.all_reduce(parameter)
        matrix = torch.zeros(6, 3)
        matrix[:, 1] = value(rank)
        dist.all_reduce(matrix[:, 1])
        return [parameter.detach(), matrix]

    total = values().sum(0)
    for parameter, matrix in run(N, body, play=play):
        assert torch.equal(parameter, total)
        assert torch.equal(matrix[:, 1], total)
        assert not matrix[:, [0, 2]].any()


def test_inference_tensors(play: bool) -> None:
    # The result is written on the thread of whoever waits last: here one that has left
    # inference mode, or never was in it.
    def body(rank: int) -> list[float]:
        with torch.inference_mode(rank != 0):
            reduced, gathered = torch.ones(2), torch.zeros(2 * N)
            received = torch.zeros(2)
            works = [
                dist.all_reduce(reduced, async_op=True),
                dist.all_gather_single(gathered, torch.ones(2), async_op=True),
                dist.irecv(received, (rank - 1) % N),
                dist.isend(torch.ones(2), (rank + 1) % N),
            ]
        for work in works:
            work.wait()
        dist.barrier()
        return [float(t.sum()) for t in (reduced, gathered, received)]

    assert run(N, body, play=play) == [[2.0 * N, 2.0 * N, 2.0]] * N


@pytest.mark.parametrize(("name", "root"), crossed(2, OPERATIONS, [0, 3]))
def test_reduce(play: bool, name: str, root: int) -> None:
    def body(rank: int) -> torch.Tensor:
        mine = value(rank)
        dist.reduce(mine, root, op=operation(name))
        return mine

    results = run(N, body, play=play)
    torch.testing.assert_close(results[root], OPERATIONS[name](values()))
    for rank in set(range(N)) - {root}:
        assert torch.equal(results[rank], value(rank))


@older_names_too
@pytest.mark.parametrize("name", OPERATIONS)
def test_reduce_scatter(play: bool, name: str) -> None:
    def body(rank: int) -> list[torch.Tensor]:
        whole = value(rank, 2 * N)
        listed, single, older = torch.zeros(3, 2)
        shaped = torch.zeros(1, 2)
        op = operation(name)
        dist.reduce_scatter(listed, list(whole.clone().split(2)), op=op)
        dist.reduce_scatter_single(single, whole, op=op)
        dist.reduce_scatter_single(shaped, whole.view(N, 2), op=op)
        dist.reduce_scatter_tensor(older, whole, op=op)
        return [listed, single, shaped.view(2), older]

    parts = OPERATIONS[name](values(2 * N)).split(2)
    for part, results in zip(parts, run(N, body, play=play), strict=True):
        for result in results:
            torch.testing.assert_close(result, part)


# ---- copies ----


@pytest.mark.parametrize("root", [0, 3])
def test_broadcast(play: bool, root: int) -> None:
    def body(rank: int) -> torch.Tensor:
        mine = value(rank)
        dist.broadcast(mine, root)
        return mine

    for result in run(N, body, play=play):
        assert torch.equal(result, value(root))


@older_names_too
def test_all_gather(play: bool) -> None:
    def body(rank: int) -> list[torch.Tensor]:
        listed = [torch.zeros(6) for _ in range(N)]
        single, (stacked, older) = torch.zeros(6 * N), torch.zeros(2, N, 6)
        dist.all_gather(listed, value(rank))
        dist.all_gather_single(single, value(rank))
        dist.all_gather_single(stacked, value(rank))
        dist.all_gather_into_tensor(older, value(rank))
        return [torch.stack(listed), single.view(N, 6), stacked, older]

    for results in run(N, body, play=play):
        for result in results:
            assert torch.equal(result, values())


@pytest.mark.parametrize("root", [0, 3])
def test_gather_and_scatter(play: bool, root: int) -> None:
    def body(rank: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        gathered = [torch.zeros(6) for _ in range(N)] if rank == root else None
        dist.gather(value(rank), gathered, dst=root)
        mine = torch.zeros(6)
        parts = [10 * value(i) for i in range(N)] if rank == root else None
        dist.scatter(mine, parts, src=root)
        return gathered and torch.stack(gathered), mine

    results = run(N, body, play=play)
    assert torch.equal(results[root][0], values())
    for rank, (_, mine) in enumerate(results):
        assert torch.equal(mine, 10 * value(rank))


def test_all_to_all(play: bool) -> None:
    def rows(source: int, to: int) -> int:
        return 2 * source + to + 1

    def body(rank: int) -> list[list[float]]:
        even = [torch.full((2,), 10.0 * rank + to) for to in range(N)]
        listed, single = [torch.zeros(2) for _ in range(N)], torch.zeros(2 * N)
        dist.all_to_all(listed, even)
        dist.all_to_all_single(single, torch.cat(even))
        sent = [rows(rank, to) for to in range(N)]
        received = [rows(source, rank) for source in range(N)]
        uneven = [torch.full((n,), 10.0 * rank + to) for to, n in enumerate(sent)]
        parts = torch.zeros(sum(received))
        dist.all_to_all_single(parts, torch.cat(uneven), received, sent)
        return [torch.cat(listed).tolist(), single.tolist(), parts.tolist()]

    for rank, (listed, single, parts) in enumerate(run(N, body, play=play)):
        values = [10.0 * source + rank for source in range(N)]
        assert listed == single == [values[s] for s in range(N) for _ in range(2)]
        assert parts == [values[s] for s in range(N) for _ in range(rows(s, rank))]


def test_objects(play: bool) -> None:
    def body(rank: int) -> None:
        gathered = [None] * N
        dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
        assert gathered == [{"rank": r, "text": "x" * r} for r in range(N)]

        shared = ["from", rank, {"long": "y" * 100 * rank}]
        dist.broadcast_object_list(shared, src=2)
        assert shared == ["from", 2, {"long": "y" * 200}]

        collected = [None] * N if rank == 1 else None
        dist.gather_object(rank * 11, collected, dst=1)
        assert collected == ([0, 11, 22, 33, 44] if rank == 1 else None)

        mine = [None]
        dist.scatter_object_list(mine, list("abcde") if rank == 3 else None, src=3)
        assert mine == ["abcde"[rank]]

    run(N, body, play=play)


@pytest.mark.parametrize("name", ["barrier", "monitored_barrier"])
def test_nobody_leaves_a_barrier_before_everybody_came(play: bool, name: str) -> None:
    def body(rank: int) -> float:
        paceline.pace(0.1 * rank)
        getattr(dist, name)()
        return paceline.now()

    for left in run(N, body, play=play):
        assert 0.4 <= left < 0.401


# ---- point to point ----


def test_send_and_receive(play: bool) -> None:
    def body(rank: int) -> torch.Tensor:
        mine, other = value(rank), torch.zeros(6)
        if rank % 2:
            dist.recv(other, rank - 1)
            dist.send(mine, rank - 1)
        elif rank + 1 < N:
            dist.send(mine, rank + 1)
            dist.recv(other, rank + 1)
        return other

    results = run(N, body, play=play)
    for rank, peer in ((0, 1), (1, 0), (2, 3), (3, 2)):
        assert torch.equal(results[rank], value(peer))
    assert not results[4].any()


def test_messages_keep_their_order_and_tags_tell_them_apart(play: bool) -> None:
    def body(rank: int) -> list[float]:
        if rank == 0:
            sent = [(1.0, 0), (2.0, 7), (3.0, 0), (4.0, 7)]
            works = [dist.isend(torch.tensor(x), 1, tag=tag) for x, tag in sent]
        else:
            got = [torch.zeros(()) for _ in range(4)]
            works = [
                dist.irecv(buffer, 0, tag=tag)
                for buffer, tag in zip(got, (7, 7, 0, 0), strict=True)
            ]
        for work in works:
            work.wait()
        return [float(x) for x in got] if rank else []

    assert run(2, body, play=play)[1] == [2.0, 4.0, 1.0, 3.0]


@pytest.mark.parametrize("batched", [False, True])
def test_neighbours_exchange(play: bool, batched: bool) -> None:
    def body(rank: int) -> torch.Tensor:
        got = torch.zeros(6)
        ahead, behind = (rank + 1) % N, (rank - 1) % N
        if batched:
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, value(rank), ahead),
                    dist.P2POp(dist.irecv, got, behind),
                ]
            )
        else:
            works = [dist.isend(value(rank), ahead), dist.irecv(got, behind)]
        for work in works:
            work.wait()
        return got

    for rank, got in enumerate(run(N, body, play=play)):
        assert torch.equal(got, value((rank - 1) % N))


def test_a_send_begins_when_its_receive_is_posted(play: bool) -> None:
    # 1 MB at 25 MB/s: 40 ms, and 0.05 ms until it is there.
    def body(rank: int) -> float:
        buffer = torch.zeros(250_000)
        if rank == 0:
            dist.send(buffer, 1)
        else:
            paceline.pace(1.0)
            dist.recv(buffer, 0)
        return paceline.now()

    assert run(2, body, play=play) == pytest.approx([1.04, 1.04005])


def test_receive_from_anyone_is_refused(play: bool) -> None:
    with pytest.raises(WorkerFailedError, match="name the source") as caught:
        run(2, lambda rank: dist.recv(torch.zeros(1)), play=play)
    assert isinstance(caught.value.__cause__, UsageError)


# ---- groups ----


def test_groups_of_some(play: bool) -> None:
    def body(rank: int) -> tuple[float | None, float | None]:
        odd = dist.new_group([1, 3])
        even = dist.new_group([4, 0, 2])
        sums: list[float | None] = []
        for group, members in ((odd, (1, 3)), (even, (0, 2, 4))):
            total = torch.tensor(float(rank))
            if rank in members:
                assert dist.get_rank(group) == members.index(rank)
                assert dist.get_world_size(group) == len(members)
                dist.all_reduce(total, group=group)
            sums.append(float(total) if rank in members else None)
        return sums[0], sums[1]

    pairs = [(None, 6.0), (4.0, None)] * 2 + [(None, 6.0)]
    assert run(N, body, play=play) == pairs


def test_roots_and_peers_in_a_group(play: bool) -> None:
    def body(rank: int) -> list[float]:
        group = dist.new_group([1, 2, 4])
        if rank not in (1, 2, 4):
            return []
        by_global, by_place = torch.tensor(float(rank)), torch.tensor(float(rank))
        dist.broadcast(by_global, src=4, group=group)
        dist.broadcast(by_place, group_src=1, group=group)
        message = torch.tensor(100.0 + rank)
        if rank == 1:
            dist.send(message, dst=4, group=group)
        elif rank == 4:
            dist.recv(message, src=1, group=group)
        return [float(t) for t in (by_global, by_place, message)]

    expected = [[], [4.0, 2.0, 101.0], [4.0, 2.0, 102.0], [], [4.0, 2.0, 101.0]]
    assert run(N, body, play=play) == expected


def test_two_groups_of_the_same_ranks_are_two_queues(play: bool) -> None:
    # In one queue these would be mismatched: each rank begins with another group.
    def body(rank: int) -> list[float]:
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        local = [
            dist.new_group([0, 1], use_local_synchronization=True) for _ in range(2)
        ]
        results = []
        for a, b in (groups, local):
            x, y = torch.tensor(1.0 + rank), torch.ones(3)
            calls = [(x, a), (y, b)]
            works = [
                dist.all_reduce(tensor, group=group, async_op=True)
                for tensor, group in (calls if rank else calls[::-1])
            ]
            for work in works:
                work.wait()
            results += [float(x), float(y.sum())]
        return results

    assert run(2, body, play=play) == [[3.0, 6.0] * 2] * 2


def test_local_synchronization_needs_members_only(play: bool) -> None:
    def body(rank: int) -> float:
        if rank not in (1, 3):
            return -1.0
        group = dist.new_group([3, 1], use_local_synchronization=True)
        mine = torch.tensor(float(rank))
        dist.all_reduce(mine, group=group)
        return float(mine)

    assert run(N, body, play=play) == [-1.0, 4.0, -1.0, 4.0, -1.0]


def test_a_group_can_keep_its_order(play: bool) -> None:
    def body(rank: int) -> list[float]:
        group = dist.new_group([2, 0, 1], sort_ranks=False)
        gathered = torch.zeros(3)
        dist.all_gather_single(gathered, torch.tensor([float(rank)]), group=group)
        return [dist.get_rank(group), *gathered.tolist()]

    assert run(3, body, play=play) == [
        [1, 2.0, 0.0, 1.0],
        [2, 2.0, 0.0, 1.0],
        [0, 2.0, 0.0, 1.0],
    ]


def test_destroy_and_begin_again(play: bool) -> None:
    def body(rank: int) -> list[float]:
        results = []
        for backend in ("gloo", "nccl", None):
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group(backend)
            half = dist.new_group([0, 1])
            mine = torch.tensor(1.0)
            if rank < 2:
                dist.all_reduce(mine, group=half)
            dist.all_reduce(mine)
            results.append(float(mine))
        dist.destroy_process_group()
        assert not dist.is_initialized()
        return results

    assert run(N, body, play=play) == [[2.0 + 2.0 + 3.0] * 3] * N


def test_a_new_beginning_has_nothing_left_from_before(play: bool) -> None:
    # The first message was never received, and one rank made a call more.
    def body(rank: int) -> list[float]:
        if rank == 0:
            dist.isend(torch.tensor(-1.0), 1)
            dist.barrier(async_op=True)
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        got, total = torch.tensor(5.0), torch.tensor(1.0)
        dist.recv(got, 0) if rank else dist.send(got, 1)
        dist.all_reduce(total)
        return [float(got), float(total)]

    assert run(2, body, play=play) == [[5.0, 2.0]] * 2


@pytest.mark.parametrize("arguments", [{}, {"rank": -1}, {"world_size": 3}])
def test_scripts_may_initialize_as_under_torchrun(play: bool, arguments) -> None:
    def main(rank: int) -> None:
        dist.init_process_group("nccl", init_method="env://", **arguments)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 3)
        paceline.init()  # again is harmless
        assert paceline.rank() == rank
        assert paceline.world_size() == 3
        assert paceline.runtime_name() == "simulated"

    simulation(3, play=play).run(main)


@pytest.mark.parametrize("arguments", [{"rank": 9}, {"world_size": 2}])
def test_another_rank_or_size_is_refused(play: bool, arguments) -> None:
    ((key, got),) = arguments.items()
    with pytest.raises(WorkerFailedError, match=f"{key}={got}.*worker 0 of 3"):
        simulation(3, play=play).run(
            lambda rank: dist.init_process_group("gloo", **arguments)
        )


# ---- when values are taken and given ----


def test_a_buffer_changed_after_launch_changes_nothing(play: bool) -> None:
    def body(rank: int) -> list[float]:
        buffers = [value(rank) for _ in range(4)]
        whole = value(rank, 2 * N)
        gathered, part, got = torch.zeros(6 * N), torch.zeros(2), torch.zeros(6)
        reduced, sent, spread, shown = buffers
        works = [
            dist.all_reduce(reduced, async_op=True),
            dist.broadcast(spread, 2, async_op=True),
            dist.all_gather_single(gathered, shown, async_op=True),
            dist.reduce_scatter_single(part, whole, async_op=True),
            dist.isend(sent, (rank + 1) % N),
            dist.irecv(got, (rank - 1) % N),
        ]
        for buffer in (*buffers, whole):
            buffer.fill_(1e6)
        for work in works:
            work.wait()
        assert torch.equal(reduced, values().sum(0))
        assert torch.equal(gathered.view(N, 6), values())
        assert torch.equal(part, values(2 * N).sum(0)[2 * rank : 2 * rank + 2])
        assert torch.equal(got, value((rank - 1) % N))
        return spread.tolist()

    spread = run(N, body, play=play)
    assert spread[2] == [1e6] * 6  # the root's own buffer is nobody else's business
    assert [spread[rank] for rank in (0, 1, 3, 4)] == [value(2).tolist()] * 4


def test_a_result_is_not_there_before_its_time(play: bool) -> None:
    def body(rank: int) -> list[bool]:
        mine = torch.ones(25_000)
        work = dist.all_reduce(mine, async_op=True)
        seen = [work.is_completed(), bool(mine[0] == 1)]
        work.wait()
        return [*seen, work.is_completed(), bool(mine[0] == N)]

    assert run(N, body, play=play) == [[False, True, True, True]] * N


def test_waiting_again_is_harmless(play: bool) -> None:
    def body(rank: int) -> float:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        first = paceline.now()
        work.wait()
        return paceline.now() - first

    assert run(N, body, play=play) == [0.0] * N


# ---- the same again ----


def everything(rank: int) -> list[torch.Tensor]:
    """Collectives that overlap, skew, groups, messages, random numbers."""
    halves = [dist.new_group([0, 1, 2]), dist.new_group([3, 4])]
    kept = []
    for step in range(4):
        paceline.pace(0.001 * torch.rand(()).item() * (rank + 1))
        tensors = [torch.rand(1000 * (step + 1)) + rank for _ in range(3)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        dist.all_reduce(tensors[0].clone(), group=halves[rank // 3])
        got = torch.zeros(50)
        works += [
            dist.isend(tensors[1][:50].clone(), (rank + 1) % N),
            dist.irecv(got, (rank - 1) % N),
        ]
        dist.broadcast(tensors[2].clone(), step)
        for work in works:
            work.wait()
        kept += [*tensors, got]
    return kept


def racks() -> Cluster:
    return cluster(rack(3, uplink=10e6, speed=(1.0, 0.5, 2.0)), rack(2, link=12.5e6))


def test_two_runs_are_equal_bit_for_bit(play: bool) -> None:
    runs = []
    for _ in range(2):
        runtime = simulation(racks(), play=play, trace=True)
        runs.append((run_on(runtime, everything), runtime.result))
    (first, one), (second, two) = runs
    # Three sums of all, one of a half, a broadcast, and a message to the next.
    assert len(one.spans) == 4 * (3 + 1 + 1 + 1) * N
    assert one.spans == two.spans
    assert [kept.spans for kept in one.kept] == [kept.spans for kept in two.kept]
    assert one.virtual_seconds == two.virtual_seconds > 0
    assert one.switches == two.switches
    for ours, theirs in zip(first, second, strict=True):
        assert all(map(torch.equal, ours, theirs))
