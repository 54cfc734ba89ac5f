"""What belongs to a parameter is found by the parameter itself, wherever its memory is."""

from types import SimpleNamespace

import torch

from paceline.methods.local_updates.state import (
    by_parameter,
    flatten_moments,
    learning_rates,
    optimizer_state_names,
)
from paceline.methods.model_averaging import ModelAverager


def sharing():
    """Two parameters that begin at one address, in groups of their own, and what trains them."""
    memory = torch.arange(6.0)
    first, second = (torch.nn.Parameter(memory[:count]) for count in (6, 2))
    assert first.data_ptr() == second.data_ptr()
    groups = [
        {"params": [first], "lr": 0.5, "momentum": 0.9},
        {"params": [second], "lr": 0.25, "momentum": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    run = SimpleNamespace(optimizer=optimizer, parameters=[first, second])
    return run, ModelAverager([[second, first]])


def test_learning_rates_are_each_parameter_s_own():
    run, model = sharing()
    assert learning_rates(run, model.parameters[0].of) == [0.25, 0.5]


def test_moments_are_each_parameter_s_own():
    run, model = sharing()
    first, second = run.parameters
    assert optimizer_state_names(run.optimizer) == {
        id(first): ["momentum_buffer"],
        id(second): [],
    }
    first.grad = torch.ones(6)
    run.optimizer.step()
    (moments,) = flatten_moments(model, run)
    assert [moment.tolist() for moment in moments.of] == [[1.0] * 6]


def test_what_is_saved_is_in_the_order_of_parameters():
    run, model = sharing()
    values = by_parameter(run, model.parameters)
    assert [len(value) for value in values] == [6, 2]
