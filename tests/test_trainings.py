"""What a worker's job holds of its script's trainings."""

import copy
import gc
import weakref
from dataclasses import dataclass

import pytest
import torch

from paceline.interfaces.trainings import TrainingRegistry
from paceline.run_options import RunOptions


@dataclass
class Status:
    first_step: int = 0
    finished: bool = False
    broken_by: str = ""


def begin(job, close=lambda: None, **status):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    job.begin(model, optimizer, Status(**status))
    job.hold(job.trainings[-1].training, close)
    return job.trainings[-1]


def job_that_tells(told):
    return TrainingRegistry(
        RunOptions(), lambda number, cause: told.append((number, cause))
    )


@pytest.fixture
def job():
    return job_that_tells([])


def test_trainings_are_numbered_as_they_begin(job):
    begun = [begin(job), begin(job, finished=True), begin(job, broken_by="boom")]
    assert job.trainings == begun
    assert job.unfinished == [begun[0], begun[2]]


def test_a_training_is_over_when_it_is_finished_or_broken(job):
    for status in ({}, {"finished": True}, {"broken_by": "boom"}):
        begin(job, **status)
    assert [job.is_over(number) for number in range(4)] == [False, True, True, False]
    assert [job.broken_by(number) for number in range(4)] == ["", "", "boom", ""]


@pytest.mark.parametrize("status", [{"finished": True}, {}, {"broken_by": "boom"}])
def test_what_has_ended_well_is_let_go_of_when_another_begins(job, status):
    """Finishing it is put off no more, either: that would hold the optimizer."""
    done = []
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    job.begin(model, optimizer, Status(3, **status), lambda: done.append(0))
    there, optimizer = weakref.ref(model), weakref.ref(optimizer)
    begin(job)
    job.drop_unheld()
    assert job.trainings[0].optimizer is optimizer(), "its model is held"
    assert not any(
        vars(copy.deepcopy(model)).get(name)
        for name in vars(model).keys() - vars(torch.nn.Linear(1, 1)).keys()
    )
    del model
    job.drop_unheld()
    over = status == {"finished": True}
    assert (
        job.trainings[0].released == over == (there() is None) == (optimizer() is None)
    )
    assert [number for number, _ in job.there()] == ([1] if over else [0, 1])
    assert job.first_step == 3
    assert job.is_over(0) == bool(status)
    job.end()
    assert done == ([] if over else [0])


def test_a_runtime_may_keep_what_has_ended(job):
    job.keeps_ended = True
    begin(job, finished=True)
    begin(job)
    gc.collect()
    assert [number for number, _ in job.there()] == [0, 1]


def test_a_job_has_begun_where_its_last_comer_joined(job):
    assert job.first_step == 0
    begin(job, first_step=3)
    begin(job)
    assert job.first_step == 3


def test_a_broken_training_is_passed_on():
    told = []
    job_that_tells(told).broke(1, "boom")
    assert told == [(1, "boom")]


def test_hidden_trainings_keep_the_numbers_that_others_know():
    told = []
    job = job_that_tells(told)
    begin(job, broken_by="boom")
    job.hidden, job.trainings = job.trainings, []
    begin(job)
    job.broke(0, "later")
    assert told == [(1, "later")]
    assert [job.is_over(number) for number in range(3)] == [True, False, False]
    assert job.broken_by(0) == "boom"


def test_what_was_put_off_is_done_once_and_in_order(job):
    done = []
    job.at_exit(lambda: done.append("first"))
    job.at_exit(lambda: done.append("second"))
    assert done == []
    job.end()
    job.end()
    assert done == ["first", "second"]


def test_what_no_worker_uses_is_closed_and_all_else_at_the_end(job):
    """One that is broken has perhaps something under way."""
    done = []
    statuses = [{}, {"finished": True}, {"finished": True}, {"broken_by": "boom"}]
    statuses += [{"finished": True, "broken_by": "boom"}]
    for number, status in enumerate(statuses):
        begin(job, lambda number=number: done.append(number), **status)
    assert job.in_use == [True, False, False, True, True]
    job.close_unused(
        [True, True, False, True, True]
    )  # another worker is in the second one
    assert done == [2]
    assert job.in_use == [True, False, True, True]
    assert len(job.trainings) == 5
    job.at_exit(lambda: done.append("put off"))
    job.end()
    job.end()
    assert done == [2, "put off", 0, 1, 3, 4]
