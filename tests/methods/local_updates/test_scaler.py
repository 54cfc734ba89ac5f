"""A GradScaler, where each worker finds infinities of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
from paceline.errors import UsageError, WorkerFailedError
from tests.methods.local_updates.helpers import double, momentum
from tests.support.training import flat, loss_of, simulate

METHODS = [
    "local-sgd:sync_every=4",
    "diloco:sync_every=4",
    "streaming-diloco:sync_every=4,fragments=2,delay=1",
    "sel-sync",
    "daso:group=2",
    "ds-sync",
    "ds-sync:overlap=step",
]
STEPS = 8


def train(
    method: str, scale: float, infinite: int | None = None, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """What each of four workers has before and after step 2, is shown in an evaluation after
    the last round, and ends with. In step *infinite* worker 3 has an infinite loss."""

    def body(rank: int) -> dict[str, torch.Tensor]:
        model, seen = double(), {}
        optimizer = paceline.distribute(
            model, momentum(model.parameters()), method=method, **options
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 0)
        for step in range(STEPS):
            seen[f"before {step}"] = flat(model)
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            if (rank, step) == (3, infinite):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        with optimizer.consolidated():
            seen["shown"] = flat(model)
        optimizer.finish()
        return seen | {"end": flat(model)}

    return simulate(4, body)


@pytest.mark.parametrize("method", METHODS)
def test_who_leaves_out_an_update_stays_in_step_with_the_others(method: str) -> None:
    workers = train(method, 8.0, infinite=2)
    for one in workers:
        assert torch.equal(one["shown"], workers[0]["shown"])
        assert torch.equal(one["end"], workers[0]["end"])
        assert one["end"].isfinite().all()
    if method.startswith(("local-sgd", "diloco")):
        assert torch.equal(workers[3]["before 2"], workers[3]["before 3"])
        assert not torch.equal(workers[0]["before 2"], workers[0]["before 3"])


def test_an_own_gradient_that_was_clipped_with_its_scale_is_refused() -> None:
    with pytest.raises(WorkerFailedError, match="clip_norm with a GradScaler") as error:
        train("local-sgd:sync_every=4", 8.0, clip_norm=1.0)
    assert isinstance(error.value.__cause__, UsageError)
    train("daso:group=2", 8.0, clip_norm=1.0)  # of the node's mean, after it
