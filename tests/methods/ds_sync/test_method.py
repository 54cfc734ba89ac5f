"""What ds-sync averages, over workers and over time, and what it refuses."""

import copy

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError
from paceline.testing import inspect
from tests.methods.ds_sync.helpers import Walk, equal, simulate
from tests.methods.ds_sync.trainings import begin, models, step, train

# ---- what is averaged ----


def test_a_group_has_one_model_after_its_step_statistics_included():
    def each(model, optimizer):
        return copy.deepcopy(model.state_dict())

    results = train("ds-sync:groups=digits", 4, 4, each=each)
    phases = [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]
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
    results = train("ds-sync:groups=digits", 4, (5, 3, 5, 4))
    assert equal(models(results))
    assert results[1][0][1].num_batches_tracked.item() == 5


def test_buffers_that_the_user_wants_local_stay_each_workers_own():
    results = train("ds-sync", 4, 3, buffers="local")
    means = {tuple(model[1].running_mean.tolist()) for model in models(results)}
    assert len(means) == 4
    weights = [model[0].weight for model in models(results)]
    assert all(torch.equal(weight, weights[0]) for weight in weights)


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


# ---- SWA ----


def test_the_end_is_the_mean_of_all_weights_that_all_workers_have_counted():
    def each(model, optimizer):
        return [p.detach().clone() for p in model.parameters()]

    for overlap in ("none", "forward", "step"):
        method = f"ds-sync:groups=digits,swa_from=3,swa_every=2,overlap={overlap}"
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
    """Constant gradients, so the places are known; worker 1 takes part after its data ended."""

    def body(rank):
        model = Walk()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        method = "ds-sync:swa_from=0"
        optimizer = paceline.distribute(model, inner, method=method)
        for _ in range(2 if rank else 4):
            optimizer.zero_grad()
            model(torch.ones(model.place.shape)).backward()
            optimizer.step()
        optimizer.finish()
        return -model.place[0].item()

    results, _ = simulate(2, body)
    counted = [1, 2, 2.5, 3] + [1, 2]
    assert results == pytest.approx([sum(counted) / len(counted)] * 2)


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
        ("ds-sync:adjust_every=-1", "0 for none"),
        ("ds-sync:groups=deck", "digits"),
    ],
)
def test_what_cannot_be_is_refused_in_words(method, words):
    with pytest.raises(Exception, match=words) as caught:
        train(method, 4, 1)
    assert isinstance(caught.value.__cause__ or caught.value, UsageError)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_number_of_workers_trains(workers):
    results = train("ds-sync", workers, 4)
    assert equal(models(results))


def test_restarts_in_the_middle_of_a_period_are_the_kits_for_own_states():
    """What is saved says which plan it was, and what was on its way."""

    def body(rank):
        model, optimizer = begin("ds-sync:groups=digits,overlap=step,swa_from=0")
        step(model, optimizer, 0)
        names = {own.name: own.save() for own in inspect(optimizer).worker_states}
        optimizer.finish()
        return names["method.ds-sync"]

    saved, _ = simulate(4, body)
    assert {"0.weight", "buffers 0.0"} <= saved[0]["means"].keys()
    assert saved[0]["plan"]["plan"]["phases"] == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
