"""The laws of a `Comm` in virtual time, and on three real processes in one job; what follows results,
and buffers that stand for larger ones.
"""

import threading
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from paceline.collectives.communicator import Communicator, ConnectionlessGroup
from paceline.collectives.pending import ContinuationChain, ThreadRunner, WaitingRunner
from paceline.collectives.registry import COLLECTIVES, attach, make
from paceline.errors import UsageError
from paceline.interfaces.buckets import stand_in_for
from paceline.records import StepRecorder
from paceline.runtimes.join import join_runtime
from paceline.runtimes.processes import PEER_LOST_MARKERS
from tests.collectives.cases import CASES, run_case
from tests.support.forked import run_together, together
from tests.support.hanging import SECONDS
from tests.support.simulations import cluster, rack, run

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("play", [False, True], ids=["priced", "played"])
@pytest.mark.parametrize("name", CASES)
def test_law_in_virtual_time(name, play):
    run(3, lambda rank: run_case(name), play=play)


@pytest.mark.slow
def test_every_law_on_three_processes():
    ends = run_together(3, ["-m", "tests.collectives.all_cases"], folder=ROOT)
    for rank, end in enumerate(ends):
        said = set(end.stdout.splitlines())
        assert said >= {f"rank {rank} {name}: ok" for name in CASES}, end.stdout
        assert f"rank {rank} leaves nothing" in said


def test_a_rank_that_dies_in_a_work_ends_the_job():
    ranks = together(3, ["-m", "tests.collectives.dies_in_a_work"], folder=ROOT)
    try:
        ends = [rank.done() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ends[2].returncode == 3
    for end in ends[:2]:
        assert end.returncode not in (0, 3), end.stdout + end.stderr
        assert any(words in end.stderr for words in PEER_LOST_MARKERS), end.stderr


WORKERS = 6
SIZE = 720_720
"""Bytes; of so many elements parts are whole, however they are cut."""


def all_reduce(comm, tensor):
    return comm.all_reduce(tensor(SIZE))


def broadcast(comm, tensor):
    return comm.broadcast(tensor(SIZE))


def reduce_scatter(comm, tensor):
    return comm.reduce_scatter(tensor(SIZE // WORKERS), tensor(SIZE))


def all_gather(comm, tensor):
    return comm.all_gather(tensor(SIZE), tensor(SIZE // WORKERS))


def all_to_all(comm, tensor):
    return comm.all_to_all(tensor(SIZE), tensor(SIZE))


OPERATIONS = [all_reduce, broadcast, reduce_scatter, all_gather, all_to_all]


def seconds(make_comm, operation, elements):
    """Of an operation on `SIZE` bytes in so many elements."""

    def tensor(size):
        return stand_in_for(size, torch.zeros(max(1, elements * size // SIZE)))

    def body(rank):
        runtime = join_runtime()
        comm = make_comm(runtime, Communicator(runtime))
        start = runtime.clock.now()
        operation(comm, tensor).wait()
        return runtime.clock.now() - start

    return max(run(cluster(rack(4), rack(2, uplink=8e6)), body))


@pytest.mark.parametrize("name", sorted(COLLECTIVES.keys() - {"parameter-server"}))
def test_a_collective_s_price_is_of_the_bytes(name):
    def of(elements):
        return seconds(
            lambda runtime, comm: attach(make(name), runtime, comm),
            all_reduce,
            elements,
        )

    assert of(2) == of(100) == of(SIZE // 4)


def own_group(_, comm):
    return comm.group(range(WORKERS))


def sends(_, comm):
    return ConnectionlessGroup(comm, range(WORKERS), "sends")


@pytest.mark.parametrize("make_comm", [own_group, sends])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_price_of_each_operation_is_of_the_bytes(operation, make_comm):
    def of(elements):
        return seconds(make_comm, operation, elements)

    assert of(WORKERS) == of(100 * WORKERS) == of(SIZE // 4)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_a_message_is_sent_at_the_price_of_the_bytes(shape):
    def of(tensor):
        def body(rank):
            runtime = join_runtime()
            comm, start = Communicator(runtime), runtime.clock.now()
            (comm.receive if rank else comm.send)(tensor, 1 - rank).wait()
            return runtime.clock.now() - start

        return max(run(2, body))

    assert of(stand_in_for(SIZE, torch.zeros(shape))) == of(torch.zeros(SIZE // 4))


class Result:
    """Something that a chain waits for; the test says when it is in."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.has_arrived = threading.Event()
        self.is_awaited = threading.Event()
        self.error = error

    def wait_for_result(self) -> None:
        self.is_awaited.set()
        self.has_arrived.wait()
        if self.error is not None:
            raise self.error

    def on_completion(self, action):
        raise AssertionError("this is no simulated runtime")


class Runtime:
    """What a chain asks of its runtime."""

    def __init__(self) -> None:
        self.clock = SimpleNamespace(now=lambda: 0.0)
        self.recorder = StepRecorder(0, self.clock.now)
        self.runners = []

    def runner(self, name, *, thread):
        self.runners.append(ThreadRunner(name) if thread else WaitingRunner())
        return self.runners[-1]


@pytest.fixture
def runtime():
    return Runtime()


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_works_run_in_the_order_of_issue_whatever_is_in_first(runtime):
    chain = ContinuationChain(runtime, "order")
    results = [Result() for _ in range(3)]
    ran = []
    pendings = [
        chain.append(result, lambda i=i: ran.append(i))
        for i, result in enumerate(results)
    ]
    results[2].has_arrived.set()
    results[1].has_arrived.set()
    results[0].is_awaited.wait()
    assert ran == []
    results[0].has_arrived.set()
    pendings[2].wait()
    assert ran == [0, 1, 2]
    chain.close()


def test_works_run_beside_the_caller_without_gradients(runtime):
    chain = ContinuationChain(runtime, "beside")
    seen = []
    chain.append(
        None, lambda: seen.append((threading.current_thread(), torch.is_grad_enabled()))
    ).wait()
    assert seen[0][0] is not threading.current_thread()
    assert not seen[0][1]
    chain.close()


def test_a_thread_starts_with_the_first_work_and_ends_with_close(runtime):
    chain = ContinuationChain(runtime, "lazy")
    assert threads("lazy") == []
    chain.append(None, lambda: None).wait()
    assert len(threads("lazy")) == 1
    chain.close()
    assert threads("lazy") == []


def test_a_runner_that_nobody_closes_takes_its_thread_along():
    runner = ThreadRunner("forgotten")
    told = runner.completion_event("told")
    runner.put(None, lambda error: told.set())
    told.wait()
    (thread,) = threads("forgotten")
    del runner
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_close_drops_what_has_not_run_and_says_so(runtime):
    chain = ContinuationChain(runtime, "closed")
    under_way, ran = Result(), []
    first = chain.append(under_way, lambda: ran.append("first"))
    second = chain.append(Result(), lambda: ran.append("second"))
    inner = chain.nested.append(None, lambda: ran.append("inner"))
    inner.wait()
    under_way.is_awaited.wait()
    closing = threading.Thread(target=chain.close)
    closing.start()
    with pytest.raises(UsageError, match="was closed before"):
        second.wait()
    under_way.has_arrived.set()  # the operation under way ends
    with pytest.raises(UsageError, match="was closed before"):
        first.wait()
    closing.join()
    assert ran == ["inner"]
    assert threads("closed") == []


def test_what_a_transport_raises_reaches_wait_and_all_later_works(runtime):
    chain = ContinuationChain(runtime, "broken")
    lost = RuntimeError("Connection closed by peer")
    failing, later = Result(lost), Result()
    failing.has_arrived.set()
    later.has_arrived.set()
    ran = []
    pendings = [
        chain.append(failing, lambda: ran.append(1)),
        chain.append(later, lambda: ran.append(2)),
    ]
    pendings.append(pendings[1].then(lambda: ran.append(3)))
    for pending in (*pendings[::-1], *pendings):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            pending.wait()
    assert ran == []
    chain.close()


def test_where_only_the_caller_can_take_results_works_run_as_it_waits(runtime):
    chain = ContinuationChain(runtime, "caller", thread=False)
    results = [Result() for _ in range(3)]
    for result in results:
        result.has_arrived.set()
    ran = []
    pendings = [
        chain.append(result, lambda i=i: ran.append(i))
        for i, result in enumerate(results)
    ]
    after = pendings[0].then(lambda: ran.append("after"))
    assert ran == []
    pendings[1].wait()
    assert ran == [0, 1]
    after.wait()
    assert ran == [0, 1, "after"]
    chain.close()
    with pytest.raises(UsageError, match="was closed before"):
        pendings[2].wait()


class TakenMeanwhile(SimpleQueue):
    """Whoever asks whether there is something is told so, and then it is taken."""

    def empty(self):
        answer = super().empty()
        if not answer:
            super().get()
        return answer


def test_closing_does_not_wait_for_what_the_thread_takes_meanwhile():
    runner = ThreadRunner("closing")
    runner._queue = TakenMeanwhile()
    runner._queue.put((None, lambda error: None))
    closing = threading.Thread(target=runner.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()
