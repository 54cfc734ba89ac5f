"""SelSync: when workers average, and that all do where one wants it."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.methods.contrib.sel_sync import SelSync, norm_of
from tests.methods.local_updates.helpers import spread, train
from tests.support.training import loss_of, network

WORKERS, STEPS = 3, 8


def times_equal(method: str, **options: Any) -> list[int]:
    """The steps after which all hold one model."""
    trained = train(method, WORKERS, STEPS, **options)
    return [step for step in range(STEPS) if spread(trained, step) == 0.0]


@pytest.mark.parametrize("window", [1, 3, STEPS])
def test_until_the_window_is_full_all_average_and_then_nobody_does(window: int) -> None:
    """No change is as large as an infinite one."""
    assert times_equal(f"sel-sync:delta=inf,window={window}") == list(range(window - 1))


def test_one_workers_flag_is_everybodys() -> None:
    """The loss of worker 1 is a hundred times larger in step 5, and nobody else's changes."""
    jump = 5

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        scale = 100.0 if (rank, step) == (1, jump) else 1.0
        return scale * (1.0 + rank) * sum(p.sum() for p in model.parameters())

    found = times_equal("sel-sync:delta=0.5,window=3", loss=loss)
    # Its means move by far for as long as the window holds the jump, and when it leaves.
    assert {0, 1, jump, jump + 1}.issubset(found)
    assert not {2, 3, 4}.intersection(found)


def test_bytes_are_those_of_flags_where_none_is_raised() -> None:
    sent = train("sel-sync:delta=inf,window=3", WORKERS, STEPS)[0].sent
    plain = train("local-sgd:sync_every=1", WORKERS, STEPS)[0].sent
    assert min(sent[:2]) > 0.9 * plain[0]
    assert max(sent[3:]) < 0.2 * plain[0]


def test_the_norm_is_the_sum_over_tensors() -> None:
    model = network()
    loss_of(model, 0, 0).backward()
    frozen = nn.Parameter(torch.ones(3))
    by_hand = sum(math.sqrt((p.grad**2).sum().item()) for p in model.parameters())
    assert norm_of([*model.parameters(), frozen]) == pytest.approx(by_hand, rel=1e-6)
    half = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    half.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    assert norm_of([half]) == pytest.approx(120000.0, rel=1e-3)
    assert norm_of([frozen]) == 0.0


def flags(method: SelSync, norms: list[float]) -> list[bool]:
    run: Any = SimpleNamespace(buckets=[], own_buffers=[], parameters=[])
    worker = method.start(run)
    return [worker._raises(norm) for norm in norms]


def by_definition(method: SelSync, norms: list[float]) -> list[float]:
    """The paper's D, step by step, each formula written out."""

    def mean(values: list[float]) -> float:
        last = values[-method.window :]
        weights = [(1 - method.smoothing) ** (len(last) - i) for i in range(len(last))]
        return sum(w * v for w, v in zip(weights, last, strict=True)) / sum(weights)

    smooth = [mean(norms[: t + 1]) for t in range(len(norms))]
    changes = [abs(b - a) / a for a, b in pairwise(smooth)]
    return [mean(changes[:t]) if t else 0.0 for t in range(len(norms))]


@pytest.mark.parametrize("smoothing", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("window", [1, 4, 25])
def test_flags_are_those_of_the_paper(window: int, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(window)
    norms = torch.randn(60, generator=generator).exp().tolist()
    changes = by_definition(SelSync(window=window, smoothing=smoothing), norms)
    delta = statistics.median(changes[window:]) * (1 + 1e-9)
    found = flags(SelSync(delta=delta, window=window, smoothing=smoothing), norms)
    full = [step + 1 >= window for step in range(len(norms))]
    pairs = zip(changes, full, strict=True)
    assert found == [not is_full or d >= delta for d, is_full in pairs]
    assert set(found[window:]) == {True, False}


def test_what_is_not_finite_raises_the_flag_and_is_forgotten() -> None:
    method, norms = SelSync(delta=0.1, window=2), [1.0, 1.0, 1.0]
    for strange in (math.inf, math.nan):
        found = flags(method, [*norms, strange, *norms])
        assert found == [True, False, False, True, False, False, False]
    assert flags(method, [0.0, 0.0, 0.0, 1.0]) == [True, False, False, True]


def test_who_is_out_of_data_counts_in_the_next_mean() -> None:
    """Worker 0 ends after two steps that nobody has averaged: they are in the end's mean, by
    what each has trained on."""
    steps = (2, 6)
    by_itself = [
        train("sel-sync:delta=inf,window=1", 1, steps[rank], loss=_of(rank))[0].end
        for rank in range(2)
    ]
    trained = train("sel-sync:delta=inf,window=1", 2, steps)
    weighed = (2 * by_itself[0] + 6 * by_itself[1]) / 8
    for one in trained:
        torch.testing.assert_close(one.end, weighed, rtol=0, atol=1e-12)


def _of(rank: int) -> Any:
    return lambda model, _, step: loss_of(model, rank, step)


def test_it_says_how_often_there_was_a_mean() -> None:
    one, _ = train("sel-sync:delta=inf,window=4", 2, STEPS)
    assert any("averaged in 3 of" in note for note in one.notes)
