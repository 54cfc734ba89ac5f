"""Messages of all ranks: texts of any length, also where somebody leaves in the middle of one."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from paceline.tools.auto.controller import WorkerFinishedError
from paceline.tools.auto.deferred_messages import WORDS, DeferredMessages
from tests.support.hanging import SECONDS


def together(ranks, work):
    """What *work* of each rank returns, a thread each."""
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks), timeout=SECONDS))


class Sums:
    """All-reduces of ranks that are threads: the same number of each rank's is one."""

    def __init__(self, size):
        self.size, self.posted = size, [[] for _ in range(size)]
        self._changed = threading.Condition()

    def comm(self, rank):
        def all_reduce(buffer, operation):
            with self._changed:
                number = len(self.posted[rank])
                self.posted[rank].append(buffer.clone())
                self._changed.notify_all()
            return SimpleNamespace(wait=lambda: self._sum(number, buffer))

        return SimpleNamespace(rank=rank, size=self.size, all_reduce=all_reduce)

    def _sum(self, number, buffer):
        with self._changed:
            all_are_in = self._changed.wait_for(
                lambda: all(len(of) > number for of in self.posted), SECONDS
            )
        assert all_are_in
        buffer.copy_(sum(of[number] for of in self.posted))


def candidates(length):
    line = "0.123456789 ds-sync:compression=gd-top-k:density=0.004,collective=rina é\n"
    text = line * (length // len(line.encode()) + 1)
    return text.encode()[:length].decode(errors="ignore")


def test_a_worker_says_once_that_it_is_out_of_data():
    sums = Sums(1)
    end = DeferredMessages(sums.comm(0), torch.device("cpu"))
    end.finish()
    end.finish()
    assert len(sums.posted[0]) == 1


@pytest.mark.parametrize("length", [0, 1, WORDS - 1, WORDS, WORDS + 1, 5 * WORDS])
def test_rank_0_s_text_is_heard_whole_however_long_it_is(length):
    sums = Sums(3)

    def work(rank):
        end = DeferredMessages(sums.comm(rank), torch.device("cpu"))
        end.post_text(candidates(length) if rank == 0 else "not looked at")
        text = end.take_text()
        end.post([1.0, 2.0])
        assert end.take()[:2] == [3.0, 6.0]
        end.close()
        return text

    assert together(3, work) == [candidates(length)] * 3


@pytest.mark.parametrize("told_before", [False, True])
def test_who_leaves_in_the_middle_of_a_text_keeps_nobody_waiting(told_before):
    """It leaves before the text's first message, or after that and before the second."""
    sums = Sums(3)

    def work(rank):
        end = DeferredMessages(sums.comm(rank), torch.device("cpu"))
        if rank != 1 or told_before:
            end.post_text(candidates(3 * WORDS))
        if rank == 1:
            end.finish()
        else:
            with pytest.raises(WorkerFinishedError):
                end.take_text()
            end.finish()
        end.close()

    together(3, work)
    assert len({len(of) for of in sums.posted}) == 1
