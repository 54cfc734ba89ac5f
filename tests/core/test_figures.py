"""What a step's record says of the method's own: for whoever asks, and for nobody else."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.records import StepRecord
from paceline.run_options import RunOptions
from tests.support.simulations import run

STEPS = 24
WORKERS = 3


class Slope(torch.nn.Module):
    """Its gradient is *slope*, always."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 16))
        self.slope = torch.linspace(0.1, 1.0, 64).view(4, 16)

    def forward(self) -> torch.Tensor:
        return (self.weight * self.slope).sum()


def train(
    method: str, *, asks: bool = True
) -> tuple[list[StepRecord], list[torch.Tensor]]:
    """Each step's record, and the weight after it."""
    records: list[StepRecord] = []
    weights: list[torch.Tensor] = []
    if asks:
        paceline.on_step(records.append)
    model = Slope()
    optimizer = paceline.distribute(
        model, torch.optim.SGD(model.parameters(), 1.0), method=method
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        model().backward()
        optimizer.step(loss=1.0)
        weights.append(model.weight.detach().clone())
    optimizer.finish()
    return records, weights


def figures(method: str) -> list[list[dict[str, float]]]:
    """By worker, of each step."""
    return [
        [record.figures for record in records]
        for records, _ in run(WORKERS, lambda rank: train(method))
    ]


def test_rounds_are_counted() -> None:
    for told in figures("local-sgd:sync_every=4"):
        assert [one["round"] for one in told] == [s // 4 for s in range(1, STEPS + 1)]


@pytest.mark.parametrize(("method", "most"), [("ssp:staleness=2", 2), ("asp", STEPS)])
def test_staleness_is_what_others_have_done_meanwhile(method: str, most: int) -> None:
    found = [one["staleness"] for told in figures(method) for one in told]
    # Each of the others may be ahead by so many steps, and this one of them.
    assert 0 < max(found) <= (WORKERS - 1) * (2 * most + 1)


def test_what_waits_for_all_is_not_stale() -> None:
    found = [one["staleness"] for told in figures("backup:wait_for=3") for one in told]
    assert set(found) == {0}


@pytest.mark.parametrize("collective", ["native", "parameter-server"])
def test_a_budget_and_what_is_deferred_of_it(collective: str) -> None:
    method = f"osp:collective={collective},defer=most,budget=linear,ramp=10,buckets=ddp"
    for told in figures(method):
        budgets = [one["budget"] for one in told]
        assert budgets == sorted(budgets)
        assert budgets[0] < budgets[-1] <= 1
        assert all(0 <= one["deferred"] <= one["budget"] for one in told)


def test_groups_are_told() -> None:
    told = figures("gssp:members=0-1+2")
    assert [{one["group"] for one in worker} for worker in told] == [{0}, {0}, {1}]


def test_the_norm_of_what_compression_has_left_out() -> None:
    """What workers have sent, and what they have left out, is the sum of their gradients."""
    method = "bsp:compression=ef-sign,buckets=ddp"
    for records, weights in run(WORKERS, lambda rank: train(method)):
        norms = [record.figures["residual_norm"] for record in records]
        for step, (norm, weight) in enumerate(zip(norms, weights, strict=True), 1):
            left = (step * Slope().slope + weight) / WORKERS
            assert norm == pytest.approx(float(left.norm()), rel=1e-4, abs=1e-5)
        assert max(norms) > 0.1


def test_nobody_asks_for_them_in_vain() -> None:
    records, _ = run(WORKERS, lambda rank: train("bsp"))[0]
    assert {str(record.figures) for record in records} == {"{}"}


@pytest.mark.parametrize("method", ["ssp", "local-sgd", "bsp:compression=top-k"])
def test_who_asks_changes_nothing(method: str) -> None:
    options = RunOptions(seed=1)
    asked, unasked = (
        run(WORKERS, lambda rank, asks=asks: train(method, asks=asks), options=options)
        for asks in (True, False)
    )
    for (_, mine), (_, theirs) in zip(asked, unasked, strict=True):
        assert torch.equal(torch.stack(mine), torch.stack(theirs))


class ImaginarySlope(torch.nn.Module):
    """Its gradient is an imaginary number times that of `Slope`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 16, dtype=torch.complex64))
        self.slope = Slope().slope

    def forward(self) -> torch.Tensor:
        return (self.weight.imag * self.slope).sum()


def test_imaginary_parts_count_in_the_norm_of_residuals() -> None:
    def body(rank: int) -> list[float]:
        records: list[StepRecord] = []
        paceline.on_step(records.append)
        model = ImaginarySlope()
        inner = torch.optim.SGD(model.parameters(), 1.0)
        # It sends one number of 128 in each step.
        compression = "top-k:density=0.0078125,small=0"
        optimizer = paceline.distribute(model, inner, compression=compression)
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        optimizer.finish()
        return [record.figures["residual_norm"] for record in records]

    (found,) = run(WORKERS, body)[0]
    left = Slope().slope.flatten()[:-1] / WORKERS
    assert found == pytest.approx(float(left.norm()), rel=1e-5)
