"""Groups that are chosen anew while training, by the times they took: on simulated racks of
which a host becomes slow."""

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack, Rule
from paceline.cluster.cluster import repair, throttle
from paceline.interfaces.buckets import stand_in_for
from paceline.runtimes.join import join_runtime
from tests.methods.ds_sync.helpers import Walk, equal, simulate, worker_of

LINK = 125e6
SLOW = 3
"""Its link has an eighth of its bandwidth from step `SINCE` on."""
SINCE = 20
INTERVAL = 10
METHOD = f"ds-sync:size=4,adjust_every={INTERVAL}"


def two_racks(*rules: Rule) -> Cluster:
    rack = Rack(workers=4, link=LINK, latency=50e-6)
    return Cluster((rack, rack), rules=rules)


THROTTLED = two_racks(throttle(f"worker {SLOW}", LINK / 8, step=SINCE))


def begin(method):
    """A model that stands for one of 4 MB."""
    model = Walk()
    stand_in_for(4_000_000, model.place)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, paceline.distribute(model, inner, method=method)


def steps_of(model, optimizer, steps):
    """Does them; the plan after each."""
    plans = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full(model.place.shape, 1.0 + paceline.rank())).backward()
        paceline.pace(0.005)
        optimizer.step()
        plans.append(worker_of(optimizer).current.plan)
    return plans


def train(cluster, method=METHOD, steps=60):
    """The plan of each step, equal on all workers; when all had done each."""

    def body(rank):
        model, optimizer = begin(method)
        plans = steps_of(
            model, optimizer, steps[rank] if isinstance(steps, list) else steps
        )
        ends = [record.end_seconds for record in join_runtime().recorder.steps]
        optimizer.finish()
        return plans, ends, model

    results, _ = simulate(cluster, body)
    assert equal([model for *_, model in results])
    longest = max((plans for plans, *_ in results), key=len)
    assert all(plans == longest[: len(plans)] for plans, *_ in results)
    return longest, [max(ends) for ends in zip(*(r[1] for r in results), strict=False)]


@pytest.mark.parametrize(
    "overlap",
    ["none", *(pytest.param(o, marks=pytest.mark.slow) for o in ("forward", "step"))],
)
def test_a_host_that_becomes_slow_is_put_into_pairs_and_steps_are_shorter(overlap):
    method = f"{METHOD},overlap={overlap}"
    plans, ends = train(THROTTLED, method)
    versions = [plan.version for plan in plans]
    changed = versions.index(1)
    assert versions == [0] * changed + [1] * (len(versions) - changed)
    # What is seen in one interval is told at its end, and used one later.
    assert SINCE + INTERVAL < changed <= SINCE + 2 * INTERVAL + 1
    before, after = plans[0], plans[-1]
    sizes = [{len(p.mine(s, SLOW)) for s in range(60, 70)} for p in (before, after)]
    assert max(sizes[0]) == 4
    assert sizes[1] == {2}
    # On the slow link a pair sends the model once, and four of a ring once and a half; it was
    # in the one and in the other by turns.
    *_, stays = train(
        THROTTLED, method.replace(f"adjust_every={INTERVAL}", "adjust_every=0")
    )
    window = 15
    slow = stays[-1] - stays[-1 - window]
    fast = ends[-1] - ends[-1 - window]
    assert fast < 0.85 * slow


def test_nothing_changes_while_the_network_is_what_it_was_taken_for():
    plans, _ = train(two_racks())
    assert {plan.version for plan in plans} == {0}


def test_a_host_that_is_as_fast_as_before_is_with_others_again():
    cluster = two_racks(
        throttle(f"worker {SLOW}", LINK / 8, step=SINCE),
        repair(f"worker {SLOW}", step=60),
    )
    plans, _ = train(cluster, steps=110)
    assert [plan.version for plan in plans][-1] == 2
    assert plans[-1].phases == plans[0].phases


@pytest.mark.parametrize("steps", [[60, 25, 60, 60, 60, 60, 31, 60], [0] * 7 + [50]])
def test_workers_that_end_earlier_take_part_until_they_are_gone(steps):
    train(THROTTLED, steps=steps)


def test_what_was_told_before_a_restart_is_used_after_it(tmp_path):
    straight, _ = train(
        two_racks(throttle(f"worker {SLOW}", LINK / 8, at=0.0)), steps=30
    )

    def body(rank):
        model, optimizer = begin(METHOD)
        if (tmp_path / "saved").exists():
            paceline.load(tmp_path / "saved")
            plans = steps_of(model, optimizer, 15)
        else:
            plans = steps_of(model, optimizer, 15)
            paceline.save(tmp_path / "saved")
        optimizer.finish()
        return plans

    cluster = two_racks(throttle(f"worker {SLOW}", LINK / 8, at=0.0))
    halves = [simulate(cluster, body)[0][0] for _ in range(2)]
    assert [*halves[0], *halves[1]] == straight
    assert straight[-1].version == 1


def test_groups_that_were_asked_for_by_name_are_not_adjusted():
    with pytest.raises(Exception, match="stay as they are"):
        paceline.distribute(
            *(model := Walk(), torch.optim.SGD(model.parameters(), lr=1.0)),
            method="ds-sync:groups=digits,adjust_every=10",
        )
