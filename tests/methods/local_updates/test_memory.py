"""Parameters that are given other memory: what is averaged is what the model holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.methods.local_updates.helpers import train
from tests.support.tables import crossed
from tests.support.training import Trained, flat

METHODS = [
    "local-sgd:sync_every=3",
    "local-sgd:sync_every=3,state=average",
    "hierarchical-local-sgd:sync_every=4,group=2,group_every=2",
    "slowmo:sync_every=3",
    "streaming-diloco:sync_every=4,fragments=2,delay=1",
    "sel-sync",
    "daso:group=2,sync_every=3,delay=2",
    "ds-sync",
    "ds-sync:overlap=forward",
    "ds-sync:overlap=step",
]


def move(model: nn.Module) -> None:
    """As optimizers do that look ahead, cuDNN's flat weights of an LSTM, and
    ``vector_to_parameters``."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def trained(method: str, moves: bool) -> tuple[list[Trained], dict[int, torch.Tensor]]:
    """Four workers, and what each goes on with after an evaluation."""
    own = {}

    def watch(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        if moves and step == 1:
            move(model)
        if step == 4:
            with optimizer.consolidated():
                if moves:
                    move(model)
            own[rank] = flat(model)

    return train(method, 4, 7, watch=watch), own


@pytest.mark.parametrize("method", crossed(2, METHODS))
def test_other_memory_changes_no_bit(method: str) -> None:
    plain, own = trained(method, False)
    moved, own_of_moved = trained(method, True)
    for rank in range(4):
        assert torch.equal(own[rank], own_of_moved[rank])
        assert torch.equal(plain[rank].end, moved[rank].end)
        assert torch.equal(moved[rank].end, moved[0].end)
