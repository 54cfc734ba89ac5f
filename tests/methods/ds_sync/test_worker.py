"""What ds-sync averages, over workers and over time; what means travel beside; and who meets whom
when somebody leaves, or a link becomes slow."""

import copy
import json

import pytest
import torch
from torch import nn

import paceline
from paceline.bucketing.rules import MEASURED
from paceline.cluster import Cluster, Rack, Rule, cluster_toml
from paceline.cluster.cluster import repair, throttle
from paceline.errors import UsageError, WorkerFailedError
from paceline.interfaces import AGREE_EVERY
from paceline.interfaces.buckets import stand_in_for
from paceline.runtimes.join import join_runtime
from paceline.testing import CASES, Case, inspect
from paceline.testing.cases import cluster_of
from paceline.testing.method_checks import CHECKS, final_parameters
from tests.support import forked
from tests.support.tables import crossed, sampled
from tests.support.training import simulate, train
from tests.tools.auto.cases import changing

OVERLAPS = ["none", "forward", "step"]
SIZE = 400
"""Elements of `Walk`."""


class Walk(nn.Module):
    """Its gradient is what it is called with: under SGD at a rate of 1 each worker walks by
    that."""

    def __init__(self, start=0.0):
        super().__init__()
        self.place = nn.Parameter(torch.full((SIZE,), start))

    def forward(self, change):
        return (self.place * change).sum()


def sgd(rate, momentum=0.0):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum)


def by_noise(model, rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return model(torch.randn(SIZE, generator=generator))


def by_one(model, rank, step):
    return model(torch.ones(SIZE))


def walk(method, where, steps, loss=by_one, **options):
    options = {"make": Walk, "optimizer": sgd(1.0)} | options
    return train(method, where, steps, loss=loss, **options)


def ends(trained):
    return [one.end[0].item() for one in trained]


def network():
    """The same on every worker; with BatchNorm's statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2)
    )


def on_own_batch(model, rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return model(torch.randn(8, 4, generator=generator)).square().sum()


def trained(method, workers, steps, **options):
    keys = {"make": network, "optimizer": sgd(0.003, 0.9), "loss": on_own_batch}
    return train(method, workers, steps, **keys | options)


def worker_of(optimizer):
    return inspect(optimizer).worker


def equal(models):
    """Whether all have the same parameters and buffers, to the bit."""
    first, *others = [model.state_dict() for model in models]
    return all(torch.equal(first[key], other[key]) for other in others for key in first)


def equal_ends(*runs):
    return equal([one.model for run in runs for one in run])


# ---- what is averaged ----


def test_a_group_has_one_model_after_its_step_statistics_included():
    seen = {}

    def watch(rank, step, model, optimizer):
        seen[rank, step] = copy.deepcopy(model.state_dict())

    run = trained("ds-sync:groups=digits", 4, 4, watch=watch)
    phases = [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
    for step in range(4):
        for first, second in phases[step % 2]:
            one, other = seen[first, step], seen[second, step]
            assert all(torch.equal(one[key], other[key]) for key in one)
    apart = {
        key for key, value in seen[0, 0].items() if not value.equal(seen[2, 0][key])
    }
    assert {"0.weight", "1.running_mean", "1.running_var"} <= apart
    assert equal_ends(run)


def test_all_end_with_the_mean_of_all_and_with_the_largest_count():
    """Of the forward passes of those who had fewer BatchNorm knows nothing more."""
    run = trained("ds-sync:groups=digits", 4, (5, 3, 5, 4))
    assert equal_ends(run)
    assert run[1].model[1].num_batches_tracked.item() == 5


def test_half_precision_is_averaged_in_single_where_more_than_two_are_added():
    """1 + 2^-8 + 2^-8: in bfloat16 each addition would lose its second number."""
    values = [1.0, 2.0**-8, 2.0**-8]

    def script(rank, step, model, optimizer):
        with torch.no_grad():
            model.weight.fill_(3 * values[rank])
        model(torch.zeros(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    make = lambda: nn.Linear(3, 3, bias=False).to(torch.bfloat16)  # noqa: E731
    run = train("ds-sync:size=3", 3, 1, make=make, optimizer=sgd(0.0), script=script)
    expected = torch.tensor(sum(values)).to(torch.bfloat16).item()
    assert [one.steps[0].unique().tolist() for one in run] == [[expected]] * 3
    assert expected > 1.0


# ---- mixing ----


def spread(places):
    """The mean square distance of workers from their mean."""
    return (places - places.mean(0)).square().mean().item()


@pytest.mark.parametrize(
    ("method", "workers", "digits"),
    [
        ("ds-sync:groups=digits,size=2", 8, 3),
        ("ds-sync:groups=digits,size=3", 9, 2),
        ("ds-sync", 5, None),
        ("ds-sync", 7, None),
    ],
)
def test_groups_keep_the_mean_of_all_and_digits_agree_after_as_many_steps(
    method, workers, digits
):
    """Of places that differ in the beginning. Whatever the sizes of groups are: who is in one
    counts as much as it gets."""
    steps = 8 if digits is None else digits + 1
    loss = lambda model, rank, step: (  # noqa: E731
        by_noise(model, rank, step) if step == 0 else model(torch.zeros(SIZE))
    )
    run = walk(method, workers, steps, loss)
    places = [torch.stack([one.steps[n] for one in run]) for n in range(steps)]
    means = [its.mean(0) for its in places]
    torch.testing.assert_close(means[-1], means[0], rtol=1e-5, atol=1e-5)
    if digits is not None:
        assert spread(places[digits - 2]) > 0.01
        rounding = 1e-6 if "size=3" in method else 0.0
        for its in places[digits - 1 :]:
            assert (its - its[0]).abs().max() <= rounding


# ---- averages over time ----


def test_the_end_is_the_mean_of_all_weights_that_all_workers_have_counted():
    def method(overlap):
        return f"ds-sync:groups=digits,swa_from=3,swa_every=2,overlap={overlap}"

    plain, forward, late = (trained(method(o), 4, 8) for o in OVERLAPS)
    # Under the others the script sees what is not averaged yet.
    counted = [one.steps[n] for one in plain for n in (3, 5, 7)]
    mean = torch.stack(counted).mean(0).float()
    torch.testing.assert_close(plain[0].end.float(), mean)
    assert all(torch.equal(one.end, plain[0].end) for one in (*plain, *forward))
    assert equal_ends(late)


def test_workers_count_as_much_as_they_have_counted():
    """Constant gradients, so the places are known; worker 1 takes part after its data ended."""
    counted = [1, 2, 2.5, 3] + [1, 2]
    found = [-end for end in ends(walk("ds-sync:swa_from=0", 2, (4, 2)))]
    assert found == pytest.approx([sum(counted) / len(counted)] * 2)


def test_swa_that_begins_after_the_end_changes_nothing_and_that_is_said(capsys):
    plain = trained("ds-sync", 4, 5)
    assert "swa_from" not in capsys.readouterr().err
    assert equal_ends(plain, trained("ds-sync:swa_from=5", 4, 5))
    assert "swa_from=5: no weights were averaged" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_average_of_weights_counts_the_last_step(overlap, workers):
    """Also where the method is changed: all leave together, and no shadow step applies the means
    that are under way."""
    spec = f"ds-sync:swa_from=0,overlap={overlap}"
    assert ends(walk(spec, workers, 2)) == [-1.5] * workers
    if workers == 2:
        method = changing({1: spec, 3: "bsp"}, meets=True)
        assert ends(walk(method, 2, 3)) == [-2.5] * 2  # to -1 under bsp, -2 and -3


@pytest.mark.slow
def test_averages_over_time_go_on_in_a_job_of_another_size(tmp_path):
    """Nothing is counted after the load: the end is the mean of what was counted before."""
    folder = tmp_path / "saved"
    first = trained("ds-sync:swa_from=1,swa_every=2", 4, 5, save=folder)
    later = trained("ds-sync:swa_from=1000", 3, 1, first=5, load=folder)
    for one in later:
        torch.testing.assert_close(one.end, first[0].end)


# ---- overlap ----


@pytest.mark.parametrize(
    ("more", "buckets"),
    sampled(
        3, [("groups=digits", "wfbp"), ("size=4", "ddp"), ("groups=auto", "single")]
    ),
)
def test_waiting_in_the_forward_pass_changes_no_bit(more, buckets):
    plain, ahead = (
        trained(
            f"ds-sync:{more},overlap={overlap}",
            *(4, 7),
            optimizer=torch.optim.Adam,
            buckets=buckets,
            reads=False,
        )
        for overlap in ("none", "forward")
    )
    assert equal_ends(plain, ahead)


def test_means_that_travel_all_step_are_put_before_the_update():
    """Of gradients that do not depend on parameters the end is the same; of others it is
    not."""
    specs = [f"ds-sync:groups=digits,overlap={overlap}" for overlap in OVERLAPS]
    assert equal_ends(*(walk(s, 4, 5, by_noise, reads=False) for s in specs))
    assert not equal_ends(*(trained(spec, 4, 5)[:1] for spec in specs[::2]))


def test_overlap_hides_what_the_group_sends():
    """Nothing, what the forward pass takes, or all of it."""

    def make():
        return nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(4)))

    def loss(model, rank, step):
        hidden = torch.ones(1, 50)
        for layer in model:
            hidden = layer(hidden)
            paceline.pace(0.0002)
        return hidden.sum()

    def exposed(overlap):
        found = []

        def watch(rank, step, model, optimizer):
            record = join_runtime().recorder.steps[-1]
            found.append(record.exposed_communication_seconds)

        keys = {"make": make, "optimizer": sgd(0.1), "loss": loss, "pace": 0.0002}
        spec = f"ds-sync:overlap={overlap}"
        train(spec, 2, 6, reads=False, watch=watch, **keys)
        return found[-1]

    assert exposed("step") == 0.0
    assert exposed("forward") < 0.6 * exposed("none")


@pytest.mark.parametrize(
    "overlap",
    [
        pytest.param(overlap, marks=[] if overlap == "step" else pytest.mark.slow)
        for overlap in OVERLAPS
    ],
)
def test_an_evaluation_is_of_the_mean_wherever_it_is_made(overlap):
    """Between backward and step, after each step, after the last; and takes nothing along."""
    seen = {}

    def look(when, rank, model, optimizer):
        with optimizer.consolidated():
            seen.setdefault(when, {})[rank] = copy.deepcopy(model)

    def looking(rank, step, model, optimizer):
        optimizer.zero_grad()
        on_own_batch(model, rank, step).backward()
        if step == 2:
            look("in a step", rank, model, optimizer)
        optimizer.step()
        look(step, rank, model, optimizer)

    method = f"ds-sync:groups=digits,overlap={overlap}"
    plain = trained(method, 4, 5, reads=False)
    looked = trained(method, 4, 5, reads=False, script=looking)
    assert len(seen) == 6
    assert all(equal([*models.values()]) for models in seen.values())
    assert equal_ends(plain, looked)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_what_the_script_loads_between_two_steps_stays(overlap):
    """Means of before are not for it."""

    def watch(rank, step, model, optimizer):
        if step == 1:
            model.load_state_dict(Walk(start=100.0).state_dict())

    run = walk(f"ds-sync:overlap={overlap},swa_from=0", 2, 4, watch=watch)
    assert ends(run) == [98.5] * 2  # of 99 and 98, which are since the load


def test_a_write_that_a_mean_would_overwrite_is_refused():
    """Under ``forward`` it is a use: the mean is in place before it, as where nothing travels."""

    def watch(rank, step, model, optimizer):
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)

    def clamped(overlap):
        return trained(f"ds-sync:overlap={overlap}", 2, 2, watch=watch, reads=False)

    assert equal_ends(clamped("none"), clamped("forward"))
    with pytest.raises(WorkerFailedError, match="was written to") as found:
        clamped("step")
    assert isinstance(found.value.__cause__, UsageError)


# ---- who trains ----

PLANS = ["groups=digits,size=3", "groups=digits", "swa_from=2"]
DATA = [(4, 9, 2, 7, 5), (3, 3 * AGREE_EVERY, 20, 1, 40), (0, 0, 50, 0, 0)]
"""How many steps each worker has data for."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "overlap", "steps"),
    [(PLANS[i], OVERLAPS[(i + j) % 3], DATA[j]) for i in range(3) for j in range(3)],
)
def test_all_end_with_one_model_whoever_is_out_of_data_when(more, overlap, steps):
    method = f"ds-sync:{more},overlap={overlap}"
    run = trained(method, 5, steps, optimizer=torch.optim.Adam, reads=False)
    assert equal_ends(run)


@pytest.mark.slow
def test_those_who_remain_have_a_plan_of_their_own():
    seen = {}

    def watch(rank, step, model, optimizer):
        plan = worker_of(optimizer).current.plan
        seen[rank, step] = plan.version, plan.members

    trained("ds-sync:groups=digits", 5, (70, 4, 70, 70, 70), watch=watch)
    for step in range(70):
        assert len({seen[rank, step] for rank in (0, 2, 3, 4)}) == 1
    assert seen[0, 0] == (0, (0, 1, 2, 3, 4))
    assert seen[0, 69] == (1, (0, 2, 3, 4))


def test_who_is_gone_counts_no_more_at_the_end():
    """Its model is one of long ago."""
    _, *others = walk("ds-sync:size=3", 3, (0, 60, 60))
    for one in others:
        assert torch.equal(one.end, one.steps[-1])


LAWS_OF_ENDS = [
    *("converges", "uneven_data_ends", "leaving_after_backward_ends_with_one_model"),
    *("a_checkpoint_is_a_restart", "a_restart_loses_nothing"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("law", "overlap"), crossed(1, LAWS_OF_ENDS, OVERLAPS))
def test_the_kits_laws_hold_for_four_workers(law, overlap):
    """The kit tries three, of whom all are one group."""
    case = Case(method=f"ds-sync:groups=digits,overlap={overlap}")
    simulate(4, lambda rank: CHECKS[law](case, "wfbp"))


@pytest.mark.slow
def test_real_processes_end_with_the_bits_of_simulated_workers(tmp_path):
    """Four, of whom each meets others in each step."""
    words = ["-m", "paceline.testing", "--row", "ds-sync", "--one-in", "60"]
    racks = cluster_of(4, racks=2)
    (tmp_path / "racks.toml").write_text(cluster_toml(racks))
    environment = {"PACELINE_CLUSTER": str(tmp_path / "racks.toml")}
    first, *_ = forked.run_together(4, words, environment=environment)
    found = json.loads(first.stdout)
    assert len(found) == 4
    for name, end in found.items():
        method, rule = name.split()
        if rule not in MEASURED:
            case = next(case for case in CASES if case.name == method)
            run = simulate(
                racks, lambda rank, case=case, rule=rule: final_parameters(case, rule)
            )
            assert run == [end] * 4


# ---- groups that are chosen anew, by the times they took ----

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


def large():
    """A model that stands for one of 4 MB."""
    model = Walk()
    stand_in_for(4_000_000, model.place)
    return model


def plans_of(cluster, method=METHOD, steps=60, **options):
    """The plan of each step, equal on all workers; when all had done each."""
    plans, moments = {}, {}

    def watch(rank, step, model, optimizer):
        plan = worker_of(optimizer).current.plan
        assert plans.setdefault(step, plan) == plan
        moments[step] = max(moments.get(step, 0.0), paceline.now())

    loss = lambda model, rank, step: model(torch.full((SIZE,), 1.0 + rank))  # noqa: E731
    keys = {"make": large, "pace": 0.005, "reads": False, "watch": watch}
    run = walk(method, cluster, steps, loss, **keys | options)
    assert equal_ends(run)
    numbers = sorted(plans)
    return [plans[n] for n in numbers], [moments[n] for n in numbers]


@pytest.mark.parametrize(
    "overlap",
    ["none", *(pytest.param(o, marks=pytest.mark.slow) for o in ("forward", "step"))],
)
def test_a_host_that_becomes_slow_is_put_into_pairs_and_steps_are_shorter(overlap):
    method = f"{METHOD},overlap={overlap}"
    plans, moments = plans_of(THROTTLED, method)
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
    stays = f"ds-sync:size=4,adjust_every=0,overlap={overlap}"
    _, without = plans_of(THROTTLED, stays)
    window = 15
    slow = without[-1] - without[-1 - window]
    fast = moments[-1] - moments[-1 - window]
    assert fast < 0.85 * slow


def test_nothing_changes_while_the_network_is_what_it_was_taken_for():
    plans, _ = plans_of(two_racks(), steps=3 * INTERVAL)
    assert {plan.version for plan in plans} == {0}


@pytest.mark.slow
def test_a_host_that_is_as_fast_as_before_is_with_others_again():
    cluster = two_racks(
        throttle(f"worker {SLOW}", LINK / 8, step=SINCE),
        repair(f"worker {SLOW}", step=60),
    )
    plans, _ = plans_of(cluster, steps=110)
    assert plans[-1].version == 2
    assert plans[-1].phases == plans[0].phases


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((60, 25, 60, 60, 60, 60, 31, 60), marks=pytest.mark.slow),
        (0, 0, 0, 0, 0, 0, 0, 40),
    ],
    ids=["some", "one"],
)
def test_workers_that_end_earlier_take_part_until_they_are_gone(steps):
    plans_of(THROTTLED, steps=steps)


@pytest.mark.slow
def test_what_was_told_before_a_restart_is_used_after_it(tmp_path):
    cluster = two_racks(throttle(f"worker {SLOW}", LINK / 8, at=0.0))
    straight, _ = plans_of(cluster, steps=30)
    folder = tmp_path / "saved"
    first, _ = plans_of(cluster, steps=15, save=folder)
    second, _ = plans_of(cluster, steps=15, first=15, load=folder)
    assert first + second == straight
    assert straight[-1].version == 1
