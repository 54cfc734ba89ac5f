"""What means travel beside under ds-sync, and what is seen of the model meanwhile."""

import copy

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError
from paceline.runtimes.join import join_runtime
from tests.methods.ds_sync.helpers import Walk, equal, simulate
from tests.methods.ds_sync.trainings import (
    OVERLAPS,
    adam,
    batch,
    begin,
    models,
    step,
    train,
)

# ---- overlap ----


@pytest.mark.parametrize(
    ("more", "buckets"),
    [
        ("groups=digits", "wfbp"),
        ("size=4", "ddp"),
        ("groups=auto", "single"),
    ],
)
def test_waiting_in_the_forward_pass_changes_no_bit(more, buckets):
    plain, ahead = (
        models(train(f"ds-sync:{more},overlap={o}", 4, 7, adam, buckets=buckets))
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
            method = f"ds-sync:groups=digits,overlap={overlap}"
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
        models(train(f"ds-sync:groups=digits,overlap={o}", 4, 5))
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
            optimizer = paceline.distribute(model, inner, method=method, buckets="wfbp")
            for _ in range(6):
                optimizer.zero_grad()
                hidden = torch.ones(1, 50)
                for layer in model:
                    hidden = layer(hidden)
                    paceline.pace(0.0002)
                hidden.sum().backward()
                paceline.pace(0.0002)
                optimizer.step()
            return join_runtime().recorder.steps[-1]

        (last, _), _ = simulate(2, body)
        waits[overlap] = last.exposed_communication_seconds
    assert waits["step"] == 0.0
    assert waits["forward"] < 0.6 * waits["none"]


# ---- evaluations, loads ----


@pytest.mark.parametrize(
    "overlap",
    [
        pytest.param(overlap, marks=[] if overlap == "step" else pytest.mark.slow)
        for overlap in OVERLAPS
    ],
)
def test_an_evaluation_is_of_the_mean_wherever_it_is_made(overlap):
    """Before the first step, between backward and step, after each, after the last; and takes
    nothing along."""
    ends = []
    for evaluates in (False, True):

        def look(model, optimizer):
            with optimizer.consolidated():
                return copy.deepcopy(model)

        def body(rank, evaluates=evaluates):
            model, optimizer = begin(f"ds-sync:groups=digits,overlap={overlap}")
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


def test_a_write_that_a_mean_would_overwrite_is_refused():
    """Under ``forward`` it is a use: the mean is in place before it, as where nothing travels."""

    def clamped(overlap):
        def body(rank):
            model, optimizer = begin(f"ds-sync:overlap={overlap}")
            step(model, optimizer, 0)
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)
            step(model, optimizer, 1)
            optimizer.finish()
            return model

        return simulate(2, body)[0]

    assert equal([*clamped("none"), *clamped("forward")])
    with pytest.raises(Exception, match="was written to") as found:
        clamped("step")
    assert isinstance(found.value.__cause__, UsageError)
