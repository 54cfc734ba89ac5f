"""Methods that do not meet in every step: what steps between two rounds send, who counts in a
round, and how such trainings end."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import paceline
from paceline.errors import UsageError
from paceline.interfaces import AGREE_EVERY, Rhythm
from paceline.testing.task import Counting
from paceline.worlds.join import join_world
from tests.newcomer.toys.every_fourth import EveryFourth
from tests.newcomer.toys.pairs import Pairs
from tests.osp.helpers import simulate

ELEMENTS = 18
SUM_OF_TWO = 4 * ELEMENTS
"""Bytes that each of two workers sends to form a sum of the model of `Counting`: half of it there,
and half of it back."""


class WithStatistics(torch.nn.Module):
    """A model with buffers, each different on every rank."""

    def __init__(self):
        super().__init__()
        self.counting = Counting()
        self.register_buffer("seen", torch.full((4,), float(paceline.rank())))

    def forward(self):
        return self.counting()


def train(method, workers, steps, make=Counting, fusion="optimal"):
    """Each worker's bytes in each step, and its model before and after `finish`; *steps*: of
    each worker."""

    def body(rank):
        model = make()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(model, inner, method=method, fusion=fusion)
        for _ in range(steps[rank]):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        sent = [record.bytes_sent for record in join_world().journal.steps]
        before = applied(model)
        optimizer.finish()
        return sent, before, applied(model), model

    return simulate(workers, body)


def applied(model):
    """How many gradients are in each parameter."""
    return sorted({-round(v.item(), 4) for p in model.parameters() for v in p.view(-1)})


@pytest.mark.parametrize("make", [Counting, WithStatistics])
def test_steps_between_two_rounds_send_nothing(make):
    """Neither for buffers, nor for the planner, nor for who still trains."""
    results = train(EveryFourth(), 2, (8, 8), make)
    for rank, (sent, *_) in enumerate(results):
        assert sent[:3] == sent[4:7] == [0, 0, 0]
        assert sent[3] == sent[7]
        buffers = 16 if make is WithStatistics and rank == 0 else 0
        assert sent[3] == SUM_OF_TWO + buffers


def test_buffers_are_shared_in_rounds():
    *_, (*_, model) = train(EveryFourth(), 2, (8, 8), WithStatistics)
    assert model.seen.tolist() == [0.0] * 4


def test_who_is_out_of_data_counts_once_more_with_what_it_has_done_since():
    """A round after step 4; then one with 8 and 5 steps; the rest is one worker's own."""
    results = train(EveryFourth(), 2, (10, 5))
    for _, _, after, _ in results:
        assert after == [6.5 + 2]
    assert [before for _, before, _, _ in results] == [[8.5], [5.0]]


def test_who_has_done_nothing_since_the_last_round_does_not_count():
    for _, _, after, _ in train(EveryFourth(), 3, (8, 4, 4)):
        assert after == [8.0]


@pytest.mark.parametrize("steps", [(1, 1), (4, 4), (3, 9), (0, 6)])
def test_all_end_with_one_model(steps):
    first, second = train(EveryFourth(), 2, steps)
    assert first[2] == second[2]


def test_pairs_send_to_one_other_worker_and_meet_all_the_others_rarely():
    steps = 2 * AGREE_EVERY + 1
    for sent, *_ in train(Pairs(), 4, (steps,) * 4):
        usual = [n for i, n in enumerate(sent, 1) if i % AGREE_EVERY]
        # Each parameter is a sum of its own, of 12, 5 and 1 elements.
        assert all(abs(n - SUM_OF_TWO) <= 8 for n in usual)
        agreements = [n for i, n in enumerate(sent, 1) if not i % AGREE_EVERY]
        assert all(0 < n - SUM_OF_TWO <= 64 for n in agreements)


@pytest.mark.parametrize("steps", [(40, 40, 40, 40), (3, 40, 20, 7), (0, 0, 35, 1)])
def test_groups_end_with_the_mean_of_all_models(steps):
    results = train(Pairs(), 4, steps)
    ends = [after for _, _, after, _ in results]
    assert all(end == ends[0] for end in ends)
    assert min(steps) <= ends[0][0] <= max(steps)


@dataclass(frozen=True, kw_only=True)
class WaitsTooEarly(EveryFourth):
    """Waits for a mean while backward runs."""

    name: ClassVar[str] = "waits-too-early"
    rhythm: ClassVar[Rhythm] = Rhythm()

    def bucket_ready(self, state, run, bucket):
        run.mean(bucket).wait()


def test_a_mean_that_is_waited_for_too_early_is_refused():
    with pytest.raises(Exception, match="before the last bucket") as caught:
        train(WaitsTooEarly(), 2, (2, 2), fusion="wfbp")
    assert isinstance(caught.value.__cause__, UsageError)


def test_a_rhythm_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="every=-1 steps: expected 1 or more"):
        Rhythm(every=-1)
