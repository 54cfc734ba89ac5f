"""Which hooks a method may have, and when they are called."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError
from paceline.methods.bsp import BSP
from tests.methods.osp.helpers import simulate


@dataclass(frozen=True, kw_only=True)
class Notes(BSP):
    """Notes what is called."""

    name: ClassVar[str] = "notes"
    calls: list = field(default_factory=list)

    def before_use(self, state, run, bucket):
        self.calls.append(("before_use", *sorted(bucket.names)))

    def buckets_rebuilt(self, state, run):
        self.calls.append(("buckets_rebuilt", len(run.buckets)))

    def after_update(self, state, run):
        self.calls.append(("after_update", run.active))


def alone(make, loss, steps, buckets="wfbp"):
    """What `Notes` has noted on one worker, in each step."""
    notes = Notes()

    def body(rank):
        model = make()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, method=notes, buckets=buckets)
        seen = []
        for _ in range(steps):
            notes.calls.clear()
            optimizer.zero_grad()
            loss(model, notes).backward()
            optimizer.step()
            seen.append(list(notes.calls))
        notes.calls.clear()
        with torch.no_grad():
            loss(model, notes)
        seen.append(list(notes.calls))
        notes.calls.clear()
        optimizer.finish()
        return seen, list(notes.calls)

    (result,) = simulate(1, body)
    return result


def uses(calls):
    return [names for what, *names in calls if what == "before_use"]


def test_parameters_are_announced_once_a_step_before_their_module_runs():
    def make():
        return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))

    def loss(model, notes):
        x = model[0](torch.ones(3))
        assert uses(notes.calls) == [["0.weight"]]
        return model(x).sum()

    *steps, evaluation = alone(make, loss, 3)[0]
    every = [["0.weight"], ["1.weight"], ["2.weight"]]
    assert all(uses(step) == every for step in steps)
    assert uses(evaluation) == every


def test_a_module_that_uses_its_childrens_parameters_announces_them_all():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    first, *_ = alone(Attends, lambda m, _: m(torch.ones(2, 4)).sum(), 1)[0]
    announced = {name for names in uses(first) for name in names}
    assert announced == {name for name, _ in Attends().named_parameters()}


def test_who_keeps_company_goes_through_the_end_of_steps_too():
    _, at_the_end = alone(
        lambda: nn.Linear(2, 2), lambda m, _: m(torch.ones(2)).sum(), 1
    )
    assert at_the_end == [("after_update", False)]


def test_new_buckets_are_announced():
    def body(rank):
        notes = Notes()
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, method=notes, buckets="optimal")
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.ones(64)).sum().backward()
            optimizer.step()
        optimizer.finish()
        return [call[1] for call in notes.calls if call[0] == "buckets_rebuilt"]

    first, second = simulate(2, body)
    assert first == second
    assert first, "the plan never changed"


@dataclass(frozen=True, kw_only=True)
class Misspelt(BSP):
    def bucket_redy(self, state, run, bucket):
        """Would never be called."""


@dataclass(frozen=True, kw_only=True)
class HasHelpers(BSP):
    def largest(self, buckets):
        return max(buckets)

    def _note(self, state, run):
        """Private."""


class Undeclared:
    name = "undeclared"
    updates_on = "worker"


def distributed(method):
    def body(rank):
        model = nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        paceline.distribute(model, inner, method=method).finish()

    simulate(1, body)


def test_a_hook_that_there_is_not_is_refused():
    with pytest.raises(Exception, match="defines unknown hook 'bucket_redy'") as caught:
        distributed(Misspelt())
    assert isinstance(caught.value.__cause__, UsageError)
    assert "bucket_ready" in str(caught.value)


def test_what_is_no_hook_is_a_methods_own_business():
    distributed(HasHelpers())


def test_a_method_says_all_that_training_has_to_know():
    with pytest.raises(
        Exception, match="declare rounds, visible_gradient, clips"
    ) as caught:
        distributed(Undeclared())
    assert isinstance(caught.value.__cause__, UsageError)
