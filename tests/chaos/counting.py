"""The model whose parameters count gradients.

Worker r's gradient is n in element r of each block, and 0 elsewhere; the learning rate is 1. Where each gradient is
applied once, with the weight 1/n, element r ends at minus the number of steps of worker r.
"""

import torch

BLOCKS = ("first", "second", "third")


class Counting(torch.nn.Module):
    """Blocks with one element for each worker, and some that stay 0."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers
        for name in BLOCKS:
            setattr(self, name, torch.nn.Parameter(torch.zeros(workers + 5)))

    def forward(self, rank: int) -> torch.Tensor:
        """The loss of worker *rank*."""
        # Blocks depend on each other, so that their gradients come one after the other.
        value = torch.zeros(())
        for name in BLOCKS:
            value = value + self.workers * getattr(self, name)[rank]
        return value


def counted(model: Counting) -> torch.Tensor:
    """The parameters, a row for each block."""
    return torch.stack([getattr(model, name).detach().clone() for name in BLOCKS])
