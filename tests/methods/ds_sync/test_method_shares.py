"""What is averaged of buffers and optimizers of several kinds."""

import pytest
import torch
from torch import nn

import paceline
from tests.methods.ds_sync.helpers import equal, simulate


class Flagged(nn.Module):
    """Remembers whether it has seen anything, as layers do that take their scale from the
    first batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("workers", [2, 4])
def test_all_end_with_the_same_flags(workers):
    """True where any worker's is."""

    def body(rank):
        torch.manual_seed(0)
        model = Flagged()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, method="ds-sync")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        model.seen[0] = rank == 1
        with optimizer.consolidated():
            shown = model.seen.tolist()
        assert model.seen.tolist() == [rank == 1, False]
        optimizer.finish()
        return model, shown

    results, _ = simulate(workers, body)
    assert equal([model for model, _ in results])
    assert [shown for _, shown in results] == [[True, False]] * workers
    assert results[0][0].seen.tolist() == [True, False]


@pytest.mark.parametrize("first", [[], "first"])
def test_groups_of_an_optimizer_may_keep_different_tensors(first):
    """Nothing, of no parameters or of some; and momentum of the others."""

    def body(rank):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        own = list(model[0].parameters()) if first else []
        others = list(model[1].parameters())
        groups = [{"params": own}, {"params": others, "momentum": 0.9}]
        inner = torch.optim.SGD(groups, lr=0.1)
        method = "ds-sync:size=2,state=average"
        optimizer = paceline.distribute(model, inner, method=method)
        noise = torch.Generator().manual_seed(rank)
        optimizer.zero_grad()
        model(torch.randn(4, 2, generator=noise)).square().sum().backward()
        optimizer.step()
        return [inner.state[p]["momentum_buffer"].clone() for p in others]

    (one, other), _ = simulate(2, body)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(one, other, strict=True))
