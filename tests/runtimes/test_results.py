"""The figures of a run's workers, told through the job's store."""

import pytest

from paceline.records import StepStats
from paceline.runtimes.results import gather_stats
from paceline.timeouts import timeouts
from paceline.torch_internals import local_store


def summary(rank):
    return StepStats(1.0 + rank, 0.1, 0.05, 0.02, 100.0)


@pytest.fixture
def store():
    return local_store()


def test_rank_0_takes_those_of_all_in_order(store):
    for rank in (2, 1):
        assert gather_stats(summary(rank), rank, 3, store) == [summary(rank)]
    everyone = [summary(rank) for rank in range(3)]
    assert gather_stats(summary(0), 0, 3, store) == everyone


def test_who_is_not_at_its_end_keeps_nobody(store, monkeypatch):
    monkeypatch.setattr(timeouts, "last_figures", 0.02)
    gather_stats(summary(2), 2, 3, store)
    here = gather_stats(summary(0), 0, 3, store)
    assert here == [summary(0), summary(2)]


def test_a_store_that_has_gone_is_no_error():
    class Gone:
        def set(self, key, value):
            raise RuntimeError("Connection reset by peer")

    assert gather_stats(summary(1), 1, 2, Gone()) == [summary(1)]
