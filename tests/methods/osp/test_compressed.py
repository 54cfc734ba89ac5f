"""Codes of what OSP sends in both stages: each piece keeps its own residual."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.testing import inspect
from tests.methods.osp.helpers import ALL, FIRST_DEFERRED, HALF, decide_often
from tests.support.simulations import run
from tests.support.training import plain_sgd

STEPS = 12
CODE = "int8:rounding=nearest,error_feedback=true"


class Sums(torch.nn.Module):
    """Gradients are what it is called with, whatever the parameters are."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(12, 20, dtype=torch.float64))
        self.vector = torch.nn.Parameter(torch.zeros(30, dtype=torch.float64))

    def forward(self, matrix, vector):
        return (self.matrix * matrix).sum() + (self.vector * vector).sum()


def gradients(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((12, 20), (30,))
    ]


@pytest.mark.parametrize("mask", [HALF, ALL], ids=["half", "all"])
def test_what_was_applied_and_what_is_left_are_all_gradients(monkeypatch, mask):
    """Also where a piece is late in one step and in time in the next one."""
    decide_often(monkeypatch)
    kept = {}

    def body(rank):
        model = Sums()
        optimizer = paceline.distribute(
            model, plain_sgd(model.parameters()), method=mask, compression=CODE
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            model(*gradients(rank, step)).backward()
            optimizer.step()
        optimizer.finish()
        (own,) = [
            one
            for one in inspect(optimizer).worker_states
            if one.name.startswith("compression.")
        ]
        kept[rank] = own.save()
        return [parameter.detach().clone() for parameter in model.parameters()]

    (first, other) = run(2, body)
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for number, name in enumerate(("matrix", "vector")):
        left = torch.zeros_like(first[number]).view(-1)
        for states in kept.values():
            for key, state in states.items():
                start, stop = 0, left.numel()
                if key.startswith(f"{name}["):
                    start, stop = map(int, key[len(name) + 1 : -1].split(":"))
                if key == name or key.startswith(f"{name}["):
                    left[start:stop] += state["residual"].view(-1)
        total = sum(gradients(r, s)[number] / 2 for r in (0, 1) for s in range(STEPS))
        applied = -first[number] / 0.1
        assert left.any()
        assert STEPS > FIRST_DEFERRED
        torch.testing.assert_close(applied + left.view(applied.shape), total)
