"""What ds-sync averages, when it puts it into the model, and what it ends with."""

import copy

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError
from paceline.interfaces import AGREE_EVERY
from paceline.optimizer import training_of
from paceline.testing import Case
from paceline.testing.checks import CHECKS
from paceline.worlds.join import join_world
from tests.ds_sync.helpers import Walk, equal, simulate, state_of

OVERLAPS = ["none", "forward", "step"]


def network():
    """The same on every worker; with BatchNorm's statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2)
    )


def batch(rank, step):
    """Of each worker and step another one."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.003, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def begin(method, make=sgd, fusion="wfbp", **more):
    model = network()
    optimizer = paceline.distribute(
        model, make(model.parameters()), method=method, fusion=fusion, **more
    )
    return model, optimizer


def step(model, optimizer, number):
    optimizer.zero_grad()
    model(batch(paceline.rank(), number)).square().sum().backward()
    optimizer.step()


def train(method, workers, steps, make=sgd, each=lambda model, optimizer: None, **more):
    """Each worker's model at the end, and what *each* gave after its steps; *steps*: of all, or
    of each."""
    steps = (steps,) * workers if isinstance(steps, int) else steps

    def body(rank):
        model, optimizer = begin(method, make, **more)
        seen = []
        for number in range(steps[rank]):
            step(model, optimizer, number)
            seen.append(each(model, optimizer))
        optimizer.finish()
        return model, seen

    results, _ = simulate(workers, body)
    return results


def models(results):
    return [model for model, _ in results]


# ---- what is averaged ----


def test_a_group_has_one_model_after_its_step_statistics_included():
    def each(model, optimizer):
        return copy.deepcopy(model.state_dict())

    results = train("ds-sync:shuffle=pairs", 4, 4, each=each)
    phases = [[(0, 1), (2, 3)], [(0, 3), (1, 2)]]
    for number in range(4):
        states = [seen[number] for _, seen in results]
        for pair in phases[number % 2]:
            first, second = (states[rank] for rank in pair)
            assert all(torch.equal(first[key], second[key]) for key in first)
        apart = {key for key in states[0] if not states[0][key].equal(states[2][key])}
        if number < 1:
            assert {"0.weight", "1.running_mean", "1.running_var"} <= apart
    assert equal(models(results))


def test_all_end_with_the_mean_of_all_and_with_the_largest_count():
    """Of the forward passes of those who had fewer BatchNorm knows nothing more."""
    results = train("ds-sync:shuffle=pairs", 4, (5, 3, 5, 4))
    assert equal(models(results))
    assert results[1][0][1].num_batches_tracked.item() == 5


def test_buffers_that_the_user_wants_local_stay_each_workers_own():
    results = train("ds-sync", 4, 3, buffers="local")
    means = {tuple(model[1].running_mean.tolist()) for model in models(results)}
    assert len(means) == 4
    weights = [model[0].weight for model in models(results)]
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def moments(optimizer, key):
    state = optimizer.unwrapped.state_dict()["state"]
    return torch.cat([state[n][key].reshape(-1) for n in sorted(state)])


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(
    ("make", "keys"),
    [(sgd, ["momentum_buffer"]), (adam, ["exp_avg", "exp_avg_sq"])],
    ids=["sgd", "adam"],
)
def test_the_optimizers_state_is_averaged_where_that_is_asked_for(make, keys, overlap):
    def each(model, optimizer):
        return [moments(optimizer, key).clone() for key in keys]

    for state in ("local", "average"):
        method = f"ds-sync:shuffle=fixed,state={state},overlap={overlap}"
        results = train(method, 4, 5, make, each)
        (_, first), (_, second), *_ = results
        # Where means travel, those of a step are in place before the next update.
        same = all(map(torch.equal, first[-1], second[-1]))
        assert same == (state == "average" and overlap == "none")
        if state == "local":
            local = first[-1]
        else:
            assert not any(map(torch.equal, first[-1], local))


def test_state_that_one_worker_does_not_keep_yet_counts_as_zero():
    """Its optimizer has not stepped, as after a step that a GradScaler leaves out."""

    def body(rank):
        model = Walk()
        inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        method = "ds-sync:state=average"
        optimizer = paceline.distribute(model, inner, method=method)
        model(torch.ones(model.place.shape)).backward()
        if rank:
            model.place.grad = None
        optimizer.step()
        kept = inner.state[model.place].get("momentum_buffer")
        return None if kept is None else kept.clone()

    (first, second), _ = simulate(2, body)
    assert first.unique().tolist() == [0.5]
    assert second is None


def test_half_precision_is_averaged_in_single_where_more_than_two_are_added():
    """1 + 2^-8 + 2^-8: in bfloat16 each addition would lose its second number."""
    values = [1.0, 2.0**-8, 2.0**-8]

    def body(rank):
        model = nn.Linear(3, 3, bias=False).to(torch.bfloat16)
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = paceline.distribute(model, inner, method="ds-sync:size=3")
        with torch.no_grad():
            model.weight.fill_(3 * values[rank])
        model(torch.zeros(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        return model.weight.dtype, model.weight.detach().float().unique().tolist()

    results, _ = simulate(3, body)
    expected = torch.tensor(sum(values)).to(torch.bfloat16).item()
    assert results == [(torch.bfloat16, [expected])] * 3
    assert expected > 1.0


# ---- overlap ----


@pytest.mark.parametrize("fusion", ["wfbp", "single", "ddp"])
@pytest.mark.parametrize("more", ["shuffle=pairs", "shuffle=random", "state=average"])
def test_waiting_in_the_forward_pass_changes_no_bit(more, fusion):
    plain, ahead = (
        models(train(f"ds-sync:{more},overlap={o}", 4, 7, adam, fusion=fusion))
        for o in ("none", "forward")
    )
    assert equal([*plain, *ahead])


def test_means_that_travel_all_step_are_put_before_the_update():
    """Of gradients that do not depend on parameters the end is the same; of others it is
    not."""
    walks = []
    for overlap in OVERLAPS:

        def body(rank, overlap=overlap):
            model = Walk()
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            method = f"ds-sync:shuffle=pairs,overlap={overlap}"
            optimizer = paceline.distribute(model, inner, method=method)
            noise = torch.Generator().manual_seed(rank)
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(model.place.shape, generator=noise)).backward()
                optimizer.step()
            optimizer.finish()
            return model

        walks.append(simulate(4, body)[0])
    assert equal([model for walk in walks for model in walk])
    plain, late = (
        models(train(f"ds-sync:shuffle=pairs,overlap={o}", 4, 5))
        for o in ("none", "step")
    )
    assert not equal([plain[0], late[0]])


def test_overlap_hides_what_the_group_sends():
    """Nothing, what the forward pass takes, or all of it."""
    waits = {}
    for overlap in OVERLAPS:

        def body(rank, overlap=overlap):
            model = nn.Sequential(*(nn.Linear(50, 50, bias=False) for _ in range(4)))
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            method = f"ds-sync:overlap={overlap}"
            optimizer = paceline.distribute(model, inner, method=method, fusion="wfbp")
            for _ in range(6):
                optimizer.zero_grad()
                hidden = torch.ones(1, 50)
                for layer in model:
                    hidden = layer(hidden)
                    paceline.pace(0.0002)
                hidden.sum().backward()
                paceline.pace(0.0002)
                optimizer.step()
            return join_world().journal.steps[-1]

        (last, _), _ = simulate(2, body)
        waits[overlap] = last.exposed_communication_seconds
    assert waits["step"] == 0.0
    assert waits["forward"] < 0.6 * waits["none"]


# ---- who trains ----


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(
    "more", ["shuffle=digits,size=3", "shuffle=random", "swa_from=2"]
)
@pytest.mark.parametrize(
    "steps", [(4, 9, 2, 7, 5), (3, 3 * AGREE_EVERY, 20, 1, 40), (0, 0, 50, 0, 0)]
)
def test_all_end_with_one_model_whoever_is_out_of_data_when(more, overlap, steps):
    results = train(f"ds-sync:{more},overlap={overlap}", 5, steps, adam)
    assert equal(models(results))


def test_those_who_remain_have_a_plan_of_their_own():
    def each(model, optimizer):
        plan = state_of(optimizer).current.plan
        return plan.version, plan.members

    results = train("ds-sync:shuffle=pairs", 5, (70, 4, 70, 70, 70), each=each)
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


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("law", sorted(CHECKS.keys() - {"one_worker_is_the_reference"}))
def test_the_kits_laws_hold_for_four_workers(law, overlap):
    """The kit tries three, of whom all are one group."""
    case = Case(method=f"ds-sync:shuffle=pairs,overlap={overlap}")
    simulate(4, lambda rank: CHECKS[law](case, "wfbp"))


# ---- evaluations, loads ----


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_evaluation_is_of_the_mean_wherever_it_is_made(overlap):
    """Before the first step, between backward and step, after each, after the last; and takes
    nothing along."""
    ends = []
    for evaluates in (False, True):

        def look(model, optimizer):
            with optimizer.consolidated():
                return copy.deepcopy(model)

        def body(rank, evaluates=evaluates):
            model, optimizer = begin(f"ds-sync:shuffle=pairs,overlap={overlap}")
            looks = [look(model, optimizer)] if evaluates else []
            for number in range(5):
                optimizer.zero_grad()
                model(batch(rank, number)).square().sum().backward()
                if evaluates and number == 2:
                    looks.append(look(model, optimizer))
                optimizer.step()
                if evaluates and number != 1:
                    looks.append(look(model, optimizer))
            optimizer.finish()
            if evaluates:
                looks.append(look(model, optimizer))
            return model, looks

        results, _ = simulate(4, body)
        ends += models(results)
        for seen in zip(*(looks for _, looks in results), strict=True):
            assert equal(seen)
    assert equal(ends)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_what_the_script_loads_between_two_steps_stays(overlap):
    """Means of before are not for it."""

    def body(rank):
        model = Walk()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        method = f"ds-sync:overlap={overlap},swa_from=0"
        optimizer = paceline.distribute(model, inner, method=method)
        for number in range(4):
            optimizer.zero_grad()
            model(torch.ones(model.place.shape)).backward()
            optimizer.step()
            if number == 1:
                model.load_state_dict(Walk(start=100.0).state_dict())
        optimizer.finish()
        return model.place.unique().tolist()

    results, _ = simulate(2, body)
    assert results == [[98.5]] * 2  # of 99 and 98, which are since the load


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_write_that_a_mean_would_overwrite_is_refused(overlap):
    def body(rank):
        model, optimizer = begin(f"ds-sync:overlap={overlap}")
        step(model, optimizer, 0)
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
        step(model, optimizer, 1)

    if overlap == "none":
        simulate(2, body)
        return
    with pytest.raises(Exception, match="was written to since step") as found:
        simulate(2, body)
    assert isinstance(found.value.__cause__, UsageError)


# ---- SWA ----


def test_the_end_is_the_mean_of_all_weights_that_all_workers_have_counted():
    def each(model, optimizer):
        return [p.detach().clone() for p in model.parameters()]

    for overlap in ("none", "forward", "step"):
        method = f"ds-sync:shuffle=pairs,swa_from=3,swa_every=2,overlap={overlap}"
        results = train(method, 4, 8, each=each)
        assert equal(models(results))
        if overlap == "none":  # else the script sees what is not averaged yet
            counted = [seen[n] for _, seen in results for n in (3, 5, 7)]
            for number, parameter in enumerate(models(results)[0].parameters()):
                mean = torch.stack([w[number].double() for w in counted]).mean(0)
                torch.testing.assert_close(parameter.detach(), mean.float())
            plain = parameter.detach()
        elif overlap == "forward":
            assert torch.equal(plain, list(models(results)[0].parameters())[-1])


def test_workers_count_as_much_as_they_have_counted():
    """Constant gradients: places 1, 2, 3, ... of whoever trains; weights are averaged by hand."""

    def body(rank):
        model = Walk()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        method = "ds-sync:shuffle=fixed,swa_from=0"
        optimizer = paceline.distribute(model, inner, method=method)
        for _ in range(4 if rank < 2 else 2):
            optimizer.zero_grad()
            model(torch.ones(model.place.shape)).backward()
            optimizer.step()
        optimizer.finish()
        return -model.place[0].item()

    results, _ = simulate(4, body)
    counted = [1, 2, 3, 4] * 2 + [1, 2] * 2
    assert results == pytest.approx([sum(counted) / len(counted)] * 4)


def test_swa_that_begins_after_the_end_changes_nothing_and_that_is_said(capsys):
    plain = models(train("ds-sync", 4, 5))
    assert "swa_from" not in capsys.readouterr().err
    assert equal([*plain, *models(train("ds-sync:swa_from=5", 4, 5))])
    assert "swa_from=5: no weights were counted" in capsys.readouterr().err


# ---- bad input ----


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ds-sync:size=1", "groups of 2 or more"),
        ("ds-sync:size=5", "groups of 2 to 4 workers"),
        ("ds-sync:swa_every=0", "1 or more steps"),
        ("ds-sync:swa_from=-2", "-1 for"),
        ("ds-sync:adjust=-1", "0 for none"),
        ("ds-sync:shuffle=deck", "random"),
        ("ds-sync:shuffle=pairs,size=4", "groups of two"),
    ],
)
def test_what_cannot_be_is_refused_in_words(method, words):
    with pytest.raises(Exception, match=words) as caught:
        train(method, 4, 1)
    assert isinstance(caught.value.__cause__ or caught.value, UsageError)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD as it is set keeps no tensors"),
        (lambda p: torch.optim.Adafactor(p, lr=0.1), "another shape"),
        (lambda p: torch.optim.LBFGS(p, lr=0.1), "cannot be tried"),
    ],
    ids=["sgd", "adafactor", "lbfgs"],
)
def test_an_optimizer_whose_state_has_no_mean_is_refused(make, words):
    with pytest.raises(Exception, match=words):
        train("ds-sync:state=average", 2, 1, make)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_number_of_workers_trains(workers):
    results = train("ds-sync", workers, 4)
    assert equal(models(results))


def test_restarts_in_the_middle_of_a_period_are_the_kits_for_own_states():
    """What is saved says which plan it was, and what was on its way."""

    def body(rank):
        model, optimizer = begin("ds-sync:shuffle=pairs,overlap=step,swa_from=0")
        step(model, optimizer, 0)
        names = {own.name: own.save() for own in training_of(optimizer).own_states}
        optimizer.finish()
        return names["method.ds-sync"]

    saved, _ = simulate(4, body)
    assert {"0.weight", "buffers 0.0"} <= saved[0]["means"].keys()
    assert saved[0]["plan"]["phases"] == [[[0, 1], [2, 3]], [[0, 3], [1, 2]]]
