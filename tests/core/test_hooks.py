"""Which hooks a method may have, and when they are called."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import nn

import paceline
from paceline.compression.quantization import Int8
from paceline.errors import UsageError
from paceline.methods.bsp import BSP, BSPWorker
from paceline.methods.osp import OSP
from tests.support.training import simulate


@dataclass(frozen=True, kw_only=True)
class Notes(BSP):
    """Notes what is called."""

    name: ClassVar[str] = "notes"
    calls: list = field(default_factory=list)

    def start(self, run):
        return NotesWorker(run, self)


class NotesWorker(BSPWorker):
    def before_use(self, bucket):
        self.method.calls.append(("before_use", *sorted(bucket.names)))

    def buckets_rebuilt(self):
        self.method.calls.append(("buckets_rebuilt", len(self.run.buckets)))

    def after_update(self):
        self.method.calls.append(("after_update", self.run.active))


class Reads(Notes):
    """Reads all parameters before each use."""

    def start(self, run):
        return ReadingWorker(run, self)


class ReadingWorker(NotesWorker):
    def before_use(self, bucket):
        super().before_use(bucket)
        for parameter in self.run.parameters:
            parameter.sum()


def alone(make, loss, steps, buckets="wfbp", method=Notes):
    """What *method* has noted on one worker, in each step."""
    notes = method()

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


@pytest.mark.parametrize("method", [Notes, Reads])
def test_parameters_are_announced_once_a_step_before_their_module_runs(method):
    """A method's own reads announce nothing."""

    def make():
        return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))

    def loss(model, notes):
        x = model[0](torch.ones(3))
        assert uses(notes.calls) == [["0.weight"]]
        return model(x).sum()

    *steps, evaluation = alone(make, loss, 3, method=method)[0]
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


class Undeclared:
    name = "undeclared"
    updates_on = "worker"


def distributed(method):
    def body(rank):
        model = nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        paceline.distribute(model, inner, method=method).finish()

    simulate(1, body)


def with_worker(**members):
    """A method whose worker is bsp's, with more *members*."""
    worker = type("OwnWorker", (BSPWorker,), members)

    @dataclass(frozen=True, kw_only=True)
    class Own(BSP):
        def start(self, run):
            return worker(run, self)

    return Own()


def refused(method, words):
    with pytest.raises(Exception, match=words) as caught:
        distributed(method)
    assert isinstance(caught.value.__cause__, UsageError)
    return str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("bucket_redy", "bucket_ready"),
        ("backward_end", "backward_ended"),
        ("after_step", "after_update"),
        ("on_bucket_ready", "bucket_ready"),
        ("parameters_loaded", "parameters_replaced"),
        ("save", ""),
    ],
)
def test_a_public_function_of_a_worker_that_is_no_hook_is_refused(name, meant):
    said = refused(
        with_worker(**{name: lambda self, *_: None}), f"unknown hook '{name}'"
    )
    assert f"Did you mean '{meant}'" in said if meant else "Known: " in said


def test_what_is_private_or_no_function_is_a_workers_own_business():
    members = {
        "_largest": lambda self: max(self.run.buckets),
        "share": property(lambda self: self.run.weight),
        "made_of": classmethod(lambda cls, run: cls(run, BSP())),
        "steps_of_all": 3.0,
    }
    distributed(with_worker(**members))


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("bucket_ready", lambda self, state, run, bucket: None),
        ("bucket_ready", lambda self: None),
        ("after_update", lambda self, state, run: None),
        ("load_state", lambda self: None),
    ],
)
def test_a_hook_with_other_arguments_is_refused_before_the_first_step(name, hook):
    written = "self, bucket" if name == "bucket_ready" else "self"
    said = refused(with_worker(**{name: hook}), f"hook OwnWorker.{name}")
    assert f"def {name}({written}" in said


def test_a_hook_may_take_more_than_it_is_given():
    distributed(with_worker(metrics=lambda self, digits=3: {"one": 1.0}))


def test_a_hook_of_the_method_itself_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class OldForm(BSP):
        def bucket_ready(self, state, run, bucket):
            """Would never be called."""

    said = refused(OldForm(), "defines the hook 'bucket_ready' itself")
    assert "def bucket_ready(self, bucket)" in said


def test_a_method_says_all_that_training_has_to_know():
    words = "declare rounds, visible_gradient, clips, start"
    refused(Undeclared(), words)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": OSP(defer="nonsense")}, "osp: unknown value for defer 'nonsense'"),
        ({"method": BSP(overlap="no")}, "bsp: overlap: expected True or False"),
        ({"compression": Int8(rounding="up")}, "int8: unknown value for rounding"),
    ],
)
def test_options_that_code_has_set_are_checked(options, named):
    def body(rank):
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(UsageError, match=named):
            paceline.distribute(model, inner, **options)

    simulate(2, body)
