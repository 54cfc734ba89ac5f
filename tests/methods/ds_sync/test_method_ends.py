"""Who trains under ds-sync, and that all end with one model, whoever is out of data when."""

import pytest
import torch

import paceline
from paceline.interfaces import AGREE_EVERY
from paceline.testing import Case
from paceline.testing.method_checks import CHECKS
from tests.methods.ds_sync.helpers import Walk, equal, simulate, worker_of
from tests.methods.ds_sync.trainings import OVERLAPS, adam, each_once, models, train
from tests.tools.auto.cases import changing

PLANS = ["groups=digits,size=3", "groups=digits", "swa_from=2"]
ENDS = [(4, 9, 2, 7, 5), (3, 3 * AGREE_EVERY, 20, 1, 40), (0, 0, 50, 0, 0)]
"""How many steps each worker has data for."""

LAWS_OF_ENDS = [
    *("converges", "uneven_data_ends", "leaving_after_backward_ends_with_one_model"),
    *("a_checkpoint_is_a_restart", "a_restart_loses_nothing"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "overlap", "steps"),
    [
        pytest.param(
            more,
            overlap,
            ENDS[(i + j) % len(ENDS)],
            marks=[] if i == j else [pytest.mark.slow],
        )
        for i, more in enumerate(PLANS)
        for j, overlap in enumerate(OVERLAPS)
    ],
)
def test_all_end_with_one_model_whoever_is_out_of_data_when(more, overlap, steps):
    results = train(f"ds-sync:{more},overlap={overlap}", 5, steps, adam)
    assert equal(models(results))


@pytest.mark.slow
def test_those_who_remain_have_a_plan_of_their_own():
    def each(model, optimizer):
        plan = worker_of(optimizer).current.plan
        return plan.version, plan.members

    results = train("ds-sync:groups=digits", 5, (70, 4, 70, 70, 70), each=each)
    seen = [seen for rank, (_, seen) in enumerate(results) if rank != 1]
    assert all(one == seen[0] for one in seen)
    assert seen[0][0] == (0, (0, 1, 2, 3, 4))
    assert seen[0][-1] == (1, (0, 2, 3, 4))


def test_who_is_gone_counts_no_more_at_the_end():
    """Its model is one of long ago."""

    def body(rank):
        model = Walk()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(model, inner, method="ds-sync:size=3")
        for _ in range(100 if rank else 0):
            optimizer.zero_grad()
            model(torch.ones(model.place.shape)).backward()
            optimizer.step()
        before = model.place[0].item()
        optimizer.finish()
        return before, model.place[0].item()

    (_, *others), _ = simulate(3, body)
    assert all(after == before for before, after in others)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_average_of_weights_counts_the_last_step(overlap, workers):
    def body(rank):
        model = Walk()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        method = f"ds-sync:swa_from=0,overlap={overlap}"
        optimizer = paceline.distribute(model, inner, method=method)
        for _ in range(2):  # to -1 and -2
            optimizer.zero_grad()
            model(torch.ones(model.place.shape)).backward()
            optimizer.step()
        optimizer.finish()
        return model.place.detach().mean().item()

    results, _ = simulate(workers, body)
    assert results == [-1.5] * workers


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_change_of_method_counts_the_last_step(overlap):
    """All leave together, so no shadow step applies the means that are under way."""

    def body(rank):
        model = Walk()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        spec = f"ds-sync:swa_from=0,overlap={overlap}"
        method = changing({1: spec, 3: "bsp"}, meets=True)
        optimizer = paceline.distribute(model, inner, method=method)
        for _ in range(3):  # to -1 under bsp, then to -2 and -3
            optimizer.zero_grad()
            model(torch.ones(model.place.shape)).backward()
            optimizer.step()
        place = model.place.detach().mean().item()
        optimizer.finish()
        return place

    results, _ = simulate(2, body)
    assert results == [-2.5] * 2


@pytest.mark.parametrize(
    ("law", "overlap"),
    each_once(LAWS_OF_ENDS),
)
def test_the_kits_laws_hold_for_four_workers(law, overlap):
    """The kit tries three, of whom all are one group."""
    case = Case(method=f"ds-sync:groups=digits,overlap={overlap}")
    simulate(4, lambda rank: CHECKS[law](case, "wfbp"))
