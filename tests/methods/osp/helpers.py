"""The masks with which OSP is tried, and the gradients that workers have computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.papers.osp_comparisons import compared
from hypothesis import strategies as st
from torch import nn

from paceline.methods.osp import OSP
from paceline.methods.osp.deferral import PATIENCE
from paceline.methods.osp.measurement import TRIAL_STEPS, ModelPieces, Rate, StepTimes

FIRST_DEFERRED = 2
"""With ``budget=constant`` the first decision is made in step 0, and known after step 1."""

INTERVAL = OSP.interval

NATIVE_TRIAL = set(range(INTERVAL + 1, INTERVAL + 1 + TRIAL_STEPS + 2))
"""After these steps something is deferred: the decision of step 20 holds after step 21, that
of step 27 has seen steps 23 to 27, and holds after step 28."""

SERVER_TRIAL = set(range(INTERVAL + 1, INTERVAL + 1 + TRIAL_STEPS + 3))
"""What workers have seen they tell in the step after that."""

AGAIN = PATIENCE * INTERVAL
"""So many steps later a trial that has failed is repeated."""

HALF = "osp:collective=native,defer=most,budget=constant,most=0.5,chunk=64"
ALL = "osp:collective=native,defer=most,budget=constant,most=1,chunk=64"

MASKS: dict[str, str | OSP] = {
    "0.3 product": ALL.replace("most=1", "most=0.3,order=importance"),
    "0.5 random": compared("random", f"{HALF},order=importance"),
    "0.5 inverse": compared("inverse", f"{HALF},order=importance"),
    "0.5": HALF,
    "all": ALL,
    "all, small pieces": ALL.replace("chunk=64", "chunk=16"),
    "0.5, after backward": f"{HALF},overlap=false",
    "growing": HALF.replace("constant", "linear,ramp=8"),
}
"""By all-reduce. Where importance decides and `decide_often` holds, masks change from step to
step."""

SERVED: dict[str, str | OSP] = {
    f"{name}, served": MASKS[name].replace("collective=native,", "")  # type: ignore[union-attr]
    for name in ("0.3 product", "0.5", "all")
}
"""The same by parameter servers."""


def decide_often(monkeypatch: pytest.MonkeyPatch, steps: int = 3) -> None:
    """Let a decision be made every few steps, so that short trainings see many."""
    monkeypatch.setattr(OSP, "interval", steps)


Loss = Callable[[nn.Module, int, int], torch.Tensor | None]


class Gradients:
    """A loss function that notes each worker's own gradients, as ``own[step][rank]``:
    ``.grad`` may hold what travels, and hold it no longer after the step."""

    def __init__(self, workers: int, steps: int, loss: Loss) -> None:
        self.own: list[list[torch.Tensor | None]] = [
            [None] * workers for _ in range(steps)
        ]
        self._loss = loss

    def __call__(self, model: nn.Module, rank: int, step: int) -> torch.Tensor | None:
        value = self._loss(model, rank, step)
        self.own[step][rank] = gradient_of(model, value)
        return value

    def means(self) -> list[torch.Tensor]:
        """Of each step, over those that took it."""
        return [
            torch.stack([one for one in own if one is not None]).mean(0)
            for own in self.own
        ]


def gradient_of(model: nn.Module, loss: torch.Tensor | None) -> torch.Tensor:
    """All gradients of *loss*; zeros where it does not depend on a parameter."""
    parameters: list[Any] = list(model.parameters())
    if loss is None:
        return torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    gradients = torch.autograd.grad(
        loss,
        parameters,
        retain_graph=True,
        materialize_grads=True,
        allow_unused=True,
    )
    return torch.cat([g.detach().double().reshape(-1) for g in gradients])


@st.composite
def steps(draw: st.DrawFn) -> tuple[ModelPieces, StepTimes, Rate, list[int]]:
    """A model in buckets, its times, a network, and an order of importance."""
    count = draw(st.integers(1, 5))
    buckets = sorted(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12)))
    sizes = [draw(st.integers(1, 1000)) for _ in buckets]
    ready = sorted(draw(st.floats(0.001, 1.0)) for _ in range(count))
    times = StepTimes(ready, ready[-1] + draw(st.floats(0, 0.2)))
    rate = Rate(draw(st.floats(0, 0.05)), draw(st.floats(1e-7, 1e-2)))
    order = draw(st.permutations(range(len(buckets))))
    return ModelPieces(sizes, buckets, count), times, rate, list(order)
