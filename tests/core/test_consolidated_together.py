"""`consolidated` where all workers form the result: entered after the same step, or refused."""

import threading

import pytest
import torch

import paceline
from paceline.errors import PacelineError, UsageError
from paceline.interfaces.consolidated_entry import ConsolidatedEntries
from tests.support import forked
from tests.support.hanging import SECONDS
from tests.support.training import simulate

METHODS = ["local-sgd:sync_every=4", "sel-sync", "daso", "ds-sync:size=2"]


def trained(method, steps, later=0):
    """Rank 1 does other numbers of steps than the others before it looks; *later*: and after."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = paceline.distribute(model, inner, method=method, buckets="ddp")
    mine = steps[1] if paceline.rank() == 1 else steps[0]
    for _ in range(mine):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    with optimizer.consolidated():
        seen = model.weight.tolist()
    for _ in range(later):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    optimizer.finish()
    return seen


@pytest.mark.parametrize("steps", [(5, 6), (6, 5), (5, 10), (10, 5)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_other_numbers_of_steps_are_refused_by_their_numbers(method, steps):
    with pytest.raises(PacelineError) as caught:
        simulate(4, lambda rank: trained(method, steps))
    assert isinstance(caught.value.__cause__, UsageError), caught.value
    words = str(caught.value)
    assert "consolidated()" in words
    assert f"after step {min(steps)}" in words


@pytest.mark.parametrize("method", METHODS)
def test_equal_numbers_of_steps_are_not(method):
    simulate(4, lambda rank: trained(method, (5, 5), later=3))


@pytest.mark.parametrize("method", ["bsp", "asp", "diloco:sync_every=4"])
def test_where_anybody_may_look_alone_nobody_is_refused(method):
    """The result is at hand on each worker, or on the server."""
    torch.manual_seed(0)

    def body(rank):
        model = torch.nn.Linear(3, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, inner, method=method, buckets="ddp")
        for step in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            if step == 2 * rank:
                with optimizer.consolidated():
                    pass
        optimizer.finish()

    simulate(2, body)


@pytest.mark.parametrize("case", ["local-sgd:sync_every=4 5 10", "sel-sync 6 5"])
def test_real_workers_are_told_in_words_and_soon(case):
    ranks = forked.together(
        3, ["-m", "tests.core.test_consolidated_together", *case.split()]
    )
    try:
        for rank in ranks:
            end = rank.done()
            assert end.returncode == 1
            assert "consolidated()" in end.stderr
            assert "after step 5" in end.stderr
    finally:
        for rank in ranks:
            rank.kill()


# ---- the messages ----


def connected(count, *, waits=True):
    """Ranks whose messages arrive at once."""
    ranks = [ConsolidatedEntries() for _ in range(count)]
    for rank, places in enumerate(ranks):
        places.add()

        def send(place, rank=rank):
            for other in ranks:
                other.receive(rank, place, count)

        places.connect(rank, send, waits=waits)
    return ranks


def entering(places, step, errors, **options):
    def enter():
        try:
            places.enter(1, step, **{"without_left": False} | options)
            errors.append(None)
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    return thread


@pytest.mark.parametrize("waits", [True, False])
def test_who_enters_waits_for_all_others_and_all_go_on(waits):
    ranks = connected(3, waits=waits)
    for count in (1, 2):
        errors = []
        threads = [entering(places, 4 * count, errors) for places in ranks]
        for thread in threads:
            thread.join(SECONDS)
        assert errors == [None] * 3
        for places in ranks:
            places.goes_on(1, 4 * count + 1)


@pytest.mark.parametrize("first", [True, False])
def test_who_begins_another_step_is_told_and_so_is_who_waits(first):
    ranks, errors = connected(2), []
    if first:
        ranks[1].goes_on(1, 5)
        thread = entering(ranks[0], 4, errors)
    else:
        thread = entering(ranks[0], 4, errors)
        while not ranks[1]._received:
            thread.join(0.01)
        with pytest.raises(UsageError, match=r"rank 1 goes on after step 2"):
            ranks[1].goes_on(1, 5)
    thread.join(SECONDS)
    assert "rank 1 goes on after step 2" in str(errors[0])


@pytest.mark.parametrize("without_left", [True, False])
def test_who_is_out_of_data_need_not_come_where_groups_go_on_without(without_left):
    ranks, errors = connected(2), []
    ranks[1].leaves(1)
    thread = entering(ranks[0], 4, errors, without_left=without_left)
    thread.join(SECONDS)
    assert (errors == [None]) is without_left
    assert without_left or "rank 1 is out of data" in str(errors[0])


def test_who_has_lost_the_others_waits_no_longer():
    ranks, errors = connected(2), []
    thread = entering(ranks[0], 4, errors)
    ranks[0].disconnect()
    thread.join(SECONDS)
    assert errors == [None]


def test_a_loaded_checkpoint_takes_steps_back():
    ranks, errors = connected(2), []
    ranks[1].goes_on(1, 9)
    for places in ranks:
        places.begins_anew(1)
    threads = [entering(places, 3, errors) for places in ranks]
    for thread in threads:
        thread.join(SECONDS)
    assert errors == [None, None]


if __name__ == "__main__":
    import sys

    paceline.init()
    trained(sys.argv[1], (int(sys.argv[2]), int(sys.argv[3])))
