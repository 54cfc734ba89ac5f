"""What ds-sync saves, and what a job goes on with, of the same size or of another."""

import pytest
import torch

import paceline
from tests.methods.ds_sync.helpers import equal, simulate, worker_of
from tests.methods.ds_sync.trainings import begin, each_once, step

SWA = "swa_from=1,swa_every=2"


def train(folder, method, workers, numbers, load, save):
    """Each worker's model and state before `finish`, of steps with these *numbers*; and its
    model after it."""

    def body(rank):
        model, optimizer = begin(method)
        if load:
            paceline.load(folder)
        before = [p.detach().clone() for p in model.parameters()]
        for number in numbers:
            step(model, optimizer, number)
        if save:
            paceline.save(folder)
        worker = worker_of(optimizer)
        optimizer.finish()
        return before, worker, model

    results, _ = simulate(workers, body)
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "overlap"),
    each_once([f"groups=digits,{SWA}", "groups=digits", "size=3"]),
)
def test_a_restart_in_the_middle_of_a_period_changes_no_bit(tmp_path, overlap, more):
    """Eight workers have a period of three; what was on its way is saved, too."""
    method = f"ds-sync:{more},overlap={overlap}"
    straight = train(tmp_path, method, 8, range(7), load=False, save=False)
    train(tmp_path, method, 8, range(4), load=False, save=True)
    resumed = train(tmp_path, method, 8, range(4, 7), load=True, save=False)
    assert equal([model for *_, model in [*straight, *resumed]])


def test_a_job_of_another_size_begins_with_the_mean_and_a_plan_of_its_own(tmp_path):
    method = f"ds-sync:groups=digits,{SWA}"
    saved = train(tmp_path, method, 4, range(5), load=False, save=True)
    loaded = train(tmp_path, method, 3, range(5, 8), load=True, save=False)
    begins = [before for before, *_ in loaded]
    for places in zip(*begins, strict=True):
        assert all(torch.equal(place, places[0]) for place in places)
    for _, worker, _ in loaded:
        assert worker.current.plan.members == (0, 1, 2)
    assert equal([model for *_, model in loaded])
    averages = [worker.save_state()["swa"] for _, worker, _ in saved]
    assert [one["count"] for one in averages] == [2] * 4  # of steps 1 and 3


def test_averages_over_time_go_on_in_a_job_of_another_size(tmp_path):
    """Nothing is counted after the load: the end is the mean of what was counted before."""
    first = train(tmp_path, f"ds-sync:{SWA}", 4, range(5), load=False, save=True)
    *_, expected = first[0]
    later = train(tmp_path, "ds-sync:swa_from=1000", 3, [5], load=True, save=False)
    for *_, model in later:
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other)
