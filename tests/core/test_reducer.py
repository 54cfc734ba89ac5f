"""Gradients on their way into buckets: copied together, scaled once, after all other hooks."""

import warnings

import pytest
import torch
from torch import nn

import paceline
from tests.support.simulations import run

SIZES = (3, 40, 20_000, 7, 5, 30_000)
"""Small and large tensors, so that buckets have several copy groups."""


class Sums(nn.Module):
    """A parameter of each size; its gradient is *factor* in every element."""

    def __init__(self, matrices=False):
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(size, 2) if matrices else torch.zeros(size))
            for size in SIZES
        )

    def forward(self, factor):
        return factor * sum(weight.sum() for weight in self.weights)


def wrap(model, buckets="single"):
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return paceline.distribute(model, inner, buckets=buckets)


@pytest.mark.parametrize("matrices", [False, True])
@pytest.mark.parametrize("accumulate", ["fresh", "into-views", "some-fresh"])
def test_each_gradient_is_scaled_once_wherever_it_was(matrices, accumulate):
    """Whether ``.grad`` is new, or lies in its bucket already, or some are of each kind."""

    def body(rank):
        model = Sums(matrices)
        optimizer = wrap(model)
        seen = []
        for step in range(4):
            if accumulate == "into-views":
                optimizer.zero_grad(set_to_none=False)
            elif accumulate == "fresh":
                optimizer.zero_grad()
            else:
                for index, weight in enumerate(model.weights):
                    if index % 2:
                        weight.grad = None
                    elif weight.grad is not None:
                        weight.grad.zero_()
            model(float(rank + 1 + step)).backward()
            seen.append([weight.grad.unique().tolist() for weight in model.weights])
            optimizer.step()
        return seen

    for seen in run(2, body):
        assert seen == [[[1.5 + step]] * len(SIZES) for step in range(4)]


def clamp(parameter):
    parameter.grad.clamp_(max=0.4)


def test_hooks_of_the_script_change_gradients_before_they_are_sent():
    """As under DDP, also where they were registered after `distribute`."""

    def body(rank):
        model = Sums()
        early, *_, late = model.weights
        early.register_post_accumulate_grad_hook(clamp)
        optimizer = wrap(model)
        model(1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        late.register_post_accumulate_grad_hook(clamp)
        model(rank + 1.0).backward()
        return [weight.grad.unique().tolist() for weight in model.weights]

    for early, *between, late in run(2, body):
        assert between == [[1.5]] * (len(SIZES) - 2)
        torch.testing.assert_close(early + late, [0.4, 0.4])


def test_higher_derivatives_leave_no_graph_in_buckets():
    def body(rank):
        model = Sums()
        optimizer = wrap(model)
        factor = torch.tensor(float(rank), requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of the cycle that this makes
            model(factor).backward(create_graph=True)
        optimizer.step()
        return [weight.grad.requires_grad for weight in model.weights]

    assert not any(map(any, run(2, body)))
