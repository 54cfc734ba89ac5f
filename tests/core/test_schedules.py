"""Schedulers of torch's: no warning that their order is wrong, where it is right."""

import warnings

import pytest
import torch

import paceline
from paceline.runtimes.simulated import Simulation
from paceline.testing import CASES
from tests.support.training import inputs, network


@pytest.mark.parametrize("when", ["before", "after", "closure"])
@pytest.mark.parametrize("method", ["bsp", "asp"])
def test_a_scheduler_that_steps_after_the_optimizer_does_not_warn(method, when):
    def body(rank):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if when != "after":
            schedule = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = paceline.distribute(model, inner, method=method)
        if when == "after":
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def loss(step):
            optimizer.zero_grad()
            found = model(inputs(rank, step)).square().mean()
            found.backward()
            return found

        for step in range(3):
            if when == "closure":
                optimizer.step(lambda step=step: loss(step))
            else:
                loss(step)
                optimizer.step()
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5**3
        optimizer.finish()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Simulation(CASES[0].cluster(2)).run(body)
    assert not [str(one.message) for one in caught if "sched" in str(one.message)]


def test_a_scheduler_that_steps_first_is_still_warned_of():
    def body(rank):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
        optimizer = paceline.distribute(model, inner, method="asp")
        schedule.step()
        optimizer.finish()

    with pytest.warns(UserWarning, match="before `optimizer.step"):
        Simulation(CASES[0].cluster(1)).run(body)
