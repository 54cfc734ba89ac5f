"""How often DASO's nodes exchange their parameters, by the loss that the script reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import paceline
from paceline.methods.contrib.daso_pace import Pace
from paceline.runtimes.join import join_world
from tests.methods.local_updates.helpers import momentum, simulate
from tests.methods.osp.helpers import flat, loss_of, network

Losses = Callable[[int, int], float | None]
"""What a worker reports in a step, if anything."""


def test_a_loss_that_stands_still_goes_through_the_cycle() -> None:
    """Each third judgement that has not improved is one change."""
    pace, seen = Pace(), []
    for _ in range(19):
        if pace.judge(1.0, most=8):
            seen.append((pace.every, pace.delay))
    assert seen == [(2, 1), (1, 1), (8, 2), (4, 1), (2, 1), (1, 1)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_loss_that_falls_changes_nothing(sign: float) -> None:
    pace, loss = Pace(), 10.0 * sign
    for _ in range(50):
        assert not pace.judge(loss, most=8)
        loss -= 0.06 * abs(loss)
    slowly = 10.0 * sign
    changes = 0
    for _ in range(50):
        changes += pace.judge(slowly, most=8)
        slowly -= 0.001 * abs(slowly)
    assert changes > 2


@pytest.mark.parametrize("every", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("most", [1, 3, 8])
def test_no_exchange_is_longer_than_the_way_to_the_next(every: int, most: int) -> None:
    for delay in range(every + 1):
        pace = Pace(every, delay)
        for _ in range(60):
            changed = pace.judge(1.0, most)
            assert 0 <= pace.delay <= pace.every or not changed
            assert pace.every >= 1


def run(
    method: str,
    workers: int,
    losses: Losses,
    steps: range,
    *,
    load: Path | None = None,
    save: Path | None = None,
) -> list[tuple[torch.Tensor, list[str]]]:
    """Each worker's parameters after `finish`, and what was said of daso before it."""

    def body(rank: int) -> tuple[torch.Tensor, list[str]]:
        model = network()
        optimizer = paceline.distribute(
            model, momentum(model.parameters()), method=method, fusion="wfbp"
        )
        if load is not None:
            paceline.load(load)
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            loss = losses(rank, step)
            if loss is not None:
                paceline.log(loss=loss)
            optimizer.step()
        if save is not None:
            paceline.save(save)
        notes = [note for note in join_world().journal.notes if "daso" in note]
        optimizer.finish()
        return flat(model), notes

    return simulate(workers, body)


def notes_of(method: str, losses: Sequence[float | None], steps: int) -> list[str]:
    """What is said in a training whose workers report these losses, one each."""
    ran = run(method, len(losses), lambda rank, step: losses[rank], range(steps))
    assert all(notes == ran[0][1] for _, notes in ran)
    return ran[0][1]


def test_all_change_their_pace_alike_after_the_mean_of_their_losses() -> None:
    """A worker without a loss, and one whose loss is none, do as the others do."""
    notes = notes_of("daso:group=2,judge_every=2", [1.0, 3.0, None, math.nan], steps=12)
    assert [note.split(": ")[1] for note in notes] == [
        "after step 10 nodes exchange parameters every 2 steps, and use them 1 later"
    ]


def test_without_a_loss_it_says_so_once() -> None:
    (note,) = notes_of("daso:group=2,judge_every=2", [None] * 4, steps=8)
    assert "no worker has reported a loss" in note


def test_nobody_to_exchange_with_is_said() -> None:
    (note,) = notes_of("daso:group=2", [None] * 2, steps=1)
    assert "this is bsp" in note


# ---- restarts ----


def uneven(rank: int, step: int) -> float:
    """Less than half of it is known to whoever forgets what was said before a restart."""
    return (8.0, 1.0, 1.0)[step % 3] + rank


def seldom(rank: int, step: int) -> float | None:
    """A loss counts until the next one is said."""
    return None if step % 4 else uneven(rank, step)


@pytest.mark.slow
@pytest.mark.parametrize("losses", [uneven, seldom])
@pytest.mark.parametrize("saved", [7, 9, 11])
def test_a_restart_changes_no_bit_wherever_it_is_between_judgements(
    losses: Losses, saved: int, tmp_path: Path
) -> None:
    method, steps, folder = "daso:group=2,judge_every=3", 32, tmp_path / "checkpoint"
    straight = run(method, 4, losses, range(steps))
    before = run(method, 4, losses, range(saved), save=folder)
    after = run(method, 4, losses, range(saved, steps), load=folder)
    assert len(straight[0][1]) >= 2
    for (end, notes), (_, first), (other, second) in zip(
        straight, before, after, strict=True
    ):
        assert first + second == notes
        assert torch.equal(end, other)
