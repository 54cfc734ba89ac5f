"""Several jobs: leases, who may speak for which, and what is left when one ends."""

import numpy as np
import pytest

from paceline.collectives.in_network.jobs import (
    MOST_JOBS,
    Jobs,
    Terms,
    key_of,
)
from paceline.collectives.in_network.packets import Kind, Seal, blank, sizes
from paceline.errors import UsageError

TOKEN = "a token of tests"
ELEMENTS = 4


@pytest.fixture
def jobs():
    return Jobs(slots=10, places=4, elements=ELEMENTS, token=TOKEN)


def terms(name="job a", **changes):
    asked = {"workers": 2, "slots": 4, "elements": ELEMENTS} | changes
    return Terms(name=name, **asked)


def contributions(job, key=None, **header):
    packets = blank(job.terms.workers, ELEMENTS)
    columns = packets["header"]
    columns["kind"], columns["elements"] = Kind.CONTRIBUTION, 2
    columns["job"] = job.number
    columns["worker"] = np.arange(len(packets))
    columns["bitmap"] = 1 << np.arange(len(packets))
    for name, value in header.items():
        columns[name] = value
    packets["values"] = 3
    Seal(key or key_of(TOKEN, job.terms.name)).sign(packets)
    return packets


def take(jobs, packets):
    return jobs.take(packets, sizes(packets))


def test_slots_are_partitioned_and_given_back(jobs):
    first = jobs.register(terms("a"), 0)
    second = jobs.register(terms("b"), 0)
    assert not set(first.lease) & set(second.lease)
    assert jobs.free_slots == 2
    third = jobs.register(terms("c", slots=9), 0)
    assert len(third.lease) == 2  # what there is
    with pytest.raises(UsageError, match="needs 1 slots, and there are 0"):
        jobs.register(terms("d"), 0)
    jobs.end(first)
    assert jobs.free_slots == 4
    assert jobs.register(terms("d"), 0).lease == first.lease


def test_fewer_slots_than_needed_are_refused(jobs):
    jobs.register(terms("a", slots=8), 0)
    with pytest.raises(UsageError, match="needs 3 slots, and there are 2"):
        jobs.register(terms("b", slots=6, fewest=3), 0)


def test_a_job_ends_with_its_last_workers_goodbye(jobs):
    job = jobs.register(terms(), 0)
    jobs.register(terms(), 1)
    assert not jobs.depart(job, 1)
    assert jobs.free_slots == 6
    assert jobs.depart(job, 0)
    assert jobs.free_slots == 10
    assert not list(jobs)


@pytest.mark.parametrize(
    ("asked", "worker", "words"),
    [
        (terms(workers=3), 1, "the same of all"),
        (terms(), 0, "worker 0 has registered before"),
        (terms(), 2, "worker 2 of 2: expected 0 to 1"),
        (terms("b", workers=65), 0, "65 workers"),
        (terms("b", elements=ELEMENTS + 1), 0, "larger --mtu"),
        (terms("b", slots=0), 0, "expected 1 or more"),
    ],
)
def test_registrations_that_cannot_be_are_refused(jobs, asked, worker, words):
    jobs.register(terms(), 0)
    with pytest.raises(UsageError, match=words):
        jobs.register(asked, worker)
    assert len(list(jobs)) == 1


def test_there_is_a_bound_on_jobs():
    jobs = Jobs(slots=1, places=4, elements=ELEMENTS, token=TOKEN)
    for number in range(MOST_JOBS):
        jobs.register(terms(str(number), rules="best-effort"), 0)
    with pytest.raises(UsageError, match="jobs are here already"):
        jobs.register(terms("one more", rules="best-effort"), 0)


def test_answers_are_signed_with_the_jobs_key_and_name_it(jobs):
    job = jobs.register(terms(), 0)
    ((whose, out),) = take(jobs, contributions(job))
    assert whose is job
    assert out.packets["header"]["job"] == job.number
    assert out.packets["values"][0, :2].tolist() == [6, 6]
    assert Seal(key_of(TOKEN, "job a")).genuine(out.packets).all()


def test_one_job_cannot_speak_for_another(jobs):
    mine = jobs.register(terms("mine"), 0)
    other = jobs.register(terms("other"), 0)
    forged = contributions(other, key=key_of(TOKEN, "mine"))
    ((_, out),) = take(jobs, forged)
    assert len(out.to) == 0
    assert jobs.all_dropped() == {"forged": 2}
    # nor name its slots
    beyond = contributions(mine, slot=len(mine.lease))
    ((_, out),) = take(jobs, beyond)
    assert len(out.to) == 0
    ((_, out),) = take(jobs, contributions(other))
    assert out.packets["values"][0, :2].tolist() == [6, 6]


def test_what_comes_for_a_job_that_has_ended_is_for_nobody(jobs):
    job = jobs.register(terms(), 0)
    late = contributions(job)
    jobs.end(job)
    again = jobs.register(terms(), 0)  # of the same name, and has another number
    assert again.number != job.number
    assert take(jobs, late) == []
    assert jobs.all_dropped() == {"of an unknown job": 2}


def test_batches_of_several_jobs_are_told_apart(jobs):
    both = [jobs.register(terms(name), 0) for name in ("a", "b")]
    mixed = np.concatenate([contributions(job) for job in both])[[0, 2, 1, 3]]
    answers = take(jobs, mixed)
    assert [job for job, _ in answers] == both
    assert all(len(out.to) == 1 for _, out in answers)


def test_longer_datagrams_than_the_job_asked_for_are_dropped(jobs):
    job = jobs.register(terms(elements=1), 0)
    ((_, out),) = take(jobs, contributions(job))
    assert len(out.to) == 0
    assert jobs.all_dropped() == {"too long for its job": 2}


def test_keys_differ_by_token_and_by_job():
    keys = {key_of(token, job) for token in ("one", "two") for job in ("a", "b")}
    assert len(keys) == 4
