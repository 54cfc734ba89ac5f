"""What has moved, compressed: tensor by tensor, under the names of the parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from tests.local.helpers import double, momentum, sgd, simulate, train
from tests.osp.helpers import flat, loss_of

RESIDUALS = "int8:rounding=nearest,residuals=true"


class TwoRates(nn.Module):
    """Two tensors, of which one moves ten thousand times as far as the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.slow = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def test_a_tensor_that_moves_little_is_not_lost_beside_one_that_moves_far() -> None:
    """They share a bucket. Codes have 127 levels."""

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return (model.fast + 1e-4 * model.slow).sum()  # type: ignore[operator]

    def body(rank: int) -> nn.Module:
        model = TwoRates()
        optimizer = paceline.distribute(
            model,
            sgd(model.parameters()),
            method="diloco:every=2,outer_learning_rate=0.5,outer_momentum=0,nesterov=false",
            compression="int8:rounding=nearest",
            fusion="single",
        )
        for step in range(4):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        optimizer.finish()
        return model

    for model in simulate(2, body):
        assert model.fast.tolist() == pytest.approx([-0.2] * 3)
        assert model.slow.tolist() == pytest.approx([-0.2e-4] * 3)


@pytest.mark.parametrize(
    "method", ["diloco:every=4", "streaming-diloco:every=6,fragments=2,delay=2"]
)
@pytest.mark.parametrize(("workers", "fusion"), [(2, "ddp"), (3, "wfbp")])
def test_residuals_go_on_in_other_buckets_and_among_other_workers(
    method: str, workers: int, fusion: str, tmp_path: Path
) -> None:
    """In as many workers bit for bit: their codes are those of tensors."""

    def body(rank: int, first: int, last: int, fusion: str) -> torch.Tensor:
        model = double()
        optimizer = paceline.distribute(
            model,
            momentum(model.parameters()),
            method=method,
            fusion=fusion,
            compression=RESIDUALS,
        )
        if first:
            paceline.load(tmp_path / "checkpoint")
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if last < 12:
            paceline.save(tmp_path / "checkpoint")
        optimizer.finish()
        return flat(model)

    straight = simulate(2, lambda rank: body(rank, 0, 12, "wfbp"))
    simulate(2, lambda rank: body(rank, 0, 6, "wfbp"))
    ends = simulate(workers, lambda rank: body(rank, 6, 12, fusion))
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert torch.equal(ends[0], straight[0]) == (workers == 2)


def test_what_is_left_out_of_one_code_is_sent_with_the_next() -> None:
    plain, coarse = (
        train("diloco:every=2", 2, 12, compression=code)[0].end
        for code in ("none", RESIDUALS)
    )
    moved = (plain - flat(double())).abs().max()
    assert 0 < (coarse - plain).abs().max() < 0.02 * moved
