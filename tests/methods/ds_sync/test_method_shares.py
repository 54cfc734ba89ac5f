"""What is averaged of buffers of several kinds."""

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
