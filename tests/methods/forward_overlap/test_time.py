"""What steps take in virtual time, by hand."""

import pytest
import torch

import paceline
from paceline.runtimes.join import join_runtime
from tests.support.simulations import LINK, run

LAYERS, FORWARD, BACKWARD = 4, 0.02, 0.04
HALF = 0.04
"""Seconds of a layer's reduce-scatter, or all-gather, among four workers."""
ELEMENTS = round(HALF * LINK * 4 / 3 / 4)


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        paceline.pace(FORWARD)
        return x + weight.flatten()[0]

    @staticmethod
    def backward(ctx, gradient):
        paceline.pace(BACKWARD)
        return gradient, torch.ones_like(ctx.weight)


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.zeros(ELEMENTS) for _ in range(LAYERS)
        )

    def forward(self, x):
        for weight in self.weights:
            x = Layer.apply(x, weight + 0)
        return x


def step_seconds(method):
    def body(rank):
        model = Layers()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, method=method, buckets="wfbp")
        ends = []
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.zeros(())).backward()
            optimizer.step()
            ends.append(join_runtime().clock.now())
        optimizer.finish()
        return ends[-1] - ends[-2]

    (seconds,) = {round(one, 4) for one in run(4, body)}
    return seconds


def test_second_halves_move_beside_the_next_forward_pass():
    """bsp: from when the first gradient is there, on the way without a pause. dear: scatters keep up
    with backward, and one is left when it ends; then come two pairs of gathers, and the two
    layers that use the second pair."""
    bsp = LAYERS * FORWARD + BACKWARD + 2 * LAYERS * HALF
    dear = LAYERS * BACKWARD + HALF + LAYERS * HALF + 2 * FORWARD
    assert step_seconds("bsp") == pytest.approx(bsp, rel=0.01)
    assert step_seconds("dear") == pytest.approx(dear, rel=0.01)
